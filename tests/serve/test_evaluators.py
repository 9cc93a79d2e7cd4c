# make lmms-env, then .venv/bin/python -m pytest tests/serve/test_evaluators.py
"""Evaluators of others through the service. tests/commands/test_bench.py has lmms-eval."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.docs_commands import run_in_docs
from tests.support.pool import free_port
from tests.support.reference import load_reference
from tests.support.serve_client import served

pytestmark = [pytest.mark.slow, pytest.mark.engine("lmms")]

ROOT = Path(__file__).parents[2]
SUITE = ROOT / ".venv-lmms" / "bin" / "python"
PAIRS = 40
TOLERANCE = 1e-5  # of sums of log-probs in fp32. Measured worst: 1.5e-6


def pairs_of(tokenizer: Any, model: Any) -> list[tuple[str, str]]:
    """Return contexts and continuations: any words, or what the model takes for the most likely."""
    choose, pairs = random.Random(0), []
    words = ["red", "blue", "0", "circle", "What", "é", "image", "3", "你"]
    for number in range(PAIRS):
        context = " ".join(choose.choices(words, k=1 + number % 12))
        after = "".join(f" {word}" for word in choose.choices(words, k=1 + number % 7))
        if number % 2:
            ids = tokenizer(context)["input_ids"]
            with torch.no_grad():
                likeliest = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            after = tokenizer.decode([likeliest])
            if tokenizer(context + after)["input_ids"] != [*ids, likeliest]:
                continue  # its text is read as other tokens
        pairs.append((context, after))
    return pairs


def test_lm_eval_reads_the_log_probs_of_transformers(tiny, tmp_path, record_property) -> None:
    path = tiny(vocab=509, seed=4)
    model, tokenizer = load_reference(path), AutoTokenizer.from_pretrained(path)
    pairs = pairs_of(tokenizer, model)
    lines = [json.dumps({"context": before, "continuation": after}) for before, after in pairs]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    tasks.mkdir()
    task = (ROOT / "tests" / "support" / "lm_eval_tasks" / "words.yaml").read_text()
    (tasks / "words.yaml").write_text(task.replace("WORDS", str(tmp_path / "words.jsonl")))
    with served(path, tmp_path / "run", free_port()) as service:
        changes = {"=DIR": f"={path}", "http://127.0.0.1:8000": service.url}
        changes["hellaswag"] = f"words --log_samples --include_path {tasks} --output_path {out}"
        run_in_docs("serve-chats.md", "lm_eval", SUITE, tasks, changes)
    [file] = out.glob("*/samples_words_*.jsonl")
    samples = {each["doc_id"]: each for each in map(json.loads, file.read_text().splitlines())}
    worst, greedy = 0.0, []
    for number, (before, after) in enumerate(pairs):
        [[[total, is_greedy]]] = samples[number]["resps"]
        start, ids = len(tokenizer(before)["input_ids"]), tokenizer(before + after)["input_ids"]
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        targets = torch.tensor(ids[start:])
        scored = log_probs[start - 1 : -1]
        expected = scored.gather(1, targets[:, None]).double().sum().item()
        worst = max(worst, abs(float(total) - expected))
        assert (is_greedy == "True") == bool((scored.argmax(-1) == targets).all())
        greedy.append(is_greedy)
    record_property("worst", worst)
    assert worst < TOLERANCE
    assert len(pairs) > PAIRS / 2 and {"True", "False"} == set(greedy)
