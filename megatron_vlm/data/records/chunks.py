"""Lists of encoded chunks: tokens that were encoded elsewhere, with images in between."""

from collections.abc import Mapping
from typing import Any

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.messages import image_of
from megatron_vlm.data.records.record import EncodedRecord, ImageChunk
from megatron_vlm.data.records.record_values import is_list, kind_of, single_value, weight_of
from megatron_vlm.errors import DataError

_MASKS = ("mask", "loss_mask", "weights")
_SOURCES = ("data", "image", "location")


def parse_chunks(raw: Mapping[str, Any], keys: Keys) -> EncodedRecord:
    """Parse a raw dict that has `chunks` or `model_input`."""
    where = keys.where
    raw = keys.read(raw, {"chunks", "model_input", *_MASKS}, where)
    chunks: Any = single_value(raw, ("chunks", "model_input"), where)
    if isinstance(chunks, Mapping):
        chunks = keys.read(chunks, {"chunks"}, f"{where}: model_input").get("chunks")
    if not is_list(chunks) or not len(chunks):
        raise DataError("must be a list with at least one chunk", place=where, key="chunks")
    parsed = tuple(_parse_chunk(c, f"{where}: chunk {i}", keys) for i, c in enumerate(chunks))
    mask = single_value(raw, _MASKS, where)
    if mask is not None:
        if not is_list(mask):
            raise DataError(
                "must be a list of weights such as 0 and 1, one for each token",
                place=where,
                key="mask",
            )
        mask = tuple(weight_of(value, f"mask[{i}]", where) for i, value in enumerate(mask))
    return EncodedRecord(where, parsed, mask)


def _parse_chunk(chunk: Any, where: str, keys: Keys) -> tuple[int, ...] | ImageChunk:
    if not isinstance(chunk, Mapping):
        raise DataError(f"must be an object, not {kind_of(chunk)}", place=where)
    if chunk.get("tokens") is not None:
        keys.read(chunk, {"type", "tokens"}, where)
        tokens = chunk["tokens"]
        if not is_list(tokens) or any(type(t) is not int or t < 0 for t in tokens):
            raise DataError("must be a list of token ids", place=where, key="tokens")
        return tuple(tokens)
    # The bytes of a picture tell its format.
    chunk = keys.read(chunk, {"type", *_SOURCES, "format", "expected_tokens"}, where)
    source = single_value(chunk, _SOURCES, where)
    if source is None:
        raise DataError(
            f"has neither tokens nor an image; its keys are {sorted(chunk)}", place=where
        )
    if isinstance(source, str) and chunk.get("type") == "image" and "data" in chunk:
        source = f"data:image;base64,{source}"  # JSON carries bytes as base64
    expected = chunk.get("expected_tokens")
    if expected is not None and (type(expected) is not int or expected < 1):
        raise DataError(
            place=where, key="expected_tokens", found=expected, allowed="a count, at least 1"
        )
    return ImageChunk(image_of(source, where, keys), expected)
