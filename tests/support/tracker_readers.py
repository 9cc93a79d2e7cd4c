"""Print what a tracker has of a run, as its own package reads it: python tracker_readers.py TRACKER
FOLDER. The answer is JSON: losses by step, a setting, the name and pixel of a picture, its texts.

Runs in the environment of `make trackers-env`, which has nothing of ours.
"""

import json
import sys
from pathlib import Path

import PIL.Image


def pixel(path):
    return PIL.Image.open(path).convert("RGB").getpixel((0, 0))


def mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    place = client.get_experiment_by_name("shapes").experiment_id
    runs = client.search_runs([place])
    run = runs[0].info.run_id
    images = [each.path for each in client.list_artifacts(run, "images")]
    png = next(name for name in images if name.endswith(".png"))
    table = next(each.path for each in client.list_artifacts(run, "samples"))
    texts = json.loads(Path(client.download_artifacts(run, table)).read_text())
    return {
        "runs": [each.info.run_name for each in runs],
        "losses": [[m.step, m.value] for m in client.get_metric_history(run, "train/loss")],
        "lr": float(runs[0].data.params["optim.lr"]),
        "pixel": pixel(client.download_artifacts(run, png)),
        "texts": [row[0] for row in texts["data"]],
        "ended": runs[0].info.status == "FINISHED",
    }


def trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import MEDIA_DIR

    runs = SQLiteStorage.get_runs("shapes")
    name = runs[0] if isinstance(runs[0], str) else runs[0]["name"]
    logs = SQLiteStorage.get_logs("shapes", name)
    [picture, _] = [row["held/pictures"] for row in logs if "held/pictures" in row]
    [table, _] = [row["held/samples"] for row in logs if "held/samples" in row]
    return {
        "runs": [name],
        "losses": [[row["step"], row["train/loss"]] for row in logs if "train/loss" in row],
        "lr": SQLiteStorage.get_run_config("shapes", name)["optim.lr"],
        "pixel": pixel(MEDIA_DIR / picture[0]["file_path"]),
        "texts": [row["sample"] for row in table["_value"]],
        "ended": True,
    }


print(json.dumps({"mlflow": mlflow, "trackio": trackio}[sys.argv[1]](Path(sys.argv[2]))))
