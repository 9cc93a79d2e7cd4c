"""Messages in a rendered chat: which turns each shows, which are trained, and what they weigh."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vlm.data.records.record import ChatMessage
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class RenderedMessage:
    """A message of the rendered text. Its tokens [body, end) are those after the line with its
    role, <|im_end|> included."""

    role: str
    body: int
    end: int
    turns: list[ChatMessage]  # those that it shows

    @property
    def weight(self) -> float | None:
        """What the record says about the loss of its tokens."""
        return self.turns[0].weight if self.turns else None


def choose_trained(
    messages: Sequence[RenderedMessage], train_on: str | Sequence[str]
) -> list[bool]:
    """Which messages data.train_on picks."""
    if train_on == "record":
        return [bool(message.weight) for message in messages]
    if train_on == "last_assistant":
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        return [i == last for i in range(len(messages))]
    roles = ["assistant"] if train_on == "all_assistant" else train_on
    return [message.role in roles for message in messages]


def weight_of_message(message: RenderedMessage, where: str) -> float:
    """Of the loss of each of its tokens."""
    if len(given := {turn.weight for turn in message.turns}) > 1:
        shown = ", ".join("none" if weight is None else f"{weight:g}" for weight in given)
        raise DataError(
            f"differs between {len(message.turns)} {message.role} messages that the chat template "
            f"shows as one: {shown}",
            place=where,
            key="weight",
            remedy="give them the same",
        )
    return 1.0 if message.weight is None else message.weight


def take_turns(waiting: list[ChatMessage], role: str) -> list[ChatMessage]:
    """Take the turns that a message with this role shows: one, or several tool messages in a row,
    which Qwen's templates show as one of the user; none for a system prompt that the template
    adds by itself."""
    if waiting and role == "user" and waiting[0].role == "tool":
        count = next((i for i, t in enumerate(waiting) if t.role != "tool"), len(waiting))
    else:
        count = int(bool(waiting) and waiting[0].role == role)
    taken = waiting[:count]
    del waiting[:count]
    return taken
