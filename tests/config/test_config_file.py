# .venv/bin/python -m pytest tests/config/test_config_file.py
"""`--config my.yaml`: the keys that it sets, what overrides it, and files that are refused."""

import os
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from megatron_vlm.cli import main
from megatron_vlm.cli.parser import make_parser
from megatron_vlm.commands.eval import locate
from megatron_vlm.config import ConfigFile, from_yaml, load_config, to_yaml
from megatron_vlm.config.arguments import parse_arguments, read_configuration
from megatron_vlm.config.config_file import MAX_CONFIG_BYTES, YamlText
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.json_schema import config_schema
from megatron_vlm.config.key_hints import config_dir
from megatron_vlm.config.schema import Config, DataConfig, ModelConfig
from megatron_vlm.errors import ConfigError
from megatron_vlm.train import run_train
from tests.support.error_fields import raises
from tests.support.tables import in_one_test

MINE = """\
defaults:
  - model: qwen3_vl_2b
  - parallel: tp2_pp2
model: {path: x}
optim:
  lr: 3e-6
  weight_decay: 0.5
data:
  train: [a.jsonl, {path: b.jsonl, weight: 0.5}]
  eval: {charts: c.jsonl}
log:
"""


def test_recipes_then_the_file_then_the_command_line():
    config_file = ConfigFile.parse(MINE, "my.yaml")
    cfg = load_config(["optim.weight_decay=0.25", "data.seed=7"], config_file)
    assert (cfg.parallel.tp, cfg.parallel.pp, cfg.data.max_tokens) == (2, 2, 8192)  # recipes
    assert (cfg.optim.lr, cfg.optim.warmup_ratio) == (3e-6, 0.03)
    assert (cfg.optim.weight_decay, cfg.data.seed) == (0.25, 7)
    assert [(spec.path, spec.weight) for spec in cfg.data.train] == [
        ("a.jsonl", 1),
        ("b.jsonl", 0.5),
    ]
    assert [held_out.name for held_out in cfg.data.eval] == ["charts"]


def test_a_recipe_of_the_command_line_replaces_that_of_the_file():
    config_file = ConfigFile.parse(MINE, "my.yaml")
    cfg = load_config(["model=qwen3_vl_32b"], config_file)
    assert (cfg.parallel.tp, cfg.optim.lr) == (2, 3e-6)  # parallel=tp2_pp2 is still the later group
    assert load_config(["model=qwen3_vl_32b", "parallel=default"], config_file).parallel.auto
    assert load_config(["~parallel"], config_file).parallel.tp == 1


def test_the_configuration_of_a_run_is_such_a_file():
    cfg = load_config(
        ["optim.beta1=0.5", "eval.candidates=[yes,no]", 'eval.prefill="a: "'],
        ConfigFile.parse(MINE, "my.yaml"),
    )
    run_file = ConfigFile.parse(to_yaml(cfg), "runs/first/config.yaml")
    assert load_config([], run_file) == cfg
    assert load_config(["train.steps=30"], run_file).train.steps == 30
    with pytest.raises(ConfigError, match=r"complete, so recipes cannot be chosen; .*model\.KEY"):
        load_config(["model=qwen3_vl_8b"], run_file)


def test_a_run_is_evaluated_with_the_keys_of_a_file():
    text = to_yaml(load_config(["model.path=x", "data=shapes", "parallel.tp=4", "data.seed=3"]))
    file = ConfigFile.parse("parallel: {tp: 2}\neval: {generate: true, samples: 5}", "my.yaml")
    cfg = from_yaml(text, ["eval.samples=6"], file)
    assert (cfg.parallel.tp, cfg.eval.generate, cfg.eval.samples, cfg.data.seed) == (2, True, 6, 3)
    with pytest.raises(ConfigError, match="recipes cannot be chosen"):
        from_yaml(text, [], ConfigFile.parse(MINE, "my.yaml"))


def test_a_folder_is_evaluated_with_the_keys_of_a_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cfg, _ = locate(str(tmp_path), [], ConfigFile.parse(MINE, "my.yaml"))
    assert (cfg.model.path, cfg.parallel.tp) == (str(tmp_path), 2)


