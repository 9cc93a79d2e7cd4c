# .venv/bin/python -m pytest tests/data/test_video_options.py
"""Rates, frames, pixels and times, by configuration and by record: rows equal transformers'."""

import base64
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata, read_video_pyav

from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.records.keys import UnknownKeysError
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import NOT_GIVEN, ConfigError, DataError
from megatron_vlm.family.qwen.videos import VideoSettings
from megatron_vlm.family.video_plan import VideoInfo, VideoOptions
from tests.support.chats import hf_processor, say
from tests.support.error_fields import at, raises
from tests.support.videos import (
    PAD,
    SETTINGS,
    Oracle,
    SizeOracle,
    hf,
    make_video,
    pixel_values,
    random_frames,
)

IMAGE = "<|image_pad|>"
COUNT, SIZE = 31, (96, 64)  # frames, 10 a second
SIZE_NAMES = ("shortest_edge", "longest_edge")
LEAST, MOST = 1024, 65536  # pixels of all frames, in tiny checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video, and pictures as frames."""
    folder = tmp_path_factory.mktemp("videos")
    make_video(folder / "clip.mp4", COUNT, size=SIZE)
    for number, frame in enumerate(random_frames(5, 90, 130)):
        PIL.Image.fromarray(frame).save(folder / f"{number}.png")
    return folder


def record(**part: Any) -> dict[str, Any]:
    return {"messages": [say("user", {"type": "video", **part}), say("assistant", "It rolls.")]}


def row_of(model: str, folder: Path, raw: dict[str, Any], **keys: Any) -> Row:
    return RowMaker(model, image_root=str(folder), **keys).row(raw)


def assert_equal(row: Row, model: str, theirs: Any, oracle: Any) -> None:
    """Tokens, grid and pixel values against what the oracle made."""
    processor = hf_processor(model)
    processor.video_processor = oracle
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    text = processor.tokenizer.apply_chat_template(
        [say("user", {"type": "video"}), say("assistant", "It rolls.")], tokenize=False
    )
    text = text.replace(PAD, processor.replace_video_token(theirs, 0))
    assert row.ids_S.tolist() == processor.tokenizer(text)["input_ids"]
    assert row.video_grid_I3.tolist() == theirs["video_grid_thw"].tolist()
    ours = VideoSettings.from_checkpoint(model)
    values = pixel_values(row.pixel_values_videos_PC.numpy(), ours)
    assert torch.equal(values, theirs["pixel_values_videos"])


def hf_file(path: Path, oracle: Any, sample: Callable[..., Any] | None = None) -> Any:
    """The file as transformers reads it."""
    frames, metadata = read_video_pyav(str(path), sample or oracle.sample_frames)
    return oracle.preprocess(
        [frames], video_metadata=[metadata], do_sample_frames=False, return_metadata=True
    )


# What is given, and the frames that it makes of the clip.
KEYS = [
    ({}, 6),
    ({"fps": 1.0}, 4),
    ({"fps": 4.5}, 13),
    ({"fps": 100}, 31),
    ({"min_frames": 9}, 9),
    ({"max_frames": 5}, 5),
    ({"max_frames": 2}, 2),  # below the checkpoint's least, 4
    ({"fps": 4, "min_frames": 2, "max_frames": 7}, 7),
]


@pytest.mark.parametrize(("given", "count"), KEYS)
def test_frames_by_keys_and_by_records_are_those_of_transformers(given, count, tiny, folder):
    oracle = Oracle.from_pretrained(tiny(), **given)
    expected = hf_file(folder / "clip.mp4", oracle)
    assert expected["video_grid_thw"][0, 0] == math.ceil(count / 2)
    clip = {"video": "clip.mp4"}
    assert_equal(row_of(tiny(), folder, record(**clip), video=given), tiny(), expected, oracle)
    assert_equal(row_of(tiny(), folder, record(**clip, **given)), tiny(), expected, oracle)


