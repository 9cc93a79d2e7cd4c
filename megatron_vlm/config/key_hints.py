"""Suggestions for unknown keys: the names of other trainers for this one's keys, and near misses. A
wrong guess is worse than none, so only a close match is suggested."""

import difflib
from collections.abc import Sequence
from dataclasses import is_dataclass

from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import NOT_GIVEN, ConfigError

# Names in Hugging Face's TrainingArguments, TRL, LLaMA-Factory, ms-swift and Megatron-LM. A value
# means the same here.
_SAME = {
    "model.path": "model_name_or_path model_path model_id model_id_or_path base_model",
    "model.recompute": "recompute_granularity",
    "model.freeze_vision": "freeze_vit freeze_vision_tower",
    "model.freeze_merger": "freeze_aligner freeze_multi_modal_projector",
    "model.freeze_language": "freeze_llm freeze_language_model",
    "lora.rank": "lora_rank lora_r peft_r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.rslora": "use_rslora",
    "lora.path": "adapter_name_or_path adapters adapter_path",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pp_size",
    "parallel.cp": "context_parallel_size cp_size",
    "parallel.ep": "expert_model_parallel_size ep_size",
    "model.router_balance_loss": "router_aux_loss_coef",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "data.train": "train_dataset train_file train_files train_data train_data_path",
    "data.eval": "eval_dataset val_dataset validation_file eval_file eval_data eval_data_path",
    "data.image_root": "media_dir image_folder image_dir",
    "data.max_pixels": "image_max_pixels",
    "data.min_pixels": "image_min_pixels",
    "data.video_max_frames": "video_maxlen fps_max_frames",
    "data.video_min_frames": "fps_min_frames",
    "data.num_workers": "dataloader_num_workers",
    "data.prefetch": "dataloader_prefetch_factor",
    "data.shuffle": "train_dataloader_shuffle dataset_shuffle",
    "data.shuffle_window": "buffer_size shuffle_buffer_size",
    "data.seed": "data_seed",
    "optim.lr": "learning_rate",
    "optim.vision_lr": "vit_lr vision_tower_lr",
    "optim.merger_lr": "aligner_lr mm_projector_lr",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.warmup_ratio": "lr_warmup_ratio lr_warmup_fraction",
    "optim.clip_grad": "max_grad_norm grad_clip gradient_clip_val",
    "train.steps": "max_steps train_iters",
    "train.epochs": "num_train_epochs num_epochs",
    "eval.every": "eval_steps eval_interval",
    "eval.generate": "predict_with_generate",
    "checkpoint.every": "save_steps save_interval",
    "checkpoint.keep_last": "save_total_limit",
    "log.every": "logging_steps log_interval",
    "log.wandb": "wandb_project",
    "launch.processes": "nproc_per_node num_processes num_gpus n_gpus",
    "run": "output_dir save_dir",
}
_ADAPTERS = (
    "lora=default trains adapters, as lora.rank=16 does: in lora.targets; without, all weights are "
    "trained but those of model.freeze_vision, model.freeze_merger and model.freeze_language"
)
_TARGETS = (
    "lora.targets is a list of parts, such as [attention,mlp], or of names of linear layers, such "
    "as [q_proj,v_proj]"
)
_NO_QUANTIZATION = (
    "the weights beside adapters are not quantized; train.precision is auto, bf16 or fp32"
)
_BATCH = (
    "train.global_batch_size is the samples of a whole step, over all accumulation and all ranks; "
    "train.micro_batch_size is the rows of one pass"
)
_STEPS = "checkpoint.every, eval.every and log.every count steps; null means only at the end"
_SHARDS = (
    "parallel.tp and parallel.pp divide the model over GPUs, and parallel.distributed_optimizer, "
    "which is on, divides the optimizer's state"
)
_PRECISION = "train.precision is auto, bf16 or fp32; fp16 is not trained"
_TEMPLATE = "the checkpoint's own chat template is used"
_TRAINED = "data.train_on says which messages are learnt: by default those of the assistant"
_TUNE = "model.freeze_vision, model.freeze_merger and model.freeze_language say what does not learn"
_BUDGET = (
    "data.video_min_pixels and data.video_max_pixels count the pixels of all frames of a video "
    "together; beside a video in a record, min_pixels and max_pixels are of each frame"
)
_LENGTH = "data.max_tokens counts images, too; data.truncation says what becomes of longer records"
# Keys that do not exist here, or whose values have another meaning here.
_OTHER = {
    _ADAPTERS: "peft use_lora use_peft peft_config finetuning_type train_type tuner_type sft_type",
    _TARGETS: "target_modules lora_target lora_target_modules target_regex",
    "lora.train names the parts that are trained whole beside adapters, such as [merger]": (
        "modules_to_save additional_target"
    ),
    "lora.init is kaiming or gaussian": "init_lora_weights init_weights",
    "adapters are plain LoRA; lora.rslora scales them by the root of their rank": (
        "use_dora dora pissa_init loraplus_lr_ratio"
    ),
    _NO_QUANTIZATION: "qlora quantization_bit load_in_4bit load_in_8bit quant_bits quant_method",
    _BATCH: "per_device_train_batch_size train_batch_size batch_size gradient_accumulation_steps "
    "per_gpu_train_batch_size gradient_accumulation accumulate_grad_batches",
    "eval.batch_size is the samples of one pass over all data parallel ranks": (
        "per_device_eval_batch_size eval_batch_size"
    ),
    _STEPS: "save_strategy eval_strategy evaluation_strategy logging_strategy do_eval "
    "eval_on_start",
    _SHARDS: "deepspeed fsdp fsdp_config zero_stage deepspeed_config use_fsdp",
    _PRECISION: "bf16 fp16 tf32 torch_dtype dtype mixed_precision params_dtype",
    _TEMPLATE: "template chat_template chat_template_path system default_system",
    _TRAINED: "train_on_prompt mask_history train_on_inputs assistant_only_loss "
    "completion_only_loss loss_scale",
    _TUNE: "tune_mm_vision tune_mm_mlp tune_mm_llm freeze_parameters trainable_parameters",
    _BUDGET: "video_max_pixels video_min_pixels video_total_pixels",
    _LENGTH: "max_seq_length max_seq_len max_length cutoff_len model_max_length seq_length "
    "seq_len truncation_strategy",
    "data.train and data.eval are files, globs, or names of Hugging Face data sets; "
    "dataset_info.json is not read": "dataset dataset_name dataset_path data_path dataset_dir",
    "optim.schedule is constant, linear, cosine or wsd": "lr_scheduler_type lr_scheduler "
    "lr_decay_style scheduler lr_scheduler_kwargs",
    "optim.min_lr_ratio is a fraction of optim.lr": "min_lr min_learning_rate",
    "AdamW is the only optimizer, and its keys are in the group optim": "optimizer optim_type",
    "model.recompute and model.recompute_vision say what is computed again instead of kept": (
        "gradient_checkpointing vit_gradient_checkpointing gradient_checkpointing_kwargs "
        "activation_checkpointing"
    ),
    "model.backend=torch uses SDPA, model.backend=te Transformer Engine": "attn_implementation "
    "attn_impl flash_attn use_flash_attn attention_backend",
    "rows are not packed, but micro-batches of equal cost: train.micro_batch_tokens": (
        "padding_free neat_packing use_liger_kernel group_by_length sample_packing"
    ),
    "checkpoint.resume is auto (the newest checkpoint of run), never, or a folder": (
        "resume_from_checkpoint overwrite_output_dir ignore_data_skip load"
    ),
    "checkpoint.best=SET/SCORE keeps the best checkpoint": "load_best_model_at_end "
    "metric_for_best_model greater_is_better",
    "log.tensorboard=true and log.wandb=PROJECT write elsewhere what metrics.jsonl has": (
        "report_to logging_dir tensorboard_dir"
    ),
    "a run is named by its folder: run=runs/NAME": "run_name wandb_name wandb_run_name "
    "experiment_name",
    "settings of Hydra's own are not taken; the folder of a run is run=runs/NAME": "hydra",
    "nothing is split off data.train; name held-out data in data.eval": "val_size "
    "split_dataset_ratio eval_ratio validation_split",
    "data.train={path: NAME, streaming: true} reads a data set as it comes": "streaming",
    "eval.samples limits an evaluation; for training, give a smaller file": "max_samples "
    "max_train_samples num_train_samples max_eval_samples",
    "megatron-vlm train does nothing but supervised fine-tuning": "stage do_train rlhf_type task",
    "model.router_balance_loss is the coefficient of transformers' load_balancing_loss_func, over "
    "the global batch": "moe_aux_loss_coeff aux_loss_coeff moe_router_load_balancing_type",
    "model.router_z_loss is the coefficient of the mean over layers and tokens": (
        "moe_z_loss_coeff router_z_loss_coef"
    ),
    "several machines are started with torchrun, Slurm or Ray: docs/clusters.md": (
        "nnodes node_rank master_addr master_port"
    ),
}
_KEYS = {name: key for key, names in _SAME.items() for name in names.split()}
_SENTENCES = {name: text for text, names in _OTHER.items() for name in names.split()}


