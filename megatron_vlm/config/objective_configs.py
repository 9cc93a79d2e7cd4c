"""Keys of objectives: preferences, reward models, distillation from stored targets, embeddings and
rerankers."""

from dataclasses import dataclass
from typing import Literal

from megatron_vlm.config.bounds import AboveZero, Count, Decay, Natural, NonNegative, Share

RerankLoss = Literal["pointwise", "listwise"]
# Qwen3-VL-Embedding's default, and Qwen3-VL-Reranker's.
EMBED_INSTRUCTION = "Represent the user's input."
RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
# The prompt of Qwen3-VL-Reranker: its system message, and what precedes instruction, query and
# document in the message of the user.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
PAIR_MARKS = ("<Instruct>: ", "<Query>:", "\n<Document>:")


@dataclass(frozen=True)
class EmbedConfig:
    """Embeddings: InfoNCE over the documents of the whole step. See docs/embeddings.md."""

    instruction: str = EMBED_INSTRUCTION  # system message of queries and documents that have none
    temperature: AboveZero = 0.05  # similarities are divided by it: 1 / scale of others
    hard_negatives: Count | None = None  # taken from each record, which must have them; null: all
    dimensions: tuple[Natural, ...] = ()  # sizes that embeddings may be cut to; (): the whole alone
    dimension_weights: tuple[NonNegative, ...] = ()  # weights of the sizes' losses; (): each 1


@dataclass(frozen=True)
class RerankConfig:
    """Rerankers: the logit of yes minus that of no. See docs/embeddings.md."""

    instruction: str = RERANK_INSTRUCTION  # the task, which begins each prompt
    loss: RerankLoss = "pointwise"  # cross-entropy of each label; listwise: of one among negatives
    hard_negatives: Count | None = None  # taken from each record, which must have them; null: all
    positive_token: str = "yes"  # answer that a document is relevant
    negative_token: str = "no"  # answer that it is not


@dataclass(frozen=True)
class RetrievalForm:
    """The form of records with a query and its documents. Each query and document is a row, or with
    `answers` each pair of them."""

    instruction: str
    hard_negatives: int | None = None
    answers: tuple[str, str] | None = None  # the tokens of yes and no
    needs_positive: bool = True  # false: a record may have negatives alone


ObjectiveName = Literal[
    "sft", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "reward", "distill", "embed", "rerank"
]
Divergence = Literal["forward", "reverse", "jsd"]
Reference = Literal["keep", "adapters_off", "model"]
# What a record of data.train is: a chat; a prompt for samples; a prompt with a better and a worse
# answer; the same for a reward model; an answer with the label good or bad; a query with its
# documents.
RecordName = Literal["chat", "prompt", "pair", "rated_pair", "label", "query"]
RecordKind = RecordName | RetrievalForm


@dataclass(frozen=True)
class PreferenceConfig:
    """Losses over preferences, with the names and defaults of TRL. See docs/preferences.md."""

    losses: tuple[str, ...] = ()  # losses of the objective; (): its own one, of dpo sigmoid
    loss_weights: tuple[NonNegative, ...] = ()  # weights of preference.losses; (): each 1
    reference: str = "auto"  # source of the initial model's log-probs, or a folder of score
    beta: AboveZero = 0.1  # strength of the pull towards the reference; scale of the rewards
    label_smoothing: Decay = 0.0  # probability that a label is wrong, of the losses that use it
    simpo_gamma: NonNegative = 0.5  # margin of simpo
    sft_coef: NonNegative | None = None  # cross-entropy of chosen answers; null: as the objective
    discopop_tau: AboveZero = 0.05  # temperature of discopop
    desirable_weight: NonNegative = 1.0  # weight of good answers in kto
    undesirable_weight: NonNegative = 1.0  # weight of bad answers in kto


@dataclass(frozen=True)
class RewardConfig:
    """Reward models: a scalar head, trained on preferences. See docs/preferences.md."""

    center_coef: NonNegative = 0.0  # coefficient of the squared sum of a pair's rewards, as in TRL


@dataclass(frozen=True)
class DistillConfig:
    """The divergence from a teacher. See docs/distillation.md."""

    divergence: Divergence | None = None  # KL or GKD's mixture; null: forward, in rl reverse
    beta: Share = 0.5  # teacher's share of the mixture of jsd; 0: forward KL, 1: reverse KL
    temperature: AboveZero = 1.0  # divides the model's logits; it is that of megatron-vlm score
    ce_coef: NonNegative = 0.0  # coefficient of the cross-entropy, which is added

    def share(self, default: Divergence) -> float:
        """Return the teacher's share of the mixture: 0 for the forward KL, 1 for the reverse."""
        shares = {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}
        return shares[self.divergence or default]
