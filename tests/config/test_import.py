# .venv/bin/python -m pytest tests/config/test_import.py
"""Configurations of other trainers become ours, line by line, or are refused with their line."""

import json
import re
from pathlib import Path

import pytest

from megatron_vlm.cli import main
from megatron_vlm.commands.import_config.command import read_source, translated_text
from megatron_vlm.config import ConfigFile, load_config
from megatron_vlm.config.checks import check_training
from megatron_vlm.config.command_checks import check_used
from megatron_vlm.config.schema import Config, get
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises
from tests.support.suites import quick
from tests.support.tables import in_one_test
from tests.support.trainer_examples import run_script, script_text, texts, yaml_text
from tests.support.trainer_fields import GOLDEN, fields_of, outcomes
from tests.support.trainer_scripts import FILES, SCRIPTS

EXAMPLES = texts()
FIELDS = json.loads(GOLDEN.read_text())
# Examples that cannot be translated, with the key that says why.
REFUSED = {
    "LLaMA-Factory extras/oft/qwen2_5vl_oft_sft": "finetuning_type",
    "LLaMA-Factory extras/oft/qwen2_5vl_oft_dpo": "finetuning_type",
    "ms-swift train/multimodal/lora_llm_full_vit/sft": "train_type",
}


def read(folder: Path, name: str, text: str):
    """Read the settings of a file with this text, or of the command that a script starts."""
    if name.endswith(".sh"):
        return read_source(*run_script(text, folder, RAY_DATA_HOME="/data"))
    path = folder / name
    path.write_text(text)
    return read_source([str(path)], {})


def file_of(given) -> tuple[str, str]:
    """Return the name and the text of the file of a case."""
    if isinstance(given, dict):
        return "a.yaml", yaml_text(given)
    if isinstance(given, tuple):
        return given
    return "a.sh" if "megatron-vlm import" in given else "a.yaml", given


def translate(folder: Path, name: str, text: str, **options) -> tuple[str, Config]:
    """Return the printed YAML of a file or script, and what our trainer makes of it."""
    printed = translated_text(read(folder, name, text), **options)
    return printed, started(printed)


def started(printed: str) -> Config:
    """Return the configuration, with what a start refuses before it opens a file."""
    file = ConfigFile.parse(printed, "ours.yaml")
    words = " ".join(re.sub(r"\n *#", " ", printed).split())
    given = [each for each in ("data.train=a", "train.steps=7") if f"give {each[:10]}" in words]
    check_training(load_config(given, file))
    command = re.search(r"megatron-vlm (train|rl) --config", printed)[1]
    cfg = load_config([], file)
    assert check_used(cfg, command, [], file) is None  # no key without effect
    return cfg


# One of each trainer, and those that are refused.
QUICK = {name.partition(" ")[0]: name for name in reversed(EXAMPLES)}.values()


@pytest.mark.parametrize("name", quick({*QUICK, *REFUSED}, EXAMPLES))
def test_examples_of_other_trainers_are_translated_whole(name, tmp_path):
    """Every key of an example is in the output, which load_config has taken: beside a value, or
    with what is here instead."""
    file, text = EXAMPLES[name]
    if name in REFUSED:
        with raises(ConfigError, key=REFUSED[name]) as caught:
            translate(tmp_path, file, text)
        line = caught.value.place.rpartition("line ")[2]
        assert file == "swift.sh" or REFUSED[name] in text.splitlines()[int(line) - 1]
        return
    source = read(tmp_path, file, text)
    given = {key for key, each in source.settings.items() if each.value is not None}
    printed = translated_text(source, gpus=8)
    assert [key for key in given if key not in printed] == []
    assert started(printed)
    values = ConfigFile.parse(printed, "ours.yaml").values
    assert values["model.path"] and (values.get("data.train") or "give data.train" in printed)


QUICK_SCRIPTS = {
    "ms-swift: variables, a sum and a comment",
    "ms-swift: rlhf with a loop, a function and arguments",
    "Megatron-SWIFT: a layout that fits",
    "LLaMA-Factory: a file, and values after it",
    "TRL: a file, options over it, and processes",
    "verl: arrays of overrides",
}


