"""Ranks as actors of a Ray cluster: their placement, and the store through which they meet."""

import os
from typing import Any, NamedTuple

import ray  # type: ignore
import torch.distributed as dist
from ray.exceptions import GetTimeoutError  # type: ignore
from ray.util.placement_group import placement_group, remove_placement_group  # type: ignore
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore

from megatron_vlm.distributed.job_store import listen_at
from megatron_vlm.distributed.process import SECRET, new_secret
from megatron_vlm.errors import ConfigError

PLACE_S = 60.0  # time for the cluster to find room


def place_ranks(
    processes: int, tp: int, cpus: float, gpus: float
) -> tuple[Any, list[dict[str, Any]]]:
    """Reserve room in the cluster. Return a placement group and the options of each rank's actor.
    The TP ranks of one stage share a node."""
    if processes < 1 or processes % tp:
        raise ConfigError(
            f"does not divide the {processes} processes",
            key="parallel.tp",
            found=tp,
            remedy=f"start a multiple of {tp}",
        )
    bundle = {key: tp * each for key, each in (("CPU", cpus), ("GPU", gpus)) if each}
    group = placement_group([bundle] * (processes // tp))
    try:
        ray.get(group.ready(), timeout=PLACE_S)
    except GetTimeoutError:
        remove_placement_group(group)
        raise ConfigError(
            f"no room in {PLACE_S:.0f} s for {processes // tp} times {bundle} among "
            f"{ray.cluster_resources()}",
            place="the Ray cluster",
            remedy="start fewer processes, or ask for less for each",
        ) from None
    options = [
        {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank // tp),
        }
        for rank in range(processes)
    ]
    return group, options


def gpus_of_rank(platform: str) -> float:
    """Return 1 if the cluster has any GPU: an actor without one sees none and would use the CPU."""
    return float(platform != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)


def room_for(cpus: float, gpus: float) -> int:
    """Return the number of ranks that fit on the nodes that are alive."""
    needed = {key: each for key, each in (("CPU", cpus), ("GPU", gpus)) if each}
    rooms = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(room.get(key, 0) / each for key, each in needed.items())) for room in rooms)


class StoreAddress(NamedTuple):
    """Address of a job's store, with the secret of the ranks."""

    host: str
    port: int
    secret: str


class RankActor:
    """Process of one rank: a base class of actors."""

    def __init__(self, rank: int, world: int):
        self.rank = rank
        self.store: dist.TCPStore | None = None
        # torchrun sets the same variables. With GPUs, Ray shows each actor only its own, as the
        # first.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")

    def __repr__(self) -> str:
        return f"rank {self.rank}"  # Ray prints it before each line

    def open_store(self) -> StoreAddress:
        """Open, on rank 0, the store through which the ranks meet. It listens from now on, and only
        at the address that other nodes know. A port that is only free might be taken later, as Ray
        opens many."""
        host: str = ray.util.get_node_ip_address()
        self.store = listen_at(host, 0)
        return StoreAddress(host, self.store.port, new_secret())

    def use_store(self, store: StoreAddress) -> None:
        """Make torch use this store instead of opening one, as under torchrun."""
        os.environ.update(
            {
                "MASTER_ADDR": store.host,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                SECRET: store.secret,
            }
        )
