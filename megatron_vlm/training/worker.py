"""MegatronWorker: one rank's model, its training step, and its place in the job.

It is SPMD: every rank makes a worker and makes the same calls. A batch goes to a data parallel
replica: all ranks of one replica pass the same batch, and replicas pass different batches. A batch
is a list of rows or a TensorBatch, which is cut into micro-batches in order, or a list of
micro-batches as the loader plans them.
"""

import math
import os
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
from megatron_vlm.data.batches.collate import cut_micro_batches
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.media.images import PixelTables
from megatron_vlm.data.tensors.rows import rows_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import check_same, compared_keys, fail_together, job_store
from megatron_vlm.distributed.device import Platform, pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import RankGroups, leave_world
from megatron_vlm.distributed.host_memory import host_memory_total
from megatron_vlm.distributed.process import is_under_launcher, print_to_user, rank_of_process
from megatron_vlm.distributed.rendezvous import join_world, meeting_place
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import CheckpointError, ConfigError
from megatron_vlm.family.cpu_matmul import enable_onednn
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.hf.checkpoint_files import digests, weights_digest
from megatron_vlm.hf.export_folder import ExportMark
from megatron_vlm.hf.export_weights import export_hf, stored_tensors
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.load_weights import (
    check_tensors,
    check_tied,
    held_params,
    load_hf,
    own_parameters,
)
from megatron_vlm.hf.model_card import TrainingSummary
from megatron_vlm.hf.weight_map import Entry, name_table
from megatron_vlm.lora.export_adapter import export_adapter
from megatron_vlm.lora.layers import attach, dropout_rng
from megatron_vlm.lora.targets import (
    adapted_linears,
    adapter_entries,
    check_base_type,
    check_blocks,
    entries_in_blocks,
)
from megatron_vlm.lora.weights import adapted_weights, fill, values
from megatron_vlm.model.build import build_chunks, compute_dtype
from megatron_vlm.model.constraints import check_backend, check_config
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.planner.auto_layout import settle_layers
from megatron_vlm.planner.memory import check_offload
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.training.backward import Backward, Gradients, LossCall, StepMetrics, run_backward
from megatron_vlm.training.comm_overlap import WeightGather
from megatron_vlm.training.expert_routing import check_routing
from megatron_vlm.training.generate import ROWS, sample
from megatron_vlm.training.losses import LossFunction, Objective, check_divisor, loss_of
from megatron_vlm.training.optimizer import (
    AdamStep,
    apply_gradients,
    build_optimizer,
    check_lr,
    is_gather_overlapped,
    set_adam,
    set_lr,
    step_settings,
    wrap_data_parallel,
)
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.router_losses import RouterTerms
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.stop_strings import Texts

# Collectives time out only after this many times launch.timeout_minutes: the watchdog reports
# first, and knows which rank is stuck.
PATIENCE = 2

Batch = Sequence[Row] | TensorBatch | Sequence[MicroBatch]


