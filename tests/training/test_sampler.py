# .venv/bin/python -m pytest tests/training/test_sampler.py
"""Sampling in the trainer: samples carry the log-probs of `forward`, independent of the other rows
of a pass, a row that ends makes room for the next prompt, and top-k and top-p cut off the same
tokens as in transformers."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import continue_row
from megatron_vlm.errors import ConfigError
from megatron_vlm.model.kv_cache import CACHE_BLOCK, KVCache
from megatron_vlm.training.generate import Decoder
from megatron_vlm.training.generation_batch import (
    DecodePass,
    TextOf,
    Texts,
    likeliest,
    pick,
    whole_logits,
)
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, make_rows, token_ids
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_logits
from tests.support.runs import Case, call, my_rows
from tests.support.suites import FULL, quick
from tests.training.test_decode import QWEN3_5
from tests.training.test_moe_train import EXPERTS

# Log-probs around -6 in fp32 on the CPU. Measured worst case: 9.6e-7, at TP2.
TOLERANCE = 5e-6
STOP_IDS = tuple(range(0, 250, 8))  # about one token in 16: answers of very different lengths
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "logit_bias": ((8, 2.5), (30, -4.0)),
    "min_tokens": 6,
}
SEEDS = [3, 1, 4, 1, 5, 9, 2, 6]
HYBRID = QWEN3_5 | dict(layers=2, full_attention_interval=2)


def worst_log_prob(worker: MegatronWorker) -> float:
    """Return the largest difference between the log-probs of samples and those of `forward`."""
    prompts = my_rows(make_rows(MIXED))
    settings = SamplingSettings(12, temperature=0.7, top_k=200, top_p=0.9, stop_ids=STOP_IDS)
    settings = replace(settings, **(PENALTIES | {"min_tokens": 2}))
    completions = worker.sample(prompts, settings, 2, range(0, 2 * len(prompts), 2), batch_rows=3)
    pairs = [
        (prompt, each)
        for prompt, answers in zip(prompts, completions, strict=True)
        for each in answers
    ]
    scored = worker.forward([continue_row(prompt, each.ids) for prompt, each in pairs])
    lengths = {len(each.ids) for _, each in pairs}
    assert len(lengths) > 2 and all(len(each.ids) == len(each.log_probs) for _, each in pairs)
    assert all((each.ids[-1] in STOP_IDS) == (each.ended == "stop") for _, each in pairs)
    return max(
        float((log_probs_S[-len(each.ids) :] - torch.tensor(each.log_probs)).abs().max())
        for (_, each), log_probs_S in zip(pairs, scored, strict=True)
    )


LAYOUTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "tp2": (layout(tp=2), SHALLOW),
    "pp2": (layout(pp=2), SHALLOW),
    "tp2-pp2": (layout(tp=2, pp=2), SHALLOW),
    "experts-ep2": (layout(dp=2, ep=2), EXPERTS | SHALLOW),
    "qwen3_5": (layout(), HYBRID),
    "qwen3_5-tp2-pp2": (layout(tp=2, pp=2), HYBRID),
    "qwen3_5-experts-ep2": (layout(dp=2, ep=2), {**HYBRID, "experts": 4}),
}


QUICK = ("tp2-pp2", "experts-ep2")


@pytest.mark.parametrize("name", quick(QUICK, [*QUICK, "qwen3_5-tp2-pp2", "qwen3_5-experts-ep2"]))
def test_log_probs_are_those_of_forward(name, pool, tiny, record_property):
    case, sizes = LAYOUTS[name]
    worst = max(pool.run(call, case.world, tiny(**sizes), case, worst_log_prob))
    record_property("log_probs", worst)
    assert worst <= TOLERANCE


def routed(worker: MegatronWorker) -> tuple[bool, float]:
    """Return whether samples record the routing that the trainer chooses, and the largest
    difference between their log-probs and those of `forward` with that routing."""
    prompts = my_rows(make_rows(MIXED))
    settings, seeds = SamplingSettings(6, stop_ids=STOP_IDS), range(len(prompts))
    completions = worker.sample(prompts, settings, 2, seeds, batch_rows=3, routing=True)
    answered, samples = [], []
    for prompt, answers in zip(prompts, completions, strict=True):
        for answer in answers:
            row = continue_row(prompt, answer.ids)
            answered.append(replace(row, routing_SLK=answer.routing_SLK))
            samples.append(answer)
    free = worker.routing([replace(row, routing_SLK=None) for row in answered])
    same = [
        torch.equal(answer.routing_SLK[:-1], chosen_SLK[:-1])
        and bool((answer.routing_SLK[-1] < 0).all())
        for answer, chosen_SLK in zip(samples, free, strict=True)
    ]
    scored = worker.forward(answered)
    return all(same), max(
        float((log_probs_S[-len(answer.ids) :] - torch.tensor(answer.log_probs)).abs().max())
        for answer, log_probs_S in zip(samples, scored, strict=True)
    )


@pytest.mark.parametrize(
    "case", [layout(dp=2, ep=2), pytest.param(layout(pp=2), marks=FULL)], ids=["ep2", "pp2"]
)
def test_samples_say_which_experts_their_tokens_went_to(case, pool, tiny):
    for same, worst in pool.run(call, 2, tiny(**EXPERTS | SHALLOW), case, routed):
        assert same and worst <= TOLERANCE


Seen = list[list[tuple[int, int, int]]]


def counted(worker: MegatronWorker) -> Seen:
    """Return a list that records (rows, tokens of a row, draws) of each pass that the worker sends
    through its stages from now on, by call."""
    passes: Seen = []
    right = worker.stage.run

    def run(items: list[DecodePass], *rest: Any, **more: Any) -> list[Any]:
        passes.append([(*item.batch.tokens_BS5.shape[:2], len(item.draws)) for item in items])
        return right(items, *rest, **more)

    worker.stage.run = run  # type: ignore[method-assign]
    return passes


Found = tuple[list[list[Completion]], Seen]
LONG = SamplingSettings(60, stop_ids=STOP_IDS)


def continuously_and_in_waves(worker: MegatronWorker) -> tuple[Found, Found]:
    """Return the answers to the same prompts with the same seeds, and their passes: all prompts
    sampled at once, and four at a time, until the last of the four ends."""
    prompts, seeds = make_rows(MIXED) * 3, list(range(24))
    passes = counted(worker)
    together = worker.sample(prompts, LONG, 1, seeds, batch_rows=4)
    split, waves = len(passes), []
    for start in range(0, 24, 4):
        part = slice(start, start + 4)
        waves += worker.sample(prompts[part], LONG, 1, seeds[part], batch_rows=4)
    return (together, passes[:split]), (waves, passes[split:])


@pytest.mark.parametrize("name", quick(["pp2"], ["pp2", "qwen3_5"]))
def test_a_row_that_ends_makes_place_for_the_next_prompt(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    (together, runs), (waves, wave_runs) = pool.run(
        call, case.world, tiny(**sizes), case, continuously_and_in_waves
    )[0]
    passes, wave_passes = (list(chain.from_iterable(each)) for each in (runs, wave_runs))
    # As many decoding passes are in progress together as there are stages.
    assert max(sum(tokens == 1 for _, tokens, _ in run) for run in runs) == case.parallel["pp"]
    assert ids_of(together) == ids_of(waves)
    lengths = [len(each.ids) for (each,) in together]
    assert min(lengths) <= 3 and max(lengths) >= 40
    assert all(rows <= 4 for rows, _, _ in passes)
    decoding, in_waves = (
        [rows for rows, tokens, _ in counts if tokens == 1] for counts in (passes, wave_passes)
    )
    # Every token but an answer's first takes one row of one pass.
    assert sum(decoding) == sum(in_waves) == sum(lengths) - 24
    assert len(in_waves) == sum(max(lengths[i : i + 4]) - 1 for i in range(0, 24, 4))
    # All rows are in use while prompts wait, so the number of passes is close to the minimum.
    assert len(decoding) < sum(lengths) / 4 + max(lengths) < len(in_waves)
    assert len(passes) < len(wave_passes)


def ids_of(found: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[each.ids for each in answers] for answers in found]


def several_of_each(worker: MegatronWorker) -> dict[str, Found]:
    """Return five answers to each of three prompts, with room for all answers in a pass, not even
    for those of one prompt, and for a single answer."""
    prompts, settings = make_rows(MIXED)[1:4], SamplingSettings(20, stop_ids=STOP_IDS)
    passes, results = counted(worker), {}
    for rows in (16, 3):
        answers = worker.sample(prompts, settings, 5, [0, 100, 200], batch_rows=rows)
        results[f"rows {rows}"] = (answers, passes.copy())
        passes.clear()
    alone = [
        [worker.sample([prompt], settings, 1, [100 * place + k])[0][0] for k in range(5)]
        for place, prompt in enumerate(prompts)
    ]
    return results | {"alone": (alone, [])}


@pytest.mark.parametrize("sizes", quick([SHALLOW], [SHALLOW, HYBRID]), ids=["qwen3_vl", "qwen3_5"])
def test_several_answers_to_a_prompt_that_is_seen_once(sizes, pool, tiny):
    results = pool.run(call, 1, tiny(**sizes), layout(), several_of_each)[0]
    assert len({each for answers in ids_of(results["alone"][0]) for each in answers}) == 15
    for rows in (16, 3):
        answers, runs = results[f"rows {rows}"]
        passes = list(chain.from_iterable(runs))
        assert ids_of(answers) == ids_of(results["alone"][0])
        prefills = [(count, draws) for count, tokens, draws in passes if tokens > 1]
        assert sum(count for count, _ in prefills) == 3 and sum(d for _, d in prefills) == 15
        assert max(count for count, tokens, _ in passes if tokens == 1) == min(rows, 15)


def across_layouts(worker: MegatronWorker) -> list[list[tuple[int, ...]]]:
    settings = SamplingSettings(10, temperature=0.9, top_k=50, top_p=0.8, stop_ids=STOP_IDS)
    settings = replace(settings, **PENALTIES, min_p=0.05)
    return ids_of(worker.sample(make_rows(MIXED), settings, 3, SEEDS, batch_rows=5))


@pytest.mark.parametrize("name", quick(QUICK, ["tp2-pp2", "qwen3_5-tp2-pp2"]))
def test_samples_are_the_same_at_every_layout(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    expected = pool.run(call, 1, tiny(**sizes), layout(), across_layouts)
    assert pool.run(call, case.world, tiny(**sizes), case, across_layouts) == expected * case.world


def letters(ids: Any) -> str:
    """Return the text of ids that are two letters each."""
    return "".join(chr(97 + token % 7) + chr(97 + token % 3) for token in ids)


def with_stop_strings(worker: MegatronWorker) -> list[list[Completion]]:
    """Return answers without stop strings, and with ones that begin and end within tokens."""
    prompts = make_rows(MIXED)
    free = worker.sample(prompts, SamplingSettings(30), 1, SEEDS)
    settings = SamplingSettings(30, stop_strings=("bbc", "dcfa"))
    stopped = worker.sample(prompts, settings, 1, SEEDS, texts=Texts(letters))
    return [[answers[0] for answers in group] for group in (free, stopped)]


def test_an_answer_ends_with_the_token_that_completes_a_string(pool, tiny):
    free, stopped = pool.run(call, 1, tiny(**SHALLOW), layout(), with_stop_strings)[0]
    ends = 0
    for full, cut in zip(free, stopped, strict=True):
        count = next(
            (i for i in range(1, 31) if {"bbc", "dcfa"} & pieces(letters(full.ids[:i]))), None
        )
        assert cut.ids == full.ids[:count] and len(full.ids) == 30
        assert cut.ended == ("length" if count is None else "stop") and full.ended == "length"
        ends += count is not None
    assert 2 < ends < 8


def words(ids: Any) -> str:
    """Return the text of ids, without the spaces before the first word and before full stops."""
    pieces = "".join(("", " a", " bb", ".", " c", "d")[token % 6] for token in ids)
    return pieces.removeprefix(" ").replace(" .", ".")


ALPHABETS: dict[str, tuple[TextOf, list[list[int]], list[tuple[str, ...]]]] = {
    "letters": (letters, [[i] for i in range(21)], [("bbc", "dcfa"), ("dcfa",), ("bbceb",)]),
    "bytes": (
        # As in byte-level BPE: up to four make a character.
        lambda ids: bytes(ids).decode("utf-8", errors="replace"),
        [[*each.encode()] for each in ("a", "é", "三", "😀", "b")] + [[0x80], [0xF0, 0x9F]],
        [("é三",), ("😀a", "\ufffdb"), ("三😀三é",), ("\ufffd\ufffd\ufffd",)],
    ),
    "words": (words, [[i] for i in range(6)], [("a bb",), (". a.", "d c d"), ("bb.d a",)]),
    "reversed": (  # its end does not come from the last ids
        lambda ids: letters(ids)[::-1],
        [[i] for i in range(21)],
        [("bbc",), ("afcd",), ("aaaaaaaaaa",)],
    ),
}


@pytest.mark.parametrize("name", ALPHABETS)
def test_a_string_is_met_where_the_whole_answer_has_it(name):
    """The search finds a string at the first token where the text of all ids has it, and decodes
    only a tail of the long answers."""
    text_of, tokens, choices = ALPHABETS[name]
    rng, met, max_decoded, longest = random.Random(0), 0, 0, 0
    for turn in range(60):
        strings, decoded = choices[turn % len(choices)], []

        def counting(ids: Any, decoded: list[int] = decoded) -> str:
            decoded.append(len(ids))
            return text_of(ids)

        [search] = Texts(counting).searches(strings)
        ids: list[int] = []
        for token in chain.from_iterable(rng.choice(tokens) for _ in range(300)):
            ids.append(token)
            expected = any(string in text_of(ids) for string in strings)
            assert search.found(ids) == expected
            if expected:
                met += 1
                longest = max(longest, len(ids))
                break
        max_decoded = max(max_decoded, *decoded[2:], 0)
    assert met > 5 and longest > 100
    assert (max_decoded > 290) if name == "reversed" else (max_decoded < 200)


def test_a_string_with_a_special_token_in_it_is_met():
    """It is looked for in text that shows special tokens, such as 9, which answers leave out."""
    shown = lambda ids: "".join("<end>" if i == 9 else "ab"[i % 2] for i in ids)  # noqa: E731
    texts = Texts(lambda ids: shown([i for i in ids if i != 9]), shown, ("<end>",))
    for string, expected in (("a<end>", 3), ("aaa", 4), ("<end>a<e", 5)):
        searches = texts.searches(["nothing", string])
        ids, at = [0, 0, 9, 0, 9, 1], []
        for end in range(1, 7):
            if any(each.found(ids[:end]) for each in searches):
                at.append(end)
        assert at[0] == expected


SEVERAL = [
    SamplingSettings(3),
    SamplingSettings(25, stop_ids=STOP_IDS),
    SamplingSettings(12, temperature=0),
    SamplingSettings(9, temperature=0.6, tempered=True),
    SamplingSettings(30, stop_strings=("bbc", "dcfa")),
    SamplingSettings(7, top_k=40, **PENALTIES, stop_ids=STOP_IDS),
    SamplingSettings(8, top_p=0.7, temperature=1.3),
    SamplingSettings(9, temperature=0.6),
]


def settings_of_their_own(worker: MegatronWorker) -> tuple[Any, Any, list[int]]:
    """Return the answers to prompts with different settings, together and alone, and the row counts
    of the decoding passes. Together, they decode in rounds of two steps. Later prompts join those
    in progress, and two further prompts leave before their end."""
    rows, alone = make_rows(MIXED), []
    for place, (row, settings) in enumerate(zip(rows, SEVERAL, strict=True)):
        drawn = worker.sample([row], settings, 1 + place % 3, [10 * place], texts=Texts(letters))
        alone.append([(each.ids, each.ended) for each in drawn[0]])
    passes, decoder = counted(worker), Decoder(worker.stage, 8, Texts(letters))
    prompts = [
        decoder.prompt(place, row, settings, 1 + place % 3, 10 * place)
        for place, (row, settings) in enumerate(zip(rows, SEVERAL, strict=True))
    ]
    gone = replace(SEVERAL[1], stop_ids=(), max_tokens=200)
    goners = [decoder.prompt(100 + place, rows[place], gone, 2, place) for place in range(2)]
    together: dict[int, Any] = {}
    batches = [[prompts[0], goners[0]], prompts[1:4], [], [*prompts[4:], goners[1]]]
    for turn in count():
        decoder.join(batches[turn] if turn < len(batches) else [])
        if turn in (4, 7):
            decoder.leave({goners[turn // 7].number})
        for prompt in decoder.advance(2):
            answers = [draw.completion for draw in prompt.draws]
            together[prompt.number] = [(each.ids, each.ended) for each in answers]
        if turn > len(batches) and not decoder.prompts:
            break
    # All prompts have ended or left, and none of their state remains.
    assert not decoder.waiting
    for each in decoder.generation_batches:
        assert not each.draws and not each.cache.layers and not each.begun.layers
    in_order = [together[place] for place in range(len(prompts))]
    return in_order, alone, [each[0] for each in chain.from_iterable(passes) if each[1] == 1]


@pytest.mark.parametrize("name", quick(["pp2"], ["pp2", "tp2"]))
def test_each_is_drawn_by_its_own_settings_whoever_comes_and_goes(name, pool, tiny):
    case, sizes = LAYOUTS[name]
    answers = pool.run(call, case.world, tiny(**sizes), case, settings_of_their_own)
    for together, alone, rows in answers:
        assert together == alone
        assert len({len(ids) for answers in alone for ids, _ in answers}) > 5
        assert max(rows) == 8


def pieces(text: str) -> set[str]:
    return {text[i : i + size] for i in range(len(text)) for size in (3, 4)}


def warped(scores_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the scores after transformers' top-k and top-p."""
    if top_k:
        scores_BV = TopKLogitsWarper(top_k)(None, scores_BV)
    if top_p < 1:
        scores_BV = TopPLogitsWarper(top_p)(None, scores_BV)
    return scores_BV


