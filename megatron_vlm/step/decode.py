"""Generation, greedy or sampled, and the ranking of candidates, on the weights that are trained.

The prompts of a batch go through the pipeline once (the prefill); after that each pass takes one
token of every row that has not stopped. A pass is a MicroBatch like any other, its rows one token
long, and Megatron's forward-only schedule takes it from stage to stage.

Shapes: S tokens, B rows of a batch, V this rank's part of the padded vocabulary, T the ranks of
TP, 3 the axes of a position, 5 the columns of a token as in data/encode/row.py.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.data.batch.micro_batch import (
    MicroBatch,
    collate,
    cut_micro_batches,
    filler_batch,
)
from megatron_vlm.data.encode.row import IGNORE, Row, continued, place_row
from megatron_vlm.distributed.device import to_device
from megatron_vlm.distributed.grid import Axis
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.sizes import Tokens
from megatron_vlm.model.cache import KVCache
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel
from megatron_vlm.step.arrival import StageInput
from megatron_vlm.step.pipeline import Stage, as_it_is


def generate(
    stage: Stage,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = 16,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The most likely next tokens of each prompt, up to the first of `stop_ids` (left out) or to
    `max_new_tokens`: what Hugging Face's `generate(do_sample=False)` gives.

    With a `temperature` above 0 they are sampled from softmax(logits / temperature). `seeds` then
    has a number from 0 on for each prompt: the same prompt and seed give the same answer,
    whatever the layout and the other prompts. Placeholders of images and videos are never sampled:
    nobody could be trained on such an answer.

    All ranks of a replica pass the same prompts and get the same answers; replicas may pass
    different ones, or none. Labels are ignored. A batch has at most `batch_rows` rows; as many
    batches as there are pipeline stages are in flight together. `on_token` hears of each token as
    it is found, with the number of its prompt; what it raises ends the generation.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_rows", batch_rows)):
        if value < 1:
            raise ConfigError(f"generate: {name}={value} must be at least 1")
    sampling = _sampling(temperature, seeds, len(prompts), stage.sizes.tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    batches = _batches(stage, prompts, batch_rows)
    together = stage.grid.pp.size
    with stage.evaluating():
        # While the last stage works on one batch, the first can take up the next. Replicas that
        # share experts go on until the last of them has all its answers.
        for start in range(0, stage.most(len(batches)), together):
            passes = [
                DecodePass.prefill(batch, max_new_tokens, stage.device)
                for batch in batches[start : start + together]
            ]
            while stage.most(len(passes)):
                picked = _run(stage, passes, sampling)
                unfinished = [
                    each.extend(answers, ids, max_new_tokens, stop_ids, on_token)
                    for each, ids in zip(passes, picked, strict=True)
                ]
                passes = [each for each in unfinished if each is not None]
    return answers


def candidate_log_probs(
    stage: Stage, prompt: Row, candidates: Sequence[Sequence[int]], batch_rows: int
) -> list[float]:
    """The summed log-prob of each candidate's tokens after the prompt. Called as `generate` is."""
    for place, candidate in enumerate(candidates):
        if not len(candidate):
            raise DataError(
                f"candidate {place} of {len(candidates)} has 0 tokens, which would always rank "
                "first; give at least one, such as the end of the turn"
            )
    rows = [continued(prompt, candidate) for candidate in candidates]
    batches = cut_micro_batches(rows, batch_rows, stage.sizes.tokens)
    return [float(log_probs_S.double().sum()) for log_probs_S in stage.score(batches)]


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float
    seeds: tuple[int, ...]  # of all prompts
    never: tuple[int, ...]  # ids that are not sampled

    def noise(self, one: "DecodePass", vocab: int, device: torch.device) -> Tensor:
        """Gumbel noise [B, vocab]: the largest of logits with it is a sample. Drawn for each row
        and pass alone, and for the whole vocabulary on each rank."""
        noise_BV = torch.empty(len(one.batch.rows), vocab, dtype=torch.float64, device=device)
        generator = torch.Generator(device)
        for row, place in enumerate(one.batch.rows):
            # Similar seeds give similar first numbers: spread the seeds.
            seed = hashlib.blake2b(f"{self.seeds[place]} {one.number}".encode(), digest_size=8)
            generator.manual_seed(int.from_bytes(seed.digest(), "little") >> 1)
            noise_BV[row].exponential_(generator=generator)
        noise_BV[:, list(self.never)] = torch.inf
        return noise_BV.log_().neg_().float()


@dataclass(frozen=True)
class DecodePass:
    """A batch's way through the pipeline, with its prompts or the newest token of each row."""

    batch: MicroBatch
    cache: KVCache
    number: int = 0

    @staticmethod
    def prefill(batch: MicroBatch, max_new_tokens: int, device: torch.device) -> "DecodePass":
        columns = max(batch.lengths) + max_new_tokens - 1  # the last token is not fed back
        return DecodePass(batch, KVCache(batch.lengths, columns, device))

    def extend(
        self,
        answers: list[list[int]],
        ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
        on_token: Callable[[int, int], None] | None = None,
    ) -> "DecodePass | None":
        """Add to the answers the ids that this pass found; the next pass of those that continue."""
        going_on = []
        for row, (place, token) in enumerate(zip(self.batch.rows, ids, strict=True)):
            if token in stop_ids:
                continue
            answers[place].append(token)
            if on_token is not None:
                on_token(place, token)
            if len(answers[place]) < max_new_tokens:
                going_on.append(row)
        return self._next(ids, going_on) if going_on else None

    def _next(self, ids: Sequence[int], rows: list[int]) -> "DecodePass":
        # Text continues after the highest position on any axis (padding has position 0).
        positions_B = self.batch.tokens_BS5[:, :, 2:].amax((1, 2)) + 1
        tokens_B15 = torch.empty(len(rows), 1, 5, dtype=torch.int32)
        tokens_B15[:, 0, 0] = torch.tensor([ids[row] for row in rows])
        tokens_B15[:, 0, 1] = IGNORE
        tokens_B15[:, 0, 2:] = positions_B[rows, None]
        places = tuple(self.batch.rows[row] for row in rows)
        self.cache.advance(rows)
        batch = MicroBatch(tokens_B15, (1,) * len(rows), places)
        return DecodePass(batch, self.cache, self.number + 1)


