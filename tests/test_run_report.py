# .venv/bin/python -m pytest tests/test_run_report.py
"""report.html says what metrics.jsonl says, in figures and in curves, and needs nothing else."""

import base64
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import PIL.Image
import pytest

from megatron_vlm.display.scales import COLUMNS, number, smooth, step_scale, thin, value_scale
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.run.report import write_report
from megatron_vlm.run.report.metrics import read_metrics
from megatron_vlm.run.report.page import duration

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


def example(answer="red", prediction="red", **more):
    said = {"prompt": "<image> What colour?", "answer": answer, "prediction": prediction}
    return {"where": "eval.jsonl:3", "images": [data_uri()], **said, **more}


class Page(HTMLParser):
    """Elements, and what is read in them; asserts that what is opened is closed."""

    def __init__(self, page):
        super().__init__()
        self.text, self.open, self.found, self.words = page, [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))
        self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.found.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def tiles(self):
        """What it is: the figure."""
        pairs = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span></div>', self.text)
        return {name: figure for figure, name in pairs}

    @property
    def rows(self):
        cells = re.findall(r"<tr>(.*?)</tr>", self.text)
        return [tuple(re.findall(r"<td>(.*?)</td>", row)) for row in cells]

    def chart(self, title):
        """The figure with this title."""
        figures = re.findall(r"<figure.*?</figure>", self.text)
        return next(figure for figure in figures if f"<b>{title}</b>" in figure)

    @property
    def charts(self):
        return re.findall(r"<figure.*?<b>(.*?)</b>", self.text)


@pytest.fixture
def report(tmp_path):
    """report(lines..., tail=..., examples=..., config=...) -> the page of a run with these."""

    def make(*lines, tail="", examples=None, config=None):
        run = tmp_path / "my run"
        run.mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text + tail)
        if examples is not None:
            content = {"step": 100, "name": "eval", "examples": examples}
            (run / "examples.json").write_text(json.dumps(content))
        if config is not None:
            (run / "config.yaml").write_text(config)
        path = write_report(run)
        assert path == run / "report.html"
        return Page(path.read_text(encoding="utf-8"))

    return make


def test_tiles_are_those_of_the_run(report):
    page = report(
        start(),
        *(step(i, loss, tokens_per_s=rate) for i, loss, rate in ((0, 3.0, 900), (1, 1.25, 1100))),
        step(2, 1.5, tokens_per_s=5000, epoch=1, seconds=61.0),
        evaluation(1, 2.0, accuracy=0.875, exact_match=0.25),
        evaluation(3, 1.75, accuracy=0.8, exact_match=0.225),
        evaluation(3, 1.0, "other", accuracy=0.9),
    )
    assert page.tiles == {
        "last loss, step 2": "1.5",
        "best loss, step 1": "1.25",
        "best eval loss, step 3": "1.75",
        "best eval exact match, step 1": "25.0%",
        "best other loss, step 3": "1",
        "best other token accuracy, step 3": "90.0%",
        "of 500 steps, epoch 1": "3",
        "tokens a second, median": "1,100",
        "in steps": "1 min 2 s",
        "2 processes on cpu": "tp1 pp2 dp1",
    }
    assert "my run" in page.words
    facts = "/models/tiny \u00b7 2,000 samples \u00b7 30M parameters, 12M of them trained"
    assert f"{facts} \u00b7 started 2026-11-21 07:00:00" in page.words


def test_a_resumed_run_replaces_what_it_did_again_and_what_it_lost(report):
    page = report(
        start(),
        *(step(i, 9.0 - i) for i in range(6)),  # saved after 3; 5 is the lowest, and lost
        evaluation(3, 0.75),
        evaluation(6, 0.25),
        event(5, "stopped by a signal"),
        start(3, world=4, layout={"tp": 2, "pp": 2, "dp": 1}),
        event(3, "resumed from step-00000003"),
        step(3, 6.5),
        step(4, 6.25, skipped=True),
    )
    assert page.tiles["last loss, step 4"] == page.tiles["best loss, step 4"] == "6.25"
    assert page.tiles["of 500 steps, epoch 0"] == "5"
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
    loss = page.chart("Loss")
    assert loss.count('class="tall"') == 2 and loss.count('class="short"') == 2  # with the legend's


