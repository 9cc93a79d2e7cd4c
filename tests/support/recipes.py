"""Recipes of the public cookbook, unchanged, against a service. Each runs in a separate process, in
the client's environment. The module also writes their training data: image folders and chats."""

import json
import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ImageOps

from megatron_vlm.commands.demo.coloured_shapes import COLOURS, Scene, Shape, draw

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "tests/support/tinker_client"
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
SIDE = 64  # pixels; a picture has four tokens, and a shape lies within one of them
SIZES = (20, 22, 24, 26)
SHAPES = ("triangle", "square")


@dataclass(frozen=True)
class Cookbook:
    """A runner of the cookbook, with the address of a service and a working directory."""

    url: str
    folder: Path
    model: str

    def recipe(self, name: str, *arguments: str) -> str:
        model = [f"model_name={self.model}", "renderer_name=qwen3_vl_instruct"]
        module = f"tinker_cookbook.recipes.{name}"
        return self._run([str(PYTHON), "-m", module, *model, *arguments])

    def trained(self, name: str, log: str, *arguments: str) -> "Trained":
        """Run a recipe that trains and writes below the folder `log`, and return its results."""
        where = "experiment_dir" if name.startswith("vlm") else "log_path"
        settings = [f"{where}={log}", "behavior_if_log_dir_exists=raise", "save_every=0"]
        self.recipe(name, *settings, *arguments)
        return Trained.read(self.folder / log)

    def script(self, name: str, *arguments: str) -> str:
        return self._run([str(PYTHON), str(CLIENT / name), *arguments])

    def _run(self, command: Sequence[str]) -> str:
        """Run a command that finds only files in the folder: the hub is unreachable, and caches are
        here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        environment |= {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": "tml-recipes",
            "TINKER_TELEMETRY": "0",
            "HF_HOME": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout


@dataclass(frozen=True)
class Trained:
    steps: list[dict[str, Any]]
    state: str
    sampler: str

    @staticmethod
    def read(folder: Path) -> "Trained":
        (metrics,) = folder.rglob("metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        last = json.loads((metrics.parent / "checkpoints.jsonl").read_text().splitlines()[-1])
        steps = [line for line in lines if set(line) - {"step"}]
        return Trained(steps, last["state_path"], last["sampler_path"])

    def of(self, name: str) -> list[float]:
        """Return a figure for each step that has it."""
        return [step[name] for step in self.steps if name in step]


def write_pictures(
    folder: Path,
    train: int,
    test: int,
    words: Mapping[str, str] | None = None,
    mirrored: bool = False,
    seed: int = 0,
) -> None:
    """Write a class for each colour and each of SHAPES, with `train` and `test` pictures that are
    all different. `words` replaces the names of the colours. The recipe flips pictures at random;
    `mirrored` pictures are symmetric, so a flip does not change them or the numbers of a run."""
    rng, known_shapes = random.Random(seed), set[Shape]()
    for split, count in (("train", train), ("test", test)):
        for colour in COLOURS:
            for name in SHAPES:
                label = f"{(words or {}).get(colour, colour)}_{name}"
                below = folder / "dpdl-benchmark" / "caltech101" / split / label
                below.mkdir(parents=True)
                for number in range(count):
                    shape = _shape(rng, name, colour, known_shapes)
                    picture = draw(Scene(SIDE, SIDE, (shape,)))
                    if mirrored:
                        half = picture.crop((0, 0, SIDE // 2, SIDE))
                        picture.paste(ImageOps.mirror(half), (SIDE // 2, 0))
                    picture.save(below / f"{number:04}.png")


def _shape(rng: random.Random, name: str, colour: str, drawn: set[Shape]) -> Shape:
    """Return a shape that is not in `drawn`, and add it there."""
    while True:
        size, half = rng.choice(SIZES), SIDE // 2
        left, top = (rng.choice((0, half)) + rng.randint(2, half - 2 - size) for _ in "xy")
        shape = Shape(name, colour, left, top, size)
        if shape not in drawn:
            drawn.add(shape)
            return shape


def write_sums(path: Path, count: int) -> None:
    """Write chats such as math_rl's: a sum with its answer, and another sum."""
    rng, lines = random.Random(0), []
    for _ in range(count):
        a, b = rng.randint(0, 100), rng.randint(0, 100)
        texts = ["What is 4 + 5?", "9", f"What is {a} + {b}?", f"{a + b}"]
        pairs = zip(("user", "assistant") * 2, texts, strict=True)
        messages = [{"role": role, "content": text} for role, text in pairs]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
