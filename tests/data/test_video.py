# .venv/bin/python -m pytest tests/data/test_video.py
"""Videos: plans, text and pixel values equal transformers' own; files are read frame by frame."""

import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata, read_video_pyav

from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.media.video_file import iter_frames, probe_video
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.qwen.videos import VideoSettings
from megatron_vlm.family.video_plan import VideoInfo, VideoPlan
from tests.support.error_fields import raises
from tests.support.videos import (
    END,
    H264,
    PAD,
    RELEASED,
    SETTINGS,
    SMALL,
    START,
    Oracle,
    SizeOracle,
    hf,
    hf_processor,
    make_video,
    number_of,
    pixel_values,
    random_frames,
)

pytestmark = pytest.mark.newest  # it depends on the versions

# Settings


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"video_preprocessor_config.json": RELEASED}, SETTINGS),
        ({"video_preprocessor_config.json": {"cap_pixels_per_frame": None}}, VideoSettings()),
        (
            {
                "video_preprocessor_config.json": RELEASED,
                "processor_config.json": {"video_processor": {"fps": 1, "max_frames": 8}},
            },
            VideoSettings(fps=1, max_frames=8),
        ),
        (
            {
                "video_preprocessor_config.json": RELEASED | {"min_pixels": 7},
                "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
            },
            SETTINGS,
        ),
    ],
)
def test_settings_are_what_hugging_face_reads(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = VideoSettings.from_checkpoint(tmp_path)
    assert found == expected
    theirs = Oracle.from_pretrained(tmp_path)
    for key in ("patch_size", "fps", "min_frames", "max_frames", "max_video_tokens", "image_std"):
        assert getattr(found, key) == getattr(theirs, key), key
    assert (found.min_pixels, found.max_pixels) == (
        theirs.size.shortest_edge,
        theirs.size.longest_edge,
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"do_resize": False}, {"key": "do_resize", "found": False, "allowed": (True,)}),
        ({"do_sample_frames": False}, {"key": "do_sample_frames", "found": False}),
        ({"resample": 2}, {"key": "resample", "found": 2, "allowed": (3,)}),
        ({"num_frames": 8}, {"key": "num_frames", "found": 8, "allowed": (None,)}),
        ({"size": {"shortest_edge": 4096}}, {"key": "max_pixels", "problem_has": "4096"}),
        ({"fps": None}, {"key": "fps", "problem_has": "no value"}),
    ],
)
def test_settings_that_are_refused(tmp_path, changes, fields):
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps(RELEASED | changes))
    with raises(ConfigError, place=str(path), **fields):
        VideoSettings.from_checkpoint(tmp_path)
    path.unlink()
    with raises(ConfigError, place=str(path), problem_has="is missing"):
        VideoSettings.from_checkpoint(tmp_path)


def test_the_cap_of_a_frame_is_by_default_that_of_this_transformers(tmp_path):
    """Its versions announce that the default will change."""
    small = {"max_video_tokens": 4, "size": {"shortest_edge": 4096, "longest_edge": 10**6}}
    path = tmp_path / "video_preprocessor_config.json"
    grids = set()
    for cap in ({}, {"cap_pixels_per_frame": False}, {"cap_pixels_per_frame": True}):
        path.write_text(json.dumps(RELEASED | small | cap))
        ours = VideoSettings.from_checkpoint(tmp_path)
        frames = random_frames(6, 128, 128)
        oracle = Oracle.from_pretrained(tmp_path)
        theirs = oracle.preprocess([frames], do_sample_frames=False, return_tensors="pt")
        grid = ours.plan(VideoInfo(6, None, 128, 128), sample=False).grid
        assert [list(grid)] == theirs["video_grid_thw"].tolist()
        grids.add(grid)
    assert len(grids) == 2


# Plans


