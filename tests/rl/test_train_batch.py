# .venv/bin/python -m pytest tests/rl/test_train_batch.py
"""What is trained on is what was seen and said: an episode's row is that of the whole conversation,
as the chat template and the image processor make it, with only what was drawn supervised."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch

from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RlConfig,
    TeacherConfig,
    TrainConfig,
)
from megatron_vlm.config.teachers import SELF
from megatron_vlm.data.batches.balance import RowSize
from megatron_vlm.data.batches.collate import collate
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import IGNORE, Row, place_row
from megatron_vlm.engines.own import AskedPrompt, OwnEngine
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode import Group
from megatron_vlm.rl.episode_runner import EpisodeRunner, seed_of
from megatron_vlm.rl.policy_update import within_limit
from megatron_vlm.rl.rollouts import next_prompts
from megatron_vlm.rl.teacher_engines import check_ids_of_teacher
from megatron_vlm.rl.train_batch import (
    TrainBatch,
    TrainRow,
    _size,
    is_drawn,
    make_train_batch,
    of_teacher,
    train_batch_from_bytes,
    train_batch_to_bytes,
)
from megatron_vlm.user_code.pool import RewardPool, RewardSettings
from tests.support.chats import picture, say, text
from tests.support.error_fields import raises
from tests.support.rl_tasks import Looks, closer, tool

TASKS = Path(__file__).parents[1] / "support" / "rl_tasks.py"
SAMPLES = 3
ANSWERS = ["red", "what is it?", "0 1 2", "word word", "look"]


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return tiny(deepstack=1, from_scratch=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A picture, two of odd sizes, none; the second has an answer at its end, which is no part of
    the prompt."""
    folder = tmp_path_factory.mktemp("asks")
    picture(70, 50, 0).save(folder / "a.png")
    picture(33, 120, 1).save(folder / "b.png")
    a, b = ({"type": "image", "image": f"{name}.png"} for name in "ab")
    chats = [
        [say("system", "be short"), say("user", a, text("what?"))],
        [say("user", a, text("and"), b), say("assistant", "the right answer")],
        [say("user", "word?"), say("assistant", "red"), say("user", "0?")],
    ]
    lines = [json.dumps({"messages": chat, "solution": place}) for place, chat in enumerate(chats)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def config(folder: Path, model: str, **rl) -> Config:
    data = DataConfig(
        train=parse_sources(str(folder / "train.jsonl"), "data.train"),
        ignore_keys=("solution",),
        cache_dir=None,
        num_workers=0,
        shuffle=False,
    )
    given = {"samples": SAMPLES, "processes": 1, "max_new_tokens": 40, **rl}
    train = TrainConfig(global_batch_size=3, micro_batch_size=2)
    return Config(model=ModelConfig(model), data=data, train=train, rl=RlConfig(**given))


def table_of(cfg: Config) -> EpisodeRunner:
    data = open_data(
        cfg.data.train,
        "data.train",
        cfg.data,
        cfg.model.path,
        read_sizes(cfg.model.path),
        kind="prompt",
    )
    assert isinstance(data, DataSet)
    views = None if cfg.teacher.view is None else RewardPool(RewardSettings.of_view(cfg, 1))
    return EpisodeRunner(cfg, data, RewardPool(RewardSettings.from_config(cfg.rl, 1)), views)


def opened(cfg: Config) -> Iterator[EpisodeRunner]:
    episode_runner = table_of(cfg)
    yield episode_runner
    for pool in (episode_runner.reward_pool, episode_runner.views):
        if pool is not None:
            pool.close()


@pytest.fixture(scope="module")
def letters(folder, model) -> Iterator[EpisodeRunner]:
    """Episodes of one answer, with a reward."""
    yield from opened(config(folder, model, reward=f"{TASKS}:letters"))


@pytest.fixture(scope="module")
def looks(folder, model) -> Iterator[EpisodeRunner]:
    """Episodes of three turns, with an environment."""
    yield from opened(config(folder, model, environment=f"{TASKS}:Looks"))


def train_batch_of(episode_runner: EpisodeRunner, groups: list[Group], dp: int) -> TrainBatch:
    return make_train_batch(groups, episode_runner.cfg, episode_runner.data.work, dp)


def completion(episode_runner: EpisodeRunner, seed: int, ended: str = "stop") -> Completion:
    """An answer that depends on its seed, with log-probs that say where they belong."""
    ids = episode_runner.tokenizer(ANSWERS[seed % len(ANSWERS)]).input_ids
    ids += [episode_runner.dialogues[0].end_id] * (ended == "stop")
    return Completion(tuple(ids), tuple(-1.0 - place / 64 for place in range(len(ids))), ended)


def with_view(cfg: Config, name: str) -> Config:
    return replace(cfg, teacher=TeacherConfig(SELF, view=f"{TASKS}:{name}"))


def play(episode_runner: EpisodeRunner, ended: str = "stop", sharers: int = SAMPLES) -> list[Group]:
    """Answered by a sampler that says what its seeds say. `sharers`: episodes with one opening."""

    async def sample(prompt: Row, settings, seeds):
        asked.append((prompt, seeds))
        return [completion(episode_runner, seed, ended) for seed in seeds]

    asked: list = []
    queue = CompletionQueue(SimpleNamespace(sample=sample), episode_runner.settings)
    handles, _ = next_prompts(episode_runner.data, Position(), 3)
    groups = asyncio.run(episode_runner.play(queue, handles, step=5, first_group=0))
    # The first answers to a prompt are asked for at once, the others one by one.
    assert [len(seeds) for _, seeds in asked[:3]] == [sharers] * 3
    return groups


def whole(folder: Path, model: str, chat: list[dict]) -> Row:
    maker = RowMaker(model, image_root=str(folder), ignore_keys=("solution",))
    return maker.row({"messages": chat})


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def prompt_of(record: dict) -> list[dict]:
    chat = record["messages"]
    return chat[:-1] if chat[-1]["role"] == "assistant" else chat


def same_pictures(one: Row, other: Row) -> bool:
    for name in ("pixel_values_PC", "image_grid_I3"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if (mine is None) != (theirs is None) or (mine is not None and not mine.equal(theirs)):
            return False
    return True


def test_a_row_of_one_answer_is_that_of_the_chat(folder, model, letters):
    train_batch = train_batch_of(letters, play(letters), 1)
    for number, each in enumerate(train_batch.rows):
        record = records(folder)[number // SAMPLES]
        answer = letters.text(each.row.ids_S[each.row.labels_S != IGNORE].tolist())
        expected = whole(folder, model, [*prompt_of(record), say("assistant", answer)])
        # The template ends a turn with a line break, which nobody draws.
        count = len(each.row.ids_S)
        assert each.row.ids_S.equal(expected.ids_S[:count]) and count == len(expected.ids_S) - 1
        last = len(expected.labels_S[:count]) - int((each.row.labels_S != IGNORE).sum())
        assert each.row.labels_S[last:].equal(expected.ids_S[last:count])
        assert (each.row.labels_S[:last] == IGNORE).all()
        assert same_pictures(each.row, expected)


@pytest.mark.parametrize("ended", ["stop", "length"])
def test_a_row_of_several_turns_is_that_of_the_conversation(folder, model, looks, ended):
    """Also where answers were cut off: what should have ended them is there, and not trained."""
    groups = play(looks, ended)
    train_batch = train_batch_from_bytes(train_batch_to_bytes(train_batch_of(looks, groups, 1)))
    episodes = [each for group in groups for each in group.episodes]
    for episode, each in zip(episodes, train_batch.rows, strict=True):
        chat, environment = prompt_of(records(folder)[episode.group]), Looks()
        environment.reset({})
        rewards = []
        for answer in episode.answers:
            told = environment.step(answer)
            rewards.append(told.reward)
            chat = [*chat, say("assistant", answer), *told.messages]
        assert len(episode.answers) == 3 and episode.reward == sum(rewards)
        expected, count = whole(folder, model, chat), len(each.row.ids_S)
        assert each.row.ids_S.equal(expected.ids_S[:count])
        assert count == len(expected.ids_S) - (1 if ended == "stop" else 2)
        assert same_pictures(each.row, expected)
        # What is supervised are the answers, with their ends where those were drawn.
        drawn_S = each.row.labels_S != IGNORE
        ids = [looks.tokenizer(answer).input_ids for answer in episode.answers]
        ends = [looks.dialogues[0].end_id] * (ended == "stop")
        assert each.row.labels_S[drawn_S].tolist() == [i for own in ids for i in [*own, *ends]]
        log_probs = [-1.0 - place / 64 for own in ids for place in range(len(own) + len(ends))]
        assert each.sampler_log_probs_N.tolist() == log_probs


def test_an_episode_ends_before_it_outgrows_its_limit(looks):
    """A third turn would pass 100 tokens with the answer that it asks for."""
    rl = replace(looks.cfg.rl, max_tokens=100)
    groups = play(replace(looks, cfg=replace(looks.cfg, rl=rl)))
    episodes = [each for group in groups for each in group.episodes]
    assert {len(each.answers) for each in episodes} == {1, 2} and all(e.cut for e in episodes)
    assert all(len(each.segments[0].ids) <= 100 for each in episodes)


def test_people_are_shown_what_was_said_without_the_template(looks):
    groups = play(looks)
    assert [group.question for group in groups] == [
        "system: be short\nuser: what?",
        "and",
        "user: word?\nassistant: red\nuser: 0?",
    ]
    assert [looks.words(row) for row in groups[0].episodes[0].shown[1:]] == [
        "look again 1",
        "look again 2",
    ]


def test_pictures_travel_once(letters):
    """Eight answers to a picture are not eight pictures on the way."""
    train_batch = train_batch_of(letters, play(letters), 2)
    pixels = [each.row.pixel_values_PC for each in train_batch.rows]
    bytes_once = sum(p.nbytes for p in {id(p): p for p in pixels if p is not None}.values())
    assert bytes_once < len(train_batch_to_bytes(train_batch)) < 1.5 * bytes_once
    again = train_batch_from_bytes(train_batch_to_bytes(train_batch))
    assert again.updates == train_batch.updates
    for one, other in zip(again.rows, train_batch.rows, strict=True):
        assert one.row.ids_S.equal(other.row.ids_S) and same_pictures(one.row, other.row)
        assert (one.advantage, one.weight) == (other.advantage, other.weight)


def test_a_teacher_sees_its_view_before_what_was_drawn(folder, model):
    """Each record has a view of its own, or none. The drawn tokens are not those that their text
    would have, and travel as they are."""
    cfg = with_view(config(folder, model, reward=f"{TASKS}:letters"), "closer")
    for runner in opened(cfg):
        groups = play(runner)
        episodes = [each for group in groups for each in group.episodes]
        letters = [token for letter in "red" for token in runner.tokenizer(letter).input_ids]
        for episode in episodes:
            [segment] = episode.segments
            start = len(segment.ids) - segment.drawn
            segment.ids[start:] = letters
            segment.log_probs[start:] = [-1.0] * len(letters)
        train_batch = train_batch_from_bytes(
            data := train_batch_to_bytes(train_batch_of(runner, groups, 2))
        )
        for episode, each in zip(episodes, train_batch.rows, strict=True):
            [*_, record] = records(folder)[: episode.group + 1]
            seen = of_teacher(each)
            assert seen.labels_S[is_drawn(seen)].tolist() == letters
            if (view := closer(record)) is None:
                assert each.teacher == -1 and seen is each.row and record["solution"] == 2
                continue
            expected = whole(folder, model, [*view, say("assistant", "red")])
            opening = expected.ids_S[: len(seen.ids_S) - len(letters)].tolist()
            assert seen.ids_S.tolist() == opening + letters and each.teacher == 0
            assert opening[-1] != letters[0] and same_pictures(seen, expected)
        views = {id(p): p for each in train_batch.rows if (p := each.teacher_prompt) is not None}
        pixels = {id(each.pixel_values_PC): each.pixel_values_PC for each in views.values()}
        assert len(pixels) == 2 and sum(each.nbytes for each in pixels.values()) < len(data)


def test_a_micro_batch_of_longer_views_is_divided():
    """One that is within the limit, and one without a limit, stay in their order."""
    lengths = [9, 4, 31, 8, 30]
    rows = {n: Row(torch.zeros(length), torch.zeros(length)) for n, length in enumerate(lengths)}
    numbers = list(rows)
    assert within_limit(numbers, rows, None) == within_limit(numbers, rows, 155) == [numbers]
    assert within_limit(numbers, rows, 62) == [[1, 3], [0], [4, 2]]
    assert within_limit(numbers, rows, 30) == [[1, 3], [0], [4], [2]]


WRONG_VIEWS = {
    "failing": dict(key="teacher.view", problem_has="raised ValueError: no such crop at "),
    "answered": dict(key="teacher.view", problem_has="ends with an answer"),
    "unread": dict(problem_has="missing.png"),
    "long": dict(key="data.max_tokens", found=200),
}


@pytest.mark.parametrize("name", WRONG_VIEWS)
def test_a_wrong_view_is_refused_before_anything_is_drawn(folder, model, name):
    cfg = with_view(config(folder, model, reward=f"{TASKS}:letters"), name)
    cfg = replace(cfg, data=replace(cfg.data, max_tokens=200, truncation="image_safe"))
    for runner in opened(cfg):
        with raises(DataError, **WRONG_VIEWS[name]) as raised:
            play(runner)
        assert f"{folder / 'train.jsonl'}" in raised.value.place


@dataclass
class Here:
    """Ranks that answer each round at once, with its seeds."""

    rounds: list[list[tuple[int, list[int]]]] = field(default_factory=list)

    def draw_soon(self, asked: Sequence[AskedPrompt]) -> "Future[Any]":
        self.rounds.append([(int(each.prompt.ids_S), [*each.seeds]) for each in asked])
        drawn: Future[Any] = Future()
        drawn.set_result([[*each.seeds] for each in asked])
        return drawn


def test_what_is_asked_together_does_not_depend_on_how_long_rewards_take():
    """Nobody is answered before all wait, and the order is that of the seeds."""

    async def main():
        ranks = Here()
        engine = OwnEngine(ranks.draw_soon)
        queue = CompletionQueue(engine, SamplingSettings(4), engine.capacity.in_rounds)
        first, second = (Row(torch.tensor([n]), torch.tensor([IGNORE])) for n in (1, 2))

        def ask(row: Row, *seeds: int) -> list[Any]:
            asking = [queue.ask(row, seed, len(seeds), seed) for seed in seeds]
            return [asyncio.create_task(each) for each in asking]

        queue.playing = 4
        asked = [*ask(first, 7, 6), *ask(second, 3)]
        await settled()
        assert ranks.rounds == []
        await queue.leave(0)  # the fourth has ended without a question
        assert ranks.rounds == [[(2, [3]), (1, [6, 7])]]
        assert await asyncio.gather(*asked) == [7, 6, 3]
        again = ask(second, 5)
        await settled()
        await queue.leave(0)
        assert len(ranks.rounds) == 1
        again += ask(first, 4)
        assert await asyncio.gather(*again) == [5, 4]
        assert ranks.rounds[1:] == [[(1, [4]), (2, [5])]]
        await queue.leave(0)
        await queue.leave(0)
        queue.playing += 2  # others begin, and only one waits
        ask(first, 9)
        await settled()
        assert len(ranks.rounds) == 2

    asyncio.run(main())


async def settled() -> None:
    """Let every task go as far as it gets by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_seeds_follow_each_other_only_in_the_first_turn():
    episodes = [SimpleNamespace(group=3, place=place) for place in range(4)]
    first = [seed_of(0, 1, each, 0) for each in episodes]
    assert first == list(range(first[0], first[0] + 4)) and max(first) < 2**62
    others = {
        seed_of(seed, step, episodes[1], turn)
        for seed in (0, 1)
        for step in (1, 2)
        for turn in (0, 1)
    }
    later = {seed_of(0, 1, each, 1) for each in episodes}
    assert len(others) == 8 and len(later) == 4


def test_pictures_of_an_environment_may_be_of_any_kind(folder, looks):
    image = PIL.Image.new("RGB", (64, 64), (10, 20, 30))
    image.save(folder / "own.png")
    rows = [
        looks.dialogues[0].reply([say("user", {"type": "image", "image": given})], "record 1")[0]
        for given in (image, (folder / "own.png").read_bytes(), "own.png")
    ]
    assert all(same_pictures(rows[0], row) and row.ids_S.equal(rows[0].ids_S) for row in rows)


def test_an_environment_gives_tools_and_new_conversations(folder, model):
    """Other tools are shown from the beginning, and a new conversation has no picture of before."""
    image = {"type": "image", "image": PIL.Image.new("RGB", (64, 64))}
    maker = RowMaker(model)
    for runner in opened(config(folder, model, environment=f"{TASKS}:Tools")):
        groups = play(runner, sharers=1)
    for episode in (each for group in groups for each in group.episodes):
        said = [say("assistant", each) for each in episode.answers]
        chat = [say("user", "look"), said[0], say("user", "again"), said[1]]
        more = [*chat, say("user", image), said[2]]
        short = [say("user", "in short"), say("assistant", "black"), say("user", "so"), said[3]]
        shown = [(chat, ["look"]), (more, ["look", "crop"]), (short, ["look", "crop"])]
        for segment, (messages, names) in zip(episode.segments, shown, strict=True):
            tools = [tool(name) for name in names]
            row = maker.row({"messages": messages, "tools": tools})
            assert segment.ids == row.ids_S[: len(segment.ids)].tolist()
            assert len(row.ids_S) - len(segment.ids) <= 1
        assert [len(each.pictures) for each in episode.segments] == [2, 3, 1]
        assert episode.reward == 4.5 and episode.figures == {"begun": 1}


def test_prompts_have_a_cache_of_their_own(folder, model, tmp_path):
    """What training has encoded of the same file is no prompt."""
    cfg = config(folder, model, reward=f"{TASKS}:letters")
    data = replace(cfg.data, cache_dir=str(tmp_path))
    sizes, found = read_sizes(model), {}
    for prompts_only in (True, False, True):
        kind = "prompt" if prompts_only else "chat"
        opened = open_data(data.train, "data.train", data, model, sizes, kind=kind)
        assert isinstance(opened, DataSet)
        found[prompts_only] = [len(opened.indexes[0]), int(opened.indexes[0].supervised.sum())]
    assert found[True] == [3, 0]
    assert found[False][0] == 2 and found[False][1] > 0  # two records have an answer


def test_updates_divide_the_prompts(letters):
    """Each prompt is learnt from once, with all of its answers in one update."""
    cfg = replace(letters.cfg, rl=replace(letters.cfg.rl, updates=2))
    train_batch = train_batch_of(replace(letters, cfg=cfg), play(letters), 2)
    rows = [
        sorted(n for share in update.plan for b in share for n in b)
        for update in train_batch.updates
    ]
    assert rows == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]

    assert [update.figures.samples for update in train_batch.updates] == [6, 3]


def test_answers_to_a_prompt_share_a_micro_batch_and_its_pictures(letters):
    """Three answers to a prompt, in micro-batches of two: two of them are kept together."""
    [update] = (batch := train_batch_of(letters, play(letters), 1)).updates
    pixels = [each.row.pixel_values_PC for each in batch.rows]
    groups = [group for share in update.plan for group in share]
    assert sorted(row for group in groups for row in group) == list(range(9))
    for first in (0, 3):
        pairs = [group for group in groups if pixels[group[0]] is pixels[first]]
        assert 2 in {sum(pixels[row] is pixels[first] for row in group) for group in pairs}
    assert update.figures.patches == 3 * (len(pixels[0]) + len(pixels[3]))
    assert update.figures.shared_patches == len(pixels[0]) + len(pixels[3])
    work = letters.data.work
    once = sum(_size(batch.rows[row].row, work).visuals[0].cost for row in (0, 3))
    whole = sum(_size(each.row, work).cost for each in batch.rows)
    assert update.figures.work == pytest.approx(whole - once) and once > 0.05 * whole


def test_turns_share_the_pictures_that_came_before_them(looks):
    """Each episode has pictures of its own after those of the prompt, and all travel once."""
    groups = play(looks)
    shown = [row for group in groups for each in group.episodes for row in each.shown]
    bytes_once = sum({id(r): r.pixel_values_PC.nbytes for r in shown if r.has_media}.values())
    sent = train_batch_to_bytes(train_batch_of(looks, groups, 1))
    assert bytes_once < len(sent) < 1.5 * bytes_once
    batch = train_batch_from_bytes(sent)
    tokens = looks.data.readers[0].tokens
    placed = [place_row(each.row, tokens, "row") for each in batch.rows[:SAMPLES]]
    first = groups[0].episodes[0].shown[0]
    own = [row for each in groups[0].episodes for row in each.shown[1:]]
    found = collate(placed, range(SAMPLES))
    assert found.image_grid_I3.tolist() == [
        *first.image_grid_I3.tolist(),
        *[grid for row in own for grid in row.image_grid_I3.tolist()],
    ]
    assert found.pixel_values_PC.equal(torch.cat([r.pixel_values_PC for r in (first, *own)]))
    assert found.visual_of_O.tolist() == [0, 1, 2, 0, 3, 4, 0, 5, 6]
    sizes = [_size(each.row, looks.data.work) for each in batch.rows[:SAMPLES]]
    assert [len(size.visuals) for size in sizes] == [3] * SAMPLES
    together = RowSize.of_rows(sizes)
    assert together.patches == len(found.pixel_values_PC)
    # Pixels that replace those of a row are shown, and not the parts that it had.
    grey = replace(placed[0], pixel_values_PC=torch.zeros_like(placed[0].pixel_values_PC))
    assert not collate([place_row(grey, tokens, "row")], [0]).pixel_values_PC.any()


def test_ids_that_a_teacher_has_no_row_for_are_refused():
    ids_S = torch.tensor([1, 7, 2])
    row = TrainRow(Row(ids_S, ids_S), torch.zeros(3), advantage=1.0, weight=1.0, teacher=1)
    batch = TrainBatch([row], [])
    check_ids_of_teacher(batch, 1, 8, "a teacher")
    check_ids_of_teacher(batch, 0, 7, "a teacher of other rows")
    with raises(DataError, key="tokens", found=7, allowed=range(7)):
        check_ids_of_teacher(batch, 1, 7, "a teacher")
