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
    async def among_others(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            await asyncio.shield(self._tell())

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.closed = True
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.inside)
            yield
        finally:
            self.closed = False
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()
