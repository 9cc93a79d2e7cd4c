# .venv/bin/python -m pytest tests/run/test_evaluation.py
"""Scores of held-out sets equal those of Hugging Face's model at each layout."""

import json
import math
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.commands.eval import locate, print_scores
from megatron_vlm.config.data_sources import parse_sets, parse_sources
from megatron_vlm.config.evaluation_checks import BUILT_IN_METRICS, held_out_names
from megatron_vlm.config.schema import CheckpointConfig, EvalConfig
from megatron_vlm.data.batches.dataset import open_data
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.report.metrics_lines import Example
from megatron_vlm.run.evaluation.answer_metrics import (
    METRICS,
    Answer,
    anls,
    exact_match,
    iou,
    relaxed_accuracy,
)
from megatron_vlm.run.evaluation.evaluate import Evaluator, choose_answers, read_candidates
from megatron_vlm.run.evaluation.held_out_sets import first_samples, last_answer, slice_row
from megatron_vlm.run.progress import Progress, is_due
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import TOLERANCE, layout
from tests.run.test_sequences import SMALLEST
from tests.run.test_train import go_pooled
from tests.support.reference import load_reference, row_logits
from tests.support.runs import Case
from tests.support.sets import data_config, open_set, write_set
from tests.training.test_decode import continue_row

ROWS, NEW_TOKENS = 13, 6
PREFILL = "word"
MARGIN = 1e-4  # see tests/training/test_decode.py
LAYOUTS = {
    "1x1x1": layout(),
    "dp2": layout(dp=2),
    "tp2-pp2": layout(tp=2, pp=2),
    "pp2x2": layout(pp=2, virtual_stages=2),
}


def hf_row(row: Row, pixels: PixelTables) -> Row:
    """Return the row with floats in place of bytes, as the image processor makes them
    (tests/data/test_media.py)."""
    return replace(row, pixel_values_PC=pixels.images(row.pixel_values_PC))


def logits_of(model: Any, row: Row) -> torch.Tensor:
    with torch.no_grad():
        return row_logits(model, row)


def prompt_and_answer(row: Row) -> tuple[Row, list[int]]:
    """Split a row into its prompt and its one answer. The end of the turn is trained, the newline
    behind it is not."""
    trained = (row.labels_S != IGNORE).nonzero()[:, 0]
    start, end = int(trained[0]), int(trained[-1]) + 1
    ids_S = row.ids_S[:start]
    prompt = replace(row, ids_S=ids_S, labels_S=torch.full_like(ids_S, IGNORE))
    return prompt, row.ids_S[start:end].tolist()


