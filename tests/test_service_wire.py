# .venv/bin/python -m pytest tests/test_service_wire.py
"""Requests and answers of the service, by its own messages: what is read, what is refused in which
words, and that bytes of any kind end in nothing but a RequestError. tests/test_tinker_converters.py
has the client's own converters on the other side."""

import base64
import contextlib
import json
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vlm.service.wire.answers import write_forward_backward, write_samples
from megatron_vlm.service.wire.compression import MOST_FRAMES, MOST_WINDOW, unpacked
from megatron_vlm.service.wire.requests import MOST_DENSE, read_forward_backward, read_prompt
from megatron_vlm.service.wire.schema import MOST_FIELDS, message, parsed
from megatron_vlm.service.wire.targets import read_prompt_targets
from megatron_vlm.service.wire.values import Picture, RequestError, Sampled, Samples, Text, TopK
from tests.mutation import mutate_bytes, mutate_json

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
PNG = b"\x89PNG\r\n\x1a\n and so on"
JPEG = b"\xff\xd8\xff and so on"


def tensor(target: Any, values: Any, dtype: int = FLOAT32, shape: Any = None) -> None:
    layout = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}[dtype]
    array = np.asarray(values)
    target.dense, target.dtype = array.astype(layout).tobytes(), dtype
    target.shape.extend(array.shape if shape is None else shape)


def sparse(target: Any, values: Any, crow: Any, column: Any, shape: Any) -> None:
    target.sparse_csr.values = np.array(values, "<f4").tobytes()
    target.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    target.sparse_csr.col_indices = np.array(column, "<i8").tobytes()
    target.dtype = FLOAT32
    target.shape.extend(shape)


def named(datum: Any, name: str) -> Any:
    """The tensor of a datum with this name."""
    for entry in datum.loss_fn_inputs:
        if entry.key == name:
            return entry.value
    return datum.loss_fn_inputs.add(key=name).value


def anew(datum: Any, name: str) -> Any:
    """The same, emptied."""
    found = named(datum, name)
    found.Clear()
    return found


def valid() -> Any:
    """Two datums: text alone, and a picture in text with targets [3, 2] and sparse weights."""
    request = message("ForwardBackwardRequest")
    request.model_id, request.seq_id, request.loss_fn = "run:train:0", 7, "cross_entropy"
    request.loss_fn_config_v2.add(key="clip_low").value.number = 0.8
    request.loss_fn_config_v2.add(key="kind").value.text = "token"
    first = request.data.add()
    first.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    tensor(named(first, "target_tokens"), [2, 3, 4], INT64)
    tensor(named(first, "weights"), [0.0, -1.5, 1.0])
    second = request.data.add()
    second.model_input.add().encoded_text.tokens = np.array([5], "<i4").tobytes()
    image = second.model_input.add().image
    image.data, image.format, image.expected_tokens = PNG, "png", 4
    image.override_dimensions.width, image.override_dimensions.height = 64, 32
    tensor(named(second, "target_tokens"), [[1, 2], [3, 4], [5, 6]], INT64)
    sparse(named(second, "weights"), [0.5, 2.0, 3.0], [0, 2, 2, 3], [0, 1, 0], [3, 2])
    return request


def changed(change: Callable[[Any], object]) -> bytes:
    request = valid()
    change(request)
    return request.SerializeToString()


