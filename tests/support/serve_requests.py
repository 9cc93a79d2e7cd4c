"""Requests of clients of the service, and the results of Hugging Face's classes for the same
chunks."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.family.gemma4.images import Gemma4Images
from megatron_vlm.serve.protocol.protobuf import message
from tests.support.batches import Ids, token_ids

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


def ids_in(path: str) -> Ids:
    """Return the tokens of pictures in a tiny checkpoint."""
    config = AutoConfig.from_pretrained(path)
    if config.model_type != "gemma4":
        return token_ids()
    pictures = config.image_token_id, config.video_token_id
    return Ids(*pictures, config.boi_token_id, config.eoi_token_id, text=250)


def around(shown: Picture, ids: Ids | None = None) -> Chunks:
    """Return a picture between the tokens that mark its start and end."""
    ids = ids or token_ids()
    return [[ids.start], shown, [ids.end]]


def processor_of(path: str) -> Callable[[PIL.Image.Image], tuple[Tensor, Tensor, int]]:
    """Return the function for the patches of a picture, its grid, and how many patches a token has
    on a side. Hugging Face's image processor for Gemma 4 has the bits of the trainer's only where
    torchvision is: tests/data/test_image_readers.py compares them."""
    if AutoConfig.from_pretrained(path).model_type == "gemma4":
        reader = Gemma4Images.from_checkpoint(path)

        def read(image: PIL.Image.Image) -> tuple[Tensor, Tensor, int]:
            patches_PC = torch.from_numpy(reader.patches(image))
            grid_I3 = torch.tensor([reader.grid(image.height, image.width)])
            floats_PC = reader.pixel_values(patches_PC, reader.table())
            return floats_PC, grid_I3, reader.pooling_kernel_size

        return read
    processor = AutoImageProcessor.from_pretrained(path)

    def process(image: PIL.Image.Image) -> tuple[Tensor, Tensor, int]:
        done = processor(images=[image], return_tensors="pt")
        return done["pixel_values"], done["image_grid_thw"], processor.merge_size

    return process


def row_of(chunks: Chunks, path: str) -> Row:
    """Return the chunks as a row that Hugging Face's image processor has made."""
    ids, process = ids_in(path), processor_of(path)
    tokens: list[int] = []
    pixels, grids = [], []
    for chunk in chunks:
        if isinstance(chunk, Picture):
            patches, grid, merge = process(chunk.opened)
            pixels.append(patches)
            grids.append(grid)
            tokens += [ids.image] * (int(grid.prod()) // merge**2)
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
