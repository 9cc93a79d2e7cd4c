# .venv/bin/python -m pytest tests/run/test_train_parts.py
"""Learning rates over a run, parts with rates of their own, and steps that must not be applied."""

import json
import math
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from megatron_vlm.checkpoint.rank_state import get_step
from megatron_vlm.config.schema import Config, LogConfig, OptimConfig, TrainConfig
from megatron_vlm.data.batches.loader import BatchFigures
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.distributed.agreement import Vote, all_reduce_max
from megatron_vlm.distributed.watchdog import RankStatus, describe, find_stuck
from megatron_vlm.errors import ConfigError, TrainError
from megatron_vlm.report.metrics_lines import RlLine, StepLine
from megatron_vlm.run.log import RunLog, duration, progress_line, step_figures
from megatron_vlm.run.throughput import NonFiniteGuard
from megatron_vlm.training.lr_schedule import (
    describe_run_length,
    epochs_in,
    lr_at,
    total_steps,
    warmup_of,
)
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.limits import files_of_at_most
from tests.support.runs import call

RATES = {
    "constant": [1.0] * 8,
    "linear": [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    "cosine": [1.0, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381],
    "wsd": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5],
}


@pytest.mark.parametrize("schedule", RATES)
def test_schedules_by_hand(schedule):
    optim = OptimConfig(lr=1.0, schedule=schedule, decay_ratio=0.25)
    assert [lr_at(optim, step, 8) for step in range(8)] == pytest.approx(RATES[schedule], abs=1e-4)


def test_warm_up_and_floor():
    optim = OptimConfig(lr=2.0, schedule="linear", warmup_steps=3, min_lr_ratio=0.1)
    rates = [lr_at(optim, step, 7) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.55, 1.1, 0.65, 0.2])
    assert lr_at(optim, 99, 7) == pytest.approx(0.2)  # a run that was made longer stays there


def test_warm_up_as_a_ratio():
    """Rounded up, below the number of steps; a number of steps comes before it."""
    ratio = OptimConfig(lr=2.0, schedule="linear", warmup_ratio=0.3, min_lr_ratio=0.1)
    steps = replace(ratio, warmup_steps=3, warmup_ratio=None)
    for step in range(8):
        assert lr_at(ratio, step, 8) == lr_at(steps, step, 8)
        assert lr_at(replace(steps, warmup_ratio=0.9), step, 8) == lr_at(steps, step, 8)
    few = replace(ratio, warmup_ratio=0.03)
    assert [warmup_of(few, total) for total in (1, 2, 4, 100, 101)] == [0, 1, 1, 3, 4]


@pytest.mark.parametrize(
    ("epochs", "samples", "batch_size", "steps", "prompt_steps"),
    [
        (2.0, 10, 8, 4, 3),  # batches of 8, 2, 8 and 2; prompts of 8, 8 and 4
        (3.0, 6, 8, 3, 3),  # each epoch is one short batch
        (3.0, 100, 8, 39, 38),
        (2.0, 16, 8, 4, 4),
        (0.5, 23, 8, 2, 2),
        (1.5, 10, 8, 3, 2),
        (1.1, 10, 1, 11, 11),  # 1.1 x 10 is above 11 as floats
        (0.01, 10, 8, 1, 1),
    ],
)
def test_epochs_end_with_a_short_batch(epochs, samples, batch_size, steps, prompt_steps):
    """Batches of prompts cross epochs instead."""
    train = TrainConfig(global_batch_size=batch_size, epochs=epochs)
    assert total_steps(train, samples) == steps
    assert total_steps(train, samples, prompts_only=True) == prompt_steps
    if epochs == int(epochs):
        assert epochs_in(steps, samples, batch_size, prompts_only=False) == epochs
    assert epochs_in(prompt_steps, samples, batch_size, True) == prompt_steps * batch_size / samples


