"""Messages in a rendered chat: the turns that they show, the choice of trained messages, and
weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class RenderedMessage:
    """A message of the rendered text: tokens [body, end) after its role, with its closing token."""

    role: str
    body: int
    end: int
    turns: list[ChatMessage]  # turns that it shows
    is_after_result: bool = False  # an answer in the turn of the result before it

    @property
    def weight(self) -> float | None:
        """Weight of its tokens' losses, if the record has one."""
        return self.turns[0].weight if self.turns else None


def choose_trained(
    messages: Sequence[RenderedMessage], train_on: str | Sequence[str]
) -> list[bool]:
    """Return a flag for each message: true if data.train_on picks it."""
    if train_on == "record":
        return [bool(message.weight) for message in messages]
    if train_on == "last_assistant":
        answers = (m for m in reversed(messages) if m.role == "assistant" and m.turns)
        last = next((message.turns[-1] for message in answers), None)
        return [any(turn is last for turn in message.turns) for message in messages]
    roles = ["assistant"] if train_on == "all_assistant" else train_on
    return [message.role in roles for message in messages]


def weight_of_message(message: RenderedMessage, where: str) -> float:
    """Return the weight of the loss of each token in the message."""
    if len(weights := {turn.weight for turn in message.turns}) > 1:
        listing = ", ".join("none" if weight is None else f"{weight:g}" for weight in weights)
        raise DataError(
            f"differs between {len(message.turns)} {message.role} messages that the chat template "
            f"shows as one: {listing}",
            place=where,
            key="weight",
            remedy="give them the same",
        )
    return 1.0 if message.weight is None else message.weight
