"""Commands from rank 0 to all ranks. Rank 0 alone receives the clients' calls; all ranks
compute."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.controller.resumable_decoder import SampleProgress, SampleRequest
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import Signals, Stopped
from megatron_vlm.distributed.error_recovery import have_all_failed
from megatron_vlm.distributed.rank0 import CommandChannel
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.serve.failures import CallFailedError, Trouble
from megatron_vlm.serve.rank_models import Loss, Models, ModelSettings
from megatron_vlm.training.optimizer import AdamStep
from megatron_vlm.training.worker import StepMetrics


class ModelCommands:
    """Methods of Models, called on rank 0 and run on every rank."""

    def __init__(self, models: Models, signals: Signals):
        self.models, self.signals = models, signals
        self.lead = CommandChannel(models.watchdog, signals, models.base.platform.device)
        self.stopping = False
        self.performed = 0  # number of commands that have run, the same on all ranks

    # -- rank 0

    def wait(self) -> None:
        """Keep the ranks connected while nothing else runs; call it often. Raise Stopped once a
        rank has received a signal to stop."""
        if self.lead.is_silent or self.signals.received is not None:
            self._give({"do": "wait"})

    def make(
        self, name: str, form: ModelSettings, training: bool, folder: str | None, moments: bool
    ) -> None:
        order = {"name": name, "form": form.as_json(), "training": training}
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
        """Compute the gradients of different models, each on its own batch."""
        order = {"do": "forward_backward", "losses": [asdict(loss) for loss in losses]}
        metrics: list[StepMetrics] = self._give(order, *batches)
        return metrics

    def forward(self, name: str, rows: Sequence[Row], temperature: float = 1.0) -> list[Tensor]:
        order = {"do": "forward", "name": name, "temperature": temperature}
        log_probs: list[Tensor] = self._give(order, rows)
        return log_probs

    def likeliest(
        self, name: str, rows: Sequence[Row], count: int, temperature: float
    ) -> list[Tensor]:
        order = {"do": "likeliest", "name": name, "count": count, "temperature": temperature}
        tokens: list[Tensor] = self._give(order, rows)
        return tokens

    def optim_step(self, name: str, lr: float, adam: AdamStep) -> tuple[float, float]:
        order = {"do": "optim_step", "name": name, "lr": lr, "adam": asdict(adam)}
        norm_and_lr: tuple[float, float] = self._give(order)
        return norm_and_lr

    def draw(
        self,
        name: str,
        rows: Sequence[Row],
        requests: Sequence[SampleRequest],
        leave: Sequence[int],
        rounds: int,
    ) -> list[SampleProgress]:
        order = {"do": "draw", "name": name, "leave": list(leave), "rounds": rounds}
        message = {**order, "requests": [each.as_json() for each in requests]}
        progress: list[SampleProgress] = self._give(message, *([rows] if rows else []))
        return progress

    def move(self, name: str, to: str) -> None:
        self._give({"do": "move", "name": name, "to": to})

    def end(self) -> None:
        """Make the other ranks return from `follow`."""
        self._give({"do": "end"})

    def _give(self, order: dict[str, Any], *rows: Sequence[Row]) -> Any:
        # This happens before the other ranks wait for the rows, so an error here concerns rank 0
        # alone.
        batches = [batch_of(each) for each in rows]
        contents = [] if self.lead.alone else [each.to_bytes() for each in batches]
        if not self._send_order(order, contents):
            raise Stopped
        return self._run_command(order, batches)

    def _send_order(self, order: dict[str, Any], contents: Sequence[bytes]) -> bool:
        """Send a command to the other ranks. Return False where they receive the order to stop
        instead."""
        try:
            if self.lead.meet() and not self.stopping:
                # The other ranks are waiting for a command. After this one, only the commands of
                # the shutdown follow.
                self.stopping = True
                self.lead.send({"do": "wait"})
                return False
            self.lead.send(order, contents)
        except Exception as error:
            raise BrokenError(
                f"the other ranks cannot receive this call: {error}", place=order["do"]
            ) from error
        return True

    # -- the others

    def follow(self) -> None:
        """Run the commands of rank 0 until the service ends."""
        while True:
            self.lead.meet()
            order, contents = self.lead.receive()
            if order["do"] == "end":
                return
            try:
                self._run_command(order, list(map(TensorBatch.from_bytes, contents)))
            except BrokenError:
                raise
            except MegatronVLMError:
                continue  # rank 0 has the same error and reports it to the client

    # -- all

    def _run_command(self, order: dict[str, Any], batches: Sequence[TensorBatch]) -> Any:
        """Run a command and return its result. After an unexpected error all ranks go on if all
        have met it at the same place. Otherwise raise BrokenError, which ends the job."""
        self.performed += 1
        try:
            return _perform(self.models, order, batches)
        except BrokenError as error:
            trouble = Trouble.from_error(error.__cause__ or error)
        except MegatronVLMError:
            raise
        except Exception as error:
            trouble = Trouble.from_error(error)
        # The error is freed by now, and with its traceback the tensors of the computation.
        raise self._error_after(order["do"], trouble)

    def _error_after(self, call: str, trouble: Trouble) -> Exception:
        base = self.models.base
        together = self.lead.alone or (
            not trouble.in_collective and have_all_failed(f"failed/{self.performed}", base.grid)
        )
        if not together:
            text = f"not all ranks have met this error: {trouble.message}"
            return BrokenError(text, place=call)
        try:
            base.platform.wait()
            base.platform.release()
        except Exception as error:
            return BrokenError(f"the device no longer does anything: {error}", place=call)
        return CallFailedError(trouble.message)


def _perform(models: Models, order: dict[str, Any], batches: Sequence[TensorBatch]) -> Any:
    """Run a command on this rank. Every rank, rank 0 too, builds the arguments from the message, so
    all have the same ones."""
    arguments = dict(order)
    if (do := arguments.pop("do")) in ("wait", "end"):
        return None
    names = [arguments.pop("name")] if "name" in arguments else []
    if do == "make":
        arguments["form"] = ModelSettings.from_json(arguments["form"])
    elif do == "forward_backward":
        arguments["losses"] = [Loss(**each) for each in arguments["losses"]]
    elif do == "optim_step":
        arguments["adam"] = AdamStep(**arguments["adam"])
    elif do == "draw":
        arguments["requests"] = [SampleRequest.from_json(each) for each in arguments["requests"]]
    targets = ", ".join(names or [each.model for each in arguments["losses"]])
    models.watchdog.begin_phase(0, f"{do} of {targets}", files=do in ("make", "save", "load"))
    call: Callable[..., Any] = getattr(models, do)
    try:
        return call(*names, *batches, **arguments)
    finally:
        models.watchdog.begin_phase(0, "waiting for calls")
