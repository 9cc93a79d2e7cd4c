"""The sizes of a tiny checkpoint. Apart from tiny.py, so that the command line need not import
torch to know its own options."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a tiny model. Odd on purpose where a mistake would hide behind round numbers."""

    layers: int = 4
    hidden: int = 64
    intermediate: int = 176
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24  # not hidden / heads
    vocab: int = 512
    vision_depth: int = 3
    vision_hidden: int = 32
    vision_heads: int = 2
    vision_intermediate: int = 80
    deepstack: int = 3
    patch_size: int = 16
    tied: bool = False
    from_scratch: bool = False
    seed: int = 0
