# .venv/bin/python -m pytest tests/commands/test_coloured_shapes.py
"""Tests of the demo set. Their reference looks at the pixels of the files and answers every
question again."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_vlm.cli import main
from megatron_vlm.commands.demo.coloured_shapes import (
    COLOURS,
    FACTS,
    RECORD_KINDS,
    SHAPES,
    ShapesSpec,
    write_shapes,
)
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises
from tests.support.suites import full

SPEC = ShapesSpec(train=400, eval=160)
PAIRS = [f"What colour is the shape in the {which} picture?" for which in ("first", "second")]


@dataclass(frozen=True)
class Seen:
    """A shape that the reference recognises in the pixels."""

    colour: str
    name: str
    x: float
    y: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shapes") / "set"
    write_shapes(out, SPEC)
    return out


def records(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def files(folder: Path) -> dict[Path, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def open_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def image_paths(record: dict) -> list[str]:
    return [part["image"] for part in record["messages"][0]["content"] if part["type"] == "image"]


def turns(record: dict) -> list[tuple[str, str]]:
    pairs = zip(record["messages"][::2], record["messages"][1::2], strict=True)
    return [(user["content"][-1]["text"], assistant["content"]) for user, assistant in pairs]


def look(path: Path) -> list[Seen]:
    """Return the connected areas of each colour. The fraction of its box that an area fills tells
    its shape."""
    pixels = np.asarray(open_image(path))
    shapes = []
    for colour, rgb in COLOURS.items():
        remaining = np.pad((pixels == rgb).all(-1), 1)
        while remaining.any():
            area = np.zeros_like(remaining)
            area[np.unravel_index(remaining.argmax(), remaining.shape)] = True
            size = 0
            while area.sum() > size:
                size = area.sum()
                for axis in (0, 1):
                    area |= np.roll(area, 1, axis) | np.roll(area, -1, axis)
                area &= remaining
            rows, columns = np.nonzero(area)
            box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
            fill = size / box
            name = SHAPES[1 if fill > 0.95 else 0 if fill > 0.7 else 2 if fill > 0.45 else 3]
            x, y = (columns.min() + columns.max()) / 2 - 1, (rows.min() + rows.max()) / 2 - 1
            shapes.append(Seen(colour, name, x, y))
            remaining &= ~area
    return shapes


def answer(text: str, pictures: list[list[Seen]], sizes: list[tuple[int, int]]) -> str:
    """Return the answer according to the pixels. A question about `the red one` fails if there are
    two."""
    if not pictures:
        return FACTS[text]
    shapes = pictures[0]
    if match := re.fullmatch(r"What colour is the shape in the (first|second) picture\?", text):
        assert len(pictures) == 2
        (one,) = pictures[0 if match[1] == "first" else 1]
        return one.colour
    assert len(pictures) == 1
    if text == "How many shapes are there?":
        return str(len(shapes))
    if match := re.fullmatch(r"How many (\w+) shapes are there\?", text):
        return str(sum(shape.colour == match[1] for shape in shapes))
    if match := re.fullmatch(r"What shape is the (\w+) one\?", text):
        (one,) = [shape for shape in shapes if shape.colour == match[1]]
        return one.name
    if match := re.fullmatch(r"What colour is the (\w+)\?", text):
        (one,) = [shape for shape in shapes if shape.name == match[1]]
        return one.colour
    match = re.fullmatch(r"Where is the (\w+): (left or right|top or bottom)\?", text)
    (one,) = [shape for shape in shapes if shape.name == match[1]]
    before, after = match[2].split(" or ")
    off_centre = one.x - sizes[0][0] / 2 if before == "left" else one.y - sizes[0][1] / 2
    assert abs(off_centre) >= 11
    return before if off_centre < 0 else after


@pytest.mark.parametrize("split", [full("train"), "eval"])
def test_every_answer_is_what_the_pixels_say(folder, split):
    for record in records(folder, split):
        paths = [folder / path for path in image_paths(record)]
        sizes = [open_image(path).size for path in paths]
        pictures = [look(path) for path in paths]
        for text, reply in turns(record):
            assert reply == answer(text, pictures, sizes), (paths, text, reply)


def test_a_record_has_the_form_of_openai(folder):
    by_kind = {}
    for record in records(folder, "train"):
        by_kind.setdefault(record["kind"], record)
        assert set(record) == {"messages", "kind"}
        for index, message in enumerate(record["messages"]):
            assert message["role"] == ("assistant" if index % 2 else "user")
            types = ["text"] if index else ["image"] * len(image_paths(record)) + ["text"]
            if message["role"] == "user":
                assert [part["type"] for part in message["content"]] == types
    assert set(by_kind) == set(RECORD_KINDS)
    counts = {kind: (len(image_paths(r)), len(turns(r))) for kind, r in by_kind.items()}
    chat = counts.pop("chat")
    assert chat[0] == 1 and chat[1] in (2, 3)
    assert counts.pop("pair") == (2, 1) and counts.pop("text") == (0, 1)
    assert set(counts.values()) == {(1, 1)}
    image, text = by_kind["count"]["messages"][0]["content"]
    assert re.fullmatch(r"images/\d{6}\.png", image["image"]) and set(text) == {"type", "text"}


def test_splits_share_no_picture_and_all_files_are_used_once(folder):
    named = [
        path
        for split in ("eval", "train")
        for r in records(folder, split)
        for path in image_paths(r)
    ]
    assert sorted(named) == sorted(f"images/{file.name}" for file in folder.glob("images/*"))
    assert named == [f"images/{index + 1:06d}.png" for index in range(len(named))]
    pixels = set()
    for path in named:
        image = open_image(folder / path)
        assert image.mode == "RGB"
        assert set(image.size) <= {64, 96, 100}
        pixels.add((image.size, image.tobytes()))
    assert len(pixels) == len(named)
    sizes = [size for size, _ in pixels]
    assert any(w != h for w, h in sizes) and any(w % 32 or h % 32 for w, h in sizes)


def test_easy_records_have_one_shape_and_pictures_of_their_own(tmp_path):
    spec = ShapesSpec(train=60, eval=20, easy=90)
    write_shapes(tmp_path / "set", spec)
    easy = records(tmp_path / "set", "easy")
    assert len(easy) == 90
    kinds = Counter(record["kind"] for record in easy)
    assert set(kinds) == {"shape"}
    images = [record["messages"][0]["content"][0]["image"] for record in easy]
    assert len(set(images)) == 90
    for image in images:
        assert len(look(tmp_path / "set" / image)) == 1
    # The other splits are the same as without it.
    write_shapes(tmp_path / "less", ShapesSpec(train=60, eval=20))
    for split in ("train", "eval"):
        assert records(tmp_path / "set", split) == records(tmp_path / "less", split)


def test_answers_are_balanced_within_every_way_to_ask(folder):
    for split, slack in (("train", 3), ("eval", 2)):
        replies_by_form: dict[str, Counter] = {}
        for record in records(folder, split):
            for text, reply in turns(record):
                words = "|".join([*COLOURS, *SHAPES])
                form = "fact" if text in FACTS else re.sub(words, "_", text)
                replies_by_form.setdefault(form, Counter())[reply] += 1
        assert {form: set(replies) for form, replies in replies_by_form.items()} == {
            "What colour is the _?": set(COLOURS),
            "What shape is the _ one?": set(SHAPES),
            "How many shapes are there?": {"1", "2", "3"},
            "How many _ shapes are there?": {"1", "2", "3"},
            "Where is the _: left or right?": {"left", "right"},
            "Where is the _: top or bottom?": {"top", "bottom"},
            **{form: set(replies_by_form[form]) for form in PAIRS},  # fewer questions than colours
            "fact": set(replies_by_form["fact"]),
        }
        for form, replies in replies_by_form.items():
            assert max(replies.values()) - min(replies.values()) <= slack, (split, form, replies)


def test_shares_of_the_kinds(folder):
    kinds = Counter(record["kind"] for record in records(folder, "train"))
    assert all(abs(kinds[kind] / 4 - RECORD_KINDS[kind]) < 5 for kind in RECORD_KINDS), kinds


def test_no_chat_says_an_answer_before_it_is_asked_for(folder):
    for record in records(folder, "train"):
        earlier = ""
        for text, reply in turns(record):
            assert reply not in earlier
            earlier += text + reply


def test_same_seed_same_bytes(tmp_path):
    small = ShapesSpec(train=30, eval=10, seed=5)
    write_shapes(tmp_path / "a", small)
    write_shapes(tmp_path / "b", small)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    write_shapes(tmp_path / "c", ShapesSpec(train=30, eval=10, seed=6))
    a, c = (records(tmp_path / name, "train") for name in "ac")
    assert a != c
    # The evaluation records do not depend on the number of training records that follow.
    write_shapes(tmp_path / "d", ShapesSpec(train=60, eval=10, seed=5))
    assert records(tmp_path / "d", "eval") == records(tmp_path / "a", "eval")


def test_a_set_can_be_narrowed(tmp_path):
    spec = ShapesSpec(40, 0, 0, 1, ("colour", "position"), max_shapes=1, sides=(96,))
    write_shapes(tmp_path / "one", spec)
    train_records = records(tmp_path / "one", "train")
    assert {record["kind"] for record in train_records} == {"colour", "position"}
    for record in train_records:
        (path,) = image_paths(record)
        assert open_image(tmp_path / "one" / path).size == (96, 96)
        assert len(look(tmp_path / "one" / path)) == 1
    assert (tmp_path / "one" / "eval.jsonl").read_text() == ""
    words = ["--train", "5", "--eval", "0", "--sides", "120"]
    main(["demo", "shapes", *words, "--out", str(tmp_path / "large")])
    images = list((tmp_path / "large" / "images").iterdir())
    assert {open_image(path).size for path in images} == {(120, 120)}
    write_shapes(tmp_path / "nine", ShapesSpec(20, 0, 0, 1, ("count",), 9, (96,)))
    assert {reply for r in records(tmp_path / "nine", "train") for _, reply in turns(r)} > {
        "8",
        "9",
    }


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ShapesSpec(kinds=("color",)), r"kinds=\[color\]; choose from colour, shape"),
        (ShapesSpec(kinds=()), r"kinds=\[\]"),
        (ShapesSpec(kinds=("chat", "text")), "a chat also needs one of colour"),
        (ShapesSpec(train=-1), "train=-1"),
        (ShapesSpec(sides=(24, 96)), r"sides=\[24,96\]: .*24, 28.* 32 pixels"),
        (ShapesSpec(sizes=(8, 32)), r"sizes=\[8,32\]; give 16 or more"),
        (ShapesSpec(step=0), "step=0"),
        (ShapesSpec(sides=()), r"sides=\[\]"),
        (ShapesSpec(max_shapes=1), r"max_shapes=1: .* need at least 2"),
        (ShapesSpec(max_shapes=10), r"max_shapes=10: .* room for 9"),
        (ShapesSpec(max_shapes=5, sides=(64, 90)), r"max_shapes=5: .* room for 4"),
        (
            ShapesSpec(kinds=("position",), max_shapes=1, sides=(48,), sizes=(44,)),
            "train=2000: after 0 pictures .* 'position'",
        ),
        (
            ShapesSpec(train=40, kinds=("colour",), max_shapes=1, sides=(48,), sizes=(44,)),
            "train=40: after 32 pictures .* 'colour'; lower train",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, spec, words):
    with pytest.raises(ConfigError, match=words):
        write_shapes(tmp_path / "out", spec)


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    with raises(ConfigError, place=str(tmp_path), remedy_has="a new folder"):
        write_shapes(tmp_path, SPEC)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
