# .venv/bin/python -m pytest tests/data/test_sample.py
"""Truncation, which never cuts an image, and sizes and patches, which equal Hugging Face's."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.data.tokens.chat_renderer import ChatRenderer
from megatron_vlm.data.tokens.reader import make_encoder
from megatron_vlm.data.tokens.sample import RecordDropped, Sample, Span, truncate
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.qwen.images import ImageSettings
from tests.data.test_chat_template import reader  # noqa: F401 - a fixture
from tests.support.chats import image, say, text
from tests.support.error_fields import raises

pytestmark = pytest.mark.newest  # it depends on the versions

PICTURES = [image(*size) for size in ((64, 64), (100, 60), (40, 90), (33, 32))]
PAD, VIDEO, TEXT = 1, 2, 0
PIECES = st.lists(
    st.one_of(
        st.integers(1, 9).map(lambda n: ("text", n)),
        st.integers(1, 6).map(lambda n: ("image", n)),
        st.integers(1, 6).map(lambda n: ("video", n)),
    ),
    min_size=1,
    max_size=12,
)


def build(pieces, trained_seed):
    """Return a sample of text, images and videos in this order, and the spans of its media."""
    ids, spans, images, videos = [], [], [], []
    for kind, count in pieces:
        if kind == "text":
            ids += [TEXT] * count
            continue
        spans.append(Span(kind, len(ids), len(ids) + count))
        ids += [PAD if kind == "image" else VIDEO] * count
        (images if kind == "image" else videos).append((1, 2, 2 * count))
    ids = np.array(ids, dtype=np.int32)
    trained = (np.random.default_rng(trained_seed).random(len(ids)) < 0.4) & (ids == TEXT)
    return Sample(ids, trained, tuple(images), tuple(videos)), spans


@settings(max_examples=400)
@given(PIECES, st.integers(1, 80), st.one_of(st.none(), st.integers(1, 6)), st.integers(0, 9))
def test_a_cut_is_the_longest_that_is_safe(pieces, max_tokens, max_images, seed):
    sample, spans = build(pieces, seed)
    cut = truncate(sample, spans, max_tokens, max_images)
    end = len(cut.ids_S)
    # The cut is a beginning of the sample, with its own trained tokens.
    assert cut.ids_S.tolist() == sample.ids_S[:end].tolist()
    assert cut.trained_S.tolist() == sample.trained_S[:end].tolist()
    # The remaining patches belong to the remaining placeholders, image by image.
    assert int((cut.ids_S == PAD).sum()) == sum(h * w // 4 for _, h, w in cut.image_grids)
    assert int((cut.ids_S == VIDEO).sum()) == sum(h * w // 4 for _, h, w in cut.video_grids)
    assert cut.image_grids == sample.image_grids[: len(cut.image_grids)]
    assert end <= max_tokens
    assert max_images is None or len(cut.image_grids) <= max_images

    def safe(place):
        images = sum(s.kind == "image" and s.end <= place for s in spans)
        inside = any(s.start < place < s.end for s in spans)
        return place <= max_tokens and not inside and images <= (max_images or 99)

    longest = max((p for p in range(len(sample.ids_S) + 1) if safe(p)), default=0)
    if max_images is None:
        assert end == longest
    else:  # the first surplus image and everything after it are removed
        assert end <= longest and safe(end)


def record(images, words=3):
    parts = [image(64, 64, seed) for seed in range(images)]
    return {
        "messages": [
            say("user", text("a"), parts[0], text("b")),
            say("assistant", "x" * words),
            say("user", *parts[1:], text("c")),
            say("assistant", "y"),
        ]
    }


def test_image_safe_keeps_the_first_turn_whole(reader):  # noqa: F811
    whole = reader().encode(record(3), "x:1")
    token = reader().encoder.renderer.tokenizer.convert_tokens_to_ids
    second = whole.ids_S.tolist().index(token("<|vision_start|>"), 10)
    third = whole.ids_S.tolist().index(token("<|vision_start|>"), second + 1)
    for limit, num_images, length in (
        (second + 3, 1, second),  # inside the second image, which is removed with its bracket
        (second + 1, 1, second),
        (second, 1, second),
        (third - 1, 1, second),  # one token short of its closing bracket
        (third, 2, third),
        (third + 1, 2, third),
        (len(whole.ids_S) - 1, 3, len(whole.ids_S) - 1),
    ):
        cutting = reader(truncation="image_safe", max_tokens=limit)
        sample = cutting.encode(record(3), "x:1")
        assert (len(sample.image_grids), len(sample.ids_S)) == (num_images, length)
        row = cutting.row(record(3), "x:1", sample)
        assert len(row.pixel_values_PC) == 16 * num_images


def test_too_many_images(reader):  # noqa: F811
    for truncation, error, words in (
        ("error", DataError, "x:1: data.max_images=2 is below its 3 images; raise the limit"),
        ("drop", RecordDropped, "above data.max_tokens or data.max_images"),
    ):
        with pytest.raises(error) as refusal:
            reader(truncation=truncation, max_images=2).encode(record(3), "x:1")
        assert words in str(refusal.value)
    sample = reader(truncation="image_safe", max_images=2).encode(record(3), "x:1")
    assert len(sample.image_grids) == 2


def test_too_long(reader):  # noqa: F811
    with raises(DataError, place="x:1", key="data.max_tokens", found=20):
        reader(max_tokens=20).encode(record(2), "x:1")
    with pytest.raises(RecordDropped, match="nothing left to learn after the cut"):
        reader(max_tokens=8, truncation="image_safe").encode(record(2), "x:1")


@pytest.mark.parametrize("limits", [{"max_tokens": 20}, {"max_images": 0}, {"max_tokens": 9}])
def test_a_prompt_is_never_cut(limits, reader):  # noqa: F811
    asked = [say("user", image(64, 64), text("a")), say("assistant", "b"), say("user", "c " * 5000)]
    for kind, truncation in product(("chat", "prompt"), ("image_safe", "drop", "error")):
        limited = replace(reader(truncation=truncation, **limits), kind=kind)
        refused = DataError if truncation == "error" else RecordDropped
        for messages in (asked[:1] * 3, asked):  # by its tokens, and by the length of its text
            with pytest.raises(refused, match=r"data\.max_(tokens|images)"):
                limited.encode({"messages": messages}, "x:1", prompt=kind == "chat")
    fits = reader(truncation="image_safe", max_tokens=60)
    whole = reader().encode({"messages": asked[:1]}, "x:1", prompt=True)
    assert fits.encode({"messages": asked[:1]}, "x:1", prompt=True).ids_S.tolist() == (
        whole.ids_S.tolist()
    )


@pytest.mark.parametrize(
    ("name", "limits", "remedy"),
    [
        ("text", {"max_tokens": 8}, ""),
        ("image", {"max_tokens": 8}, " lower data.max_pixels,"),
        ("video", {"max_tokens": 8}, " lower data.video.max_pixels or data.video.max_frames,"),
        ("image", {"max_images": 0}, ""),
    ],
)
def test_what_is_too_long_is_told_what_would_make_it_shorter(name, limits, remedy, reader):  # noqa: F811
    frames = {"type": "video", "video": [image(64, 64)["image"]] * 4}
    content = {"text": text("a " * 9), "image": image(64, 64), "video": frames}[name]
    with pytest.raises(DataError) as error:
        reader(**limits).encode({"messages": [say("user", content), say("assistant", "b")]}, "x:1")
    assert f"; raise the limit,{remedy} or set data.truncation to" in str(error.value)


@pytest.mark.parametrize("truncation", ["error", "drop", "image_safe"])
def test_a_text_too_long_to_fit_is_never_tokenized(truncation, reader, monkeypatch):  # noqa: F811
    """The tokens of a word of 10 MB take gigabytes; see test_hostile.py."""
    limited = reader(truncation=truncation, max_tokens=512)
    lengths = []
    tokenize = ChatRenderer._tokenize
    monkeypatch.setattr(
        ChatRenderer,
        "_tokenize",
        lambda self, pieces: lengths.append(sum(map(len, pieces))) or tokenize(self, pieces),
    )
    long = {"messages": [say("user", "Say a."), say("assistant", "a" * 10**6)]}
    if truncation == "image_safe":
        assert len(limited.encode(long, "x:1").ids_S) == 512
    else:
        words = r"x:1: data\.max_tokens=512 .* \d+ tokens or more; raise the limit"
        error, words = (DataError, words) if truncation == "error" else (RecordDropped, "above")
        with pytest.raises(error, match=words):
            limited.encode(long, "x:1")
    assert max(lengths, default=0) < 10**5


ANY = st.text(max_size=60) | st.text("\u1112\u1161\u11ab\u03b1\u0313\u0301 \n", max_size=60)


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma4"])
def renderer(request, tiny):
    return make_encoder(tiny(family=request.param), DataConfig()).renderer


@given(words=ANY)
@example(words=" " * 60)  # Gemma has tokens of many blanks, each three bytes to its tokenizer
def test_no_text_has_fewer_tokens_than_its_least(words, renderer):
    ids = renderer.tokenizer(words * 9, add_special_tokens=False)["input_ids"]
    assert renderer.min_tokens_of(words * 9) <= len(ids)


def test_a_first_token_is_no_end_of_text(renderer):
    """Gemma's tokenizer begins each text with <bos>, which its template writes itself."""
    assert renderer.end_of_text == ()


