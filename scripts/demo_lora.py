"""The model of `make demo` learns a new kind of question by adapters alone, in minutes on a laptop:
which thing has the colour of a shape. PEFT loads the adapter and gives the same answers. With the
adapter off, the model answers the old questions as before. `make demo-lora` runs it:

    python scripts/demo_lora.py DEMO OUT

DEMO is the folder that scripts/demo.py has written.
"""

import json
import sys
import time
from pathlib import Path

from demo import compare, run
from peft import PeftModel
from transformers import Qwen3VLForConditionalGeneration
from transformers.utils import logging

from megatron_vlm.commands.demo.coloured_shapes import ShapesSpec, write_shapes

WANTED = 0.95  # exact match on held-out questions
TRAIN, EVAL = 4000, 200
# Another colour for each colour would be easier, because these words are new to the model.
THINGS = {
    "red": "tomato",
    "green": "grass",
    "blue": "sky",
    "yellow": "banana",
    "black": "coal",
    "white": "snow",
    "orange": "carrot",
    "purple": "aubergine",
}
SETTINGS = [
    "optim.name=adamw",
    "optim.lr=5e-3",
    "optim.warmup_steps=10",
    "data.shuffle=true",
    "eval.every=250",
]


def write_things(out: Path) -> None:
    """Write pictures of one shape each, none of which the model has seen, and questions for things
    of the same colour."""
    write_shapes(out, ShapesSpec(TRAIN, EVAL, kinds=("colour",), max_shapes=1, seed=1))
    for path in (out / "train.jsonl", out / "eval.jsonl"):
        records = map(json.loads, path.read_text().splitlines())
        path.write_text("".join(json.dumps(_about_things(record)) + "\n" for record in records))


def _about_things(record: dict) -> dict:  # type: ignore[type-arg]
    user, assistant = record["messages"]
    image, question = user["content"]
    shape = question["text"].removeprefix("What colour is ")
    content = [image, {"type": "text", "text": f"What has the colour of {shape}"}]
    answer = THINGS[assistant["content"]]
    messages = [{**user, "content": content}, {**assistant, "content": answer}]
    return {"messages": messages, "kind": "thing"}


def main(demo: Path, out: Path) -> int:
    """Make the data, train, export, load in PEFT and compare; return the exit status."""
    logging.disable_progress_bar()
    start = time.perf_counter()
    base = demo / "run" / "export"
    write_things(out / "things")
    run(
        *("train", "model=tiny_cpu", f"model.path={base}", "lora=default", "parallel.pp=2"),
        *(f"data.train={out}/things/train.jsonl", f"data.eval={out}/things/eval.jsonl"),
        *("data=shapes", "train=demo", *SETTINGS, "checkpoint.export=both", f"run={out}/run"),
    )
    metrics = (out / "run" / "metrics.jsonl").read_text().splitlines()
    score = [line for line in map(json.loads, metrics) if line["kind"] == "eval"][-1]["exact_match"]

    print("\nThe adapter in PEFT, on the demo's model in transformers:")
    model = PeftModel.from_pretrained(
        Qwen3VLForConditionalGeneration.from_pretrained(base), out / "run" / "export"
    ).eval()
    differ = compare(model, base, out / "things", out / "run")
    with model.disable_adapter():
        lost = compare(model, base, demo / "shapes", demo / "run")
    minutes = (time.perf_counter() - start) / 60
    print(
        f"exact match {score:.1%} (wanted {WANTED:.0%}); {differ} answers differ in PEFT; "
        f"with the adapter off, {lost} old answers differ; {minutes:.1f} minutes"
    )
    return int(score < WANTED or differ > 0 or lost > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