# Bounds of the configuration, and of a record for each frame, and those that transformers gets.
BUDGETS = [
    ({"max_pixels": 30000}, {}, (LEAST, 30000)),
    ({"min_pixels": 60000, "max_pixels": 61000}, {}, (60000, 61000)),
    ({"min_pixels": 10**6, "max_pixels": 2 * 10**6}, {}, (10**6, 2 * 10**6)),
    ({}, {"max_pixels": 2048}, (LEAST, 6 * 2048)),
    ({}, {"max_pixels": 10**6}, (LEAST, MOST)),  # the budget of all frames stays
    ({}, {"max_pixels": 2e6, "total_pixels": 2.5e5}, (LEAST, 500_000)),
    ({}, {"total_pixels": 9000}, (LEAST, 18000)),  # of temporal patches, each of two frames
    ({}, {"min_pixels": 20000, "total_pixels": 90000}, (6 * 20000, 180_000)),
]


@pytest.mark.parametrize(("keys", "given", "size"), BUDGETS)
@pytest.mark.parametrize("cap", [False, True])
def test_budgets_are_the_size_of_transformers(keys, given, size, cap, tiny, folder, tmp_path):
    if cap and given:
        pytest.skip("the plans below have capped frames")
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    path = model / "video_preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cap_pixels_per_frame": cap}))
    oracle = Oracle.from_pretrained(model, size=dict(zip(SIZE_NAMES, size, strict=True)))
    clip = record(video="clip.mp4", **given)
    row = row_of(str(model), folder, clip, max_tokens=100_000, video=keys)
    assert_equal(row, str(model), hf_file(folder / "clip.mp4", oracle), oracle)


@pytest.mark.parametrize(
    ("given", "first", "total", "num_frames"),
    [
        ({"nframes": 5}, 0, COUNT, 5),
        ({"num_frames": 31}, 0, COUNT, 31),
        ({"video_start": 1.2}, 12, 19, None),
        ({"video_end": 1.25}, 0, 13, None),
        ({"video_start": 0.71, "video_end": 2.5}, 8, 18, None),
        ({"video_start": 2.0, "video_end": 99, "nframes": 3}, 20, 11, 3),
    ],
)
def test_a_part_of_a_file_and_a_number_of_frames(given, first, total, num_frames, tiny, folder):
    """Times are those of the whole file."""
    oracle = Oracle.from_pretrained(tiny())

    def sample(metadata: VideoMetadata, **_: Any) -> np.ndarray:
        metadata = replace(metadata, total_num_frames=total)
        return first + oracle.sample_frames(metadata, num_frames=num_frames)

    expected = hf_file(folder / "clip.mp4", oracle, sample)
    row = row_of(tiny(), folder, record(video="clip.mp4", **given))
    assert_equal(row, tiny(), expected, oracle)


