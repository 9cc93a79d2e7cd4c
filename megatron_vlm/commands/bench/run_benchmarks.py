"""Scores of the base model and the export of a run, task by task."""

import argparse
import datetime
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_vlm.commands.bench.lmms_eval import TaskScore, find_lmms_eval, run_task
from megatron_vlm.commands.bench.model_server import BenchModel, BenchSettings, served_model
from megatron_vlm.commands.chat.command import find_model
from megatron_vlm.config import read_saved
from megatron_vlm.engines.engine_kinds import DEFAULT_ENGINE, engine_kind
from megatron_vlm.engines.vllm import media_fault
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_family
from megatron_vlm.hf.export_mark import add_to_card
from megatron_vlm.io.atomic import blake2b, write_text
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import UntrustedFile, home_path
from megatron_vlm.report.bench_table import (
    BENCH_FILE,
    BenchLine,
    Benchmark,
    bench_cells,
    bench_markdown,
)
from megatron_vlm.report.run import write_report

_DONE = "done.json"  # in the folder of a task that is complete
_NO_MEDIA = ("--limit-mm-per-prompt", '{"image": 0, "video": 0}')


def run_benchmarks(args: argparse.Namespace) -> None:
    """Serve both models, ask the tasks that are missing, and publish the table."""
    settings, suite = _settings(args), args.suite
    run = home_path(args.run_folder).absolute()
    before, after = models_of(run)
    version = engine_kind(DEFAULT_ENGINE).version(settings.engine, "--engine")
    settings = _without_faults(settings, before, after)
    title = f"{suite} {find_lmms_eval(settings.suite_python)}"
    print(f"{title}, {version}: {', '.join(settings.tasks)}", flush=True)
    scores = [run_model(settings, model, run / "bench" / suite) for model in (before, after)]
    benchmark = write_benchmark(run, title, compare_scores(*scores))
    write_report(run)
    add_to_card(after.adapter or Path(after.folder), "Benchmarks", bench_markdown(benchmark))
    for line in benchmark.lines:
        print("  ".join(bench_cells(line)))
    print(f"table: {run / 'bench' / 'scores.json'}, and the page and the model card of the run")


