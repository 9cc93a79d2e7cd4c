"""Answers of the model to records of an evaluation set, with their pictures; also of several runs
to the same held-out questions, side by side."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.report import sections
from megatron_vlm.report.metrics_lines import Example, Examples, ExampleTurn, is_right

_MAX_TEXT = 1500  # characters of a text
_MAX_IMAGES = 8  # pictures in one place of a text
_PICTURE_BYTES = 12 * 2**20  # bytes of all pictures of these examples
_AT_ONCE = 12
_PADS = re.compile(r"(<\|(?:image|video)_pad\|>)\1+")


def example_section(path: Path) -> Iterator[sections.Section]:
    """Yield the examples, right or wrong; nothing if the run has none."""
    if not os.path.lexists(path):
        return
    yield sections.Heading("Examples", "Examples")
    try:
        examples = Examples.read(path)
    except DataError as error:
        yield sections.Note(f"{path.name} cannot be read: {error}", "alarm")
        return
    kinds = ["right" if example.is_right else "wrong" for example in examples.examples]
    yield sections.Note(
        f"{examples.name}, after {examples.step:,} steps: {kinds.count('right')} of these "
        f"{len(kinds)} right. Wrong answers come first; the scores are those of all.",
        "quiet",
    )
    room = PictureRoom(_PICTURE_BYTES)
    cards = [_card(example, room) for example in examples.examples]
    yield sections.CardPages(cards, kinds, _AT_ONCE)


def _card(example: Example, room: "PictureRoom") -> sections.Card:
    parts = [
        *question_parts(example.turns, room),
        right_answers(example.references),
        sections.Labelled("model", [said_or_nothing(example.prediction)]),
    ]
    if example.is_right:
        return sections.Card("\u2713 right", example.where, parts, "good")
    return sections.Card("\u2717 wrong", example.where, parts, "alarm")


@dataclass
class PictureRoom:
    """Bytes that a page has left for pictures."""

    size: int

    def pictures(self, uris: Sequence[str]) -> sections.Pictures:
        """Return the pictures, with a text in place of those that find no room."""
        shown = []
        for uri in uris[:_MAX_IMAGES]:
            fits = len(uri) <= self.size
            self.size -= len(uri) * fits
            known = uri if sections.is_picture_uri(uri) else "[no picture]"
            shown.append(known if fits else "[no room for the picture]")
        if (more := len(uris) - _MAX_IMAGES) > 0:
            shown.append(f"[{more:,} more]")
        return sections.Pictures(shown)


def question_parts(turns: Sequence[ExampleTurn], room: PictureRoom) -> Iterator[sections.Section]:
    """Yield the turns of a question, each next to its role, with pictures at their places."""
    for turn in turns:
        parts: list[sections.Section] = []
        for is_picture, run in groupby(turn.parts, lambda part: bool(part.image)):
            if is_picture:
                parts.append(room.pictures([part.image for part in run]))
            else:
                parts.append(sections.Said([shorten_text("".join(part.text for part in run))]))
        yield from [sections.Labelled(turn.role, parts)] if turn.role else parts


def right_answers(references: Sequence[str]) -> sections.Section:
    """Return the right answers to a question below each other."""
    label = "answer" if len(references) == 1 else "answers"
    return sections.Labelled(label, [said_or_nothing(text) for text in references])


def said_or_nothing(text: str) -> sections.Section:
    """Return what a model said, or a remark where that is nothing."""
    if not text.strip():
        return sections.Note("(nothing)", "quiet")
    return sections.Said([shorten_text(text)])


def shorten_text(text: str) -> str:
    """Shorten a text: repeated placeholders become one, and a long text loses its middle."""
    text = _PADS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1]):,} ", text)
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


_MAX_LINES = 20_000  # answers of a set that are read
_LONGEST = 2**20  # characters of a line
_MAX_CARDS = 200
_Answers = dict[str, tuple[str, tuple[str, ...]]]  # prediction and right answers, by run or place


def answer_section(folders: Mapping[str, Path]) -> Iterator[sections.Section]:
    """Yield the last answers of the runs, by name, to the questions that at least two of them were
    asked; nothing if there are none. Those on which runs differ come first."""
    read = {name: _predictions(folder / "predictions") for name, folder in folders.items()}
    sets = dict.fromkeys(name for answers in read.values() for name in answers)
    questions: dict[str, tuple[ExampleTurn, ...]] = {}
    for folder in folders.values():
        questions = _questions(folder / "examples.json") | questions
    room, has_heading = PictureRoom(_PICTURE_BYTES), False
    for name in sets:
        by_run = {run: answers[name] for run, answers in read.items() if name in answers}
        shared = _shared(by_run)
        if not shared:
            continue
        if not has_heading:
            yield sections.Heading("Answers side by side", "Answers")
            has_heading = True
        counts = []
        for run in by_run:
            if verdicts := [is_right(*each[run]) for each in shared.values() if run in each]:
                counts.append(f"{run} has {sum(verdicts):,} of {len(verdicts):,} right")
        yield sections.Note(f"{name}: {', '.join(counts)}.", "quiet")
        if len(shared) > _MAX_CARDS:
            yield sections.Note(f"The first {_MAX_CARDS} of {len(shared):,} are here.", "quiet")
        chosen = sorted(shared, key=lambda where: _kind(shared[where]) != "different")[:_MAX_CARDS]
        cards = [
            _side_card(where, shared[where], questions.get(where, ()), room) for where in chosen
        ]
        yield sections.CardPages(cards, [_kind(shared[where]) for where in chosen], _AT_ONCE)


def _shared(by_run: Mapping[str, _Answers]) -> dict[str, _Answers]:
    """Return the runs' answers to each record that at least two of them were asked alike."""
    found: dict[str, _Answers] = {}
    for run, answers in by_run.items():
        for where, answer in answers.items():
            found.setdefault(where, {})[run] = answer
    return {
        where: answers
        for where, answers in found.items()
        if len(answers) > 1 and len({references for _, references in answers.values()}) == 1
    }