def hint(wrong: str) -> str:
    """Return the remedy for "WRONG is not a configuration key"."""
    if keys := similar_keys(wrong):
        return f"did you mean {' or '.join(map(repr, keys))}?"
    if text := hint_sentence(wrong):
        return text
    group, _, name = wrong.partition(".")
    groups = [key for key, kind in key_types().items() if is_dataclass(kind)]
    if name and group in groups:
        return f"the keys of {group} are {', '.join(_names_of(group))}"
    return f"the groups of keys are {', '.join(groups)}: see megatron-vlm train --help"


def similar_keys(wrong: str) -> Sequence[str]:
    """Return the keys that were most likely meant, or an empty sequence if nothing is near."""
    wrong = wrong.replace("-", "_")
    if wrong in leaves():
        return [wrong]
    for name in _spellings(wrong):
        if name in _SENTENCES:
            return []
        if name in _KEYS:
            return [_KEYS[name]]
    group, _, last = wrong.rpartition(".")
    if same_name := [key for key in leaves() if "." in key and key.rpartition(".")[2] == last]:
        near_keys = [key for key in same_name if _are_near(group, key.rpartition(".")[0])]
        return near_keys or same_name
    if wrong.partition(".")[0] in _SENTENCES:
        return []
    if near_keys := difflib.get_close_matches(last, _names_of(group), n=1, cutoff=0.6):
        return [f"{group}.{near_keys[0]}" if group else near_keys[0]]
    all_keys = [] if _names_of(group) and group else list(key_types())
    return difflib.get_close_matches(wrong, all_keys, n=1, cutoff=0.8)


