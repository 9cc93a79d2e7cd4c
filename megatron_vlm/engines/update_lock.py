"""A lock that admits many holders at a time, or one alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class UpdateLock:
    """A lock for weight updates. `alone` waits until all holders have left; meanwhile no new holder
    enters."""

    def __init__(self) -> None:
        self.inside = 0
        self.closed = False
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def shared_with_requests(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            await asyncio.shield(self._notify())

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.closed = True
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.inside)
            yield
        finally:
            self.closed = False
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
