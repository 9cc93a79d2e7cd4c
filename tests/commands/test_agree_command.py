# .venv/bin/python -m pytest tests/commands/test_agree_command.py
"""Tests of `megatron-vlm agree`. It reports every difference between an engine and the trainer in
inputs and log-probs, and nothing else. A process that replays answers from files replaces vLLM
here; tests/commands/test_agree_vllm.py has the real one."""

import contextlib
import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path

import pytest
import torch

from megatron_vlm.cli import main
from megatron_vlm.commands.agree.agree_ranks import run_agree
from megatron_vlm.commands.agree.agreement_report import agreement_report
from megatron_vlm.commands.agree.compare import (
    Agreement,
    ComparedPrompt,
    TokenText,
    compare,
    token_pairs,
)
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.process import UNLIKE
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.prompts import Prompts
from megatron_vlm.engines.sampler import ProcessedMedia, ProcessedPrompt
from megatron_vlm.report.html import draw_parts
from megatron_vlm.report.sections import Card, Pictures, Scatter
from megatron_vlm.run.evaluation.held_out_sets import question_of
from tests.model.test_parity import layout
from tests.support.fake_engine import REPLAYS, replay_of
from tests.support.report_facts import Facts, Page
from tests.support.runs import call
from tests.support.sets import open_set, write_set
from tests.support.suites import quick
from tests.support.tables import in_one_test

ROWS, NEW_TOKENS = 5, 6
STAND_IN = Path(__file__).parents[1] / "support" / "fake_engine.py"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """A model, its prompts, and the trainer's answers to them."""

    folder: str
    data: str
    rows: list[Row]
    answers: list[Completion]
    tables: PixelTables


@pytest.fixture(scope="module")
def world(tiny, pool, tmp_path_factory) -> World:
    """Return a world with prompts of 0, 1, 2, 3 and 0 pictures."""
    folder, data = tiny(), write_set(tmp_path_factory.mktemp("prompts"), ROWS)
    opened = open_set(data, folder, None, train=False)
    rows = [question_of(opened, opened.handle(number)).prompt for number in range(ROWS)]
    draw = methodcaller("sample", rows, SamplingSettings(NEW_TOKENS), 1, range(ROWS))
    answers = [each for [each] in pool.run(call, 1, folder, layout(), draw)[0]]
    return World(folder, data, rows, answers, PixelTables(folder, CPU))


def honest(row: Row, tables: PixelTables) -> ProcessedPrompt:
    """Return the trainer's input as an engine would report it."""
    values_PC = tables.images(row.pixel_values_PC)
    if row.image_grid_I3 is None or values_PC is None:
        return ProcessedPrompt(tuple(row.ids_S.tolist()), (), (), "vLLM 0")
    grids = [tuple(grid) for grid in row.image_grid_I3.tolist()]
    parts = values_PC.split([math.prod(grid) for grid in grids])
    media = tuple(ProcessedMedia(*pair) for pair in zip(grids, parts, strict=True))
    return ProcessedPrompt(tuple(row.ids_S.tolist()), media, (), "vLLM 0")


def changed(
    seen: ProcessedPrompt, media: Callable[[ProcessedMedia], ProcessedMedia]
) -> ProcessedPrompt:
    """Return a view with another first picture."""
    return replace(seen, images=(media(seen.images[0]), *seen.images[1:]))


def moved(by: float) -> Callable[[ProcessedMedia], ProcessedMedia]:
    """Return a function that changes one value of the patches."""

    def move(media: ProcessedMedia) -> ProcessedMedia:
        patches_PC = media.patches_PC.clone()
        patches_PC[-1, 7] += by
        return replace(media, patches_PC=patches_PC)

    return move


def turned(media: ProcessedMedia) -> ProcessedMedia:
    time, high, wide = media.grid
    assert high != wide
    return replace(media, grid=(time, wide, high))


def other_id(seen: ProcessedPrompt) -> ProcessedPrompt:
    return replace(seen, ids=(*seen.ids[:4], seen.ids[4] + 1, *seen.ids[5:]))


