# .venv/bin/python -m pytest tests/package/test_cards.py
"""Verification cards, and the table of docs/verified.md, which is made from them."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_vlm.commands.bench.run_benchmarks import write_benchmark
from megatron_vlm.report.bench_table import BenchLine

ROOT = Path(__file__).parents[2]
MEASURED = {
    "model": "M",
    "family": "qwen3_vl",
    "status": "passed",
    "date": "2026-11-26",
    "commit": "abc",
    "machine": "2 cores",
    "log": "pytest",
    "versions": {"torch": "2.13.0"},
    "parity": [{"layout": "tp2", "worst": 1e-6, "tolerance": 5e-6}],
}


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("verification_card")


def written(folder, values):
    path = folder / "m.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


WRONG = {
    "no field": (dict(MEASURED, speed=1), "m.yaml: Key 'speed' not in 'VerificationCard'"),
    "no model": ({"family": "qwen3_vl", "status": "failed"}, "m.yaml: "),
    "type": (dict(MEASURED, parity=[{"layout": "tp2", "worst": "big"}]), "'big'"),
    "family": (dict(MEASURED, family="llava"), "family: llava is none of"),
    "status": (dict(MEASURED, status="good"), "status: good is none of"),
    "recipe": (dict(MEASURED, recipe="x"), "there is no configs/model/x.yaml"),
    "no date": ({**MEASURED, "date": None}, "date: a card that is passed has some"),
    "no figures": ({**MEASURED, "parity": []}, "figures: a card that is passed has some"),
    "other date": (dict(MEASURED, date="26.11.2026"), "26.11.2026 is not YYYY-MM-DD"),
    "figures": (
        {"model": "M", "family": "qwen3_vl", "status": "not measured", "scores": []}
        | {"parity": MEASURED["parity"]},
        "figures: a card that is not measured has none",
    ),
    "too wrong": (
        dict(MEASURED, parity=[{"layout": "tp2", "worst": 6e-6, "tolerance": 5e-6}]),
        "but the errors are not all in tolerance",
    ),
    "not yaml": ("model: [", "m.yaml: while parsing"),
    "no mapping": ("- 1", "m.yaml: "),
}


@pytest.mark.parametrize(("values", "problem"), WRONG.values(), ids=WRONG)
def test_a_card_that_is_wrong_names_its_field(values, problem, cards, tmp_path):
    with pytest.raises(cards.CardError) as refused:
        cards.read_card(written(tmp_path, values))
    assert problem in str(refused.value)


def test_a_card_is_filled_from_a_run_on_a_gpu(cards, tmp_path):
    card = cards.read_card(written(tmp_path, MEASURED))
    assert card.parity == [cards.LayoutError("tp2", 1e-6, 5e-6)]
    lines = [
        ("ceilings", "versions", {"torch": "2.13.0+cu130", "triton": "not installed"}),
        ("ceilings", "device", "H100"),
        ("parity", "1x1x1 torch bf16 (worst: loss)", {"found": 2e-2, "bound": 0.1, "holds": True}),
        ("parity", "status", "done, 17 s"),
        ("families", "Qwen3.5 (worst: loss)", {"found": 1e-6, "bound": 1e-5, "holds": True}),
        ("families", "Gemma 4 (worst: loss)", {"found": 2e-6, "bound": 1e-5, "holds": True}),
        (
            "families",
            "Qwen3.5 by flash-linear-attention bf16 (worst: loss)",
            {"found": 0.03, "bound": 0.1, "holds": True},
        ),
        ("whole", "model", "2B"),
        ("whole", "ours, default", {"step_ms": 47.2, "tokens_per_s": 27105.559}),
    ]
    text = "\n".join(json.dumps(dict(zip(("step", "key", "value"), x, strict=True))) for x in lines)
    (tmp_path / "figures.jsonl").write_text(text)
    filled = importlib.import_module("make_card").fill_from_gpu(card, tmp_path)
    assert filled.parity == [cards.LayoutError("1x1x1 torch bf16", 2e-2, 0.1)]
    hybrid = replace(card, family="qwen3_5")
    filled_hybrid = importlib.import_module("make_card").fill_from_gpu(hybrid, tmp_path)
    by_fla = cards.LayoutError("Qwen3.5 by flash-linear-attention bf16", 0.03, 0.1)
    assert filled_hybrid.parity == [cards.LayoutError("Qwen3.5", 1e-6, 1e-5), by_fla]
    assert filled.throughput == [cards.Speed("2B: ours, default", 27110.0)]
    assert filled.machine == "H100" and filled.versions["torch"] == "2.13.0+cu130"
    assert "triton" not in filled.versions


@pytest.mark.parametrize("error", [0.01, None])
def test_a_card_is_filled_from_benchmarks(error, cards, tmp_path):
    card = cards.read_card(written(tmp_path, MEASURED))
    line = BenchLine("docvqa_val", "anls", 0.5, 0.75, error)
    write_benchmark(tmp_path, "lmms-eval 0.7.3", [line])
    filled = importlib.import_module("make_card").fill_from_bench(card, tmp_path)
    assert filled.scores == [cards.Score("docvqa_val anls", 0.5, 0.75, error)]
    assert filled.parity == card.parity and filled.log == "pytest"
    assert filled.versions["suite"] == "lmms-eval 0.7.3"
    lines = [*importlib.import_module("make_models_table")._details(filled)]
    shown = "" if error is None else "0.010"
    assert lines[-1] == f"| docvqa_val anls | 0.500 | 0.750 | +0.250 | {shown} |"


def test_the_table_is_made_from_the_cards(cards):
    """Else: python scripts/make_models_table.py"""
    maker = importlib.import_module("make_models_table")
    page = maker.PAGE.read_text()
    assert maker.with_models(page) == page
