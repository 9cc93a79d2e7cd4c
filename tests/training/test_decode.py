# .venv/bin/python -m pytest tests/training/test_decode.py
"""Greedy generation equals Hugging Face's at each layout, and so do log-probs of candidates."""

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.family.decoder_layers import DELTA_CHUNK
from megatron_vlm.model.kv_cache import KVCache
from megatron_vlm.training.generate import candidate_log_probs, generate
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, layout
from tests.support.batches import MIXED, SHALLOW, RowSpec, make_rows, token_ids
from tests.support.reference import inputs_of, load_reference, row_log_probs
from tests.support.runs import Case, call, my_rows
from tests.support.suites import FULL, in_turn, quick

pytestmark = pytest.mark.newest  # it depends on the versions

NEW_TOKENS = 8
# A near-tie would make a test a toss-up. The first and the second choice of every reference differ
# by at least 1e-4 in log-prob (asserted), a hundred times the error of our log-probs.
MIN_MARGIN = 1e-4
# bf16 at TP2 x PP2 differs from Hugging Face in bf16 by up to 2.5e-3 (test_properties.py).
BF16_MARGIN = 0.01
QWEN3_5: dict[str, Any] = {"family": "qwen3_5", "head_dim": 64}


@dataclass(frozen=True)
class Continuation:
    ids: list[int]
    margins: list[float]  # log-prob of the first choice minus that of the second, at each step


def continue_row(
    model: Qwen3VLForConditionalGeneration,
    row: Row,
    count: int = NEW_TOKENS,
    stop_ids: Collection[int] = (),
    never: Collection[int] | None = None,
) -> Continuation:
    """Return Hugging Face's own greedy generation of one row, by default without placeholders."""
    model.eval()
    if never is None:
        config = model.config
        never = [config.image_token_id, config.video_token_id]
        never += [config.audio_token_id] if config.model_type == "gemma4" else []
    model.generation_config.eos_token_id = None
    out = model.generate(
        **inputs_of(model, row),
        attention_mask=torch.ones_like(row.ids_S)[None],
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=list(stop_ids) or None,
        suppress_tokens=list(never) or None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = out.sequences[0, len(row.ids_S) :].tolist()
    logits = torch.cat(out.logits).float().log_softmax(-1)
    logits[:, list(never)] = -torch.inf
    best = logits.topk(2).values
    return Continuation(
        ids[:-1] if ids[-1] in stop_ids else ids, (best[:, 0] - best[:, 1]).tolist()
    )


def continue_rows(path: str, rows: list[Row], **options: Any) -> list[list[int]]:
    """Return the tokens after a check that no choice was close."""
    model = load_reference(path)
    continuations = [continue_row(model, row, **options) for row in rows]
    assert min(min(row.margins) for row in continuations) > MIN_MARGIN
    return [row.ids for row in continuations]


def edited(source: str, out: Path, change: Callable[[torch.nn.Module], None]) -> str:
    """Write a checkpoint with changed weights and return its path."""
    shutil.copytree(source, out)
    model = load_reference(source)
    with torch.no_grad():
        change(model)
    model.save_pretrained(out)
    return str(out)


def turn_away(model: torch.nn.Module) -> None:
    """Give random signs to the norm before the head, so that the answers differ. A random model
    with a tied head repeats its last token after any prompt, since the head is the embedding."""
    weight = model.model.language_model.norm.weight
    weight *= torch.randn(weight.shape, generator=torch.Generator().manual_seed(6)).sign()


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory) -> Callable[..., str]:
    @cache
    def make(**sizes: Any) -> str:
        if not sizes.get("tied"):
            return tiny(**sizes)
        return edited(tiny(**sizes), tmp_path_factory.mktemp("tied") / "turned", turn_away)

    return make


