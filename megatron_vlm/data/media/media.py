"""Access to the pictures that a record points to, within limits and inside one folder. `image_size`
reads only a header; `read_image` gives RGB as Hugging Face's processors make it."""

import base64
import binascii
import io
import os
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps

from megatron_vlm.data.media.fetch import fetch
from megatron_vlm.data.records.record import Image
from megatron_vlm.errors import DataError
from megatron_vlm.family.images import MAX_ASPECT, check_aspect
from megatron_vlm.io.untrusted import path_remedy, real_path, what_is_at

# Pillow's other decoders are rarely needed and less often tested; that of EPS runs Ghostscript on
# a file of any name. JPEG includes the MPO files of phones.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
MAX_TILE_PIXELS = 4096 * 4096  # limit for a tile of a TIFF
_TILE_SIDES = (322, 323)  # the tags of a tile's width and height
_ORIENTATION = 0x0112  # the EXIF tag; values from 5 on swap width and height


@dataclass(frozen=True)
class MediaPolicy:
    """Limits on the sources of media that a record may name."""

    root: str | None  # paths are relative to this folder and stay inside it; None: no paths at all
    allow_http: bool = False
    exif_orientation: bool = True  # turn pictures upright by their EXIF tag, as transformers does
    max_aspect: float = MAX_ASPECT  # largest ratio of a picture's sides


def resolve_path(source: str, policy: MediaPolicy, where: str) -> Path:
    """Resolve a path or file:// URL to a real path inside the root."""
    if policy.root is None:
        raise DataError(
            f": {source[:120]!r} is a local file, and no folder is open to records",
            place=where,
            remedy="give the file's content (bytes or a data URI), or set image_root",
        )
    root = real_path(policy.root)
    try:
        if source.startswith("file://"):
            source = urllib.parse.unquote(urllib.parse.urlsplit(source).path)
        path = real_path(root / source)
        kind = what_is_at(path)
    except (OSError, ValueError) as error:  # too long, with a NUL byte, a loop of links
        raise DataError(f": {source[:120]!r} is not a path: {error}", place=where) from error
    if not path.is_relative_to(root):
        raise DataError(
            f": {source} lies outside data.image_root={root}",
            place=where,
            remedy="move it there, or set data.image_root to a folder that holds all files",
        )
    if kind != "a file":
        instead = "" if kind == "nothing" else f": it is {kind}"
        remedy = "" if instead else "set data.image_root to the folder at which its paths begin"
        remedy = path_remedy(source) if "\\" in source else remedy
        raise DataError(
            f": no file {source} in data.image_root={root}{instead}",
            place=where,
            remedy="set data.image_root=." if _is_file_here(source) else remedy,
        )
    return path


def _is_file_here(source: str) -> bool:
    """Return whether the working directory, where other trainers look, has this file."""
    try:
        here = real_path(os.getcwd())
        path = real_path(here / source)
        return path.is_relative_to(here) and what_is_at(path) == "a file"
    except (OSError, ValueError):
        return False


def image_size(image: Image, policy: MediaPolicy, where: str) -> tuple[int, int]:
    """Return the (height, width) of the picture once decoded, from its header alone."""
    with _open_image(image, policy, where) as opened:
        width, height = opened.size
        # Pillow would decode a PNG to look for EXIF after its pixels: only EXIF before them counts.
        # Pillow always turns a TIFF, and has already swapped its size.
        known = opened.format != "TIFF" and (opened.format != "PNG" or "exif" in opened.info)
        tag = opened.getexif().get(_ORIENTATION) if policy.exif_orientation and known else None
        turned = tag in (5, 6, 7, 8)  # width and height are swapped; a text is no orientation
    return (width, height) if turned else (height, width)


