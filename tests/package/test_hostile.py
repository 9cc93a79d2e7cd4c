# .venv/bin/python -m pytest tests/package/test_hostile.py
"""Damaged and malicious files: each ends in one sentence that names the file, within bounds of
memory. Programs that pictures would start, and servers that send slowly, are in test_media.py."""

import gzip
import io
import json
import os
import random
import struct
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from megatron_vlm.cli import main
from megatron_vlm.commands.bench.run_benchmarks import rank_of
from megatron_vlm.commands.chat.command import find_model
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.objective_configs import RetrievalForm
from megatron_vlm.config.schema import Config, LoraConfig
from megatron_vlm.data.media.media import MediaPolicy, image_size, read_image
from megatron_vlm.data.media.video_file import iter_frames, probe_video
from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.records.preferences import parse_labelled, parse_pair
from megatron_vlm.data.records.record import Image
from megatron_vlm.data.records.retrieval import parse_retrieval
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.distributed.process import run_guarded
from megatron_vlm.errors import DataError, MegatronVLMError, within
from megatron_vlm.lora.peft_folder import (
    different_settings,
    lora_of,
    read_adapter_config,
    unsupported_options,
)
from megatron_vlm.run.log import RunLog
from tests.support import fuzz
from tests.support.single_process import run_alone

# Arrow files with flipped bits.


def arrow_file(folder: Path) -> Path:
    """Write records with all types of data sets: nested lists, structs, bytes and numbers."""
    records = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"question {i}"}]},
                {"role": "assistant", "content": [{"type": "image", "image": f"{i}.png"}]},
            ],
            "images": [bytes(range(i + 1))],
            "tokens": [[1, 2, i], [3]],
            "score": i / 2,
        }
        for i in range(30)
    ]
    import datasets  # imported only in the process that reads

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(records).save_to_disk(folder / "saved")
    return next((folder / "saved").glob("*.arrow"))


def flipped(content: bytes, number: int) -> bytes:
    """Return the content with one byte changed, or cut off every tenth time."""
    chance = random.Random(number)
    place = chance.randrange(len(content))
    if number % 10 == 0:
        return content[:place]
    value = chance.choice([0, 0x7F, 0xFF, content[place] ^ 1 << chance.randrange(8)])
    return content[:place] + bytes([value]) + content[place + 1 :]


def read_all(path: str) -> str:
    """Return the outcome of reading every record of a file."""
    try:
        source = open_source(SourceSpec(path), None, None)
        for index in range(len(source)):
            try:
                source[index]
            except MegatronVLMError as error:
                assert f"{path}: row {index}: the record is damaged" in str(error)
                return "a record refused"
    except MegatronVLMError as error:
        assert path in str(error), error
        return "refused"
    return "read"


def read_flipped(folder: str, start: int, count: int) -> dict[str, int]:
    content = arrow_file(Path(folder)).read_bytes()
    path = Path(folder) / "flipped.arrow"
    outcomes: Counter[str] = Counter()
    for number in range(start, start + count):
        path.unlink(missing_ok=True)  # a mapped file must not change
        path.write_bytes(flipped(content, number))
        print("flip", number, flush=True)
        outcomes[read_all(str(path))] += 1
    return dict(outcomes)


