"""The MTP head of Qwen3.5 ("multi-token prediction", `mtp.*`), put together from
transformers' own layers, and what it should draft.

    x_i = fc([norm_e(e_{i+1}) | norm_h(h_i)])   e: the decoder's input, so the tower's feature
    h'_i = norm(layer(x)_i)                     where the id is a placeholder
    guess_i = argmax(h'_i @ head.T)             of t_{i+2}; h: after the final norm

The layer is causal over i and takes the rope position of i. Shapes: S tokens, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

from megatron_vlm.data.tokens.row import IGNORE, Row
from tests.support.reference import (
    HFModel,
    Reference,
    exact_delta_nets,
    grads_of,
    in_fp64,
    inputs_of,
    load_reference,
)

PREFIX = "mtp."


class DraftHead(nn.Module):
    """Its parameters have the names of the checkpoint, without the prefix."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        width = text.hidden_size
        has_experts = bool(getattr(text, "num_experts", 0))
        kind = sparse.Qwen3_5MoeDecoderLayer if has_experts else dense.Qwen3_5DecoderLayer
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = dense.Qwen3_5RMSNorm(width, eps=text.rms_norm_eps)
        self.pre_fc_norm_hidden = dense.Qwen3_5RMSNorm(width, eps=text.rms_norm_eps)
        layer = kind(text, text.layer_types.index("full_attention"))
        self.layers = nn.ModuleList([layer])
        self.norm = dense.Qwen3_5RMSNorm(width, eps=text.rms_norm_eps)

    def forward(self, embeds_1SH: Tensor, hidden_1SH: Tensor, rotary: Any, mask: Any) -> Tensor:
        parts = self.pre_fc_norm_embedding(embeds_1SH), self.pre_fc_norm_hidden(hidden_1SH)
        x_1SH = self.fc(torch.cat(parts, -1))
        out = self.layers[0](x_1SH, position_embeddings=rotary, attention_mask=mask)
        return self.norm(out[0] if isinstance(out, tuple) else out)


@dataclass
class Trunk:
    """A row's inputs of the head: the decoder's inputs, and its outputs after the final norm."""

    embeds_1SH: Tensor
    hidden_1SH: Tensor
    rotary: Any
    mask: Any


def trunk_of(model: HFModel, row: Row) -> Trunk:
    text, found = model.model.language_model, dict[str, Any]()
    with text.register_forward_pre_hook(lambda _, args, kw: found.update(kw), with_kwargs=True):
        hidden_1SH = model.model(**inputs_of(model, row), use_cache=False).last_hidden_state
    embeds_1SH, positions = found["inputs_embeds"], found["position_ids"]
    if positions is None:
        positions = torch.arange(len(row.ids_S)).expand(3, 1, -1)
    rotary = text.rotary_emb(embeds_1SH, positions[-3:])
    # The name of the last argument differs between versions.
    mask = create_causal_mask(model.config.text_config, embeds_1SH, None, None)
    return Trunk(embeds_1SH, hidden_1SH, rotary, mask)


def draft_logits(model: HFModel, head: DraftHead, trunk: Trunk) -> Tensor:
    """Return the logits [S, V]; at i they are of token i + 2. Only the head gets gradients."""
    next_1SH = torch.cat([trunk.embeds_1SH[:, 1:], torch.zeros_like(trunk.embeds_1SH[:, :1])], 1)
    inputs = next_1SH.detach(), trunk.hidden_1SH.detach(), trunk.rotary, trunk.mask
    return (head(*inputs) @ model.lm_head.weight.detach().T)[0]


def read_head(model: HFModel, folder: str, dtype: torch.dtype = torch.float32) -> DraftHead:
    head = DraftHead(model.config.text_config).to(dtype)
    tensors = load_file(Path(folder) / "model.safetensors")
    names = {name.removeprefix(PREFIX): x for name, x in tensors.items() if PREFIX in name}
    head.load_state_dict({name: x.to(dtype) for name, x in names.items()})
    return head


def run_drafts(path: str, rows: list[Row]) -> Reference:
    """Return in fp64 the head's loss, the logits of its guesses, and its gradients: the forward KL
    divergence from the model's own distribution, over its 64 likeliest tokens and the rest, a mean
    over the places whose token after the next one is supervised."""
    with exact_delta_nets():
        model = load_reference(path, torch.float64)
        head, sums, logits = read_head(model, path, torch.float64), [], []
        for row in map(in_fp64, rows):
            with torch.no_grad():
                trunk = trunk_of(model, row)
                own_SV = (trunk.hidden_1SH[0, 1:-1] @ model.lm_head.weight.T).log_softmax(-1)
            guess_SV = draft_logits(model, head, trunk)[:-2]
            at_S = row.labels_S[2:] != IGNORE
            logits.append(guess_SV[at_S].detach())
            own, guess = own_SV[at_S], guess_SV[at_S].log_softmax(-1)
            ids = own.topk(min(64, own.shape[1])).indices
            own, guess = (with_rest(x.gather(1, ids), x, ids) for x in (own, guess))
            sums.append((own.exp() * (own - guess)).sum())
        loss = torch.stack(sums).sum() / sum(map(len, logits))
        loss.backward()
    named = [(PREFIX + name, param) for name, param in head.named_parameters()]
    return Reference(float(loss.detach()), logits, grads_of(named))


def with_rest(chosen_NJ: Tensor, all_NV: Tensor, ids_NJ: Tensor) -> Tensor:
    """Return these log-probs, and that of all other tokens together."""
    others_N = all_NV.scatter(1, ids_NJ, -torch.inf).logsumexp(-1)
    return torch.cat([chosen_NJ, others_N[:, None]], 1)


def write_head(head: DraftHead, folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in head.state_dict().items():
        tensors[PREFIX + name] = value.to(tensors[PREFIX + name].dtype).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
