"""The reference: Hugging Face's own model on the same weights and rows, without our code between
the rows and its forward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from inspect import unwrap
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers import Qwen3VLForConditionalGeneration as HFModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from megatron_vlm.data.tokens.row import IGNORE, Row
from tests.support import gemma4_inputs
from tests.support.batches import RowSpec, make_rows


@dataclass(frozen=True)
class Reference:
    loss: float
    log_probs: list[Tensor]
    grads: dict[str, Tensor]


@cache
def _compute_by_torch() -> None:
    """Let transformers compute gated delta nets by torch. Where flash-linear-attention is installed
    it would take that, also on the CPU, where it cannot run."""
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        for name, function in vars(module).items():
            if name.startswith("torch_") and name.endswith("_gated_delta_rule"):
                setattr(module, name, unwrap(function))


def load_reference(path: str, dtype: torch.dtype = torch.float32) -> HFModel:
    _compute_by_torch()
    how = {"dtype": dtype, "attn_implementation": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(path, **how)
    if dtype is torch.float64:  # the kernel for all experts at once knows no fp64
        model.set_experts_implementation("eager")
    return model.train()


def inputs_of(model: HFModel, row: Row) -> dict[str, Any]:
    """Return one row as the model takes it, without padding and without our collation."""
    if model.config.model_type == "gemma4":
        return gemma4_inputs.inputs_of(model.config, row)
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
    return run_model(model, rows, dict(model.named_parameters()))


def run_model(
    model: torch.nn.Module, rows: Sequence[Row], params: Mapping[str, torch.nn.Parameter]
) -> Reference:
    """Return the loss of a batch, its log-probs, and the gradients of these parameters."""
    count = sum(int((row.labels_S[1:] != IGNORE).sum()) for row in rows)
    total, log_probs = 0.0, []
    for row in rows:
        out = row_log_probs(model, row)
        loss = -out.sum() / count
        # It needs none where only adapters of the tower are trained, and no picture comes.
        if loss.requires_grad:
            loss.backward()
        log_probs.append(out.detach())
        total += float(-out.detach().double().sum())
    grads = {name: grad.clone() for name, grad in grads_of(params.items()).items()}
    return Reference(total / count, log_probs, grads)


def grads_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the gradients of parameters, zero where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


@cache
def reference_of(
    path: str,
    specs: tuple[RowSpec, ...],
    vocab: int = 512,
    run: Callable[[str, list[Row]], Reference] = run_reference,
) -> Reference:
    """Return the reference for a batch. It is computed once for all tests of a process."""
    return run(path, make_rows(specs, vocab))


def run_exact_reference(path: str, rows: list[Row]) -> Reference:
    """Run transformers' Qwen3.5 in fp64 with the delta rule token by token. Its own rule in fp32
    loses up to four digits of the gradients that go through the decay."""
    with exact_delta_nets():
        return run_reference(path, [in_fp64(row) for row in rows], torch.float64)


def in_fp64(row: Row) -> Row:
    values = {name: v for name, v in vars(row).items() if isinstance(v, Tensor)}
    return replace(row, **{n: v.double() for n, v in values.items() if v.is_floating_point()})


@contextmanager
def exact_delta_nets() -> Iterator[None]:
    """Make transformers' modules compute the gated delta rule token by token, and keep fp64 where
    they would round to fp32."""
    to_float = torch.Tensor.float

    def keep_fp64(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.dtype is torch.float64 else to_float(x, *args, **kwargs)

    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            norm = next(getattr(module, name) for name in dir(module) if "RMSNormGated" in name)
            own = {"torch_chunk_gated_delta_rule": rule_by_token}
            stack.enter_context(mock.patch.multiple(module, **own))
            stack.enter_context(mock.patch.object(norm, "forward", _gated_norm))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", keep_fp64))
        yield


def rule_by_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    normalise: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of the gated delta rule, in the dtype of its inputs."""
    if normalise:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    # transformers 5.24 leaves it to the rule to repeat the key heads.
    repeats = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = query.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    outs = []
    for token in range(query.shape[1]):
        state = state * g[:, token].exp()[..., None, None]
        expected = torch.einsum("bhk,bhkv->bhv", key[:, token], state)
        error = (value[:, token] - expected) * beta[:, token, :, None]
        state = state + key[:, token, ..., None] * error[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, token], state))
    return torch.stack(outs, 1), state


def _gated_norm(norm: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (hidden_states * scale) * F.silu(gate)
