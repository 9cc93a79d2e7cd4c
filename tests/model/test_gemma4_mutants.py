# .venv/bin/python -m pytest tests/model/test_gemma4_mutants.py
"""The parity of Gemma 4 notices the faults that other implementations had, or could have."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.family.gemma4 import layer_kinds as layers
from megatron_vlm.family.gemma4 import model as family
from megatron_vlm.family.gemma4 import tower
from megatron_vlm.model import (
    attention,
    decoder_layer,
    experts,
    fused_ops,
    layer_specs,
    log_probs,
    rope,
    stage_model,
)
from megatron_vlm.model.log_probs import Products
from megatron_vlm.model.router import route
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_gemma4 import DENSE, EDGES, EXPERTS, without_constants
from tests.model.test_mutants import replaced
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.support.gemma4 import MIXED, make_rows, reference_of
from tests.support.runs import Outcome, call, loss_and_grads
from tests.support.suites import full

Mutant = Callable[[], AbstractContextManager[Any]]


def text(**changes: Any) -> Mutant:
    """Return a mutant with other sizes of the decoder."""
    return replaced(family, "_text_sizes", lambda right: lambda c: replace(right(c), **changes))


def kinds(change: Callable[[Any], dict[str, Any]]) -> Mutant:
    """Return a mutant with other attention."""

    def wrong(right: Any) -> Any:
        def of_layer(config: Any, number: int) -> Any:
            sizes = right(config, number)
            return replace(sizes, **change(sizes))

        return of_layer

    return replaced(family, "_attention", wrong)


def mask(wrong: Callable[..., Tensor]) -> Mutant:
    def changed(right: Any) -> Any:
        # In training, nothing comes before these tokens.
        return lambda *given: wrong(right, *given[:4])

    return replaced(attention, "window_mask", changed)


def exchanged_norms(right: Any) -> Any:
    """Exchange the norms after attention and before the MLP (Megatron-Bridge 4201)."""
    names = ("post_attention_layernorm.weight", "pre_feedforward_layernorm.weight")
    other = dict(zip(names, names[::-1], strict=True))

    def params(self: Any, hidden: int) -> Any:
        for param in right(self, hidden):
            name = param.tensors[0].name
            if name in other:
                param = layers.vector_param(param.name, other[name], hidden)
            yield param

    return params


def without_post_norms(right: Any) -> Any:
    def add(x: Tensor, weight: Tensor, _eps: float, residual: Tensor) -> Tensor:
        return residual + x * weight

    def unnormed(options: Any, text: Any) -> Any:
        chains = replace(options.chains, norm=add)
        return right(replace(options, chains=chains), text)

    return unnormed


def cap_without_slope(right: Any) -> Any:
    """Leave the slope of the cap out of the backward, whose loss and log-probs are right."""

    def gradients(ctx: Any, products: Products, stored: Any, slope_of: Any) -> Any:
        def of_capped(logits: Tensor, start: int) -> Tensor:
            bend = 1 - (logits / products.cap).square()
            return slope_of(logits, start).div_(bend)

        return right(ctx, products, stored, of_capped)

    return gradients


def scaled_visuals(right: Any) -> Any:
    def see(self: Any, hidden: Tensor, pixels: Any, plan: Any) -> Any:
        seen, features = right(self, hidden, pixels, plan)
        flat = seen.flatten(0, 1)
        larger = flat[plan.places_V] * self.sizes.text.embed_scale
        return flat.index_copy(0, plan.places_V, larger).view_as(seen), features

    return see


def rotated_first_values(right: Any) -> Any:
    """Rotate the first values of a head, as if it had fewer (Megatron-Bridge 4195, 4916)."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        return torch.cat([right(x[..., :width], cos, sin), x[..., width:]], -1)

    return rotate


def narrow_exponents(right: Any) -> Any:
    """Spread the frequencies over the rotated part alone."""

    def init(self: Any, text: Any, *args: Any) -> None:
        right(self, text, *args)
        parts = []
        for each in text.attentions:
            count, theta = each.rotary.count, each.rotary.theta
            parts.append(1.0 / theta ** (torch.arange(count, dtype=torch.float) / count))
        self.inv_freq = torch.cat(parts)

    return init


def window_on_both_sides(right: Any, ids: Tensor, tokens: Any, window: int, sees: bool) -> Tensor:
    places = torch.arange(ids.shape[1])
    return right(ids, tokens, window, sees) & (places[None] - places[:, None] < window)[None, None]


