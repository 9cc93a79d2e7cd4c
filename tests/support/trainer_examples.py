"""Example configurations of other trainers for Qwen2.5-VL, Qwen3-VL and Qwen3.5, as facts: the keys
and values of each, under the path that it has in the repository of its trainer (read 2026-11-26).
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def yaml_text(facts: Facts) -> str:
    """Write facts as YAML, one key per line. JSON is YAML."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in facts.items())


def script_text(command: str, facts: Facts, variables: str = "") -> str:
    """Write facts as a command line of --KEY VALUE, in continued lines."""
    words = []
    for key, value in facts.items():
        texts = value if isinstance(value, list) else [value]
        shown = " ".join(shell_word(text) for text in texts)
        words.append(f"--{key} {shown}".rstrip())
    lines = [*variables.split(), f"megatron-vlm import {command}", *words]
    return "# an example\n" + " \\\n    ".join(lines) + "\n"


def shell_word(value: Any) -> str:
    """Write a value as a word of a shell, which leaves $ in its meaning."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if "$" in text else shlex.quote(text)


def hydra_text(facts: Facts, lines: str = "") -> str:
    """Write facts as overrides of verl, some of which are new keys."""
    words = [
        f"{'+' * key.startswith('+')}actor_rollout_ref.{key.lstrip('+')}={value}"
        if key.lstrip("+").partition(".")[0] in ("actor", "rollout", "ref", "model")
        else f"{key}={value}"
        for key, value in facts.items()
    ]
    command = "megatron-vlm import python3 -m verl.trainer.main_ppo"
    return f"set -x\nENGINE=${{1:-vllm}}\n{lines}\n" + " \\\n    ".join([command, *words]) + " $@\n"


_SHELL = """megatron-vlm() {
  [ "$1" = import ] && shift
  printf '%s\\0' "$@" END
  env -0
}
"""


def run_script(
    text: str, folder: Path | None = None, **variables: str
) -> tuple[list[str], dict[str, str]]:
    """Return the words that a script gives to `megatron-vlm import`, and their environment."""
    known = {"PATH": os.environ["PATH"], "HOME": "/home/me"} | variables
    command = ["bash", "-c", _SHELL + text]
    how = {"capture_output": True, "text": True, "env": known, "cwd": folder}
    done = subprocess.run(command, check=True, **how)
    words, _, rest = done.stdout.partition("END\0")
    pairs = (each.partition("=") for each in rest.split("\0") if each)
    return words.split("\0")[:-1], {name: value for name, _, value in pairs}


# LLaMA-Factory

_LF = {
    **{"stage": "sft", "do_train": True, "cutoff_len": 2048, "max_samples": 1000},
    **{"preprocessing_num_workers": 16, "dataloader_num_workers": 4, "logging_steps": 10},
    **{"save_steps": 500, "plot_loss": True, "overwrite_output_dir": True},
    **{"save_only_model": False, "report_to": "none", "per_device_train_batch_size": 1},
    **{"num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True},
    **{"ddp_timeout": 180000000, "resume_from_checkpoint": None, "trust_remote_code": True},
}
_PIXELS = {"image_max_pixels": 262144, "video_max_pixels": 16384}
_QWEN25 = {
    **{"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "template": "qwen2_vl"},
    **{"overwrite_cache": True},
    **_PIXELS,
}
_QWEN3 = {
    **{"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "template": "qwen3_vl_nothink"},
    **_PIXELS,
}
_DEMO = {"dataset": "mllm_demo,identity,alpaca_en_demo"}
_LORA = {
    **{"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"},
    **{"gradient_accumulation_steps": 8, "learning_rate": 1.0e-4},
}
_DPO = _LORA | {
    **{"stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "rlhf_v"},
    **{"learning_rate": 5.0e-6},
}
_FULL = {
    **{"finetuning_type": "full", "freeze_vision_tower": True},
    **{"freeze_multi_modal_projector": True, "freeze_language_model": False},
    **{"deepspeed": "examples/deepspeed/ds_z3_config.json", "gradient_accumulation_steps": 2},
    **{"learning_rate": 1.0e-5},
}
_ASCEND = {
    **{"use_v1_kernels": True, "flash_attn": "fa2", "overwrite_cache": True, "logging_steps": 1},
    **{"gradient_accumulation_steps": 1, "learning_rate": 1.0e-5, "ddp_timeout": 1800},
}
_ASCEND_LORA = _ASCEND | {
    **{"model_name_or_path": "Qwen/Qwen3.5-35B-A3B", "template": "qwen3_5_nothink"},
    **{"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "packing": False},
    **{"dataset": "alpaca_en_demo", "save_steps": 2000, "max_steps": 2000},
    **{"disable_gradient_checkpointing": True},
}
_OFT = {"finetuning_type": "oft", "oft_block_size": 32, "oft_target": "all"}
LLAMA_FACTORY: dict[str, Facts] = {
    "train_full/qwen2_5vl_full_sft": _LF
    | _QWEN25
    | _DEMO
    | _FULL
    | {"output_dir": "saves/qwen2_5vl-7b/full/sft", "pad_to_multiple_of": 28},
    "train_lora/qwen2_5vl_lora_sft": _LF
    | _QWEN25
    | _DEMO
    | _LORA
    | {"output_dir": "saves/qwen2_5vl-7b/lora/sft"},
    "train_lora/qwen2_5vl_lora_dpo": _LF
    | _QWEN25
    | _DPO
    | {"output_dir": "saves/qwen2_5vl-7b/lora/dpo"},
    "train_full/qwen3vl_full_sft": _LF
    | _QWEN3
    | _DEMO
    | _FULL
    | {"output_dir": "saves/qwen3-vl-4b/full/sft"},
    "train_full/qwen3vl_full_sft_fa4": _LF
    | _QWEN3
    | _DEMO
    | _FULL
    | {"output_dir": "saves/qwen3-vl-4b/full/sft_fa4", "flash_attn": "fa4"},
    "train_lora/qwen3vl_lora_sft": _LF
    | _QWEN3
    | _DEMO
    | _LORA
    | {"output_dir": "saves/qwen3-vl-4b/lora/sft"},
    "train_lora/qwen3vl_lora_dpo": _LF
    | _QWEN3
    | _DPO
    | {"output_dir": "saves/qwen3-vl-4b/lora/dpo"},
    "train_lora/qwen3.5_lora_roleplay": _LF
    | {
        **{"model_name_or_path": "Qwen/Qwen3.5-4B-Instruct", "template": "qwen3_5"},
        **{"finetuning_type": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.1},
        **{"lora_target": "all", "dataset": "identity,alpaca_en", "save_steps": 100},
        **{"output_dir": "saves/qwen3.5-4b/lora/roleplay", "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 8, "learning_rate": 2.0e-4, "val_size": 0.1},
        **{"per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 100},
    },
    "ascend/qwen3_5_full_sft_fsdp2": _LF
    | _ASCEND
    | {
        **{"model_name_or_path": "Qwen/Qwen3.5-4B", "template": "qwen3_5_nothink"},
        **{"finetuning_type": "full", "dataset": "alpaca_en_demo", "max_steps": 500},
        **{"per_device_train_batch_size": 8, "output_dir": "saves/Qwen3.5-4B/full/sft"},
    },
    "ascend/qwen3_5_lora_sft_fsdp2": _LF
    | _ASCEND_LORA
    | {"output_dir": "saves/Qwen3.5-4B/full/sft"},
    "ascend/qwen3_5moe_lora_sft_fsdp2": _LF
    | _ASCEND_LORA
    | {"output_dir": "saves/Qwen3.5-35B/lora/sft"},
    "ascend/qwen3vlmoe_full_sft_fsdp2": _LF
    | _ASCEND
    | _PIXELS
    | {
        **{"model_name_or_path": "Qwen/Qwen3-VL-30B-A3B-Instruct", "template": "qwen3_vl"},
        **{"finetuning_type": "full", "disable_gradient_checkpointing": False},
        **{"dataset": "llava_1k_en, llava_1k_zh", "cutoff_len": 1024, "max_steps": 500},
        **{"save_only_model": True, "per_device_train_batch_size": 2, "learning_rate": 1.0e-4},
        **{"seed": 1234, "output_dir": "saves/Qwen3-VL-30B-A3B-Instruct/full/sft"},
    },
    "ascend/qwen3vlmoe_lora_sft_fsdp": _LF
    | _ASCEND
    | _PIXELS
    | {
        **{"model_name_or_path": "Qwen/Qwen3-VL-30B-A3B-Instruct", "template": "qwen3_vl"},
        **{"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"},
        **{"disable_gradient_checkpointing": False, "flash_attn": "disabled"},
        **{"dataset": "alpaca_zh_demo, alpaca_en_demo", "cutoff_len": 1024, "seed": 1234},
        **{"save_only_model": True, "per_device_train_batch_size": 8, "learning_rate": 1.0e-4},
        **{"output_dir": "saves/qwen3vlmoe/lora/sft"},
    },
    "extras/oft/qwen2_5vl_oft_sft": _LF
    | _QWEN25
    | _DEMO
    | _OFT
    | {"output_dir": "saves/qwen2_5vl-7b/oft/sft", "gradient_accumulation_steps": 8},
    "extras/oft/qwen2_5vl_oft_dpo": _LF
    | _QWEN25
    | _OFT
    | {"stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "rlhf_v"},
}

# ms-swift

_LATEX = "AI-ModelScope/LaTeX_OCR:human_handwrite#20000"
_SWIFT = {
    **{"split_dataset_ratio": 0.01, "torch_dtype": "bfloat16", "num_train_epochs": 1},
    **{"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "lora_rank": 8},
    **{"lora_alpha": 32, "target_modules": "all-linear", "learning_rate": "1e-4"},
    **{"save_total_limit": 2, "logging_steps": 5, "max_length": 2048, "output_dir": "output"},
    **{"warmup_ratio": 0.05, "dataloader_num_workers": 4, "eval_steps": 50, "save_steps": 50},
}
_SWIFT3 = _SWIFT | {
    **{"dataset": _LATEX, "load_from_cache_file": True, "attn_impl": "flash_attn"},
    **{"padding_free": True, "freeze_vit": True, "freeze_aligner": True},
    **{"gradient_checkpointing": True, "dataset_num_proc": 4},
}
_SWIFT_MOE = _SWIFT3 | {
    **{"model": "Qwen/Qwen3-VL-30B-A3B-Instruct", "router_aux_loss_coef": "1e-3"},
    **{"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16},
    **{"gradient_accumulation_steps": 1, "use_liger_kernel": True},
}
_SWIFT25 = {key: value for key, value in _SWIFT.items() if key not in ("target_modules",)} | {
    **{"model": "Qwen/Qwen2.5-VL-7B-Instruct", "gradient_accumulation_steps": "$(expr 16 / $n)"},
    **{"freeze_vit": True, "max_length": 4096, "eval_steps": 100, "save_steps": 100},
    **{"dataset": "swift/RLAIF-V-Dataset#20000", "deepspeed": "zero2", "dataset_num_proc": 4},
}
_SWIFT25_LORA = _SWIFT25 | {"target_modules": "all-linear", "train_type": "lora"}
_MIXED = [
    "AI-ModelScope/alpaca-gpt4-data-zh#10000",
    "AI-ModelScope/LaTeX_OCR:human_handwrite#5000",
    "swift/VideoChatGPT:Generic#2000",
]
_MEGATRON = {
    **{"load_from_cache_file": True, "split_dataset_ratio": 0.01, "micro_batch_size": 1},
    **{"global_batch_size": 4, "recompute_granularity": "full", "recompute_method": "uniform"},
    **{"recompute_num_layers": 1, "finetune": True, "cross_entropy_loss_fusion": True},
    **{"lr_warmup_fraction": 0.05, "dataset_num_proc": 8, "no_save_optim": True},
    **{"no_save_rng": True, "sequence_parallel": True, "attention_backend": "flash"},
}
_LR_LORA, _LR_FULL = {"lr": "1e-4", "min_lr": "1e-5"}, {"lr": "1e-5", "min_lr": "1e-6"}
_EXPERTS = {
    **{"moe_permute_fusion": True, "moe_grouped_gemm": True, "moe_shared_expert_overlap": True},
    **{"moe_aux_loss_coeff": "1e-6"},
}
_TUNER = {"lora_rank": 8, "lora_alpha": 32, "target_modules": "all-linear"}
_QWEN35 = (
    _MEGATRON
    | _EXPERTS
    | {
        **{"model": "Qwen/Qwen3.5-35B-A3B", "save_safetensors": True, "num_train_epochs": 1},
        **{"add_non_thinking_prefix": True, "freeze_llm": False, "freeze_vit": True},
        **{"freeze_aligner": True, "output_dir": "megatron_output/Qwen3.5-35B-A3B"},
        **{"eval_steps": 200, "save_steps": 200, "dataloader_num_workers": 8},
    }
)
_QWEN35_FULL = (
    _QWEN35
    | _LR_FULL
    | {
        **{"dataset": "AI-ModelScope/LongAlpaca-12k", "tuner_type": "full"},
        **{"moe_expert_capacity_factor": 2, "mtp_num_layers": 1, "optimizer_cpu_offload": True},
        **{"use_precision_aware_optimizer": True},
    }
)
_VIDEO = "MAX_PIXELS=1003520 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12"
_TOKENS = "IMAGE_MAX_TOKEN_NUM=1024 VIDEO_MAX_TOKEN_NUM=128 FPS_MAX_FRAMES=16"
_ALLOC = "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'"
# (command, variables, settings)
MS_SWIFT: dict[str, tuple[str, str, Facts]] = {
    "models/qwen3_vl/transformers": (
        "swift sft",
        "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        {key: value for key, value in _SWIFT_MOE.items() if key != "use_liger_kernel"}
        | {"model": "Qwen/Qwen3-VL-235B-A22B-Instruct", "train_type": "lora"}
        | {"gradient_accumulation_steps": 4},
    ),
    "models/qwen3_vl/zero2": (
        "swift sft",
        "IMAGE_MAX_TOKEN_NUM=1024 NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1",
        _SWIFT_MOE | {"train_type": "lora", "deepspeed": "zero2"},
    ),
    "models/qwen3_vl/zero3": (
        "swift sft",
        "IMAGE_MAX_TOKEN_NUM=1024 NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1",
        _SWIFT_MOE
        | {"tuner_type": "lora", "deepspeed": "zero3", "eval_steps": 100, "save_steps": 100},
    ),
    "models/qwen3_vl/mixed": (
        "swift sft",
        f"{_ALLOC} {_TOKENS} NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1",
        _SWIFT3
        | {"model": "Qwen/Qwen3-VL-4B-Instruct", "dataset": _MIXED, "train_type": "lora"}
        | {"packing": True, "vit_gradient_checkpointing": False, "deepspeed": "zero2"}
        | {"gradient_accumulation_steps": 2, "eval_steps": 100, "save_steps": 100}
        | {"max_length": 4096},
    ),
    "models/qwen3_vl/mcore": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        _MEGATRON
        | _EXPERTS
        | _TUNER
        | _LR_LORA
        | {"load": "Qwen3-VL-235B-A22B-Instruct-mcore", "dataset": _LATEX, "train_type": "lora"}
        | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "max_epochs": 1}
        | {"expert_model_parallel_size": 8, "save": "megatron_output/Qwen3-VL-235B-A22B-Instruct"}
        | {"eval_interval": 200, "save_interval": 200, "max_length": 2048, "packing": True}
        | {"num_workers": 8},
    ),
    "models/qwen3_vl/mcore_full": (
        "megatron sft",
        f"{_ALLOC} OMP_NUM_THREADS=14 NPROC_PER_NODE=8 {_TOKENS}",
        _MEGATRON
        | _EXPERTS
        | _LR_FULL
        | {"load": "Qwen3-VL-30B-A3B-Instruct-mcore", "dataset": _MIXED, "max_epochs": 1}
        | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "packing": True}
        | {"save": "megatron_output/Qwen3-VL-30B-A3B-Instruct", "eval_interval": 500}
        | {"save_interval": 500, "max_length": 4096, "num_workers": 8}
        | {"moe_expert_capacity_factor": 2, "optimizer_cpu_offload": True}
        | {"use_precision_aware_optimizer": True, "optimizer_offload_fraction": 0.2},
    ),
    "models/qwen3_5/transformers": (
        "swift sft",
        f"{_ALLOC} NPROC_PER_NODE=4 {_VIDEO} CUDA_VISIBLE_DEVICES=0,1,2,3",
        _SWIFT
        | {"model": "Qwen/Qwen3.5-35B-A3B", "tuner_type": "lora", "load_from_cache_file": True}
        | {"dataset": "AI-ModelScope/LaTeX_OCR:human_handwrite#2000", "deepspeed": "zero3"}
        | {"add_non_thinking_prefix": True, "per_device_train_batch_size": 4}
        | {"per_device_eval_batch_size": 4, "experts_impl": "grouped_mm", "group_by_length": True}
        | {"router_aux_loss_coef": "1e-3", "gradient_accumulation_steps": 1}
        | {"output_dir": "output/Qwen3.5-35B-A3B", "dataset_num_proc": 4},
    ),
    "models/qwen3_5/mcore": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 {_VIDEO}",
        _QWEN35
        | _TUNER
        | _LR_LORA
        | {"tuner_type": "lora", "merge_lora": True, "expert_model_parallel_size": 4}
        | {"dataset": ["AI-ModelScope/alpaca-gpt4-data-zh#500", "swift/self-cognition#500"]}
        | {"micro_batch_size": 4, "global_batch_size": 16, "group_by_length": True}
        | {"max_length": 2048, "attention_backend": "unfused", "padding_free": False}
        | {"model_author": "swift", "model_name": "swift-robot"},
    ),
    "models/qwen3_5/mcore_full": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=8 {_VIDEO}",
        _QWEN35_FULL
        | {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
        | {"expert_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 24}
        | {"global_batch_size": 16, "group_by_length": True, "max_length": 16384}
        | {"optimizer_offload_fraction": 0.62, "padding_free": False},
    ),
    "models/qwen3_5/packing": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=8 {_VIDEO} SWIFT_USE_MCORE_GDN=1",
        _QWEN35_FULL
        | {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "packing": True}
        | {"max_length": 32768, "optimizer_offload_fraction": 0.64},
    ),
    "models/qwen3_5/fp8": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 {_TOKENS}",
        {key: value for key, value in _QWEN35.items() if not key.startswith("moe_")}
        | _LR_FULL
        | {"model": "Qwen/Qwen3.5-4B", "dataset": "swift/self-cognition#500", "packing": True}
        | {"model_author": "swift", "model_name": "swift-robot", "fp8_recipe": "blockwise"}
        | {"linear_decoupled_in_proj": True, "fp8_format": "e4m3", "fp8_param_gather": True}
        | {"tuner_type": "full", "tensor_model_parallel_size": 2, "global_batch_size": 2}
        | {"max_length": 4096, "mtp_num_layers": 1},
    ),
    "models/qwen3_5/mcore_grpo_moe": (
        "megatron rlhf",
        f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE=8 {_ALLOC}",
        {"rlhf_type": "grpo", "model": "Qwen/Qwen3.5-35B-A3B", "save_safetensors": True}
        | {"enable_thinking": False, "merge_lora": True, "context_parallel_size": 1}
        | {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 8}
        | {"pipeline_model_parallel_size": 1, "moe_permute_fusion": True}
        | {"dataset": "open-r1/DAPO-Math-17k-Processed", "system": "You are helpful."}
        | {"num_train_epochs": 1, "global_batch_size": 64, "micro_batch_size": 1}
        | {"steps_per_generation": 2, "num_generations": 8, "reward_funcs": "accuracy"}
        | {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}
        | {"vllm_tensor_parallel_size": 2, "vllm_max_model_len": 9192, "max_length": 1000}
        | {"max_completion_length": 8192, "tuner_type": "lora", "target_modules": "all-linear"}
        | {"lr": "5e-5", "bf16": True, "beta": 0.00, "epsilon": 0.2, "epsilon_high": 0.28}
        | {"dynamic_sample": False, "overlong_filter": True, "loss_type": "grpo"}
        | {"sleep_level": 1, "offload_model": True, "offload_bridge": False}
        | {"offload_optimizer": True, "logging_steps": 1, "recompute_granularity": "full"}
        | {"recompute_method": "uniform", "recompute_num_layers": 1, "finetune": []}
        | {"dataloader_num_workers": 8, "dataset_num_proc": 8, "no_save_optim": []}
        | {"no_save_rng": [], "save_steps": 20, "attention_backend": "flash"}
        | {"moe_expert_capacity_factor": 2, "temperature": 1.0, "padding_free": False}
        | {"sequence_parallel": True, "log_completions": True}
        | {"report_to": ["tensorboard", "swanlab"]},
    ),
    "train/multimodal/video": (
        "swift sft",
        "NPROC_PER_NODE=$n CUDA_VISIBLE_DEVICES=0,1 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12",
        _SWIFT25_LORA | {"dataset": "swift/VideoChatGPT:all", "max_length": 2048},
    ),
    "train/multimodal/vit_gradient_checkpointing": (
        "swift sft",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12",
        _SWIFT25
        | {"dataset": "swift/VideoChatGPT:all", "train_type": "full", "freeze_vit": False}
        | {"freeze_aligner": False, "gradient_accumulation_steps": 1, "learning_rate": "1e-5"}
        | {"gradient_checkpointing": False, "vit_gradient_checkpointing": True}
        | {"deepspeed": "zero3", "use_liger_kernel": True, "attn_impl": "flash_attn"}
        | {"padding_free": True, "save_only_model": True},
    ),
    "train/multimodal/rlhf/dpo/full": (
        "swift rlhf",
        f"{_ALLOC} CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=$n MAX_PIXELS=1003520",
        _SWIFT25
        | {"rlhf_type": "dpo", "train_type": "full", "learning_rate": "1e-5"}
        | {"deepspeed": "zero3", "save_only_model": True},
    ),
    "train/multimodal/rlhf/dpo/lora": (
        "swift rlhf",
        "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$n MAX_PIXELS=1003520",
        _SWIFT25_LORA | {"rlhf_type": "dpo", "rpo_alpha": 0.1, "load_from_cache_file": True},
    ),
    "train/multimodal/rlhf/kto": (
        "swift rlhf",
        "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$n MAX_PIXELS=1003520",
        _SWIFT25_LORA
        | {"rlhf_type": "kto"}
        | {"dataset": "AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto#10000"},
    ),
    "train/multimodal/lora_llm_full_vit/sft": (
        "swift sft",
        "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 MAX_PIXELS=1003520",
        _SWIFT25 | {"train_type": "custom", "external_plugins": "custom_plugin.py"},
    ),
    "megatron/multimodal/dense/lora": (
        "megatron sft",
        f"{_ALLOC} NPROC_PER_NODE=2 MAX_PIXELS=1003520 CUDA_VISIBLE_DEVICES=0,1",
        _MEGATRON
        | _TUNER
        | _LR_LORA
        | {"load": "Qwen2.5-VL-7B-Instruct-mcore", "train_type": "lora", "packing": True}
        | {"dataset": "AI-ModelScope/LaTeX_OCR:human_handwrite#5000", "freeze_llm": False}
        | {"tensor_model_parallel_size": 1, "freeze_vit": True, "freeze_aligner": True}
        | {"max_epochs": 1, "save": "megatron_output/Qwen2.5-VL-7B-Instruct"}
        | {"save_interval": 200, "vit_gradient_checkpointing": True, "max_length": 2048}
        | {"num_workers": 4},
    ),
    "megatron/multimodal/dense/dpo": (
        "megatron rlhf",
        f"{_ALLOC} NPROC_PER_NODE=4 MAX_PIXELS=1003520 CUDA_VISIBLE_DEVICES=0,1,2,3",
        _MEGATRON
        | _LR_FULL
        | {"rlhf_type": "dpo", "load": "Qwen2.5-VL-7B-Instruct-mcore", "train_type": "full"}
        | {"dataset": "swift/RLAIF-V-Dataset#20000", "tensor_model_parallel_size": 4}
        | {"freeze_llm": False, "freeze_vit": True, "freeze_aligner": True, "packing": True}
        | {"max_epochs": 1, "save": "megatron_output/Qwen2.5-VL-7B-Instruct"}
        | {"save_interval": 200, "vit_gradient_checkpointing": True, "max_length": 8192}
        | {"num_workers": 4, "beta": 0.1, "loss_type": "sigmoid"},
    ),
}

# TRL: the commands in the docstrings of examples/scripts.

TRL: dict[str, tuple[str, Facts]] = {
    "scripts/dpo_vlm": (
        "accelerate launch examples/scripts/dpo_vlm.py",
        {"dataset_name": "HuggingFaceH4/rlaif-v_formatted", "dataset_streaming": []}
        | {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "per_device_train_batch_size": 2}
        | {"gradient_accumulation_steps": 32, "dataset_num_proc": 32, "bf16": []}
        | {"output_dir": "dpo_idefics_rlaif-v", "torch_dtype": "bfloat16", "use_peft": []}
        | {"gradient_checkpointing": [], "lora_target_modules": "all-linear"}
        | {"report_to": "wandb"},
    ),
    "scripts/grpo_vlm": (
        "accelerate launch --config_file deepspeed_zero3.yaml examples/scripts/grpo_vlm.py",
        {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "learning_rate": "1e-5"}
        | {"output_dir": "grpo-Qwen2.5-VL-3B-Instruct", "gradient_checkpointing": []}
        | {"dtype": "bfloat16", "max_prompt_length": 2048, "max_completion_length": 1024}
        | {"use_vllm": [], "vllm_mode": "colocate", "use_peft": [], "log_completions": []}
        | {"lora_target_modules": ["q_proj,", "v_proj"]},
    ),
}

# axolotl

_AX = {
    **{"val_set_size": 0.0, "output_dir": "./outputs/out", "wandb_project": None},
    **{"dataset_prepared_path": "last_run_prepared", "wandb_entity": None, "wandb_watch": None},
    **{"wandb_name": None, "wandb_log_model": None, "micro_batch_size": 1, "num_epochs": 1},
    **{"optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": 0.0002},
    **{"tf32": True, "gradient_checkpointing": True, "logging_steps": 1, "warmup_ratio": 0.1},
    **{"evals_per_epoch": 1, "saves_per_epoch": 1, "weight_decay": 0.0},
}
_AX_VISION = _AX | {
    **{"processor_type": "AutoProcessor", "remove_unused_columns": False},
    "datasets": [
        {"path": "HuggingFaceH4/llava-instruct-mix-vsft"}
        | {"type": "chat_template", "split": "train[:1%]"}
    ],
    **{"pad_to_sequence_len": False, "gradient_accumulation_steps": 4, "bf16": True},
}
_AX_LORA = {
    **{"adapter": "lora", "lora_model_dir": None, "sequence_len": 8192, "lora_r": 32},
    **{"lora_alpha": 16, "lora_dropout": 0.05},
}
_AX_PATTERN = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
_AX_25 = _AX_VISION | {
    **{"base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "chat_template": "qwen2_vl", "fp16": None},
    **{"attn_implementation": "flash_attention_2"},
}
_AX_35 = _AX_VISION | {
    **{"base_model": "Qwen/Qwen3.5-9B", "chat_template": "qwen3_5", "flash_attention": True},
    **{"skip_prepare_dataset": True, "sample_packing": False},
    **{"gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_AX_NAMES = {"lora_target_modules": [*_PROJECTIONS, "down_proj", "up_proj"]}
_AX_TEXT = _AX | {
    **{"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
    **{"strict": False, "chat_template": "qwen3_5", "sequence_len": 2048, "bf16": "auto"},
    "datasets": [
        {"path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]"}
        | {"field_messages": "conversations"}
        | {"message_property_mappings": {"role": "from", "content": "value"}}
    ],
    **{"sample_packing": True, "gradient_accumulation_steps": 2, "evals_per_epoch": 4},
    **{"gradient_checkpointing_kwargs": {"use_reentrant": False}, "flash_attention": True},
    **{"resume_from_checkpoint": None, "special_tokens": None},
}
_AX_QLORA = _AX_TEXT | {
    **{"load_in_4bit": True, "adapter": "qlora", "lora_r": 16, "lora_alpha": 32},
    **{"optimizer": "adamw_torch_4bit"},
}
_AX_QLORA_MOE = _AX_QLORA | {
    **{"quantize_moe_experts": True, "lora_dropout": 0, "lora_target_modules": _PROJECTIONS},
    **{"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False},
}
_AX_LIGER = _AX_QLORA_MOE | {
    **{"use_kernels": True, "use_scattermoe": True, "liger_layer_norm": True, "liger_rope": True},
    **{"liger_rms_norm": True, "liger_glu_activation": True, "liger_rms_norm_gated": True},
    **{"torch_compile": False, "lora_qkv_kernel": True, "lora_o_kernel": True},
    **{"micro_batch_size": 4, "optimizer": "adamw_torch_8bit", "activation_offloading": True},
}


def fsdp(layer: str, offload: bool) -> Facts:
    """Return axolotl's settings of FSDP 2."""
    config = {"fsdp_version": 2, "offload_params": offload, "cpu_ram_efficient_loading": False}
    config |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "sharding_strategy": "FULL_SHARD"}
    config |= {"transformer_layer_cls_to_wrap": layer, "state_dict_type": "FULL_STATE_DICT"}
    config |= {"reshard_after_forward": True, "activation_checkpointing": True}
    return {"fsdp_config": config}


