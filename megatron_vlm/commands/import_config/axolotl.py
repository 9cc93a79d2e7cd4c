"""axolotl: the YAML file of `axolotl train`, with options after it."""

from typing import Any

from megatron_vlm.commands.import_config.data_rules import put_sets, translate_split
from megatron_vlm.commands.import_config.grpo_rules import translate_grpo
from megatron_vlm.commands.import_config.hugging_face import SHARED_RULES
from megatron_vlm.commands.import_config.model_rules import translate_adapters
from megatron_vlm.commands.import_config.run_rules import find_gpu_count, translate_device_batches
from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.training_rules import translate_rate
from megatron_vlm.commands.import_config.translation import Trainer, Translation, is_off

_KNOWN = {  # keys of an entry of `datasets` that are taken, or that say nothing that is needed
    *("path", "type", "split", "name", "data_files", "field_messages", "ds_type", "roles"),
    *("message_property_mappings", "message_field_role", "message_field_content"),
}


def _translate_data(t: Translation) -> None:
    def entries(setting: Setting) -> list[Any]:
        if not isinstance(setting.value, list) or not all(
            isinstance(each, dict) and each.get("path") for each in setting.value
        ):
            raise t.source.error(setting, allowed="a list of data sets, each with a path")
        return [entry for each in setting.value for entry in _entries(t, each, setting)]

    put_sets(t, "datasets", "test_datasets", entries)
    translate_split(t)


def _entries(t: Translation, dataset: dict[str, Any], setting: Setting) -> list[Any]:
    files = dataset.get("data_files")
    paths = [dataset["path"]] if not files else files if isinstance(files, list) else [files]
    entry: dict[str, Any] = {}
    if (split := dataset.get("split")) not in (None, "train"):
        entry["split"] = str(split)
    if dataset.get("name"):
        entry["subset"] = str(dataset["name"])
    mapping = dataset.get("message_property_mappings")
    mapping = mapping if isinstance(mapping, dict) else {}
    named = {
        "messages": dataset.get("field_messages"),
        "role": dataset.get("message_field_role") or mapping.get("role"),
        "content": dataset.get("message_field_content") or mapping.get("content"),
    }
    columns = {ours: str(name) for ours, name in named.items() if name not in (None, ours)}
    # Conversations with from and value are read without an entry.
    if columns and columns != {"messages": "conversations", "role": "from", "content": "value"}:
        entry["columns"] = columns
    if isinstance(dataset.get("roles"), dict):
        entry["roles"] = dataset["roles"]
    rest = sorted(name for name in dataset.keys() - _KNOWN if not is_off(dataset[name]))
    if rest:
        t.differ(f"{', '.join(rest)} of {dataset['path']} are not taken: see docs/data.md", setting)
    return [{"path": str(path)} | entry if entry else str(path) for path in paths]


def _translate_supervision(t: Translation) -> None:
    if (everything := t.switched_on("train_on_inputs")) is not None:
        t.put("data.train_on", ["system", "user", "assistant", "tool"], everything)


def _translate_rate(t: Translation) -> None:
    translate_rate(t)
    if t.given("warmup_steps") is None and t.given("warmup_ratio") is None:
        note = "axolotl warms up over 3 % of the steps where nothing is set, and at most 100"
        t.put("optim.warmup_ratio", 0.03, note=note)


AXOLOTL = Trainer(
    title="axolotl",
    own_names="base_model datasets sequence_len adapter lora_target_linear lora_model_dir "
    "num_epochs val_set_size sample_packing dataset_prepared_path evals_per_epoch saves_per_epoch "
    "pad_to_sequence_len train_on_inputs skip_prepare_dataset lr_scheduler rl_beta "
    "unfrozen_parameters processor_type eval_sample_packing flash_attention",
    defaults={
        **{"micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0},
        **{"lr_scheduler": "cosine", "optimizer": "adamw_torch_fused", "sequence_len": 512},
        **{"excess_length_strategy": "drop", "lora_dropout": 0.0},
    },
    names={
        **{"model_name_or_path": "base_model", "model_revision": "revision_of_model"},
        **{"rlhf_type": "rl", "beta": "rl_beta dpo_beta orpo_alpha trl.beta"},
        **{"tuner_type": "adapter", "lora_rank": "lora_r", "target_modules": "lora_target_modules"},
        **{"adapter_name_or_path": "lora_model_dir", "quantization_method": "quant_method"},
        **{"max_length": "sequence_len", "truncation_strategy": "excess_length_strategy"},
        **{"num_train_epochs": "num_epochs", "val_size": "val_set_size"},
        **{"per_device_train_batch_size": "micro_batch_size", "optim": "optimizer"},
        **{"per_device_eval_batch_size": "eval_batch_size", "lr_scheduler_type": "lr_scheduler"},
        "modules_to_save": "lora_modules_to_save",
        **{"min_lr_rate": "cosine_min_lr_ratio", "num_generations": "trl.num_generations"},
        **{"context_parallel_size": "context_parallel_size sequence_parallel_degree"},
        **{"max_completion_length": "trl.max_completion_length", "loss_type": "trl.loss_type"},
        **{"temperature": "trl.temperature", "top_p": "trl.top_p", "use_vllm": "trl.use_vllm"},
        **{"scale_rewards": "trl.scale_rewards", "num_iterations": "trl.num_iterations"},
        "reward_funcs": "trl.reward_funcs",
        "tensor_model_parallel_size": "tensor_parallel_size",
    },
    rules=(
        *(find_gpu_count, translate_adapters, _translate_data, _translate_supervision),
        *(translate_device_batches, _translate_rate, *SHARED_RULES, translate_grpo),
    ),
)
