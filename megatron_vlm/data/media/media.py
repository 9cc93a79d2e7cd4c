"""Opening pictures that a data set points to: bounded, inside their folder, refused by name.

`image_size` reads a header only, so that samples are planned before anything is decoded;
`read_image` gives RGB as Hugging Face's processors make it.
"""

import base64
import binascii
import io
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps

from megatron_vlm.data.media.fetch import fetch
from megatron_vlm.data.read.records import Image
from megatron_vlm.errors import DataError

MAX_ASPECT = 200  # Hugging Face's smart_resize refuses more
_ORIENTATION = 0x0112  # the EXIF tag; values from 5 on swap width and height


@dataclass(frozen=True)
class MediaPolicy:
    """What a record may point to."""

    root: str  # paths are relative to this folder and stay inside it
    allow_http: bool = False
    exif_orientation: bool = True  # turn pictures as their camera says, as transformers does


def resolve_path(source: str, policy: MediaPolicy, where: str) -> Path:
    """A path or file:// URL as a real path inside the root."""
    if source.startswith("file://"):
        source = urllib.parse.unquote(urllib.parse.urlsplit(source).path)
    root = Path(policy.root).resolve()
    try:
        path = (root / source).resolve()
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # too long, a NUL byte, a loop of links
        raise DataError(f"{where}: {source[:120]!r} is not a path: {error}") from error
    if not path.is_relative_to(root):
        raise DataError(
            f"{where}: {source} lies outside data.image_root={root}; move it there, or set "
            "data.image_root to a folder that holds all files"
        )
    if not is_file:
        raise DataError(f"{where}: no file {source} in data.image_root={root}")
    return path


def image_size(image: Image, policy: MediaPolicy, where: str) -> tuple[int, int]:
    """(height, width) as the decoded picture will have them, from its header alone."""
    with _opened(image, policy, where) as opened:
        width, height = opened.size
        # A PNG without EXIF in front of its pixels would be decoded to look behind them.
        known = opened.format != "PNG" or "exif" in opened.info
        turned = policy.exif_orientation and known and opened.getexif().get(_ORIENTATION, 1) >= 5
    return (width, height) if turned else (height, width)


def read_image(image: Image, policy: MediaPolicy, where: str) -> PIL.Image.Image:
    """The picture in RGB; a corrupt or truncated file is refused."""
    with _opened(image, policy, where) as opened:
        turned = PIL.ImageOps.exif_transpose(opened) if policy.exif_orientation else opened
        turned.load()
        return turned if turned.mode == "RGB" else turned.convert("RGB")


@contextmanager
def _opened(image: Image, policy: MediaPolicy, where: str) -> Iterator[PIL.Image.Image]:
    """The picture opened and closed again; what Pillow finds wrong inside names it."""
    try:
        with _open(image, policy, where) as opened:
            yield opened
    except (OSError, SyntaxError, EOFError, IndexError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: {image.name} cannot be decoded: {_first(error)}") from error


def _open(image: Image, policy: MediaPolicy, where: str) -> PIL.Image.Image:
    """The picture with its header read and its size checked, nothing decoded."""
    source: Any = image.source
    where = f"{where}: {image.name}"
    if isinstance(source, str):
        source = _open_source(source, policy, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            opened = (
                source if isinstance(source, PIL.Image.Image) else PIL.Image.open(_file(source))
            )
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        limit = PIL.Image.MAX_IMAGE_PIXELS
        raise DataError(
            f"{where} has more than {limit} pixels; make it smaller beforehand"
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{where} is not an image that can be opened: {_first(error)}") from error
    width, height = opened.size
    if max(width, height) > MAX_ASPECT * min(width, height):
        opened.close()
        raise DataError(
            f"{where} is {width} x {height} pixels; sides may differ by a factor of {MAX_ASPECT} "
            "at most: crop or drop it"
        )
    return opened


def _open_source(source: str, policy: MediaPolicy, where: str) -> bytes | Path:
    if source.startswith("data:"):
        return _data_uri(source, where)
    if source.startswith(("http://", "https://")):
        if not policy.allow_http:
            raise DataError(f"{where} is on the network; download it, or set data.allow_http=true")
        return fetch(source, where)
    return resolve_path(source, policy, where)


def _data_uri(uri: str, where: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(f"{where}: a data URI must be base64: data:image/png;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: the data URI is not base64: {error}") from error


def _file(source: bytes | Path) -> io.BytesIO | Path:
    # Pillow opens a path itself and closes it once the pixels are read.
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(" <_io")[0]
