"""Peak of resident memory for each switch of docs/planning.md, the planner's figure, and the
time of a step beside it. The models have 30 M and 200 M parameters, in fp32 on the CPU.

    make bench   (or: .venv/bin/python benchmarks/memory.py [SWITCH ...])

Host memory and that of the device are the same here, so the figure is the sum of both. What the
process itself needs is measured with a tiny model, and subtracted.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from hf_ratio import BASE, MICRO_BATCH, bench_rows
from record import write_section
from row_sizes import sizes_of_row
from transformers import AutoTokenizer

from megatron_vlm import MegatronWorker, load_config
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS

MODELS = {
    "30 M": replace(BASE, layers=10, vocab=10240, vision_hidden=256, vision_intermediate=1024),
    "200 M": replace(
        BASE,
        layers=16,
        hidden=896,
        intermediate=2688,
        heads=14,
        vocab=16384,
        vision_hidden=512,
        vision_heads=8,
        vision_intermediate=2048,
        vision_depth=8,
    ),
}
TINY = replace(BASE, vocab=10240, layers=1, hidden=64, intermediate=64, vision_depth=1)
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "optim.states=bf16": ("optim.states=bf16",),
    "optim.states=int8": ("optim.states=int8",),
    "optim.offload=0.5": ("optim.offload=0.5",),
    "optim.offload=1": ("optim.offload=1",),
    "model.recompute=full": ("model.recompute=full",),
    "model.recompute_vision=true": ("model.recompute_vision=true",),
    "model.offload_activations=1": ("model.offload_activations=1",),
    "optim=muon": ("optim=muon",),
    "lora=default": ("lora=default",),
    "lora=default lora.base=int8": ("lora=default", "lora.base=int8"),
    "lora=default lora.base=nf4": ("lora=default", "lora.base=nf4"),
}
STEPS = {"30 M": 3, "200 M": 2}
TOLERANCE = 0.1
# Memory that is freed goes back to the system at once, which takes time: so that is measured apart.
EXACT = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
# It does so in pieces of this many bytes and more. Smaller ones would make the larger model slower
# by hours.
PIECE = {"30 M": 2**16, "200 M": 2**20}


def measure(pipe: Connection, path: str, name: str, vocab: int, words: tuple[str, ...]) -> None:
    """Send the peak of this process during the steps of a model, the planner's figure and the
    seconds of the fastest step but the first."""
    from megatron_vlm.planner.layout import ModelLayout
    from megatron_vlm.planner.memory import estimate
    from megatron_vlm.planner.row_sizes import BatchSizes

    torch.set_num_threads(os.cpu_count() or 1)
    keys = ("train.precision=fp32", f"train.micro_batch_size={MICRO_BATCH}", "platform=cpu")
    cfg = load_config([f"model.path={path}", *keys, *words])
    worker = MegatronWorker(cfg)
    tokenizer = AutoTokenizer.from_pretrained(path)
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    rows = bench_rows(vocab, special)
    sizes = [sizes_of_row(row) for row in rows]
    batches = [
        BatchSizes.from_rows(sizes[first : first + MICRO_BATCH])
        for first in range(0, len(sizes), MICRO_BATCH)
    ]
    layout = ModelLayout(cfg, worker.source.sizes, worker.dims, 4)
    [planned] = estimate(layout, batches)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    seconds = []
    for _ in range(STEPS[name]):
        start = time.perf_counter()
        worker.forward_backward(rows)
        worker.optim_step()
        seconds.append(time.perf_counter() - start)
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    peak = 1024 * int(line.split()[1])
    pipe.send((peak, planned.total + planned.host, min(seconds[1:])))


def run(
    path: str, name: str, vocab: int, words: tuple[str, ...], exact: bool
) -> tuple[int, int, float]:
    """Return what `measure` sends, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    before = dict(os.environ)
    if exact:
        os.environ.update(EXACT | {"MALLOC_MMAP_THRESHOLD_": str(PIECE[name])})
    process = context.Process(target=measure, args=(child, path, name, vocab, words))
    process.start()
    os.environ.clear()
    os.environ.update(before)
    child.close()  # so that the failure of the process is noticed
    result: tuple[int, int, float] = parent.recv()
    process.join()
    return result


def table(chosen: tuple[str, ...]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| model | switch | measured MiB | planned MiB | ratio | step s |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: f"{folder}/{name.split()[0]}" for name in (*MODELS, "tiny")}
        for name, spec in {**MODELS, "tiny": TINY}.items():
            write_tiny(paths[name], spec)
        for name, spec in MODELS.items():
            peak, planned, _ = run(paths["tiny"], name, TINY.vocab, (), exact=True)
            process = peak - planned
            print(f"the process needs {process / 2**20:.0f} MiB", flush=True)
            for switch in chosen:
                known = paths[name], name, spec.vocab, SWITCHES[switch]
                peak, planned, _ = run(*known, exact=True)
                seconds = run(*known, exact=False)[2]
                ratio = (peak - process) / planned
                mark = "" if abs(ratio - 1) <= TOLERANCE else " (!)"
                lines.append(
                    f"| {name} | `{switch}` | {(peak - process) / 2**20:,.0f} | "
                    f"{planned / 2**20:,.0f} | {ratio:.2f}{mark} | {seconds:.2f} |"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print, and write docs/benchmarks.md."""
    chosen = tuple(sys.argv[1:]) or tuple(SWITCHES)
    lines = table(chosen)
    if len(chosen) == len(SWITCHES):
        write_section("memory", lines, {})


if __name__ == "__main__":
    main()
