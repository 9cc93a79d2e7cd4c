"""What rank 0 has all ranks do: it alone hears the clients, and all ranks compute."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from megatron_vlm.data.encode.row import Row
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.agree import Signals, Stopped
from megatron_vlm.distributed.lead import Lead
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.group.member import BrokenError
from megatron_vlm.service.models import Loss, ModelForm, Models
from megatron_vlm.step.completions import Completion, SamplingSettings
from megatron_vlm.step.optimizer import AdamStep
from megatron_vlm.worker import StepMetrics


class ModelOrders:
    """The calls of Models on rank 0, each made on every rank."""

    def __init__(self, models: Models, signals: Signals):
        self.models, self.signals = models, signals
        self.lead = Lead(models.watchdog, signals, models.base.platform.device)
        self.stopping = False

    # -- rank 0

    def wait(self) -> None:
        """Often, also where there is nothing to do. Raises Stopped once a rank was told to stop."""
        if self.lead.is_silent or self.signals.received is not None:
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
        self, losses: Sequence[Loss], batches: Sequence[Sequence[Row]]
    ) -> list[StepMetrics]:
        """Of different models, each with a batch of its own."""
        order = {"do": "forward_backward", "losses": [asdict(loss) for loss in losses]}
        done: list[StepMetrics] = self._give(order, *batches)
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

    def _give(self, order: dict[str, Any], *rows: Sequence[Row]) -> Any:
        if self.lead.meet() and not self.stopping:
            # The others wait for an order by now. Those that follow are the last ones.
            self.stopping = True
            self.lead.tell({"do": "wait"})
            raise Stopped
        batches = [batch_of(each) for each in rows]
        self.lead.tell(order, [] if self.lead.alone else [each.to_bytes() for each in batches])
        return _perform(self.models, order, batches)

    # -- the others

    def follow(self) -> None:
        """Take orders until the service ends."""
        while True:
            self.lead.meet()
            order, contents = self.lead.hear()
            if order["do"] == "end":
                return
            try:
                _perform(self.models, order, list(map(TensorBatch.from_bytes, contents)))
            except BrokenError:
                raise
            except MegatronVLMError:
                continue  # rank 0 has it, too, and tells the client


def _perform(models: Models, order: dict[str, Any], batches: Sequence[TensorBatch]) -> Any:
    """On every rank, from what was said: so all understand the same."""
    what = dict(order)
    if (do := what.pop("do")) in ("wait", "end"):
        return None
    names = [what.pop("name")] if "name" in what else []
    if do == "make":
        what["form"] = ModelForm.of(what["form"])
    elif do == "forward_backward":
        what["losses"] = [Loss(**each) for each in what["losses"]]
    elif do == "optim_step":
        what["adam"] = AdamStep(**what["adam"])
    elif do == "sample":
        what["settings"] = SamplingSettings.of(what["settings"])
    of = ", ".join(names or [each.model for each in what["losses"]])
    models.watchdog.at(0, f"{do} of {of}", files=do in ("make", "save", "load"))
    call: Callable[..., Any] = getattr(models, do)
    try:
        return call(*names, *batches, **what)
    finally:
        models.watchdog.at(0, "waiting for calls")
