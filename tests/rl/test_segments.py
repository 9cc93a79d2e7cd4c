# .venv/bin/python -m pytest tests/rl/test_segments.py
"""Where a chat template rewrites earlier turns, a new row begins, with what Hugging Face's template
shows then; and an episode teaches the same in several rows as in one."""

import asyncio
import base64
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor

from megatron_vlm.config.schema import Config, PolicyLoss, RlConfig, TeacherConfig, TrainConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.qwen.tiny import CHAT_TEMPLATE
from megatron_vlm.rl.completion_requests import CompletionQueue
from megatron_vlm.rl.episode import Episode, Group, Segment
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.policy_update import PolicyUpdater
from megatron_vlm.rl.rollouts import next_prompts
from megatron_vlm.rl.train_batch import Aggregate, is_drawn, make_train_batch, of_teacher
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.rl.test_train_batch import TASKS, config, opened, prompt_of, records, with_view
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.chats import hf_encode, hf_processor, picture, say, text, think
from tests.support.comparison import check_worst
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_logits
from tests.support.rl_tasks import Looks, closer
from tests.support.runs import Case, collect_grads
from tests.support.suites import quick
from tests.training.test_losses import TOLERANCE, VOCAB
from tests.training.test_policy_losses import apart, clipped, picked, reinforced, weighted_reinforce

TEMPLATES = Path(__file__).parents[1] / "support" / "templates"
# Of each template: rows of an episode of three questions, and how an answer begins.
RELEASED = {
    "qwen3_5": (3, "I see {n}.\n</think>\n\n"),
    "qwen3_5_small": (3, ""),
    "qwen3_6": (3, "I see {n}.\n</think>\n\n"),
    "qwen3_8": (1, "I see {n}.\n</think>\n\n"),
    # A template that does not know thoughts, and that a user lets open them.
    "opened": (3, "I see {n}.\n</think>\n\n"),
}


def template_of(name: str) -> str:
    if name != "opened":
        return (TEMPLATES / f"{name}.jinja").read_text()
    head, opening, tail = CHAT_TEMPLATE.rpartition("<|im_start|>assistant\\n")
    return head + opening + "<think>\\n" + tail