def read_image(image: Image, policy: MediaPolicy, where: str) -> PIL.Image.Image:
    """Return the picture in RGB. Corrupt and truncated files are refused."""
    with _open_image(image, policy, where) as opened:
        turned = PIL.ImageOps.exif_transpose(opened) if policy.exif_orientation else opened
        turned.load()
        return turned if turned.mode == "RGB" else turned.convert("RGB")


@contextmanager
def _open_image(image: Image, policy: MediaPolicy, where: str) -> Iterator[PIL.Image.Image]:
    """Open the picture and close it again; Pillow's errors in between are raised with its name."""
    try:
        opened = _open(image, policy, where)
        # A picture that came as a PIL image stays open: it belongs to the caller.
        with nullcontext(opened) if opened is image.source else opened:
            width, height = opened.size
            size, most = f"{width} x {height}", policy.max_aspect
            check_aspect(height, width, f"{where}: {image.name}", size, most)
            _check_tiles(opened, f"{where}: {image.name}")
            yield opened
    except Exception as error:  # decoders raise many kinds, even RuntimeError
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"cannot be decoded: {_first(error)}", place=f"{where}: {image.name}"
        ) from error


def _open(image: Image, policy: MediaPolicy, where: str) -> PIL.Image.Image:
    """Return the picture with its header read, but not decoded."""
    source: Any = image.source
    if isinstance(source, PIL.Image.Image):
        return source
    if isinstance(source, str):
        source = _open_source(source, policy, where, image.name)
    return open_picture(source, f"{where}: {image.name}")


def open_picture(source: bytes | Path, where: str) -> PIL.Image.Image:
    """Open the content or the path of a file as a picture. Its header is read, but nothing is
    decoded, and only FORMATS are tried. `where` is the place of an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            # Given a path, Pillow closes the file itself once the pixels are read.
            return PIL.Image.open(
                io.BytesIO(source) if isinstance(source, bytes) else source, formats=_formats()
            )
    except PIL.UnidentifiedImageError as error:
        raise DataError(
            f"is not an image that can be opened: it is none of {', '.join(_formats())}, or its "
            "header is damaged",
            place=where,
            remedy="convert it to one of them, or drop it",
        ) from error
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        limit = PIL.Image.MAX_IMAGE_PIXELS
        raise DataError(
            f"has more than {limit} pixels", place=where, remedy="shrink the file"
        ) from error
    except Exception as error:  # decoders raise many kinds
        raise DataError(
            f"is not an image that can be opened: {_first(error)}", place=where
        ) from error


@cache
def _formats() -> tuple[str, ...]:
    """Return the formats that this Pillow was built with: its older versions have no AVIF."""
    PIL.Image.init()
    return tuple(name for name in FORMATS if name in PIL.Image.OPEN)


def _check_tiles(opened: PIL.Image.Image, where: str) -> None:
    """Refuse a TIFF with huge tiles: each is decoded whole, however small the picture is."""
    tags = getattr(opened, "tag_v2", {}) if opened.format == "TIFF" else {}
    width, height = (int(tags.get(tag, 1)) for tag in _TILE_SIDES)
    if width * height > MAX_TILE_PIXELS:
        raise DataError(
            f"has tiles of {width} x {height} pixels, above the limit of {MAX_TILE_PIXELS} pixels",
            place=where,
            remedy="save it again",
        )


def _open_source(source: str, policy: MediaPolicy, where: str, name: str) -> bytes | Path:
    if source.startswith("data:"):
        return _decode_uri(source, f"{where}: {name}")
    if source.startswith(("http://", "https://")):
        if not policy.allow_http:
            raise DataError(
                f": {name} is on the network",
                place=where,
                remedy="download it, or set data.allow_http=true",
            )
        return fetch(source, f"{where}: {name}")
    return resolve_path(source, policy, where)


def _decode_uri(uri: str, where: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(
            ": a data URI must be base64", place=where, allowed="data:image/png;base64,..."
        )
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DataError(f": the data URI is not base64: {error}", place=where) from error


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(" <_io")[0]