def test_a_run_that_would_end_within_its_warm_up_is_refused():
    """By its real number of steps, from epochs, too."""

    def describe(cfg: Config, samples: int | None) -> str:
        return describe_run_length(cfg, samples, total_steps(cfg.train, samples))

    cfg = Config(train=TrainConfig(global_batch_size=64, epochs=2))
    cfg = replace(cfg, optim=OptimConfig(warmup_steps=8))
    steps = "8 steps (200 samples"
    with raises(ConfigError, key="optim.warmup_steps", found=8, problem_has=steps):
        describe(cfg, 200)
    assert describe(cfg, 270) == "270 samples, 10 steps of 64, 8 of them warm-up"
    recipe = replace(cfg, optim=OptimConfig(warmup_ratio=0.03))
    assert describe(recipe, 200) == "200 samples, 8 steps of 64, 1 of them warm-up"
    streamed = replace(recipe, train=replace(cfg.train, steps=1000))
    assert describe(streamed, None) == "a stream, 1,000 steps of 64, 30 of them warm-up"
    once = Config(train=TrainConfig(global_batch_size=2, steps=1))
    assert describe(once, 9) == "9 samples, 1 step of 2, 0 of them warm-up"


def _groups(worker: MegatronWorker) -> dict[str, tuple[float, float]]:
    worker.forward_backward(make_rows(MIXED))
    worker.optim_step(5e-4)
    return {
        f"{group['lr']:.6f} {group['weight_decay']:.3f}": sum(p.numel() for p in group["params"])
        for group in worker.optimizer.param_groups
        if group["params"]
    }


def test_parts_have_rates_of_their_own(pool, tiny):
    """At half the configured rate every part has half of its own."""
    own = {"lr": 1e-3, "vision_lr": 1e-4, "merger_lr": 4e-3, "weight_decay": 0.1}
    (groups,) = pool.run(call, 1, tiny(), replace(layout(), optim=own), _groups)
    assert set(groups) == {
        "0.000500 0.100",  # language
        "0.000500 0.000",  # its norms
        "0.000050 0.100",  # vision
        "0.000050 0.000",
        "0.002000 0.100",  # mergers
        "0.002000 0.000",
    }


def _poisoned(worker: MegatronWorker) -> tuple[bool, float, float]:
    before = [param.detach().clone() for param in worker.chunks[0].parameters()]
    worker.forward_backward(make_rows(MIXED))
    next(worker.chunks[0].parameters()).main_grad.view(-1)[0] = math.nan
    norm, _ = worker.optim_step()
    moved = not all(map(torch.equal, before, worker.chunks[0].parameters()))
    worker.forward_backward(make_rows(MIXED))
    return moved, norm, worker.optim_step()[0]


@pytest.mark.parametrize("name", ["1x1x1", "dp2"])
def test_a_nan_gradient_is_not_applied(name, pool, tiny):
    case = layout() if name == "1x1x1" else layout(dp=2)
    for moved, norm, after in pool.run(call, case.world, tiny(), case, _poisoned):
        assert not moved and math.isnan(norm) and math.isfinite(after)


def _steps_around_an_empty_one(worker: MegatronWorker) -> tuple[list, list, tuple]:
    """The weights after a step and after one without a trained token, and what the latter said."""
    worker.forward_backward(make_rows(MIXED))
    worker.optim_step()
    before = [param.detach().clone() for param in worker.held.values()]
    rows = make_rows(MIXED)
    untrained = [replace(row, labels_S=torch.full_like(row.labels_S, IGNORE)) for row in rows]
    metrics = worker.forward_backward(untrained)
    said = (metrics.loss, metrics.num_tokens, *worker.optim_step(lr=0.25))
    after = [param.detach().clone() for param in worker.held.values()]
    worker.forward_backward(make_rows(MIXED))
    worker.optim_step(lr=1e-3)
    return before, after, (*said, get_step(worker.optimizer))


