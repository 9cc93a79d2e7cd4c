# .venv/bin/python -m pytest tests/report/test_rl_report.py
"""The page of a run that trains on samples, in any state of its files."""

import json

import numpy as np
import pytest

from megatron_vlm.report.charts import chart_scripts
from megatron_vlm.report.metrics_lines import RlLine, to_json
from megatron_vlm.report.run import read_report, rl_samples, write_report
from megatron_vlm.report.run.metrics_arrays import read_metrics
from megatron_vlm.report.sections import (
    Card,
    Fold,
    Labelled,
    Note,
    Pictures,
    Said,
    Table,
    is_picture_uri,
)
from tests.report.test_run_report import HOSTILE, data_uri, evaluation, start, step, write_run
from tests.support.report_facts import Facts, check_self_contained, in_a_browser, walk

PLUM = (150, 40, 130)


def rl(number, reward=0.5, **more):
    return {
        **{"kind": "rl", "step": number, "reward": reward, "reward_std": 0.25, "prompts": 4},
        **{"asked": 4, "alike": 0.125, "answer_tokens": 6.5, "longest_answer": 9, "cut": 0.0625},
        **{"turns": 1.0, "sampling_s": 0.2, "figures": {}, **more},
    }


def episode(reward=1.0, *answers, heard=(), **more):
    fields = {"answers": list(answers or ["red"]), "heard": [*heard], "reward": reward}
    return {**fields, "figures": {}, "tokens": 3, "cut": False, **more}


def prompt(number, *episodes, where="a.jsonl:1", **more):
    fields = {"step": number, "where": where, "question": "user\nWhat colour?"}
    shown = {"images": [], "right": None, "episodes": list(episodes or [episode()])}
    return {**fields, **shown, **more}


@pytest.fixture
def report(tmp_path):
    """Return report(lines..., samples=..., tail=...) -> the facts of a run with these."""

    def make(*lines, samples=None, tail=""):
        run = write_run(tmp_path / "my run", lines)
        (run / "samples.jsonl").unlink(missing_ok=True)
        if samples is not None:
            text = "".join(json.dumps(line) + "\n" for line in samples)
            (run / "samples.jsonl").write_text(text + tail)
        return Facts(read_report(run))

    return make


def steps_of(facts):
    """Return (number, remark, whether it is open) of each step on the page."""
    folds = [fold for fold in facts.of(Fold) if fold.title.startswith("Step ")]
    return [(fold.title[5:], fold.remark, fold.is_open) for fold in folds]


def rewards_of(facts):
    """Return (place between the worst and the best, reward) of each episode, in page order."""
    return [(each.score, each.label) for each in facts.of(Labelled)]


def pictures_of(facts):
    """Return the pictures, and the texts that replace missing ones."""
    return [each for group in facts.of(Pictures) for each in group.pictures]


def note_of(facts):
    [note] = [word for word in facts.words if "samples.jsonl" in word]
    return note


SOON = ["Reward", "Spread of rewards", "Tokens of an episode", "Episodes cut", "Prompts alike"]
TRAIN = ["Loss", "Learning rate", "Gradient norm", "Tokens", "Images", "Step time", "Padding"]
TRAIN += ["Memory"]
EVERY = {
    **{"kl": 0.25, "entropy": 1.5, "ratio": 1.0, "clip_fraction": 0.5, "drift": 0.75},
    **{"apart": 2.0, "apart_mean": 0.01, "weights_cut": 0.03, "masked": 0.01, "behind": 1.5},
    **{"teacher_kl": 0.125, "taught": 0.5, "rerouted": 0.125},
    **{"rounds": 4.0, "accepted": 0.75, "accepted_at": [0.5, 0.25]},
}


def test_a_run_without_rewards_shows_its_teacher(report):
    alone = dict(reward_std=None, alike=None)
    page = report(*(rl(i, None, teacher_kl=0.5 - 0.125 * i, **alone) for i in range(2)))
    assert page.curves("KL to the teacher") == [("KL", [0, 1], [0.5, 0.375])]
    assert not {"Reward", "Spread of rewards", "Prompts alike"} & {*page.titles}
    assert page.tiles["KL to the teacher, step 1"] == "0.375"
    assert not [name for name in page.tiles if "reward" in name]


