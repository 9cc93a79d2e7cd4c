"""Simulation, not a measurement, of steps and checkpoints of Qwen3-VL on 64 to 8,192 data parallel
ranks. Only planning is measured: it is the package's own, on the same number of rows.

    make scale   (or: .venv/bin/python benchmarks/simulate_scale.py [most ranks] [folder])

It writes tables into docs/scaling.md, between its marks, and docs/scaling.svg.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scale_model import (
    Machine,
    Rows,
    Setup,
    bubble,
    checkpoint,
    draw_rows,
    exchange,
    forward_seconds,
    make_moe_setup,
    make_setup,
    replica_seconds,
    travel,
)
from scale_page import NAMES, Point, Table, picture, write

from megatron_vlm.data.batches.balance import Limits, Plan, measure, naive_plan, plan_batch
from megatron_vlm.data.batches.cost import WorkModel

DOCS = Path(__file__).parent.parent / "docs"
RANKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS_PER_RANK, ROWS_FIXED = 32, 16384
MACHINE = Machine()
SETUPS = (
    make_setup("Qwen3-VL 8B, TP 2", (36, 4096, 12288, 32), 2, 1, 8192),
    make_setup("Qwen3-VL 32B, TP 4, PP 4", (64, 5120, 25600, 64), 4, 4, 8192),
)
EP_RANKS = (8, 16, 32, 64, 128, 256, 512)
MOE_SETUPS = (
    make_moe_setup("Qwen3-VL 30B-A3B, PP 2", (48, 2048, 768, 32), 2, 8192),
    make_moe_setup("Qwen3-VL 235B-A22B, PP 8", (94, 4096, 1536, 64), 8, 8192),
)

ASSUMED = {
    "peak_flops": "FLOP/s of a GPU, bf16, dense (the H100's data sheet, as in device.py)",
    "utilisation": "of that peak within a micro-batch; tensor parallel reductions are in it",
    "layer_s": "s, the least that the forward of a layer or a vision block takes",
    "link": "bytes/s of a GPU to others of its machine (NVLink)",
    "network": "bytes/s of a GPU to other machines (400 Gb/s, 80 % used)",
    "hop_s": "s, each hop of a ring",
    "gpus": "GPUs of a machine",
    "to_host": "bytes/s of a GPU into pageable host memory",
    "files": "bytes/s of the file system, all machines together",
    "files_machine": "bytes/s of one machine with the file system, digests included",
    "creates": "files/s created in one folder",
    "stat_s": "s, one rank looking up a file",
    "save_every_s": "s from one checkpoint to the next",
}


def assumptions() -> Table:
    """Return the assumptions about the machine, number by number."""
    rows = [(f"{getattr(MACHINE, name):g}", words) for name, words in ASSUMED.items()]
    return Table("Assumed", ("number", "what"), [*rows])


def plans(rows: Rows, setup: Setup, ranks: int) -> tuple[list[Plan], float]:
    """Return one plan for each of NAMES, and the seconds that the package's planning took."""
    sizes = rows.sizes(WorkModel.from_sizes(setup.sizes))
    start = time.perf_counter()
    planned = plan_batch(sizes, ranks, Limits(tokens=setup.tokens))
    seconds = time.perf_counter() - start
    return [naive_plan(sizes, ranks, 4), naive_plan(sizes, ranks, 1), planned], seconds


def simulate(setup: Setup, ranks: int, num_rows: int) -> Point:
    """Simulate a step of each plan: the slowest replica, then the exchange."""
    rows = draw_rows(num_rows)
    sizes = rows.sizes(WorkModel.from_sizes(setup.sizes))
    all_plans, plan_s = plans(rows, setup, ranks)
    moved = exchange(setup, ranks, MACHINE)
    more = moved.reduce_s + moved.gather_s
    speed = MACHINE.peak_flops * MACHINE.utilisation * setup.gpus * ranks
    perfect = 3 * sum(size.cost for size in sizes) / speed
    shares = [share for share in all_plans[-1] if share]
    last, costliest = (
        2 * forward_seconds([share[place] for share in shares], rows, setup, MACHINE)
        for place in (-1, 0)
    )
    return Point(
        ranks,
        tuple(max(replica_seconds(plan, rows, setup, MACHINE)) + more for plan in all_plans),
        tuple(measure(plan, sizes) for plan in all_plans),
        perfect + more,
        plan_s,
        float(last.max(1).mean()),
        float(costliest.max(1).mean()),
    )


