"""Losses, which are pure functions of the log-probs of the supervised tokens. To add one, write it:

    @register
    def reinforce(log_probs_N, advantages_N, *, scale=1.0):
        loss_N = -scale * advantages_N * log_probs_N
        return loss_N, {"advantage": advantages_N}

and select it by name: `worker.forward_backward(batch, loss="reinforce", scale=0.5)`. Its positional
parameters after the first are values of each token, which a Row has in `values_S` and a TensorBatch
in fields of these names (without _N); `sequences_N` is the row of each token. Its keyword
parameters are options, which are numbers with a default, as for `Objective`. It returns
the loss of each token and the values to report of each token. Both are summed, and divided once by
the number of supervised tokens of the global batch. If rows have `loss_weights_S`, the loss of each
token is multiplied by its weight, and the sum is divided by the sum of all weights instead. A
`divisor` of the call replaces either. Losses of tokens are in token_losses.py.

A loss that compares whole rows has `rows` as its second parameter: a RowInputs. It returns the loss
and the values to report of each example, and their sums are divided by the number of examples of
the global batch. Losses over preferences are in row_losses.py. If its first parameter is
`embeddings_NH`, it receives the normalised hidden states in place of log-probs, and if that is
`scores_N` the rewards of a scalar head. A loss with the
parameters `student_NR` and `teacher_NR` reads the log-probs of whole distributions, as `distill`
does.

Shapes: N supervised tokens of a micro-batch, R a teacher's tokens and all others (see
lumped_log_probs.py). N may be 0.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.host_copies import DeferredFigures
from megatron_vlm.errors import ConfigError
from megatron_vlm.model import head
from megatron_vlm.training import token_losses
from megatron_vlm.training.stage_inputs import RowInputs, StageInput

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
REFERENCE = "ref_log_probs"
SEQUENCES = "sequences"  # the row of each token, which every batch has
TEACHER_WEIGHTS = "teacher_weights"  # factors of the teacher's term; without them it is 1
# Heads of losses whose first parameter has another name than log_probs_N.
_HEADS: dict[str, head.Head] = {"embeddings_NH": head.embedding_head, "scores_N": head.score_head}
_DISTRIBUTIONS = ("student_NR", "teacher_NR")
_REGISTRY: dict[str, LossFunction] = {each.__name__: each for each in token_losses.LOSSES}


def register(function: LossFunction) -> LossFunction:
    """Register a loss under its function's name, in place of an earlier one of that name."""
    _REGISTRY[function.__name__] = function
    return function