@pytest.mark.parametrize("name", ["1x1x1", "pp2", "dp2"])
def test_a_step_of_untrained_tokens_moves_nothing(name, pool, tiny):
    """Momentum and weight decay would, with gradients of zero, and count a step."""
    case = {"1x1x1": layout(), "pp2": layout(pp=2), "dp2": layout(dp=2)}[name]
    case = replace(case, optim={"lr": 1e-3, "weight_decay": 0.1})
    for before, after, said in pool.run(call, case.world, tiny(), case, _steps_around_an_empty_one):
        assert len(before) and all(map(torch.equal, before, after))
        assert said == (0.0, 0, 0.0, 0.25, 2)


def test_the_guard_counts_and_stops():
    guard = NonFiniteGuard(Config(train=TrainConfig(max_nonfinite=2)))
    fine, wrong, empty = (StepMetrics(1.0, 5), StepMetrics(math.nan, 5), StepMetrics(0.0, 0))
    assert guard.check(0, fine, 1.0) is None
    assert "(1 so far)" in guard.check(1, wrong, 1.0)
    assert guard.check(2, fine, 1.0) is None
    assert "(2 so far)" in guard.check(3, fine, math.inf)
    said = "step 4: no token of its batch is trained: not applied (1 so far)"
    assert guard.check(4, empty, 0.0) == said
    assert "(3 so far)" in guard.check(5, fine, math.inf)
    with raises(TrainError, place="step 6", remedy_has="optim.lr") as caught:
        guard.check(6, wrong, 1.0)
    assert "loss nan" in caught.value.problem and "3 in a row" in caught.value.problem
    with raises(TrainError, place="step 0"):
        NonFiniteGuard(Config(train=TrainConfig(on_nonfinite="stop"))).check(0, wrong, 1.0)


def sign(rank, phases, phase="data", age=0.0, still=0.0, alive=0):
    return RankStatus(rank, (phases, alive), 7, phase, age, still)


def test_the_watchdog_blames_the_right_rank():
    assert find_stuck([sign(0, 5), sign(1, 5)], 60) is None
    silent = [sign(0, 5, still=70), sign(1, 5, age=65), sign(2, 4, still=90)]
    assert find_stuck(silent, 60).rank == 1
    waiting = [sign(0, 9, still=70), sign(1, 8, "data", still=71), sign(2, 9, still=70)]
    assert find_stuck(waiting, 60).rank == 1
    assert find_stuck([sign(0, 9, still=70), sign(1, 8, still=3)], 60) is None  # it still moves
    text = describe(find_stuck(waiting, 60), 60)
    assert "rank 1 has been stuck for 71 s" in text and "at step 7: data" in text
    scoring = [sign(0, 5, still=70, alive=8), sign(1, 5, still=70, alive=7)]
    assert find_stuck(scoring, 60).rank == 1
    scoring[1] = sign(1, 6, still=70)  # its next phase has only begun
    assert find_stuck(scoring, 60).rank == 0


def _agreed(worker: MegatronWorker) -> int:
    rank = torch.distributed.get_rank()
    return all_reduce_max(Vote.STOP if rank == 1 else Vote.OK)


def test_one_rank_stops_all(pool, tiny):
    assert pool.run(call, 2, tiny(), layout(dp=2), _agreed) == [Vote.STOP, Vote.STOP]


def figures(step, **more):
    fixed = dict(epoch=0, loss=2.0, lr=1e-3, grad_norm=1.0, seconds=0.5, tokens_per_s=1000.0)
    fixed |= dict(trained_tokens_per_s=100.0, images_per_s=4.0, padding=0.02, mfu=None)
    return StepLine(step=step, memory_gb=1.5, **{**fixed, **more})


def test_a_line_for_people():
    line = "  ".join(step_figures([figures(0, loss=3.0, mfu=0.2), figures(1, loss=1.0, mfu=0.4)]))
    assert line.startswith("loss 2.0000  lr 1.00e-03  norm 1  1,000 tok/s  (100 trained)")
    assert "pad 2.0%  MFU 30.0%" in line and line.endswith("1.5 GB")
    assert duration(4000) == "1:06:40"


