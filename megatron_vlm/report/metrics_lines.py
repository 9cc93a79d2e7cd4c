"""The files that a run writes and its report reads: the lines of metrics.jsonl, and examples.json,
questions of an evaluation set with pictures and answers.

Steps count from 1, so the step of a line is the number of steps that were done when it was written.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.untrusted import UntrustedFile

SAMPLES = "samples.jsonl"  # next to metrics.jsonl: the samples of some steps of `megatron-vlm rl`
PREFERENCE_FIGURES: tuple[str, ...] = (
    *("rewards_chosen", "rewards_rejected", "rewards_margin", "reward_accuracy"),
    *("logps_chosen", "logps_rejected", "kl_estimate"),
)
RETRIEVAL_FIGURES = ("accuracy", "positive_similarity", "nearest_negative_similarity")
DISTILL_FIGURES: tuple[str, ...] = ("divergence", "cross_entropy")
MAX_USAGES = 40  # usage lines of a run, in addition to that of its last step
_LARGEST = 1e100  # no figure of a run is larger
_LINE = UntrustedFile("a line of metrics.jsonl")
STOPPED = "stopped by a signal after"  # the event of a run that was stopped begins so


@dataclass(frozen=True)
class StartLine:
    """Line of a start or a resume."""

    time: str
    step: int
    platform: str
    world: int
    layout: dict[str, int]
    parameters: int
    trainable: int
    model: str
    samples: int | None  # None for a stream
    total_steps: int
    versions: dict[str, str]
    dropped: int | None = None  # records of data.train that a rule left out
    wrong: int | None = None  # records left out, as data.max_errors allows
    device: str | None = None  # name of a GPU, or cpu


@dataclass(frozen=True)
class StepLine:
    """Line of an optimizer step. A figure that is not finite is written as null."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    trained_tokens_per_s: float
    images_per_s: float
    padding: float
    mfu: float | None
    memory_gb: float
    skipped: bool = False  # not applied: its loss or gradient was not finite
    empty: bool = False  # not applied: no token of its batch was trained
    expert_load: float | None = None  # tokens of the busiest expert over the mean
    balance_loss: float | None = None  # sum over the routers, without its coefficient
    z_loss: float | None = None  # sum over the routers, without its coefficient
    mtp_loss: float | None = None  # divergence of the drafts from the model, mean over guesses
    mtp_accepted: float | None = None  # share of guesses accepted at a temperature of 1
    samples: int | None = None  # samples of the global batch
    # Share of the patches of all rows that the tower does not encode again, because an earlier row
    # of the micro-batch has the same images.
    shared_patches: float | None = None
    # Means over the answers of the batch, if the objective compares answers.
    rewards_chosen: float | None = None
    rewards_rejected: float | None = None
    rewards_margin: float | None = None
    reward_accuracy: float | None = None  # share of pairs whose chosen answer has the higher reward
    logps_chosen: float | None = None
    logps_rejected: float | None = None
    kl_estimate: float | None = None  # the divergence that kto estimates
    # Means over queries: whether the positive is nearest of all documents. For a reranker the
    # accuracy is the share of documents that are judged as they are labelled.
    accuracy: float | None = None
    positive_similarity: float | None = None
    nearest_negative_similarity: float | None = None
    divergence: float | None = None  # from the teacher, mean over the supervised tokens
    cross_entropy: float | None = None  # mean over the same tokens, beside a teacher
    wall_s: float | None = None  # seconds since the last start line


STEP_FIELDS = tuple(field.name for field in fields(StepLine))
_ABSENT = {field.name: field.default for field in fields(StepLine) if field.default is not MISSING}


@dataclass(frozen=True)
class UsageLine:
    """Memory of all ranks, and where the time of rank 0 went. Only some steps have such a line."""

    step: int
    memory_gb: list[float]  # the most that each rank has had
    seconds: dict[str, float]  # time of each phase since the last such line, or the start


