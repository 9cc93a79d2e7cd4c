"""The set and the model of runs that learn from samples, for files without their own."""

from pathlib import Path

import pytest

from tests.support.often_drawn import drawing_often
from tests.support.sets import write_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    write_set(folder, rows=7)
    return folder


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory) -> str:
    """Return a random model that ends an answer after some tokens. Others end one in 500."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    return drawing_often(tiny(deepstack=1, from_scratch=True), folder, "<|im_end|>")
