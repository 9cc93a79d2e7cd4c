"""The demo set: drawn pictures of coloured shapes, with questions that a tiny model learns in
minutes. Answers are balanced: a model that does not look at the picture scores no better than a
guess."""

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from megatron_vlm.errors import ConfigError

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


ABOUT_ONE_PICTURE = {"colour": 10, "shape": 14, "count": 14, "position": 16}
# Shares in per cent. A chat has two or three of the questions above about one picture. A pair has a
# question about one of two pictures, and a text has no picture.
RECORD_KINDS = {**ABOUT_ONE_PICTURE, "chat": 38, "pair": 5, "text": 3}
FACTS = {
    "What colour is a ripe tomato?": "red",
    "What colour is grass?": "green",
    "What colour is the sky on a clear day?": "blue",
    "What colour is a ripe banana?": "yellow",
    "What colour is coal?": "black",
    "What colour is snow?": "white",
    "What colour is a carrot?": "orange",
    "What colour is an aubergine?": "purple",
}
_MARGIN = 2  # pixels around a shape
_TRIES = 500
_CHOICE = 8  # pictures to choose from, so that rare answers come as often as others


@dataclass(frozen=True)
class ShapesSpec:
    """Number of records, and their variety."""

    train: int = 2000
    eval: int = 200
    easy: int = 0  # records to start with: one shape, and its name
    seed: int = 0
    kinds: tuple[str, ...] = tuple(RECORD_KINDS)
    max_shapes: int = 3
    # Share of the pictures with several shapes, apart from those for counting. A tiny model learns
    # to distinguish several shapes long after it has learned everything about one.
    crowded: float = 0.03
    sides: tuple[int, ...] = (64, 96, 100)  # sides of a picture, in pixels
    # With its margin a shape fits a square of 32 pixels, which is one token of an image. Shapes
    # that spread over several tokens take a tiny model many more pictures to learn.
    sizes: tuple[int, ...] = (24, 28)
    step: int = 1  # pixels from one possible position to the next

    @property
    def cell(self) -> int:
        """The side of a square that holds any shape with its margin."""
        return max(self.sizes) + 2 * _MARGIN


@dataclass(frozen=True)
class ShapeQuestion:
    """A question with its one right answer. Answers are balanced within a form."""

    form: str  # the kind, and the variant of its wording
    text: str
    answer: str

    @property
    def kind(self) -> str:
        return self.form.split()[0]


def write_shapes(out: str | Path, spec: ShapesSpec = ShapesSpec()) -> None:
    """Write OUT/eval.jsonl, OUT/train.jsonl, OUT/easy.jsonl and OUT/images. The same spec gives the
    same bytes. No two pictures are equal, within a split or across splits. The held-out set is
    written first, so that it does not depend on the number of training records."""
    _check(spec)
    easy = replace(spec, kinds=("shape",), max_shapes=1)
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            "is not empty", place=str(out), remedy="choose a new folder for the shapes"
        )
    (out / "images").mkdir(parents=True)
    used_scenes: set[Scene] = set()
    splits = [("eval", spec.eval, spec), ("train", spec.train, spec)]
    splits += [("easy", spec.easy, easy)] if spec.easy else []
    for split, count, split_spec in splits:
        maker = _Maker(split_spec, random.Random(f"{spec.seed} {split}"), used_scenes, out)
        lines = [json.dumps(maker.record()) + "\n" for _ in range(count)]
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="ascii")


