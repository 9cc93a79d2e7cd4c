"""Models of a service on one rank: the base model, the models in training, and weights that are
kept for sampling. Every rank has the same models and makes the same calls.

Models with adapters share the base model's weights. A fully trained model has its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_vlm.checkpoint import save_load
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.controller import WorkerGroup, local_group
from megatron_vlm.controller.multi_model_backward import SummedLoss, backward_together
from megatron_vlm.controller.resumable_decoder import (
    ResumableDecoder,
    SampleProgress,
    SampleRequest,
)
from megatron_vlm.controller.split_batch import BatchLike
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.training.optimizer import AdamStep
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

BASE = "base"


@dataclass(frozen=True)
class ModelSettings:
    """Settings that a model is created with. LoRA rank 0 trains all weights."""

    rank: int
    seed: int
    targets: tuple[str, ...] = ("attention", "mlp")

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "ModelSettings":
        """Create the settings from the result of `plain`."""
        return ModelSettings(fields["rank"], fields["seed"], tuple(fields["targets"]))

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a dictionary for JSON."""
        return asdict(self)

    def config(self, cfg: Config) -> Config:
        """Return the configuration of the model's workers."""
        lora = LoraConfig()
        if self.rank:
            lora = LoraConfig(self.rank, cfg.serve.lora_alpha, targets=self.targets)
        return replace(cfg, lora=lora, train=replace(cfg.train, seed=self.seed))


@dataclass(frozen=True)
class Loss:
    """Loss of a model, and its options."""

    model: str
    name: str
    options: Mapping[str, float]


class Models:
    """Models by name. A call that a worker refuses is refused on every rank alike."""

    def __init__(self, cfg: Config, watchdog: Watchdog):
        self.cfg, self.watchdog = cfg, watchdog
        self.base = MegatronWorker(ModelSettings(0, cfg.train.seed).config(cfg), False, watchdog)
        self.workers = {BASE: self.base}
        self.groups: dict[str, WorkerGroup] = {BASE: local_group(self.base)}
        self.decoders: dict[str, ResumableDecoder] = {}  # for models with samples in progress

    def make(
        self,
        name: str,
        form: ModelSettings,
        training: bool,
        folder: str | None = None,
        moments: bool = True,
    ) -> None:
        """Create a model with its initial weights, or with the weights in a folder and, with
        `moments`, the optimizer's moments."""
        base = self.base if form.rank else None
        worker = MegatronWorker(form.config(self.cfg), training, self.watchdog, base)
        self.workers[name], self.groups[name] = worker, local_group(worker)
        if folder is not None:
            try:
                self.load(name, folder, moments)
            except Exception:
                self.drop(name)
                raise

    def drop(self, name: str) -> None:
        """Free the memory of a model."""
        self.decoders.pop(name, None)
        self.workers.pop(name, None)
        self.groups.pop(name, None)

    def save(self, name: str, folder: str, moments: bool) -> None:
        """Save the weights of a model and, with `moments`, the optimizer's moments."""
        save_load.save(self.workers[name], Path(folder), {}, moments=moments)

    def load(self, name: str, folder: str, moments: bool) -> None:
        """Load what `save` has written. Gradients of the former weights are dropped."""
        worker = self.workers[name]
        self.decoders.pop(name, None)
        save_load.load(worker, Path(folder), moments=moments)
        if worker.gradients is not None:
            worker.gradients.forget()

    def forward_backward(self, *batches: BatchLike, losses: Sequence[Loss]) -> list[StepMetrics]:
        """Compute the gradients of a summed loss for each batch; each batch is for another model.
        The gradients are added to those since the model's last step. Return metrics with
        log-probs."""
        return backward_together(
            [
                SummedLoss(self.groups[each.model], batch, each.name, each.options)
                for batch, each in zip(batches, losses, strict=True)
            ]
        )

    def forward(self, name: str, batch: BatchLike, temperature: float = 1.0) -> list[Any]:
        """Return the log-probs of the targets of each row."""
        return self.groups[name].forward(batch, temperature).result()

    def likeliest(self, name: str, batch: BatchLike, count: int, temperature: float) -> list[Any]:
        """Return the most likely tokens at each place of a row that has targets."""
        return self.groups[name].likeliest(batch, count, temperature).result()

    def optim_step(self, name: str, lr: float, adam: AdamStep) -> tuple[float, float]:
        """Apply the gradients, or make a step without gradients."""
        self.decoders.pop(name, None)
        return self.groups[name].optim_step(lr, adam).result()

    def draw(
        self,
        name: str,
        *prompts: BatchLike,
        requests: Sequence[SampleRequest],
        leave: Sequence[int],
        rounds: int,
    ) -> list[SampleProgress]:
        """Draw samples for this number of rounds; see ResumableDecoder. Samples in progress stay
        from one call to the next, unless a call fails or the model is changed or dropped."""
        if name not in self.decoders:
            rows = self.cfg.serve.sampler_rows
            self.decoders[name] = ResumableDecoder(self.groups[name], rows)
        joining = prompts[0] if prompts else None
        try:
            progress = self.decoders[name].advance(joining, requests, leave, rounds)
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

    def step_of(self, name: str) -> int:
        """Return the number of optimizer steps so far."""
        return self.workers[name].steps
