"""PEFT on a model that bitsandbytes stores in 4 bits, in an environment of its own:

    python bitsandbytes_peft.py IN OUT

IN is a file of torch with the folder of the `model`, of PEFT's `adapter`, whether the scales are
stored in 8 bits (`nested`), and the `rows`: inputs of the model, and `labels` with -100 where a
token is not supervised. OUT gets the names of the layers in 4 bits, the loss, the log-probs of each
row and the gradients of the adapter. The model itself is saved beside OUT, in `stored`.
"""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # so that nothing needs a compiler of C++

import torch

# torchvision's compiled operators do not load next to torch's build for the CPU. Nothing here uses
# them, but they must be defined.
for operator in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

import bitsandbytes  # noqa: E402
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute  # noqa: E402
from bitsandbytes.functional import get_4bit_type  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig  # noqa: E402

IGNORE = -100


def decode(codes, absmax, block, kind, shape, dtype):
    code = get_4bit_type(kind, device="cpu")
    return _dequantize_4bit_compute(codes.reshape(-1), absmax, code, block, shape, dtype)


# Where a processor has AVX-512, bitsandbytes 0.50.2 decodes by another program, which is wrong for
# rows that are no whole number of blocks, such as the vision tower's here: values of [128, 32] are
# off by up to 1.6. The program for all devices is right everywhere.
library = torch.library.Library("bitsandbytes", "IMPL")
library.impl("dequantize_4bit", decode, "CPU", allow_override=True)


def main(given: str, out: str) -> None:
    case = torch.load(given)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=case["nested"],
    )
    model = AutoModelForImageTextToText.from_pretrained(
        case["model"],
        quantization_config=settings,
        dtype=torch.float32,
        device_map="cpu",
        attn_implementation="sdpa",
    )
    model.save_pretrained(Path(out).parent / "stored")
    linears = [n for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    adapted = PeftModel.from_pretrained(model, case["adapter"], is_trainable=True).train()
    labels = [row.pop("labels") for row in case["rows"]]
    count = sum(int((each[1:] != IGNORE).sum()) for each in labels)
    total, log_probs = 0.0, []
    for row, targets in zip(case["rows"], labels, strict=True):
        logits = adapted(**row).logits[0, :-1].float()
        picked = logits.log_softmax(-1).gather(-1, row["input_ids"][0, 1:, None])[:, 0]
        picked = picked * (targets[1:] != IGNORE)
        (-picked.sum() / count).backward()
        total -= float(picked.detach().double().sum())
        log_probs.append(torch.cat([picked.new_zeros(1), picked.detach()]))
    grads = {
        name.replace(".default", ""): param.grad
        for name, param in adapted.named_parameters()
        if param.requires_grad
    }
    torch.save(
        {"linears": linears, "loss": total / count, "log_probs": log_probs, "grads": grads}, out
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
