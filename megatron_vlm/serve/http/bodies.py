"""Request bodies, read within their limits."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import zstandard
from starlette.requests import ClientDisconnect, Request

from megatron_vlm.serve.http.request_limits import RequestLimits
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.protocol.compression import MAX_WINDOW, decompress
from megatron_vlm.serve.protocol.payloads import RequestError

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