def test_only_figures_that_the_run_has_are_curves(report):
    titles = report(step(0, 1.0), rl(0), step(1, 1.0), rl(1)).titles
    assert titles == [*SOON, "Sampling time", *TRAIN]
    page = report(
        *(step(i, 1.0, seconds=0.5 + i) for i in range(2)),
        rl(0, figures={"exact": 0.5}, turns=2.0),
        rl(1, -1.5, figures={"exact": 0.25, "form": 1.0}, sampling_s=0.3, **EVERY),
    )
    assert page.titles == [
        *SOON[:2],
        *("Exact", "Form", "Tokens of an episode", "Answers of an episode"),
        *SOON[3:],
        *("KL", "KL to the teacher", "Tokens taught", "Drift", "Entropy", "Ratio"),
        *("Clip fraction", "Agreement of sampler and trainer", "Weights cut", "Tokens masked"),
        *("Rerouted", "Drafts accepted", "Rounds with accepted drafts", "Behind", "Sampling time"),
        *TRAIN,
    ]
    assert page.curves("Reward") == [("reward", [0, 1], [0.5, -1.5])]
    assert page.curves("Spread of rewards") == [("spread", [0, 1], [0.25, 0.25])]
    assert page.curves("Exact") == [("mean", [0, 1], [0.5, 0.25])]
    assert page.curves("Form") == [("mean", [0, 1], [None, 1.0])]
    tokens = [("mean", [0, 1], [6.5, 6.5]), ("longest", [0, 1], [9, 9])]
    assert page.curves("Tokens of an episode") == tokens
    assert page.curves("Answers of an episode") == [("answers", [0, 1], [2.0, 1.0])]
    assert page.curves("Episodes cut") == [("cut", [0, 1], [0.0625, 0.0625])]
    assert page.curves("Prompts alike") == [("alike", [0, 1], [0.125, 0.125])]
    names = ("KL to the teacher", "teacher_kl")
    for title, key in (("KL", "kl"), names, ("Drift", "drift"), ("Entropy", "entropy")):
        assert [y for _, _, y in page.curves(title)] == [[None, EVERY[key]]]
    charts = {"Ratio": "ratio", "Weights cut": "weights_cut", "Tokens masked": "masked"}
    charts |= {"Drafts accepted": "accepted"}
    for title, key in {**charts, "Rerouted": "rerouted", "Behind": "behind"}.items():
        assert [y for _, _, y in page.curves(title)] == [[None, EVERY[key]]]
    assert page.curves("Clip fraction") == [("clipped", [0, 1], [None, 0.5])]
    drafts = [("1 or more", [0, 1], [None, 0.5]), ("2 or more", [0, 1], [None, 0.25])]
    assert page.curves("Rounds with accepted drafts") == drafts
    agreement = [("largest", [0, 1], [None, 2.0]), ("mean", [0, 1], [None, 0.01])]
    assert page.curves("Agreement of sampler and trainer") == agreement
    assert page.chart("Agreement of sampler and trainer")["log"]
    seconds = [("sampling", [0, 1], [0.2, 0.3]), ("step", [0, 1], [0.5, 1.5])]
    assert page.curves("Sampling time") == seconds
    percents = [title for title in page.titles if page.chart(title)["percent"]]
    shares = ["Episodes cut", "Prompts alike", "Tokens taught", "Clip fraction"]
    shares += ["Weights cut", "Tokens masked", "Rerouted", "Rounds with accepted drafts", "Padding"]
    assert percents == shares
    drawn = page.page().text
    assert drawn.count("Drag over a chart") == drawn.count("<noscript>") == 1


def test_tiles_are_means_of_ten_steps(report):
    rewards = [0.0, *[1.0] * 10, *[0.5] * 4]
    page = report(
        *(step(i, 1.0) for i in range(15)),
        *(rl(i, reward) for i, reward in enumerate(rewards)),
        rl(15, None, kl=0.5, apart=3.0),
        rl(16, 0.75, kl=0.125, apart=2.0),
        rl(17, 0.25),
    )
    tiles = [(name, figure) for name, figure in page.tiles.items()]
    assert tiles[:4] == [
        ("last mean reward, steps 7 to 17", "0.7"),
        ("best mean reward, steps 1 to 10", "1"),
        ("KL to the initial model, step 16", "0.125"),
        ("largest difference of log-probs, sampler and trainer, step 15", "3"),
    ]
    assert not [name for name, _ in tiles if "loss" in name]
    page = report(*(step(i, 0.0, samples=16) for i in (1, 2)), *(rl(i, asked=5) for i in (1, 2)))
    assert page.tiles["prompts"] == "10"  # not their 32 answers
    assert report(rl(4, 0.25)).tiles["last mean reward, step 4"] == "0.25"
    tiles = report(rl(4, 0.25), rl(5, 0.75)).tiles
    assert tiles["best mean reward, steps 4 to 5"] == "0.5"
    page = report(rl(4, None))
    assert page.summary("Reward") == {}
    assert not [name for name in page.tiles if "reward" in name]


