"""Programs of test_exit_cases.py. They import as little as they can, since each runs in a process
of its own, and so do its data workers."""

import os
import sys
import time
from multiprocessing import current_process
from pathlib import Path

import torch

from megatron_vlm.config.schema import Config
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.distributed.launch.launch import ray_address
from megatron_vlm.engines.vllm_process import _environment
from megatron_vlm.io.atomic import scratch_folder


class Work:
    """Tasks of which the first is done at once and the others never."""

    def __getitem__(self, task: int) -> int:
        if task:
            time.sleep(3600)
        return task


def hold() -> None:
    """Wait for data workers, as a trainer does."""
    results = map_in_processes(Work(), range(8), 2, 1)
    print(next(results), flush=True)
    next(results)


def make_scratch() -> None:
    """Make a scratch folder in TMPDIR, and workers with sockets there."""
    results = map_in_processes(Work(), range(8), 1, 1)
    print(scratch_folder(), next(results), flush=True)
    sys.stdin.read()


class Tensors:
    """Tensors, each of which passes through a socket of the worker that makes it."""

    def __getitem__(self, task: int) -> torch.Tensor:
        return torch.full((2,), task)


def make_sockets() -> None:
    """Print the folders that a process with a worker, its engines and its Ray cluster use."""
    (made,) = map_in_processes(Tensors(), [3], 1, 1)
    sockets = Path(current_process()._config["tempdir"])
    ray_address(Config())
    engine = _environment()["VLLM_RPC_BASE_PATH"]
    mode = oct(sockets.stat().st_mode)
    print(made.tolist(), scratch_folder(), sockets, mode, engine, os.environ["RAY_TMPDIR"])
