"""Parser of client requests, with the model's input, text and pictures, as protobuf and as JSON.
The bytes may be anything; for bytes that are no request of the protocol, a RequestError names the
field."""

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vlm.serve.protocol.payloads import (
    MAX_TOKEN_ID,
    Chunk,
    Datum,
    ForwardBackward,
    Picture,
    RequestError,
    Text,
    entry,
)
from megatron_vlm.serve.protocol.protobuf import next_field, parse_message
from megatron_vlm.serve.protocol.request_tensors import dense_entries, place, read_tensor

HEADS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # first bytes of the files
_FORMATS = tuple(HEADS)
_MAX_SIDE = 2**16  # maximum side of a JPEG
_KINDS = ("encoded_text", "image")
_TOKEN = f"a whole number from 0 to {MAX_TOKEN_ID}"


def read_prompt(objects: Sequence[Mapping[str, Any]]) -> tuple[Chunk, ...]:
    """Read the chunks of a prompt, as parsed JSON."""
    chunks = tuple(_of_json(each, f"prompt.chunks[{i}]") for i, each in enumerate(objects))
    _check_not_empty(chunks, "prompt.chunks")
    return chunks


def _check_not_empty(chunks: tuple[Chunk, ...], where: str) -> None:
    if not any(isinstance(each, Picture) or len(each.tokens) for each in chunks):
        raise RequestError(
            f": its {len(chunks)} chunks have no token and no picture",
            key=where,
            remedy="give one or more",
        )


def _of_message(chunk: Any, where: str) -> Chunk:
    kinds = [field.name for field, _ in chunk.ListFields()]
    if len(kinds) != 1:
        raise RequestError(
            f"has {len(kinds)} kinds of content", key=where, found=kinds, allowed=_KINDS
        )
    if kinds == ["dmel"]:
        raise _no_audio(where)
    if kinds == ["encoded_text"]:
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise RequestError(
                f"has {len(data)} bytes, which is not a multiple of the 4 of an int32",
                key=f"{where}.encoded_text.tokens",
                remedy="send whole tokens",
            )
        return _text(np.frombuffer(data, "<i4"), f"{where}.encoded_text")
    image = chunk.image
    size = None
    if image.HasField("override_dimensions"):
        size = image.override_dimensions.width, image.override_dimensions.height
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return _picture(Picture(image.data, image.format, expected, size), f"{where}.image")


def _of_json(chunk: Mapping[str, Any], where: str) -> Chunk:
    kind = chunk.get("type")
    if kind == "encoded_text":
        return _text(_whole_numbers(chunk.get("tokens"), where), where)
    if kind == "image":
        return _picture(_json_picture(chunk, where), where)
    if kind == "dmel":
        raise _no_audio(where)
    if kind == "image_asset_pointer":
        raise RequestError(
            "is an image_asset_pointer, and this service fetches nothing",
            key=where,
            remedy="send the image itself as an image chunk",
        )
    raise RequestError("has no known type", key=where, found=chunk, allowed=_KINDS)


def _no_audio(where: str) -> RequestError:
    return RequestError(
        "is audio (dmel), which this model does not take",
        key=where,
        remedy="give encoded_text and image chunks",
    )


def _whole_numbers(tokens: Any, where: str) -> np.ndarray:
    if not isinstance(tokens, list):
        raise RequestError(key=f"{where}.tokens", found=tokens, allowed="a list of tokens")
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(key=f"{where}.tokens[{i}]", found=token, allowed=_TOKEN)
    return np.array(tokens, np.int32)


def _text(tokens: np.ndarray, where: str) -> Text:
    if len(tokens) and tokens.min() < 0:
        at = int(np.argmax(tokens < 0))
        raise RequestError(key=f"{where}.tokens[{at}]", found=int(tokens[at]), allowed=_TOKEN)
    return Text(tokens.astype(np.int32))


