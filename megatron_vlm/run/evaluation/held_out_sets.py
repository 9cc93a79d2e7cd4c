"""Held-out sets: their batches for the loss, and their questions with the right answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron_vlm.config.data_sources import HELD_OUT, SourceSpec
from megatron_vlm.config.objectives import needs_mismatched, records_of
from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.collate import Pictured, grey, hide_pictures
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import DataSet, Handle, open_data, with_scores
from megatron_vlm.data.batches.loader import Loader, Replica, StepBatch
from megatron_vlm.data.batches.order import Order, order_of_all
from megatron_vlm.data.records.formats import OnlyAsksError
from megatron_vlm.data.records.keys import references_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of, rows_of
from megatron_vlm.data.tokens.row import Row, slice_row
from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import show_count
from megatron_vlm.training.data_feed import SharedBatches, open_together, share_bytes, share_json
from megatron_vlm.training.worker import MegatronWorker

Alive = Callable[[], None]  # tells the watchdog that something goes on


@dataclass(frozen=True)
class Question:
    """A sample up to its last answer, and that answer."""

    handle: Handle
    prompt: Row
    answer_ids: tuple[int, ...]  # without the token that ends the turn
    references: tuple[str, ...] = ()  # all right answers, if the record lists them


@dataclass(frozen=True)
class EvalSet:
    """A held-out set; only the loading ranks have `data`. Its methods are collectives."""

    worker: MegatronWorker
    cfg: Config
    name: str
    data: DataSet | None
    samples: int
    remarks: Remarks
    is_blind: bool = False  # its pictures are grey

    @staticmethod
    def open(
        worker: MegatronWorker,
        cfg: Config,
        name: str,
        specs: Sequence[SourceSpec],
        held_out: bool = False,
        may_ask: bool = False,
    ) -> "EvalSet":
        """Open the set with this name. With `held_out` it is the part of data.train that data.split
        holds out. With `may_ask`, a set whose records only ask has no samples."""
        grid = worker.grid
        key = "data.split" if held_out else f"data.eval {name}"

        def opening() -> tuple[DataSet | None, tuple[int, Any]]:
            share, sizes = (grid.dp.rank, grid.dp.size), worker.source.sizes
            named = "data.split" if held_out else "data.eval"
            try:
                data = open_data(
                    *(specs, named, cfg.data, cfg.model.path, sizes, share),
                    train=False,
                    kind=records_of(cfg),
                    held_out=held_out,
                )
            except OnlyAsksError:
                if not may_ask:
                    raise
                return None, (0, asdict(Remarks()))
            data = with_scores(data, cfg)
            assert isinstance(data, DataSet)
            remarks = asdict(
                Remarks((describe_split(data, cfg),))
                if held_out
                else Remarks.from_data(data, key, cfg.data)
            )
            data = first_samples(data, cfg.eval.samples)
            return data, (len(data.order), remarks)

        data, (samples, remarks) = open_together(key, grid, opening, worker.watchdog)
        return EvalSet(worker, cfg, name, data, samples, Remarks(**remarks))

    @staticmethod
    def open_all(worker: MegatronWorker, cfg: Config, may_ask: bool) -> list["EvalSet"]:
        """Open all sets of data.eval, or else the one of data.split."""
        if not cfg.data.eval and cfg.data.split is not None:
            return [EvalSet.open(worker, cfg, HELD_OUT, cfg.data.train, held_out=True)]
        sets = [(entry.name, (entry.source,)) for entry in cfg.data.eval]
        opened = [EvalSet.open(worker, cfg, *each, may_ask=may_ask) for each in sets]
        return [each for each in opened if each.samples]

    def batches(self) -> Iterator[StepBatch]:
        """Yield the set's batches, each on every rank of the replica."""
        grid, cfg, size = self.worker.grid, self.cfg, self.cfg.eval.batch_size
        loader = None
        if self.data is not None:
            replica = Replica(grid.dp.rank, grid.dp.size)
            loader = Loader(
                *(self.data, cfg.data, size, Limits.from_config(cfg.train), replica),
                epochs=1,
                with_mismatched=needs_mismatched(cfg),
            )
        batches = SharedBatches(loader, grid, self.worker.platform.device)
        for _ in range(-(-self.samples // size)):
            batch = batches.next()
            yield replace(batch, micro_batches=self._shown(batch.micro_batches))

    def handles(self) -> list[Handle]:
        """Return the samples whose questions this replica answers, equal on all of its ranks."""
        local_handles: Any = None
        if self.data is not None:
            max_samples, dp = self.cfg.eval.answer_samples, self.worker.grid.dp
            data = self.data if max_samples is None else first_samples(self.data, max_samples)
            local_handles = data.order.epoch(0)[dp.rank :: dp.size].tolist()
        return [(source, index) for source, index in self.share(local_handles)]

    def ask(self, handles: Sequence[Handle]) -> list[Question]:
        """Return these samples as questions, on every rank of the replica."""
        questions: list[Question] = []
        failure: DataError | None = None
        if self.data is not None:
            for handle in handles:
                try:
                    questions.append(question_of(self.data, handle))
                except DataError as error:
                    if not self.cfg.data.max_errors:
                        failure = error
                        break
        known = [(each.handle, each.answer_ids, each.references) for each in questions]
        facts = self.share(failure or known)
        if not facts:
            return []
        prompts = batch_of([each.prompt for each in questions]).to_bytes() if questions else None
        rows = rows_of(TensorBatch.from_bytes(share_bytes(prompts, self.worker.grid)))
        return [
            Question((source, index), row, tuple(answer_ids), tuple(references))
            for ((source, index), answer_ids, references), row in zip(
                facts, self._shown(rows), strict=True
            )
        ]

    def _shown(self, pictured: Sequence[Pictured]) -> list[Pictured]:
        return [hide_pictures(each, grey) if self.is_blind else each for each in pictured]

    def share(self, value: Any) -> Any:
        """Return the JSON value of the rank that loads, on all ranks of the replica."""
        return share_json(value, self.worker.grid)


def describe_split(data: DataSet, cfg: Config) -> str:
    """Return a sentence about the number of samples that data.split holds out."""
    records, samples = (sum(map(len, parts)) for parts in (data.sources, data.indexes))
    return (
        f"data.split={cfg.data.split:.10g} holds out {show_count(samples, 'sample')} of the "
        f"{records:,} records of data.train: the set {HELD_OUT}"
    )


def list_held_out(sets: Sequence[EvalSet]) -> str:
    """Return a line with the place of each record that data.split holds out, if it is set."""
    return "".join(
        f"{each.data.where((source, sample))}\n"
        for each in sets
        if each.name == HELD_OUT and each.data is not None and each.cfg.data.split is not None
        for source, index in enumerate(each.data.indexes)
        for sample in range(len(index))
    )


def first_samples(data: DataSet, samples: int | None) -> DataSet:
    """Return about `samples` samples, always the same, spread over each source, since files are
    often sorted; or all of them in their order."""
    lengths = tuple(map(len, data.indexes))
    total = sum(lengths)
    if samples is None or samples >= total:
        return replace(data, order=order_of_all(lengths))
    weights = (samples / total,) * len(lengths)
    return replace(data, order=Order(lengths, weights, seed=0, shuffle=True))


def question_of(data: DataSet, handle: Handle) -> Question:
    """Return a sample up to its last answer, and that answer."""
    reader, sample = data.readers[handle[0]], data.indexes[handle[0]][handle[1]]
    start, end = last_answer(sample.trained_S)
    ids = sample.ids_S[start:end].tolist()
    if ids and ids[-1] in reader.encoder.renderer.end_ids:
        ids.pop()
    prompt = slice_row(data.row(handle), start, reader.tokens)
    return Question(handle, prompt, tuple(ids), references_of(data.raw(handle)))


def last_answer(trained_S: np.ndarray) -> tuple[int, int]:
    """Return the last run of trained tokens: [start, end)."""
    end = int(trained_S.nonzero()[0][-1]) + 1
    untrained = (~trained_S[:end]).nonzero()[0]
    return (int(untrained[-1]) + 1 if len(untrained) else 0), end
