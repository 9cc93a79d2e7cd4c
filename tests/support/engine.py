"""Real vLLM in a separate process (`make vllm-env`, vllm_engine/serve.py), and rows as vLLM takes
them."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import PIL.Image

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.prompts import seen_by_trainer
from megatron_vlm.family.qwen.images import ImageSettings

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
ANSWER_S = 300  # loading takes 15 s on an idle machine


class EngineError(Exception):
    """An error that vLLM reports."""


class Engine:
    """A vLLM that serves a checkpoint; `options` are those of `load` in vllm_engine/serve.py."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() does
        self.process = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", Path(__file__).parent / "vllm_engine" / "serve.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_"))},
        )
        try:
            self.ask("load", folder=folder, **options)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **fields: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **fields}), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise EngineError(f"no answer to {do} within {ANSWER_S} s\n{self._end()}")
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"vLLM has ended during {do}\n{self._end()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply["answer"]

    def _end(self) -> str:
        self.output.seek(0)
        return self.output.read()[-5000:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.output):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def as_prompt(row: Row, image_id: int, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return a row as vLLM takes it: with one placeholder for each picture, which vLLM expands."""
    ids = row.ids_S.tolist()
    prompt_ids = [ids[0], *(b for a, b in pairwise(ids) if not a == b == image_id)]
    return {"ids": prompt_ids, "pictures": [str(path) for path in pictures]}


def write_seen(row: Row, settings: ImageSettings, folder: Path) -> list[Path]:
    """Write the pictures of a row as the trainer sees them, resized, and return their paths."""
    pictures = seen_by_trainer(row, settings)
    if pictures:
        folder.mkdir(parents=True)
    paths = [folder / f"{place}.png" for place in range(len(pictures))]
    for path, pixels in zip(paths, pictures, strict=True):
        PIL.Image.fromarray(pixels).save(path)
    return paths