@settings(max_examples=300)
@given(
    count=st.one_of(st.integers(1, 12), st.integers(1, 20000)),
    fps=st.one_of(st.none(), st.floats(0.1, 240), st.sampled_from([24.0, 25.0, 30000 / 1001])),
    height=st.one_of(st.integers(1, 64), st.integers(1, 4000)),
    width=st.one_of(st.integers(1, 64), st.integers(1, 4000)),
    ours=st.sampled_from([SETTINGS, SMALL, VideoSettings()]),
    cap=st.booleans(),
    sample=st.booleans(),
)
def test_plans_equal_hugging_face(count, fps, height, width, ours, cap, sample):
    ours = replace(ours, cap_pixels_per_frame=cap)
    oracle = hf(SizeOracle, ours)
    metadata = VideoMetadata(count, fps=fps)
    indices = oracle.sample_frames(metadata) if sample else np.arange(count)
    frames = torch.empty(1, len(indices), 3, height, width, device="meta")
    size = SizeDict(shortest_edge=ours.min_pixels, longest_edge=ours.max_pixels)
    info = VideoInfo(count, fps, height, width)
    try:
        expected = oracle.resize(frames, size, None, 32, 2, cap)
    except ValueError:
        with pytest.raises(DataError):
            ours.plan(info, sample)
        return
    plan = ours.plan(info, sample)
    assert list(plan.indices) == indices.tolist()
    assert (plan.height, plan.width) == expected
    grid = ((len(indices) + 1) // 2, expected[0] // 16, expected[1] // 16)
    assert plan.grid == grid
    if len(plan.indices) < 2000:
        metadata.frames_indices = indices
        inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
        text = hf_processor(oracle).replace_video_token(inputs, 0)
        assert text_of(plan, ours) == text


def text_of(plan: VideoPlan, ours: VideoSettings) -> str:
    """The text of a video, with the placeholders of whole frames."""
    return ours.text(plan).replace(PAD, PAD * ours.num_tokens(plan.grid))


def test_text_of_an_odd_count_of_frames():
    """7 frames at 2 a second; the 8th is the 7th again, so the last pair is at 3.0 seconds."""
    plan = SETTINGS.plan(VideoInfo(7, 2.0, 64, 96))
    assert plan.indices == (0, 1, 2, 3, 4, 5, 6)
    assert plan.timestamps == (0.25, 1.25, 2.25, 3.0)
    assert plan.grid == (4, 4, 6)
    frame = START + 6 * PAD + END
    assert text_of(plan, SETTINGS) == (
        f"<0.2 seconds>{frame}<1.2 seconds>{frame}<2.2 seconds>{frame}<3.0 seconds>{frame}"
    )


@pytest.mark.parametrize(
    ("info", "fields"),
    [
        (
            VideoInfo(1, 30.0, 64, 64),
            {"problem_has": "1 of 1 frames are taken, but a patch spans 2"},
        ),
        (VideoInfo(0, 30.0, 64, 64), {"problem_has": "0 of 0 frames are taken"}),
        (VideoInfo(9, 30.0, 32, 6432), {"problem_has": "6432 x 32 pixels"}),
        (VideoInfo(9, 0.0, 64, 64), {"key": "fps", "found": 0.0}),
        (VideoInfo(9, float("nan"), 64, 64), {"key": "fps", "found_has": "nan"}),
    ],
)
def test_plans_that_are_refused(info, fields):
    with raises(DataError, place="row 3", **fields):
        SETTINGS.plan(info, where="row 3")


def test_hugging_face_keeps_the_template_brackets():
    """transformers 5 replaces the pad alone: brackets stand around all frames of a video."""
    texts, _ = hf_processor().get_text_with_replacements([START + PAD + END], [], ["FRAMES"])
    assert texts == [START + "FRAMES" + END]


# Pixels


@pytest.mark.parametrize("shape", [(4, 48, 64), (7, 301, 517), (3, 20, 90), (2, 64, 96)])
def test_pixel_values_equal_hugging_face(shape):
    ours = replace(SMALL, image_mean=(0.48, 0.46, 0.41), image_std=(0.27, 0.26, 0.28))
    oracle = hf(Oracle, ours)
    oracle.image_mean, oracle.image_std = ours.image_mean, ours.image_std
    frames = random_frames(*shape)
    theirs = oracle.preprocess([frames], do_sample_frames=False, return_tensors="pt")
    plan = ours.plan(VideoInfo(shape[0], None, *shape[1:]), sample=False)
    patches = ours.patches(iter(frames), plan)
    assert patches.dtype == np.uint8
    assert [list(plan.grid)] == theirs["video_grid_thw"].tolist()
    assert torch.equal(pixel_values(patches, ours), theirs["pixel_values_videos"])


def test_pictures_and_videos_have_their_own_normalisation(tiny):
    """With the same mean and deviation, the two processors round in another way."""
    patches = torch.arange(1536).remainder(256).byte()[None]
    tables, videos = PixelTables(tiny(), torch.device("cpu")), VideoSettings.from_checkpoint(tiny())
    assert torch.equal(tables.videos(patches), videos.pixel_values(patches, videos.table()))
    assert not torch.equal(tables.videos(patches), tables.images(patches))


@pytest.mark.parametrize("size", [(37, 51), (301, 517), (200, 90)])
def test_resizing_is_two_passes_of_bytes(size):
    """By hand in float64: across, rounded to bytes, then down. Measured: 1 of 255 apart at most
    (torch counts in 16 bits), where floats without the rounding between are 14 to 23 apart."""
    frames = random_frames(2, *size)
    plan = SETTINGS.plan(VideoInfo(2, None, *size), sample=False)
    expected = torch.tensor(frames).permute(0, 3, 1, 2).double()
    for shape in ((size[0], plan.width), (plan.height, plan.width)):
        expected = F.interpolate(expected, shape, mode="bicubic", antialias=True)
        expected = expected.clamp(0, 255).round()
    by_hand = SETTINGS.patches(expected.byte().permute(0, 2, 3, 1).numpy(), plan)
    apart = abs(SETTINGS.patches(frames, plan).astype(int) - by_hand)
    assert apart.max() <= 1 and apart.mean() < 0.01


def test_frames_that_do_not_fit_the_plan():
    frames = random_frames(4, 48, 64)
    plan = SETTINGS.plan(VideoInfo(4, None, 48, 64), sample=False)
    with pytest.raises(DataError, match=r"has 3 frames .* planned with 4 frames"):
        SETTINGS.patches(frames[:3], plan)
    with pytest.raises(DataError, match=r"has 4 frames of shapes \[\(40, 64, 3\), \(48, 64, 3\)"):
        SETTINGS.patches([*frames[:3], frames[3, :40]], plan)


# Files


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("clip.mp4", "mpeg4", {}),
        ("clip.mp4", H264, {"bf": "3"}),
        ("clip.mp4", "mpeg4", {"mux": [("movflags", "frag_keyframe+empty_moov")]}),
        ("clip.mkv", "ffv1", {}),
        ("clip.avi", "mpeg4", {}),
        ("clip.ts", "mpeg2video", {}),
    ],
)
def test_sampled_frames_are_those_frames(tmp_path, name, codec, options):
    """17 frames at 10 a second: the container states their number in MP4 alone."""
    path = make_video(tmp_path / name, 17, codec, **options)
    info = probe_video(path)
    assert info == VideoInfo(17, 10.0, 48, 64)
    plan = replace(SETTINGS, fps=3).plan(info)
    assert plan.indices == (0, 4, 8, 12, 16)
    for indices in (plan.indices, range(17)):
        assert [number_of(frame) for frame in iter_frames(path, indices)] == list(indices)