SEEN: dict[str, tuple[Callable[[ProcessedPrompt], ProcessedPrompt], str | None]] = {
    "nothing": (lambda seen: seen, None),
    "rounding": (lambda seen: changed(seen, moved(1e-6)), None),
    "an id": (other_id, "1 of 1 prompts have other ids, the first here"),
    "a missing id": (
        lambda seen: replace(seen, ids=seen.ids[:-1]),
        "1 of 1 prompts have other ids, the first here",
    ),
    "a grid": (lambda seen: changed(seen, turned), "1 of 1 prompts have other grids"),
    "a pixel": (lambda seen: changed(seen, moved(1 / 127.5)), "prompts have other patches"),
    "no number": (lambda seen: changed(seen, moved(math.nan)), "prompts have other patches"),
    "a smaller picture": (
        lambda seen: changed(seen, lambda m: replace(m, patches_PC=m.patches_PC[1:])),
        "prompts have other patches",
    ),
    "a picture fewer": (
        lambda seen: replace(seen, images=seen.images[:1]),
        "prompts have other grids, the first here; 1 of 1 prompts have other patches",
    ),
}


@in_one_test("name", SEEN)
def test_what_an_engine_sees_otherwise_is_found(name, world):
    change, fault = SEEN[name]
    row = world.rows[2]
    compared = compare("here", row, change(honest(row, world.tables)), world.tables)
    faults = agreement([compared]).faults
    assert (not faults) if fault is None else fault in "; ".join(faults)


def test_patches_are_compared_in_the_engines_type(world):
    row = world.rows[1]
    rounded = changed(
        honest(row, world.tables), lambda m: replace(m, patches_PC=m.patches_PC.bfloat16())
    )
    assert compare("here", row, rounded, world.tables).patches == 0


def agreement(prompts: list[ComparedPrompt], bound: float = 1e-4) -> Agreement:
    return Agreement("model", "TP1", "float32", 1.0, bound, tuple(prompts))


def said(world: World, engine: list[list[float]]) -> Agreement:
    """Return an agreement about prompts whose answers have these log-probs from the engine, and -1,
    -2 and so on from the trainer."""
    views = [honest(row, world.tables) for row in world.rows]
    pairs = zip(world.rows, views, engine, strict=False)
    return agreement(
        [
            replace(
                compare(f"folder/file:{place}", row, each, world.tables),
                tokens=token_pairs(
                    range(len(log_probs)), log_probs, [-1.0 - i for i in range(len(log_probs))]
                ),
            )
            for place, (row, each, log_probs) in enumerate(pairs)
        ]
    )


def test_figures_are_those_of_all_tokens(world):
    agreed = said(world, [[-1.0, -2.00003], [-1.00006, -2.0, -3.0]])
    assert agreed.worst == pytest.approx(6e-5) and agreed.mean == pytest.approx(9e-5 / 5)
    assert agreed.faults == []
    assert [(p.where, t.place) for p, t in agreed.worst_tokens(2)] == [
        ("folder/file:1", 0),
        ("folder/file:0", 1),
    ]
    assert replace(agreed, bound=5e-5).faults == [
        "1 of 5 log-probs differ by more than 5e-05, by 6e-05 at most"
    ]


def test_a_log_prob_that_is_no_number_is_a_difference(world):
    for wrong in (math.nan, -math.inf):
        agreed = said(world, [[-1.0], [-1.0, wrong]])
        assert "1 of 3 log-probs differ" in agreed.faults[0]
        [(prompt, token)] = agreed.worst_tokens(1)
        assert (prompt.where, token.place) == ("folder/file:1", 1)
        assert facts_of(agreed, world).report.title == "They differ"


def facts_of(found: Agreement, world: World) -> Facts:
    return Facts(agreement_report(found, TokenText.from_folder(world.folder)))


