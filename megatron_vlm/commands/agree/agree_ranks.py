"""The ranks of `megatron-vlm agree`: rank 0 requests answers from the engine, then all ranks score
them."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_vlm.checkpoint.save_load import load
from megatron_vlm.commands.agree import agree_settings
from megatron_vlm.commands.agree.agreement_report import agreement_report
from megatron_vlm.commands.agree.ask_engine import Asking
from megatron_vlm.commands.agree.compare import BOUNDS, Agreement, TokenText, token_pairs
from megatron_vlm.config.arguments import parse_arguments, read_configuration
from megatron_vlm.config.schema import Config
from megatron_vlm.data.tensors.rows import batch_of, rows_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.row import IGNORE, Row, continue_row
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.distributed.collectives import all_gather_json, broadcast_bytes, broadcast_json
from megatron_vlm.distributed.process import UNLIKE, rank_of_process, run_process
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.model.build import compute_dtype
from megatron_vlm.report.show_report import show_report
from megatron_vlm.training.worker import MegatronWorker


def run_agree(arguments: Sequence[str]) -> int:
    """Compare engine and trainer on one rank; return UNLIKE if they differ."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    agree_settings.add_agree_arguments(parser)
    args = parse_arguments(parser, arguments)
    settings = agree_settings.AgreeSettings.from_arguments(args)
    file, _ = read_configuration(args)
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
