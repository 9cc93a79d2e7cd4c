"""Request bodies, read within the limits of the service, and the error responses to requests that
are refused."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zstandard
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron_vlm.io.printable import escape_controls
from megatron_vlm.serve.protocol.payloads import (
    MAX_WINDOW,
    Datum,
    Picture,
    RequestError,
    decompress,
)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the service. A request above a limit is refused with the limit's name and value."""

    # limits of a request
    body_bytes: int = 256 * 2**20  # a forward_backward
    unpacked_bytes: int = 512 * 2**20
    sample_bytes: int = 64 * 2**20  # an asample
    form_bytes: int = 4 * 2**20  # any other request
    body_seconds: float = 120.0  # from its first to its last byte
    headers_seconds: float = 20.0
    header_bytes: int = 64 * 2**10
    data: int = 4096
    chunks: int = 1024  # per datum or prompt
    pictures: int = 64
    tokens: int = 2**20  # per datum or prompt, without its pictures
    pixels: int = 2**30  # all pictures of a request, as sent or resized, whichever is more
    waiting_pixels: int = 2**31  # all requests that are read before their turn
    # limits of a sample
    max_tokens: int = 2**16
    num_samples: int = 256
    top_k: int = 1024
    stop: int = 64
    # limits of a key at a time
    open_calls: int = 4096
    open_bytes: int = 4 * 2**30
    sessions: int = 256
    models: int = 64  # models of recently active clients
    snapshot_seconds: float = 1800.0  # a snapshot's life once the model has a newer one
    # limits of the server
    connections: int = 4096
    bodies_bytes: int = 2 * 2**30  # all bodies that are being received
    # limits of responses
    answer_seconds: float = 120.0  # a client's time to read a part of the response
    poll_seconds: float = 40.0
    url_seconds: float = 3600.0
    client_samples: int = 512  # samples that one client has in flight


def check_datums(data: tuple[Datum, ...], limits: RequestLimits) -> None:
    """Refuse a forward_backward that is too large, naming the datum."""
    if len(data) > limits.data:
        raise RequestError(f"has {len(data)} datums, and limit data is {limits.data}", key="data")
    for i, datum in enumerate(data):
        pictures = sum(isinstance(chunk, Picture) for chunk in datum.chunks)
        tokens = sum(len(c.tokens) for c in datum.chunks if not isinstance(c, Picture))
        check_chunks(f"data[{i}].model_input", len(datum.chunks), pictures, tokens, limits)


def check_chunks(
    where: str, chunks: int, pictures: int, tokens: int, limits: RequestLimits
) -> None:
    """Refuse too many chunks, pictures or tokens."""
    for name, count, maximum in (
        ("chunks", chunks, limits.chunks),
        ("pictures", pictures, limits.pictures),
        ("tokens", tokens, limits.tokens),
    ):
        if count > maximum:
            raise RequestError(f"has {count} {name}, and limit {name} is {maximum}", key=where)


_log = logging.getLogger(__name__)


