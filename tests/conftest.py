"""Shared fixtures: the process tree, the pool of processes, tiny checkpoints and the lock for
Ray."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.distributed.device import install_cpu_stand_in
from megatron_vlm.family.tiny import TinySpec
from tests.nccl.plugin import Judged
from tests.support.durations import Durations, file_seconds
from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree
from tests.support.random_runs import LONG, ROOT, not_played

# The last digits of results depend on the number of threads, and a launcher derives that number
# from the machine's cores.
os.environ["OMP_NUM_THREADS"] = "1"


# The random inputs of a test follow from its code alone, but for those of a long run.
settings.register_profile("fixed", deadline=None, derandomize=not LONG)
settings.load_profile("fixed")


# Programs of others that run in environments of their own: .venv-vllm, and so on.
ENGINES = {
    "vllm": "vLLM",
    "tinker": "the Tinker client",
    "chat": "the clients of OpenAI's and Anthropic's APIs",
    "embed": "sentence-transformers",
    "lmms": "lmms-eval",
    "trl": "TRL with bitsandbytes",
    "te": "Transformer Engine",
    "fla": "flash-linear-attention",
    "verifiers": "verifiers",
    "openenv": "OpenEnv",
    "llamacpp": "llama.cpp",
    "trackers": "the set of MLflow, Trackio and SwanLab",
}


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("DURATIONS") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())
    if "NCCL_RULES" in os.environ:
        config.pluginmanager.register(Judged(os.environ["NCCL_RULES"]))


def pytest_collection_finish() -> None:
    """Spare later collections of garbage the modules, which stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("engine"):
        for name in mark.args:
            if not (ROOT / f".venv-{name}" / "ready").exists():
                pytest.skip(f"{ENGINES[name]} is not there: make {name}-env builds its environment")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that other commits play, and run the longest files first: a worker takes
    one file at a time, and none should be left alone with a long one at the end."""
    others = set(not_played(items))
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    seconds = file_seconds()
    items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


@pytest.fixture(scope="module")
def ray_lock() -> Iterator[None]:
    """Wait until no other test on this machine has a Ray cluster, and keep other tests from
    starting one."""
    with open(Path(tempfile.gettempdir()) / "megatron-vlm-ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def process_tree() -> Iterator[ProcessTree]:
    process_tree = ProcessTree()
    yield process_tree
    process_tree.close()


@pytest.fixture(scope="session")
def pool(process_tree: ProcessTree) -> Iterator[Pool]:
    pool = Pool(process_tree.fork)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return `make`: tiny(layers=..., tied=...) returns the folder of such a checkpoint, and
    tiny(TinyGemma4(...)) that of one of Gemma 4."""
    root = tmp_path_factory.mktemp("tiny")

    def make(dtype: Any = "float32", **sizes: Any) -> str:
        if not isinstance(dtype, str):
            return dtype.write(root / f"gemma4-{abs(hash(dtype))}")
        path = root / "-".join([dtype, *(f"{key}{sizes[key]}" for key in sorted(sizes))])
        if not path.exists():
            write_tiny(path, TinySpec(**sizes), dtype)
        return str(path)

    return make


@pytest.fixture
def cpu_stand_in() -> None:
    install_cpu_stand_in()