AXOLOTL: dict[str, Facts] = {
    "qwen2_5-vl/lora-7b": _AX_25
    | _AX_LORA
    | {"lora_target_modules": _AX_PATTERN.replace("mlp|", "mlp|cross_attn|")}
    | {"skip_prepare_dataset": True, "sample_packing": False},
    "qwen2_5-vl/lora-7b-packed": _AX_25
    | _AX_LORA
    | {"lora_target_modules": _AX_PATTERN}
    | {"sample_packing": True, "eval_sample_packing": False},
    "qwen3.5/9b-lora-vision": _AX_35 | _AX_LORA | _AX_NAMES,
    "qwen3.5/7b-lora-vision": _AX_35 | _AX_LORA | _AX_NAMES,
    "qwen3.5/9b-fft-vision": _AX_35 | {"sequence_len": 4096, "bf16": "auto"},
    "qwen3.5/35b-a3b-moe-vision-lora": _AX_35
    | _AX_LORA
    | _AX_NAMES
    | {"base_model": "Qwen/Qwen3.5-35B-A3B", "val_set_size": 0, "sequence_len": 4096}
    | {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0, "max_steps": 10, "bf16": "auto"}
    | {"optimizer": "adamw_torch_8bit"},
    "qwen3.5/27b-fft": _AX_TEXT
    | {"base_model": "Qwen/Qwen3.5-27B"}
    | {"unfrozen_parameters": [r"model\.language_model\..*", r"lm_head\..*"]},
    "qwen3.5/27b-qlora": _AX_QLORA
    | {"base_model": "Qwen/Qwen3.5-27B", "eval_sample_packing": True}
    | {
        "lora_target_modules": [
            *_AX_NAMES["lora_target_modules"],
            *(f"linear_attn.{each}" for each in ("in_proj_qkv", "in_proj_z", "out_proj")),
        ]
    },
    "qwen3.5/27b-qlora-fsdp": _AX_QLORA
    | _AX_NAMES
    | {"base_model": "Qwen/Qwen3.5-27B"}
    | fsdp("Qwen3_5DecoderLayer", offload=False),
    "qwen3.5/35b-a3b-moe-qlora": _AX_LIGER | {"base_model": "Qwen/Qwen3.5-35B-A3B-Base"},
    "qwen3.5/35b-a3b-moe-qlora-fsdp": _AX_QLORA_MOE
    | {"base_model": "Qwen/Qwen3.5-35B-A3B"}
    | fsdp("Qwen3_5MoeDecoderLayer", offload=True),
    "qwen3.5/122b-a10b-moe-qlora": _AX_QLORA_MOE | {"base_model": "Qwen/Qwen3.5-122B-A10B"},
    "qwen3.5/122b-a10b-moe-qlora-fsdp": _AX_QLORA_MOE
    | {"base_model": "Qwen/Qwen3.5-122B-A10B"}
    | fsdp("Qwen3_5MoeDecoderLayer", offload=True),
    "qwen3.5/qwen3.6-35b-a3b-moe-qlora": _AX_LIGER
    | {"base_model": "Qwen/Qwen3.6-35B-A3B", "output_dir": "./outputs/qwen36-35b-a3b-qlora"},
}

