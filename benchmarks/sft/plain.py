"""A training loop in plain Transformers, whose definition of the loss is an argument. It explains
the losses of the other trainers: a trainer with this definition has these losses.

It runs in the environment of `make trl-env`. Its arguments and answers are those of theirs.py, with
two arguments more:

- ENDING: `turn` supervises an answer and its <|im_end|>; `newline` the line break after it, too.
- MEAN: `step` divides by the supervised tokens of the step; `micro_batch` takes the mean of each
  micro-batch and averages these.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from theirs import Arguments, answer, read_arguments, wait

# isort: split
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor

ENDINGS = {"turn": "<|im_end|>", "newline": "<|im_end|>\n"}
IGNORE = -100
Batch = tuple[dict[str, Tensor], Tensor]


def encode(folder: str, lines: list[str], processor: Any, ending: str) -> Batch:
    """Return the inputs of a micro-batch and its labels, which the model's output predicts."""
    texts, images, supervised = [], [], []
    for line in lines:
        messages = json.loads(line)["messages"]
        prompt = processor.apply_chat_template(
            messages[:1], tokenize=False, add_generation_prompt=True
        )
        completion = messages[1]["content"] + ending
        texts.append(prompt + completion)
        supervised.append(len(processor.tokenizer(completion)["input_ids"]))
        parts = messages[0]["content"]
        names = [part["image"] for part in parts if part["type"] == "image"]
        images += [Image.open(f"{folder}/{name}") for name in names]
    inputs = processor(text=texts, images=images or None, padding=True, return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], IGNORE)
    for row, count in enumerate(supervised):
        end = int(inputs["attention_mask"][row].sum())
        labels[row, end - count : end] = inputs["input_ids"][row, end - count : end]
    return inputs, labels[:, 1:]


def batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield the lines in lists of this size."""
    rest = iter(lines)
    while batch := list(islice(rest, size)):
        yield batch


def steps(asked: Arguments, processor: Any, ending: str) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step."""
    with open(f"{asked.folder}/chats.jsonl") as file:
        for rows in batched(file, asked.rows):
            micro_batches = batched(rows, asked.micro_batch)
            yield [encode(asked.folder, lines, processor, ending) for lines in micro_batches]


def main(asked: Arguments, ending: str, mean: str) -> None:
    """Train until the input ends."""
    path = f"{asked.folder}/model"
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    processor = AutoProcessor.from_pretrained(path)
    processor.tokenizer.padding_side = "right"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for micro_batches in steps(asked, processor, ENDINGS[ending]):
        wait()
        counts = [int((labels != IGNORE).sum()) for _, labels in micro_batches]
        loss_of_step = 0.0
        for (inputs, labels), count in zip(micro_batches, counts, strict=True):
            logits = model(**inputs).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (sum(counts) if mean == "step" else count * len(counts))
            loss.backward()
            loss_of_step += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        answer(loss_of_step)
    wait()


if __name__ == "__main__":
    main(read_arguments(), *sys.argv[5:7])
