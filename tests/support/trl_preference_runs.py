"""Runs of TRL's DPOTrainer and KTOTrainer, in the environment of `make trl-env`, which has nothing
of ours: trl_preference_runs.py KIND MODEL DATA OUT, where DATA has a record in each line, with the
prompt as the chat template renders it. It prints a JSON list of what each step logs, and writes the
weights after the last step to OUT.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch
import vllm_engine.torchvision_operators  # noqa: F401 - torchvision can then be imported

os.environ["HF_HUB_OFFLINE"] = "1"

from datasets import Dataset, Image, Sequence
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer


def main(kind: str, path: str, data: str, out: str) -> None:
    """Train as a user would, without shuffling."""
    with open(data) as lines:
        records = [json.loads(line) for line in lines]
    columns = {name: [record[name] for record in records] for name in records[0]}
    dataset = Dataset.from_dict(columns).cast_column("images", Sequence(Image()))
    config, made = (DPOConfig, DPOTrainer) if kind == "dpo" else (KTOConfig, KTOTrainer)
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = config(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(records),
            max_steps=STEPS,
            train_sampling_strategy="sequential",
            logging_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            adam_epsilon=1e-4,
            beta=0.3,
            max_length=None,
        )
        trainer = made(
            Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32),
            args=settings,
            train_dataset=dataset,
            processing_class=AutoProcessor.from_pretrained(path, use_fast=True),
        )
        trainer.train()
        torch.save({name: p.detach() for name, p in trainer.model.named_parameters()}, out)
        logged = [line for line in trainer.state.log_history if "loss" in line]
    json.dump(logged, OUT)
    OUT.flush()


STEPS = 3
if __name__ == "__main__":
    # Only the answer goes to standard output.
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(*sys.argv[1:])