def test_the_report_has_the_figures_and_the_pictures(world):
    facts = facts_of(said(world, [[-1.0], [-1.0, -2.00002], [-1.00004]]), world)
    assert facts.tiles["worst difference of a log-prob"] == "4.0e-05"
    assert (facts.tiles["tokens"], facts.tiles["prompts"]) == ("4", "3")
    first = facts.of(Card)[0]
    assert (first.title, first.where) == ("4.0e-05", "folder/file:2, token 0 of the answer")
    counts = [len(each.pictures) for each in facts.of(Pictures)]
    assert counts[:2] == [2, 1]
    assert facts.page().text.count("<img") == sum(counts)
    assert first.sections[-1].text.startswith("engine -1.000040 \u00b7 trainer -1.000000")
    assert [row[0] for row in facts.rows] == ["file:0", "file:1", "file:2"]
    assert [row[3] for row in facts.rows] == ["equal"] * 3
    assert [row[-2] for row in facts.rows] == ["0", "2.0e-05", "4.0e-05"]


def test_every_token_is_a_point_where_it_belongs(world):
    """Differences are on a logarithmic scale. Differences of 0 lie on its lowest line."""
    against, differences = facts_of(said(world, [[-1.0, -2.001], [-1.00001]]), world).of(Scatter)
    assert sorted(against.points) == [(-2.0, -2.001), (-1.0, -1.00001), (-1.0, -1.0)]
    assert [label.rpartition(" ")[2] for label in differences.labels] == [
        *("1.0e-03", "1.0e-05", "0.0e+00")
    ]
    assert Page(draw_parts(against)).text.count("<circle") == 3
    plot = Page(draw_parts(differences))
    heights = [float(circle["cy"]) for circle in plot.all("circle")]
    [bound] = [float(a["y1"]) for a in plot.all("line") if a.get("class") == "bound"]
    assert heights[0] < bound < heights[1] < heights[2] == 280


# The whole command.


@pytest.fixture
def replays(world, tmp_path) -> Path:
    """Make a stand-in engine whose inputs and answers are those of the trainer, and return the
    folder of its replies."""
    folder = tmp_path / "replays"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{REPLAYS}={folder} exec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    for row, answer in zip(world.rows, world.answers, strict=True):
        write_replay(folder, world, row, honest(row, world.tables), answer)
    return folder


def write_replay(
    folder: Path, world: World, row: Row, seen: ProcessedPrompt, answer: Completion
) -> None:
    request = Prompts(EngineSettings("", world.folder)).request(row, SamplingSettings(1), [])
    file = folder / replay_of(request.fields["prompt"])
    images = [
        {"grid": media.grid, "dtype": "float32", "shape": list(media.patches_PC.shape)}
        for media in seen.images
    ]
    one = dict(ids=answer.ids, log_probs=answer.log_probs, ended=answer.ended, versions=[])
    one["accepted"] = []
    replies = {
        "inspect": {"ids": seen.ids, "image": images, "video": [], "vllm": "0.0"},
        "sample": {"samples": [one]},
    }
    file.write_text(json.dumps(replies))
    values = b"".join(media.patches_PC.numpy().tobytes() for media in seen.images)
    Path(f"{file}.bin").write_bytes(values)


def words(world: World, replays: Path, **keys: object) -> list[str]:
    settings = [f"{key}={value}" for key, value in keys.items()]
    settings += [f"data.eval={world.data}", "data.cache_dir=null", "launch.timeout_minutes=2"]
    python = replays.parent / "python"
    options = [f"--engine={python}", f"--max-tokens={NEW_TOKENS}"]
    return [world.folder, *settings, *options, f"--html={replays.parent / 'page.html'}"]


