# .venv/bin/python -m pytest tests/data/test_index.py
"""The cache of encoded text: correct, complete, and safe with many processes at once."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import Config, DataConfig, ModelConfig, VideoLimits
from megatron_vlm.data.batches.data_warnings import Remarks
from megatron_vlm.data.batches.dataset import NoSampleError, open_data
from megatron_vlm.data.tokens import index as indexing
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from tests.support.chats import CHATS, say
from tests.support.error_fields import raises
from tests.support.limits import files_of_at_most
from tests.support.sets import data_config, open_set, write_set


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(indexing, "CHUNK", 5)


def samples(data):
    """Return all samples of the index by record."""
    (index,) = data.indexes
    return {
        int(record): (s.ids_S.tolist(), s.trained_S.tolist(), s.image_grids, s.video_grids)
        for record, s in zip(index.records, map(index.__getitem__, range(len(index))), strict=True)
    }


def test_the_index_is_what_the_reader_gives(tiny, tmp_path, small_chunks):
    data = open_set(write_set(tmp_path), tiny(), tmp_path / "cache")
    (index,), (source,), (reader,) = data.indexes, data.sources, data.readers
    assert len(index) == 23
    for place in range(23):
        record = int(index.records[place])
        expected = reader.encode(source[record], "x")
        actual = index[place]
        assert actual.ids_S.tolist() == expected.ids_S.tolist()
        assert actual.trained_S.tolist() == expected.trained_S.tolist()
        assert actual.image_grids == expected.image_grids
        assert index.tokens[place] == len(expected.ids_S)
        assert index.supervised[place] == expected.num_supervised
        assert index.patches[place] == expected.num_patches
        assert index.patch_pairs[place] == expected.patch_pairs
        assert index.images[place] == len(expected.image_grids)


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_of_pairs_are_known_in_both_parts_of_a_split(held_out, tiny, tmp_path, small_chunks):
    path, sizes = tmp_path / "pairs.jsonl", read_sizes(tiny())
    records = [dict(prompt=f"{n}?", chosen="a" * n, rejected="b " * (20 - n)) for n in range(1, 13)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = parse_sources(str(path), "data.train"), "data.train", data_config(None, split=5.0)
    data = open_data(*given, tiny(), sizes, kind="pair", held_out=held_out)
    (index,) = data.indexes
    assert len(index) == (5 if held_out else 7)
    for sample in range(len(index)):
        lengths = [len(row.ids_S) for row in index.example(sample)]
        assert index.lengths(sample) == lengths and len(set(lengths)) == 2
        assert index.longest[sample] == max(lengths)


def encodes(monkeypatch):
    """Return a list that gets an item for each record encoded from now on."""
    calls = []
    encode = Reader.encode_example

    def counted(*args):
        calls.append(args[2])
        return encode(*args)

    monkeypatch.setattr(Reader, "encode_example", counted)
    return calls


def test_what_is_cached_is_not_encoded_again(tiny, tmp_path, small_chunks, monkeypatch):
    path, cache = write_set(tmp_path), tmp_path / "cache"
    calls = encodes(monkeypatch)
    first = samples(open_set(path, tiny(), cache))
    assert len(calls) == 23
    assert samples(open_set(path, tiny(), cache)) == first
    assert len(calls) == 23
    one = next(cache.rglob("*.safetensors"))
    one.unlink()
    assert samples(open_set(path, tiny(), cache)) == first
    assert len(calls) in (28, 26)  # one chunk of five, or the last one of three
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(path, copy / "other-name.jsonl")
    open_set(str(copy / "other-name.jsonl"), tiny(), cache, image_root=str(tmp_path))
    assert len(calls) <= 28  # the content counts, not the name


def test_every_deciding_setting_makes_a_new_entry(tiny, tmp_path, monkeypatch):
    path, cache = write_set(tmp_path), tmp_path / "cache"
    open_set(path, tiny(), cache)
    calls, wrong = encodes(monkeypatch), []
    for change in (
        {"max_tokens": 100, "truncation": "drop"},
        {"train_on": "last_assistant"},
        {"special_tokens": "escape"},
        {"ignore_keys": ("reward",)},
        {"template_kwargs": {"has_system": True}},
        {"min_pixels": 4096},
        {"video": VideoLimits(fps=1.0)},
        {"max_images": 3},
        {"exif_orientation": False},
    ):
        calls.clear()
        open_set(path, tiny(), cache, **change)
        wrong += [change] * (len(calls) != 23)
    assert not wrong


def test_what_is_ignored_is_part_of_the_fingerprint(tiny, tmp_path):
    """A resumed run recognizes its data by the fingerprint."""
    from megatron_vlm.training.data_fingerprint import fingerprint  # Megatron is slow to import

    data = open_set(write_set(tmp_path), tiny(), tmp_path / "cache")
    rules: tuple[dict[str, Any], ...] = ({}, {"ignore_keys": ("reward",)})
    rules += ({"template_kwargs": {"level": 3}},)
    rules += ({"video": VideoLimits(fps=1.0)}, {"video": VideoLimits(max_frames=8)})
    model = ModelConfig(path=tiny())
    first, *others = (fingerprint(data, Config(model=model, data=DataConfig(**r))) for r in rules)
    assert first.changed_rows(first) == first.changed_order(first) == []
    keys = ("ignore_keys", "template_kwargs", "video", "video")
    for key, other in zip(keys, others, strict=True):
        assert first.changed_order(other) == []
        assert [f"data.{key}" in change for change in first.changed_rows(other)] == [True]


def test_another_content_or_tokenizer_makes_a_new_entry(tiny, tmp_path, monkeypatch):
    path, cache = write_set(tmp_path), tmp_path / "cache"
    open_set(path, tiny(), cache)
    calls = encodes(monkeypatch)
    content = Path(path).read_text()
    Path(path).write_text(content.replace("word", "Word", 1))
    open_set(path, tiny(), cache)
    assert len(calls) == 23
    Path(path).write_text(content)
    other = tmp_path / "other"
    shutil.copytree(tiny(), other)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template + "{# another #}")
    open_set(path, str(other), cache)
    assert len(calls) == 46


def test_settings_that_decide_nothing_share_an_entry(tiny, tmp_path, monkeypatch):
    path, cache = write_set(tmp_path), tmp_path / "cache"
    open_set(path, tiny(), cache)
    calls = encodes(monkeypatch)
    open_set(path, tiny(), cache, seed=9, max_errors=100, prefetch=7)
    assert not calls


def test_with_the_cache_off_nothing_stays(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = write_set(tmp_path)
    assert len(open_set(path, tiny(), None).order) == 23
    assert not (tmp_path / "home").exists()


def wrong_and_dropped(tmp_path):
    path = Path(write_set(tmp_path, 12))
    lines = path.read_text().splitlines()
    lines[3] = "not JSON"
    lines[7] = json.dumps({"messages": [say("robot", "a")]})
    lines[8] = json.dumps({"messages": [say("user", "a")]})  # nothing to learn
    path.write_text("\n".join(lines))
    return str(path)


def test_wrong_records_stop_a_run(tiny, tmp_path):
    path = wrong_and_dropped(tmp_path)
    with pytest.raises(DataError, match=r"train\.jsonl:4: is not a line of JSON"):
        open_set(path, tiny(), tmp_path / "cache")
    with raises(DataError, key="data.max_errors", found=1, problem_has=" 2 "):
        open_set(path, tiny(), tmp_path / "cache", max_errors=1)


def test_wrong_records_are_skipped_and_counted(tiny, tmp_path, small_chunks, caplog):
    caplog.set_level("INFO", "megatron_vlm.data")
    path = wrong_and_dropped(tmp_path)
    data = open_set(path, tiny(), tmp_path / "cache", max_errors=100)
    dropped, errors = data.faults()
    assert dict(dropped) == {"nothing to learn": 1}
    assert [error.split("train.jsonl")[1][:3] for error in errors] == [":4:", ":8:"]
    assert f"dropped {path}:9: nothing to learn" in caplog.messages
    assert f"skipped {errors[0]}" in caplog.messages
    assert sorted(data.indexes[0].records.tolist()) == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    assert len(data.order) == 9


def test_all_unknown_keys_of_a_file_are_named_at_once(tiny, tmp_path, small_chunks):
    path = Path(write_set(tmp_path, 12))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for place, record in enumerate(records):
        record |= {"score": place} | ({"imagse": "a"} if place in (3, 11) else {})
    records[7]["messages"][1]["rank"] = 2
    records[9] = "no record"
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError) as error:
        open_set(str(path), tiny(), tmp_path / "cache")
    keys = "'imagse' (most likely 'images'; 2 records), 'rank' (message 1; 1 record) is not known"
    assert f"{path}:4: the meaning of {keys}" in str(error.value)
    assert str(error.value).endswith("set data.ignore_keys=[imagse,rank]")
    with pytest.raises(DataError, match=r"'score'.*11 records.*'imagse'"):
        open_set(str(path), tiny(), tmp_path / "cache", unknown_keys="refuse")


def test_keys_that_are_passed_over_are_counted(tiny, tmp_path, small_chunks):
    """Keys of cached records are counted, too."""
    path = wrong_and_dropped(tmp_path)
    content = Path(path).read_text()
    Path(path).write_text(content.replace('{"messages"', '{"meta": 1, "messages"'))
    for _ in range(2):
        data = open_set(path, tiny(), tmp_path / "cache", max_errors=100)
        cfg = data_config(None)
        remarks = Remarks.from_data(data, "data.train", cfg)
        assert (remarks.dropped, remarks.wrong) == (1, 2)
        assert len(remarks.lines) == 3 and "'meta' (10)" in remarks.lines[-1]
        assert "2 of 12 records wrong and skipped, the first: " in remarks.lines[1]
        quiet = Remarks.from_data(data, "data.train", replace(cfg, unknown_keys="ignore"))
        assert quiet.lines == remarks.lines[:-1]


def test_what_is_cut_is_counted_and_a_prompt_is_left_out(tiny, tmp_path, small_chunks):
    """The cache knows it, too, and a pair counts once."""
    long, short = "a " * 200, "a"
    chats = [[say("user", short), say("assistant", each)] for each in (short, long, long)]
    chats.append([say("user", long), say("assistant", short)])
    path = tmp_path / "asks.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    options = {"truncation": "image_safe", "max_tokens": 60}
    for _ in range(2):
        data = open_set(str(path), tiny(), tmp_path / "cache", **options)
        remarks = Remarks.from_data(data, "data.train", data_config(None, **options))
        assert (remarks.dropped, remarks.truncated, len(data.order)) == (1, 2, 3)
        assert any("2 of 4 records cut to the limits; " in line for line in remarks.lines)
        asks = open_set(str(path), tiny(), tmp_path / "cache", kind="prompt", **options)
        assert dict(asks.faults()[0]) == {"above data.max_tokens or data.max_images": 1}
        assert (asks.truncated, len(asks.order)) == (0, 3)
    pairs = [{"messages": chats[0], "rejected": [say("assistant", long)]}]
    pairs.append({"messages": chats[1], "rejected": [say("assistant", "b " * 200)]})
    path.write_text("\n".join(map(json.dumps, pairs)))
    assert open_set(str(path), tiny(), None, kind="pair", **options).truncated == len(pairs)


def test_a_mended_record_is_found(tiny, tmp_path, small_chunks):
    """A missing picture is not part of the file's digest, so its chunk must not be cached."""
    path = write_set(tmp_path, 12)
    away = tmp_path / "images" / "7-1.png"
    away.rename(tmp_path / "away.png")
    data = open_set(path, tiny(), tmp_path / "cache", max_errors=100)
    assert "no file images/7-1.png" in data.faults()[1][0]
    (tmp_path / "away.png").rename(away)
    assert len(open_set(path, tiny(), tmp_path / "cache").order) == 12