UNLIMITED = {"max_tokens": 99999, "max_images": None, "truncation": "error"}


@pytest.fixture(scope="module")
def escaping(reader):  # noqa: F811
    return reader(special_tokens="escape")


WORDS = st.text(alphabet="ab \n.é三<|>", max_size=12) | st.just("<|im_end|>\n<|im_start|>user\n")
PARTS = st.lists(
    st.one_of(WORDS.map(text), st.integers(0, 3).map(PICTURES.__getitem__)), max_size=4
)
LONG = st.sampled_from(["ab", "a b\n", "\u1112\u1161\u11ab ", "<|im_end|>"])
PARTS |= LONG.map(lambda word: [text(word * 700)])
TURNS = st.lists(st.tuples(PARTS, WORDS), min_size=1, max_size=4)


@pytest.mark.full
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(turns=TURNS, max_tokens=st.integers(5, 120), max_images=st.sampled_from([None, 1, 2]))
def test_random_records_are_cut_safely(turns, max_tokens, max_images, escaping):
    """The placeholders match the remaining patches, and some tokens are trained."""
    messages = []
    for parts, answer in turns:
        messages += [say("user", *parts, text("?")), say("assistant", answer + "!")]
    cutter = escaping
    cutter.encoder.cfg = replace(cutter.encoder.cfg, **UNLIMITED)
    whole = cutter.encode({"messages": messages}, "x:1")
    limits = {"max_tokens": max_tokens, "max_images": max_images, "truncation": "image_safe"}
    cutter.encoder.cfg = replace(cutter.encoder.cfg, **limits)
    try:
        sample = cutter.encode({"messages": messages}, "x:1")
    except RecordDropped:
        assert not whole.trained_S[1:max_tokens].any() or whole.image_grids
        return
    assert len(sample.ids_S) <= max_tokens and sample.num_supervised
    assert whole.ids_S[: len(sample.ids_S)].tolist() == sample.ids_S.tolist()
    assert max_images is None or len(sample.image_grids) <= max_images
    row = cutter.row({"messages": messages}, "x:1", sample)  # checks each image's placeholders
    patches = 0 if row.pixel_values_PC is None else len(row.pixel_values_PC)
    renderer = cutter.encoder.renderer
    assert patches == 4 * int((row.ids_S == renderer.image_id).sum())
    opened, closed = (
        int((row.ids_S == token).sum())
        for token in (renderer.vision_start_id, renderer.vision_end_id)
    )
    assert opened == closed == len(sample.image_grids)
    assert len(renderer.tokenizer.decode(whole.ids_S).split("<|im_start|>")) >= 2 * len(turns)


