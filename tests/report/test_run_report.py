# .venv/bin/python -m pytest tests/report/test_run_report.py
"""Pages of a run, and of several runs with their differences."""

import base64
import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from megatron_vlm.cli import main
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.printable import number, time_spent
from megatron_vlm.report.charts import CURVE_COLUMNS, ChartControls, chart_scripts, smooth, thin_out
from megatron_vlm.report.html import document, draw_parts, script_of
from megatron_vlm.report.metrics_lines import (
    MAX_USAGES,
    EvalLine,
    EventLine,
    Example,
    ExamplePart,
    Examples,
    ExampleTurn,
    StartLine,
    StepLine,
    from_json,
    has_usage_line,
    to_json,
)
from megatron_vlm.report.picture_uri import preview_uri
from megatron_vlm.report.run import read_report, write_report
from megatron_vlm.report.run.metrics_arrays import read_metrics
from megatron_vlm.report.run.page import differences
from megatron_vlm.report.sections import CardPages, Note, Table, is_picture_uri
from tests.support.error_fields import raises
from tests.support.report_facts import Facts, Page, check_self_contained, colour, in_a_browser, walk
from tests.support.suites import full

TEAL = (20, 140, 130)
HOSTILE = "<script>alert(1)</script> & \u4e09 \x1b[2J\u202e"


def start(step=0, **more):
    return {
        **{"kind": "start", "time": "2026-11-21T07:00:00", "step": step, "platform": "cpu"},
        **{"world": 2, "layout": {"tp": 1, "pp": 2, "dp": 1}, "parameters": 30_000_000},
        **{"trainable": 12_000_000, "model": "/models/tiny", "samples": 2000, "total_steps": 500},
        **{"versions": {"torch": "2.13.0", "megatron-core": "0.16.1"}, **more},
    }


def step(number, loss, **more):
    return {
        **{"kind": "step", "step": number, "epoch": 0, "loss": loss, "lr": 1e-5, "grad_norm": 0.8},
        **{"seconds": 0.5, "tokens_per_s": 1000.0, "trained_tokens_per_s": 100.0},
        **{"images_per_s": 12.0, "padding": 0.01, "mfu": None, "memory_gb": 1.5, "skipped": False},
        **more,
    }


def evaluation(number, loss, name="eval", accuracy=0.5, **more):
    scores = {"loss": loss, "token_accuracy": accuracy, "samples": 200, "seconds": 3.2}
    return {"kind": "eval", "step": number, "name": name, **scores, **more}


def event(number, text):
    return {"kind": "event", "step": number, "text": text}


def data_uri(colour=TEAL, size=(64, 48)):
    file = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def example(answer="red", prediction="red", images=None, prompt="What colour?", **more):
    texts = {"where": "eval.jsonl:3", "answer": answer, "prediction": prediction}
    images = [data_uri()] if images is None else images
    parts = [*({"text": "", "image": uri} for uri in images), {"text": prompt, "image": ""}]
    return {**texts, "turns": [{"role": "user", "parts": parts}], **more}


def write_run(run, lines, tail="", examples=None, config=None):
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + tail)
    if examples is not None:
        content = {"step": 100, "name": "eval", "examples": examples}
        (run / "examples.json").write_text(json.dumps(content))
    if config is not None:
        (run / "config.yaml").write_text(config)
    return run


@pytest.fixture
def report(tmp_path):
    """Return report(lines..., tail=..., examples=..., config=...) -> the facts of such a run."""

    def make(*lines, **more):
        return Facts(read_report(write_run(tmp_path / "my run", lines, **more)))

    return make


def test_tiles_are_those_of_the_run(report):
    page = report(
        start(),
        *(step(i, loss, tokens_per_s=rate) for i, loss, rate in ((1, 3.0, 900), (2, 1.25, 1100))),
        step(3, 1.5, tokens_per_s=5000, epoch=1, seconds=61.0),
        evaluation(1, 2.0, accuracy=0.875, exact_match=0.25),
        evaluation(3, 1.75, accuracy=0.8, exact_match=0.225),
        evaluation(3, 1.0, "other", accuracy=0.9),
    )
    assert page.tiles == {
        "last loss, step 3": "1.5",
        "best loss, step 2": "1.25",
        "best eval loss, step 3": "1.75",
        "best eval exact match, step 1": "25.0%",
        "best other loss, step 3": "1",
        "best other token accuracy, step 3": "90.0%",
        "of 500 steps": "3",
        "epoch, from 0": "1",
        "tokens per second, median": "1,100",
        "in steps": "1 min 2 s",
        "2 processes on cpu": "tp1 pp2 dp1",
    }
    assert "my run" in page.words
    facts = "/models/tiny \u00b7 2,000 samples \u00b7 30M parameters, 12M of them trained"
    assert f"{facts} \u00b7 started 2026-11-21 07:00:00" in page.words
    words = report(start(samples=None), step(0, 1.0)).words
    assert any(text.startswith("/models/tiny \u00b7 a stream \u00b7 30M") for text in words)