def test_the_later_of_two_lines_wins_without_a_start_between(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [step(0, 1.0), step(1, 2.0), step(2, 3.0), step(1, 4.0), evaluation(1, 5.0)]
    lines += [evaluation(1, 6.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = read_metrics(path)
    assert metrics.steps_N.tolist() == [0, 1, 2]
    assert metrics.figures["loss"].tolist() == [1.0, 4.0, 3.0]
    assert [e.scores["loss"] for e in metrics.evaluations] == [6.0]
    assert math.isnan(metrics.evaluations[0].scores["exact_match"])
    assert metrics.replaced == 1 and metrics.seconds == 2.0


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        ("", None),
        (json.dumps(step(2, 0.5))[:-20], "1 line of metrics.jsonl cannot be read"),
        ('{"kind": "step"}\n[]\n\xff\n', "3 lines of metrics.jsonl cannot be read"),
        (json.dumps(step(2, 0.5, lr="fast")) + "\n", "1 line of metrics.jsonl cannot be read"),
        ('{"kind": "later", "step": 2}\n\n', None),  # of a kind that is not known
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
    paths = dict(re.findall(r'd="(M[^"]*)" class="(.*?)"', page.chart("Loss")))
    assert [(kind, path.count("M")) for path, kind in paths.items()] == [("line", 2), ("lone", 1)]
    assert ("Steps not applied" in page.text) == (value is None)
    if value is None:
        text = "Steps not applied, since loss or gradient was not finite: 2. Step 2, 4"
        assert text in page.words


def test_nothing_finite_is_no_curve(report):
    page = report(step(0, None))
    assert page.tiles["loss"] == "-" and "no number was logged" in page.chart("Loss")
    page = report()
    assert page.tiles == {
        **{"loss": "-", "steps": "0", "tokens a second, median": "-"},
        **{"in steps": "0.0 s"},
    }
    assert "No step was logged." in page.words
    page = report(evaluation(0, 1.5))
    assert page.charts == ["Loss", "Token accuracy"]


def points(figure, kind="line"):
    """[n, 2] of a curve."""
    path = re.search(rf'd="M([^"]*?)" class="{kind}"', figure)[1]
    return np.array([[float(v) for v in pair.split(",")] for pair in path.split(" ")])


def test_a_curve_stands_where_its_values_are(report):
    page = report(start(), *(step(i, loss) for i, loss in enumerate((4.0, 1.0, 3.0))))
    # 300 high from 0 to 4, 1000 wide from 0 to 2.
    assert points(page.chart("Loss")).tolist() == [[0, 0], [500, 225], [1000, 75]]
    labels = re.findall(r"<text.*?>(.*?)</text>", page.chart("Loss"))
    assert labels == ["0", "1", "2", "3", "4", "0", "1", "2"]
    caption = "training: last 3 at 2, lowest 1 at 1, highest 4 at 0"
    assert f"<figcaption>{caption}</figcaption>" in page.chart("Loss")


def test_losses_far_apart_get_a_log_scale(report):
    page = report(*(step(i, 10.0**-i) for i in range(4)))
    loss = page.chart("Loss")
    assert "log scale" in loss and ">0.001<" in loss
    assert points(loss)[:, 1].tolist() == pytest.approx([0, 100, 200, 300], abs=0.1)
    assert "log scale" not in page.chart("Learning rate")
    assert "log scale" not in report(step(0, 0.0), step(1, 100.0)).chart("Loss")


def test_a_hundred_thousand_steps_are_thinned_and_keep_their_extremes(report):
    random = np.random.default_rng(0)
    losses = (2 + random.normal(0, 0.1, 100_000)).tolist()
    losses[40_001], losses[70_003] = 9.0, 0.5
    line = '{"kind": "step", "step": %d, "loss": %r, "grad_norm": %r, "tokens_per_s": %r}\n'
    page = report(start(), tail="".join(line % (i, v, v, v) for i, v in enumerate(losses)))
    assert len(page.text) < 500_000
    raw = points(page.chart("Loss"), "faint")
    assert 1000 < len(raw) <= 2 * COLUMNS + 2
    # 300 high from 0 to 10: 9 and 0.5 are there, at their steps.
    assert raw[raw[:, 1].argmin()] == pytest.approx([400.0, 30.0], abs=0.1)
    assert raw[raw[:, 1].argmax()] == pytest.approx([700.0, 285.0], abs=0.1)
    mean = points(page.chart("Loss"))
    assert len(mean) == COLUMNS and np.abs(mean[:, 1] - 240).max() < 1
    assert page.tiles["best loss, step 70,003"] == "0.5"
    assert "highest 9 at 40,001" in page.chart("Loss")


def test_curves_that_have_nothing_to_say_are_left_out(report):
    every = ["Loss", "Learning rate", "Gradient norm", "Tokens", "Images", "Time of a step"]
    every += ["Padding", "MFU", "Memory"]
    without = [name for name in every if name not in ("MFU", "Images")]
    assert report(step(0, 1.0, mfu=0.4), step(1, 1.0)).charts == every
    assert report(step(0, 1.0, images_per_s=0)).charts == without
    page = report(step(0, 1.0, mfu=0.41), step(1, 1.0, mfu=0.43))
    assert "last 43.0% at 1, lowest 41.0% at 0" in page.chart("MFU")
    assert "trained" in page.chart("Tokens")


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
    assert page.charts[-3:] == ["Loss", "Token accuracy", "Exact match"]
    titles = re.findall(r"<title>(.*?)</title>", page.chart("Exact match"))
    assert titles == ["a at 10: 10.0%", "a at 20: 10.0%"]
    dots = re.findall(r"<title>(.*?)</title>", page.chart("Loss"))
    assert dots == ["a at 10: 0.5", "a at 20: 0.625", "b at 10: 0.75"]
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
    images = [attributes["src"] for name, attributes in page.found if name == "img"]
    assert images == [*pictures, data_uri()]
    assert "eval, after 100 steps: 1 of 3 right" in page.words
    assert page.words.count("\u2713 right") == 1 and page.words.count("\u2717 wrong") == 2
    assert page.words.count("[no picture]") == 2
    assert "<|image_pad|> x 64 !" in page.words
    half = "a" * 750
    assert f"{half} [... 3,500 characters ...] {half}" in page.words


def test_broken_examples_are_told(report, tmp_path):
    page = report(step(0, 1.0), examples=[{"where": "x"}])
    assert "examples.json cannot be read: KeyError: 'prompt'" in page.words
    (tmp_path / "my run" / "examples.json").write_text('{"step": 1, "exa')
    assert "examples.json cannot be read: JSONDecodeError" in report(step(0, 1.0)).text


def test_text_stays_text_and_the_page_needs_nothing_else(report):
    page = report(
        start(model=HOSTILE, layout={HOSTILE: 1}, versions={HOSTILE: HOSTILE}, time=HOSTILE),
        *(step(i, 2.0 + i % 3) for i in range(100)),
        evaluation(2, 1.0, HOSTILE),
        event(1, HOSTILE),
        examples=[example(HOSTILE, HOSTILE, prompt=HOSTILE, where=HOSTILE, images=[HOSTILE])],
        config=f"model: {HOSTILE}\n",
    )
    assert "http://" not in page.text and "https://" not in page.text
    assert "<script" not in page.text and "url(" not in page.text and "@import" not in page.text
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert page.text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; \u4e09 \\x1b[2J") >= 12
    for name, attributes in page.found:
        assert name not in ("script", "link", "iframe", "object", "base", "form", "foreignobject")
        assert attributes.get("src", "data:image/png;").startswith("data:image/png;")
        assert attributes.get("href", "#").startswith("#")
        assert not [key for key in attributes if key.startswith("on")]
    anchors = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    assert {a["href"][1:] for name, a in page.found if name == "a"} == anchors
    assert "default-src &#x27;none&#x27;" in page.text
    assert re.search(r"<details.*?<summary>config.yaml</summary><pre>model: ", page.text)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: No such file or directory; give the"):
        write_report(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written: Is a directory"):
        write_report(tmp_path)


def test_neither_torch_nor_megatron_is_imported():
    code = (
        "import sys, megatron_vlm.run.report\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'torch', 'megatron'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ((0.11, 2.72), {}, ["0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        ((0, 9.8e-6), {}, ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1.0e-5"]),
        ((3000, 13000), {}, ["0", "5k", "10k", "15k"]),
        ((61.5, 62.25), {}, ["61.4", "61.6", "61.8", "62.0", "62.2", "62.4"]),
        ((0.002, 0.046), {"percent": True}, ["0%", "1%", "2%", "3%", "4%", "5%"]),
        ((0.8, 0.8), {}, ["0", "0.2", "0.4", "0.6", "0.8"]),
        ((-2, -2), {}, ["-2.0", "-1.5", "-1.0", "-0.5", "0"]),
        ((0, 0), {}, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.3, 45), {"may_log": True}, ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]),
        ((0.4, 14), {"may_log": True}, ["0.2", "0.5", "1", "2", "5", "10", "20"]),
        ((0.02, 45), {"may_log": True}, ["0.1", "1", "10"]),
        ((1e-6, 1e6), {"may_log": True}, ["1e-6", "0.001", "1", "1000", "1M"]),
        ((0, 45), {"may_log": True}, ["0", "10", "20", "30", "40", "50"]),
        ((1.5e6, 2.25e6), {}, ["1.4M", "1.6M", "1.8M", "2.0M", "2.2M", "2.4M"]),
    ],
)
def test_ticks_read_well(values, options, labels):
    scale = value_scale(np.array([*values, math.nan]), **options)
    assert scale.low <= min(values) and max(values) <= scale.high
    found = [label for _, label in scale.ticks]
    assert found == labels
    assert [float(scale(np.array(end))) for end in (scale.low, scale.high)] == [0, 1]


def test_step_ticks_are_whole():
    assert [label for _, label in step_scale(0, 499).ticks] == ["0", "100", "200", "300", "400"]
    assert [label for _, label in step_scale(3, 5).ticks] == ["3", "4", "5"]
    assert [label for _, label in step_scale(7, 7).ticks] == ["6", "7", "8"]
    assert [label for _, label in step_scale(0, 300_000).ticks] == ["0", "100k", "200k", "300k"]


def test_means_are_those_around_each_point():
    y = np.arange(160.0) % 2
    y[7] = math.nan
    x, mean = smooth(np.arange(160), y)
    # A window of three, the 7 left out. At the ends there are two.
    assert x.tolist() == [i for i in range(160) if i != 7]
    by_hand = [np.delete(y, 7)[max(0, i - 1) : i + 2].mean() for i in range(159)]
    assert mean.tolist() == pytest.approx(by_hand) and mean[1] == pytest.approx(1 / 3)
    huge = np.full(1000, 0.25)
    huge[10] = 1e20
    assert smooth(np.arange(1000), huge)[1][-1] == 0.25


def test_few_points_are_not_thinned():
    x = np.arange(10)
    assert thin(x, x, columns=5)[0] is x
    assert thin(x, np.full(10, math.nan), columns=2)[0].tolist() == [0, 5, 9]


def test_numbers_and_durations():
    numbers = [number(v) for v in (0.123456, 12345.6, 1e-5, math.nan)]
    assert numbers == ["0.1235", "12,346", "1e-05", "-"]
    assert [number(v, percent=True) for v in (0.8543, 0.001)] == ["85.4%", "0.10%"]
    seconds = (59.94, 60, 3599, 3600, 86_399, 90_000)
    expected = ["59.9 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "23 h 59 min", "1 d 1 h"]
    assert [duration(s) for s in seconds] == expected


def colour(code):
    return tuple(bytes.fromhex(code))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not on PATH")
@pytest.mark.parametrize(
    ("width", "scheme", "curve", "dot", "paper"),
    [(1200, 1, "2f6ba8", "c05a12", "f7f6f3"), (480, 0, "7db1e6", "f29a5c", "15171b")],
)
def test_a_browser_draws_the_curves(width, scheme, curve, dot, paper, report, tmp_path):
    page = report(
        start(),
        *(step(i, 3 / (1 + i / 20)) for i in range(200)),
        *(evaluation(i, 3 / (1 + i / 20)) for i in range(20, 201, 20)),
        examples=[example()],
    )
    assert page.chart("Loss")
    shot = tmp_path / "shot.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--force-device-scale-factor=1", "--force-color-profile=srgb"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},5600"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    command += [(tmp_path / "my run" / "report.html").as_uri()]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    env = os.environ | {"HOME": str(tmp_path)}
    subprocess.run(command, check=True, timeout=120, env=env, **quiet)
    with PIL.Image.open(shot) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    assert pixels.shape[1] == width

    def mask(wanted, slack=0):
        return np.abs(pixels.astype(int) - colour(wanted)).max(axis=-1) <= slack

    # Lines are narrow and slanted: few of their pixels have the colour alone.
    assert mask(curve, 40).any(axis=0).sum() > 0.6 * width
    assert mask(curve, 40).sum() > 2 * width
    # Each set's points stand once on the loss, once on the scores: discs 8 pixels wide.
    assert mask(dot).sum() > 3 * 10 * 25
    assert int((pixels == TEAL).all(axis=-1).sum()) in range(64 * 48 - 30, 64 * 48 + 1)
    assert mask(paper).sum() > pixels[..., 0].size // 10
    assert mask(paper)[:, -8:].all()  # nothing sticks out