@pytest.fixture(scope="module")
def reference(checkpoint) -> Callable[..., list[list[int]]]:
    """Return a function that gives Hugging Face's answers to the mixed rows."""

    @cache
    def compute(**sizes: Any) -> list[list[int]]:
        rows = make_rows(MIXED, sizes.get("vocab", 512))
        answers = continue_rows(checkpoint(**sizes), rows)
        assert len({tuple(row) for row in answers}) == len(rows)
        return answers

    return compute


def answer(
    path: str, case: Case, requests: list[dict[str, Any]], split: bool = False
) -> list[list[list[int]]]:
    """Return one worker's answers to several requests, each a dict of generate's arguments."""
    worker = MegatronWorker(case.config(path))
    if split:
        requests = [{**request, "prompts": my_rows(request["prompts"])} for request in requests]
    return [generate(worker.stage, **request) for request in requests]


def ask(rows: list[Row], **more: Any) -> dict[str, Any]:
    return {"prompts": rows, "max_new_tokens": NEW_TOKENS, "stop_ids": (), "batch_rows": 3, **more}


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "1x1x1": (layout(), {}),
    "tp2-pp2": (layout(tp=2, pp=2), {}),
    "stage0-0-layers": (layout(pp=2, layers_per_stage=[0, 4]), {}),
    "pp2x2-tied": (layout(pp=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2]), {"tied": True}),
    "stages-0-1-1-2-tied": (layout(pp=4, layers_per_stage=[0, 1, 1, 2]), {"tied": True}),
    "odd-vocab-tied-tp2-pp2": (layout(tp=2, pp=2), {"vocab": 509, "tied": True}),
    "kv-heads-4-images-not-shared-tp2": (layout(tp=2, share_images=False), {"kv_heads": 4}),
    "recompute-all-tp2-pp2": (
        layout(tp=2, pp=2, recompute="full", recompute_vision=True, layers_per_stage=[1, 3]),
        {},
    ),
    "qwen3_5": (layout(), QWEN3_5),
    "qwen3_5-tp2-pp2": (layout(tp=2, pp=2), QWEN3_5),
    "qwen3_5-experts": (layout(), {**QWEN3_5, "experts": 4}),
}


@pytest.mark.parametrize(
    "name", quick(("1x1x1", "tp2-pp2", "qwen3_5-tp2-pp2"), CASES, in_turn(3, "decoded"))
)
def test_equals_hugging_face(name, pool, checkpoint, reference):
    """Eight mixed rows run in batches of 3, 3 and 2, several at a time with PP. Some of them run
    again, so that any state left behind would show."""
    case, sizes = CASES[name]
    rows, expected = make_rows(MIXED, sizes.get("vocab", 512)), reference(**sizes)
    requests = [ask(rows), ask(rows[:3])]
    if (
        "family" in sizes and case.world == 1
    ):  # states of rows that run alone, and of all rows together
        requests += [ask(rows, batch_rows=1), ask(rows, batch_rows=8)]
    for answers in pool.run(answer, case.world, checkpoint(**sizes), case, requests):
        assert answers == [expected, expected[:3], expected, expected][: len(requests)]


@pytest.mark.parametrize("name", quick(["dp2"], ["dp2", "tp2-dp2"]))
def test_replicas_generate_for_themselves(name, pool, tiny, reference):
    case = layout(dp=2) if name == "dp2" else layout(tp=2, dp=2)
    rows, expected = make_rows(MIXED), reference()
    # The second request has one row: none for the first replica.
    answers = pool.run(answer, case.world, tiny(), case, [ask(rows), ask(rows[:1])], True)
    tp = case.parallel["tp"]
    assert answers[:tp] == [[expected[:4], []]] * tp
    assert answers[tp:] == [[expected[4:], expected[:1]]] * tp