@pytest.fixture(scope="module")
def asked(tiny, tmp_path_factory) -> dict[str, Any]:
    """Return a set with the model's own answer in every other record, and Hugging Face's
    results."""
    path, folder = tiny(), tmp_path_factory.mktemp("asked")
    file = Path(write_set(folder, ROWS))
    model, tokenizer = load_reference(path).eval(), AutoTokenizer.from_pretrained(path)
    pixels = PixelTables(path, torch.device("cpu"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    rows = rows_in(str(file), path, pixels)
    prompts = (prompt_and_answer(row)[0] for row in rows)
    continuations = [continue_row(model, prompt, NEW_TOKENS, [end]) for prompt in prompts]
    assert min(min(each.margins) for each in continuations) > MARGIN
    texts = [tokenizer.decode(each.ids).strip() for each in continuations]
    blind = [
        continue_row(model, prompt_and_answer(row)[0], NEW_TOKENS, [end])
        for row in rows_in(str(file), path, pixels, grey=True)
    ]
    assert min(min(each.margins) for each in blind) > MARGIN
    special = set(tokenizer.all_special_tokens)
    for record, text in list(zip(records, texts, strict=True))[::2]:
        if text and not any(token in text for token in special):
            record["messages"][-1]["content"] = text
    for record in records[::3]:
        record["messages"][-1]["weight"] = 0.3
    for record, text in list(zip(records, texts, strict=True))[1::8]:
        record["answers"] = [record["messages"][-1]["content"], text]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    answers = [record["messages"][-1]["content"].strip() for record in records]
    return {
        "file": str(file),
        "candidates": list(dict.fromkeys(answers)),
        "texts": texts,
        "blind_texts": [tokenizer.decode(each.ids).strip() for each in blind],
        "references": [
            record.get("answers", [answer]) for record, answer in zip(records, answers, strict=True)
        ],
        "rows": rows_in(str(file), path, pixels),
        "blind_rows": rows_in(str(file), path, pixels, grey=True),
        "model": model,
        "tokenizer": tokenizer,
        "path": path,
    }


def rows_in(file: str, path: str, pixels: PixelTables, grey: bool = False) -> list[Row]:
    data = open_set(file, path, None, train=False)
    rows = [data.row((0, i)) for i in range(len(data.order))]
    if grey:
        for row in (each for each in rows if each.pixel_values_PC is not None):
            row.pixel_values_PC[:] = 128
    return [hf_row(row, pixels) for row in rows]


@pytest.fixture(scope="module")
def expected(asked) -> dict[str, float]:
    """Return the loss, the token accuracy and the ranking score by Hugging Face's logits, with the
    pictures and with grey ones."""
    blind = expected_scores(asked, "blind_rows")
    return expected_scores(asked, "rows") | {f"blind_{name}": v for name, v in blind.items()}


def expected_scores(asked: dict[str, Any], rows: str) -> dict[str, float]:
    model, tokenizer = asked["model"], asked["tokenizer"]
    total, right, count, ranked, weight = 0.0, 0, 0, 0, 0.0
    for row, references in zip(asked[rows], asked["references"], strict=True):
        log_probs = logits_of(model, row)[:-1].log_softmax(-1)
        targets = row.labels_S[1:]
        for place in (targets != IGNORE).nonzero()[:, 0]:
            own = 1.0 if row.loss_weights_S is None else float(row.loss_weights_S[place + 1])
            total -= own * float(log_probs[place, targets[place]])
            weight += own
            right += int(log_probs[place].argmax() == targets[place])
            count += 1
        prompt, answer = prompt_and_answer(row)
        sums = []
        for candidate in asked["candidates"]:
            ids = [*tokenizer(candidate)["input_ids"], answer[-1]]
            whole = replace(prompt, ids_S=torch.cat([prompt.ids_S, torch.tensor(ids)]))
            tail = logits_of(model, whole)[-len(ids) - 1 : -1].log_softmax(-1)
            sums.append(float(tail[range(len(ids)), ids].sum()))
        assert sorted(sums)[-1] - sorted(sums)[-2] > MARGIN
        choice = asked["candidates"][int(np.argmax(sums))]
        ranked += choice in [reference.strip() for reference in references]
    assert weight < count
    return {"loss": total / weight, "token_accuracy": right / count, "ranking": ranked / ROWS}


def examine(path: str, case: Case, file: Any, options: dict[str, Any]) -> list:
    cfg = replace(
        case.config(path),
        data=replace(data_config(None), eval=parse_sets(file)),
        eval=EvalConfig(batch_size=4, **options),
    )
    worker = MegatronWorker(cfg, training=False)
    with closing(Evaluator(worker, cfg)) as evaluator:
        results = list(evaluator.evaluate())
    remarks = [remark for done in results for remark in done.remarks]
    return [(done.name, done.scores | {"remarks": remarks}, done.examples) for done in results]


OWN_METRIC = """
async def own(prediction, answers, record):
    message = record["messages"][-1]
    if message.get("weight") and len(answers) == 2:
        raise ValueError("no such weight")
    return {"letters": len(prediction), "first": prediction == answers[0]}
"""


def expected_metrics(asked: dict[str, Any]) -> dict[str, float]:
    """Return the means over the texts that Hugging Face's model generates, with the pictures and
    with grey ones."""
    means = means_of(asked, "texts")
    blind = {f"blind_{name}": value for name, value in means_of(asked, "blind_texts").items()}
    texts = zip(asked["texts"], asked["blind_texts"], asked["references"], strict=True)
    needs = [blind not in right for text, blind, right in texts if text in right]
    return means | blind | {"needs_picture": sum(needs) / len(needs)}


def means_of(asked: dict[str, Any], texts: str) -> dict[str, float]:
    pairs = list(zip(asked[texts], asked["references"], strict=True))
    # Every third record has a weight.
    scored = [(t, right) for n, (t, right) in enumerate(pairs) if n % 3 or len(right) == 1]
    return {
        "exact_match": sum(text in right for text, right in pairs) / ROWS,
        "anls": math.fsum(anls(*pair)["anls"] for pair in pairs) / ROWS,
        "relaxed_accuracy": sum(relaxed_accuracy(*p)["relaxed_accuracy"] for p in pairs) / ROWS,
        "own_letters": sum(len(text) for text, _ in scored) / len(scored),
        "own_first": sum(text == right[0] for text, right in scored) / len(scored),
        "own_failed": ROWS - len(scored),
    }


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("red", ["blue", " red\n"], 1.0),
        (" red", ["red"], 1.0),
        ("Red", ["red"], 0.0),
        ("", ["red"], 0.0),
    ],
)
def test_an_answer_is_right_in_scores_and_on_pages_alike(prediction, references, expected):
    assert exact_match(prediction, references) == {"exact_match": expected}
    for first, listed in ((references[0], references), (references[-1], ())):
        shown = Example("x:1", first, prediction, answers=tuple(listed))
        assert shown.is_right == Answer((0, 0), first, prediction, tuple(listed)).is_right
        assert shown.is_right == bool(expected)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("Kitten", ["sitting"], 1 - 3 / 7),
        ("sunday", ["saturday"], 1 - 3 / 8),
        ("abcdef", ["bcdefg"], 1 - 2 / 6),  # a letter less, and one more
        ("kitten", ["dog", "KITTEN"], 1.0),  # the best reference, without letter case
        ("a  b", ["a b"], 1.0),  # white space
        ("abcd", ["abxy"], 0.5),  # the threshold itself counts
        ("abcd", ["axyz"], 0.0),  # a similarity of 0.25
        ("", ["abc"], 0.0),
        ("abcdefgh", ["a"], 0.0),
        ("", [""], 1.0),
    ],
)
def test_anls_is_that_of_docvqa(prediction, references, expected):
    assert anls(prediction, references) == {"anls": pytest.approx(expected, abs=1e-12)}


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("104", ["100"], True),
        ("105", ["100"], True),  # the edge counts
        ("106", ["100"], False),
        ("-95", ["-100"], True),
        ("95", ["-100"], False),
        ("42%", ["0.42"], True),
        ("42", ["42%"], False),
        ("0", ["0"], True),  # as texts
        ("0.0", ["0"], False),
        ("1,000", ["1000"], False),  # Python reads no such number
        ("Yes", ["yes"], True),
        ("yes", ["no", "YES"], True),
        ("2021", ["2,021"], False),
        ("nan", ["nan"], False),
    ],
)
def test_relaxed_accuracy_is_that_of_chartqa(prediction, references, expected):
    assert relaxed_accuracy(prediction, references) == {"relaxed_accuracy": float(expected)}


