"""Answers of the model, greedy or sampled, and the ranking of candidates, on the weights that are
trained.

Shapes: S tokens, B rows of a pass, N draws of a pass, V the vocabulary, 2 an id and its log-prob.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_vlm.data.batch.micro_batch import cut_micro_batches
from megatron_vlm.data.encode.row import IGNORE, Row, continued, place_row
from megatron_vlm.distributed.device import to_device
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.model.qwen3_vl import Qwen3VLGPTModel
from megatron_vlm.step.arrival import StageInput
from megatron_vlm.step.completions import Completion, Ended, SamplingSettings
from megatron_vlm.step.expert_choices import Chosen, routing_tables
from megatron_vlm.step.lane import DecodePass, Draw, Lane, Prompt, filler
from megatron_vlm.step.pipeline import Stage, as_it_is
from megatron_vlm.step.sampling import pick, whole_logits

ROWS = 16  # of a pass, where nothing else is asked for

TextOf = Callable[[Sequence[int]], str]
Hear = Callable[[int, int], None]


def sample(
    stage: Stage,
    prompts: Sequence[Row],
    settings: SamplingSettings,
    n: int = 1,
    seeds: Sequence[int] | None = None,
    batch_rows: int = ROWS,
    text_of: TextOf | None = None,
    on_token: Hear | None = None,
    routing: bool = False,
) -> list[list[Completion]]:
    """`n` answers to each prompt, as `settings` say.

    Drawn answers need a seed for each prompt: answer k is the one that seed + k alone gives, at
    every layout and whatever else is asked at the same time. Placeholders of images and videos are
    never drawn: nobody could be trained on such an answer. Stop strings are looked for in
    `text_of` the ids of an answer.

    All ranks of a replica pass the same prompts and get the same answers; replicas may pass
    different ones, or none. Labels are ignored. A pass has at most `batch_rows` rows, and as many
    passes as there are pipeline stages are under way: so many rows have a cache, each with columns
    for the longest row beside it. `on_token` hears of each token but stop ids as it is found, with
    the number of its prompt; what it raises ends the generation. With `routing`, a sample says
    which experts its tokens went to.
    """
    _check(settings, len(prompts), n, seeds, batch_rows, text_of)
    asked = _placed(stage, prompts, n, seeds or [0] * len(prompts))
    # The longest come first: what does not fit fails at once.
    waiting = deque(sorted(asked, key=lambda prompt: -len(prompt.row.tokens_S5)))
    lanes = [Lane(batch_rows, stage.device) for _ in range(stage.grid.pp.size)]

    def ended(draw: Draw) -> Ended | None:
        if on_token is not None and draw.ids[-1] not in settings.stop_ids:
            on_token(draw.prompt, draw.ids[-1])
        return _ended(draw.ids, settings, text_of)

    with stage.evaluating():
        while True:
            passes = [(lane, each) for lane in lanes for each in lane.passes(waiting)]
            # Replicas that share experts go on until the last of them has all its answers.
            if not stage.most(len(passes)):
                break
            _run(stage, [each for _, each in passes], settings, routing)
            for lane, each in passes:
                lane.settle(each, ended)
    return [[_sample_of(draw) for draw in prompt.draws] for prompt in asked]


def generate(
    stage: Stage,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = ROWS,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_token: Hear | None = None,
) -> list[list[int]]:
    """The most likely next tokens of each prompt, up to the first of `stop_ids` (left out) or to
    `max_new_tokens`: what Hugging Face's `generate(do_sample=False)` gives. With a `temperature`
    above 0 they are drawn. The rest is as for `sample`."""
    settings = SamplingSettings(max_new_tokens, temperature, stop_ids=tuple(stop_ids))
    found = sample(stage, prompts, settings, 1, seeds, batch_rows, on_token=on_token)
    return [settings.without_stop(each.ids) for (each,) in found]


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


def _check(
    settings: SamplingSettings,
    prompts: int,
    n: int,
    seeds: Sequence[int] | None,
    batch_rows: int,
    text_of: TextOf | None,
) -> None:
    for name, value in (("n", n), ("batch_rows", batch_rows)):
        if value < 1:
            raise ConfigError(f"sampling: {name}={value} must be at least 1")
    if settings.temperature > 0 and (seeds is None or len(seeds) != prompts):
        raise ConfigError(
            f"sampling: temperature={settings.temperature} needs a seed for each of the {prompts} "
            f"prompts, and there are {'none' if seeds is None else len(seeds)}; give seeds"
        )
    if settings.stop_strings and text_of is None:
        raise ConfigError(
            f"sampling: stop_strings={settings.stop_strings} are looked for in the text of an "
            "answer; give text_of, such as the decode of a tokenizer"
        )


def _placed(stage: Stage, prompts: Sequence[Row], n: int, seeds: Sequence[int]) -> list[Prompt]:
    asked = []
    for number, (row, seed) in enumerate(zip(prompts, seeds, strict=True)):
        placed = place_row(_unlabelled(row), stage.sizes.tokens, f"prompt {number}")
        position = int(placed.tokens_S5[:, 2:].max()) + 1
        asked.append(Prompt(placed, [Draw(number, seed + k, position) for k in range(n)]))
    return asked


def _unlabelled(row: Row) -> Row:
    none_S = torch.full_like(row.ids_S, IGNORE)
    return replace(row, labels_S=none_S, values_S={}, loss_weights_S=None, targets=None)


def _ended(ids: Sequence[int], settings: SamplingSettings, text_of: TextOf | None) -> Ended | None:
    if ids[-1] in settings.stop_ids:
        return "stop"
    if settings.stop_strings and text_of is not None:
        # Of the whole answer: a string may begin in one token and end in another, and what a token
        # says may depend on those before it.
        text = text_of(ids)
        if any(string in text for string in settings.stop_strings):
            return "stop"
    return "length" if len(ids) == settings.max_tokens else None


def _sample_of(draw: Draw) -> Completion:
    assert draw.ended is not None
    routing_SLK = None
    if draw.routing:
        last_1LK = torch.full_like(draw.routing[-1][:1], -1)
        routing_SLK = torch.cat([*draw.routing, last_1LK])
    return Completion(tuple(draw.ids), tuple(draw.log_probs), draw.ended, routing_SLK=routing_SLK)


def _run(
    stage: Stage, passes: Sequence[DecodePass], settings: SamplingSettings, routing: bool
) -> None:
    """Each pass through all stages; on every rank its draws get their next tokens."""
    chosen: list[Chosen] = []
    outputs = stage.run(
        passes,
        partial(_forward_step, stage, settings, chosen),
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
    stage: Stage, passes: Sequence[DecodePass], chunk: Qwen3VLGPTModel
) -> Iterator[tuple[DecodePass, StageInput]]:
    # Past the prefill come generated tokens: a placeholder among them shows nothing.
    sees = [one.cache.in_prefill for one in passes]
    batches = [one.batch for one in passes]
    return zip(passes, stage.arrivals(batches, chunk, sees), strict=True)


def _forward_step(
    stage: Stage,
    settings: SamplingSettings,
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
        return output, as_it_is
    return output, partial(_pick, stage, settings, one)


def _pick(
    stage: Stage,
    settings: SamplingSettings,
    one: DecodePass,
    logits_Bv: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """The next token of each draw [N, 2]."""
    logits_BV = whole_logits(logits_Bv, stage.sizes.text.vocab, stage.grid.tp)
    rows_N = to_device(torch.tensor(one.rows), stage.device)
    tokens, turns = stage.sizes.tokens, [draw.turn for draw in one.draws]
    return pick(logits_BV[rows_N], settings, (tokens.image_id, tokens.video_id), turns)
