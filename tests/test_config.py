# .venv/bin/python -m pytest tests/test_config.py
"""The configuration: recipes, overrides, and keys that do not exist."""

from dataclasses import FrozenInstanceError

import pytest

from megatron_vlm.config import config_dir, from_yaml, known_keys, load_config, to_yaml
from megatron_vlm.config.schema import Config
from megatron_vlm.errors import ConfigError


def test_defaults_are_the_dataclasses():
    assert load_config(["model.path=x"]) == Config(model=Config().model.__class__("x"))


def test_overrides():
    cfg = load_config(["model.path=x", "parallel.layers_per_stage=[0,12,12]", "optim.lr=3e-4"])
    assert cfg.parallel.layers_per_stage == [0, 12, 12]
    assert cfg.optim.lr == 3e-4
    with pytest.raises(FrozenInstanceError):
        cfg.optim.lr = 1.0


RECIPES = sorted(f"{file.parent.name}={file.stem}" for file in config_dir().glob("*/*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes(recipe):
    assert load_config([recipe, "model.path=x"]).model.path == "x"


def test_a_recipe_sets_what_belongs_together_and_an_override_wins():
    cfg = load_config(["model=qwen3_vl_32b", "model.path=x", "parallel.tp=4"])
    assert (cfg.parallel.tp, cfg.parallel.pp, cfg.train.precision) == (4, 2, "bf16")


def test_the_resolved_configuration_reads_back():
    cfg = load_config(["model=tiny_cpu", "model.path=x", "data.train=[a.jsonl,{path: b}]"])
    assert from_yaml(to_yaml(cfg)) == cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.path=y", "'modle.path' is not a configuration key; did you mean 'model.path'"),
        ("parallel.tpp=2", "did you mean 'parallel.tp'"),
        ("+train.packed=true", "did you mean 'train.packing'"),
        ("model=qwen4", "model/qwen4 is no recipe; there are .*qwen3_vl_2b"),
        ("optim.schedule=cosin", "optim.schedule='cosin' is not one of constant, linear, cosine"),
        ("train.global_batch_size=0", "train.global_batch_size=0: give at least 1"),
        ("optim.min_lr_ratio=2", "optim.min_lr_ratio=2.0: give 0 to 1"),
        ("data.train_on=[robot]", "data.train_on=.*choose one of all_assistant"),
        ("log.profile_steps=[3]", r"log.profile_steps=\[3\]: give \[first, last\)"),
        ("checkpoint.best=loss", "checkpoint.best='loss': give SET/SCORE"),
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
