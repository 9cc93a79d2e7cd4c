"""Stand-in for the reward pool of a run that learns from a teacher alone."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_vlm.user_code.environment import EnvStep, Message


class NoRewards:
    """Pool without processes. An episode has one answer, whose reward is 0."""

    def begin(
        self, episode: int, record: Mapping[str, Any], where: str
    ) -> "Future[Sequence[Message] | None]":
        """Begin an episode with the messages of its record."""
        return _done(None)

    def step(self, episode: int, answer: str) -> "Future[EnvStep]":
        """Return the response to the answer, which ends the episode."""
        return _done(EnvStep())

    def end(self, episode: int) -> None:
        """Do nothing, because no episode is remembered."""

    def close(self) -> None:
        """Do nothing, because nothing was started."""


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future
