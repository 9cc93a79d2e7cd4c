"""Processes of their own: the emulated device changes torch for good, as the stand-in does, and a
process can only have one of them."""

from collections.abc import Iterator

import pytest

from tests.nursery import Nursery
from tests.pool import Pool


@pytest.fixture(scope="session")
def device_pool(nursery: Nursery) -> Iterator[Pool]:
    pool = Pool(nursery.fork)
    yield pool
    pool.close()