@pytest.mark.parametrize("name", quick(["1x1x1"], ["1x1x1", "tp2-pp2", "pp2x2"]))
def test_rows_stop_at_different_times(name, pool, tiny, reference):
    case = CASES[name][0] if name in CASES else layout(pp=2, virtual_stages=2)
    rows, free = make_rows(MIXED), reference()
    stop_ids = {free[0][4], free[2][0], free[4][7], free[6][2]}
    expected = continue_rows(tiny(), rows, stop_ids=stop_ids)
    lengths = {len(row) for row in expected}
    assert {0, NEW_TOKENS} < lengths and len(lengths) >= 4
    requests = [
        ask(rows, stop_ids=stop_ids),
        ask(rows, stop_ids=stop_ids, batch_rows=16),
        ask(rows, max_new_tokens=1),
        ask(rows[1:2], stop_ids=list(stop_ids)),
        ask(rows[2:3], stop_ids=stop_ids),
        ask([]),
    ]
    for answers in pool.run(answer, case.world, tiny(), case, requests):
        whole, together, one_token, one_row, stopped_at_once, none = answers
        assert whole == together == expected
        assert one_token == [row[:1] for row in free]
        assert one_row == expected[1:2]
        assert stopped_at_once == [[]]
        assert none == []


@pytest.mark.parametrize("family", quick(["qwen3_vl"], ["qwen3_vl", "gemma4"]))
def test_placeholders_are_never_generated(family, pool, tiny, tmp_path):
    """A model that wants the placeholder of an image, or of a sound, says what it wants second."""

    def wanted(model: torch.nn.Module) -> int:
        return model.config.audio_token_id if family == "gemma4" else model.config.image_token_id

    def want(model: torch.nn.Module) -> None:
        model.get_output_embeddings().weight[wanted(model)] *= 40

    path = edited(tiny(family=family), tmp_path / "wants", want)
    rows = make_rows(MIXED[:3], family=family)
    drawn = continue_rows(path, rows, never=())
    assert wanted(load_reference(path)) in {id for ids in drawn for id in ids}
    expected = continue_rows(path, rows)
    for case in (layout(), layout(pp=2)):
        assert pool.run(answer, case.world, path, case, [ask(rows)])[0] == [expected]


@torch.no_grad()
def continue_by_whole_forwards(path: str, row: Row, count: int) -> list[int]:
    """Continue a row by Hugging Face's forward over the whole row for each new token."""
    model = load_reference(path).eval()
    length = len(row.ids_S)
    for _ in range(count):
        best = model(**inputs_of(model, row)).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > MIN_MARGIN
        row = replace(row, ids_S=torch.cat([row.ids_S, best.indices[:1]]))
    return row.ids_S[length:].tolist()


def test_a_prompt_may_end_in_an_image(pool, tiny):
    """transformers 5.17 contradicts itself after an image: its generate counts each axis on from
    the last patch, its forward (and so training) from the longer side. Our generation follows the
    latter."""
    rows = []
    for row in make_rows((RowSpec(9, images=((2, 8),)), RowSpec(12, images=((8, 2),)))):
        end = int((row.ids_S == token_ids().image).nonzero().max()) + 1
        rows.append(replace(row, ids_S=row.ids_S[:end], labels_S=row.labels_S[:end]))
    expected = [continue_by_whole_forwards(tiny(), row, NEW_TOKENS) for row in rows]
    case = layout(pp=2)
    assert pool.run(answer, case.world, tiny(), case, [ask(rows)])[0] == [expected]


@FULL
def test_bf16_at_tp2_pp2(pool, tiny, record_property):
    """Rows are compared until Hugging Face's own choice is close."""
    path, case = tiny(dtype="bfloat16"), layout(tp=2, pp=2)
    case = replace(case, train={"precision": "bf16"})
    rows = make_rows(MIXED)
    model = load_reference(path, torch.bfloat16)
    actual = pool.run(answer, case.world, path, case, [ask(rows, max_new_tokens=10)])[0][0]
    compared = 0
    for row, actual_ids in zip(rows, actual, strict=True):
        expected = continue_row(model, row, 10)
        for actual_id, expected_id, margin in zip(
            actual_ids, expected.ids, expected.margins, strict=True
        ):
            if margin < BF16_MARGIN:
                break
            assert actual_id == expected_id
            compared += 1
    record_property("compared", compared)
    assert compared >= 20