SETTINGS = ImageSettings(min_pixels=4096, max_pixels=200_000)


@settings(max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_equal_hugging_face(height, width):
    if max(height, width) > 200 * min(height, width):
        return
    expected = smart_resize(height, width, 32, SETTINGS.min_pixels, SETTINGS.max_pixels)
    assert SETTINGS.resized_size(height, width) == expected


@settings(max_examples=40)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 99), st.booleans())
def test_patches_equal_hugging_face_bit_for_bit(height, width, seed, clip):
    if max(height, width) > 200 * min(height, width):
        return
    mean, std = ((0.481, 0.458, 0.408), (0.269, 0.261, 0.276)) if clip else ((0.5,) * 3, (0.5,) * 3)
    chosen = replace(SETTINGS, mean=mean, std=std)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        size={"shortest_edge": chosen.min_pixels, "longest_edge": chosen.max_pixels},
        image_mean=list(mean),
        image_std=list(std),
    )
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = PIL.Image.fromarray(values)
    expected = processor(images=[picture], return_tensors="pt")
    patches = torch.from_numpy(chosen.patches(picture))
    assert torch.equal(chosen.pixel_values(patches, chosen.table()), expected["pixel_values"])
    assert chosen.grid(height, width) == tuple(expected["image_grid_thw"][0].tolist())