def _json_picture(chunk: Mapping[str, Any], where: str) -> Picture:
    data, expected = chunk.get("data"), chunk.get("expected_tokens")
    if not isinstance(data, str):
        raise RequestError(key=f"{where}.data", found=data, allowed="the image file in base64")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"is not base64 ({error})", key=f"{where}.data", allowed="the image file in base64"
        ) from error
    size = None
    if (override := chunk.get("override_dimensions")) is not None:
        sides = override if isinstance(override, dict) else {}
        within = f"{where}.override_dimensions"
        width = _check_whole_number(sides.get("width"), f"{within}.width")
        size = width, _check_whole_number(sides.get("height"), f"{within}.height")
    if expected is not None:
        expected = _check_whole_number(expected, f"{where}.expected_tokens")
    return Picture(content, chunk.get("format", ""), expected, size)


def _check_whole_number(value: Any, where: str) -> int:
    if type(value) is not int or not -MAX_TOKEN_ID <= value <= MAX_TOKEN_ID:
        raise RequestError(key=where, found=value, allowed=f"a whole number up to {MAX_TOKEN_ID}")
    return int(value)


def _picture(picture: Picture, where: str) -> Picture:
    if not picture.data:
        raise RequestError(
            "has 0 bytes", key=f"{where}.data", allowed="the image file, 1 byte or more"
        )
    if picture.format not in _FORMATS:
        raise RequestError(
            "is not supported", key=f"{where}.format", found=picture.format, allowed=_FORMATS
        )
    expected = picture.expected_tokens
    if expected is not None and not 1 <= expected <= MAX_TOKEN_ID:
        raise RequestError(
            f": a picture takes from 1 to {MAX_TOKEN_ID} tokens",
            key=f"{where}.expected_tokens",
            found=expected,
            remedy="give the number that the processor counts, or leave it out",
        )
    for side, length in zip(("width", "height"), picture.size or (), strict=False):
        if not 1 <= length <= _MAX_SIDE:
            raise RequestError(
                f": a side has from 1 to {_MAX_SIDE} pixels",
                key=f"{where}.override_dimensions.{side}",
                found=length,
                remedy="leave override_dimensions out to take the picture's own",
            )
    if not picture.data.startswith(HEADS[picture.format]):
        formats = [name for name, head in HEADS.items() if picture.data.startswith(head)]
        begins = formats[0] if formats else repr(picture.data[:8])
        raise RequestError(
            f": the data begins as {begins}",
            key=f"{where}.format",
            found=picture.format,
            allowed="the format that the file has",
        )
    return picture


__all__ = ["MAX_DENSE_CELLS", "read_forward_backward", "read_prompt"]

