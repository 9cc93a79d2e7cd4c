"""The demo: a Qwen3-VL learns to name colours; export; transformers agrees with the result.

A tiny random model on the CPU with PP=2 (`make demo` does it):
    torchrun --nproc-per-node=2 scripts/demo.py OUT
A real one on four GPUs, configured like every run:
    torchrun --nproc-per-node=4 scripts/demo.py OUT model.path=DIR parallel.tp=2 parallel.pp=2
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from megatron_vlm.config import load_config
from megatron_vlm.data.batch import IGNORE, Row
from megatron_vlm.report import print_report
from megatron_vlm.schema import Config
from megatron_vlm.tiny import write_tiny
from megatron_vlm.worker import MegatronWorker

STEPS = 30
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")


def picture(colour: str, index: int) -> Image.Image:
    """A disc of a colour on grey; sizes and places differ from picture to picture."""
    width, height = 64 + 32 * (index % 3), 64 + 32 * (index % 2)
    image = Image.new("RGB", (width, height), "grey")
    left, top = index * 7 % 20, index * 5 % 20
    ImageDraw.Draw(image).ellipse((left, top, left + 44, top + 44), fill=colour)
    return image


def make_row(tokenizer, processor, colour: str, index: int) -> Row:  # type: ignore[no-untyped-def]
    """One chat: the picture, a question, and the colour as the answer to learn."""
    pixels = processor(images=[picture(colour, index)], return_tensors="pt")
    question = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What colour is the circle?"}],
    }
    prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    count = int(pixels["image_grid_thw"][0].prod()) // 4
    prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * count)
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer(colour + "<|im_end|>")["input_ids"]
    return Row(
        ids_S=torch.tensor(prompt_ids + answer_ids),
        labels_S=torch.tensor([IGNORE] * len(prompt_ids) + answer_ids),
        pixel_values_PC=pixels["pixel_values"],
        image_grid_I3=pixels["image_grid_thw"],
    )


def hf_log_probs(model: Qwen3VLForConditionalGeneration, row: Row) -> torch.Tensor:
    """What transformers gives for the row's supervised tokens."""
    config = model.config
    is_image = (row.ids_S == config.image_token_id).int()
    with torch.no_grad():
        pixels = row.pixel_values_PC
        assert pixels is not None
        logits = model(
            input_ids=row.ids_S[None],
            mm_token_type_ids=is_image[None],
            pixel_values=pixels.to(model.dtype),
            image_grid_thw=row.image_grid_I3,
        ).logits[0]
    picked = logits[:-1].float().log_softmax(-1).gather(-1, row.ids_S[1:, None])[:, 0]
    return picked[row.labels_S[1:] != IGNORE]


def configure(out: Path, overrides: list[str]) -> Config:
    """The checkpoint that was asked for; else a tiny one, made by rank 0, at PP=2."""
    if any(override.startswith("model.path=") for override in overrides):
        return load_config(overrides)
    base, ready = out / "base", out / "ready"
    if os.environ["RANK"] == "0":
        write_tiny(base)
        ready.touch()
        print(f"1. wrote a tiny random Qwen3-VL to {base}")
    while not ready.exists():
        time.sleep(0.1)
    return load_config(["model=tiny_cpu", f"model.path={base}", "parallel.pp=2", *overrides])


def train(worker: MegatronWorker, rows: list[Row]) -> None:
    """Steps over the same batch, printed on rank 0."""
    for step in range(STEPS):
        metrics = worker.forward_backward(rows)
        grad_norm, lr = worker.optim_step()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == STEPS - 1):
            print(f"   step {step:2d}  loss {metrics.loss:.4f}  grad norm {grad_norm:.3f}  lr {lr}")


def compare(tuned: Path, rows: list[Row], ours: list[torch.Tensor], worker: MegatronWorker) -> None:
    """The exported checkpoint in transformers against what the worker computes."""
    dtype = worker.model.config.params_dtype
    model = Qwen3VLForConditionalGeneration.from_pretrained(tuned, dtype=dtype).eval()
    worst = max(
        float((hf_log_probs(model, row) - mine[row.labels_S != IGNORE]).abs().max())
        for row, mine in zip(rows, ours, strict=True)
    )
    print(f"4. transformers loads it; largest difference of a log-prob: {worst:.1e} in {dtype}")
    if dtype is torch.float32 and worst > 1e-4:
        raise SystemExit("the exported checkpoint does not agree with the trained model")


def main(out: Path, overrides: list[str]) -> None:
    """Make, train, export, reload, compare."""
    logging.disable_progress_bar()
    cfg = configure(out, overrides)
    worker = MegatronWorker(cfg)
    print_report(worker)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    processor = Qwen2VLImageProcessorPil.from_pretrained(cfg.model.path)
    rows = [make_row(tokenizer, processor, colour, i) for i, colour in enumerate(COLOURS)]
    first = dist.get_rank() == 0
    if first:
        print(f"2. training on {len(rows)} pictures")
    train(worker, rows)
    ours = worker.forward(rows)
    worker.export_hf(str(out / "tuned"))
    if first:
        print(f"3. exported to {out / 'tuned'}")
        compare(out / "tuned", rows, ours, worker)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
