"""examples.json of a run: questions of an evaluation set, with pictures and answers."""

import json
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
    """A turn of the question. Files of older versions have one for all, without a role."""

    role: str
    parts: tuple[ExamplePart, ...]


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and the model's answer."""

    where: str
    answer: str
    prediction: str
    turns: tuple[ExampleTurn, ...] = ()

    @property
    def is_right(self) -> bool:
        return is_right(self.answer, self.prediction)


@dataclass(frozen=True)
class Examples:
    """The examples of one set, after `step` steps."""

    name: str
    step: int
    examples: tuple[Example, ...]

    def write(self, run: Path) -> None:
        write_text(run / "examples.json", json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Examples":
        """Read the file; raise DataError if it is malformed."""
        raw = UntrustedFile(str(path)).json()
        examples = []
        for item in raw["examples"].items():
            texts = {key: item[key].string() for key in ("where", "answer", "prediction")}
            turns = item.get("turns")
            read = _older_turns(item) if turns is None else map(_turn, turns.items())
            examples.append(Example(**texts, turns=tuple(read)))
        return Examples(raw["name"].string(), raw["step"].whole(), tuple(examples))


def is_right(answer: str, prediction: str) -> bool:
    """Return whether a prediction is the answer, as exact match counts."""
    return prediction.strip() == answer.strip()


def _turn(field: JsonField) -> ExampleTurn:
    parts = (
        ExamplePart(part["text"].string(), part["image"].string())
        for part in field["parts"].items()
    )
    return ExampleTurn(field["role"].string(), tuple(parts))


def _older_turns(item: JsonField) -> list[ExampleTurn]:
    """Return the question of an older version: all pictures, then the text of all turns."""
    images = item.get("images")
    sources = [] if images is None else [each.string() for each in images.items()]
    parts = [*(ExamplePart(image=uri) for uri in sources), ExamplePart(item["prompt"].string())]
    return [ExampleTurn("", tuple(parts))]
