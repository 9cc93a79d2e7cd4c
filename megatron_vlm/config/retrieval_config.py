"""Keys of embeddings and rerankers, and the form in which their records become rows."""

from dataclasses import dataclass
from typing import Literal

from megatron_vlm.config.bounds import AboveZero, Count, Natural, NonNegative

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