CUTS = [(0, 1.0), (1, 1.0), (7, 1.0), (600, 1.0), (0, 0.9), (0, 1e-9), (7, 0.5), (40, 0.95)]


TIES = 8  # rows with many equal logits


def random_logits() -> Tensor:
    """Return logits of 509 ids and one padding id; some rows have equal logits."""
    logits_BV = 3 * torch.randn(64, 510, generator=torch.Generator().manual_seed(0))
    logits_BV[:TIES, :500] = logits_BV[:TIES, :500].round()
    logits_BV[0] = 0
    return logits_BV


def cut_off(worker: MegatronWorker) -> list[Tensor]:
    logits_BV = random_logits()
    width = logits_BV.shape[1] // worker.grid.tp.size
    part_Bv = logits_BV[:, worker.grid.tp.rank * width :][:, :width]
    whole_BV = whole_logits(part_Bv, worker.source.sizes.text.vocab, worker.grid.tp)
    return [likeliest(whole_BV, *cut) for cut in CUTS]


@pytest.mark.parametrize("tp", [1, 2])
def test_top_k_and_top_p_are_those_of_transformers(tp, pool, tiny):
    for scores in pool.run(call, tp, tiny(vocab=509), layout(tp=tp), cut_off):
        for (top_k, top_p), actual_BV in zip(CUTS, scores, strict=True):
            expected_BV = warped(random_logits()[:, :509], top_k, top_p)
            # transformers and vLLM do not define which of several equal logits top-p leaves out.
            assert torch.equal(actual_BV[TIES:], expected_BV[TIES:])
            assert torch.equal(actual_BV.sort().values, expected_BV.sort().values)
            assert top_p < 1 or torch.equal(actual_BV, expected_BV)
            assert (actual_BV > -torch.inf).any(-1).all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 13, 1.0), (1.0, 0, 0.8), (1.7, 20, 0.9)],
)
def test_frequencies_are_the_probabilities_of_what_is_left(
    temperature, top_k, top_p, record_property
):
    draws, never = 20000, torch.tensor([3, 17])
    logits_V = 1.5 * torch.randn(30, generator=torch.Generator().manual_seed(2))
    settings = SamplingSettings(1, temperature, top_k, top_p)
    turns = [(seed, 0) for seed in range(draws)]
    found_N2 = pick(logits_V.expand(draws, -1), settings, never, turns)
    scores_V = logits_V / temperature
    scores_V[never] = -torch.inf
    expected_V = draws * warped(scores_V[None], top_k, top_p)[0].double().softmax(-1)
    found_V = torch.bincount(found_N2[:, 0].long(), minlength=30).double()
    left_V = expected_V > 0
    assert not found_V[~left_V].any() and (top_k == 0 or int(left_V.sum()) <= top_k)
    degrees = int(left_V.sum()) - 1  # Pearson's sum of squares, in standard deviations
    squares = (found_V - expected_V)[left_V] ** 2 / expected_V[left_V]
    error = (float(squares.sum()) - degrees) / (2 * degrees) ** 0.5
    record_property("standard_deviations", error)
    assert abs(error) < 4
    # Log-probs are those of the model, before the cut.
    model_V = logits_V.log_softmax(-1).double()
    assert torch.equal(found_N2[:, 1], model_V[found_N2[:, 0].long()])


