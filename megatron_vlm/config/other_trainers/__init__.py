"""Names of settings in other trainers (Hugging Face's Trainer, TRL, verl, ms-swift, LLaMA-Factory,
axolotl, Qwen's qwen-vl-finetune, Megatron-LM), each with our key for it or a sentence about what
does that here."""

from megatron_vlm.config.other_trainers.model_names import MODEL_NAMES
from megatron_vlm.config.other_trainers.training_names import SECTIONS, TRAINING_NAMES

# Names whose value means the same as that of one of our keys.
SAME_KEYS = {
    "run": "output_dir save_dir default_local_dir save",
    "model.path": "model_name_or_path model_path model_id model_id_or_path base_model "
    "partial_pretrain pretrained_model_name_or_path",
    "model.recompute": "recompute_granularity",
    "model.freeze_vision": "freeze_vit freeze_vision_tower",
    "model.freeze_merger": "freeze_aligner freeze_multi_modal_projector freeze_projector",
    "model.freeze_language": "freeze_llm freeze_language_model freeze_lm",
    "model.router_balance_loss": "router_aux_loss_coef",
    "lora.rank": "lora_rank lora_r peft_r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.path": "adapter_name_or_path adapters adapter_path lora_model_dir adapter_load "
    "lora_adapter_path mcore_adapter",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pp_size",
    "parallel.ep": "expert_model_parallel_size ep_size",
    "parallel.virtual_stages": "num_virtual_stages_per_pipeline_rank",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "data.train": "train_dataset train_file train_files train_data train_data_path",
    "data.eval": "eval_dataset val_dataset validation_file eval_file eval_data eval_data_path "
    "val_files valid_data_path",
    "data.system": "system default_system default_system_message system_prompt",
    "data.split": "val_size split_dataset_ratio eval_ratio validation_split val_set_size "
    "dataset_test_size",
    "data.image_root": "media_dir image_folder image_dir data_root",
    "data.max_pixels": "image_max_pixels",
    "data.min_pixels": "image_min_pixels",
    "data.template_kwargs": "chat_template_kwargs apply_chat_template_kwargs",
    "data.num_workers": "dataloader_num_workers",
    "data.prefetch": "dataloader_prefetch_factor",
    "data.shuffle": "train_dataloader_shuffle dataset_shuffle shuffle_dataset "
    "shuffle_merged_datasets",
    "data.shuffle_window": "buffer_size shuffle_buffer_size",
    "data.seed": "data_seed data_loader_seed",
    "optim.lr": "learning_rate",
    "optim.vision_lr": "vit_lr vision_tower_lr",
    "optim.merger_lr": "aligner_lr mm_projector_lr",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.warmup_steps": "lr_warmup_iters lr_warmup_steps",
    "optim.warmup_ratio": "lr_warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio "
    "warmup_steps_ratio",
    "optim.min_lr_ratio": "min_lr_rate cosine_min_lr_ratio",
    "optim.clip_grad": "max_grad_norm grad_clip gradient_clip_val",
    "train.steps": "max_steps train_iters total_training_steps",
    "train.epochs": "num_train_epochs num_epochs total_epochs max_epochs",
    "train.global_batch_size": "data.train_batch_size",
    "train.micro_batch_size": "ppo_micro_batch_size_per_gpu",
    "train.micro_batch_tokens": "ppo_max_token_len_per_gpu",
    "eval.every": "eval_steps eval_interval test_freq",
    "eval.generate": "predict_with_generate generate_during_eval",
    "eval.max_new_tokens": "eval_max_new_tokens",
    "checkpoint.every": "save_steps save_interval save_freq",
    "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "checkpoint.push": "hub_model_id",
    "log.every": "logging_steps log_interval",
    "log.project": "wandb_project project_name project swanlab_project mlflow_experiment_name "
    "trackio_project_name",
    "rl.samples": "num_generations rollout.n num_return_sequences",
    "rl.max_new_tokens": "max_completion_length response_length max_response_length",
    "rl.temperature": "rollout.temperature",
    "rl.kl_coef": "kl_loss_coef",
    "rl.entropy_coef": "entropy_coeff",
    "rl.clip_low": "clip_ratio_low",
    "rl.clip_high": "clip_ratio_high",
    "rl.dynamic_sampling": "dynamic_sample filter_groups.enable",
    "rl.max_weight": "tis_imp_ratio_cap",
    "launch.processes": "nproc_per_node num_processes num_gpus n_gpus n_gpus_per_node "
    "gpus_per_node gpus",
    "launch.timeout_minutes": "distributed_timeout_minutes",
}
_NAMES = MODEL_NAMES | TRAINING_NAMES
_SENTENCES = {name: sentence for sentence, names in _NAMES.items() for name in names.split()}
# The sentence about a name, and that about all other names that begin so: the tables have them as
# `moe_*`.
OTHER_SENTENCES = {name: text for name, text in _SENTENCES.items() if not name.endswith("*")}
NAME_FAMILIES = {name[:-1]: text for name, text in _SENTENCES.items() if name.endswith("*")}

__all__ = ["NAME_FAMILIES", "OTHER_SENTENCES", "SAME_KEYS", "SECTIONS"]
