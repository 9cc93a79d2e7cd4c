# .venv/bin/python -m pytest tests/rl/test_segments.py
"""Where a chat template rewrites earlier turns, a new row begins, with what Hugging Face's template
shows then; and an episode teaches the same in several rows as in one."""

import asyncio
import base64
import io
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import PIL.Image
import pytest
import torch

from megatron_vlm.config.schema import PolicyLoss, RlConfig
from megatron_vlm.data.batches.cost import WorkModel
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.rl.completion_requests import EngineQueue
from megatron_vlm.rl.episode import Episode, Group, Segment
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.policy_update import PolicyUpdater
from megatron_vlm.rl.rollouts import next_prompts
from megatron_vlm.rl.train_batch import make_train_batch
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.rl.test_train_batch import TASKS, config, opened, prompt_of, records
from tests.support.batches import MIXED, make_rows
from tests.support.chats import hf_encode, hf_processor, picture, say, text, think
from tests.support.rl_tasks import Looks
from tests.support.runs import Case, collect_grads
from tests.training.test_policy_losses import apart

TEMPLATES = Path(__file__).parents[1] / "support" / "templates"
# Of each released template: rows of an episode of three questions, and how an answer begins.
RELEASED = {
    "qwen3_5": (3, "I see {n}.\n</think>\n\n"),
    "qwen3_5_small": (3, ""),
    "qwen3_6": (3, "I see {n}.\n</think>\n\n"),
    "qwen3_8": (1, "I see {n}.\n</think>\n\n"),
}


@pytest.fixture(scope="module", params=RELEASED)
def looks(request, tiny, tmp_path_factory):
    """Episodes of three turns, with one of the templates."""
    model = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(tiny(deepstack=1, from_scratch=True), model)
    (model / "chat_template.jinja").unlink()
    shutil.copyfile(TEMPLATES / f"{request.param}.jinja", model / "chat_template.jinja")
    folder = model.parent
    picture(70, 50, 0).save(folder / "a.png")
    image = {"type": "image", "image": "a.png"}
    chats = [[say("system", "be short"), say("user", image, text("what?"))]]
    lines = [f'{{"messages": {chat!r}}}'.replace("'", '"') for chat in chats]
    (folder / "train.jsonl").write_text("\n".join(lines))
    for runner in opened(config(folder, str(model), environment=f"{TASKS}:Looks")):
        yield request.param, str(model), folder, runner


def answer_of(name: str, number: int) -> str:
    return RELEASED[name][1].format(n=number) + f"red {number}"


def play(runner: EpisodeRunner, name: str) -> tuple[list[Group], list[Row]]:
    """Play an episode of each prompt, and return what the sampler was asked."""
    asked: list[Row] = []

    async def sample(prompt: Row, settings: Any, seeds: Any) -> list[Completion]:
        asked.append(prompt)
        completions = []
        for seed in seeds:
            ids = runner.tokenizer(answer_of(name, seed % 7)).input_ids
            ids.append(runner.dialogues[0].end_id)
            log_probs = tuple(-1.0 - place / 64 for place in range(len(ids)))
            completions.append(Completion(tuple(ids), log_probs, "stop"))
        return completions

    queue = EngineQueue(SimpleNamespace(sample=sample), runner.settings)
    handles, _ = next_prompts(runner.data, Position(), 1)
    return asyncio.run(runner.play(queue, handles, step=5, first_group=0)), asked


