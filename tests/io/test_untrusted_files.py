# .venv/bin/python -m pytest tests/io/test_untrusted_files.py
"""Whatever is in the place of a file, and whatever is in it, is refused in one sentence."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.checkpoint.manifest import Manifest, read_manifest, write_file, write_manifest
from megatron_vlm.checkpoint.run_checkpoints import find_checkpoint
from megatron_vlm.cli import main
from megatron_vlm.config import ConfigFile
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.media.media import MediaPolicy, resolve_path
from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.data.sources.stream import open_stream
from megatron_vlm.data.sources.text_files import parse_json
from megatron_vlm.data.tokens.reader import make_encoder
from megatron_vlm.data.tokens.tokenizer import stop_ids
from megatron_vlm.errors import CheckpointError, ConfigError, DataError, MegatronVLMError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.checkpoint_files import is_regular_file, settings_digests
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.untrusted import (
    MAX_JSON_DEPTH,
    JsonField,
    UntrustedFile,
    home_path,
    is_too_deep,
)
from megatron_vlm.report.run import write_report
from megatron_vlm.run.evaluation.evaluate import read_candidates
from tests.support.error_fields import raises
from tests.support.mutation import nested

FILE = UntrustedFile("a.json", ConfigError, "mend it")


def loop(path: Path) -> None:
    path.symlink_to(path)


# What may stand in the place of a file. Whoever opened the first two would wait for ever.
PLACES: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "symbolic links": loop,
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
}


def load_weights(folder: Path) -> None:
    source = HFCheckpoint(folder)
    source.read_headers()


def encoder(folder: Path) -> None:
    make_encoder(str(folder), DataConfig())


def read_stream(path: str) -> None:
    list(open_stream([SourceSpec(path, streaming=True)], DataConfig(), True).records(0, None))


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_sizes,
    "generation_config.json": lambda folder: stop_ids(folder, (1,)),
    "preprocessor_config.json": encoder,
    "video_preprocessor_config.json": encoder,
    "processor_config.json": encoder,
    "tokenizer.json": encoder,
    "tokenizer_config.json": encoder,
    "chat_template.jinja": encoder,
    "model.safetensors": load_weights,
    "metrics.jsonl": write_report,
    "config.yaml": write_report,
    "examples.json": write_report,
    "samples.jsonl": write_report,
    "complete.json": read_manifest,
    "merges.txt": settings_digests,
    "names.txt": lambda folder: read_candidates(str(folder / "names.txt")),
    "train.jsonl": lambda folder: open_source(SourceSpec(str(folder / "train.jsonl")), None, None),
    "stream.jsonl": lambda folder: read_stream(str(folder / "stream.jsonl")),
    "clip.mp4": lambda folder: resolve_path("clip.mp4", MediaPolicy(str(folder)), str(folder)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_opened(name, place, tiny, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny(), folder)
    drawn = {"prompts": 1, "asked": 1, "longest_answer": 1, "figures": {}}
    drawn |= dict.fromkeys(("reward", "reward_std", "alike", "answer_tokens", "cut"), 0.5)
    line = {"kind": "rl", "step": 0, **drawn, "turns": 1, "sampling_s": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(line))
    (folder / name).unlink(missing_ok=True)
    PLACES[place](folder / name)
    if name in ("examples.json", "samples.jsonl"):  # the rest of the page is shown
        write_report(folder)
        assert f"{name} cannot be read" in (folder / "report.html").read_text()
        return
    with pytest.raises(MegatronVLMError) as caught:
        READERS[name](folder)
    assert str(folder) in str(caught.value)
    assert name in str(caught.value) or place in str(caught.value), caught.value


def test_a_loop_of_links_in_a_model_is_left_out_of_its_export(tmp_path):
    loop(tmp_path / "notes.txt")
    assert not is_regular_file(tmp_path / "notes.txt")


@pytest.mark.parametrize("words", [["export", "OLD", "new"], ["chat", "OLD"]], ids=lambda w: w[0])
def test_a_path_that_is_too_long_is_a_mistake(words, capfd):
    assert main([{"OLD": "x" * 5000}.get(word, word) for word in words]) == 2
    said = capfd.readouterr().err
    assert "cannot be used: File name too long; give a shorter path" in said


def test_a_home_folder_of_nobody_is_a_path_like_any_other():
    """Path.expanduser raises RuntimeError."""
    path = "~no-such-user/a"
    assert str(home_path(path)) == path and home_path("~") == Path.home()
    with pytest.raises(ConfigError, match=r"no-such-user/a.* has no config\.json"):
        read_sizes(path)
    with pytest.raises(ConfigError, match="--config: ~no-such-user/a"):
        ConfigFile.read(path)


def field(value: Any) -> JsonField:
    return JsonField({"a": {"b": [value]}}, "", FILE)


@pytest.mark.parametrize(
    ("value", "read", "allowed"),
    [
        (True, lambda f: f.whole(), "a whole number from 0 to"),
        (1.0, lambda f: f.whole(), "a whole number"),
        (7, lambda f: f.whole(1, 6), "a whole number from 1 to 6"),
        (float("nan"), lambda f: f.number(), "a finite number"),
        (10**400, lambda f: f.number(), "a finite number"),
        (0.5, lambda f: f.number(1, 2), "a finite number from 1 to 2"),
        (None, lambda f: f.string(), "text"),
        ("c", lambda f: f.items(), "a list"),
        ([], lambda f: f.object(), "an object"),
    ],
)
def test_a_value_of_another_type_is_named_by_its_path(value, read, allowed):
    fields = {"place": "a.json", "key": "a.b[0]", "allowed_has": allowed, "remedy": "mend it"}
    with raises(ConfigError, **fields) as caught:
        read(field(value)["a"]["b"].items()[0])
    assert caught.value.found is value and f"is not {allowed}" in str(caught.value)


def test_a_value_that_is_missing_is_named_by_its_path():
    with raises(ConfigError, place="a.json", key="a.b[0].c", remedy="mend it"):
        field({})["a"]["b"].items()[0]["c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "is not JSON: 'c' occurs twice in an object"),
        ("[" * 10**5, "nested too deeply"),
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ("[" + "{}," * 2**23, "about"),
        (b'"\xff"', "is not JSON: 'utf-8' codec"),
        ("9" * 5000, "is not JSON: Exceeds the limit"),
    ],
)
def test_json_that_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        FILE.parse(text)
    assert said in str(caught.value) and "a.json: " in str(caught.value)


def test_depth_is_counted():
    assert not is_too_deep(nested(MAX_JSON_DEPTH)) and is_too_deep(nested(MAX_JSON_DEPTH + 1))
    twice: list[Any] = []
    twice += [twice, twice]  # 2**100 paths lead through it
    assert is_too_deep(twice)
    with pytest.raises(DataError, match="a:1: has JSON that is nested too deeply"):
        parse_record({"messages": nested(MAX_JSON_DEPTH + 1)}, "a:1")
    with pytest.raises(DataError, match=r"a:1: is not a line of JSON: 'a' occurs twice"):
        parse_json('{"a": 1, "a": 2}', "a:1")


def test_errors_of_libraries_become_ours_and_ours_stay():
    message = r"^a\.json: cannot be read: KeyError: 'x'; mend it$"
    with pytest.raises(ConfigError, match=message), FILE.wrap_errors("cannot be read"):
        raise KeyError("x")
    with pytest.raises(DataError, match=r"^mine$"), FILE.wrap_errors("cannot be read"):
        raise DataError("mine")
    with pytest.raises(KeyboardInterrupt), FILE.wrap_errors("cannot be read"):
        raise KeyboardInterrupt


def test_a_manifest_that_is_nested_too_deeply(tmp_path):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    write_manifest(folder, Manifest((write_file(folder / "state.json", [b"{}"]),)))
    assert find_checkpoint(folder) == folder
    (folder / "complete.json").write_text('{"files": ' + "[" * 10**5)
    with raises(CheckpointError, place=str(folder / "complete.json")):
        read_manifest(folder)


def test_a_data_file_that_shrinks_is_not_read_on(tmp_path):
    """It is mapped: reading past its end kills the process."""
    import datasets

    datasets.Dataset.from_list([{"a": "b" * 10_000}] * 9).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    source = open_source(SourceSpec(str(file)), None, None)
    assert source[8]["a"] == "b" * 10_000
    os.truncate(file, 4096)
    with pytest.raises(DataError, match=r"has 4,096 bytes now, and had .* when it was opened"):
        source[8]


def test_an_address_that_is_none(tmp_path):
    with pytest.raises(DataError, match=r"a:1: 'file://\[x' is not a path"):
        resolve_path("file://[x", MediaPolicy(str(tmp_path)), "a:1")


def test_json_files_are_read_by_their_size(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"a": 1}]))
    assert UntrustedFile(str(tmp_path / "a.json")).content(2**40) == b'[{"a": 1}]'
    with pytest.raises(DataError, match="has more than 9 bytes"):
        UntrustedFile(str(tmp_path / "a.json")).content(9)
