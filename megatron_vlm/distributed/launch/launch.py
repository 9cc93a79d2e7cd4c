"""Start of a command's processes, unless torchrun, Slurm or Ray has already started them."""

import os
import tempfile
from collections.abc import Callable, Sequence

from megatron_vlm.config.checks import processes_for
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.launch.local_launcher import run_job
from megatron_vlm.distributed.process import is_under_launcher, run_process
from megatron_vlm.errors import require_extra

_RAY_ROOM = 36  # bytes of TMPDIR: Ray adds 71 for its sockets, and Linux allows 107


def ray_address(cfg: Config) -> str:
    """Return the address of the cluster; "local" for a new one, which stays on loopback."""
    address = cfg.launch.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        # Ray reads the variable when it is imported. It is for laptops, where Ray uses loopback as
        # the address of a node. Without it, Ray listens at every address, even if told otherwise.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if len(os.fsencode(tempfile.gettempdir())) > _RAY_ROOM:
            os.environ.setdefault("RAY_TMPDIR", "/tmp")  # Ray's default without TMPDIR
    return address


def launch(
    cfg: Config, module: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]
) -> int:
    """Run `command(arguments)` in as many processes as the layout needs, and return the exit
    status. Processes that are started here run `python -m module arguments`, which does the
    same."""
    if is_under_launcher():
        return run_process(command, arguments)
    if cfg.launch.backend == "ray" and command.__name__ in ("run_train", "run_rl", "run_serve"):
        require_extra("ray", "ray", key="launch.backend", found="ray")
        address = ray_address(cfg)
        from megatron_vlm.distributed.launch.ray_launcher import run_ray_job

        return run_ray_job(cfg, arguments, address, (command.__module__, command.__name__))
    gpus = 0
    if cfg.platform != "cpu":
        from megatron_vlm.distributed.device import count_gpus  # the module imports torch

        gpus = count_gpus()
    count = processes_for(cfg, gpus)
    if not gpus:
        # Each process would start a thread for every core, and they would slow each other down.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if count == 1 and not cfg.launch.max_restarts:  # a restart needs another process
        return run_process(command, arguments)
    return run_job(module, arguments, count, cfg.launch.max_restarts)