def processed(logits_V: Tensor, prompt: list[int], ids: list[int], more: Any) -> Tensor:
    """Return a row of scores after transformers' processors, and after OpenAI's formula of two
    penalties, which transformers has not."""
    seen, scores_1V = torch.tensor([prompt + ids]), logits_V[None].clone()
    biases = [[[id], value] for id, value in more["logit_bias"]]
    scores_1V = SequenceBiasLogitsProcessor(biases)(seen, scores_1V)
    floor = more["min_tokens"]
    few = MinNewTokensLengthLogitsProcessor(len(prompt), floor, [*STOP_IDS], device="cpu")
    scores_1V = few(seen, scores_1V)
    scores_1V = RepetitionPenaltyLogitsProcessor(more["repetition_penalty"])(seen, scores_1V)
    for id in set(ids):
        times = ids.count(id)
        scores_1V[0, id] -= more["frequency_penalty"] * times + more["presence_penalty"]
    return scores_1V[0]


def greedy(worker: MegatronWorker) -> list[list[int]]:
    rows = make_rows(MIXED)
    settings = SamplingSettings(12, temperature=0, stop_ids=STOP_IDS, **PENALTIES)
    return [[*each.ids] for (each,) in worker.sample(rows, settings)]


@pytest.mark.parametrize("name", quick(["tp2"], ["tp2", "pp2"]))
def test_penalties_are_those_of_transformers(name, pool, tiny):
    """The most likely tokens, step by step. Several follow only from a penalty."""
    case, sizes = LAYOUTS[name]
    path = tiny(**sizes)
    found = pool.run(call, case.world, path, case, greedy)[0]
    model, never, changed = load_reference(path), token_ids(), 0
    for row, ids in zip(make_rows(MIXED), found, strict=True):
        whole = continue_row(row, ids)
        logits_SV = row_logits(model, whole)
        for place in range(len(ids)):
            logits_V = logits_SV[len(row.ids_S) + place - 1].clone()
            scores_V = processed(logits_V, row.ids_S.tolist(), ids[:place], PENALTIES)
            for each_V in (logits_V, scores_V):
                each_V[[never.image, never.video]] = -torch.inf
            assert ids[place] == int(scores_V.argmax())
            changed += ids[place] != int(logits_V.argmax())
    assert changed > 10 and min(map(len, found)) >= PENALTIES["min_tokens"]


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_is_that_of_transformers(min_p):
    logits_BV = random_logits()
    expected_BV = MinPLogitsWarper(min_p)(None, logits_BV)
    assert torch.equal(likeliest(logits_BV, 0, 1.0, min_p), expected_BV)
    both_BV = warped(expected_BV, 3, 0.9)
    assert torch.equal(likeliest(logits_BV, 3, 0.9, min_p)[TIES:], both_BV[TIES:])


