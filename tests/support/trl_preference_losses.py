"""TRL's losses over preferences of given log-probs. Runs in the environment of `make trl-env`,
which has nothing of ours: trl_preference_losses.py MODEL, with a list of cases as JSON on standard
input.

A case has `trainer` (dpo, kto, orpo, cpo, reward), `config`, `log_probs` of the answers [rows,
tokens] with zeros where there is no token, `lengths`, `reference` [rows], and for kto `labels` and
`kl`, the log-probs of mismatched rows under the model and the reference. For reward the first
numbers of the rows are rewards, and the config may have `margin`. All are float64. The answer to it
is the loss and its gradient by the log-probs.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import vllm_engine.torchvision_operators  # noqa: F401 - torchvision can then be imported

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

Tensor = torch.Tensor
ALWAYS: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 2,
}


def trainer_of(kind: str, path: str, folder: str, config: dict[str, Any]) -> Any:
    columns = {"prompt": ["what"] * 2}
    if kind == "dpo":
        columns |= {"chosen": ["a", "b"], "rejected": ["c", "d"]}
        settings, made = DPOConfig(output_dir=folder, **ALWAYS, **config), DPOTrainer
    else:
        columns |= {"completion": ["a", "b"], "label": [True, False]}
        settings, made = KTOConfig(output_dir=folder, **ALWAYS, **config), KTOTrainer
    trainer = made(
        Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.model.train()
    trainer.precompute_ref_logps = True
    return trainer


def outputs_of(log_probs: Tensor) -> Any:
    """What the model would have given: the first token is not predicted."""
    none = torch.zeros_like(log_probs)
    return SimpleNamespace(
        log_probs=log_probs, entropy=none, mean_logits=none, is_top1=none.bool(), aux_loss=None
    )


def with_trainer(case: dict[str, Any], log_probs: Tensor, path: str, folder: str) -> Tensor:
    trainer = trainer_of(case["trainer"], path, folder, case["config"])
    rows, tokens = log_probs.shape
    mask = torch.arange(tokens) < torch.tensor(case["lengths"])[:, None]
    # One token of the prompt comes first.
    mask = torch.cat([torch.zeros(rows, 1, dtype=torch.long), mask.long()], dim=1)
    ids = torch.zeros(rows, tokens + 1, dtype=torch.long)
    reference = torch.tensor(case["reference"], dtype=torch.float64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    if case["trainer"] == "dpo":
        chosen, rejected = reference.chunk(2)
        inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        loss: Tensor = trainer._compute_loss(
            _as_model(lambda **_: outputs_of(log_probs)), inputs, False
        )
        return loss
    mismatched, ref_mismatched = torch.tensor(case["kl"], dtype=torch.float64)
    inputs |= {"label": torch.tensor(case["labels"]), "ref_logps": reference}
    if trainer.calculate_KL:
        inputs |= {f"KL_{name}": value + 1 for name, value in inputs.items() if "mask" in name}
        inputs |= {"KL_input_ids": ids + 1, "ref_KL_logps": ref_mismatched}

    def model(input_ids: Tensor, **_: Any) -> Any:
        if not input_ids.any():
            return outputs_of(log_probs)
        return outputs_of(torch.cat([mismatched[:, None], torch.zeros(rows, tokens - 1)], dim=1))

    loss = trainer._compute_loss(_as_model(model), inputs, False)
    return loss


def _as_model(function: Any) -> Any:
    return function


def without_reference(case: dict[str, Any], log_probs: Tensor) -> Tensor:
    """The loss of ORPO and CPO, from their own functions of the answers' log-probs."""
    config = {"label_smoothing": 0.0, "alpha": 0.0, "simpo_gamma": 0.5, **case["config"]}
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **config)
    lengths = torch.tensor(case["lengths"])
    sums = log_probs.sum(1)
    is_mean = case["trainer"] == "orpo" or config.get("loss_type") in ("ipo", "simpo")
    chosen, rejected = (sums / lengths if is_mean else sums).chunk(2)
    count = len(lengths) // 2
    nll = -sums[:count].sum() / lengths[:count].sum()
    if case["trainer"] == "orpo":
        losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
        return nll - losses.mean()
    losses, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    return losses.mean() + config["cpo_alpha"] * nll


def of_rewards(config: dict[str, Any], rewards: Tensor) -> Tensor:
    """The loss of RewardTrainer, from its own function."""

    def same(value: Tensor) -> Tensor:
        return value

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=config["center_rewards_coefficient"]),
        accelerator=SimpleNamespace(gather=same, gather_for_metrics=same),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    inputs = {"margin": torch.tensor(config["margin"])} if "margin" in config else {}
    outputs = SimpleNamespace(logits=rewards[:, None])
    loss: Tensor = RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)
    return loss


def answer(path: str, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    log_probs = torch.tensor(case["log_probs"], dtype=torch.float64, requires_grad=True)
    if case["trainer"] in ("dpo", "kto"):
        loss = with_trainer(case, log_probs, path, folder)
    elif case["trainer"] == "reward":
        loss = of_rewards(case["config"], log_probs[:, 0])
    else:
        loss = without_reference(case, log_probs)
    loss.backward()
    assert log_probs.grad is not None
    return {"loss": float(loss.detach()), "grad": log_probs.grad.tolist()}


def main() -> None:
    cases = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        found = [answer(sys.argv[1], folder, case) for case in cases]
    json.dump(found, OUT)
    OUT.flush()


if __name__ == "__main__":
    # Only the answer goes to standard output.
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
