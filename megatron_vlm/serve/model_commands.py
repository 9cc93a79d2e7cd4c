"""What rank 0 has all ranks do: it alone hears the clients, and all ranks compute."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from megatron_vlm.controller.group_decoder import SampleProgress, SampleRequest
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import Signals, Stopped
from megatron_vlm.distributed.error_recovery import failed_alike
from megatron_vlm.distributed.rank0 import CommandChannel
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.serve.failures import CallFailedError, Trouble
from megatron_vlm.serve.rank_models import Loss, ModelForm, Models
from megatron_vlm.training.optimizer import AdamStep
from megatron_vlm.training.worker import StepMetrics


class ModelCommands:
    """The calls of Models on rank 0, each made on every rank."""

    def __init__(self, models: Models, signals: Signals):
        self.models, self.signals = models, signals
        self.lead = CommandChannel(models.watchdog, signals, models.base.platform.device)
        self.stopping = False
        self.performed = 0  # orders, the same number on all ranks

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

    def draw(
        self,
        name: str,
        rows: Sequence[Row],
        requests: Sequence[SampleRequest],
        leave: Sequence[int],
        rounds: int,
    ) -> list[SampleProgress]:
        order = {"do": "draw", "name": name, "leave": list(leave), "rounds": rounds}
        said = {**order, "requests": [each.plain() for each in requests]}
        found: list[SampleProgress] = self._give(said, *([rows] if rows else []))
        return found

    def move(self, name: str, to: str) -> None:
        self._give({"do": "move", "name": name, "to": to})

    def end(self) -> None:
        """The others return from `follow`."""
        self._give({"do": "end"})

    def _give(self, order: dict[str, Any], *rows: Sequence[Row]) -> Any:
        # Before the others wait for it: what fails here is no concern of theirs.
        batches = [batch_of(each) for each in rows]
        contents = [] if self.lead.alone else [each.to_bytes() for each in batches]
        if not self._told(order, contents):
            raise Stopped
        return self._performed(order, batches)

    def _told(self, order: dict[str, Any], contents: Sequence[bytes]) -> bool:
        """Tell the others; False where they are told to stop in its place."""
        try:
            if self.lead.meet() and not self.stopping:
                # The others wait for an order by now. Those that follow are the last ones.
                self.stopping = True
                self.lead.tell({"do": "wait"})
                return False
            self.lead.tell(order, contents)
        except Exception as error:
            raise BrokenError(
                f"the other ranks cannot receive this call: {error}", place=order["do"]
            ) from error
        return True

    # -- the others

    def follow(self) -> None:
        """Take orders until the service ends."""
        while True:
            self.lead.meet()
            order, contents = self.lead.hear()
            if order["do"] == "end":
                return
            try:
                self._performed(order, list(map(TensorBatch.from_bytes, contents)))
            except BrokenError:
                raise
            except MegatronVLMError:
                continue  # rank 0 has it, too, and tells the client

    # -- all

    def _performed(self, order: dict[str, Any], batches: Sequence[TensorBatch]) -> Any:
        """What comes of it. After an error that nobody has foreseen all ranks go on where all have
        met it, at the same place; otherwise it is a BrokenError, which ends the job."""
        self.performed += 1
        try:
            return _perform(self.models, order, batches)
        except BrokenError as error:
            trouble = Trouble.of(error.__cause__ or error)
        except MegatronVLMError:
            raise
        except Exception as error:
            trouble = Trouble.of(error)
        # The error is gone by now, and with its traceback whatever was computed with.
        raise self._after(order["do"], trouble)

    def _after(self, call: str, trouble: Trouble) -> Exception:
        base = self.models.base
        together = self.lead.alone or (
            not trouble.in_collective and failed_alike(f"failed/{self.performed}", base.grid)
        )
        if not together:
            text = f"not all ranks have met this error: {trouble.told}"
            return BrokenError(text, place=call)
        try:
            base.platform.wait()
            base.platform.release()
        except Exception as error:
            return BrokenError(f"the device no longer does anything: {error}", place=call)
        return CallFailedError(trouble.told)


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
    elif do == "draw":
        what["requests"] = [SampleRequest.of(each) for each in what["requests"]]
    of = ", ".join(names or [each.model for each in what["losses"]])
    models.watchdog.at(0, f"{do} of {of}", files=do in ("make", "save", "load"))
    call: Callable[..., Any] = getattr(models, do)
    try:
        return call(*names, *batches, **what)
    finally:
        models.watchdog.at(0, "waiting for calls")
