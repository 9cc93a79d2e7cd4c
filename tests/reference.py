"""The reference: Hugging Face's own model on the same weights and rows, without our code between
the rows and its forward."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers import Qwen3VLForConditionalGeneration as HFModel

from megatron_vlm.data.tokens.row import IGNORE, Row


@dataclass(frozen=True)
class Reference:
    loss: float
    log_probs: list[Tensor]
    grads: dict[str, Tensor]


def load_reference(path: str, dtype: torch.dtype = torch.float32) -> HFModel:
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa"
    )
    return model.train()


def inputs_of(model: HFModel, row: Row) -> dict[str, Any]:
    """Return one row as the model takes it, without padding and without our collation."""
    types = torch.zeros_like(row.ids_S)
    types[row.ids_S == model.config.image_token_id] = 1
    types[row.ids_S == model.config.video_token_id] = 2
    media = dict(
        pixel_values=row.pixel_values_PC,
        image_grid_thw=row.image_grid_I3,
        pixel_values_videos=row.pixel_values_videos_PC,
        video_grid_thw=row.video_grid_I3,
    )
    return dict(
        input_ids=row.ids_S[None],
        mm_token_type_ids=types[None].int(),
        **{name: value for name, value in media.items() if value is not None},
    )


def row_logits(model: HFModel, row: Row) -> Tensor:
    """Return the logits [S, V] of a row."""
    logits: Tensor = model(**inputs_of(model, row)).logits[0]
    return logits


def row_log_probs(model: HFModel, row: Row) -> Tensor:
    """Return the log-probs of a row's supervised tokens at the tokens' places, and zero
    elsewhere."""
    logits = row_logits(model, row)
    log_probs = logits[:-1].float().log_softmax(-1)
    picked = log_probs.gather(-1, row.ids_S[1:, None])[:, 0]
    supervised = (row.labels_S[1:] != IGNORE).float()
    return torch.cat([picked.new_zeros(1), picked * supervised])


def run_reference(path: str, rows: list[Row], dtype: torch.dtype = torch.float32) -> Reference:
    model = load_reference(path, dtype)
    log_probs = []
    count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)
    total = 0.0
    for row in rows:
        out = row_log_probs(model, row)
        (-out.sum() / count).backward()
        log_probs.append(out.detach())
        total += float(-out.detach().double().sum())
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }
    return Reference(total / count, log_probs, grads)