@dataclass(frozen=True)
class Objective:
    """A loss with its options, and three terms that any loss can have. `kl_coef` adds that multiple
    of `kl_k3` to `ref_log_probs`, `entropy_coef` subtracts that multiple of the entropy, and
    `teacher_coef` adds that multiple of the divergence from the teacher of the rows:
    `generalized_jsd` of `teacher_beta`, which is 1, the reverse KL, unless it is given. 0 only
    reports a term, and None does not compute it."""

    function: LossFunction
    own_names: tuple[str, ...] = ()  # names of the values of each token that the function reads
    options: Mapping[str, float] = field(default_factory=dict)
    kl_coef: float | None = None
    entropy_coef: float | None = None
    teacher_coef: float | None = None
    teacher_beta: float = 1.0
    temperature: float = 1.0  # divides the logits of a model that is compared with a teacher
    metrics: tuple[str, ...] = ()  # names of the values that are reported in addition to the loss
    reads_rows: bool = False  # the function reads rows, and returns a loss for each example
    reads: str = "log_probs_M"  # the output of the head that the function reads

    @staticmethod
    def create(loss: str | LossFunction, options: Mapping[str, float]) -> "Objective":
        """Build an objective from a function or a registered name. Options are checked."""
        if isinstance(loss, str):
            if loss not in _REGISTRY:
                raise ConfigError(
                    "is not registered",
                    key="loss",
                    found=loss,
                    allowed=tuple(_REGISTRY),
                    remedy=_hint(loss, _REGISTRY),
                )
            loss = _REGISTRY[loss]
        parameters = inspect.signature(loss).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        has_teacher = set(_DISTRIBUTIONS) <= {p.name for p in parameters}
        more = ["temperature"] if has_teacher else ["entropy_coef", "teacher_coef", "teacher_beta"]
        known = [*own, "kl_coef", *more]
        for name, value in options.items():
            if name not in known:
                raise ConfigError(
                    "is not an option",
                    place=f"loss {loss.__name__}",
                    key=name,
                    allowed=known,
                    remedy=_hint(name, known),
                )
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(
                    place=f"loss {loss.__name__}", key=name, found=value, allowed="a finite number"
                )
        first, *names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        read = [name.removesuffix("_N") for name in names]
        objective = Objective(
            loss,
            tuple(name for name in read if name != "rows"),
            {name: value for name, value in options.items() if name in own},
            options.get("kl_coef"),
            options.get("entropy_coef"),
            options.get("teacher_coef"),
            options.get("teacher_beta", 1.0),
            options.get("temperature", 1.0),
            reads_rows="rows" in read,
            reads=first if first in _HEADS else "log_probs_M",
        )
        if objective.temperature <= 0:
            raise ConfigError(
                place=f"loss {loss.__name__}",
                key="temperature",
                found=objective.temperature,
                allowed="more than 0",
            )
        if not 0 <= objective.teacher_beta <= 1:
            raise ConfigError(
                place=f"loss {loss.__name__}",
                key="teacher_beta",
                found=objective.teacher_beta,
                allowed="from 0 (forward KL) to 1 (reverse KL)",
            )
        # Called with no tokens, the function refuses bad options here, before any forward.
        empty_N = torch.zeros(0)
        values = dict.fromkeys((*objective.value_names, SEQUENCES), empty_N)
        values |= dict.fromkeys(_DISTRIBUTIONS, torch.zeros(0, 1))
        report = objective.of_tokens(empty_N, empty_N, values)[1]
        return replace(objective, metrics=tuple(report))

    @property
    def head(self) -> head.Head:
        """The head that computes what the loss reads."""
        if self.needs_teacher:
            return partial(head.lumped_head, temperature=self.temperature)
        if self.reads in _HEADS:
            return _HEADS[self.reads]
        return head.log_probs_head if self.entropy_coef is None else head.entropy_head

    @property
    def needs_teacher(self) -> bool:
        """True if the loss compares the model with a teacher."""
        return _DISTRIBUTIONS[0] in self.own_names or self.teacher_coef is not None

    def check_batches(self, batches: Sequence[MicroBatch]) -> None:
        """Refuse batches without a teacher where the loss needs one, and extra values of the model
        where places have several targets, which would have to share them."""
        for place, batch in enumerate(batches) if self.needs_teacher else ():
            batch.check_teacher(f"micro-batch {place}")
        if self.entropy_coef is not None and self.teacher_coef is not None:
            raise ConfigError(
                ": the head computes either entropies or the divergence from a teacher",
                key="entropy_coef",
                found=self.entropy_coef,
                remedy="leave out entropy_coef or teacher_coef",
            )
        has_one_target = self.needs_teacher or self.entropy_coef is not None
        if has_one_target and any(batch.of_M is not None for batch in batches):
            raise ConfigError(
                ": an entropy belongs to a token, but rows have several targets at one place",
                key="entropy_coef",
                found=self.entropy_coef,
                remedy="leave entropy_coef out, or give one target per place",
            )

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the values of each token that the objective needs."""
        more = [REFERENCE] if self.kl_coef is not None else []
        own = [name for name in self.own_names if name not in (*_DISTRIBUTIONS, SEQUENCES)]
        return tuple(dict.fromkeys([*own, *more]))

    def of_tokens(
        self,
        log_probs_N: Tensor,
        entropy_N: Tensor | None,
        values_N: Mapping[str, Tensor],
        rows: RowInputs | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the reported values of each token, or of each example if the function
        reads rows."""
        own = [values_N[name] for name in self.own_names]
        if self.reads_rows:
            assert (self.kl_coef, self.entropy_coef, self.teacher_coef) == (None,) * 3
            rows = rows or RowInputs.empty(log_probs_N.device)
            return self.function(log_probs_N, rows, *own, **self.options)
        loss_N, report = self.function(log_probs_N, *own, **self.options)
        report = dict(report)
        if self.kl_coef is not None:
            report["kl"] = token_losses.kl_k3(log_probs_N, values_N[REFERENCE])
            loss_N = loss_N + self.kl_coef * report["kl"]
        if self.entropy_coef is not None:
            assert entropy_N is not None
            report["entropy"] = entropy_N
            loss_N = loss_N - self.entropy_coef * entropy_N
        if self.teacher_coef is not None:
            student_NR, teacher_NR = (values_N[name] for name in _DISTRIBUTIONS)
            divergence_N = token_losses.generalized_jsd(student_NR, teacher_NR, self.teacher_beta)
            weights_N = values_N.get(TEACHER_WEIGHTS, torch.ones_like(divergence_N))
            report["teacher_kl"] = weights_N * divergence_N
            loss_N = loss_N + self.teacher_coef * report["teacher_kl"]
        return loss_N, report