def test_a_request_is_read():
    found = read_forward_backward(valid().SerializeToString())
    assert (found.model_id, found.seq_id, found.loss) == ("run:train:0", 7, "cross_entropy")
    assert found.options == {"clip_low": 0.8, "kind": "token"}
    assert found.forward_only is False
    first, second = found.data
    (text,) = first.chunks
    assert text.tokens.dtype == np.int32 and text.tokens.tolist() == [1, 2, 3]
    assert first.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert first.inputs["target_tokens"].dtype == np.int64
    assert first.inputs["weights"].tolist() == [0.0, -1.5, 1.0]
    assert first.inputs["weights"].dtype == np.float32
    assert second.chunks[0].tokens.tolist() == [5]
    assert second.chunks[1] == Picture(PNG, "png", 4, (64, 32))
    assert second.inputs["target_tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert second.inputs["weights"].tolist() == [[0.5, 2.0], [0.0, 0.0], [3.0, 0.0]]
    assert second.inputs["weights"].dtype == np.float32
    assert read_forward_backward(changed(lambda r: setattr(r, "forward_only", True))).forward_only


def test_what_an_image_may_leave_out():
    def bare(request):
        image = request.data[1].model_input[1].image
        image.ClearField("expected_tokens")
        image.ClearField("override_dimensions")
        image.data, image.format = JPEG, "jpeg"

    assert read_forward_backward(changed(bare)).data[1].chunks[1] == Picture(JPEG, "jpeg")


def test_other_dtypes():
    def other(request):
        datum = request.data[0]
        tensor(anew(datum, "target_tokens"), [2, 3, 2**31 - 1], INT32)
        half = anew(datum, "weights")
        half.dense, half.dtype = struct.pack("<3H", 0x3F80, 0xC000, 0x3DCD), BFLOAT16

    inputs = read_forward_backward(changed(other)).data[0].inputs
    assert inputs["target_tokens"].dtype == np.int64
    assert inputs["target_tokens"].tolist() == [2, 3, 2**31 - 1]
    assert inputs["weights"].dtype == np.float32
    assert inputs["weights"].tolist() == [1.0, -2.0, 0.10009765625]


def test_options_of_old_clients():
    def old(request):
        request.loss_fn_config.add(key="beta", value=0.5)

    def older(request):
        old(request)
        request.ClearField("loss_fn_config_v2")

    assert "beta" not in read_forward_backward(changed(old)).options
    assert read_forward_backward(changed(older)).options == {"beta": 0.5}


def weights(values: Any, shape: Any = None) -> Callable[[Any], None]:
    return lambda r: tensor(anew(r.data[0], "weights"), values, FLOAT32, shape)


def targets(values: Any, dtype: int = INT64, shape: Any = None) -> Callable[[Any], None]:
    return lambda r: tensor(anew(r.data[0], "target_tokens"), values, dtype, shape)


def csr(values: Any, crow: Any, column: Any, shape: Any = (3, 2)) -> Callable[[Any], None]:
    return lambda r: sparse(anew(r.data[1], "weights"), values, crow, column, shape)


def image(**fields: Any) -> Callable[[Any], None]:
    def change(request):
        for name, value in fields.items():
            setattr(request.data[1].model_input[1].image, name, value)

    return change


def several(*changes: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda request: [change(request) for change in changes]


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "no model": (lambda r: r.ClearField("model_id"), "model_id is empty; give what create_model"),
    "no number": (lambda r: r.ClearField("seq_id"), "seq_id is 0, and requests are counted from 1"),
    "negative number": (lambda r: setattr(r, "seq_id", -3), "seq_id is -3"),
    "no loss": (lambda r: r.ClearField("loss_fn"), "loss_fn is empty; give the name"),
    "no data": (lambda r: r.ClearField("data"), "data has 0 datums; give 1 or more"),
    "no chunks": (
        lambda r: r.data[0].ClearField("model_input"),
        "data[0].model_input: 0 chunks, and no token or picture in them; give",
    ),
    "no tokens": (
        lambda r: setattr(r.data[0].model_input[0].encoded_text, "tokens", b""),
        "data[0].model_input: 1 chunks, and no token",
    ),
    "an empty chunk": (
        lambda r: r.data[1].model_input.add(),
        "data[1].model_input[2] is nothing; make it one of encoded_text and image",
    ),
    "two chunks in one": (
        lambda r: setattr(r.data[1].model_input[0].image, "format", "png"),
        "data[1].model_input[0] is encoded_text and image; make it one of",
    ),
    "audio": (
        lambda r: setattr(r.data[1].model_input.add().dmel, "dmel", b"abc"),
        "data[1].model_input[2] is audio (dmel), and this model hears nothing; give encoded_text",
    ),
    "half a token": (
        lambda r: setattr(r.data[0].model_input[0].encoded_text, "tokens", b"12345"),
        "data[0].model_input[0].encoded_text.tokens: 5 bytes, which are no multiple of the 4",
    ),
    "a negative token": (
        lambda r: setattr(
            r.data[0].model_input[0].encoded_text, "tokens", b"\0\0\0\0" + b"\xff" * 4
        ),
        "data[0].model_input[0].encoded_text.tokens[1] is -1; give whole numbers from 0 to 2147483",
    ),
    "no file": (image(data=b""), "data[1].model_input[1].image.data has 0 bytes; give the image"),
    "gif": (image(format="gif"), "image.format is 'gif', which is none of png and jpeg; give"),
    "another format": (
        image(format="jpeg"),
        "data[1].model_input[1].image.format is jpeg, and its data begins as png; give the format",
    ),
    "no picture": (
        image(data=b"RIFF1234WEBP"),
        "image.format is png, and its data begins as b'RIFF1234'; give the format that",
    ),
    "no format": (image(format=""), "image.format is '', which is none of png and jpeg"),
    "negative count": (
        image(expected_tokens=-4),
        "image.expected_tokens is -4, and a picture takes",
    ),
    "count of 0": (
        image(expected_tokens=0),
        "image.expected_tokens is 0, and a picture takes from 1",
    ),
    "no width": (
        lambda r: setattr(r.data[1].model_input[1].image.override_dimensions, "width", 0),
        "image.override_dimensions.width is 0, and sides are from 1 to 65536; leave",
    ),
    "a long side": (
        lambda r: setattr(r.data[1].model_input[1].image.override_dimensions, "height", 65537),
        "image.override_dimensions.height is 65537",
    ),
    "no targets": (
        lambda r: r.data[1].loss_fn_inputs.pop(0),
        'data[1].loss_fn_inputs["target_tokens"] is missing; give the token',
    ),
    "targets as floats": (targets([1, 2, 3], FLOAT32), '"target_tokens"] is float32; give int64'),
    "no target": (targets([]), 'data[0].loss_fn_inputs["target_tokens"] has shape [0]; give 1'),
    "a negative target": (targets([1, -100, 2]), '"target_tokens"][1] is -100; give tokens from 0'),
    "a large target": (targets([1, 2, 2**31]), '"target_tokens"][2] is 2147483648; give tokens'),
    "fewer weights": (
        weights([1, 2]),
        'data[0].loss_fn_inputs["weights"] has shape [2] and target_tokens [3]; give one value for',
    ),
    "weights of another shape": (
        weights([[1], [2], [3]]),
        "has shape [3, 1] and target_tokens [3]",
    ),
    "fewer advantages": (
        lambda r: tensor(named(r.data[0], "advantages"), [1.0]),
        'loss_fn_inputs["advantages"] has shape [1] and target_tokens [3]',
    ),
    "more log-probs": (
        lambda r: tensor(named(r.data[0], "logprobs"), [1.0] * 4),
        'loss_fn_inputs["logprobs"] has shape [4] and target_tokens [3]',
    ),
    "no mask": (
        lambda r: tensor(named(r.data[0], "sequence_ratio_mask"), []),
        'loss_fn_inputs["sequence_ratio_mask"] has shape [0] and target_tokens [3]',
    ),
    "nan": (
        weights([1, np.nan, np.inf]),
        'data[0].loss_fn_inputs["weights"][1] is nan; give finite numbers, 0 where',
    ),
    "inf": (
        lambda r: tensor(named(r.data[0], "advantages"), [1, 2, -np.inf]),
        'data[0].loss_fn_inputs["advantages"][2] is -inf; give finite',
    ),
    "nan of two dimensions": (
        csr([1, np.nan, 1], [0, 2, 2, 3], [0, 1, 0]),
        'data[1].loss_fn_inputs["weights"][0, 1] is nan',
    ),
    "values and shape": (
        weights([1, 2, 3], [8]),
        'loss_fn_inputs["weights"]: 3 values and shape [8], which holds 8; give as many',
    ),
    "a shape beyond int64": (
        weights([1, 2, 3], [2**31 - 1, 2**31 - 1]),
        "3 values and shape [2147483647, 2147483647], which holds 4611686014132420609",
    ),
    "a product of 0": (weights([], [0, 2**62]), f'weights"].shape is [0, {2**62}], and each dim'),
    "a product that wraps": (weights([], [2**32, 2**32]), "shape is [4294967296, 4294967296], and"),
    "negative shape": (
        weights([1, 2, 3], [-3]),
        '"weights"].shape is [-3], and each dimension must',
    ),
    "two negatives": (weights([1, 2, 3], [-1, -3]), '"weights"].shape is [-1, -3], and each'),
    "many dimensions": (weights([1, 2, 3], [3, 1, 1]), "shape has 3 dimensions and at most 2"),
    "half a value": (
        lambda r: setattr(named(r.data[0], "weights"), "dense", b"1234567"),
        '"weights"], of float32: 7 bytes, which are no multiple of the 4 of a value; send whole',
    ),
    "no dtype": (
        lambda r: setattr(named(r.data[0], "weights"), "dtype", 0),
        '"weights"].dtype is 0, which is none of 1 (float32), 2 (int64), 3 (int32), 4 (bfloat16)',
    ),
    "another dtype": (
        lambda r: setattr(named(r.data[0], "weights"), "dtype", -5),
        '"weights"].dtype is -5, which is none of',
    ),
    "neither": (
        lambda r: named(r.data[0], "weights").ClearField("dense"),
        '"weights"] has no values; give either dense or sparse_csr',
    ),
    "both": (
        lambda r: setattr(named(r.data[1], "weights"), "dense", b"1234"),
        '"weights"] has both dense values and sparse_csr; give either',
    ),
    "one dimension, sparse": (
        csr([1], [0, 1], [0], [1]),
        "is sparse_csr with shape [1], and sparse",
    ),
    "crow of another length": (
        csr([1], [0, 1], [0]),
        "sparse_csr.crow_indices: 2 numbers for 3 rows; give one more than there are rows",
    ),
    "crow that falls": (
        csr([1, 1, 1], [0, 3, 2, 3], [0, 1, 0]),
        "sparse_csr.crow_indices falls from 3 to 2 at [2]; let it never fall",
    ),
    "crow beyond int64": (csr([1], [0, 2**63 - 1, -(2**63), 1], [0]), "crow_indices falls from 9"),
    "crow that begins late": (
        csr([1], [1, 1, 1, 1], [0]),
        "crow_indices goes from 1 to 1, and there",
    ),
    "crow that ends early": (
        csr([1, 2], [0, 1, 1, 1], [0, 1]),
        "goes from 0 to 1, and there are 2",
    ),
    "columns of another length": (
        csr([1, 1], [0, 1, 1, 2], [0]),
        "sparse_csr.col_indices: 1 numbers for 2 values; give one for each value",
    ),
    "a column outside": (
        csr([1, 1], [0, 1, 1, 2], [0, 2]),
        "sparse_csr.col_indices[1] is 2, and there are 2 columns; give columns from 0 to 1",
    ),
    "a negative column": (csr([1], [0, 1, 1, 1], [-1]), "col_indices[0] is -1, and there are 2"),
    "a column twice": (
        csr([1, 1], [0, 2, 2, 2], [1, 1]),
        "sparse_csr.col_indices[1] is 1 after 1, in row 0; let the columns of a row rise",
    ),
    "too large once dense": (
        csr([], [0], [], [2**13, 2**14]),
        'data[1].loss_fn_inputs["weights"] is sparse_csr with shape [8192, 16384]: with it, the '
        f"sparse tensors of this request have {2**27} entries, above {MOST_DENSE}; send fewer",
    ),
    "too large together": (
        several(
            lambda r: sparse(named(r.data[0], "advantages"), [], [0], [], [2**13, 2**12]),
            csr([], [0], [], [2**13, 2**12 + 1]),
        ),
        f"have {2**26 + 2**13} entries, above {MOST_DENSE}",
    ),
    "an input twice": (
        lambda r: tensor(r.data[0].loss_fn_inputs.add(key="weights").value, [1.0] * 3),
        'data[0].loss_fn_inputs["weights"] stands there 2 times; give it once',
    ),
    "a long name": (
        lambda r: r.data[0].loss_fn_inputs.add(key="\n" * 2000),
        'loss_fn_inputs["' + "\\n" * 80 + '..."] has no values',
    ),
    "an option of nothing": (
        lambda r: r.loss_fn_config_v2.add(key="x"),
        'loss_fn_config_v2["x"] is nothing; give either a number or a text',
    ),
    "an option of both": (
        lambda r: setattr(r.loss_fn_config_v2[0].value, "text", "a"),
        'loss_fn_config_v2["clip_low"] is both a number and a text',
    ),
    "an option twice": (
        lambda r: setattr(r.loss_fn_config_v2.add(key="kind").value, "number", 1),
        'loss_fn_config_v2["kind"] stands there 2 times',
    ),
    "an option that is nan": (
        lambda r: setattr(r.loss_fn_config_v2[0].value, "number", np.nan),
        'loss_fn_config_v2["clip_low"] is nan; give a number',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    change, text = REFUSED[name]
    body = changed(change)
    with pytest.raises(RequestError) as refused:
        read_forward_backward(body)
    assert text in str(refused.value)
    assert len(str(refused.value)) < 500


NO_PROTOBUF = {
    "a group": (b"\x0b\x0c", "byte 0 begins a field of the wire type 3"),
    "a cut number": (b"\x10\x80", "the number at byte 1 is cut off at 2"),
    "a long number": (b"\x10" + b"\xff" * 12, "the number at byte 1 has more than 10 bytes"),
    "a cut field": (b"\x0a\x05abc", "the field at byte 0 ends at 7, and what it is in at 5"),
    "a cut field within": (
        b"\x1a\x02\x0a\x05",
        "the field at byte 2 ends at 9, and what it is in at 4",
    ),
    "a cut fixed field": (b"\x99\x06123", "the field at byte 0 ends at 10"),
    "text that is none": (
        b"\x0a\x02\xff\xff",
        "the body as ForwardBackwardRequest: is not readable",
    ),
    "zstd": (zstandard.compress(bytes(100)), "say Content-Encoding: zstd where it is packed"),
    "JSON": (b'{"model_id": "x"}', "the body is no protobuf message"),
}


@pytest.mark.parametrize("name", NO_PROTOBUF)
def test_bytes_that_are_no_protobuf(name):
    body, text = NO_PROTOBUF[name]
    with pytest.raises(RequestError) as refused:
        read_forward_backward(body)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * 2**24,  # datums
        b"\x1a\x80\x80\x80\x08" + b"\x0a\x00" * 2**23,  # chunks of one
        b"\x1a\x8a\x80\x80\x08\x12\x85\x80\x80\x08\x12\x80\x80\x80\x08\x22\xfb\xff\xff\x07"
        + b"\x01" * (2**24 - 5),  # numbers of a shape
        b"\x98\x06\x00" * 2**22,  # of a field that nobody knows
    ],
    ids=["datums", "chunks", "shape", "unknown"],
)
def test_many_fields_in_few_bytes(body):
    begun = time.monotonic()
    with pytest.raises(RequestError, match=rf"has more than {MOST_FIELDS} fields, .* send fewer"):
        read_forward_backward(body)
    assert time.monotonic() - begun < 10  # 0.5 s on an idle machine


def test_fields_that_nobody_knows_are_passed_over():
    body = valid().SerializeToString() + b"\x98\x06\x05" + b"\x9a\x06\x03abc"
    assert read_forward_backward(body).model_id == "run:train:0"


def attempt(body: bytes) -> None:
    """Whatever it is, it is read or refused."""
    try:
        found = read_forward_backward(body)
    except RequestError as error:
        assert len(str(error)) < 3000
        return
    for datum in found.data:
        assert datum.chunks and datum.inputs["target_tokens"].ndim in (1, 2)


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_mutated_requests_are_read_or_refused(seed, packed):
    chance = random.Random(seed)
    body = valid().SerializeToString()
    if packed:
        body = mutate_bytes(zstandard.compress(body), chance)
        try:
            body = unpacked(body, 2**20)
        except RequestError:
            return
    attempt(mutate_bytes(body, chance))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body):
    attempt(body)
    with contextlib.suppress(RequestError):
        assert len(unpacked(body, 1000)) <= 1000


