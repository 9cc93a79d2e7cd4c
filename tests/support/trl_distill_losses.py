"""TRL's divergences of given logits. Runs in the environment of `make trl-env`, which has nothing
of ours: trl_distill_losses.py, with cases as JSON on standard input.

A case has `student` and `teacher` (logits [tokens, events]) and options. With `top_k` the loss is
that of IWOPDTrainer, which lumps all tokens but the teacher's first k itself, and else that of
GKDTrainer. The answer has the summed loss and its gradient with respect to the student's logits.
"""

import json
import os
import sys
from typing import Any

import torch
import vllm_engine.torchvision_operators  # noqa: F401 - torchvision can then be imported

os.environ["HF_HUB_OFFLINE"] = "1"

from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer


def answer(case: dict[str, Any]) -> dict[str, Any]:
    student = torch.tensor(case["student"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(case["teacher"], dtype=torch.float64)
    trainer = IWOPDTrainer if "top_k" in case["options"] else GKDTrainer
    loss = trainer.generalized_jsd_loss(
        student[None], teacher[None], reduction="sum", **case["options"]
    )
    loss.backward()
    assert student.grad is not None
    return {"loss": float(loss.detach()), "grad": student.grad.tolist()}


if __name__ == "__main__":
    # Only the answer goes to standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump([answer(case) for case in json.load(sys.stdin)], out)
    out.flush()
