"""The trackers that are known by name. Their packages are imported when one is started."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.run.trackers import TrackedRun, TrackedSample


class TensorBoard:
    """Events in RUN/tensorboard."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        # Readers forget the steps of an earlier start that come again.
        self.writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.first_step + 1)
        self.writer.add_text("config", "  \n".join(f"{k}={v}" for k, v in run.config.items()))

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        text = "\n\n---\n\n".join(each.text.replace("\n", "  \n") for each in samples)
        self.writer.add_text(f"{name}/answers", text, step)
        pictures = (picture for each in samples for picture in each.pictures())
        for number, picture in enumerate(pictures):
            pixels = np.asarray(picture)
            self.writer.add_image(f"{name}/pictures/{number}", pixels, step, dataformats="HWC")

    def finish(self) -> None:
        self.writer.close()


@dataclass
class WandBLike:
    """A tracker with W&B's functions."""

    module: Any
    run: Any
    to_table: Callable[[list[str]], Any]

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def log_samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        shown = {f"{name}/answers": self.to_table([each.text for each in samples])}
        pictures = ((picture, each.text) for each in samples for picture in each.pictures())
        for number, (picture, text) in enumerate(pictures):
            shown[f"{name}/pictures/{number}"] = self.module.Image(picture, caption=text)
        self.run.log(shown, step=step)

    def finish(self) -> None:
        self.run.finish()


def start_wandb(run: TrackedRun) -> WandBLike:
    """Start W&B, where a run that is started again continues by its id."""
    import wandb

    known: Any = {"name": run.name, "id": run.id, "resume": "allow", "config": dict(run.config)}
    opened = wandb.init(project=run.project, dir=run.folder, **known)
    return WandBLike(wandb, opened, lambda texts: wandb.Table(["sample"], [[t] for t in texts]))


def start_trackio(run: TrackedRun) -> WandBLike:
    """Start Trackio, on this machine unless TRACKIO_SPACE_ID names a Space."""
    import pandas
    import trackio

    name = f"{run.name}-{run.id[:8]}"  # it knows runs by their names
    config = dict(run.config)
    opened = trackio.init(run.project, name=name, resume="allow", config=config, embed=False)

    def to_table(texts: list[str]) -> Any:
        return trackio.Table(dataframe=pandas.DataFrame({"sample": texts}))

    return WandBLike(trackio, opened, to_table)


def start_swanlab(run: TrackedRun) -> WandBLike:
    """Start SwanLab, as SWANLAB_MODE says: cloud, local or offline."""
    import swanlab

    known: Any = {"name": run.name, "id": run.id, "resume": "allow"}
    place = str(run.folder / "swanlab")
    swanlab.init(project=run.project, config=dict(run.config), log_dir=place, **known)
    return WandBLike(swanlab, swanlab, lambda texts: [swanlab.Text(text) for text in texts])


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI or in the current folder. A tag has the id of the run."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient, entities

        self.client, self.metric = MlflowClient(), entities.Metric
        client, tag = self.client, "megatron_vlm_run"
        found = client.get_experiment_by_name(run.project)
        place = client.create_experiment(run.project) if found is None else found.experiment_id
        if known := client.search_runs([place], f"tags.{tag} = '{run.id}'"):
            self.run_id = known[0].info.run_id
            client.update_run(self.run_id, "RUNNING")
            return
        self.run_id = client.create_run(place, tags={tag: run.id}, run_name=run.name).info.run_id
        params = [entities.Param(k, str(v)[:6000]) for k, v in run.config.items()]
        for first in range(0, len(params), 100):  # it takes no more, and no longer ones
            client.log_batch(self.run_id, params=params[first : first + 100])

    def log_figures(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in figures.items()}
        self.client.log_batch(self.run_id, [self.metric(k, v, now, step) for k, v in named.items()])

    def log_samples(self, step: int, name: str, samples: Sequence[TrackedSample]) -> None:
        texts = {"sample": [each.text for each in samples]}
        self.client.log_table(self.run_id, texts, f"answers/{name}-{step}.json")
        pictures = (picture for each in samples for picture in each.pictures())
        for number, picture in enumerate(pictures):
            self.client.log_image(self.run_id, picture, key=f"{name}/{number}", step=step)

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


start_tensorboard, start_mlflow = TensorBoard, MLflow
