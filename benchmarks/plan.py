"""Steps with parallel.layers_per_stage=auto compared with those of the even split, on rows full of
pictures; and the planner's prediction for every stage compared with its time.

    make bench   (or: .venv/bin/python benchmarks/plan.py)

With two stages both splits run at the same time and take turns step by step. The time of a stage is
that of its thread on the processor, so that other programs do not count. Four stages do not fit on
two cores at once: there the splits run one after the other, and the step is computed from the
measured stages with 1F1B.
"""

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record
from row_sizes import sizes_of_row
from transformers.utils import logging

from megatron_vlm import Config, Row
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.schema import ModelConfig, ParallelConfig, TrainConfig
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family import read_sizes
from megatron_vlm.family.qwen.tiny import SPECIAL_TOKENS, train_tokenizer
from megatron_vlm.family.spec import ModelSizes
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.planner.auto_layout import decide
from megatron_vlm.planner.flops import OpCount, StepCost, accumulate, micro_work
from megatron_vlm.planner.layer_split import even_split
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.pipeline_time import Stages, counts_of_parts
from megatron_vlm.planner.row_sizes import RowSample

# The tower takes about as long as the decoder on these rows.
SPEC = TinySpec(
    layers=12,
    hidden=256,
    intermediate=768,
    heads=8,
    kv_heads=4,
    head_dim=32,
    vocab=512,
    deepstack=2,
    vision_depth=2,
    vision_hidden=256,
    vision_heads=4,
    vision_intermediate=1024,
)
PICTURES = ((24, 24),) * 10 + ((20, 28),) * 4  # in patches, one picture a row
TEXTS = (150, 120)  # tokens of the rows without a picture
CORES = os.cpu_count() or 1
WARM_UP, REPEATS = 1, 5


def make_rows() -> list[Row]:
    """Return one row for each micro-batch, the most expensive ones first."""
    tokenizer = train_tokenizer(SPEC.vocab)
    names = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS), strict=True))
    generator = torch.Generator().manual_seed(0)
    return [_row(names, 40, grid, generator) for grid in PICTURES] + [
        _row(names, text, None, generator) for text in TEXTS
    ]