def test_cut_requests_are_read_or_refused():
    body = valid().SerializeToString()
    for end in range(len(body)):
        attempt(body[:end])
        attempt(body[:end] + b"\xff" + body[end + 1 :])


def test_a_prompt_is_read():
    chunks = read_prompt(
        {
            "chunks": [
                {"type": "encoded_text", "tokens": [1, 2**31 - 1]},
                {"type": "image", "data": base64.b64encode(PNG).decode(), "format": "png"},
                {
                    "type": "image",
                    "data": base64.b64encode(JPEG).decode(),
                    "format": "jpeg",
                    "expected_tokens": 12,
                    "override_dimensions": {"width": 3, "height": 4},
                },
                {"type": "encoded_text", "tokens": []},
            ]
        },
        "prompt",
    )
    assert isinstance(chunks[0], Text) and chunks[0].tokens.dtype == np.int32
    assert chunks[0].tokens.tolist() == [1, 2**31 - 1]
    assert chunks[1:3] == (Picture(PNG, "png"), Picture(JPEG, "jpeg", 12, (3, 4)))
    assert len(chunks[3].tokens) == 0


def of_text(tokens: Any) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def of_image(**fields: Any) -> dict[str, Any]:
    return {"chunks": [{"type": "image", "data": "AAAA", "format": "png"} | fields]}