def test_only_a_run_with_samples_has_their_section(report):
    page = report(step(0, 1.0), samples=[prompt(0)])
    assert page.titles == TRAIN and "Samples" not in page.names
    assert page.tiles["last loss, step 0"] == "1"
    page = report(step(0, 1.0), rl(0))  # the file is missing
    assert "samples.jsonl" not in page.text and page.titles[0] == "Reward"
    assert page.names[:2] == ["Samples", "Curves"]
    assert [a["href"] for a in page.page().all("a")][:2] == ["#samples", "#curves"]


def test_a_sample_has_its_pictures_answers_and_rewards(report):
    asked_uri, one_uri, two_uri = (data_uri(colour) for colour in (PLUM, (1, 2, 3), (4, 5, 6)))
    turn = [{"text": "user\nAnd now?", "images": [one_uri, two_uri]}]
    page = report(
        step(0, 1.0),
        rl(0),
        samples=[
            prompt(
                0,
                episode(-0.25, "", cut=True, tokens=1),
                episode(0.75, "left", "blue", heard=turn, figures={"found": 1.0, "form": 0.5}),
                episode(0.5, "right"),
                images=[asked_uri],
                where="a.jsonl:7",
                right="blue",
            )
        ],
    )
    assert note_of(page) == "samples.jsonl has samples of 1 step. The best are first."
    assert steps_of(page) == [("0", "1 prompt, mean reward 0.3333", True)]
    assert "a.jsonl:7 \u00b7 3 episodes, mean reward 0.3333" in page.words
    assert "user\nWhat colour?" in page.words
    assert "Right: blue" in page.words
    assert rewards_of(page) == [(1, "0.75"), (0.75, "0.5"), (0, "-0.25")]
    assert pictures_of(page) == [asked_uri, one_uri, two_uri]
    best, _, worst = page.of(Labelled)
    turn = [Said(["user\nAnd now?"], "quiet"), Pictures([one_uri, two_uri])]
    foot = Note("3 tokens \u00b7 found 1 \u00b7 form 0.5", "quiet")
    assert best.sections == [Said(["left"]), *turn, Said(["blue"]), foot]
    cut = Note("1 token \u00b7 cut by its length", "quiet")
    assert worst.sections == [Note("(nothing)", "quiet"), cut]
    drawn = page.page()
    assert [image["src"] for image in drawn.all("img")] == [asked_uri, one_uri, two_uri]
    assert [b["style"] for b in drawn.all("b") if b.get("class") == "score"] == [
        *("--share: 100%", "--share: 75%", "--share: 0%")
    ]
    assert [each.get("open") for each in drawn.all("details")][:1] == [""]


def test_an_agents_requests_are_shown_with_their_rows(report):
    """The first request stands there where it is not the prompt, and a row where another begins or
    goes on. Episodes of a single row name none."""
    uri = data_uri(PLUM)
    texts = "system: look", "short", "and then?"
    heard = [{"text": text, "images": [uri] * (text == "short")} for text in texts]
    agents = episode(1.0, *"abcd", heard=[*heard, heard[1]], rows=[1, 2, 2, 1])
    page = report(rl(0), samples=[prompt(0, agents, episode(0.0, "e", rows=[1]))])
    first, single = page.of(Labelled)
    assert first.sections[:-1] == [
        *(Note("Row 1", "quiet"), Said(["system: look"], "quiet"), Pictures([]), Said(["a"])),
        *(Note("Row 2", "quiet"), Said(["short"], "quiet"), Pictures([uri]), Said(["b"])),
        *(Said(["and then?"], "quiet"), Pictures([]), Said(["c"])),
        *(Note("Row 1", "quiet"), Said(["short"], "quiet"), Pictures([uri]), Said(["d"])),
    ]
    assert single.sections == [Said(["e"]), Note("3 tokens", "quiet")]


