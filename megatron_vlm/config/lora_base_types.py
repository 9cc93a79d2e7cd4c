"""Types of the frozen weights beside adapters, `lora.base`. Training, planner and model card read
this table. It needs no torch, so that a plan can be made before torch is imported."""

from typing import Literal

BaseType = Literal["nf4", "int8"]

WEIGHTS_PER_BLOCK = 64  # neighbouring weights that share a scale
_SCALE_BYTES = 4  # scales are in fp32
_CODE_BYTES: dict[BaseType, float] = {"nf4": 0.5, "int8": 1.0}
BASE_TITLES: dict[BaseType, str] = {"nf4": "4 bits (NF4)", "int8": "8 bits (int8)"}


def base_bytes(base: BaseType) -> float:
    """Return the bytes of a weight, with its share of the block's scale."""
    return _CODE_BYTES[base] + _SCALE_BYTES / WEIGHTS_PER_BLOCK
