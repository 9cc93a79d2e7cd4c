"""Held-out sets: their batches for the loss, and their questions with the right answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batch.batching import Limits
from megatron_vlm.data.batch.dataset import DataSet, Handle, open_data
from megatron_vlm.data.batch.loader import Loader
from megatron_vlm.data.batch.micro_batch import MicroBatch
from megatron_vlm.data.batch.order import Order, all_of
from megatron_vlm.data.encode.positions import VisionTokens
from megatron_vlm.data.encode.row import Row
from megatron_vlm.data.read.sources import SourceSpec, parse_specs
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.feed.feeder import open_together
from megatron_vlm.feed.share import my_replica, share_batch, share_object
from megatron_vlm.worker import MegatronWorker


@dataclass(frozen=True)
class EvalSet:
    """A held-out set; `data` on the loading ranks alone."""

    name: str
    data: DataSet | None
    samples: int


@dataclass(frozen=True)
class Question:
    """A sample up to its last answer, and that answer."""

    handle: Handle
    prompt: Row
    answer_ids: tuple[int, ...]  # without the end of the turn


def named_specs(value: Any) -> list[tuple[str, SourceSpec]]:
    """data.eval, each entry a set with a name of its own: {name: SOURCE}, or the file's name."""
    if isinstance(value, dict) and "path" not in value:
        return [
            (str(name), parse_specs(spec, f"data.eval.{name}")[0]) for name, spec in value.items()
        ]
    specs = parse_specs(value, "data.eval")
    names = [Path(spec.path).name.split(".")[0] for spec in specs]
    return [
        (name if names.count(name) == 1 else f"{name}-{place}", spec)
        for place, (name, spec) in enumerate(zip(names, specs, strict=True))
    ]


def open_sets(worker: MegatronWorker, cfg: Config) -> list[EvalSet]:
    """Every entry of data.eval. A collective."""
    named = [] if cfg.data.eval is None else named_specs(cfg.data.eval)
    _check_best(cfg, [name for name, _ in named])
    return [_open(worker, cfg, name, spec) for name, spec in named]


def _check_best(cfg: Config, names: Sequence[str]) -> None:
    best = cfg.checkpoint.best
    if best is not None and best.split("/")[0] not in names:
        raise ConfigError(
            f"checkpoint.best={best}: data.eval has no set {best.split('/')[0]!r}; "
            f"it has {', '.join(names) or 'none'}"
        )


def _open(worker: MegatronWorker, cfg: Config, name: str, spec: SourceSpec) -> EvalSet:
    def opening() -> tuple[DataSet, int]:
        replica, hf_config = my_replica(), worker.source.config
        share = (replica.rank, replica.count)
        path = cfg.model.path
        data = open_data([vars(spec)], "data.eval", cfg.data, path, hf_config, share, train=False)
        if not isinstance(data, DataSet):
            raise ConfigError(f"data.eval: {spec.path} streams, and an evaluation needs its size")
        data = first_of(data, cfg.eval.samples)
        return data, len(data.order)

    data, samples = open_together(f"data.eval {name}", worker.platform.device, opening)
    return EvalSet(name, data, samples)


def first_of(data: DataSet, samples: int | None) -> DataSet:
    """So many samples of one source, spread over all of it: files are often sorted. The same ones
    each time; all of them in their order where there are no more."""
    length = len(data.indexes[0])
    if samples is None or samples >= length:
        return replace(data, order=all_of((length,)))
    return replace(data, order=Order((length,), (samples / length,), seed=0, shuffle=True))


def batches_of(
    worker: MegatronWorker, cfg: Config, held_out: EvalSet
) -> Iterator[list[MicroBatch]]:
    """The set's micro-batches, each list on every rank of the replica. A collective."""
    limits = Limits.of(cfg.train)
    size = cfg.eval.batch_size
    loaded: Any = iter(())
    if held_out.data is not None:
        loaded = iter(Loader(held_out.data, cfg.data, size, limits, my_replica(), epochs=1))
    for _ in range(-(-held_out.samples // size)):
        mine: Any = None
        if held_out.data is not None:
            try:
                mine = (next(loaded).micro_batches, None)
            except DataError as error:
                mine = error
        yield share_batch(mine, worker.platform.device)[0]


def questions_of(worker: MegatronWorker, cfg: Config, held_out: EvalSet) -> list[Handle]:
    """The samples of this replica that are asked, the same on every one of its ranks."""
    mine: Any = None
    if held_out.data is not None:
        most = cfg.eval.answer_samples
        data = held_out.data if most is None else first_of(held_out.data, most)
        replica = my_replica()
        mine = data.order.epoch(0)[replica.rank :: replica.count].tolist()
    return [(source, index) for source, index in share_object(mine, worker.platform.device)]


def ask(
    worker: MegatronWorker, cfg: Config, held_out: EvalSet, handles: Sequence[Handle]
) -> list[Question]:
    """These samples as questions, on every rank of the replica. A collective."""
    mine: Any = None
    if held_out.data is not None:
        mine = []
        for handle in handles:
            try:
                mine.append(question_of(held_out.data, handle))
            except DataError as error:
                if cfg.data.on_error == "raise":
                    mine = error
                    break
    questions: list[Question] = share_object(mine, worker.platform.device)
    return questions


def question_of(data: DataSet, handle: Handle) -> Question:
    """A sample up to its last answer, and that answer."""
    reader, sample = data.readers[handle[0]], data.indexes[handle[0]][handle[1]]
    start, end = last_answer(sample.trained_S)
    ids = sample.ids_S[start:end].tolist()
    if ids and ids[-1] == reader.encoder.renderer.end_id:
        ids.pop()
    return Question(handle, cut_row(data.row(handle).row, start, reader.tokens), tuple(ids))


def last_answer(trained_S: np.ndarray) -> tuple[int, int]:
    """The last run of trained tokens: [start, end)."""
    end = int(trained_S.nonzero()[0][-1]) + 1
    untrained = (~trained_S[:end]).nonzero()[0]
    return (int(untrained[-1]) + 1 if len(untrained) else 0), end


def cut_row(row: Row, end: int, tokens: VisionTokens) -> Row:
    """The row's first tokens, with the images and videos among them."""
    ids_S = row.ids_S[:end]

    def visible(
        token: int, pixels: torch.Tensor | None, grid: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if pixels is None or grid is None:
            return None, None
        patches = grid.prod(1).cumsum(0)
        count = int((patches <= int((ids_S == token).sum()) * tokens.merge**2).sum())
        return (pixels[: patches[count - 1]], grid[:count]) if count else (None, None)

    images = visible(tokens.image_id, row.pixel_values_PC, row.image_grid_I3)
    videos = visible(tokens.video_id, row.pixel_values_videos_PC, row.video_grid_I3)
    return Row(ids_S, row.labels_S[:end], *images, *videos)
