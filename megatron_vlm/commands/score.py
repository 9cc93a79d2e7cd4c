"""`megatron-vlm score WHERE KEY=VALUE ... --out DIR`: log-probs of a data set by any model, and the
targets of its students."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vlm.commands.eval import add_where, held_in_place, locate
from megatron_vlm.config import ConfigFile
from megatron_vlm.config.arguments import rank_arguments, read_configuration
from megatron_vlm.config.checks import require
from megatron_vlm.config.objectives import spec_of
from megatron_vlm.config.schema import Config, TeacherConfig
from megatron_vlm.data.worker_processes import start_server
from megatron_vlm.distributed import process
from megatron_vlm.distributed.dims import loads_data
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.untrusted import home_path
from megatron_vlm.run.run_folder import with_commit
from megatron_vlm.training.preflight import check_records, check_run

if TYPE_CHECKING:
    from megatron_vlm.family.spec import ModelSizes
    from megatron_vlm.run.scoring.score_folder import ScoreFolder
    from megatron_vlm.training.worker import MegatronWorker


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and of each of its processes."""
    add_where(parser)
    out = "folder to write; one that is not complete is continued"
    parser.add_argument("--out", metavar="DIR", required=True, help=out)
    likely = (
        "also store the N most likely tokens at each supervised token, for the training of "
        "students (default: 0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help=likely)
    heat = "divide the logits of these tokens by X (default: 1)"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help=heat)
    python = (
        "score in engines, those of vLLM unless engine.name is set: the python of their environment"
    )
    parser.add_argument("--engine", metavar="PYTHON", help=python)
    gpus = (
        "GPUs of an engine, such as 0,1; several times for several engines (default: one engine, "
        "with CUDA_VISIBLE_DEVICES as here)"
    )
    parser.add_argument("--devices", metavar="LIST", action="append", default=[], help=gpus)


def score(args: argparse.Namespace) -> int:
    """write a model's log-probs of a data set, and targets for students

    Score every record of data.train and data.eval: the log-prob of each supervised token and, with
    --top-k, the most likely tokens there, from which a student learns with teacher.path=DIR. Print
    one line of JSON per source, a table, and the records with the highest perplexity.

    example: megatron-vlm score Qwen/Qwen3-VL-32B-Instruct data.train=chats.jsonl --top-k 64
    --out teacher

    With --engine engines score the records, vLLM's by default; otherwise the ranks do, at any
    layout.

    With train.objective=dpo or kto the records are preferences, and every answer is scored. A run
    reads the log-probs of its reference from there with preference.reference=DIR.

    The command continues where an earlier one was stopped. A folder with scores of other data, of
    another model or with other options is refused.
    """
    file, arguments = read_configuration(args)
    _check_options(args)
    with held_in_place(args.where) as where:
        cfg, checkpoint = _locate(where, args, file)
        if args.engine is not None:
            _check_engine(cfg, checkpoint, args)
            check_records(cfg)
            _score_with_engines(cfg, args)
            return 0
        check_run(cfg)
        arguments = [where, *with_commit(arguments, cfg), "--out", args.out]
        arguments += ["--top-k", str(args.top_k), "--temperature", str(args.temperature)]
        from megatron_vlm.distributed.launch.launch import launch

        return launch(cfg, "megatron_vlm.commands.score", run_score, arguments)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that cannot be."""
    if args.top_k < 0:
        raise ConfigError(key="--top-k", found=args.top_k, allowed="0 or above")
    if not 0 < args.temperature < float("inf"):
        raise ConfigError(key="--temperature", found=args.temperature, allowed="more than 0")
    if args.devices and args.engine is None:
        raise ConfigError(
            "has no effect without --engine",
            key="--devices",
            found=args.devices[0],
            remedy="the ranks take their GPUs from launch.processes and CUDA_VISIBLE_DEVICES",
        )


def _check_engine(cfg: Config, checkpoint: Path | None, args: argparse.Namespace) -> None:
    """Refuse what engines cannot score: they take a whole model in a folder of Hugging Face's."""
    whole = "write a folder with megatron-vlm export RUN DIR --as merged, and give that one"
    if args.temperature != 1:
        raise ConfigError(
            ": an engine's log-probs of a prompt are those at temperature 1",
            key="--temperature",
            found=args.temperature,
            remedy="score without --engine",
        )
    if checkpoint is not None:
        problem = "is a run or one of its checkpoints, which engines do not load"
        raise ConfigError(problem, key="WHERE", found=args.where, remedy=whole)
    if cfg.lora.rank:
        raise ConfigError(
            ": the engines get whole weights, without adapters",
            key="lora.rank",
            found=cfg.lora.rank,
            remedy=whole,
        )
    if cfg.data.add_tokens:
        raise ConfigError(
            ": the engines have the model's own vocabulary",
            key="data.add_tokens",
            found=cfg.data.add_tokens,
            remedy=whole,
        )


def _locate(
    where: str, args: argparse.Namespace, file: ConfigFile | None
) -> tuple[Config, Path | None]:
    """Return the configuration, whose data can be scored, and the checkpoint to load. The scores of
    a model do not depend on its teacher or its reference."""
    cfg, checkpoint = locate(where, args.overrides, file, needs="model.path")
    _check_data(cfg)
    objective = "sft" if cfg.train.objective == "distill" else cfg.train.objective
    return (
        replace(
            cfg,
            train=replace(cfg.train, objective=objective),
            teacher=TeacherConfig(),
            preference=replace(cfg.preference, reference="auto"),
        ),
        checkpoint,
    )