def test_of_many_steps_the_first_the_last_and_some_between_are_shown(report):
    page = report(rl(0), rl(1_000), samples=[prompt(i * 25) for i in range(41)])
    note = "samples.jsonl has samples of 41 steps, 6 of them here. The best are first."
    assert note_of(page) == note
    shown = [(number, is_open) for number, _, is_open in steps_of(page)]
    numbers = ["1,000", "800", "600", "400", "200", "0"]
    assert shown == [(n, n in ("1,000", "0")) for n in numbers]


def test_a_resumed_run_shows_each_step_once(report):
    lines = [start(), *(rl(i, 0.25) for i in range(7)), start(2), *(rl(i, 0.75) for i in (3, 4))]
    old = [prompt(i, episode(0.0, f"old {i}"), where=w) for i in range(0, 7, 2) for w in "ab"]
    new = [prompt(4, episode(1.0, f"new {w}"), where=w) for w in "ab"]
    page = report(*lines, samples=[*old, *new])
    assert page.curves("Reward") == [("reward", list(range(5)), [0.25] * 3 + [0.75] * 2)]
    assert steps_of(page) == [
        ("4", "2 prompts, mean reward 1", True),
        ("2", "2 prompts, mean reward 0", False),
        ("0", "2 prompts, mean reward 0", True),
    ]
    texts = [word for word in page.words if word.startswith(("old", "new"))]
    assert texts == ["new a", "new b", "old 2", "old 2", "old 0", "old 0"]
    # The run is killed again, after a later step but before its samples are written.
    page = report(*lines, rl(5), rl(6), samples=[*old, *new])
    assert [number for number, _, _ in steps_of(page)] == ["4", "2", "0"]
    # Until the resumed run writes samples, those of the discarded weights are not shown.
    page = report(*lines[:-1], samples=old)
    assert [number for number, _, _ in steps_of(page)] == ["2", "0"]


def test_a_step_that_was_told_in_part_is_shown_as_it_was_done_again(report):
    first = prompt(0, episode(0.0, "first"), where="a")
    again = [prompt(0, episode(0.0, "again"), where=where) for where in "abc"]
    page = report(rl(0), samples=[first, *again])
    assert page.words.count("again") == 3 and "first" not in page.words
    assert rewards_of(page) == [(0.5, "0")] * 3  # rewards that are alike have the colour between


@pytest.mark.parametrize(
    ("broken", "count"),
    [
        (json.dumps(prompt(2))[:-9], "1 line"),
        ("[]\n{}\nnull\n\n\xff\n" + json.dumps(prompt(2, episode(reward=None))), "5 lines"),
        (json.dumps(prompt(-1)), "1 line"),
        (json.dumps(prompt(2, episode(cut=1))), "1 line"),
        (json.dumps(prompt(2, episode(float("nan")))), "1 line"),
        (json.dumps(prompt(2, episode(figures={"a": "b"}))), "1 line"),
        (json.dumps(prompt(2, images="ab")), "1 line"),
        (json.dumps(prompt(2, episode(rows="ab"))), "1 line"),
        (json.dumps(prompt(2, episode(heard=[{"text": "a"}]))), "1 line"),
    ],
)
def test_lines_that_cannot_be_read_are_counted(broken, count, report):
    page = report(rl(0), rl(2), samples=[prompt(0)], tail=f"{broken}\n")
    assert [number for number, _, _ in steps_of(page)] == ["0"]
    why = "cannot be read: a run that is killed cuts off its last one."
    assert f"The best are first. {count} of samples.jsonl {why}" in note_of(page)


def test_an_empty_file_says_nothing(report):
    page = report(rl(0), samples=[])
    assert not [word for word in page.words if "samples.jsonl" in word] and not steps_of(page)


