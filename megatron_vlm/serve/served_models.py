"""Models of a service on one rank: the base model, the models in training, and weights that are
kept for sampling. Every rank has the same models and makes the same calls.

Models with adapters share the base model's weights. A fully trained model has its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

from megatron_vlm.checkpoint import save_load
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.controller import WorkerGroup, local_group
from megatron_vlm.controller.rank_worker import BrokenError
from megatron_vlm.controller.torchrun import SummedLoss, backward_together
from megatron_vlm.controller.worker_group import BatchLike
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.agreement import Signals, Stopped, have_all_failed
from megatron_vlm.distributed.rank0 import CommandChannel
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.lora.peft_folder import is_adapter
from megatron_vlm.serve.failures import CallFailedError, Trouble
from megatron_vlm.serve.resumable_decoder import ResumableDecoder, SampleProgress, SampleRequest
from megatron_vlm.training.optimizer_step import AdamStep
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

BASE = "base"
Json: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ModelSettings:
    """Settings that a model is created with. LoRA rank 0 trains all weights. The last two come
    from an uploaded adapter."""

    rank: int
    seed: int
    targets: tuple[str, ...] = ("attention", "mlp")
    alpha: float | None = None  # None: serve.lora_alpha
    rslora: bool = False

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "ModelSettings":
        """Create the settings from the result of `dataclasses.asdict` after JSON."""
        return ModelSettings(**{**fields, "targets": tuple(fields["targets"])})

    def config(self, cfg: Config) -> Config:
        """Return the configuration of the model's workers."""
        lora = LoraConfig()
        if self.rank:
            alpha = cfg.serve.lora_alpha if self.alpha is None else self.alpha
            lora = LoraConfig(self.rank, alpha, self.rslora, targets=self.targets)
        # Models that share a pass cannot overlap its end, so only the user's own word does it.
        parallel = replace(
            cfg.parallel,
            overlap_grad_reduce=bool(cfg.parallel.overlap_grad_reduce),
            overlap_param_gather=bool(cfg.parallel.overlap_param_gather),
        )
        return replace(cfg, lora=lora, parallel=parallel, train=replace(cfg.train, seed=self.seed))