def test_a_draw_depends_on_its_seed_and_the_number_of_its_token():
    turns = [(seed, token) for seed in (5, 6) for token in range(40)]
    none = torch.tensor([], dtype=torch.long)
    one, other = (
        pick(torch.zeros(80, 500), SamplingSettings(1), none, each)[:, 0].tolist()
        for each in (turns, turns[::-1])
    )
    assert one == other[::-1] and len(set(one)) > 60


def test_the_lowest_of_equal_logits_is_picked_greedily():
    greedily = SamplingSettings(1, temperature=0)
    [[picked, log_prob]] = pick(torch.zeros(1, 9), greedily, torch.tensor([0]), ())
    assert picked == 1 and float(log_prob) == pytest.approx(math.log(1 / 9))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 0),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("temperature", 1e-39),  # logits divided by it are infinite
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.1),
        ("min_tokens", 6),
        ("repetition_penalty", 0.0),
        ("stop_strings", ("a", "")),
    ],
)
def test_settings_that_are_refused(key, value):
    with raises(ConfigError, place="sampling", key=key) as caught:
        SamplingSettings(**{"max_tokens": 5, key: value})
    assert caught.value.found is value


def refusals(worker: MegatronWorker) -> list[ConfigError]:
    prompts, settings = make_rows(MIXED)[2:4], SamplingSettings(1)
    messages = []
    for more in (
        {"settings": settings},
        {"settings": settings, "seeds": [1]},
        {"settings": settings, "seeds": [1, 2], "n": 0},
        {"settings": replace(settings, stop_strings=("a",)), "seeds": [1, 2]},
        {"settings": settings, "seeds": [1, 2], "routing": True},
    ):
        with pytest.raises(ConfigError) as error:
            worker.sample(prompts, **more)
        messages.append(error.value)
    return messages


