"""Results of a rank's calls as bytes for the other ranks. Tensors stay binary, the rest is JSON. An
error keeps its fields, and its type if it is one of this package's errors."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_vlm import errors
from megatron_vlm.controller.rank_worker import FailedElsewhereError, WorkerError
from megatron_vlm.data.tensors.tensor_bytes import pack, unpack
from megatron_vlm.data.tokens.completions import Completion
from megatron_vlm.distributed.error_json import error_from_json, error_to_json
from megatron_vlm.distributed.rendezvous import MeetingError
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.training.worker import StepMetrics

_ERRORS: dict[str, type[MegatronVLMError]] = {
    each.__name__: each
    for each in (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.TrainError,
        MegatronVLMError,
        MeetingError,
        WorkerError,
        FailedElsewhereError,
    )
}


def result_to_bytes(answer: Any) -> bytes:
    """Encode the result of a RankWorker's method, or an error."""
    meta: dict[str, Any]
    rows: list[Tensor] = []
    if isinstance(answer, Exception):
        known = next((kind for kind in type(answer).__mro__ if kind.__name__ in _ERRORS), None)
        name = WorkerError.__name__ if known is None else known.__name__
        meta = {"kind": "error", "name": name, "fields": error_to_json(answer)}
    elif isinstance(answer, StepMetrics):
        figures = [answer.loss, answer.num_tokens, answer.means]
        meta = {"kind": "metrics", "figures": figures, "has_rows": answer.log_probs is not None}
        rows = answer.log_probs or []
    elif isinstance(answer, list) and answer and isinstance(answer[0], StepMetrics):
        meta = {"kind": "several"}
        rows = [
            torch.frombuffer(bytearray(result_to_bytes(item)), dtype=torch.uint8) for item in answer
        ]
    elif isinstance(answer, list) and any(isinstance(row, Tensor) for row in answer):
        meta, rows = {"kind": "rows"}, answer
    elif isinstance(answer, list) and answer and _are_samples(answer[0]):
        samples = [item for completions in answer for item in completions]
        figures = [item.as_json() for item in samples]
        meta = {"kind": "samples", "counts": list(map(len, answer)), "figures": figures}
    elif isinstance(answer, tuple):
        meta = {"kind": "tuple", "value": answer}
    else:
        meta = {"kind": "value", "value": answer}
    return pack({"rows": (True, rows)}, meta)


def result_from_bytes(data: bytes) -> Any:
    """Decode the bytes of `result_to_bytes`."""
    fields, meta = unpack(data)
    rows, kind = list(fields["rows"][1]), meta["kind"]
    if kind == "error":
        return _ERRORS[meta["name"]](**error_from_json(meta["fields"]))
    if kind == "metrics":
        loss, num_tokens, means = meta["figures"]
        return StepMetrics(loss, num_tokens, rows if meta["has_rows"] else None, means)
    if kind == "several":
        return [result_from_bytes(row.numpy().tobytes()) for row in rows]
    if kind == "rows":
        return rows
    if kind == "samples":
        samples = map(Completion.from_json, meta["figures"])
        return [list(islice(samples, count)) for count in meta["counts"]]
    return tuple(meta["value"]) if kind == "tuple" else meta["value"]


def _are_samples(answer: Any) -> bool:
    return isinstance(answer, list) and any(isinstance(each, Completion) for each in answer)