@pytest.mark.full
@in_one_test(
    ("written", "key", "value"),
    [
        ("optim: {lr: 1e-5}", "optim.lr", 1e-5),  # a string in YAML 1.1
        ("optim.lr: 1E+2", "optim.lr", 100.0),
        ("optim: {lr: 1}", "optim.lr", 1.0),
        ("data: {train: {path: a, weight: 5e-1}}", "data.train", (SourceSpec("a", 0.5),)),
        ("run: 1.50", "run", "1.50"),
        ("run: 2024-01-01", "run", "2024-01-01"),
        ("data: {cache_dir: ~}", "data.cache_dir", None),
        ("eval: {candidates: [yes, no, 010, 1e3]}", "eval.candidates", ("yes", "no", "010", "1e3")),
        ("log: {report: no}", "log.report", False),
        ("train: {steps: 0x10}", "train.steps", ConfigError),
        ("eval: {prefill: 'The answer is: '}", "eval.prefill", "The answer is: "),
        ("data: {eval: &a {x: y.jsonl}, train: *a}", "data.train", ConfigError),
        ("data: {train: &a y.jsonl, eval: *a}", "data.max_tokens", 8192),
    ],
)
def test_values_are_read_as_they_are_meant(written, key, value):
    try:
        cfg = load_config(["model.path=x"], ConfigFile.parse(written, "my.yaml"))
    except ConfigError:
        assert value is ConfigError
        return
    for name in key.split("."):
        cfg = getattr(cfg, name)
    assert cfg == value and type(cfg) is type(value)


# PyYAML writes these three unescaped, and YAML reads each as the end of a line.
BREAKS = "\x85\u2028\u2029"
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters=BREAKS), max_size=20)


@pytest.mark.full
@settings(max_examples=50)
@given(ANY_TEXT.filter(lambda text: "${" not in text))
def test_any_text_of_a_run_reads_back(text):
    cfg = Config(model=ModelConfig(text), data=DataConfig(train=(SourceSpec(text),)))
    values = ConfigFile.parse(to_yaml(cfg), "config.yaml").values
    assert values["model.path"] == text and values["data.train"] == text


LAUGHS = "data:\n  train:\n  - &a0 [x, x]\n"
LAUGHS += "".join(f"  - &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@in_one_test(
    ("text", "place", "key", "more"),
    [
        ("", "", "", {"remedy_has": "{lr: 1e-5}", "problem_has": "empty"}),
        ("- 1", "", "", {"remedy_has": "{lr: 1e-5}"}),
        ("run: a\n---\nrun: b", "line 2", "", {"problem_has": "found another document"}),
        ("optim: {lr: 1", "line 1", "", {"problem_has": "expected ',' or '}'"}),
        ("optim:\n  lrr: 1", "line 2", "optim.lrr", {"remedy_has": "'optim.lr'"}),
        ("train:\n  steps: two", "line 2", "train.steps", {"found": "two"}),
        ("train:\n  steps: 1.5", "line 2", "train.steps", {"found": "1.5"}),
        (
            "train:\n  steps: 0",
            "line 2",
            "train.steps",
            {"found": 0, "allowed": "at least 1, or null"},
        ),
        ("data:\n  eval:\n    x: 3", "line 2", "data.eval.x", {"found": 3}),
        ("data:\n  train: {path: x, weight: 0}", "line 2: x", "data.train.weight", {"found": 0}),
        ("data:\n  add_tokens: [a, '']", "line 2", "data.add_tokens[1]", {"found": ""}),
        ("optim:\n  lr: 1\n  lr: 2", "line 3", "lr", {"problem_has": "line 2"}),
        ("optim:\n  lr: 1\noptim.lr: 2", "line 3", "optim.lr", {"problem_has": "line 2"}),
        ("run: a\nrun: b", "line 2", "run", {"problem_has": "line 1"}),
        ("model: qwen3_vl_2b", "line 1", "model", {"remedy_has": "defaults: [{model: NAME}]"}),
        ("defaults: [{modle: x}]", "line 1", "defaults", {"found": "modle", "remedy_has": "model"}),
        ("defaults: {model: x}", "line 1", "defaults", {"remedy_has": "- GROUP: NAME"}),
        ("defaults: [_self_]", "line 1", "defaults", {"remedy_has": "- GROUP: NAME"}),
        ("defaults: [{model: ../../x}]", "line 1", "defaults.model", {"found": "../../x"}),
        ("defaults: [{log: wandb}, {log: wandb}]", "line 1", "defaults.log", {"found": "wandb"}),
        ("defaults: [{model: qwen9}]", "defaults", "model", {"found": "qwen9"}),
        ("run: ${oc.env:HOME}", "line 1", "", {"problem_has": "'${oc.env:HOME}': ${...}"}),
        ("data: {train: [a, {path: '${x}'}]}", "line 1", "", {"problem_has": "${...}"}),
        ("run: !!python/object/apply:os.system [x]", "line 1", "", {"problem_has": "with a tag"}),
        ("train: {steps: !!int x}", "line 1", "", {"problem_has": "a value with a tag"}),
        ("<<: {run: a}", "line 1", "'<<'", {}),
        ("? [a]\n: b", "line 1", "", {"problem_has": "key"}),
        ("data: {eval: &a [*a]}", "", "", {"problem_has": 32}),
        ("[" * 2000, "", "", {"problem_has": 32}),
        (LAUGHS, "", "", {"problem_has": 10000}),
        ("train: {steps: " + "9" * 5000 + "}", "line 1", "train.steps", {"allowed_has": "whole"}),
        ("run: a\x00b", "", "", {"problem_has": "YAML"}),
    ],
)
def test_mistakes_name_the_file_and_the_line(text, place, key, more):
    place = f"my.yaml, {place}" if place else "my.yaml"
    with raises(ConfigError, place=place, key=key, **more):
        load_config(["model.path=x"], ConfigFile.parse(text, "my.yaml"))


