"""The charts of a run or of several: rewards of samples, the loss, figures that explain them, costs
and scores."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.io.printable import number
from megatron_vlm.report.charts import Chart, ChartControls, Charts, Curve, RunAxes, StepMarks
from megatron_vlm.report.metrics_lines import EvalLine, RlLine
from megatron_vlm.report.run.metrics_arrays import LoggedRun, RunMetrics, best_of
from megatron_vlm.report.sections import Heading, Note, Section, Table

_MAX_ROWS = 200  # rows of the table of evaluations
_MAX_FIGURES = 12  # figures of rewards
_MAX_NAME_LENGTH = 60  # characters
CURVE_NAMES = {
    "reward": "reward",
    "loss": "loss",
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "ranking": "ranking",
    "anls": "ANLS",
    "relaxed_accuracy": "relaxed accuracy",
    "iou": "IoU",
    "iou_accuracy": "IoU of at least 0.5",
    "needs_picture": "right answers that need the picture",
    "reward_accuracy": "reward accuracy",
    "divergence": "divergence",
    "cross_entropy": "cross-entropy",
}
_NO_SHARES = frozenset({"loss", "reward", "divergence", "cross_entropy"})


@dataclass(frozen=True)
class ChartPlan:
    """Chart of figures of each step. `keys`: a field of StepLine or RlLine for each curve."""

    title: str
    keys: dict[str, str]  # name of the curve: field
    unit: str = ""
    percent: bool = False
    may_log: bool = False
    steady: bool = False  # needs no smoothing
    above: float = -math.inf  # the chart is left out if no value is above it


_LOSS = ChartPlan("Loss", {"training": "loss"})
_REWARD = ChartPlan("Reward", {"reward": "reward"}, "mean over episodes")
_SAMPLE_CHARTS = (
    ChartPlan("Spread of rewards", {"spread": "reward_std"}, "standard deviation"),
    ChartPlan("Tokens of an episode", {"mean": "answer_tokens", "longest": "longest_answer"}),
    ChartPlan("Answers of an episode", {"answers": "turns"}, "mean", above=1),
    ChartPlan("Episodes cut", {"cut": "cut"}, "by a limit of length", percent=True),
    ChartPlan("Prompts alike", {"alike": "alike"}, "all answers had the same reward", percent=True),
    ChartPlan("KL", {"KL": "kl"}, "to the initial model"),
    ChartPlan("KL to the teacher", {"KL": "teacher_kl"}, "of a token"),
    ChartPlan("Tokens taught", {"taught": "taught"}, "by a teacher", percent=True),
    ChartPlan("Seen", {"KL": "seen"}, "to the model without the pictures", may_log=True),
    ChartPlan("Blind answers", {"blind": "blind"}, "no picture changes them", percent=True),
    ChartPlan("Drift", {"drift": "drift"}, "KL from the policy that drew the samples"),
    ChartPlan("Entropy", {"entropy": "entropy"}, "of a token"),
    ChartPlan("Ratio", {"ratio": "ratio"}, "of probabilities, new to old"),
    ChartPlan("Clip fraction", {"clipped": "clip_fraction"}, "of tokens", percent=True),
    ChartPlan(
        "Agreement of sampler and trainer",
        {"largest": "apart", "mean": "apart_mean"},
        "difference of log-probs",
        may_log=True,
    ),
    ChartPlan("Weights cut", {"cut": "weights_cut"}, "of tokens", percent=True),
    ChartPlan("Tokens masked", {"masked": "masked"}, "by their weights", percent=True),
    ChartPlan("Rerouted", {"rerouted": "rerouted"}, "of tokens and layers", percent=True),
    ChartPlan("Drafts accepted", {"accepted": "accepted"}, "tokens of a round", above=0),
    ChartPlan(
        "Rounds with accepted drafts",
        {f"{n + 1} or more": f"accepted_at_{n}" for n in range(4)},
        percent=True,
    ),
    ChartPlan("Behind", {"mean": "behind", "oldest": "behind_max"}, "age of weights in steps"),
    ChartPlan("Sampling time", {"sampling": "sampling_s", "step": "seconds"}, "seconds"),
)
_STEP_CHARTS = (
    ChartPlan("Learning rate", {"learning rate": "lr"}, steady=True),
    ChartPlan("Gradient norm", {"norm": "grad_norm"}, may_log=True),
    ChartPlan("Tokens", {"all": "tokens_per_s", "trained": "trained_tokens_per_s"}, "per second"),
    ChartPlan("Images", {"images": "images_per_s"}, "per second", above=0),
    ChartPlan("Step time", {"time": "seconds"}, "seconds", may_log=True),
    ChartPlan("Padding", {"padding": "padding"}, "of all positions", percent=True),
    ChartPlan("Patches shared", {"shared": "shared_patches"}, "of all patches", percent=True),
    ChartPlan("MFU", {"MFU": "mfu"}, "of peak FLOP/s", percent=True, above=0),
    ChartPlan("Rewards", {"chosen": "rewards_chosen", "rejected": "rewards_rejected"}),
    ChartPlan("Margin of rewards", {"margin": "rewards_margin"}),
    ChartPlan("Reward accuracy", {"accuracy": "reward_accuracy"}, "of pairs", percent=True),
    ChartPlan("Log-probs of answers", {"chosen": "logps_chosen", "rejected": "logps_rejected"}),
    ChartPlan("KL of kto", {"KL": "kl_estimate"}, "estimate"),
    ChartPlan("Accuracy", {"accuracy": "accuracy"}, "of queries or documents", percent=True),
    ChartPlan(
        "Similarity to the query",
        {"positive": "positive_similarity", "nearest other": "nearest_negative_similarity"},
    ),
    ChartPlan(
        "Divergence from the teacher", {"divergence": "divergence"}, "of a token", may_log=True
    ),
    ChartPlan("Cross-entropy", {"cross-entropy": "cross_entropy"}, "of the records' tokens"),
    ChartPlan("Loss of drafts", {"divergence": "mtp_loss"}, "of a guess", may_log=True, above=0),
    ChartPlan("Accepted drafts", {"accepted": "mtp_accepted"}, "of guesses", percent=True),
    ChartPlan("Busiest expert", {"busiest": "expert_load"}, "times the mean", above=0),
    ChartPlan("Balancing loss", {"balance": "balance_loss"}, above=0),
    ChartPlan("Router z loss", {"z": "z_loss"}, may_log=True, above=0),
    ChartPlan("Memory", {"memory": "memory_gb"}, "GB", steady=True),
)


def sample_section(runs: Sequence[LoggedRun]) -> Iterator[Section]:
    """Yield the curves of the runs that learn from samples; nothing if there is no such run."""
    if not any(run.metrics.samples for run in runs):
        return
    yield Heading("Samples", "Samples")
    yield from control_section(runs)
    span = steps_span(runs)
    rewarded = any(run.metrics.rewards() for run in runs)
    lines = [line for run in runs for line in run.metrics.samples]
    taught = any(line.teacher_kl is not None for line in lines)
    if rewarded or not taught:  # a teacher needs no rewards
        reward = Chart(_REWARD.title, _curves(runs, _REWARD), _REWARD.unit, height=300)
        yield Charts([reward], span)
    names = dict.fromkeys(name for line in lines for name in line.figures)
    plans = map(_figure_plan, [*names][:_MAX_FIGURES])
    figures = [Chart(p.title, _curves(runs, p, of_rewards=True), p.unit) for p in plans]
    first, *others = _SAMPLE_CHARTS
    charts = [*_charts(runs, [first]), *figures, *_charts(runs, others)]
    yield Charts(charts, span)
    if len(names) > _MAX_FIGURES:
        text = f"The first {_MAX_FIGURES} of {len(names):,} figures of rewards are shown."
        yield Note(text, "quiet")


def curve_section(runs: Sequence[LoggedRun]) -> Iterator[Section]:
    """Yield the curves of the figures that are logged with each step."""
    yield Heading("Curves", "Curves")
    if not any(len(run.metrics.steps_N) for run in runs):
        yield Note("No step was logged.", "quiet")
        return
    if not any(run.metrics.samples for run in runs):  # their section has them already
        yield from control_section(runs)
    span = steps_span(runs)
    losses = _curves(runs, _LOSS) + _score_curves(runs, "loss")
    loss = Chart("Loss", losses, may_log=True, marks=tuple(_marks(runs)), height=300)
    yield Charts([loss], span)
    yield Charts([*_charts(runs, _STEP_CHARTS)], span)


def _figure_plan(name: str) -> ChartPlan:
    short = name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_MAX_NAME_LENGTH]}..."
    return ChartPlan(_title(short), {"mean": name}, "mean over episodes")


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def score_section(runs: Sequence[LoggedRun]) -> Iterator[Section]:
    """Yield charts and a table of each set; nothing if there was no evaluation."""
    all_evaluations = [e for run in runs for e in run.metrics.evaluations]
    if not all_evaluations:
        return
    yield Heading("Evaluation", "Evaluation")
    more = [name for e in all_evaluations for name in e.metrics or {}]  # users' own metrics too
    names = {name: name[:_MAX_NAME_LENGTH].replace("_", " ") for name in more} | CURVE_NAMES
    scores = [s for s in names if any(math.isfinite(e.score(s)) for e in all_evaluations)]
    scores = sorted(scores, key=[*CURVE_NAMES, *names].index)
    curves = ((score, _score_curves(runs, score)) for score in scores)
    charts = [Chart(_title(names[s]), drawn, percent=is_share(s)) for s, drawn in curves]
    yield Charts(charts, steps_span(runs))
    max_rows = max(3, _MAX_ROWS // sum(len(run.metrics.sets()) for run in runs))
    rows = [
        (run.name, *row) if len(runs) > 1 else row
        for run in runs
        for evaluations in run.metrics.sets().values()
        for row in _rows(evaluations, scores, max_rows)
    ]
    caption = "* the best of its set."
    if len(rows) < len(all_evaluations):
        caption += f" Of each set, the best and the last {max_rows:,}."
    columns = ("set", "step", *map(names.__getitem__, scores), "samples", "seconds")
    yield Table(("run", *columns) if len(runs) > 1 else columns, rows, caption)


def score_text(score: str, value: float) -> str:
    """Format a score: in percent if it is a share of answers."""
    return number(value, percent=is_share(score))


def is_share(score: str) -> bool:
    """Return whether a score is a share of answers."""
    name = score.removeprefix("blind_")  # with grey pictures
    return name not in _NO_SHARES and name in CURVE_NAMES


def _charts(runs: Sequence[LoggedRun], plans: Sequence[ChartPlan]) -> Iterator[Chart]:
    """Yield the planned charts that have something to show."""
    for plan in plans:
        curves = _curves(runs, plan)
        if any((curve.y > plan.above).any() for curve in curves):
            yield Chart(plan.title, curves, plan.unit, plan.percent, plan.may_log)


def _curves(
    runs: Sequence[LoggedRun], plan: ChartPlan, of_rewards: bool = False
) -> tuple[Curve, ...]:
    """Return the curve of each run and key, or of a figure of rewards. A comparison has one key."""
    curves, alone = [], len(runs) == 1
    for place, run in enumerate(runs):
        for colour, (name, key) in enumerate(plan.keys.items()):
            x_N, y_N = _logged(run.metrics, key, of_rewards)
            if not alone:
                colour, name = place, run.name
            curves.append(Curve(name, x_N, y_N, colour, is_smoothed=not plan.steady, run=place))
            if not alone:
                break
    return tuple(curves)


def _logged(metrics: RunMetrics, key: str, of_rewards: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and the values of a field of StepLine or RlLine, or of a figure of rewards."""
    if not of_rewards and key in metrics.figures:
        return metrics.steps_N, metrics.figures[key]
    rows = [line.figures if of_rewards else _figures(line) for line in metrics.samples]
    values_N = np.array([row.get(key) for row in rows], dtype=float)  # None becomes nan
    return np.array([line.step for line in metrics.samples]), values_N


