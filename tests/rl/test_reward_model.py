# .venv/bin/python -m pytest tests/rl/test_reward_model.py
"""Rewards of rl.reward=model:FOLDER are those of Hugging Face's model for the sampled answers, and
what cannot be a reward model is refused before the first step."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.reader import RowMaker
from tests.rl.test_rl import LEAN, go, learnt, lines, samples
from tests.support.reference import inputs_of, load_reference
from tests.support.suites import FULL
from tests.training.test_reward import add_score

# Relative to the largest reward, in fp32. Measured worst case: see the suite's figures.
TOLERANCE = 1e-5
JUDGE = dict(layers=3, hidden=48, seed=2)


@pytest.fixture(scope="module")
def judge(tiny, tmp_path_factory) -> Path:
    """A reward model of other sizes, whose chat template writes answers in another way."""
    path = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(tiny(**JUDGE), path)
    add_score(path / "model.safetensors", "score.weight")
    file = path / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|im_end|>", " .<|im_end|>"))
    return path


def by_hugging_face(judge: Path, folder: Path, where: str, answer: str) -> float:
    """The reward of an answer to the prompt of a record: the head at the last token."""
    record = json.loads((folder / "train.jsonl").read_text().splitlines()[number_of(where) - 1])
    record["messages"][-1]["content"] = answer
    maker = RowMaker(str(judge), image_root=str(folder), special_tokens="escape")
    row = maker.row(record)
    pixels = PixelTables(str(judge), torch.device("cpu")).images(row.pixel_values_PC)
    reference = load_reference(str(judge)).eval()
    given = inputs_of(reference, SimpleNamespace(**(vars(row) | {"pixel_values_PC": pixels})))
    with torch.no_grad():
        hidden = reference.model(**given).last_hidden_state[0, -1]
    return float(load_file(judge / "model.safetensors")["score.weight"][0] @ hidden)


def number_of(where: str) -> int:
    return int(where.rpartition("line ")[2] if "line" in where else where.rpartition(":")[2])


@pytest.mark.parametrize(
    ("world", "layout"), [(2, ["parallel.tp=2"]), pytest.param(4, ["parallel.pp=2"], marks=FULL)]
)
def test_rewards_are_those_of_hugging_face(world, layout, pool, folder, model, judge):
    more = [f"rl.reward=model:{judge}", "train.steps=2", "eval.samples=2", *layout]
    run = learnt(pool, world, folder, model, f"world{world}", *more)
    shown = [(line["where"], each) for line in samples(run) for each in line["episodes"]]
    rewards = [each["reward"] for _, each in shown]
    assert len(shown) == 2 * 3 * 4 and len(set(rewards)) > 12
    scale = max(map(abs, rewards))
    for where, each in shown:
        [answer] = each["answers"]
        if not answer.strip():  # no record has an empty message
            continue
        want = by_hugging_face(judge, folder, where, answer)
        assert each["reward"] == pytest.approx(want, abs=TOLERANCE * scale)
    held_out = [line["reward"] for line in lines(run, "eval")]
    assert len(held_out) == 2 and all(held_out)


def test_what_is_no_reward_model_is_refused(pool, folder, model, judge, tmp_path):
    shutil.copytree(judge, tmp_path / "two")
    tensors = load_file(judge / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
    save_file(tensors, tmp_path / "two/model.safetensors", {"format": "pt"})
    cases: dict[str, tuple[Any, ...]] = {
        "there is no model in": (tmp_path / "none",),
        "has no score.weight, so it is no reward model": (model,),
        "score.weight is (2, 48)": (tmp_path / "two",),
        "rl.agent is set": (judge, "rl.agent=python"),
        "has no effect with rl.reward=model:": (judge, "rl.failed_reward=1"),
    }
    for problem, (where, *more) in cases.items():
        given = [f"rl.reward=model:{where}", *LEAN, *more]
        status, _, err = go(pool, 1, folder, model, "refused", *given)
        assert status == 2 and problem in err, err
    assert not list((folder / "refused").glob("metrics.jsonl"))
