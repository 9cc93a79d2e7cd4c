"""The own decoder on every rank: sampling from a model of this process over many calls. Requests
join and leave between the calls, while the KV caches of the other requests wait."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_vlm.controller.rank_worker import with_rank
from megatron_vlm.controller.torchrun import local_transport
from megatron_vlm.controller.worker_group import (
    BatchLike,
    ReplicaBatch,
    WorkerGroup,
    split_batch,
    without_labels,
)
from megatron_vlm.data.tensors.tensor_batch import rows_of
from megatron_vlm.data.tokens.completions import Pieces, SamplingSettings
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.generate import Decoder

PREFILL_TOKENS = 2048  # prompt tokens of a command, which other requests wait for


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
        """Build a request from the result of `dataclasses.asdict` after JSON."""
        return SampleRequest(
            **{**fields, "settings": SamplingSettings.from_json(fields["settings"])}
        )


class SampleProgress(NamedTuple):
    """Progress of a request. JSON holds it as a list."""

    number: int
    tokens: int  # tokens in all its answers so far
    left: int  # answers that have not ended
    # Set once all answers have ended, each in the form of Completion.as_json.
    answers: list[list[Any]] | None = None
    refused: str | None = None  # reason why the request did not join, or has no answers
    # For each answer of a streamed request, the number of its tokens before these rounds and those
    # that follow.
    pieces: Pieces | None = None


class ResumableDecoder:
    """Decoder of a local group, on every rank. The weights of the model must not change."""

    def __init__(self, group: WorkerGroup, batch_rows: int):
        self.ranks = local_transport(group)
        worker = self.ranks.member.worker
        self.decoder = Decoder(
            worker.stage, batch_rows, on_token=worker.report_token, prefill_tokens=PREFILL_TOKENS
        )
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
            part = self.ranks.local_part(split_batch(without_labels(prompts), places))
        grid = self.ranks.grid
        own = [request for request in requests if request.replica == grid.dp.rank]

        def work() -> list[Any]:
            try:
                return self._advance(part, own, leave, rounds)
            except Exception as error:
                raise with_rank(error, grid.rank) from error

        results = self.ranks.answers(work)
        return [SampleProgress(*values) for each in results for values in each]

    def _advance(
        self,
        part: ReplicaBatch | None,
        requests: Sequence[SampleRequest],
        leave: Collection[int],
        rounds: int,
    ) -> list[SampleProgress]:
        decoder = self.decoder
        progress, joining = [], []
        if any(request.settings.needs_texts for request in requests):
            decoder.texts = self.ranks.member.texts
        self.streamed |= {request.number for request in requests if request.streamed}
        rows = [] if part is None else rows_of(part.all_fields())
        for row, request in zip(rows, requests, strict=True):
            try:
                settings, seed = request.settings, request.seed
                joining.append(decoder.prompt(request.number, row, settings, request.n, seed))
            except MegatronVLMError as error:
                # Its number means nothing to the client.
                text = str(error).replace(f"prompt {request.number}:", "the prompt:", 1)
                progress.append(SampleProgress(request.number, 0, 0, refused=text))
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
            answers = pieces = refused = None
            if not each.left:
                try:
                    answers = [draw.completion.as_json() for draw in each.draws]
                except MegatronVLMError as error:
                    refused = str(error)
            elif each.number in before:
                lengths = before[each.number]
                pieces = [[n, draw.ids[n:]] for n, draw in zip(lengths, each.draws, strict=True)]
            progress.append(
                SampleProgress(each.number, each.tokens, each.left, answers, refused, pieces)
            )
        self.streamed &= decoder.prompts.keys()
        return progress
