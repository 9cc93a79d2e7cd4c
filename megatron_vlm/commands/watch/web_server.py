"""The uvicorn server of `megatron-vlm watch`, whose streams of events end with it."""

import uvicorn
from starlette.applications import Starlette

from megatron_vlm.commands.watch.monitor import Monitor

_STOP_SECONDS = 3


class WatchServer(uvicorn.Server):
    """A server that lets the streams go on to their end before it waits for them."""

    monitor: Monitor

    async def shutdown(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        await self.monitor.close()
        await super().shutdown(sockets)


def make_server(app: Starlette, monitor: Monitor) -> WatchServer:
    """Return the server, which is run with a socket that listens."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=500,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    server = WatchServer(config)
    server.monitor = monitor
    return server
