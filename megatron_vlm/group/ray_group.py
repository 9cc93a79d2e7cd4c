"""A group over Ray: one actor for each rank, held by a controller that is no rank itself.

Needs the extra `ray`. What a call reads of a batch goes into Ray's object store once, as the bytes
of a TensorBatch for each replica; pixel values are an object of their own, which only the first
stage's actors take out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray  # type: ignore
from ray.exceptions import RayActorError, RayTaskError  # type: ignore
from ray.util.placement_group import remove_placement_group  # type: ignore

from megatron_vlm.config.schema import Config
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.ray_cluster import MeetingPlace, go_to, place_ranks, take_rank
from megatron_vlm.group.group import WorkerGroup
from megatron_vlm.group.handle import Handle
from megatron_vlm.group.member import Member, WorkerError, first_failure, of_rank
from megatron_vlm.group.parts import Part
from megatron_vlm.worker import MegatronWorker

GRACE_S = 20.0  # for the other ranks to end their call, once one has failed


def start_ray_group(
    cfg: Config,
    processes: int,
    cpus: float = 1.0,
    gpus: float = 0.0,
    training: bool = True,
) -> WorkerGroup:
    """Start so many actors with these resources each, in a Ray that is initialised, and a worker
    in each. The TP ranks of one stage share a node."""
    place, options = place_ranks(processes, cfg.parallel.tp, cpus, gpus)
    make = ray.remote(RankActor)
    actors: list[Any] = [
        make.options(**own).remote(rank, processes) for rank, own in enumerate(options)
    ]
    crew = Crew(actors, place)
    address = crew.gather([actors[0].open_place.remote()])[0]
    crew.gather([actor.go_to.remote(address) for actor in actors])
    return WorkerGroup(RayRanks(crew, cfg, training))


def share_ray_group(group: WorkerGroup, cfg: Config, training: bool = True) -> WorkerGroup:
    """A second group in the processes of the first, such as the reference of a policy. Its layout
    must be that of the first, and both end when one is closed."""
    assert isinstance(group.ranks, RayRanks)
    return WorkerGroup(RayRanks(group.ranks.crew, cfg, training))


class RankActor:
    """One rank and its workers."""

    def __init__(self, rank: int, world: int):
        self.rank = rank
        take_rank(rank, world)
        self.members: list[Member] = []
        self.pixel_bytes = 0  # that the last call brought
        self.place: MeetingPlace | None = None

    def open_place(self) -> tuple[str, int]:
        """Of rank 0: where all meet."""
        self.place = MeetingPlace()
        return self.place.address

    def go_to(self, address: tuple[str, int]) -> None:
        go_to(address)

    def start(self, cfg: Config, training: bool) -> tuple[int, ParallelDims]:
        """Make a worker; its number here, and the layout."""
        try:
            worker = MegatronWorker(cfg, training)
        except Exception as error:
            raise of_rank(error, self.rank) from error
        self.members.append(Member(worker))
        return len(self.members) - 1, worker.dims

    def call(self, number: int, method: str, *args: Any) -> Any:
        """A method of a Member that takes no batch."""
        return self._answer(number, method, *args)

    def call_on_part(
        self,
        number: int,
        method: str,
        batch: np.ndarray,
        pixels: np.ndarray | None,
        first_row: int,
        *args: Any,
    ) -> Any:
        """A method of a Member on a part of a batch, which comes as bytes."""
        self.pixel_bytes = 0 if pixels is None else pixels.nbytes
        values = None if pixels is None else TensorBatch.from_bytes(pixels.data)
        part = Part(TensorBatch.from_bytes(batch.data), values, first_row)
        return self._answer(number, method, part, *args)

    def last_pixel_bytes(self) -> int:
        """Of the last call on a part."""
        return self.pixel_bytes

    def _answer(self, number: int, method: str, *args: Any) -> Any:
        member = self.members[number]
        result = member.call(method, *args)
        # The other ranks of a replica have the same, which need not travel.
        leads = self.rank == member.worker.dims.replica_of(self.rank) * member.worker.dims.tp
        return result if leads else None


class Crew:
    """The actors of one set of processes."""

    def __init__(self, actors: Sequence[Any], place: Any):
        self.actors = actors
        self.place = place
        self.ended: str | None = None

    def gather(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The result of every rank. The first error is raised once all have ended their call; the
        processes are ended where one has died, or others do not come out of theirs."""
        found: dict[Any, Any] = {}
        errors: list[Exception] = []
        going = list(refs)
        while going:
            done, going = ray.wait(going, timeout=GRACE_S if errors else timeout)
            if not done and not errors:
                raise TimeoutError(f"{len(going)} of {len(refs)} ranks work on after {timeout} s")
            if not done:
                break
            found[done[0]] = _outcome(done[0], refs.index(done[0]))
            errors = [item for item in found.values() if isinstance(item, Exception)]
        if not errors:
            return [found[ref] for ref in refs]
        error = first_failure(errors)
        if going or any(isinstance(item, DeadError) for item in errors):
            self.close(str(error))
            raise WorkerError(f"the group has ended: {self.ended}") from error
        raise error

    def close(self, why: str = "it was closed") -> None:
        """End all actors; whoever calls them later is told why."""
        if self.ended is None:
            self.ended = why
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self.place)


class RayRanks:
    """A worker in each process of a crew."""

    def __init__(self, crew: Crew, cfg: Config, training: bool):
        self.crew = crew
        found = crew.gather([actor.start.remote(cfg, training) for actor in crew.actors])
        self.number, self.dims = found[0]

    def call(self, method: str, parts: Sequence[Part] | None, *args: Any) -> Handle[list[Any]]:
        if self.crew.ended is not None:
            raise WorkerError(f"the group has ended: {self.crew.ended}")
        if parts is None:
            refs = [actor.call.remote(self.number, method, *args) for actor in self.crew.actors]
        else:
            refs = self._send(method, parts, args)
        leads = [replica * self.dims.tp for replica in range(self.dims.dp)]

        def wait(timeout: float | None) -> list[Any]:
            found = self.crew.gather(refs, timeout)
            return [found[rank] for rank in leads]

        return Handle(wait)

    def _send(self, method: str, parts: Sequence[Part], args: Sequence[Any]) -> list[Any]:
        stored = [(_store(part.batch), _store(part.pixels), part.first_row) for part in parts]
        refs = []
        for rank, actor in enumerate(self.crew.actors):
            batch, pixels, first_row = stored[self.dims.replica_of(rank)]
            mine = pixels if self.dims.stage_of_rank(rank) == 0 else None
            refs.append(
                actor.call_on_part.remote(self.number, method, batch, mine, first_row, *args)
            )
        return refs

    def close(self) -> None:
        self.crew.close()


def _store(batch: TensorBatch | None) -> Any:
    """In the object store, as an array: actors of a node read it where it lies."""
    return None if batch is None else ray.put(np.frombuffer(batch.to_bytes(), dtype=np.uint8))


class DeadError(WorkerError):
    """A process that is gone."""


def _outcome(ref: Any, rank: int) -> Any:
    """The result of a call that has ended, or the worker's own error, without Ray's layers."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, Exception) else error
    except RayActorError as error:
        return DeadError(f"rank {rank}: its process has died: {error}")
