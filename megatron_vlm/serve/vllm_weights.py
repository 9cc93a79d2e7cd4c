"""Snapshots as an engine takes them, and which of them it has.

Adapters are a folder of PEFT's, whole weights a checkpoint of Hugging Face's. Each is written once,
inside the snapshot's own folder, and goes with it when the journal forgets the snapshot. It is read
from the disk and needs none of the ranks. The whole weights that an engine has are held by other
links to the same files, since an engine that dies is given them again, whoever has forgotten them.
"""

import asyncio
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.engines.engine_thread import Engines
from megatron_vlm.engines.sampler import Checkpoint
from megatron_vlm.serve.journal.journal_records import SamplingSession
from megatron_vlm.serve.rank_models import ModelForm

FORM = "engine"  # the folder's name


@dataclass(frozen=True)
class SampleWeights:
    """What a sampling session's samples are drawn with: the base model, with `adapter` or without,
    or `whole` weights in place of the base model's. Both are folders of snapshots."""

    whole: Path | None = None
    adapter: Path | None = None

    @staticmethod
    def of(sampler: SamplingSession) -> "SampleWeights":
        """What never changes while the session lasts."""
        if sampler.folder is None:
            return SampleWeights()
        if ModelForm.of(sampler.facts["form"]).rank:
            return SampleWeights(adapter=sampler.folder)
        return SampleWeights(whole=sampler.folder)


class EngineWeights:
    """To be used in the engines' loop."""

    def __init__(self, engines: Engines, run: Path) -> None:
        """`run`: the service's folder."""
        self.engines, self.held = engines, run / FORM
        shutil.rmtree(self.held, ignore_errors=True)  # of a service that ended
        self.whole: Path | None = None  # the snapshot in place of the base model
        self.switches = 0
        self.swap_s = 0.0  # that a switch took lately
        self.writing: dict[Path, asyncio.Task[None]] = {}

    async def switch(self, whole: Path | None) -> None:
        """Give the engine a snapshot's whole weights, or the base model's."""
        started, sampler = time.monotonic(), self.engines.sampler
        self.switches += 1
        folder, held = sampler.settings.folder, self.held / f"{self.switches}"
        if whole is not None:
            folder = str(held)
            await asyncio.to_thread(_link, await self.folder(whole, False), folder)
        try:
            await sampler.update(Checkpoint(folder), self.switches)
        except BaseException:
            shutil.rmtree(held, ignore_errors=True)
            raise
        self.whole = whole
        for older in self.held.glob("*"):
            if older != held:
                shutil.rmtree(older, ignore_errors=True)
        self.swap_s += 0.3 * (time.monotonic() - started - self.swap_s)

    async def folder(self, snapshot: Path, adapter: bool) -> str:
        """The snapshot as the engine takes it, written unless it is there: it appears whole."""
        folder = snapshot / FORM
        if not folder.is_dir():
            if snapshot not in self.writing:
                task = asyncio.create_task(_write(snapshot, folder, adapter))
                self.writing[snapshot] = task
                task.add_done_callback(lambda task: self._written(snapshot, task))
            # Whoever waits may be cancelled, and others wait for the same.
            await asyncio.shield(self.writing[snapshot])
        return str(folder)

    def _written(self, snapshot: Path, task: "asyncio.Task[None]") -> None:
        del self.writing[snapshot]
        if not task.cancelled():
            task.exception()  # whoever waits for it raises it; there may be nobody


def _link(folder: str, out: str) -> None:
    """The same files, without a copy where the disk can do so."""

    def one(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(folder, out, copy_function=one)


async def _write(snapshot: Path, folder: Path, adapter: bool) -> None:
    kind = ("adapter",) if adapter else ()
    await asyncio.to_thread(export_checkpoint, str(snapshot), str(folder), None, *kind)
