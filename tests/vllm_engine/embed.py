"""Embeddings of vLLM's pooling runner: embed.py FOLDER TASK.json OUT.safetensors.

It runs in the environment of `make vllm-env`. The task has prompts of token ids with the paths of
their pictures."""

import json
import os
import sys

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

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    with open(sys.argv[2]) as file:
        prompts = json.load(file)
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
    save_file({"embeddings": torch.tensor([o.outputs.embedding for o in outputs])}, sys.argv[3])
