"""Decoding of all pictures and videos of a data set, for `inspect --decode`.

Opening a set reads their headers alone. A file that breaks off after its header is found here,
before a run reaches it.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.batches.dataset import DataSet, Handle, NoSampleError
from megatron_vlm.data.tokens.index import check_errors
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class _DecodeErrors:
    """The error of each sample that cannot be decoded, found in worker processes."""

    data: DataSet

    def __getitem__(self, handle: Handle) -> tuple[Handle, str | None]:
        try:
            self.data.rows(handle)
        except DataError as error:
            return handle, str(error)
        return handle, None


def only_decodable(data: DataSet, cfg: DataConfig) -> DataSet:
    """Decode every sample that has pictures or videos. Return the data without those that fail;
    their errors are among its faults."""
    handles = [
        (source, sample)
        for source, index in enumerate(data.indexes)
        for sample in np.flatnonzero(index.patches).tolist()
    ]
    tried = map_in_processes(_DecodeErrors(data), handles, cfg.num_workers, cfg.prefetch)
    errors = {handle: error for handle, error in tried if error is not None}
    indexes = []
    for source, index in enumerate(data.indexes):
        wrong = [sample for place, sample in errors if place == source]
        keeps = np.ones(len(index), dtype=bool)
        keeps[wrong] = False
        part = index.only(keeps)
        messages = (errors[source, sample] for sample in wrong)
        part.faults = replace(index.faults, errors=(*index.faults.errors, *messages))
        indexes.append(part)
    order = replace(data.order, lengths=tuple(map(len, indexes)))
    data = replace(data, indexes=tuple(indexes), order=order, reference_log_probs=None)
    check_errors(data.faults()[1], cfg)
    if not len(order):
        raise NoSampleError(
            f": none of the {len(handles):,} samples can be decoded", data=data, key="data.train"
        )
    return data
