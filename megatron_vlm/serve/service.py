"""Main loop of the service on rank 0, and its status line. It takes calls from the journal, one
turn after the other.

HTTP server (a thread)  ->  journal  ->  this loop  ->  commands to all ranks
                            journal  <-  results
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_vlm.config.schema import Config
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.serve.call_runner import CallRunner
from megatron_vlm.serve.call_scheduler import CallScheduler
from megatron_vlm.serve.engine_samples import EngineSampling
from megatron_vlm.serve.failures import FullDisk, bare, catch_error
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Call
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.served_models import ModelCommands

TIDY_S = 15.0
STATUS_EVERY_S = 10.0


class Service:
    """Service loop on rank 0, which schedules the calls and writes their results."""

    def __init__(
        self,
        cfg: Config,
        commands: ModelCommands,
        journal: Journal,
        prefetcher: RequestPrefetcher,
        engine_sampling: EngineSampling | None = None,
    ):
        """`engine_sampling` draws samples with an engine. Without it the ranks draw them."""
        self.cfg, self.commands, self.prefetcher = cfg, commands, prefetcher
        self.disk = FullDisk()
        self.runner = CallRunner(cfg.serve, commands, journal, prefetcher, self.disk)
        self.model_cache = self.runner.model_cache
        self.drawing = engine_sampling or self.runner.sample_turns
        self.accepted = {} if engine_sampling is None else engine_sampling.accepted
        self.scheduler = CallScheduler(
            cfg, commands, journal, prefetcher, self.model_cache, self.drawing.next_calls
        )
        self.progress = ProgressLine()
        self.gauges = {"samples_total": 0.0}  # for /metrics
        self.tidy_at = 0.0

    def run(self) -> None:
        """Run until a signal raises Stopped."""
        while True:
            self.commands.wait()
            try:
                self._tidy_if_due()
                self._look_around()
            except sqlite3.Error as error:  # no call has started
                self.disk.wait(error)

    def _look_around(self) -> None:
        """Run a turn if calls are pending; otherwise the scheduler pauses."""
        self.drawing.check()
        calls = self.scheduler.pending()
        self.runner.sample_turns.leave_cancelled({call.request_id for call in calls})
        self._count()
        self.progress.update(self.gauges, len(calls))
        if together := self.scheduler.next_turn(calls):
            self._turn(together)

    def _tidy_if_due(self) -> None:
        """Free memory and disk space that no call needs, between turns, when nothing is written."""
        if time.monotonic() < self.tidy_at:
            return
        self.tidy_at = time.monotonic() + TIDY_S
        self.model_cache.delete_orphan_folders()
        with catch_error(  # the model stays in memory
            lambda error: print_to_user(
                f"a model that waits for its client could not be moved to disk: {bare(error)}"
            )
        ):
            self.model_cache.put_away_silent()

    def _turn(self, together: Sequence[Call]) -> None:
        """Run these calls, and count the time that each has taken."""
        sizes = self.scheduler.batcher.sizes(together)
        tenant = self.scheduler.tenant_of(together[0])
        samples = self.runner.sample_turns
        started = time.monotonic()
        together = self.runner.run(together, partial(self.scheduler.arriving_samples, tenant))
        seconds = time.monotonic() - started
        sizes |= samples.sizes(together)
        self.progress.record_work(
            sum(not samples.is_in_progress(each) for each in together), seconds
        )
        self._count()
        size = sum(sizes[each.request_id] for each in together)
        for member in together:
            share = seconds * sizes[member.request_id] / size
            if not samples.is_in_progress(member):
                self.prefetcher.drop(member)
            self.scheduler.record_work(member, share)
            if member.changes_state:
                self._keep_if_due(member.owner, share)

    def _keep_if_due(self, model: str, seconds: float) -> None:
        """Save the model after enough unsaved work, so that a killed service repeats little."""
        loaded = self.model_cache.models.get(model)
        if loaded is None:
            return
        loaded.unsaved_s += seconds
        if loaded.unsaved_s > self.cfg.serve.save_seconds:

            def report(error: Exception) -> None:  # no client waits for this save
                loaded.unsaved_s = 0.0
                print_to_user(
                    f"the state of {model} could not be saved, and the journal grows: {bare(error)}"
                )

            with catch_error(report):
                self.model_cache.keep(loaded)

    def close(self) -> None:
        """Save the models in memory. Pending calls run when the service starts again."""
        self.drawing.close()
        self.prefetcher.close()
        self.model_cache.keep_all()

    def _count(self) -> None:
        stages = {self.drawing, self.runner.sample_turns}
        self.gauges["samples_total"] = float(sum(each.samples for each in stages))
        for drafts, rounds in sorted(self.accepted.items()):
            self.gauges[f"rounds_accepting_{drafts}_drafts_total"] = float(rounds)
        self.gauges["samples_under_way"] = float(sum(each.left for each in stages))
        self.gauges.update(self.runner.model_calls.gauges)
        self.gauges["models_in_memory"] = float(len(self.model_cache.models))
        self.gauges["snapshots_in_memory"] = float(len(self.model_cache.snapshots))


class ProgressLine:
    """Line about the last seconds, printed only if calls were done in them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.last = clock, clock()
        self.calls, self.busy_s = 0, 0.0
        self.before: dict[str, float] = {}

    def record_work(self, calls: int, seconds: float) -> None:
        """Count calls that were done."""
        self.calls += calls
        self.busy_s += seconds

    def update(self, gauges: Mapping[str, float], waiting: int) -> None:
        """Print the line when it is due; call this often."""
        seconds = self.clock() - self.last
        if seconds < STATUS_EVERY_S:
            return
        if self.calls:
            print_to_user(self._line(gauges, waiting, seconds))
        self.last, self.calls, self.busy_s = self.clock(), 0, 0.0
        self.before = dict(gauges)

    def _line(self, gauges: Mapping[str, float], waiting: int, seconds: float) -> str:
        def since(name: str) -> float:
            return gauges.get(name, 0.0) - self.before.get(name, 0.0)

        return (
            f"{self.calls} calls in {seconds:.0f} s ({self.busy_s / seconds:.0%} busy): "
            f"{since('trained_tokens_total') / seconds:,.0f} tokens/s through models, "
            f"{since('optimizer_steps_total'):.0f} steps, {since('samples_total'):.0f} samples; "
            f"{gauges.get('models_in_memory', 0):.0f} models in memory, {waiting} calls wait"
        )
