"""Ranks as actors of a Ray cluster: where they run, and how they find each other."""

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

PLACE_S = 60.0  # the cluster has this long to find room


def place_ranks(
    processes: int, tp: int, cpus: float, gpus: float
) -> tuple[Any, list[dict[str, Any]]]:
    """Reserve room: a placement group, and the options of each rank's actor. The TP ranks of one
    stage share a node."""
    if processes < 1 or processes % tp:
        raise ConfigError(
            f"does not divide the {processes} processes",
            key="parallel.tp",
            found=tp,
            remedy=f"start a multiple of {tp}",
        )
    bundle = {key: tp * each for key, each in (("CPU", cpus), ("GPU", gpus)) if each}
    place = placement_group([bundle] * (processes // tp))
    try:
        ray.get(place.ready(), timeout=PLACE_S)
    except GetTimeoutError:
        remove_placement_group(place)
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
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place, rank // tp),
        }
        for rank in range(processes)
    ]
    return place, options


def gpus_of_rank(platform: str) -> float:
    """One where the cluster has any: without it, an actor sees none and would take the CPU."""
    return float(platform != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)


def room_for(cpus: float, gpus: float) -> int:
    """How many ranks fit on the nodes that are alive."""
    count = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fits = [has.get(key, 0) / each for key, each in (("CPU", cpus), ("GPU", gpus)) if each]
            count += int(min(fits))
    return count


class StoreAddress(NamedTuple):
    """How the ranks of a job find its store, and the secret that they share."""

    host: str
    port: int
    secret: str


class RankActor:
    """The process of one rank: a base for actors."""

    def __init__(self, rank: int, world: int):
        self.rank = rank
        self.store: dist.TCPStore | None = None
        # As torchrun sets them. With GPUs, Ray shows each actor only its own, as the first.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")

    def __repr__(self) -> str:
        return f"rank {self.rank}"  # what Ray puts before each line

    def open_store(self) -> StoreAddress:
        """On rank 0: open the store through which the ranks find each other. It listens from now
        on, at the address that other nodes know, and there alone: a port that is merely free may
        be taken later, as Ray opens many."""
        host: str = ray.util.get_node_ip_address()
        self.store = listen_at(host, 0)
        return StoreAddress(host, self.store.port, new_secret())

    def use_store(self, store: StoreAddress) -> None:
        """Have torch use this store instead of opening one, as under torchrun."""
        os.environ.update(
            {
                "MASTER_ADDR": store.host,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                SECRET: store.secret,
            }
        )