def questions(scene: Scene) -> list[ShapeQuestion]:
    """Return the questions about a picture that are not ambiguous."""
    names = Counter(shape.name for shape in scene.shapes)
    colours = Counter(shape.colour for shape in scene.shapes)
    items = [ShapeQuestion("count all", "How many shapes are there?", str(len(scene.shapes)))]
    for colour, count in colours.items():
        text = f"How many {colour} shapes are there?"
        items.append(ShapeQuestion("count coloured", text, str(count)))
    for shape in scene.shapes:
        if colours[shape.colour] == 1:
            text = f"What shape is the {shape.colour} one?"
            items.append(ShapeQuestion("shape", text, shape.name))
        if names[shape.name] == 1:
            items.append(ShapeQuestion("colour", f"What colour is the {shape.name}?", shape.colour))
            for form, start, length, sides in (
                ("position x", shape.left, scene.width, ("left", "right")),
                ("position y", shape.top, scene.height, ("top", "bottom")),
            ):
                off_centre = start + shape.size / 2 - length / 2
                if abs(off_centre) >= shape.size / 2:  # the whole shape is on one side
                    text = f"Where is the {shape.name}: {sides[0]} or {sides[1]}?"
                    items.append(ShapeQuestion(form, text, sides[off_centre > 0]))
    return items


_Asked = tuple[tuple[Scene, ...], ShapeQuestion]