def one_block(right: Any, ids: Tensor, tokens: Any, window: int, _: bool) -> Tensor:
    """Let every image of a row see all others."""
    causal = right(ids, tokens, 10**6, False)
    visual = (ids == tokens.image_id) | (ids == tokens.video_id)
    places = torch.arange(ids.shape[1])
    near = (places[None] - places[:, None] > -window)[None, None]
    return (causal | (visual[:, :, None] & visual[:, None])[:, None]) & near


def images_in_full_layers(right: Any) -> Any:
    def of_pass(self: Any, dtype: torch.dtype) -> Tensor | None:
        if self.sizes.window is not None:
            return right(self, dtype)
        sdpa = self.core_attention.backend
        sdpa.kernels = {**sdpa.kernels, (sdpa.kind, True): sdpa.kernels[sdpa.kind, False]}
        return attention.window_mask(self.core_attention.context.ids_BS, self.tokens, 10**6, True)

    return of_pass


def heads(change: Callable[..., Tensor]) -> Mutant:
    """Return a mutant with other values."""

    def wrong(right: Any) -> Any:
        def of(self: Any, mixed: Tensor, *rotary: Tensor) -> Any:
            query, key, value = right(self, mixed, *rotary)
            last = mixed.unflatten(-1, (self.groups, -1, self.sizes.head_dim))[..., -1, :]
            return query, key, change(self, last, value)

        return of

    return replaced(attention.UnscaledSelfAttention, "_heads", wrong)


def value_after_the_norm_of_keys(self: Any, last: Tensor, value: Tensor) -> Tensor:
    return self.k_layernorm(last) if self.sizes.values_are_keys else value


def scores(module: Any, name: str) -> Mutant:
    """Return a mutant that scales scores by the width of heads."""

    def wrong(right: Any) -> Any:
        return lambda *given, **named: right(*given, **{**named, "scale": None})

    return replaced(module, name, wrong)


def gelu(other: Callable[[Tensor], Tensor]) -> Mutant:
    """Return a mutant with another activation in decoder and tower."""
    return replaced(F, "gelu", lambda right: lambda x, approximate="none": other(x))


_GELU = F.gelu


def flipped_axes(right: Any) -> Any:
    def inputs(*given: Any, **sizes: Any) -> Any:
        return {name: value.flip(-1) for name, value in right(*given, **sizes).items()}

    return inputs


def router_behind_the_norm(right: Any) -> Any:
    """Route by what the experts read."""

    def mix(self: Any, hidden: Tensor, routing: Any) -> Tensor:
        scale = self.router_scale * hidden.shape[-1] ** -0.5

        def wrong(_: Tensor, *given: Any) -> Any:
            return route(self.input_norm(hidden) * scale, *given)

        with mock.patch.object(experts, "route", wrong):
            return right(self, hidden, routing)

    return mix


def without_expert_scale(right: Any) -> Any:
    def mix(self: Any, hidden: Tensor, routing: Any) -> Tensor:
        ones = torch.nn.Parameter(torch.ones_like(self.expert_scale))
        scale, self.expert_scale = self.expert_scale, ones
        try:
            return right(self, hidden, routing)
        finally:
            self.expert_scale = scale

    return mix


