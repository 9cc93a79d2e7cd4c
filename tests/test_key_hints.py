# .venv/bin/python -m pytest tests/test_key_hints.py
"""Names from other trainers are answered with our key, or with the keys that exist."""

import re
import subprocess
import sys

import pytest

from megatron_vlm.cli import main
from megatron_vlm.config import config_dir, known_keys, load_config
from megatron_vlm.config.key_hints import (
    _OTHER,
    _SAME,
    hint,
    hint_sentence,
    option_error,
    similar_keys,
)
from megatron_vlm.config.schema import leaves
from megatron_vlm.errors import ConfigError
from tests.error_fields import raises

KEYS = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "optim.learning_rate": "optim.lr",
    "optimizer.lr": "optim.lr",
    "training.num_train_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "model.name_or_path": "model.path",
    "output_dir": "run",
    "freeze_vit": "model.freeze_vision",
    "freeze_vision_tower": "model.freeze_vision",
    "freeze_aligner": "model.freeze_merger",
    "freeze_llm": "model.freeze_language",
    "lora_rank": "lora.rank",
    "lora.r": "lora.rank",
    "peft.r": "lora.rank",
    "use_rslora": "lora.rslora",
    "adapter_name_or_path": "lora.path",
    "log.rank": "lora.rank",
    "vit_lr": "optim.vision_lr",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "logging_steps": "log.every",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.clip_grad",
    "adam_beta2": "optim.beta2",
    "dataloader_num_workers": "data.num_workers",
    "tensor_model_parallel_size": "parallel.tp",
    "max_pixels": "data.max_pixels",
    "video_maxlen": "data.video_max_frames",
    "video_fps": "data.video_fps",
    "packing": "train.packing",
    "warmup_steps": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_ratio",
    "global_batch_size": "train.global_batch_size",
    "nproc_per_node": "launch.processes",
    # near misses
    "modle.path": "model.path",
    "model.pth": "model.path",
    "optim.lrr": "optim.lr",
    "train.packed": "train.packing",
    "data.max_token": "data.max_tokens",
    "checkpoint.keep_lsat": "checkpoint.keep_last",
}
SENTENCES = {
    "use_lora": "lora=default trains adapters",
    "lora.target_modules": "lora.targets is a list",
    "modules_to_save": "lora.train names the parts",
    "use_dora": "adapters are plain LoRA",
    "video_max_pixels": "all frames of a video together",
    "quantization_bit": "not quantized",
    "finetuning_type": "lora=default trains adapters",
    "per_device_train_batch_size": "train.micro_batch_size is the rows of one pass",
    "gradient_accumulation_steps": "train.global_batch_size is the samples of a whole step",
    "per_device_eval_batch_size": "eval.batch_size is",
    "max_seq_length": "data.max_tokens counts images, too",
    "cutoff_len": "data.max_tokens counts images, too",
    "max_length": "data.max_tokens counts images, too",
    "dataset": "data.train and data.eval are files",
    "bf16": "train.precision is auto, bf16 or fp32",
    "fp16": "fp16 is not trained",
    "torch_dtype": "train.precision",
    "deepspeed": "parallel.distributed_optimizer",
    "lr_scheduler_type": "constant, linear, cosine or wsd",
    "gradient_checkpointing": "model.recompute",
    "attn_impl": "model.backend=te",
    "resume_from_checkpoint": "checkpoint.resume is auto",
    "load_best_model_at_end": "checkpoint.best=SET/SCORE",
    "report_to": "log.wandb=PROJECT",
    "save_strategy": "checkpoint.every",
    "val_size": "name held-out data in data.eval",
    "template": "chat template",
    "mask_history": "data.train_on",
    "streaming": "streaming: true",
    "stage": "supervised fine-tuning",
}
# Values that people write for these keys in other trainers. All other keys take a whole number.
_SWITCH, _DATA = ("true", "false", "True"), ("chats.jsonl", "[a.json,b.json]", "org/name")
TYPICAL: dict[str, tuple[str, ...]] = {
    "model.path": ("Qwen/Qwen3-VL-2B-Instruct", "/models/base"),
    "model.recompute": ("full", "selective"),
    **{f"model.freeze_{part}": _SWITCH for part in ("vision", "merger", "language")},
    **dict.fromkeys(("parallel.distributed_optimizer", "data.shuffle", "eval.generate"), _SWITCH),
    **dict.fromkeys(("data.train", "data.eval"), _DATA),
    "data.image_root": ("images",),
    **dict.fromkeys(("optim.lr", "optim.vision_lr", "optim.merger_lr", "optim.eps"), ("1e-5",)),
    **dict.fromkeys(("optim.beta1", "optim.beta2"), ("0.9", "0.95")),
    "optim.clip_grad": ("1.0", "1"),
    "optim.warmup_ratio": ("0.03",),
    "lora.alpha": ("16", "32.0"),
    "lora.dropout": ("0.05",),
    "lora.rslora": _SWITCH,
    "lora.path": ("out/adapter",),
    "log.wandb": ("project",),
    "run": ("out/first",),
}
# Values that sentences list in words. Other sentences give whole settings: model.backend=te.
NAMED = {
    "train.precision": ("auto", "bf16", "fp32"),
    "optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "checkpoint.resume": ("auto", "never"),
}
NOTHING = {
    "foo": "the groups of keys are model, lora, parallel, data",
    "rank.foo": "the groups of keys are",
    "log.xx": "the keys of log are every, tensorboard",
    "optim.xx": "the keys of optim are lr, vision_lr",
    "parallel.xx": "the keys of parallel are tp, pp",
}