def compare_with_whole_forward(
    worker: MegatronWorker, lengths: Sequence[int] = (5, 16, 9), steps: int = 8
) -> float:
    """Return the largest relative difference between logits of tokens fed one by one and those of
    the whole rows at once. The rows differ in length, and the second leaves half-way."""
    generator = torch.Generator().manual_seed(1)
    count, longest, worst = len(lengths), max(lengths) + steps, 0.0
    ids_BS = torch.randint(0, 250, (count, longest), generator=generator)
    worker.stage.wrapped[0].eval()

    def position_ids(columns_BS: Tensor) -> Tensor:
        return columns_BS.expand(3, *columns_BS.shape)

    with torch.no_grad():
        columns_BS = torch.arange(longest).expand(count, -1)
        whole_BSV = worker.chunks[0](ids_BS, position_ids(columns_BS))
        prompts_BS = ids_BS[:, : max(lengths)].clone()
        for row, length in enumerate(lengths):
            prompts_BS[row, length:] = 0
        cache = KVCache(lengths, torch.device("cpu"))
        columns_BS = torch.arange(max(lengths)).expand(count, -1)
        last_BS = columns_BS == torch.tensor(lengths)[:, None] - 1
        logits_BV = worker.chunks[0](
            prompts_BS, position_ids(columns_BS), cache=cache, loss_mask=last_BS
        )
        rows = list(range(count))
        for step in range(steps):
            ends = torch.tensor([lengths[row] + step for row in rows])
            expected_BV = whole_BSV[rows, ends - 1]
            worst = max(
                worst, float((logits_BV - expected_BV).abs().max() / expected_BV.abs().max())
            )
            remaining = list(range(len(rows)))
            if step == steps // 2:
                remaining.remove(1)
            rows, ends = [rows[place] for place in remaining], ends[remaining]
            cache.keep(remaining)
            cache.advance()
            logits_BV = worker.chunks[0](
                ids_BS[rows, ends][:, None], position_ids(ends[:, None]), cache=cache
            )[:, 0]
    return worst


def compare_with_megatrons_attention(worker: MegatronWorker) -> float:
    """Compare with Megatron's own unfused core attention: the cache works with any backend."""
    for layer in worker.chunks[0].decoder.layers:
        attention = layer.self_attention.core_attention
        attention.backend = DotProductAttention(
            worker.chunks[0].config, attention.layer_number, AttnMaskType.causal, "self"
        )
    return compare_with_whole_forward(worker)


@pytest.mark.parametrize("compare", [compare_with_whole_forward, compare_with_megatrons_attention])
def test_the_cache_gives_the_logits_of_a_whole_forward(compare, pool, tiny, record_property):
    worst = pool.run(call, 1, tiny(), layout(), compare)[0]
    record_property("logits", worst)
    assert worst <= TOLERANCE


def compare_states_with_whole_forward(worker: MegatronWorker) -> float:
    """Compare rows shorter than the convolution's kernel, and at the ends of the chunks of the
    delta rule. Every row crosses such an end."""
    return compare_with_whole_forward(worker, (1, 3, 2, 31, 32, 33, 64), 2 * DELTA_CHUNK)


@pytest.mark.parametrize("experts", quick([0], [0, 4]))
def test_states_give_the_logits_of_a_whole_forward(experts, pool, tiny, record_property):
    path = tiny(**QWEN3_5, experts=experts)
    worst = pool.run(call, 1, path, layout(), compare_states_with_whole_forward)[0]
    record_property("logits", worst)
    assert worst <= TOLERANCE


CANDIDATES = [[17], [3, 99, 50], [40, 40, 40, 40, 41], [17, 18]]


def _rank(worker: MegatronWorker) -> list[list[float]]:
    prompts = [make_rows(MIXED)[place] for place in (0, 2, 5)]
    return [candidate_log_probs(worker.stage, prompt, CANDIDATES, 2) for prompt in prompts]