def test_what_is_too_long_is_left_out(report, monkeypatch):
    monkeypatch.setattr(rl_samples, "_LONGEST", 500)
    samples = [prompt(0), prompt(1, episode(1.0, "a" * 2000)), prompt(2)]
    page = report(rl(2), samples=samples)
    assert [number for number, _, _ in steps_of(page)] == ["2", "0"]
    assert "1 line of samples.jsonl cannot" in note_of(page) and "longer" not in note_of(page)
    monkeypatch.setattr(rl_samples, "_MAX_LINES", 2)
    page = report(rl(2), samples=samples)
    assert [number for number, _, _ in steps_of(page)] == ["0"]
    note = "It is longer than a page reads: what comes later is left out."
    assert note_of(page).endswith(note)
    monkeypatch.undo()
    monkeypatch.setattr(rl_samples, "_MAX_BYTES", len(json.dumps(prompt(0))))
    page = report(rl(2), samples=samples)
    assert [number for number, _, _ in steps_of(page)] == ["0"] and note in note_of(page)


@pytest.mark.full
def test_a_page_stays_small_whatever_the_file_has(report):
    uri = "data:image/png;base64," + "A" * 2**19
    observations = [{"text": "h", "images": [uri[:5000]] * 30}] * 29
    figures = {f"{i}{'f' * 5000}": 1.0 for i in range(100)}
    many = [
        episode(float(i), *["a" * 5000] * 30, heard=observations if not i else [], figures=figures)
        for i in range(20)
    ]
    lines = [rl(i, figures=figures) for i in range(3)]
    samples = [
        prompt(0, *many[:1], question="first"),
        prompt(1, episode(), images=[uri], question="between"),
        *(prompt(2, *many[1:], where=str(i), images=[uri] * 2, question="last") for i in range(6)),
        *(prompt(2, where=str(i)) for i in range(6, 20)),
    ]
    page = report(*lines, samples=samples)
    assert len(page.page().text) < 14_000_000  # measured: 8,990,000
    shown = [each for each in pictures_of(page) if is_picture_uri(each)]
    assert sum(map(len, shown)) <= 6 * 2**20 and shown.count(uri) == 11
    last, between, first = ([*walk(fold)] for fold in page.of(Fold)[:3])
    assert last.count(uri) == 11 and uri not in between
    assert first.count(uri[:5000]) == 5 * 8  # smaller pictures still fit
    assert between.count("[no room for the picture]") == 1
    assert first.count("[22 more]") == 5 and first.count("[... 24 more answers]") == 1
    cards = [each for each in last if isinstance(each, Card)]
    assert len(cards) == 8 and steps_of(page)[0][1].startswith("8 prompts, mean")
    assert "8 of 19 episodes, mean reward 10" in cards[0].where
    ranks = [reward for _, reward in rewards_of(page)][:8]
    assert ranks == ["19", "17", "14", "12", "9", "7", "4", "1"]
    assert "The first 12 of 100 figures of rewards are shown." in page.words
    assert len([title for title in page.titles if title.endswith("fff...")]) == 12
    text = "".join(each for each in last if isinstance(each, str))
    assert text.count("[... 3,500 characters ...]") == 6 * 8 * 6  # answers x episodes x prompts
    assert text.count("[... 3,501 characters ...]") == 6 * 8 * 8  # figures of these episodes


