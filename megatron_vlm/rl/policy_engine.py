"""Engines of the trainer: their settings, and the weights that all ranks send to them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_vlm.config.evaluation_checks import has_agents
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.distributed.agreement import fail_together
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Adapter, SamplerError
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import Part, TensorSpec
from megatron_vlm.io.hub import folder_of
from megatron_vlm.training.worker import MegatronWorker


def settings_of(worker: MegatronWorker, data: DataSet) -> EngineSettings:
    """Return the settings that all engines share."""
    cfg, rl, engine = worker.cfg, worker.cfg.rl, worker.cfg.engine
    max_images = max(int(index.images.max()) for index in data.indexes)
    has_turns = rl.environment is not None or rl.agent is not None
    more_images = rl.turns if has_turns else 0
    if engine.draft_tokens and rl.replay_routing and not worker.platform.is_cuda:
        raise ConfigError(
            "would mix the experts of rejected drafts with the answer's, which vLLM on a CPU does "
            "not tell apart",
            key="engine.draft_tokens",
            found=engine.draft_tokens,
            remedy="set it to 0, or rl.replay_routing=false",
        )
    length = cfg.data.max_tokens + rl.max_new_tokens
    if has_turns:
        length = max(length, rl.max_tokens)
    return EngineSettings.from_config(
        engine,
        str(folder_of(cfg.model.path)),
        dtype=str(worker.chunks[0].config.params_dtype).removeprefix("torch."),
        max_len=engine.max_len or length,
        pictures=engine.pictures or max(1, max_images + more_images),
        videos=engine.videos,
        has_media=has_agents(rl)
        or any(index.images.any() or index.videos.any() for index in data.indexes),
        lora_rank=cfg.lora.rank,
        lora_vision=has_tower_weights(worker.adapted),
        routing_layers=worker.source.sizes.text.expert_layers if rl.replay_routing else (),
    )


def has_tower_weights(weights: Sequence[TensorSpec]) -> bool:
    """Return whether some weights are in the vision tower or its mergers. An engine
    serves adapters there only if it was started with that setting."""
    return any(weight.part in (Part.vision, Part.merger) for weight in weights)


def sync_engine_weights(
    worker: MegatronWorker, engines: EngineThread | None, version: int, folder: Path
) -> None:
    """Send the current weights to the engines: tensor by tensor, or as an adapter in `folder`. This
    is a collective; rank 0 has the engines, and all ranks raise its error."""
    interrupt = worker.cfg.rl.interrupt
    with fail_together(SamplerError):
        if not worker.cfg.lora.rank:
            named = worker.named_weights()
            try:
                if engines is not None:
                    engines.submit(engines.engine.update(named, version, interrupt)).result()
            finally:
                for _ in named:  # all ranks give each tensor, also if an engine refused one
                    pass
            return
        target = folder / f"adapter-{version}"
        worker.export_hf(str(target), kind="adapter")
        if engines is not None:
            update = engines.engine.update(Adapter(str(target)), version, interrupt)
            engines.submit(update).result()
            for older in folder.glob("adapter-*"):
                if older != target:
                    shutil.rmtree(older)
