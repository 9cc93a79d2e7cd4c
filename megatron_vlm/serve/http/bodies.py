"""Request bodies, read within their limits."""

import asyncio

import zstandard
from starlette.requests import ClientDisconnect, Request

from megatron_vlm.serve.http.request_limits import RequestLimits
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.protocol.compression import MAX_WINDOW, decompress
from megatron_vlm.serve.protocol.payloads import RequestError

_HEAD = 4096
BACKGROUND = 2**18  # bytes; larger bodies are decompressed and parsed in a thread


class Unreadable(Exception):  # noqa: N818
    """An error for a body that exceeds a limit or cannot be decoded. `head` holds its first bytes,
    which may identify the call."""

    def __init__(self, status: int, text: str, head: bytes) -> None:
        super().__init__(text)
        self.status, self.text, self.head = status, text, head


class Bodies:
    """A reader of bodies. `held` counts the bytes that are being received, `received` all bytes so
    far."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.held = 0
        self.received = 0

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
            raise Unreadable(
                413,
                f"the body has more than {max_bytes} bytes, which is limit {limit}; send less in a "
                "request",
                _head(body) if packed == "zstd" else bytes(body[:_HEAD]),
            )
        if packed == "identity":
            return bytes(body)
        # Most requests have one limit, compressed or not. A batch compresses well, so its
        # decompressed body has a limit of its own.
        return await self._decompress(
            bytes(body), self._limits.unpacked_bytes if limit == "body_bytes" else max_bytes
        )

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
            if discarded > max_bytes or (is_too_long and len(body) >= min(_HEAD, max_bytes)):
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

    async def _decompress(self, body: bytes, max_bytes: int) -> bytes:
        try:
            if len(body) < BACKGROUND:
                return decompress(body, max_bytes)
            return await asyncio.to_thread(decompress, body, max_bytes)
        except RequestError as error:
            raise Unreadable(422, str(error), _head(body)) from error


def _head(body: bytes | bytearray) -> bytes:
    """Return the first bytes of a compressed body, decompressed, or no bytes if they cannot be
    read."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        return decompressor.stream_reader(body).read(_HEAD)
    except zstandard.ZstdError:
        return b""


def place_of(head: bytes) -> tuple[str, int] | None:
    """Return the model_id and seq_id at the beginning of a ForwardBackwardRequest, or None. The
    request may be cut off or wrong after them. Without them, the model's later calls would wait for
    ever for a number that never comes."""
    if head[:1] != b"\x0a":
        return None
    size, at = _varint(head, 1)
    name = head[at : at + size]
    if len(name) != size or head[at + size : at + size + 1] != b"\x10":
        return None
    seq, end = _varint(head, at + size + 1)
    try:
        return (name.decode(), seq) if end and 0 < seq < 2**31 else None
    except UnicodeDecodeError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and the position after it, or (0, 0) if there is none."""
    value = 0
    for i, byte in enumerate(data[at : at + 5]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    return 0, 0
