"""A group inside torchrun: SPMD, without a separate controller.

Every rank makes the same calls with the same batches, takes the part of its replica, and gets the
results of the whole batch. They travel as bytes: tensors stay binary, the rest is JSON, and an
error of this package keeps its type and fields."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_vlm import errors
from megatron_vlm.controller import rank_worker
from megatron_vlm.controller.worker_group import (
    BatchLike,
    Join,
    Parts,
    ReplicaBatch,
    T,
    WorkerGroup,
    filled_rows,
    split_batch,
)
from megatron_vlm.data.tensors.tensor_list import pack, unpack
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.distributed.collectives import all_gather_bytes
from megatron_vlm.distributed.error_json import error_from_json, error_to_json
from megatron_vlm.distributed.rendezvous import MeetingError
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.backward import LossCall
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.worker import MegatronWorker, StepMetrics

_ERRORS: dict[str, type[MegatronVLMError]] = {
    each.__name__: each
    for each in (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.TrainError,
        MegatronVLMError,
        MeetingError,
        rank_worker.WorkerError,
        rank_worker.FailedElsewhereError,
    )
}


def result_to_bytes(answer: Any) -> bytes:
    """Encode the result of a RankWorker's method, or an error."""
    meta: dict[str, Any]
    rows: list[Tensor] = []
    if isinstance(answer, Exception):
        known = next((kind for kind in type(answer).__mro__ if kind.__name__ in _ERRORS), None)
        name = rank_worker.WorkerError.__name__ if known is None else known.__name__
        meta = {"kind": "error", "name": name, "fields": error_to_json(answer)}
    elif isinstance(answer, StepMetrics):
        figures = [answer.loss, answer.num_tokens, answer.means]
        meta = {"kind": "metrics", "figures": figures, "has_rows": answer.log_probs is not None}
        rows = answer.log_probs or []
    elif isinstance(answer, list) and answer and isinstance(answer[0], StepMetrics):
        meta = {"kind": "several"}
        rows = [
            torch.frombuffer(bytearray(result_to_bytes(item)), dtype=torch.uint8) for item in answer
        ]
    elif isinstance(answer, list) and any(isinstance(row, Tensor) for row in answer):
        meta, rows = {"kind": "rows"}, answer
    elif isinstance(answer, list) and answer and _are_samples(answer[0]):
        samples = [item for completions in answer for item in completions]
        figures = [item.as_json() for item in samples]
        meta = {"kind": "samples", "counts": list(map(len, answer)), "figures": figures}
    elif isinstance(answer, tuple):
        meta = {"kind": "tuple", "value": answer}
    else:
        meta = {"kind": "value", "value": answer}
    return pack({"rows": (True, rows)}, meta)


def result_from_bytes(data: bytes) -> Any:
    """Decode the bytes of `result_to_bytes`."""
    fields, meta = unpack(data)
    rows, kind = list(fields["rows"][1]), meta["kind"]
    if kind == "error":
        return _ERRORS[meta["name"]](**error_from_json(meta["fields"]))
    if kind == "metrics":
        loss, num_tokens, means = meta["figures"]
        return StepMetrics(loss, num_tokens, rows if meta["has_rows"] else None, means)
    if kind == "several":
        return [result_from_bytes(row.numpy().tobytes()) for row in rows]
    if kind == "rows":
        return rows
    if kind == "samples":
        samples = map(Completion.from_json, meta["figures"])
        return [list(islice(samples, count)) for count in meta["counts"]]
    return tuple(meta["value"]) if kind == "tuple" else meta["value"]


def _are_samples(answer: Any) -> bool:
    return isinstance(answer, list) and any(isinstance(each, Completion) for each in answer)


def local_group(worker: MegatronWorker) -> WorkerGroup:
    """Return the group that this rank's worker belongs to. A process may have several groups."""
    return WorkerGroup(LocalTransport(worker))


class LocalTransport:
    """Transport to this rank's RankWorker, whose calls are complete when they return."""

    def __init__(self, worker: MegatronWorker):
        self.member = rank_worker.RankWorker(worker)
        self.grid, self.dims = worker.grid, worker.dims

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        if parts is not None:
            args = (self.local_part(parts), *args)
        future: Future[T] = Future()
        try:
            future.set_result(join(self.answers(partial(self.member.call, method, *args))))
        except rank_worker.BrokenError:
            # Raise at once: the other ranks cannot be notified. They end when this process does.
            raise
        except MegatronVLMError as error:
            future.set_exception(error)
        return future

    def local_part(self, parts: Sequence[ReplicaBatch]) -> ReplicaBatch:
        """Return the part of this rank's replica."""
        part = parts[self.grid.dp.rank]
        return part if self.grid.first else replace(part, pixels=None)

    def answers(self, work: Callable[[], Any]) -> list[Any]:
        """Do the work on all ranks; return each replica's result or raise a rank's error."""
        local_result: Any = None
        failure: Exception | None = None
        try:
            local_result = work()
        except rank_worker.BrokenError:
            raise
        except Exception as error:
            failure = error
        encoded = result_to_bytes(failure if failure else local_result if self.grid.leads else None)
        # Gather from all ranks, not only from this replica: an error must reach every rank.
        results = [result_from_bytes(result) for result in all_gather_bytes(encoded)]
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise rank_worker.first_failure(errors) from failure
        leaders = map(self.dims.leader_of, range(self.dims.dp))
        return [results[rank] for rank in leaders]

    def close(self) -> None:
        """Do nothing: torchrun started the processes."""


@dataclass(frozen=True, eq=False)
class SummedLoss:
    """A request for gradients of a local group's model, from the sum of a loss over a batch. They
    are added to the gradients since the last optim_step."""

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
    transports = [local_transport(request.group) for request in requests]
    members = [transport.member for transport in transports]
    parts = []
    for request, transport in zip(requests, transports, strict=True):
        names = Objective.create(request.loss, request.options).value_names
        batch = filled_rows(request.batch, transport.dims.dp, names)
        parts.append(transport.local_part(split_batch(batch, transport.dims.dp)))

    def run() -> list[StepMetrics]:
        try:
            return rank_worker.backward_of(members, parts, [request.call for request in requests])
        except Exception as error:
            raise rank_worker.with_rank(error, members[0].worker.grid.rank) from error

    joined = []
    for request, *of_replicas in zip(requests, *transports[0].answers(run), strict=True):
        log_probs = [row for metrics in of_replicas for row in metrics.log_probs or []]
        joined.append(replace(of_replicas[0], log_probs=log_probs[: len(request.batch)]))
    return joined


def local_transport(group: WorkerGroup) -> LocalTransport:
    """Return the transport of a local group."""
    assert isinstance(group.ranks, LocalTransport), "the others' processes are elsewhere"
    return group.ranks
