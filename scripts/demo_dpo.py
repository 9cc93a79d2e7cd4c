"""The model of `make demo` first learns to give its right answers in a wordy way. Then it learns
from pairs that people prefer short answers. Both answers of a pair are right, so only preferences
tell them apart. `make demo-dpo` runs it:

    python scripts/demo_dpo.py DEMO OUT

DEMO is the folder that scripts/demo.py has written.
"""

import json
import sys
import time
from pathlib import Path

from demo import run

WANTED = 0.9  # exact match on held-out questions after DPO
WORDY, PAIRS = 1600, 800  # records
WORDS = ("obviously it is {}", "well, {}, I would say")
COMMON = [
    "model=tiny_cpu",
    "parallel.pp=2",
    "train=demo",
    "optim.name=adamw",
    "data=shapes",
    "log.every=10",
]


def write_answers(shapes: Path, out: Path) -> None:
    """Write records whose answers are mostly wordy, and pairs of a short and a wordy answer."""
    out.mkdir(parents=True)
    lines = (shapes / "train.jsonl").read_text().splitlines()
    single = [record for record in map(json.loads, lines) if len(record["messages"]) == 2]
    wordy = [_wordy(record, number) for number, record in enumerate(single[:WORDY])]
    pairs = [_pair(record, number) for number, record in enumerate(single[WORDY:][:PAIRS])]
    held_out = [json.loads(line) for line in (shapes / "eval.jsonl").read_text().splitlines()]
    held_out = [record for record in held_out if len(record["messages"]) == 2]
    for name, records in (
        ("wordy", wordy),
        ("pairs", pairs),
        ("eval", held_out),
        ("eval_pairs", [_pair(record, number) for number, record in enumerate(held_out)]),
    ):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (out / f"{name}.jsonl").write_text(text)


def _wordy(record: dict, number: int) -> dict:  # type: ignore[type-arg]
    """Three of four answers are wordy, so that the model can still give a short one."""
    user, assistant = record["messages"]
    answer = assistant["content"]
    if number % 4:
        answer = WORDS[number % len(WORDS)].format(answer)
    return {"messages": [user, {**assistant, "content": answer}]}


def _pair(record: dict, number: int) -> dict:  # type: ignore[type-arg]
    user, assistant = record["messages"]
    worse = WORDS[number % len(WORDS)].format(assistant["content"])
    answers = {"chosen": [assistant], "rejected": [{**assistant, "content": worse}]}
    return {"prompt": [user], **answers}


def last_scores(folder: Path) -> list[dict]:  # type: ignore[type-arg]
    """Return the evaluations that a run has logged."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "eval"]


def main(demo: Path, out: Path) -> int:
    """Make the data, train twice, and compare the answers; return the exit status."""
    start, images = time.perf_counter(), f"data.image_root={demo / 'shapes'}"
    write_answers(demo / "shapes", out / "data")
    run(
        *("train", *COMMON, f"model.path={demo / 'run' / 'export'}", images),
        *(f"data.train={out}/data/wordy.jsonl", f"data.eval={out}/data/eval.jsonl"),
        *("optim.lr=5e-4", "eval.every=0", f"run={out}/wordy"),
    )
    run(
        *("train", *COMMON, f"model.path={out / 'wordy' / 'export'}", images),
        *(f"data.train={out}/data/pairs.jsonl", f"data.eval={out}/data/eval_pairs.jsonl"),
        *("train.objective=dpo", "preference.losses=[sigmoid,sft]"),
        *("optim.lr=2e-4", "optim.warmup_steps=5", "eval.every=25", f"run={out}/dpo"),
    )
    [before], after = last_scores(out / "wordy"), last_scores(out / "dpo")[-1]
    minutes = (time.perf_counter() - start) / 60
    print(
        f"short right answers {before['exact_match']:.1%} before, {after['exact_match']:.1%} after "
        f"(wanted {WANTED:.0%}); held-out pairs ranked right "
        f"{after['metrics']['reward_accuracy']:.1%}; {minutes:.1f} minutes"
    )
    return int(after["exact_match"] < WANTED or after["metrics"]["reward_accuracy"] < WANTED)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
