"""Decompression of bodies that arrive compressed by zstd."""

import zstandard

from megatron_vlm.serve.protocol.payloads import RequestError

# The largest window that HTTP allows for zstd (RFC 9659). The decompressor would allocate more for
# a frame that requests it.
MAX_WINDOW = 2**23
# Several consecutive frames are allowed. A body of nothing but empty frames is not.
MAX_ZSTD_FRAMES = 1000
# Bytes that are decompressed at once. Four bytes may encode a block of 128 KiB, so these yield at
# most 8 MiB.
_STEP = 256
_PLACE = "the packed body"


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Decompress the zstd frames in `body`. More than `max_bytes` bytes are refused as soon as they
    appear."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    content = bytearray()
    at = frames = 0
    while at < len(body) or not frames:
        frame = decompressor.decompressobj()
        frames += 1
        if frames > MAX_ZSTD_FRAMES:
            raise RequestError(
                f"has more than {MAX_ZSTD_FRAMES} zstd frames",
                place=_PLACE,
                remedy="pack it into one frame",
            )
        while not frame.eof:
            piece = body[at : at + _STEP]
            if not piece:
                raise RequestError(
                    f"is cut off after {len(body)} bytes",
                    place=_PLACE,
                    remedy="send the whole zstd frame",
                )
            try:
                content += frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise RequestError(
                    f"has no zstd frame at byte {at} that can be unpacked ({error})",
                    place=_PLACE,
                    remedy=f"pack it with a window of at most {MAX_WINDOW} bytes, or send it as "
                    "it is",
                ) from error
            if len(content) > max_bytes:
                raise RequestError(
                    f"has {len(body)} bytes that unpack to more than the limit of {max_bytes}",
                    place=_PLACE,
                    remedy="send fewer datums in a request",
                )
            at += len(piece) - len(frame.unused_data)
    return bytes(content)
