# .venv/bin/python -m pytest tests/model/test_gemma4.py
"""Losses, log-probs and every gradient of Gemma 4 equal Hugging Face's, at each layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row import continue_row
from megatron_vlm.model import attention
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.support import varlen
from tests.support.comparison import check_worst
from tests.support.gemma4 import (
    MIXED,
    TEXT,
    RowSpec,
    TinyGemma4,
    exact_reference_of,
    make_rows,
    reference_of,
)
from tests.support.gemma4_inputs import inputs_of
from tests.support.runs import Outcome, call, loss_and_grads, train
from tests.support.suites import full, slow

pytestmark = pytest.mark.newest  # it depends on the versions

DENSE, EXPERTS = TinyGemma4(), TinyGemma4(experts=8)
SIX = TinyGemma4(layers=6, kinds=("sliding_attention",) * 5 + ("full_attention",))
CONSTANTS = ("layer_scalar", "std_bias", "std_scale")  # tensors that never learn
_FULL = "full_attention"
TWO_FULL = TinyGemma4(kinds=("sliding_attention", _FULL, _FULL, _FULL))
# Rows of a window's length and one more, an image longer than the window, two images side by side,
# an image in a row that is shorter than the window.
EDGES = (
    *(RowSpec(8), RowSpec(9), RowSpec(1, ((12, 12), (3, 3))), RowSpec(3, (), ((2, 9, 9),))),
    RowSpec(2, ((3, 6),)),
)

CASES: dict[str, Any] = {
    "1": (layout(), DENSE, MIXED),
    "tp2-pp2-recompute": (
        layout(tp=2, pp=2, recompute="full", recompute_vision=True, layers_per_stage=[1, 3]),
        DENSE,
        MIXED,
    ),
    "experts-ep2": (layout(dp=2, ep=2), EXPERTS, MIXED),
    "tp2": full(layout(tp=2), DENSE, MIXED),
    "pp2": full(layout(pp=2), DENSE, MIXED),
    "odd-vocab-tp2-pp2": full(layout(tp=2, pp=2), TinyGemma4(vocab=509), MIXED),
    "shared-keys": full(layout(), replace(DENSE, kv_heads=2), MIXED),
    "dp2": full(layout(dp=2), DENSE, MIXED),
    "stage0-0-layers": full(layout(pp=2, layers_per_stage=[0, 4]), DENSE, MIXED),
    "pp2x2": full(layout(pp=2, virtual_stages=2), TinyGemma4(layers=8), MIXED),
    "recompute-selective": full(layout(recompute="selective"), DENSE, MIXED),
    "compiled": slow(layout(compile=True), DENSE, MIXED),
    "offload": full(layout(offload_activations=1.0), DENSE, MIXED),
    "vision-frozen-pp2": full(layout(pp=2, freeze_vision=True), DENSE, MIXED),
    "all-but-merger-frozen-tp2": full(
        layout(tp=2, freeze_vision=True, freeze_language=True), DENSE, MIXED
    ),
    "five-sliding-layers-pp2": full(layout(pp=2), SIX, MIXED),
    "two-full-layers-in-a-row": full(layout(), TWO_FULL, MIXED),
    "values-of-their-own-tp2": full(layout(tp=2), TinyGemma4(values_are_keys=False), MIXED),
    "wide-heads": full(layout(), TinyGemma4(global_head_dim=288, tamed=0.25), MIXED),
    "edges-pp2": (layout(pp=2), DENSE, EDGES),
    "experts": full(layout(), EXPERTS, MIXED),
    "experts-ep2-pp2-recompute": full(layout(pp=2, dp=2, ep=2, recompute="full"), EXPERTS, MIXED),
    "experts-ep4": full(layout(dp=4, ep=4), EXPERTS, MIXED),
}


# Windows that FlashAttention computes, which runs as plain math here.
SHARED_KEYS = replace(DENSE, kv_heads=2)
FLASH: dict[str, Any] = {
    "tp2-pp2-selective": (layout(tp=2, pp=2, recompute="selective"), SHARED_KEYS, MIXED),
    "edges": full(layout(), DENSE, EDGES),
    "pp2-recompute": full(layout(pp=2, recompute="full"), SHARED_KEYS, EDGES),
    "pp2x2": full(layout(pp=2, virtual_stages=2), TinyGemma4(layers=8), MIXED),
    "offload": full(layout(offload_activations=1.0), DENSE, MIXED),
}


def without_constants(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes with the gradients that transformers has: it keeps what never learns as
    buffers."""
    results = []
    for each in outcomes:
        constants = {name: grad for name, grad in each.grads.items() if name.endswith(CONSTANTS)}
        assert all(grad.isnan().all() for grad in constants.values())  # without a gradient
        grads = {name: grad for name, grad in each.grads.items() if name not in constants}
        results.append(replace(each, grads=grads))
    return results


@pytest.mark.parametrize(("case", "sizes", "specs"), CASES.values(), ids=CASES)
def test_equals_hugging_face(case, sizes, specs, tiny, pool, record_property):
    outcomes = pool.run(loss_and_grads, case.world, tiny(sizes), case, make_rows(specs))
    deviations = errors(without_constants(outcomes), reference_of(sizes, specs), case)
    check_worst(deviations, TOLERANCE, record_property)


