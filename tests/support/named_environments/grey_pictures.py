"""Greys as PNG, for the environments of this folder, which have nothing of ours."""

import base64
import io

from PIL import Image


def grey_png(*greys: int) -> str:
    """Return a picture with a square of 64 x 64 pixels for each grey, in base64."""
    image = Image.new("RGB", (64 * len(greys), 64))
    for place, grey in enumerate(greys):
        image.paste((grey,) * 3, (64 * place, 0, 64 * place + 64, 64))
    image.save(file := io.BytesIO(), "PNG")
    return base64.b64encode(file.getvalue()).decode()
