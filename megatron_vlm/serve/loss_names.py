"""Loss names of the client protocol, and the losses of this package that compute them: the inputs
of each loss, and its options with the defaults of the public service. Each loss is a sum over the
targets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_vlm.errors import show_choices
from megatron_vlm.serve.protocol.payloads import RequestError, entry

# {input name in the protocol: its name in the losses of this package}
_SAMPLED = {"logprobs": "old_log_probs", "advantages": "advantages"}
CROSS_ENTROPY = "weighted_cross_entropy"


@dataclass(frozen=True)
class LossMapping:
    """Loss of the client protocol."""

    loss: str
    inputs: Mapping[str, str]
    clips: tuple[float, float] | None = None  # default thresholds of the ratio, if the loss clips
    options: Mapping[str, float] = field(default_factory=dict)


FORMS = {
    "cross_entropy": LossMapping(CROSS_ENTROPY, {"weights": "weights"}),
    "importance_sampling": LossMapping("importance_sampling", _SAMPLED),
    "ppo": LossMapping("ppo", _SAMPLED, clips=(0.8, 1.2)),
    "cispo": LossMapping("cispo", _SAMPLED, clips=(0.0, 4.0)),
    "dro": LossMapping("dro", _SAMPLED, options={"beta": 0.05}),
    "gspo": LossMapping(
        "gspo_token", _SAMPLED | {"sequence_ratio_mask": "sequence_mask"}, clips=(0.8, 1.2)
    ),
}
OPTIONAL = {"weights": 1.0}  # inputs that may be missing, and their defaults
_LARGEST = float(np.finfo(np.float32).max)
_CONFIG = "loss_fn_config"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"


def form_of(name: str) -> LossMapping:
    """Return the loss of this name. Raise RequestError if there is none."""
    if name not in FORMS:
        raise RequestError(
            "is not supported",
            key="loss_fn",
            found=name,
            allowed=tuple(FORMS),
            remedy=f"give {show_choices(tuple(FORMS))}, or compute a loss of your own in the "
            "client (forward_backward_custom)",
        )
    return FORMS[name]


def options_of(name: str, loss_config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the options of this package's loss for the options that the client has set."""
    form = form_of(name)
    options = dict(form.options)
    if form.clips is not None:
        options |= {_LOW: form.clips[0], _HIGH: form.clips[1]}
    for key, value in loss_config.items():
        key_name = entry(_CONFIG, key)
        if key not in options:
            raise RequestError(
                f"is not an option of {name}" + ("" if options else ", which has none"),
                key=key_name,
                allowed=tuple(options) or None,
                remedy="" if options else "leave it out",
            )
        if isinstance(value, str):
            raise RequestError("is text", key=key_name, found=value, allowed="a number")
        if not math.isfinite(value) and key != _HIGH:
            raise RequestError(key=key_name, found=value, allowed="a finite number")
        options[key] = value
    if form.clips is None:
        return options
    # No ratio exceeds the largest fp32 number, so this bound clips nothing.
    low, high = options.pop(_LOW), min(options.pop(_HIGH), _LARGEST)
    for key, value, fits, allowed in (
        (_LOW, low, 0 <= low < 1, "a number from 0 to below 1"),
        (_HIGH, high, high > 1, "a number above 1"),
    ):
        if not fits:
            raise RequestError(
                f": the ratio is clipped from {low} to {high}",
                key=entry(_CONFIG, key),
                found=value,
                allowed=allowed,
            )
    return options | {"clip_low": 1 - low, "clip_high": high - 1}
