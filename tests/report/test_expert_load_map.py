# .venv/bin/python -m pytest tests/report/test_expert_load_map.py
"""The load of experts over a run: a line of metrics.jsonl for some of its steps, and a map of it on
the page."""

import base64
import json
import re

import numpy as np
import pytest

from megatron_vlm.errors import DataError
from megatron_vlm.report.heat import HeatMap
from megatron_vlm.report.metrics_lines import MAX_LOADS, LoadLine, from_json, has_load_line, to_json
from megatron_vlm.report.run import read_report, write_report
from megatron_vlm.report.run.metrics_arrays import read_metrics
from tests.model.test_moe import EXPERTS
from tests.report.test_run_report import start, step, write_run
from tests.run.test_train import go_pooled
from tests.support.report_facts import Facts, colour, in_a_browser
from tests.support.sets import write_set


def load(number, table, layers=None):
    layers = list(range(len(table))) if layers is None else layers
    return {"kind": "load", "step": number, "layers": layers, "load": table}


def map_of(run):
    [heat] = Facts(read_report(run)).of(HeatMap)
    return heat


@pytest.mark.parametrize("total", [1, 2, 39, 40, 41, 100, 12_345])
def test_some_steps_tell_the_load_the_first_and_the_last_among_them(total):
    steps = [step for step in range(1, total + 1) if has_load_line(step, total)]
    assert steps[0] == 1 and steps[-1] == total
    assert min(total, MAX_LOADS // 2) <= len(steps) <= MAX_LOADS + 1


@pytest.mark.full
def test_a_run_logs_the_load_of_its_experts(pool, tiny, tmp_path):
    """A short run logs the load of every step, and its page shows it."""
    write_set(tmp_path)
    path = tiny(**EXPERTS, dense_layers=1)
    words = ["parallel.pp=1", "parallel.ep=2", "train.steps=2", "checkpoint.export=false"]
    status, _, err = go_pooled(pool, 2, tmp_path, path, "run", *words)
    assert status == 0, err
    loads = read_metrics(tmp_path / "run" / "metrics.jsonl").loads
    assert [line.step for line in loads] == [1, 2]
    for line in loads:
        assert line.layers == [1, 2, 3] and np.shape(line.load) == (3, 8)
        assert np.mean(line.load, axis=1) == pytest.approx(100, abs=1)
        assert np.max(line.load) > 110
    heat = map_of(tmp_path / "run")
    assert heat.steps == [1, 2] and heat.rows == [1, 2, 3]
    assert np.array_equal(heat.cells_TRC, np.array([line.load for line in loads]) / 100)
    assert 'class="card heat"' in (tmp_path / "run" / "report.html").read_text()


def test_a_line_comes_back_as_it_was_and_no_other_table_does():
    line = LoadLine(7, [1, 3], [[0, 250, 50], [100, 100, 100]])
    assert from_json(to_json(line)) == line
    assert len(to_json(LoadLine(0, list(range(94)), [[100] * 128] * 94))) < 64_000
    for layers, table in (([0], []), ([0, 1], [[1]]), ([0, 1], [[1], [1, 2]]), ([0], [[]])):
        with pytest.raises(DataError):
            from_json(json.dumps(load(0, table, layers)))
    with pytest.raises(DataError):
        from_json(json.dumps(load(0, [["x"]])))


def test_the_page_has_what_was_logged_and_says_the_busiest(tmp_path):
    """A resumed run does steps again, and the load of the lost steps is gone."""
    lines = [start(), *(step(i, 1.0) for i in range(4))]
    lines += [load(i, [[100, 100], [40 * i, 200 - 40 * i]], [2, 5]) for i in range(4)]
    lines += [start(2), step(2, 1.0), load(2, [[100, 100], [0, 200]], [2, 5])]
    facts = Facts(read_report(write_run(tmp_path / "run", lines)))
    [heat] = facts.of(HeatMap)
    assert heat.steps == [0, 1, 2] and heat.rows == [2, 5]
    assert heat.cells_TRC[:, 1, 0].tolist() == [0, 0.4, 0]
    page = facts.page()
    data = json.loads(re.search(r'<script[^>]*>(\{"steps".*?)</script>', page.text)[1])
    drawn = np.frombuffer(base64.b64decode(data["cells"]), np.uint8) / data["unit"]
    assert drawn == pytest.approx(heat.cells_TRC.ravel(), abs=0.5 / 32 + 1e-9)
    assert (data["steps"], data["rows"], data["columns"]) == ([0, 1, 2], [2, 5], 2)
    text = "Rows are layers 2 to 5, columns experts 0 to 1. At step 2 the most is 2.00 times the "
    text += "mean, of expert 1 in layer 5; 1 of 4 have nothing."
    assert text in page.words
    assert "Experts" in facts.names and "Load of experts" in facts.words
    dense = Facts(read_report(write_run(tmp_path / "dense", lines[:2])))
    assert not dense.of(HeatMap) and "Experts" not in dense.names


def test_many_lines_are_thinned_and_another_model_is_left_out(tmp_path):
    lines = [start(), step(0, 1.0), load(0, [[100]])]
    lines += [load(i, [[100, 100], [50, 150]]) for i in range(1, 200)]
    heat = map_of(write_run(tmp_path / "run", lines))
    assert len(heat.steps) == MAX_LOADS + 1 == len(heat.cells_TRC)
    assert (heat.steps[0], heat.steps[-1]) == (1, 199)


@pytest.mark.full
@in_a_browser
def test_a_browser_draws_the_map_in_light_and_dark(tmp_path, browser):
    """Expert 0 of 8 has all tokens, so one eighth of the map has one colour, the rest the other."""
    lines = [start(), step(0, 1.0), load(0, [[800] + [0] * 7] * 40)]
    path = write_report(write_run(tmp_path / "run", lines))
    for dark, more, less in ((False, "c05a12", "2f6ba8"), (True, "f29a5c", "7db1e6")):
        browser.open(path, dark=dark, height=3400)
        pixels = browser.picture().astype(np.int16)
        wanted = [np.array(colour(each), np.int16) for each in (more, less)]
        areas = [int((np.abs(pixels - each).max(axis=-1) <= 3).sum()) for each in wanted]
        assert areas[1] > 100_000 and areas[1] / areas[0] == pytest.approx(7, rel=0.05)


@in_a_browser
def test_slider_and_arrow_keys_tell_a_cell(tmp_path, browser):
    """A script that the test adds to the page presses the keys; the page's policy is removed."""
    lines = [start(), step(0, 1.0), *(load(i, [[50 * i, 200 - 50 * i]] * 2) for i in range(2))]
    path = write_report(write_run(tmp_path / "run", lines))
    press = """
      const [canvas, slider] = ["canvas", "input"].map((name) =>
        document.querySelector(`figure.heat ${name}`));
      const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
      ["ArrowUp", "ArrowRight", "ArrowRight", "ArrowDown"].forEach(key);
      document.title = canvas.title;
      slider.value = 0;
      slider.dispatchEvent(new Event("input"));
    """
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?/>', "", path.read_text())
    path.write_text(page.replace("</body>", f"<script>{{{press}}}</script></body>"))
    browser.open(path)
    drawn = browser.content()
    assert "<title>layer 1, expert 1: 1.50 times the mean</title>" in drawn
    assert "layer 1, expert 1: 2.00 times the mean</p>" in drawn
    assert re.search(r"<output>0</output>", drawn)
