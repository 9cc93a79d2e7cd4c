"""Episodes of a verifiers environment, rl.environment=verifiers:ID. Its harness asks the model."""

import asyncio
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils import loaders


def load_verifiers(name: str) -> Callable[..., Awaitable[Mapping[str, float]]]:
    """Return the function that plays the `task` of a record at a URL. `name`: a task set, all of
    which runs on this machine, or a TOML file for verifiers with the table `env`."""
    if name.endswith(".toml"):
        given = tomllib.loads(Path(name).read_text())["env"]
    else:
        harness = loaders.default_harness_id(name).replace("bash", "null")  # it runs no commands
        seat = {"runtime": {"type": "subprocess"}, "harness": {"id": harness}}
        seats = dict.fromkeys(agent_config_fields(loaders.env_config_type(name)()), seat)
        given = {"taskset": {"id": name}, **seats}
    environment = loaders.load_environment(loaders.resolve_env_config(given))
    kind, serving = type(environment.taskset).task_type(), environment.serving()
    started: list[asyncio.Task[Any]] = []

    async def play(record: Mapping[str, Any], url: str) -> Mapping[str, float]:
        if not started:  # the first episode starts what all share
            started.append(asyncio.create_task(serving.__aenter__()))
        await asyncio.shield(started[0])
        data = kind.data_type().model_validate(record["task"])
        task = kind(data, environment.config.taskset.task)
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
        episode = await environment.run_episode(task, vf.ModelContext("policy", client))
        if not episode.ok:
            errors = [*episode.errors, *(each for t in episode.traces for each in t.errors)]
            raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        figures = {name: value for trace in traces for name, value in trace.metrics.items()}
        return {**figures, "reward": fmean(trace.reward for trace in traces)}

    return play