def test_text_stays_text(tmp_path):
    hostile = f"{HOSTILE}</script><img src=x onerror=alert(1)>\x00\ud800"
    observations = [{"text": hostile, "images": [hostile, "data:image/svg+xml;base64,AA=="]}]
    answers = (1e307, hostile, hostile)
    lines = [
        step(0, 1.0),
        rl(0, 1e307, figures={hostile: 1e307}),
        rl(1, -1e307, figures={"</script><!--": -1e307, "": 0.5}),
    ]
    samples = [
        prompt(
            0,
            episode(*answers, heard=observations, figures={hostile: 1e307}, tokens=2**62),
            episode(-1e307),
            episode(-0.9e308),
            episode(0.9e308),
            question=hostile,
            where=hostile,
            images=[hostile, "https://example.com/a.png"],
        )
    ]
    run = write_run(tmp_path / "run", lines)
    text = "".join(json.dumps(line) + "\n" for line in samples)
    (run / "samples.jsonl").write_text(text)
    facts = Facts(read_report(run))
    page = facts.page()
    check_self_contained(page, chart_scripts())
    assert not page.all("img") and page.words.count("[no picture]") == 4
    assert "<script>alert" not in page.text and "</script><!--" not in page.text
    assert "\x1b" not in page.text and "\u202e" not in page.text and "\x00" not in page.text
    spelled = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; \u4e09 \\x1b[2J\\u202e&lt;/script&gt;"
    spelled += "&lt;img src=x onerror=alert(1)&gt;\\x00\\ud800"
    assert page.text.count(spelled) == 6  # where, question, two answers, heard, figure
    assert [share for share, _ in rewards_of(facts)] == [0.5] * 4  # their range is not finite


def two_runs(tmp_path):
    first = [start(), *(line for i in range(1, 21) for line in (step(i, 1.0), rl(i, i / 10)))]
    second = [start(), step(1, 0.5), rl(1, 5.0, figures={"form": 1.0}), rl(2, 4.0)]
    runs = {"first": first, "second": second, "third": [start(), step(1, 2.0), evaluation(1, 1.0)]}
    return [write_run(tmp_path / name, lines) for name, lines in runs.items()]


def test_rewards_of_several_runs_are_compared(tmp_path):
    page = Facts(read_report(*two_runs(tmp_path)))
    check_self_contained(page.page(), chart_scripts())
    assert page.tiles == {
        "best mean reward: second, steps 1 to 2": "4.5",
        "best loss: third, step 1": "2",  # the runs with samples have none
        "best eval loss: third, step 1": "1",
        "best eval token accuracy: third, step 1": "50.0%",
        "most tokens per second, median: first": "1,000",
    }
    assert page.of(Table)[0].header == ("", "first", "second", "third")
    assert [*zip(*page.of(Table)[0].rows[:5], strict=True)][1:] == [
        ("20/500", "-", "-", "1.55 at 20", "1.55 at 20"),
        ("1/500", "-", "-", "4.5 at 2", "4.5 at 2"),
        ("1/500", "2", "2 at 1", "-", "-"),
    ]
    assert page.text.count("Rewards are means of 10 steps, of which the last is named.") == 1
    curves = page.chart("Reward")["curves"]
    drawn = [(c["name"], c["run"], c["colour"]) for c in curves]
    assert drawn == [("first", 0, "c0"), ("second", 1, "c1")]
    assert curves[1]["x"] == [1, 2] and curves[1]["y"] == [5.0, 4.0]
    assert page.chart("Reward")["span"] == page.chart("Loss")["span"] == [1, 20]
    assert page.chart("Form")["span"] == [1, 2]  # each chart has its own steps
    assert [c["name"] for c in page.chart("Form")["curves"]] == ["second"]
    assert [c["name"] for c in page.chart("Sampling time")["curves"]] == ["first", "second"]
    assert page.page().text.count("Drag over a chart") == 1
    page = Facts(read_report(tmp_path / "third", write_run(tmp_path / "4", [step(0, 1.0)])))
    assert "reward" not in "".join(page.words) and "Samples" not in page.names


def test_a_line_is_read_as_it_was_written(tmp_path):
    plain = {key: value for key, value in rl(3).items() if key != "kind"}
    for line in (RlLine(**plain), RlLine(**{**plain, **EVERY, "figures": {"a": 0.5}})):
        (tmp_path / "metrics.jsonl").write_text(to_json(line) + "\n")
        assert read_metrics(tmp_path / "metrics.jsonl").samples == (line,)


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (480, True)])
def test_a_browser_draws_the_samples(width, dark, report, browser, tmp_path):
    observations = [{"text": "And now?", "images": [data_uri((7, 90, 200))]}]
    page = report(
        *(line for i in range(3) for line in (step(i, 1.0), rl(i, clip_fraction=0.0))),
        samples=[
            prompt(0, episode(0.0, "w" * 300)),
            prompt(1, episode(0.5)),
            prompt(2, episode(1.0, "a", "b", heard=observations), images=[data_uri(PLUM)]),
        ],
    )
    browser.open(write_report(tmp_path / "my run"), width, dark, height=9000)
    assert browser.content().count("<canvas") == len(page.titles)
    pixels = browser.picture()

    def count(colour):
        return int((pixels == colour).all(axis=-1).sum())

    for colour in (PLUM, (7, 90, 200)):
        assert count(colour) in range(64 * 48 - 30, 64 * 48 + 1)
    good, bad = [("2c8258", "b3402a"), ("63c393", "ee8a72")][dark]
    assert min(count(tuple(bytes.fromhex(each))) for each in (good, bad)) > 400
    paper = np.abs(pixels.astype(int) - [(247, 246, 243), (21, 23, 27)][dark]).max(axis=-1)
    assert (paper[:, -8:] == 0).all()  # nothing overflows the page