@settings(max_examples=150)
@given(
    count=st.integers(2, 3000),
    fps=st.floats(1, 120),
    size=st.tuples(st.integers(20, 2000), st.integers(20, 2000)),
    rate=st.one_of(st.none(), st.floats(0.01, 60)),
    most_frames=st.one_of(st.none(), st.integers(2, 900)),
    pixels=st.tuples(*[st.one_of(st.none(), st.integers(1024, 10**6))] * 3),
    cap=st.booleans(),
)
def test_plans_with_options_equal_hugging_face(count, fps, size, rate, most_frames, pixels, cap):
    """Capped, each frame has at most what qwen-vl-utils gives it."""
    least, most, total = pixels
    if least and most and least > most:
        least, most = most, least
    ours = replace(SETTINGS, cap_pixels_per_frame=cap)
    given = {"fps": rate, "max_frames": most_frames, "min_pixels": least}
    options = VideoOptions(max_pixels=most, total_pixels=total, **given)
    oracle = hf(SizeOracle, ours)
    oracle.max_frames = most_frames or oracle.max_frames
    indices = oracle.sample_frames(VideoMetadata(count, fps=fps), fps=rate)
    taken = len(indices)
    budget = 2 * total if total else ours.max_pixels
    if cap:
        share = min(ours.max_video_tokens * 32 * 32, budget // taken)
        budget = max(share, int(1.05 * (least or ours.min_pixels))) * taken
    low = least * taken if least else ours.min_pixels
    high = min(budget, most * taken) if most else budget
    plan = partial(ours.plan, VideoInfo(count, fps, *size), options=options)
    if low > high and (least or most or total):
        with raises(DataError, place="the video") as caught:
            plan()
        assert re.search(rf"the {taken} frames .* {low} .* {high}$", caught.value.problem)
        return
    frames = torch.empty(1, taken, 3, *size, device="meta")
    expected = oracle.resize(
        frames, SizeDict(shortest_edge=low, longest_edge=high), None, 32, 2, False
    )
    found = plan()
    assert list(found.indices) == indices.tolist()
    assert (found.height, found.width) == expected


# Lists of frames


@pytest.mark.parametrize(
    ("given", "metadata"),
    [
        ({}, {"fps": None}),
        ({"fps": 2}, {"fps": 2}),
        ({"sample_fps": 0.5}, {"fps": 0.5}),
        ({"times": [0, 0.3, 1.5, 9, 40.25]}, {"fps": 1, "frames_indices": [0, 0.3, 1.5, 9, 40.25]}),
        (
            {"timestamps": [index / 29.97 for index in (3, 8, 21, 400, 401)]},
            {"fps": 29.97, "frames_indices": [3, 8, 21, 400, 401]},
        ),
    ],
)
def test_the_times_of_frames_are_said_in_the_text(given, metadata, tiny, folder):
    names = [f"{number}.png" for number in range(5)]
    frames = np.stack([np.asarray(PIL.Image.open(folder / name)) for name in names])
    oracle = Oracle.from_pretrained(tiny())
    known = VideoMetadata(5, **{"frames_indices": list(range(5)), **metadata})
    expected = oracle.preprocess(
        [frames], video_metadata=[known], do_sample_frames=False, return_metadata=True
    )
    row = row_of(tiny(), folder, record(video=names, **given))
    assert_equal(row, tiny(), expected, oracle)


def test_pixels_of_frames_in_a_list(tiny, folder):
    """5 frames of 90 x 130: 96 x 128 pixels each, if the budget allows."""
    part = {"video": [f"{number}.png" for number in range(5)]}
    assert row_of(tiny(), folder, record(**part)).video_grid_I3.tolist() == [[3, 6, 8]]
    small = row_of(tiny(), folder, record(**part, max_pixels=64 * 96))
    assert small.video_grid_I3.tolist() == [[3, 4, 4]]


# Places


@pytest.mark.parametrize("video", ["clip.mp4", {"path": "clip.mp4"}, {"url": "clip.mp4"}])
def test_options_stand_beside_the_video_or_with_it_in_the_column(video, tiny, folder):
    wanted = row_of(tiny(), folder, record(video="clip.mp4", fps=1.0, max_pixels=2048))
    assert wanted.video_grid_I3.tolist() == [[2, 2, 2]]
    held = {"path": video} if isinstance(video, str) else video
    options = {"fps": 1, "max_pixels": 2048, "nframes": None, "times": []}
    in_column = {"messages": [say("user", "<video>"), say("assistant", "It rolls.")]}
    for raw in (
        record(video=video, **options),
        record(video={**held, **options}),
        record(video={**held, "fps": 1.0}, max_pixels=2048),
        {**in_column, "videos": [{**held, **options}]},
    ):
        row = row_of(tiny(), folder, raw)
        assert row.ids_S.tolist() == wanted.ids_S.tolist()
        assert torch.equal(row.pixel_values_videos_PC, wanted.pixel_values_videos_PC)


@pytest.mark.parametrize(
    ("given", "size"),
    [({"max_pixels": 4096}, (LEAST, 4096)), ({"min_pixels": 40000}, (40000, MOST))],
)
def test_pixels_of_an_image_are_those_of_transformers(given, size, tiny, folder):
    """The other image is as it was."""
    data = base64.b64encode((folder / "0.png").read_bytes()).decode()
    plain = {"type": "image", "image": f"data:image/png;base64,{data}"}
    raw = {"messages": [say("user", plain | given, plain), say("assistant", "Red.")]}
    bounds = dict(zip(SIZE_NAMES, size, strict=True))
    theirs = [
        Qwen2VLImageProcessorPil.from_pretrained(tiny(), **sizes)(
            PIL.Image.open(folder / "0.png"), return_tensors="pt"
        )
        for sizes in ({"size": bounds}, {})
    ]
    grids = [found["image_grid_thw"][0].tolist() for found in theirs]
    tokenizer = hf_processor(tiny()).tokenizer
    messages = [say("user", {"type": "image"}, {"type": "image"}), say("assistant", "Red.")]
    first, second, rest = tokenizer.apply_chat_template(messages, tokenize=False).split(IMAGE)
    text = first + IMAGE * (math.prod(grids[0]) // 4) + second
    text += IMAGE * (math.prod(grids[1]) // 4) + rest
    row = row_of(tiny(), folder, raw)
    assert grids[0] != grids[1] and row.image_grid_I3.tolist() == grids
    assert row.ids_S.tolist() == tokenizer(text)["input_ids"]
    # Bytes of one frame; theirs are normalised by 0.5 and 0.5, and repeat the frame.
    values = torch.cat([found["pixel_values"].view(-1, 3, 2, 256)[:, :, 0] for found in theirs])
    ours = row.pixel_values_PC.view(-1, 3, 256).float() / 127.5 - 1
    torch.testing.assert_close(ours, values, atol=1e-6, rtol=0)


# What is refused

FILE, FRAMES = {"video": "clip.mp4"}, {"video": ["0.png", "1.png"]}
PART = "message 0, part 0"
WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[(FILE | {"fps": v}, at(PART, "fps", found_has=v)) for v in (0, -1, math.nan, True, 1e-300)],
    (FILE | {"fps": "2"}, at(PART, "fps", found="2")),
    (FILE | {"nframes": 1}, at(PART, "nframes", found=1)),
    (FILE | {"nframes": 4.5}, at(PART, "nframes", found=4.5)),
    (FILE | {"max_frames": 1}, at(PART, "max_frames", found=1)),
    (FILE | {"min_frames": 10**400}, at(PART, "min_frames", found_has="10000000")),
    (FILE | {"min_frames": math.inf}, at(PART, "min_frames", found_has=float("inf"))),
    (FILE | {"max_pixels": "big"}, at(PART, "max_pixels", found="big")),
    (FILE | {"total_pixels": [4]}, at(PART, "total_pixels", found=[4])),
    (FILE | {"video_start": -1}, at(PART, "video_start", found=-1)),
    (FILE | {"video_end": math.nan}, at(PART, "video_end", found_has=float("nan"))),
    (
        FILE | {"video_start": 3, "video_end": 2},
        at(PART, "video_start", found=3.0, problem_has="video_end=2.0"),
    ),
    (
        FILE | {"min_frames": 9, "max_frames": 8},
        at(PART, "min_frames", found=9, problem_has="max_frames=8"),
    ),
    (
        FILE | {"min_pixels": 9, "max_pixels": 8},
        at(PART, "min_pixels", found=9, problem_has="max_pixels=8"),
    ),
    (FILE | {"nframes": 4, "fps": 2}, at(PART, "nframes", found=4)),
    (FILE | {"times": [0, 1]}, at(PART, "times")),
    (FILE | {"sample_fps": 2}, at(PART, "sample_fps")),
    (FILE | {"resized_height": 64}, at(PART, "resized_height")),
    (FILE | {"video": {"path": "clip.mp4", "fps": 1}, "fps": 2}, at(PART, "fps")),
    *[
        (FRAMES | {key: 4}, at(PART, key, remedy_has=f"ignore_keys=[{key}]"))
        for key in ("nframes", "min_frames", "max_frames", "video_start", "video_end")
    ],
    (FRAMES | {"raw_fps": 24}, at(PART, "raw_fps")),
    (FRAMES | {"times": [1]}, at(PART, "times", "1 values for 2 frames")),
    (FRAMES | {"times": "1 2"}, at(PART, "times", "a str")),
    (FRAMES | {"times": [1, None]}, at(PART, "times[1]", found=None)),
    (FRAMES | {"times": [1, -2]}, at(PART, "times[1]", found=-2)),
    (FRAMES | {"times": [2, 1]}, at(PART, "times[1]", found=1, problem_has="before 2")),
    (FRAMES | {"times": [1, 2], "fps": 2}, at(PART, "times", "fps")),
    (FRAMES | {"fps": 2, "sample_fps": 3}, at(PART, "fps", "sample_fps")),
    (
        {"video": [{"path": "0.png", "max_pixels": 4096}] * 2},
        at(PART, has="frames have min_pixels or max"),
    ),
    ({"fps": 2}, at(PART, "fps")),
    (FILE | {"speed": 2}, at(has="'speed' (message 0, part 0)", kind=UnknownKeysError)),
]


@pytest.mark.parametrize(("part", "fields"), WRONG)
def test_values_that_are_refused(part, fields):
    with raises(**{"kind": DataError} | fields):
        parse_record(record(**part), "a:7")


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ({"max_pixels": 0}, {"key": "max_pixels", "found": 0, "allowed_has": "at least 1"}),
        ({"min_pixels": 9, "max_pixels": 8}, {"key": "min_pixels", "problem_has": "max_pixels=8"}),
        ({"resized_width": 64}, {"key": "resized_width", "problem_has": "max_pixels"}),
    ],
)
def test_values_of_images_that_are_refused(part, fields):
    said = [say("user", {"type": "image", "image": "a.png", **part}), say("assistant", "b")]
    with raises(DataError, place="chats.jsonl:7: message 0, part 0", **fields):
        parse_record({"messages": said}, "chats.jsonl:7")
    with raises(DataError, place="chats.jsonl:7: image 0", **fields):
        raw = {"messages": [say("user", "a"), said[1]], "images": [{"path": "a.png", **part}]}
        parse_record(raw, "chats.jsonl:7")


