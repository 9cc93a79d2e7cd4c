"""Keys of objectives over preferences."""

from dataclasses import dataclass
from typing import Literal

from megatron_vlm.config.bounds import AboveZero, Decay, NonNegative
from megatron_vlm.config.retrieval_config import RetrievalForm

ObjectiveName = Literal[
    "sft", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "distill", "embed", "rerank"
]
Reference = Literal["auto", "keep", "adapters_off", "model"]
# What a record of data.train is: a chat; a prompt for samples; a prompt with a better and a worse
# answer; an answer with the label good or bad; a query with its documents.
RecordName = Literal["chat", "prompt", "pair", "label", "query"]
RecordKind = RecordName | RetrievalForm


@dataclass(frozen=True)
class PreferenceConfig:
    """Losses over preferences, with the names and defaults of TRL. See docs/preferences.md."""

    losses: tuple[str, ...] = ()  # losses of the objective; (): its own one, of dpo sigmoid
    loss_weights: tuple[NonNegative, ...] = ()  # weights of preference.losses; (): each 1
    beta: AboveZero = 0.1  # strength of the pull towards the reference; scale of the rewards
    label_smoothing: Decay = 0.0  # probability that a label is wrong, of the losses that use it
    simpo_gamma: NonNegative = 0.5  # margin of simpo
    sft_coef: NonNegative | None = None  # cross-entropy of chosen answers; null: as the objective
    discopop_tau: AboveZero = 0.05  # temperature of discopop
    desirable_weight: NonNegative = 1.0  # weight of good answers in kto
    undesirable_weight: NonNegative = 1.0  # weight of bad answers in kto
