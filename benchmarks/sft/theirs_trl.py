"""TRL's SFTTrainer on the rows of rows.py. Its arguments and answers are those of theirs.py.

One setting is not a user's usual one. Transformers declares that the class of Qwen3-VL takes no
number of items (`accepts_loss_kwargs = False`). The Trainer therefore divides the loss of each
micro-batch by its own supervised tokens and averages the micro-batches, so that the tokens of a
micro-batch with few of them weigh more. With rows of mixed length that mean differs from the mean
over all supervised tokens of the step, which this package uses. TRL computes its loss itself and
can divide by the tokens of the whole step once the attribute is true; it costs no time. Then the
losses of single rows differ by less than 4e-6, and for rows without a picture only in the last
digit of fp32. The reason is the resize of torchvision, which TRL uses: it differs from Pillow's by
one level of 255 in 0.3 % of the values.
"""

import json
import os
from typing import Any

import torch
from theirs import Arguments, TakeTurns, read_arguments

# isort: split
from datasets import Dataset, Image, Sequence
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer


def records(folder: str, processor: Any) -> Dataset:
    """Return prompt and completion as the chat template renders them, up to the end of the
    answer."""
    columns: dict[str, list[Any]] = {"prompt": [], "completion": [], "images": []}
    with open(f"{folder}/chats.jsonl") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            prompt = processor.apply_chat_template(
                messages[:1], tokenize=False, add_generation_prompt=True
            )
            columns["prompt"].append(prompt)
            columns["completion"].append(messages[1]["content"] + "<|im_end|>")
            parts = messages[0]["content"]
            names = [part["image"] for part in parts if part["type"] == "image"]
            columns["images"].append([f"{folder}/{name}" for name in names])
    return Dataset.from_dict(columns).cast_column("images", Sequence(Image()))


def main(asked: Arguments) -> None:
    """Build the trainer and train until the input ends."""
    folder = asked.folder
    model = AutoModelForImageTextToText.from_pretrained(f"{folder}/model", dtype=torch.float32)
    model.accepts_loss_kwargs = True  # see above: the mean over the supervised tokens of a step
    processor = AutoProcessor.from_pretrained(f"{folder}/model")
    config = SFTConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=asked.micro_batch,
        gradient_accumulation_steps=asked.accumulated,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=None,
        completion_only_loss=True,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_num_workers=int(os.environ.get("TRL_WORKERS", "0")),
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=records(folder, processor),
        processing_class=processor,
        callbacks=[TakeTurns()],
    )
    trainer.train()


if __name__ == "__main__":
    main(read_arguments())