def _figures(line: RlLine) -> dict[str, Any]:
    shares = enumerate(line.accepted_at or ())
    return vars(line) | {f"accepted_at_{place}": share for place, share in shares}


def _score_curves(runs: Sequence[LoggedRun], score: str) -> tuple[Curve, ...]:
    """Return the curves of a score by set. On the page of one run a set keeps its colour."""
    curves = []
    for place, run in enumerate(runs):
        for colour, (name, evaluations) in enumerate(run.metrics.sets().items(), start=1):
            x = np.array([e.step for e in evaluations])
            y = np.array([e.score(score) for e in evaluations])
            if len(runs) > 1:
                colour, name = place, f"{run.name}: {name}"
            # In a comparison the colour is that of the run, so the line tells training from scores.
            curves.append(Curve(name, x, y, colour, dots=True, dashed=len(runs) > 1, run=place))
    return tuple(curve for curve in curves if np.isfinite(curve.y).any())


def _marks(runs: Sequence[LoggedRun]) -> Iterator[StepMarks]:
    """Yield marks at steps that were not applied, and at steps where a run was resumed."""
    for place, run in enumerate(runs):
        metrics = run.metrics
        not_applied = metrics.steps_N[metrics.skipped_N | metrics.empty_N]
        yield StepMarks("not applied", not_applied, run=place)
        resumes = np.array([start.step for start in metrics.starts[1:]], dtype=float)
        inside = resumes[(resumes > 0) & (resumes <= metrics.steps_done)]
        name = "resumed" if len(runs) == 1 else f"{run.name} resumed"
        yield StepMarks(name, inside, "tall", run=place)