def test_a_resumed_run_replaces_what_it_did_again_and_what_it_lost(report):
    page = report(
        start(),
        *(step(i, 10.0 - i) for i in range(1, 7)),  # resumes from 3; step 6, the lowest, is lost
        evaluation(3, 0.75),
        evaluation(6, 0.25),
        event(5, "stopped by a signal"),
        start(3, world=4, layout={"tp": 2, "pp": 2, "dp": 1}),
        event(3, "resumed from step-00000003"),
        step(4, 6.5),
        step(5, 6.25, skipped=True),
    )
    assert page.tiles["last loss, step 5"] == page.tiles["best loss, step 5"] == "6.25"
    assert page.tiles["of 500 steps"] == "5"
    assert page.tiles["in steps, 3 of them lost or done again"] == "4.0 s"
    assert page.tiles["best eval loss, step 3"] == "0.75"
    assert page.tiles["4 processes on cpu"] == "tp2 pp2 dp1"
    events = [row for row in page.rows if len(row) == 2]
    assert events[:4] == [
        ("started 2026-11-21 07:00:00: tp1 pp2 dp1, 2 processes on cpu", "0"),
        ("stopped by a signal", "5"),
        ("started 2026-11-21 07:00:00: tp2 pp2 dp1, 4 processes on cpu", "3"),
        ("resumed from step-00000003", "3"),
    ]
    assert events[4:] == [("torch", "2.13.0"), ("megatron-core", "0.16.1")]
    assert page.chart("Loss")["marks"] == [
        {"kind": "short", "x": [5], "run": 0},
        {"kind": "tall", "x": [3], "run": 0},
    ]


