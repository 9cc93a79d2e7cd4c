"""samples.jsonl of a run: the samples of some of its steps, read within bounds.

As in metrics_arrays.py, a step that a resumed run repeated replaces the first one, and all samples
after it are dropped.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_vlm.errors import DataError
from megatron_vlm.io.untrusted import JsonField, UntrustedFile
from megatron_vlm.report.example_lines import strings_of
from megatron_vlm.report.run.growing_lines import GrowingLines

_LONGEST = 2**26  # bytes of a line
_MAX_LINES = 10_000
_MAX_BYTES = 2**31
_MAX_STEPS = 6  # steps that a page shows
_MAX_PROMPTS = 8  # prompts of a step


@dataclass(frozen=True)
class ShownEpisode:
    """An episode: its answers, an observation after each but the last, and its reward."""

    answers: tuple[str, ...]
    heard: tuple[tuple[str, tuple[str, ...]], ...]  # text and pictures after each but the last
    reward: float
    figures: dict[str, float]
    tokens: int
    cut: bool
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

    @staticmethod
    def from_line(line: JsonField) -> "ShownPrompt":
        """Parse a line; raise DataError if it is malformed."""
        return ShownPrompt(
            step=line["step"].whole(),
            where=line["where"].string(),
            question=line["question"].string(),
            images=strings_of(line["images"]),
            episodes=tuple(_episode(each) for each in line["episodes"].items()),
            right=None if line["right"].value is None else line["right"].string(),
        )


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
        """Take the lines that are complete by now and new. One that is cut off is not JSON."""
        if self._growing.has_begun_anew():
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
        return ShownPrompt.from_line(JsonField(self.file.parse(line), "", self.file))

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


def _episode(line: JsonField) -> ShownEpisode:
    figures, heard = line["figures"].object(), line["heard"].items()
    if not isinstance(line["cut"].value, bool):
        raise line["cut"].error("true or false")
    return ShownEpisode(
        answers=strings_of(line["answers"]),
        heard=tuple((each["text"].string(), strings_of(each["images"])) for each in heard),
        reward=float(line["reward"].number()),
        figures={name: float(value.number()) for name, value in figures.items()},
        tokens=line["tokens"].whole(),
        cut=line["cut"].value,
        teacher_kl=None if (kl := line.get("teacher_kl")) is None else float(kl.number()),
    )
