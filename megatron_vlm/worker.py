"""MegatronWorker: one rank's model, its training step, and its place in the whole.

SPMD: every rank makes one and makes the same calls. A batch goes to a data parallel replica: all
ranks of one replica pass the same, replicas pass different ones. A batch is rows (a list of them,
or a TensorBatch), cut into micro-batches in order, or micro-batches as the loader plans them.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batch.micro_batch import MicroBatch, cut_micro_batches
from megatron_vlm.data.encode.row import IGNORE, Row
from megatron_vlm.data.media.pixels import PixelTables
from megatron_vlm.data.tensors.rows import rows_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.hf.export import export_hf
from megatron_vlm.hf.load import check_tensors, load_hf, vision_shapes
from megatron_vlm.hf.names import name_table
from megatron_vlm.hf.source import Source
from megatron_vlm.model.build import build_model
from megatron_vlm.model.constraints import check_built, check_config
from megatron_vlm.model.log_probs import collect
from megatron_vlm.step.losses import LossFunction, Objective, loss_of
from megatron_vlm.step.optimizer import build_optimizer, set_lr, step, wrap_data_parallel
from megatron_vlm.step.pipeline import broadcast_from_last, evaluating, run_schedule

# Collectives outlast launch.timeout_minutes: the watchdog speaks first, and knows who stands still.
_PATIENCE = 2

Batch = Sequence[Row] | TensorBatch | Sequence[MicroBatch]


@dataclass(frozen=True)
class StepMetrics:
    """Of the global batch, the same on every rank; log_probs of this replica's rows, on request."""

    loss: float  # mean over the supervised tokens
    num_tokens: int  # supervised
    log_probs: list[Tensor] | None = None  # per row [S], as `forward` returns them
    means: dict[str, float] = field(default_factory=dict)  # what the loss reports, over the same


