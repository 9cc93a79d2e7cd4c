"""Communicators of NCCL on several GPUs: as a run opens them, at first use, or all at the start."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu.step import Figures, MissingError

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.device import memory_outside, pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.distributed.job_store import stay_on_this_machine

ROOT = Path(__file__).parent.parent.parent
SECONDS = 85
PROGRAM = "from gpu.communicators import be_rank; be_rank()"


def communicators(figures: Figures) -> None:
    """Measure seconds and memory of the groups at TP 2, for both ways."""
    count = 2 if figures.dry else torch.cuda.device_count()
    if count < 2:
        raise MissingError(f"a second GPU: torch sees {count}")
    for way in ("at first use", "at the start"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", PROGRAM, f"{folder}/store", figures.platform, way]
            variables = {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
            ranks = [
                subprocess.Popen(
                    command,
                    env=os.environ | variables | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                    stdout=subprocess.PIPE,
                )
                for rank in range(count)
            ]
            [output, *_] = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        figures.say(f"communicators opened {way}", json.loads(output))


def be_rank() -> None:
    """Make the groups of a layout as one rank, use those that a step uses, and print the costs."""
    store, name, way = sys.argv[1:4]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    platform = pick_platform(name)
    stay_on_this_machine()
    memory, began = memory_outside(platform), time.monotonic()
    dist.init_process_group(
        platform.dist_backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=platform.device if platform.is_cuda and way == "at the start" else None,
    )
    grid = RankGroups.create(ParallelDims.create(ParallelConfig(tp=2), world, 2), 0, SECONDS / 60)
    costs = {"groups s": time.monotonic() - began}
    one = torch.ones(1, device=platform.device)
    for group in (grid.tp.group, grid.dp.group, grid.tp_dp.group):
        dist.all_reduce(one, group=group)
    one.item()  # waits for the device
    costs["with their first use s"] = time.monotonic() - began
    costs["GiB outside torch"] = (memory_outside(platform) - memory) / 2**30
    print(json.dumps({name: round(cost, 2) for name, cost in costs.items()}))
    dist.destroy_process_group()