@contextmanager
def flash_alone() -> Iterator[None]:
    """Let FlashAttention compute every window, also on the CPU, where it is plain math."""
    varlen.register()
    never = mock.Mock(side_effect=AssertionError("a mask was made"))
    with (
        mock.patch.object(attention, "takes_lengths", lambda _: True),
        mock.patch.object(attention, "window_mask", never),
    ):
        yield


def without_masks(path: str, case: Any, rows: Any) -> Outcome:
    with flash_alone():
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize(("case", "sizes", "specs"), FLASH.values(), ids=FLASH)
def test_windows_without_masks_equal_hugging_face(case, sizes, specs, tiny, pool, record_property):
    outcomes = pool.run(without_masks, case.world, tiny(sizes), case, make_rows(specs))
    deviations = errors(without_constants(outcomes), reference_of(sizes, specs), case)
    check_worst(deviations, TOLERANCE, record_property)


def test_untamed_scores_are_as_near_to_the_truth_as_transformers(tiny, pool, record_property):
    """Scores have no scale. Where nothing tames them, fp32 itself is the limit."""
    wild = TinyGemma4(tamed=1.0)
    case, theirs, exact = layout(), reference_of(wild), exact_reference_of(wild)
    outcomes = pool.run(loss_and_grads, 1, tiny(wild), case, make_rows())
    ours = without_constants(outcomes)
    of_theirs = [replace(ours[0], log_probs=theirs.log_probs, train_log_probs=theirs.log_probs)]
    of_theirs = [replace(of_theirs[0], loss=theirs.loss, grads=theirs.grads)]
    worst, own = errors(ours, exact, case), errors(of_theirs, exact, case)
    record_property("worst", max(worst.values()))
    assert max(worst.values()) <= 2 * max(own.values())


def with_every_mask(path: str, specs: Any) -> tuple[Outcome, Outcome]:
    """Return the outcomes of rows as they are, and with a mask where none is needed."""
    rows = make_rows(specs)
    plain = loss_and_grads(path, layout(), rows)
    masked = mock.patch.object(attention, "needs_mask", lambda *_: True)
    with masked:
        return plain, loss_and_grads(path, layout(), rows)


def test_a_mask_that_is_left_out_changes_no_digit(tiny, pool, record_property):
    """Text in rows of up to a window, whose attention is causal."""
    specs = tuple(map(RowSpec, (8, 5, 7, 8)))
    [(plain, masked)] = pool.run(with_every_mask, 1, tiny(DENSE), specs)
    apart = {
        name: float((plain.grads[name] - grad).norm() / grad.norm())
        for name, grad in masked.grads.items()
        if not grad.isnan().any() and grad.norm() > 0
    }
    record_property("worst", max(apart.values()))
    assert len(apart) > 30 and max(apart.values()) <= 1e-7  # measured: 0
    assert plain.loss == pytest.approx(masked.loss, rel=1e-7)


@pytest.mark.parametrize(
    ("case", "sizes"), [(layout(tp=2, pp=2), DENSE), full(layout(dp=2, ep=2), EXPERTS)]
)
def test_an_export_has_the_bits_that_were_loaded(case, sizes, tiny, pool, tmp_path):
    pool.run(train, case.world, tiny(sizes), case, [], str(tmp_path / "out"))
    loaded, exported = (
        load_file(f"{folder}/model.safetensors") for folder in (tiny(sizes), tmp_path / "out")
    )
    assert exported.keys() == loaded.keys()
    assert all(torch.equal(exported[name], loaded[name]) for name in loaded)
    assert sum("layer_scalar" in name or ".std_" in name for name in exported) == sizes.layers + 2


def greedy_without_masks(worker: MegatronWorker) -> list[tuple[list[int], float]]:
    with flash_alone():
        return greedy_answers(worker)


def greedy_answers(worker: MegatronWorker) -> list[tuple[list[int], float]]:
    """Return the tokens of each row's answer, drawn in passes of three rows, and how far their
    log-probs are from those of a forward."""
    rows = make_rows()
    settings = SamplingSettings(max_tokens=24, temperature=0.0)
    answers = [samples[0] for samples in worker.sample(rows, settings, batch_rows=3)]
    pairs = zip(rows, answers, strict=True)
    again = worker.forward([continue_row(row, answer.ids) for row, answer in pairs])
    return [
        (list(answer.ids), float((torch.tensor(answer.log_probs) - log_probs[-24:]).abs().max()))
        for answer, log_probs in zip(answers, again, strict=True)
    ]


@pytest.mark.parametrize(
    ("tiny", "answer"),
    [(DENSE, greedy_answers), full(DENSE, greedy_without_masks), full(EXPERTS, greedy_answers)],
)
def test_greedy_answers_are_those_of_generate(tiny, answer, pool, tmp_path):
    model = tiny.model().eval()
    with torch.no_grad():  # a random model would draw placeholders
        model.model.language_model.embed_tokens.weight[TEXT:] = 0
    model.save_pretrained(tmp_path / "model")
    how = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    [answers] = pool.run(call, 1, str(tmp_path / "model"), layout(), answer)
    for row, (ids, apart) in zip(make_rows(), answers, strict=True):
        expected = model.generate(**inputs_of(model.config, row), **how)[0, len(row.ids_S) :]
        assert ids == expected.tolist() and apart < 1e-4  # measured: 1.1e-5
