"""The samples of a run that learns from them: prompts with pictures, answers with rewards."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import number, show_count
from megatron_vlm.report import sections
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.report.run.examples import PictureRoom, said_or_nothing, shorten_text
from megatron_vlm.report.run.metrics_arrays import CUT_OFF, RunMetrics
from megatron_vlm.report.run.rl_sample_lines import (
    SampleIndex,
    SampleLines,
    ShownEpisode,
    ShownPrompt,
)

_MAX_EPISODES = 8  # episodes of a prompt
_MAX_ANSWERS = 6  # answers of an episode
_MAX_FIGURES = 8  # figures of an episode
_PICTURE_BYTES = 6 * 2**20  # bytes of all pictures of a page


def sample_cards(
    metrics: RunMetrics, folder: Path, index: SampleIndex | None = None
) -> Iterator[sections.Section]:
    """Yield the samples of the last step that has them, of the first and of some between; nothing
    if the run logged no samples. `index` has the lines that the caller has shown before."""
    path = folder / SAMPLES
    if not metrics.samples or not os.path.lexists(path):
        return
    try:
        if index is None:
            index = SampleIndex(path, is_complete=True)
        index.read_on()
        samples = index.choose(metrics.samples[-1].step)
    except DataError as error:
        yield sections.Note(f"{SAMPLES} cannot be read: {error}", "alarm")
        return
    yield from _notes(samples)
    all_prompts = [prompt for prompts in samples.steps.values() for prompt in prompts]
    cards = _Cards([each.reward for prompt in all_prompts for each in prompt.episodes])
    # Pictures of steps that are open come first, because those of other steps may find no room.
    ends = [*dict.fromkeys([*samples.steps][-1:] + [*samples.steps][:1])]
    order = [*ends, *(step for step in samples.steps if step not in ends)]
    cards_by_step = {step: cards.step(step, samples.steps[step], step in ends) for step in order}
    yield from (cards_by_step[step] for step in sorted(cards_by_step, reverse=True))


def _notes(sample_lines: SampleLines) -> Iterator[sections.Section]:
    notes = []
    if sample_lines.steps:
        shown, steps = len(sample_lines.steps), show_count(sample_lines.num_steps, "step")
        some = f", {shown} of them here" * (shown < sample_lines.num_steps)
        notes.append(f"{SAMPLES} has samples of {steps}{some}. The best are first.")
    if sample_lines.unreadable:
        lines = show_count(sample_lines.unreadable, "line")
        notes.append(f"{lines} of {SAMPLES} {CUT_OFF}")
    if not sample_lines.whole:
        notes.append("It is longer than a page reads: what comes later is left out.")
    if notes:
        yield sections.Note(" ".join(notes), "quiet")


@dataclass
class _Cards:
    """Maker of cards. It adds pictures while there is room for them."""

    rewards: list[float]  # rewards of all samples shown, which set the scale of the colours
    room: PictureRoom = field(default_factory=lambda: PictureRoom(_PICTURE_BYTES))

    def step(self, step: int, prompts: Sequence[ShownPrompt], is_open: bool) -> sections.Fold:
        rewards = [each.reward for prompt in prompts for each in prompt.episodes]
        remark = f"{show_count(len(prompts), 'prompt')}, mean reward {_mean(rewards)}"
        return sections.Fold(f"Step {step:,}", remark, [*map(self._prompt, prompts)], is_open)

    def _prompt(self, prompt: ShownPrompt) -> sections.Card:
        ranked = sorted(prompt.episodes, key=lambda each: -each.reward)
        shown = np.linspace(0, len(ranked) - 1, min(len(ranked), _MAX_EPISODES)).astype(int)
        count = f"{len(shown)} of {len(ranked):,}" if len(shown) < len(ranked) else f"{len(shown)}"
        mean = _mean([each.reward for each in ranked])
        facts = f"{shorten_text(prompt.where)} \u00b7 {count} episodes, mean reward {mean}"
        parts: list[sections.Section] = [
            self.room.pictures(prompt.images),
            sections.Said([shorten_text(prompt.question)]),
        ]
        if prompt.right is not None:
            parts.append(sections.Note(f"Right: {shorten_text(prompt.right)}", "quiet"))
        parts.append(sections.SideBySide([self._episode(ranked[place]) for place in shown]))
        return sections.Card("", facts, parts)

    def _episode(self, episode: ShownEpisode) -> sections.Labelled:
        parts: list[sections.Section] = []
        for place, answer in enumerate(episode.answers[:_MAX_ANSWERS]):
            parts.append(said_or_nothing(answer))
            if place < min(len(episode.heard), _MAX_ANSWERS - 1):
                text, images = episode.heard[place]
                parts += [sections.Said([shorten_text(text)], "quiet"), self.room.pictures(images)]
        if (more := len(episode.answers) - _MAX_ANSWERS) > 0:
            parts.append(sections.Note(f"[... {more:,} more answers]", "quiet"))
        parts.append(sections.Note(" \u00b7 ".join(_facts(episode)), "quiet"))
        return sections.Labelled(number(episode.reward), parts, self._score(episode.reward))

    def _score(self, reward: float) -> float:
        low, high = min(self.rewards), max(self.rewards)
        return (reward - low) / (high - low) if 0 < high - low < float("inf") else 0.5


def _facts(episode: ShownEpisode) -> Iterator[str]:
    yield show_count(episode.tokens, "token")
    if episode.cut:
        yield "cut by its length"
    if episode.teacher_kl is not None:
        yield f"KL to the teacher {number(episode.teacher_kl)}"
    for name in [*episode.figures][:_MAX_FIGURES]:
        yield f"{shorten_text(name)} {number(episode.figures[name])}"


def _mean(rewards: Sequence[float]) -> str:
    return number(sum(rewards) / len(rewards)) if rewards else "-"
