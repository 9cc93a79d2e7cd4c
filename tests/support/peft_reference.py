"""The reference for adapters: PEFT on Hugging Face's own model, without our code."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from megatron_vlm.data.tokens.row import Row
from tests.support.reference import Reference, load_reference, run_model

# Our groups of targets as PEFT's regular expressions.
GROUPS = {
    "attention": r"model\.language_model\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_(qkv|z|b|a)|out_proj))",
    "mlp": r"model\.language_model\.layers\.\d+\.mlp\."
    r"((shared_expert\.)?(gate|up|down)_proj|shared_expert_gate)",
    "head": "lm_head",
    "merger": r"model\.(visual\..*merger.*\.linear_fc[12]|embed_vision\.embedding_projection)",
    "vision_attention": r"model\.(visual\.blocks\.\d+\.attn\.(qkv|proj)"
    r"|vision_tower\.encoder\.layers\.\d+\.self_attn\.[qkvo]_proj\.linear)",
    "vision_mlp": r"model\.(visual\.blocks\.\d+\.mlp\.linear_fc[12]"
    r"|vision_tower\.encoder\.layers\.\d+\.mlp\.(gate|up|down)_proj\.linear)",
}
# The values of bitsandbytes.functional.get_4bit_type("nf4").
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
MERGERS = r"model\.(visual\.(merger|deepstack_merger_list\.\d+)|embed_vision\.embedding_projection)"


@dataclass(frozen=True)
class Adapter:
    """An adapter of PEFT. With `whole_merger` the mergers are trained in addition to it."""

    targets: tuple[str, ...] = ("attention", "mlp")
    rank: int = 4
    alpha: float = 12.0
    rslora: bool = False
    whole_merger: bool = False
    parameters: tuple[str, ...] = ()  # PEFT's names of expert tensors
    base: str | None = None  # lora.base: the frozen weights have the values of codes

    @property
    def ours(self) -> dict[str, Any]:
        return dict(
            rank=self.rank,
            alpha=self.alpha,
            rslora=self.rslora,
            targets=self.targets,
            train=("merger",) if self.whole_merger else (),
            base=self.base,
        )


def base_model(path: str, adapter: Adapter) -> torch.nn.Module:
    model = load_reference(path)
    if adapter.base is not None:
        round_base(model, adapter.base, MERGERS if adapter.whole_merger else "none")
    return model


def peft_model(path: str, adapter: Adapter) -> PeftModel:
    """Return the model with an adapter whose every tensor is random, B included."""
    model = base_model(path, adapter)
    pattern = "|".join(GROUPS.get(target, target) for target in adapter.targets)
    modules = [name for name, _ in model.named_modules()]
    mergers = [name for name in modules if re.fullmatch(MERGERS, name)]
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        use_rslora=adapter.rslora,
        target_modules=pattern if any(re.fullmatch(pattern, name) for name in modules) else [],
        target_parameters=list(adapter.parameters) or None,
        modules_to_save=mergers if adapter.whole_merger else None,
    )
    wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if ".lora_" in name:  # the adapters together are about as large as the base weights
                param.normal_(std=0.1 if ".lora_A." in name else 0.03, generator=generator)
    return wrapped.train()


def round_base(model: torch.nn.Module, base: str, left_out: str) -> None:
    """Give the frozen weights the values that they have as codes: those of all linear layers but
    the head, as transformers chooses them for bitsandbytes, and those of experts. Routers are not
    rounded here: Gemma 4's are linear layers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and ".router." not in name:
            if not re.match(left_out, name):
                module.weight.data = nearest(module.weight.data, base)
        elif name.endswith(".experts"):
            for param in module.parameters():
                param.data = nearest(param.data, base)


def nearest(weight: Tensor, base: str) -> Tensor:
    """Return the nearest value of a code for each weight, in blocks of 64."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    shares = blocks * (1 / scales)
    if base == "int8":  # some weights are so near to the middle that the last digit decides
        return ((shares * 127).round() / 127 * scales).view(weight.shape)
    values = torch.tensor(NF4)
    codes = (shares[..., None] - values).abs().argmin(-1)
    return (values[codes] * scales).view(weight.shape)


def trained(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters, by PEFT's names for adapters and Hugging Face's for whole
    weights."""
    parameters = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            plain = name.replace(".default", "")
            if ".modules_to_save" in plain:
                plain = plain.replace(".modules_to_save", "").removeprefix("base_model.model.")
            parameters[plain] = param
    return parameters


def as_ours(model: PeftModel, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values of trained parameters by our names. Experts are stacked as PEFT lays them out:
    the rows of A are contiguous for each expert, and the columns of B alternate between the
    experts."""
    inside = {n: m.parameter_name for n, m in model.named_modules() if hasattr(m, "parameter_name")}
    values = {}
    for name, value in named.items():
        stem, mark, end = name.partition(".lora_")
        if (leaf := inside.get(stem)) is not None:
            count = model.config.text_config.num_experts
            kinds = {"A": value.chunk(count), "B": [value[:, n::count] for n in range(count)]}
            stem = f"{stem.removesuffix('.base_layer')}.{leaf}"
            value = torch.stack(list(kinds[end[0]]))
        values[stem + mark + end] = value
    return values


def run_peft(model: PeftModel, rows: Sequence[Row]) -> Reference:
    """Return losses and gradients of a batch."""
    model.zero_grad()
    found = run_model(model, rows, trained(model))
    return replace(found, grads=as_ours(model, found.grads))


def train_peft(
    model: PeftModel, batches: Sequence[Sequence[Row]], optim: dict[str, float]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the gradient norm of each batch's step, and the weights after all steps."""
    params = trained(model)
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim["lr"])
    norms = []
    for rows in batches:
        run_peft(model, rows)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), optim["clip_grad"])))
        optimizer.step()
    return norms, as_ours(model, {name: p.detach().clone() for name, p in params.items()})


def save(model: PeftModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)
