"""Tiny random checkpoints of Gemma 4 as transformers makes them, rows for them, and transformers'
losses and gradients on these rows.

The window is shorter than an image and than most rows, scalars are not 1, and logits reach the
cap: else half of the faults that are known elsewhere would not be seen.

Shapes: S tokens of a row, P patches, C values of a patch, I images, 2 the axes x, y."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from megatron_vlm.data.tokens.row import IGNORE, Row
from tests.support.reference import Reference, run_model

IMAGE, VIDEO, START, END, TEXT = 500, 501, 502, 503, 490
PATCH, MERGE = 4, 3
VALUES = 3 * PATCH * PATCH


@dataclass(frozen=True)
class TinyGemma4:
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    experts: int = 0
    expert_intermediate: int = 40
    intermediate: int = 176
    head_dim: int = 16
    kinds: tuple[str, ...] = ()  # alternating by default
    window: int = 8
    global_head_dim: int = 32
    kv_heads: int = 4  # of sliding layers
    values_are_keys: bool = True
    vocab: int = 512
    # Factor of the norms of queries and keys. Scores have no other scale: with 1, transformers'
    # own gradients in fp32 are 5e-5 from those in fp64.
    tamed: float = 0.5

    def config(self) -> Gemma4Config:
        alternating = ("sliding_attention", "full_attention") * (self.layers // 2)
        text: dict[str, Any] = dict(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_global_key_value_heads=2 if self.values_are_keys else None,
            head_dim=self.head_dim,
            global_head_dim=self.global_head_dim,
            attention_k_eq_v=self.values_are_keys,
            sliding_window=self.window,
            layer_types=list(self.kinds or alternating),
            use_bidirectional_attention="vision",
            final_logit_softcapping=30.0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=self.vocab,
            num_kv_shared_layers=0,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            **dict(pad_token_id=0, eos_token_id=1, bos_token_id=2),
        )
        if self.experts:
            text |= dict(enable_moe_block=True, num_experts=self.experts)
            text |= dict(top_k_experts=2, moe_intermediate_size=self.expert_intermediate)
        vision = dict(
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=16,
            patch_size=PATCH,
            pooling_kernel_size=MERGE,
            position_embedding_size=64,
            standardize=True,
        )
        ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END)
        audio = dict(audio_token_id=504, boa_token_id=505, eoa_token_index=506)
        return Gemma4Config(
            text_config=text, vision_config=vision, **ids, **audio, tie_word_embeddings=True
        )

    def model(self, dtype: torch.dtype = torch.float32) -> Gemma4ForConditionalGeneration:
        config = self.config()
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        model = Gemma4ForConditionalGeneration(config)
        self._randomise(model)
        if dtype is torch.float64:  # the kernel for all experts at once knows no fp64
            model.set_experts_implementation("eager")
        return model.to(dtype).train()

    def _randomise(self, model: Gemma4ForConditionalGeneration) -> None:
        """Ones and zeros would hide a swapped tensor, or a scalar that is left out."""
        generator = torch.Generator().manual_seed(0)

        def noise(like: Tensor, size: float) -> Tensor:
            return size * torch.randn(like.shape, generator=generator)

        factors = {"q_norm.weight": self.tamed, "k_norm.weight": self.tamed}
        # With these, logits are up to 20.
        factors |= {"language_model.norm.weight": 6, "embed_tokens.weight": 6}
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.dim() == 1:
                    param.add_(noise(param, 0.1))
                if "position_embedding_table" in name:
                    param.copy_(noise(param, 0.3))
                param.mul_(next((f for end, f in factors.items() if name.endswith(end)), 1))
            for name, value in model.named_buffers():
                if name.endswith("layer_scalar"):
                    value.copy_(0.6 + 0.3 * torch.rand(1, generator=generator))
                elif name.endswith(("std_bias", "std_scale")):
                    value.add_(noise(value, 0.2))

    def write(self, folder: Path) -> str:
        """Return the folder of the checkpoint, which is written once."""
        if not folder.exists():
            self.model().save_pretrained(folder)
        return str(folder)


@dataclass(frozen=True)
class RowSpec:
    """Text with images (height, width in patches) and videos (frames, height, width)."""

    text: int
    images: tuple[tuple[int, int], ...] = ()
    videos: tuple[tuple[int, int, int], ...] = ()


MIXED = (
    RowSpec(9, ((9, 12),)),
    RowSpec(21, ((3, 3), (6, 9))),
    RowSpec(13),
    RowSpec(7),
    RowSpec(11, ((3, 12), (6, 6), (9, 3), (3, 3))),
    RowSpec(17, ((6, 3),), ((2, 6, 9),)),
    RowSpec(40),
    RowSpec(25, ((12, 3),)),
)


def make_rows(specs: Sequence[RowSpec] = MIXED, seed: int = 0) -> list[Row]:
    """Return rows. Their patches are numbers from -1 to 1 that every precision holds, as the tower
    reads them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for spec in specs:
        blocks = [[START] + [IMAGE] * (h * w // MERGE**2) + [END] for h, w in spec.images]
        for frames, h, w in spec.videos:
            blocks += [[START] + [VIDEO] * (h * w // MERGE**2) + [END]] * frames
        text = torch.randint(3, TEXT, (spec.text,), generator=generator).tolist()
        cuts = torch.randint(1, max(spec.text, 2), (len(blocks),), generator=generator)
        ends = cuts.sort().values.tolist()
        tokens = []
        for start, end, block in zip([0, *ends], [*ends, spec.text], [*blocks, []], strict=True):
            tokens += text[start:end] + block
        ids_S = torch.tensor(tokens)
        labels_S = ids_S.clone()
        labels_S[(ids_S >= 500) | (torch.rand(len(ids_S), generator=generator) >= 0.4)] = IGNORE
        labels_S[0], labels_S[-1] = IGNORE, ids_S[-1]
        media: list[Tensor | None] = []
        for grids in ([(1, h, w) for h, w in spec.images], list(spec.videos)):
            if not grids:
                media += [None, None]
                continue
            grid_I3 = torch.tensor(grids)
            shape = (int(grid_I3.prod(-1).sum()), VALUES)
            media += [torch.randint(-128, 129, shape, generator=generator) / 128, grid_I3]
        rows.append(Row(ids_S, labels_S, *media))
    return rows


@cache
def reference_of(tiny: TinyGemma4, specs: Sequence[RowSpec] = MIXED) -> Reference:
    """Return the reference for a batch. It is computed once for all tests of a process."""
    return _run(tiny.model(), make_rows(specs))


def _run(model: Gemma4ForConditionalGeneration, rows: Sequence[Row]) -> Reference:
    return run_model(model, rows, dict(model.named_parameters()))


@cache
def exact_reference_of(tiny: TinyGemma4, specs: Sequence[RowSpec] = MIXED) -> Reference:
    """Return the reference in fp64, where transformers would round to fp32 on the way."""
    model = tiny.model(torch.float64)
    rotary = model.model.vision_tower.encoder.rotary_emb
    rotary.inv_freq = rotary.inv_freq.float()
    rows = [
        replace(row, **{name: each.double() for name, each in vars(row).items() if _is_float(each)})
        for row in make_rows(specs)
    ]
    with _without_rounding():
        return _run(model, rows)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def _without_rounding() -> Iterator[None]:
    to_float, softmax, one_hot = Tensor.float, F.softmax, F.one_hot

    def keep_fp64(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.dtype is torch.float64 else to_float(x, *args, **kwargs)

    def in_dtype(x: Tensor, dim: int | None = None, dtype: Any = None, **kwargs: Any) -> Tensor:
        return softmax(x, dim, dtype=x.dtype if x.dtype is torch.float64 else dtype, **kwargs)

    with (
        mock.patch.object(Tensor, "float", keep_fp64),
        mock.patch.object(F, "softmax", in_dtype),
        mock.patch.object(F, "one_hot", lambda *a, **k: one_hot(*a, **k).double()),
    ):
        yield
