"""Video files, read through PyAV: the number of frames, their size, and the frames themselves."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.errors import DataError, require_extra
from megatron_vlm.family.video_plan import VideoInfo
from megatron_vlm.io.untrusted import reason, require_file

# A decoder holds up to 17 frames, and a file of 1 MB can demand that many of any size.
MAX_FRAME_PIXELS = 4096 * 4096  # more than 4K, or the 5312 x 2988 of action cameras
# Only files that hold their own frames are read: a playlist could name any other file.
_OPEN_OPTIONS = {
    "max_pixels": str(MAX_FRAME_PIXELS),  # checked by the decoders for each frame
    "format_whitelist": "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg",
    "protocol_whitelist": "file",
}
_REMEDY = "re-encode it (ffmpeg -i OLD NEW.mp4) or drop it"


def probe_video(path: str | Path) -> VideoInfo:
    """Return the length, frame rate and upright size. The whole file is read, and decoded only if
    the count in its header may be wrong: outside MP4, or with packets that are not shown."""
    with _open_video(path) as (container, stream):
        fps = float(stream.average_rate) if stream.average_rate else None
        stated = stream.frames if "mp4" in container.format.name else 0
        packets = [(p.is_discard, p.is_corrupt) for p in container.demux(stream) if p.size]
    if len(packets) < stated or (packets and packets[-1][1]):
        raise DataError(
            f"holds {len(packets)} frames of {stated or 'more'}: it is cut off, or was trimmed "
            "without being encoded",
            place=str(path),
            remedy=_REMEDY,
        )
    frames = _decode_frames(path)
    first = next(frames, None)
    if first is None:
        raise DataError("has no frames", place=str(path), remedy="drop it")
    exact = len(packets) == stated and not any(hidden for hidden, _ in packets)
    count = stated if exact else 1 + sum(1 for _ in frames)
    if _quarter_turns(first) % 2:
        return VideoInfo(count, fps, first.width, first.height)
    return VideoInfo(count, fps, first.height, first.width)


def iter_frames(path: str | Path, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the frames with these ascending indices, upright as torchcodec 0.11 and Hugging Face
    have them, as RGB bytes [height, width, 3]. They come one at a time, because all frames of a
    video take gigabytes. Decoding begins at the start of the file: seeking misses frames in many
    files."""
    assert list(indices) == sorted(set(indices)), "indices must ascend"
    waiting = deque(indices)
    count = 0
    for count, frame in enumerate(_decode_frames(path), start=1):
        if waiting and count - 1 == waiting[0]:
            waiting.popleft()
            upright = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
            yield np.ascontiguousarray(upright)
        if not waiting:
            return
    raise DataError(
        f"ends after {count} frames, and frame {waiting[0]} is missing",
        place=str(path),
        remedy=_REMEDY,
    )


def _decode_frames(path: str | Path) -> Iterator[Any]:
    with _open_video(path) as (container, stream):
        yield from container.decode(stream)


def _quarter_turns(frame: Any) -> int:
    """Return the quarter turns, counter-clockwise, that make a frame upright, unless mirrored."""
    return round(frame.rotation / 90) % 4


@contextmanager
def _open_video(path: str | Path) -> Iterator[tuple[Any, Any]]:
    """Yield PyAV's container and its main video stream, and name the file in PyAV's errors."""
    require_extra("video", "av", kind=DataError, place=str(path))
    import av

    try:
        # Titles and the like are not read: some are not UTF-8. PyAV 19 keeps their bytes, and
        # has no such option.
        is_lenient = int(av.__version__.split(".")[0]) >= 19
        lenient = {} if is_lenient else {"metadata_errors": "ignore"}
        with av.open(str(require_file(path)), options=_OPEN_OPTIONS, **lenient) as container:
            stream = container.streams.best("video")
            if stream is None:
                raise DataError("has no video stream", place=str(path), remedy="drop it")
            if stream.codec_context is None:
                raise DataError("has an unknown codec", place=str(path), remedy=_REMEDY)
            stream.codec_context.options = {"max_pixels": _OPEN_OPTIONS["max_pixels"]}
            yield container, stream
    except av.FFmpegError as error:
        kinds = _OPEN_OPTIONS["format_whitelist"]
        raise DataError(
            f"cannot be read as a video ({kinds}, up to {MAX_FRAME_PIXELS} pixels a frame): "
            f"{error.strerror}",
            place=str(path),
            remedy=_REMEDY,
        ) from error
    except (UnicodeError, AttributeError, ValueError, ArithmeticError) as error:
        # PyAV raises these for headers that contradict themselves.
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"cannot be read as a video: {reason(error)}", place=str(path), remedy=_REMEDY
        ) from error
