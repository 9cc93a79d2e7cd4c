"""A group inside torchrun: SPMD, without a controller of its own.

Every rank makes the group around its worker and makes the same calls with the same batches; each
takes its replica's part, and all get the results of the whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vlm.group.group import WorkerGroup
from megatron_vlm.group.handle import Handle
from megatron_vlm.group.member import BrokenError, Member, first_failure
from megatron_vlm.group.parts import Part
from megatron_vlm.worker import MegatronWorker


def local_group(worker: MegatronWorker) -> WorkerGroup:
    """The group of which this rank's worker is a part. A process may have several."""
    return WorkerGroup(LocalRanks(worker))


class LocalRanks:
    """This rank's Member; a call is done when it returns."""

    def __init__(self, worker: MegatronWorker):
        self.member = Member(worker)
        self.dims = worker.dims

    def call(self, method: str, parts: Sequence[Part] | None, *args: Any) -> Handle[list[Any]]:
        if parts is not None:
            part = parts[parallel_state.get_data_parallel_rank()]
            args = (part if self.member.worker.first else replace(part, pixels=None), *args)
        mine: Any = None
        failure: Exception | None = None
        try:
            mine = self.member.call(method, *args)
        except BrokenError:
            raise  # the others cannot be told; they end with this process
        except Exception as error:
            failure = error
        found: list[Any] = [None] * dist.get_world_size()
        # All ranks, not only the replica's: an error must reach every one.
        leads = parallel_state.get_model_parallel_src_rank() == dist.get_rank()
        dist.all_gather_object(found, failure if failure else mine if leads else None)
        errors = [item for item in found if isinstance(item, Exception)]
        if errors:
            raise first_failure(errors) from failure
        replicas = range(self.dims.dp)
        results = [found[replica * self.dims.tp] for replica in replicas]
        return Handle(lambda timeout: results)

    def close(self) -> None:
        """The processes are not ours."""