REFUSED_PROMPTS = {
    "a list": ([1, 2], "prompt is [1, 2]; give an object with a list, chunks"),
    "no list": ({"chunks": {}}, "prompt is {'chunks': {}}; give"),
    "empty": ({"chunks": []}, "prompt.chunks: 0 chunks, and no token or picture in them"),
    "no tokens": (of_text([]), "prompt.chunks: 1 chunks, and no token"),
    "a number": ({"chunks": [5]}, "prompt.chunks[0] is 5, whose type is none of encoded_text and"),
    "no type": (
        {"chunks": [{"tokens": [1]}]},
        "prompt.chunks[0] is {'tokens': [1]}, whose type is",
    ),
    "a pointer": (
        {"chunks": [{"type": "image_asset_pointer", "location": "file:///etc/passwd"}]},
        "prompt.chunks[0] is an image_asset_pointer, and nothing is fetched here; send the image",
    ),
    "audio": ({"chunks": [{"type": "dmel", "dmel": ""}]}, "prompt.chunks[0] is audio (dmel), and"),
    "text": (of_text("abc"), "prompt.chunks[0].tokens is 'abc'; give a list of tokens"),
    "a fraction": (of_text([1, 2.0]), "prompt.chunks[0].tokens[1] is 2.0; give whole numbers from"),
    "true": (of_text([True]), "prompt.chunks[0].tokens[0] is True; give whole"),
    "negative": (
        of_text([0, -1]),
        "prompt.chunks[0].tokens[1] is -1; give whole numbers from 0 to",
    ),
    "large": (of_text([2**31]), "prompt.chunks[0].tokens[0] is 2147483648; give whole"),
    "no base64": (of_image(data="A&=="), "prompt.chunks[0].data is no base64 ("),
    "no letter of base64": (of_image(data="AA*AA"), "prompt.chunks[0].data is no base64 ("),
    "no ASCII": (of_image(data="ää"), "prompt.chunks[0].data is no base64 ("),
    "no text": (of_image(data=5), "prompt.chunks[0].data is 5; give the image file in base64"),
    "no data": (of_image(data=""), "prompt.chunks[0].data has 0 bytes; give"),
    "gif": (of_image(format="gif"), "prompt.chunks[0].format is 'gif', which is none of png and"),
    "a text as a picture": (of_image(), "prompt.chunks[0].format is png, and its data begins as"),
    "a list of formats": (of_image(format=["png"]), "prompt.chunks[0].format is ['png'], which"),
    "a count of text": (
        of_image(expected_tokens="4"),
        "prompt.chunks[0].expected_tokens is '4'; give",
    ),
    "negative count": (
        of_image(expected_tokens=-1),
        "prompt.chunks[0].expected_tokens is -1, and a",
    ),
    "a long count": (
        of_image(expected_tokens=10**4000),
        "prompt.chunks[0].expected_tokens is 1000",
    ),
    "no sides": (
        of_image(override_dimensions=5),
        "override_dimensions.width is None; give a whole",
    ),
    "one side": (of_image(override_dimensions={"width": 3}), "override_dimensions.height is None"),
}


