"""Requests of clients of the service, and the results of Hugging Face's classes for the same
chunks."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.serve.protocol.protobuf import message
from tests.support.batches import token_ids

FLOAT32, INT64 = 1, 2


@dataclass(frozen=True)
class Picture:
    """An image file as a client sends it."""

    data: bytes
    format: str

    @property
    def opened(self) -> PIL.Image.Image:
        return PIL.Image.open(io.BytesIO(self.data)).convert("RGB")


Chunks = Sequence[list[int] | Picture]


def picture(width: int, height: int, seed: int, format: str = "png") -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format)
    return Picture(file.getvalue(), format)


def around(shown: Picture) -> Chunks:
    """Return a picture between the tokens that mark its start and end."""
    ids = token_ids()
    return [[ids.start], shown, [ids.end]]


def row_of(chunks: Chunks, path: str) -> Row:
    """Return the chunks as a row that Hugging Face's image processor has made."""
    processor, ids = AutoImageProcessor.from_pretrained(path), token_ids()
    tokens: list[int] = []
    pixels, grids = [], []
    for chunk in chunks:
        if isinstance(chunk, Picture):
            processed = processor(images=[chunk.opened], return_tensors="pt")
            pixels.append(processed["pixel_values"])
            grids.append(processed["image_grid_thw"])
            tokens += [ids.image] * (int(grids[-1].prod()) // 4)
        else:
            tokens += chunk
    row = Row(torch.tensor(tokens), torch.full((len(tokens),), IGNORE))
    if not pixels:
        return row
    return Row(row.ids_S, row.labels_S, torch.cat(pixels), torch.cat(grids))


def request(
    model: str,
    seq: int,
    data: Sequence[tuple[Chunks, Mapping[str, Any]]],
    loss: str,
    options: Mapping[str, float] = {},
    forward_only: bool = False,
) -> bytes:
    """Return a forward_backward request. Integers among the inputs become ids, other numbers
    floats."""
    body = message("ForwardBackwardRequest")
    body.model_id, body.seq_id, body.loss_fn, body.forward_only = model, seq, loss, forward_only
    for name, value in options.items():
        body.loss_fn_config_v2.add(key=name).value.number = value
    for chunks, inputs in data:
        datum = body.data.add()
        for chunk in chunks:
            if isinstance(chunk, Picture):
                image = datum.model_input.add().image
                image.data, image.format = chunk.data, chunk.format
            else:
                tokens = np.array(chunk, "<i4").tobytes()
                datum.model_input.add().encoded_text.tokens = tokens
        for name, value in inputs.items():
            array, tensor = np.asarray(value), datum.loss_fn_inputs.add(key=name).value
            whole = array.dtype.kind == "i"
            tensor.dense = array.astype("<i8" if whole else "<f4").tobytes()
            tensor.dtype = INT64 if whole else FLOAT32
            tensor.shape.extend(array.shape)
    return bytes(body.SerializeToString())


def targeted_log_probs(logits_SV: Tensor, targets: Any) -> Tensor:
    """Return the log-probs of the targets, in their shape."""
    targets = torch.as_tensor(np.asarray(targets))
    picked = logits_SV.float().log_softmax(-1).gather(1, targets.view(len(targets), -1))
    return picked.view(targets.shape)
