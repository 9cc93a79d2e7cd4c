# .venv/bin/python -m pytest tests/report/test_page_scripts.py
"""Pages under the hands of a reader: width of a phone, hover, slider, axes, download, search."""

import csv
import io

import numpy as np
import pytest

from megatron_vlm.commands.plan.plan_report import pipeline_timeline
from megatron_vlm.planner.pipeline_time import Stages
from megatron_vlm.report.html import render_page, tile_columns
from megatron_vlm.report.run import write_report
from megatron_vlm.report.sections import Command, Report
from tests.report.test_run_report import evaluation, event, example, start, step, write_run
from tests.support.report_facts import in_a_browser

STEPS = 60
LONG = "a/long/folder/without/a/single/blank/" * 3 + "eval.jsonl:1"

WORDS = "parallel.tp=2 " * 9 + "k" * 90

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of two runs with 30 examples, whose lr is small."""
    folder = tmp_path_factory.mktemp("runs")
    examples = [
        example("red", "red" if i % 3 else "blue", prompt=f"Question {i}", where=f"{LONG}{i}")
        for i in range(30)
    ]
    return [
        write_run(
            folder / name,
            [
                start(model="m" * 90),
                *(
                    step(i, rate / i, lr=1e-3 * i / STEPS, tokens_per_s=100.0 * i)
                    for i in range(1, STEPS + 1)
                ),
                *(evaluation(i, rate / i, exact_match=i / STEPS) for i in (20, 40, STEPS)),
                event(30, "w" * 200),
            ],
            examples=examples,
            config="\n".join(f"key_{i}: {name}{'v' * 50}" for i in range(9)),
        )
        for name, rate in (("first", 3.0), ("second", 2.0))
    ]


CHART = """(title) => [...document.querySelectorAll("figure.chart")]
  .find((figure) => figure.querySelector("b").textContent === title)"""


def legend(browser, title):
    return browser.run(f"""[...({CHART})("{title}").querySelectorAll(".keys > span")]
      .map((span) => span.textContent.replaceAll("\\u00a0", " "))""")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    seconds = np.ones((9, 4))
    timeline = pipeline_timeline(Stages(seconds, 2 * seconds, 0 * seconds), "one step " * 20)
    command = Command("The fastest: ", WORDS)
    page = tmp_path_factory.mktemp("plan") / "plan.html"
    page.write_text(render_page(Report("p", "p" * 99, ["l" * 99], [], [command, timeline])))
    return page


@pytest.mark.full
def test_nothing_is_wider_than_a_phone(browser, runs, plan):
    for page in (write_report(runs[0]), write_report(*runs), plan):
        for dark in (False, True):
            browser.open(page, width=390, dark=dark)
            assert browser.wider_than_page() == []


def test_legends_have_values_at_rest_and_under_the_pointer(browser, runs):
    browser.open(write_report(runs[0]))
    assert legend(browser, "Loss") == [
        "step 60",
        "training0.0542 (raw 0.05)",
        "eval0.05 at step 60",
    ]
    assert legend(browser, "Learning rate") == ["step 60", "learning rate0.001"]
    box = browser.run(f"""(() => {{
      const over = ({CHART})("Loss").querySelector(".u-over");
      over.scrollIntoView({{ block: "center" }});
      const {{ left, top, width, height }} = over.getBoundingClientRect();
      return [left, top, width, height];
    }})()""")
    browser.move(box[0] + box[2] * 29 / 59, box[1] + box[3] / 2)
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert legend(browser, "Loss")[0] == "step 30"
    assert legend(browser, "Loss")[1].endswith("(raw 0.1)")
    assert legend(browser, "Learning rate") == ["step 30", "learning rate0.0005"]


def test_numbers_of_an_axis_are_not_cut(browser, runs):
    """The widest number of an axis needs less than the room beside the plot."""
    browser.open(write_report(runs[0]))
    room = browser.run(f"""(() => {{
      const figure = ({CHART})("Learning rate");
      const pen = document.createElement("canvas").getContext("2d");
      pen.font = "11.5px system-ui, sans-serif";
      const left = parseFloat(figure.querySelector(".u-over").style.left);
      return left - pen.measureText("0.00075").width;
    }})()""")
    assert room >= 6


def test_smoothing_and_the_axis_can_be_chosen(browser, runs):
    browser.open(write_report(runs[0]))
    browser.run("""(() => {
      const slider = document.querySelector(".controls input");
      slider.value = 0;
      slider.dispatchEvent(new Event("input"));
    })()""")
    assert legend(browser, "Loss")[1] == "training0.05"
    assert browser.run("document.querySelector('.controls output').textContent") == "off"
    wanted = {"tokens": "tokens 91,500", "time": "30 s"}
    for over, place in wanted.items():
        browser.run(f"""(() => {{
          const select = document.querySelector(".controls select");
          select.value = "{over}";
          select.dispatchEvent(new Event("change"));
        }})()""")
        assert legend(browser, "Loss")[0] == place


def test_the_points_of_a_chart_can_be_saved(browser, runs, tmp_path):
    browser.open(write_report(*runs))
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.run(f"""[...({CHART})("Loss").querySelectorAll("button")]
      .find((button) => button.textContent === "CSV").click()""")
    browser.wait_for("Page.downloadProgress", state="completed")
    rows = [*csv.DictReader(io.StringIO((tmp_path / "loss.csv").read_text()))]
    assert len(rows) == 2 * (STEPS + 3)
    row = next(row for row in rows if row["run"] == row["curve"] == "second" and row["step"] == "4")
    assert row["tokens"] == "500" and row["seconds"] == "2" and row["value"] == "0.5"


def test_cards_are_paged_filtered_and_found(browser, runs):
    browser.open(write_report(runs[0]))

    def shown():
        return browser.run("""[...document.querySelectorAll(".cards > div")]
          .filter((card) => card.getBoundingClientRect().height)
          .map((card) => +card.textContent.match(/Question (\\d+)/)[1])""")

    def press(text):
        browser.run(f"""[...document.querySelectorAll(".pager button")]
          .find((button) => button.textContent.startsWith("{text}")).click()""")

    assert shown() == [*range(12)]
    press("next")
    press("next")
    assert shown() == [*range(24, 30)]
    press("wrong")
    assert shown() == [*range(0, 30, 3)]
    press("all")
    browser.run("""(() => {
      const search = document.querySelector(".pager input");
      search.value = "QUESTION 27";
      search.dispatchEvent(new Event("input"));
    })()""")
    assert shown() == [27]
    assert browser.run("document.querySelector('.pager output').textContent") == "1 to 1 of 1"


def test_a_pipeline_tells_its_boxes_and_words_are_copied(browser, plan):
    browser.open(plan)
    told = "document.querySelector('.told').textContent"
    assert browser.run(told) == "Point at a box to read its times."
    x, y = browser.run("""(() => {
      const box = document.querySelector("svg.timeline g").getBoundingClientRect();
      return [box.left + box.width / 2, box.top + box.height / 2];
    })()""")
    browser.move(x, y)
    assert browser.run(told) == (
        "forward of micro-batch 0 on stage 0: 1.000 s, from 0.000 to 1.000 s"
    )
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.run("document.querySelector('.copied button').click()")
    copied = """(async () => {
      const button = document.querySelector(".copied button");
      while (button.textContent !== "copied") await new Promise(requestAnimationFrame);
      return navigator.clipboard.readText();
    })()"""
    assert browser.run(copied) == WORDS


def test_tiles_fill_their_rows():
    assert [tile_columns(count) for count in (4, 5, 6, 8, 9, 10, 12)] == [4, 5, 3, 4, 5, 5, 4]