OF_OTHERS = """\
### model
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
model: Qwen/Qwen3-VL-4B-Instruct
optim: adamw_torch
optim.lr: 1e-4
peft_config: {r: 8}
trainer:
  total_epochs: 3
  logger: [console]
  nothing_known: 1
data:
  max_prompt_length: ${oc.env:HOME}
  seed: 1
"""


def test_all_unknown_keys_of_a_file_are_answered_at_once(tmp_path, capfd):
    (tmp_path / "my.yaml").write_text(OF_OTHERS)
    assert main(["train", "--config", str(tmp_path / "my.yaml")]) == 2
    lines = capfd.readouterr().err.splitlines()
    expected = {
        2: "model_name_or_path is not a configuration key; did you mean 'model.path'?",
        3: "did you mean model=qwen3_vl_4b model.path=Qwen/Qwen3-VL-4B-Instruct?",
        4: "optim=adamw_torch is a group of keys; AdamW is what runs",
        6: "peft_config is not a configuration key; lora=default trains adapters",
        8: "trainer.total_epochs is not a configuration key; did you mean 'train.epochs'?",
        9: "trainer.logger is not a configuration key; log.trackers=[wandb,tensorboard]",
        10: "trainer.nothing_known is not a configuration key; the groups of keys are",
        12: "data.max_prompt_length is not a configuration key; data.max_tokens counts images",
    }
    assert len(lines) == len(expected)
    for line, (number, text) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"megatron-vlm: {tmp_path}/my.yaml, line {number}: ")
        assert text in line


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file():
    file = ConfigFile.parse("train:\n  steps: 3", "my.yaml")
    with raises(ConfigError, place="", key="train.steps", found=0):
        load_config(["model.path=x", "train.steps=0"], file)


def test_only_a_small_regular_file_of_text_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    (tmp_path / "latin").write_bytes(b"run: caf\xe9")
    for name, message in {
        "pipe": "named pipe",
        "large": f"{MAX_CONFIG_BYTES:,} bytes",
        "latin": "byte 8",
        "nothing": "nothing: does not exist",
        ".": "folder",
    }.items():
        with raises(ConfigError, place_has="--config: ") as caught:
            ConfigFile.read(str(tmp_path / name))
        assert message in str(caught.value)
        assert str(tmp_path / name).rstrip("/.") in str(caught.value)
    with raises(ConfigError, place_has="--config: "):
        ConfigFile.read("a\0b")