@pytest.mark.parametrize("name", REFUSED_PROMPTS)
def test_refused_prompts(name):
    value, text = REFUSED_PROMPTS[name]
    with pytest.raises(RequestError) as refused:
        read_prompt(value, "prompt")
    assert text in str(refused.value)
    assert len(str(refused.value)) < 500


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_prompts_are_read_or_refused(seed):
    both = {"chunks": of_text([1, 2])["chunks"] + of_image(expected_tokens=3)["chunks"]}
    text = mutate_json(both, random.Random(seed))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    try:
        assert read_prompt(value, "prompt")
    except RequestError as error:
        assert len(str(error)) < 3000


def test_loss_outputs_are_written_in_records_of_one_form():
    def output(n: int, *more: int) -> dict[str, np.ndarray]:
        return {"logprobs": np.arange(n * int(np.prod(more)), dtype=np.float32).reshape(n, *more)}

    body = write_forward_backward(
        [output(2), output(3), output(2, 2), output(1)], {"loss:sum": 0.5}
    )
    found = parsed("ForwardBackwardOutput", body)
    assert found.loss_fn_output_type == "ArrayRecord"
    assert [each.num_datums for each in found.loss_fn_outputs] == [2, 1, 1]
    first, second, _ = (each.fields[0].value for each in found.loss_fn_outputs)
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8, 20]
    assert np.frombuffer(first.data, "<f4").tolist() == [0, 1, 0, 1, 2]
    assert (list(first.trailing_shape), list(second.trailing_shape)) == ([], [2])
    assert [(each.key, each.value) for each in found.metrics] == [("loss:sum", 0.5)]


