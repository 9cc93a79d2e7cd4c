"""Commands from rank 0 to all ranks between two optimizer steps. Rank 0 alone has the prompts, the
rewards and the environments; all ranks sample and train."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of, rows_of
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import Signals
from megatron_vlm.distributed.collectives import gather_json
from megatron_vlm.distributed.error_json import error_from_json, error_to_json
from megatron_vlm.distributed.rank0 import SIGNAL_POLL_S, CommandChannel
from megatron_vlm.engines.own import AskedPrompt
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.errors import DataError
from megatron_vlm.training.row_scores import row_rewards
from megatron_vlm.training.worker import MegatronWorker

T = TypeVar("T")
Completions = list[list[Completion]]


class RankCommands:
    """Commands that rank 0 sends and the others follow. All ranks raise Stopped once a rank has
    received a signal to stop."""

    def __init__(self, worker: MegatronWorker, signals: Signals):
        self.worker, self.rows = worker, worker.cfg.engine.rows
        self.reward_model: MegatronWorker | None = None  # set where rl.reward names a model
        methods: dict[str, Callable[..., Any]] = {
            "draw": self._draw,
            "score": self._score,
            "fail": _raise_error,
        }
        self.channel = CommandChannel(
            worker.watchdog,
            signals,
            lambda method, arguments: methods[method](*arguments),
            TensorBatch,
        )
        self.wait = self.channel.wait  # on rank 0, often, while it waits for something else
        self.rounds: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def draw_soon(self, asked: Sequence[AskedPrompt]) -> Future[Completions]:
        """Draw answers with the trainer's own decoder on all ranks, during `result_of`. Call it
        from any thread of rank 0. All prompts have the same settings."""
        assert len({each.settings for each in asked}) == 1
        drawn: Future[Completions] = Future()
        self.rounds.put(lambda: drawn.set_result(self._draw_round(asked)))
        return drawn

    def score_soon(self, rows: Sequence[Row]) -> Future[list[float]]:
        """Score rows with the reward model on all ranks, during `result_of`. Call it from any
        thread of rank 0."""
        scored: Future[list[float]] = Future()
        self.rounds.put(lambda: scored.set_result(self.channel.call("score", batch_of(rows))))
        return scored

    def result_of(self, work: Future[T]) -> T:
        """Return the result of work in another thread. Meanwhile draw and score what it asks for,
        and keep contact with the other ranks. Call it on rank 0."""
        work.add_done_callback(lambda _: self.rounds.put(None))
        while not work.done():
            try:
                if (run_round := self.rounds.get(timeout=SIGNAL_POLL_S)) is not None:
                    run_round()
            except Empty:
                pass
            self.wait()
        return work.result()

    def _draw_round(self, prompts: Sequence[AskedPrompt]) -> Completions:
        by_place: dict[int, list[Completion]] = {}
        for n in sorted({len(each.seeds) for each in prompts}):
            places = [place for place, each in enumerate(prompts) if len(each.seeds) == n]
            seeds = [prompts[place].seeds[0] for place in places]
            batch = batch_of([prompts[place].prompt for place in places])
            settings = asdict(prompts[places[0]].settings)
            answers = self.channel.call("draw", batch, settings, n, seeds)
            by_place |= zip(places, answers, strict=True)
        return [by_place[place] for place in range(len(prompts))]

    def end_wait(self, content: bytes, facts: dict[str, Any]) -> None:
        """Send the result that `follow` returns on the other ranks. Call it on rank 0."""
        self.channel.send("end", content, facts)

    def follow(self) -> tuple[bytes, dict[str, Any]]:
        """Run the commands of rank 0 until its result arrives, and return the result. Call it on
        the other ranks."""
        content, facts = self.channel.follow()
        return content, facts

    def fail(self, error: Exception) -> None:
        """Raise the error on the other ranks. Call it on rank 0, and then raise the error there."""
        self.channel.send("fail", error_to_json(error), isinstance(error, DataError))

    def _draw(
        self, batch: TensorBatch, settings: dict[str, Any], n: int, seeds: Sequence[int]
    ) -> Completions:
        """Return the answers on rank 0. Each replica draws those to its prompts. A collective."""
        grid, rows = self.worker.grid, rows_of(batch)
        local_places = range(grid.dp.rank, len(rows), grid.dp.size)
        completions = self.worker.sample(
            [rows[place] for place in local_places],
            SamplingSettings.from_json(settings),
            n,
            [seeds[place] for place in local_places],
            self.rows,
        )
        plain = [[each.as_json() for each in answers] for answers in completions]
        gathered = self._gather(plain, len(rows))
        return [[Completion.from_json(each) for each in answers] for answers in gathered]

    def _score(self, batch: TensorBatch) -> list[float]:
        """Return the rewards of rows on rank 0. Each replica scores some of them. A collective."""
        assert self.reward_model is not None
        grid, rows = self.worker.grid, rows_of(batch)
        own_rows = rows[grid.dp.rank :: grid.dp.size]
        batches = self.reward_model.micro_batches(own_rows) if own_rows else []
        return self._gather(row_rewards(self.reward_model.stage, batches), len(rows))

    def _gather(self, local: list[Any], count: int) -> list[Any]:
        """Return on rank 0 what the replicas have computed of prompts or rows, which were dealt to
        them in turn, and nothing on other ranks. A collective."""
        grid, dims = self.worker.grid, self.worker.dims
        if not (by_rank := gather_json(local if grid.leads else [])):
            return []
        by_replica = [by_rank[dims.leader_of(replica)] for replica in range(grid.dp.size)]
        size = grid.dp.size
        return [by_replica[place % size][place // size] for place in range(count)]


def _raise_error(fields: dict[str, Any], is_data: bool) -> None:
    kind = DataError if is_data else SamplerError
    raise kind(**error_from_json(fields))