def _kind(answers: _Answers) -> str:
    verdicts = {is_right(*each) for each in answers.values()}
    return "different" if len(verdicts) > 1 else "all right" if True in verdicts else "all wrong"


def _side_card(
    where: str, answers: _Answers, turns: Sequence[ExampleTurn], room: PictureRoom
) -> sections.Card:
    [references] = {references for _, references in answers.values()}
    quotes = []
    for run, (said, _) in answers.items():
        mark = "\u2713" if is_right(said, references) else "\u2717"
        quotes.append(sections.Labelled(f"{mark} {run}", [said_or_nothing(said)]))
    count = sum(is_right(*each) for each in answers.values())
    tone: sections.Tone = "good" if count == len(answers) else "alarm" if not count else ""
    parts = [*question_parts(turns, room), right_answers(references), *quotes]
    return sections.Card(f"{count} of {len(answers)} right", where, parts, tone)


def _questions(path: Path) -> dict[str, tuple[ExampleTurn, ...]]:
    """Return the questions that a run shows, by the places of their records."""
    if not os.path.lexists(path):
        return {}
    try:
        return {each.where: each.turns for each in Examples.read(path).examples}
    except DataError:
        return {}  # the page of the run says what is wrong with the file


def _predictions(folder: Path) -> dict[str, _Answers]:
    """Return the answers to each set. A file that cannot be read, or a line, is left out."""
    if not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            found[path.stem] = _answers(path)
        except DataError:
            continue
    return found


def _answers(path: Path) -> _Answers:
    file = UntrustedFile(str(path))
    file.regular_path()
    answers: _Answers = {}
    with file.wrap_errors("cannot be read"), path.open(encoding="utf-8", errors="replace") as lines:
        for _ in range(_MAX_LINES):
            if not (text := lines.readline(_LONGEST)):
                break
            try:
                line = JsonField(file.parse(text), "", file).read(Example)
                answers[line.where] = (line.prediction, line.references)
            except DataError:
                continue
    return answers
