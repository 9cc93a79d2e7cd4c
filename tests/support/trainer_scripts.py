"""Scripts in the style of the trainers' own examples, with `megatron-vlm import` in front of
their commands. Each comes with our keys that it must become, and with words of its notes."""

from typing import Any

from megatron_vlm.config.schema import VideoLimits

PROMPT = "You are a careful reader.\n"
LF_YAML = """\
### model
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
image_max_pixels: 262144
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: mllm_demo,identity  # video: mllm_video_demo
template: qwen3_vl_nothink
cutoff_len: 2048

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 1.0e-5}
bf16: true
"""
TRL_YAML = """\
model_name_or_path: Qwen/Qwen3-VL-2B-Instruct
dataset_name: trl-lib/llava-instruct-mix
learning_rate: 2.0e-5
"""
AXOLOTL_YAML = """\
base_model: Qwen/Qwen3-VL-2B-Instruct
datasets:
  - path: chats.jsonl
sequence_len: 4096
micro_batch_size: 2
learning_rate: 0.0002
"""
FILES = {"prompt.txt": PROMPT, "lf.yaml": LF_YAML, "trl.yaml": TRL_YAML}
FILES |= {"axolotl.yaml": AXOLOTL_YAML}
_SWIFT = "swift sft --model Qwen/Qwen3-VL-2B-Instruct --dataset a.jsonl"
_MEGATRON = "megatron sft --model Qwen/Qwen3-VL-30B-A3B-Instruct --dataset a.jsonl"
_TRL = "--model_name_or_path Qwen/Qwen3-VL-2B-Instruct --dataset_name org/chats"
_VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-VL-2B-Instruct"

QWEN_SFT = """\
NPROC_PER_NODE=8
deepspeed=./scripts/zero3.json
llm=Qwen/Qwen3-VL-4B-Instruct  # Using HuggingFace model ID
batch_size=4
entry_file=qwenvl/train/train_qwen.py
args="
    --deepspeed ${deepspeed} \\
    --model_name_or_path "${llm}" \\
    --dataset_use public_dataset1,public_dataset2%50 \\
    --data_flatten True \\
    --tune_mm_vision False \\
    --tune_mm_mlp True \\
    --tune_mm_llm True \\
    --bf16 \\
    --output_dir ./output \\
    --num_train_epochs 0.5 \\
    --per_device_train_batch_size ${batch_size} \\
    --per_device_eval_batch_size $((batch_size*2)) \\
    --gradient_accumulation_steps 4 \\
    --max_pixels 50176 \\
    --min_pixels 784 \\
    --eval_strategy "no" \\
    --save_strategy "steps" \\
    --save_steps 1000 \\
    --save_total_limit 1 \\
    --learning_rate 1e-5 \\
    --weight_decay 0 \\
    --warmup_ratio 0.03 \\
    --max_grad_norm 1 \\
    --lr_scheduler_type "cosine" \\
    --logging_steps 1 \\
    --model_max_length 8192 \\
    --gradient_checkpointing True \\
    --dataloader_num_workers 4 \\
    --run_name qwen3vl \\
    --report_to wandb"
megatron-vlm import torchrun --nproc_per_node=${NPROC_PER_NODE} --master_addr=127.0.0.1 \\
    --master_port=29500 ${entry_file} ${args}
"""

