"""The demo: a tiny random Qwen3-VL learns to name colours, on the CPU, with PP=2.

torchrun --nproc-per-node=2 scripts/demo.py OUT   (`make demo` does it)
"""

import os
import sys
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
    is_image = (row.ids_S == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(
            input_ids=row.ids_S[None],
            mm_token_type_ids=is_image[None],
            pixel_values=row.pixel_values_PC,
            image_grid_thw=row.image_grid_I3,
        ).logits[0]
    picked = logits[:-1].log_softmax(-1).gather(-1, row.ids_S[1:, None])[:, 0]
    return picked[row.labels_S[1:] != IGNORE]


def main(out: Path) -> None:
    """Make, train, export, reload, compare."""
    logging.disable_progress_bar()
    base, tuned = out / "base", out / "tuned"
    if os.environ["RANK"] == "0":
        write_tiny(base)
        print(f"1. wrote a tiny random Qwen3-VL to {base}")
    torch.distributed.init_process_group("gloo")
    dist.barrier()
    cfg = load_config([f"model.path={base}", "parallel.pp=2"], config_name="tiny_cpu")
    worker = MegatronWorker(cfg)
    print_report(worker)
    tokenizer = AutoTokenizer.from_pretrained(base)
    processor = Qwen2VLImageProcessorPil.from_pretrained(base)
    rows = [make_row(tokenizer, processor, colour, i) for i, colour in enumerate(COLOURS)]
    first = dist.get_rank() == 0
    if first:
        print(f"2. training on {len(rows)} pictures, PP=2 over gloo")
    for step in range(STEPS):
        metrics = worker.forward_backward(rows)
        grad_norm, lr = worker.optim_step()
        if first and (step % 5 == 0 or step == STEPS - 1):
            print(f"   step {step:2d}  loss {metrics.loss:.4f}  grad norm {grad_norm:.3f}  lr {lr}")
    ours = worker.forward(rows)
    worker.export_hf(str(tuned))
    if first:
        print(f"3. exported to {tuned}")
        model = Qwen3VLForConditionalGeneration.from_pretrained(tuned, dtype=torch.float32).eval()
        worst = max(
            float((hf_log_probs(model, row) - mine[row.labels_S != IGNORE]).abs().max())
            for row, mine in zip(rows, ours, strict=True)
        )
        print(f"4. transformers loads it; largest difference of a log-prob: {worst:.1e}")
        if worst > 1e-4:
            raise SystemExit("the exported checkpoint does not agree with the trained model")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