def test_a_file_equals_hugging_face_from_end_to_end(tmp_path):
    path = make_video(tmp_path / "clip.mp4", 31, H264, size=(70, 50))
    oracle = hf(Oracle, SMALL)
    frames, metadata = read_video_pyav(str(path), oracle.sample_frames)
    theirs = oracle.preprocess(
        [frames], video_metadata=[metadata], do_sample_frames=False, return_metadata=True
    )
    plan = SMALL.plan(probe_video(path))
    patches = SMALL.patches(iter_frames(path, plan.indices), plan)
    assert len(plan.indices) == 6 and list(plan.indices) == metadata.frames_indices.tolist()
    assert torch.equal(pixel_values(patches, SMALL), theirs["pixel_values_videos"])
    assert text_of(plan, SMALL) == hf_processor(oracle).replace_video_token(theirs, 0)


def test_a_clip_cut_without_encoding(tmp_path):
    """Its edit list hides frames before the cut: the count in the file is of all."""
    source = make_video(tmp_path / "long.mp4", 30, "mpeg4", g="10")
    clip = tmp_path / "clip.mp4"
    with av.open(str(source)) as whole, av.open(str(clip), "w") as container:
        stream = container.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.size:
                packet.pts -= 5 * packet.duration
                packet.dts -= 5 * packet.duration
                packet.stream = stream
                container.mux(packet)
    with av.open(str(clip)) as container:
        assert container.streams.video[0].frames == 30
    assert probe_video(clip).num_frames == 25
    assert [number_of(frame) for frame in list(iter_frames(clip, [0, 24]))] == [5, 29]


