# .venv/bin/python -m pytest tests/data/test_tensors.py
"""Lists and batches of tensors: each operation is Python's own on the rows, bytes are all there."""

import math
import pickle
import pickletools
import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_vlm.data.tensors.tensor_batch import TensorBatch
from megatron_vlm.data.tensors.tensor_list import DTYPES, TensorList
from megatron_vlm.errors import DataError

NUM_ROWS = 5
SEEDS = st.integers(0, 2**32 - 1)


def make_list(num_rows: int = NUM_ROWS) -> TensorList:
    """Row i has i patches, so its shape says which row it was; row 0 is an absent one."""
    return TensorList([torch.full((place, 3), float(place)) for place in range(num_rows)])


def make_batch(num_rows: int = NUM_ROWS) -> TensorBatch:
    ids = torch.arange(num_rows)[:, None].expand(num_rows, 2)
    return TensorBatch({"ids": ids, "pixels": make_list(num_rows)}, {"step": 7})


def places_of(rows: TensorList | TensorBatch) -> list[int]:
    """Which rows of make_list or make_batch these are; every field must say the same."""
    if isinstance(rows, TensorList):
        assert all(bool((row == len(row)).all()) for row in rows)
        return [shape[0] for shape in rows.shapes]
    assert rows.meta == {"step": 7}
    places = places_of(rows["pixels"])
    assert rows["ids"].tolist() == [[place, place] for place in places]
    return places


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Every bit pattern there is, so NaN, infinities and minus zero too."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(bytearray(random.Random(seed).randbytes(size) + b"."), dtype=torch.uint8)
    raw = raw[:size] & 1 if dtype == torch.bool else raw[:size]
    return raw.view(dtype).view(shape)


def bits(value: Tensor | TensorList) -> Any:
    if isinstance(value, TensorList):
        return [bits(row) for row in value]
    flat = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return value.dtype, value.shape, flat.view(torch.uint8).tolist()


def same_bits(one: TensorBatch, other: TensorBatch) -> bool:
    fields = [[(name, bits(value)) for name, value in batch.items()] for batch in (one, other)]
    return fields[0] == fields[1] and one.meta == other.meta


@st.composite
def tensor_lists(draw: st.DrawFn, num_rows: int | None = None) -> TensorList:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    rank = draw(st.integers(0, 3))
    num_rows = draw(st.integers(0, 6)) if num_rows is None else num_rows
    rows = []
    for _ in range(num_rows):
        size = st.integers(1, 4)
        shape = tuple(draw(st.lists(size, min_size=rank, max_size=rank)))
        if draw(st.booleans()):
            shape = (0, *draw(st.lists(size, max_size=3)))
        rows.append(tensor_of(dtype, shape, draw(SEEDS)))
    return TensorList(rows)


@st.composite
def tensor_batches(draw: st.DrawFn) -> TensorBatch:
    num_rows = draw(st.integers(0, 6))
    fields: dict[str, Tensor | TensorList] = {}
    for name in draw(st.lists(st.text(max_size=4), unique=True, max_size=4)):
        if draw(st.booleans()):
            fields[name] = draw(tensor_lists(num_rows))
        else:
            dtype = draw(st.sampled_from(list(DTYPES.values())))
            shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=3)))
            fields[name] = tensor_of(dtype, shape, draw(SEEDS))
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.none() | st.booleans() | numbers | st.text(max_size=3)
    meta = st.recursive(leaves, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=4)
    return TensorBatch(fields, draw(st.dictionaries(st.text(max_size=3), meta, max_size=3)))


R = range(NUM_ROWS)
# The laws below have slices, lists of places and repetitions.
ROWS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "empty list": (lambda x: x[[]], []),
    "range": (lambda x: x[range(4, 1, -1)], [4, 3, 2]),
    "small integers": (lambda x: x[torch.tensor([2, 1], dtype=torch.uint8)], [2, 1]),
    "numpy": (lambda x: x[np.array([1, 1])], [1, 1]),
    "mask": (lambda x: x[torch.tensor([True, False, False, True, True])], [0, 3, 4]),
    "mask in a list": (lambda x: x[[False, True, False, False, True]], [1, 4]),
    "interleave": (lambda x: x.repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
    "interleave tensor": (
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 0, 3, 0])),
        [0, 3, 3, 3],
    ),
    "cat": (lambda x: x.cat([x[3:], x, x[:0], x[[1]]]), [3, 4, *R, 1]),
    "split": (lambda x: x.cat(x.split([2, 0, 3])[::-1]), [2, 3, 4, 0, 1]),
    "chunk": (lambda x: x.chunk(4)[0], [0, 1]),  # torch.chunk gives three
}