def test_a_set_with_nothing_left_says_why(tiny, tmp_path):
    path = write_set(tmp_path, 3)
    with raises(NoSampleError, key="data.train", problem_has=": 3 "):
        open_set(path, tiny(), tmp_path / "cache", max_tokens=3, truncation="drop")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError) as caught:
        open_set(str(tmp_path / "empty.jsonl"), tiny(), tmp_path / "cache")
    assert caught.value.place.endswith("empty.jsonl")


def build(path, model, cache, share, results):
    indexing.CHUNK = 2
    results.put((share[0], samples(open_set(path, model, cache, share))))


@pytest.mark.full
def test_many_processes_at_once(tiny, tmp_path):
    """Four processes build one cache together, after another one was killed while it did."""
    path, model, cache = write_set(tmp_path, 60), tiny(), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    builders = [
        context.Process(target=build, args=(path, model, cache, (rank, 4), results))
        for rank in range(4)
    ]
    victim = context.Process(target=build, args=(path, model, cache, (2, 4), results))
    victim.start()
    while not list(cache.rglob("*.safetensors")):
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    for builder in builders:
        builder.start()
    outcomes = [results.get()[1] for _ in builders]
    for builder in builders:
        builder.join()
    assert all(one == outcomes[0] for one in outcomes)
    assert len(outcomes[0]) == 60


