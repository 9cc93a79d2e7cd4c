"""Frozen weights beside adapters in 4 or 8 bits, `lora.base`: which weights these are, and what is
refused."""

from collections.abc import Sequence

from megatron_vlm.config.base_types import WEIGHTS_PER_BLOCK
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.weight_map import Entry


def entries_in_blocks(
    lora: LoraConfig, table: Sequence[Entry], source: HFCheckpoint
) -> list[Entry]:
    """Return the parameters that are stored as codes. In a checkpoint of codes these are the ones
    whose every tensor is stored so there: the others stay as they are."""
    chosen = [entry for entry in table if entry.is_in_blocks(lora)]
    if not source.in_blocks:
        return chosen
    return [entry for entry in chosen if all(map(source.is_in_blocks, entry.names))]


def check_base_type(cfg: Config, source: HFCheckpoint) -> None:
    """Refuse a checkpoint that is stored in 4 bits where the weights are to have another form."""
    if source.in_blocks and cfg.lora.base != "nf4":
        raise ConfigError(
            f"does not fit the checkpoint, which has {len(source.in_blocks)} weights in 4 bits "
            "(NF4): they can only be frozen, beside adapters",
            key="lora.base",
            found=cfg.lora.base,
            allowed=("nf4",),
            remedy="set lora=default lora.base=nf4, or give the checkpoint in bf16 from which this "
            "one was made",
        )


def check_blocks(lora: LoraConfig, table: Sequence[Entry], tp: int) -> None:
    """Refuse weights that cannot be stored in blocks: where blocks do not fill the rows of a part,
    the codes would depend on the layout."""
    if (misfit := find_misfit(lora, table, tp)) is not None:
        raise misfit


def find_misfit(lora: LoraConfig, table: Sequence[Entry], tp: int) -> ConfigError | None:
    """Return the error for the first weight that cannot be stored in blocks."""
    block = WEIGHTS_PER_BLOCK
    for entry in table:
        if not entry.is_in_blocks(lora):
            continue
        tensor = entry.hf_tensors[0]
        row = tensor.shape[-1]
        is_alone = entry.layout.cut is None and len(entry.hf_tensors) == 1
        if tensor.num_values % block or (row % block and not is_alone):
            return ConfigError(
                f"stores weights in blocks of {block} that share a scale, and the rows of "
                f"{tensor.name} {list(tensor.shape)} are not a whole number of blocks",
                key="lora.base",
                found=lora.base,
                remedy="set lora.base=null: this model is too small for blocks; one of "
                "megatron-vlm tiny --head-dim 32 --intermediate 192 is not",
            )
        has_columns = entry.layout.cut == "tp" and entry.layout.axis == 1
        if has_columns and row % (tp * block):
            return ConfigError(
                f"cuts each row of {tensor.name}, which has {row} weights, into parts of "
                f"{row / tp:g}, inside a block of {block} that share a scale",
                key="parallel.tp",
                found=tp,
                allowed=[d for d in range(1, tp) if tp % d == 0 and row % (d * block) == 0],
                remedy="set parallel.tp to one of these and raise parallel.pp, or set "
                "lora.base=null",
            )
    return None