@pytest.mark.parametrize(
    ("part", "keys", "key", "found", "numbers"),
    [
        ({"nframes": 32}, {}, "nframes", 32, "31"),
        ({"nframes": 9, "video_end": 0.5}, {}, "nframes", 9, "6"),
        ({"video_start": 3.1}, {}, "video_start", 3.1, "video_end=the end"),
        ({"video_start": 1.01, "video_end": 1.09}, {}, "video_start", 1.01, "video_end=1.09"),
        ({"video_start": 3.0}, {}, "", NOT_GIVEN, "1 of 1 frames"),
        ({"min_frames": 9}, {"max_frames": 8}, "min_frames", 9, "8"),
        ({"max_pixels": 100}, {}, "max_pixels", 100, "6 frames have a minimum of 1024 .* 600$"),
        ({"min_pixels": 20000}, {}, "min_pixels", 20000, "6 frames .* 120000 .* 65536$"),
    ],
)
def test_what_does_not_fit_the_file_or_the_settings(part, keys, key, found, numbers, tiny, folder):
    maker = RowMaker(tiny(), image_root=str(folder), video=keys)
    with raises(DataError, place="chats.jsonl:7: video 0", key=key, found=found) as caught:
        maker.row(record(video="clip.mp4", **part), where="chats.jsonl:7")
    assert re.search(numbers, caught.value.problem)


