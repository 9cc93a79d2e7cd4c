"""Start the processes of a run on this machine, where torchrun has not: torchrun does it."""

import os
import sys

from megatron_vlm.errors import ConfigError
from megatron_vlm.schema import Config


def under_launcher() -> bool:
    """Whether torchrun (or Slurm, or Ray) has started this process as one of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def processes_for(cfg: Config, gpus: int) -> int:
    """launch.processes; else one for each GPU, or on the CPU as few as the layout needs."""
    least = cfg.parallel.tp * cfg.parallel.pp
    count = cfg.launch.processes
    if count is None:
        count = gpus if gpus and cfg.platform != "cpu" else least
    if count % least:
        raise ConfigError(
            f"launch.processes={count} is not a multiple of parallel.tp x parallel.pp = {least}; "
            "change one of them"
        )
    return count


def launch(cfg: Config, overrides: list[str]) -> int:
    """Run `megatron_vlm.train` in as many processes as it takes; the exit status."""
    from megatron_vlm.train import main

    if under_launcher():
        return main(overrides)
    import torch

    count = processes_for(cfg, torch.cuda.device_count())
    if not torch.cuda.is_available():
        # Each process would take all cores, and they would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if count == 1:
        return main(overrides)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    words = ["--standalone", f"--nproc-per-node={count}", "-m", "megatron_vlm.train", *overrides]
    try:
        torchrun(words)
    except ChildFailedError as error:  # each child has said itself what was wrong
        codes = [failure.exitcode for failure in error.failures.values()]
        print(f"megatron-vlm: a process ended with exit status {codes[0]}", file=sys.stderr)
        return abs(codes[0])
    return 0
