"""Parser of client requests. The bytes may be anything; for bytes that are no request of the
protocol, a RequestError names the field."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_vlm.serve.protocol.payloads import (
    MAX_TOKEN_ID,
    Datum,
    ForwardBackward,
    RequestError,
    entry,
)
from megatron_vlm.serve.protocol.prompt_chunks import read_chunks, read_prompt
from megatron_vlm.serve.protocol.protobuf import next_field, parse_message
from megatron_vlm.serve.protocol.request_tensors import dense_entries, place, read_tensor

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
    chunks = read_chunks(datum.model_input, f"{where}.model_input")
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