def test_what_is_refused(pool, tiny):
    without, few, none, no_text, no_experts = pool.run(call, 1, tiny(), layout(), refusals)[0]
    for error, seeds in ((without, "no"), (few, "1")):
        assert (error.place, error.key, error.found) == ("sampling", "temperature", 1.0)
        assert "2 prompts" in error.problem and f" {seeds} seeds" in error.problem
    assert (none.place, none.key, none.found) == ("sampling", "n", 0)
    assert (no_text.place, no_text.key, no_text.found) == ("sampling", "stop_strings", ("a",))
    assert "has no experts" in str(no_experts)


DIVIDED = {
    "1x1x1": (layout(), SHALLOW),
    "tp2-pp2": LAYOUTS["tp2-pp2"],
    "dp2": (layout(dp=2), SHALLOW),
    "pp2x2": (layout(pp=2, virtual_stages=2), {}),
    "experts-ep2": LAYOUTS["experts-ep2"],
    "qwen3_5": LAYOUTS["qwen3_5"],
    "qwen3_5-tp2-pp2": LAYOUTS["qwen3_5-tp2-pp2"],
    "gemma4": (layout(), {"family": "gemma4"}),
    "gemma4-tp2-pp2": (layout(tp=2, pp=2), {"family": "gemma4"}),
}
DIVIDED_QUICK = ("experts-ep2", "qwen3_5-tp2-pp2", "gemma4")
PART = 8  # tokens


