"""The body of a request, within its limits."""

import asyncio

import zstandard
from starlette.requests import ClientDisconnect, Request

from megatron_vlm.serve.http.request_limits import RequestLimits
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.protocol.compression import MOST_WINDOW, decompress
from megatron_vlm.serve.protocol.payloads import RequestError

_HEAD = 4096
BACKGROUND = 2**18  # bytes from which a body is unpacked and read beside the loop


class Unreadable(Exception):  # noqa: N818
    """The body is above a limit, or not what its headers say. Its first bytes may tell which call
    it would have been."""

    def __init__(self, status: int, text: str, head: bytes) -> None:
        super().__init__(text)
        self.status, self.text, self.head = status, text, head


class Bodies:
    """Receives bodies, and knows how many bytes of them there are at the moment."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.held = 0
        self.received = 0

    async def read(self, request: Request, limit: str) -> bytes:
        """The body as it was before it was packed; `limit` is the one of its bytes."""
        most = getattr(self._limits, limit)
        packed = request.headers.get("content-encoding", "identity").strip().lower()
        if packed not in ("identity", "zstd"):
            raise HttpError(
                415, f"Content-Encoding {packed[:40]!r}: send zstd, or the body as it is"
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                whole = await self._receive(request, body, most)
        except TimeoutError as error:
            seconds = self._limits.body_seconds
            raise HttpError(
                408, f"the body was not there after {seconds:g} s, which is limit body_seconds"
            ) from error
        except ClientDisconnect as error:
            raise HttpError(400, "the connection ended within the body") from error
        finally:
            self.held -= len(body)
        if not whole:
            raise Unreadable(
                413,
                f"the body has more than {most} bytes, which is limit {limit}; send less in a "
                "request",
                _head(body) if packed == "zstd" else bytes(body[:_HEAD]),
            )
        if packed == "identity":
            return bytes(body)
        # Packed or not, of most requests as much is read; data of a batch packs well.
        return await self._unpacked(
            bytes(body), self._limits.unpacked_bytes if limit == "body_bytes" else most
        )

    async def _receive(self, request: Request, body: bytearray, most: int) -> bool:
        """Up to the limit, and whether that was all. As much again is read and forgotten: a client
        that is answered in the middle of its body takes it for a lost connection, and sends it
        again."""
        forgotten = 0
        announced = request.headers.get("content-length", "0")
        hopeless = not announced.isascii() or len(announced) > 15 or int(announced) > 2 * most
        async for chunk in request.stream():
            self.received += len(chunk)
            if len(body) <= most:
                self._hold(len(chunk))
                body += chunk
            else:
                forgotten += len(chunk)
            if forgotten > most or (hopeless and len(body) >= min(_HEAD, most)):
                return False
        return len(body) <= most

    def _hold(self, size: int) -> None:
        if self.held + size > self._limits.bodies_bytes:
            raise HttpError(
                429,
                f"{self.held} bytes are being received, and limit bodies_bytes is "
                f"{self._limits.bodies_bytes}",
            )
        self.held += size

    async def _unpacked(self, body: bytes, most: int) -> bytes:
        try:
            if len(body) < BACKGROUND:
                return decompress(body, most)
            return await asyncio.to_thread(decompress, body, most)
        except RequestError as error:
            raise Unreadable(422, str(error), _head(body)) from error


def _head(body: bytes | bytearray) -> bytes:
    """The first bytes of what is packed; none where they cannot be read."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    try:
        return decompressor.stream_reader(body).read(_HEAD)
    except zstandard.ZstdError:
        return b""


def place_of(head: bytes) -> tuple[str, int] | None:
    """The model_id and seq_id at the beginning of a ForwardBackwardRequest, which may be cut off
    or wrong after them: its calls would wait for ever for a number that never comes."""
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
    """A number and the place after it; (0, 0) where there is none."""
    value = 0
    for i, byte in enumerate(data[at : at + 5]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    return 0, 0
