"""ms-swift: `swift sft` and `swift rlhf`, and Megatron-SWIFT's `megatron sft`, with options and the
YAML file of --config, or the args.json of a run."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vlm.commands.import_config import run_rules
from megatron_vlm.commands.import_config.data_rules import put_columns, put_sets, translate_split
from megatron_vlm.commands.import_config.grpo_rules import translate_grpo
from megatron_vlm.commands.import_config.hugging_face import HF_DEFAULTS, SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import translate_adapters
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.training_rules import put_rate, put_warmup, translate_rate
from megatron_vlm.commands.import_config.translation import Trainer, Translation
from megatron_vlm.config.config_file import MAX_CONFIG_BYTES
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import UntrustedFile

_ACCUMULATED = 16  # samples up to which it accumulates where it is not said
_TOKEN_PIXELS = 32 * 32  # pixels of a picture that become a token of Qwen3-VL and Qwen3.5
_MEDIA = {
    **{"data.max_pixels": "max_pixels", "data.min_pixels": "min_pixels", "data.video.fps": "fps"},
    **{"data.video.max_frames": "fps_max_frames", "data.video.min_frames": "fps_min_frames"},
}
_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".tar")
_HUB = (
    "names of data sets are those of the Hugging Face Hub here; ms-swift takes them from "
    "ModelScope unless use_hf is true"
)
_TASKS = {"embedding": "embed", "reranker": "rerank", "generative_reranker": "rerank"}


def _check_task(t: Translation) -> None:
    """Say where another task than the next token is trained."""
    task = t.given("task_type")
    if task is None or task.value == "causal_lm":
        return
    objective = _TASKS.get(str(task.value))
    if objective is None:
        raise t.source.error(task, "has no counterpart here", allowed=["causal_lm", *_TASKS])
    t.differ(
        f"this file trains answers: for {task.value} set train.objective={objective}, and see its "
        "records in docs/embeddings.md",
        task,
    )


def _translate_data(t: Translation) -> None:
    """Set files, and names such as ORG/NAME:SUBSET#COUNT."""
    names, drawn = [], []

    def sources(setting: Setting) -> list[Any]:
        found: list[Any] = []
        for text in setting.value if isinstance(setting.value, list) else [setting.value]:
            path, _, count = str(text).partition("#")
            drawn.extend([f"{count} of {path}"] if count else [])
            name, colon, subsets = path.partition(":")
            if path.endswith(_FILES) or "://" in path:
                found.append(path)
                continue
            names.append(name)
            each = [{"path": name, "subset": subset} for subset in subsets.split("/")]
            found += each if colon else [path]
        return found

    put_sets(t, "dataset", "val_dataset", sources)
    if drawn:
        t.differ(
            f"samples are drawn there ({', '.join(drawn)}), and whole data sets are read here: "
            "write the part that you want into a file of its own"
        )
    hub = t.given("use_hf")
    if names and not t.flag(hub):
        t.differ(_HUB)
    if (columns := t.given("columns")) is not None:
        put_columns(t, {str(ours): name for name, ours in t.mapping(columns).items()}, columns)
    translate_split(t)


def _translate_system(t: Translation) -> None:
    """Set data.system. A value that is the path of a file stands for its content."""
    setting = t.given("system")
    if setting is None:
        return
    words = str(setting.value)
    if words.endswith((".txt", ".md")) and len(words.split()) == 1:
        if not Path(words).is_file():
            raise t.source.error(
                setting, "is a file that does not exist here", remedy="write the prompt itself"
            )
        words = UntrustedFile(words, ConfigError).text(MAX_CONFIG_BYTES)
    t.put("data.system", words, setting)


def _translate_media(t: Translation) -> None:
    """Set the bounds of pictures and videos, which come from the environment."""
    for key, name in _MEDIA.items():
        t.copy_setting(key, t.variable(name.upper()) or t.given(name))
    for bound in ("max", "min"):
        tokens = t.variable(f"IMAGE_{bound.upper()}_TOKEN_NUM")
        if tokens is not None and f"data.{bound}_pixels" not in t.lines:
            note = f"{_TOKEN_PIXELS} pixels of a token"
            t.put(f"data.{bound}_pixels", t.whole(tokens) * _TOKEN_PIXELS, tokens, note=note)
    for name in ("VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM"):
        if (setting := t.variable(name)) is not None:
            t.differ(
                "the bound of a frame there; max_pixels of data.video counts all frames of a "
                "video, and beside a video in a record max_pixels is of each frame",
                setting,
            )


def _translate_supervision(t: Translation) -> None:
    scale = t.given("loss_scale")
    if scale is not None and scale.value == "last_round":
        t.put("data.train_on", "last_assistant", scale)
    elif scale is not None and scale.value != "default":
        t.differ("every message of data.train_on has the weight 1, or its `weight`", scale)