def scaling_table(setup: Setup, points: Sequence[Point], title: str) -> Table:
    """Return a table. `fullest / mean`: the cost of the busiest rank over the mean, padding
    included."""
    rows: list[tuple[str, ...]] = []
    for p in points:
        four, one, planned = p.seconds
        row = (
            f"{p.ranks:,}",
            f"{p.ranks * setup.gpus:,}",
            *(f"{s:.2f}" for s in (*p.seconds, p.perfect)),
            f"{four / planned:.2f}, {one / planned:.2f}",
            *(f"{balance.imbalance:.3f}" for balance in p.balances[1:]),
            *(f"{balance.padding:.1%}" for balance in p.balances[::2]),
            f"{p.plan_s:.2f}",
        )
        rows.append(row)
    seconds = (f"{name}, s" for name in NAMES)
    header: tuple[str, ...] = ("DP ranks", "GPUs", *seconds, "perfect, s", "gain over 4, over 1")
    header += (
        "fullest / mean: 1 each",
        "ours",
        "padding: 4 each",
        "ours",
        "planning, s (measured)",
    )
    return Table(f"{setup.name}: {title}", header, rows)


def planned_layers(setup: Setup, rows: Rows, plan: Plan) -> tuple[int, ...]:
    """Return the layers_per_stage with the fastest replicas, found by a search over the sizes of
    first and last stages."""
    pp, layers = len(setup.layers_S), sum(setup.layers_S)
    tried = []
    for first in range(layers // pp + 1):
        for last in range(layers // pp - 3, layers // pp + 3):
            base, extra = divmod(layers - first - last, pp - 2)
            layers_S = (first, *(base + (i < extra) for i in range(pp - 2)), last)
            seconds = replica_seconds(plan, rows, replace(setup, layers_S=layers_S), MACHINE)
            tried.append((float(np.mean(seconds)), layers_S))
    return min(tried)[1]


def _cheap_ends(share: list[list[int]]) -> list[list[int]]:
    """Reorder a share from costliest first to costliest in the middle."""
    return share[::-1][::2] + share[::-1][1::2][::-1]


ORDERS: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
    "costliest first (ours)": lambda share: share,
    "costliest last": lambda share: share[::-1],
    "costliest in the middle": _cheap_ends,
    "any": lambda share: random.Random(0).sample(share, len(share)),
}


def pipeline_tables(setup: Setup, ranks: int = 64) -> list[Table]:
    """Compare default stages with planned ones, and orders of the micro-batches. The stages are
    planned on other rows than those of the comparison."""
    planning_rows, rows = draw_rows(8 * ROWS_PER_RANK, seed=1), draw_rows(ranks * ROWS_PER_RANK)
    by_stage: list[tuple[str, ...]] = []
    by_order: list[tuple[str, ...]] = []
    for tokens in (2048, 4096, 8192):
        cut = replace(setup, tokens=tokens)
        planned = planned_layers(cut, planning_rows, plans(planning_rows, cut, 8)[0][-1])
        plan = plans(rows, cut, ranks)[0][-1]
        count = np.mean([len(share) for share in plan])
        for layers_S in (cut.layers_S, planned):
            staged = replace(cut, layers_S=layers_S)
            seconds = replica_seconds(plan, rows, staged, MACHINE)
            bubbles = [bubble(forward_seconds(share, rows, staged, MACHINE)) for share in plan]
            figures = (f"{(len(layers_S) - 1) / count:.0%}", f"{np.mean(bubbles):.0%}")
            cutting = (f"{tokens:,}", f"{count:.1f}", f"{list(layers_S)}")
            by_stage.append((*cutting, *figures, f"{max(seconds):.2f}"))
        ordered = [[order(share) for share in plan] for order in ORDERS.values()]
        staged = replace(cut, layers_S=planned)
        slowest = [max(replica_seconds(each, rows, staged, MACHINE)) for each in ordered]
        by_order.append((f"{tokens:,}", f"{list(planned)}", *(f"{s:.2f}" for s in slowest)))
    first = ("micro_batch_tokens", "micro-batches", "layers_per_stage", "(pp - 1) / m", "bubble")
    where = f"{setup.name}, {ranks} DP ranks"
    return [
        Table(f"{where}: default and planned stages", (*first, "slowest replica, s"), by_stage),
        Table(
            f"{where}: orders of a replica's micro-batches, slowest replica, s",
            ("micro_batch_tokens", "layers_per_stage", *ORDERS),
            by_order,
        ),
    ]


def exchange_table(setup: Setup, points: Sequence[Point]) -> Table:
    """Return a table. `left`: the part of the reduction that overlap_grad_reduce leaves at best,
    with the package's order of micro-batches and with the costliest one last."""
    rows: list[tuple[str, ...]] = []
    for p in points:
        now, costliest = (
            exchange(setup, p.ranks, MACHINE, seconds) for seconds in (p.last_s, p.costliest_s)
        )
        row = (
            f"{p.ranks:,}",
            f"{now.values / 1e9:.2f}",
            f"{6 * now.values * (p.ranks - 1) / p.ranks / 1e9:.1f}",
            f"{now.reduce_s:.2f}",
            f"{now.gather_s:.2f}",
            f"{(now.reduce_s + now.gather_s) / p.seconds[2]:.0%}",
            f"{now.bucket / 1e6:,.0f}",
            f"{now.overlapped_s:.2f}",
            f"{costliest.overlapped_s:.2f}",
        )
        rows.append(row)
    header: tuple[str, ...] = (
        "DP ranks",
        "values of a GPU, G",
        "sent by a GPU, GB",
        "reduce-scatter, s",
    )
    header += ("all-gather, s", "part of our step", "bucket, M values", "left: ours, s")
    header += ("costliest last, s",)
    return Table(f"{setup.name}: exchange of gradients and weights, once a step", header, rows)


def travel_table(setup: Setup, ranks: Sequence[int]) -> Table:
    """Return a table of the all-to-all of experts and of compute. * marks counts of ranks above the
    number of experts."""
    assert setup.sizes.text.experts is not None
    lines: list[tuple[str, ...]] = []
    for count in ranks:
        rows = draw_rows(count * ROWS_PER_RANK)
        plan = plans(rows, setup, count)[0][-1]
        t = travel(plan, rows, setup, MACHINE)
        row = (
            f"{count}" + " *" * (count > setup.sizes.text.experts.count),
            f"{(t.inside + t.outside) / 1e9:.1f}",
            f"{t.outside / 1e9:.1f}",
            *(f"{seconds:.2f}" for seconds in (t.seconds, t.compute_s, t.waiting_s)),
            f"{t.seconds / (t.seconds + t.compute_s + t.waiting_s):.0%}",
        )
        lines.append(row)
    header: tuple[str, ...] = ("EP ranks", "sent by a GPU, GB", "to other machines, GB")
    header += ("all-to-all, s", "compute, s", "waiting, s", "all-to-all, of the three")
    title = f"{setup.name}: tokens to experts and back, {ROWS_PER_RANK} rows a rank"
    return Table(title, header, lines)


def checkpoint_table(setup: Setup, ranks: Sequence[int]) -> Table:
    """Return a table of writing a checkpoint, synchronously and asynchronously, and of resuming
    from it."""
    rows: list[tuple[str, ...]] = []
    for count in ranks:
        t = checkpoint(setup, count, MACHINE)
        row = (
            f"{count:,}",
            f"{t.files:,}",
            f"{t.total / 1e9:.0f}",
            f"{t.largest / 1e6:,.1f}",
            f"{t.stop_sync:.1f}",
            f"{t.stop_async:.1f}",
            *(f"{part:.2%}" for part in t.lost(MACHINE)),
            f"{t.find:.0f}",
            f"{t.read / 1e12:.1f}",
            f"{t.resume:,.0f}",
        )
        rows.append(row)
    header: tuple[str, ...] = ("DP ranks", "files", "in all, GB", "largest of a rank, MB")
    header += (
        "stop: sync, s",
        "async, s",
        "of an hour: sync",
        "async",
        "resume: verify, s",
        "read, TB",
        "in all, s",
    )
    return Table(f"{setup.name}: a checkpoint every 30 minutes, and resuming", header, rows)


def main(most: int = RANKS[-1], folder: Path = DOCS) -> None:
    """Simulate, print and write."""
    ranks = [n for n in RANKS if n <= most]
    tables, panels = [assumptions()], []
    for setup in SETUPS:
        growing = [simulate(setup, n, n * ROWS_PER_RANK) for n in ranks]
        fixed = [simulate(setup, n, ROWS_FIXED) for n in ranks]
        titles = (f"{ROWS_PER_RANK} rows a rank", f"{ROWS_FIXED:,} rows a step")
        for title, points in zip(titles, (growing, fixed), strict=True):
            tables.append(scaling_table(setup, points, title))
            panels.append((f"{setup.name}: {title}", points))
        tables += [exchange_table(setup, growing), checkpoint_table(setup, ranks)]
    for setup in (make_setup("Qwen3-VL 8B, TP 2, PP 4", (36, 4096, 12288, 32), 2, 4, 0), SETUPS[1]):
        tables += pipeline_tables(setup)
    tables += [travel_table(setup, [n for n in EP_RANKS if n <= most]) for setup in MOE_SETUPS]
    for table in tables:
        table.show()
    write(folder, tables, picture(panels))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else RANKS[-1], Path(given[1]) if given[1:] else DOCS)
