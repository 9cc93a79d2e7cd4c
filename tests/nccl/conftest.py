"""Processes whose torch the tests of this room may change."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree


@pytest.fixture(scope="package")
def own_pool(process_tree: ProcessTree) -> Iterator[Pool]:
    pool = Pool(process_tree.fork, as_launched=True)
    yield pool
    pool.close()