def _row(
    names: dict[str, int], text: int, grid: tuple[int, int] | None, generator: torch.Generator
) -> Row:
    ids = torch.randint(0, 250, (text,), generator=generator)
    labels = ids.clone()
    labels[: text // 2] = IGNORE
    if grid is None:
        return Row(ids, labels)
    height, width = grid
    marks = [names["<|vision_start|>"], names["<|vision_end|>"]]
    image_ids = torch.full((height * width // 4,), names["<|image_pad|>"])
    image_ids = torch.cat([torch.tensor(marks[:1]), image_ids, torch.tensor(marks[1:])])
    pixels = torch.randn(height * width, 3 * 2 * 16 * 16, generator=generator)
    return Row(
        torch.cat([image_ids, ids]),
        torch.cat([torch.full_like(image_ids, IGNORE), labels]),
        pixels,
        torch.tensor([[1, height, width]]),
    )


def configuration(path: str, split: Sequence[int]) -> Config:
    """Return the configuration of a pipeline with these numbers of layers on its stages."""
    return Config(
        model=ModelConfig(path=path),
        parallel=ParallelConfig(pp=len(split), layers_per_stage=list(split)),
        train=TrainConfig(micro_batch_size=1, global_batch_size=len(PICTURES) + len(TEXTS)),
        platform="cpu",
    )


def serve(path: str, split: Sequence[int], rank: int, port: int, pipe: Connection) -> None:
    """Serve one stage. Answer each message with the step's seconds and those of its tasks."""
    logging.set_verbosity_error()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(split)), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from megatron.core.pipeline_parallel import schedules

    from megatron_vlm import MegatronWorker

    spent: dict[str, list[float]] = {"forward_step": [], "backward_step": []}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **kwargs)
            spent[name].append(time.thread_time() - start)
            return result

        return run

    for name in spent:
        setattr(schedules, name, timed(name, getattr(schedules, name)))
    worker, rows = MegatronWorker(configuration(path, split)), make_rows()
    while pipe.recv():
        for seconds in spent.values():
            seconds.clear()
        start = time.perf_counter()
        loss = worker.forward_backward(rows).loss
        worker.optim_step()
        taken = time.perf_counter() - start
        pipe.send((taken, loss, *map(list, spent.values())))


@dataclass(frozen=True)
class Measured:
    """Medians over the steps. Suffixes: G micro-batches, S stages."""

    step_s: float
    forward_GS: np.ndarray
    backward_GS: np.ndarray

    @property
    def pipeline_s(self) -> float:
        return end_of_step(self.forward_GS, self.backward_GS)


def measure(path: str, splits: Sequence[Sequence[int]]) -> list[Measured]:
    """Measure all splits, step by step in turns."""
    context = multiprocessing.get_context("spawn")
    worlds, processes = [], []
    for split in splits:
        port, pipes = free_port(), []
        for rank in range(len(split)):
            parent, child = context.Pipe()
            words = (path, split, rank, port, child)
            processes.append(context.Process(target=serve, args=words, daemon=True))
            processes[-1].start()
            pipes.append(parent)
        worlds.append(pipes)
    answers: list[list[Any]] = [[] for _ in splits]
    for repeat in range(WARM_UP + REPEATS):
        losses = []
        for pipes, split_answers in zip(worlds, answers, strict=True):
            for pipe in pipes:
                pipe.send(True)
            results = [pipe.recv() for pipe in pipes]
            losses.append(results[-1][1])
            if repeat >= WARM_UP:
                split_answers.append(results)
        assert max(losses) - min(losses) < 1e-4 * losses[0], losses  # the same work
    for pipes in worlds:
        for pipe in pipes:
            pipe.send(False)
    for process in processes:
        process.join()
    return [_medians(split_answers) for split_answers in answers]


def _medians(steps: list[Any]) -> Measured:
    tables = [
        np.median([[stage[part] for stage in step] for step in steps], axis=0).T for part in (2, 3)
    ]
    return Measured(statistics.median(max(s[0] for s in step) for step in steps), *tables)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def works(sizes: ModelSizes, path: str, split: Sequence[int]) -> list[list[StepCost]]:
    """Return the work of each stage for each micro-batch."""
    cfg, dims = configuration(path, split), ParallelDims(1, len(split), 1, 1, tuple(split))
    layout = ModelLayout(cfg, sizes, dims, 4)
    parts = [StepCost(OpCount(), accumulate(n, 4)) for n, _ in counts_of_parts(layout)]
    table = []
    for batch in map(sizes_of_row, make_rows()):
        work = micro_work(layout, batch)
        row = [(work.layers[0] + parts[0]) * count for count in split]
        row[-1] += work.layers[-1] + work.layers[0] * -1  # the last layer ends at places
        row[0] += work.first + parts[1]
        row[-1] += work.last + parts[2]
        table.append(row)
    return table


def end_of_step(forward_GS: np.ndarray, backward_GS: np.ndarray) -> float:
    """Return the seconds of 1F1B, if nothing takes time between the stages."""
    return Stages(forward_GS, backward_GS, 0 * forward_GS).seconds


def columns(table: list[list[StepCost]]) -> np.ndarray:
    """Return an array [forward or backward, G, S, kind of work]."""
    return np.array(
        [
            [[(w.matmul, w.attention, w.moved, w.layers) for w in map(part, row)] for row in table]
            for part in (lambda p: p.forward, lambda p: p.backward)
        ]
    )


def fitted(table: np.ndarray, measured: Measured) -> np.ndarray:
    """Fit the seconds of each kind of work, none below 0, with the least relative error over all
    tasks."""
    seconds = np.stack([measured.forward_GS, measured.backward_GS]).reshape(-1)
    rows = table.reshape(-1, table.shape[-1]) / seconds[:, None]
    chosen = list(range(rows.shape[1]))
    while True:
        speeds = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
        if (speeds >= 0).all():
            break
        chosen.pop(int(speeds.argmin()))
    all_speeds = np.zeros(rows.shape[1])
    all_speeds[chosen] = speeds
    return all_speeds


def stage_errors(predicted: np.ndarray, measured: Measured) -> np.ndarray:
    """Return the relative error of each stage's forwards and backwards over a step."""
    seconds = np.stack([measured.forward_GS, measured.backward_GS]).sum((0, 1))
    return np.abs(predicted.sum((0, 1)) / seconds - 1)


def figures_of(pp: int, path: str) -> dict[str, float]:
    """Measure and predict the even split and the planner's split."""
    sizes, rows = read_sizes(path), list(map(sizes_of_row, make_rows()))
    cfg = configuration(path, even_split(pp, SPEC.layers))
    cfg = Config(model=cfg.model, parallel=ParallelConfig(pp=pp), train=cfg.train, platform="cpu")
    even = even_split(pp, SPEC.layers)
    auto = decide(cfg, sizes, pp, pick_platform("cpu"), RowSample(tuple(rows), "these rows"))[0]
    print(f"pp={pp}: even {list(even)}, auto {list(auto)}", flush=True)
    together = [[even, auto]] if pp <= CORES else [[even], [auto]]
    first, second = [measured for splits in together for measured in measure(path, splits)]
    # The speeds of this machine come from the even split; they predict the other one.
    speeds = fitted(columns(works(sizes, path, even)), first)
    tables = [columns(works(sizes, path, split)) @ speeds for split in (even, auto)]
    predicted = [end_of_step(*table) for table in tables]
    errors = [
        stage_errors(table, times) for table, times in zip(tables, (first, second), strict=True)
    ]
    figures = {
        f"plan_pp{pp}_auto_over_even": first.pipeline_s / second.pipeline_s,
        f"plan_pp{pp}_auto_over_even_predicted": predicted[0] / predicted[1],
        f"plan_pp{pp}_stage_error_fitted_split": float(errors[0].max()),
        f"plan_pp{pp}_stage_error_other_split": float(errors[1].max()),
    }
    if pp <= CORES:
        figures[f"plan_pp{pp}_auto_over_even_wall"] = first.step_s / second.step_s
    return figures


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, SPEC)
        figures = figures_of(2, path)
        print(figures, flush=True)
        record("plan", figures | figures_of(4, path))


if __name__ == "__main__":
    main()
