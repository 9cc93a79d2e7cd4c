# make tinker-env, then .venv/bin/python -m pytest tests/serve/test_tinker_losses.py
"""With the public client: a loss that the client computes by itself gives the gradients of the one
that the service computes, and sparse targets those of dense ones."""

import json

import pytest

from tests.support.pool import free_port
from tests.support.recipes import Cookbook
from tests.support.serve_client import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine("tinker"),
]

TOLERANCE = 1e-6  # relative; measured worst: 6.3e-8


def test_losses_of_the_client_and_sparse_targets(tiny, tmp_path):
    path = tiny(vocab=512)
    with served(path, tmp_path / "run", free_port(), "serve.name=tiny") as running:
        said = Cookbook(running.url, tmp_path, "tiny").script("losses.py", "tiny")
    found = json.loads(said.splitlines()[-1])
    assert found["built in"] == [pytest.approx(each, rel=TOLERANCE) for each in found["own"]]
    assert found["built in"][0][0] != found["built in"][1][0]
    *sparse, shape = found["sparse"]
    assert sparse == pytest.approx(found["dense"][:2], rel=TOLERANCE) and sparse[1] > 0
    assert shape == [6, 3]
    sparse, dense = found["chosen"]
    assert sparse == dense and len(sparse) == 5
    asked = [(r, c) for r in range(5) for c in range(4) if sparse[r][c] < -1]
    assert asked == [(1, 2), (4, 0), (4, 3)]
