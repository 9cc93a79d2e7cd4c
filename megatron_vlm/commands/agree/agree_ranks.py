"""The ranks of `megatron-vlm agree`: rank 0 requests answers from the engine, then all ranks score
them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.checkpoint.save_load import load
from megatron_vlm.commands.agree import agree_settings
from megatron_vlm.commands.agree.agree_settings import AgreeSettings, prompts_of
from megatron_vlm.commands.agree.agreement_report import agreement_report
from megatron_vlm.commands.agree.compare import (
    BOUNDS,
    Agreement,
    ComparedPrompt,
    TokenText,
    compare,
    token_pairs,
)
from megatron_vlm.config.arguments import rank_arguments
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of, rows_of
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row, continue_row
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_json, broadcast_bytes, broadcast_json
from megatron_vlm.distributed.process import UNLIKE, rank_of_process, run_process
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_for, engine_of_flags
from megatron_vlm.engines.sampler import Engine, SamplerError
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.report.terminal import show_report
from megatron_vlm.run.evaluation.held_out_sets import question_of
from megatron_vlm.training.worker import MegatronWorker

T = TypeVar("T")
_BEAT_S = 5.0  # seconds between two heartbeats while the engine starts, which has its own timeout
_SHARE = 0.4  # share of a GPU's memory for an engine that is on the trainer's GPU


# A prompt and the answer to it, which is None if the ids differed.
AnsweredPrompt = tuple[ComparedPrompt, Completion | None]


@dataclass
class Asking:
    """The prompts and the engine. The steps are, in this order: open, start, update, ask, close."""

    worker: MegatronWorker
    cfg: Config
    settings: AgreeSettings
    dtype: str  # float32 or bfloat16, for engine and trainer
    prompts: list[tuple[str, Row]] = field(default_factory=list)
    answered: list[AnsweredPrompt] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    engine: Engine | None = None

    def open(self) -> None:
        """Choose prompts that are spread over the data."""
        cfg, key = self.cfg, "data.eval" if self.cfg.data.eval else "data.train"
        sizes = self.worker.source.sizes
        data = open_data(prompts_of(cfg), key, cfg.data, cfg.model.path, sizes, train=False)
        assert isinstance(data, DataSet)
        count = sum(map(len, data.indexes))
        places = np.linspace(0, count - 1, min(self.settings.samples, count)).round().astype(int)
        for handle in map(data.handle, places.tolist()):
            self.prompts.append((data.where(handle), question_of(data, handle).prompt))
        self.stop_ids = data.readers[0].encoder.renderer.end_ids

    def start(self) -> None:
        """Start the engine with room for prompts of these sizes."""
        rows = [row for _, row in self.prompts]
        is_cuda = self.worker.platform.is_cuda
        devices = self.settings.devices
        engine = engine_of_flags(
            self.cfg.engine, self.settings.engine, () if devices is None else (devices,)
        )
        settings = EngineSettings.from_config(
            engine,
            str(self.worker.source.path),
            dtype=self.dtype,
            max_len=max(len(row.ids_S) for row in rows) + self.settings.max_tokens,
            pictures=max(1, *(_count(row.image_grid_I3) for row in rows)),
            videos=max(_count(row.video_grid_I3) for row in rows),
            has_media=any(row.has_media for row in rows),
            is_inspected=True,
            reserves_media=is_cuda,
            memory_share=_SHARE if is_cuda and devices is None else None,
        )
        try:
            self.engine = self.runner.run(self._run_with_heartbeat(engine_for(engine, settings)))
        except ConfigError as error:
            if error.key != "engine.name" or not settings.has_media:
                raise
            remedy = "compare on GPUs, or give prompts of text alone"
            raise ConfigError(**error.fields() | {"key": "--engine", "remedy": remedy}) from None

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give the trainer's weights to the engine."""
        assert self.engine is not None
        self.runner.run(self.engine.update(named, 1))

    def ask(self) -> None:
        """Request the answers to all prompts at the same time."""
        self.answered = self.runner.run(self._ask_all())

    async def _ask_all(self) -> list[AnsweredPrompt]:
        tables = PixelTables(str(self.worker.source.path), torch.device("cpu"))
        requests = (
            self._ask_one(seed, where, row, tables)
            for seed, (where, row) in enumerate(self.prompts)
        )
        return list(await asyncio.gather(*requests))

    async def _ask_one(
        self, seed: int, where: str, row: Row, tables: PixelTables
    ) -> AnsweredPrompt:
        assert self.engine is not None
        settings, stop_ids = self.settings, self.stop_ids
        sampling = SamplingSettings(settings.max_tokens, settings.temperature, stop_ids=stop_ids)
        try:
            view = await self.engine.inspect(row)
            assert view is not None, "an engine of one process that was started for it"
            prompt = compare(where, row, view, tables)
            answers = await self.engine.sample(row, sampling, [seed]) if prompt.ids else [None]
        except DataError as error:
            raise DataError(**error.within(where).fields()) from error
        self.worker.watchdog.busy()
        return prompt, answers[0]

    async def _run_with_heartbeat(self, work: Coroutine[Any, Any, T]) -> T:
        async def beat() -> None:
            while True:
                self.worker.watchdog.busy()
                await asyncio.sleep(_BEAT_S)

        beating = asyncio.create_task(beat())
        try:
            return await work
        finally:
            beating.cancel()

    def close(self) -> None:
        """Shut the engine down."""
        if self.engine is not None:
            self.runner.run(self.engine.close())
        self.runner.close()