@pytest.mark.parametrize(
    ("matrix", "size", "red"),
    [
        # (x, y) is shown at (a x + c y, b x + d y) for (a, b, c, d): here y goes to -x, so that
        # the upper half becomes the right one.
        ((0, 1, -1, 0), (64, 48), (slice(None), slice(28, None))),
        ((-1, 0, 0, -1), (48, 64), (slice(28, None), slice(None))),
        ((0, -1, 1, 0), (64, 48), (slice(None), slice(None, 20))),
    ],
)
def test_a_rotated_video_stands_upright(tmp_path, matrix, size, red):
    path = make_video(tmp_path / "phone.mp4", 2, "mpeg4")
    content = bytearray(path.read_bytes())
    a, b, c, d = (value * 0x10000 for value in matrix)
    place = content.index(b"tkhd") + 44
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000)
    path.write_bytes(content)
    info = probe_video(path)
    assert (info.height, info.width) == size
    (frame,) = list(iter_frames(path, [0]))
    assert frame.shape[:2] == size
    assert frame[red][..., 0].min() > 200 and frame[..., 0].mean() < 160


def damaged(folder: Path, kind: str) -> Path:
    """A file that is no whole video."""
    path = folder / "bad.mp4"
    if kind == "no index":  # an MP4 has its index at the end
        content = make_video(path, 30).read_bytes()
        path.write_bytes(content[: len(content) // 2])
    elif kind.startswith("cut"):
        content = make_video(path, 30, mux=[("movflags", "faststart")]).read_bytes()
        with av.open(str(path)) as container:
            ends = [packet.pos + packet.size for packet in container.demux(video=0) if packet.size]
        path.write_bytes(content[: ends[19] + 3 * (kind == "cut in a frame")])
    elif kind == "text":
        path.write_text("no video\n" * 100)
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "picture":
        PIL.Image.new("RGB", (64, 48)).save(path, format="png")
    elif kind == "playlist":
        path.write_text(f"ffconcat version 1.0\nfile {make_video(folder / 'good.mp4', 4).name}\n")
    elif kind == "no frames":
        path = make_video(folder / "bad.avi", 0)
    elif kind == "sound":
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=16000)
            silence = np.zeros((1, 16000), np.float32)
            frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no index", "cannot be read as a video .*Invalid data"),
        ("cut in a frame", "holds 21 frames of 30: it is cut off"),
        ("cut between frames", "holds 20 frames of 30: it is cut off"),
        ("text", "cannot be read as a video .*Invalid data"),
        ("empty", "cannot be read as a video .*Invalid data"),
        ("missing", ""),
        ("folder", "is a folder, and only files are read"),
        ("picture", "cannot be read as a video"),
        ("playlist", "cannot be read as a video"),
        ("no frames", "has no frames"),
        ("sound", "has no video stream"),
    ],
)
def test_files_that_are_no_whole_video(tmp_path, kind, message):
    path = damaged(tmp_path, kind)
    with raises(DataError, place=str(path)) as caught:
        probe_video(path)
    assert re.search(message or "does not exist", caught.value.problem)


def test_frames_that_cannot_be_read(tmp_path):
    path = make_video(tmp_path / "clip.mp4", 10, H264)
    with raises(
        DataError, place=str(path), problem="ends after 10 frames, and frame 12 is missing"
    ):
        list(iter_frames(path, [3, 12]))
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        spans = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    for start, size in spans[4:]:
        content[start : start + size] = b"\xff" * size
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: (cannot be read|ends after)"):
        list(iter_frames(path, [0, 9]))


def test_without_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        DataError, match=r"needs the package av; run pip install 'megatron_vlm\[video\]'"
    ):
        probe_video(tmp_path / "clip.mp4")
