"""LLaMA-Factory's `llamafactory-cli train` on the rows of rows.py, with a YAML file as a user
writes it. Its arguments and answers are those of theirs.py.

What differs from its defaults is what the comparison fixes: all weights are trained, nothing is
computed twice to save memory, rows keep their order and length, and the checkpoint's own processor
chooses the size of a picture.
"""

import json
import sys
from pathlib import Path

import yaml
from theirs import Arguments, TakeTurns, read_arguments

# isort: split
from llamafactory.train.tuner import run_exp

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}


def write_config(asked: Arguments) -> Path:
    """Write the data set's entry and the configuration, and return the latter's path."""
    folder = Path(asked.folder)
    entry = {
        "file_name": "tagged.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {**TAGS, "assistant_tag": "assistant"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}))
    config = {
        "model_name_or_path": f"{folder}/model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "disable_gradient_checkpointing": True,
        "image_max_pixels": 2048 * 2048,  # the checkpoint's limit counts, not a second one
        "dataset": "chats",
        "dataset_dir": str(folder),
        "template": "qwen3_vl_nothink",
        "cutoff_len": 8192,
        "overwrite_cache": True,
        "dataloader_num_workers": 0,
        "disable_shuffling": True,
        "output_dir": f"{folder}/llamafactory",
        "per_device_train_batch_size": asked.micro_batch,
        "gradient_accumulation_steps": asked.accumulated,
        "num_train_epochs": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    path = folder / "llamafactory.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


if __name__ == "__main__":
    sys.argv[1:] = [str(write_config(read_arguments()))]
    run_exp(callbacks=[TakeTurns()])