# name: (script, our keys with their values, words of the notes)
SCRIPTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ms-swift: variables, a sum and a comment": (
        """#!/bin/bash
# 2 * 40GiB
nproc_per_node=2
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
MAX_PIXELS=1003520 \\
megatron-vlm import swift sft \\
    --model Qwen/Qwen3-VL-4B-Instruct \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' \\
              'swift/self-cognition#500' \\
    --tuner_type lora \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --learning_rate 1e-4 \\
    --system 'You are a helpful assistant.' \\
    --output_dir output  # runs/first
""",
        {"train.global_batch_size": 16, "data.max_pixels": 1003520, "run": "output"}
        | {"data.system": "You are a helpful assistant.", "lora.rank": 8},
        "500 of swift/self-cognition",
    ),
    "ms-swift: a value that begins with <": (
        "megatron-vlm import swift sft --model Qwen/Qwen3-VL-2B-Instruct --dataset a.jsonl \\\n"
        "  --system '<role>You judge.</role>' --tuner_type full --num_train_epochs 7\n",
        {"data.system": "<role>You judge.</role>", "lora.rank": 0, "train.epochs": 7.0},
        "",
    ),
    "ms-swift: a value that begins with >, and an output that is redirected": (
        f"megatron-vlm import {_SWIFT} --system '> quoted' --num_train_epochs 2 2>/dev/null | cat",
        {"data.system": "> quoted", "train.epochs": 2.0},
        "",
    ),
    "ms-swift: a file with the prompt": (
        f"megatron-vlm import {_SWIFT} --system prompt.txt",
        {"data.system": PROMPT},
        "",
    ),
    "ms-swift: JSON, the left side, and another task": (
        f"""megatron-vlm import {_SWIFT} --learning_rate 1e-4 --truncation_strategy left \\
  --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{"min_lr": 1e-5}}' \\
  --columns '{{"query": "messages", "image": "images"}}' --task_type embedding""",
        {"optim.min_lr_ratio": 0.1, "data.truncation": "image_safe"}
        | {"data.columns": {"messages": "query", "images": "image"}},
        "truncation_strategy=left: a longer record loses its end here; set train.objective=embed",
    ),
    "ms-swift: its file started by torchrun": (
        "megatron-vlm import torchrun --master_port 29500 --nproc_per_node=4 --nnodes 2 "
        f"swift/cli/sft.py {_SWIFT.removeprefix('swift sft ')} --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 1",
        {"train.global_batch_size": 16, "optim.lr": 1e-4, "lora.alpha": 32},
        "",
    ),
    "ms-swift: one process that sees four GPUs": (
        f"CUDA_VISIBLE_DEVICES=0,1,2,3 megatron-vlm import {_SWIFT}"
        " --gradient_accumulation_steps 4",
        {"train.global_batch_size": 4},
        "",
    ),
    "ms-swift: rlhf with a loop, a function and arguments": (
        """set -euo pipefail
DIR="$(cd "$(dirname "${BASH_SOURCE[0]:-.}")" && pwd)"
cat > /dev/null <<'EOF'
it's a note, with "quotes
EOF
train() {
  local beta=${1:-0.1}; shift
  megatron-vlm import swift rlhf --rlhf_type dpo --beta "$beta" --model "$MODEL" \\
    --dataset "$DIR/pairs.jsonl" --rpo_alpha 0.1 "$@"
}
for MODEL in Qwen/Qwen3-VL-2B-Instruct; do train 0.5 "$@"; done
""",
        {"train.objective": "dpo", "preference.beta": 0.5, "preference.losses": ("sigmoid", "sft")},
        "",
    ),
    "ms-swift: grpo with plugins": (
        """NPROC_PER_NODE=8 megatron-vlm import swift rlhf --rlhf_type grpo \\
  --model Qwen/Qwen3-VL-2B-Instruct --dataset a.jsonl --external_plugins plugin.py \\
  --reward_funcs external_math format --num_generations 8 --per_device_train_batch_size 4 \\
  --max_completion_length 1024 --use_vllm true --vllm_mode colocate --temperature 0.9
""",
        {"train.global_batch_size": 4, "rl.samples": 8, "rl.kl_coef": 0.04, "rl.temperature": 0.9}
        | {"rl.aggregate": "sequences", "engine.name": "vllm"},
        "reward_funcs=[external_math,format]: a reward is a function",
    ),
    "Megatron-SWIFT: experts over tensor parallel ranks": (
        f"NPROC_PER_NODE=8 megatron-vlm import {_MEGATRON} --tensor_model_parallel_size 2 "
        "--expert_model_parallel_size 8 --global_batch_size 32 --lr 1e-5 --min_lr 1e-6",
        {"train.global_batch_size": 32, "parallel.ep": 1, "optim.min_lr_ratio": 0.1},
        "experts divide data parallel ranks here",
    ),
    "Megatron-SWIFT: a layout that fits": (
        f"NPROC_PER_NODE=8 megatron-vlm import {_MEGATRON} --tensor_model_parallel_size 2 "
        "--expert_model_parallel_size 4 --recompute_granularity full",
        {"parallel.tp": 2, "parallel.ep": 4, "model.recompute": "full"},
        "",
    ),
    "LLaMA-Factory: a file, and values after it": (
        "export FORCE_TORCHRUN=1 NPROC_PER_NODE=4\n"
        "megatron-vlm import llamafactory-cli train lf.yaml learning_rate=1e-5 lora_rank=16",
        {"optim.lr": 1e-5, "lora.rank": 16, "train.global_batch_size": 32}
        | {"optim.min_lr_ratio": 1.0, "data.max_pixels": 262144},
        "",
    ),
    "LLaMA-Factory: options, by deepspeed": (
        "megatron-vlm import deepspeed --num_gpus 8 --master_port=9901 src/train.py --stage sft "
        "--do_train --model_name_or_path Qwen/Qwen3-VL-2B-Instruct --dataset mllm_demo "
        "--finetuning_type full --deepspeed ds_z3.json --per_device_train_batch_size 2",
        {"train.global_batch_size": 16, "lora.rank": 0, "optim.lr": 5e-5},
        "",
    ),
    "TRL: a script by accelerate": (
        f"""megatron-vlm import accelerate launch --config_file examples/zero3.yaml \\
    --num_processes 4 examples/scripts/sft_vlm.py {_TRL} \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \\
    --gradient_checkpointing --use_peft --lora_target_modules q_proj v_proj --eval_strategy no
""",
        {"train.global_batch_size": 64, "lora.targets": ("q_proj", "v_proj")}
        | {"model.recompute": "full", "optim.lr": 2e-5},
        "TRL learns whole chats; config_file=examples/zero3.yaml: accelerate's file is not read",
    ),
    "TRL: a file, options over it, and processes": (
        "megatron-vlm import trl sft --config trl.yaml --num_processes 2 --learning-rate 1e-5",
        {"train.global_batch_size": 16, "optim.lr": 1e-5, "data.max_tokens": 1024},
        "",
    ),
    "TRL: dpo, whose dataset is a shell variable with blanks": (
        "name='org/my pairs'\nmegatron-vlm import trl dpo --dataset_name \"$name\" --beta 0.2 "
        "--model_name_or_path Qwen/Qwen3-VL-2B-Instruct",
        {"train.objective": "dpo", "preference.beta": 0.2, "optim.lr": 1e-6},
        "",
    ),
    "axolotl: a file, options and a launcher": (
        "CUDA_VISIBLE_DEVICES=0,1 megatron-vlm import axolotl train axolotl.yaml "
        "--learning-rate 1e-4 --num-epochs=2",
        {"optim.lr": 1e-4, "train.epochs": 2.0, "train.global_batch_size": 4},
        "",
    ),
    "verl: arrays of overrides": (
        f"""set -x
PROJECT=${{PROJECT:-vlm}}
DATA=(
  data.train_files="$HOME/data/train.parquet"
  data.train_batch_size=$(( 2 * 64 ))
)
megatron-vlm import {_VERL} \\
  "${{DATA[@]}}" algorithm.adv_estimator=grpo trainer.logger='["console","wandb"]' \\
  trainer.project_name=$PROJECT +actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
  actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 ~trainer.val_before_train $@
""",
        {
            "train.global_batch_size": 128,
            "rl.samples": 5,
            "rl.loss": "gspo",
            "log.project": "vlm",
            "log.trackers": ("wandb",),
        },
        "",
    ),
    "verl: another file of defaults, in ray": (
        f"megatron-vlm import ray job submit --no-wait -- {_VERL} --config-name=ppo_megatron "
        "algorithm.adv_estimator=rloo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
        " data.train_files='[a.parquet, b.parquet]'",
        {"rl.advantage": "rloo", "parallel.tp": 2},
        "config_name=ppo_megatron: defaults of that file are not read",
    ),
    "qwen-vl-finetune: its script for Qwen3-VL": (
        QWEN_SFT,
        {"train.global_batch_size": 128, "train.micro_batch_size": 4, "optim.schedule": "cosine"}
        | {"optim.lr": 1e-5, "optim.warmup_ratio": 0.03, "train.epochs": 0.5, "lora.rank": 0}
        | {"model.freeze_vision": True, "model.freeze_merger": False, "checkpoint.every": 1000}
        | {"model.freeze_language": False, "data.max_tokens": 8192, "data.max_pixels": 50176}
        | {"data.min_pixels": 784, "log.project": "huggingface", "run": "./output"}
        | {"data.video": VideoLimits(2.0, 4, 8, 200704, 802816)},
        "data_dict in qwenvl/data/__init__.py; DeepStack's mergers learn with the merger here; "
        "give data.train=[{; data_flatten=True: records over data.max_tokens are left as they are",
    ),
    "qwen-vl-finetune: adapters, packs and rates": (
        "megatron-vlm import python -m qwenvl.train.train_qwen --model_name_or_path "
        "Qwen/Qwen3-VL-2B-Instruct --dataset_use 'a%50,b' --lora_enable True --data_flatten True "
        "--data_packing True --mm_projector_lr 1e-5 --base_interval 2 --cache_dir ./cache",
        {"lora.rank": 64, "lora.alpha": 128.0, "lora.dropout": 0.05, "optim.lr": 5e-5}
        | {"lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "optim.merger_lr": None}
        | {"model.freeze_vision": False, "train.global_batch_size": 8, "data.max_tokens": 512},
        "in place of a name's %50; a batch counts packs of records there; "
        "mm_projector_lr=1e-5: no effect there",
    ),
    "qwen-vl-finetune: rates of the parts": (
        "megatron-vlm import qwenvl/train/train_qwen.py --model_name_or_path "
        "Qwen/Qwen3-VL-2B-Instruct --dataset_use a --tune_mm_mlp True --tune_mm_llm True "
        "--tune_mm_vision True --mm_projector_lr 2e-5 --vision_tower_lr 1e-6",
        {"optim.merger_lr": 2e-5, "optim.vision_lr": 1e-6, "model.freeze_vision": False},
        "",
    ),
    "variables in front, as env has them": (
        f"megatron-vlm import env NPROC_PER_NODE=2 FPS_MAX_FRAMES=12 {_SWIFT}"
        " --gradient_accumulation_steps 1",
        {"train.global_batch_size": 2, "data.video": VideoLimits(max_frames=12)},
        "",
    ),
}