@dataclass(frozen=True, kw_only=True)
class RlLine:
    """Samples and policy update of a step of `megatron-vlm rl`. None was not computed."""

    step: int
    reward: float | None  # mean over episodes; null with a teacher and no rewards
    reward_std: float | None  # standard deviation over episodes
    prompts: int  # prompts that the step trained on
    asked: int  # prompts that were sampled to get them
    alike: float | None  # share of the sampled prompts whose answers all have the same reward
    answer_tokens: float  # tokens of an episode, mean
    longest_answer: int
    cut: float  # share of episodes that a limit of length ended
    turns: float  # answers of an episode, mean
    rows: float | None = None  # rows of an episode, mean; 1 unless earlier turns are rewritten
    reread: float | None = None  # positions of all rows per position of the episodes' last rows
    seen: float | None = None  # KL of a token to the policy without the pictures
    blind: float | None = None  # share of the answers that do not depend on their pictures
    sampling_s: float  # from the first question to the last reward
    kl: float | None = None  # to the initial model
    teacher_kl: float | None = None  # distill.divergence from the teacher, mean over its tokens
    taught: float | None = None  # share of the tokens that a teacher has scored
    entropy: float | None = None
    ratio: float | None = None  # probability of a token now over that at the time of sampling
    clip_fraction: float | None = None  # share of tokens
    drift: float | None = None  # KL from the policy that sampled to the one that is trained
    apart: float | None = None  # largest difference of log-probs between engine and trainer
    apart_mean: float | None = None
    weights_cut: float | None = None  # share of tokens whose weight rl.max_weight cut
    masked: float | None = None  # share of tokens whose policy loss rl.mask_weight left out
    rerouted: float | None = None  # share of (token, layer) for which the router chooses otherwise
    rounds: float | None = None  # passes of an engine that drafts, of an episode, mean
    accepted: float | None = None  # drafted tokens that a round accepted, mean
    accepted_at: list[float] | None = None  # share of rounds that accepted the first, second, ...
    behind: float | None = None  # steps since the weights that sampled a token, mean over tokens
    behind_max: int | None = None  # the same for the oldest token
    figures: dict[str, float]  # figures of rewards and environments by name, means over episodes


@dataclass(frozen=True, kw_only=True)
class EvalLine:
    """The scores of one evaluation set. A score that was not measured is None."""

    step: int
    name: str
    loss: float | None = None
    token_accuracy: float | None = None
    reward: float | None = None  # mean over the set's prompts, from `megatron-vlm rl`
    ranking: float | None = None
    exact_match: float | None = None
    metrics: dict[str, float] | None = None  # scores of eval.metrics by name
    samples: int
    seconds: float
    wall_s: float | None = None  # seconds since the last start line

    @staticmethod
    def from_scores(
        step: int, name: str, scores: Mapping[str, Any], wall_s: float | None = None
    ) -> "EvalLine":
        """Return the line of an evaluation, in which the scores without a field are metrics."""
        names = {item.name for item in fields(EvalLine)}
        known = {key: value for key, value in scores.items() if key in names}
        metrics = {key: value for key, value in scores.items() if key not in names}
        return EvalLine(step=step, name=name, metrics=metrics or None, wall_s=wall_s, **known)

    def score(self, key: str) -> float:
        """Return a score; nan if it was not requested."""
        value = (self.metrics or {}).get(key, getattr(self, key, None))
        return math.nan if value is None else value


@dataclass(frozen=True)
class EventLine:
    """Event that a reader of the report should know about, too."""

    step: int
    text: str


Line = StartLine | StepLine | UsageLine | RlLine | EvalLine | EventLine
_KINDS: dict[str, type[Line]] = {
    "start": StartLine,
    "step": StepLine,
    "usage": UsageLine,
    "rl": RlLine,
    "eval": EvalLine,
    "event": EventLine,
}


