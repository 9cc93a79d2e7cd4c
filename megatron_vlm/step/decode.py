"""Generation, greedy or sampled, and the ranking of candidates, on the weights that are trained.

The prompts of a batch go through the pipeline once (the prefill); after that each turn takes one
token of every row that has not stopped. A turn is a MicroBatch like any other, its rows one token
long, and Megatron's forward-only schedule takes it from stage to stage.

Shapes: S tokens, B rows of a batch, V this rank's part of the padded vocabulary, T the ranks of
TP, 3 the axes of a position, 5 the columns of a token as in data/batch.py.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from megatron_vlm.data.batch.micro_batch import MicroBatch, collate
from megatron_vlm.data.encode.positions import VisionTokens
from megatron_vlm.data.encode.row import IGNORE, Row, continued, place_row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.model.cache import KVCache
from megatron_vlm.step.pipeline import broadcast_from_last, evaluating, run_schedule
from megatron_vlm.worker import MegatronWorker


def generate(
    worker: MegatronWorker,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = 16,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """The most likely next tokens of each prompt, until one of `stop_ids` (left out) comes or there
    are `max_new_tokens`: what Hugging Face's `generate(do_sample=False)` gives.

    With a `temperature` above 0 they are sampled from softmax(logits / temperature). `seeds` then
    has a number from 0 on for each prompt: the same prompt and seed give the same answer,
    whatever the layout and the other prompts. Placeholders of images and videos are never sampled:
    nobody could be trained on such an answer.

    All ranks of a replica pass the same prompts and get the same answers; replicas may pass
    different ones, or none. Labels are ignored. A batch has at most `batch_rows` rows; as many
    batches as there are pipeline stages are under way together.
    """
    _check_request(worker, max_new_tokens, batch_rows)
    sampling = _sampling(temperature, seeds, len(prompts), worker.model.tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    batches = _batches(worker, prompts, batch_rows)
    with evaluating(worker.ddp):
        # While the last stage works on one batch, the first can take up the next.
        for start in range(0, len(batches), worker.dims.pp):
            turns = [
                Turn.prefill(batch, max_new_tokens, worker.platform.device)
                for batch in batches[start : start + worker.dims.pp]
            ]
            while turns:
                picked = _run(worker, turns, sampling)
                unfinished = [
                    turn.extend(answers, ids, max_new_tokens, stop_ids)
                    for turn, ids in zip(turns, picked, strict=True)
                ]
                turns = [turn for turn in unfinished if turn is not None]
    return answers


def rank(worker: MegatronWorker, prompt: Row, candidates: Sequence[Sequence[int]]) -> list[float]:
    """The log-prob of each candidate's tokens after the prompt, summed. Called as `generate` is."""
    for place, candidate in enumerate(candidates):
        if not len(candidate):
            raise DataError(
                f"candidate {place} of {len(candidates)} has 0 tokens, which would always rank "
                "first; give at least one, such as the end of the turn"
            )
    rows = [continued(prompt, candidate) for candidate in candidates]
    return [float(log_probs_S.double().sum()) for log_probs_S in worker.forward(rows)]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen where that is not the likeliest."""

    temperature: float
    seeds: tuple[int, ...]  # of all prompts
    never: tuple[int, ...]  # ids that are not sampled

    def noise(self, turn: "Turn", vocab: int, device: torch.device) -> Tensor:
        """Gumbel noise [B, vocab]: the largest of logits with it is a sample. Drawn for each row
        and turn alone, and for the whole vocabulary on each rank."""
        noise_BV = torch.empty(len(turn.batch.rows), vocab, dtype=torch.float64, device=device)
        generator = torch.Generator(device)
        for row, place in enumerate(turn.batch.rows):
            # A generator's first numbers are alike for seeds that are: spread them.
            seed = hashlib.blake2b(f"{self.seeds[place]} {turn.number}".encode(), digest_size=8)
            generator.manual_seed(int.from_bytes(seed.digest(), "little") >> 1)
            noise_BV[row].exponential_(generator=generator)
        noise_BV[:, list(self.never)] = torch.inf
        return noise_BV.log_().neg_().float()


@dataclass(frozen=True)
class Turn:
    """One pass of a batch through the pipeline: its prompts, or the newest token of each row."""

    batch: MicroBatch
    cache: KVCache
    number: int = 0

    @staticmethod
    def prefill(batch: MicroBatch, max_new_tokens: int, device: torch.device) -> "Turn":
        columns = max(batch.lengths) + max_new_tokens - 1  # the last token is not fed back
        return Turn(batch, KVCache(batch.lengths, columns, device))

    def extend(
        self,
        answers: list[list[int]],
        ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int],
    ) -> "Turn | None":
        """Add to the answers the ids that this turn found; the next turn of the rows that go on."""
        going_on = []
        for row, (place, token) in enumerate(zip(self.batch.rows, ids, strict=True)):
            if token in stop_ids:
                continue
            answers[place].append(token)
            if len(answers[place]) < max_new_tokens:
                going_on.append(row)
        return self._next(ids, going_on) if going_on else None

    def _next(self, ids: Sequence[int], rows: list[int]) -> "Turn":
        # Text goes on after the highest position on any axis (padding has position 0).
        positions_B = self.batch.tokens_BS5[:, :, 2:].amax((1, 2)) + 1
        tokens_B15 = torch.empty(len(rows), 1, 5, dtype=torch.int32)
        tokens_B15[:, 0, 0] = torch.tensor([ids[row] for row in rows])
        tokens_B15[:, 0, 1] = IGNORE
        tokens_B15[:, 0, 2:] = positions_B[rows, None]
        places = tuple(self.batch.rows[row] for row in rows)
        self.cache.advance(rows)
        batch = MicroBatch(tokens_B15, (1,) * len(rows), places)
        return Turn(batch, self.cache, self.number + 1)


def _check_request(worker: MegatronWorker, max_new_tokens: int, batch_rows: int) -> None:
    backend = worker.cfg.model.backend
    if backend != "torch":
        raise ConfigError(
            f"model.backend={backend}: generation keeps its cache in the attention of the torch "
            "backend; set model.backend=torch, or rank candidates instead"
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_rows", batch_rows)):
        if value < 1:
            raise ConfigError(f"generate: {name}={value} must be at least 1")


def _sampling(
    temperature: float, seeds: Sequence[int] | None, prompts: int, tokens: VisionTokens
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


def _batches(worker: MegatronWorker, prompts: Sequence[Row], size: int) -> list[MicroBatch]:
    """Prompts of like length together. The longest come first: what does not fit fails at once."""
    placed = [
        place_row(_unlabelled(row), worker.model.tokens, f"prompt {place}")
        for place, row in enumerate(prompts)
    ]
    order = sorted(range(len(placed)), key=lambda place: -len(placed[place].tokens_S5))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [collate([placed[place] for place in part], part) for part in parts]


def _unlabelled(row: Row) -> Row:
    return replace(row, labels_S=torch.full_like(row.ids_S, IGNORE), values_S={})


def _run(
    worker: MegatronWorker, turns: Sequence[Turn], sampling: Sampling | None
) -> list[list[int]]:
    """Each turn through all stages; on every rank, the id that follows each of its rows."""
    step = partial(_forward_step, worker, sampling)
    outputs = run_schedule(worker.ddp, turns, step, forward_only=True)
    counts = [len(turn.batch.rows) for turn in turns]
    ids = torch.empty(sum(counts), dtype=torch.long, device=worker.platform.device)
    if worker.last:
        ids = torch.cat(outputs)
    # Every stage needs the ids: the first to go on, all to know which rows have stopped.
    broadcast_from_last(ids)
    return [part.tolist() for part in ids.split(counts)]


def _forward_step(
    worker: MegatronWorker, sampling: Sampling | None, data: Iterator[Turn], model: Any
) -> tuple[Tensor, Any]:
    turn = next(data)
    batch = turn.batch.for_stage(worker.first, worker.platform.device)
    lengths_B = torch.tensor(batch.lengths, device=worker.platform.device)
    columns_S = torch.arange(batch.tokens_BS5.shape[1], device=worker.platform.device)
    # The head on each row's last token only.
    last_BS = columns_S == lengths_B[:, None] - 1
    output = worker.call_model(model, batch, cache=turn.cache, loss_mask=last_BS)
    if sampling is None:
        return output, partial(pick_ids, vocab=worker.model.real_vocab)
    return output, partial(sample_ids, worker.model.real_vocab, sampling, turn)


def sample_ids(
    vocab: int, sampling: Sampling, turn: Turn, logits_BV: Tensor, non_loss_data: bool = True
) -> Tensor:
    """An id for each row [B], the same on all TP ranks and at each TP degree."""
    noise_BV = sampling.noise(turn, vocab, logits_BV.device)
    width = logits_BV.shape[1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    mine_BV = noise_BV[:, first : first + width]
    mine_BV = F.pad(mine_BV, (0, width - mine_BV.shape[1]))  # padding of the vocabulary
    return pick_ids(logits_BV.float() / sampling.temperature + mine_BV, vocab)


def pick_ids(logits_BV: Tensor, vocab: int, non_loss_data: bool = True) -> Tensor:
    """The id of each row's largest logit over all TP ranks [B]; of equals the lowest, as torch's
    argmax over the whole row. Ids from `vocab` on are padding."""
    group = parallel_state.get_tensor_model_parallel_group()
    rows, width = logits_BV.shape
    ids_V = dist.get_rank(group) * width + torch.arange(width, device=logits_BV.device)
    real_BV = logits_BV.float().masked_fill(ids_V >= vocab, float("-inf"))
    best_B, column_B = real_BV.max(dim=-1)
    # float64 carries logit and id in one collective, both exact.
    mine_B2 = torch.stack([best_B.double(), ids_V[column_B].double()], dim=-1)
    found = mine_B2.new_empty(dist.get_world_size(group) * rows, 2)
    dist.all_gather_into_tensor(found, mine_B2, group=group)
    found_TB2 = found.view(dist.get_world_size(group), rows, 2)
    winner_1B = found_TB2[:, :, 0].argmax(dim=0, keepdim=True)
    return found_TB2[:, :, 1].gather(0, winner_1B)[0].long()