def _are_near(group: str, other: str) -> bool:
    return bool(difflib.get_close_matches(group, [other], n=1, cutoff=0.6))


def hint_sentence(wrong: str) -> str | None:
    """Return a sentence on the counterpart of a key of other trainers, or None if the key is
    unknown."""
    wrong = wrong.replace("-", "_")
    names = [*_spellings(wrong), wrong.partition(".")[0]]
    return next((_SENTENCES[name] for name in names if name in _SENTENCES), None)


def option_error(option: str, value: str | None) -> ConfigError:
    """Return an error on an unknown option, such as `--lr 1e-5`, with what to write instead."""
    option, _, joined = option.partition("=")
    name, value = option.lstrip("-"), joined or value
    remedy, problem = hint(name), ": settings are given as KEY=VALUE"
    if is_dataclass(key_types().get(name)):
        remedy = f"{name}=NAME chooses a recipe, {name}.KEY=VALUE sets a value"
    elif len(keys := similar_keys(name)) == 1:
        remedy = f"write {keys[0]}={value or 'VALUE'}"
    elif not keys and not hint_sentence(name):
        problem = "is not an option"
    shown_value = NOT_GIVEN if value is None else value
    return ConfigError(problem, key=option, found=shown_value, remedy=remedy)


def _spellings(wrong: str) -> list[str]:
    """Return a name as other trainers may write it: lora.rank is lora_rank, optim.learning_rate is
    learning_rate."""
    return [wrong, wrong.replace(".", "_"), wrong.rpartition(".")[2]]


def _names_of(group: str) -> list[str]:
    """Return the names of the keys of a group; with "", of the keys outside the groups."""
    return [
        key.rpartition(".")[2]
        for key, kind in key_types().items()
        if key.rpartition(".")[0] == group and not (group and is_dataclass(kind))
    ]
