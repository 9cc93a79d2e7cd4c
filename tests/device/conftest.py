"""A pool of processes for the emulated device alone. The emulated device changes torch permanently,
as the stand-in does, and a process can have only one of them."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree


@pytest.fixture(scope="session")
def device_pool(process_tree: ProcessTree) -> Iterator[Pool]:
    pool = Pool(process_tree.fork)
    yield pool
    pool.close()
