"""A single step of run.py: `python -m gpu.step MODULE FUNCTION OUT SCRATCH [--dry]`."""

import importlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NOT_RUN = 77  # the exit status of a step whose program or device is missing


class MissingError(Exception):
    """A program or device that a step needs is not here."""


@dataclass(frozen=True)
class Figures:
    """Writer of a step's figures, line by line. Steps leave files for each other in `scratch`."""

    step: str
    out: Path
    scratch: Path
    dry: bool
    start: float = field(default_factory=time.monotonic)

    def say(self, key: str, value: Any) -> None:
        """Write a figure immediately, because a step may be cut off."""
        line = {"step": self.step, "key": key, "value": value}
        with (self.out / "figures.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(f"[{time.monotonic() - self.start:6.1f} s] {key}: {value}", flush=True)

    def check(self, key: str, value: float, bound: float) -> None:
        """Write a comparison that must hold."""
        self.say(key, {"found": value, "bound": bound, "holds": bool(value <= bound)})

    @property
    def platform(self) -> Literal["cpu", "cuda"]:
        """The platform on which a worker computes."""
        return "cpu" if self.dry else "cuda"


def main() -> None:
    """Find the function and call it."""
    module, name, out, scratch = sys.argv[1:5]
    step = getattr(importlib.import_module(f"gpu.{module}"), name)
    figures = Figures(name, Path(out), Path(scratch), "--dry" in sys.argv)
    try:
        step(figures)
    except MissingError as error:
        figures.say("missing", str(error))
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    # The steps import this module by its name, so this main would know another MissingError.
    importlib.import_module("gpu.step").main()
