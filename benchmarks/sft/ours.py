"""The trainer of this package on the rows of rows.py, with a step for each line on standard input.

Its arguments are FOLDER ROWS MICRO_BATCH WORKERS. It prints {"loss": ...} after each step.
"""

import json
import os
import sys
from pathlib import Path

from megatron_vlm import load_config
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.run.run import Run
from megatron_vlm.train import train_step


def main() -> None:
    """Open a run and train until the input ends."""
    folder, rows, micro_batch, workers = sys.argv[1:5]
    home = Path(folder, f"run{workers}")
    lines = Path(folder, "chats.jsonl").read_text().splitlines()
    cfg = load_config(
        [
            "model=tiny_cpu",
            f"model.path={folder}/model",
            f"data.train={folder}/chats.jsonl",
            "data.shuffle=false",
            f"data.cache_dir={folder}/cache{workers}",
            f"data.num_workers={workers}",
            f"run={home}",
            f"train.steps={len(lines) // int(rows)}",
            f"train.global_batch_size={rows}",
            f"train.micro_batch_size={micro_batch}",
            "optim.lr=1e-4",
            "optim.schedule=constant",
            "platform=cpu",
        ]
    )
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to standard output
    with Watchdog.watch_rank(0, 60) as watchdog, Run.open(cfg, watchdog) as run:
        for step in range(run.total_steps):
            if not sys.stdin.readline():
                break
            train_step(run, step)
            written = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
            loss = [line["loss"] for line in written if line["kind"] == "step"][-1]
            print(json.dumps({"loss": loss}), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