class HttpError(Exception):
    """An error that becomes a response with this status. A client retries 408, 409, 429 and 5xx by
    itself."""

    def __init__(
        self,
        status: int,
        text: str,
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        """`param` and `code` are for OpenAI's clients: the field, and a name of the error."""
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers
        self.param, self.code = param, code


ErrorBody = Callable[[HttpError], dict[str, Any]]


def tinker_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an error. `error` and `detail` hold what happened and what to do;
    `category` is "server" from status 500 on, otherwise "user"."""
    kind, text = "server" if error.status >= 500 else "user", escape_controls(error.text)
    return {"error": text, "detail": text, "category": kind}


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error response."""
    return JSONResponse(tinker_error(HttpError(status, text)), status, headers)


def unsupported_path(path: str) -> str:
    """Return the message for a path that no route has."""
    return (
        f"{path[:200]} is not supported by this service; docs/serve.md lists what is, and a newer "
        "client may ask for what came after it"
    )


def add_handlers(
    app: FastAPI, body_at: Callable[[str], ErrorBody] = lambda _: tinker_error
) -> None:
    """Register handlers so that every failed request gets a JSON body. Paths that no route has get
    the body of their API."""

    @app.exception_handler(HttpError)
    async def refused(_: Request, error: HttpError) -> JSONResponse:
        headers = {name.replace("_", "-"): value for name, value in error.headers.items()}
        return refusal(error.status, error.text, headers)

    @app.exception_handler(RequestValidationError)
    async def query(_: Request, error: RequestValidationError) -> JSONResponse:
        where = error.errors()[0]
        return refusal(422, f"{where['loc'][-1]}: {where['msg']}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}"
        known = {404: unsupported_path(text), 405: unsupported_path(text)}
        told = HttpError(error.status_code, known.get(error.status_code, str(error.detail)))
        body = body_at(request.url.path)(told)
        return JSONResponse(body, told.status, dict(error.headers or {}))

    @app.exception_handler(sqlite3.Error)
    async def journal(_: Request, error: sqlite3.Error) -> JSONResponse:
        _log.error("the journal cannot be written: %s", error)
        return refusal(503, f"the journal cannot be written: {error}")

    @app.exception_handler(OSError)
    async def operating_system(request: Request, error: OSError) -> JSONResponse:
        # The operator sees the path. The client sends the request again.
        _log.error("%s: %s", request.url.path, error)
        reason = error.strerror or type(error).__name__
        return refusal(503, f"{request.url.path}: the server cannot read or write a file: {reason}")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # The server logs the traceback; a client need not see the server's files.
        return refusal(500, f"{request.url.path}: {type(error).__name__} in the server")


HEAD_BYTES = 4096
_BACKGROUND = 2**18  # bytes; larger bodies are decompressed and parsed in a thread
T = TypeVar("T")


class UnreadableError(HttpError):
    """A body that exceeds a limit or cannot be decoded. `head` has its first bytes, which may
    identify the call."""

    def __init__(self, status: int, text: str, head: bytes) -> None:
        super().__init__(status, text)
        self.head = head


class Bodies:
    """A reader of bodies."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.held = 0  # bytes that are being received
        self.received = 0  # all bytes so far

    async def read(self, request: Request, limit: str) -> bytes:
        """Read the body and decompress it. `limit` is the name of the limit on its bytes."""
        max_bytes = getattr(self._limits, limit)
        packed = request.headers.get("content-encoding", "identity").strip().lower()
        if packed not in ("identity", "zstd"):
            raise HttpError(
                415, f"Content-Encoding {packed[:40]!r}: send zstd, or the body as it is"
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                is_complete = await self._receive(request, body, max_bytes)
        except TimeoutError as error:
            seconds = self._limits.body_seconds
            raise HttpError(
                408, f"the body was not there after {seconds:g} s, which is limit body_seconds"
            ) from error
        except ClientDisconnect as error:
            raise HttpError(400, "the connection ended within the body") from error
        finally:
            self.held -= len(body)
        if not is_complete:
            raise UnreadableError(
                413,
                f"the body has more than {max_bytes} bytes, which is limit {limit}; send less in a "
                "request",
                _head(body) if packed == "zstd" else bytes(body[:HEAD_BYTES]),
            )
        if packed == "identity":
            return bytes(body)
        # Most requests have one limit, compressed or not. A batch compresses well, so its
        # decompressed body has a limit of its own.
        unpacked_bytes = self._limits.unpacked_bytes if limit == "body_bytes" else max_bytes
        try:
            return await parse_body(bytes(body), decompress, unpacked_bytes)
        except RequestError as error:
            raise UnreadableError(422, str(error), _head(body)) from error

    async def _receive(self, request: Request, body: bytearray, max_bytes: int) -> bool:
        """Receive the body up to the limit and return whether that was all of it. As many bytes
        again are read and discarded: a client that gets its response in the middle of its body
        takes that for a lost connection and sends the body again."""
        discarded = 0
        announced = request.headers.get("content-length", "0")
        is_too_long = (
            not announced.isascii() or len(announced) > 15 or int(announced) > 2 * max_bytes
        )
        async for chunk in request.stream():
            self.received += len(chunk)
            if len(body) <= max_bytes:
                self._hold(len(chunk))
                body += chunk
            else:
                discarded += len(chunk)
            if discarded > max_bytes or (is_too_long and len(body) >= min(HEAD_BYTES, max_bytes)):
                return False
        return len(body) <= max_bytes

    def _hold(self, size: int) -> None:
        if self.held + size > self._limits.bodies_bytes:
            raise HttpError(
                429,
                f"{self.held} bytes are being received, and limit bodies_bytes is "
                f"{self._limits.bodies_bytes}",
            )
        self.held += size


async def parse_body(body: bytes, parse: Callable[..., T], *values: Any) -> T:
    """Parse a body, in a thread if it is large."""
    if len(body) < _BACKGROUND:
        return parse(body, *values)
    return await asyncio.to_thread(parse, body, *values)


def _head(body: bytes | bytearray) -> bytes:
    """Return the first bytes of a compressed body, or no bytes if they cannot be decompressed."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        return decompressor.stream_reader(body).read(HEAD_BYTES)
    except zstandard.ZstdError:
        return b""
