# .venv/bin/python -m pytest tests/data/test_visuals.py
"""Rows from what Hugging Face's processors return are those of our own reader, in each family; what
cannot be right is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from megatron_vlm import DataError, RowMaker, make_visuals
from megatron_vlm.data.tokens.row import Row, place_row
from megatron_vlm.family import read_family, read_sizes
from tests.support.chats import image, picture, say, text
from tests.support.error_fields import raises
from tests.support.runs import Case, loss_and_grads

GEMMA4 = dict(family="gemma4", layers=2, vision_depth=1, full_attention_interval=2)
TINY: dict[str, dict[str, Any]] = {
    "qwen3_vl": dict(layers=2, vision_depth=1, deepstack=1),
    "qwen3_5": dict(
        family="qwen3_5", layers=2, head_dim=64, vision_depth=1, full_attention_interval=2
    ),
    "gemma4": GEMMA4,
}
# Gemma's processor for Pillow rounds the pictures that it resizes differently: these keep a size.
SIZES = [(480, 336), (384, 384), (240, 672)]


def processed(family: str, path: str, sizes: list[tuple[int, int]] = SIZES) -> dict[str, Any]:
    """Return what the processor in transformers makes of pictures."""
    kind = Gemma4ImageProcessorPil if family == "gemma4" else Qwen2VLImageProcessorPil
    pictures = [picture(*size) for size in sizes]
    return {**kind.from_pretrained(path)(images=pictures, return_tensors="pt")}


@pytest.mark.parametrize("family", TINY)
def test_rows_are_those_of_the_reader(family, tiny, pool):
    path = tiny(**TINY[family])
    asked = say("user", *(image(*size) for size in SIZES), text("Which?"))
    record = {"messages": [asked, say("assistant", "The red one.")]}
    own = RowMaker(path, max_tokens=4096).row(record)
    made = Row(own.ids_S, own.labels_S, **make_visuals(path, processed(family, path)))
    assert own.pixel_values_PC is not None and made.pixel_values_PC is not None
    images = read_family(path).images(path, {})
    expected = images.pixel_values(own.pixel_values_PC, images.table())
    assert torch.equal(made.image_grid_I3, own.image_grid_I3)  # type: ignore[arg-type]
    # transformers rescales by an ulp otherwise where it pads.
    assert (made.pixel_values_PC - expected).abs().max() <= 2**-22
    ((first, second),) = pool.run(losses, 1, path, own, made)
    assert abs(first - second) <= 1e-5 * abs(first)


def losses(path: str, *rows: Row) -> list[float]:
    return [loss_and_grads(path, Case(), [row]).loss for row in rows]


@pytest.mark.parametrize("is_newer", [False, True])
def test_frames_of_gemma_4_become_videos(is_newer, tiny):
    """Newer versions of transformers put the frames of all videos in a row, and count them."""
    path = tiny(**GEMMA4)
    frames = processed("gemma4", path, [(384, 384)] * 6)
    values, places = frames["pixel_values"], frames["image_position_ids"]
    given = {"pixel_values_videos": values, "video_position_ids": places}
    if is_newer:
        given["num_frames_per_video"] = torch.tensor([2, 4])
    else:
        given = {name: each.unflatten(0, (2, 3)) for name, each in given.items()}
    made, still = make_visuals(path, given), make_visuals(path, frames)
    counts = [2, 4] if is_newer else [3, 3]
    assert made["video_grid_I3"].tolist() == [[count, 24, 24] for count in counts]
    assert torch.equal(made["pixel_values_videos_PC"], still["pixel_values_PC"])


FAULTS = {
    "above 1": (lambda pixels, grid: (2 * pixels + 3, grid), "which no picture has"),
    "no numbers": (lambda pixels, grid: (pixels * torch.nan, grid), "which no picture has"),
    "padded": (lambda pixels, grid: (pixels[None], grid), "patches but its grid needs"),
    "narrow": (lambda pixels, grid: (pixels[:, 1:], grid), "values, and the tower reads 768"),
    "whole numbers": (lambda pixels, grid: (pixels.long(), grid), "neither bytes nor floats"),
    "three dims": (lambda pixels, grid: (pixels[:, None], grid), "neither bytes nor floats"),
    "no squares": (lambda pixels, grid: (pixels[: 4 * 8], grid * 0 + 4), "squares of 3 x 3"),
    "negative": (lambda pixels, grid: (pixels, -grid), "squares of 3 x 3"),
    "one grid": (lambda pixels, grid: (pixels, grid[0]), "is no [n, 3]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_right_is_refused(fault, tiny):
    path = tiny(**GEMMA4)
    record = {"messages": [say("user", image(384, 384)), say("assistant", "Red.")]}
    own, change = RowMaker(path, max_tokens=4096).row(record), FAULTS[fault]
    visuals = make_visuals(path, processed("gemma4", path, [(384, 384)]))
    tokens = read_sizes(path).tokens
    place_row(replace(own, **visuals), tokens, "x:1")
    pixels, grid = change[0](visuals["pixel_values_PC"], visuals["image_grid_I3"])
    with raises(DataError, place="x:1", key="pixel_values", problem_has=change[1]):
        place_row(replace(own, pixel_values_PC=pixels, image_grid_I3=grid), tokens, "x:1")


def test_the_output_of_another_processor_is_refused(tiny):
    gemma4, qwen = tiny(**GEMMA4), tiny(**TINY["qwen3_vl"])
    with raises(DataError, key="image_grid_thw", problem_has="must be tensors"):
        make_visuals(qwen, processed("gemma4", gemma4))
    with raises(DataError, key="image_position_ids", problem_has="must be tensors"):
        make_visuals(gemma4, processed("qwen3_vl", qwen))
    cut = processed("gemma4", gemma4)
    cut["image_position_ids"] = cut["image_position_ids"][:, 1:]
    with raises(DataError, key="position_ids", problem_has="whole picture"):
        make_visuals(gemma4, cut)