def boxes(*named: tuple[str, list[float]]) -> str:
    return json.dumps([{"bbox_2d": numbers, "label": label} for label, numbers in named])


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        (boxes(("dog", [0, 0, 10, 10])), boxes(("Dog", [0, 0, 10, 10])), (1.0, 1.0)),
        ("The dog: [5, 0, 15, 10].", "[0, 0, 10, 10]", (1 / 3, 0.0)),
        ("(0,0),(10,6)", "(0,0),(10,10)", (0.6, 1.0)),  # as Qwen2-VL writes them
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", (1.0, 1.0)),  # corners in another order
        (f"```json\n{boxes(('a', [0, 0, 9, 10]))}\n```", "[0,0,10,10]", (0.9, 1.0)),
        # Other labels are no pair, and of two boxes for one the better counts.
        (boxes(("cat", [0, 0, 10, 10])), boxes(("dog", [0, 0, 10, 10])), (0.0, 0.0)),
        ("[0,0,10,10] [0,0,10,9]", "[0,0,10,9]", (0.5, 0.5)),
        # The largest overlap comes first, and leaves 5 / 9 to the other boxes.
        ("[0,0,10,10] [0,0,10,5]", "[0,0,10,9] [0,0,10,10]", (7 / 9, 1.0)),
        ("nothing", "[0,0,10,10]", (0.0, 0.0)),
        ("nothing", "[]", (1.0, 1.0)),
        ("[0,0,1,1]", "[]", (0.0, 0.0)),
        ("[0,0,1,1]", "a dog", None),
        ('{"bbox_2d": [1e999, 0, 1, 1]}', "[0,0,1,1]", (0.0, 0.0)),
    ],
)
def test_boxes_overlap(prediction, reference, expected):
    scores = iou(prediction, [reference])
    assert set(METRICS) == set(BUILT_IN_METRICS)
    assert set(scores) <= set(BUILT_IN_METRICS["iou"])
    assert (tuple(scores.values()) or None) == (expected and pytest.approx(expected, abs=1e-12))
    if expected:
        worst = boxes(("", [700, 700, 701, 701]))
        assert iou(prediction, [worst, reference]) == scores  # the best reference counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "tp2-pp2" else pytest.mark.full) for each in LAYOUTS],
)
def test_scores_are_hugging_faces(name, asked, expected, pool):
    own = Path(asked["file"]).with_name("own.py")
    own.write_text(OWN_METRIC)
    options = {"generate": True, "max_new_tokens": NEW_TOKENS, "candidates": asked["candidates"]}
    options |= {"metrics": ("anls", "relaxed_accuracy", "iou", f"{own}:own"), "blind": True}
    case, sets = LAYOUTS[name], {"held out": asked["file"]}
    metrics = expected_metrics(asked)
    results = pool.run(examine, case.world, asked["path"], case, sets, options)
    for rank, [(title, scores, examples)] in enumerate(results):
        assert title == "held out" and scores["samples"] == ROWS
        for key, value in expected.items():
            is_loss = key.endswith("loss")
            assert scores[key] == pytest.approx(value, abs=TOLERANCE if is_loss else 1e-12), key
        assert {key: scores[key] for key in metrics} == metrics  # to the last digit
        assert bool(examples) == (rank == 0)
        failed, no_boxes = scores["remarks"][1], scores["remarks"][0]
        assert f"{own}:own has no score for {metrics['own_failed']} of {ROWS} answers" in failed
        assert "train.jsonl:" in failed and "raised ValueError: no such weight at" in failed
        assert "no right answer of held out has boxes" in no_boxes and "iou" not in scores
    assert 0.2 < metrics["exact_match"] < 0.8 and metrics["own_failed"]  # some right, some wrong
    assert 0 < expected["ranking"] < 1 and 0 < metrics["needs_picture"] < 1