def _rows(
    evaluations: list[EvalLine], scores: Sequence[str], max_rows: int
) -> Iterator[tuple[str, ...]]:
    best = {score: best_of(evaluations, score) for score in scores}
    for i, e in enumerate(evaluations):
        stars = {score: "\u00a0*" if e is best[score] else "" for score in scores}
        if i >= len(evaluations) - max_rows or any(stars.values()):
            texts = (score_text(key, e.score(key)) + stars[key] for key in scores)
            yield (e.name, f"{e.step:,}", *texts, f"{e.samples:,}", number(e.seconds))


def steps_span(runs: Sequence[LoggedRun]) -> tuple[float, float] | None:
    """Return the first and the last step of a run, which all of its charts share. In a comparison
    each chart has its own steps, because one run may be far longer than the others."""
    if len(runs) > 1:
        return None
    [run] = runs
    steps: list[float] = [*run.metrics.steps_N[:1], *run.metrics.steps_N[-1:]]
    steps += [e.step for e in run.metrics.evaluations]
    steps += [line.step for line in run.metrics.samples]
    return float(min(steps)), float(max(steps))


def control_section(runs: Sequence[LoggedRun]) -> Iterator[Section]:
    """Yield the controls of the charts of these runs; nothing if none of them has a step."""
    if any(len(run.metrics.steps_N) for run in runs):
        yield ChartControls([run.name for run in runs], [_axes(run.metrics) for run in runs])


def _axes(metrics: RunMetrics) -> RunAxes:
    """Return steps with their tokens and seconds. A figure that is not finite counts as 0."""
    seconds_N = np.nan_to_num(metrics.figures["seconds"], posinf=0, neginf=0)
    rates_N = np.nan_to_num(metrics.figures["tokens_per_s"], posinf=0, neginf=0)
    return RunAxes(metrics.steps_N, np.cumsum(np.round(seconds_N * rates_N)), np.cumsum(seconds_N))