def _translate_batches(t: Translation) -> None:
    steps, rows = t.given("gradient_accumulation_steps"), t.take("per_device_train_batch_size")
    if steps is not None or t.method == "grpo":
        run_rules.put_device_batches(t, steps)
        return
    per_pass = (1 if rows is None else t.whole(rows)) * run_rules.replicas(t)
    count = math.ceil(_ACCUMULATED / max(1, per_pass))
    run_rules.put_device_batches(t, None, count, f"accumulated up to {_ACCUMULATED} samples")


def _translate_rate(t: Translation) -> None:
    translate_rate(t, default=1e-4 if t.has_lora else 1e-5)


def _translate_answers(t: Translation) -> None:
    if t.is_rl:
        t.set_defaults(loss_type="grpo", beta=0.04)
    translate_grpo(t)


_OWN_RULES = (
    # Where torchrun is not asked for, one process has all GPUs that it sees.
    partial(run_rules.find_gpu_count, counts_devices=False),
    *(_check_task, translate_adapters, _translate_data, _translate_system),
    *(_translate_media, _translate_supervision),
)
_DEFAULTS = {
    **{"weight_decay": 0.1, "adam_beta2": 0.95, "truncation_strategy": "delete", "lora_rank": 8},
    **{"lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"},
    **{"freeze_vit": True, "freeze_aligner": True, "freeze_llm": False},
}
MS_SWIFT = Trainer(
    title="ms-swift",
    own_names="model train_type tuner_type freeze_vit freeze_aligner freeze_llm attn_impl vit_lr "
    "aligner_lr split_dataset_ratio load_from_cache_file target_modules rlhf_type quant_bits "
    "quant_method model_author lazy_tokenize swift_version model_id_or_path sft_type "
    "dataset_shuffle add_non_thinking_prefix custom_register_path external_plugins",
    defaults=HF_DEFAULTS
    | _DEFAULTS
    | {
        **{"per_device_train_batch_size": 1, "lr_scheduler_type": "cosine", "logging_steps": 5},
        **{"report_to": "tensorboard", "gradient_checkpointing": True, "tuner_type": "lora"},
    },
    names={
        "model_name_or_path": "model model_id_or_path load mcore_model",
        "val_size": "split_dataset_ratio",
        **{"tuner_type": "tuner_type train_type sft_type", "quantization_bit": "quant_bits"},
        **{"adapter_name_or_path": "adapters adapter_load", "quantization_method": "quant_method"},
        **{"freeze_vision_tower": "freeze_vit", "freeze_language_model": "freeze_llm"},
        **{"freeze_multi_modal_projector": "freeze_aligner", "rpo_alpha": "rpo_alpha cpo_alpha"},
        **{"learning_rate": "lr learning_rate", "lr_scheduler_type": "lr_decay_style"},
        **{"max_steps": "max_steps train_iters", "adam_epsilon": "adam_eps"},
        **{"num_train_epochs": "num_train_epochs max_epochs num_epochs", "optim": "optimizer"},
        **{"warmup_steps": "lr_warmup_iters", "warmup_ratio": "lr_warmup_fraction"},
        "early_stopping_patience": "early_stop_interval",
        **{"max_grad_norm": "clip_grad", "save_steps": "save_interval"},
        **{"eval_steps": "eval_interval", "logging_steps": "log_interval", "output_dir": "save"},
    },
    same={"optim.vision_lr": "vit_lr", "optim.merger_lr": "aligner_lr"},
    rules=(*_OWN_RULES, *(_translate_batches, _translate_rate, *SHARED_RULES, _translate_answers)),
)


def _translate_megatron_batches(t: Translation) -> None:
    total = t.take("global_batch_size")
    if total is not None and t.is_rl:
        run_rules.put_prompts(t, t.whole(total), 1, [total], "prompts of a step")
    else:
        t.copy_setting("train.global_batch_size", total)
    t.copy("train.micro_batch_size", "micro_batch_size")


def _translate_megatron_rate(t: Translation) -> None:
    default = Setting("learning_rate", 1e-4 if t.has_lora else 1e-5, is_default=True)
    put_rate(t, t.given("learning_rate") or default)
    put_warmup(t)


# `megatron sft`, which has Megatron-LM's settings.
MEGATRON_SWIFT = replace(
    MS_SWIFT,
    defaults=_DEFAULTS
    | {
        **{"micro_batch_size": 1, "global_batch_size": 16, "lr_decay_style": "cosine"},
        **{"save_interval": 500, "log_interval": 5, "recompute_granularity": "selective"},
        "tuner_type": "full",
    },
    rules=(
        *_OWN_RULES,
        *(_translate_megatron_batches, _translate_megatron_rate, *SHARED_RULES, _translate_answers),
    ),
)
