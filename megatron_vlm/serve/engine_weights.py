"""Snapshots of weights in the engine's format, and the weights that an engine has.

An adapter is a PEFT folder, and full weights are a Hugging Face checkpoint. Each is written once
from the snapshot's files, inside the snapshot's own folder, and is deleted with it when the journal
forgets the snapshot. Hard links keep the files of the engine's current full weights: an engine that
dies receives them again, even if the journal has forgotten the snapshot.
"""

import asyncio
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.sampler import Checkpoint
from megatron_vlm.lora.peft_folder import is_adapter
from megatron_vlm.serve.journal.journal_records import SamplingSession
from megatron_vlm.serve.served_models import ModelSettings

FORM = "engine"  # the folder's name


@dataclass(frozen=True)
class SampleWeights:
    """Weights of a sampling session: the base model, with or without `adapter`, or the full weights
    `whole` in place of the base model's. Both are folders of snapshots."""

    whole: Path | None = None
    adapter: Path | None = None

    @staticmethod
    def from_sampler(sampler: SamplingSession) -> "SampleWeights":
        """Return the weights of a session, which never change."""
        if sampler.folder is None:
            return SampleWeights()
        if ModelSettings.from_json(sampler.facts["form"]).rank:
            return SampleWeights(adapter=sampler.folder)
        return SampleWeights(whole=sampler.folder)


class EngineWeights:
    """Weights of the engines; to be used in the engines' loop."""

    def __init__(self, engines: EngineThread, base: str, run: Path) -> None:
        """`base` is the folder of the base model, and `run` the service's."""
        self.engines, self.base, self.held = engines, base, run / FORM
        shutil.rmtree(self.held, ignore_errors=True)  # left over from an earlier service
        self.whole: Path | None = None  # the snapshot in place of the base model
        self.switches = 0
        self.swap_s = 0.0  # moving average of the seconds that a switch takes
        self.writing: dict[Path, asyncio.Task[None]] = {}

    async def switch(self, whole: Path | None) -> None:
        """Give the engine a snapshot's full weights, or the base model's."""
        started = time.monotonic()
        self.switches += 1
        folder, held = self.base, self.held / f"{self.switches}"
        if whole is not None:
            folder = str(held)
            await asyncio.to_thread(_link, await self.folder(whole, False), folder)
        try:
            await self.engines.engine.update(Checkpoint(folder), self.switches)
        except BaseException:
            shutil.rmtree(held, ignore_errors=True)
            raise
        self.whole = whole
        for older in self.held.glob("*"):
            if older != held:
                shutil.rmtree(older, ignore_errors=True)
        self.swap_s += 0.3 * (time.monotonic() - started - self.swap_s)

    async def folder(self, snapshot: Path, adapter: bool) -> str:
        """Return the folder of the snapshot in the engine's format, and write it if it is not
        there. The folder appears only when it is complete."""
        if adapter and is_adapter(snapshot):
            return str(snapshot)
        folder = snapshot / FORM
        if not folder.is_dir():
            if snapshot not in self.writing:
                task = asyncio.create_task(_write(snapshot, folder, adapter))
                self.writing[snapshot] = task
                task.add_done_callback(lambda task: self._end_writing(snapshot, task))
            # This waiter may be cancelled while others wait for the same task.
            await asyncio.shield(self.writing[snapshot])
        return str(folder)

    def _end_writing(self, snapshot: Path, task: "asyncio.Task[None]") -> None:
        del self.writing[snapshot]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: waiters raise it, if there are any


def _link(folder: str, out: str) -> None:
    """Link the files of a folder into another, and copy them where the file system has no links."""

    def one(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(folder, out, copy_function=one)


async def _write(snapshot: Path, folder: Path, adapter: bool) -> None:
    kind = ("adapter",) if adapter else ()
    await asyncio.to_thread(export_checkpoint, str(snapshot), str(folder), None, *kind)