def test_seconds_of_a_file_that_does_not_say_its_rate():
    with raises(DataError, place="row 3", key="video_end", found=1.0):
        SETTINGS.plan(
            VideoInfo(9, None, 64, 64), where="row 3", options=VideoOptions(video_end=1.0)
        )


def test_bounds_of_an_image_that_contradict_the_configuration(tiny, folder):
    part = {"type": "image", "image": "0.png", "max_pixels": 5000}
    raw = {"messages": [say("user", part), say("assistant", "Red.")]}
    with raises(DataError, key="min_pixels", found=6000, problem_has="max_pixels=5000") as caught:
        row_of(tiny(), folder, raw, min_pixels=6000)
    assert caught.value.place.endswith("image 0")
    assert len(row_of(tiny(), folder, raw).ids_S)


def test_what_is_ignored_has_no_effect(tiny, folder):
    raw = record(video="clip.mp4", resized_height=64, fps=1)
    ignored = row_of(tiny(), folder, raw, ignore_keys=("resized_height", "fps"))
    assert ignored.video_grid_I3[0, 0] == 3


@pytest.mark.parametrize(
    ("keys", "name", "found", "words"),
    [
        ({"min_frames": 9, "max_frames": 8}, "min_frames", 9, "max_frames=8"),
        ({"min_frames": 769}, "min_frames", 769, "data.video.max_frames=768"),
        ({"max_pixels": 1000}, "min_pixels", 1024, "data.video.max_pixels=1000"),
        ({"fps": 0}, "fps", 0, "more than 0"),
        ({"max_frames": 1}, "max_frames", 1, "at least 2"),
    ],
)
def test_keys_that_are_refused(keys, name, found, words, tiny):
    with pytest.raises(ConfigError) as caught:
        RowMaker(tiny(), video=keys)
    assert f"data.video.{name}={found}" in str(caught.value) and words in str(caught.value)