def _sampling(
    temperature: float, seeds: Sequence[int] | None, prompts: int, tokens: Tokens
) -> Sampling | None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"generate: temperature={temperature} must be 0 (greedy) or above")
    if temperature == 0:
        return None
    if seeds is None or len(seeds) != prompts:
        raise ConfigError(
            f"generate: temperature={temperature} needs a seed for each of the {prompts} prompts, "
            f"and there are {'none' if seeds is None else len(seeds)}; give seeds"
        )
    return Sampling(temperature, tuple(seeds), (tokens.image_id, tokens.video_id))


def _batches(stage: Stage, prompts: Sequence[Row], size: int) -> list[MicroBatch]:
    """Prompts of like length together. The longest come first: what does not fit fails at once."""
    placed = [
        place_row(_unlabelled(row), stage.sizes.tokens, f"prompt {place}")
        for place, row in enumerate(prompts)
    ]
    order = sorted(range(len(placed)), key=lambda place: -len(placed[place].tokens_S5))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [collate([placed[place] for place in part], part) for part in parts]


def _unlabelled(row: Row) -> Row:
    return replace(
        row, labels_S=torch.full_like(row.ids_S, IGNORE), values_S={}, loss_weights_S=None
    )


def _run(stage: Stage, passes: Sequence[DecodePass], sampling: Sampling | None) -> list[list[int]]:
    """Each pass through all stages; on every rank, the id that follows each of its rows."""
    outputs = stage.run(
        passes,
        partial(_forward_step, stage, sampling),
        forward_only=True,
        batch_of=attrgetter("batch"),
        filler=lambda: DecodePass.prefill(filler_batch(), 1, stage.device),
        arriving=partial(_arrivals, stage),
    )
    counts = [len(one.batch.rows) for one in passes]
    ids = torch.empty(sum(counts), dtype=torch.long, device=stage.device)
    if stage.grid.last and outputs:
        ids = torch.cat(outputs)
    # Every stage needs the ids: the first to continue, all to know which rows have stopped.
    stage.grid.from_last_stage(ids)
    return [part.tolist() for part in ids.split(counts)]


def _arrivals(
    stage: Stage, passes: Sequence[DecodePass], chunk: Qwen3VLGPTModel
) -> Iterator[tuple[DecodePass, StageInput]]:
    # Past the prefill come generated tokens: a placeholder among them shows nothing.
    sees = passes[0].cache.in_prefill
    batches = [one.batch for one in passes]
    return zip(passes, stage.arrivals(batches, chunk, sees), strict=True)


def _forward_step(
    stage: Stage,
    sampling: Sampling | None,
    data: Iterator[tuple[DecodePass, StageInput]],
    chunk: Any,
) -> tuple[Tensor, Any]:
    one, batch = next(data)
    rows = len(one.batch.lengths)
    # The head on each row's last token only.
    last_B = [(length - 1) * rows + row for row, length in enumerate(one.batch.lengths)]
    places_B = to_device(torch.tensor(last_B), stage.device)
    output = stage.call(chunk, batch, cache=one.cache, loss_mask=places_B)
    vocab, tp = stage.sizes.text.vocab, stage.grid.tp
    if not one.batch.rows:  # a filler
        return output, as_it_is
    if sampling is None:
        return output, partial(pick_ids, vocab, tp)
    return output, partial(sample_ids, vocab, tp, sampling, one)


def sample_ids(
    vocab: int,
    tp: Axis,
    sampling: Sampling,
    one: DecodePass,
    logits_BV: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """An id for each row [B], the same on all TP ranks and at each TP degree."""
    noise_BV = sampling.noise(one, vocab, logits_BV.device)
    width = logits_BV.shape[1]
    first = tp.rank * width
    mine_BV = noise_BV[:, first : first + width]
    mine_BV = F.pad(mine_BV, (0, width - mine_BV.shape[1]))  # padding of the vocabulary
    return pick_ids(vocab, tp, logits_BV.float() / sampling.temperature + mine_BV)


def pick_ids(vocab: int, tp: Axis, logits_BV: Tensor, non_loss_data: bool = True) -> Tensor:
    """The id of each row's largest logit over all TP ranks [B]; of several equal ones the lowest,
    as torch's argmax over the whole row. Ids from `vocab` on are padding."""
    rows, width = logits_BV.shape
    ids_V = tp.rank * width + torch.arange(width, device=logits_BV.device)
    real_BV = logits_BV.float().masked_fill(ids_V >= vocab, float("-inf"))
    best_B, column_B = real_BV.max(dim=-1)
    # float64 carries logit and id in one collective, both exact.
    mine_B2 = torch.stack([best_B.double(), ids_V[column_B].double()], dim=-1)
    found = mine_B2.new_empty(tp.size * rows, 2)
    dist.all_gather_into_tensor(found, mine_B2, group=tp.group)
    found_TB2 = found.view(tp.size, rows, 2)
    winner_1B = found_TB2[:, :, 0].argmax(dim=0, keepdim=True)
    return found_TB2[:, :, 1].gather(0, winner_1B)[0].long()
