"""Messages in a rendered chat: the turns that they show, the choice of trained messages, and
weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class RenderedMessage:
    """A message of the rendered text: tokens [body, end) after its role, with <|im_end|>."""

    role: str
    body: int
    end: int
    turns: list[ChatMessage]  # turns that it shows

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
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        return [i == last for i in range(len(messages))]
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


def take_turns(waiting: list[ChatMessage], role: str) -> list[ChatMessage]:
    """Take the turns that a message with this role shows: one, or several tool messages, which
    Qwen's templates show as one of the user; none for a system prompt of the template's own."""
    if waiting and waiting[0].role == "system" != role and _is_blank(waiting[0]):
        del waiting[0]
    if waiting and role == "user" and waiting[0].role == "tool":
        count = next((i for i, t in enumerate(waiting) if t.role != "tool"), len(waiting))
    else:
        count = int(bool(waiting) and waiting[0].role == role)
    taken = waiting[:count]
    del waiting[:count]
    return taken


def _is_blank(turn: ChatMessage) -> bool:
    return not any(not isinstance(part, str) or part.strip() for part in turn.parts)