class Models:
    """Models by name. A call that a worker refuses is refused on every rank alike."""

    def __init__(self, cfg: Config, watchdog: Watchdog):
        self.cfg, self.watchdog = cfg, watchdog
        self.base = MegatronWorker(ModelSettings(0, cfg.train.seed).config(cfg), False, watchdog)
        self.workers = {BASE: self.base}
        self.groups: dict[str, WorkerGroup] = {BASE: local_group(self.base)}
        self.decoders: dict[str, ResumableDecoder] = {}  # for models with samples in progress

    def make(
        self, name: str, form: Json, training: bool, folder: str | None, moments: bool
    ) -> None:
        """Create a model with its initial weights, or with the weights in a folder: an adapter of
        PEFT, or what `save` has written, with `moments` also the optimizer's moments."""
        cfg = ModelSettings.from_json(form).config(self.cfg)
        adapter = folder if folder is not None and is_adapter(Path(folder)) else None
        self._build(name, cfg, training, adapter)
        if folder is not None and adapter is None:
            try:
                self.load(name, folder, moments)
            except Exception:
                self.drop(name)
                raise

    def _build(self, name: str, cfg: Config, training: bool, adapter: str | None) -> None:
        base = self.base if cfg.lora.rank else None
        cfg = replace(cfg, lora=replace(cfg.lora, path=adapter))
        worker = MegatronWorker(cfg, training, self.watchdog, base)
        # The model's checkpoints have its weights, and the folder of the adapter may go.
        worker.cfg = replace(worker.cfg, lora=replace(cfg.lora, path=None))
        self.workers[name], self.groups[name] = worker, local_group(worker)

    def drop(self, name: str) -> None:
        """Free the memory of a model."""
        for each in (self.decoders, self.workers, self.groups):
            each.pop(name, None)

    def save(self, name: str, folder: str, moments: bool) -> None:
        """Save the weights of a model and, with `moments`, the optimizer's moments."""
        save_load.save(self.workers[name], Path(folder), {}, moments=moments)

    def load(self, name: str, folder: str, moments: bool) -> None:
        """Load an adapter of PEFT, or what `save` has written. Gradients of the former weights are
        dropped."""
        worker = self.workers[name]
        self.decoders.pop(name, None)
        if is_adapter(Path(folder)):
            self._build(name, worker.cfg, True, folder)
            return
        save_load.load(worker, Path(folder), moments=moments)
        if worker.gradients is not None:
            worker.gradients.forget()

    def forward_backward(self, losses: Sequence[Json], *batches: BatchLike) -> list[StepMetrics]:
        """Add the gradients of a summed loss for each batch, each for another model (`name`), to
        those since the model's last step. Return metrics with log-probs."""
        return backward_together(
            [
                SummedLoss(self.groups[each["name"]], batch, each["loss"], each["options"])
                for batch, each in zip(batches, losses, strict=True)
            ]
        )

    def forward(self, name: str, batch: BatchLike, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of the targets of each row."""
        return self.groups[name].forward(batch, temperature).result()

    def likeliest(
        self, name: str, batch: BatchLike, count: int, temperature: float
    ) -> list[Tensor]:
        """Return the most likely tokens at each place of a row that has targets."""
        return self.groups[name].likeliest(batch, count, temperature).result()

    def optim_step(self, name: str, lr: float, adam: Json) -> tuple[float, float]:
        """Apply the gradients, or make a step without gradients."""
        self.decoders.pop(name, None)
        return self.groups[name].optim_step(lr, AdamStep(**adam)).result()

    def draw(
        self,
        name: str,
        prompts: BatchLike | None,
        requests: Sequence[Json],
        leave: Sequence[int],
        rounds: int,
    ) -> list[SampleProgress]:
        """Draw samples for this number of rounds; see ResumableDecoder. Samples in progress stay
        from one call to the next, unless a call fails or the model is changed or dropped."""
        if name not in self.decoders:
            rows = self.cfg.engine.rows
            self.decoders[name] = ResumableDecoder(self.groups[name], rows)
        asked = [SampleRequest.from_json(each) for each in requests]
        try:
            progress = self.decoders[name].advance(prompts, asked, leave, rounds)
        except Exception:
            del self.decoders[name]
            raise
        if not any(each.left for each in progress):
            del self.decoders[name]
        return progress

    def move(self, name: str, to: str) -> None:
        """Continue the samples of a model with another model that has the same weights."""
        self.decoders[to] = self.decoders.pop(name)
        self.decoders[to].move(self.groups[to])

    def backwards_of(self, name: str) -> int:
        """Return how many calls have added gradients since the model was loaded."""
        gradients = self.workers[name].gradients
        return 0 if gradients is None else gradients.calls


P = ParamSpec("P")
T = TypeVar("T")


class ModelCommands:
    """Calls of Models on every rank, whose arguments are batches and values of JSON."""

    def __init__(self, models: Models, signals: Signals):
        self.models = models
        self.channel = CommandChannel(
            models.watchdog, signals, self._run, TensorBatch, _unreachable
        )
        self.wait = self.channel.wait
        self.performed = 0  # number of calls that have run, the same on all ranks

    def call(self, method: Callable[P, T], *arguments: P.args, **_: P.kwargs) -> T:
        """Run a method of Models on every rank, and return its result on rank 0."""
        return self.channel.call(method.__name__, *arguments)

    def end(self) -> None:
        """Make the other ranks return from `follow`."""
        self.channel.send("end")

    def follow(self) -> None:
        """Run the calls of rank 0 until the service ends."""
        while True:
            try:
                self.channel.follow()
                return
            except Stopped:
                continue  # rank 0 still saves what is in memory
            except BrokenError:
                raise
            except MegatronVLMError:
                continue  # rank 0 has the same error and reports it to the client

    def _run(self, method: str, arguments: list[Any]) -> Any:
        """Run a call and return its result. After an unexpected error all ranks go on if all have
        met it at the same place. Otherwise raise BrokenError, which ends the job."""
        self.performed += 1
        first = arguments[0]
        names = first if isinstance(first, str) else ", ".join(each["name"] for each in first)
        files = method in ("make", "save", "load")
        self.models.watchdog.begin_phase(0, f"{method} of {names}", files=files)
        try:
            return getattr(self.models, method)(*arguments)
        except BrokenError as error:
            trouble = Trouble.from_error(error.__cause__ or error)
        except MegatronVLMError:
            raise
        except Exception as error:
            trouble = Trouble.from_error(error)
        finally:
            self.models.watchdog.begin_phase(0, "waiting for calls")
        # The error is freed by now, and with its traceback the tensors of the computation.
        raise self._error_after(method, trouble)

    def _error_after(self, call: str, trouble: Trouble) -> Exception:
        base = self.models.base
        together = self.channel.alone or (
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


def _unreachable(method: str, error: Exception) -> BrokenError:
    return BrokenError(f"the other ranks cannot receive this call: {error}", place=method)
