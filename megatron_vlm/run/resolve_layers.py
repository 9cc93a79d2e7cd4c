"""The setting `parallel.layers_per_stage=auto` in a run. Rank 0 reads the data and decides for all
ranks."""

from pathlib import Path

import torch.distributed as dist

from megatron_vlm.config import to_yaml
from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.agreement import fail_together, store_barrier
from megatron_vlm.distributed.collectives import broadcast_json
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.atomic import write_text
from megatron_vlm.planner.auto_split import decide, needs_auto_split, with_layers
from megatron_vlm.planner.row_sizes import mix_of
from megatron_vlm.training.worker import PATIENCE


def resolve_layers(cfg: Config, watchdog: Watchdog) -> tuple[Config, str]:
    """Return the configuration with the layers of each stage, equal on all ranks, and on rank 0 a
    sentence about them. If the layers must be decided, this is a collective, and config.yaml then
    has them, too."""
    if not needs_auto_split(cfg):
        return cfg, ""
    platform, remark = pick_platform(cfg.platform), ""
    watchdog.begin_phase(0, "planning the stages", files=True)
    join_world(platform, PATIENCE * cfg.launch.timeout_minutes)
    failure: MegatronVLMError | None = None
    layers: tuple[int, ...] = ()
    if dist.get_rank() == 0:
        try:
            sizes = read_sizes(cfg.model.path, cfg.data.add_tokens)
            split = decide(cfg, sizes, dist.get_world_size(), platform, mix_of(cfg, sizes))
            layers, remark = split.layers, split.text
        except MegatronVLMError as error:
            failure = error
    store_barrier("the layers of each stage")
    with fail_together(platform.device, DataError):
        if failure is not None:
            raise failure
    cfg = with_layers(cfg, tuple(broadcast_json(layers, 0, None, platform.device)))
    if dist.get_rank() == 0:
        write_text(Path(cfg.run) / "config.yaml", to_yaml(cfg))
    return cfg, remark
