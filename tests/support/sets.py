"""Small data sets on disk, and functions that open them as a run would."""

import json
from dataclasses import replace
from pathlib import Path

from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.family import read_sizes
from tests.support.chats import picture, say, text


def write_set(folder: Path, rows: int = 23) -> str:
    """Write records with 0 to 3 image files and answers of mixed length."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for row in range(rows):
        parts = []
        for number in range(row % 4):
            name = f"images/{row}-{number}.png"
            picture(40 + 8 * (row % 23), 90 - 2 * (row % 23), number).save(folder / name)
            parts.append({"type": "image", "image": name})
        answer = say("assistant", "word " * (1 + row * row % 17))
        records.append({"messages": [say("user", *parts, text(f"{row}?")), answer]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def open_set(
    value, model: str, cache: Path | None, share=(0, 1), train=True, kind="chat", **options
) -> DataSet:
    cfg = data_config(cache, **options)
    specs = parse_sources(value, "data.train")
    return open_data(specs, "data.train", cfg, model, read_sizes(model), share, train, kind)


def data_config(cache: Path | None, **options) -> DataConfig:
    fixed = {"cache_dir": None if cache is None else str(cache), "num_workers": 0}
    return replace(DataConfig(), **{**fixed, **options})
