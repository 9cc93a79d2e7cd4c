"""The samples of an rl run, from samples.jsonl: prompts with pictures, answers with rewards.

The file may grow while it is read, so each line is read once, within bounds. The last line counts
when its end is written. A truncated or replaced file is read again from its beginning. As in
metrics_arrays.py, a step that a resumed run repeated replaces the first one, and
all samples after it are dropped."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import number, show_count
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.report import sections
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.report.run.examples import PictureRoom, said_or_nothing, shorten_text
from megatron_vlm.report.run.metrics_arrays import CUT_OFF, RunMetrics

_KEPT = 64  # bytes before the place of reading, by which the file is recognised


class GrowingLines:
    """Reader of the new lines of a growing file. Only if the file `is_complete`, links are followed
    and the last line needs no end."""

    def __init__(self, path: Path, max_line: int, is_complete: bool = False):
        self.path, self.max_line, self.is_complete = path, max_line, is_complete
        self.place = 0
        self._before = b""

    def was_replaced(self) -> bool:
        """Return whether another file has taken its place. The next lines are then its first."""
        with self._open() as file:
            file.seek(self.place - len(self._before))
            is_same = file.read(len(self._before)) == self._before
        if not is_same:
            self.place, self._before = 0, b""
        return not is_same

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the place and the content of each new complete line, cut to `max_line` bytes."""
        with self._open() as file:
            file.seek(self.place)
            while line := file.readline(self.max_line):
                begin, last = self.place, line
                while last and not last.endswith(b"\n") and len(last) == self.max_line:
                    last = file.readline(self.max_line)
                if not (last.endswith(b"\n") or self.is_complete):
                    return
                self.place = file.tell()
                self._before = last[-_KEPT:]
                yield begin, line

    def _open(self) -> BinaryIO:
        if self.is_complete:
            file = UntrustedFile(str(self.path))
            file.regular_path()
            with file.wrap_errors("cannot be read"):
                return self.path.open("rb")
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            is_link = self.path.is_symlink()
            problem = "is a link, which is not followed" if is_link else "cannot be read: "
            problem += "" if is_link else error.strerror or type(error).__name__
            raise DataError(problem, place=self.path.name) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise DataError("is not a file", place=self.path.name)
        return open(handle, "rb")


_LONGEST = 2**26  # bytes of a line
_MAX_LINES = 10_000
_MAX_BYTES = 2**31
_MAX_STEPS = 6  # steps that a page shows
_MAX_PROMPTS = 8  # prompts of a step


@dataclass(frozen=True)
class ShownObservation:
    """Observation: the text and the pictures that an environment has returned."""

    text: str
    images: tuple[str, ...]


@dataclass(frozen=True)
class ShownEpisode:
    """An episode: its answers, an observation after each but the last, and its reward."""

    answers: tuple[str, ...]
    heard: tuple[ShownObservation, ...]  # before each, as far as known
    reward: float
    figures: dict[str, float]
    tokens: int
    cut: bool
    rows: tuple[int, ...] = ()  # number of the row of each answer
    teacher_kl: float | None = None  # mean over its tokens, if there was a teacher


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt and its episodes. Pictures are data URIs."""

    step: int
    where: str
    question: str
    images: tuple[str, ...]
    episodes: tuple[ShownEpisode, ...]
    right: str | None = None  # the right answer, if the record has one


@dataclass(frozen=True)
class SampleLines:
    """The prompts of a few steps, in the order of steps."""

    steps: dict[int, list[ShownPrompt]]
    num_steps: int  # in the file
    unreadable: int  # number of malformed lines
    whole: bool  # False if the file was longer than is read


class SampleIndex:
    """Index of the lines of each step, as the file may be larger than the memory, and may grow."""

    def __init__(self, path: Path, is_complete: bool = False):
        self.path, self.file = path, UntrustedFile(str(path))
        self._growing = GrowingLines(path, _LONGEST, is_complete)
        self._begin()

    def _begin(self) -> None:
        self.places: dict[int, list[int]] = {}
        self.sources: set[str] = set()  # sources of the prompts of the last step
        self.num_lines = 0
        self.unreadable = 0
        self.whole = True

    def read_on(self) -> None:
        """Take the new complete lines. A line that was cut is no JSON."""
        if self._growing.was_replaced():
            self._begin()
        for place, line in self._growing.new_lines():
            self.whole = self.num_lines < _MAX_LINES and place < _MAX_BYTES
            if not self.whole:
                break
            self._take_line(place, line)

    def choose(self, last_step: int) -> SampleLines:
        """Return samples of steps up to `last_step`: the first, the last and a few between them."""
        logged = [step for step in self.places if step <= last_step]
        chosen = np.linspace(0, len(logged) - 1, min(len(logged), _MAX_STEPS)).round().astype(int)
        steps: dict[int, list[ShownPrompt]] = {}
        with self.file.wrap_errors("cannot be read"), self.path.open("rb") as opened:
            for step in (logged[place] for place in chosen):
                steps[step] = []
                for begin in self.places[step][:_MAX_PROMPTS]:
                    opened.seek(begin)
                    steps[step].append(self._parse(opened.readline(_LONGEST)))
        return SampleLines(steps, len(logged), self.unreadable, self.whole)

    def _parse(self, line: bytes) -> ShownPrompt:
        return JsonField(self.file.parse(line), "", self.file).read(ShownPrompt)

    def _take_line(self, place: int, line: bytes) -> None:
        if not line.strip():
            return
        self.num_lines += 1
        try:
            prompt = self._parse(line)
        except DataError:
            self.unreadable += 1
            return
        last = next(reversed(self.places), -1)
        # A step may have been logged in part before it was repeated. Then a prompt comes twice.
        again = prompt.step < last or (prompt.step == last and prompt.where in self.sources)
        if again:
            self.places = {k: places for k, places in self.places.items() if k < prompt.step}
        if again or prompt.step > last:
            self.sources = set()
        self.sources.add(prompt.where)
        self.places.setdefault(prompt.step, []).append(place)


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
    # Pictures of open steps come first, because the pictures of other steps may find no room.
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
        first = len(episode.answers) - len(episode.heard)  # answer that the first of them precedes
        rows = episode.rows if len({*episode.rows}) > 1 else ()
        for place, answer in enumerate(episode.answers[:_MAX_ANSWERS]):
            before, row = rows[max(0, place - 1) : place], rows[place : place + 1]
            if row and row != before:
                parts.append(sections.Note(f"Row {row[0]}", "quiet"))
            if first <= place < first + len(episode.heard):
                heard = episode.heard[place - first]
                parts.append(sections.Said([shorten_text(heard.text)], "quiet"))
                parts.append(self.room.pictures(heard.images))
            parts.append(said_or_nothing(answer))
        if (more := len(episode.answers) - _MAX_ANSWERS) > 0:
            parts.append(sections.Note(f"[... {more:,} more answers]", "quiet"))
        parts.append(sections.Note(" \u00b7 ".join(_facts(episode)), "quiet"))
        reward, low, high = episode.reward, min(self.rewards), max(self.rewards)
        score = (reward - low) / (high - low) if 0 < high - low < float("inf") else 0.5
        return sections.Labelled(number(reward), parts, score)


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
