# .venv/bin/python -m pytest tests/config/test_moved_keys.py
"""Keys of former versions are answered with what to write, and saved configurations are read."""

from typing import Any

import yaml

from megatron_vlm.config import from_yaml, load_config, to_yaml
from megatron_vlm.config.moved_keys import MOVED_KEYS
from megatron_vlm.config.schema import MuonSettings, VideoLimits, get, key_types
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
    **{f"data.video_{end}_{of}": None for end in ("min", "max") for of in ("frames", "pixels")},
    "data.video_fps": None,
    "optim.muon_momentum": 0.95,
    "optim.muon_nesterov": True,
    "optim.muon_ns_steps": 5,
    "optim.muon_adjust_lr_fn": "match_rms_adamw",
    **{"serve.adapters": 8, "serve.full_models": 1},
    **{"serve.snapshots": 8, "serve.full_snapshots": 1},
    "data.on_error": "raise",
    "data.max_errors": 100,
    "eval.every_epochs": None,
    "checkpoint.every_epochs": None,
    **{"data.teacher": None, "data.teacher_top_k": None},
    **{"data.reference": None, "train.reference": "auto"},
    **{"rl.teacher": None, "rl.teacher_scorer": "own", "rl.teacher_coef": 1.0},
    **{"rl.teacher_top_k": 0, "rl.teacher_gpus": [], "rl.teacher_options": {}},
    "rl.teacher_timeout": 600.0,
}
# Other values, with what they are today.
CHANGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"log.profile_ranks": [0, 1], "lora.init": "gaussian"}, {}),
    ({"data.on_error": "skip"}, {"data.max_errors": 100}),
    ({"data.on_error": "skip", "data.max_errors": 7}, {"data.max_errors": 7}),
    ({"data.max_errors": 7}, {"data.max_errors": 0}),
    ({"eval.every_epochs": 0.5}, {"eval.every": "0.5 epochs", "checkpoint.every": None}),
    ({"checkpoint.every_epochs": 1.0}, {"checkpoint.every": "1 epoch"}),
    (
        {"data.video_fps": 1.5, "data.video_max_frames": 8},
        {"data.video": VideoLimits(fps=1.5, max_frames=8), "data.max_pixels": None},
    ),
    (
        {"optim.name": "muon", "optim.muon_ns_steps": 3, "optim.muon_nesterov": False},
        {"optim.muon": MuonSettings(ns_steps=3, nesterov=False), "optim.muon_lr": None},
    ),
    (
        {"serve.adapters": 4, "serve.full_models": 0},
        {"serve.loaded": {"adapters": 4, "full_models": 0}},
    ),
    ({"checkpoint.every": 7}, {"checkpoint.every": 7}),
    (
        {"train.objective": "distill", "data.teacher": "scores", "data.teacher_top_k": 4},
        {"teacher.path": "scores", "teacher.top_k": 4, "teacher.engine": "own"},
    ),
    (
        {
            "rl.teacher": {"a": "x", "b": "y"},
            "rl.teacher_scorer": "vllm",
            "rl.teacher_gpus": ["0", "1"],
        },
        {"teacher.path": {"a": "x", "b": "y"}, "teacher.engine": "vllm"},
    ),
    (
        {"train.objective": "dpo", "train.reference": "keep", "data.reference": "scores"},
        {"preference.reference": "scores"},
    ),
    ({"train.reference": "model"}, {"preference.reference": "model"}),
]


def read(values: dict[str, Any]) -> Any:
    """Read a configuration as the version before saved it, with these values."""
    saved = yaml.safe_load(to_yaml(load_config(NOW)))
    for key, value in (SAVED | values).items():
        group, _, name = key.partition(".")
        saved[group][name] = value
    return from_yaml(yaml.safe_dump(saved))


@in_one_test("key", MOVED_KEYS)
def test_a_key_that_moved_is_answered(key):
    assert key not in key_types()
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