def test_figures_are_shown_as_a_table_beside_the_json(capsys):
    figures = {"loss": 1.23456789012345678, "samples": 2000, "seconds": 12.3456}
    print_scores({"charts": figures, "maps": figures | {"exact_match": 0.5}})
    out, table = capsys.readouterr()
    assert not out and "1.235" in table and "2,000" in table and "12.35" in table
    assert table.split()[:5] == ["set", "loss", "samples", "seconds", "exact_match"]
    assert "1.2345" not in table


def test_a_prefill_begins_every_answer(asked, pool):
    """Generation continues from the prefill, which counts as part of the answer."""
    model, tokenizer = asked["model"], asked["tokenizer"]
    prefill = tokenizer(PREFILL)["input_ids"]
    right = 0
    for row in asked["rows"]:
        prompt, answer = prompt_and_answer(row)
        prefilled = replace(prompt, ids_S=torch.cat([prompt.ids_S, torch.tensor(prefill)]))
        continuation = continue_row(model, prefilled, NEW_TOKENS, [answer[-1]])
        text = tokenizer.decode([*prefill, *continuation.ids]).strip()
        right += text == tokenizer.decode(answer[:-1]).strip()
    options = {"generate": True, "max_new_tokens": NEW_TOKENS, "prefill": PREFILL + " "}
    what = asked["path"], layout(), asked["file"], options
    [[(_, scores, examples)]] = pool.run(examine, 1, *what)
    assert scores["exact_match"] == pytest.approx(right / ROWS, abs=1e-12)
    assert all(example.prediction.startswith(PREFILL) for example in examples)


@pytest.mark.parametrize(
    ("wrong", "right", "chosen"), [(9, 9, (4, 2)), (9, 1, (5, 1)), (1, 9, (1, 5)), (2, 2, (2, 2))]
)
def test_examples_fill_their_room_with_wrong_answers_first(wrong, right, chosen):
    answers = [Answer((0, i), "red", "red" if i < right else "blue") for i in range(wrong + right)]
    verdicts = [answer.is_right for answer in choose_answers(answers, 6)]
    assert verdicts == [False] * chosen[0] + [True] * chosen[1]


