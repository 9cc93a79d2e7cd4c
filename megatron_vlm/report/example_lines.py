"""examples.json of a run: questions of an evaluation set, with pictures and answers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.untrusted import JsonField, UntrustedFile


@dataclass(frozen=True)
class ExamplePart:
    """Text of a turn, or a picture at its place in the text."""

    text: str = ""
    image: str = ""  # data URI


@dataclass(frozen=True)
class ExampleTurn:
    """A turn of the question."""

    role: str
    parts: tuple[ExamplePart, ...]


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and the model's answer."""

    where: str
    answer: str
    prediction: str
    turns: tuple[ExampleTurn, ...] = ()
    answers: tuple[str, ...] = ()  # all right answers, if the record lists them

    @property
    def references(self) -> tuple[str, ...]:
        """The right answers."""
        return self.answers or (self.answer,)

    @property
    def is_right(self) -> bool:
        return is_right(self.prediction, self.references)


@dataclass(frozen=True)
class Examples:
    """The examples of one set, after `step` steps."""

    name: str
    step: int
    examples: tuple[Example, ...]

    def write(self, run: Path) -> None:
        """Write RUN/examples.json, which the report shows."""
        write_text(run / "examples.json", json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Examples":
        """Read the file; raise DataError if it is malformed."""
        raw = UntrustedFile(str(path)).json()
        examples = []
        for item in raw["examples"].items():
            texts = {key: item[key].string() for key in ("where", "answer", "prediction")}
            turns = tuple(map(_turn, item["turns"].items()))
            answers = strings_of(item.get("answers"))
            examples.append(Example(**texts, turns=turns, answers=answers))
        return Examples(raw["name"].string(), raw["step"].whole(), tuple(examples))


def is_right(prediction: str, references: Sequence[str]) -> bool:
    """Return whether a prediction is one of the right answers, word for word. White space around
    either does not count. This is exact match everywhere: in scores, files and pages."""
    return prediction.strip() in [reference.strip() for reference in references]


def strings_of(field: JsonField | None) -> tuple[str, ...]:
    """Return a list of strings, which may be missing."""
    return () if field is None else tuple(item.string() for item in field.items())


def _turn(field: JsonField) -> ExampleTurn:
    parts = field["parts"].items()
    texts = tuple(ExamplePart(part["text"].string(), part["image"].string()) for part in parts)
    return ExampleTurn(field["role"].string(), texts)
