"""Frozen models of the ranks, next to the model that is trained: the reference of rl.kl_coef, and
teachers. They have the processes and the degrees of parallelism of the trained model."""

from dataclasses import replace
from typing import Any

from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import SWITCHES
from megatron_vlm.errors import ConfigError
from megatron_vlm.training.worker import MegatronWorker


class FrozenModels:
    """Models that only score rows. Two requests for the same weights get the same model."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker
        self.loaded: list[tuple[Config, MegatronWorker]] = []

    def reference(self) -> MegatronWorker:
        """Return the initial model. With LoRA its adapters are zero, or those of lora.path. A
        collective."""
        return self._load(self.worker.cfg)

    def teacher(self, path: str) -> MegatronWorker:
        """Return the model of a checkpoint, without adapters. A collective."""
        try:
            return self._load(teacher_config(self.worker.cfg, path))
        except ConfigError as error:
            raise error.within(f"rl.teacher={path}") from error

    def _load(self, cfg: Config) -> MegatronWorker:
        for known, model in self.loaded:
            if known == cfg:
                return model
        model = MegatronWorker(cfg, training=False, watchdog=self.worker.watchdog)
        self.loaded.append((cfg, model))
        return model


def teacher_config(cfg: Config, path: str) -> Config:
    """Return the configuration of a teacher. It has the student's degrees of parallelism, but as
    many layers as it likes, so its stages have an even share of them."""
    if path == cfg.model.path and not cfg.lora.rank:
        return cfg
    # Settings of training, which a model without experts or without trained parts would refuse.
    training: dict[str, Any] = {f"freeze_{part}": False for part in SWITCHES}
    training |= {"router_balance_loss": 0.0, "router_z_loss": 0.0}
    return replace(
        cfg,
        model=replace(cfg.model, path=path, **training),
        data=replace(cfg.data, add_tokens=()),
        lora=LoraConfig(),
        parallel=replace(cfg.parallel, layers_per_stage=None),
    )
