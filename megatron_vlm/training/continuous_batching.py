"""Answers that are drawn together, whatever the settings of each: prompts join between two rounds,
and leave with their last answer. A round takes every lane through the pipeline once.

Shapes: B rows of a pass, v a rank's part of the vocabulary with its padding, N draws of a pass, T
tokens of a pass, L decoder layers with experts, K experts of a token, 2 an id and its log-prob.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, Row, place_row
from megatron_vlm.distributed.device import to_device
from megatron_vlm.errors import ConfigError
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.completions import SamplingSettings
from megatron_vlm.training.expert_routing import Chosen, routing_tables
from megatron_vlm.training.generation_batch import (
    ActiveSample,
    DecodePass,
    GenerationBatch,
    Prompt,
    filler,
)
from megatron_vlm.training.pipeline import Stage, pass_through
from megatron_vlm.training.stage_inputs import StageInput
from megatron_vlm.training.stop_strings import Texts
from megatron_vlm.training.token_sampling import pick, whole_logits

Hear = Callable[[int, int], None]


class Decoder:
    """On every rank of a replica, with the same prompts. Its rows keep their place in the cache
    from one call of `advance` to the next, whatever the ranks do meanwhile, as long as the weights
    stay what they are.

    A pass has at most `batch_rows` rows, and as many passes as there are pipeline stages are under
    way: so many rows have a cache, each with columns for the longest row beside it. `on_token`
    hears of each token but stop ids as it is found, with the number of its prompt. With `routing`,
    a sample says which experts its tokens went to.
    """

    def __init__(
        self,
        stage: Stage,
        batch_rows: int,
        texts: Texts | None = None,
        on_token: Hear | None = None,
        routing: bool = False,
    ):
        if batch_rows < 1:
            raise ConfigError(
                place="sampling", key="batch_rows", found=batch_rows, allowed="at least 1"
            )
        self.stage, self.texts, self.on_token = stage, texts, on_token
        self.routing = routing
        self.lanes = [GenerationBatch(batch_rows, stage.device) for _ in range(stage.grid.pp.size)]
        self.waiting: deque[Prompt] = deque()
        self.prompts: dict[int, Prompt] = {}  # that have not ended, by their numbers

    def prompt(
        self, number: int, row: Row, settings: SamplingSettings, n: int, seed: int
    ) -> Prompt:
        """What can join: refused is refused here. Labels are ignored."""
        if n < 1:
            raise ConfigError(place="sampling", key="n", found=n, allowed="at least 1")
        if settings.stop_strings and self.texts is None:
            raise ConfigError(
                "need the text of each answer",
                place="sampling",
                key="stop_strings",
                found=settings.stop_strings,
                remedy="give texts, such as those that a tokenizer decodes",
            )
        placed = place_row(_unlabelled(row), self.stage.sizes.tokens, f"prompt {number}")
        position = int(placed.tokens_S5[:, 2:].max()) + 1
        draws = [ActiveSample(number, settings, seed + k, position) for k in range(n)]
        if self.texts is not None and settings.stop_strings:
            for draw in draws:
                draw.searches = self.texts.searches(settings.stop_strings)
        return Prompt(placed, draws)

    def join(self, prompts: Sequence[Prompt]) -> None:
        """Draw answers to these, too, after those that wait."""
        self.prompts |= {prompt.number: prompt for prompt in prompts}
        # The longest come first: what does not fit fails at once.
        self.waiting += sorted(prompts, key=lambda prompt: -len(prompt.row.tokens_S5))

    def leave(self, numbers: Collection[int]) -> None:
        """Draw no more answers to these."""
        self.prompts = {n: each for n, each in self.prompts.items() if n not in numbers}
        self.waiting = deque(each for each in self.waiting if each.number not in numbers)
        for lane in self.lanes:
            lane.leave(numbers)

    def advance(self, rounds: int | None = None) -> list[Prompt]:
        """A token of each row in so many rounds, or until all answers have ended; the prompts whose
        answers have. A collective of the replica, and of those that share experts with it, which go
        on until the last of them has all its answers."""
        with self.stage.evaluating():
            while rounds is None or rounds > 0:
                passes = [(lane, each) for lane in self.lanes for each in lane.passes(self.waiting)]
                if not self.stage.most(len(passes)):
                    break
                _run(self.stage, [each for _, each in passes], self.routing)
                for lane, each in passes:
                    lane.settle(each, self._hear)
                rounds = None if rounds is None else rounds - 1
        ended = [prompt for prompt in self.prompts.values() if not prompt.left]
        for prompt in ended:
            del self.prompts[prompt.number]
        return ended

    def _hear(self, draw: ActiveSample) -> None:
        if self.on_token is not None and draw.ids[-1] not in draw.settings.stop_ids:
            self.on_token(draw.prompt, draw.ids[-1])


def _unlabelled(row: Row) -> Row:
    none_S = torch.full_like(row.ids_S, IGNORE)
    return replace(row, labels_S=none_S, values_S={}, loss_weights_S=None, targets=None)


def _run(stage: Stage, passes: Sequence[DecodePass], routing: bool) -> None:
    """Each pass through all stages; on every rank its draws get their next tokens."""
    chosen: list[Chosen] = []
    outputs = stage.run(
        passes,
        partial(_forward_step, stage, chosen),
        forward_only=True,
        batch_of=attrgetter("batch"),
        filler=lambda: filler(stage.device),
        arriving=partial(_arrivals, stage),
    )
    counts = [len(one.draws) for one in passes]
    picked_N2 = torch.empty(sum(counts), 2, dtype=torch.double, device=stage.device)
    if stage.grid.last and outputs:
        picked_N2 = torch.cat(outputs)
    # Every rank needs them: the first stage to continue, all to know which rows have ended.
    stage.grid.from_head(picked_N2)
    found = iter(picked_N2.tolist())
    for one in passes:
        for draw in one.draws:
            token, log_prob = next(found)
            draw.ids.append(int(token))
            draw.log_probs.append(log_prob)
    if routing:
        _add_routing(stage, passes, chosen)


def _add_routing(stage: Stage, passes: Sequence[DecodePass], chosen: Sequence[Chosen]) -> None:
    """Where the tokens of these passes went to, for their draws. A collective."""
    batches = [one.batch for one in passes]
    tables = routing_tables(batches, chosen, stage.sizes.text, stage.grid, stage.device)
    for one, table_TLK in zip(passes, tables, strict=True):
        by_row = table_TLK.split(list(one.batch.lengths))
        for row, draw in zip(one.rows, one.draws, strict=True):
            draw.routing.append(by_row[row])


def _arrivals(
    stage: Stage, passes: Sequence[DecodePass], chunk: StageModel
) -> Iterator[tuple[DecodePass, StageInput]]:
    # Past the prefill come generated tokens: a placeholder among them shows nothing.
    sees = [one.cache.in_prefill for one in passes]
    batches = [one.batch for one in passes]
    return zip(passes, stage.arrivals(batches, chunk, sees), strict=True)


def _forward_step(
    stage: Stage,
    chosen: list[Chosen],
    data: Iterator[tuple[DecodePass, StageInput]],
    chunk: Any,
) -> tuple[Tensor, Any]:
    one, batch = next(data)
    if batch.routing is not None:
        chosen.append((batch.number, batch.routing.chosen))
    lengths = one.batch.lengths
    # The head on each row's last token only.
    last_B = [(length - 1) * len(lengths) + row for row, length in enumerate(lengths)]
    places_B = to_device(torch.tensor(last_B), stage.device)
    output = stage.call(chunk, batch, cache=one.cache, loss_mask=places_B)
    if not one.draws:  # a filler
        return output, pass_through
    return output, partial(_pick, stage, one)


def _pick(stage: Stage, one: DecodePass, logits_Bv: Tensor, non_loss_data: bool = True) -> Tensor:
    """The next token of each draw [N, 2]: one by one it is what its own settings pick, and those
    that pick alike are done at once."""
    logits_BV = whole_logits(logits_Bv, stage.sizes.text.vocab, stage.grid.tp)
    never = (stage.sizes.tokens.image_id, stage.sizes.tokens.video_id)
    alike: dict[tuple[float, int, float, bool], list[int]] = {}
    for place, draw in enumerate(one.draws):
        alike.setdefault(draw.settings.picking, []).append(place)
    picked_N2 = torch.empty(len(one.draws), 2, dtype=torch.double, device=stage.device)
    for places in alike.values():
        draws = [one.draws[place] for place in places]
        rows = to_device(torch.tensor([one.rows[place] for place in places]), stage.device)
        turns = [draw.turn for draw in draws]
        picked = pick(logits_BV[rows], draws[0].settings, never, turns)
        picked_N2[to_device(torch.tensor(places), stage.device)] = picked
    return picked_N2
