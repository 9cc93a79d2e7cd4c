"""Trainers whose configurations `megatron-vlm import` reads: by which names each is recognised, and
the values that a configuration without a name has there.

Only defaults that are not those of this package, or on which other values depend, are listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

TrainerName = Literal["llamafactory", "ms-swift", "trl", "axolotl", "verl"]
TRAINER_NAMES: tuple[TrainerName, ...] = get_args(TrainerName)


@dataclass(frozen=True)
class OtherTrainer:
    """Properties of a trainer that are known without a configuration."""

    title: str
    own_names: str  # names that the other trainers of this table do not have
    defaults: Mapping[str, Any]


# transformers.TrainingArguments, which three of the trainers extend.
_HUGGING_FACE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 500,
}
_LLAMA_FACTORY = _HUGGING_FACE | {
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target": "all",
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "freeze_language_model": False,
    "dataset_dir": "data",
    "cutoff_len": 2048,
    "image_max_pixels": 768 * 768,
    "image_min_pixels": 32 * 32,
    "video_fps": 2.0,
    "video_maxlen": 128,
    "pref_loss": "sigmoid",
    "pref_beta": 0.1,
    "disable_gradient_checkpointing": False,
}
_TRL = _HUGGING_FACE | {
    "learning_rate": 2e-5,
    "logging_steps": 10,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "assistant_only_loss": False,
}
_MS_SWIFT = _HUGGING_FACE | {
    "per_device_train_batch_size": 1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "logging_steps": 5,
    "report_to": "tensorboard",
    "gradient_checkpointing": True,
    "truncation_strategy": "delete",
    "tuner_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": "all-linear",
    "freeze_vit": True,
    "freeze_aligner": True,
    "freeze_llm": False,
}
# `megatron sft` of ms-swift, whose settings are those of Megatron-LM.
MEGATRON_SWIFT: Mapping[str, Any] = {
    **{"micro_batch_size": 1, "global_batch_size": 16, "lr_decay_style": "cosine"},
    **{"weight_decay": 0.1, "adam_beta2": 0.95, "save_interval": 500, "log_interval": 5},
    **{"recompute_granularity": "selective", "truncation_strategy": "delete"},
    **{"tuner_type": "full", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05},
    **{"target_modules": "all-linear", "freeze_vit": True, "freeze_aligner": True},
    **{"freeze_llm": False},
}
_AXOLOTL = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1.0,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "sequence_len": 512,
    "excess_length_strategy": "drop",
    "lora_dropout": 0.0,
}
_VERL = {
    "actor.ppo_mini_batch_size": 256,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.clip_ratio": 0.2,
    "actor.loss_agg_mode": "token-mean",
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.use_kl_loss": False,
    "actor.kl_loss_coef": 0.001,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "model.enable_gradient_checkpointing": True,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    "data.image_key": "images",
    "data.prompt_key": "prompt",
    "trainer.total_epochs": 30,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
}

OTHER_TRAINERS: Mapping[TrainerName, OtherTrainer] = {
    "llamafactory": OtherTrainer(
        "LLaMA-Factory",
        "finetuning_type stage do_train cutoff_len dataset_dir lora_target quantization_bit "
        "image_max_pixels freeze_vision_tower freeze_multi_modal_projector pref_loss pref_beta "
        "preprocessing_num_workers overwrite_cache plot_loss neat_packing media_dir "
        "flash_attn val_size mask_history train_on_prompt enable_liger_kernel",
        _LLAMA_FACTORY,
    ),
    "ms-swift": OtherTrainer(
        "ms-swift",
        "model train_type tuner_type freeze_vit freeze_aligner freeze_llm attn_impl vit_lr "
        "aligner_lr split_dataset_ratio load_from_cache_file target_modules rlhf_type quant_bits "
        "quant_method model_author lazy_tokenize swift_version model_id_or_path sft_type "
        "dataset_shuffle add_non_thinking_prefix custom_register_path external_plugins",
        _MS_SWIFT,
    ),
    "trl": OtherTrainer(
        "TRL",
        "dataset_name dataset_config dataset_train_split dataset_test_split use_peft "
        "assistant_only_loss completion_only_loss dataset_text_field dataset_kwargs "
        "model_init_kwargs lora_task_type dtype max_seq_length dataset_streaming "
        "eval_packing precompute_ref_log_probs num_completions_to_print",
        _TRL,
    ),
    "axolotl": OtherTrainer(
        "axolotl",
        "base_model datasets sequence_len adapter lora_target_linear lora_model_dir num_epochs "
        "val_set_size sample_packing dataset_prepared_path evals_per_epoch saves_per_epoch "
        "pad_to_sequence_len train_on_inputs skip_prepare_dataset lr_scheduler rl_beta "
        "unfrozen_parameters processor_type eval_sample_packing flash_attention",
        _AXOLOTL,
    ),
    "verl": OtherTrainer(
        "verl",
        "actor_rollout_ref algorithm critic custom_reward_function trainer",
        _VERL,
    ),
}
