"""Greedy or sampled answers of the model, and the ranking of candidates, with the weights in
training. Answers with different settings are batched continuously: prompts join between two rounds
and leave with their last answer. A round takes every batch of generation through the pipeline once.

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

from megatron_vlm.data.batches.collate import split_micro_batches
from megatron_vlm.data.tokens.answer_masks import unpack_masks
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row, continue_row, place_row, prompt_parts, without_targets
from megatron_vlm.distributed.device import to_device
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.model.stage_model import StageModel
from megatron_vlm.training.expert_routing import Chosen, routing_tables
from megatron_vlm.training.generation_batch import (
    ActiveSample,
    DecodePass,
    GenerationBatch,
    Prompt,
    Texts,
    filler,
    pick,
    whole_logits,
)
from megatron_vlm.training.pipeline import ItemKind, Stage
from megatron_vlm.training.row_scores import score_rows
from megatron_vlm.training.stage_inputs import StageInput

Hear = Callable[[int, int], None]


class Decoder:
    """A decoder on every rank of a replica, with the same prompts. Its rows keep their place in the
    cache between two calls of `advance`, independent of the ranks' other work, as long as the
    weights do not change.

    A pass has at most `batch_rows` rows, and as many passes as pipeline stages are in progress. All
    of their rows have a cache, each with columns for the longest row of its pass. `on_token`
    receives each token except stop ids when it is sampled, with the number of its prompt. With
    `routing`, a sample has the experts of its tokens. With `prefill_tokens`, a call of `advance`
    ends once it has taken this number of prompt tokens through the pipeline, and a longer prompt is
    divided among calls.
    """

    def __init__(
        self,
        stage: Stage,
        batch_rows: int,
        texts: Texts | None = None,
        on_token: Hear | None = None,
        routing: bool = False,
        prefill_tokens: int | None = None,
    ):
        assert not (routing and prefill_tokens)  # a divided prompt would lose its experts
        if batch_rows < 1:
            raise ConfigError(
                place="sampling", key="batch_rows", found=batch_rows, allowed="at least 1"
            )
        self.stage, self.texts, self.on_token = stage, texts, on_token
        self.routing, self.prefill_tokens = routing, prefill_tokens
        never = torch.tensor(stage.sizes.tokens.placeholders, dtype=torch.long)
        self.never_N = to_device(never, stage.device)  # once: a token would wait for the copy
        self.generation_batches = [
            GenerationBatch(batch_rows, stage.device, prefill_tokens)
            for _ in range(stage.grid.pp.size)
        ]
        self.waiting: deque[Prompt] = deque()
        self.prompts: dict[int, Prompt] = {}  # prompts that have not ended, by their numbers

    def prompt(
        self, number: int, row: Row, settings: SamplingSettings, n: int, seed: int
    ) -> Prompt:
        """Check a request, and return a prompt that can join. Labels are ignored."""
        if n < 1:
            raise ConfigError(place="sampling", key="n", found=n, allowed="at least 1")
        if settings.needs_texts and self.texts is None:
            key = "stop_strings" if settings.stop_strings else "grammar"
            raise ConfigError(
                "need the text of each answer",
                place="sampling",
                key=key,
                found=getattr(settings, key),
                remedy="give texts, such as those that a tokenizer decodes",
            )
        placed = place_row(without_targets(row), self.stage.sizes.tokens, f"prompt {number}")
        position = int(placed.tokens_S5[:, 2:].max()) + 1
        ids = to_device(row.ids_S.long(), self.stage.device)
        draws = [ActiveSample(number, settings, seed + k, position, ids) for k in range(n)]
        if self.texts is not None and settings.stop_strings:
            for draw in draws:
                draw.searches = self.texts.searches(settings.stop_strings)
        parts = [placed]
        if self.prefill_tokens is not None:
            parts = prompt_parts(placed, self.prefill_tokens, self.stage.sizes.tokens)
        return Prompt(parts, draws)

    def join(self, prompts: Sequence[Prompt]) -> None:
        """Sample answers to these prompts as well, after those that wait."""
        self.prompts |= {prompt.number: prompt for prompt in prompts}
        # The longest come first, so that a prompt that does not fit fails at once.
        self.waiting += sorted(prompts, key=lambda prompt: -prompt.length)

    def leave(self, numbers: Collection[int]) -> None:
        """Stop sampling answers to these prompts."""
        self.prompts = {n: prompt for n, prompt in self.prompts.items() if n not in numbers}
        self.waiting = deque(prompt for prompt in self.waiting if prompt.number not in numbers)
        for batch in self.generation_batches:
            batch.leave(numbers)

    def advance(self, rounds: int | None = None) -> list[Prompt]:
        """Sample a token of each row in each of `rounds` rounds, or until all answers have ended.
        Return the prompts whose answers have ended. A collective of the replica and of the replicas
        that share experts with it, which continue until the last of them has all its answers."""
        prefilled, most = 0, self.prefill_tokens
        with self.stage.evaluating():
            while rounds is None or rounds > 0:
                passes = [
                    (batch, decode_pass)
                    for batch in self.generation_batches
                    for decode_pass in batch.passes(self.waiting)
                ]
                if not self.stage.global_max(len(passes)):
                    break
                self._run([self._with_masks(decode_pass) for _, decode_pass in passes])
                for batch, decode_pass in passes:
                    batch.settle(decode_pass, self._record_token)
                    if decode_pass.cache.in_prefill:
                        prefilled += decode_pass.batch.tokens_BS5[..., 0].numel()
                if most is not None and self.stage.global_max(prefilled) >= most:
                    break
                rounds = None if rounds is None else rounds - 1
        ended = [prompt for prompt in self.prompts.values() if not prompt.left]
        for prompt in ended:
            del self.prompts[prompt.number]
        return ended

    def _with_masks(self, one: DecodePass) -> DecodePass:
        """Begin the masks of a pass, which are computed while the stages compute it."""
        is_held = any(draw.settings.grammar is not None for draw in one.draws)
        if not is_held or not self.stage.grid.is_last_stage:
            return one
        assert self.texts is not None and self.texts.masks is not None
        return replace(one, masks=self.texts.masks.begin(one.draws))

    def _record_token(self, draw: ActiveSample) -> None:
        if self.on_token is not None and draw.ids[-1] not in draw.settings.stop_ids:
            self.on_token(draw.prompt, draw.ids[-1])

    def _run(self, passes: Sequence[DecodePass]) -> None:
        """Take each pass through all stages. On every rank its draws get their next tokens."""
        stage, chosen = self.stage, list[Chosen]()
        outputs = stage.run(
            passes,
            partial(self._forward_step, chosen),
            forward_only=True,
            kind=ItemKind(attrgetter("batch"), lambda: filler(stage.device), self._arrivals),
        )
        counts = [len(decode_pass.draws) for decode_pass in passes]
        picked_N2 = torch.empty(sum(counts), 2, dtype=torch.double, device=stage.device)
        if stage.grid.is_last_stage and outputs:
            picked_N2 = torch.cat(outputs)
        # The first stage needs the tokens to continue, and all ranks to know which rows have ended.
        stage.grid.broadcast_from_head(picked_N2)
        results = iter(picked_N2.tolist())
        for decode_pass in passes:
            for draw in decode_pass.draws:
                token, log_prob = next(results)
                draw.ids.append(int(token))
                draw.log_probs.append(log_prob)
        if self.routing:
            self._add_routing(passes, chosen)

    def _add_routing(self, passes: Sequence[DecodePass], chosen: Sequence[Chosen]) -> None:
        """Add the routing of these passes' tokens to their draws. A collective."""
        batches, stage = [decode_pass.batch for decode_pass in passes], self.stage
        tables = routing_tables(batches, chosen, stage.sizes.text, stage.grid, stage.device)
        for decode_pass, table_TLK in zip(passes, tables, strict=True):
            by_row = table_TLK.split(list(decode_pass.batch.lengths))
            for row, draw in zip(decode_pass.rows, decode_pass.draws, strict=True):
                draw.routing.append(by_row[row])

    def _arrivals(
        self, passes: Sequence[DecodePass], chunk: StageModel
    ) -> Iterator[tuple[DecodePass, StageInput]]:
        # Generated tokens follow the prefill: a placeholder among them has no image.
        sees = [decode_pass.cache.in_prefill for decode_pass in passes]
        batches = [decode_pass.batch for decode_pass in passes]
        return zip(passes, self.stage.arrivals(batches, chunk, sees), strict=True)

    def _forward_step(
        self, chosen: list[Chosen], data: Iterator[tuple[DecodePass, StageInput]], chunk: Any
    ) -> tuple[Tensor, Any]:
        decode_pass, batch = next(data)
        if batch.routing is not None:
            chosen.append((batch.number, batch.routing.chosen))
        lengths = decode_pass.batch.lengths
        # The head runs on each row's last token only.
        last_B = [(length - 1) * len(lengths) + row for row, length in enumerate(lengths)]
        places_B = to_device(torch.tensor(last_B), self.stage.device)
        output = self.stage.call(chunk, batch, cache=decode_pass.cache, loss_mask=places_B)
        return output, partial(self._pick, decode_pass)

    def _pick(self, one: DecodePass, logits_Bv: Tensor, non_loss_data: bool = True) -> Tensor:
        """Pick the next token of each draw [N, 2], which depends on its own settings alone. Draws
        that pick alike are computed at once."""
        stage = self.stage
        if not one.draws:  # a filler, or a part of a prompt before its last
            return torch.empty(0, 2, dtype=torch.double, device=stage.device)
        logits_BV = whole_logits(logits_Bv, stage.sizes.text.vocab, stage.grid.tp)
        alike: dict[tuple[float, ...], list[int]] = {}
        for place, draw in enumerate(one.draws):
            alike.setdefault(draw.settings.picking, []).append(place)
        picked_N2 = torch.empty(len(one.draws), 2, dtype=torch.double, device=stage.device)
        allowed_NV = None
        if one.masks is not None:
            allowed_NV = unpack_masks(
                to_device(one.masks.result(), stage.device), logits_BV.shape[1]
            )
        for places in alike.values():
            draws = [one.draws[place] for place in places]
            rows = to_device(torch.tensor([one.rows[place] for place in places]), stage.device)
            turns = [draw.turn for draw in draws]
            numbers = to_device(torch.tensor(places), stage.device)
            allowed = None if allowed_NV is None else allowed_NV[numbers]
            own_BV, penalised_BV = logits_BV[rows], None
            if any(draw.settings.needs_penalties for draw in draws):
                penalised_BV = torch.stack(list(map(ActiveSample.penalised, draws, own_BV)))
            changes = penalised_BV, allowed
            picked_N2[numbers] = pick(own_BV, draws[0].settings, self.never_N, turns, *changes)
        return picked_N2


