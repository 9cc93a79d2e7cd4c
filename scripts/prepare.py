"""Shared code of the prepare scripts: reading data sets, writing checked RGB images and JSON
lines."""

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import datasets
import numpy as np
import PIL.Image
import PIL.ImageOps

from megatron_vlm import ConfigError, DataError, MegatronVLMError
from megatron_vlm.data.media.media import MediaPolicy, image_size, open_picture
from megatron_vlm.data.records.record import Image
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.io.untrusted import require_file

_ORIENTATION = 0x0112  # the EXIF tag
_TABLES = ("state.json", "dataset_dict.json", "*.parquet", "data/*.parquet")


def run(main: Callable[[list[str]], None]) -> int:
    """Call main(argv). An error that the user can fix ends in one sentence, with status 2."""
    datasets.disable_progress_bars()
    try:
        main(sys.argv[1:])
    except MegatronVLMError as error:
        print(f"{Path(sys.argv[0]).name}: {escape_controls(str(error))}", file=sys.stderr)
        return 2
    return 0


def holds_tables(folder: Path) -> bool:
    """Return whether the folder itself has files that `open_dataset` can read."""
    return any(next(folder.glob(pattern), None) for pattern in _TABLES)


def open_dataset(name: str, subset: str | None, split: str, streaming: bool) -> Any:
    """Open a split of a data set: on the Hub, in a folder of save_to_disk, or in one of Parquet
    files. A subset may be a folder inside it."""
    folder = Path(name)
    if not folder.is_dir():
        return _load(name, subset, split=split, streaming=streaming)
    if subset and (folder / subset).is_dir():
        folder /= subset
    if not holds_tables(folder):
        inside = sorted(path.name for path in folder.iterdir())
        raise ConfigError(
            f"{folder} has no Parquet files and was not written by save_to_disk; it has "
            f"{inside[:20]}; give the folder of a data set, or one with a folder for each subset"
        )
    if not any((folder / state).is_file() for state in _TABLES[:2]):
        # With streaming, Parquet files are read in place and not copied into a cache.
        return _load(str(folder), split=split, streaming=streaming)
    dataset = datasets.load_from_disk(folder)
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise ConfigError(key="--split", found=split, place=str(folder), allowed=tuple(dataset))
    return dataset[split]


def _load(name: str, *args: str | None, **kwargs: Any) -> Any:
    try:
        return datasets.load_dataset(name, *args, **kwargs)
    except Exception as error:  # no connection, no such data set or split, unreadable files
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise ConfigError(f"`datasets` cannot load it: {reason}", place=name) from error


def rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows as Arrow has them. Their images are not decoded yet, so a corrupt one costs a
    row and not the run. (A cast to Image(decode=False) copies lists of images.)"""
    for table in dataset.with_format("arrow"):
        yield table.to_pylist()[0]


@dataclass(frozen=True)
class Picture:
    """An image file that every program shows upright and in RGB, and the suffix of its name."""

    content: bytes
    suffix: str


def rgb_picture(value: Any, where: str, longest: int | None = None) -> Picture:
    """Convert an undecoded image of `datasets`, of any mode, to RGB with no side above `longest`.
    An RGB JPEG or PNG stays as it is, byte for byte; other images become PNG. Raise DataError for
    an image that training would refuse (corrupt, too large, too thin)."""
    content = _image_bytes(value, where)
    try:
        image_size(Image(content), MediaPolicy(root="."), where)  # the same check as in training
        opened = open_picture(content, where)
        image = _to_rgb(PIL.ImageOps.exif_transpose(opened))
    except DataError:
        raise
    except Exception as error:  # each of Pillow's formats has its own errors
        raise DataError(f"the image cannot be decoded: {error}", place=where) from error
    scale = min(1.0, longest / max(image.size)) if longest else 1.0
    plain = opened.mode == "RGB" and not opened.has_transparency_data
    upright = opened.getexif().get(_ORIENTATION, 1) == 1
    if plain and upright and scale == 1.0 and opened.format in ("JPEG", "PNG"):
        return Picture(content, ".jpg" if opened.format == "JPEG" else ".png")
    if scale < 1.0:
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), PIL.Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(file.getvalue(), ".png")


def _image_bytes(value: Any, where: str) -> bytes:
    """Return the file of an undecoded image of `datasets`, which has its bytes or its path."""
    if not isinstance(value, dict) or not (value.get("bytes") or value.get("path")):
        raise DataError("the image is missing", place=where)
    if value.get("bytes"):
        return value["bytes"]
    try:
        return require_file(value["path"]).read_bytes()
    except DataError as error:
        raise error.within(where) from error
    except OSError as error:
        raise DataError(f"{value['path']}: {error.strerror}", place=where) from error


def _to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode.startswith("I;16"):  # Pillow clips at 255: nearly all pixels would be white
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:  # convert("RGB") would show the hidden colours, mostly black
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


@dataclass
class Output:
    """The folder that is being written, and the counts so far."""

    folder: Path
    files: dict[str, TextIO]
    written: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, split: str, stem: str, pictures: Sequence[Picture], turns: Any) -> None:
        """Write a record: images, then pairs of question and answer."""
        content: list[dict[str, str]] = []
        for index, picture in enumerate(pictures):
            path = f"images/{stem}{f'-{index}' if len(pictures) > 1 else ''}{picture.suffix}"
            (self.folder / path).write_bytes(picture.content)
            content.append({"type": "image", "image": path})
            self.written["images"] += 1
        messages: list[dict[str, Any]] = []
        for question, answer in turns:
            text = [{"type": "text", "text": question}] if question else []
            messages.append({"role": "user", "content": content + text})
            messages.append({"role": "assistant", "content": answer})
            content = []
        self.files[split].write(json.dumps({"messages": messages}) + "\n")
        self.written[split] += 1

    def skip(self, why: str, where: str) -> None:
        self.skipped.setdefault(why, []).append(where)

    def report(self) -> str:
        """List the records that were written and those that were left out, as lines of text."""
        lines = [
            f"{self.written[name]} records in {self.folder / name}.jsonl" for name in self.files
        ]
        lines.append(f"{self.written['images']} images in {self.folder / 'images'}")
        for why, places in self.skipped.items():
            more = f" and {len(places) - 20} more" if len(places) > 20 else ""
            lines.append(f"left out {len(places)} {why}: {'; '.join(places[:20])}{more}")
        return "\n".join(lines)


@contextmanager
def output(out: str, splits: Sequence[str]) -> Iterator[Output]:
    """Yield an Output. Its OUT/SPLIT.jsonl files appear once everything is written; then the counts
    are printed. An error leaves only images, which the next run overwrites."""
    folder = Path(out)
    paths = [folder / f"{split}.jsonl" for split in splits]
    for path in paths:
        if path.exists():
            raise ConfigError("exists", place=str(path), remedy="choose a new folder with --out")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    parts = [path.with_name(path.name + ".part") for path in paths]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open(part, "w", encoding="utf-8")) for part in parts]
            result = Output(folder, dict(zip(splits, files, strict=True)))
            yield result
        if not all(result.written[split] for split in splits):
            raise DataError(
                f"has no records, so none was written\n{result.report()}", place="a split"
            )
        for part, path in zip(parts, paths, strict=True):
            os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    print(escape_controls(result.report()))