@pytest.mark.parametrize("width", [12, 20, 40, 60, 80, 100, 120, 200])
def test_the_line_of_progress_fits_the_terminal(width):
    """Step and time are the last to go, and a bar is never cut."""
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    window = [figures(466, tokens_per_s=18200.0, trained_tokens_per_s=1900.0, mfu=0.3)]
    console.print(progress_line(width, 467, 3000, duration(40000), step_figures(window)))
    (line,) = console.file.getvalue().splitlines()
    assert len(line) <= width
    has_bar = "\u2501" in line or "-" * 3 in line
    expected = {12: "step 467/300", 20: "step 467/3000  11:06"}.get(width)
    if expected is not None:
        assert line == expected
        return
    assert "step 467/3000  11:06:40 left" in line
    assert has_bar == (width >= 100)
    assert ("norm 1  18,200 tok/s" in line) == (width >= 80)
    assert line.endswith("1.5 GB") == (width == 200)


def test_metrics_are_whole_lines_after_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 0}\n{"kind": "st')
    log = RunLog(Config(run=str(tmp_path), log=LogConfig(every=10)), True, 20)
    log.step(figures(1, loss=math.nan))
    log.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"kind": "st'
    assert json.loads(lines[2])["loss"] is None and json.loads(lines[2])["step"] == 1


def test_a_step_of_rl_shows_its_reward_in_place_of_the_loss(tmp_path):
    for teacher in ({}, {"reward": None, "teacher_kl": 0.25}):
        console = Console(file=StringIO(), width=200)
        log = RunLog(Config(run=str(tmp_path), log=LogConfig(every=1)), True, 20, console=console)
        fixed = dict(step=1, reward=0.75, reward_std=0.0, prompts=1, asked=1, alike=0.0, figures={})
        fixed |= dict(answer_tokens=6.5, longest_answer=9, cut=0.0, turns=1.0, sampling_s=0.2)
        log.samples(RlLine(**fixed | teacher))
        log.step(figures(1, loss=0.0))
        log.close()
        shown = "teacher_kl 0.25" if teacher else "reward 0.75"
        expected = f"step 1/20  {shown}  6.5 tokens  0.2 s of sampling  lr 1.00e-03  norm 1  "
        assert console.file.getvalue().startswith(expected)


def test_only_one_rank_speaks(tmp_path, capsys):
    log = RunLog(Config(run=str(tmp_path / "none")), False, 20)
    log.step(figures(0))
    log.event(0, "x")
    log.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "none").exists()


def test_figures_of_a_batch():
    from megatron_vlm.data.batches.balance import RowSize

    sizes = [RowSize(10, 1.0, images=2), RowSize(6, 2.0), RowSize(4, 3.0, images=1)]
    batch = BatchFigures.from_plan(sizes, [[[0, 1]], [[2]]])
    assert batch == BatchFigures(samples=3, tokens=20, padded=24, images=3, work=6.0)


def test_metrics_that_cannot_be_written_are_a_sentence(tmp_path):
    """A folder in their place, and a disk that is full after 400 bytes."""
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    place, remedy = str(tmp_path / "folder" / "metrics.jsonl"), "run=FOLDER"
    with raises(TrainError, place=place, problem_has="Is a dir", remedy_has=remedy):
        RunLog(Config(run=str(tmp_path / "folder")), True, 20).event(0, "begun")
    log = RunLog(Config(run=str(tmp_path), log=LogConfig(every=10)), True, 20)
    log.step(figures(0))
    place = str(tmp_path / "metrics.jsonl")
    failed = raises(TrainError, place=place, problem_has="File too", remedy_has=remedy)
    with files_of_at_most(400), failed:
        log.step(figures(1))
    log.close()
    log = RunLog(Config(run=str(tmp_path), log=LogConfig(every=10)), True, 20)
    log.step(figures(1))
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(lines[place])["step"] for place in (0, 2)] == [0, 1] and len(lines) == 3
