"""Pictures of coloured shapes: what is in them, and how it is drawn."""

import math
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLOURS = {
    "red": (230, 20, 20),
    "green": (20, 160, 50),
    "blue": (30, 60, 240),
    "yellow": (255, 230, 30),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "orange": (255, 130, 0),
    "purple": (160, 20, 150),
}
SHAPES = ("circle", "square", "triangle", "star")
_GREY = (128, 128, 128)


@dataclass(frozen=True, order=True)
class Shape:
    """A shape in the box (left, top, left + size, top + size)."""

    name: str
    colour: str
    left: int
    top: int
    size: int


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn. Its shapes are sorted, so that equal pictures are equal
    scenes."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def draw(scene: Scene) -> Image.Image:
    """Draw the picture. Edges are not smoothed: a pixel has the colour of a shape, or is grey."""
    image = Image.new("RGB", (scene.width, scene.height), _GREY)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        reach, fill = (shape.size - 1) / 2, COLOURS[shape.colour]
        x, y = shape.left + reach, shape.top + reach
        box = (x - reach, y - reach, x + reach, y + reach)
        if shape.name == "circle":
            pen.ellipse(box, fill=fill)
        elif shape.name == "square":
            pen.rectangle(box, fill=fill)
        elif shape.name == "triangle":
            pen.polygon(((box[0], box[3]), (box[2], box[3]), (x, box[1])), fill=fill)
        else:
            tips = [(reach * (0.45 if i % 2 else 1), i * math.pi / 5) for i in range(10)]
            pen.polygon([(x + r * math.sin(a), y - r * math.cos(a)) for r, a in tips], fill=fill)
    return image