def test_examples_show_what_was_asked(asked, pool):
    options = {"generate": True, "max_new_tokens": NEW_TOKENS, "examples": 6}
    [[(name, _, examples)]] = pool.run(examine, 1, asked["path"], layout(), asked["file"], options)
    assert name == "train" and len(examples) == 6
    for example in examples:
        line = int(example.where.rpartition(":")[2])
        record = json.loads(Path(asked["file"]).read_text().splitlines()[line - 1])
        user, assistant = record["messages"]
        assert example.answer == assistant["content"].strip()
        assert list(example.answers) == record.get("answers", [])
        *pictures, said = example.turns[-1].parts
        assert example.turns[-1].role == "user" and user["content"][-1]["text"] == said.text
        assert len(pictures) == len(user["content"]) - 1 and all(each.image for each in pictures)
    verdicts = [example.is_right for example in examples]
    assert verdicts == [False] * 4 + [True] * 2  # wrong ones first


def test_candidates_without_the_right_answer_are_refused(asked, pool):
    options = {"candidates": ["cat", "dog"]}
    with pytest.raises(RuntimeError, match=r"eval\.candidates lacks .* 2 with the prefill"):
        pool.run(examine, 1, asked["path"], layout(), asked["file"], options)


def test_a_part_of_a_set_is_spread_over_it(asked):
    data = open_set(asked["file"], asked["path"], None, train=False)
    five = [int(index) for _, index in first_samples(data, 5).order.epoch(0)]
    assert len(set(five)) == 5 and sorted(five) != list(range(5))
    assert [int(index) for _, index in first_samples(data, 5).order.epoch(0)] == five
    assert [int(index) for _, index in first_samples(data, 99).order.epoch(0)] == list(range(ROWS))


def test_the_last_answer_is_found():
    trained = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    assert last_answer(trained) == (5, 8)
    assert last_answer(np.array([1, 1], dtype=bool)) == (0, 2)


def test_a_cut_row_keeps_the_images_before_it(asked):
    tokens = read_sizes(asked["path"]).tokens
    with_images = (row for row in asked["rows"] if row.image_grid_I3 is not None)
    row = next(row for row in with_images if len(row.image_grid_I3) == 3)
    places = (row.ids_S == tokens.image_id).nonzero()[:, 0]
    first = int(row.image_grid_I3[0].prod()) // tokens.merge**2
    cut = slice_row(row, int(places[first]), tokens)
    assert cut.image_grid_I3.tolist() == row.image_grid_I3[:1].tolist()
    assert torch.equal(cut.pixel_values_PC, row.pixel_values_PC[: row.image_grid_I3[0].prod()])
    assert slice_row(row, int(places[0]), tokens).pixel_values_PC is None
    whole = slice_row(row, len(row.ids_S), tokens)
    assert torch.equal(whole.pixel_values_PC, row.pixel_values_PC)


