"""Frozen models of the ranks, beside the model that is trained: its reference, which is the model
before the first step, teachers, and the reward model of `rl`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_vlm.config.objectives import trains_adapters_alone
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.config.trainable import SWITCHES
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.spec import SCORE
from megatron_vlm.lora.layers import LowRank
from megatron_vlm.training.worker import MegatronWorker


class FrozenModels:
    """Models that only score rows. They have the processes and the degrees of parallelism of the
    trained model, and are loaded at first use. Two requests for the same weights get the same
    model. The methods are collectives."""

    def __init__(self, worker: MegatronWorker):
        self.worker = worker
        self.loaded: list[tuple[Config, MegatronWorker]] = []

    @contextmanager
    def reference(self, adapters_off: bool | None = None) -> Iterator[MegatronWorker]:
        """Yield the initial model: the trained one without its adapters, if these alone are
        trained, or one of its own."""
        if adapters_off is None:
            adapters_off = trains_adapters_alone(self.worker.cfg)
        if adapters_off:
            with without_adapters(self.worker):
                yield self.worker
        else:
            yield self._load(self.worker.cfg)

    def teacher(self, path: str) -> MegatronWorker:
        """Return the model of a checkpoint, without adapters."""
        try:
            return self._load(teacher_config(self.worker.cfg, path))
        except ConfigError as error:
            raise error.within(f"teacher.path={path}") from error

    def reward_model(self, folder: str) -> MegatronWorker:
        """Return the model of rl.reward=model:FOLDER, which must have a scalar head."""
        cfg = teacher_config(self.worker.cfg, folder)
        model = self._load(replace(cfg, train=replace(cfg.train, objective="reward")))
        if model.source.has_new_score:
            raise ConfigError(
                f"has no {SCORE}, so it is no reward model",
                key="rl.reward",
                found=f"model:{folder}",
                remedy="give an export of a run with train.objective=reward",
            )
        return model

    def _load(self, cfg: Config) -> MegatronWorker:
        for known, model in self.loaded:
            if known == cfg:
                return model
        model = MegatronWorker(cfg, training=False, watchdog=self.worker.watchdog)
        self.loaded.append((cfg, model))
        return model


@contextmanager
def without_adapters(worker: MegatronWorker) -> Iterator[None]:
    """Switch off all adapters: their second matrices are zero inside the context."""
    worker.gather.finish()
    matrices = [
        module.B
        for chunk in worker.chunks
        for module in chunk.modules()
        if isinstance(module, LowRank)
    ]
    saved = [matrix.detach().clone() for matrix in matrices]
    try:
        with torch.no_grad():
            for matrix in matrices:
                matrix.zero_()
        yield
    finally:
        with torch.no_grad():
            for matrix, values in zip(matrices, saved, strict=True):
                matrix.copy_(values)


def teacher_config(cfg: Config, path: str) -> Config:
    """Return the configuration of a teacher. It has the student's degrees of parallelism, but as
    many layers as it likes, so its stages have an even share of them."""
    if path == cfg.model.path and not cfg.lora.rank:
        return cfg
    # Settings of training, which a model without experts or without trained parts would refuse.
    training: dict[str, Any] = {f"freeze_{part}": False for part in SWITCHES}
    training |= {"router_balance_loss": 0.0, "router_z_loss": 0.0, "mtp": "carry"}
    return replace(
        cfg,
        model=replace(cfg.model, path=path, **training),
        data=replace(cfg.data, add_tokens=()),
        lora=LoraConfig(),
        rl=replace(cfg.rl, replay_routing=False),
        parallel=replace(cfg.parallel, layers_per_stage=None),
    )
