"""Optimizers: the states that they keep for each weight, and the bytes of these states.

Checkpoint, planner and model card read this table, and training makes its optimizer from it. It
needs no torch, so that a plan can be made before torch is imported.
"""

from dataclasses import dataclass

from megatron_vlm.config.schema import OptimConfig

STATE_NAMES = ("exp_avg", "exp_avg_sq")  # in the optimizer and in a checkpoint
QUANTIZED_BLOCK = 256  # weights whose int8 states share a scale
MIN_INT8_WEIGHTS = 4096  # smaller tensors keep fp32 states, which cost nothing there
# Weights that optim.offload moves at once, a multiple of the blocks above. Host memory has two such
# buckets of gradients, and two of weights.
OFFLOAD_BUCKET = 2**24
_FP32 = 4
_BYTES = {"fp32": _FP32, "bf16": 2, "int8": 1 + _FP32 / QUANTIZED_BLOCK}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as the configuration describes it."""

    title: str  # for people
    state_names: tuple[str, ...]  # states of each weight
    states: str  # type of the states, a value of optim.states

    @property
    def state_bytes(self) -> float:
        """Bytes of all states of a weight."""
        return len(self.state_names) * _BYTES[self.states]


def optimizer_spec(optim: OptimConfig) -> OptimizerSpec:
    """Return the optimizer of a configuration."""
    title = "AdamW" if optim.states == "fp32" else f"AdamW with {optim.states} moments"
    return OptimizerSpec(title, STATE_NAMES, optim.states)
