# .venv/bin/python -m pytest tests/data/test_sources.py
"""The same records come out of every kind of file; broken files are refused by name and line."""

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.sources import text_files as reading
from megatron_vlm.data.sources.source import named_source, open_source
from megatron_vlm.data.sources.stream import open_stream
from megatron_vlm.data.sources.text_files import file_digest, iter_lines
from megatron_vlm.errors import ConfigError, DataError
from tests.support.chats import picture, say
from tests.support.error_fields import raises

RECORDS = [
    {
        "messages": [
            say("user", "<image>Where?"),
            say("assistant", f"answer {i} \u00e9\u4e09 <bbox>"),
        ],
        "images": ["p.png"],
        "objects": {"ref": [], "bbox": [[20 + i, 30, 100.5, 60]]},
    }
    for i in range(5)
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
# A blank line, a line of spaces, Windows line ends, and no line end at the end of the file.
RAGGED = "\n  \n" + LINES.replace("\n", "\r\n\n").rstrip()


def png(seed):
    file = io.BytesIO()
    picture(40, 40, seed).save(file, "PNG")
    return file.getvalue()


def table(path):
    return datasets.Dataset.from_list(RECORDS)


def write_arrow(path):
    table(path).save_to_disk(path.parent / "tmp")
    (path.parent / "tmp" / "data-00000-of-00001.arrow").rename(path)


def write_folder(path):
    path.mkdir()
    table(path).to_parquet(path / "train.parquet")


def write_texts(path):
    """Write JSON lines as `train` of a folder with another split."""
    path.mkdir()
    (path / "train.jsonl").write_text(LINES)
    (path / "test.jsonl").write_text("{}")


def write_lists(path):
    """Write a packed list and a plain one, as the README.md of their folder says."""
    path.mkdir()
    (path / "0.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS[:2]).encode()))
    (path / "1.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS[2:]).encode()))
    configs = "configs:\n- config_name: default\n  data_files: '*.json.gz'\n"
    (path / "README.md").write_text(f"---\n{configs}---\n")


def write_tar(path):
    with tarfile.open(path, "w") as tar:
        for index, record in enumerate(RECORDS):
            add(tar, f"x/{index:03d}.json", json.dumps(record).encode())


def write_rows(path, **options):
    """Write values as JSON in cells: they have commas, and quotes that are written twice."""
    delimiter = "\t" if ".tsv" in path.name else ","
    rows = [[json.dumps(value, ensure_ascii=False) for value in r.values()] for r in RECORDS]
    rows = [[*RECORDS[0], "note, or\nline"], *([*row, f"x\t{len(row)}"] for row in rows)]
    with io.TextIOWrapper(io.BytesIO(), newline="", **options) as text:
        csv.writer(text, delimiter=delimiter).writerows(rows)
        text.flush()
        content = text.buffer.getvalue()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def zst(data):
    return pyarrow.Codec("zstd").compress(data, asbytes=True)


WRITERS = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "ragged.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + RAGGED.encode()),
    "marked.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.encode()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "a.jsonl.zst": lambda path: path.write_bytes(zst(LINES.encode())),
    "a.json": lambda path: path.write_text(json.dumps(RECORDS)),
    "lines.json": lambda path: path.write_text(LINES),
    "a.csv": lambda path: write_rows(path, encoding="utf-8-sig"),
    "a.tsv": lambda path: write_rows(path, encoding="utf-8"),
    "a.csv.gz": lambda path: write_rows(path, encoding="utf-8"),
    "a.parquet": lambda path: table(path).to_parquet(path),
    "a.arrow": write_arrow,
    "saved": lambda path: table(path).save_to_disk(path),
    "dict": lambda path: datasets.DatasetDict({"train": table(path)}).save_to_disk(path),
    "folder": write_folder,
    "lines": write_texts,
    "lists": write_lists,
    "a.tar": write_tar,
}


def write(folder, name):
    WRITERS[name](folder / name)
    return str(folder / name)


def add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def records_of(spec, cache=None, **names):
    """Return the place and the content of each record, as an indexed source or a stream has it."""
    if spec.streaming:
        stream = open_stream([spec], DataConfig(shuffle=False, **names), train=True)
        return [(record.where, record.raw()) for record in stream.records(0, None)]
    source = open_source(spec, None, cache, **names)
    return [(source.where(i), source[i]) for i in range(len(source))]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_records(name, tmp_path):
    source = open_source(SourceSpec(write(tmp_path, name)), None, tmp_path / "cache")
    assert len(source) == 5
    for index in (3, 0, 4, 1, 2):  # at random
        expected = parse_record(RECORDS[index], source.where(index))
        assert parse_record(source[index], source.where(index)) == expected


def test_places_are_lines_of_the_file(tmp_path):
    path = write(tmp_path, "ragged.jsonl")
    source = open_source(SourceSpec(path), None, None)
    assert [source.where(i) for i in range(5)] == [f"{path}:{n}" for n in (3, 5, 7, 9, 11)]


@given(content=st.binary(max_size=60), block=st.sampled_from([1, 3, 8, 64]))
def test_lines_are_found_whatever_the_blocks(content, block, tmp_path_factory):
    content = content.translate(bytes(b"\n \r\tab{}"[i % 8] for i in range(256)))
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    lines = content.split(b"\n")
    pieces = [content[start : start + block] for start in range(0, len(content), block)]
    found = list(iter_lines(pieces))
    assert [line for _, _, line in found] == (lines if lines[-1] else lines[:-1])
    assert all(content[start:].startswith(line) for _, start, line in found)
    expected = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    source = open_source(SourceSpec(str(path)), None, None)
    found = [(line, content[start:end]) for line, start, end in source.places.tolist()]
    assert found == expected
    assert source.digest == hashlib.blake2b(content, digest_size=16).hexdigest()


def test_a_line_that_is_too_large_is_left_out_as_it_comes(monkeypatch):
    monkeypatch.setattr(reading, "MAX_RECORD", 4)
    pieces = [b"1234\n123", b"45\n12", b"345678", b"9012", b"3\n1\n12345"]
    found = [line for _, _, line in iter_lines(pieces)]
    assert found == [b"1234", None, None, b"1", None]


@pytest.mark.parametrize("damage", ["cut", "FIFO", "none"])
def test_a_damaged_unpacked_file_is_unpacked_again(damage, tmp_path):
    path, cache = write(tmp_path, "a.jsonl.gz"), tmp_path / "cache"
    before = open_source(SourceSpec(path), None, cache).digest
    (file,) = (cache / "unpacked").glob("*.jsonl")
    written = file.stat().st_mtime_ns
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "FIFO":
        file.unlink()
        os.mkfifo(file)
    assert open_source(SourceSpec(path), None, cache).digest == before
    assert (file.stat().st_mtime_ns == written) == (damage == "none")


def test_places_in_other_files(tmp_path):
    for name, place in (("a.json", ": record 2"), ("a.parquet", ": row 2"), ("a.tar", ": x/002")):
        path = write(tmp_path, name)
        assert open_source(SourceSpec(path), None, None).where(2) == path + place


def test_a_glob_reads_files_in_order_of_name(tmp_path):
    for name in ("2.jsonl", "1.jsonl"):
        (tmp_path / name).write_text(json.dumps({"from": name}) + "\n")
    source = open_source(SourceSpec(str(tmp_path / "*.jsonl")), None, None)
    assert [source[i]["from"] for i in range(2)] == ["1.jsonl", "2.jsonl"]


CELLS = {
    'plain,"a,b","say ""hi""" ': None,  # nothing but a delimiter follows a quoted cell
    'plain,"a,b","say ""hi"""': ["plain", "a,b", 'say "hi"'],
    '"two\nlines","two\r\nlines", spaces ': ["two\nlines", "two\r\nlines", " spaces "],
    "null,007,": ["null", "007", ""],
    'NaN,5" pipe,\ufeff\u2028\x85': ["NaN", '5" pipe', "\ufeff\u2028\x85"],
}


@pytest.mark.parametrize("row", CELLS)
@pytest.mark.parametrize("streaming", [False, True])
def test_cells_stay_as_they_are(row, streaming, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(f"\ufeffa,b,c\r\n{row}\r\n\r\n  \nx,y,z".encode())
    spec = SourceSpec(str(path), streaming=streaming)
    if CELLS[row] is None:
        with raises(DataError, place=f"{path}:2", remedy_has="in double quotes"):
            records_of(spec)
        return
    last = f"{path}:{5 + 2 * ('lines' in row)}"
    expected = [dict(zip("abc", cells, strict=True)) for cells in (CELLS[row], "xyz")]
    assert records_of(spec) == list(zip([f"{path}:2", last], expected, strict=True))


def test_image_columns_are_read_undecoded(tmp_path):
    """No image library but ours, with its limits, sees the bytes."""
    text = datasets.Value("string")
    features = datasets.Features({"prompt": text, "completion": text, "images": [datasets.Image()]})
    rows = [{"prompt": "a", "completion": "b", "images": [{"bytes": b"broken", "path": None}]}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    source = open_source(SourceSpec(str(tmp_path / "a.parquet")), None, None)
    assert parse_record(source[0], "x").turns[0].parts[0].source == b"broken"


def test_fields_that_only_other_records_have_are_left_out(tmp_path):
    """Arrow gives every struct the fields of all."""
    parts = (
        {"type": "text", "text": "a", "image": None},
        {"type": "image", "text": None, "image": "b"},
    )
    rows = [{"messages": [say("user", part)]} for part in parts]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    source = open_source(SourceSpec(str(tmp_path / "a.parquet")), None, None)
    assert source[0]["messages"][0]["content"] == [{"type": "text", "text": "a"}]
    assert source[1]["messages"][0]["content"] == [{"type": "image", "image": "b"}]


@pytest.mark.parametrize("name", ["a.parquet", "saved", "folder"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_json_is_refused_by_name(name, streaming, tmp_path):
    """`datasets` keeps a column of strings and lists as JSON, and the text "yes" as yes."""
    if streaming and name == "saved":
        pytest.skip("is not streamed")
    rows = [[{"role": "user", "content": content}] for content in ('"yes"', [{"text": "a"}])]
    path = tmp_path / name
    path.with_suffix(".jsonl").write_text(
        "".join(f'{{"a": 1, "b": {json.dumps(row)}}}\n' for row in rows)
    )
    table = datasets.Dataset.from_json(str(path.with_suffix(".jsonl")))
    if name == "saved":
        table.save_to_disk(path)
    else:
        path.mkdir(exist_ok=True) if name == "folder" else None
        table.to_parquet(path / "train.parquet" if name == "folder" else path)
    spec = SourceSpec(str(path), streaming=streaming)
    with raises(ConfigError, key="b", problem_has="feature Json", remedy_has="JSON lines"):
        records_of(spec)


def test_tar_samples_with_pictures(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "0.jpg", png(0))
        chat = {"messages": [say("user", "<image>What?"), say("assistant", "Noise.")]}
        add(tar, "0.json", json.dumps({**chat, "image": "0.jpg"}).encode())
        add(tar, "1.img0.png", png(1))
        add(tar, "1.img1.png", png(2))
        add(tar, "1.txt", b" two pictures\n")
        add(tar, "2.txt", b"nothing to see")
        add(tar, "3.jpg", png(3))
        add(tar, "3.txt", b"\n")
    source = open_source(SourceSpec(str(tmp_path / "a.tar")), None, None)
    first, second = (
        parse_record(source[i], source.where(i), caption_prompt="Describe it.") for i in range(2)
    )
    assert [part.source for part in first.turns[0].parts[:1]] == [png(0)]
    *pictures, question = second.turns[0].parts
    assert [part.source for part in pictures] == [png(1), png(2)]
    assert (question, second.turns[1].parts) == ("Describe it.", ("two pictures",))
    with pytest.raises(DataError, match=r"a\.tar: 2: has .* a sample needs \.json"):
        source[2]
    with raises(DataError, place=source.where(3), key="text", problem_has="is empty"):
        parse_record(source[3], source.where(3))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "saved", "a.tar"])
def test_digests_follow_the_content(name, tmp_path):
    for folder in ("1", "2", "3"):
        (tmp_path / folder).mkdir()
    paths = [write(tmp_path / folder, name) for folder in ("1", "2")]
    one, other = (open_source(SourceSpec(path), None, None).digest for path in paths)
    if name in ("a.jsonl", "a.json"):  # elsewhere times and paths take part: a miss, never a lie
        assert one == other
    global RECORDS, LINES
    kept = RECORDS, LINES
    try:
        RECORDS = [{**record, "extra": "x"} for record in RECORDS]
        LINES = LINES.replace("answer 3", "Answer 3")
        changed = open_source(SourceSpec(write(tmp_path / "3", name)), None, None).digest
    finally:
        RECORDS, LINES = kept
    assert changed != one


def test_a_large_file_is_digested_in_samples(tmp_path, monkeypatch):
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 4096)
    monkeypatch.setattr("megatron_vlm.data.sources.text_files._WHOLE_DIGEST", 2**10)
    monkeypatch.setattr("megatron_vlm.data.sources.text_files._SAMPLE", 2**12)
    before = file_digest(str(path))
    assert file_digest(str(path)) == before
    with path.open("r+b") as file:
        file.write(b"x")
    assert file_digest(str(path)) != before


BAD_FILES = {
    "half.jsonl": (LINES.encode()[:-20], r"half\.jsonl:5: is not a line of JSON"),
    "latin.jsonl": (b'{"a": "\xe9"}\n', r"latin\.jsonl:1: is not a line of JSON: 'utf-8' codec"),
    "deep.jsonl": (
        b"[" * 100_000 + b"\n",
        r"deep\.jsonl:1: (has JSON that is nested too deeply|is not a line)",
    ),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-9], r"cut\.jsonl\.gz: cannot be unpacked"),
    "cut.jsonl.zst": (zst(LINES.encode() * 9)[:40], r"zst: cannot be unpacked"),
    "text.jsonl.gz": (b"not packed", r"text\.jsonl\.gz: cannot be unpacked"),
    "list.json": (b"[{}", r"list\.json: is not JSON: .*; mend the file"),
    "object.json": (b'{\n"a": 1}', r"object\.json:1: is not a line of JSON"),
    "wide.jsonl": ('{"a": 1}\n'.encode("utf-16"), r"wide\.jsonl: is UTF-16 text; save it as UTF-8"),
    "wide.csv": ("a,b\n1,2\n".encode("utf-16-be"), r"wide\.csv: is UTF-16 text"),
    "pretty.jsonl": (b'{\n  "a": 1\n}\n', r"pretty\.jsonl:1: .* next lines; .* in one line"),
    "list.jsonl": (b'[\r\n{"a": 1}\r\n]\r\n', r"list\.jsonl:1: .* a list in a \.json file"),
    "empty.csv": (b"\n", r"empty\.csv: is empty; its first row must have the names"),
    "twice.csv": (b"a,a\n1,2\n", r"twice\.csv:1: has two columns with the name 'a'"),
    "one.csv": (b"a;b\n1;2\n", r"one\.csv:1: has a single column with the name 'a;b'; .* a comma"),
    "latin.csv": (b"a,b\n1,2\n\xe9,2\n", r"latin\.csv:3: is not UTF-8 text, at byte 0"),
    "more.tsv": (b"a\tb\n\n1\t2\t3\n", r"more\.tsv:3: has 3 cells, and .* 2 columns; .* a tab"),
    "open.csv": (b'a,b\n1,2\n"3\n4,5\n', r"open\.csv:3: cannot be read as rows .* unexpected end"),
    "after.csv": (b'a,b\n"1"x,2\n', r"after\.csv:2: cannot be read as rows .* expected after"),
    "list.csv": (b"images,b\n['a.png'],2\n", r"list\.csv:2: images is a string that is not JSON"),
    "text.parquet": (b"not a table", r"text\.parquet: is not a readable parquet file"),
    "text.arrow": (b"not a table", r"text\.arrow: is not a readable arrow file"),
    "text.tar": (b"not a tar", r"text\.tar: is not a readable, uncompressed tar file"),
    "notes.md": (b"# notes", r"notes\.md: .* format; give \.jsonl"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_broken_files_are_refused_by_name(name, tmp_path):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=words):
        source = open_source(SourceSpec(str(tmp_path / name)), None, tmp_path / "cache")
        for index in range(len(source)):
            source[index]
    unfinished = [*(tmp_path / "cache").rglob("*.new"), *(tmp_path / "cache").rglob("*.tmp")]
    assert not unfinished


def test_a_truncated_tar_is_refused(tmp_path):
    path = write(tmp_path, "a.tar")
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content[:3000])
    with raises(DataError, place=path, problem_has="unexpected end of data"):
        open_source(SourceSpec(path), None, None)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("missing.jsonl", {"key": "", "problem_has": "no such file"}),
        ("mixed/*", {"key": "", "problem_has": ".json, .jsonl"}),
        ("packed.jsonl.gz", {"key": "data.cache_dir", "found": None}),
        ("dict", {"key": "split", "found": "train", "allowed": ("other",)}),
    ],
)
def test_sources_that_cannot_be(path, fields, tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.json").touch()
    (tmp_path / "mixed" / "a.jsonl").touch()
    (tmp_path / "packed.jsonl.gz").touch()
    other = datasets.DatasetDict({"other": datasets.Dataset.from_list(RECORDS)})
    other.save_to_disk(tmp_path / "dict")
    with raises(ConfigError, **fields) as error:
        open_source(SourceSpec(str(tmp_path / path)), None, None)
    assert path in str(error.value)


FILES = (".arrow", ".parquet", ".jsonl", ".gz")


@pytest.mark.parametrize("name", [*WRITERS, "a.ndjson"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_named_pipe_is_not_waited_for(name, streaming, tmp_path):
    """To open one waits for somebody to write into it."""
    path = tmp_path / name
    if name in ("saved", "dict", "folder", "lines", "lists"):
        write(tmp_path, name)
        path = next(each for each in path.rglob("*.*") if each.suffix in FILES)
        path.unlink()
    os.mkfifo(path)
    spec = SourceSpec(str(tmp_path / name), streaming=streaming)
    with pytest.raises((DataError, ConfigError), match=f"{path}: is a named pipe"):
        records_of(spec, tmp_path / "cache")


def sparse_member():
    """A member of a million million bytes that takes none of the file."""
    info = tarfile.TarInfo("0.json")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % 2**33
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    return bytes(header) + bytes(1024)


def long_name():
    """A name of a million million characters."""
    info = tarfile.TarInfo("0.json")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 10**12
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def pax_size(kind, size):
    """A member whose extended header says this size: a negative one leads back to the header."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("0.json")
        info.type, info.pax_headers = kind, {"size": str(size)}
        tar.addfile(info)
    return file.getvalue()


HEADERS = {
    "holes": sparse_member(),
    "name": long_name(),
    "negative": pax_size(tarfile.REGTYPE, -1),
    "backwards": pax_size(tarfile.REGTYPE, -2048),
    "backwards, and of no known type": pax_size(b"Z", -2048),
    "beyond the file": pax_size(tarfile.REGTYPE, 10**12),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_tar_headers_that_promise_too_much(content, tmp_path):
    (tmp_path / "a.tar").write_bytes(content)
    with raises(DataError, place=str(tmp_path / "a.tar"), problem_has="uncompressed tar file"):
        open_source(SourceSpec(str(tmp_path / "a.tar")), None, None)


def test_a_tar_sample_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_RECORD", 2**10)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "0.json", json.dumps(RECORDS[0]).encode())
        add(tar, "1.json", json.dumps(RECORDS[1]).encode())
        add(tar, "1.txt", bytes(1000))
    source = open_source(SourceSpec(str(tmp_path / "a.tar")), None, None)
    assert source[0] == RECORDS[0]
    with raises(DataError, place=f"{tmp_path / 'a.tar'}: 1", problem_has="0 MiB"):
        source[1]


def test_a_device_and_a_folder_are_no_data_files(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    with raises(DataError, place=str(tmp_path / "a.jsonl"), problem_has="a device"):
        open_source(SourceSpec(str(tmp_path / "a.jsonl")), None, None)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "away.jsonl")
    with raises(DataError, place=str(tmp_path / "gone.jsonl"), problem_has="a link"):
        open_source(SourceSpec(str(tmp_path / "gone.jsonl")), None, None)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.jsonl").write_text(LINES)
    (tmp_path / "b" / "1.jsonl").mkdir()
    with raises(DataError, place=str(tmp_path / "b" / "1.jsonl"), problem_has="a folder"):
        open_source(SourceSpec(str(tmp_path / "b" / "*.jsonl")), None, None)


OUTSIDE = {
    "../secret.jsonl": "as a data file, which lies outside",
    "a/../../secret.jsonl": "as a data file, which lies outside",
    "{}/secret.jsonl": "as a data file, which lies outside",
    "file://{}/secret.jsonl": r"names file://\S+/secret.jsonl as a data file",
    "https://127.0.0.1:9/a.jsonl": r"names https://127\.0\.0\.1:9/a\.jsonl as a data file",
    "zip://a.jsonl::a.zip": "as a data file",
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_readme_names_no_file_outside_its_folder(name, streaming, file, tmp_path):
    (tmp_path / "secret.jsonl").write_text(LINES)
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "0.jsonl").write_text(LINES)

    def open_it(named):
        yaml = f"configs:\n- config_name: default\n  data_files: '{named}'\n"
        text = f"---\n{yaml}---\n# A set\n" if file == "README.md" else yaml
        (tmp_path / "set" / file).write_text(text)
        return records_of(SourceSpec(str(tmp_path / "set"), streaming=streaming))

    assert len(open_it("0.jsonl")) == 5
    with pytest.raises(DataError, match=OUTSIDE[name]):
        open_it(name.format(tmp_path))


def test_a_name_that_the_hub_does_not_have_here(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises(ConfigError, place="nobody/nothing", problem_has="`datasets` cannot load"):
        open_source(SourceSpec("nobody/nothing"), None, None)


def test_a_stream_resumes_after_any_record(tmp_path):
    """Windows of 4 in 10 records: each is shuffled by itself, epochs differ, states are exact."""
    lines = [json.dumps({"prompt": str(i), "completion": "a"}) + "\n" for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    spec = SourceSpec(str(tmp_path / "a.jsonl"), streaming=True)
    stream = open_stream([spec], DataConfig(shuffle_window=4), train=True)

    def read(epoch, state=None):
        return [
            (record.where, record.raw()["prompt"], record.state)
            for record in stream.records(epoch, state)
        ]

    whole = read(0)
    windows = [sorted(int(text) for _, text, _ in whole[i : i + 4]) for i in (0, 4, 8)]
    assert windows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(where.endswith(f"a.jsonl:{int(text) + 1}") for where, text, _ in whole)
    assert [text for _, text, _ in read(1)] != [text for _, text, _ in whole]
    for taken, (_, _, state) in enumerate(whole, 1):
        rest = read(0, json.loads(json.dumps(state, sort_keys=True)))  # as a checkpoint keeps it
        assert [entry[:2] for entry in rest] == [entry[:2] for entry in whole[taken:]]


@pytest.mark.parametrize("name", [*WRITERS])
def test_a_stream_gives_the_same_records(name, tmp_path):
    if name in ("saved", "dict"):
        pytest.skip("these are not streamed")
    path = write(tmp_path, name)
    stream = open_stream([SourceSpec(path, streaming=True)], DataConfig(shuffle=False), train=True)
    found = [parse_record(record.raw(), "x") for record in stream.records(0, None)]
    assert found == [parse_record(record, "x") for record in RECORDS]
    assert stream.root == str(tmp_path / name if name in ("folder", "lines", "lists") else tmp_path)


def test_where_the_images_of_streams_lie(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.jsonl").write_text(LINES)
    one, other = (SourceSpec(str(tmp_path / f / "*.jsonl"), streaming=True) for f in ("a", "b"))
    assert open_stream([one], DataConfig(), True).root == str(tmp_path / "a")
    assert open_stream([one], DataConfig(image_root="/x"), True).root == "/x"
    assert (
        open_stream([replace(one, image_root="/y")], DataConfig(image_root="/x"), True).root == "/y"
    )
    assert open_stream([one, other], DataConfig(), True).root is None


DIALOG = [{"who": "me", "says": "What?", "role": None}, {"who": "bot", "says": "That."}]
SAID = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
NAMES = {"columns": {"messages": "dialog", "images": "photo", "role": "who", "content": "says"}}
NAMES["roles"] = {"user": ["you", "me"], "assistant": "bot"}
ROW = {"dialog": DIALOG, "photo": ["a.png"]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_and_roles_get_the_names_of_records(name, streaming, tmp_path):
    """Whatever the file, and if the names are of the entry or of the configuration."""
    path = tmp_path / name
    if name == "a.csv":
        row = [json.dumps(ROW["dialog"]), '["a.png"]']
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[*ROW], row])
    elif name == "a.parquet":
        datasets.Dataset.from_list([ROW]).to_parquet(path)
    else:
        path.write_text(json.dumps([ROW] if name == "a.json" else ROW))
    if streaming and name == "a.json":
        pytest.skip("a list is not streamed")
    for own, general in ((NAMES, {}), ({}, NAMES), (NAMES, {"columns": {"text": "x"}})):
        ((_, raw),) = records_of(SourceSpec(str(path), streaming=streaming, **own), **general)
        filled = [{k: v for k, v in said.items() if v is not None} for said in raw["messages"]]
        assert {**raw, "messages": filled} == {"messages": SAID, "images": ["a.png"]}


def test_a_column_that_has_the_name_of_another_field_is_not_read_for_it(tmp_path):
    """It is reported as a key without a meaning, and two columns may swap their names."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "b", "completion": "a", "images": 3, "picture": null}')
    columns = {"prompt": "completion", "completion": "prompt", "images": "picture"}
    source = open_source(SourceSpec(str(path), columns=columns), None, None)
    expected = {"prompt": "a", "completion": "b", "images": None, "images (not mapped)": 3}
    assert source[0] == expected
    assert source.digest != open_source(SourceSpec(str(path)), None, None).digest


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_the_data_does_not_have(name, streaming, tmp_path):
    """A column that later records alone have is one that the data has."""
    rows = [{"q": "a", "answer": "b"}] * 3 + [{"q": "a", "answer": "b", "photo": "c"}]
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("not JSON\n" + "".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = datasets.Dataset.from_list([{**row, "photo": row.get("photo")} for row in rows])
        table.to_csv(path) if name == "a.csv" else table.to_parquet(path)

    def open_it(**columns):
        spec = SourceSpec(str(path), streaming=streaming, columns=columns)
        if streaming:
            return next(open_stream([spec], DataConfig(), True).records(0, None))
        return open_source(spec, None, None)

    open_it(question="q", image="photo")
    fields = {"key": "columns.image", "found": "foto", "allowed": ("q", "answer", "photo")}
    with raises(ConfigError, **fields) as error:
        open_it(question="q", image="foto")
    assert error.value.place.startswith(str(path))


TAGS = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "bot"}
INFO = {
    "plain": {"file_name": "plain.json"},
    "asked": {
        "file_name": "asked.jsonl",
        "columns": {"prompt": "q", "response": "a", "system": "", "images": "image"},
    },
    "shared": {"file_name": "shared.csv", "formatting": "sharegpt"},
    "tagged": {
        "file_name": "sub/tagged.parquet",
        "formatting": "openai",
        "columns": {"messages": "dialog", "images": "photo", "tools": None},
        "tags": {**TAGS, "system_tag": None},
    },
    "ranked": {
        **{"file_name": "ranked.json", "formatting": "sharegpt", "ranking": True, "tags": TAGS},
        "columns": {"messages": "dialog", "chosen": "good", "rejected": "bad"},
    },
    "labelled": {
        **{"file_name": "asked.jsonl", "formatting": "alpaca"},
        "columns": {"prompt": "q", "response": "a", "kto_tag": "id"},
    },
    "hub": {
        **{"hf_hub_url": "some/chats", "ms_hub_url": "x/y", "subset": "en", "split": "train_sft"},
        **{"revision": "v2", "ranking": False, "num_samples": None},
    },
}


@pytest.fixture
def described(tmp_path):
    """Return the path before the name of a data set."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    alpaca = {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}
    (tmp_path / "plain.json").write_text(json.dumps([alpaca]))
    asked = {"q": "a", "a": "b", "input": "c", "image": "d.png", "id": 1}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked))
    ranked = {"dialog": [{"who": "me", "says": "a"}], "good": {"who": "bot", "says": "b"}}
    (tmp_path / "ranked.json").write_text(
        json.dumps([ranked | {"bad": {"who": "bot", "says": "c"}}])
    )
    conversation = json.dumps([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    with (tmp_path / "shared.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["conversations", "system"], [conversation, "c"]])
    datasets.Dataset.from_list([ROW]).to_parquet(tmp_path / "sub" / "tagged.parquet")
    return f"{tmp_path / 'dataset_info.json'}:"


ASKED = {"instruction": "a", "output": "b", "input (not mapped)": "c"}
READ = {
    "plain": dict(instruction="a", input="b", output="c") | {"history (not mapped)": [["d", "e"]]},
    "asked": {**ASKED, "images": "d.png", "id": 1},
    "shared": {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "system (not mapped)": "c",
    },
    "tagged": {"messages": SAID, "images": ["a.png"]},
    "ranked": {
        "messages": [{"role": "user", "content": "a"}],
        "chosen": {"role": "assistant", "content": "b"},
        "rejected": {"role": "assistant", "content": "c"},
    },
    "labelled": {**ASKED, "image (not mapped)": "d.png", "kto_tag": 1},
}


@pytest.mark.parametrize("name", READ)
def test_dataset_info_says_what_is_read(name, described, tmp_path):
    """As in LLaMA-Factory: from its folder, and no other columns."""
    source = open_source(SourceSpec(described + name), None, None)
    assert [source[i] for i in range(len(source))] == [READ[name]]
    assert source.root == str(tmp_path)
    assert open_source(SourceSpec(described + name, image_root="/x"), None, None).root == "/x"


def test_dataset_info_with_a_data_set_of_the_hub(described):
    spec, names = named_source(SourceSpec(f"{described}hub", weight=2), {"text": "x"}, {})
    place = {"split": "train_sft", "subset": "en", "revision": "v2"}
    assert spec == SourceSpec("hub:some/chats", weight=2, **place)
    assert not names.fields and {"history", "messages"} <= {*names.unread}
    assert not {"instruction", "input", "output"} & {*names.unread}


SHAREGPT = {"file_name": "x.json", "formatting": "sharegpt"}


@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        (None, {"key": "NAME", "found": "new", "allowed": [*INFO]}),
        ({"file_name": "x.json", "ranking": True}, {"key": "new.ranking"}),
        *(
            (
                {"file_name": "x", "columns": {"prompt": "a", key: "b"}},
                {"key": f"new.columns.{key}"},
            )
            for key in ("audios", "messages", "promt")
        ),
        *(
            ({key: "x"}, {"key": f"new.{key}"})
            for key in ("script_url", "cloud_file_name", "ms_hub_url")
        ),
        ({"file_name": "x", "num_samples": 3}, {"key": "new.num_samples", "remedy_has": "weight"}),
        ({"hf_hub_url": "a/b", "folder": "x"}, {"key": "new.folder"}),
        ({"file_name": "x.json", "formating": "x"}, {"key": "new.formating"}),
        ({"file_name": "x.json", "formatting": "chat"}, {"key": "new.formatting", "found": "chat"}),
        ({"formatting": "alpaca"}, {"key": "new.file_name", "problem_has": "missing"}),
        ({"file_name": "x.json", "columns": {"prompt": "text"}}, {"key": "new.columns.response"}),
        ({"file_name": "x.json", "tags": {"role_tag": "a"}}, {"key": "new.tags.role_tag"}),
        ({**SHAREGPT, "columns": {"images": "a"}}, {"key": "new.columns.messages"}),
        ({**SHAREGPT, "columns": {"messages": "a", "images": "a"}}, {"key": "new.columns.images"}),
        ({**SHAREGPT, "tags": {"role": "a"}}, {"key": "new.tags.role"}),
    ],
)
def test_what_dataset_info_may_not_say(entry, fields, tmp_path):
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(INFO if entry is None else {**INFO, "new": entry}))
    with raises(ConfigError, place=str(path), **fields):
        open_source(SourceSpec(f"{path}:new"), None, None)


def test_columns_beside_dataset_info_are_refused(described):
    with raises(ConfigError, place=f"{described}plain", problem_has="those of its description"):
        open_source(SourceSpec(f"{described}plain", columns={"text": "a"}), None, None)


def test_mixed_streams_have_the_same_columns(described, tmp_path):
    path = str(tmp_path / "asked.jsonl")
    specs = [SourceSpec(path, streaming=True, columns=c) for c in (None, {"prompt": "q"})]
    with raises(ConfigError, key="data.train", problem_has="these differ"):
        open_stream(specs, DataConfig(), True)
    assert open_stream(specs, DataConfig(columns={"prompt": "q"}), True).names.fields


@pytest.mark.parametrize("name", ["json", "parquet", "imagefolder"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_is_called_like_a_format(name, streaming, tmp_path, monkeypatch):
    """`datasets` would take the name for that of a reader, and look into the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text(json.dumps({"messages": []}))
    found = {"problem_has": "no such file or folder", "remedy_has": str(tmp_path)}
    with raises(ConfigError, place=name, **found):
        open_source(SourceSpec(name), None, None)
    write_folder(tmp_path / name)
    (tmp_path / "link").symlink_to(name)
    assert len(open_source(SourceSpec("link"), None, None)) == 5
    spec = SourceSpec(name, streaming=streaming)
    assert len(records_of(spec)) == 5
    assert streaming or open_source(spec, None, None).root == str(tmp_path / name)
