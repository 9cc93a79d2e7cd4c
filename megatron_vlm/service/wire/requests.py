"""What clients ask for, out of the bytes that arrive. They may be anything: what is no request of
the protocol is a RequestError that names the field."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_vlm.service.wire.chunks import read_chunks, read_prompt
from megatron_vlm.service.wire.schema import parsed
from megatron_vlm.service.wire.tensors import dense_entries, place, read_tensor
from megatron_vlm.service.wire.values import MOST_TOKEN, Datum, ForwardBackward, RequestError

__all__ = ["MOST_DENSE", "read_forward_backward", "read_prompt"]

# Entries of the sparse tensors of a request once they are dense, all together: 512 MiB of int64.
MOST_DENSE = 2**26
# Inputs that have one value for each target.
_PER_TARGET = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
_LONGEST_NAME = 80  # that a message repeats


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request in `body`, which is a ForwardBackwardRequest unless the client is wrong."""
    request = parsed("ForwardBackwardRequest", body)
    if not request.model_id:
        raise RequestError("model_id is empty; give what create_model has returned")
    if request.seq_id < 1:
        raise RequestError(
            f"seq_id is {request.seq_id}, and requests are counted from 1; give the number of this "
            "one"
        )
    if not request.loss_fn:
        raise RequestError("loss_fn is empty; give the name of a loss, such as cross_entropy")
    if not request.data:
        raise RequestError("data has 0 datums; give 1 or more")
    _check_dense_entries(request.data)
    return ForwardBackward(
        request.model_id,
        request.seq_id,
        tuple(_datum(each, f"data[{i}]") for i, each in enumerate(request.data)),
        request.loss_fn,
        _options(request),
        request.forward_only,
    )


def _options(request: Any) -> dict[str, float | str]:
    """Of the loss. Old clients fill the first map, those of today the second or both."""
    if not request.loss_fn_config_v2:
        old = _named(request.loss_fn_config, "loss_fn_config")
        return {name: _number(value, where) for name, (value, where) in old.items()}
    options: dict[str, float | str] = {}
    for name, (value, where) in _named(request.loss_fn_config_v2, "loss_fn_config_v2").items():
        number, text = value.HasField("number"), value.HasField("text")
        if number == text:
            raise RequestError(
                f"{where} is {'both a number and a text' if text else 'nothing'}; give either a "
                "number or a text"
            )
        options[name] = value.text if text else _number(value.number, where)
    return options


def _number(value: float, where: str) -> float:
    """An option may be infinite, as a bound that never binds."""
    if math.isnan(value):
        raise RequestError(f"{where} is nan; give a number")
    return value


def _named(entries: Iterable[Any], where: str) -> dict[str, tuple[Any, str]]:
    """The values of a map, each with what it is called in messages."""
    found: dict[str, tuple[Any, str]] = {}
    for entry in entries:
        called = _called(where, entry.key)
        if entry.key in found:
            raise RequestError(f"{called} stands there 2 times; give it once")
        found[entry.key] = entry.value, called
    return found


def _called(where: str, name: str) -> str:
    short = name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."
    return f"{where}[{json.dumps(short)}]"


def _check_dense_entries(data: Iterable[Any]) -> None:
    """Before any is made: a few bytes may say that they are an array of any size."""
    total = 0
    for i, datum in enumerate(data):
        for entry in datum.loss_fn_inputs:
            where = _called(f"data[{i}].loss_fn_inputs", entry.key)
            total += dense_entries(entry.value, where)
            if total > MOST_DENSE:
                raise RequestError(
                    f"{where} is sparse_csr with shape {list(entry.value.shape)}: with it, the "
                    f"sparse tensors of this request have {total} entries, above {MOST_DENSE}; "
                    "send fewer datums in a request, or fewer columns"
                )


def _datum(datum: Any, where: str) -> Datum:
    chunks = read_chunks(datum.model_input, f"{where}.model_input")
    named = _named(datum.loss_fn_inputs, f"{where}.loss_fn_inputs")
    inputs = {name: read_tensor(tensor, called) for name, (tensor, called) in named.items()}
    for name, (_, called) in named.items():
        _check_finite(inputs[name], called)
    _check_targets(inputs, f"{where}.loss_fn_inputs")
    return Datum(chunks, inputs)


def _check_finite(values: np.ndarray, where: str) -> None:
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise RequestError(
            f"{where}{place(wrong)} is {values[wrong][0]}; give finite numbers, 0 where there is "
            "nothing to learn"
        )


def _check_targets(inputs: Mapping[str, np.ndarray], where: str) -> None:
    targets = inputs.get("target_tokens")
    called = f'{where}["target_tokens"]'
    if targets is None:
        raise RequestError(f"{called} is missing; give the token to predict at each place")
    if targets.dtype != np.int64:
        raise RequestError(f"{called} is {targets.dtype}; give int64, the numbers of tokens")
    if not targets.size:
        raise RequestError(f"{called} has shape {list(targets.shape)}; give 1 target or more")
    wrong = (targets < 0) | (targets > MOST_TOKEN)
    if wrong.any():
        raise RequestError(
            f"{called}{place(wrong)} is {targets[wrong][0]}; give tokens from 0 to {MOST_TOKEN}, "
            "and weight 0 to those that are not to be learned"
        )
    for name in _PER_TARGET:
        if name in inputs and inputs[name].shape != targets.shape:
            raise RequestError(
                f'{where}["{name}"] has shape {list(inputs[name].shape)} and target_tokens '
                f"{list(targets.shape)}; give one value for each target"
            )
