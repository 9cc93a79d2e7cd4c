"""Run sentence-transformers on an export, in its own environment: .venv-embed/bin/python
tests/support/sentence_transformers_reference.py FOLDER TASK.json OUT.safetensors

The task has the messages of the columns anchor, positive and negatives. The output has the
embeddings of each column, and the loss with every gradient. Or the task has pairs of a query and a
document, each a list of parts, and the output has the score of each and its logit."""

import json
import sys
from typing import Any

import PIL.Image
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, losses
from torch import Tensor


def run(folder: str, task: dict[str, Any]) -> dict[str, Tensor]:
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    columns = task["columns"]
    for part in (part for column in columns for [turn] in column for part in turn["content"]):
        if "image" in part:  # this torchvision cannot read files
            part["image"] = PIL.Image.open(part["image"])
    model.eval()
    result = {
        f"column {number}": torch.stack(
            [model.encode([item], convert_to_tensor=True)[0] for item in column]
        )
        for number, column in enumerate(columns)
    }
    prompt = model.prompts[model.default_prompt_name]
    loss: Any = losses.MultipleNegativesRankingLoss(model, scale=1 / task["temperature"])
    if task["dimensions"]:
        weights = task["dimension_weights"]
        loss = losses.MatryoshkaLoss(model, loss, task["dimensions"], matryoshka_weights=weights)
    model.train()
    features = [model.preprocess(column, prompt=prompt) for column in columns]
    value = loss(features, torch.zeros(0))
    value.backward()
    result["loss"] = value.detach()
    for name, param in model[0].model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        result[f"model.{name}"] = grad.contiguous()
    return result


def score(folder: str, task: dict[str, Any]) -> dict[str, Tensor]:
    model = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    pairs = [tuple(map(as_input, pair)) for pair in task["pairs"]]
    options: dict[str, Any] = dict(convert_to_tensor=True, batch_size=3)
    logits = model.predict(pairs, activation_fn=torch.nn.Identity(), **options)
    return {"scores": model.predict(pairs, **options), "logits": logits}


def as_input(parts: list[dict[str, str]]) -> Any:
    """Return parts as a user would give them: a text, a picture, or an object with both."""
    values = {part["type"]: part[part["type"]] for part in parts}
    if "image" in values:
        values["image"] = PIL.Image.open(values["image"])
    return next(iter(values.values())) if len(values) == 1 else values


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        task = json.load(file)
    save_file((score if "pairs" in task else run)(sys.argv[1], task), sys.argv[3])