class MegatronWorker:
    """A rank's worker. Build it from a Config inside torchrun (or any launcher that sets torch's
    variables)."""

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
        self.base, self.cfg = base, cfg
        self.source: HFCheckpoint = (
            base.source if base else HFCheckpoint(cfg.model.path, cfg.data.add_tokens)
        )
        sizes = self.source.sizes
        self._remark(sizes.num_values)
        world_size = int(os.environ["WORLD_SIZE"]) if is_under_launcher() else 1
        # Everything that can be refused is refused here, before a process group or any weight
        # exists.
        self.cfg = cfg = self._settle(cfg, sizes, world_size, training)
        self.adapted = adapted_weights(cfg, sizes)
        self.table: list[Entry] = name_table(sizes, cfg.model.backend, self.dims)
        check_blocks(cfg.lora, self.table, self.dims.tp)
        self._read_headers()
        own_digests = digests(self.source) if world_size > 1 and base is None else {}
        patience = PATIENCE * cfg.launch.timeout_minutes
        watchdog.begin_phase(0, f"meeting the other ranks{meeting_place()}")
        self.owns_groups = join_world(self.platform, patience)
        watchdog.join(job_store(), world_size)
        if world_size > 1:
            check_same(compared_keys(cfg), own_digests, self.platform.device)
        self.grid = RankGroups.create(self.dims, cfg.train.seed, patience)
        watchdog.begin_phase(0, "building the model")
        self._build()
        self.gather = WeightGather([])
        self._held = held_params(self.chunks, self.table, self.grid.pp.rank)
        watchdog.begin_phase(0, "loading the weights", files=True)
        self._load()
        watchdog.begin_phase(0, "building the optimizer")
        wrapped: list[Any] = list(self.chunks)
        self.optimizer: MegatronOptimizer | None = None
        self.gradients: Gradients | None = None
        if training:
            wrapped = wrap_data_parallel(cfg, self.chunks, self.grid)
            entries = {param: entry for entry, param in self.held.items()}
            self.optimizer = build_optimizer(cfg, wrapped, entries, self.grid)
            self.gradients = Gradients(wrapped, self.optimizer)
            if is_gather_overlapped(cfg, self.grid):
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
        if self.owns_groups:
            leave_world(has_failed=kind is not None)

    def _settle(self, cfg: Config, sizes: ModelSizes, world: int, training: bool) -> Config:
        """Return the configuration with its layout, which is checked."""
        cfg = settle_layers(cfg, sizes, world, self.platform)
        self.dims = ParallelDims.create(cfg.parallel, world, sizes.text.num_layers)
        check_config(cfg, sizes, self.dims)
        check_backend(cfg, self.platform.is_cuda)
        if training:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            itemsize = compute_dtype(cfg, self.platform).itemsize
            check_offload(cfg, sizes, self.dims, itemsize, local, host_memory_total())
        return cfg

    def _remark(self, parameters: int) -> None:
        """Report, once in a job, what users may not expect of the platform."""
        remark = self.platform.remark(self.cfg.platform, parameters)
        if remark is not None and self.base is None and rank_of_process() == 0:
            print_to_user(remark)

    def _read_headers(self) -> None:
        """Read the headers of the weights, and check that they fit."""
        self.source.read_headers()
        check_base_type(self.cfg, self.source)
        check_tensors(self.source)
        check_tied(self.source)

    def _build(self) -> None:
        """Build this stage's chunks of the model with their adapters, and complete the table of
        parameters."""
        cfg, family, sizes = self.cfg, self.source.family, self.source.sizes
        if not self.platform.is_cuda:
            enable_onednn(sizes.text.hidden, sizes.text.experts is not None)
        stage = self.grid.pp.rank
        in_blocks = {
            (entry.chunk, entry.our_name)
            for entry in entries_in_blocks(cfg.lora, self.table, self.source)
            if entry.stage == stage
        }
        linears = adapted_linears(self.table, self.adapted)
        self.table += adapter_entries(linears, cfg.lora.rank)
        base_chunks = None if self.base is None else self.base.chunks
        self.chunks: list[StageModel] = build_chunks(
            cfg, family, self.source.config, sizes, self.grid, self.platform, in_blocks, base_chunks
        )
        local_linears = [linear for linear in linears if linear.stage == stage]
        attach(self.chunks, local_linears, cfg.lora, self.grid.tp.group)

    def _load(self) -> None:
        """Fill the parameters, and mark those that are trained."""
        with fail_together(self.platform.device, CheckpointError):
            own_params = self.held if self.base is None else own_parameters(self.held, self.cfg)
            load_hf(own_params, self.source, self.grid, self.watchdog.busy)
            if self.adapted:
                fill(self.held, self.grid, values(self.cfg, self.adapted, self.source))
        for entry, param in self.held.items():
            param.requires_grad_(not entry.is_frozen(self.cfg))

    @cached_property
    def base_digest(self) -> str:
        """Digest of the weights that were loaded."""
        return self.base.base_digest if self.base else weights_digest(self.source.path)

    @property
    def held(self) -> Mapping[Entry, torch.nn.Parameter]:
        """Parameters of this rank by their entries in the table, with the newest weights. All code
        that reads or fills parameters takes them from here first."""
        self.gather.finish()
        return self._held

    def forward(self, batch: Batch, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of each row's supervised tokens at this temperature, fp32 on the
        host: one tensor [S] for each row, zero where a token is not supervised. The log-probs of a
        row with targets have the targets' shape. All ranks of the replica get the same."""
        if not 0 < temperature < math.inf:
            raise ConfigError(
                place="forward", key="temperature", found=temperature, allowed="more than 0"
            )
        return self.stage.score(self.micro_batches(batch), temperature)

    def likeliest(self, batch: Batch, count: int, temperature: float = 1.0) -> list[Tensor]:
        """Return the most likely tokens at each position where a row predicts one: [S, k, 2], ids
        and log-probs at this temperature, at the position that predicts them, and zeros elsewhere.
        They are float64 on the host, the same on every rank of the replica."""
        tokens = range(1, self.source.sizes.text.vocab + 1)
        if count not in tokens:
            raise ConfigError(place="likeliest", key="count", found=count, allowed=tokens)
        if not 0 < temperature < math.inf:
            raise ConfigError(
                place="likeliest", key="temperature", found=temperature, allowed="more than 0"
            )
        return self.stage.likeliest(self.micro_batches(batch), count, temperature)

    def routing(self, batch: Batch) -> list[Tensor]:
        """Return the experts of each token of each row. As `routing_SLK` of a Row, they route its
        tokens to the same experts again. They are int32 on the host, the same on every rank of the
        replica."""
        self._check_experts()
        return self.stage.routing(self.micro_batches(batch))

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
            [replace(completion, version=self.steps) for completion in answers]
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
        added to those of the calls since the last optim_step; after an error these are unchanged.
        """
        call = LossCall(return_per_token_outputs, loss, divisor, accumulate, options)
        return run_backward(self.backward(batch, call))

    def backward(self, batch: Batch, call: LossCall) -> Backward:
        """Check and prepare a forward_backward: for run_backward, or with those of other workers of
        the same base for run_together."""
        assert self.gradients is not None, "made without training"
        check_divisor(call.divisor)
        objective = Objective.create(call.loss, call.options)
        batches = self.micro_batches(batch, objective.value_names)
        objective.check_batches(batches)
        self.stage.batch_sizes = [BatchSizes.from_micro_batch(each) for each in batches]
        step, model, router = partial(self._loss_step, objective), self.cfg.model, None
        if model.router_balance_loss or model.router_z_loss:
            router = RouterTerms(model, self.stage, batches, call.divisor)
        return Backward(self.stage, self.gradients, batches, step, objective, call, router)

    def optim_step(
        self, lr: float | None = None, adam: AdamStep | None = None
    ) -> tuple[float, float]:
        """Clip and apply the gradients, which are then spent. Return (gradient norm before
        clipping, learning rate). Nothing is applied if the norm is not finite, or if no token was
        supervised. `adam` can request a step without supervised tokens, in which momentum and decay
        move the weights. `adam` also replaces the configured settings for this step."""
        assert self.optimizer is not None and self.gradients is not None, "made without training"
        check_lr(lr)
        self.lr = self.lr if lr is None else lr
        adam = step_settings(self.cfg.optim, adam)
        if not self.gradients.some:
            if not adam.without_gradients:
                return 0.0, self.lr
            self.gradients.clear()
        set_lr(self.optimizer, self.lr, self.cfg.optim.lr)
        set_adam(self.optimizer, adam)
        norm = apply_gradients(
            self.optimizer, self.gather, self.grid, self.platform.device, adam.clip_grad
        )
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
        `mark` records where these come from. `done` describes the training for the model card. With
        adapters, `kind` chooses between them and the model that they are merged into; the default
        is that of cfg."""
        if not self.cfg.lora.rank:
            export_hf(self.held, self.source, self.table, self.grid, path, mark=mark, done=done)
            return
        kind = kind or export_of(self.cfg)
        trained = [entry for entry in self.table if not entry.is_frozen(self.cfg)]
        form = self.cfg.lora, self.adapted, self.source
        export_adapter(self.held, trained, self.table, self.grid, form, path, kind, mark, done)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as `export_hf` writes it, one at a time, on rank 0, and nothing on
        other ranks. A collective: all ranks must iterate to the end."""
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
            planned: Sequence[MicroBatch] = batch  # type: ignore[assignment]
            for place, micro_batch in enumerate(planned):
                micro_batch.check_values(value_names, f"micro-batch {place}")
            return self._check_batches(planned)
        rows: Sequence[Row] = batch  # type: ignore[assignment]
        size = self.cfg.train.micro_batch_size
        tokens = self.source.sizes.tokens
        return self._check_batches(cut_micro_batches(rows, size, tokens, value_names, first_row))

    def _check_batches(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        if any(batch.routing_TLK is not None for batch in batches):
            check_routing(batches, self.source.sizes.text)
        return list(batches)

    def _loss_step(
        self, objective: Objective, data: Iterator[StageInput], chunk: Any
    ) -> tuple[Tensor, Any]:
        self.watchdog.busy()  # a step of many micro-batches may take long
        batch = next(data)
        assert self.gradients is not None
        number = self.gradients.micro_batches + batch.number  # among all micro-batches of the step
        where = self.cfg.train.seed, self.steps, self.grid.dp.rank, number
        with dropout_rng(*where) if self.cfg.lora.dropout else nullcontext():
            head = objective.extra_output, objective.temperature
            output = self.stage.predict(chunk, batch, *head)
        return output, partial(loss_of, objective, batch)
