"""Start the processes of a command on this machine, where torchrun has not: torchrun does it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from megatron_vlm.errors import ConfigError, MegatronVLMError
from megatron_vlm.exits import INTERRUPTED, MISTAKE
from megatron_vlm.local_job import RESTART, run_job
from megatron_vlm.schema import Config

DEBUG = "MEGATRON_VLM_DEBUG"  # set: errors keep their traceback


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
    except KeyboardInterrupt:
        print("megatron-vlm: stopped at once, nothing was saved", file=sys.stderr)
        return INTERRUPTED


def processes_for(cfg: Config, gpus: int) -> int:
    """launch.processes; else one for each GPU, or on the CPU as few as the layout needs."""
    least = cfg.parallel.tp * cfg.parallel.pp
    count = cfg.launch.processes or gpus or least
    if count % least:
        raise ConfigError(
            f"launch.processes={count} is not a multiple of parallel.tp x parallel.pp = {least}; "
            "change one of them"
        )
    return count


def restarts() -> int:
    """How often this job was started again after a failure, by us or by torchrun."""
    return int(os.environ.get(RESTART) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def check_ray() -> None:
    """Refuse what is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launch.backend=ray needs Ray: pip install 'megatron_vlm[ray]'")


def _count_gpus(cfg: Config) -> int:
    if cfg.platform == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def launch(cfg: Config, module: str, function: str, words: Sequence[str]) -> int:
    """Run `module.function(words)` in as many processes as it takes; the exit status."""
    command = getattr(importlib.import_module(module), function)
    if under_launcher():
        return run_process(command, words)
    if cfg.launch.backend == "ray" and function == "run_train":
        check_ray()
        from megatron_vlm.ray_job import run_ray_job

        return run_ray_job(cfg, words)
    gpus = _count_gpus(cfg)
    count = processes_for(cfg, gpus)
    if not gpus:
        # Each process would take all cores, and they would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if count == 1:
        return run_process(command, words)
    return run_job(module, words, count, cfg.launch.max_restarts)
