"""forward_backward of several models in this process, in one pass through the pipeline."""

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
    """A request for gradients of a local group's model. They are those of the sum of a loss over a
    batch, and are added to the gradients since the last optim_step."""

    group: WorkerGroup
    batch: BatchLike
    loss: str
    options: Mapping[str, float]

    @property
    def call(self) -> LossCall:
        """The call that each rank runs."""
        return LossCall(True, self.loss, 1.0, True, self.options)


def backward_together(requests: Sequence[SummedLoss]) -> list[StepMetrics]:
    """Run forward_backward for each request, and return the results with the log-probs. The groups
    hold different models that share one base, and all ranks make the same call. After an error
    every model has the gradients that it had before."""
    transports = [_local_transport(request.group) for request in requests]
    parts = [
        _local_part(request, transport)
        for request, transport in zip(requests, transports, strict=True)
    ]
    members = [transport.member for transport in transports]
    results = transports[0].answers(partial(_run, members, parts, requests))
    return [
        _join_metrics([metrics[position] for metrics in results], len(request.batch))
        for position, request in enumerate(requests)
    ]


def _run(
    members: Sequence[RankWorker], parts: Sequence[ReplicaBatch], requests: Sequence[SummedLoss]
) -> list[StepMetrics]:
    """Run the requests on this rank."""
    try:
        return backward_of(members, parts, [request.call for request in requests])
    except Exception as error:
        raise with_rank(error, members[0].worker.grid.rank) from error


def _local_transport(group: WorkerGroup) -> LocalTransport:
    assert isinstance(group.ranks, LocalTransport), "the others' processes are elsewhere"
    return group.ranks


def _local_part(request: SummedLoss, ranks: LocalTransport) -> ReplicaBatch:
    names = Objective.create(request.loss, request.options).value_names
    return ranks.local_part(even_parts(request.batch, ranks.dims.dp, names))


def _join_metrics(of_replicas: Sequence[StepMetrics], rows: int) -> StepMetrics:
    log_probs = [row for metrics in of_replicas for row in metrics.log_probs or []]
    return replace(of_replicas[0], log_probs=log_probs[:rows])