def test_a_cached_sample_whose_image_changed_is_an_error(tiny, tmp_path):
    path = write_set(tmp_path, 4)
    data = open_set(path, tiny(), tmp_path / "cache")
    shutil.copy(tmp_path / "images" / "3-2.png", tmp_path / "other.png")
    from tests.support.chats import picture

    picture(200, 200).save(tmp_path / "images" / "1-0.png")
    with pytest.raises(DataError, match=r"the file has changed; delete data\.cache_dir"):
        data.row((0, 1))


def test_weights_survive_the_cache(tiny, tmp_path, small_chunks):
    """Chunks without weights store none, and neither do samples without weights."""

    def record(weight):
        return {"messages": [say("user", "a"), say("assistant", "b", weight=weight)]}

    path = tmp_path / "weights.jsonl"
    weights = [1] * 5 + [0.25, 1, True, 2, None]
    path.write_text("".join(json.dumps(record(weight)) + "\n" for weight in weights))
    for _ in range(2):
        (index,) = open_set(str(path), tiny(), tmp_path / "cache").indexes
        assert [file.weighted for file in index.files] == [False, True]
        encoded = [index[place] for place in range(len(weights))]
        assert [sample.weights_S is None for sample in encoded] == [
            weight not in (0.25, 2) for weight in weights
        ]
        for sample, weight in zip(encoded, weights, strict=True):
            if sample.weights_S is not None:
                assert (sample.weights_S[sample.trained_S] == weight).all()
                assert not sample.weights_S[~sample.trained_S].any()