MUTANTS: dict[str, Mutant] = {
    "norms exchanged": replaced(layers.ScaledLayer, "params", exchanged_norms),
    "no norms after attention and MLP": replaced(layer_specs, "norm_and_add", without_post_norms),
    "no cap of logits": text(logit_cap=None),
    "cap without its slope": replaced(log_probs, "factor_gradients", cap_without_slope),
    "embeddings not scaled": text(embed_scale=None),
    "visual features scaled": replaced(stage_model.StageModel, "_see", scaled_visuals),
    "scores scaled": scores(F, "scaled_dot_product_attention"),
    "first values rotated": replaced(fused_ops, "rotate", rotated_first_values),
    "exponents over the rotated part": replaced(rope.PlainRoPE, "__init__", narrow_exponents),
    "one theta": kinds(lambda sizes: {"rotary": replace(sizes.rotary, theta=10_000.0)}),
    "images causal": mask(lambda right, ids, tokens, window, _: right(ids, tokens, window, False)),
    "images both ways in full layers": replaced(
        attention.UnscaledSelfAttention, "_mask", images_in_full_layers
    ),
    "window on both sides": mask(window_on_both_sides),
    "all images one block": mask(one_block),
    "no window": mask(lambda right, ids, tokens, _, sees: right(ids, tokens, 10**6, sees)),
    "window one too wide": mask(
        lambda right, ids, tokens, window, sees: right(ids, tokens, window + 1, sees)
    ),
    "value after the norm of keys": heads(value_after_the_norm_of_keys),
    "no norm of values": heads(lambda _, last, value: last),
    "no scalar": replaced(
        decoder_layer.ScaledDecoderLayer,
        "forward",
        lambda right: decoder_layer.DecoderLayer.forward,
    ),
    "exact GELU": gelu(_GELU),
    "SiLU": gelu(F.silu),
    "axes of the tower exchanged": replaced(family, "patch_inputs", flipped_axes),
    "scores of the tower scaled": scores(tower, "attend_in_frames"),
}
OF_EXPERTS: dict[str, Mutant] = {
    "router behind the experts' norm": replaced(
        experts.MLPBesideExperts, "mix", router_behind_the_norm
    ),
    "no scale of experts": replaced(experts.MLPBesideExperts, "mix", without_expert_scale),
}
ONE_TOO_FEW = replaced(
    attention, "needs_mask", lambda right: lambda tokens, *rest: right(tokens - 1, *rest)
)
# Rows that need no mask, each in a micro-batch of its own.
SHORTCUTS: dict[str, Mutant] = {
    "no mask for a short row with a picture": replaced(
        attention, "needs_mask", lambda right: lambda *sizes: right(*sizes[:2], False)
    ),
    "pictures are not known of": replaced(
        decoder_layer.PassContext,
        "__init__",
        lambda right: lambda *given, **more: right(*given[:-1], False, **more),
    ),
}
QUICK = ("cap without its slope", "exact GELU", "window one too wide", *SHORTCUTS)


def broken(path: str, rows: list[Any], name: str) -> Outcome:
    with (MUTANTS | OF_EXPERTS | SHORTCUTS)[name]():
        return loss_and_grads(path, layout(), rows)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else full(name) for name in (*MUTANTS, *OF_EXPERTS, *SHORTCUTS)]
)
def test_parity_notices(name, pool, tiny, record_property):
    """The faintest, GELU by its exact formula, is 20 times above the bar."""
    sizes = EXPERTS if name in OF_EXPERTS else DENSE
    specs = EDGES if name in SHORTCUTS else MIXED
    outcomes = without_constants(pool.run(broken, 1, tiny(sizes), make_rows(specs), name))
    deviations = errors(outcomes, reference_of(sizes, specs), layout())
    worst = max(deviations.values())
    record_property("worst", worst)
    assert worst > 10 * TOLERANCE


def logits_by_length(worker: MegatronWorker) -> list[Tensor]:
    """Return the logits of rows of text of a window's length, one less and one more."""
    [chunk], row = worker.chunks, make_rows()[6]
    with worker.stage.evaluating():
        return [
            chunk(
                input_ids=row.ids_S[None, :length],
                position_ids=torch.arange(length).expand(3, 1, -1),
                has_visuals=False,
            )[0]
            for length in LENGTHS
        ]


def with_one_too_few(worker: MegatronWorker) -> list[Tensor]:
    with ONE_TOO_FEW():
        return logits_by_length(worker)


LENGTHS = (DENSE.window - 1, DENSE.window, DENSE.window + 1)


def test_a_row_of_one_token_more_than_the_window_has_a_mask(pool, tmp_path_factory):
    """Only its last token would see too much, which no loss shows."""
    path = DENSE.write(tmp_path_factory.getbasetemp() / "gemma4-0")
    model, row = DENSE.model().eval(), make_rows()[6]
    with torch.no_grad():
        theirs = [model(input_ids=row.ids_S[None, :length]).logits[0] for length in LENGTHS]
    apart = [
        [
            float((ours - theirs_SV).abs().max())
            for ours, theirs_SV in zip(logits, theirs, strict=True)
        ]
        for read in (logits_by_length, with_one_too_few)
        for logits in pool.run(call, 1, path, layout(), read)
    ]
    assert max(apart[0]) < 1e-4  # measured: 1.4e-5
    assert apart[1][:2] == apart[0][:2] and apart[1][2] > 0.1
