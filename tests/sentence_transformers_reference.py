"""Run sentence-transformers on an export, in its own environment: .venv-embed/bin/python
tests/sentence_transformers_reference.py FOLDER TASK.json OUT.safetensors

The task has the messages of the columns anchor, positive and negatives. The output has the
embeddings of each column, and the loss with every gradient."""

import json
import sys
from typing import Any

import PIL.Image
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, losses
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


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        save_file(run(sys.argv[1], json.load(file)), sys.argv[3])
