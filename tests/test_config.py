# .venv/bin/python -m pytest tests/test_config.py
"""The configuration: recipes, overrides, and keys that do not exist."""

from dataclasses import FrozenInstanceError

import pytest

from megatron_vlm.config import Config, config_dir, known_keys, load_config
from megatron_vlm.errors import ConfigError


def test_defaults_are_the_dataclasses():
    assert load_config(["model.path=x"]) == Config(model=Config().model.__class__("x"))


def test_overrides():
    cfg = load_config(["model.path=x", "parallel.layers_per_stage=[0,12,12]", "optim.lr=3e-4"])
    assert cfg.parallel.layers_per_stage == [0, 12, 12]
    assert cfg.optim.lr == 3e-4
    with pytest.raises(FrozenInstanceError):
        cfg.optim.lr = 1.0


@pytest.mark.parametrize("recipe", sorted(file.stem for file in config_dir().glob("*.yaml")))
def test_every_recipe_composes(recipe):
    assert load_config(["model.path=x"], recipe).model.path == "x"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.path=y", "'modle.path' is not a configuration key; did you mean 'model.path'"),
        ("parallel.tpp=2", "did you mean 'parallel.tp'"),
        ("+train.packed=true", "did you mean 'train.packing'"),
        ("parallel.tp=two", "parallel.tp: Value 'two' of type 'str' could not be converted"),
    ],
)
def test_mistakes(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["model.path=x", override])


def test_a_missing_path_is_named():
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        load_config([])


def test_keys_that_people_bring_from_other_trainers_exist():
    assert {"parallel.cp", "parallel.sequence_parallel", "train.packing"} <= set(known_keys())
