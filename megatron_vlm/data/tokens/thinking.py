"""Reasoning in a template that can switch it off: what a prompt already has of the answer, and
records whose answers begin in another way than a prompt asks for.

Shapes: U tokens before placeholders are expanded, S tokens, K tokens of a pattern.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

OPEN_BLOCK, CLOSE = "<think>\n", "</think>"
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
THINKING_VARIABLE = "enable_thinking"  # variable of a chat template
THINKING_VARIABLES = (THINKING_VARIABLE, "preserve_thinking")  # A template would take "no" for yes.


@dataclass(frozen=True)
class AnswerOpening:
    """The tokens that a template adds to a prompt after the line with the answer's role: an open or
    an empty block of thoughts."""

    ids_K: np.ndarray
    contrary_K: np.ndarray  # beginning of an answer that such a prompt does not ask for
    is_open: bool  # true if the prompt leaves its block open, so that the model thinks

    def given(self, answer_U: np.ndarray) -> int:
        """Return how many of the answer's first tokens the prompt has already."""
        length = min(len(answer_U), len(self.ids_K))
        other = np.flatnonzero(answer_U[:length] != self.ids_K[:length])
        return int(other[0]) if len(other) else length

    def is_contrary(self, ids_S: np.ndarray, trained_S: np.ndarray) -> bool:
        """Return whether an answer that the prompt does not ask for is trained: an empty block
        where the prompt opens one, or reasoning where the prompt has an empty block."""
        count = len(self.contrary_K)
        starts = np.flatnonzero(ids_S[: max(len(ids_S) - count + 1, 0)] == self.contrary_K[0])
        return any(
            trained_S[start + count - 1]
            and np.array_equal(ids_S[start : start + count], self.contrary_K)
            for start in starts.tolist()
        )


def split_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with the thoughts in its text moved into their own field, as
    Qwen3.5's template takes them out of the text; that of Qwen3.8 does not."""
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    if not isinstance(content, str) or CLOSE not in content:
        return message
    thoughts = content.split(CLOSE)[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = content.split(CLOSE)[-1].lstrip("\n")
    return {**message, "content": answer, "reasoning_content": thoughts}


def contrary_text(opening: str) -> str:
    """Return how an answer begins that is contrary to the text that opens answers."""
    return OPEN_BLOCK if CLOSE in opening else EMPTY_BLOCK


_REMEDIES = (
    ("No user query found", "give the chat a message of the user that is no answer of a tool"),
    ("System message cannot contain", "move pictures and videos into a message of the user"),
    ("System message must be at the beginning", "put the system message first"),
)


def remedy_of(refusal: str) -> str:
    """Return the remedy for what the template of a Qwen model refuses, or "" if it is not
    known."""
    return next((remedy for text, remedy in _REMEDIES if text in refusal), "")
