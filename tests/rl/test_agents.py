# .venv/bin/python -m pytest tests/rl/test_agents.py
"""Agents that own their loop: what is learnt is what was drawn for their requests, with the
pictures that they have sent, and a program that fails costs its episode alone."""

import asyncio
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vlm.config import load_config
from megatron_vlm.data.batches.dataset import open_data
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import IGNORE, Row, parts_of
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.agent_requests import AgentEpisode
from megatron_vlm.rl.agent_server import AgentServer
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode import Episode, Group, Segment
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.rollouts import next_prompts
from megatron_vlm.rl.seen import hidden_view
from megatron_vlm.rl.train_batch import is_drawn, make_train_batch
from megatron_vlm.serve.chat_texts import TokenizerTexts
from megatron_vlm.serve.sample_calls import SampleAsk
from megatron_vlm.user_code.pool import RewardPool, RewardSettings
from tests.rl.test_rl import furthest, learnt, lines, samples
from tests.rl.test_train_batch import TASKS, config
from tests.support import agent_program
from tests.support.chats import picture, say, text
from tests.support.error_fields import raises
from tests.support.often_drawn import drawing_often
from tests.support.sets import write_set

PROGRAM = Path(agent_program.__file__)
ROOT = Path(__file__).parents[2]
WORDS = ["red", "what is it?", "0 1 2", "word word", "look"]


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return tiny(deepstack=1, from_scratch=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    picture(70, 50, 0).save(folder / "a.png")
    image = {"type": "image", "image": "a.png"}
    record = {"messages": [say("user", image, text("what?"))], "solution": 7}
    (folder / "train.jsonl").write_text(json.dumps(record))
    return folder


class Played:
    """Episodes of a kind of agent, and what a sampler was asked for and has drawn."""

    def __init__(
        self,
        folder: Path,
        model: str,
        kind: str,
        in_rounds: bool = False,
        words: Callable[[str, int], str] = lambda asked, seed: WORDS[seed % 5],
        is_split: bool = False,
        end: str | None = None,
        **rl: Any,
    ):
        """`words`: the answer to a prompt with this text, by its seed. `is_split`: it has a token
        for each character. `end`: the token that ends it, if it is not the usual one."""
        given = {"agent": f"{sys.executable} {PROGRAM} {kind}", "samples": 2, "max_new_tokens": 99}
        cfg = config(folder, model, **given | rl)
        self.words, self.is_split, self.end = words, is_split, end
        self.most = 0  # episodes at a time
        self.asked: list[tuple[Row, int, Completion]] = []
        with runner_of(cfg) as self.runner:
            self.groups = asyncio.run(self._play(in_rounds))
        self.rows = make_train_batch(self.groups, cfg, self.runner.data.work, 1).rows

    async def _play(self, in_rounds: bool) -> list[Group]:
        runner, loop = self.runner, asyncio.get_running_loop()

        async def sample(prompt: Row, settings: Any, seeds: Any) -> list[Completion]:
            assert settings.max_tokens <= 99 and settings.temperature == 1
            assert runner.agents is not None
            self.most = max(self.most, len(runner.agents.requests.open))
            drawn, asked = [], runner.tokenizer.decode(prompt.ids_S)
            for seed in seeds:
                said = self.words(asked, seed)
                parts = list(said) if self.is_split else [said]
                ids = [token for part in parts for token in runner.tokenizer(part).input_ids]
                usual = runner.dialogues[0].end_id
                ids.append(runner.tokenizer.vocab[self.end] if self.end else usual)
                log_probs = tuple(-1.0 - (seed + place) % 64 / 64 for place in range(len(ids)))
                drawn.append(Completion(tuple(ids), log_probs, "stop", ((0, len(ids)),)))
                self.asked.append((prompt, seed, drawn[-1]))
            return drawn

        sizes = read_sizes(runner.cfg.model.path)
        runner.agents = await asyncio.to_thread(AgentServer, runner.cfg, sizes, 9, loop)
        queue = CompletionQueue(SimpleNamespace(sample=sample), runner.settings, in_rounds)
        handles, _ = next_prompts(runner.data, Position(), 1)
        try:
            return await runner.play(queue, handles, step=5, first_group=0)
        finally:
            await asyncio.to_thread(runner.agents.close)

    @property
    def episodes(self) -> list[Any]:
        return self.groups[0].episodes

    def answers_of(self, segment: Segment) -> list[tuple[Row, int, Completion]]:
        """Return the draws that a segment has, and check that it has them as they were drawn."""
        found = [
            each
            for each in self.asked
            if segment.ids[: len(each[0].ids_S)] == each[0].ids_S.tolist()
            and segment.ids[len(each[0].ids_S) :][: len(each[2].ids)] == [*each[2].ids]
            and segment.log_probs[len(each[0].ids_S) :][: len(each[2].ids)] == [*each[2].log_probs]
        ]
        assert sum(len(drawn.ids) for _, _, drawn in found) == segment.drawn
        return found


@contextmanager
def runner_of(cfg: Any) -> Iterator[EpisodeRunner]:
    sizes = read_sizes(cfg.model.path)
    given = cfg.data.train, "data.train", cfg.data, cfg.model.path, sizes
    data = open_data(*given, kind="prompt")
    with closing(RewardPool(RewardSettings.from_config(cfg.rl, 1))) as pool:
        yield EpisodeRunner(cfg, data, pool)


@pytest.mark.parametrize("in_rounds", [False, True])
def test_what_is_learnt_is_what_was_drawn(folder, model, in_rounds):
    """An episode of two turns is one row: the whole conversation as the template shows it, with the
    pictures of both turns, and with the tokens and log-probs of the engine."""
    played = Played(folder, model, "two_turns", in_rounds)
    record = json.loads((folder / "train.jsonl").read_text())
    maker = RowMaker(model, image_root=str(folder), ignore_keys=("solution",))
    for episode, row in zip(played.episodes, played.rows, strict=True):
        [segment] = episode.segments
        assert len(played.answers_of(segment)) == 2 and episode.figures == {"turns": 2}
        assert episode.reward == len(episode.answers[1]) % 5
        again = {"type": "image", "image": agent_program.grey(99)["image_url"]["url"]}
        first, second = (say("assistant", each) for each in episode.answers)
        chat = [*record["messages"], first, say("user", again, text("again?")), second]
        whole = maker.row({"messages": chat})
        length = len(row.row.ids_S)
        assert row.row.ids_S.equal(whole.ids_S[:length]) and length >= len(whole.ids_S) - 1
        assert row.row.labels_S[is_drawn(row.row)].equal(whole.labels_S[whole.labels_S >= 0])
        assert row.row.image_grid_I3.equal(whole.image_grid_I3)
        assert row.row.pixel_values_PC.equal(whole.pixel_values_PC)
        assert len(parts_of(row.row, "pixel_values_PC")) == 2
        hidden = hidden_view(played.runner.cfg, 5)(row).pixel_values_PC  # for rl.seen
        assert (hidden != row.row.pixel_values_PC).any(1).all()
    # Episodes of a prompt share its picture.
    one, other = (parts_of(each.row, "pixel_values_PC") for each in played.rows)
    assert all(a is b for a, b in zip(one[0], other[0], strict=True))


def test_a_rewritten_conversation_is_another_segment(folder, model):
    played = Played(folder, model, "compaction")
    for episode in played.episodes:
        whole, short = episode.segments
        assert [len(played.answers_of(each)) for each in (whole, short)] == [2, 1]
        assert episode.reward == 2 and len(episode.answers) == 3
        first, other = (parts_of(each.row, "pixel_values_PC") for each in played.rows[:2])
        assert len(first) == len(other) == 1 and not first[0][0].equal(other[0][0])


def test_requests_side_by_side_are_segments_of_their_own(folder, model):
    """One of them is continued: the answers to the same request have seeds of their own."""
    played = Played(folder, model, "parallel")
    for episode in played.episodes:
        draws = [played.answers_of(each) for each in episode.segments]
        assert sorted(map(len, draws)) == [1, 2]
    assert len({seed for _, seed, _ in played.asked}) == 6


CALL = '<tool_call>\n{"name":"look",  "arguments":{"x":1}}\n</tool_call>'
# Answers that the chat template shows in other tokens or ends in another way, or that are empty.
SENT_BACK = {
    "other tokens": ("what is the word?", True, None),
    "a break first": ("\n\nred word", False, None),
    "nothing": ("", False, None),
    "other spaces": (f"I look. {CALL}", False, None),
    "a call alone": (CALL, True, None),
    "another end": ("red word", False, "<|endoftext|>"),
}


@pytest.mark.parametrize("drawn", SENT_BACK)
def test_an_answer_that_comes_back_has_the_tokens_that_were_drawn(folder, model, drawn):
    said, is_split, end = SENT_BACK[drawn]
    words = lambda asked, seed: said  # noqa: E731
    given: dict[str, Any] = {"words": words, "is_split": is_split, "end": end}
    played = Played(folder, model, "sends_back", **given)
    for episode in played.episodes:
        [segment] = episode.segments
        assert len(played.answers_of(segment)) == 2 and episode.reward == 1
        assert episode.answers == [said, said]
        assert '"name": "look"' in played.runner.words(episode.shown[1])  # the page shows tools


@pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>"])
def test_an_answer_keeps_the_end_token_that_was_drawn(tiny, end):
    """The chat template ends this answer with <turn|>. An answer at the end is continued."""
    path, variables = tiny(family="gemma4"), {"enable_thinking": True}
    texts = TokenizerTexts(load_config([f"model.path={path}"]), read_sizes(path), 10**6)
    chat = [say("user", "what?"), say("assistant", "red word"), say("user", "and?")]
    first = texts.prompt(chat[:1], [], variables).ids
    answer = [*texts.encode("red word"), texts.tokenizer.vocab[end]]
    drawn, closed = [(first, answer)], texts.encode("<turn|>" * (end != "<turn|>"))
    whole, continued = (texts.prompt(chat[:n], [], variables, drawn).ids for n in (3, 2))
    assert continued == [*first, *answer[:-1]]
    after = texts.prompt(chat, [], variables).ids[len(continued) + 1 :]
    assert whole == [*first, *answer, *closed, *after]


def test_an_answer_that_was_changed_is_rendered(folder, model):
    given: dict[str, Any] = {"words": lambda asked, seed: "word word", "is_split": True}
    played = Played(folder, model, "changes", **given)
    record = json.loads((folder / "train.jsonl").read_text())
    maker = RowMaker(model, image_root=str(folder), ignore_keys=("solution",))
    chat = [*record["messages"], say("assistant", "word word!"), say("user", text("and?"))]
    shown = maker.row({"messages": chat}, prompt=True).ids_S.tolist()
    for episode in played.episodes:
        _, changed = episode.segments
        assert changed.ids[: changed.prompt_length] == shown


def test_many_episodes_have_many_requests(folder, model):
    """All 64 wait for the first round together, each with one of its sub-agents or more."""
    played = Played(folder, model, "sub_agents", in_rounds=True, samples=64)
    assert played.most == 64 and len(played.asked) == 4 * 64
    drawn = [
        (each.ids_S.tolist(), [*said.ids], [*said.log_probs]) for each, _, said in played.asked
    ]
    learnt = [
        (each.ids[: each.prompt_length], each.ids[each.prompt_length :], each.log_probs)
        for episode in played.episodes
        for each in episode.segments
    ]
    learnt = [(ids, said, known[len(ids) :]) for ids, said, known in learnt]
    assert sorted(learnt) == sorted(drawn)
    for episode in played.episodes:
        greys = (int(each.pictures[0].pixel_values_PC.min()) for each in episode.segments)
        assert sorted(greys) == [0, 0, 1, 2] and episode.reward == 1
    app = played.runner.agents.server._server.config.app
    assert not app.state.chats.prompts._turns  # nothing is left of the episodes


@pytest.mark.parametrize("in_rounds", [False, True])
def test_episodes_wait_for_a_place(folder, model, in_rounds):
    played = Played(folder, model, "two_turns", in_rounds, samples=5, max_concurrent=2)
    assert played.most == 2 and [len(each.answers) for each in played.episodes] == [2] * 5


def test_a_child_that_outlives_its_episode_is_refused(folder, model, tmp_path):
    played = Played(folder, model, f"outlives {tmp_path / 'status'}", max_concurrent=1)
    assert [each.reward for each in played.episodes] == [0, 410]


def test_a_program_sees_its_own_address_alone(folder, model, monkeypatch, tmp_path):
    """Neither other addresses, nor secrets, nor paths in its record and in what it is told."""
    monkeypatch.setenv("SECRET", "hidden words")
    played = Played(folder, model, f"spies {tmp_path / 'told'}", turns=32)
    assert [each.reward for each in played.episodes] == [1, 1]
    told = (tmp_path / "told").read_text()
    for hidden in (
        str(folder),
        model,
        str(ROOT),
        str(Path.home()),
        "site-packages",
        "hidden words",
    ):
        assert hidden not in told


def test_a_crowd_of_requests_gets_the_answers_that_are_left(folder, model):
    played = Played(folder, model, "crowds", turns=3)
    assert [(each.reward, len(each.answers)) for each in played.episodes] == [(3, 3)] * 2


def test_a_failure_of_the_engine_ends_the_run(folder, model, tmp_path):
    """A program is not told of it."""

    def words(asked: str, seed: int) -> str:
        raise SamplerError("/secret/engine.log has more")

    with raises(SamplerError, problem_has="/secret/engine.log"):
        Played(folder, model, f"shows {tmp_path / 'told'}", words=words, failed_reward=-1.0)
    told = (tmp_path / "told").read_text()
    assert told.startswith("500 ") and "secret" not in told


def test_a_request_continues_the_longest_row():
    """One answer was cut where another goes on. A longer request of other tokens begins a row."""

    def row(*ids: int) -> Row:
        return Row(torch.tensor(ids), torch.full((len(ids),), IGNORE))

    episode = Episode(0, 0, 0, "here", {})
    prompts = row(3), row(3), row(3, 5, 6, 7), row(4, 5, 6, 7, 8, 9)
    for prompt, ids in zip(prompts, ((5,), (5, 6), (8,), (1,)), strict=True):
        episode.add_request(prompt, Completion(ids, (-1.0,) * len(ids), "length"), "")
    rows = [each.ids for each in episode.segments]
    assert rows == [[3, 5], [3, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9, 1]]


def test_pictures_of_tool_results_arrive(folder, model):
    played = Played(folder, model, "anthropic")
    for episode, row in zip(played.episodes, played.rows, strict=True):
        assert episode.reward == 3 and len(row.row.image_grid_I3) == 1


def test_a_reward_may_be_that_of_a_function(folder, model):
    played = Played(folder, model, "judged", reward=f"{TASKS}:letters")
    for episode in played.episodes:
        assert episode.reward == len(episode.answers[-1]) % 5 and "long" in episode.figures


def test_requests_are_refused_by_name(folder, model, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert all(each.reward == 1 for each in Played(folder, model, "refused").episodes)


# What goes wrong, in words of its message.
FAILURES = {
    "many": "ended with exit status 1",
    "exits": "ended with exit status 1: no tool today",
    "silent": "gave no reward",
    "floods": "gave as reward 'much'",
    "pictures": "has 99 pictures, and limit pictures is 9",
    "other_model": "there is no 'gpt-4o': an agent asks for policy",
    "hangs": "took longer than rl.agent_timeout=3 seconds",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_program_that_fails_costs_its_episode(folder, model, kind, capfd):
    seconds = 3.0 if kind == "hangs" else 100.0
    given: dict[str, Any] = {"failed_reward": -1.0, "turns": 3, "agent_timeout": seconds}
    played = Played(folder, model, kind, in_rounds=True, **given)
    for episode in played.episodes:
        assert episode.reward == -1 and episode.figures == {"failed": 1}
    assert FAILURES[kind] in capfd.readouterr().err
    for each in Path("/proc").glob("[0-9]*/cmdline"):  # what it has started has ended, too
        with suppress(OSError):
            assert f":{played.runner.agents.port}/e/".encode() not in each.read_bytes()
    if kind == "exits":
        with raises(DataError, place_has="train.jsonl:1", key="rl.agent", problem_has="no tool"):
            Played(folder, model, kind)


def test_a_request_that_is_repeated_is_one_draw():
    """It is, where its first connection has closed before the answer, and where it says so."""
    settings, drawn = SamplingSettings(4), list[Completion]()
    ids_S = torch.tensor([3, 4, 5])
    prompt, gate = Row(ids_S, torch.full_like(ids_S, IGNORE)), asyncio.Event()
    ask = SampleAsk(prompt, settings, 1, 0, False, 0, 0, None, np.zeros(3, dtype=bool))

    async def sample(prompt: Row, settings: Any, seeds: Any) -> list[Completion]:
        await gate.wait()
        drawn.extend(Completion((seed % 500,), (-1.0,), "stop") for seed in seeds)
        return drawn[-1:]

    async def repeat() -> list[Segment]:
        queue = CompletionQueue(SimpleNamespace(sample=sample), settings)
        seed_of = lambda name: zlib.crc32(name.encode())  # noqa: E731
        episode = Episode(0, 0, 0, "here", {})
        learn = lambda prompt, answer: episode.add_request(prompt, answer, "")  # noqa: E731
        asking = AgentEpisode(episode, queue, 8, seed_of, learn, None)
        gone = asyncio.create_task(asking.draw(ask, "name", False))
        await asyncio.sleep(0)
        gone.cancel()
        first = asyncio.create_task(asking.draw(ask, "name", False))
        await asyncio.sleep(0)
        gate.set()
        assert await first == await asking.draw(ask, "name", True) == drawn
        assert await asking.draw(ask, "name", False) == drawn[1:] != drawn[:1]
        return asking.episode.segments

    segments = asyncio.run(repeat())
    assert [each.ids for each in segments] == [[3, 4, 5, *each.ids] for each in drawn]


@pytest.mark.slow
@pytest.mark.engine("chat")
@pytest.mark.parametrize("kind", ["of_openai", "of_anthropic", "of_agents_sdk"])
def test_programs_of_others_are_agents_as_they_are(folder, model, kind):
    """They call a tool and send its result with the answer: one row, with the drawn tokens."""

    def words(asked: str, seed: int) -> str:
        return "It is red." if "<tool_response>" in asked else CALL

    program = ROOT / "tests" / "support" / "chat_clients" / "rl_agents.py"
    agent = f"env PYTHONPATH= {ROOT / '.venv-chat' / 'bin' / 'python'} {program} {kind}"
    played = Played(folder, model, kind, agent=agent, words=words, is_split=True)
    for episode, row in zip(played.episodes, played.rows, strict=True):
        [segment] = episode.segments
        assert len(played.answers_of(segment)) == 2 and episode.reward == 1
        assert len(row.row.image_grid_I3) == (1 if kind == "of_agents_sdk" else 2)


@pytest.mark.full
def test_a_run_with_an_agent_resumes_bit_for_bit(pool, folder, model, tmp_path):
    """The ranks' own decoder answers the agent in rounds."""
    write_set(tmp_path, rows=7)
    ending = drawing_often(model, tmp_path / "model", "<|im_end|>")
    more = [f"rl.agent={sys.executable} {PROGRAM} two_turns", "parallel.pp=2", "train.steps=2"]
    more += ["checkpoint.every=1", "eval.samples=2"]
    whole = learnt(pool, 2, tmp_path, ending, "whole", *more)
    learnt(pool, 2, tmp_path, ending, "resumed", *more, "train.steps=1")
    resumed = learnt(pool, 2, tmp_path, ending, "resumed", *more)
    assert furthest(whole, resumed) == 0 and samples(whole) == samples(resumed)
    for line in lines(whole, "rl"):
        assert line["rows"] == 1
        assert line["turns"] == 2 and line["figures"] == {"turns": 2} and line["seen"] is not None
    shown = [episode for line in samples(whole) for episode in line["episodes"]]
    assert all(len(heard) == 1 and heard[0]["images"] for heard in (e["heard"] for e in shown))
    assert all(line["reward"] is not None for line in lines(whole, "eval"))
