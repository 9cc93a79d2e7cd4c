"""Settings of transformers.TrainingArguments, which LLaMA-Factory, ms-swift, TRL and axolotl
extend: their defaults and the rules that the four share."""

from typing import Any

from megatron_vlm.commands.import_config.data_rules import (
    translate_lengths,
    translate_new_tokens,
    translate_thinking,
)
from megatron_vlm.commands.import_config.run_rules import (
    translate_evaluation_batch,
    translate_folder,
    translate_layout,
    translate_recomputation,
    translate_shuffling,
)
from megatron_vlm.commands.import_config.training_rules import (
    translate_intervals,
    translate_length,
    translate_optimizer,
    translate_precision,
    translate_seeds,
)

HF_DEFAULTS: dict[str, Any] = {
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 5e-5},
    **{"num_train_epochs": 3.0, "lr_scheduler_type": "linear", "save_steps": 500},
    "logging_steps": 500,
}
# Rules for everything but data, adapters, batches and the rate.
SHARED_RULES = (
    *(translate_lengths, translate_new_tokens, translate_thinking, translate_evaluation_batch),
    *(translate_length, translate_optimizer, translate_precision, translate_seeds),
    *(translate_intervals, translate_folder, translate_layout, translate_recomputation),
    translate_shuffling,
)