ROWS = 16  # default number of rows in a pass


def sample(
    stage: Stage,
    prompts: Sequence[Row],
    settings: SamplingSettings,
    n: int = 1,
    seeds: Sequence[int] | None = None,
    batch_rows: int = ROWS,
    texts: Texts | None = None,
    on_token: Hear | None = None,
    routing: bool = False,
) -> list[list[Completion]]:
    """Generate `n` answers to each prompt.

    Sampled answers need a seed for each prompt. Answer k depends on seed + k alone, at every layout
    and with any other requests. Placeholders of images and videos are never sampled, because such
    an answer cannot be trained on. Stop strings are searched in the text that `texts` decodes.

    All ranks of a replica pass the same prompts and get the same answers. Replicas may pass
    different prompts, or none. The other arguments are Decoder's.
    """
    if settings.temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ConfigError(
            f"needs a seed for each of the {len(prompts)} prompts, but there are "
            f"{'no' if seeds is None else len(seeds)} seeds",
            place="sampling",
            key="temperature",
            found=settings.temperature,
            remedy="give seeds",
        )
    decoder = Decoder(stage, batch_rows, texts, on_token, routing)
    requests = [
        decoder.prompt(number, row, settings, n, seed)
        for number, (row, seed) in enumerate(zip(prompts, seeds or [0] * len(prompts), strict=True))
    ]
    decoder.join(requests)
    decoder.advance()
    return [[draw.completion for draw in prompt.draws] for prompt in requests]


def generate(
    stage: Stage,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = ROWS,
) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, up to the first of `stop_ids` (left out)
    or to `max_new_tokens`, as Hugging Face's `generate(do_sample=False)` does. See `sample`."""
    settings = SamplingSettings(max_new_tokens, 0.0, stop_ids=tuple(stop_ids))
    answers = sample(stage, prompts, settings, batch_rows=batch_rows)
    return [settings.without_stop(completion.ids) for (completion,) in answers]


def candidate_log_probs(
    stage: Stage, prompt: Row, candidates: Sequence[Sequence[int]], batch_rows: int
) -> list[float]:
    """Return the summed log-prob of each candidate's tokens after the prompt. A collective."""
    for place, candidate in enumerate(candidates):
        if not len(candidate):
            raise DataError(
                "it has 0 tokens, so it would always rank first",
                place=f"candidate {place} of {len(candidates)}",
                remedy="give at least one, such as the end of the turn",
            )
    rows = [continue_row(prompt, candidate) for candidate in candidates]
    batches = split_micro_batches(rows, batch_rows, stage.sizes.tokens)
    return [float(log_probs_S.double().sum()) for log_probs_S in score_rows(stage, batches, 1.0)]