@pytest.mark.parametrize(
    "count", [60, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_flipped_bit_in_an_arrow_file_kills_nobody(count, tmp_path, process_tree):
    """Arrow itself would follow a damaged offset and die of SIGBUS or SIGSEGV."""
    outcomes = run_alone(process_tree, read_flipped, str(tmp_path), 0, count).result
    assert sum(outcomes.values()) == count
    assert len(outcomes) == 3, outcomes


# Files that unpack to gigabytes.


def zst(content: bytes) -> bytes:
    packed: bytes = pyarrow.Codec("zstd").compress(content, asbytes=True)
    return packed


def read_bomb(path: str, cache: str) -> str:
    try:
        source = open_source(SourceSpec(path), None, Path(cache))
        source[0]
    except MegatronVLMError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize(
    ("packing", "content"),
    [
        pytest.param("gz", b"a", id="one line"),
        pytest.param("zst", b"{}\n", id="short lines", marks=pytest.mark.slow),
        pytest.param("zst", b"\n", id="blank lines", marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_a_packed_bomb_is_refused(packing, content, tmp_path, process_tree):
    """The file unpacks to 4 GB."""
    piece = content * (2**25 // len(content))
    packed = zst(piece) if packing == "zst" else gzip.compress(piece, 6)
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(packed * 128)
    assert path.stat().st_size < 2**23
    outcome = run_alone(process_tree, read_bomb, str(path), str(tmp_path / "cache"))
    assert outcome.result.startswith(f"{path}: unpacks to more than "), outcome
    assert outcome.grown < 200
    assert not list((tmp_path / "cache").rglob("*.*"))


def write_lines(path: Path) -> None:
    """Write lines that take much more memory than file space, and one that is right."""
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n[" + b"{}," * (2**23 - 1) + b"{}]\n" + b"\n" * 2**23 + b'{"right": 1}')


def read_large(path: str) -> list[str]:
    source = open_source(SourceSpec(path), None, None)
    results = []
    for index in range(len(source)):
        try:
            results.append(json.dumps(source[index]))
        except MegatronVLMError as error:
            results.append(str(error))
    return results


@pytest.mark.full
def test_a_record_is_bounded_and_others_are_read(tmp_path, process_tree):
    path = tmp_path / "a.jsonl"
    write_lines(path)
    outcome = run_alone(process_tree, read_large, str(path))
    assert outcome.result == [
        f"{path}:1: is larger than 256 MiB; split it, or give its images as files",
        f"{path}:2: has about {2**24} values in one record, above the limit of {2**22}; mend the "
        "record or drop it",
        '{"right": 1}',
    ]
    assert outcome.grown < 400


# Videos.


def write_video(path: Path, size: tuple[int, int], frames: int) -> bytes:
    """Return black frames as a transport stream, which can be joined to others."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        black = np.zeros((size[1], size[0], 3), np.uint8)
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(black, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


def watch(path: str) -> str:
    try:
        info = probe_video(path)
        return f"{sum(1 for _ in iter_frames(path, range(info.num_frames)))} frames"
    except MegatronVLMError as error:
        return str(error)


def watch_all(paths: list[str]) -> list[str]:
    return [watch(path) for path in paths]


def test_frames_of_a_video_are_bounded(tmp_path, process_tree):
    """Frames that grow within a video are bounded, too."""
    small, large, growing = (tmp_path / f"{name}.ts" for name in ("small", "large", "growing"))
    large_frames = write_video(large, (4800, 4800), 2)
    growing.write_bytes(write_video(small, (64, 64), 8) + large_frames)
    assert large.stat().st_size < 2**22
    outcome = run_alone(process_tree, watch_all, [str(path) for path in (small, large, growing)])
    assert outcome.result[0] == "8 frames"
    for path, message in zip((large, growing), outcome.result[1:], strict=True):
        assert message.startswith(f"{path}: cannot be read as a video")
        assert "up to 16777216 pixels a frame): Invalid argument" in message
    assert outcome.grown < 150


# Text that takes gigabytes as tokens.


def encode_word(model: str) -> str:
    from megatron_vlm.data.tokens.reader import RowMaker  # imports torch, which takes seconds

    maker = RowMaker(model, max_tokens=512)
    word = {"role": "assistant", "content": "a" * 10**7}
    before = time.process_time()
    with pytest.raises(DataError, match=r"data\.max_tokens=512 .* tokens or more") as error:
        maker.row({"messages": [{"role": "user", "content": "?"}, word]})
    assert time.process_time() - before < 5
    return str(error.value)


@pytest.mark.slow
def test_a_word_of_10_mb_is_not_tokenized(tiny, process_tree):
    """Tokenizing it takes 3,000 MiB, and refusing it 510, of which 100 are for imports."""
    assert run_alone(process_tree, encode_word, tiny()).grown < 1000


# Records with a value of another kind at any place.

ODD: list[Any] = [3, True, 0.5, "x", None, [], [1], {}, {"a": 1}, [["user"]], [{"role": ["user"]}]]
ODD += ['"x"', "[1]", 10**400, [[{}]], {"role": {}, "content": [3]}]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
OTHER = [CHAT[0], {"from": "gpt", "value": "b"}]
PARTS = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, "q"]}]
PAIR = {"prompt": "q", "chosen": CHAT, "rejected": OTHER, "images": []}
BASES: dict[str, list[dict[str, Any]]] = {
    "chat": fuzz.valid_records(),
    "pair": [
        PAIR,
        {**PAIR, "prompt": CHAT[:1]},
        {"prompt": PARTS, "chosen": "a", "rejected": [CHAT[1]]},
        {"messages": CHAT, "rejected_response": "b", "rejected_images": ["a.png"]},
        {"conversations": OTHER, "rejected_messages": CHAT},
    ],
    "label": [{"prompt": CHAT[:1], "completion": CHAT[1:], "label": True}],
    "retrieval": [
        {"anchor": "q", "positive": {"text": "a", "image": "a.png"}, "negative": ["b"]},
        {"messages": CHAT[:1], "positive_messages": [CHAT[:1]], "negative_messages": [OTHER[:1]]},
        {"query": PARTS, "documents": ["a", "b"], "labels": [1, 0]},
    ],
}


def odd_versions(value: Any) -> Iterator[Any]:
    """Yield copies in which each value in turn is another one, and each name is another one."""
    yield from ODD
    kinds = {dict: lambda: [*value], list: lambda: range(len(value))}
    for key in kinds.get(type(value), list)():
        for odd in odd_versions(value[key]):
            copied = value.copy()
            copied[key] = odd
            yield copied
        if isinstance(key, str):
            rest = {name: part for name, part in value.items() if name != key}
            yield from (rest | {name: value[key]} for name in (f"{key}_{'9' * 4400}", f"{key}s"))
            yield rest


def parse_as(kind: str, raw: Any) -> Any:
    if kind == "chat":
        return parse_record(raw, "x:1")
    if kind == "retrieval":
        forms = (RetrievalForm("", None), RetrievalForm("", 1, ("yes", "no")))
        with within("x:1"):
            return [parse_retrieval(raw, parse_record, form) for form in forms]
    read = parse_pair if kind == "pair" else parse_labelled
    with within("x:1"):
        return read(raw, parse_record)


def test_no_value_of_a_record_ends_in_a_traceback():
    """An error of any other kind would stop a run in spite of data.max_errors=100."""
    failures, counts = dict[str, Any](), Counter[str]()
    for kind, bases in BASES.items():
        for raw in (each for base in bases for each in odd_versions(base)):
            try:
                parse_as(kind, raw)
                counts["taken"] += 1
            except DataError as error:
                counts["refused"] += 1
                if not str(error).startswith("x:1: "):
                    failures[str(error)] = (kind, raw)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                failures[f"{place.name}: {error!r}"[:200]] = (kind, raw)
    assert not failures, "\n".join(
        f"{error}\n    {str(raw)[:300]}" for error, raw in failures.items()
    )
    assert min(counts.values()) > 400, counts


# Adapters with a value of another kind in their description.


@pytest.mark.full
def test_no_value_of_an_adapter_ends_in_a_traceback(tiny, tmp_path):
    """`eval`, `chat` and `bench` read it before they start anything."""
    valid = {"peft_type": "LORA", "base_model_name_or_path": tiny(), "revision": None, "r": 8}
    valid |= {"lora_alpha": 16, "use_rslora": False, "target_parameters": ["a"], "bias": "none"}
    valid |= {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {}, "use_dora": False}
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(8, 4)}, tmp_path / "adapter_model.safetensors")
    readers = {
        "eval": lambda folder: lora_of(folder, tiny()),
        "chat": lambda folder: find_model(str(folder)),
        "bench": rank_of,
        "train": check_options,
    }
    failures, counts = list[str](), Counter[str]()
    for config in odd_versions(valid):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        for command, read in readers.items():
            try:
                read(tmp_path)
                counts["read"] += 1
            except MegatronVLMError:
                counts["refused"] += 1
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1].name
                failures.append(f"{command}: {place}: {error!r:.150} {str(config)[:200]}")
    assert not failures, "\n".join(dict.fromkeys(failures))
    assert min(counts.values()) > 50, counts


def check_options(folder: Path) -> None:
    config = read_adapter_config(folder)
    for error in (*unsupported_options(config), *different_settings(config, LoraConfig(8))):
        raise error.within(str(folder))


# Names that would steer a terminal.

EVIL = "a\x1b[2J\x1b]0;x\x07[red]\u202eb\x9b"
SHOWN = r"a\x1b[2J\x1b]0;x\x07[red]\u202eb\x9b"


def test_errors_show_escapes_as_text(tmp_path, capsys):
    """Errors of a command and of a rank show them as text."""
    path = tmp_path / f"{EVIL}.txt"
    path.write_text("")
    assert main(["inspect", f"data.train='{path}'", f"model.path={tmp_path}"]) == 2
    assert run_guarded(lambda _: read_all_or_raise(str(path)), []) == 2
    output = capsys.readouterr().err
    assert not set("\x1b\x07\x9b\u202e") & set(output)
    assert output.count(SHOWN) >= 1


def read_all_or_raise(path: str) -> int:
    raise DataError(f"{path}: wrong")


def test_a_run_says_escapes_and_markup_as_text(tmp_path):
    out = io.StringIO()
    console = Console(file=out, width=500)
    log = RunLog(Config(run=str(tmp_path)), speaks=True, total_steps=1, console=console)
    log.event(0, f"{EVIL}: skipped")
    log.close()
    assert out.getvalue() == f"{SHOWN}: skipped\n"


# Pictures.


def tiled(side: int) -> bytes:
    """Return a TIFF of 64 x 64 pixels with a single packed tile of `side` x `side`."""
    packer = zlib.compressobj(9)
    tile = b"".join([*(packer.compress(bytes(side)) for _ in range(side)), packer.flush()])
    numbers = {256: 64, 257: 64, 322: side, 323: side, 324: 8, 325: len(tile)}
    shorts = {258: 8, 259: 8, 262: 1, 277: 1}
    tags = {**{tag: (4, n) for tag, n in numbers.items()}, **{t: (3, n) for t, n in shorts.items()}}
    entries = [struct.pack("<HHII", tag, *tags[tag][:1], 1, tags[tag][1]) for tag in sorted(tags)]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(tile)) + tile + directory


def look(path: str) -> list[str]:
    results = []
    for read in (image_size, read_image):
        policy = MediaPolicy(str(Path(path).parent))
        try:
            results.append(str(read(Image(Path(path).name), policy, "x:1")))
        except MegatronVLMError as error:
            results.append(str(error))
    return results


def test_tiles_of_a_tiff_are_bounded(tmp_path, process_tree):
    (tmp_path / "a.tif").write_bytes(tiled(12_000))
    (tmp_path / "b.tif").write_bytes(tiled(1024))
    outcome = run_alone(process_tree, look, str(tmp_path / "a.tif"))
    assert (
        outcome.result[0]
        == outcome.result[1]
        == (
            "x:1: a.tif: has tiles of 12000 x 12000 pixels, above the limit of 16777216 pixels; "
            "save it again"
        )
    )
    assert outcome.grown < 100
    assert look(str(tmp_path / "b.tif"))[0] == "(64, 64)"
    assert "size=64x64" in look(str(tmp_path / "b.tif"))[1]
