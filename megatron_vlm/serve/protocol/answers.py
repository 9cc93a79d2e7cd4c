"""Responses to clients, as the bytes that they read."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from megatron_vlm.serve.protocol.payloads import Sampled, Samples, SparseLogProbs, TopK
from megatron_vlm.serve.protocol.protobuf import message
from megatron_vlm.serve.protocol.request_tensors import FLOAT32, INT64

# The client's ways to combine a metric of several requests into one. It refuses every other name.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "hash2", "unique")
_DTYPES = {"float32": (FLOAT32, "<f4"), "int64": (INT64, "<i8")}
_RECORD = "ArrayRecord"
_STOP, _LENGTH = 0, 1

Output: TypeAlias = Mapping[str, np.ndarray]


def write_forward_backward(outputs: Sequence[Output], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput. `outputs` has one mapping per datum, in order and all with
    the same names. Arrays are float32 or int64, [n] or [n, k]. A metric is called
    name:reduction."""
    answer = message("ForwardBackwardOutput")
    answer.loss_fn_output_type = _RECORD
    for output in outputs:
        assert output.keys() == outputs[0].keys(), (list(output), list(outputs[0]))
    # A record has one trailing shape per name. A datum with another shape begins the next record.
    for _, alike in itertools.groupby(outputs, _form):
        _write_record(answer.loss_fn_outputs.add(), list(alike))
    for name, value in metrics.items():
        parts = name.split(":")
        assert len(parts) == 2 and parts[0] and parts[1] in REDUCTIONS, name
        answer.metrics.add(key=name, value=value)
    return answer.SerializeToString()


def write_samples(samples: Samples) -> bytes:
    """Encode a SampleResponse."""
    answer = message("SampleResponse")
    for sampled in samples.sequences:
        sequence = answer.sequences.add(
            stop_reason=_STOP if sampled.stopped else _LENGTH, tokens=_int32(sampled.tokens)
        )
        if sampled.log_probs is not None:
            assert sampled.log_probs.shape == sampled.tokens.shape, sampled
            sequence.logprobs = _float32(sampled.log_probs)
        if sampled.top is not None:
            assert len(sampled.top.ids) == len(sampled.tokens), sampled
            _write_top(sequence.topk_sampled_logprobs, sampled.top)
    if samples.prompt_log_probs is not None:
        assert samples.prompt_log_probs.ndim == 1, samples.prompt_log_probs.shape
        answer.prompt_logprobs = _float32(samples.prompt_log_probs)
    if samples.top_prompt is not None:
        _write_top(answer.topk_prompt_logprobs, samples.top_prompt)
    if samples.target_prompt_log_probs is not None:
        _write_targets(answer.target_prompt_logprobs, samples.target_prompt_log_probs)
    return answer.SerializeToString()


def read_samples(body: bytes) -> Samples:
    """Decode a SampleResponse that `write_samples` has encoded, without target log-probs."""
    answer = message("SampleResponse")
    answer.ParseFromString(body)
    return Samples(
        tuple(
            Sampled(
                np.frombuffer(each.tokens, "<i4"),
                np.frombuffer(each.logprobs, "<f4") if each.HasField("logprobs") else None,
                each.stop_reason == _STOP,
                _read_top(each, "topk_sampled_logprobs"),
            )
            for each in answer.sequences
        ),
        np.frombuffer(answer.prompt_logprobs, "<f4")
        if answer.HasField("prompt_logprobs")
        else None,
        _read_top(answer, "topk_prompt_logprobs"),
    )


def _read_top(answer: Any, field: str) -> TopK | None:
    if not answer.HasField(field):
        return None
    top = getattr(answer, field)
    ids = np.frombuffer(top.token_ids, "<i4").reshape(top.length, top.k)
    return TopK(ids, np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k))


def _write_targets(written: Any, log_probs: np.ndarray | SparseLogProbs) -> None:
    written.dtype = FLOAT32
    written.shape.extend(log_probs.shape)
    if isinstance(log_probs, SparseLogProbs):
        written.sparse_csr.values = _float32(log_probs.values)
        written.sparse_csr.crow_indices = log_probs.crow.astype("<i8").tobytes()
        written.sparse_csr.col_indices = log_probs.column.astype("<i8").tobytes()
    else:
        written.dense = _float32(log_probs)


def _form(output: Output) -> dict[str, Any]:
    """Return the type and trailing shape of each name, which the datums of one record share."""
    for name, array in output.items():
        assert str(array.dtype) in _DTYPES and array.ndim in (1, 2), (name, array.dtype, array.ndim)
        assert all(array.shape[1:]), (name, array.shape)  # The client divides by it.
    return {name: (array.dtype, array.shape[1:]) for name, array in output.items()}


def _write_record(record: Any, outputs: list[Output]) -> None:
    record.type_tag, record.num_datums = _RECORD, len(outputs)
    for name in outputs[0]:
        dtype, layout = _DTYPES[str(outputs[0][name].dtype)]
        pieces = [each[name].astype(layout).tobytes() for each in outputs]
        tensor = record.fields.add(key=name).value
        tensor.data, tensor.dtype = b"".join(pieces), dtype
        ends = np.cumsum([0, *map(len, pieces)])
        tensor.offsets = ends.astype("<i8").tobytes()
        tensor.trailing_shape.extend(outputs[0][name].shape[1:])


def _write_top(written: Any, top: TopK) -> None:
    assert top.ids.ndim == 2 and top.ids.shape == top.log_probs.shape, (top.ids.shape, top)
    written.token_ids, written.logprobs = _int32(top.ids), _float32(top.log_probs)
    written.length, written.k = top.ids.shape


def _int32(array: np.ndarray) -> bytes:
    assert array.dtype == np.int32, array.dtype
    return array.astype("<i4").tobytes()


def _float32(array: np.ndarray) -> bytes:
    assert array.dtype == np.float32, array.dtype
    return array.astype("<f4").tobytes()
