"""Print what a tracker has of a run, as its own package reads it: python tracker_readers.py TRACKER
RUN. The answer is JSON: its runs there, losses by step, a setting, a pixel of the picture, and
the texts of the samples.

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
    table = next(each.path for each in client.list_artifacts(run, "answers"))
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
    [picture, _] = [row["held/pictures/0"] for row in logs if "held/pictures/0" in row]
    [table, _] = [row["held/answers"] for row in logs if "held/answers" in row]
    return {
        "runs": [name],
        "losses": [[row["step"], row["train/loss"]] for row in logs if "train/loss" in row],
        "lr": SQLiteStorage.get_run_config("shapes", name)["optim.lr"],
        "pixel": pixel(MEDIA_DIR / picture["file_path"]),
        "texts": [row["sample"] for row in table["_value"]],
        "ended": True,
    }


def swanlab(folder):
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    records = []
    for file in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        records += map(Record.FromString, reader)
    scalars = [each.scalar for each in records if each.HasField("scalar")]
    files = [item.filename for each in records for item in each.media.value.items]
    config, *_ = folder.glob("swanlab/run-*/files/config.yaml")
    [png, *_] = [name for name in files if name.endswith(".png")]
    [text, *_] = [name for name in files if name.endswith(".txt")]
    return {
        "runs": sorted({each.start.id for each in records if each.HasField("start")}),
        "losses": [[m.step, m.value.number] for m in scalars if m.key == "train/loss"],
        "lr": yaml.safe_load(config.read_text())["optim.lr"]["value"],
        "pixel": pixel(next(folder.glob(f"swanlab/run-*/media/image/{png}"))),
        "texts": [next(folder.glob(f"swanlab/run-*/media/text/{text}")).read_text()],
        "ended": sum(each.HasField("finish") for each in records) == 2,
    }


READERS = {"mlflow": mlflow, "trackio": trackio, "swanlab": swanlab}
print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
