# .venv/bin/python -m pytest tests/config/test_moved_keys.py
"""Keys of former versions are answered with what to write, and saved configurations are read."""

from typing import Any

import yaml

from megatron_vlm.config import from_yaml, load_config, to_yaml
from megatron_vlm.config.moved_keys import MOVED_KEYS
from megatron_vlm.config.schema import get, key_types
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises
from tests.support.tables import in_one_test

NOW = ["model.path=x", "data.train=a.jsonl"]
# The values of these keys in a config.yaml that the version before wrote with NOW.
SAVED = {
    "parallel.cp": 1,
    "parallel.sequence_parallel": False,
    "train.packing": False,
    "lora.init": "kaiming",
    "log.profile_ranks": [0],
    "optim.vision_weight_decay": None,
    "optim.merger_weight_decay": None,
}
# Other values, with what they are today.
CHANGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"log.profile_ranks": [0, 1], "lora.init": "gaussian"}, {}),
]


def read(values: dict[str, Any]) -> Any:
    """Read a configuration as the version before saved it, with these values."""
    saved = yaml.safe_load(to_yaml(load_config(NOW)))
    for key, value in (SAVED | values).items():
        group, _, name = key.partition(".")
        saved[group][name] = value
    return from_yaml(yaml.safe_dump(saved))


@in_one_test("key", SAVED)
def test_a_key_that_moved_is_answered(key):
    assert key in MOVED_KEYS and key not in key_types()
    for written in (f"{key}=1", f"+{key}=1"):
        with raises(ConfigError, key=key, remedy=MOVED_KEYS[key].answer):
            load_config([*NOW, written])


def test_a_saved_configuration_is_read_as_before():
    assert read({}) == load_config(NOW)


@in_one_test(("values", "expected"), CHANGED)
def test_saved_values_are_found_under_the_keys_of_today(values, expected):
    cfg = read(values)
    assert {key: get(cfg, key) for key in expected} == expected


def test_a_run_that_needs_a_feature_that_is_gone_does_not_go_on():
    with raises(ConfigError, key="optim.vision_weight_decay", found=0.1, remedy_has="version"):
        read({"optim.vision_weight_decay": 0.1})
