"""What cannot work is refused: in the configuration, before any weight is read, and again on the
built model, so that nothing turns it on behind our back."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megatron_vlm.config.schema import Config
from megatron_vlm.config.validate import check_values
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """A value that cannot work: key, value, the reason and the way out."""

    key: str
    value: object
    reason: str
    way_out: str

    def error(self) -> ConfigError:
        return ConfigError(f"{self.key}={self.value}: {self.reason}; {self.way_out}")


_PACKING = "rows packed into one sequence would need per-image position resets and block masks"
_CP = "context parallelism would cut an image's tokens, and its DeepStack features, over ranks"
_SP = "sequence parallelism would cut the sequence into which visual features are scattered"
_MOE_TP = "Megatron trains MoE with TP>1 only under sequence parallelism, which is off here"


def check_config(cfg: Config, hf_config: PretrainedConfig, dims: ParallelDims) -> None:
    """Refuse what cannot work, from the configuration and the checkpoint's config.json alone."""
    check_values(cfg)
    for refusal in _config_refusals(cfg, hf_config):
        raise refusal.error()
    text = hf_config.text_config
    dims.check_divides(text.num_attention_heads, text.num_key_value_heads, text.intermediate_size)
    deepstack = len(hf_config.vision_config.deepstack_visual_indexes)
    if deepstack > text.num_hidden_layers:
        raise ConfigError(
            f"the vision tower feeds {deepstack} DeepStack layers, but the decoder has "
            f"{text.num_hidden_layers}; the checkpoint's config.json is not a Qwen3-VL one"
        )


def _config_refusals(cfg: Config, hf_config: PretrainedConfig) -> list[Refusal]:
    found = []
    parallel, train, model = cfg.parallel, cfg.train, cfg.model
    if train.packing:
        found.append(
            Refusal(
                "train.packing",
                train.packing,
                _PACKING,
                "set train.packing=false: micro-batches are not padded to a fixed length anyway",
            )
        )
    if parallel.cp != 1:
        found.append(
            Refusal("parallel.cp", parallel.cp, _CP, "set parallel.cp=1 and raise parallel.tp")
        )
    if parallel.sequence_parallel:
        found.append(
            Refusal(
                "parallel.sequence_parallel",
                True,
                _SP,
                "set parallel.sequence_parallel=false and use model.recompute to save memory",
            )
        )
    if "moe" in hf_config.model_type and parallel.tp > 1:
        found.append(Refusal("parallel.tp", parallel.tp, _MOE_TP, "set parallel.tp=1, raise pp"))
    if hf_config.model_type != "qwen3_vl":
        found.append(
            Refusal(
                "model.path",
                model.path,
                f"its config.json says model_type={hf_config.model_type!r}",
                "this version trains dense Qwen3-VL (model_type='qwen3_vl')",
            )
        )
    elif parallel.ep != 1:
        found.append(
            Refusal("parallel.ep", parallel.ep, "the model has no experts", "set parallel.ep=1")
        )
    if model.freeze_vision and model.freeze_merger and model.freeze_language:
        found.append(
            Refusal(
                "model.freeze_language",
                True,
                "vision, merger and language are all frozen: nothing is left to train",
                "unfreeze one of them",
            )
        )
    if train.micro_batch_size < 1:
        found.append(
            Refusal("train.micro_batch_size", train.micro_batch_size, "no rows", "set at least 1")
        )
    return found


def check_built(config: TransformerConfig) -> None:
    """Refuse again on the config that the built model really runs with."""
    refusals = [
        (config.sequence_parallel, "sequence_parallel", config.sequence_parallel, _SP),
        (
            config.context_parallel_size != 1,
            "context_parallel_size",
            config.context_parallel_size,
            _CP,
        ),
        (
            config.num_moe_experts is not None and config.tensor_model_parallel_size > 1,
            "num_moe_experts",
            config.num_moe_experts,
            _MOE_TP,
        ),
        (
            not config.variable_seq_lengths,
            "variable_seq_lengths",
            config.variable_seq_lengths,
            "DeepStack features and unequal micro-batches need shapes sent with the tensors",
        ),
        (
            not config.calculate_per_token_loss,
            "calculate_per_token_loss",
            config.calculate_per_token_loss,
            "the loss would be averaged per micro-batch instead of over the global batch",
        ),
        (
            config.virtual_pipeline_model_parallel_size is not None,
            "virtual_pipeline_model_parallel_size",
            config.virtual_pipeline_model_parallel_size,
            "the interleaved schedule sends tensors of one fixed shape",
        ),
    ]
    for wrong, key, value, reason in refusals:
        if wrong:
            way_out = "something changed the built model's TransformerConfig; undo that"
            raise Refusal(f"TransformerConfig.{key}", value, reason, way_out).error()