# verl

_GRPO = {
    **{"algorithm.adv_estimator": "grpo", "data.train_batch_size": 512},
    **{"data.train_files": "$HOME/data/geo3k/train.parquet"},
    **{"data.val_files": "$HOME/data/geo3k/test.parquet", "data.max_prompt_length": 1024},
    **{"data.max_response_length": 2048, "data.filter_overlong_prompts": True},
    **{"data.truncation": "'error'", "actor.optim.lr": "1e-6", "actor.ppo_mini_batch_size": 128},
    **{"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01, "rollout.n": 5},
    **{"actor.kl_loss_type": "low_var_kl", "actor.entropy_coeff": 0, "rollout.name": "$ENGINE"},
    **{"algorithm.use_kl_in_reward": False, "trainer.critic_warmup": 0, "trainer.nnodes": 1},
    **{"trainer.logger": "['console','wandb']", "trainer.n_gpus_per_node": 8},
    **{"trainer.project_name": "'verl_grpo_example_geo3k'", "trainer.save_freq": 20},
    **{"trainer.experiment_name": "'qwen2_5_vl_7b_function_rm'", "trainer.test_freq": 5},
    **{"trainer.total_epochs": 15},
}
_CACHE = "rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache"
_FSDP = _GRPO | {
    **{"data.image_key": "images", "model.path": "Qwen/Qwen2.5-VL-7B-Instruct"},
    **{"model.use_remove_padding": True, "actor.ppo_micro_batch_size_per_gpu": 10},
    **{"model.enable_gradient_checkpointing": True, "actor.fsdp_config.param_offload": False},
    **{"actor.fsdp_config.optimizer_offload": False, "ref.fsdp_config.param_offload": True},
    **{"rollout.log_prob_micro_batch_size_per_gpu": 20, "rollout.enforce_eager": False},
    **{"rollout.tensor_model_parallel_size": 2, "rollout.gpu_memory_utilization": 0.6},
    **{"rollout.enable_chunked_prefill": False, "rollout.free_cache_engine": False},
    **{"ref.log_prob_micro_batch_size_per_gpu": 20},
}
_NPU = _FSDP | {
    **{"actor.use_torch_compile": False, "trainer.logger": "['console']", "trainer.save_freq": -1},
    **{"trainer.test_freq": -1, "trainer.device": "npu", "actor.ppo_mini_batch_size": 32},
    **{"actor.ppo_micro_batch_size_per_gpu": 2, "trainer.n_gpus_per_node": 16},
}
_OVERRIDE = "+actor.megatron.override_transformer_config"
_OFFLOADED = "+actor.optim.override_optimizer_config"
_VERL_MEGATRON = _GRPO | {
    **{"model.path": "$HF_MODEL_PATH", "actor.ppo_micro_batch_size_per_gpu": 1},
    **{"actor.megatron.pipeline_model_parallel_size": "$PP"},
    **{"actor.megatron.tensor_model_parallel_size": "$TP", "actor.use_dynamic_bsz": True},
    **{"actor.ppo_max_token_len_per_gpu": 4096, "ref.log_prob_use_dynamic_bsz": True},
    **{"rollout.tensor_model_parallel_size": 4, "rollout.gpu_memory_utilization": 0.7},
    **{"actor.megatron.param_offload": True, "actor.megatron.optimizer_offload": True},
    **{"actor.megatron.grad_offload": True, "ref.megatron.param_offload": True},
    "trainer.logger": """'["console","wandb"]'""",
    f"+{_CACHE}": True,
}
_VERL_QWEN3 = _VERL_MEGATRON | {
    "actor.megatron.context_parallel_size": "$CP",
    **{f"{_OFFLOADED}.optimizer_offload_fraction": 1, f"{_OFFLOADED}.optimizer_cpu_offload": True},
    **{f"{_OFFLOADED}.overlap_cpu_optimizer_d2h_h2d": True},
    **{f"{_OFFLOADED}.use_precision_aware_optimizer": True},
    **{f"{_OVERRIDE}.moe_router_dtype": "fp32", f"{_OVERRIDE}.moe_enable_deepep": True},
    **{f"{_OVERRIDE}.moe_token_dispatcher_type": "flex", f"{_OVERRIDE}.recompute_num_layers": 1},
    **{f"{_OVERRIDE}.recompute_method": "uniform", f"{_OVERRIDE}.recompute_granularity": "full"},
    **{f"{_OVERRIDE}.gradient_accumulation_fusion": True, f"{_OVERRIDE}.moe_permute_fusion": True},
}
_EXPERT_DEGREES = {
    "actor.megatron.expert_model_parallel_size": "$EP",
    "actor.megatron.expert_tensor_parallel_size": "$ETP",
}


def degrees(model: str, **sizes: int) -> str:
    """Return the lines in which a script of verl sets its model and degrees."""
    where = f'HF_MODEL_PATH=${{HF_MODEL_PATH:-"${{RAY_DATA_HOME}}/models/{model}"}}'
    return "\n".join([where, *(f"{name}=${{{name}:-{size}}}" for name, size in sizes.items())])


# (lines before the command, settings)
VERL: dict[str, tuple[str, Facts]] = {
    "grpo_trainer/run_qwen2_5_vl-7b": ("", _FSDP | {_CACHE: True}),
    "grpo_trainer/run_qwen2_5_vl-7b_lora": (
        "",
        _FSDP
        | {_CACHE: True, "model.lora_rank": 16, "model.lora_alpha": 32}
        | {"model.path": "/data/models/Qwen2.5-VL-7B-Instruct", "trainer.save_freq": -1}
        | {"model.target_modules": "all-linear", "model.exclude_modules": "'.*visual.*'"},
    ),
    "grpo_trainer/run_qwen2_5_vl-7b-sglang": (
        "",
        _FSDP | {f"+{_CACHE}": True, "rollout.name": "sglang", "rollout.free_cache_engine": True},
    ),
    "grpo_trainer/run_qwen2_5_vl_7b_npu": ("export USE_OPTIMIZED_MODEL=0", _NPU),
    "grpo_trainer/run_qwen2_5_vl-7b-megatron": (
        "HF_MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct\nDIST_CKPT_PATH=${DIST_CKPT_PATH}\nTP=2\nPP=1",
        _VERL_MEGATRON
        | {"actor.ppo_micro_batch_size_per_gpu": 4, "actor.ppo_max_token_len_per_gpu": 5120}
        | {"actor.megatron.use_dist_checkpointing": True}
        | {"actor.megatron.dist_checkpointing_path": "$DIST_CKPT_PATH"},
    ),
    "grpo_trainer/run_qwen3_vl-8b-megatron": (
        degrees("Qwen3-VL-8B-Instruct", CP=2, TP=2, PP=2),
        _VERL_QWEN3,
    ),
    "grpo_trainer/run_qwen3_vl-30b-megatron": (
        degrees("Qwen3-VL-30B-A3B-Instruct", CP=2, TP=2, PP=1, EP=8, ETP=1),
        _VERL_QWEN3
        | _EXPERT_DEGREES
        | {f"{_OVERRIDE}.moe_aux_loss_coeff": 0.01, f"{_OVERRIDE}.moe_z_loss_coeff": 0.001},
    ),
    "grpo_trainer/run_qwen3_vl-235b-megatron": (
        degrees("Qwen3-VL-235B-A22B-Instruct", CP=2, TP=4, PP=8, EP=8, ETP=1),
        _VERL_QWEN3
        | _EXPERT_DEGREES
        | {f"{_OVERRIDE}.account_for_loss_in_pipeline_split": True, "trainer.nnodes": 8}
        | {f"{_OVERRIDE}.account_for_embedding_in_pipeline_split": True},
    ),
}


def texts() -> dict[str, tuple[str, str]]:
    """Return the name of a file and its text for each example."""
    found = {
        f"LLaMA-Factory {name}": ("lf.yaml", yaml_text(each))
        for name, each in LLAMA_FACTORY.items()
    }
    for name, (command, variables, facts) in MS_SWIFT.items():
        found[f"ms-swift {name}"] = ("swift.sh", f"n=2\n{script_text(command, facts, variables)}")
    for name, (command, facts) in TRL.items():
        found[f"TRL {name}"] = ("trl.sh", script_text(command, facts))
    found |= {
        f"axolotl {name}": ("axolotl.yaml", yaml_text(each)) for name, each in AXOLOTL.items()
    }
    for name, (lines, facts) in VERL.items():
        found[f"verl {name}"] = ("verl.sh", hydra_text(facts, lines))
    return found
