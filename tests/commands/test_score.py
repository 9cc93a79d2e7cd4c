# .venv/bin/python -m pytest tests/commands/test_score.py
"""`megatron-vlm score`: log-probs and likeliest tokens are those of Hugging Face's model at each
layout; a killed command continues; a folder never holds scores of two things."""

import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_vlm.cli import main
from megatron_vlm.commands.score import run_score
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.scores.score_file import RecordScore, ScoreFile, ScoreLookup, lump_tail
from megatron_vlm.data.scores.score_index import ScoreIndex, read_complete
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.distributed.process import run_guarded
from megatron_vlm.errors import DataError
from megatron_vlm.run.scoring import score_folder
from megatron_vlm.training.row_scores import SMALLEST_REST, RowScores
from tests.engines.test_sampling_engines import STAND_IN
from tests.run.test_evaluation import hf_row, logits_of
from tests.support.reference import load_reference
from tests.support.sets import open_set, write_set
from tests.support.suites import full

TOLERANCE = 5e-6  # absolute, fp32 on the CPU; measured worst: 9.1e-7
ROWS, EVAL_ROWS, TOP, CHUNK = 13, 3, 6, 4
LAYOUTS: dict[str, dict[str, int]] = {
    "1x1": {},
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    """Return the folder of a data set, and of a held-out set of which one record is in both."""
    folder = tmp_path_factory.mktemp("score")
    lines = Path(write_set(folder, ROWS)).read_text().splitlines()
    texts = [json.loads(line) for line in lines[::4][: EVAL_ROWS - 1]]
    for record in texts:
        record["messages"][-1]["content"] += "more"
    held_out = [*texts, json.loads(lines[0])]
    (folder / "eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in held_out))
    return folder


def words_of(folder: Path, model: str, out: str, *more: str) -> list[str]:
    keys = {
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
        "data.cache_dir": folder / "cache",
        "data.num_workers": 0,
        "eval.batch_size": 4,
        "launch.timeout_minutes": 2,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    return [model, *words, "--out", str(folder / out), *more]


def score_rank(words: list[str], fail_at: int = -1) -> tuple[int, str, str]:
    """Run one rank of the command, which dies when it is about to write a file."""
    save, written = score_folder.save_scores, 0

    def save_scores(path: Path, records: list[RecordScore]) -> None:
        nonlocal written
        if written == fail_at:
            raise OSError(28, "No space left on device")
        written += 1
        save(path, records)

    with (
        mock.patch.object(score_folder, "RECORDS_PER_FILE", CHUNK),
        mock.patch.object(score_folder, "save_scores", save_scores),
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
    ):
        status = run_guarded(run_score, words)
    return status, out.getvalue(), err.getvalue()


def score(pool: Any, words: list[str], world: int = 1, fail_at: int = -1) -> tuple[int, str, str]:
    answers = pool.run(score_rank, world, words, fail_at)
    assert all(out == "" for _, out, _ in answers[1:])  # the others are quiet
    return answers[0]


def records_of(folder: Path) -> list[list[RecordScore]]:
    """Return the records of each set."""
    index = ScoreIndex.read(folder)
    assert index.is_complete
    sets = []
    for number in range(len(index.sets)):
        files = [ScoreFile.open(folder / name) for name in index.sets[number].files(number)]
        sets.append([file.record(place) for file in files for place in range(len(file))])
    return sets


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "dp2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_scores_are_hugging_faces(name, asked, tiny, pool, record_property):
    path, temperature = tiny(vocab=509), 1.0 if name == "1x1" else 0.7
    world = 1 if name == "1x1" else 2
    options = [f"{key}={value}" for key, value in LAYOUTS[name].items()]
    more = [*options, "--top-k", str(TOP), "--temperature", str(temperature)]
    status, out, err = score(pool, words_of(asked, path, name, *more), world)
    assert status == 0, err
    model, pixels = load_reference(path).eval(), PixelTables(path, torch.device("cpu"))
    worst, sums = 0.0, []
    sets = records_of(asked / name)
    assert [len(records) for records in sets] == [ROWS, EVAL_ROWS]
    for file, records in zip(("train", "eval"), sets, strict=True):
        data = open_set(str(asked / f"{file}.jsonl"), path, None, train=False)
        for number, record in enumerate(records):
            row = hf_row(data.row((0, number)), pixels)
            assert record.number == number and record.where == data.where((0, number))
            assert record.digest == data.indexes[0].digests[number]
            positions = (row.labels_S[1:] != IGNORE).nonzero()[:, 0]
            assert record.positions_N.tolist() == (positions + 1).tolist()
            assert record.ids_N.tolist() == row.ids_S[positions + 1].tolist()
            logits = logits_of(model, row)[positions].double()
            own = logits.log_softmax(-1).gather(1, row.ids_S[positions + 1, None])[:, 0]
            errors = [np.abs(record.log_probs_N - own.numpy()).max()]
            assert record.top_ids_NJ is not None and record.top_log_probs_NR is not None
            ids, given = torch.from_numpy(record.top_ids_NJ), record.top_log_probs_NR
            whole = (logits / temperature).log_softmax(-1)
            others = whole.scatter(1, ids.long(), -torch.inf).logsumexp(1, keepdim=True)
            want = torch.cat([whole.topk(TOP).values, others], dim=1)
            errors.append(np.abs(given - want.numpy()).max())
            picked = whole.gather(1, ids.long())  # of two that are as likely, either may be first
            errors.append(np.abs(given[:, :-1] - picked.numpy()).max())
            worst = max(worst, *map(float, errors))
            sums.append((file, float(own.sum()), len(own)))
    record_property("worst", worst)
    assert worst <= TOLERANCE
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["set"] for line in lines] == ["data.train", "eval"]
    for line, file in zip(lines, ("train", "eval"), strict=True):
        total = sum(value for each, value, _ in sums if each == file)
        tokens = sum(count for each, _, count in sums if each == file)
        assert (line["records"], line["tokens"]) == (ROWS if file == "train" else 3, tokens)
        assert line["log_prob"] == pytest.approx(total / tokens, abs=TOLERANCE)
        assert line["perplexity"] == pytest.approx(np.exp(-total / tokens), rel=1e-4)
    shown = err[err.index("records with the highest perplexity") :].splitlines()
    assert all(re.search(r" /\S+/(train|eval)\.jsonl:\d+$", line) for line in shown[1 : ROWS + 1])


@pytest.fixture(scope="module")
def whole(asked, tiny, pool) -> Path:
    """Return a folder of scores without likeliest tokens."""
    status, _, err = score(pool, words_of(asked, tiny(vocab=509), "whole"))
    assert status == 0, err
    return asked / "whole"


def test_scores_without_likeliest_tokens(whole):
    records = records_of(whole)[0]
    assert all(record.top_ids_NJ is None for record in records)
    assert len({record.sample_digest for record in records}) == ROWS


@pytest.mark.full
def test_a_stopped_command_continues(whole, asked, tiny, pool):
    words = words_of(asked, tiny(vocab=509), "stopped")
    status, _, err = score(pool, words, fail_at=2)
    assert status == 2 and "No space left on device" in err and "continues" in err
    folder = asked / "stopped"
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == ["00-000000000.safetensors", "00-000000004.safetensors"]
    times = [file.stat().st_mtime_ns for file in files]
    assert not ScoreIndex.read(folder).is_complete
    # A file in the middle is computed alone.
    files.pop(0).unlink()
    status, out, err = score(pool, words, world=2)
    assert status == 0 and "has 1 of 5 files already" in err
    assert files[0].stat().st_mtime_ns == times[1]
    whole_lines = ScoreIndex.read(whole)
    assert ScoreIndex.read(folder).digest == whole_lines.digest
    for one, other in zip(records_of(folder), records_of(whole), strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.digest, a.sample_digest, a.where) == (b.digest, b.sample_digest, b.where)
            assert np.abs(a.log_probs_N - b.log_probs_N).max() <= TOLERANCE
    # Once more, and nothing is computed.
    again = score(pool, words, fail_at=0)
    assert again[0] == 0 and again[1] == out and "has 5 of 5 files already" in again[2]


@pytest.mark.full
def test_scores_of_something_else_are_refused(whole, asked, tiny, pool):
    model = tiny(vocab=509)
    shorter = asked / "shorter.jsonl"
    shorter.write_text("".join((asked / "train.jsonl").read_text().splitlines(True)[:5]))
    foreign = asked / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    cases = {
        "top_k was 0 and is now 3": words_of(asked, model, "whole", "--top-k", "3"),
        "temperature was 1.0": words_of(asked, model, "whole", "--temperature", "2"),
        "weights was": words_of(asked, tiny(vocab=509, layers=3), "whole"),
        "the records of data.train was 13 and is now 5": words_of(
            asked, model, "whole", f"data.train={shorter}"
        ),
        "the data sets was": words_of(asked, model, "whole", "data.eval=null"),
        "no scores.json among them": words_of(asked, model, "foreign"),
        "--top-k=600": words_of(asked, model, "new", "--top-k", "600"),
        "--top-k=-1": words_of(asked, model, "new", "--top-k", "-1"),
        "--temperature=0.0": words_of(asked, model, "new", "--temperature", "0"),
        "--devices=0 has no effect without --engine": words_of(asked, model, "new", "--devices=0"),
        "data.train is not set": [model, "--out", str(asked / "new")],
    }
    for problem, words in cases.items():
        status, out, err = score(pool, words)
        assert (status, out) == (2, "") and problem in err, err
    assert (foreign / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", ["truncated", "a changed value", full("a changed column")])
def test_damaged_files_are_refused(damage, whole, asked, tiny, pool):
    folder = asked / damage.replace(" ", "-")
    shutil.copytree(whole, folder)
    file = sorted(folder.glob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[:-10]
    else:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        name = "log_probs" if damage == "a changed value" else "digests"
        content[8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    if damage == "a changed value":
        opened = ScoreFile.open(file)
        with pytest.raises(Exception, match="checksum of record 0"):
            opened.record(0)
        return
    status, _, err = score(pool, words_of(asked, tiny(vocab=509), folder.name))
    assert status == 2 and file.name in err and "delete the file and run" in err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sets": []}, "scores.json: sets=[] is not a list of data sets"),
        ({"samples": 0}, "sets[0].samples=0 is not a whole number from 1"),
        ({"samples": 10**12}, "scores.json names "),
        ({"top_k": 5}, "tokens of each place, and scores.json says 5"),
    ],
)
def test_a_damaged_index_is_refused(change, problem, whole, tiny, tmp_path):
    folder = tmp_path / "scores"
    shutil.copytree(whole, folder)
    content = json.loads((folder / "scores.json").read_text())
    (content["sets"][0] if "samples" in change else content).update(change)
    (folder / "scores.json").write_text(json.dumps(content))
    vocabulary = read_tokenizer(tiny(vocab=509)).get_vocab()
    with pytest.raises(DataError, match=re.escape(problem)):
        index = read_complete("preference.reference", str(folder))
        ScoreLookup.open("preference.reference", str(folder), index, vocabulary)


def by_engine(asked: Path, model: str, out: str, **options: Any) -> list[str]:
    """Return the command that scores the texts by a stand-in with these options."""
    lines = (asked / "train.jsonl").read_text().splitlines()
    texts = asked / "texts.jsonl"
    texts.write_text("".join(f"{line}\n" for line in lines if "image" not in line))
    python = asked / f"python-{out}"
    environment = f"STAND_IN_OPTIONS='{json.dumps(options)}'"
    version = '[ "$1" = -c ] && echo 0 && exit'  # of vLLM, which the command asks for
    start = f'{environment} exec {sys.executable} {STAND_IN} "$@"'
    python.write_text(f"#!/bin/sh\n{version}\n{start}\n")
    python.chmod(0o755)
    more = ["data.eval=null", f"data.train={texts}", "--top-k", "2", "--engine", str(python)]
    return ["score", *words_of(asked, model, out, *more)]


@pytest.mark.full
def test_an_engine_that_dies_is_asked_again_or_ends_the_command(asked, tiny, capsys):
    """Of a file that is not whole, nothing is left, and the next command writes it."""
    model, once = tiny(vocab=509), asked / "once"
    assert main(by_engine(asked, model, "well")) == 0
    assert main(by_engine(asked, model, "dying", lives=2, once=str(once))) == 0
    assert once.exists()
    [well], [dying] = records_of(asked / "well"), records_of(asked / "dying")
    assert len(well) == len(dying) > 2
    for first, second in zip(well, dying, strict=True):
        assert first.where == second.where
        assert all(map(np.array_equal, first.values, second.values))
    capsys.readouterr()
    assert main(by_engine(asked, model, "dead", lives=1)) == 2
    said = capsys.readouterr().err
    assert "texts.jsonl:1" in said and "died" in said, said
    assert not list((asked / "dead").glob("*.safetensors*"))
    assert main(by_engine(asked, model, "dead")) == 0
    [continued] = records_of(asked / "dead")
    assert [each.where for each in continued] == [each.where for each in well]


def test_an_engines_table_has_the_rest_of_each_place():
    """The scores are at the position that predicts a token. A rest that fp32 cannot tell from
    nothing has the smallest probability that it can."""
    table = torch.tensor([[[9, 0.25], [3, 0.5], [9, 0.25]], [[4, 1e-9], [5, 1.0], [6, 1e-7]]])
    table = torch.cat([table[..., :1], table[..., 1:].log()], dim=-1).double()
    targets = RowScores.from_table(table, torch.tensor([1, 2]))
    assert targets.ids_NJ.tolist() == [[3, 9], [5, 6]]
    assert targets.label_log_probs_N.exp().tolist() == pytest.approx([0.25, 1e-9])
    rest = targets.log_probs_NR[:, -1].exp()
    assert rest.tolist() == pytest.approx([0.25, SMALLEST_REST])


def test_fewer_tokens_leave_the_rest_to_all_others():
    log_probs = torch.tensor([[0.5, 0.2, 0.1, 0.2]]).log()
    lumped = lump_tail(log_probs, 1).exp()
    assert torch.allclose(lumped, torch.tensor([[0.5, 0.5]]))
    assert torch.equal(lump_tail(log_probs, 3), log_probs)


def test_what_engines_cannot_score_is_refused(asked, tiny, capsys):
    model, engine = tiny(vocab=509), ["--engine", "/no/such/python"]
    cases = {
        "--temperature=0.7: an engine's log-probs of a prompt": ["--temperature", "0.7"],
        "data.add_tokens=['<x>']: the engines have": ['data.add_tokens=["<x>"]'],
        "lora.rank=16: the engines get": ["lora=default"],
        "--engine=/no/such/python cannot be started": [],
    }
    for problem, more in cases.items():
        status = main(["score", *words_of(asked, model, "engine", *engine, *more)])
        assert status == 2 and problem in capsys.readouterr().err
    assert not (asked / "engine").exists()
