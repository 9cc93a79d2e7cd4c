"""Input of the model: text and pictures, as protobuf and as JSON."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vlm.serve.protocol.payloads import MAX_TOKEN_ID, Chunk, Picture, RequestError, Text

HEADS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # first bytes of the files
_FORMATS = tuple(HEADS)
_MAX_SIDE = 2**16  # maximum side of a JPEG
_KINDS = ("encoded_text", "image")
_TOKEN = f"a whole number from 0 to {MAX_TOKEN_ID}"


def read_chunks(messages: Sequence[Any], where: str) -> tuple[Chunk, ...]:
    """Read the chunks of a datum's model_input."""
    chunks = tuple(_of_message(each, f"{where}[{i}]") for i, each in enumerate(messages))
    return _check_not_empty(chunks, where)


def read_prompt(objects: Sequence[Mapping[str, Any]]) -> tuple[Chunk, ...]:
    """Read the chunks of a prompt, as parsed JSON."""
    chunks = tuple(_of_json(each, f"prompt.chunks[{i}]") for i, each in enumerate(objects))
    return _check_not_empty(chunks, "prompt.chunks")


def _check_not_empty(chunks: tuple[Chunk, ...], where: str) -> tuple[Chunk, ...]:
    if not any(isinstance(each, Picture) or len(each.tokens) for each in chunks):
        raise RequestError(
            f": its {len(chunks)} chunks have no token and no picture",
            key=where,
            remedy="give one or more",
        )
    return chunks


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
