"""`megatron_vlm.train`, `evaluate` and `chat`: the commands as functions, for notebooks and
scripts. Each call is a process of its own, so that a caller keeps neither its memory nor its
settings, and an error says what the command says."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from signal import SIGINT
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.config.key_hints import group_names
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import MegatronVLMError

PathLike = str | Path
_MARK = "megatron-vlm: "  # begins each message to the user


def train(*settings: str, **keys: Any) -> Path:
    """Run `megatron-vlm train` and return the folder of the run. Settings are words of its command
    line; keys are recipes by group, and values, in groups as in a file of --config:

    train("data=shapes", model="tiny_cpu", optim={"lr": 1e-3}, run="runs/first")
    """
    words = _words(settings, keys)
    _run(["train", *words], is_shown=True)
    named = [word.partition("=")[2] for word in settings if word.startswith("run=")]
    return Path((named or [str(keys.get("run", Config().run))])[-1])


def evaluate(where: PathLike, *settings: str, **keys: Any) -> dict[str, dict[str, float]]:
    """Run `megatron-vlm eval` on a run, a checkpoint or a Hugging Face folder, and return the
    scores of each set by its name."""
    text = _run(["eval", str(where), *_words(settings, keys)])
    scores = [json.loads(line) for line in text.splitlines()]
    return {each.pop("name"): each for each in scores}


def chat(
    where: PathLike,
    prompt: str,
    *,
    images: Iterable[PathLike] = (),
    videos: Iterable[PathLike] = (),
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """Ask a run or an exported folder one question, as `megatron-vlm chat` does, and return the
    answer."""
    words = [f"--image={path}" for path in images] + [f"--video={path}" for path in videos]
    words += [f"--prompt={prompt}", f"--max-new-tokens={max_new_tokens}"]
    words += [f"--temperature={temperature}", f"--seed={seed}"]
    return _run(["chat", str(where), *words]).strip()


def _words(settings: Iterable[str], keys: dict[str, Any]) -> list[str]:
    """Return the arguments of a command. The keys are the text of a file of --config, in which a
    name in the place of a group is a recipe."""
    recipes = {key: keys[key] for key in group_names() if isinstance(keys.get(key), str)}
    values = {key: value for key, value in keys.items() if key not in recipes}
    text = yaml.safe_dump({"defaults": [{key: name} for key, name in recipes.items()], **values})
    return [*(ConfigFile.parse(text, "Python").words if keys else ()), *settings]


def _run(words: Sequence[str], is_shown: bool = False) -> str:
    """Run a command, which must succeed, and return what it wrote to stdout. With `is_shown`, print
    its lines as they come."""
    command = [sys.executable, "-m", "megatron_vlm.cli", *words]
    messages, lines = (STDOUT if is_shown else PIPE), []
    with Popen(command, stdout=PIPE, stderr=messages, text=True) as child:
        try:
            if is_shown:
                assert child.stdout is not None
                for line in child.stdout:
                    print(line, end="", flush=True)
                    lines.append(line)
            text, said = child.communicate()
        except KeyboardInterrupt:  # a notebook interrupts its own process alone
            child.send_signal(SIGINT)
            raise
    if child.returncode:
        marked = [line for line in (*lines, *(said or "").splitlines()) if line.startswith(_MARK)]
        reason = " ".join(line.removeprefix(_MARK).strip() for line in marked)
        raise MegatronVLMError(
            reason or f"{shlex.join(words)} ended with status {child.returncode}"
        )
    return text
