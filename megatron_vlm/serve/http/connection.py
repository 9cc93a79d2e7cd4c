"""Client connection that cannot hold its place for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_vlm.serve.http.request_limits import RequestLimits


class Connection(H11Protocol):
    """The HTTP protocol of uvicorn with two more timeouts: one for the headers of a request, and
    one for a client that does not read its response."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.answer_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._late)
        _cancel(self._unread)

    @property
    def _limits(self) -> RequestLimits:
        app: Any = self.config.app
        return app.state.context.limits

    def _watch(self) -> None:
        """Start the timeout for the headers of a request, or cancel it once they have arrived."""
        if not (self.cycle is None or self.cycle.response_complete):
            _cancel(self._late)
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self._limits.headers_seconds, self._end)

    def _end(self) -> None:
        self._late = None
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
