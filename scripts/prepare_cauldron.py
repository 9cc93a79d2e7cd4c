"""A subset of the Cauldron (huggingface.co/datasets/HuggingFaceM4/the_cauldron) for training.

    python scripts/prepare_cauldron.py ai2d --out data/ai2d --limit 1000
    python scripts/prepare_cauldron.py ai2d --out data/ai2d --dataset FOLDER

The script writes OUT/train.jsonl and OUT/images. A row's images come before its first question.
Rows without images, with an empty question or answer, or with a corrupt image are left out and
counted.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from prepare import Output, open_dataset, output, rgb_picture, rows, run

from megatron_vlm import ConfigError, DataError


def main(argv: list[str]) -> None:
    """Parse the arguments and write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subset", help="for example ai2d or vqav2")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--limit", type=int, help="read only this many rows, as a stream")
    parser.add_argument(
        "--dataset",
        default="HuggingFaceM4/the_cauldron",
        help="another data set with these columns: a name, or a folder of save_to_disk or Parquet",
    )
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise ConfigError(
            key="--limit", found=args.limit, allowed="at least 1, or leave it out for all rows"
        )
    streaming = args.limit is not None or Path(args.dataset).is_dir()
    with output(args.out, ["train"]) as result:
        dataset = open_dataset(args.dataset, args.subset, args.split, streaming)
        for index, row in enumerate(islice(rows(dataset), args.limit)):
            add_row(result, index, row)


def add_row(result: Output, index: int, row: dict[str, Any]) -> None:
    """Write the record of a row, or count why it is left out."""
    if not {"images", "texts"} <= set(row):
        raise ConfigError(
            "has neither images nor texts", place=f"a row with the columns {', '.join(row)}"
        )
    turns = [(turn["user"] or "", turn["assistant"] or "") for turn in row["texts"] or []]
    if not row["images"]:
        return result.skip("without images", f"row {index}")
    if not turns or not all(text.strip() for turn in turns for text in turn):
        return result.skip("with an empty question or answer", f"row {index}")
    try:
        pictures = [
            rgb_picture(image, f"row {index}, image {i}") for i, image in enumerate(row["images"])
        ]
    except DataError as error:
        return result.skip("with a corrupt image", str(error))
    result.add("train", f"{index:06d}", pictures, turns)


if __name__ == "__main__":
    sys.exit(run(main))
