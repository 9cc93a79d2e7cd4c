"""Room for ranks in a Ray cluster, and where they meet."""

import os
from typing import Any

import ray  # type: ignore
import torch.distributed as dist
from ray.exceptions import GetTimeoutError  # type: ignore
from ray.util.placement_group import placement_group, remove_placement_group  # type: ignore
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore

from megatron_vlm.errors import ConfigError

PLACE_S = 60.0  # for the cluster to find room


def place_ranks(
    processes: int, tp: int, cpus: float, gpus: float
) -> tuple[Any, list[dict[str, Any]]]:
    """A placement group and the options of each rank's actor. The TP ranks of one stage share a
    node."""
    if processes < 1 or processes % tp:
        raise ConfigError(
            f"parallel.tp={tp} does not divide the {processes} processes; start a multiple of {tp}"
        )
    bundle = {key: tp * each for key, each in (("CPU", cpus), ("GPU", gpus)) if each}
    place = placement_group([bundle] * (processes // tp))
    try:
        ray.get(place.ready(), timeout=PLACE_S)
    except GetTimeoutError:
        remove_placement_group(place)
        raise ConfigError(
            f"no room in {PLACE_S:.0f} s for {processes // tp} times {bundle} in a Ray cluster "
            f"of {ray.cluster_resources()}; start fewer processes, or ask for less each"
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


def room_for(cpus: float, gpus: float) -> int:
    """How many ranks the nodes that are alive can hold together."""
    count = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            fits = [has.get(key, 0) / each for key, each in (("CPU", cpus), ("GPU", gpus)) if each]
            count += int(min(fits))
    return count


def take_rank(rank: int, world: int) -> None:
    """This process is a rank, as torchrun's variables say it. With GPUs, Ray shows each actor only
    its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")


class MeetingPlace:
    """Where the ranks find each other: on rank 0's node. The store listens from the start: a port
    that was only found free could be another's by the time (Ray's processes take many)."""

    def __init__(self) -> None:
        host: str = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = (host, self.store.port)


def go_to(address: tuple[str, int]) -> None:
    """Torch is to take the store that is there, as under torchrun."""
    os.environ.update(
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