@pytest.mark.parametrize("name", ["loss", "loss:sum:mean", ":sum", "loss:", "loss:total"])
def test_metrics_that_the_client_would_not_take(name):
    with pytest.raises(AssertionError, match=name):
        write_forward_backward([], {name: 1.0})


@pytest.mark.parametrize(
    "outputs",
    [
        [{"logprobs": np.zeros(3)}],
        [{"logprobs": np.float32(3)}],
        [{"logprobs": np.zeros((3, 0), np.float32)}],
        [{"logprobs": np.zeros(3, np.float32)}, {}],
    ],
    ids=["float64", "no dimension", "no columns", "other names"],
)
def test_outputs_that_are_a_mistake_of_ours(outputs):
    with pytest.raises(AssertionError):
        write_forward_backward(outputs, {})


def test_samples_are_written():
    tokens = np.array([4, 5], np.int32)
    top = TopK(np.array([[4, 1, 0], [5, 0, 0]], np.int32), np.full((2, 3), -1.0, np.float32))
    samples = Samples(
        (
            Sampled(tokens, np.array([-0.5, -1.0], np.float32), True, top),
            Sampled(tokens[:1], None, False),
        ),
        np.array([np.nan, -2.0], np.float32),
        target_prompt_log_probs=np.ones((1, 3), np.float32),
    )
    found = parsed("SampleResponse", write_samples(samples))
    first, second = found.sequences
    assert (first.stop_reason, second.stop_reason) == (0, 1)
    assert first.tokens == tokens.tobytes()
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-0.5, -1.0]
    assert (first.topk_sampled_logprobs.length, first.topk_sampled_logprobs.k) == (2, 3)
    assert not second.HasField("logprobs") and not second.HasField("topk_sampled_logprobs")
    assert not found.HasField("topk_prompt_logprobs")
    assert list(found.target_prompt_logprobs.shape) == [1, 3]


