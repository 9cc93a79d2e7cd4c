"""Embeddings and scores of vLLM's pooling runner: pooling.py FOLDER TASK.json OUT.safetensors.

It runs in the environment of `make vllm-env`. The task has `prompts` of token ids with the paths of
their pictures, to be embedded; or `pairs` of queries and documents, each a list of parts, to be
scored, with the `overrides` of config.json and the path of a `template`."""

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)

import PIL.Image
import torch
from safetensors.torch import save_file
from vllm import LLM


def embed(llm: LLM, prompts: list[dict[str, Any]]) -> torch.Tensor:
    given = [
        {"prompt_token_ids": each["ids"]}
        | (
            {"multi_modal_data": {"image": [PIL.Image.open(path) for path in each["pictures"]]}}
            if each["pictures"]
            else {}
        )
        for each in prompts
    ]
    outputs = llm.embed(given, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def score(llm: LLM, pairs: list[list[Any]], template: str) -> torch.Tensor:
    queries, documents = (
        [{"content": [as_vllm(part) for part in pair[side]]} for pair in pairs] for side in (0, 1)
    )
    outputs = llm.score(queries, documents, chat_template=template, use_tqdm=False)
    return torch.tensor([output.outputs.score for output in outputs])


def as_vllm(part: dict[str, str]) -> dict[str, Any]:
    if "image" not in part:
        return part
    data = base64.b64encode(Path(part["image"]).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[2]).read_text())
    llm = LLM(
        sys.argv[1],
        runner="pooling",
        convert="classify" if "pairs" in task else "auto",
        dtype=task.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=512,
        limit_mm_per_prompt={"image": 2, "video": 0},
        hf_overrides=task.get("overrides", {}),
    )
    if "pairs" in task:
        result = {"scores": score(llm, task["pairs"], Path(task["template"]).read_text())}
    else:
        result = {"embeddings": embed(llm, task["prompts"])}
    save_file(result, sys.argv[3])
