"""Optimizers: the states that they keep for each weight, and the bytes of these. Checkpoint,
planner, model card and training read this table. It needs no torch, as a plan needs none."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_vlm.config.schema import OptimConfig
from megatron_vlm.errors import ConfigError

STATE_NAMES = ("exp_avg", "exp_avg_sq")  # in the optimizer and in a checkpoint
ADAM_SETTINGS = ("beta1", "beta2", "eps", "weight_decay", "clip_grad")  # keys of AdamW
QUANTIZED_BLOCK = 256  # weights whose int8 states share a scale
MIN_INT8_WEIGHTS = 4096  # smaller tensors keep fp32 states, which cost nothing there
# Weights that optim.offload moves at once, a multiple of the blocks above. Host memory has two such
# buckets of gradients, and two of weights.
OFFLOAD_BUCKET = 2**24
_FP32 = 4
_BYTES = {"fp32": _FP32, "bf16": 2, "int8": 1 + _FP32 / QUANTIZED_BLOCK}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as the configuration describes it. training/optimizer.py makes it."""

    title: str  # for people
    state_names: tuple[str, ...]  # states of each weight
    states: str  # type of the states, a value of optim.states
    # States of each weight of a matrix (hf/matrices.py); (): as for all weights.
    matrix_state_names: tuple[str, ...] = ()
    # What a step may set instead of the configured settings, in addition to the learning rate.
    step_settings: tuple[str, ...] = ADAM_SETTINGS

    @property
    def bytes_of_state(self) -> float:
        """Bytes of one state of a weight."""
        return _BYTES[self.states]


def optimizer_spec(optim: OptimConfig) -> OptimizerSpec:
    """Return the optimizer of a configuration."""
    title, matrix_state_names, settings = _OPTIMIZERS[optim.name]
    title = title.format(optim=optim)
    if optim.states != "fp32":
        title += f"{',' * bool(matrix_state_names)} with {optim.states} moments"
    return OptimizerSpec(title, STATE_NAMES, optim.states, matrix_state_names, settings)


# For each optim.name: its title, the states of matrices, and what a step may set. A step of Muon
# sets nothing: the settings of AdamStep are AdamW's alone.
_OPTIMIZERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "adamw": ("AdamW", (), ADAM_SETTINGS),
    "muon": (
        "Muon for matrices (momentum {optim.muon.momentum:g}, {optim.muon.ns_steps} Newton-Schulz "
        "steps, {optim.muon.adjust_lr_fn}) and AdamW for the rest",
        ("momentum_buffer",),
        (),
    ),
}


def muon_errors(optim: OptimConfig) -> Iterator[ConfigError]:
    """Refuse settings that have no effect with the optimizer, or that Muon does not have."""
    defaults = OptimConfig()
    for name in ("muon_lr", "muon"):
        if optim.name != "muon" and getattr(optim, name) != getattr(defaults, name):
            yield ConfigError(
                f"is a setting of Muon, and optim.name is {optim.name}",
                key=f"optim.{name}",
                remedy="give optim.name=muon, or leave it out",
            )
    if optim.name == "muon" and optim.offload:
        yield ConfigError(
            "keeps AdamW's states in host memory, and Muon orthogonalises on the device",
            key="optim.offload",
            remedy="set it to 0, or give optim.name=adamw",
        )
    if optim.muon_lr is not None and not optim.lr:
        yield ConfigError(
            ": the schedule scales optim.muon_lr as it scales optim.lr, which is 0",
            key="optim.muon_lr",
            remedy="give optim.lr more than 0: it is the rate of embeddings, norms and the head",
        )