def _settings(args: argparse.Namespace) -> BenchSettings:
    for name in ("tasks", "engine", "suite_python"):
        if not getattr(args, name):
            raise ConfigError("is not set", key=f"--{name.replace('_', '-')}", remedy="give it")
    for name in ("limit", "concurrent"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(key=f"--{name}", found=value, allowed="at least 1")
    tasks = tuple(task.strip() for task in args.tasks.split(","))
    if not all(tasks) or any("/" in task or task.startswith(".") for task in tasks):
        raise ConfigError(key="--tasks", found=args.tasks, allowed="names of tasks, between commas")
    include = None if args.include is None else str(home_path(args.include).absolute())
    if include is not None and not Path(include).is_dir():
        raise ConfigError("is not a folder", key="--include", found=args.include)
    return BenchSettings(
        tasks,
        args.engine,
        _words(args, "engine_args"),
        args.devices,
        str(home_path(args.suite_python).absolute()),
        _words(args, "suite_args"),
        args.limit,
        include,
        args.concurrent,
    )


def _without_faults(
    settings: BenchSettings, before: BenchModel, after: BenchModel
) -> BenchSettings:
    """Refuse an adapter that vLLM would serve otherwise than it was trained. Where it would see
    pictures otherwise, let it refuse them, so that text alone is scored."""
    fault = read_family(before.folder).engine_prompt.fault_of_adapters
    if after.adapter is not None and fault is not None:
        raise ConfigError(
            f"cannot be served as an adapter: {fault}",
            place=str(after.adapter),
            remedy="merge it: megatron-vlm export --as merged",
        )
    if (fault := media_fault(settings.engine, before.folder)) is None:
        return settings
    print(f"requests with pictures are refused: {fault}", flush=True)
    return replace(settings, engine_args=[*_NO_MEDIA, *settings.engine_args])


def _words(args: argparse.Namespace, name: str) -> list[str]:
    """Return the words of an argument, split as a shell does."""
    try:
        return shlex.split(getattr(args, name))
    except ValueError as error:  # a quotation that is not closed
        raise ConfigError(
            f"cannot be split into words: {error}",
            key=f"--{name.replace('_', '-')}",
            found=getattr(args, name),
        ) from error


def models_of(run: Path) -> tuple[BenchModel, BenchModel]:
    """Return the base model of a run, and its export."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            "is not the folder of a run: it has no config.yaml",
            place=str(run),
            remedy="give what training got as run=",
        )
    folder, adapter = find_model(str(run))
    base = folder_of(read_saved(run).model.path)
    rank = 0 if adapter is None else rank_of(adapter)
    return BenchModel("before", str(base)), BenchModel("after", folder, adapter, rank)


def rank_of(adapter: Path) -> int:
    """Return the largest rank of an adapter."""
    config = UntrustedFile(str(adapter / "adapter_config.json"), ConfigError).json()
    patterns = config.get("rank_pattern")
    ranks = [config["r"], *(patterns.object().values() if patterns else ())]
    return max(rank.whole(1) for rank in ranks)


def run_model(settings: BenchSettings, model: BenchModel, folder: Path) -> list[TaskScore]:
    """Return the scores of all tasks for a model. It is served if one of them is missing."""
    own = folder / f"{model.name}-{_identity(model, settings)}"
    missing = [task for task in settings.tasks if not (own / task / _DONE).is_file()]
    if missing:
        own.mkdir(parents=True, exist_ok=True)
        with served_model(settings, model, own / "engine.log") as endpoint:
            for task in missing:
                print(f"{model.name}: {task}", flush=True)
                scores = run_task(settings, task, model.name, endpoint, own)
                done = json.dumps([asdict(score) for score in scores], indent=1)
                write_text(own / task / _DONE, done)
    done_files = [own / task / _DONE for task in settings.tasks]
    scores = [TaskScore(**each) for file in done_files for each in json.loads(file.read_text())]
    for score in scores:
        error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
        line = f"{score.task} {score.metric} {score.value:.4f}{error}"
        print(f"{model.name}: {line}", flush=True)
    return scores


def _identity(model: BenchModel, settings: BenchSettings) -> str:
    """Return a short name of what decides the scores: the files of the model, and the settings."""
    hasher = blake2b()
    for path in model.files:
        facts = path.stat()
        hasher.update(f"{path}\n{facts.st_size}\n{facts.st_mtime_ns}\n".encode())
    hasher.update(repr((settings.limit, settings.include, settings.suite_args)).encode())
    hasher.update(repr(settings.engine_args).encode())
    return hasher.hexdigest()[:12]


def compare_scores(before: Sequence[TaskScore], after: Sequence[TaskScore]) -> list[BenchLine]:
    """Return a line for each score that both models have."""
    old = {(score.task, score.metric): score for score in before}
    return [
        _line(old[score.task, score.metric], score)
        for score in after
        if (score.task, score.metric) in old
    ]


def _line(before: TaskScore, after: TaskScore) -> BenchLine:
    """Compare two scores. Where both have a value for each sample, the standard error is that of
    the differences; otherwise it takes the two as independent."""
    names = before.samples.keys()
    error = None
    is_paired = len(names) > 1 and names == after.samples.keys()
    if is_paired:
        changes = [after.samples[name] - before.samples[name] for name in names]
        error = statistics.stdev(changes) / math.sqrt(len(changes))
    elif before.standard_error is not None and after.standard_error is not None:
        error = math.hypot(before.standard_error, after.standard_error)
    return BenchLine(
        before.task, before.metric, before.value, after.value, error, len(names) or None, is_paired
    )


def write_benchmark(folder: Path, suite: str, lines: Sequence[BenchLine]) -> Benchmark:
    """Write bench/scores.json in a folder, in place of a former one."""
    path = folder / BENCH_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now().isoformat(" ", "minutes")
    benchmark = Benchmark(suite, now, tuple(lines))
    write_text(path, json.dumps(asdict(benchmark), indent=1) + "\n")
    return benchmark