def _agree(words: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return run_agree(words), output.getvalue()


LAYOUTS = {"1x1x1": (1, {}), "tp2-pp2": (4, {"parallel.tp": 2, "parallel.pp": 2}), "dp2": (2, {})}


@pytest.mark.parametrize("name", quick(["tp2-pp2"], LAYOUTS))
def test_an_engine_that_says_what_the_trainer_does_agrees(name, world, pool, replays):
    """The measured difference is 4.8e-7."""
    size, keys = LAYOUTS[name]
    results = pool.run(_agree, size, words(world, replays, **keys))
    assert {status for status, _ in results} == {0}
    assert "They agree" in results[0][1] and all(text == "" for _, text in results[1:])
    worst = re.search(r"worst difference of a log-prob: (\S+),", results[0][1])
    assert worst and float(worst[1]) < 4e-6
    count = sum(len(answer.ids) for answer in world.answers)
    assert f"tokens: {count}, prompts: {ROWS}, largest difference of patches: 0" in results[0][1]
    page = (replays.parent / "page.html").read_text()
    assert "Engine and trainer agree" in page and page.count("<article") == 8


def shifted(answer: Completion) -> Completion:
    *first, last = answer.log_probs
    return replace(answer, log_probs=(*first, last + 2e-4))


@pytest.mark.full
def test_a_replica_without_a_prompt_of_its_own_takes_part(world, pool, replays):
    arguments = [*words(world, replays), "--samples=1"]
    results = pool.run(_agree, 2, arguments)
    assert {status for status, _ in results} == {0}
    assert f"tokens: {len(world.answers[0].ids)}, prompts: 1, " in results[0][1]


def test_one_that_does_not_is_unlike(world, pool, replays):
    """The command reports all differences, on every rank. A prompt whose ids differ is not
    sampled."""
    views = [honest(row, world.tables) for row in world.rows]
    for row, view, answer in (
        (world.rows[1], views[1], shifted(world.answers[1])),
        (world.rows[2], other_id(views[2]), world.answers[2]),
        (world.rows[3], changed(views[3], turned), world.answers[3]),
    ):
        write_replay(replays, world, row, view, answer)
    results = pool.run(_agree, 2, words(world, replays, **{"parallel.tp": 2}))
    assert [status for status, _ in results] == [UNLIKE] * 2
    left = sum(len(each.ids) for each in world.answers) - len(world.answers[2].ids)
    said = results[0][1]
    assert "They differ: " in said and f"tokens: {left}, " in said
    for fault in (
        f"1 of {left} log-probs differ by more than 0.0001",
        "1 of 5 prompts have other ids",
        "1 of 5 prompts have other grids",
        f"at 4 the trainer has {world.rows[2].ids_S[4]} (",
    ):
        assert fault in " ".join(said.split()), said


@pytest.mark.slow
def test_the_command_ends_with_1_where_they_differ(world, replays, capfd):
    row, completion = world.rows[1], world.answers[1]
    write_replay(replays, world, row, honest(row, world.tables), shifted(completion))
    status = main(["agree", *words(world, replays, **{"parallel.tp": 2})])
    output, errors = capfd.readouterr()
    assert status == 1 and "They differ: 1 of" in output
    assert "exit status" not in errors


@in_one_test(
    ("given", "said"),
    [
        (["--samples=2"], "--engine is not set.*make vllm-env"),
        (["--engine=x"], "data.eval is not set.*data.train"),
        (["--engine=x", "--samples=0"], "--samples=0; give at least 1"),
        (["--engine=x", "--max-tokens=0"], "--max-tokens=0; give at least 1"),
        (["--engine=x", "--bound=0"], "--bound=0.0; give a finite number above 0"),
        (["--engine=x", "--bound=nan"], "--bound=nan; give a finite number above 0"),
        (["--engine=x", "--temperature=-1"], "--temperature=-1.0; give a finite number"),
        (["--engine=x", "data.train={path: hub:a, streaming: true}"], "data.train is a stream"),
        (["--engine=x", "data.eval=x.jsonl", "lora.rank=4"], "lora.rank=4.*--as merged"),
        (["--engine=x", "data.eval=x.jsonl", "data.add_tokens=[<new>]"], "data.add_tokens=.*<new>"),
        (["--engine=x", "data.eval=/no/file.jsonl"], "data.eval=/no/file.jsonl: "),
        (["--enjine=x"], "--enjine=x is not an option; did you mean --engine"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, said, tiny, capsys):
    assert main(["agree", tiny(), *given]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.full
def test_an_engine_that_is_none_is_refused_on_every_rank(world, pool, replays):
    arguments = [*words(world, replays, **{"parallel.tp": 2}), "--engine=/no/such/python"]
    messages = pool.run(_refused, 2, arguments)
    assert all("python=/no/such/python " in each for each in messages)


def _refused(words: list[str]) -> str:
    try:
        run_agree(words)
    except Exception as error:
        return str(error)
    return ""
