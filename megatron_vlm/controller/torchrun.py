"""A group inside torchrun: SPMD, without a separate controller.

Every rank makes a group around its worker and makes the same calls with the same batches; each
takes its replica's part, and all get the results of the whole batch.
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
    """The group of which this rank's worker is a part. A process may have several."""
    return WorkerGroup(LocalTransport(worker))


class LocalTransport:
    """This rank's Member. A call is done when it returns: its future is never pending."""

    def __init__(self, worker: MegatronWorker):
        self.member = RankWorker(worker)
        self.grid, self.dims = worker.grid, worker.dims

    def call(self, join: Join[T], method: str, parts: Parts, *args: Any) -> Future[T]:
        if parts is not None:
            args = (self.mine_of(parts), *args)
        future: Future[T] = Future()
        try:
            future.set_result(join(self.answers(partial(self.member.call, method, *args))))
        except BrokenError:
            raise  # at once: the other ranks cannot be told, and end when this process does
        except MegatronVLMError as error:
            future.set_exception(error)
        return future

    def mine_of(self, parts: Sequence[ReplicaBatch]) -> ReplicaBatch:
        """The part of this rank's replica."""
        part = parts[self.grid.dp.rank]
        return part if self.grid.first else replace(part, pixels=None)

    def answers(self, work: Callable[[], Any]) -> list[Any]:
        """Of each replica, after all ranks have done the work. An error of any is raised by all."""
        mine: Any = None
        failure: Exception | None = None
        try:
            mine = work()
        except BrokenError:
            raise
        except Exception as error:
            failure = error
        answer = result_to_bytes(failure if failure else mine if self.grid.leads else None)
        # From all ranks, not only the replica's: an error must reach every one of them.
        device = self.member.worker.platform.device
        found = [result_from_bytes(each) for each in all_gather_bytes(answer, None, device)]
        if errors := [each for each in found if isinstance(each, Exception)]:
            raise first_failure(errors) from failure
        leaders = map(self.dims.leader_of, range(self.dims.dp))
        return [found[rank] for rank in leaders]

    def close(self) -> None:
        """Nothing to end: torchrun started the processes."""