def test_a_name_in_two_groups_is_answered_with_both():
    remedy = "'eval.max_new_tokens' or 'rl.max_new_tokens'"
    with raises(ConfigError, key="max-new-tokens", remedy_has=remedy):
        load_config(["max-new-tokens=1"])


@pytest.mark.parametrize("wrong", KEYS)
def test_answered_with_our_key(wrong):
    with raises(ConfigError, key=wrong, remedy=f"did you mean {KEYS[wrong]!r}?"):
        load_config([f"{wrong}=1"])


@pytest.mark.parametrize("wrong", SENTENCES)
def test_answered_with_what_there_is(wrong):
    with raises(ConfigError, key=wrong, remedy_has=SENTENCES[wrong]) as caught:
        load_config([f"{wrong}=1"])
    assert "did you mean" not in caught.value.remedy


@pytest.mark.parametrize("wrong", NOTHING)
def test_nothing_is_suggested_where_nothing_is_near(wrong):
    assert similar_keys(wrong) == [] and hint_sentence(wrong) is None
    assert NOTHING[wrong] in hint(wrong)


def test_several_keys_of_that_name_are_all_named():
    assert hint("seed") == "did you mean 'data.seed' or 'train.seed'?"


def test_the_tables_name_keys_that_exist_and_no_name_twice():
    assert set(_SAME) <= set(known_keys())
    names = [name for row in (*_SAME.values(), *_OTHER.values()) for name in row.split()]
    assert len(names) == len(set(names)) and not set(names) & set(known_keys())


def spellings(name: str) -> tuple[str, ...]:
    return name, f"training.{name}", name.replace("_", "-")


def accepted(setting: str) -> None:
    more = ["lora.rank=8"] if setting.startswith("lora.") and "lora.rank" not in setting else []
    more += ["model.path=base"] if "model.path" not in setting else []
    load_config([setting, *more])


@pytest.mark.parametrize("key", _SAME)
def test_every_name_of_others_leads_to_a_key_that_takes_its_value(key):
    values = TYPICAL.get(key, ("2",))
    for name in _SAME[key].split():
        hints = [hint(written) for written in spellings(name)]
        assert hints == [f"did you mean {key!r}?"] * 3
        assert option_error(f"--{name}", values[0]).remedy == f"write {key}={values[0]}"
    for value in values:
        accepted(f"{key}={value}")


@pytest.mark.parametrize("text", _OTHER)
def test_every_sentence_names_keys_and_values_that_are_accepted(text):
    for name in _OTHER[text].split():
        assert [hint(written) for written in spellings(name)] == [text] * 3
    groups = "|".join(sorted({key.partition(".")[0] for key in leaves() if "." in key}))
    for key in re.findall(rf"\b(?:{groups})\.\w+", text):
        assert key in leaves(), key
    for key, values in NAMED.items():
        for value in values if text.startswith(f"{key} is ") else ():
            assert value in text
            accepted(f"{key}={value}")
    for setting in re.findall(rf"\b((?:(?:{groups})\.\w+|run)=(?:\{{.*?\}}|[\w/]+))", text):
        if setting != "checkpoint.best=SET/SCORE":  # needs a set of data.eval
            accepted(setting)
    if "checkpoint.best=SET/SCORE" in text:
        load_config(["model.path=x", "checkpoint.best=held/loss", "data.eval={held: a.jsonl}"])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--lr", "1e-5"], "--lr=1e-5: settings are given as KEY=VALUE; write optim.lr=1e-5"),
        (["--learning-rate=1e-5"], "write optim.lr=1e-5"),
        (["--model.path", "DIR", "optim.lr=1"], "write model.path=DIR"),
        (["--train.packing", "optim.lr=1"], "write train.packing=VALUE"),
        (["optim.lr=1", "--output_dir", "out"], "write run=out"),
        (["--lora_rank", "8"], "write lora.rank=8"),
        (["--use_lora", "true"], "--use_lora=true: .* lora=default trains adapters"),
        (["--seed", "-1"], "did you mean 'data.seed' or 'train.seed'"),
        (["--model", "Qwen/Qwen3-VL"], "model=NAME chooses a recipe, model.KEY=VALUE sets a value"),
        (["--dryrun"], "--dryrun is not an option; did you mean --dry-run"),
        (["--dry"], "--dry is not an option; did you mean --dry-run"),
        (["--frobnicate", "3"], "--frobnicate=3 is not an option; the groups of keys are"),
        (["mine.yaml"], "mine.yaml: .* as --config mine.yaml"),
        (["train"], "train: arguments are given as KEY=VALUE"),
    ],
)
def test_options_are_answered_with_what_to_write(words, answer, capfd):
    assert main(["train", *words]) == 2
    output = capfd.readouterr().err
    assert output.startswith("megatron-vlm: ") and len(output.splitlines()) == 1
    assert re.search(answer, output), output


def test_help_names_every_key_and_recipe_and_needs_no_torch():
    code = (
        "import sys\nfrom megatron_vlm.cli import main\n"
        "for words in ([], ['train'], ['eval'], ['inspect'], ['chat']):\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as error: assert not error.code\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    output = done.stdout
    assert output.rstrip().endswith("set()") and output.count("--config FILE") >= 3
    words = output.split()
    for key in leaves():
        assert key.rpartition(".")[2] in words, key
    for file in config_dir().glob("*/*.yaml"):
        assert file.stem in words or file.stem == "default"
    for command in ("train", "eval", "export", "chat", "report", "doctor", "inspect"):
        assert f"    {command}" in output