def test_candidates_from_a_file(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("\ufeffcat\n\nsea horse\n")
    os.mkfifo(tmp_path / "pipe")
    assert read_candidates(str(file)) == ["cat", "sea horse"]
    for wrong, words in (
        (["cat"], "1 entries"),
        (["cat", "cat"], "1 of them different"),
        (str(tmp_path / "none"), ".*/none: does not exist; eval.candidates names a text file"),
        (str(tmp_path), "is a folder, and only files are read"),
        (str(tmp_path / "pipe"), "is a named pipe, and only files are read"),
        ("~nobody-of-this-name/a.txt", "~nobody-of-this-name/a.txt: does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_candidates(wrong)


@pytest.mark.parametrize(
    ("score", "values", "best"), [("loss", (3, 1, 2), 1), ("exact_match", (0.1, 0.1, 0.4), 2)]
)
def test_the_best_step_is_kept(score, values, best):
    checkpoint = CheckpointConfig(best=f"held/{score}")
    progress = Progress()
    for step, value in enumerate(values):
        progress = replace(progress, step=step).with_best(checkpoint, "held", {score: value})
        progress = progress.with_best(checkpoint, "other", {score: -1.0})
    assert (progress.best_step, progress.best) == (best, values[best])
    assert progress.with_best(checkpoint, "held", {score: math.nan}) is progress
    assert Progress().with_best(CheckpointConfig(), "held", {score: 1.0}).best_step is None


def steps_due(options: EvalConfig, samples: int, batch: int, steps: int) -> list[int]:
    """Return the steps at which an interval ends, in a run that takes batches as the loader
    does."""
    due, before = [], Position()
    for step in range(1, steps + 1):
        start = before if before.taken < samples else Position(before.epoch + 1)
        taken = start.taken + batch
        after = Position(start.epoch, taken) if taken <= samples else Position(start.epoch + 1)
        if is_due(options.every, step, before, after, samples):
            due.append(step)
        before = after
    return due


@pytest.mark.parametrize(
    ("options", "samples", "batch", "expected"),
    [
        (EvalConfig("1 epoch"), 24, 8, [3, 6, 9, 12]),
        (EvalConfig("1 epoch"), 23, 7, [4, 8, 12]),  # with 2 samples in each fourth step
        (EvalConfig("0.5 epochs"), 23, 7, [2, 4, 6, 8, 10, 12]),
        (EvalConfig("0.1 epochs"), 30, 1, [3, 6, 9, 12]),  # 3 x 0.1 is above 0.3 as floats
        (EvalConfig("0.1 epochs"), 8, 8, [*range(1, 13)]),  # not more than once a step
        (EvalConfig("1.5 epochs"), 16, 8, [3, 6, 9, 12]),
        (EvalConfig(every=5), 24, 8, [5, 10]),
        (EvalConfig(every=0), 24, 8, []),
        (EvalConfig(), 24, 8, []),  # the clock's, which the caller passes
    ],
)
def test_intervals_in_epochs_end_with_them(options, samples, batch, expected):
    assert steps_due(options, samples, batch, 12) == expected


STOPPING = (
    *("data.eval={held: %s/train.jsonl}", "eval.every=0.5 epochs", "checkpoint.best=held/loss"),
    *("checkpoint.every=1 epoch", "checkpoint.export_from=best"),
    *("train.early_stopping=2", "train.early_stopping_delta=1e9", "train.steps=12"),
    *("optim.lr=1.0", "optim.warmup_steps=6"),  # the rate rises, and everything becomes worse
)


@pytest.mark.full
def test_a_run_stops_early_and_exports_its_best(tiny, tmp_path, pool):
    """An epoch has 4 steps. The evaluation after step 2 is the first, and by the large delta none
    is better; those after 4 and 6 are waited for."""
    write_set(tmp_path)
    model, words = tiny(**SMALLEST), [word.replace("%s", str(tmp_path)) for word in STOPPING]
    for name in ("whole", "resumed"):
        checkpoints = tmp_path / name / "checkpoints"
        if name == "resumed":  # the count comes from the checkpoint
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            for place in ("checkpoints/step-00000006", "export"):
                shutil.rmtree(tmp_path / name / place)
        status, out, err = go_pooled(pool, 2, tmp_path, model, name, *words)
        assert status == 0, err
        text = (tmp_path / name / "metrics.jsonl").read_text()
        lines = list(map(json.loads, text.splitlines()))
        events = [line for line in lines if line["kind"] == "event"]
        losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "eval"}
        assert list(losses) == [2, 4, 6] and losses[2] < min(losses[4], losses[6])
        text = (
            "stopped early at step 6 of 12: held/loss has not improved in 2 evaluations; best "
            f"{losses[2]:.4g} at step 2"
        )
        assert (events[-1]["step"], events[-1]["text"]) == (6, text) and text in out
        steps = sorted(int(each.name[5:]) for each in checkpoints.glob("step-*"))
        assert steps == [2, 4, 6]  # the best, the end of the epoch, the last
        assert f"exported step 2, the best, to {tmp_path / name}/export" in out
        export_checkpoint(str(checkpoints / "step-00000002"), str(tmp_path / f"{name}-best"))
        one, other = (
            folder / "model.safetensors"
            for folder in (tmp_path / name / "export", tmp_path / f"{name}-best")
        )
        assert one.read_bytes() == other.read_bytes()
    words.append("parallel.pp=1")
    status, out, err = go_pooled(pool, 1, tmp_path, model, "resumed", *words)
    assert status == 0 and "nothing was left to train" in out, err
    assert f"{tmp_path}/resumed/export already holds step 2" in out
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000002")
    more = ("train.early_stopping=null", "train.early_stopping_delta=0", "train.steps=8")
    status, out, err = go_pooled(pool, 1, tmp_path, model, "resumed", *words, *more)
    assert status == 0 and "of step 2, is not in" in out and "the best is sought anew" in out, err
    assert f"exported step 8 to {tmp_path}/resumed/export" in out
    last = (*words, "checkpoint.export_from=last")
    status, out, err = go_pooled(pool, 1, tmp_path, model, "whole", *last)
    assert status == 0 and "held/loss was best at step 2: checkpoint.export_from=best" in out, err


def both_sides(files: list[str], path: str, **options: Any) -> list[list[str]]:
    """Return the first message of each record that is trained on, and of each that is held out."""
    sides = []
    for held_out in (False, True):
        cfg, specs = data_config(None, **options), parse_sources(files, "data.train")
        sizes = read_sizes(path)
        data = open_data(specs, "data.train", cfg, path, sizes, held_out=held_out)
        rows = [data.raw((s, i)) for s, index in enumerate(data.indexes) for i in range(len(index))]
        assert [len(data.row((0, 0)).ids_S)] == data.indexes[0].tokens[:1].tolist()
        sides.append([row["messages"][0]["content"][-1]["text"] for row in rows])
    assert not set(sides[0]) & set(sides[1])
    return sides


def test_records_are_held_out_by_their_content(tiny, tmp_path):
    path, file = tiny(), Path(write_set(tmp_path, 40))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    trained, held_out = both_sides([str(file)], path, split=0.25)
    assert len(held_out) == 10 and len(trained) == 30
    # Another order, another file and another id change nothing, and a copy is on the same side.
    copied = [*lines[::-1], *({"id": str(n), **each} for n, each in enumerate(lines[:5]))]
    halves = [copied[:20], copied[20:]]
    for number, half in enumerate(halves):
        text = "".join(json.dumps(each) + "\n" for each in half)
        (tmp_path / f"{number}.jsonl").write_text(text)
    files = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    again = both_sides(files, path, split=float(len(held_out)))
    assert set(again[1]) <= set(held_out) and len(again[1]) >= 10
    assert len(again[0]) + len(again[1]) == 45
    assert set(both_sides([str(file)], path, split=0.25, seed=1)[1]) != set(held_out)
    assert len(both_sides([str(file)], path, split=0.001)[1]) == 1
    with pytest.raises(DataError, match="leaves no record of the 40 to train on"):
        both_sides([str(file)], path, split=40.0)


@pytest.mark.full
def test_a_run_holds_out_a_part(tiny, tmp_path, pool):
    """The set has a name, a list in the folder of the run, and the same records after a resume at
    another layout and for `eval`."""
    file, model = Path(write_set(tmp_path)), tiny(**SMALLEST)
    words = ["data.split=5", "train.steps=2", "checkpoint.best=held_out/loss", "eval.every=1"]
    status, out, err = go_pooled(pool, 2, tmp_path, model, "split", *words)
    assert status == 0, err
    assert "data.split=5 holds out 5 samples of the 23 records of data.train" in out
    listed = (tmp_path / "split" / "held_out.txt").read_text()
    assert len(listed.splitlines()) == 5 and all("train.jsonl:" in x for x in listed.splitlines())
    more = [*words, "train.steps=3", "parallel.pp=1", "data.shuffle=true"]
    status, out, err = go_pooled(pool, 2, tmp_path, model, "split", *more)
    assert status == 0 and "resumed from" in out, err
    assert (tmp_path / "split" / "held_out.txt").read_text() == listed
    rows = (tmp_path / "split" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in rows]
    starts = [line for line in lines if line["kind"] == "start"]
    assert {(line["samples"], line["device"]) for line in starts} == {(18, "cpu")}
    sets = {(line["name"], line["samples"]) for line in lines if line["kind"] == "eval"}
    assert sets == {("held_out", 5)}
    cfg, checkpoint = locate(str(tmp_path / "split"), [])
    assert checkpoint is not None and held_out_names(cfg) == ["held_out"]
    cfg, _ = locate(str(tmp_path / "split"), [f"data.eval={file}"])
    assert held_out_names(cfg) == ["train"]