@pytest.mark.parametrize("name", quick(QUICK_SCRIPTS, SCRIPTS))
def test_scripts_are_read_as_bash_reads_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    script, wanted, notes = SCRIPTS[name]
    printed, cfg = translate(tmp_path, "run.sh", script)
    assert {key: get(cfg, key) for key in wanted} == wanted
    words = " ".join(re.sub(r"\n *#", " ", printed).split())
    assert all(note in words for note in notes.split("; ") if note)


LF = {"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct", "stage": "sft", "finetuning_type": "full"}
LF |= {"dataset": "a", "learning_rate": 1e-5}
LF_LORA = LF | {"finetuning_type": "lora"}
SWIFT = {"model": "Qwen/Qwen3-VL-2B-Instruct", "dataset": "chats.jsonl", "tuner_type": "full"}
AXOLOTL = {"base_model": "Qwen/Qwen3.5-4B", "datasets": [{"path": "a.jsonl"}]}
AXOLOTL |= {"sequence_len": 2048, "learning_rate": 1e-5}
TRL = {"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct", "dataset_name": "org/set"}
VERL = "verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-VL-2B-Instruct"
_BATCH = {"per_device_train_batch_size": 8, "num_generations": 8}
# A case: the keys of a file, a text or a script; our keys with their values; and options.
VALUES = {
    "batch of all GPUs": (
        LF | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        {"train.global_batch_size": 24, "train.micro_batch_size": 2, "lora.rank": 0},
        {"gpus": 4},
    ),
    "batch of data parallel GPUs": (
        script_text("swift sft", SWIFT | {"sequence_parallel_size": 2}, "NPROC_PER_NODE=8"),
        {"train.global_batch_size": 16, "optim.weight_decay": 0.1, "optim.beta2": 0.95},
    ),
    "defaults of LLaMA-Factory": (
        {key: LF_LORA[key] for key in LF_LORA if key != "learning_rate"},
        {"optim.lr": 5e-5, "optim.schedule": "linear", "lora.rank": 8, "lora.alpha": 16}
        | {"data.max_tokens": 2048, "data.max_pixels": 589824, "train.global_batch_size": 8}
        | {"model.freeze_vision": False, "lora.targets": ("attention", "mlp")},
    ),
    "frozen parts choose the layers of adapters": (
        LF_LORA | {"freeze_vision_tower": False, "lora_target": "all"},
        {"lora.targets": ("attention", "mlp", "vision_attention", "vision_mlp")},
    ),
    "four bits": (
        LF_LORA | {"quantization_bit": 4, "quantization_method": "bnb"},
        {"lora.base": "nf4"},
    ),
    "simpo of LLaMA-Factory": (
        LF_LORA | {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0},
        {"train.objective": "simpo", "preference.beta": 2.0},
    ),
    "share of the warm-up, and the final rate": (
        script_text("megatron sft", SWIFT | {"lr": "1e-4", "min_lr": "1e-5"}),
        {"optim.lr": 1e-4, "optim.min_lr_ratio": 0.1, "train.global_batch_size": 16},
    ),
    "prompts of Megatron-SWIFT's answers": (
        script_text(
            "megatron rlhf",
            SWIFT | {"rlhf_type": "grpo", "global_batch_size": 16, "steps_per_generation": 3},
        ),
        {"train.global_batch_size": 6, "rl.updates": 3},
    ),
    "constant has no warm-up in transformers": (
        LF | {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
        {"optim.schedule": "constant", "optim.warmup_ratio": None},
    ),
    "warm-up of a constant rate": (
        LF | {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7},
        {"optim.schedule": "constant", "optim.warmup_steps": 7},
    ),
    "words of YAML 1.1": (
        yaml_text(LF).replace('"full"', "full") + "bf16: yes\nsave_strategy: no\n",
        {"train.precision": "bf16", "checkpoint.every": 0},
    ),
    "evaluations without a set are left out": (
        LF | {"eval_strategy": "steps", "eval_steps": 5},
        {"eval.every": None},
    ),
    "the best checkpoint": (
        yaml_text(LF | {"val_size": 0.1, "eval_strategy": "epoch"})
        + "load_best_model_at_end: true\n",
        {"eval.every": "1 epoch", "checkpoint.best": "held_out/loss"},
    ),
    "columns of axolotl": (
        yaml_text(AXOLOTL | {"datasets": [{"path": "a.jsonl", "field_messages": "dialog"}]})
        + "train_on_inputs: true\n",
        {
            "data.train": [("a.jsonl", {"messages": "dialog"})],
            "data.train_on": ("system", "user", "assistant", "tool"),
        },
    ),
    "a pattern of layers": (
        yaml_text(AXOLOTL | {"adapter": "lora", "lora_r": 4, "lora_alpha": 8})
        + "lora_target_modules: 'model.language_model.layers.[\\d]+.self_attn.(q|v)_proj'\n",
        {"lora.targets": ("q_proj", "v_proj"), "lora.rank": 4},
    ),
    "a pattern of Gemma's tower": (
        yaml_text(AXOLOTL | {"base_model": "google/gemma-4-31B-it", "adapter": "lora"})
        + "lora_target_modules: 'model.vision_tower.encoder.layers.0.mlp.(up|down)_proj.linear'\n",
        {"lora.targets": ("vision_mlp",)},
    ),
    "TRL as JSON, with tabs": (
        (
            "a.json",
            '{\n\t"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct",\n\t"dataset_name": "org/set",'
            '\n\t"assistant_only_loss": true,\n\t"max_steps": 7\n}\n',
        ),
        {"train.steps": 7, "optim.lr": 2e-5, "data.max_tokens": 1024},
    ),
    "dpo of TRL": (
        TRL | {"beta": 0.3},
        {"train.objective": "dpo", "preference.beta": 0.3, "optim.lr": 1e-6},
        {"task": "dpo"},
    ),
    "a reward model of TRL": (
        TRL | {"center_rewards_coefficient": 0.01},
        {"train.objective": "reward", "reward.center_coef": 0.01},
        {"task": "reward"},
    ),
    "a reward model of LLaMA-Factory": (
        LF | {"stage": "rm"},
        {"train.objective": "reward", "reward.center_coef": 0.0},
    ),
    "prompts of TRL's answers": (
        TRL | {"num_generations": 4, "per_device_train_batch_size": 8},
        {"train.global_batch_size": 4, "rl.samples": 4, "rl.aggregate": "tokens"}
        | {"data.max_tokens": 8192, "data.truncation": "error"},  # which it does not limit
        {"task": "grpo", "gpus": 2},
    ),
    "defaults of TRL's rloo": (
        TRL,
        {"rl.samples": 2, "rl.kl_coef": 0.05, "train.global_batch_size": 4},
        {"task": "rloo"},
    ),
    "a rank without adapters": (
        TRL | {"lora_r": 32, "lora_alpha": 64},
        {"lora.rank": 0, "lora.alpha": Config().lora.alpha},
    ),
    "tokens of LLaMA-Factory": (
        LF | {"add_tokens": "<a>,<b>", "add_special_tokens": "<c>", "resize_vocab": "true"},
        {"data.add_tokens": ("<a>", "<b>", "<c>")},
    ),
    "tokens of ms-swift": (
        script_text("swift sft", SWIFT | {"new_special_tokens": ["<a>", "<b>"]}),
        {"data.add_tokens": ("<a>", "<b>")},
    ),
    "rewards that nothing divides": (
        TRL | _BATCH | {"scale_rewards": "none"},
        {"rl.advantage": "dr_grpo"},
        {"task": "grpo"},
    ),
    "rewards that their prompt divides": (
        script_text("swift rlhf", SWIFT | {"rlhf_type": "grpo", "scale_rewards": "group"} | _BATCH),
        {"rl.advantage": "grpo"},
    ),
    "rloo of ms-swift": (
        script_text(
            "swift rlhf", SWIFT | {"rlhf_type": "grpo", "advantage_estimator": "rloo"} | _BATCH
        ),
        {"rl.advantage": "rloo"},
    ),
    "weights and smoothing of dpo's losses": (
        TRL | {"loss_type": ["robust", "ipo"], "loss_weights": [1, 0.5], "label_smoothing": 0.1},
        {"preference.losses": ("robust", "ipo"), "preference.loss_weights": (1.0, 0.5)}
        | {"preference.label_smoothing": 0.1},
        {"task": "dpo"},
    ),
    "parts beside adapters": (
        LF_LORA | {"additional_target": "merger", "enable_liger_kernel": "true"},
        {"lora.train": ("merger",)},
    ),
    "evaluations without a better one": (
        AXOLOTL
        | {"val_set_size": 0.1, "early_stopping_patience": 3, "eval_steps": 50}
        | {"tokens": ["<a>", "<b>"], "loss_watchdog_threshold": 5.0},
        {"train.early_stopping": 3, "checkpoint.best": "held_out/loss"}
        | {"data.add_tokens": ("<a>", "<b>")},
    ),
    "temperature of verl's evaluations": (
        f"megatron-vlm import {VERL} algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.7 "
        "actor_rollout_ref.model.use_fused_kernels=true data.val_files=b.parquet\n",
        {"rl.eval_temperature": 0.7},
    ),
    "settings that mean nothing here": (
        TRL | {"dataset_kwargs": {"a": 1}, "model_kwargs": {"b": 2}, "interleave_prob": [1]},
        {"optim.lr": 2e-5},
    ),
    "an argument file of ms-swift": (
        (
            "args.json",
            '{"swift_version": "3.9", "model": "Qwen/Qwen3-VL-2B-Instruct", "rank": -1,'
            ' "dataset": ["a.jsonl"], "tuner_type": "full", "model_suffix": "x"}',
        ),
        {"data.train": [("a.jsonl", None)]},
    ),
    "trackers of LLaMA-Factory": (
        LF | {"report_to": "tensorboard", "use_swanlab": "true", "swanlab_project": "shapes"},
        {"log.trackers": ("tensorboard", "swanlab"), "log.project": "shapes"},
    ),
    "trackers of axolotl": (
        AXOLOTL | {"mlflow_experiment_name": "shapes", "mlflow_tracking_uri": "http://localhost"},
        {"log.trackers": ("mlflow",), "log.project": "shapes"},
    ),
    "trackers of TRL": (
        TRL | {"report_to": ["trackio", "comet_ml"]},
        {"log.trackers": ("trackio",), "log.project": "huggingface"},
    ),
    "references of OmegaConf": (
        "actor_rollout_ref:\n"
        "  model: {path: Qwen/Qwen3-VL-2B-Instruct, enable_gradient_checkpointing: false}\n"
        "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}\n"
        "data: {train_files: a.parquet, train_batch_size: 64}\n"
        "trainer: {experiment_name: x, default_local_dir: 'out/${trainer.experiment_name}'}\n",
        {"run": "out/x", "rl.advantage": "dr_grpo", "train.global_batch_size": 64},
    ),
    "a value with a comment and a line break": (
        LF | {"default_system": "One.\n# two: 2\x1b[0m"},
        {"data.system": "One.\n# two: 2\x1b[0m"},
    ),
}


QUICK_VALUES = {
    "batch of all GPUs",
    "batch of data parallel GPUs",
    "defaults of LLaMA-Factory",
    "frozen parts choose the layers of adapters",
    "columns of axolotl",
    "prompts of TRL's answers",
    "references of OmegaConf",
    "trackers of LLaMA-Factory",
}


@pytest.mark.parametrize("case", quick(QUICK_VALUES, VALUES))
def test_values_are_converted(case, tmp_path):
    given, wanted, *options = VALUES[case]
    printed, cfg = translate(tmp_path, *file_of(given), **dict(*options))
    assert "Not used there either" not in printed
    for key, value in wanted.items():
        found = get(cfg, key)
        if key == "data.train":
            found = [(each.path, each.columns) for each in found]
        assert found == value, key


# A case: the keys of a file, a text or a script; fields of the error; and options.
MISTAKES = {
    "nobody's": ("foo: 1\n", {"remedy_has": "--from llamafactory|ms-swift"}),
    "two trainers": (
        "stage: sft\nbase_model: x\n",
        {"problem_has": "stage of llamafactory", "remedy_has": "--from"},
    ),
    "no YAML": ("a: [\n", {"place_has": "line 2"}),
    "twice": ("stage: sft\nstage: dpo\n", {"place_has": "line 2"}),
    "another ending": (("a.txt", "stage: sft\n"), {"remedy_has": "give a YAML"}),
    "no model": ("stage: sft\nfinetuning_type: full\n", {"key": "model_name_or_path"}),
    "an unknown key": (
        yaml_text(LF) + "frobnicate: 3\n",
        {"place_has": "line 6", "key": "frobnicate", "remedy_has": "--ignore frobnicate"},
    ),
    "raw text": (LF | {"stage": "pt"}, {"place_has": "line 2", "key": "stage", "found": "pt"}),
    "a schedule": (
        LF | {"lr_scheduler_type": "polynomial"},
        {"key": "lr_scheduler_type", "place_has": "line 6"},
    ),
    "an optimizer": (LF | {"optim": "adafactor"}, {"found": "adafactor"}),
    "bits": (LF_LORA | {"quantization_bit": 3}, {"found": 3}),
    "no number": (LF | {"learning_rate": "x"}, {"allowed": "a number"}),
    "a value that is ours to refuse": (
        LF | {"learning_rate": -1},
        {"key": "optim.lr", "place_has": "line 5", "found": -1},
    ),
    "a slow pattern": (
        AXOLOTL | {"adapter": "lora", "lora_target_modules": "(a+)+x"},
        {"key": "lora_target_modules", "problem": "is not tried"},
    ),
    "keys of another command": (
        TRL | {"beta": 0.1},
        {"key": "beta", "remedy_has": "--command dpo"},
    ),
    "answers that fill no prompt": (
        TRL | {"num_generations": 7, "per_device_train_batch_size": 8},
        {"key": "num_generations", "remedy_has": "--gpus N"},
        {"task": "grpo"},
    ),
    "a reference that leads nowhere": (
        AXOLOTL | {"output_dir": "${oc.env:HOME}/out"},
        {"key": "output_dir", "problem_has": "reference", "remedy": "write the value"},
    ),
    "references of references": (
        "stage: sft\na0: xxxxxxxxxx\n"
        + "".join(f"a{i + 1}: ${{a{i}}}${{a{i}}}\n" for i in range(40)),
        {"key_has": "a", "problem_has": "more than 65536 letters"},
    ),
    "a megabyte": ("a: [\n" + "1,\n" * 2**18, {"problem_has": "65,536 bytes"}),
    "a number of 400 digits": (
        LF | {"num_train_epochs": 10**400},
        {"key": "num_train_epochs", "allowed": "a number"},
    ),
    "a sum without a result": (
        script_text("swift sft", SWIFT | {"gradient_accumulation_steps": '$(expr "" + 5)'}),
        {"key": "gradient_accumulation_steps", "found": True, "allowed": "a number"},
    ),
    "400 digits beside another value": (
        LF | {"warmup_steps": 10**400, "warmup_ratio": "9" * 400},
        {"key": "warmup_steps", "allowed": "a number"},
    ),
    "no command": ("megatron-vlm import echo hi\n", {"remedy_has": "in front of"}),
    "a word": ("megatron-vlm import swift sft x\n", {"remedy_has": "--NAME VALUE"}),
    "words without end": (
        "megatron-vlm import swift sft $(seq 20000)\n",
        {"key": "import", "problem": "is followed by 20002 words, and at most 4000 are read"},
    ),
    "a name of many parts": (
        f"megatron-vlm import {VERL} algorithm.adv_estimator=grpo {'a.' * 50_000}a=1\n",
        {"key_has": "a.a.a", "problem_has": "is no key of verl"},
    ),
    "tokens in a file": (
        script_text("swift sft", SWIFT | {"new_special_tokens": "a.txt"}),
        {"key": "new_special_tokens", "problem": "names the file a.txt"},
    ),
    "a file that is not there": (
        script_text("swift sft", SWIFT | {"system": "nowhere.txt"}),
        {"key": "system", "problem_has": "does not exist"},
    ),
    "rewards that the batch divides": (
        TRL | _BATCH | {"scale_rewards": "batch"},
        {"key": "scale_rewards", "found": "batch", "problem": "has no counterpart here"},
        {"task": "grpo"},
    ),
    "rewards of ms-swift that each function's own deviation divides": (
        script_text("swift rlhf", SWIFT | {"rlhf_type": "grpo", "scale_rewards": "gdpo"} | _BATCH),
        {"key": "scale_rewards", "found": "gdpo", "allowed": ["false", "group", "none", "true"]},
    ),
    "the answers of a batch": (
        script_text(
            "megatron rlhf",
            SWIFT | {"rlhf_type": "grpo", "advantage_estimator": "reinforce_plus_plus"},
        ),
        {"key": "advantage_estimator", "found": "reinforce_plus_plus"},
    ),
    "no estimator": (
        f"megatron-vlm import {VERL} algorithm.adv_estimator=null\n",
        {"key": "algorithm.adv_estimator", "remedy_has": "no critic"},
    ),
    "a critic": (
        f"megatron-vlm import {VERL}\n",
        {"key": "algorithm.adv_estimator", "found": "gae", "remedy_has": "no critic"},
    ),
}


@in_one_test("case", MISTAKES)
def test_what_cannot_be_translated_is_refused_with_its_line(case, tmp_path):
    given, fields, *options = MISTAKES[case]
    file, text = file_of(given)
    with raises(ConfigError, **fields) as caught:
        translate(tmp_path, file, text, **dict(*options))
    assert file.endswith(".sh") or file in caught.value.place


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("google/gemma-4-31B-it", ""),
        ("google/gemma-4-26B-A4B-it", ""),
        ("Qwen/Qwen3.8-27B", ""),
        ("google/gemma-4-E4B-it", "E2B, E4B and 12B are not"),
        ("acme/some-vl", "not that of a known model"),
    ],
)
def test_a_model_that_is_not_trained_is_named(model, said, tmp_path):
    printed, _ = translate(tmp_path, "a.yaml", yaml_text(AXOLOTL | {"base_model": model}))
    sentences = " ".join(printed.replace("#", "").split())
    assert ("this version trains" in sentences) == bool(said) and said in sentences