def divided(worker: MegatronWorker, family: str) -> tuple[Any, Any, list[int], float]:
    """Return the answers to prompts that take several passes, and the ones to whole prompts, with
    the number of passes of each and the largest difference between log-probs. One prompt leaves
    after its first pass."""
    rows = my_rows(make_rows((*MIXED, replace(MIXED[0], text=41)), family=family))
    settings = SamplingSettings(12, temperature=0.7, stop_ids=STOP_IDS)
    whole = worker.sample(rows, settings, 2, range(len(rows)))
    decoder = Decoder(worker.stage, 6, prefill_tokens=PART)
    prompts = [decoder.prompt(n, row, settings, 2, n) for n, row in enumerate(rows)]
    longest = max(rows, key=lambda row: len(row.ids_S))
    decoder.join([decoder.prompt(len(rows), longest, settings, 2, 0), *prompts])
    decoder.advance(1)
    decoder.leave({len(rows)})
    for _ in range(60):  # replicas that share experts call as often as each other
        decoder.advance(3)
    assert not decoder.prompts
    parts = [draw.completion for prompt in prompts for draw in prompt.draws]
    all_whole = list(chain.from_iterable(whole))
    worst = max(
        float((torch.tensor(a.log_probs) - torch.tensor(b.log_probs)).abs().max())
        for a, b in zip(parts, all_whole, strict=True)
    )
    counts = [len(prompt.parts) for prompt in prompts]
    return [each.ids for each in parts], [each.ids for each in all_whole], counts, worst


