"""A group inside torchrun: SPMD, without a separate controller.

Every rank makes a group around its worker and makes the same calls with the same batches. Each rank
takes the part of its replica, and all ranks get the results of the whole batch.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_vlm.controller.rank_worker import BrokenError, RankWorker, first_failure
from megatron_vlm.controller.results import result_from_bytes, result_to_bytes
from megatron_vlm.controller.split_batch import ReplicaBatch
from megatron_vlm.controller.worker_group import Join, Parts, T, WorkerGroup
from megatron_vlm.distributed.collectives import all_gather_bytes
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.worker import MegatronWorker


def local_group(worker: MegatronWorker) -> WorkerGroup:
    """Return the group that this rank's worker belongs to. A process may have several groups."""
    return WorkerGroup(LocalTransport(worker))


class LocalTransport:
    """Transport to this rank's RankWorker. A call is complete when it returns, so its future is
    never pending."""

    def __init__(self, worker: MegatronWorker):
        self.member = RankWorker(worker)
        self.grid, self.dims = worker.grid, worker.dims

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        if parts is not None:
            args = (self.local_part(parts), *args)
        future: Future[T] = Future()
        try:
            future.set_result(join(self.answers(partial(self.member.call, method, *args))))
        except BrokenError:
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
        """Do the work on all ranks, and return the result of each replica. If a rank fails, every
        rank raises its error."""
        local_result: Any = None
        failure: Exception | None = None
        try:
            local_result = work()
        except BrokenError:
            raise
        except Exception as error:
            failure = error
        encoded = result_to_bytes(failure if failure else local_result if self.grid.leads else None)
        # Gather from all ranks, not only from this replica: an error must reach every rank.
        device = self.member.worker.platform.device
        results = [result_from_bytes(result) for result in all_gather_bytes(encoded, None, device)]
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise first_failure(errors) from failure
        leaders = map(self.dims.leader_of, range(self.dims.dp))
        return [results[rank] for rank in leaders]

    def close(self) -> None:
        """Do nothing: torchrun started the processes."""
