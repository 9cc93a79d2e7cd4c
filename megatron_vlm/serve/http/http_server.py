"""HTTP server that runs uvicorn in its own thread. The main thread keeps the signals."""

import asyncio
import resource
import socket
import threading
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.loopback import is_loopback_host
from megatron_vlm.serve.http.context import Front
from megatron_vlm.serve.http.request_bodies import RequestLimits

_STOP_SECONDS = 5
_OTHER_FILES = 256  # left for checkpoints and other files of the process


class FrontServer:
    """A server of the application on one port."""

    def __init__(self, app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> None:
        self._context: Front = app.state.context
        check_host(host, self._context.keys is not None)
        self._host, self._port = host, port
        limits = self._context.limits
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_connections(limits.connections),
            h11_max_incomplete_event_size=limits.header_bytes,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_STOP_SECONDS,
            backlog=1024,
        )
        self._server = uvicorn.Server(config)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Start the server and return its port."""
        assert self._thread is None, "a server is started once"
        self._socket = _bind_socket(self._host, self._port)
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise ConfigError(
                    ": the server could not be started", key="serve.port", found=self._port
                )
            time.sleep(0.01)
        return self._socket.getsockname()[1]

    def stop(self) -> None:
        """Answer the waiting requests and stop. Accepted calls stay in the journal."""
        if self._thread is not None:
            self._context.close()
            self._server.should_exit = True
            self._thread.join(_STOP_SECONDS + 10)
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        # `serve` would take over the signals of the main thread.
        asyncio.run(self._server._serve([self._socket] if self._socket else None))


def check_host(host: str, has_keys: bool) -> None:
    """Refuse an address that others reach, if there are no API keys."""
    if not has_keys and not is_loopback_host(f"[{host}]" if ":" in host else host):
        raise ConfigError(
            ": without keys everybody who reaches it may do everything",
            key="serve.host",
            found=host,
            remedy="set serve.keys=FILE, made with megatron-vlm serve --add-client NAME "
            "FILE, or serve on 127.0.0.1",
        )


def check_port(host: str, port: int) -> None:
    """Refuse a port at which this process cannot listen."""
    _bind_socket(host, port).close()


def _bind_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If the protocol of the socket is TCP, asyncio sends small responses at once. Otherwise each
    # takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot be used with serve.host={host} ({error.strerror})",
            key="serve.port",
            found=port,
            allowed="another, or 0 for a port that is free",
        ) from error
    return listener


def _connections(wanted: int) -> int:
    """Return `wanted`, or fewer connections if the process may not open enough files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(16, min(wanted, soft - _OTHER_FILES))


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
