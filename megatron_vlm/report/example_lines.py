"""examples.json of a run: a few questions of an evaluation set, with pictures and answers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.untrusted import UntrustedFile


@dataclass(frozen=True)
class Example:
    """A record of an evaluation set and the model's answer."""

    where: str
    answer: str
    prediction: str
    prompt: str = ""
    images: tuple[str, ...] = ()  # data URIs

    @property
    def is_right(self) -> bool:
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
        """Read the file; raise DataError if it is malformed."""
        raw = UntrustedFile(str(path)).json()
        examples = []
        for item in raw["examples"].items():
            texts = {key: item[key].string() for key in ("where", "answer", "prediction", "prompt")}
            images = item.get("images")
            sources = () if images is None else tuple(each.string() for each in images.items())
            examples.append(Example(**texts, images=sources))
        return Examples(raw["name"].string(), raw["step"].whole(), tuple(examples))
