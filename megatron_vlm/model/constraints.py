"""Refusals of settings that cannot work: in the configuration, before any weight is read, and again
on the built model, in case something else turned them on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.objectives import check_embedding_size
from megatron_vlm.config.schema import Config
from megatron_vlm.config.trainable import SWITCHES, learns
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.family.config_json import Counts
from megatron_vlm.hf.layer_backends import BACKENDS, Refusal

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vlm.family.spec import ModelSizes

_CP = "context parallelism would cut an image's tokens, and its DeepStack features, over ranks"
_SP = "sequence parallelism would cut the sequence into which visual features are scattered"
_CHUNKS = "each stage has as many chunks as parallel.virtual_stages says"
_GATHER = {
    "distributed_optimizer": "without it each replica has all new weights and gathers none",
    "overlap_grad_reduce": "without it the weights are one piece, with no second to overlap with",
}
_MOE_TP = "Megatron trains MoE with TP>1 only under sequence parallelism, which is off here"


def check_config(cfg: Config, sizes: "ModelSizes", dims: ParallelDims) -> None:
    """Refuse settings that cannot work, from the configuration and the checkpoint's config.json
    alone."""
    check_supported(cfg)
    _raise_first(BACKENDS[cfg.model.backend].layer_refusals(sizes.text))
    text, deepstack = sizes.text, sizes.vision.deepstack
    check_embedding_size(cfg, text.hidden)
    experts = text.experts.count if text.experts else 0
    counts = Counts(text.num_layers, text.divided_by_tp, deepstack, experts)
    check_layout(counts, dims)
    check_router_keys(cfg, counts)


def check_supported(cfg: Config) -> None:
    """Refuse settings that cannot work with any checkpoint."""
    check_values(cfg)
    _raise_first(_refusals(cfg))


def _raise_first(refusals: Iterator[Refusal]) -> None:
    for key, value, reason, remedy in refusals:
        raise ConfigError(f": {reason}", key=key, found=value, remedy=remedy)


def check_backend(cfg: Config, has_gpu: bool) -> None:
    """Refuse a backend that cannot compute here."""
    if BACKENDS[cfg.model.backend].has_own_kernels and not has_gpu:
        raise ConfigError(
            "has kernels for CUDA alone, and this run computes on the CPU",
            key="model.backend",
            found=cfg.model.backend,
            remedy="set model.backend=torch",
        )


def check_layout(counts: Counts, dims: ParallelDims) -> None:
    """Refuse a layout that does not divide the model."""
    if counts.experts and dims.tp > 1:
        raise ConfigError(
            f"with {counts.experts} experts cannot work: {_MOE_TP}",
            key="parallel.tp",
            found=dims.tp,
            allowed=(1,),
            remedy="set parallel.tp=1, and divide the weights by parallel.ep and parallel.pp",
        )
    dims.check_divides(counts.divided_by_tp)
    if (counts.deepstack or 0) > counts.layers:
        raise ConfigError(
            f"is less than the {counts.deepstack} DeepStack layers that the vision tower feeds",
            place="config.json",
            key="text_config.num_hidden_layers",
            found=counts.layers,
            remedy="give a checkpoint of Qwen3-VL, which this one is not",
        )
    if dims.ep > 1 and not counts.experts:
        raise ConfigError(
            ": the model has no experts",
            key="parallel.ep",
            found=dims.ep,
            allowed=(1,),
            remedy="set parallel.ep=1",
        )
    if counts.experts % dims.ep:
        raise ConfigError(
            f"does not divide the model's num_experts={counts.experts}",
            key="parallel.ep",
            found=dims.ep,
            allowed=[ep for ep in range(1, counts.experts + 1) if not counts.experts % ep],
            remedy=f"set parallel.ep to a divisor of {counts.experts}",
        )


def check_router_keys(cfg: Config, counts: Counts) -> None:
    """Refuse a router loss, or a replay of a router's choices, for a model that has no router."""
    for key, found, off in (
        ("model.router_balance_loss", cfg.model.router_balance_loss, "0"),
        ("model.router_z_loss", cfg.model.router_z_loss, "0"),
        ("rl.replay_routing", cfg.rl.replay_routing, "false"),
    ):
        if found and not counts.experts:
            raise ConfigError(
                ": the model has no experts, so it has no router",
                key=key,
                found=found,
                remedy=f"set {key}={off}",
            )


def _refusals(cfg: Config) -> Iterator[Refusal]:
    """Yield the values that cannot work."""
    if cfg.parallel.overlap_param_gather:
        for key in ("distributed_optimizer", "overlap_grad_reduce"):
            if getattr(cfg.parallel, key) is False:
                reason = f"parallel.{key} is false, and {_GATHER[key]}"
                remedy = f"set parallel.{key}=true, or parallel.overlap_param_gather=false"
                yield "parallel.overlap_param_gather", True, reason, remedy
    yield from BACKENDS[cfg.model.backend].refusals(cfg)
    learning = any(learns(cfg, part) for part in SWITCHES) or cfg.model.mtp == "train"
    if not learning and not cfg.lora.rank:
        reason = "vision, merger and language are all frozen: nothing is left to train"
        yield "model.freeze_language", True, reason, "unfreeze one of them"


def check_built(config: "TransformerConfig", dims: ParallelDims) -> None:
    """Refuse again, on the config that the built model really runs with."""
    moe_under_tp = config.num_moe_experts is not None and config.tensor_model_parallel_size > 1
    chunks = config.virtual_pipeline_model_parallel_size or 1
    lengths = "what travels between stages has the length of its micro-batch and its features"
    mean = "the loss would be averaged per micro-batch instead of over the global batch"
    for wrong, key, reason in (
        (config.sequence_parallel, "sequence_parallel", _SP),
        (config.context_parallel_size != 1, "context_parallel_size", _CP),
        (moe_under_tp, "num_moe_experts", _MOE_TP),
        (not config.variable_seq_lengths, "variable_seq_lengths", lengths),
        (not config.calculate_per_token_loss, "calculate_per_token_loss", mean),
        (chunks != dims.virtual_stages, "virtual_pipeline_model_parallel_size", _CHUNKS),
    ):
        if wrong:
            raise ConfigError(
                f": {reason}",
                key=f"TransformerConfig.{key}",
                found=getattr(config, key),
                remedy="undo what changed the built model's TransformerConfig",
            )