def test_other_processes_get_the_text_that_was_read(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("---\n" + MINE)
    args = parse_arguments(
        make_parser(), ["train", "data.seed=1", "--config", str(path), "train.seed=2"]
    )
    file, arguments = read_configuration(args)
    path.write_text("optim: {lr: 1}")  # a change for the next run only
    second_file, second_arguments = read_configuration(
        parse_arguments(make_parser(), ["train", *arguments])
    )
    assert second_file == file and second_arguments == arguments
    assert args.overrides == ["data.seed=1", "train.seed=2"]


def test_a_rank_reads_it_as_the_command_does(tmp_path):
    file = ConfigFile.parse("model: {path: x}\ntrain: {steps: 0}", "my.yaml")
    with raises(ConfigError, place="my.yaml, line 2", key="train.steps", found=0):
        run_train([*file.words, "data.train=a.jsonl"])
    path = tmp_path / "my.yaml"
    path.write_text("optim: {lrr: 1}")
    with raises(ConfigError, place=f"{path}, line 1", key="optim.lrr"):
        run_train(["--config", str(path)])


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["inspect"], ["eval", "x"]])
def test_every_command_with_keys_takes_it(command, tmp_path: Path, capfd):
    (tmp_path / "my.yaml").write_text("optim: {lrr: 1}")
    assert main([*command, "--config", str(tmp_path / "my.yaml")]) == 2
    assert "my.yaml, line 1: optim.lrr " in capfd.readouterr().err


def test_cfg_shows_what_the_file_resolves_to(tmp_path, capfd):
    (tmp_path / "my.yaml").write_text(MINE)
    assert main(["train", "--cfg", "job", "--config", str(tmp_path / "my.yaml"), "run=r"]) == 0
    output = capfd.readouterr().out
    cfg = load_config(["run=r"], ConfigFile.parse(MINE, "my.yaml"))
    assert from_yaml(output) == cfg


READ_BY_ALL = """\
optim: {name: muon, lr: 1e-5, muon: {momentum: 0.9}}
optim.lr: 1
parallel: {pp: 2, layers_per_stage: auto}
parallel: {pp: 2, layers_per_stage: [2, 3]}
data: {train: a.jsonl, eval: {charts: c.jsonl}}
data: {train: [a.jsonl, {path: b, weight: 2}], eval: null}
train: {steps: 3}
eval: {every: 1}
eval: {every: 100}
run: 2024
log:"""
REFUSED_BY_ALL = """\
optim: {lr: -1}
optim: {lr: fast}
optim: {learning_rate: 1}
optim: {muon: {momentum: 2}}
optim: muon
parallel: {tp: 0}
parallel: {tp: 1.5}
parallel: {layers_per_stage: [-1]}
data: {train: [{path: b, weigth: 2}]}
train: {objective: sftt}
eval: {candidates: {a: b}}
defaults: [{model: qwen}]
defaults: [{models: tiny_cpu}]
defaults: tiny_cpu
optimizer: {lr: 1}"""


def test_an_editor_with_the_schema_marks_what_is_refused_and_nothing_else():
    validator = Draft7Validator(config_schema())
    validator.check_schema(validator.schema)
    whole = to_yaml(load_config(["model.path=x", "data=shapes"], ConfigFile.parse(MINE, "my.yaml")))
    recipes = [file.read_text() for file in config_dir().glob("*/*.yaml")]
    texts = [MINE, whole, *(text for text in recipes if "_global_" in text)]
    for text in (*texts, *READ_BY_ALL.splitlines()):
        file = YamlText("")
        assert [*validator.iter_errors(file.value(file.root(text)))] == [], text
    for text in READ_BY_ALL.splitlines():
        from_yaml(whole, (), ConfigFile.parse(text, "my.yaml"))
    for text in REFUSED_BY_ALL.splitlines():
        assert not validator.is_valid(yaml.safe_load(text)), text
        with pytest.raises(ConfigError):
            load_config([], ConfigFile.parse(text, "my.yaml"))
