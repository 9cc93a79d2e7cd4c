"""forward_backward of several models of this process, in one pass through the pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_vlm.controller.rank_worker import RankWorker, backward_of, with_rank
from megatron_vlm.controller.split_batch import BatchLike, ReplicaBatch, even_parts
from megatron_vlm.controller.torchrun import LocalTransport
from megatron_vlm.controller.worker_group import WorkerGroup
from megatron_vlm.training.backward import LossCall, StepMetrics
from megatron_vlm.training.losses import Objective


@dataclass(frozen=True, eq=False)
class SummedLoss:
    """Gradients that are wanted of a local group's model: of the sum of a loss over a batch, added
    to those since its last optim_step."""

    group: WorkerGroup
    batch: BatchLike
    loss: str
    options: Mapping[str, float]

    @property
    def call(self) -> LossCall:
        """What each rank is asked for."""
        return LossCall(True, self.loss, 1.0, True, self.options)


def backward_together(asked: Sequence[SummedLoss]) -> list[StepMetrics]:
    """What forward_backward returns for each, with the log-probs. The groups are of different
    models beside one base; all ranks make the same call. After an error every model has the
    gradients that it had before."""
    ranks = [_local(each.group) for each in asked]
    parts = [_mine(each, of_it) for each, of_it in zip(asked, ranks, strict=True)]
    members = [of_it.member for of_it in ranks]
    found = ranks[0].answers(partial(_run, members, parts, asked))
    return [
        _joined([of_replica[place] for of_replica in found], len(each.batch))
        for place, each in enumerate(asked)
    ]


def _run(
    members: Sequence[RankWorker], parts: Sequence[ReplicaBatch], asked: Sequence[SummedLoss]
) -> list[StepMetrics]:
    """On this rank."""
    try:
        return backward_of(members, parts, [each.call for each in asked])
    except Exception as error:
        raise with_rank(error, members[0].worker.grid.rank) from error


def _local(group: WorkerGroup) -> LocalTransport:
    assert isinstance(group.ranks, LocalTransport), "the others' processes are elsewhere"
    return group.ranks


def _mine(asked: SummedLoss, ranks: LocalTransport) -> ReplicaBatch:
    names = Objective.create(asked.loss, asked.options).value_names
    return ranks.mine_of(even_parts(asked.batch, ranks.dims.dp, names))


def _joined(of_replicas: Sequence[StepMetrics], rows: int) -> StepMetrics:
    log_probs = [row for metrics in of_replicas for row in metrics.log_probs or []]
    return replace(of_replicas[0], log_probs=log_probs[:rows])