def test_video_patches_expand_without_repeating():
    patches = torch.arange(2 * 1536).remainder(256).to(torch.uint8).view(2, 1536)
    expected = (patches.double() / 255).float().sub(0.5).div(0.5)
    assert torch.equal(SETTINGS.pixel_values(patches, SETTINGS.table()), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"do_resize": False}, "do_resize=false is not supported; give true"),
        ({"size": {"shortest_edge": 9999, "longest_edge": 99}}, "min_pixels=9999 .*max_pixels=99"),
        (None, "the checkpoint's image processor settings are needed"),
    ],
)
def test_image_settings_that_cannot_be(change, words, tmp_path):
    if change is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(ConfigError, match=words):
        ImageSettings.from_checkpoint(tmp_path)


RELEASED = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
SMALL = {"size": {"longest_edge": 8192, "shortest_edge": 2048}, "image_std": [0.25, 0.5, 1]}


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config.json": RELEASED},
        {"processor_config.json": {"image_processor": RELEASED | SMALL}},
        {
            "preprocessor_config.json": RELEASED,
            "processor_config.json": {"image_processor": RELEASED | SMALL},
        },
        {
            "preprocessor_config.json": RELEASED | SMALL,
            "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
        },
    ],
)
def test_image_settings_are_what_hugging_face_reads(files, tmp_path):
    """Qwen3.5 has the files and the processors of Qwen3-VL."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours = ImageSettings.from_checkpoint(tmp_path)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    for key in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert (ours.mean, ours.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    size = theirs.size
    assert (ours.min_pixels, ours.max_pixels) == (size.shortest_edge, size.longest_edge)


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": "cut"},
        {"special_tokens": "allow"},
        {"max_errors": -1},
        {"train_on": "assistant"},
        {"train_on": ["robot"]},
        {"max_tokens": 0},
        {"num_workers": -1},
    ],
)
def test_wrong_data_settings_name_their_key(change):
    with pytest.raises(ConfigError, match=f"data.{next(iter(change))}="):
        check_values(Config(data=DataConfig(**change)))
