"""MegatronWorker: one rank's model, its training step, and its place in the job.

It is SPMD: every rank makes a worker and makes the same calls. All ranks of a data parallel replica
pass the same batch: rows or a TensorBatch, which are cut into micro-batches in order, or
micro-batches as the loader plans them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import Exported, export_of
from megatron_vlm.data.batches.collate import split_micro_batches
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, rows_of
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.dims import overlaps
from megatron_vlm.distributed.grid import leave_world
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import Part
from megatron_vlm.hf.checkpoint_files import weights_digest
from megatron_vlm.hf.export_mark import ExportMark
from megatron_vlm.hf.gather_weights import stored_tensors
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.hf.weight_map import Entry
from megatron_vlm.hf.write_export import export_hf
from megatron_vlm.lora.export_adapter import export_adapter
from megatron_vlm.lora.layers import dropout_rng
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.training import optimizer_step, row_scores
from megatron_vlm.training.backward import Backward, Gradients, LossCall, StepMetrics, run_backward
from megatron_vlm.training.data_parallel import WeightGather, wrap_data_parallel
from megatron_vlm.training.expert_routing import check_routing
from megatron_vlm.training.generate import ROWS, sample
from megatron_vlm.training.generation_batch import Texts
from megatron_vlm.training.losses import LossFunction, Objective, check_divisor, loss_of
from megatron_vlm.training.mtp_loss import MtpTerm
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.rank_model import RankModel, load_model
from megatron_vlm.training.router_losses import RouterTerms
from megatron_vlm.training.stage_inputs import StageInput

Batch = Sequence[Row] | TensorBatch | Sequence[MicroBatch]


class MegatronWorker:
    """A rank's worker. Build it inside torchrun, or any launcher that sets torch's variables."""

    def __init__(
        self,
        cfg: Config,
        training: bool = True,
        watchdog: Watchdog | None = None,
        base: "MegatronWorker | None" = None,
    ):
        """Build the worker and load the weights. Without `training` there are no gradients and no
        optimizer, nor the memory for them. `watchdog` belongs to a run, and receives the worker's
        progress. `base` is a worker of the same checkpoint and layout. Weights that are frozen here
        are shared with it; weights that it trains change for both."""
        self.watchdog = watchdog = watchdog or Watchdog(0, None)
        self.platform: Platform = pick_platform(cfg.platform)
        self.base = base
        shared = None if base is None else base.model
        model = load_model(cfg, training, self.platform, watchdog, shared)
        self.model: RankModel = model
        self.cfg, self.source, self.dims = model.cfg, model.source, model.dims
        self.adapted, self.table, self.grid = model.adapted, model.table, model.grid
        self.chunks: list[StageModel] = model.chunks
        self.gather, cfg = WeightGather([]), model.cfg
        watchdog.begin_phase(0, "building the optimizer")
        wrapped: list[Any] = list(self.chunks)
        self.optimizer: MegatronOptimizer | None = None
        self.gradients: Gradients | None = None
        if training:
            wrapped = wrap_data_parallel(cfg, self.chunks, self.grid)
            entries = {param: entry for entry, param in self.held.items()}
            self.optimizer = build_optimizer(cfg, wrapped, entries, self.grid)
            self.gradients = Gradients(wrapped, self.optimizer)
            if overlaps(cfg.parallel, self.dims.dp)[1]:
                self.gather = WeightGather(wrapped)
        pixels = PixelTables(str(self.source.path), self.platform.device)
        self.stage = Stage(self.chunks, wrapped, self.grid, pixels)
        self.lr = cfg.optim.lr
        self.steps = 0  # completed steps of the optimizer
        self.pending_save: Any = None  # checkpoint/save_load.py: the save that started last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the groups of this process, unless an earlier worker or the caller made them."""
        if self.model.owns_groups:
            leave_world(has_failed=kind is not None)

    @property
    def layout(self) -> ModelLayout:
        """The layout for the planner."""
        itemsize = self.chunks[0].config.params_dtype.itemsize
        of = self.cfg, self.source.sizes, self.dims, itemsize, self.platform.is_cuda
        return ModelLayout(*of)

    @cached_property
    def base_digest(self) -> str:
        """Digest of the weights that were loaded."""
        return self.base.base_digest if self.base else weights_digest(self.source.path)

    @property
    def held(self) -> Mapping[Entry, torch.nn.Parameter]:
        """Parameters of this rank by their entries in the table, with the newest weights. All code
        that reads or fills parameters takes them from here first."""
        self.gather.finish()
        return self.model.held

    def forward(self, batch: Batch, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of each row's supervised tokens at this temperature, fp32 on the
        host: [S], zero where a token is not supervised, or in the shape of the row's targets. All
        ranks of the replica get the same."""
        _check_temperature("forward", temperature)
        return row_scores.score_rows(self.stage, self.micro_batches(batch), temperature)

    def likeliest(self, batch: Batch, count: int, temperature: float = 1.0) -> list[Tensor]:
        """Return the most likely tokens at each position where a row predicts one: [S, k, 2], ids
        and log-probs at this temperature, at the position that predicts them, and zeros elsewhere.
        They are float64 on the host, the same on every rank of the replica."""
        tokens = range(1, self.source.sizes.text.vocab + 1)
        if count not in tokens:
            raise ConfigError(place="likeliest", key="count", found=count, allowed=tokens)
        _check_temperature("likeliest", temperature)
        return row_scores.top_tokens(self.stage, self.micro_batches(batch), count, temperature)

    def routing(self, batch: Batch) -> list[Tensor]:
        """Return the experts of each token of each row, which as `routing_SLK` of a Row route its
        tokens to the same experts again: int32 on the host, the same on every rank of the
        replica."""
        self._check_experts()
        return row_scores.routing(self.stage, self.micro_batches(batch))

    def _check_experts(self) -> None:
        if self.source.sizes.text.experts is None:
            raise ConfigError(
                "has no experts to route to", key="model.path", found=self.cfg.model.path
            )

    def sample(
        self,
        prompts: Sequence[Row],
        settings: SamplingSettings,
        n: int = 1,
        seeds: Sequence[int] | None = None,
        batch_rows: int = ROWS,
        texts: Texts | None = None,
        routing: bool = False,
    ) -> list[list[Completion]]:
        """Sample `n` answers to each prompt, with the log-probs that `forward` returns for their
        tokens, and with `routing` the experts of the tokens. A collective; see
        training/generate.py."""
        if routing:
            self._check_experts()
        arguments = n, seeds, batch_rows, texts
        completions = sample(self.stage, prompts, settings, *arguments, self.report_token, routing)
        return [
            [replace(each, versions=((self.steps, len(each.ids)),)) for each in answers]
            for answers in completions
        ]

    def report_token(self, prompt: int, token: int) -> None:
        """Tell the watchdog that a token was sampled."""
        self.watchdog.busy()  # many long answers take a long time

    def forward_backward(
        self,
        batch: Batch,
        return_per_token_outputs: bool = False,
        loss: str | LossFunction = "cross_entropy",
        divisor: float | None = None,
        accumulate: bool = False,
        **options: float,
    ) -> StepMetrics:
        """Compute gradients of the mean loss over the global batch, in place of earlier ones.

        `return_per_token_outputs` also copies each token's log-prob to the host of every rank. For
        losses, their options and the values of each token that they read, see training/losses.py.
        With a `divisor`, which is the same on all ranks, the summed loss is divided by it, and not
        by the sum of the weights of the supervised tokens. With `accumulate` the gradients are
        added to earlier calls' since the last optim_step; after an error these are unchanged.
        """
        call = LossCall(return_per_token_outputs, loss, divisor, accumulate, options)
        return run_backward(self.backward(batch, call))

    def backward(self, batch: Batch, call: LossCall) -> Backward:
        """Check and prepare a forward_backward: for run_backward, or with other workers of the
        same base for run_together."""
        assert self.gradients is not None, "made without training"
        check_divisor(call.divisor)
        objective = Objective.create(call.loss, call.options)
        batches = self.micro_batches(batch, objective.value_names)
        objective.check_batches(batches)
        self.stage.batch_sizes = [BatchSizes.from_micro_batch(each) for each in batches]
        step, model = partial(self._loss_step, objective), self.cfg.model
        terms: list[RouterTerms | MtpTerm] = []
        if model.router_balance_loss or model.router_z_loss:
            terms.append(RouterTerms(model, self.stage, batches, call.divisor))
        if model.mtp == "train":
            terms.append(MtpTerm(self.stage, batches, call.divisor))
        return Backward(self.stage, self.gradients, batches, step, objective, call, terms)

    def optim_step(
        self, lr: float | None = None, adam: optimizer_step.AdamStep | None = None
    ) -> tuple[float, float]:
        """Clip and apply the gradients, which are then spent. Return (gradient norm before
        clipping, learning rate). Nothing is applied if the norm is not finite, or if no token was
        supervised, unless `adam` requests it: momentum and decay then move the weights. `adam` also
        replaces the configured settings for this step."""
        assert self.optimizer is not None and self.gradients is not None, "made without training"
        optimizer_step.check_lr(lr)
        self.lr = self.lr if lr is None else lr
        adam = optimizer_step.step_settings(self.cfg.optim, adam)
        if not self.gradients.some:
            if not adam.without_gradients:
                return 0.0, self.lr
            self.gradients.clear()
        optimizer_step.set_lr(self.optimizer, self.lr, self.cfg.optim.lr)
        optimizer_step.set_adam(self.optimizer, adam)
        of = self.optimizer, self.gather, self.grid, self.platform.device
        mtp_params = {param for entry, param in self.held.items() if entry.part is Part.mtp}
        limit, deferred = adam.clip_grad, self.gradients.deferred
        norm = optimizer_step.apply_gradients(*of, limit, deferred, mtp_params)
        self.gradients.forget()
        self.steps += math.isfinite(norm)
        return norm, self.lr

    def export_hf(
        self,
        path: str,
        mark: ExportMark | None = None,
        done: TrainingSummary | None = None,
        kind: Exported | None = None,
    ) -> None:
        """Write a Hugging Face checkpoint: the one that was loaded, with the current weights.
        `mark` records where these come from, and `done` describes the training for the model card.
        With adapters, `kind` chooses between them and the model that they are merged into."""
        if not self.cfg.lora.rank:
            export_hf(self.held, self.source, self.table, self.grid, path, mark=mark, done=done)
            return
        kind = kind or export_of(self.cfg)
        trained = [entry for entry in self.table if not entry.is_frozen(self.cfg)]
        form = self.cfg.lora, self.adapted, self.source
        export_adapter(self.held, trained, self.table, self.grid, form, path, kind, mark, done)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as `export_hf` writes it, one at a time, on the device of rank 0, and
        nothing on other ranks. A collective: all ranks must iterate to the end."""
        if self.cfg.lora.rank:
            raise ConfigError(
                ": the streamed weights would lack the adapters",
                key="lora.rank",
                found=self.cfg.lora.rank,
                remedy="write their folder with export_hf, and give that one",
            )
        return stored_tensors(self.held, self.source, self.table, self.grid)

    def micro_batches(
        self, batch: Batch, value_names: Sequence[str] = (), first_row: int = 0
    ) -> list[MicroBatch]:
        """Return the batch as checked micro-batches for a forward. In errors, rows count from
        `first_row`."""
        if isinstance(batch, TensorBatch):
            batch = rows_of(batch, value_names)
        if len(batch) and isinstance(batch[0], MicroBatch):
            batches: list[MicroBatch] = list(batch)  # type: ignore[arg-type]
            for place, micro_batch in enumerate(batches):
                micro_batch.check_values(value_names, f"micro-batch {place}")
        else:
            rows: Sequence[Row] = batch  # type: ignore[assignment]
            size, tokens = self.cfg.train.micro_batch_size, self.source.sizes.tokens
            batches = split_micro_batches(rows, size, tokens, value_names, first_row)
        if any("routing" in each.columns for each in batches):
            check_routing(batches, self.source.sizes.text)
        return batches

    def _loss_step(
        self, objective: Objective, data: Iterator[StageInput], chunk: Any
    ) -> tuple[Tensor, Any]:
        self.watchdog.busy()  # a step of many micro-batches may take long
        batch = next(data)
        assert self.gradients is not None
        number = self.gradients.micro_batches + batch.number  # among all micro-batches of the step
        where = self.cfg.train.seed, self.steps, self.grid.dp.rank, number
        with dropout_rng(*where) if self.cfg.lora.dropout else nullcontext():
            output = self.stage.predict(chunk, batch, objective.head)
        return output, partial(loss_of, objective, batch)


def _check_temperature(place: str, temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ConfigError(place=place, key="temperature", found=temperature, allowed="more than 0")
