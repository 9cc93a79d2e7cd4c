"""Peak memory of the head over its inputs, forward and backward, for few and for many supervised
tokens, at the vocabulary of Qwen3-VL. The head of this package is compared with torch's cross
entropy of all logits.

    make bench   (or: .venv/bin/python benchmarks/head_memory.py)
"""

import multiprocessing
import resource
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import record

VOCAB, WIDTH = 151_936, 128
TOKENS = {"1k": 1024, "4k": 4096, "16k": 16384}
ALL_AT_ONCE = ("1k",)  # at 4k torch's cross entropy takes more than 7 GB


def measure(pipe: Connection, tokens: int, ours: bool) -> None:
    """Measure in a process of its own, because the peak of a process never sinks."""
    from megatron_vlm.model.log_probs import Products, predict

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCAB, (tokens,))
    # The memory that the product itself needs, gradients included, is allocated before.
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    torch.mm(hidden.detach()[:8].T, hidden.detach()[:8])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if ours:
        loss = -predict(Products([(hidden, weight)]), targets, VOCAB, group)[0].sum()
    else:
        loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    loss.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pipe.send((peak / 1024, float(loss.detach())))


def run(tokens: int, ours: bool) -> tuple[float, float]:
    """Return MiB and the loss."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=measure, args=(child, tokens, ours))
    process.start()
    child.close()  # so that the failure of the process is noticed
    result: tuple[float, float] = parent.recv()
    process.join()
    return result


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    figures = {f"head_peak_mb_{name}": run(count, True)[0] for name, count in TOKENS.items()}
    for name in ALL_AT_ONCE:
        figures[f"head_peak_mb_{name}_all_at_once"] = run(TOKENS[name], False)[0]
    record("head_memory", figures)


if __name__ == "__main__":
    main()