def _count(grid_I3: Tensor | None) -> int:
    return 0 if grid_I3 is None else len(grid_I3)


def run_agree(arguments: Sequence[str]) -> int:
    """Compare engine and trainer on one rank; return UNLIKE if they differ."""
    args, file = rank_arguments(arguments, agree_settings.add_agree_arguments)
    settings = agree_settings.AgreeSettings.from_arguments(args)
    cfg, checkpoint = agree_settings.locate_checkpoint(args.where, args.overrides, file)
    with Watchdog.watch_rank(rank_of_process(), cfg.launch.timeout_minutes) as watchdog:
        worker = MegatronWorker(cfg, training=False, watchdog=watchdog)
        if checkpoint is not None:
            watchdog.begin_phase(0, "loading the checkpoint", files=True)
            load(worker, checkpoint)
        agreement = compare_all(worker, cfg, settings, streams=checkpoint is not None)
        if agreement is not None:
            words = TokenText.from_folder(str(worker.source.path))
            show_report(agreement_report(agreement, words), settings.html)
        agrees = agreement is not None and not agreement.faults
        return 0 if broadcast_json(agrees, 0) else UNLIKE


def compare_all(
    worker: MegatronWorker, cfg: Config, settings: agree_settings.AgreeSettings, streams: bool
) -> Agreement | None:
    """Return the agreement on rank 0. With `streams`, the engine gets the worker's weights;
    otherwise it keeps the weights of the folder. A collective."""
    asking = None
    if worker.grid.rank == 0:
        dtype = str(compute_dtype(cfg, worker.platform)).removeprefix("torch.")
        asking = Asking(worker, cfg, settings, dtype)
    try:
        _run_on_rank0(worker, "opening the prompts", asking, Asking.open)
        _run_on_rank0(worker, "starting the engine", asking, Asking.start)
        if streams:
            _stream(worker, asking)
        _run_on_rank0(worker, "asking the engine", asking, Asking.ask)
    finally:
        if asking is not None:
            asking.close()
    answered = [] if asking is None else asking.answered
    rows = [continue_row(prompt.prompt, answer.ids) for prompt, answer in answered if answer]
    scores = iter(_scores(worker, rows))
    if asking is None:
        return None
    dims = worker.dims
    experts = f" x EP{dims.ep}" if dims.ep > 1 else ""
    return Agreement(
        cfg.model.path,
        f"TP{dims.tp} x PP{dims.pp} x DP{dims.dp}{experts}",
        asking.dtype,
        settings.temperature,
        settings.bound or BOUNDS[asking.dtype],
        tuple(
            prompt
            if answer is None
            else replace(
                prompt,
                tokens=token_pairs(answer.ids, answer.log_probs, next(scores)),
                accepted=answer.accepted,
            )
            for prompt, answer in answered
        ),
    )


def _run_on_rank0(
    worker: MegatronWorker, name: str, asking: Asking | None, action: Callable[[Asking], None]
) -> None:
    """Run an action of rank 0 while the other ranks wait. All ranks raise its error."""
    worker.watchdog.begin_phase(0, name, files=True)
    with fail_together(SamplerError):
        if asking is not None:
            action(asking)


def _stream(worker: MegatronWorker, asking: Asking | None) -> None:
    worker.watchdog.begin_phase(0, "streaming the weights")
    with fail_together(SamplerError):
        if asking is not None:
            asking.update(worker.named_weights())
        else:
            for _ in worker.named_weights():
                pass


def _scores(worker: MegatronWorker, rows: list[Row]) -> list[list[float]]:
    """Return the trainer's log-probs of the supervised tokens of rank 0's rows. A collective."""
    device, dp = worker.platform.device, worker.grid.dp
    worker.watchdog.begin_phase(0, "scoring the answers")
    count = broadcast_json(len(rows), 0)
    if not count:
        return []
    packed = batch_of(rows).to_bytes() if worker.grid.rank == 0 else None
    rows = rows_of(TensorBatch.from_bytes(broadcast_bytes(packed, 0)))
    rows += [rows[0]] * (-count % dp.size)  # every replica scores the same number of rows
    local_rows = rows[dp.rank :: dp.size]
    pairs = zip(worker.forward(local_rows), local_rows, strict=True)
    local_scores = [log_probs_S[row.labels_S != IGNORE].tolist() for log_probs_S, row in pairs]
    scores = all_gather_json(local_scores, dp.group, device)
    return [scores[place % dp.size][place // dp.size] for place in range(count)]


if __name__ == "__main__":
    sys.exit(run_process(run_agree, sys.argv[1:]))
