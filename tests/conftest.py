"""Shared fixtures: the process tree, the pool of processes, tiny checkpoints and the lock for
Ray."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_vlm.commands.demo.tiny_model import TinySpec, write_tiny
from megatron_vlm.distributed.device import install_cpu_stand_in
from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree
from tests.support.random_runs import LONG, in_other_parts, not_played

# The last digits of results depend on the number of threads, and a launcher derives that number
# from the machine's cores.
os.environ["OMP_NUM_THREADS"] = "1"


# The random inputs of a test follow from its code alone, but for those of a long run.
settings.register_profile("fixed", deadline=None, derandomize=not LONG)
settings.load_profile("fixed")


# A worker takes one file at a time. These files take minutes and run first, so that no worker is
# left alone with one of them at the end.
LONGEST = ("serve_vllm", "tinker_recipes", "fuzz", "rl_engine", "wheel", "agree_vllm")
LONGEST += ("vllm_sampler", "vllm", "run_folder", "rl", "parity", "checkpoint")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that other commits play, and run the longest files first."""
    others = {*not_played(items), *in_other_parts(items)}
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    first = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))


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
    """Return `make`: tiny(layers=..., tied=...) returns the folder of such a checkpoint."""
    root = tmp_path_factory.mktemp("tiny")

    def make(dtype: str = "float32", **sizes: object) -> str:
        path = root / "-".join([dtype, *(f"{key}{sizes[key]}" for key in sorted(sizes))])
        if not path.exists():
            write_tiny(path, TinySpec(**sizes), dtype)
        return str(path)

    return make


@pytest.fixture
def cpu_stand_in() -> None:
    install_cpu_stand_in()
