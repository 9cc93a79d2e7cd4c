"""TRL's GRPOTrainer gives its loss of log-probs. Runs in the environment of `make trl-env`, which
has nothing of ours: trl_policy_losses.py MODEL, with a list of cases as JSON on standard input.

A case has `config` (of GRPOConfig), `inputs` (of `_compute_loss`, [answers, tokens]) and
`log_probs`, in the place of those that the model would have given; all in float64. The answer to it
has the loss, its gradient with respect to the log-probs, and the trainer's advantages of `rewards`.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch
import vllm_engine.torchvision_operators  # noqa: F401 - torchvision can then be imported

os.environ["HF_HUB_OFFLINE"] = "1"

from datasets import Dataset
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import nanstd


def trainer_of(path: str, folder: str, answers: int, config: dict[str, Any]) -> GRPOTrainer:
    """A trainer as a user would make it, about to do a step of one micro-batch."""
    settings = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=answers,
        num_generations=answers,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **config,
    )
    trainer = GRPOTrainer(
        Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["what"] * answers}),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def answer(path: str, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    given = {name: torch.tensor(v, dtype=torch.float64) for name, v in case["inputs"].items()}
    log_probs = torch.tensor(case["log_probs"], dtype=torch.float64, requires_grad=True)
    answers, tokens = log_probs.shape
    trainer = trainer_of(path, folder, answers, case["config"])
    # The only replacement: what the model would have given.
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        log_probs,
        torch.zeros_like(log_probs),
        None,
    )
    if "importance_sampling_ratio" in given:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    ids = torch.zeros(answers, tokens, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "num_items_in_batch": given["completion_mask"].sum(),
    }
    loss = trainer.compute_loss(trainer.model, inputs | given)
    loss.backward()
    assert log_probs.grad is not None
    return {"loss": float(loss.detach()), "grad": log_probs.grad.tolist()}


def main() -> None:
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        found = [answer(sys.argv[1], folder, case) for case in asked["cases"]]
    stds = [
        float(nanstd(torch.tensor([group], dtype=torch.float64), dim=1))
        for group in asked["rewards"]
    ]
    json.dump({"cases": found, "stds": stds}, OUT)
    OUT.flush()


if __name__ == "__main__":
    # Only the answer goes to standard output.
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
