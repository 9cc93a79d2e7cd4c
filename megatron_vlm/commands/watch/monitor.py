"""Runs that are watched: looked at again and again in a thread, for all readers together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_vlm.commands.watch.live_run import LiveRun
from megatron_vlm.commands.watch.run_finder import find_runs
from megatron_vlm.commands.watch.run_status import RunStatus, StatusReader

_MAX_OPEN = 8  # runs whose lines stay in memory


@dataclass
class WatchedRun:
    """A run of the list."""

    name: str
    folder: Path
    reader: StatusReader
    status: RunStatus
    version: int = 0  # counts the changes


@dataclass
class Monitor:
    """The runs under some folders, by name. `version` counts all changes."""

    folders: Sequence[Path]
    interval: float = 1.0  # seconds between two looks
    runs: dict[str, WatchedRun] = field(default_factory=dict)
    version: int = 0
    is_closing: bool = False

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._open: dict[Path, LiveRun] = {}

    def look(self) -> bool:
        """Read what is new of all runs; return whether anything is."""
        found = find_runs(self.folders)
        version = self.version
        for name in self.runs.keys() - found.keys():
            del self.runs[name]
            self.version += 1
        for name, folder in found.items():
            run = self.runs.get(name)
            if run is None or run.folder != folder:
                reader = StatusReader(folder)
                self.runs[name] = WatchedRun(name, folder, reader, reader.read())
                self.version += 1
            elif (status := run.reader.read()) != run.status:
                run.status = status
                run.version += 1
                self.version += 1
        return self.version != version

    def open_run(self, run: WatchedRun) -> LiveRun:
        """Return the lines of a run, which stay in memory for a while."""
        live = self._open.pop(run.folder, None) or LiveRun(run.folder, run.name)
        self._open[run.folder] = live  # the last one
        while len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]
        return live

    async def wait_for_change(self, version: Callable[[], int], seen: int, timeout: float) -> None:
        """Wait until a version is no longer the one that was seen, for the end of the server, or
        for the end of the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self.is_closing or version() != seen)

    async def close(self) -> None:
        """Let all who wait go on."""
        self.is_closing = True
        async with self._changed:
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look at the runs until the end of the body."""
        await asyncio.to_thread(self.look)
        task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            await self.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            if await asyncio.to_thread(self.look):
                async with self._changed:
                    self._changed.notify_all()
