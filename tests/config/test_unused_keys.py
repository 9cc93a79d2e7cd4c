# .venv/bin/python -m pytest tests/config/test_unused_keys.py
"""Keys that were given and have no effect: refused in a command, and named in a file."""

import pytest

from megatron_vlm.config import load_config, to_yaml
from megatron_vlm.config.command_checks import check_used
from megatron_vlm.config.config_file import ConfigFile
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises
from tests.support.tables import in_one_test

BASE = ["model.path=x"]
SET = "data.eval=held.jsonl"
DPO = "train.objective=dpo"


def used(command: str, words: str) -> None:
    given = [*BASE, *words.split()]
    assert check_used(load_config(given), command, given, None) is None


@in_one_test(
    ("line", "problem"),
    {
        "train rl.samples=16": "in megatron-vlm train",
        "train rl=grpo": "in megatron-vlm train",
        "train engine.name=vllm": "in megatron-vlm train",
        "rl serve.port=1": "in megatron-vlm rl",
        "serve log.every=2": "in megatron-vlm serve",
        "train eval.generate=true": "without data.eval or data.split",
        "rl rl.eval_scores=loss": "without data.eval",
        "train train.steps=2 train.epochs=1": "with train.steps=2",
        "train train=demo optim.warmup_ratio=0.1": "with optim.warmup_steps=30",
        "train optim.decay_ratio=0.3": "with optim.schedule=cosine",
        "train data.shuffle_window=9": "without a stream in data.train",
        "train preference.beta=0.2": "with train.objective=sft",
        "train embed.temperature=0.2": "with train.objective=sft",
        f"train {DPO} rerank.loss=listwise": "with train.objective=dpo",
        "rl distill.divergence=forward": "without teacher.path",
        "train launch.ray_address=a:1": "with launch.backend=local",
        "train launch.cpus_per_rank=2": "with launch.backend=local",
        "train lora=default optim.vision_lr=1e-4": "where no weights of the vision tower learn",
        "train lora=vision optim.merger_lr=1e-4 lora.train=[]": "where no weights of the",
        "train model.freeze_vision=true optim.vision_lr=1": "where no weights of the vision tower",
    }.items(),
)
def test_a_word_without_effect_is_refused(line, problem):
    command, *words = line.split()
    refused = words[-1] if "lora.train" not in line else words[1]
    key, _, value = refused.partition("=")
    with raises(ConfigError, key=key, found=value, problem_has=f"has no effect {problem}"):
        used(command, " ".join(words))


@in_one_test(
    "line",
    [
        "rl rl.samples=16 rl=grpo engine.name=vllm",
        f"train {SET} eval.generate=true",
        "train data.split=0.1 eval.every=9",
        "train eval.generate=false optim.vision_lr=null",
        "train data.eval=null eval.generate=true",  # a script's last word
        f"train {DPO} preference.beta=0.2",
        "train ~rl.samples",
        "train train.epochs=2 optim.warmup_ratio=0.1 optim.vision_lr=1e-4",
        "train train.steps=2 train.epochs=2 train.steps=null",
        "train train=demo lora=qlora",  # what recipes set
        "train optim.schedule=wsd optim.decay_ratio=0.3",
        "train lora=all optim.vision_lr=1e-4 optim.merger_lr=1e-4",
        "train lora=default lora.targets=[*.fc1] optim.vision_lr=1e-4 optim.merger_lr=1e-4",
        "train lora=vision optim.vision_lr=1e-4 optim.merger_lr=1e-4",
        "rl teacher.path=t distill.divergence=reverse",
        "train launch=ray launch.cpus_per_rank=2",
        "serve parallel.tp=2 serve.port=0",
    ],
)
def test_a_word_with_an_effect_is_taken(line):
    used(*line.split(maxsplit=1))


def test_all_words_without_effect_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        used("train", "rl.samples=2 eval.generate=true lora=default optim.vision_lr=1")
    keys = [error.key for error in (caught.value, *caught.value.further)]
    assert keys == ["rl.samples", "eval.generate", "optim.vision_lr"]


FILE = """
defaults: [{rl: grpo}, {lora: default}]
rl: {samples: 4, reward: 'm:f'}
eval: {generate: true}
optim: {lr: 1e-4, vision_lr: 1e-5}
"""


def test_a_file_may_serve_several_commands():
    """Its keys without an effect are named once. The config.yaml of a run has all keys."""
    file = ConfigFile.parse(FILE, "my.yaml")
    said = check_used(load_config(BASE, file), "train", BASE, file)
    assert said == (
        "my.yaml has keys without effect: rl.samples, rl.reward in megatron-vlm train; "
        "eval.generate without data.eval or data.split; "
        "optim.vision_lr where no weights of the vision tower learn"
    )
    words = [*BASE, SET, "lora=all"]
    assert check_used(load_config(words, file), "rl", words, file) is None
    with raises(ConfigError, key="optim.vision_lr"):
        used_with_file = [*BASE, SET, "optim.vision_lr=1e-6"]
        check_used(load_config(used_with_file, file), "rl", used_with_file, file)
    whole = ConfigFile.parse(to_yaml(load_config(BASE, file)), "config.yaml")
    assert check_used(load_config([], whole), "train", [], whole) is None
