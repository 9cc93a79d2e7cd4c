"""Commands from rank 0 to all ranks between two optimizer steps. Rank 0 alone has the prompts, the
rewards and the environments; all ranks sample and train."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_vlm.data.tensors.rows import batch_of, rows_of
from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.agreement import Signals, Stopped
from megatron_vlm.distributed.collectives import all_gather_json
from megatron_vlm.distributed.error_json import error_from_json, error_to_json
from megatron_vlm.distributed.rank0 import CommandChannel
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.errors import DataError
from megatron_vlm.rl.completion_requests import AskedPrompt
from megatron_vlm.training.worker import MegatronWorker


class RankCommands:
    """Command channel on every rank. Rank 0 sends commands, and the other ranks run them. All ranks
    raise Stopped once a rank has received a signal to stop."""

    def __init__(self, worker: MegatronWorker, signals: Signals):
        self.worker = worker
        self.lead = CommandChannel(worker.watchdog, signals, worker.platform.device)
        self.rows = worker.cfg.rl.sampler_rows

    def wait(self) -> None:
        """Keep the other ranks connected while rank 0 waits for a reward or an engine. Call it
        often on rank 0."""
        if self.lead.is_silent:
            self._give({"do": "wait"})

    def draw(
        self, prompts: Sequence[AskedPrompt], settings: SamplingSettings
    ) -> list[list[Completion]]:
        """Draw answers with the trainer's own decoder on all ranks. Call it on rank 0."""
        by_place: dict[int, list[Completion]] = {}
        for n in sorted({len(each.seeds) for each in prompts}):
            places = [place for place, each in enumerate(prompts) if len(each.seeds) == n]
            seeds = [prompts[place].seeds[0] for place in places]
            rows = [prompts[place].prompt for place in places]
            order = {"do": "draw", "settings": asdict(settings), "n": n, "seeds": seeds}
            self._give(order, batch_of(rows).to_bytes())
            by_place |= zip(places, self._draw(rows, settings, n, seeds), strict=True)
        return [by_place[place] for place in range(len(prompts))]

    def end_wait(self, content: bytes, facts: dict[str, Any]) -> None:
        """Send the result that the other ranks wait for. Call it on rank 0."""
        self._give({"do": "go on", "facts": facts}, content)

    def fail(self, error: Exception) -> None:
        """Raise the error on the other ranks. Call it on rank 0, and then raise the error there."""
        self._give(
            {"do": "fail", "fields": error_to_json(error), "data": isinstance(error, DataError)}
        )

    def follow(self) -> tuple[bytes, dict[str, Any]]:
        """Run the commands of rank 0 until its result arrives, and return the result. Call it on
        the other ranks."""
        while True:
            self._meet()
            order, contents = self.lead.receive()
            if order["do"] == "draw":
                rows = rows_of(TensorBatch.from_bytes(contents[0]))
                self._draw(
                    rows, SamplingSettings.from_json(order["settings"]), order["n"], order["seeds"]
                )
            elif order["do"] == "fail":
                kind = DataError if order["data"] else SamplerError
                raise kind(**error_from_json(order["fields"]))
            elif order["do"] == "go on":
                return contents[0], order["facts"]

    def _give(self, order: dict[str, Any], *contents: bytes) -> None:
        self._meet()
        self.lead.send(order, contents)

    def _meet(self) -> None:
        if self.lead.meet():
            raise Stopped

    def _draw(
        self, rows: Sequence[Row], settings: SamplingSettings, n: int, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Draw the answers, each replica those of its own prompts. This is a collective."""
        grid, dims = self.worker.grid, self.worker.dims
        local_places = range(grid.dp.rank, len(rows), grid.dp.size)
        completions = self.worker.sample(
            [rows[place] for place in local_places],
            settings,
            n,
            [seeds[place] for place in local_places],
            self.rows,
        )
        local_completions = (
            [[each.as_json() for each in answers] for answers in completions] if grid.leads else []
        )
        by_rank = all_gather_json(local_completions, None, self.lead.device)
        by_replica = [by_rank[dims.leader_of(replica)] for replica in range(grid.dp.size)]
        return [
            [
                Completion.from_json(each)
                for each in by_replica[place % grid.dp.size][place // grid.dp.size]
            ]
            for place in range(len(rows))
        ]
