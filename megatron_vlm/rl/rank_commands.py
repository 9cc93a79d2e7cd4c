"""What rank 0 has all ranks do between two optimizer steps: rank 0 alone has the prompts, the
rewards and the environments, and all ranks draw and learn."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_vlm.data.tensors.rows import batch_of, rows_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import Signals, Stopped
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.error_json import error_from_json, error_to_json
from megatron_vlm.distributed.rank0 import CommandChannel
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.errors import DataError
from megatron_vlm.rl.completion_requests import AskedPrompt
from megatron_vlm.training.completions import Completion, SamplingSettings
from megatron_vlm.training.worker import MegatronWorker


class RankCommands:
    """On every rank. What rank 0 gives, the others take; Stopped on all of them once one was told
    to stop."""

    def __init__(self, worker: MegatronWorker, signals: Signals):
        self.worker = worker
        self.lead = CommandChannel(worker.watchdog, signals, worker.platform.device)
        self.rows = worker.cfg.rl.sampler_rows

    def wait(self) -> None:
        """On rank 0, often: it waits for a reward or an engine, and is alive."""
        if self.lead.is_silent:
            self._give({"do": "wait"})

    def draw(
        self, asked: Sequence[AskedPrompt], settings: SamplingSettings
    ) -> list[list[Completion]]:
        """On rank 0: answers of our own decoder, drawn by all ranks."""
        found: dict[int, list[Completion]] = {}
        for n in sorted({len(each.seeds) for each in asked}):
            places = [place for place, each in enumerate(asked) if len(each.seeds) == n]
            seeds = [asked[place].seeds[0] for place in places]
            rows = [asked[place].prompt for place in places]
            order = {"do": "draw", "settings": asdict(settings), "n": n, "seeds": seeds}
            self._give(order, batch_of(rows).to_bytes())
            found |= zip(places, self._draw(rows, settings, n, seeds), strict=True)
        return [found[place] for place in range(len(asked))]

    def tell(self, content: bytes, facts: dict[str, Any]) -> None:
        """On rank 0: what all were waiting for is there."""
        self._give({"do": "go on", "facts": facts}, content)

    def fail(self, error: Exception) -> None:
        """On rank 0, which then raises the error itself."""
        self._give(
            {"do": "fail", "fields": error_to_json(error), "data": isinstance(error, DataError)}
        )

    def follow(self) -> tuple[bytes, dict[str, Any]]:
        """On the others: take orders until rank 0 tells what it has."""
        while True:
            self._meet()
            order, contents = self.lead.hear()
            if order["do"] == "draw":
                rows = rows_of(TensorBatch.from_bytes(contents[0]))
                self._draw(rows, SamplingSettings.of(order["settings"]), order["n"], order["seeds"])
            elif order["do"] == "fail":
                kind = DataError if order["data"] else SamplerError
                raise kind(**error_from_json(order["fields"]))
            elif order["do"] == "go on":
                return contents[0], order["facts"]

    def _give(self, order: dict[str, Any], *contents: bytes) -> None:
        self._meet()
        self.lead.tell(order, contents)

    def _meet(self) -> None:
        if self.lead.meet():
            raise Stopped

    def _draw(
        self, rows: Sequence[Row], settings: SamplingSettings, n: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """A collective. Each replica draws for the prompts that are dealt to it."""
        grid, dims = self.worker.grid, self.worker.dims
        mine = range(grid.dp.rank, len(rows), grid.dp.size)
        found = self.worker.sample(
            [rows[place] for place in mine],
            settings,
            n,
            [seeds[place] for place in mine],
            self.rows,
        )
        said = [[each.plain() for each in answers] for answers in found] if grid.leads else []
        of_ranks = all_gather_json(said, None, self.lead.device)
        of_replicas = [of_ranks[dims.leader_of(replica)] for replica in range(grid.dp.size)]
        return [
            [
                Completion.of(each)
                for each in of_replicas[place % grid.dp.size][place // grid.dp.size]
            ]
            for place in range(len(rows))
        ]
