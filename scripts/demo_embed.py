"""The model of `make demo` learns embeddings of texts and pictures in one space, so that words find
pictures and pictures find words. `make demo-embed` runs it:

    python scripts/demo_embed.py DEMO OUT

DEMO is the folder that scripts/demo.py has written.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from demo import run

from megatron_vlm.commands.demo.coloured_shapes import COLOURS, ShapesSpec, write_shapes

WANTED = 0.9  # recall@1 on held-out pictures
TRAIN, EVAL = 3200, 400  # pictures
KINDS = 4 * len(COLOURS)  # number of kinds of pictures: each shape in each colour
COMMON = ["train.objective=embed", "model=tiny_cpu", "train=demo", "data.max_tokens=512"]
COMMON += ["eval.generate=false"]
SETTINGS = [
    "optim.lr=4e-3",
    "optim.warmup_steps=10",
    f"train.global_batch_size={KINDS}",
    "train.micro_batch_size=8",
]


def write_records(out: Path) -> None:
    """Write pictures of one shape each, and records of their names: for training and as searches
    for a picture and for a text."""
    write_shapes(out, ShapesSpec(TRAIN, EVAL, kinds=("colour",), max_shapes=1, seed=2))
    train, held_out = (_pictures(out / f"{name}.jsonl") for name in ("train", "eval"))
    # Every step has each kind once, so that no document is wrongly taken for a negative.
    rounds = list(zip(*train.values(), strict=False))
    pairs = [pair for paths in rounds for pair in zip(train, paths, strict=True)]
    records = {
        "train": [_find_picture(name, path) for name, path in pairs],
        "pictures": [_find_picture(name, paths[0]) for name, paths in held_out.items()],
        "words": [_find_words(name, path) for name, paths in held_out.items() for path in paths],
    }
    for name, lines in records.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / f"{name}.jsonl").write_text(text)


def _pictures(file: Path) -> dict[str, list[str]]:
    """Return the pictures of a file by their names, such as a red circle."""
    pictures = defaultdict(list)
    for record in map(json.loads, file.read_text().splitlines()):
        user, assistant = record["messages"]
        image, question = user["content"]
        shape = question["text"].removeprefix("What colour is the ").removesuffix("?")
        colour = assistant["content"]
        pictures[f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"].append(image["image"])
    assert len(pictures) == KINDS
    return dict(sorted(pictures.items()))


def _find_picture(name: str, path: str) -> dict:  # type: ignore[type-arg]
    return {"anchor": name, "positive": {"image": path}}


def _find_words(name: str, path: str) -> dict:  # type: ignore[type-arg]
    return {"anchor": {"image": path}, "positive": name}


def recalls(model: Path, sets: str) -> dict[str, float]:
    """Measure a model, and return recall@1 of each set."""
    words = ["eval", str(model), *COMMON, f"data.eval={sets}"]
    print(f"\n$ megatron-vlm {' '.join(words[:-1])} '{words[-1]}'", flush=True)
    command = [sys.executable, "-m", "megatron_vlm.cli", *words]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    scores = map(json.loads, output.splitlines())
    return {score["name"]: score["recall@1"] for score in scores}


def main(demo: Path, out: Path) -> int:
    """Make the data, train, and compare the searches; return the exit status."""
    start = time.perf_counter()
    data, base = out / "data", demo / "run" / "export"
    write_records(data)
    sets = f"{{pictures: {data}/pictures.jsonl, words: {data}/words.jsonl}}"
    before = recalls(base, sets)
    run(
        *("train", *COMMON, f"model.path={base}", "parallel.pp=2", *SETTINGS),
        *(f"data.train={data}/train.jsonl", f"data.eval={data}/pictures.jsonl"),
        *("eval.every=25", "log.every=10", f"run={out}/run"),
    )
    after = recalls(out / "run" / "export", sets)
    minutes = (time.perf_counter() - start) / 60
    for name, search in (("pictures", "words find pictures"), ("words", "pictures find words")):
        print(f"{search}: recall@1 {before[name]:.1%} before, {after[name]:.1%} after")
    print(f"wanted {WANTED:.0%}; {minutes:.1f} minutes")
    return int(min(after.values()) < WANTED)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