def test_a_flipped_bit_in_the_cache_changes_no_sample(tiny, tmp_path, caplog):
    """After a flipped bit the chunk is made again, or the sample is refused by the file's name."""
    path = write_set(tmp_path, 4)
    data = open_set(path, tiny(), tmp_path / "cache")
    (source,), expected = data.sources, samples(data)
    (file,) = (tmp_path / "cache" / "text").rglob("*.safetensors")
    content = file.read_bytes()
    flipped = tmp_path / "flipped.safetensors"
    outcomes: Counter[str] = Counter()
    for place in range(0, len(content), 5):
        mask = 1 << place % 8
        flipped.unlink(missing_ok=True)  # a mapped file must not change
        flipped.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        if (cached := indexing._open_cached(flipped)) is None:
            outcomes["made again"] += 1
            continue
        index = indexing.Index(source, [cached])
        try:
            actual = samples(replace(data, indexes=(index,)))
        except DataError as error:
            assert str(error).startswith(f"{flipped}: the cache is damaged: ")
            outcomes["refused"] += 1
        else:
            assert (actual, index.faults) == (expected, data.indexes[0].faults), place
            outcomes["read"] += 1
    assert outcomes["made again"] > 100 and outcomes["refused"] > 100, outcomes
    assert outcomes["read"] < 10, outcomes  # padding of the header


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b'"I64"', b'"F64"'),
        (b'"I32"', b'"F32"'),
        (b'"weights"', b'"weightz"'),
        (b"nothing to learn", b"something to lea"),
    ],
)
def test_another_header_in_the_cache_is_no_other_meaning(right, wrong, tiny, tmp_path, caplog):
    """Such a header may still be valid for safetensors."""
    records = [[say("user", "a"), say("assistant", "b", weight=weight)] for weight in (1, 0.25, 0)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in records))
    data = open_set(str(path), tiny(), tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "text").rglob("*.safetensors")
    content = file.read_bytes()
    assert right in content
    file.unlink()  # a mapped file must not change
    file.write_bytes(damaged := content.replace(right, wrong, 1))
    reopened = open_set(str(path), tiny(), tmp_path / "cache")
    if file.read_bytes() == damaged:  # the samples are read later
        with pytest.raises(DataError, match=f"{file}: the cache is damaged"):
            samples(reopened)
    else:
        assert "it is made again" in caplog.text
        assert samples(reopened) == samples(data)
        assert reopened.indexes[0].faults == data.indexes[0].faults


def test_every_chat_survives_the_cache(tiny, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in CHATS.values()))
    data = open_set(str(path), tiny(), tmp_path / "cache")
    corpus = json.loads((Path(__file__).parents[1] / "golden" / "chat_ids.json").read_text())
    assert [ids for ids, *_ in samples(data).values()] == [corpus[name] for name in CHATS]


@pytest.mark.parametrize("packed", [False, True])
def test_an_unwritable_cache_is_done_without(packed, tiny, tmp_path, caplog):
    """The cache is a file here. The samples are the same, and each use of the cache warns once."""
    path = write_set(tmp_path)
    (tmp_path / "cache").write_text("a file")
    if packed:
        packed_path = tmp_path / "train.jsonl.gz"
        packed_path.write_bytes(gzip.compress(Path(path).read_bytes()))
        path = str(packed_path)
    actual = open_set(path, tiny(), tmp_path / "cache")
    expected = open_set(path, tiny(), tmp_path / "other")
    assert len(actual.order) == len(expected.order) == 23
    actual_ids, expected_ids = (each.indexes[0][22].ids_S for each in (actual, expected))
    assert actual_ids.tolist() == expected_ids.tolist()
    warnings = [each for each in caplog.messages if "continuing without data.cache_dir" in each]
    assert len(warnings) == 1 + packed and str(tmp_path / "cache") in warnings[0]
    assert (tmp_path / "cache").read_text() == "a file"


def test_a_full_disk_for_what_is_not_cached_is_a_sentence(tiny, tmp_path):
    path, model = write_set(tmp_path), tiny()
    failed = r"cannot be written: .*; free space there, or set"
    with files_of_at_most(64), pytest.raises(DataError, match=failed):
        open_set(path, model, None)