@pytest.mark.parametrize("make", [make_list, make_batch])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, make):
    change, expected = ROWS[name]
    assert places_of(change(make())) == expected


def test_one_row_and_iteration():
    rows, batch = make_list(), make_batch()
    for place in (2, -3, np.int64(2)):
        assert rows[place].shape == (2, 3)
        row = batch[place]
        assert (list(row), row["ids"].tolist()) == (["ids", "pixels"], [2, 2])
        assert torch.equal(row["pixels"], rows[place])
    assert [len(row) for row in rows] == [*R]
    assert [len(row["pixels"]) for row in batch] == [*R]
    for outside in (NUM_ROWS, -NUM_ROWS - 1, [0, NUM_ROWS], torch.tensor([NUM_ROWS])):
        for each in (rows, batch):
            with pytest.raises(IndexError):
                each[outside]


@given(tensor_lists(), st.integers(1, 8), st.data())
@settings(max_examples=60)
def test_laws_of_a_list(rows, n, data):
    plain = bits(rows)
    parts = rows.chunk(n)
    lengths = [len(part) for part in parts]
    assert len(parts) == n and max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert TensorList.cat(parts) == rows
    places = data.draw(
        st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8) if plain else st.just([])
    )
    assert bits(rows[places]) == [plain[place] for place in places]
    assert bits(rows[torch.tensor(places, dtype=torch.long)]) == bits(rows[places])
    cut = data.draw(st.slices(len(rows)))
    assert bits(rows[cut]) == plain[cut]
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    repeated = [row for row, count in zip(plain, counts, strict=True) for _ in range(count)]
    assert bits(rows.repeat_interleave(counts)) == repeated
    assert bits(rows.repeat(n)) == plain * n


@given(tensor_batches(), st.integers(1, 8), st.data())
@settings(max_examples=60)
def test_laws_of_a_batch(batch, n, data):
    """A batch does to each field what a list does to its rows."""
    parts = batch.chunk(n)
    assert len(parts) == n and sum(map(len, parts)) == len(batch)
    assert same_bits(TensorBatch.cat(parts), batch)
    cut = data.draw(st.slices(len(batch)))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    places = [place - len(batch) * (place % 2) for place, count in enumerate(counts) if count]
    for name, value in batch.items():
        alone = TensorList([*value])
        assert TensorList([*batch[cut][name]]) == alone[cut]
        assert TensorList([*batch[places][name]]) == alone[places]
        assert TensorList([*batch.repeat(n)[name]]) == alone.repeat(n)
        repeated = TensorList([*batch.repeat_interleave(counts)[name]])
        assert repeated == alone.repeat_interleave(counts)


@given(tensor_batches(), st.integers(2, 5))
@settings(max_examples=100)
def test_bytes_bring_back_every_bit(batch, protocol):
    written = batch.to_bytes()
    for buffer in (written, bytearray(written), memoryview(written)):
        back = TensorBatch.from_bytes(buffer)
        assert same_bits(back, batch) and back == batch
    assert same_bits(pickle.loads(pickle.dumps(batch, protocol)), batch)
    for value in batch.fields.values():
        if isinstance(value, TensorList):
            back = pickle.loads(pickle.dumps(value, protocol))
            assert bits(back) == bits(value) and back == value and back.dtype == value.dtype


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype(dtype):
    """The operations that torch has to know for it: cat, indexing, comparison, the bytes."""
    batch = TensorBatch({"x": tensor_of(dtype, (4, 64), 1)})
    taken = batch[[3, 0]]
    assert bits(taken["x"]) == bits(torch.stack([batch["x"][3], batch["x"][0]]))
    assert TensorBatch.cat([batch[:1], batch[1:]]) == batch != TensorBatch.cat([batch[1:], batch])
    assert pickle.loads(pickle.dumps(batch)) == batch != batch[[1, 0, 2, 3]]