DENSE = {"data": [5, -1, 6, 7, -1, -1], "shape": [3, 2]}
SPARSE = {
    "data": [5, 6, 7],
    "shape": [3, 9],
    "sparse_crow_indices": [0, 1, 3, 3],
    "sparse_col_indices": [8, 0, 1],
}


def test_chosen_tokens_are_read():
    dense, found = read_prompt_targets(DENSE, 4), read_prompt_targets(SPARSE, 4)
    assert dense.ids_RJ.tolist() == [[5, -1], [6, 7], [-1, -1]]
    assert found.ids_RJ.tolist() == [[5, -1], [6, 7], [-1, -1]]  # as many as the most have
    log_probs = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert dense.answer(log_probs) is log_probs
    answer = found.answer(log_probs)
    assert answer.values.tolist() == [0.0, 2.0, 3.0] and answer.shape == (3, 9)
    written = parsed("SampleResponse", write_samples(Samples((), target_prompt_log_probs=answer)))
    tensor = written.target_prompt_logprobs
    assert np.frombuffer(tensor.sparse_csr.crow_indices, "<i8").tolist() == [0, 1, 3, 3]
    assert np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist() == [8, 0, 1]
    assert list(tensor.shape) == [3, 9] and not tensor.HasField("dense")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (DENSE | {"shape": [2, 3]}, "shape [2, 3], and the prompt has 4 tokens; give [3, K]"),
        (DENSE | {"shape": [3]}, "shape [3], and the prompt"),
        (DENSE | {"shape": [3, 0]}, "shape [3, 0], and the prompt"),
        (DENSE | {"data": [1, 2]}, "2 values and shape [3, 2]; give as many as the shape has"),
        (DENSE | {"data": [1.5] * 6}, ".data: give a list of whole numbers"),
        (DENSE | {"data": "many"}, ".data: give whole numbers"),
        (DENSE | {"data": [2**70] * 6}, ".data: give whole numbers"),
        ({"data": [1]}, ".shape: give whole numbers"),
        (DENSE | {"sparse_col_indices": [1]}, "give both sparse_crow_indices and"),
        (SPARSE | {"sparse_crow_indices": [0, 1, 3]}, "sparse_crow_indices: 3 numbers for 3 rows"),
        (SPARSE | {"sparse_crow_indices": [0, 3, 1, 3]}, "falls from 3 to 1 at [2]"),
        (SPARSE | {"sparse_col_indices": [9, 0, 1]}, "sparse_col_indices[0] is 9, and there are 9"),
        (SPARSE | {"sparse_col_indices": [8, 1, 1]}, "is 1 after 1, in row 1; let the columns"),
        (SPARSE | {"sparse_col_indices": [[8, 0, 1]]}, "give a list of whole numbers"),
    ],
)
def test_chosen_tokens_that_are_refused(said, message):
    with pytest.raises(RequestError) as caught:
        read_prompt_targets(said, 4)
    assert message in str(caught.value) and "target_prompt_logprobs" in str(caught.value)


def test_chosen_tokens_cannot_fill_the_memory():
    count = 2**14
    crow = [0] + [count] * count  # all of them at the first of many places
    said = {"data": [1] * count, "shape": [count, count], "sparse_crow_indices": crow}
    with pytest.raises(RequestError, match="up to 16384 tokens at one of 16384 places"):
        read_prompt_targets(said | {"sparse_col_indices": list(range(count))}, count + 1)


