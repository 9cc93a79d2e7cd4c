"""Bodies that arrive packed by zstd."""

import zstandard

from megatron_vlm.serve.protocol.payloads import RequestError

# What HTTP allows for zstd (RFC 9659). A frame that asks for more would have it allocated.
MOST_WINDOW = 2**23
# Several frames after one another are allowed; a body of nothing but empty ones is not.
MOST_FRAMES = 1000
# Unpacked at once: four bytes may stand for a block of 128 KiB, so these for 8 MiB at most.
_STEP = 256
_PLACE = "the packed body"


def decompress(body: bytes, most: int) -> bytes:
    """The content of the zstd frames in `body`; more than `most` bytes are refused as soon as they
    appear."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    found = bytearray()
    at = frames = 0
    while at < len(body) or not frames:
        frame = decompressor.decompressobj()
        frames += 1
        if frames > MOST_FRAMES:
            raise RequestError(
                f"has more than {MOST_FRAMES} zstd frames",
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
                found += frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise RequestError(
                    f"has no zstd frame at byte {at} that can be unpacked ({error})",
                    place=_PLACE,
                    remedy=f"pack it with a window of at most {MOST_WINDOW} bytes, or send it as "
                    "it is",
                ) from error
            if len(found) > most:
                raise RequestError(
                    f"has {len(body)} bytes that unpack to more than the limit of {most}",
                    place=_PLACE,
                    remedy="send fewer datums in a request",
                )
            at += len(piece) - len(frame.unused_data)
    return bytes(found)
