"""The curves of a run that learns from samples: the rewards, then figures that explain them, then
costs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.io.numbers_as_text import number
from megatron_vlm.report.charts import Chart, chart_figure
from megatron_vlm.report.html import Html, tag
from megatron_vlm.report.run.curves import chart_notes, of_step, step_curves, steps_span
from megatron_vlm.report.run.metrics_arrays import LoggedRun, RunMetrics

_MAX_FIGURES = 12
_MAX_NAME_LENGTH = 60  # characters


@dataclass(frozen=True)
class SampleChart:
    """Chart of figures of RL steps. `keys`: a field of RlLine or StepLine for each curve."""

    title: str
    keys: dict[str, str]  # name of the curve: field
    unit: str = ""
    percent: bool = False
    may_log: bool = False
    above: float = -math.inf  # the chart is left out if no value is above it


_REWARD = SampleChart("Reward", {"reward": "reward"}, "mean over episodes")
_SPREAD = SampleChart("Spread of rewards", {"spread": "reward_std"}, "standard deviation")
_CHARTS = (
    SampleChart("Tokens of an episode", {"mean": "answer_tokens", "longest": "longest_answer"}),
    SampleChart("Answers of an episode", {"answers": "turns"}, "mean", above=1),
    SampleChart("Episodes cut", {"cut": "cut"}, "by a limit of length", percent=True),
    SampleChart("Prompts alike", {"alike": "alike"}, "all got one reward", percent=True),
    SampleChart("KL", {"KL": "kl"}, "to the initial model"),
    SampleChart("Drift", {"drift": "drift"}, "KL from the policy that drew"),
    SampleChart("Entropy", {"entropy": "entropy"}, "of a token"),
    SampleChart("Ratio", {"ratio": "ratio"}, "of probabilities, new to old"),
    SampleChart("Clip fraction", {"clipped": "clip_fraction"}, "of tokens", percent=True),
    SampleChart(
        "Agreement of sampler and trainer",
        {"largest": "apart", "mean": "apart_mean"},
        "difference of log-probs",
        may_log=True,
    ),
    SampleChart("Weights cut", {"cut": "weights_cut"}, "of tokens", percent=True),
    SampleChart("Behind", {"behind": "behind"}, "optimizer steps, weights that drew"),
    SampleChart("Sampling time", {"sampling": "sampling_s", "step": "seconds"}, "seconds"),
)


def sample_curves(runs: Sequence[LoggedRun]) -> Iterator[Html]:
    """Yield the curves of the runs that learn from samples; nothing if there is no such run."""
    if not any(run.metrics.samples for run in runs):
        return
    yield tag("h2", "Samples", id="samples")
    yield from chart_notes()
    span = steps_span(runs)
    reward = step_curves(runs, _REWARD.keys, _of_sample)
    yield chart_figure(Chart(_REWARD.title, reward, _REWARD.unit, height=300), *span)
    names = dict.fromkeys(
        name for run in runs for line in run.metrics.samples for name in line.figures
    )
    small = [_chart(runs, _SPREAD), *(_figure(runs, name) for name in [*names][:_MAX_FIGURES])]
    small += [_chart(runs, plan) for plan in _CHARTS]
    shown = [chart_figure(chart, *span) for chart in small if chart is not None]
    yield tag("div", *shown, class_="charts")
    if len(names) > _MAX_FIGURES:
        text = f"The first {_MAX_FIGURES} of {len(names):,} figures of rewards are shown."
        yield tag("p", text, class_="quiet")


def sample_tiles(metrics: RunMetrics) -> Iterator[tuple[str, str]]:
    """Yield the results of learning: (figure, its meaning)."""
    for name, (reward, first, last) in metrics.rewards().items():
        steps = f"steps {first:,} to {last:,}" if last > first else f"step {last:,}"
        yield number(reward), f"{name} mean reward, {steps}"
    if kl := [(line.step, line.kl) for line in metrics.samples if _is_known(line.kl)]:
        step, value = kl[-1]
        yield number(value or 0.0), f"KL to the initial model, step {step:,}"
    if apart := [
        (line.apart or 0.0, line.step) for line in metrics.samples if _is_known(line.apart)
    ]:
        value, step = max(apart, key=lambda found: found[0])
        what = "largest difference of log-probs, sampler and trainer"
        yield number(value), f"{what}, step {step:,}"


def _chart(runs: Sequence[LoggedRun], plan: SampleChart) -> Chart | None:
    curves = step_curves(runs, plan.keys, _of_sample)
    if not any((curve.y > plan.above).any() for curve in curves):
        return None
    return Chart(plan.title, curves, plan.unit, plan.percent, plan.may_log)


def _figure(runs: Sequence[LoggedRun], name: str) -> Chart:
    curves = step_curves(runs, {"mean": name}, _of_figure)
    short = name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_MAX_NAME_LENGTH]}..."
    return Chart(short, curves, "mean over episodes")


def _of_sample(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    if key in metrics.figures:
        return of_step(metrics, key)
    return _column(metrics, [getattr(line, key) for line in metrics.samples])


def _of_figure(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    return _column(metrics, [line.figures.get(key) for line in metrics.samples])


def _column(metrics: RunMetrics, values: list[float | None]) -> tuple[np.ndarray, np.ndarray]:
    steps_N = np.array([line.step for line in metrics.samples])
    return steps_N, np.array([math.nan if each is None else each for each in values], dtype=float)


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