def check_divisor(divisor: float | None) -> None:
    """Refuse a divisor that no sum can be divided by."""
    if divisor is None:
        return
    if not isinstance(divisor, int | float) or not math.isfinite(divisor) or divisor <= 0:
        raise ConfigError(
            key="divisor",
            found=divisor,
            allowed="a finite number above 0, by which the summed loss is divided, or None for the "
            "sum of the weights of the supervised tokens",
        )


def loss_of(
    objective: Objective, batch: StageInput, output: head.HeadOutput
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the triple that Megatron's schedules take: summed loss, token count, and report.

    Megatron's finalize_model_grads divides the gradient of the sum once, by the count of the global
    batch. backward.py changes that to a division by the sum of the weights, or by the divisor of
    the call.
    """
    values_N = {**batch.values_M(objective.value_names), SEQUENCES: batch.row_M}
    if TEACHER_WEIGHTS in batch.columns:
        values_N |= batch.values_M((TEACHER_WEIGHTS,))
    if output.events_NR is not None:
        values_N |= {"student_NR": output.events_NR, "teacher_NR": batch.teacher_NR}
    first_N = getattr(output, objective.reads)
    assert first_N is not None
    loss_N, report_N = objective.of_tokens(first_N, output.entropy_N, values_N, batch.rows)
    weights_M = None if objective.reads_rows else batch.columns.get("loss_weights")
    loss_sum = (loss_N if weights_M is None else loss_N * weights_M).sum()
    if objective.reads_rows:  # so that a batch without rows has gradients, too
        loss_sum = loss_sum.to(first_N.dtype) + 0 * first_N.sum()
    count = torch.full((), len(first_N), dtype=torch.int, device=first_N.device)
    report = {name: report_N[name].detach().sum() for name in objective.metrics}
    report |= {"loss_sum": loss_sum.detach(), "log_probs_N": first_N.detach()}
    return loss_sum, count, report


@dataclass(frozen=True)
class Totals:
    """Figures of the global batch. The device may still compute their sums."""

    objective: Objective
    count: int  # supervised tokens
    weight: float  # the sum of the tokens' weights, or the number of examples if it reads rows
    sums: DeferredFigures  # the summed loss, then the sum of each report
    divisor: float  # what divides the loss: the weight, unless the call has its own

    @property
    def loss(self) -> float:
        return self.sums.values[0] / self.divisor

    @property
    def means(self) -> dict[str, float]:
        """Means of the reports of the loss."""
        reported_of = self.weight if self.objective.reads_rows else self.count
        means = [value / max(reported_of, 1.0) for value in self.sums.values[1:]]
        return dict(zip(self.objective.metrics, means, strict=True))


def totals(
    objective: Objective,
    batches: Sequence[MicroBatch],
    outputs: Sequence[Mapping[str, Tensor]],
    grid: RankGroups,
    device: torch.device,
    divisor: float | None = None,
) -> Totals:
    """Return figures of the global batch. `outputs` are the reports of `loss_of`. A collective."""
    names = ("loss_sum", *objective.metrics)
    total = torch.zeros(len(names), dtype=torch.float64, device=device)
    if grid.is_last_stage:
        for place, name in enumerate(names):
            total[place] = sum(output[name].double() for output in outputs)
        dist.all_reduce(total, group=grid.dp.group)
    grid.from_last_stage(total)
    weights = [b.num_examples if objective.reads_rows else b.weight for b in batches]
    count, weight = grid.sum_of_replicas(sum(b.num_supervised for b in batches), sum(weights))
    return Totals(objective, int(count), weight, DeferredFigures(total), divisor or weight or 1.0)


def _hint(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is closest to this one, if any is close."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    return f"did you mean {near[0]!r}?" if near else ""