def with_uris(messages: list[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return messages with their pictures as data URIs, as hf_encode reads them."""
    written = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list):
            parts = [uri(part, folder) if part["type"] == "image" else part for part in parts]
        written.append({**message, "content": parts})
    return written


def uri(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    image = part["image"]
    image = PIL.Image.open(folder / image) if isinstance(image, str) else image
    image.save(buffer := io.BytesIO(), format="png")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image", "image": f"data:image/png;base64,{data}"}


def test_a_new_row_begins_where_the_template_rewrites(looks):
    name, model, folder, runner = looks
    count, _ = RELEASED[name]
    groups, asked = play(runner, name)
    processor, end_id = hf_processor(model), runner.dialogues[0].end_id
    [record] = records(folder)
    for episode in groups[0].episodes:
        assert len(episode.segments) == count and len(episode.answers) == 3
        chat, environment = prompt_of(record), Looks()
        environment.reset({})
        for turn, answer in enumerate(episode.answers):
            messages = {"messages": with_uris(chat, folder)}
            shown = hf_encode(processor, messages, add_generation_prompt=True)
            drawn = [*runner.tokenizer(answer).input_ids, end_id]
            ids = [*shown["input_ids"][0].tolist(), *drawn]
            segment = episode.segments[min(turn, count - 1)]
            assert segment.ids[: len(ids)] == ids
            log_probs = segment.log_probs[len(ids) - len(drawn) : len(ids)]
            assert log_probs == [-1.0 - place / 64 for place in range(len(drawn))]
            if count > 1:
                assert len(segment.ids) == len(ids) and segment.drawn == len(drawn)
                grids = torch.cat([each.image_grid_I3 for each in segment.pictures])
                assert grids.equal(shown["image_grid_thw"])
            thoughts, _, words = answer.rpartition("\n</think>\n\n")
            said = think(thoughts, words) if thoughts else say("assistant", words)
            chat = [*chat, said, *environment.step(answer).messages]
    # The sampler has seen what the rows have.
    seen = [row.ids_S.tolist() for row in asked]
    for episode in groups[0].episodes:
        for segment in episode.segments:
            first = next(n for n, each in enumerate(segment.log_probs) if each is not None)
            assert segment.ids[:first] in seen


LOSSES = [loss for loss in get_args(PolicyLoss) if loss != "gspo"]  # gspo's ratio is that of a row
CASES = {
    f"{loss}, {aggregate}": RlConfig(
        loss=loss,
        aggregate=aggregate,
        # A reference is a model of its own, so that one case has it.
        kl_coef=0.1 if (loss, aggregate) == ("ppo", "sequences") else None,
        reward="a.py:b",
        max_new_tokens=40,
    )
    for loss in LOSSES
    for aggregate in ("tokens", "sequences", "constant")
}


def groups_of(rows: list[Row], is_divided: bool) -> list[Group]:
    """Return groups of two episodes, each as one row, or with a row for the first half of what was
    drawn and one for the rest."""
    groups = []
    for place in range(0, len(rows), 2):
        episodes = []
        for number, row in enumerate(rows[place : place + 2], start=place):
            drawn = (row.labels_S != IGNORE).tolist()
            places = [n for n, is_drawn in enumerate(drawn) if is_drawn]
            middle = places[len(places) // 2]
            ids, log_probs = row.ids_S.tolist(), [-2.0 if each else None for each in drawn]
            after = [None] * (len(ids) - middle)
            first = Segment(ids, log_probs[:middle] + after, [row])
            last = Segment(ids, [None] * middle + log_probs[middle:], [row])
            is_long = is_divided and len(places) > 1
            segments = [first, last] if is_long else [Segment(ids, log_probs, [row])]
            episode = Episode(number, place, number - place, f"row {number}", {}, shown=[row])
            episode.segments, episode.reward = segments, float(number % 3)
            episodes.append(episode)
        groups.append(Group("?", episodes))
    return groups


def updates(path: str, case: Case, cfgs: Mapping[str, RlConfig], rows: list[Row]) -> Any:
    """Return loss, means and gradients of each configuration, with whole and divided episodes."""
    worker = MegatronWorker(case.config(path))
    work = WorkModel.from_sizes(worker.source.sizes)
    results = {}
    for name, rl in cfgs.items():
        for is_divided in (False, True):
            worker.cfg = cfg = replace(worker.cfg, rl=rl)
            groups = groups_of(rows, is_divided)
            batch = make_train_batch(groups, cfg, work, worker.grid.dp.size)
            updater = PolicyUpdater(worker)
            local_rows = updater.local_rows(batch)
            values = updater.values(batch, local_rows)
            metrics = updater.gradients(batch.updates[0], local_rows, values)
            results[name, is_divided] = len(batch.rows), metrics, collect_grads(worker)
    return results


@pytest.mark.full
@pytest.mark.parametrize("case", [layout(), layout(dp=2), layout(tp=2, pp=2)], ids=str)
def test_an_episode_teaches_the_same_in_several_rows(case, pool, tiny, record_property):
    case = replace(case, train=dict(micro_batch_size=3))
    results = pool.run(updates, case.world, tiny(), case, CASES, make_rows(MIXED))[0]
    worst = 0.0
    for name in CASES:
        (count, one, grads), (more, other, others) = results[name, False], results[name, True]
        assert more > count
        assert one.num_tokens == other.num_tokens
        worst = max(worst, abs(one.loss - other.loss), apart(grads, others))
    record_property("worst", worst)
    assert worst < 1e-6
