"""Tokens whose log-probs are requested at the places of a prompt. The request is dense, or sparse
if most cells request nothing; the result has the same layout.

Shapes: R places of the prompt except the last, J tokens of a place, C listed cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vlm.serve.protocol.payloads import RequestError, SparseLogProbs
from megatron_vlm.serve.protocol.request_tensors import check_csr

WHERE = "target_prompt_logprobs"
NOTHING = -1  # a cell that requests nothing
# Maximum cells after every place is padded to the largest count. An int64 array of them takes 512
# MiB.
MAX_CELLS = 2**26


@dataclass(frozen=True, eq=False)
class PromptTargets:
    """The requested tokens. For a sparse tensor, `ids_RJ` has the listed cells of each place in
    their order, without the columns in between."""

    ids_RJ: np.ndarray
    shape: tuple[int, int]
    crow: np.ndarray | None = None  # set for a sparse tensor
    column_C: np.ndarray | None = None

    def answer(self, log_probs_RJ: np.ndarray) -> np.ndarray | SparseLogProbs:
        """Return the log-probs of `ids_RJ` in the layout of the request."""
        if self.crow is None or self.column_C is None:
            return log_probs_RJ
        values_C = log_probs_RJ[_listed_cells(self.crow, log_probs_RJ.shape[1])]
        return SparseLogProbs(values_C, self.crow, self.column_C, self.shape)


def read_prompt_targets(fields: Mapping[str, Any], length: int) -> PromptTargets:
    """Read the targets of a prompt with `length` tokens. An error names the field."""
    crow, column = fields.get("sparse_crow_indices"), fields.get("sparse_col_indices")
    if (crow is None) != (column is None):
        raise RequestError(
            "has only one of sparse_crow_indices and sparse_col_indices",
            key=WHERE,
            remedy="give both",
        )
    data = _numbers(fields, "data")
    shape = tuple(_numbers(fields, "shape").tolist())
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise RequestError(
            f": the prompt has {length} tokens",
            key=f"{WHERE}.shape",
            found=list(shape),
            allowed=f"[{length - 1}, K]",
        )
    if crow is not None:
        crow = _numbers(fields, "sparse_crow_indices")
        column_C = _numbers(fields, "sparse_col_indices")
        check_csr(crow, column_C, len(data), shape, f"{WHERE}.sparse_")
        return PromptTargets(_compact(data, crow), shape, crow, column_C)
    if len(data) != shape[0] * shape[1]:
        raise RequestError(
            f"holds {shape[0] * shape[1]} values, and data has {len(data)}",
            key=f"{WHERE}.shape",
            found=list(shape),
            remedy="give as many as the shape holds",
        )
    return PromptTargets(data.reshape(shape), shape)


def _numbers(fields: Mapping[str, Any], name: str) -> np.ndarray:
    try:
        values = np.array(fields[name])
        whole = np.array(values, dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _no_numbers(fields, name) from error
    if whole.ndim != 1 or (whole != values).any():
        raise _no_numbers(fields, name)
    return whole


def _no_numbers(fields: Mapping[str, Any], name: str) -> RequestError:
    return RequestError(
        key=f"{WHERE}.{name}", found=fields.get(name), allowed="a list of whole numbers"
    )


def _compact(data_C: np.ndarray, crow: np.ndarray) -> np.ndarray:
    counts = np.diff(crow)
    width = max(int(counts.max(initial=0)), 1)
    if width * len(counts) > MAX_CELLS:
        raise RequestError(
            f"has up to {width} tokens at one of {len(counts)} places",
            key=WHERE,
            remedy="send prompts with many tokens at a place by themselves",
        )
    ids_RJ = np.full((len(counts), width), NOTHING)
    ids_RJ[_listed_cells(crow, width)] = data_C
    return ids_RJ


def _listed_cells(crow: np.ndarray, max_cells: int) -> np.ndarray:
    """Return which cells of the compact array are listed, row by row in their order."""
    return np.arange(max_cells) < np.diff(crow)[:, None]
