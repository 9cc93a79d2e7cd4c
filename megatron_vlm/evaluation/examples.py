"""examples.json of a run: a few questions of an evaluation set, with pictures and answers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_vlm.folders import write_text


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and what the model answered."""

    where: str
    answer: str
    prediction: str
    prompt: str = ""
    images: tuple[str, ...] = ()  # data URIs

    @property
    def right(self) -> bool:
        return self.prediction.strip() == self.answer.strip()


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
        """OSError, ValueError, TypeError, KeyError or AttributeError where it is not one."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        shown = []
        for item in raw["examples"]:
            texts = {key: str(item[key]) for key in ("where", "answer", "prediction", "prompt")}
            shown.append(Example(**texts, images=tuple(map(str, item.get("images", ())))))
        return Examples(str(raw["name"]), int(raw["step"]), tuple(shown))