def _check_data(cfg: Config) -> None:
    if spec_of(cfg).records in ("query", "rated_pair"):
        raise ConfigError(
            "writes no answers, so there are no log-probs",
            key="train.objective",
            found=cfg.train.objective,
            remedy="give train.objective=sft for chats, or dpo or kto for preferences",
        )
    if not cfg.data.eval:
        require(cfg, "data.train")
    for spec in cfg.data.train:
        if spec.streaming:
            raise ConfigError(
                "is a stream: its records are not known ahead, so that none could be found again",
                key="data.train",
                found=spec.path,
                remedy="download the data, and give its files",
            )


def run_score(arguments: Sequence[str]) -> int:
    """Score on one rank."""
    args, file = rank_arguments(arguments, add_score_arguments)
    _check_options(args)
    cfg, checkpoint = _locate(args.where, args, file)
    with Watchdog.watch_rank(process.rank_of_process(), cfg.launch.timeout_minutes) as watchdog:
        _score(cfg, checkpoint, args, watchdog)
    return 0


def _score(
    cfg: Config, checkpoint: Path | None, args: argparse.Namespace, watchdog: Watchdog
) -> None:
    if cfg.data.num_workers and loads_data(
        cfg.parallel, process.rank_of_process(), process.world_of_process()
    ):
        start_server()  # the server imports at the same time as this process
    from megatron_vlm.checkpoint.save_load import load
    from megatron_vlm.distributed.agreement import fail_together
    from megatron_vlm.run.scoring.score_data import open_scores_together, score_on_ranks
    from megatron_vlm.run.scoring.score_folder import ScoreSettings
    from megatron_vlm.training.worker import MegatronWorker

    worker = MegatronWorker(cfg, training=False, watchdog=watchdog)
    if checkpoint is not None:
        watchdog.begin_phase(0, "loading the checkpoint", files=True)
        load(worker, checkpoint)
    _check_top_k(args, worker.source.sizes)
    settings = ScoreSettings(args.top_k, args.temperature)
    weights = _weights_digest(worker, checkpoint)
    folder = open_scores_together(worker, cfg, home_path(args.out), settings, weights)
    watchdog.begin_phase(0, "scoring")
    if folder.is_writer:
        _report_present(folder)
    together = partial(fail_together, DataError)
    folder.compute(partial(score_on_ranks, worker, cfg, settings), _report_file, together)
    if folder.is_writer:
        _finish(folder)


def _score_with_engines(cfg: Config, args: argparse.Namespace) -> None:
    """Score in engines that this process starts."""
    if cfg.data.num_workers:
        start_server()
    from megatron_vlm.engines.engine_kinds import engine_kind, engine_of_flags
    from megatron_vlm.family import read_sizes
    from megatron_vlm.run.scoring.score_data import open_score_folder, score_with_engines
    from megatron_vlm.run.scoring.score_folder import ScoreSettings

    engine = engine_of_flags(cfg.engine, args.engine, args.devices)
    engine_kind(engine.name).version(args.engine, "--engine")
    _check_top_k(args, read_sizes(cfg.model.path))
    settings = ScoreSettings(args.top_k, args.temperature)
    folder = open_score_folder(cfg, home_path(args.out), settings)
    _report_present(folder)
    score_with_engines(folder, cfg, engine, _report_file)
    _finish(folder)


def _check_top_k(args: argparse.Namespace, sizes: "ModelSizes") -> None:
    if args.top_k > sizes.text.vocab:
        raise ConfigError(key="--top-k", found=args.top_k, allowed=range(sizes.text.vocab + 1))


def _report_present(folder: "ScoreFolder") -> None:
    count = len(folder.index.files)
    if present := count - folder.missing:
        process.print_to_user(f"{folder.path} has {present} of {count} files already")


def _report_file(done: int, missing: int) -> None:
    process.print_to_user(f"wrote file {done} of {missing}")


def _finish(folder: "ScoreFolder") -> None:
    """Print the results, and mark the folder as complete."""
    from megatron_vlm.run.scoring.score_folder import print_tables, summarize

    lines, worst = summarize(folder)
    folder.finish(lines)
    for line in lines:
        print(json.dumps(line, ensure_ascii=False), flush=True)
    print_tables(lines, worst)


def _weights_digest(worker: "MegatronWorker", checkpoint: Path | None) -> str:
    """Return a digest of the weights that compute the scores."""
    from megatron_vlm.checkpoint.manifest import COMPLETE
    from megatron_vlm.io.atomic import digest_of

    digest = worker.base_digest
    if checkpoint is not None:
        digest += f" {digest_of(checkpoint / COMPLETE)}"
    if (adapter := worker.cfg.lora.path) is not None:
        for file in sorted(home_path(adapter).glob("adapter_model.*")):
            digest += f" {digest_of(file)}"
    return digest


if __name__ == "__main__":
    sys.exit(process.run_process(run_score, sys.argv[1:]))
