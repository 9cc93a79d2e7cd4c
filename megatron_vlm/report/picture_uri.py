"""Pictures as data URIs, which a page shows without another file."""

import base64
import io

import numpy as np
import PIL.Image

_PREVIEW_SIDE = 640  # pixels
_PREVIEW_PNG_LENGTH = 2**16  # characters of a PNG, above which a JPEG takes its place
_JPEG_QUALITY = 85


def data_uri(pixels: np.ndarray) -> str:
    """Return a picture [height, width, 3] as a data URI. PNG keeps every pixel."""
    return picture_uri(PIL.Image.fromarray(pixels))


def preview_uri(pixels: np.ndarray) -> str:
    """Return a picture as a data URI of at most _PREVIEW_SIDE pixels a side. JPEG takes the place
    of PNG where that would be large."""
    image = PIL.Image.fromarray(pixels)
    image.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    uri = picture_uri(image)
    is_short = len(uri) <= _PREVIEW_PNG_LENGTH
    return uri if is_short else picture_uri(image, "JPEG", quality=_JPEG_QUALITY)


def picture_uri(image: PIL.Image.Image, kind: str = "PNG", **options: int) -> str:
    """Return a picture as a data URI."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