def odd_tensors() -> dict[str, Tensor]:
    numbers = torch.arange(24.0).view(4, 6)
    return {
        "transposed": numbers.t(),
        "every other": numbers[:, ::2],
        "one value everywhere": torch.ones(1).expand(4, 3),
        "part of a storage": numbers[2:],
        "one value of a column": numbers[:1, 2],  # contiguous with a stride of 6
        "with a gradient": torch.nn.Parameter(numbers),
        "minus zero": torch.tensor([-0.0]),
        "of a conjugate": torch.tensor([1 + 2j]).conj().imag,  # torch keeps its sign as a flag
        "no rows": torch.empty(0, 1536),
        "no columns": torch.empty(3, 0, 2, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("name", odd_tensors())
def test_bytes_of_odd_tensors(name):
    tensor = odd_tensors()[name]
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype).view(tensor.shape)
    for value in (tensor, TensorList([tensor, tensor])):
        back = pickle.loads(pickle.dumps(TensorBatch({"x": value})))["x"]
        for row in [back] if isinstance(back, Tensor) else back:
            assert bits(row) == bits(plain) and not row.requires_grad


def test_a_pickle_is_one_piece_of_bytes():
    """No torch object to load, no buffer for each row, and no more bytes than values and shapes."""
    rows = TensorList([torch.full((4, 64), place, dtype=torch.bfloat16) for place in range(100)])
    for value in (rows, TensorBatch({"pixels": rows, "ids": torch.zeros(100, 2)})):
        written = pickle.dumps(value, protocol=4)
        steps = [(step.name, said) for step, said, _ in pickletools.genops(written)]
        names = [said for name, said in steps if name == "SHORT_BINUNICODE"]
        assert len(names) == 2 and names[0] == type(value).__module__
        assert [name for name, _ in steps if "BYTES" in name] == ["BINBYTES"]
        assert len(written) < 100 * 4 * 64 * 2 + 3000
        assert b"torch" not in written


def address(value: Any) -> list[int]:
    if isinstance(value, TensorBatch):
        return [place for part in value.fields.values() for place in address(part)]
    return [row.data_ptr() for row in ([value] if isinstance(value, Tensor) else value)]


def test_views_where_views_do():
    batch = make_batch()[1:]  # an empty tensor has no address
    ids, pixels = batch["ids"], batch["pixels"]
    for part in (batch[1:3], batch.split([1, 2, 1])[1], batch.chunk(2)[0][1:]):
        assert address(part)[0] == ids[1].data_ptr() and address(part)[1] == pixels[1].data_ptr()
    assert address(TensorList.cat([pixels, pixels[[2]]])) == address(pixels) + [
        pixels[2].data_ptr()
    ]
    assert address(TensorBatch.cat([batch])) == address(batch) == address(batch.to("cpu"))
    assert address(batch.select(["ids"]).with_fields(new=pixels)) == address(batch)
    copies = pixels.repeat(3).to(torch.float64)
    assert len(set(address(copies))) == len(pixels), "a repeated row must be converted once"


def test_from_bytes_reads_in_place():
    written = make_batch().to_bytes()
    buffer = bytearray(written)
    batch = TensorBatch.from_bytes(buffer)
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert all(start < place < start + len(buffer) for place in address(batch[1:]))
    assert (batch["ids"].data_ptr() - start) % 64 == 0
    batch["ids"][0] = 9
    assert TensorBatch.from_bytes(buffer)["ids"][0].tolist() == [9, 9]
    TensorBatch.from_bytes(written)["ids"][0] = 9  # of bytes it must be a copy
    assert written == make_batch().to_bytes()
    askew = memoryview(b"..." + written), memoryview(bytearray(b"..." + written))
    for view in askew:
        batch = TensorBatch.from_bytes(view[3:])
        assert batch == make_batch() and batch["ids"].data_ptr() % 16 == 0


def test_truncated_bytes_are_refused():
    written = TensorBatch({"x": torch.arange(20), "y": make_list(20)}, {"a": 1}).to_bytes()
    for length in [*range(700), *range(700, len(written), 13), len(written) - 1]:
        for buffer in (written[:length], bytearray(written[:length])):
            with pytest.raises(DataError, match=rf"^from_bytes: {length} bytes are not what"):
                TensorBatch.from_bytes(buffer)
    with pytest.raises(DataError, match=rf"{len(written) + 1} bytes .* asks for {len(written)}"):
        TensorBatch.from_bytes(written + b"\0")


def with_header(text: str) -> bytes:
    text += " " * (-(16 + len(text)) % 64)
    return b"MVROWS\x00\x01" + len(text).to_bytes(8, "little") + text.encode()


FIELD = '{"list": false, "dtype": "float32", "shapes": [%s]}'
FOREIGN = {
    "nothing": b"",
    "a pickle": pickle.dumps({"x": 1}).ljust(128),
    "zeros": bytes(256),
    "another version": make_batch().to_bytes().replace(b"MVROWS\x00\x01", b"MVROWS\x00\x02"),
    "not JSON": with_header("import os"),
    "a list": with_header("[]"),
    "nested too deep": with_header("[" * 100_000),
    "no fields": with_header('{"meta": {}}'),
    "no meta": with_header('{"fields": {}}'),
    "meta not a dict": with_header('{"fields": {}, "meta": [1]}'),
    "a dtype torch does not have": with_header(
        '{"meta": {}, "fields": {"x": {"list": true, "dtype": "load", "shapes": [[0]]}}}'
    ),
} | {
    f"shapes {shapes}": with_header('{"meta": {}, "fields": {"x": %s}}' % (FIELD % shapes))
    for shapes in (
        *("", "0", "[2]", "[-1]", "[-1, -1]", "[-1, 0]", "[0.0]", '["a"]', "[null]", "[[0]]"),
        *("[-2], [2]", "[9223372036854775808, 0]", "[4611686018427387904, 4611686018427387904]"),
        "[1e400]",
    )
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_bytes_are_refused(name):
    for kind in (bytes, bytearray):
        with pytest.raises(DataError):
            TensorBatch.from_bytes(kind(FOREIGN[name]))


@given(tensor_batches(), st.data())
@settings(max_examples=150)
@pytest.mark.full
def test_a_changed_byte_is_refused_or_harmless(batch, data):
    buffer = bytearray(batch.to_bytes())
    header = 16 + int.from_bytes(buffer[8:16], "little")
    buffer[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    try:
        back = TensorBatch.from_bytes(buffer)
    except DataError:
        return
    for value in back.fields.values():  # every value that it promises can be read
        bits(value)


NAN = float("nan")
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "values": ([1.0, 2.0], [1.0, 2.0], True),
    "other values": ([1.0, 2.0], [1.0, 3.0], False),
    "NaN": ([NAN, 2.0], [NAN, 2.0], True),
    "NaN elsewhere": ([NAN, 2.0], [2.0, NAN], False),
    "a value for NaN": ([NAN, 2.0], [0.0, 2.0], False),
    "another dtype": (torch.ones(2), torch.ones(2).double(), False),
    "another shape": (torch.ones(2, 3), torch.ones(3, 2), False),
    "empty rows": (torch.empty(0, 4), torch.empty(0, 4), True),
    "other empty rows": (torch.empty(0, 4), torch.empty(0, 5), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equality(name):
    one, other, equal = PAIRS[name]
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    rows, others = TensorList([one]), TensorList([other])
    assert (rows == others) is equal and (rows != others) is not equal
    for side in ((rows, others), (one[:], other[:])):
        batches = [TensorBatch({"x": value}) for value in side]
        assert (batches[0] == batches[1]) is equal


def test_what_is_never_equal():
    batch = make_batch()
    assert make_list() != make_list(4) and make_list() != [*make_list()]
    assert batch != batch.without("ids") and batch != replace(batch, meta={})
    assert TensorBatch({"x": torch.ones(2)}) != TensorBatch({"x": TensorList([torch.ones(2)] * 2)})
    assert TensorBatch({"x": TensorList([torch.ones(2)] * 2)}) != TensorBatch({"x": torch.ones(2)})
    assert batch == batch.select(["pixels", "ids"]), "the order of fields is no difference"


def test_empty_rows_join_any_rows():
    """A text row among image rows, made with torch's default dtype and another rank."""
    rows = TensorList([torch.empty(0), torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0, 3)])
    assert {row.dtype for row in rows} == {rows.dtype} == {torch.bfloat16}
    assert rows.shapes == ((0,), (2, 3), (0, 3))
    assert TensorList.cat([TensorList([torch.empty(0, 3)]), rows[1:]]).dtype == torch.bfloat16
    nothing = TensorList([])
    assert (nothing.dtype, nothing.device, nothing.shapes, len(nothing)) == (None, None, (), 0)
    assert TensorList.cat([]) == nothing == rows[:0]


def test_dtype_and_device():
    batch = make_batch()
    halves = batch.to(torch.bfloat16)
    assert (halves["ids"].dtype, halves["pixels"].dtype) == (torch.int64, torch.bfloat16)
    assert halves["pixels"][4].tolist() == [[4.0] * 3] * 4
    assert make_list().to(torch.int32).dtype == torch.int32
    assert batch.device == make_list().device == torch.device("cpu")
    moved = batch.to("meta")
    assert moved.device == moved["pixels"].device == torch.device("meta")
    assert TensorBatch({}).device is TensorBatch({"x": TensorList([])}).device is None


def test_fields():
    batch = make_batch()
    assert [*batch.keys()] == ["ids", "pixels"] and dict(batch.items()) == dict(**batch)
    assert "ids" in batch and "rows" not in batch and 0 not in batch
    assert [*batch.select(["pixels", "ids"]).keys()] == ["pixels", "ids"]
    assert [*batch.without("ids").keys()] == ["pixels"]
    more = batch.with_fields(ids=torch.zeros(5), labels=torch.ones(5))
    assert [*more.keys()] == ["ids", "pixels", "labels"] and more["ids"].dtype == torch.float32
    assert more.meta == batch.meta and "labels" not in batch
    with pytest.raises(KeyError):
        batch["rows"]


def test_a_batch_cannot_be_changed():
    given_fields, meta = {"x": torch.ones(2)}, {"steps": [1]}
    batch = TensorBatch(given_fields, meta)
    given_fields["y"] = torch.ones(3)
    meta["steps"].append(2)
    assert [*batch.keys()] == ["x"] and batch.meta == {"steps": [1]}
    with pytest.raises(TypeError):
        batch.fields["x"] = torch.ones(3)
    with pytest.raises(FrozenInstanceError):
        batch.meta = {}
    with pytest.raises(TypeError):
        hash(batch)


def test_repr_is_short():
    assert repr(make_list(2)) == "TensorList(2 rows, torch.float32 [0, 3] [1, 3])"
    assert repr(make_list(9)).endswith("[3, 3] ...)")
    assert repr(make_batch(2)) == (
        "TensorBatch(2 rows, ids: int64 [rows, 2] on cpu, pixels: TensorList, meta: ['step'])"
    )


X2, X3 = torch.ones(2), torch.ones(3)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "row of None": (lambda: TensorList([X2, None]), r"rows\[1\] is a NoneType; .* an empty tensor"),
    "dtypes of rows": (
        lambda: TensorList([torch.empty(0), X2, X3.long()]),
        r"rows\[2\] is torch.int64 of rank 1 but rows\[1\] is torch.float32 of rank 1",
    ),
    "ranks of rows": (
        lambda: TensorList([X2, torch.ones(2, 2)]),
        r"rows\[1\] .* rank 2 but rows\[0\] .* 1",
    ),
    "devices of rows": (
        lambda: TensorList([X2, X3.to("meta")]).device,
        r"rows\[1\] is on meta but rows\[0\] is on cpu; .* to\(device\)",
    ),
    "devices of fields": (
        lambda: TensorBatch({"x": X2, "y": X2.to("meta")}).device,
        "y is on meta but x is on cpu",
    ),
    "devices in a field": (
        lambda: TensorBatch({"x": X2, "y": TensorList([X2, X3.to("meta")])}).device,
        r"y\[1\] is on meta but x is on cpu",
    ),
    "rows of fields": (
        lambda: TensorBatch({"x": X2, "y": TensorList([X2] * 3)}),
        "TensorBatch: y has 3 rows but x has 2",
    ),
    "rows of a new field": (lambda: make_batch().with_fields(y=X2), "y has 2 .* ids has 5"),
    "field of a scalar": (lambda: TensorBatch({"x": torch.ones(())}), "x is a scalar"),
    "field of a list": (lambda: TensorBatch({"x": [X2]}), "x is a list; give"),
    "meta of a tuple": (lambda: TensorBatch({}, {"at": (1, 2)}), r"meta\.at=\[1,2\].* tuple"),
    "meta of a tensor": (lambda: TensorBatch({}, {"at": {"x": X2}}), r"meta\.at=.* lists"),
    "meta of numbered": (lambda: TensorBatch({}, {"at": {1: 2}}), r"meta\.at={1: 2}"),
    "cat without a field": (
        lambda: TensorBatch.cat([TensorBatch({"x": X2}), TensorBatch({"x": X2, "y": X2})]),
        r"y is absent in batch 0 but float32 \[rows\] on cpu in batch 1",
    ),
    "cat of kinds": (
        lambda: TensorBatch.cat([TensorBatch({"x": v}) for v in (X2, X3, TensorList([X2]))]),
        r"x is float32 \[rows\] on cpu in batch 0 but TensorList in batch 2",
    ),
    "cat of dtypes": (
        lambda: TensorBatch.cat([TensorBatch({"x": X2}), TensorBatch({"x": X2.long()})]),
        r"x is float32 \[rows\] .* but int64 \[rows\]",
    ),
    "cat of widths": (
        lambda: TensorBatch.cat([TensorBatch({"x": torch.ones(2, n)}) for n in (4, 5)]),
        r"x is float32 \[rows, 4\] .* but float32 \[rows, 5\]",
    ),
    "cat of lists": (
        lambda: TensorBatch.cat(
            [TensorBatch({"x": TensorList([row])}) for row in (X2, torch.ones(2, 2))]
        ),
        r"cat: x: .*rows\[1\] is .* rank 2 but rows\[0\]",
    ),
    "cat of meta": (
        lambda: TensorBatch.cat([TensorBatch({}, {"step": step}) for step in (3, 4)]),
        r"meta\.step is 3 in batch 0 but 4 in batch 1",
    ),
    "cat of nothing": (lambda: TensorBatch.cat([]), r"cat: batches=\[\]"),
    "no such field": (lambda: make_batch().select(["idz"]), "select: idz .* ids, pix"),
    "no field to leave out": (lambda: make_batch().without("idz"), "select: idz "),
    "chunk 0": (lambda: make_list().chunk(0), "chunk: n=0 .* 5 rows"),
    "split too little": (lambda: make_list().split([2, 2]), r"sizes=\[2,2\] add up to 4 .* 5 rows"),
    "split below 0": (lambda: make_list().split([6, -1]), r"sizes=\[6,-1\] .* of at least 0"),
    "repeat -1": (lambda: make_list().repeat(-1), "repeat: n=-1 .* 5 rows"),
    "counts": (
        lambda: make_batch().repeat_interleave([1, 2]),
        "counts has 2 entries, .* for 5 rows",
    ),
    "counts below 0": (
        lambda: make_batch().repeat_interleave(-1),
        "counts .* smallest -1, for 5 rows",
    ),
    "short mask": (lambda: make_list()[[True, False]], r"bool and shape \[2\] for 5 rows"),
    "index of floats": (lambda: make_list()[torch.ones(5)], "index has torch.float32"),
    "index of rank 2": (lambda: make_list()[torch.ones(5, 1).long()], r"shape \[5, 1\]"),
    "bytes of complex": (
        lambda: TensorBatch({"x": X2 * 1j}).to_bytes(),
        "x: .* torch.complex64 on cpu cannot become bytes; .*bfloat16",
    ),
    "bytes of sparse": (lambda: TensorBatch({"x": X2.to_sparse()}).to_bytes(), "torch.sparse_coo"),
    "bytes of no values": (lambda: pickle.dumps(TensorList([X2.to("meta")])), "on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attempt, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        attempt()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_on_a_gpu():
    batch = make_batch().pin_memory()
    assert batch["ids"].is_pinned() and batch["pixels"][4].is_pinned()
    moved = batch.to("cuda", non_blocking=True)
    assert moved.device == torch.device("cuda", 0) and moved == batch and batch == moved
    assert places_of(moved[[3, 1]]) == [3, 1] and places_of(moved[torch.ones(5).bool()]) == [*R]
    back = pickle.loads(pickle.dumps(moved))
    assert back.device == torch.device("cpu") and back == batch