@pytest.mark.parametrize("name", quick(DIVIDED_QUICK, DIVIDED))
def test_a_long_prompt_is_divided(name, pool, tiny, record_property):
    """Its answers are those to the whole prompt, with pictures and a video, at every layout."""
    case, sizes = DIVIDED[name]
    action = partial(divided, family=sizes.get("family", "qwen3_vl"))
    results = pool.run(call, case.world, tiny(**sizes), case, action)
    for parts, whole, _counts, worst in results:
        record_property("worst", worst)
        assert parts == whole
        assert worst <= TOLERANCE
    assert max(max(counts) for _, _, counts, _ in results) >= 6


def _state(newest: list[float]) -> tuple[Tensor, Tensor]:
    """Return the state of a layer, filled with the newest token of each row."""
    value_B = torch.tensor(newest, dtype=torch.double)
    return value_B[:, None, None].expand(-1, 3, 5), -value_B[:, None, None, None].expand(
        -1, 2, 3, 4
    )


def test_a_cache_holds_what_its_rows_were_given():
    """Rows join, several from one prompt, grow and leave in random order. Each layer keeps the
    tokens of every row, in at most the columns that the longest row needs, and each state."""
    rng, device = random.Random(0), torch.device("cpu")
    cache, rows, counter = KVCache([], device), [], 0.0
    most_rows = max_length = 0
    for turn in range(400):
        if len(rows) < 6 and (not rows or rng.random() < 0.4):
            lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
            new, new_rows = KVCache(lengths, device), []
            keys_SBGD = torch.full((max(lengths), len(lengths), 2, 3), torch.nan)
            for row, length in enumerate(lengths):
                counter += 1
                new_rows.append([counter] * length)
                keys_SBGD[:, row] = counter  # fills the padding, too
            new.store(1, keys_SBGD, -keys_SBGD)
            new.states[2] = _state([row[0] for row in new_rows])
            taken = [rng.randrange(len(lengths)) for _ in range(rng.randint(1, 6 - len(rows)))]
            cache.add(new, taken, spent=bool(turn % 2))
            rows += [list(new_rows[row]) for row in taken]
            most_rows, max_length = max(most_rows, len(rows)), max(max_length, *map(len, rows))
        if (len(rows) > 1 and rng.random() < 0.1) or turn % 100 == 99:
            remaining = rng.sample(
                range(len(rows)), rng.randint(0 if turn % 100 == 99 else len(rows) - 1, len(rows))
            )
            cache.keep(remaining)
            rows = [rows[row] for row in remaining]
        if not rows:
            assert not cache.layers and not cache.states
            continue
        cache.advance()
        counter += 1
        new_B = counter + torch.arange(len(rows)) / 8
        for row, value in zip(rows, new_B.tolist(), strict=True):
            row.append(value)
        keys = new_B[None, :, None, None].expand(1, -1, 2, 3)
        key_BTGD, value_BTGD = cache.store(1, keys, -keys)
        assert cache.lengths == [len(row) for row in rows]
        expected = _state([row[-2] for row in rows])
        assert all(map(torch.equal, cache.states[2], expected))
        cache.states[2] = _state([row[-1] for row in rows])
        for row, tokens in enumerate(rows):
            assert key_BTGD[row, : len(tokens), 1, 2].tolist() == tokens
            assert cache.mask_B11T[row, 0, 0].sum() == len(tokens)
        assert torch.equal(value_BTGD, -key_BTGD) and key_BTGD.isfinite().all()
        max_length = max(max_length, *map(len, rows))
        held = cache.layers[1][0]
        assert held.shape[0] <= most_rows and held.shape[1] < max_length + CACHE_BLOCK
    assert max_length > 2 * CACHE_BLOCK