class MegatronWorker:
    """Build it from a Config inside torchrun (or any launcher that sets torch's variables)."""

    def __init__(self, cfg: Config, training: bool = True):
        """Without `training` there are no gradients and no optimizer, nor the memory for them."""
        self.cfg = cfg
        self.platform: Platform = pick_platform(cfg.platform)
        self.source = Source(cfg.model.path)
        hf_config = self.source.config
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        # Everything that can be refused is refused here, before a process group or a weight.
        self.dims = ParallelDims.create(
            cfg.parallel, world_size, hf_config.text_config.num_hidden_layers
        )
        check_config(cfg, hf_config, self.dims)
        self.source.read_headers()
        check_tensors(self.source)
        patience = _PATIENCE * cfg.launch.timeout_minutes
        join_world(self.platform, patience)
        self.dims.init_groups(cfg.train.seed, patience)
        self.first = parallel_state.is_pipeline_first_stage()
        self.last = parallel_state.is_pipeline_last_stage()
        self.table = name_table(hf_config, cfg.model.backend, self.dims, vision_shapes(hf_config))
        self.model = build_model(cfg, hf_config, self.dims, self.platform)
        load_hf(self.model, self.source, self.table)
        self.pixels = PixelTables(cfg.model.path, self.platform.device)
        self.ddp: Any = self.model
        self.optimizer: MegatronOptimizer | None = None
        if training:
            self.ddp = wrap_data_parallel(cfg, self.model)
            self.optimizer = build_optimizer(cfg, self.ddp)
        self.lr = cfg.optim.lr

    def forward(self, batch: Batch) -> list[Tensor]:
        """Log-probs of each row's supervised tokens, fp32 on the host: one tensor [S] a row, zero
        where a token is not supervised. The same on every rank of the replica."""
        batches = self.micro_batches(batch)
        with evaluating(self.ddp):
            outputs = run_schedule(self.ddp, batches, self._score_step, forward_only=True)
        return self._per_row(batches, outputs)

    def forward_backward(
        self,
        batch: Batch,
        return_per_token_outputs: bool = False,
        loss: str | LossFunction = "cross_entropy",
        **options: float,
    ) -> StepMetrics:
        """Gradients of the mean loss over the global batch, in place of any before.

        `return_per_token_outputs` also copies each token's log-prob to the host of every rank. For
        losses, their options and the values of each token that they read, see losses.py.
        """
        assert self.optimizer is not None, "made without training"
        objective = Objective.create(loss, options)
        batches = self.micro_batches(batch, objective.value_names)
        check_built(self.model.config)
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        step = partial(self._loss_step, objective)
        outputs = run_schedule(self.ddp, batches, step, forward_only=False)
        names = ("loss_sum", *objective.metrics)
        total = torch.zeros(1 + len(names), dtype=torch.float64, device=self.platform.device)
        if self.last:
            total[0] = sum(batch.num_supervised for batch in batches)
            for place, name in enumerate(names, start=1):
                total[place] = sum(output[name].double() for output in outputs)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        broadcast_from_last(total)
        count, *sums = total.tolist()
        mean, *means = (value / max(count, 1.0) for value in sums)
        log_probs = None
        if return_per_token_outputs:
            log_probs = self._per_row(batches, [output["log_probs_N"] for output in outputs])
        reported = dict(zip(objective.metrics, means, strict=True))
        return StepMetrics(mean, int(count), log_probs, reported)

    def optim_step(self, lr: float | None = None) -> tuple[float, float]:
        """Clip and apply the gradients; returns (gradient norm before clipping, learning rate).
        Where the norm is not finite, nothing is applied."""
        assert self.optimizer is not None, "made without training"
        self.lr = self.lr if lr is None else lr
        set_lr(self.optimizer, self.lr, self.cfg.optim.lr)
        return step(self.optimizer), self.lr

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint: what was loaded, with the weights of now."""
        export_hf(self.model, self.source, self.table, path)

    def micro_batches(
        self, batch: Batch, value_names: Sequence[str] = (), first_row: int = 0
    ) -> list[MicroBatch]:
        """The batch as a forward takes it, checked; its rows are called by their number from
        `first_row` on."""
        if isinstance(batch, TensorBatch):
            batch = rows_of(batch, value_names)
        if len(batch) and isinstance(batch[0], MicroBatch):
            made: Sequence[MicroBatch] = batch  # type: ignore[assignment]
            for place, micro_batch in enumerate(made):
                micro_batch.check_values(value_names, f"micro-batch {place}")
            return list(made)
        rows: Sequence[Row] = batch  # type: ignore[assignment]
        size = self.cfg.train.micro_batch_size
        return cut_micro_batches(rows, size, self.model.tokens, value_names, first_row)

    def call_model(self, model: Any, batch: MicroBatch, **more: Any) -> Tensor:
        """The stage's output for a micro-batch that `for_stage` has brought to the device."""
        output: Tensor = model(
            input_ids=batch.ids_BS,
            position_ids=batch.position_ids_3BS,
            pixel_values=self.pixels.images(batch.pixel_values_PC),
            image_grid_thw=batch.image_grid_I3,
            pixel_values_videos=self.pixels.videos(batch.pixel_values_videos_PC),
            video_grid_thw=batch.video_grid_I3,
            **more,
        )
        return output

    def _score_step(self, data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(data).for_stage(self.first, self.platform.device)
        labels = batch.targets_BS if self.last else None
        return self.call_model(model, batch, labels=labels), collect

    def _loss_step(
        self, objective: Objective, data: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Any]:
        batch = next(data).for_stage(self.first, self.platform.device, self.last)
        asked = {"labels": batch.targets_BS} if self.last else {}
        if self.last and objective.entropy_coef is not None:  # of it the log-probs do not tell
            asked = {"loss_mask": batch.targets_BS != IGNORE}
        output = self.call_model(model, batch, **asked)
        return output, partial(loss_of, objective, batch, self.model.real_vocab)

    def _per_row(self, batches: list[MicroBatch], outputs: list[Tensor]) -> list[Tensor]:
        counts = [batch.num_supervised for batch in batches]
        flat = torch.empty(sum(counts), device=self.platform.device)
        if self.last:
            flat.copy_(torch.cat(outputs))
        broadcast_from_last(flat)
        pieces = flat.cpu().split(counts)
        found = {
            place: row
            for batch, piece in zip(batches, pieces, strict=True)
            for place, row in zip(batch.rows, batch.log_probs_by_row(piece), strict=False)
        }
        return [found[place] for place in sorted(found)]
