"""Correctness on this GPU: the command line, the demo, learning, features, generation, syncs."""

import importlib
import json
import multiprocessing
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from gpu.parity import leave
from gpu.step import Figures

from megatron_vlm import MegatronWorker
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.training.generate import generate
from tests.gpu.test_parity_gpu import TOLERANCE
from tests.support.batches import MIXED, make_rows
from tests.support.reference import load_reference, row_log_probs
from tests.support.runs import Case, train
from tests.training.test_decode import NEW_TOKENS, continue_rows

# scripts/ has no packages, so a type checker would see its modules under two names.
DEMO, RL = (importlib.import_module(f"scripts.{name}") for name in ("demo", "rl.examples"))
STEPS, HALF = 4, 2
# The number of kernels of a backward pass that add in any order decides whether a run repeats to
# the last digit.
RESUME_BOUND = 1e-3
# Losses of three steps on the GPU and on the CPU, both in fp32. The worst on an H100: Muon, 3.1e-6.
FEATURE_BOUND = 3e-5
FP32 = {"precision": "fp32"}
HYBRID = {"family": "qwen3_5", "head_dim": 64}
IN_BLOCKS = {"head_dim": 32, "intermediate": 128}  # sizes that 4-bit blocks of 64 values divide
ADAPTERS = {"rank": 4, "targets": ("attention", "mlp")}
FEATURES: dict[str, tuple[Case, dict[str, Any]]] = {
    "activations in host memory": (Case(model={"offload_activations": 1.0}), {}),
    "optimizer in host memory": (Case(optim={"offload": 1.0}), {}),
    "moments in bf16": (Case(optim={"states": "bf16"}), {}),
    "moments in int8": (Case(optim={"states": "int8"}), {}),
    "Muon": (Case(optim={"name": "muon"}), {}),
    "LoRA": (Case(lora=ADAPTERS), {}),
    "LoRA beside int8": (Case(lora={**ADAPTERS, "base": "int8"}), IN_BLOCKS),
    "LoRA beside NF4": (Case(lora={**ADAPTERS, "base": "nf4"}), IN_BLOCKS),
    "LoRA, Qwen3.5": (Case(lora=ADAPTERS), HYBRID),
}


def _cli(*arguments: str) -> None:
    """Run a command as a user would."""
    subprocess.run([sys.executable, "-m", "megatron_vlm.cli", *arguments], check=True)


def _side_by_side(*commands: Sequence[str]) -> None:
    """Run commands at the same time."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda words: _cli(*words), commands))


def _lines(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def command_line(figures: Figures) -> None:
    """Make a model and data, train, resume a run that stopped half-way, export. The processes are
    started, joined and ended as in a user's run."""
    home = figures.scratch / "runs"
    _side_by_side(
        ("demo", "tiny", "--out", f"{home}/tiny", "--head-dim", "32"),
        ("demo", "shapes", "--out", f"{home}/shapes", "--train", "64", "--eval", "8"),
    )
    common = [
        "model=tiny_cpu",
        f"platform={figures.platform}",
        f"model.path={home}/tiny",
        f"data.train={home}/shapes/train.jsonl",
        "optim.schedule=constant",
        "optim.lr=1e-3",
        "train.micro_batch_size=2",
        f"checkpoint.every={HALF}",
        "log.report=false",
    ]
    halves = [*common, f"run={home}/halves", "checkpoint.export=false"]
    _side_by_side(
        ("train", *common, f"run={home}/whole", f"train.steps={STEPS}"),
        ("train", *halves, f"train.steps={HALF}"),
    )
    _cli("train", *halves, f"train.steps={STEPS}")
    whole, resumed = _lines(home / "whole", "step"), _lines(home / "halves", "step")
    assert [step["step"] for step in whole] == [step["step"] for step in resumed]
    pairs = [(a["loss"], b["loss"]) for a, b in zip(whole, resumed, strict=True)]
    figures.say("losses", [a for a, _ in pairs])
    figures.say("resume_equal_to_the_digit", all(a == b for a, b in pairs))
    figures.check("resume", max(abs(a - b) / abs(a) for a, b in pairs), RESUME_BOUND)
    figures.say("seconds_of_the_first_step", whole[0]["seconds"])
    figures.say("seconds_of_the_last_step", whole[-1]["seconds"])
    generation(figures, home / "whole" / "export")


