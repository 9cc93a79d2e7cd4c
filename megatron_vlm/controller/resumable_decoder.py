"""Sampling from a model of this process over many calls. Requests join and leave between the calls,
while the KV caches of the other requests wait."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_vlm.controller.rank_worker import with_rank
from megatron_vlm.controller.torchrun import local_transport
from megatron_vlm.controller.worker_group import (
    BatchLike,
    ReplicaBatch,
    WorkerGroup,
    cut,
    without_labels,
)
from megatron_vlm.data.tensors.rows import rows_of
from megatron_vlm.data.tokens.completions import Completion, Pieces, SamplingSettings
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.generate import Decoder


@dataclass(frozen=True)
class SampleRequest:
    """A request to sample a prompt. Answer k depends on seed + k alone."""

    number: int  # unique among the requests in progress
    replica: int  # replica that samples the answers
    settings: SamplingSettings
    n: int
    seed: int
    streamed: bool = False  # its progress has the tokens that were drawn

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "SampleRequest":
        """Build a request from the JSON form of `plain`."""
        return SampleRequest(
            **{**fields, "settings": SamplingSettings.from_json(fields["settings"])}
        )

    def as_json(self) -> dict[str, Any]:
        """Return the request in a form that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class SampleProgress:
    """Progress of a request."""

    number: int
    tokens: int  # tokens in all its answers so far
    left: int  # answers that have not ended
    answers: list[Completion] | None = None  # set once all answers have ended
    refused: str | None = None  # reason why the request did not join
    # For each answer of a streamed request, the number of its tokens before these rounds and those
    # that follow.
    pieces: Pieces | None = None

    @staticmethod
    def from_json(values: Sequence[Any]) -> "SampleProgress":
        """Build the progress from the JSON form of `plain`."""
        number, tokens, left, answers, *others = values
        completions = None if answers is None else [Completion.from_json(each) for each in answers]
        return SampleProgress(number, tokens, left, completions, *others)

    def as_json(self) -> list[Any]:
        """Return the progress in a form that JSON can hold."""
        answers = None if self.answers is None else [each.as_json() for each in self.answers]
        return [self.number, self.tokens, self.left, answers, self.refused, self.pieces]


class ResumableDecoder:
    """Decoder of a local group, on every rank. The weights of the model must not change."""

    def __init__(self, group: WorkerGroup, batch_rows: int):
        self.ranks = local_transport(group)
        worker = self.ranks.member.worker
        self.decoder = Decoder(worker.stage, batch_rows, on_token=worker.report_token)
        self.streamed: set[int] = set()  # numbers of the streamed requests

    def move(self, group: WorkerGroup) -> None:
        """Continue with a model that has the same weights."""
        self.ranks = local_transport(group)
        self.decoder.stage = self.ranks.member.worker.stage

    def advance(
        self,
        prompts: BatchLike | None,
        requests: Sequence[SampleRequest],
        leave: Collection[int],
        rounds: int,
    ) -> list[SampleProgress]:
        """Let requests leave and join, and then decode for `rounds` rounds. Return the progress of
        every request that is in progress or ended in these rounds. A refused request does not join,
        and does not keep other requests from joining."""
        dims = self.ranks.dims
        part = None
        if prompts is not None:
            places: list[list[int]] = [[] for _ in range(dims.dp)]
            for place, request in enumerate(requests):
                places[request.replica].append(place)
            part = self.ranks.local_part(cut(without_labels(prompts), places))
        grid = self.ranks.grid
        own = [request for request in requests if request.replica == grid.dp.rank]

        def work() -> list[Any]:
            try:
                return [each.as_json() for each in self._advance(part, own, leave, rounds)]
            except Exception as error:
                raise with_rank(error, grid.rank) from error

        results = self.ranks.answers(work)
        return [SampleProgress.from_json(request) for rows in results for request in rows]

    def _advance(
        self,
        part: ReplicaBatch | None,
        requests: Sequence[SampleRequest],
        leave: Collection[int],
        rounds: int,
    ) -> list[SampleProgress]:
        decoder = self.decoder
        progress, joining = [], []
        if any(request.settings.stop_strings for request in requests):
            decoder.texts = self.ranks.member.texts
        self.streamed |= {request.number for request in requests if request.streamed}
        rows = [] if part is None else rows_of(part.all_fields())
        for row, request in zip(rows, requests, strict=True):
            try:
                settings, seed = request.settings, request.seed
                joining.append(decoder.prompt(request.number, row, settings, request.n, seed))
            except MegatronVLMError as error:
                progress.append(SampleProgress(request.number, 0, 0, refused=str(error)))
        decoder.leave(leave)
        decoder.join(joining)
        inside = list(decoder.prompts.values())
        before = {
            each.number: [len(draw.ids) for draw in each.draws]
            for each in inside
            if each.number in self.streamed
        }
        decoder.advance(rounds)
        for each in inside:
            answers = pieces = None
            if not each.left:
                answers = [draw.completion for draw in each.draws]
            elif each.number in before:
                lengths = before[each.number]
                pieces = [[n, draw.ids[n:]] for n, draw in zip(lengths, each.draws, strict=True)]
            progress.append(
                SampleProgress(each.number, each.tokens, each.left, answers, pieces=pieces)
            )
        self.streamed &= decoder.prompts.keys()
        return progress