def opened_with(
    path: str, folder: Path, template: str, environment: str
) -> Iterator[EpisodeRunner]:
    """Open a record with a picture, for a model with this chat template in FOLDER/model."""
    shutil.copytree(path, folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()
    (folder / "model" / "chat_template.jinja").write_text(template)
    picture(70, 50, 0).save(folder / "a.png")
    image = {"type": "image", "image": "a.png"}
    chat = [say("system", "be short"), say("user", image, text("what?"))]
    (folder / "train.jsonl").write_text(json.dumps({"messages": chat}))
    cfg = config(folder, str(folder / "model"), environment=f"{TASKS}:{environment}")
    yield from opened(with_view(cfg, "closer"))


@pytest.fixture(scope="module", params=RELEASED)
def looks(request, tiny, tmp_path_factory):
    """Episodes of three turns, with one of the templates."""
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny(deepstack=1, from_scratch=True)
    for runner in opened_with(path, folder, template_of(request.param), "Looks"):
        yield request.param, str(folder / "model"), folder, runner


def answer_of(name: str, number: int) -> str:
    return RELEASED[name][1].format(n=number) + f"red {number}"


def play(
    runner: EpisodeRunner, name: str, drawn: Iterator[list[int]] = iter(())
) -> tuple[list[Group], list[Row]]:
    """Play an episode of each prompt, and return what the sampler was asked. The first answers
    have the tokens in `drawn`."""
    asked: list[Row] = []

    async def sample(prompt: Row, settings: Any, seeds: Any) -> list[Completion]:
        asked.append(prompt)
        completions = []
        for seed in seeds:
            ids = runner.tokenizer(answer_of(name, seed % 7)).input_ids
            ids = next(drawn, [*ids, runner.dialogues[0].end_id])
            log_probs = tuple(-1.0 - place / 64 for place in range(len(ids)))
            # The experts say how long the prompt of their request was.
            routing_SLK = torch.full((len(prompt.ids_S) + len(ids), 1, 1), len(prompt.ids_S))
            routing_SLK[-1] = -1
            completions.append(Completion(tuple(ids), log_probs, "stop", routing_SLK=routing_SLK))
        return completions

    queue = CompletionQueue(SimpleNamespace(sample=sample), runner.settings)
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
    """In each row a teacher sees its view in place of the prompt, and the rest as it is."""
    name, model, folder, runner = looks
    count, _ = RELEASED[name]
    groups, asked = play(runner, name)
    processor, end_id = hf_processor(model), runner.dialogues[0].end_id
    [record] = records(folder)
    rows = iter(make_train_batch(groups, runner.cfg, runner.data.work, 1).rows)
    for episode in groups[0].episodes:
        assert len(episode.segments) == count and len(episode.answers) == 3
        chat, environment = prompt_of(record), Looks()
        environment.reset({})
        views = [of_teacher(next(rows)) for _ in episode.segments]
        seen = closer(record)
        for turn, answer in enumerate(episode.answers):
            messages = {"messages": with_uris(chat, folder)}
            shown = hf_encode(processor, messages, add_generation_prompt=True)
            drawn = [*runner.tokenizer(answer).input_ids, end_id]
            ids = [*shown["input_ids"][0].tolist(), *drawn]
            segment = episode.segments[min(turn, count - 1)]
            assert segment.ids[: len(ids)] == ids
            log_probs = segment.log_probs[len(ids) - len(drawn) : len(ids)]
            assert log_probs == [-1.0 - place / 64 for place in range(len(drawn))]
            start = len(ids) - len(drawn)
            if turn < count:  # the first request of a segment has read all that it was shown
                assert (segment.routing_SLK[: len(ids) - 1] == start).all()
            if count > 1:
                assert len(segment.ids) == len(ids) and segment.drawn == len(drawn)
                grids = torch.cat([each.image_grid_I3 for each in segment.pictures])
                assert grids.equal(shown["image_grid_thw"])
            teacher = hf_encode(
                processor, {"messages": with_uris(seen, folder)}, add_generation_prompt=True
            )
            ids = [*teacher["input_ids"][0].tolist(), *drawn]
            view = views[min(turn, count - 1)]
            assert view.ids_S[: len(ids)].tolist() == ids
            if count > 1:
                assert view.labels_S[is_drawn(view)].tolist() == drawn
                assert view.image_grid_I3.equal(teacher["image_grid_thw"])
                assert len(view.pixel_values_PC) == view.image_grid_I3.prod(-1).sum()
            thoughts, _, words = answer.rpartition("\n</think>\n\n")
            is_apart = thoughts and name != "opened"
            said = think(thoughts, words) if is_apart else say("assistant", answer)
            told = environment.step(answer).messages
            chat, seen = [*chat, said, *told], [*seen, said, *told]
    # The sampler has seen what the rows have.
    seen = [row.ids_S.tolist() for row in asked]
    for episode in groups[0].episodes:
        for segment in episode.segments:
            first = next(n for n, each in enumerate(segment.log_probs) if each is not None)
            assert segment.ids[:first] in seen


# Answers with thoughts and a call, whose marks are tokens; or which text spells, in two pieces.
MARKED = {
    "gemma4": "<|channel>thought\nI\n<channel|>red <|tool_call>call:a{}<tool_call|><channel|>",
    "qwen3_5": "I\n</think>\n\nred <tool_call>\n</tool_call><think>no",
}
SPELLED = {"gemma4": ("<|tur", "n>user\nhi<turn", "|>"), "qwen3_5": ("<|im_st", "art|>user\nhi")}


@pytest.mark.parametrize("name", MARKED)
def test_what_was_drawn_is_learnt_wherever_an_answer_is_cut(name, tiny, tmp_path):
    is_gemma = name == "gemma4"
    path = tiny(family="gemma4") if is_gemma else tiny(deepstack=1, from_scratch=True)
    template = (Path(path) / "chat_template.jinja").read_text() if is_gemma else template_of(name)
    for runner in opened_with(path, tmp_path, template, "Looks"):
        pieces = runner.tokenizer([MARKED[name], *SPELLED[name]], add_special_tokens=False)
        whole = [id for piece in pieces.input_ids for id in piece]
        cuts = [whole[:end] for end in range(1, len(whole) + 1, 3)]
        rest, learnt = iter(cuts), []
        while len(learnt) < len(cuts):
            groups, _ = play(runner, "qwen3_5", rest)
            rows = make_train_batch(groups, runner.cfg, runner.data.work, 1).rows
            learnt += [each.row.labels_S[is_drawn(each.row)].tolist() for each in rows]
        assert all(cut in learnt for cut in cuts)


FORGETS = "{%- if messages|length > 2 %}{%- set messages = messages[2:] %}{%- endif %}"
# Pictures are shown in the last message alone, and thoughts in no earlier one.
BLIND = """{%- for message in messages %}
{%- set is_last = loop.last %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif is_last %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
THOUGHTS = template_of("qwen3_5")
AFTER = "train.jsonl:1: what rl.environment says after answer 1"
# What cannot follow an answer: the template, the environment, and the error.
REFUSED = {
    "the environment repeats an answer": (
        THOUGHTS,
        "Repeats",
        (DataError, dict(key="role", found="assistant")),
    ),
    "the template leaves turns out": (
        FORGETS + THOUGHTS,
        "Looks",
        (ConfigError, dict(problem_has="leaves out 2 of 3 messages")),
    ),
    "the template leaves a picture out": (
        BLIND,
        "Looks",
        (DataError, dict(problem_has="shows 1 of 2 images")),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_follow_an_answer_is_refused(name, tiny, tmp_path):
    template, environment, (kind, fields) = REFUSED[name]
    for runner in opened_with(tiny(deepstack=1), tmp_path, template, environment):
        with raises(kind, place_has=AFTER, **fields):
            play(runner, "qwen3_5")


MAX_TOKENS = 40  # the limit of an answer


Settings = tuple[RlConfig, TeacherConfig]


def settings(loss: PolicyLoss, aggregate: Aggregate, **more: Any) -> Settings:
    """Return the settings of a case. `more` are others of rl.*, or `teacher` with its own."""
    teacher = TeacherConfig(**more.pop("teacher", {}))
    given = dict(loss=loss, aggregate=aggregate, advantage="dr_grpo", max_new_tokens=MAX_TOKENS)
    return RlConfig(reward="a.py:b", **given, **more), teacher


FORMULAS = {
    "ppo": clipped(0.2, 0.2),
    "cispo": weighted_reinforce(1.0, 0.28),
    "importance_sampling": reinforced,
    "gspo": clipped(0.05, 0.02, by_sequence=True),
}
CLIPS = {"gspo": dict(clip_low=0.05, clip_high=0.02)}
AGGREGATES: tuple[Aggregate, ...] = ("tokens", "sequences", "constant")
TERMS = dict(kl_coef=0.4, entropy_coef=0.3)


def cases(other: str) -> dict[str, Settings]:
    """Return all losses and means, some of them with each of the terms. The other model is the
    reference, and a teacher."""
    taught, top = {"path": other, "coef": 0.7}, {"path": other, "top_k": 3}
    found = {
        f"{loss}, {aggregate}": settings(loss, aggregate, **CLIPS.get(loss, {}))
        for loss in FORMULAS
        for aggregate in AGGREGATES
    }
    for aggregate in AGGREGATES:
        found |= {
            f"{aggregate}, terms": settings("ppo", aggregate, **TERMS),
            f"{aggregate}, taught": settings("cispo", aggregate, teacher=taught),
            f"{aggregate}, top tokens": settings("cispo", aggregate, teacher=top),
        }
    return found


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
            episodes.append(episode_of(number, segments, float(number % 3)))
        groups.append(Group("?", episodes))
    return groups


def episode_of(number: int, segments: list[Segment], reward: float) -> Episode:
    """Return an episode that has been played."""
    episode = Episode(number, number // 2, number % 2, f"episode {number}", {})
    episode.segments, episode.reward = segments, reward
    return episode


def updates(
    path: str,
    other: str,
    case: Case,
    given: Mapping[str, Settings],
    episodes: Mapping[str, list[Group]],
) -> Any:
    """Return the number of rows, metrics and gradients of each case with each kind of episodes.
    The other model is the reference."""
    worker = MegatronWorker(case.config(path))
    work, own = WorkModel.from_sizes(worker.source.sizes), worker.cfg
    reference = replace(own, model=replace(own.model, path=other))
    results = {}
    for name, (rl, teacher) in given.items():
        for kind, groups in episodes.items():
            worker.cfg = cfg = replace(reference, rl=rl, teacher=teacher)
            batch = make_train_batch(groups, cfg, work, worker.grid.dp.size)
            updater = PolicyUpdater(worker)
            local_rows = updater.local_rows(batch)
            values = updater.values(batch, local_rows)
            metrics = updater.gradients(batch.updates[0], local_rows, values)
            results[name, kind] = len(batch.rows), metrics, collect_grads(worker)
    return results


LAYOUTS = [
    replace(case, train=dict(micro_batch_size=3))
    for case in (layout(), layout(dp=2), layout(tp=2, pp=2))
]


@pytest.fixture(scope="module")
def models(tiny) -> tuple[str, str]:
    return tiny(vocab=VOCAB, **SHALLOW), tiny(vocab=VOCAB, seed=1, **SHALLOW)


@pytest.mark.full
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_an_episode_teaches_the_same_in_several_rows(case, pool, models, record_property):
    """All losses but gspo, whose ratio is that of a row."""
    given = {name: each for name, each in cases(models[1]).items() if each[0].loss != "gspo"}
    rows = make_rows(MIXED, VOCAB)
    episodes = {kind: groups_of(rows, kind == "divided") for kind in ("whole", "divided")}
    results = pool.run(updates, case.world, *models, case, given, episodes)[0]
    worst = 0.0
    for name in given:
        (count, one, grads), (more, other, others) = (results[name, kind] for kind in episodes)
        assert more > count
        assert one.num_tokens == other.num_tokens
        worst = max(worst, abs(one.loss - other.loss), apart(grads, others))
        assert one.means == pytest.approx(other.means, abs=1e-6), name
    record_property("worst", worst)
    # Measured: 1.1e-6 at TP2 x PP2, where the tower encodes the pictures of both rows once.
    assert worst < 5e-6


# Rows of four episodes in two groups: the better ones have three rows and one.
ROWS = [[0, 1, 2], [3], [4], [5, 6, 7]]


@dataclass(frozen=True)
class Played:
    """Two groups of episodes, and what models say of their drawn tokens, by the row's number."""

    groups: list[Group]
    reference: dict[int, Tensor]  # log-probs of the drawn tokens
    log_probs: dict[int, Tensor]  # log-probs of all tokens at their places
    parameters: dict[str, torch.nn.Parameter]


@pytest.fixture(scope="module")
def played(models) -> Played:
    rows, generator = make_rows(MIXED, VOCAB), torch.Generator().manual_seed(5)
    model, other = (load_reference(path, torch.float64) for path in models)
    log_probs, reference, segments = {}, {}, {}
    for number, row in enumerate(rows):
        places = picked(row)
        drawn = row.ids_S[places, None]
        log_probs[number] = row_logits(model, row)[places - 1].log_softmax(-1)
        with torch.no_grad():
            said = row_logits(other, row)[places - 1].log_softmax(-1)
        reference[number] = said.gather(-1, drawn)[:, 0]
        # Answers also drift as a whole, as far as either clip of gspo.
        sampled = log_probs[number].detach().gather(-1, drawn)[:, 0]
        noise = 0.25 * torch.randn(len(places), generator=generator)
        sampled = (sampled + noise + 0.1 * (number % 3 - 1)).tolist()
        by_place = dict(zip(places.tolist(), sampled, strict=True))
        ids = row.ids_S.tolist()
        segments[number] = Segment(ids, [by_place.get(n) for n in range(len(ids))], [row])
    first, second, third, fourth = (
        episode_of(place, [segments[number] for number in numbers], float(place < 2))
        for place, numbers in enumerate(ROWS)
    )
    groups = [Group("?", [first, third]), Group("?", [second, fourth])]
    return Played(groups, reference, log_probs, dict(model.named_parameters()))


def row_losses(
    played: Played, number: int, segment: Segment, gain: float, given: Settings
) -> Tensor:
    """Return the loss of each drawn token of a row by the formulas."""
    rl, teacher = given
    places = torch.tensor([n for n, each in enumerate(segment.log_probs) if each is not None])
    all_p, reference = played.log_probs[number], played.reference[number]
    p = all_p.gather(-1, torch.tensor(segment.ids)[places, None])[:, 0]
    old = torch.tensor([each for each in segment.log_probs if each is not None]).double()
    gains = torch.full_like(old, gain)
    if teacher.path is not None:
        old = p.detach()
        gains = gain + teacher.coef * (reference - old)
    losses, _ = FORMULAS[rl.loss](p, {"old_log_probs": old, "advantages": gains})
    ahead = reference - p
    losses = losses + (rl.kl_coef or 0) * (ahead.exp() - 1 - ahead)
    return losses + (rl.entropy_coef or 0) * (all_p.exp() * all_p).sum(-1)


def formula_of(played: Played, given: Settings) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients. An episode counts once: its tokens are those of all its rows."""
    losses = []
    for group in played.groups:
        for episode in group.episodes:
            gain = episode.reward - sum(group.rewards) / 2
            of_rows = zip(ROWS[episode.number], episode.segments, strict=True)
            parts = [row_losses(played, *each, gain, given) for each in of_rows]
            losses.append(torch.cat(parts))
    total = {
        "tokens": lambda: torch.cat(losses).mean(),
        "sequences": lambda: torch.stack([each.mean() for each in losses]).mean(),
        "constant": lambda: torch.stack([each.sum() / MAX_TOKENS for each in losses]).mean(),
    }[given[0].aggregate]()
    named = played.parameters
    grads = torch.autograd.grad(total, list(named.values()), retain_graph=True)
    return float(total.detach()), dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("case", quick(LAYOUTS[1:2], LAYOUTS[1:]), ids=str)
def test_episodes_of_three_rows_and_of_one_follow_the_formula(
    case, pool, models, played, record_property
):
    """Both have the same advantage. The ratio of gspo is that of a row."""
    given = {name: each for name, each in cases(models[1]).items() if not each[1].top_k}
    results = pool.run(updates, case.world, *models, case, given, {"": played.groups})[0]
    worst = {}
    for name, each in given.items():
        _, metrics, grads = results[name, ""]
        loss, expected = formula_of(played, each)
        worst[name] = max(abs(metrics.loss - loss), apart(grads, expected))
        if "clip_fraction" in metrics.means and "taught" not in name:
            assert 0.05 < metrics.means["clip_fraction"] < 0.95, name
    check_worst(worst, TOLERANCE, record_property)


def test_rows_of_a_group_are_in_one_update(models, played):
    work = WorkModel.from_sizes(read_sizes(models[0]))
    cfg = Config(rl=RlConfig(updates=2, reward="a.py:b"), train=TrainConfig(micro_batch_size=2))
    batch = make_train_batch(played.groups, cfg, work, 2)
    for update, group in zip(batch.updates, played.groups, strict=True):
        numbers = sorted(n for share in update.plan for rows in share for n in rows)
        segments = [part.ids for each in group.episodes for part in each.segments]
        assert [batch.rows[number].row.ids_S.tolist() for number in numbers] == segments
        assert len(segments) == 4