def has_usage_line(step: int, total_steps: int) -> bool:
    """Return whether a step has a UsageLine, which is long: some steps do, and the last one."""
    return (step - 1) % -(-total_steps // MAX_USAGES) == 0 or step == total_steps


def to_json(line: Line) -> str:
    """Return the text of a line: null for what is not finite, and no None that is a default."""
    kind = next(name for name, kind in _KINDS.items() if type(line) is kind)
    absent = {f.name for f in fields(line) if f.default is None and getattr(line, f.name) is None}
    values = {key: value for key, value in vars(line).items() if key not in absent}
    infinite = {k: None for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return json.dumps({"kind": kind, **values, **infinite})


def from_json(text: str) -> Line | None:
    """Parse a line; return None for an unknown kind and raise DataError for malformed text."""
    with _LINE.wrap_errors("not as it was written"):
        kind, values = _parse(text)
        return None if kind is None else kind(**values)


def line_or_row(text: str) -> Line | list[float] | None:
    """Parse a line as `from_json` does. Of a step, of which there may be hundreds of thousands,
    return its fields as numbers, nan for None."""
    with _LINE.wrap_errors("not as it was written"):
        kind, values = _parse(text)
        if kind is StepLine:
            known = _ABSENT | values
            return [math.nan if known[name] is None else known[name] for name in STEP_FIELDS]
        return None if kind is None else kind(**values)


def _parse(text: str) -> tuple[type[Line] | None, dict[str, Any]]:
    raw = _LINE.parse(text)
    kind = _KINDS.get(raw["kind"])
    readers = {} if kind is None else _READERS[kind]
    return kind, {key: readers[key](value) for key, value in raw.items() if key in readers}


def _figure(value: float | None) -> float:
    """Return nan for null, NaN and Infinity, which other programs may have written, and for a
    number so large that sums over steps would not be finite."""
    return math.nan if value is None or not -_LARGEST < value < _LARGEST else float(value)


def _clamp_integer(value: Any) -> int:
    return min(max(int(value), -(2**53)), 2**53)  # a float represents no larger integer exactly


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    int: _clamp_integer,
    list[float]: lambda values: [_figure(value) for value in values],
    str: str,
    bool: bool,
    dict[str, int]: dict,
    dict[str, str]: dict,
    dict[str, float]: lambda figures: {str(k): _figure(v) for k, v in figures.items()},
    int | None: lambda count: None if count is None else _clamp_integer(count),
    dict[str, float] | None: lambda figures: {str(k): _figure(v) for k, v in figures.items()},
    str | None: lambda text: None if text is None else str(text),
    list[float] | None: lambda values: None if values is None else [_figure(v) for v in values],
}
# Each field is read by its type. A type that is not in _PLAIN is a figure, which may be null.
_READERS: dict[type[Line], dict[str, Callable[[Any], Any]]] = {
    kind: {f.name: _PLAIN.get(f.type, _figure) for f in fields(kind)} for kind in _KINDS.values()
}


@dataclass(frozen=True)
class ExamplePart:
    """Text of a turn, or a picture at its place in the text."""

    text: str = ""
    image: str = ""  # data URI


@dataclass(frozen=True)
class ExampleTurn:
    """A turn of the question."""

    role: str
    parts: tuple[ExamplePart, ...]


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and the model's answer."""

    where: str
    answer: str
    prediction: str
    turns: tuple[ExampleTurn, ...] = ()
    answers: tuple[str, ...] = ()  # all right answers, if the record lists them

    @property
    def references(self) -> tuple[str, ...]:
        """The right answers."""
        return self.answers or (self.answer,)

    @property
    def is_right(self) -> bool:
        return is_right(self.prediction, self.references)


@dataclass(frozen=True)
class Examples:
    """The examples of one set, after `step` steps."""

    name: str
    step: int
    examples: tuple[Example, ...]

    def write(self, run: Path) -> None:
        """Write RUN/examples.json, which the report shows."""
        write_text(run / "examples.json", json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Examples":
        """Read the file; raise DataError if it is malformed."""
        return UntrustedFile(str(path)).json().read(Examples)


def is_right(prediction: str, references: Sequence[str]) -> bool:
    """Return whether a prediction is one of the right answers, word for word. White space around
    either does not count. This is exact match everywhere: in scores, files and pages."""
    return prediction.strip() in [reference.strip() for reference in references]
