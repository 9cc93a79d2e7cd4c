"""What rank 0 has all ranks do: it alone hears the clients, and all ranks compute."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.encode.row import Row
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.agree import Signals, Stopped, Vote, agree
from megatron_vlm.distributed.messages import broadcast_bytes, broadcast_json
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.group.member import BrokenError
from megatron_vlm.service.models import ModelForm, Models
from megatron_vlm.step.completions import Completion, SamplingSettings
from megatron_vlm.step.optimizer import AdamStep
from megatron_vlm.worker import StepMetrics

EVERY_S = 2.0  # that the others hear of rank 0 where it only waits


class ModelOrders:
    """The calls of Models on rank 0, each made on every rank."""

    def __init__(self, models: Models, signals: Signals):
        self.models, self.signals = models, signals
        self.device = models.base.platform.device
        self.alone = dist.get_world_size() == 1
        self.last = time.monotonic()
        self.stopping = False

    # -- rank 0

    def wait(self) -> None:
        """Often, also where there is nothing to do. Raises Stopped once a rank was told to stop."""
        if time.monotonic() - self.last >= EVERY_S or self.signals.received is not None:
            self._give({"do": "wait"})

    def make(
        self, name: str, form: ModelForm, training: bool, folder: str | None, moments: bool
    ) -> None:
        order = {"name": name, "form": form.plain(), "training": training}
        self._give({"do": "make", **order, "folder": folder, "moments": moments})

    def drop(self, name: str) -> None:
        self._give({"do": "drop", "name": name})

    def save(self, name: str, folder: str, moments: bool) -> None:
        self._give({"do": "save", "name": name, "folder": folder, "moments": moments})

    def load(self, name: str, folder: str, moments: bool) -> None:
        self._give({"do": "load", "name": name, "folder": folder, "moments": moments})

    def forward_backward(
        self, name: str, rows: Sequence[Row], loss: str, options: dict[str, float]
    ) -> StepMetrics:
        order = {"do": "forward_backward", "name": name, "loss": loss, "options": options}
        done: StepMetrics = self._give(order, rows)
        return done

    def forward(self, name: str, rows: Sequence[Row], temperature: float = 1.0) -> list[Tensor]:
        order = {"do": "forward", "name": name, "temperature": temperature}
        found: list[Tensor] = self._give(order, rows)
        return found

    def likeliest(
        self, name: str, rows: Sequence[Row], count: int, temperature: float
    ) -> list[Tensor]:
        order = {"do": "likeliest", "name": name, "count": count, "temperature": temperature}
        found: list[Tensor] = self._give(order, rows)
        return found

    def optim_step(self, name: str, lr: float, adam: AdamStep) -> tuple[float, float]:
        order = {"do": "optim_step", "name": name, "lr": lr, "adam": asdict(adam)}
        found: tuple[float, float] = self._give(order)
        return found

    def sample(
        self,
        name: str,
        rows: Sequence[Row],
        settings: SamplingSettings,
        n: int,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        order = {"do": "sample", "name": name, "settings": asdict(settings), "n": n}
        found: list[list[Completion]] = self._give({**order, "seeds": list(seeds)}, rows)
        return found

    def end(self) -> None:
        """The others return from `follow`."""
        self._give({"do": "end"})

    def _give(self, order: dict[str, Any], rows: Sequence[Row] = ()) -> Any:
        if self._meet() and not self.stopping:
            # The others wait for an order by now. Those that follow are the last ones.
            self.stopping, order, rows = True, {"do": "wait"}, ()
            self._say(order, None)
            raise Stopped
        batch = batch_of(rows) if rows else None
        self._say(order, batch)
        return _perform(self.models, order, batch)

    def _say(self, order: dict[str, Any], batch: TensorBatch | None) -> None:
        if self.alone:
            return
        broadcast_json(order | {"has_rows": batch is not None}, 0, None, self.device)
        if batch is not None:
            broadcast_bytes(batch.to_bytes(), 0, None, self.device)

    # -- the others

    def follow(self) -> None:
        """Take orders until the service ends."""
        while True:
            self._meet()
            order = broadcast_json(None, 0, None, self.device)
            if order["do"] == "end":
                return
            batch = None
            if order["has_rows"]:
                batch = TensorBatch.from_bytes(broadcast_bytes(None, 0, None, self.device))
            try:
                _perform(self.models, order, batch)
            except BrokenError:
                raise
            except MegatronVLMError:
                continue  # rank 0 has it, too, and tells the client

    def _meet(self) -> bool:
        """Whether any rank was told to stop."""
        self.last = time.monotonic()
        self.models.watchdog.alive()
        vote = Vote.OK if self.signals.received is None else Vote.STOP
        return agree(vote, self.device) == Vote.STOP


def _perform(models: Models, order: dict[str, Any], batch: TensorBatch | None) -> Any:
    """On every rank, from what was said: so all understand the same."""
    what = dict(order)
    do, name = what.pop("do"), what.pop("name", "")
    what.pop("has_rows", None)
    if do in ("wait", "end"):
        return None
    models.watchdog.at(0, f"{do} of {name}", files=do in ("make", "save", "load"))
    call: Callable[..., Any] = getattr(models, do)
    if do == "make":
        what["form"] = ModelForm.of(what["form"])
    elif do == "optim_step":
        what["adam"] = AdamStep(**what["adam"])
    elif do == "sample":
        what["settings"] = SamplingSettings.of(what["settings"])
    try:
        return call(name, **what) if batch is None else call(name, batch, **what)
    finally:
        models.watchdog.at(0, "waiting for calls")
