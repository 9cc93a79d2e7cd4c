# make verifiers-env openenv-env && .venv/bin/python -m pytest tests/rl/test_named_environments.py
"""Environments by name: verifiers' harness and an OpenEnv server play episodes with pictures inside
`megatron-vlm rl`, each in an environment of its own."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_vlm.errors import ConfigError
from megatron_vlm.user_code.pool import RewardPool, RewardSettings
from tests.rl.test_agents import Played, folder
from tests.rl.test_rl import LEAN, lines, samples, words
from tests.support import agent_program
from tests.support.error_fields import raises
from tests.support.pool import free_port

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support" / "named_environments"
RECIPE = re.compile(r"```python\n(# tasks\.py.*?)```", re.DOTALL)

__all__ = ["folder"]  # a fixture


def python_of(package: str) -> Path:
    return ROOT / f".venv-{package}" / "bin" / "python"


def run(package: str, *given: object, stdin: str = "") -> str:
    """Run Python in the environment of a package, and return its output."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    paths = {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python_of(package), *map(str, given)],
        env={**kept, **paths},
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return tiny(deepstack=1, from_scratch=True)


@pytest.fixture
def server() -> Iterator[str]:
    """Return the address of an OpenEnv server."""
    port = free_port()
    process = subprocess.Popen([python_of("openenv"), SUPPORT / "grey_openenv.py", str(port)])
    while True:
        with suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        assert process.poll() is None
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def learn(folder: Path, model: str, environment: str) -> list[dict[str, Any]]:
    """Learn for two steps, and return the episodes that the run shows."""
    more = [*LEAN, "train.steps=2", "train.global_batch_size=2", "rl.samples=2"]
    more += [f"rl.environment={environment}"]
    run(
        environment.partition(":")[0],
        "-m",
        "megatron_vlm.cli",
        "rl",
        *words(folder, model, "run", *more),
    )
    for line in lines(folder / "run", "rl"):
        assert line["turns"] == 2 and line["rows"] == 1 and line["seen"] is not None
    shown = samples(folder / "run")
    assert all(len(prompt["images"]) == 1 for prompt in shown)
    episodes = [episode for prompt in shown for episode in prompt["episodes"]]
    assert len(episodes) == 8 and len({each["reward"] for each in episodes}) > 2
    assert all(len(each["heard"][0]["images"]) == 1 for each in episodes)
    return episodes


@pytest.mark.slow
@pytest.mark.engine("verifiers")
def test_a_harness_of_verifiers_plays_episodes(model, tmp_path):
    """Its tasks are written as records by the lines in the documentation."""
    [recipe] = RECIPE.findall((ROOT / "docs" / "rl.md").read_text())
    (tmp_path / "tasks.py").write_text(recipe)
    (tmp_path / "train.jsonl").write_text(run("verifiers", tmp_path / "tasks.py", "grey_verifiers"))
    for episode in learn(tmp_path, model, "verifiers:grey_verifiers"):
        assert episode["reward"] == len(episode["answers"][1].strip()) % 5
        assert episode["figures"]["grey"] in (0, 64, 128, 255)


@pytest.mark.slow
@pytest.mark.engine("verifiers")
def test_the_ids_are_those_of_the_train_client_of_verifiers(folder, model):
    """Its renderer makes the prompt of the first request, and from it and the drawn ids that of the
    second, each with a picture."""
    messages = json.loads((folder / "train.jsonl").read_text())["messages"]
    messages[0]["content"][0]["image"] = str(folder / "a.png")
    played = Played(folder, model, "two_turns")
    more = [agent_program.user(agent_program.grey(99), "again?")]
    for episode in played.episodes:
        first, second = played.answers_of(episode.segments[0])
        given = {"model": model, "first": messages, "drawn": first[2].ids, "second": more}
        said = run("verifiers", SUPPORT / "renderer_ids.py", stdin=json.dumps(given))
        assert json.loads(said) == [each[0].ids_S.tolist() for each in (first, second)]


@pytest.mark.slow
@pytest.mark.engine("openenv")
def test_a_server_of_openenv_plays_episodes(model, tmp_path, server):
    prompt = [{"role": "system", "content": "Guess."}]
    records = [{"prompt": prompt, "reset": {"seed": seed}} for seed in (0, 64, 128, 255)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    for episode in learn(tmp_path, model, f"openenv:{server}"):
        assert episode["reward"] == sum(len(each.strip()) % 5 for each in episode["answers"])


@pytest.mark.parametrize(
    ("package", "module"), [("verifiers", "verifiers"), ("openenv", "websockets")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, module):
    assert find_spec(module) is None, "this environment has it"
    target = f"{package}:http://127.0.0.1:9"
    remedy = f"pip install 'megatron_vlm[{package}]'"
    with raises(ConfigError, key="rl.environment", found=target, remedy=remedy):
        RewardPool(RewardSettings("environment", target, 1, 9.0, None))
