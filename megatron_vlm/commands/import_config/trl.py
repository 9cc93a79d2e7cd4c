"""TRL: `trl sft` and its kin, or one of its scripts, with options and the YAML file of
--config."""

from typing import Any

from megatron_vlm.commands.import_config.data_rules import translate_split
from megatron_vlm.commands.import_config.grpo_rules import translate_grpo
from megatron_vlm.commands.import_config.hugging_face import HF_DEFAULTS, SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import put_adapters
from megatron_vlm.commands.import_config.run_rules import find_gpu_count, translate_device_batches
from megatron_vlm.commands.import_config.training_rules import translate_rate
from megatron_vlm.commands.import_config.translation import Trainer, Translation, is_off


def _check_command(t: Translation) -> None:
    """Refuse a file that is for another command than sft: its keys mean other things."""
    if t.task or t.source.command:
        return
    for name in ("num_generations", "max_completion_length", "reward_funcs", "beta"):
        if (setting := t.given(name)) is not None:
            raise t.source.error(
                setting,
                "is no key of trl sft",
                remedy="say for which command the file is: --command dpo|kto|orpo|cpo|grpo",
            )


def _translate_adapters(t: Translation) -> None:
    if (setting := t.switched_on("use_peft")) is not None:
        put_adapters(t, setting)


def _translate_data(t: Translation) -> None:
    name, subset = t.given("dataset_name"), t.given("dataset_config", "dataset_config_name")
    train, test = t.take("dataset_train_split"), t.take("dataset_test_split")
    stream = t.given("dataset_streaming", "streaming")
    strategy = t.given("eval_strategy", "evaluation_strategy")
    if name is None:
        return
    entry: dict[str, Any] = {"path": str(name.value)}
    if subset is not None:
        entry["subset"] = str(subset.value)
    held_out = entry | {"split": str(test.value if test else "test")}
    if train is not None and train.value != "train":
        entry["split"] = str(train.value)
    if stream is not None and t.flag(stream):
        entry["streaming"] = True
        if t.given("max_steps") is None:
            t.differ("a stream has no length: give train.steps", stream)
    t.put("data.train", entry["path"] if len(entry) == 1 else entry, name, subset, train)
    if strategy is not None and not is_off(strategy.value):
        t.put("data.eval", held_out, name, test)


def _translate_supervision(t: Translation) -> None:
    only = t.take("assistant_only_loss") if t.method == "sft" else None
    if only is not None and not t.flag(only):
        t.differ(
            "only messages of the assistant are learnt, where TRL learns whole chats; "
            "data.train_on=[system,user,assistant] learns the others, too",
            only,
        )


def _translate_rate(t: Translation) -> None:
    translate_rate(t, default=None if t.method == "sft" else 1e-6)


def _find_defaults(t: Translation) -> None:
    if t.is_rl:  # GRPOConfig and RLOOConfig limit no prompt
        t.set_defaults(max_length=None)
    if t.method == "rloo":
        t.set_defaults(num_generations=2, beta=0.05)


TRL = Trainer(
    title="TRL",
    own_names="dataset_name dataset_config dataset_train_split dataset_test_split use_peft "
    "assistant_only_loss completion_only_loss dataset_text_field dataset_kwargs "
    "model_init_kwargs lora_task_type dtype max_seq_length dataset_streaming "
    "eval_packing precompute_ref_log_probs num_completions_to_print",
    defaults=HF_DEFAULTS
    | {
        **{"learning_rate": 2e-5, "logging_steps": 10, "max_length": 1024, "lora_r": 16},
        **{"gradient_checkpointing": True, "lora_alpha": 32, "lora_dropout": 0.05},
        **{"dataset_train_split": "train", "dataset_test_split": "test"},
        "assistant_only_loss": False,
    },
    names={
        **{"lora_rank": "lora_r", "target_modules": "lora_target_modules"},
        **{"max_length": "max_length max_seq_length", "truncation_strategy": "truncation_mode"},
        **{"rpo_alpha": "rpo_alpha cpo_alpha", "modules_to_save": "lora_modules_to_save"},
    },
    rules=(
        *(find_gpu_count, _check_command, _find_defaults, _translate_adapters, _translate_data),
        *(translate_split, _translate_supervision, translate_device_batches, _translate_rate),
        *(*SHARED_RULES, translate_grpo),
    ),
)