class _Maker:
    """Maker of the records of one split. It always chooses the answer that has come least often."""

    def __init__(self, spec: ShapesSpec, rng: random.Random, drawn: set[Scene], out: Path):
        self.spec, self.rng, self.drawn, self.out = spec, rng, drawn, out
        self.given: Counter[tuple[str, str]] = Counter()

    def record(self) -> dict[str, Any]:
        """Return the next record, and save its pictures."""
        kind = self.rng.choices(self.spec.kinds, [RECORD_KINDS[k] for k in self.spec.kinds])[0]
        topics = [k for k in self.spec.kinds if k in ABOUT_ONE_PICTURE]
        # A picture for counting has several shapes, so a chat begins with another question if
        # possible.
        first = [k for k in topics if k != "count"] or topics
        opening = self.rng.choice(first) if kind == "chat" else kind
        scenes, question = self._rarest_candidate(self._askable(opening))
        turns = [question]
        for _ in range(self.rng.choice((1, 2)) if kind == "chat" else 0):
            earlier = " ".join(turn.text + turn.answer for turn in turns)
            left = [q for q in questions(scenes[0]) if q.kind in topics and q.answer not in earlier]
            rare = [(scenes, q) for q in left if not self._comes_often(q)]
            turns += [self._rarest_candidate(rare)[1]] if rare else []
        content = [{"type": "image", "image": self._save(scene)} for scene in scenes]
        messages: list[dict[str, Any]] = []
        for turn in turns:
            content.append({"type": "text", "text": turn.text})
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": turn.answer})
            content = []
        return {"messages": messages, "kind": "chat" if len(turns) > 1 else question.kind}

    def _askable(self, kind: str) -> list[_Asked]:
        if kind == "text":
            return [((), ShapeQuestion(kind, text, answer)) for text, answer in FACTS.items()]
        for _ in range(_TRIES):
            fewest, max_count = self._how_many(kind)
            candidates = (self._scene(self.rng.randint(fewest, max_count)) for _ in range(_CHOICE))
            scenes = [scene for scene in candidates if scene not in self.drawn]
            options: list[_Asked] = [((s,), q) for s in scenes for q in questions(s)]
            options = [(chosen, q) for chosen, q in options if q.kind == kind]
            pairs = zip(scenes[::2], scenes[1::2], strict=False) if kind == "pair" else ()
            for pair in pairs:
                for which, scene in zip(("first", "second"), pair, strict=True):
                    text = f"What colour is the shape in the {which} picture?"
                    answer = scene.shapes[0].colour
                    options.append((pair, ShapeQuestion(f"pair {which}", text, answer)))
            if options:
                return options
        raise ConfigError(
            f": after {len(self.drawn)} pictures there is no other for a question of {kind!r}",
            key="train",
            found=self.spec.train,
            remedy=f"lower train and eval={self.spec.eval}, or widen sides={self.spec.sides}",
        )

    def _rarest_candidate(self, candidates: list[_Asked]) -> _Asked:
        times = [self.given[question.form, question.answer] for _, question in candidates]
        rarest = [c for c, count in zip(candidates, times, strict=True) if count == min(times)]
        scenes, question = self.rng.choice(rarest)
        self.given[question.form, question.answer] += 1
        return scenes, question

    def _comes_often(self, question: ShapeQuestion) -> bool:
        """Return whether its answer is ahead of others. One picture leaves a chat few questions."""
        counts = [n for (form, _), n in self.given.items() if form == question.form]
        return self.given[question.form, question.answer] > min(counts, default=0) + 1

    def _how_many(self, kind: str) -> tuple[int, int]:
        """Return the fewest and the most shapes in a picture for a question: mostly one."""
        max_shapes = self.spec.max_shapes
        if kind == "count":
            return 1, max_shapes
        if kind == "pair" or max_shapes == 1:
            return 1, 1
        return (2, max_shapes) if self.rng.random() < self.spec.crowded else (1, 1)

    def _scene(self, count: int) -> Scene:
        """Return a random picture: a grid with room for the largest shape, one to a cell."""
        rng, spec = self.rng, self.spec
        # A picture has few colours, so that it makes sense to count the shapes of one colour.
        palette = rng.sample(list(COLOURS), min(len(COLOURS), rng.randint(1, count)))
        columns = rows = 0
        while columns * rows < count:
            width, height = rng.choices(spec.sides, k=2)
            columns, rows = width // spec.cell, height // spec.cell
        shapes = []
        for place in rng.sample(range(columns * rows), count):
            size = rng.choice(spec.sizes)
            left = self._place_in_part(width, columns, place % columns, size)
            top = self._place_in_part(height, rows, place // columns, size)
            shapes.append(Shape(rng.choice(SHAPES), rng.choice(palette), left, top, size))
        return Scene(width, height, tuple(sorted(shapes)))

    def _place_in_part(self, length: int, parts: int, part: int, size: int) -> int:
        """Return a random start for an item of this size, in one of the equal parts of a length."""
        start, end = part * length // parts + _MARGIN, (part + 1) * length // parts - _MARGIN
        return self.rng.randrange(start, end - size + 1, self.spec.step)

    def _save(self, scene: Scene) -> str:
        self.drawn.add(scene)
        path = f"images/{len(self.drawn):06d}.png"
        draw(scene).save(self.out / path)
        return path


def _check(spec: ShapesSpec) -> None:
    topics = [kind for kind in spec.kinds if kind in ABOUT_ONE_PICTURE]
    if (
        not spec.kinds
        or not set(spec.kinds) <= set(RECORD_KINDS)
        or ("chat" in spec.kinds and not topics)
    ):
        raise ConfigError(
            key="kinds",
            found=spec.kinds,
            allowed=RECORD_KINDS,
            remedy=f"choose from {', '.join(RECORD_KINDS)}; a chat also needs one of "
            f"{', '.join(ABOUT_ONE_PICTURE)}",
        )
    for key in ("train", "eval", "easy"):
        if getattr(spec, key) < 0:
            raise ConfigError(key=key, found=getattr(spec, key), allowed="a count of 0 or more")
    if spec.step < 1:
        raise ConfigError(key="step", found=spec.step, allowed="1 or more")
    if min(spec.sizes, default=0) < 16:
        raise ConfigError(key="sizes", found=spec.sizes, allowed="16 or more each")
    if min(spec.sides, default=0) < spec.cell:
        raise ConfigError(
            f": sizes={list(spec.sizes)} need at least {spec.cell} pixels",
            key="sides",
            found=spec.sides,
        )
    room = (max(spec.sides) // spec.cell) ** 2
    fewest = 2 if "count" in spec.kinds else 1  # with one shape, every count is 1
    if not fewest <= spec.max_shapes <= room:
        raise ConfigError(
            f": kinds={spec.kinds} need at least {fewest}, and sides={spec.sides} have room for "
            f"{room} of sizes={spec.sizes}",
            key="max_shapes",
            found=spec.max_shapes,
        )