@pytest.mark.parametrize("name", ["1x1x1", "tp2-pp2"])
def test_candidates_get_hugging_faces_log_probs(name, pool, tiny, record_property):
    case = layout() if name == "1x1x1" else layout(tp=2, pp=2)
    model = load_reference(tiny())
    answers = pool.run(call, case.world, tiny(), case, _rank)
    assert all(each == answers[0] for each in answers)
    worst = 0.0
    for place, log_probs in zip((0, 2, 5), answers[0], strict=True):
        prompt = make_rows(MIXED)[place]
        for candidate, actual in zip(CANDIDATES, log_probs, strict=True):
            ids_S = torch.cat([prompt.ids_S, torch.tensor(candidate)])
            with torch.no_grad():
                log_probs_S = row_log_probs(model, replace(prompt, ids_S=ids_S, labels_S=ids_S))
            expected = float(log_probs_S[len(prompt.ids_S) :].double().sum())
            worst = max(worst, abs(actual / expected - 1))
    record_property("log_probs", worst)
    assert worst <= TOLERANCE


def train_around(path: str, case: Case) -> list[list[tuple[float, float]]]:
    """Return the losses and norms of two steps without evaluations, and of two with some."""
    return [_steps(MegatronWorker(case.config(path)), evaluates) for evaluates in (False, True)]


def _steps(worker: MegatronWorker, with_evaluation: bool) -> list[tuple[float, float]]:
    rows = my_rows(make_rows(MIXED))
    steps = []
    for _ in range(2):
        if with_evaluation:
            generate(worker.stage, rows, 3, (), batch_rows=2)
            candidate_log_probs(worker.stage, rows[0], [[1, 2], [3]], 2)
        loss = worker.forward_backward(rows).loss
        if with_evaluation:  # while the gradients wait for their step
            generate(worker.stage, rows[:2], 2, ())
        steps.append((loss, worker.optim_step(lr=1e-3)[0]))
    return steps


@FULL
@pytest.mark.parametrize("name", ["tp2-pp2-recompute", "dp2-overlap"])
def test_training_goes_on_as_if_nothing_was_generated(name, pool, tiny):
    case = {
        "tp2-pp2-recompute": layout(tp=2, pp=2, recompute="full", recompute_vision=True),
        "dp2-overlap": layout(dp=2, overlap_grad_reduce=True),
    }[name]
    path = tiny(**SHALLOW)
    for without, with_evaluation in pool.run(train_around, case.world, path, case):
        assert with_evaluation == without
        assert without[-1][0] < without[0][0]


def _refusals(worker: MegatronWorker) -> list[str]:
    rows = make_rows((RowSpec(5), RowSpec(9, images=((4, 4),))))
    bad = replace(rows[1], image_grid_I3=rows[1].image_grid_I3 * 2)
    cases: list[tuple[Any, ...]] = [
        (generate, worker.stage, rows, 0, ()),
        (generate, worker.stage, rows, 1, (), 0),
        (generate, worker.stage, [rows[0], bad], 1, ()),
        (candidate_log_probs, worker.stage, rows[0], [[1], []], 2),
        (candidate_log_probs, worker.stage, rows[0], [], 2),
    ]
    messages = []
    for function, *arguments in cases:
        with pytest.raises(ValueError) as caught:
            function(*arguments)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def test_refuses_what_it_cannot_do(pool, tiny):
    messages = pool.run(call, 1, tiny(), layout(), _refusals)[0]
    assert messages[0].startswith("ConfigError: sampling: max_tokens=0")
    assert messages[1].startswith("ConfigError: sampling: batch_rows=0")
    assert messages[2].startswith("DataError: prompt 1: pixel_values has 16 patches")
    assert messages[3].startswith("DataError: candidate 1 of 2")
    assert messages[4].startswith("DataError: rows=[]")