def test_the_later_of_two_lines_wins_without_a_start_between(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [step(0, 1.0), step(1, 2.0), step(2, 3.0), step(1, 4.0), evaluation(1, 5.0)]
    lines += [evaluation(1, 6.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = read_metrics(path)
    assert metrics.steps_N.tolist() == [0, 1, 2]
    assert metrics.figures["loss"].tolist() == [1.0, 4.0, 3.0]
    assert [e.score("loss") for e in metrics.evaluations] == [6.0]
    assert math.isnan(metrics.evaluations[0].score("exact_match"))
    assert metrics.replaced == 1 and metrics.seconds == 2.0


@pytest.mark.parametrize(
    "line",
    [
        StartLine("2026", 3, "cpu", 2, {"tp": 2}, 9, 8, "m", 7, 6, {"torch": "2"}),
        StartLine("2026", 3, "cpu", 2, {"tp": 2}, 9, 8, "m", None, 6, {}),  # a stream
        StepLine(3, 1, 2.5, 1e-3, 0.5, 0.1, 10.0, 1.0, 0.0, 0.1, 0.25, 1.5, True),
        EvalLine(step=3, name="a", loss=1.5, token_accuracy=0.5, samples=4, seconds=0.5),
        EvalLine(step=3, name="a", ranking=0, exact_match=1, samples=4, seconds=2),
        EventLine(3, "resumed"),
    ],
)
def test_what_is_written_is_what_is_read(line):
    assert from_json(to_json(line)) == line


def test_the_file_holds_only_requested_figures_and_null_for_infinity():
    line = StepLine(0, 0, math.nan, 1e-3, math.inf, 0.1, 10.0, 1.0, 0.0, 0.1, None, 1.5)
    raw = json.loads(to_json(line))
    assert list(raw)[:5] == ["kind", "step", "epoch", "loss", "lr"]
    assert raw["loss"] is raw["grad_norm"] is raw["mfu"] is None and raw["skipped"] is False
    assert math.isnan(from_json(to_json(line)).mfu)
    scores = EvalLine(step=3, name="a", loss=math.nan, token_accuracy=0, samples=4, seconds=0.5)
    keys = ["kind", "step", "name", "loss", "token_accuracy", "samples", "seconds"]
    assert list(json.loads(to_json(scores))) == keys
    assert from_json('{"kind": "later"}') is None


@pytest.mark.parametrize("total", [1, 2, 39, 40, 41, 100, 12_345])
def test_some_steps_tell_the_memory_the_first_and_the_last_among_them(total):
    steps = [step for step in range(1, total + 1) if has_usage_line(step, total)]
    assert steps[0] == 1 and steps[-1] == total
    assert min(total, MAX_USAGES // 2) <= len(steps) <= MAX_USAGES + 1


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        ("", None),
        (json.dumps(step(2, 0.5))[:-20], "1 line of metrics.jsonl cannot be read"),
        ('{"kind": "step"}\n[]\n\xff\n', "3 lines of metrics.jsonl cannot be read"),
        (json.dumps(step(2, 0.5, lr="fast")) + "\n", "1 line of metrics.jsonl cannot be read"),
        ('{"kind": "later", "step": 2}\n\n', None),  # an unknown kind
    ],
)
def test_lines_that_cannot_be_read_are_counted(tail, told, report):
    page = report(start(), step(0, 1.0), step(1, 2.0), tail=tail)
    assert page.tiles["last loss, step 1"] == "2"
    note = [word for word in page.words if "cannot be read" in word]
    assert (note == []) if told is None else note[0].startswith(told)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_makes_a_gap(value, report):
    losses = [3.0, 2.0, value, 1.0, value, 1.5, 1.25]
    page = report(*(step(i, loss, skipped=loss is None) for i, loss in enumerate(losses)))
    assert page.tiles["last loss, step 6"] == "1.25" and page.tiles["best loss, step 3"] == "1"
    gaps = [3.0, 2.0, None, 1.0, None, 1.5, 1.25]
    assert page.curves("Loss") == [("training", list(range(7)), gaps)]
    assert ("Steps not applied" in page.text) == (value is None)
    if value is None:
        text = "Steps not applied because loss or gradient was not finite: 2. Step 2, 4"
        assert text in page.words


def test_steps_without_a_trained_token_are_counted_and_marked(report):
    page = report(step(0, 3.0), step(1, None, empty=True), step(2, 1.0))
    assert "Steps not applied because no token of their batch was trained: 1. Step 1" in page.words
    assert "not finite" not in page.text
    assert page.chart("Loss")["marks"][0] == {"kind": "short", "x": [1], "run": 0}


def test_infinite_values_are_no_curve(report):
    page = report(step(0, None))
    assert page.tiles["loss"] == "-" and page.summary("Loss") == {}
    assert "no number was logged" in page.page().words
    page = report()
    nothing = {"loss": "-", "steps": "0", "tokens per second, median": "-", "in steps": "0.0 s"}
    assert page.tiles == nothing
    assert "No step was logged." in page.words
    page = report(evaluation(0, 1.5))
    assert page.titles == ["Loss", "Token accuracy"]


def test_a_chart_holds_its_values_and_says_them_in_words(report):
    page = report(start(), *(step(i, loss) for i, loss in enumerate((4.0, 1.0, 3.0))))
    loss = page.chart("Loss")
    assert page.curves("Loss") == [("training", [0, 1, 2], [4, 1, 3])]
    assert loss["span"] == [0, 2] and loss["positive"] and not loss["log"]
    caption = "last 3 at step 2, lowest 1 at step 1, highest 4 at step 0"
    assert page.summary("Loss") == {"training": caption}
    drawn = page.page()
    assert caption in drawn.words
    assert f"Loss: training: {caption}" in [a.get("aria-label") for a in drawn.all("div")]


def test_losses_far_apart_begin_with_a_log_scale(report):
    page = report(*(step(i, 10.0**-i) for i in range(4)))
    assert page.chart("Loss")["log"] and not page.chart("Learning rate")["log"]
    loss = report(step(0, 0.0), step(1, 100.0)).chart("Loss")
    assert not loss["log"] and not loss["positive"]


@pytest.mark.slow
def test_two_hundred_thousand_steps_are_thinned_and_keep_their_extremes(report):
    random = np.random.default_rng(0)
    losses = (2 + random.normal(0, 0.1, 200_000)).round(6).tolist()
    losses[80_001], losses[140_003] = 9.0, 0.5
    before, after = json.dumps(step(7, 0.25)).replace('"step": 7', '"step": {}').split("0.25")
    lines = (f"{before.replace('{}', str(i))}{loss}{after}\n" for i, loss in enumerate(losses))
    started_s = time.process_time()
    page = report(start(), tail="".join(lines))
    assert time.process_time() - started_s < 30  # measured: 3
    assert len(page.page().text) < 500_000  # measured: 230,000, of which uPlot has 53,000
    [(_, x, y)] = page.curves("Loss")
    [curve] = page.chart("Loss")["curves"]
    last, mean, counts = curve["columns"]
    assert 1000 < len(x) <= 2 * CURVE_COLUMNS + 2
    assert x[np.argmax(y)] == 80_001 and max(y) == 9
    assert x[np.argmin(y)] == 140_003 and min(y) == 0.5
    assert len(mean) == CURVE_COLUMNS and sum(counts) == 200_000 and last[-1] == 199_999
    assert np.abs(np.array(mean) - 2).max() < 0.05
    assert any(name.startswith("best loss, mean of 5,000 steps") for name in page.tiles)
    assert "highest 9 at step 80,001" in page.summary("Loss")["training"]


def test_curves_that_have_nothing_to_say_are_left_out(report):
    every = ["Loss", "Learning rate", "Gradient norm", "Tokens", "Images", "Step time"]
    every += ["Padding", "MFU", "Memory"]
    without = [name for name in every if name not in ("MFU", "Images")]
    assert report(step(0, 1.0, mfu=0.4), step(1, 1.0)).titles == every
    assert report(step(0, 1.0, images_per_s=0)).titles == without
    page = report(step(0, 1.0, mfu=0.41), step(1, 1.0, mfu=0.43))
    assert "last 43.0% at step 1, lowest 41.0% at step 0" in page.summary("MFU")["MFU"]
    assert [name for name, _, _ in page.curves("Tokens")] == ["all", "trained"]


def test_a_student_has_charts_of_its_divergence(report, tmp_path):
    """The lowest one is the best, and none is a share."""
    metrics = [{"divergence": value, "cross_entropy": 3.0} for value in (0.75, 0.25, 0.5)]
    lines = [step(i, 1.0, divergence=0.5**i, cross_entropy=2.0) for i in range(4)]
    lines += [evaluation(i, 1.0, accuracy=None, metrics=each) for i, each in enumerate(metrics)]
    page = report(*lines)
    training = [("divergence", [0, 1, 2, 3], [1.0, 0.5, 0.25, 0.125])]
    assert page.curves("Divergence from the teacher") == training
    assert page.curves("Cross-entropy")[0] == ("cross-entropy", [0, 1, 2, 3], [2.0] * 4)
    assert page.curves("Divergence") == [("eval", [0, 1, 2], [0.75, 0.25, 0.5])]
    assert [row[3] for row in page.rows if len(row) == 7] == ["0.75", "0.25\u00a0*", "0.5"]
    runs = [write_run(tmp_path / name, lines) for name in ("one", "other")]
    tiles = Facts(read_report(*runs)).tiles
    assert tiles["best eval divergence: one, step 1"] == "0.25"


def test_evaluations_have_rows_and_curves_of_each_set(report):
    page = report(
        *(step(i, 1.0) for i in range(30)),
        evaluation(10, 0.5, "a", 0.25, exact_match=0.1),
        evaluation(10, 0.75, "b", None),
        evaluation(20, 0.625, "a", 0.75, exact_match=0.1),
    )
    assert [row for row in page.rows if len(row) == 7] == [
        ("a", "10", "0.5\u00a0*", "25.0%", "10.0%\u00a0*", "200", "3.2"),
        ("a", "20", "0.625", "75.0%\u00a0*", "10.0%", "200", "3.2"),
        ("b", "10", "0.75\u00a0*", "-", "-", "200", "3.2"),
    ]
    assert page.titles[-3:] == ["Loss", "Token accuracy", "Exact match"]
    assert page.curves("Exact match") == [("a", [10, 20], [0.1, 0.1])]
    of_sets = [("a", [10, 20], [0.5, 0.625]), ("b", [10], [0.75])]
    assert page.curves("Loss")[1:] == of_sets
    assert [c["dots"] for c in page.chart("Loss")["curves"]] == [False, True, True]
    many = [evaluation(i, abs(i - 7) + 1.0, name) for i in range(300) for name in "ab"]
    rows = [row for row in report(*many).rows if len(row) == 6]
    assert [row[1] for row in rows if row[0] == "b"][:3] == ["0", "7", "200"]
    assert len(rows) == 2 * 102  # the last hundred, the best loss, the first of equal accuracies


def test_examples_are_shown_with_their_pictures(report):
    pictures = [data_uri(), data_uri((200, 30, 120), (30, 20))]
    page = report(
        step(0, 1.0),
        examples=[
            example(" red\n", "red", images=pictures),
            example("red", "blue", images=["http-not-a-picture", "data:image/svg+xml;base64,AA=="]),
            example("a" * 5000, "<|image_pad|>" * 64 + "!"),
        ],
    )
    assert [image["src"] for image in page.page().all("img")] == [*pictures, data_uri()]
    assert "eval, after 100 steps: 1 of these 3 right." in page.text
    assert page.words.count("\u2713 right") == 1 and page.words.count("\u2717 wrong") == 2
    assert page.words.count("[no picture]") == 2
    assert "<|image_pad|> x 64 !" in page.words
    half = "a" * 750
    assert f"{half} [... 3,500 characters ...] {half}" in page.words


def test_broken_examples_are_told(report, tmp_path):
    page = report(step(0, 1.0), examples=[{"where": "x"}])
    assert "examples[0].answer is missing" in " ".join(page.words)
    (tmp_path / "my run" / "examples.json").write_text('{"step": 1, "exa')
    assert "examples.json: is not JSON: Unterminated" in report(step(0, 1.0)).text


def test_examples_are_read_as_they_were_written(tmp_path, report):
    turns = (
        ExampleTurn("user", (ExamplePart("in "), ExamplePart(image=data_uri()), ExamplePart("?"))),
        ExampleTurn("assistant", (ExamplePart("red"),)),
        ExampleTurn("user", (ExamplePart("sure?"),)),
    )
    several = Example("a:2", "red", "crimson ", turns, (" crimson", "red"))
    shown = Examples("eval", 100, (Example("a:1", "red", "blue", turns), several))
    shown.write(tmp_path)
    assert Examples.read(tmp_path / "examples.json") == shown
    shown.write(write_run(tmp_path / "my run", [step(1, 1.0)]))
    page = Facts(read_report(tmp_path / "my run"))
    [cards] = page.of(CardPages)
    labels = [part.label for part in cards.cards[0].sections]
    assert labels == ["user", "assistant", "user", "answer", "model"]
    assert cards.kinds == ["wrong", "right"]
    texts = [part for part in walk(cards.cards[1].sections[3]) if isinstance(part, str)]
    assert [text for text in texts if text] == ["answers", " crimson", "red"]
    parts = [type(part).__name__ for part in cards.cards[0].sections[0].sections]
    assert parts == ["Said", "Pictures", "Said"]


def test_previews_are_small():
    """A picture of a few colours keeps every pixel; a photo is a JPEG."""
    flat = np.zeros((40, 64, 3), np.uint8) + np.array(TEAL, np.uint8)
    photo = np.random.default_rng(0).integers(0, 256, (600, 1280, 3), np.uint8)
    opened = {}
    for name, pixels in (("flat", flat), ("photo", photo)):
        uri = preview_uri(pixels)
        assert is_picture_uri(uri)
        opened[name] = PIL.Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert opened["flat"].format == "PNG" and np.array_equal(opened["flat"], flat)
    assert opened["photo"].format == "JPEG" and opened["photo"].size == (640, 300)


def test_pictures_that_find_no_room_are_told(report):
    large = "data:image/png;base64," + "A" * 5 * 2**20
    page = report(step(1, 1.0), examples=[example(images=[large])] * 4)
    assert page.words.count(large) == 2 and page.words.count("[no room for the picture]") == 2


def hostile_run(folder, text=HOSTILE):
    return write_run(
        folder,
        [
            start(model=text, layout={text: 1}, versions={text: text}, time=text),
            *(step(i, 2.0 + i % 3) for i in range(100)),
            *(evaluation(2, 1.0, name) for name in (text, "</script><!--")),
            event(1, text),
        ],
        examples=[example(text, text, prompt=text, where=text, images=[text])],
        config=f"model: {json.dumps(text)}\n",
    )


def test_text_stays_text_and_the_page_needs_no_network(tmp_path):
    facts = Facts(read_report(hostile_run(tmp_path / "run")))
    page = facts.page()
    check_self_contained(page, (*chart_scripts(), script_of("paging")))
    assert "<script>alert" not in page.text and "</script><!--" not in page.text
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert page.text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; \u4e09 \\x1b[2J") >= 12
    names = [name for name, _, _ in facts.curves("Loss")]
    assert "<script>alert(1)</script> & \u4e09 \\x1b[2J\\u202e" in names
    assert f"model: {json.dumps(HOSTILE)}\n" in facts.words and "config.yaml" in facts.words


def test_a_static_page_allows_no_scripts():
    page = Page(document("a page", "", [draw_parts(Note("text"))]))
    check_self_contained(page)
    assert "text" in page.words and "script-src" not in page.text
    with pytest.raises(AssertionError):
        document("a page", "", [], ["let a = '</script>'"])


def two_runs(tmp_path):
    """Write two runs. The second trained twice as long, with other keys, and was resumed."""
    first = write_run(
        tmp_path / "first",
        [start(), *(step(i, 3.1 - i / 10) for i in range(1, 11)), evaluation(10, 2.0)],
        config="run: runs/first\noptim:\n  lr: 0.001\n  decay: cosine\ndata:\n  eval: null\n",
    )
    lines = [start(layout={"tp": 2}), *(step(i, 2.05 - i / 20) for i in range(1, 21))]
    lines += [evaluation(10, 1.5), evaluation(20, 1.0), evaluation(20, 0.5, "other"), start(20)]
    second = write_run(
        tmp_path / "second",
        [*lines, step(21, 4.0, tokens_per_s=9000.0)],
        config="run: runs/second\noptim:\n  lr: 0.01\n  decay: cosine\nmodel:\n  path: x\n",
    )
    return first, second


def test_several_runs_share_a_page(tmp_path):
    first, second = two_runs(tmp_path)
    page = Facts(read_report(first, second))
    drawn = page.page()
    check_self_contained(drawn, chart_scripts())
    assert [a.get("aria-pressed") for a in drawn.all("button")] == ["true"] * 2
    assert "second resumed" in drawn.words
    assert [c["dash"] for c in page.chart("Loss")["curves"]] == [False, False, True, True, True]
    assert page.tiles == {
        "best loss: second, step 20": "1.05",
        "best eval loss: second, step 20": "1",
        "best eval token accuracy: first, step 10": "50.0%",
        "best other loss: second, step 20": "0.5",
        "best other token accuracy: second, step 20": "50.0%",
        "most tokens per second, median: first": "1,000",
    }
    table, different = page.of(Table)[:2]
    assert table.header == ("", "first", "second")
    columns = [*zip(*table.rows, strict=True)][1:]
    assert columns[0][:5] == ("10/500", "2.1", "2.1 at 10", "2 at 10", "50.0% at 10")
    assert columns[0][5:9] == ("-", "-", "1,000", "5.0 s") and columns[0][9] == "tp1 pp2 dp1"
    assert columns[1][:3] == ("21/500", "4", "1.05 at 20")
    assert different.rows == [
        ("optim.lr", "0.001", "0.01"),
        ("data.eval", "null", "-"),
        ("model.path", "-", "x"),
    ]
    curves = page.chart("Loss")["curves"]
    assert [(c["name"], c["run"], c["colour"]) for c in curves] == [
        ("first", 0, "c0"),
        ("second", 1, "c1"),
        ("first: eval", 0, "c0"),
        ("second: eval", 1, "c1"),
        ("second: other", 1, "c1"),
    ]
    assert page.chart("Loss")["span"] == [1, 21] and len(page.curves("Tokens")) == 2
    marks = [(m["kind"], m["run"]) for m in page.chart("Loss")["marks"] if m["x"]]
    assert marks == [("tall", 1)]


def test_answers_of_runs_are_side_by_side(tmp_path):
    """The records that at least two runs were asked, and first those on which they differ."""
    said = {"first": ["red", "blue", "2", "x"], "second": ["red", " crimson", "3"], "third": []}
    folders = []
    for name, predictions in said.items():
        run = write_run(tmp_path / name, [step(1, 1.0)])
        (run / "predictions").mkdir()
        lines = []
        for i, prediction in enumerate(predictions):
            line = {"where": f"eval.jsonl:{i}", "answer": ("red", "red", "1", "y")[i]}
            line["prediction"] = prediction
            lines.append(json.dumps(line | ({"answers": ["red", "crimson"]} if i == 1 else {})))
        (run / "predictions" / "eval.jsonl").write_text("\n".join([*lines, '{"where": 1']))
        folders.append(run)
    turns = (ExampleTurn("user", (ExamplePart(image=data_uri()), ExamplePart("Which colour?"))),)
    asked = Example("eval.jsonl:1", "red", "blue", turns)
    Examples("eval", 1, (asked,)).write(folders[0])
    page = Facts(read_report(*folders))
    assert "eval: first has 1 of 3 right, second has 2 of 3 right." in page.words
    [cards] = page.of(CardPages)
    assert cards.kinds == ["different", "all right", "all wrong"]
    assert [card.where[-1] for card in cards.cards] == ["1", "0", "2"]
    first = cards.cards[0]
    labels = [part.label for part in first.sections]
    assert first.title == "1 of 2 right"
    assert labels == ["user", "answers", "\u2717 first", "\u2713 second"]
    drawn = page.page()
    check_self_contained(drawn, (*chart_scripts(), script_of("paging")))
    assert [image["src"] for image in drawn.all("img")] == [data_uri()]
    assert "Answers" not in Facts(read_report(folders[0], folders[2])).names


def test_runs_are_told_apart_and_given_once(tmp_path):
    folders = [write_run(tmp_path / name / "run", [step(0, 1.0)]) for name in "ab"]
    page = Facts(read_report(*folders))
    assert "a/run \u00b7 b/run" in page.words
    with raises(ConfigError, place="report", problem_has="2 runs were given, 1 of"):
        read_report(folders[0], tmp_path / "a" / ".." / "a" / "run")


def test_a_configuration_that_cannot_be_read_is_told():
    last = list(differences(["a: 1", "a: [1"]))[-1]
    assert last == ("config.yaml", "-", "cannot be read: ParserError")
    assert list(differences(["a: ${b}\nb: [1, 2]", "a: ${b}\nb: [1]"])) == [("b", "[1, 2]", "[1]")]


def test_the_command_writes_where_it_is_told(tmp_path, capsys):
    first, second = map(str, two_runs(tmp_path))
    assert write_report(Path(first), Path(second)) == Path(first) / "comparison.html"
    assert main(["report", first]) == 0
    assert main(["report", first, second, "--out", str(tmp_path / "both.html")]) == 0
    said = [f"wrote {first}/report.html", f"wrote {tmp_path}/both.html"]
    assert capsys.readouterr().out.splitlines() == said
    assert main(["report", first, str(tmp_path / "none")]) == 2
    assert "give the folder of a run" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: does not exist; give the"):
        write_report(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "report.html").mkdir()
    page = str(tmp_path / "report.html")
    with raises(ConfigError, place=page, problem_has="Is a directory"):
        write_report(tmp_path)


def test_torch_and_megatron_are_not_imported():
    code = "import sys, megatron_vlm.report.run; print({'torch', 'megatron'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=120) == b"set()\n"


def test_a_smoothed_curve_never_looks_ahead():
    y = np.arange(160.0) % 2
    y[7] = math.nan
    x, mean = smooth(np.arange(160), y)
    # A mean of ten points, without point 7. It begins where there are ten.
    assert x.tolist() == list(range(10, 160))
    by_hand = [np.delete(y, 7)[i - 9 : i + 1].mean() for i in range(9, 159)]
    assert mean.tolist() == pytest.approx(by_hand)
    jump = np.where(np.arange(100_000) < 50_000, 1.0, 9.0)
    x, mean = smooth(np.arange(100_000), jump)
    assert mean[x < 50_000].max() == 1 and 1 < mean[np.searchsorted(x, 51_000)] < 9
    huge = np.full(1000, 0.25)
    huge[10] = 1e20
    assert smooth(np.arange(1000), huge)[1][-1] == 0.25
    assert smooth(np.arange(39), np.arange(39))[1].tolist() == list(range(39))


def test_the_best_loss_is_that_of_the_smoothed_curve(report):
    """A single step that happens to be easy is not the best."""
    losses = [3.0 - i / 50 for i in range(60)]
    losses[20] = 0.01
    page = report(start(), *(step(i + 1, loss) for i, loss in enumerate(losses)))
    best = np.mean(losses[-10:])
    assert page.tiles["best loss, mean of 10 steps up to step 60"] == number(best)
    assert page.tiles["last loss, step 60"] == "1.82"


def test_the_page_has_wall_time_samples_and_the_device(report):
    page = report(
        start(device="NVIDIA H100", world=1, parameters=7_000_000, trainable=7_000_000),
        *(step(i, 1.0, samples=1000, wall_s=10.0 * i) for i in (1, 2, 3)),
        evaluation(3, 1.0, wall_s=100.0),
        start(3),
        step(4, 1.0, samples=1000, wall_s=20.0),
    )
    assert page.tiles["wall time, 2.0 s in steps"] == "2 min 0 s"
    assert page.tiles["samples, 2.0 epochs"] == "4,000"
    page = report(start(device="NVIDIA H100", world=1, parameters=7_000_000, trainable=7_000_000))
    assert page.tiles["1 process on NVIDIA H100"] == "tp1 pp2 dp1"
    assert any("7M parameters, all trained" in text for text in page.words)


def test_charts_can_be_over_tokens_and_time(report):
    page = report(start(), *(step(i, 1.0, seconds=2.0, tokens_per_s=50.0 * i) for i in (1, 2, 3)))
    [controls] = page.of(ChartControls)
    [axes] = controls.axes
    assert axes.tokens.tolist() == [100, 300, 600] and axes.seconds.tolist() == [2, 4, 6]
    assert [option["value"] for option in page.page().all("option")] == ["steps", "tokens", "time"]


def test_few_points_are_not_thinned():
    x = np.arange(10)
    assert thin_out(x, x, columns=5)[0] is x
    assert thin_out(x, np.full(10, math.nan), columns=2)[0].tolist() == [0, 5, 9]


def test_numbers_and_durations():
    numbers = [number(v) for v in (0.123456, 12345.6, 1e-5, math.nan)]
    assert numbers == ["0.1235", "12,346", "1e-05", "-"]
    assert [number(v, percent=True) for v in (0.8543, 0.001)] == ["85.4%", "0.10%"]
    seconds = (59.94, 60, 3599, 3600, 86_399, 90_000)
    expected = ["59.9 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "23 h 59 min", "1 d 1 h"]
    assert [time_spent(s) for s in seconds] == expected


@in_a_browser
@pytest.mark.parametrize(
    ("width", "dark", "curve", "dot", "paper"),
    [(1200, False, "2f6ba8", "c05a12", "f7f6f3"), full(480, True, "7db1e6", "f29a5c", "15171b")],
)
def test_a_browser_draws_the_curves(width, dark, curve, dot, paper, report, browser, tmp_path):
    report(
        start(),
        *(step(i, 3 / (1 + i / 20)) for i in range(200)),
        *(evaluation(i, 3 / (1 + i / 20)) for i in range(20, 201, 20)),
        examples=[example()],
    )
    browser.open(write_report(tmp_path / "my run"), width, dark, height=5600)
    pixels = browser.picture().astype(np.int16)
    assert pixels.shape[1] == width

    def mask(wanted, slack=0):
        return np.abs(pixels - np.array(colour(wanted), np.int16)).max(axis=-1) <= slack

    # Lines are narrow and slanted, so few of their pixels have the pure colour.
    of_curve, of_paper = mask(curve, 40), mask(paper)
    assert of_curve.any(axis=0).sum() > 0.6 * width
    assert of_curve.sum() > 2 * width
    # The points of a set are on the loss and on the scores, as discs 8 pixels wide.
    assert mask(dot).sum() > 3 * 10 * 25
    assert int((pixels == TEAL).all(axis=-1).sum()) in range(64 * 48 - 30, 64 * 48 + 1)
    assert of_paper.sum() > of_paper.size // 10
    assert of_paper[:, -8:].all()  # nothing overflows the page


@in_a_browser
def test_a_browser_runs_our_scripts_and_no_other(tmp_path, chromium):
    text = "<img src=x onerror=document.title='stolen'>"
    runs = (hostile_run(tmp_path / "a", text), two_runs(tmp_path)[0])
    path, charts = write_report(*runs), Facts(read_report(*runs)).titles
    page = path.read_text(encoding="utf-8")
    # A record could bring this markup into the page if the escapes ever failed.
    foreign = f"<script>document.title='stolen'</script>{text}</body>"
    path.write_text(page.replace("</body>", foreign), encoding="utf-8")
    chromium.open(path)
    drawn = chromium.content()
    assert "<title>2 runs compared</title>" in drawn
    assert drawn.count("<canvas") == len(charts)
    assert drawn.count('class="keys') == len(charts)
    assert drawn.count(">linear</button>") + drawn.count(">log</button>") > 5
    assert "&lt;img src=x onerror=" in drawn.split("</table>", 1)[1]
