"""The main job on a laptop: a tiny model learns to see, is exported, and is the same model in
transformers. It needs no network and no GPU. `make demo` runs it, or `make demo MODEL=gemma4`:

    python scripts/demo.py OUT [MODEL]

Every step is a command that a user could type. Each is printed before it runs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from megatron_vlm.commands.demo.coloured_shapes import COLOURS, Scene, Shape, draw

WANTED = 0.9  # exact match on held-out questions
COMMON = "--hidden 96 --heads 8 --from-scratch"
SMALL_TOWER = "--vision-depth 2 --vision-hidden 64"
# Gemma shows every picture at about 70 tokens, so that a shape spreads over several of them.
WIDE_TOWER = "--vision-depth 3 --vision-hidden 96 --vision-heads 4 --vision-intermediate 192"
TINY = {
    "qwen3_vl": f"--layers 3 --head-dim 16 --deepstack 1 {SMALL_TOWER}",
    "qwen3_5": f"--family qwen3_5 --layers 4 --head-dim 32 {SMALL_TOWER}",
    "gemma4": "--family gemma4 --layers 4 --head-dim 16 --pooling 2 --sliding-window 128 "
    + WIDE_TOWER,
}
# Gemma's tower takes most of the time, so two processes share the batch instead of the layers.
SETTINGS = {"gemma4": ["optim.lr=1.5e-3", "optim.muon_lr=5e-3", "launch.processes=2"]}
# Gemma scales a picture to its tokens: where sides differ, two shapes may look as large as three.
SHAPES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), "--easy 1600 --train 12000 --eval 200"),
    "gemma4": "--easy 4800 --train 36000 --eval 200 --sides 96 100 104",
}


def run(*words: str) -> None:
    """Run a megatron-vlm command with this Python."""
    shown = " ".join(f"'{word}'" if "[" in word else word for word in words)
    print(f"\n$ megatron-vlm {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "megatron_vlm.cli", *words], check=True)


def with_placeholders(prompt: str, processor, inputs: dict) -> str:  # type: ignore[no-untyped-def]
    """Write a placeholder for each token of the images into a prompt."""
    if isinstance(processor, Gemma4ImageProcessorPil):
        mark, shown = "<|image|>", "<|image>{}<image|>"
        counts = inputs.pop("num_soft_tokens_per_image")
    else:
        mark, shown, merged = "<|image_pad|>", "{}", processor.merge_size**2
        counts = [int(grid.prod()) // merged for grid in inputs["image_grid_thw"]]
    before, *rest = prompt.split(mark)
    return before + "".join(
        shown.format(mark * int(count)) + after for count, after in zip(counts, rest, strict=True)
    )


def hf_answer(model, tokenizer, processor, record: dict, root: Path, most: int) -> str:  # type: ignore[no-untyped-def]
    """Generate the last answer of a record with transformers."""
    messages = record["messages"][:-1]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    images = [
        Image.open(root / part["image"], formats=["PNG"])
        for part in parts
        if part["type"] == "image"
    ]
    inputs = {}
    if images:
        inputs = dict(processor(images=images, return_tensors="pt"))
        prompt = with_placeholders(prompt, processor, inputs)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    types = (ids == model.config.image_token_id).int()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        **inputs,
        do_sample=False,
        max_new_tokens=most,
        pad_token_id=0,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def compare(model, folder: Path, data: Path, run: Path) -> int:  # type: ignore[no-untyped-def]
    """Count the predictions of a run for the last answers of `data` from which a model of
    transformers differs. Tokenizer and settings of images are in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    gemma = AutoConfig.from_pretrained(folder).model_type == "gemma4"
    kind = Gemma4ImageProcessorPil if gemma else Qwen2VLImageProcessorPil
    processor = kind.from_pretrained(folder)
    records = (data / "eval.jsonl").read_text().splitlines()
    predictions = (run / "predictions" / "eval.jsonl").read_text().splitlines()
    wrong = 0
    for record, line in zip(records, predictions, strict=True):
        prediction = json.loads(line)["prediction"]
        hf_prediction = hf_answer(model, tokenizer, processor, json.loads(record), data, 8)
        if hf_prediction != prediction:
            wrong += 1
            print(f"   transformers says {hf_prediction!r}, the run said {prediction!r}")
    print(f"transformers gives {len(predictions) - wrong} of {len(predictions)} answers of the run")
    return wrong


def write_colours(folder: Path) -> Path:
    """Write one picture for each colour: a square that is larger than in training."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in COLOURS:
        draw(Scene(96, 96, (Shape("square", name, 32, 32, 32),))).save(folder / f"{name}.png")
        question = {"type": "text", "text": "What colour is the square?"}
        content = [{"type": "image", "image": f"{name}.png"}, question]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": name}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "colours.jsonl").write_text("".join(lines))
    return folder / "colours.jsonl"


def main(out: Path, family: str = "qwen3_vl") -> int:
    """Make, train, export, reload and compare; return the exit status."""
    logging.disable_progress_bar()
    start = time.perf_counter()
    run("demo", "tiny", "--out", f"{out}/base", *TINY[family].split(), *COMMON.split())
    run("demo", "shapes", "--out", f"{out}/shapes", *SHAPES[family].split())
    shapes = f"{out}/shapes"
    data = [
        f"data.train=[{shapes}/easy.jsonl,{shapes}/train.jsonl]",
        f"data.eval={shapes}/eval.jsonl",
    ]
    run(
        "train",
        *("model=tiny_cpu", f"model.path={out}/base"),
        "data=shapes",
        *data,
        "train=demo",
        *SETTINGS.get(family, ["parallel.pp=2"]),
        f"run={out}/run",
    )
    print("\nThe exported checkpoint in transformers:")
    export = out / "run" / "export"
    model = AutoModelForImageTextToText.from_pretrained(export).eval()
    different = compare(model, export, out / "shapes", out / "run")
    print("\nSquares that are larger than any in training:")
    colours = write_colours(out / "colours")
    choice = f"eval.candidates=[{','.join(COLOURS)}]"
    predictions = ["--predictions", f"{out}/colours/said"]
    run("eval", f"{out}/run/export", f"data.eval={colours}", choice, *predictions)
    answers = [
        json.loads(line)
        for line in (out / "colours" / "said" / "colours.jsonl").read_text().splitlines()
    ]
    named = sum(line["answer"] == line["prediction"] for line in answers)
    metrics = (out / "run" / "metrics.jsonl").read_text().splitlines()
    scores = [line for line in map(json.loads, metrics) if line["kind"] == "eval"][-1]
    minutes = (time.perf_counter() - start) / 60
    print(
        f"\nexact match {scores['exact_match']:.1%} (wanted {WANTED:.0%}), {different} answers "
        f"differ in transformers, {named} of {len(COLOURS)} colours named, {minutes:.1f} minutes\n"
        f"open {out}/run/report.html, or ask it yourself:\n"
        f"  megatron-vlm chat {out}/run --image {out}/colours/red.png"
    )
    # Training has no such pictures. Qwen3-VL and Gemma named all of them.
    too_few = named < len(COLOURS) // 2
    return int(scores["exact_match"] < WANTED or different > 0 or too_few)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
