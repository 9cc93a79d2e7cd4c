"""ms-swift's `swift sft` on the rows of rows.py, with the arguments that a user types. Its
arguments and answers are those of theirs.py.

What differs from its defaults is what the comparison fixes: all weights are trained, nothing is
computed twice to save memory, AdamW and its schedule are those of the others, and rows keep their
order.
"""

import os
from typing import Any

from theirs import Arguments, TakeTurns, read_arguments

# A token of a picture is 32 x 32 pixels. This is the limit in the checkpoint's processor, which
# ms-swift does not read.
os.environ["IMAGE_MAX_TOKEN_NUM"] = "64"
os.environ["IMAGE_MIN_TOKEN_NUM"] = "1"

# isort: split
from swift.callbacks import callbacks_map
from swift.pipelines import sft_main
from swift.template.templates.qwen import Qwen3VLTemplate
from transformers import AutoTokenizer


class SwiftTakesTurns(TakeTurns):
    """TakeTurns, made as ms-swift makes its callbacks."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()


def command(asked: Arguments) -> list[str]:
    """Return the arguments of `swift sft`."""
    folder = asked.folder
    settings = {
        "model": f"{folder}/model",
        "model_type": "qwen3_vl",
        "tuner_type": "full",
        "freeze_vit": "false",
        "freeze_aligner": "false",
        "torch_dtype": "float32",
        "gradient_checkpointing": "false",
        "dataset": f"{folder}/tagged.jsonl",
        "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false",
        "load_from_cache_file": "false",
        "split_dataset_ratio": "0",
        "max_length": "8192",
        "dataloader_num_workers": "0",
        "output_dir": f"{folder}/swift",
        "per_device_train_batch_size": str(asked.micro_batch),
        "gradient_accumulation_steps": str(asked.accumulated),
        "num_train_epochs": "1",
        "learning_rate": "1e-4",
        "lr_scheduler_type": "constant",
        "weight_decay": "0",
        "adam_beta2": "0.999",
        "max_grad_norm": "1.0",
        "logging_steps": "1",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "disable_tqdm": "true",
        "check_model": "false",
        "callbacks": "take_turns",
    }
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


if __name__ == "__main__":
    asked = read_arguments()
    # The number of this token in Qwen's vocabulary is written down there.
    tokenizer = AutoTokenizer.from_pretrained(f"{asked.folder}/model")
    Qwen3VLTemplate.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    callbacks_map["take_turns"] = SwiftTakesTurns
    sft_main(command(asked))