# Maximum entries of all sparse tensors of a request once they are dense: 512 MiB of int64.
MAX_DENSE_CELLS = 2**26
# Inputs that have one value for each target.
_PER_TARGET = ("weights", "logprobs", "advantages", "sequence_ratio_mask")


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the ForwardBackwardRequest in `body`."""
    request = parse_message("ForwardBackwardRequest", body)
    if not request.model_id:
        raise RequestError("is empty", key="model_id", allowed="what create_model has returned")
    if request.seq_id < 1:
        raise RequestError(
            ": requests are counted from 1",
            key="seq_id",
            found=request.seq_id,
            allowed="the number of this one",
        )
    if not request.loss_fn:
        raise RequestError(
            "is empty", key="loss_fn", allowed="the name of a loss, such as cross_entropy"
        )
    if not request.data:
        raise RequestError("has 0 datums", key="data", allowed="1 or more")
    _check_dense_entries(request.data)
    return ForwardBackward(
        request.model_id,
        request.seq_id,
        tuple(_datum(each, f"data[{i}]") for i, each in enumerate(request.data)),
        request.loss_fn,
        _options(request),
        request.forward_only,
    )


def read_place(head: bytes) -> tuple[str, int] | None:
    """Return the model_id and seq_id at the beginning of a ForwardBackwardRequest, or None. The
    request may be cut off or wrong after them. Without them, the model's later calls would wait for
    ever for a number that never comes."""
    try:
        _, _, model_end = next_field(head, 0, len(head))
        _, _, seq_end = next_field(head, model_end, len(head))
        request = parse_message("ForwardBackwardRequest", head[:seq_end])
    except RequestError:
        return None
    return (request.model_id, request.seq_id) if request.model_id and request.seq_id > 0 else None


def _options(request: Any) -> dict[str, float | str]:
    """Return the options of the loss. Old clients fill the first map, today's clients the second or
    both."""
    if not request.loss_fn_config_v2:
        old = _entries_by_name(request.loss_fn_config, "loss_fn_config")
        return {name: _number(value, where) for name, (value, where) in old.items()}
    options: dict[str, float | str] = {}
    for name, (value, where) in _entries_by_name(
        request.loss_fn_config_v2, "loss_fn_config_v2"
    ).items():
        number, text = value.HasField("number"), value.HasField("text")
        if number == text:
            has = "both a number and a text" if text else "neither a number nor a text"
            raise RequestError(f"has {has}", key=where, allowed="one of them")
        options[name] = value.text if text else _number(value.number, where)
    return options


def _number(value: float, where: str) -> float:
    """Return the value of an option unless it is NaN. It may be infinite, as a bound that never
    binds."""
    if math.isnan(value):
        raise RequestError(key=where, found=value, allowed="a number")
    return value


def _entries_by_name(entries: Iterable[Any], where: str) -> dict[str, tuple[Any, str]]:
    """Return the values of a map, each with its name in messages."""
    values: dict[str, tuple[Any, str]] = {}
    for item in entries:
        label = entry(where, item.key)
        if item.key in values:
            raise RequestError("occurs 2 times", key=label, remedy="give it once")
        values[item.key] = item.value, label
    return values


def _check_dense_entries(data: Iterable[Any]) -> None:
    """Check the size of all sparse tensors before any array is made: a few bytes may claim an array
    of any size."""
    total = 0
    for i, datum in enumerate(data):
        for item in datum.loss_fn_inputs:
            where = entry(f"data[{i}].loss_fn_inputs", item.key)
            total += dense_entries(item.value, where)
            if total > MAX_DENSE_CELLS:
                raise RequestError(
                    f"brings the sparse tensors of this request to {total} entries, above "
                    f"{MAX_DENSE_CELLS}",
                    key=f"{where}.shape",
                    found=list(item.value.shape),
                    remedy="send fewer datums in a request, or fewer columns",
                )


def _datum(datum: Any, where: str) -> Datum:
    at = f"{where}.model_input"
    chunks = tuple(_of_message(each, f"{at}[{i}]") for i, each in enumerate(datum.model_input))
    _check_not_empty(chunks, at)
    named = _entries_by_name(datum.loss_fn_inputs, f"{where}.loss_fn_inputs")
    inputs = {name: read_tensor(tensor, label) for name, (tensor, label) in named.items()}
    for name, (_, label) in named.items():
        _check_finite(inputs[name], label)
    _check_targets(inputs, f"{where}.loss_fn_inputs")
    return Datum(chunks, inputs)


def _check_finite(values: np.ndarray, where: str) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise RequestError(
            key=f"{where}{place(wrong)}",
            found=values[wrong][0].item(),
            allowed="finite numbers, 0 where there is nothing to learn",
        )


def _check_targets(inputs: Mapping[str, np.ndarray], where: str) -> None:
    targets = inputs.get("target_tokens")
    label = f'{where}["target_tokens"]'
    if targets is None:
        raise RequestError("is missing", key=label, allowed="the token to predict at each place")
    if targets.dtype != np.int64:
        raise RequestError(
            key=f"{label}.dtype", found=str(targets.dtype), allowed="int64, the ids of tokens"
        )
    if not targets.size:
        raise RequestError(
            key=f"{label}.shape", found=list(targets.shape), allowed="1 target or more"
        )
    wrong = (targets < 0) | (targets > MAX_TOKEN_ID)
    if wrong.any():
        raise RequestError(
            key=f"{label}{place(wrong)}",
            found=int(targets[wrong][0]),
            allowed=f"tokens from 0 to {MAX_TOKEN_ID}, and weight 0 to those that are not to be "
            "learned",
        )
    for name in _PER_TARGET:
        if name in inputs and inputs[name].shape != targets.shape:
            raise RequestError(
                f"is not the shape of target_tokens, {list(targets.shape)}",
                key=f"{entry(where, name)}.shape",
                found=list(inputs[name].shape),
                allowed="one value for each target",
            )
