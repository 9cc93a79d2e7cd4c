"""lmms-eval as a suite: its own runner in its own environment, and the scores that it writes."""

import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vlm.commands.bench.model_server import BenchSettings, Endpoint, cause_in
from megatron_vlm.distributed.process import CannotStartError, environment_elsewhere, output_of
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.parent import signal_when_parent_dies

_VERSION = "import importlib.metadata as m; print(m.version('lmms_eval'))"
_PATIENCE_S = 300
# Answers that lmms-eval writes in place of a request that failed. It scores them as wrong.
_NO_ANSWER = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED")
_MODEL_ARGS = "timeout=3600,max_retries=3"


@dataclass(frozen=True)
class TaskScore:
    """A score of a task, with its value for each sample where it has one."""

    task: str
    metric: str
    value: float
    standard_error: float | None = None
    samples: Mapping[str, float] = field(default_factory=dict)


def find_lmms_eval(python: str) -> str:
    """Return the version of lmms-eval that this Python has."""
    try:
        version = output_of(python, _VERSION, _PATIENCE_S)
    except CannotStartError as reason:
        raise ConfigError(
            f"cannot be started: {reason}",
            key="--suite-python",
            found=python,
            remedy="give the Python of an environment that has lmms-eval, such as "
            ".venv-lmms/bin/python after `make lmms-env`",
        ) from reason
    if version is None:
        raise ConfigError(
            "has no lmms-eval",
            key="--suite-python",
            found=python,
            remedy="run `make lmms-env` and give .venv-lmms/bin/python, or install lmms-eval there",
        )
    return version


def run_task(
    settings: BenchSettings, task: str, model: str, endpoint: Endpoint, own: Path
) -> list[TaskScore]:
    """Run a task against a server, and return its scores. The model's own folder gets one of the
    task, with the suite's files and its output. Answers are kept in a cache beside it, from which
    an interrupted task goes on."""
    folder, cache = own / task, own / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = f"model_version={model},num_concurrent={settings.concurrent},{_MODEL_ARGS}"
    command = [settings.suite_python, "-m", "lmms_eval", "eval", "--model", "openai"]
    command += ["--model_args", arguments, "--tasks", task, "--output_path", str(folder)]
    command += ["--log_samples", "--use_cache", str(cache), "--verbosity", "INFO"]
    if settings.limit is not None:
        command += ["--limit", str(settings.limit)]
    if settings.include is not None:
        command += ["--include_path", settings.include]
    log = folder / "log.txt"
    address = {"OPENAI_API_BASE": f"{endpoint.url}/v1", "OPENAI_API_KEY": endpoint.key}
    with log.open("wb") as output:
        done = subprocess.run(
            [*command, *settings.suite_args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,  # in which no folder has the name of a task, whose files it would take
            env={**_environment(), **address},
            preexec_fn=lambda: signal_when_parent_dies(signal.SIGTERM),
            check=False,
        )
    if _count_unanswered(folder):
        shutil.rmtree(cache, ignore_errors=True)  # it has these answers, too
    return read_scores(folder, done.returncode)


def read_scores(folder: Path, status: int = 0) -> list[TaskScore]:
    """Return the scores that the suite wrote into a folder."""
    log = folder / "log.txt"
    found = sorted(folder.glob("*/*_results.json"))
    if status or not found:
        ended = f"ended with status {status}" if status else "wrote no results"
        raise DataError(
            f"{ended}: {cause_in(log)}", place=f"lmms-eval, {folder.name}", remedy=f"read {log}"
        )
    if failed := _count_unanswered(folder):
        raise DataError(
            f"has {failed:,} requests without an answer, which it scores as wrong",
            place=f"lmms-eval, {folder.name}",
            remedy=f"read {log}, and start again",
        )
    results = json.loads(found[-1].read_text())["results"]
    return [score for task in results for score in _scores_of(task, results[task], folder)]


def _scores_of(task: str, figures: Mapping[str, Any], folder: Path) -> Iterator[TaskScore]:
    lines = [
        json.loads(line)
        for path in sorted(folder.glob(f"*/*_samples_{task}.jsonl"))
        for line in path.read_text().splitlines()
    ]
    for key, value in figures.items():
        metric, comma, chosen = key.partition(",")
        if not comma or "_stderr" in metric or not _is_number(value):
            continue
        errors = (figures.get(f"{metric}_{name},{chosen}") for name in ("stderr", "stderr_clt"))
        error = next((each for each in errors if each is not None and _is_number(each)), None)
        samples = {
            str(line["doc_id"]): float(line[metric])
            for line in lines
            if _is_number(line.get(metric))
        }
        complete = samples if len(samples) == len(lines) else {}
        yield TaskScore(task, metric, float(value), error, complete)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _count_unanswered(folder: Path) -> int:
    texts = [path.read_text() for path in folder.glob("*/*_samples_*.jsonl")]
    return sum(text.count(f'"{word}') for text in texts for word in _NO_ANSWER)


def _environment() -> dict[str, str]:
    """Return the variables of the suite. Pictures reach the engine as they are."""
    no_proxy = ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY"))))
    env = environment_elsewhere()
    return {**env, "LMMS_IMAGE_ENCODE_FORMAT": "PNG", "NO_PROXY": no_proxy, "no_proxy": no_proxy}
