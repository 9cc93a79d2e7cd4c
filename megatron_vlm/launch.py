"""Start the processes of a command on this machine, where torchrun has not: torchrun does it."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.schema import Config

DEBUG = "MEGATRON_VLM_DEBUG"  # set: errors keep their traceback
MISTAKE = 2  # exit status


def under_launcher() -> bool:
    """Whether torchrun (or Slurm, or Ray) has started this process as one of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_process(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """All that one process of a job does; its exit status."""
    status = guarded(command, words)
    if status != MISTAKE and "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    return status


def guarded(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """The command's exit status; one plain sentence for a mistake of its user."""
    try:
        return command(words)
    except MegatronVLMError as error:
        if os.environ.get(DEBUG):
            raise
        print(f"megatron-vlm: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return MISTAKE


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


def launch(cfg: Config, module: str, function: str, words: Sequence[str]) -> int:
    """Run `module.function(words)` in as many processes as it takes; the exit status."""
    command = getattr(importlib.import_module(module), function)
    if under_launcher():
        return run_process(command, words)
    import torch

    count = processes_for(cfg, torch.cuda.device_count())
    if not torch.cuda.is_available():
        # Each process would take all cores, and they would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if count == 1:
        return run_process(command, words)
    return _torchrun(count, module, words)


def _torchrun(count: int, module: str, words: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={count}", "-m", module, *words])
    except ChildFailedError as error:  # each child has said itself what was wrong
        codes = [failure.exitcode for failure in error.failures.values()]
        print(f"megatron-vlm: a process ended with exit status {codes[0]}", file=sys.stderr)
        return abs(codes[0])
    return 0
