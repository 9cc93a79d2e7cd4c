"""Samples of a model of this process that are drawn from one call to the next: requests come and go
between the calls, and the caches of the others wait."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_vlm.controller.rank_worker import with_rank
from megatron_vlm.controller.split_batch import BatchLike, ReplicaBatch, dealt_parts
from megatron_vlm.controller.torchrun import LocalTransport
from megatron_vlm.controller.worker_group import WorkerGroup
from megatron_vlm.data.tensors.rows import rows_of
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.completions import Completion, SamplingSettings
from megatron_vlm.training.continuous_batching import Decoder
from megatron_vlm.training.generation_batch import Prompt


@dataclass(frozen=True)
class SampleRequest:
    """What is asked of a prompt: answer k is the one that seed + k alone gives."""

    number: int  # no other that is under way has it
    replica: int  # that draws the answers
    settings: SamplingSettings
    n: int
    seed: int

    @staticmethod
    def of(said: Mapping[str, Any]) -> "SampleRequest":
        """From what JSON has made of `plain`."""
        return SampleRequest(**{**said, "settings": SamplingSettings.of(said["settings"])})

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class SampleProgress:
    """How far a request is."""

    number: int
    tokens: int  # of all its answers so far
    left: int  # answers that have not ended
    answers: list[Completion] | None = None  # once all have
    refused: str | None = None  # why it did not join

    @staticmethod
    def of(said: Sequence[Any]) -> "SampleProgress":
        """What `plain` has said."""
        number, tokens, left, answers, refused = said
        given = None if answers is None else [Completion.of(each) for each in answers]
        return SampleProgress(number, tokens, left, given, refused)

    def plain(self) -> list[Any]:
        """As JSON can hold it."""
        answers = None if self.answers is None else [each.plain() for each in self.answers]
        return [self.number, self.tokens, self.left, answers, self.refused]


class GroupDecoder:
    """On every rank, of a local group; all make the same calls. The weights of the model must stay
    what they are."""

    def __init__(self, group: WorkerGroup, batch_rows: int):
        self._work_with(group)
        worker = self.member.worker
        self.decoder = Decoder(worker.stage, batch_rows, on_token=worker.hear)

    def _work_with(self, group: WorkerGroup) -> None:
        assert isinstance(group.ranks, LocalTransport), "the others' processes are elsewhere"
        self.ranks, self.member = group.ranks, group.ranks.member

    def move(self, group: WorkerGroup) -> None:
        """Go on with a model that has the same weights."""
        self._work_with(group)
        self.decoder.stage = self.member.worker.stage

    def advance(
        self,
        prompts: BatchLike | None,
        requests: Sequence[SampleRequest],
        leave: Collection[int],
        rounds: int,
    ) -> list[SampleProgress]:
        """Take these requests in, let others leave, and draw for so many rounds: how far each is
        that is under way, or has ended in them. A request that is refused joins by itself not, and
        keeps nobody else from it."""
        dims = self.ranks.dims
        part = None
        if prompts is not None:
            replicas = [each.replica for each in requests]
            part = self.ranks.mine_of(dealt_parts(prompts, replicas, dims.dp))
        mine = [each for each in requests if each.replica == self.ranks.grid.dp.rank]

        def work() -> list[Any]:
            try:
                return [each.plain() for each in self._advance(part, mine, leave, rounds)]
            except Exception as error:
                raise with_rank(error, self.member.worker.grid.rank) from error

        found = self.ranks.answers(work)
        return [SampleProgress.of(each) for of_replica in found for each in of_replica]

    def _advance(
        self,
        part: ReplicaBatch | None,
        requests: Sequence[SampleRequest],
        leave: Collection[int],
        rounds: int,
    ) -> list[SampleProgress]:
        decoder, found = self.decoder, []
        joining: list[Prompt] = []
        if any(each.settings.stop_strings for each in requests):
            decoder.texts = self.member.texts
        rows = [] if part is None else rows_of(part.whole())
        for row, each in zip(rows, requests, strict=True):
            try:
                prompt = decoder.prompt(each.number, row, each.settings, each.n, each.seed)
                joining.append(prompt)
            except MegatronVLMError as error:
                found.append(SampleProgress(each.number, 0, 0, refused=str(error)))
        decoder.leave(leave)
        decoder.join(joining)
        inside = list(decoder.prompts.values())
        decoder.advance(rounds)
        return found + [_progress(prompt) for prompt in inside]


def _progress(prompt: Prompt) -> SampleProgress:
    answers = None if prompt.left else [draw.completion for draw in prompt.draws]
    return SampleProgress(prompt.number, prompt.tokens, prompt.left, answers)
