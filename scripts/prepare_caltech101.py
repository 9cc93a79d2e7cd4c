"""Caltech-101 as questions about the subject of a photo.

    python scripts/prepare_caltech101.py 101_ObjectCategories --out data/caltech101
    python scripts/prepare_caltech101.py NAME_OR_FOLDER --out data/caltech101

The source is the folder of the original archive (CLASS/*.jpg), or a data set with the columns image
and label. The script writes OUT/train.jsonl, OUT/eval.jsonl and OUT/images: RGB, longest side at
most 480. The same fraction of each class goes to eval. Corrupt images are left out and counted.
OUT/classes.txt has the names of all classes, one on each line, for eval.candidates.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from prepare import Output, holds_tables, open_dataset, output, rgb_picture, run

from megatron_vlm import ConfigError, DataError

LONGEST = 480
QUESTION = "What is the name of the subject in this photo?"
ANSWER = "The subject in this photo is: {}"


@dataclass(frozen=True)
class Photo:
    """A photo that is not read yet."""

    where: str  # place that messages name
    label: str
    image: Callable[[], Any]  # returns the file, as `datasets` does without decoding


def main(argv: list[str]) -> None:
    """Parse the arguments and write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="101_ObjectCategories, or a data set's name or folder")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--split", default="train", help="of a data set (default: train)")
    parser.add_argument("--eval-fraction", type=float, default=0.1, help="default: 0.1")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the order")
    parser.add_argument("--background", action="store_true", help="include BACKGROUND_Google")
    args = parser.parse_args(argv)
    if not 0 <= args.eval_fraction < 1:
        raise ConfigError(
            key="--eval-fraction", found=args.eval_fraction, allowed="at least 0 and less than 1"
        )
    splits = ["train", "eval"] if args.eval_fraction else ["train"]
    with output(args.out, splits) as result:
        photos = find_photos(args.source, args.split)
        if not args.background:
            photos = [photo for photo in photos if photo.label.lower() != "background google"]
        held_out = eval_indices([photo.label for photo in photos], args.eval_fraction, args.seed)
        order = list(range(len(photos)))
        random.Random(args.seed).shuffle(order)  # so that any part of the file has all classes
        for index in order:
            add_photo(result, "eval" if index in held_out else "train", index, photos[index])
    names = sorted({photo.label for photo in photos})
    (result.folder / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    print(f"{len(names)} names in {result.folder / 'classes.txt'}")


def add_photo(result: Output, split: str, index: int, photo: Photo) -> None:
    """Write the record of a photo, or count why it is left out."""
    try:
        picture = rgb_picture(photo.image(), photo.where, LONGEST)
    except DataError as error:
        return result.skip("with a corrupt image", str(error))
    result.add(split, f"{index:06d}", [picture], [(QUESTION, ANSWER.format(photo.label))])


def find_photos(source: str, split: str) -> list[Photo]:
    """Return the photos of a folder or data set, in its order."""
    folder = Path(source)
    if (folder / "101_ObjectCategories").is_dir():
        folder /= "101_ObjectCategories"
    if not folder.is_dir() or holds_tables(folder):
        return _from_dataset(open_dataset(source, None, split, streaming=False))
    paths = [
        path for path in sorted(folder.glob("*/*")) if path.suffix.lower() in (".jpg", ".jpeg")
    ]
    if not paths:
        raise ConfigError(
            "has no CLASS/*.jpg", place=str(folder), remedy="give the folder 101_ObjectCategories"
        )
    return [
        Photo(
            where=f"{path.parent.name}/{path.name}",
            label=path.parent.name.replace("_", " "),
            image=partial(dict, path=str(path)),
        )
        for path in paths
    ]


def _from_dataset(dataset: Any) -> list[Photo]:
    label = dataset.features.get("label")
    if "image" not in dataset.features or not isinstance(label, datasets.ClassLabel):
        raise ConfigError(
            f"the columns are {dataset.features}; give a data set with image and a ClassLabel label"
        )
    names = [name.replace("_", " ") for name in label.names]
    labels = list(dataset["label"])
    bad = next((row for row, value in enumerate(labels) if value is None or value < 0), None)
    if bad is not None:  # test splits on the Hub have the label -1
        raise DataError(
            "is not a class",
            place=f"row {bad}",
            key="label",
            found=int(labels[bad]),
            remedy="choose another --split",
        )
    table = dataset.with_format("arrow")
    return [
        Photo(f"row {row}", names[value], partial(_image_of, table, row))
        for row, value in enumerate(labels)
    ]


def _image_of(table: Any, row: int) -> Any:
    return table[row].to_pylist()[0]["image"]


def eval_indices(labels: list[str], fraction: float, seed: int) -> set[int]:
    """Choose the photos to hold out: the fraction of each class, but at least one of two and never
    the whole class."""
    by_label: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        by_label.setdefault(label, []).append(index)
    held_out: set[int] = set()
    for label, members in by_label.items():
        count = min(max(1, round(fraction * len(members))), len(members) - 1) if fraction else 0
        # A generator for each class: leaving one class out does not change the split of the others.
        held_out.update(random.Random(f"{seed} {label}").sample(members, count))
    return held_out


if __name__ == "__main__":
    sys.exit(run(main))