def test_all_mistakes_are_reported_at_once(tmp_path):
    text = yaml_text(LF | {"learning_rate": "x", "one": 1, "optim": "adafactor", "two": 2})
    with raises(ConfigError) as caught:
        translate(tmp_path, "a.yaml", text)
    errors = (caught.value, *caught.value.further)
    assert [error.key for error in errors] == ["learning_rate", "optim", "one", "two"]


@in_one_test("trainer", FIELDS)
def test_every_field_of_a_trainer_is_read_answered_or_asked_about(trainer):
    """python -m tests.support.trainer_fields writes the table anew."""
    names = [name for kind in FIELDS[trainer].values() for name in kind]
    assert outcomes(trainer, names) == FIELDS[trainer]


@pytest.mark.slow
@pytest.mark.engine("trl")
def test_the_table_has_the_fields_of_the_trl_that_is_installed():
    folders = (Path(__file__).parents[2] / ".venv-trl/lib").glob("python3*/site-packages")
    names = [name for kind in FIELDS["trl"].values() for name in kind]
    assert fields_of([*folders])["trl"] == sorted(names)


def test_one_option_leaves_out_every_key_that_is_not_known(tmp_path):
    asked = FIELDS["axolotl"]["asked"]
    (tmp_path / "a.yaml").write_text(yaml_text(AXOLOTL | dict.fromkeys(asked, 7)))
    words = ["import", str(tmp_path / "a.yaml")]
    with raises(ConfigError) as caught:
        translate(tmp_path, "a.yaml", yaml_text(AXOLOTL | dict.fromkeys(asked, 7)))
    errors = (caught.value, *caught.value.further)
    *others, remedy = [error.remedy for error in errors]
    names = remedy.rpartition("--ignore ")[2]
    assert not any(others) and names.split(",") == [error.key for error in errors]
    assert len(errors) > 150 and main([*words, "--ignore", names]) == 0


def test_the_command_prints_a_file_for_train(tmp_path, capsys):
    path = tmp_path / "lf.yaml"
    path.write_text(yaml_text(LF | {"frobnicate": 1, "output_dir": "out"}))
    words = ["import", str(path), "--gpus", "8", "--ignore", "frobnicate"]
    assert main(words) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    lines = ours.read_text().splitlines()
    assert "#   megatron-vlm train --config FILE.yaml" in lines
    assert "  lr: 1e-05  # learning_rate (line 5)" in lines
    assert "  freeze_vision: true  # freeze_vision_tower (the default of LLaMA-Factory)" in lines
    assert main(["train", "--cfg", "job", "--config", str(ours)]) == 0
    assert "run: out\n" in capsys.readouterr().out
    assert main([*words[:2], "--gpus", "0"]) == 2
    assert "--gpus=0; give at least 1" in capsys.readouterr().err
    assert main(["import", "run.sh"]) == 2
    assert "write `megatron-vlm import` in front" in capsys.readouterr().err