def demo(figures: Figures) -> None:
    """Train the model of `make demo` on this device in bf16, and ask it about held-out pictures."""
    home = figures.scratch / "demo"
    _cli("demo", "tiny", "--out", f"{home}/base", *f"{DEMO.TINY['qwen3_vl']} {DEMO.COMMON}".split())
    _cli("demo", "shapes", "--out", f"{home}/shapes", *DEMO.SHAPES["qwen3_vl"].split())
    data = [f"data.train=[{home}/shapes/easy.jsonl,{home}/shapes/train.jsonl]"]
    data += [f"data.eval={home}/shapes/eval.jsonl", "data=shapes"]
    device = [f"platform={figures.platform}", "train.precision=auto"]
    limit = ["train.steps=4", "eval.every=4", "optim.warmup_steps=0"] if figures.dry else []
    model = ["model=tiny_cpu", f"model.path={home}/base"]
    _cli("train", *model, *data, "train=demo", *device, *limit, f"run={home}/run")
    scores = _lines(home / "run", "eval")[-1]
    figures.say("loss_of_held_out_answers", scores["loss"])
    figures.check("wrong_answers", 1 - scores["exact_match"], 1 if figures.dry else 1 - DEMO.WANTED)


def reinforcement(figures: Figures) -> None:
    """Learn from samples of the own decoder on this device in bf16, as `make reinforce` does."""
    out = figures.scratch / "rl"
    write_tiny(out / "base", RL.TINY)
    task = [*RL.RL, *RL.make_colours(out)]
    device = [f"platform={figures.platform}", "train.precision=auto"]
    steps = 2 if figures.dry else RL.STEPS["own"]
    more = [*device, f"train.steps={steps}", f"run={out}/run"]
    RL.megatron_vlm("rl", *task, *more)
    rewards = [line["reward"] for line in _lines(out / "run", "rl")]
    figures.say("mean_reward_at_first", fmean(rewards[:3]))
    lacking = 1 if figures.dry else 1 - RL.WANTED["own"]
    figures.check("lacking_reward", 1 - fmean(rewards[-RL.LAST :]), lacking)


def features(figures: Figures) -> None:
    """Compare the losses of three steps with those on the CPU, feature by feature. The CPU has a
    process of its own, since a process computes on one platform."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as on_cpu:
        expected = [
            on_cpu.submit(_losses, name, "cpu", figures.scratch / "cpu") for name in FEATURES
        ]
        for name, future in zip(FEATURES, expected, strict=True):
            losses = _losses(name, figures.platform, figures.scratch / "features")
            pairs = zip(losses, future.result(), strict=True)
            figures.check(name, max(abs(a - b) / abs(b) for a, b in pairs), FEATURE_BOUND)


def _losses(name: str, platform: str, folder: Path) -> list[float]:
    """Return the losses of three steps with a feature, in fp32."""
    case, sizes = FEATURES[name]
    path = str(folder / name)
    write_tiny(path, TinySpec(**sizes))
    optim = {"lr": 1e-3, **case.optim}
    changed = replace(case, platform=platform, train=FP32, optim=optim)
    losses, *_ = train(path, changed, [make_rows(MIXED)] * 3)
    leave()
    return losses


def generation(figures: Figures, export: Path) -> None:
    """Load an exported checkpoint in both. The greedy tokens in fp32 and the log-probs must be
    equal."""
    path = str(export)
    rows = make_rows(MIXED)
    case = Case(platform=figures.platform, train={"precision": "fp32"})
    worker = MegatronWorker(case.config(path), training=False)
    tokens = generate(worker.stage, rows, NEW_TOKENS, ())
    scored = worker.forward(rows)
    leave()
    hf_tokens = continue_rows(path, rows)  # no two best tokens were close
    wrong = sum(a != b for a, b in zip(tokens, hf_tokens, strict=True))
    figures.check("answers_that_differ", wrong, 0)
    model = load_reference(path)
    with torch.no_grad():
        expected = [row_log_probs(model, row) for row in rows]
    worst = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(scored, expected, strict=True)
    )
    figures.check("log_probs", worst, TOLERANCE["torch", "fp32"])


def syncs(figures: Figures) -> None:
    """Count how often the host waits for the device in each additional micro-batch. The emulator of
    tests/device counts the same without a device."""
    path = str(figures.scratch / "syncs")
    write_tiny(path, TinySpec(head_dim=32))
    case = Case(platform=figures.platform, train={"micro_batch_size": 2})
    worker = MegatronWorker(case.config(path))
    rows = make_rows(MIXED)
    for _ in range(2):  # the first steps load kernels
        worker.forward_backward(rows)
        worker.optim_step()
    few, many = (_waits(worker, batch) for batch in (rows, rows * 2))
    added = many - few
    count = sum(added.values()) / (len(rows) / 2)
    figures.say("where", dict(added.most_common(20)))
    figures.say("of_a_step_besides", sum(few.values()) - sum(added.values()))
    figures.check("of_a_micro_batch", count, 3)
    leave()


def _waits(worker: MegatronWorker, rows: list[Any]) -> "Counter[str]":
    """Count the places of the program that waited during a step."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.forward_backward(rows)
        worker.optim_step()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