@pytest.mark.parametrize(
    "sampled",
    [
        Sampled(np.array([1], np.int64), None, True),
        Sampled(np.array([1], np.int32), np.zeros(2, np.float32), True),
        Sampled(np.array([1], np.int32), np.zeros(1), True),
        Sampled(
            np.array([1], np.int32),
            None,
            True,
            TopK(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)),
        ),
    ],
    ids=["int64", "another length", "float64", "another length of the likeliest"],
)
def test_samples_that_are_a_mistake_of_ours(sampled):
    with pytest.raises(AssertionError):
        write_samples(Samples((sampled,)))


CONTENT = bytes(range(256)) * 3000 + random.Random(0).randbytes(300_000)


def packed(content: bytes = CONTENT, **settings: Any) -> bytes:
    return zstandard.ZstdCompressor(**settings).compress(content)


def in_pieces(**settings: Any) -> bytes:
    """By a packer that is not told how much will come, and so takes the whole window."""
    packer = zstandard.ZstdCompressor(**settings).compressobj()
    return packer.compress(CONTENT) + packer.flush()


PACKED = {
    "with its size": (packed(), CONTENT),
    "without its size": (packed(write_content_size=False), CONTENT),
    "with a checksum": (packed(write_checksum=True), CONTENT),
    "the widest window": (
        in_pieces(compression_params=zstandard.ZstdCompressionParameters(window_log=23)),
        CONTENT,
    ),
    "several frames": (packed() + packed(b"more", write_content_size=False), CONTENT + b"more"),
    "nothing": (packed(b""), b""),
    "a frame to skip": (b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + packed(), CONTENT),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_bodies(name):
    body, content = PACKED[name]
    assert unpacked(body, len(content)) == content
    if content:
        with pytest.raises(
            RequestError, match=f"unpack to more than the limit of {len(content) - 1}"
        ):
            unpacked(body, len(content) - 1)


REFUSED_PACKED = {
    "empty": (b"", "cut off after 0 bytes; send the whole zstd frame"),
    "no zstd": (CONTENT[:100], "at byte 0 no zstd frame that can be unpacked ("),
    "cut": (packed()[:-1], "cut off after "),
    "cut within the header": (packed()[:5], "cut off after 5 bytes"),
    "the second cut": (packed() + packed()[:30], "cut off after "),
    "garbage behind": (packed() + b"garbage", " no zstd frame that can be unpacked ("),
    "a changed checksum": (packed(write_checksum=True)[:-1] + b"\x55", "no zstd frame that can"),
    "frames of nothing": (packed(b"") * (MOST_FRAMES + 1), f"more than {MOST_FRAMES} zstd frames"),
    "a wide window": (
        in_pieces(compression_params=zstandard.ZstdCompressionParameters(window_log=24)),
        f"pack it with a window of at most {MOST_WINDOW} bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED_PACKED)
def test_refused_packed_bodies(name):
    body, text = REFUSED_PACKED[name]
    with pytest.raises(RequestError) as refused:
        unpacked(body, 2**24)
    assert text in str(refused.value)


BOMB = """
import sys, time
from pathlib import Path
from megatron_vlm.service.wire import answers, requests
from megatron_vlm.service.wire.compression import unpacked
from megatron_vlm.service.wire.values import RequestError

def peak():  # in KiB
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

body = sys.stdin.buffer.read()
before, begun = peak(), time.monotonic()
try:
    unpacked(body, 2**24)
except RequestError:
    print((peak() - before) // 1024, time.monotonic() - begun)
assert not {"torch", "fastapi", "megatron", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("size", [True, False], ids=["with its size", "without its size"])
def test_a_bomb_is_refused_at_once(size):
    """Two GiB of zeros in 65 KB."""
    total = 2**31
    packer = zstandard.ZstdCompressor(write_content_size=size).compressobj(total if size else -1)
    zeros = bytes(2**24)
    body = b"".join(packer.compress(zeros) for _ in range(total // len(zeros))) + packer.flush()
    assert len(body) < 10**5
    done = subprocess.run(
        [sys.executable, "-c", BOMB], input=body, capture_output=True, check=True, timeout=60
    )
    grown_mib, seconds = done.stdout.split()
    # Measured: 34 MiB and 0.03 s. 16 are allowed, 8 may come at once, and there are copies.
    assert int(grown_mib) < 100
    assert float(seconds) < 5
