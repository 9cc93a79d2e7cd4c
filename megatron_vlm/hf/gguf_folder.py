"""Change of an exported folder to GGUF files, which llama.cpp and programs on it load: model.gguf
has the decoder and its tokenizer, and mmproj.gguf the tower. Names come from the package `gguf`.

Matrices keep their dtype. Vectors, routers, small kernels and the tower's patches and positions are
in fp32, as llama.cpp wants them. Nothing is quantized: llama-quantize does that. A head for drafts
is left out."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as _QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as _QWEN3_5

from megatron_vlm.errors import CheckpointError, require_extra
from megatron_vlm.family.decoder_layers import FullAttention, GatedDeltaNet
from megatron_vlm.family.processor_files import read_processor
from megatron_vlm.family.spec import Part, TensorSpec, TextSizes
from megatron_vlm.hf.expert_layouts import OF_EXPERTS, parts_of_expert
from megatron_vlm.hf.hf_checkpoint import FLOATS, INDEX, HFCheckpoint, weight_files
from megatron_vlm.hf.write_export import ChangeFolder

_DECODERS = dict(qwen3_vl="QWEN3VL", qwen3_vl_moe="QWEN3VLMOE")
_DECODERS |= dict(qwen3_5="QWEN35", qwen3_5_moe="QWEN35MOE")
_PRE_TOKENIZERS = {_QWEN2: "qwen2", _QWEN3_5: "qwen35"}  # llama.cpp's names of these patterns
_IN_FP32 = ("ffn_gate_inp", "ssm_conv1d", "position_embd", "patch_embd")
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SUFFIXES = (".weight", ".bias", ".weight.1")
_NORM_EPS = 1e-6  # in Qwen's tower
_TOWER, _DEEPSTACK, _DELTA_NET = "model.visual.", "deepstack_merger_list.", ".linear_attn."
_MERGER = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}

Named = Iterator[tuple[str, Tensor]]


def gguf_change() -> ChangeFolder:
    """Return the change of a folder. Raise ConfigError if the package `gguf` is missing."""
    require_extra("gguf", "gguf", key="--as", found="gguf")
    return partial(_to_gguf, import_module("gguf"))


def _to_gguf(gguf: Any, source: HFCheckpoint, folder: Path) -> None:
    interval = _check_model(gguf, source)
    model = HFCheckpoint(folder)
    model.read_headers()
    decoder = getattr(gguf.MODEL_ARCH, _DECODERS[source.family.model_type])
    writers = {
        kind: gguf.GGUFWriter(folder / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[kind])
        for kind, name in ((decoder, "model"), (gguf.MODEL_ARCH.MMPROJ, "mmproj"))
    }
    typical = _TYPES[FLOATS[model.tensors[model.sizes.names.embedding].dtype]]
    file_type = "ALL_F32" if typical == "F32" else f"MOSTLY_{typical}"
    for kind, writer in writers.items():
        writer.add_type(gguf.GGUFType.MODEL if kind is decoder else gguf.GGUFType.MMPROJ)
        writer.add_file_type(getattr(gguf.LlamaFileType, file_type))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if kind is decoder:
            _describe_decoder(writer, model, interval)
            _describe_tokenizer(gguf, writer, folder, model.sizes.text.vocab)
        else:
            _describe_tower(gguf, writer, model)
        # The second product of a merger counts as block 2 even in a tower with fewer blocks.
        blocks = max(3, model.sizes.text.num_layers, model.sizes.vision.depth)
        in_tower = (Part.vision, Part.merger)
        specs = [x for x in model.sizes.tensors if (x.part in in_tower) != (kind is decoder)]
        _write_tensors(gguf, writer, gguf.get_tensor_name_map(kind, blocks), model, specs)
    model.close()
    for path in (*weight_files(folder), folder / INDEX):
        path.unlink(missing_ok=True)


def _check_model(gguf: Any, source: HFCheckpoint) -> int:
    """Return the interval of layers with full attention. Refuse models without a form here."""
    kind, text = source.family.model_type, source.sizes.text
    full = [isinstance(layer.mixer, FullAttention) for layer in text.layers]
    interval = full.index(True) + 1 if any(full) else len(full)
    lacks = {
        f"models of model_type {kind}": not hasattr(gguf.MODEL_ARCH, _DECODERS.get(kind, "?")),
        "reward models": source.sizes.has_score,
        "experts in some of the layers": 0 < len(text.expert_layers) < text.num_layers,
        f"full attention in layers {[n for n, is_full in enumerate(full) if is_full]}": full
        != [(number + 1) % interval == 0 for number in range(len(full))],
    }
    if (net := text.delta_net) is not None:
        lacks["keys and values of delta nets of other widths"] = net.key_dim != net.value_dim
    for what, is_true in lacks.items():
        if is_true:
            raise CheckpointError(
                f": this exporter has no GGUF for {what}",
                place=str(source.path),
                key="--as",
                found="gguf",
                allowed=f"models of model_type {', '.join(_DECODERS)}",
            )
    return interval


def _describe_decoder(writer: Any, model: HFCheckpoint, interval: int) -> None:
    text = model.sizes.text
    attention, experts, net = text.attentions[0], text.experts, text.delta_net
    assert isinstance(attention, FullAttention)
    width = getattr(model.config.text_config, "intermediate_size", None)
    values: dict[str, Any] = {
        **dict(block_count=text.num_layers, context_length=text.max_positions),
        **dict(embedding_length=text.hidden, feed_forward_length=width),
        **dict(head_count=attention.heads, head_count_kv=attention.kv_heads),
        **dict.fromkeys(("key_length", "value_length"), attention.head_dim),
        **dict(layer_norm_rms_eps=text.norm_eps, rope_freq_base=attention.rotary.theta),
        "rope_dimension_sections": [*attention.rotary.section, 0],
    }
    if experts is not None:
        values |= dict(expert_count=experts.count, expert_used_count=experts.top_k)
        values["expert_feed_forward_length"] = experts.width
        values["expert_shared_feed_forward_length"] = experts.shared_width or None
    if net is None:
        values["num_deepstack_layers"] = model.sizes.vision.deepstack
    else:
        values |= dict(ssm_conv_kernel=net.kernel, ssm_state_size=net.key_dim)
        values |= dict(ssm_group_count=net.key_heads, ssm_time_step_rank=net.value_heads)
        values["ssm_inner_size"] = net.value_dim * net.value_heads
        values |= dict(full_attention_interval=interval, rope_dimension_count=attention.rotary.dim)
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def _describe_tokenizer(gguf: Any, writer: Any, folder: Path, vocab: int) -> None:
    tokenizer, kind = json.loads((folder / "tokenizer.json").read_text("utf-8")), gguf.TokenType
    steps = tokenizer["pre_tokenizer"].get("pretokenizers", [tokenizer["pre_tokenizer"]])
    [pattern] = [step["pattern"].get("Regex") for step in steps if "pattern" in step] or [None]
    if pattern not in _PRE_TOKENIZERS:
        raise CheckpointError(
            "splits text by a pattern that llama.cpp does not know from Qwen's models",
            place=str(folder / "tokenizer.json"),
            key="pre_tokenizer",
            found=pattern,
        )
    tokens = {n: (piece, kind.NORMAL) for piece, n in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        piece = token["content"]
        is_special = token["special"] or (piece.startswith("<|") and piece.endswith("|>"))
        tokens[token["id"]] = piece, kind.CONTROL if is_special else kind.USER_DEFINED
    pieces, kinds = zip(
        *(tokens.get(number, (f"[PAD{number}]", kind.UNUSED)) for number in range(vocab)),
        strict=True,
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZERS[pattern])
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)


def _describe_tower(gguf: Any, writer: Any, model: HFCheckpoint) -> None:
    vision, deepstack = model.config.vision_config, _deepstack(model)
    _, settings = read_processor(model.path, "image", "preprocessor_config.json")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    values = {
        **dict(use_gelu=True, projection_dim=model.sizes.text.hidden, head_count=vision.num_heads),
        **dict(embedding_length=vision.hidden_size, feed_forward_length=vision.intermediate_size),
        **dict(block_count=vision.depth, spatial_merge_size=vision.spatial_merge_size),
        **dict(patch_size=vision.patch_size, attention_layernorm_eps=_NORM_EPS),
        "image_size": isqrt(vision.num_position_embeddings) * vision.patch_size,
        "is_deepstack_layers": [number in deepstack for number in range(vision.depth)],
        "image_mean": settings.get("image_mean") or [0.5] * 3,
        "image_std": settings.get("image_std") or [0.5] * 3,
    }
    for name, value in values.items():
        getattr(writer, f"add_vision_{name}")(value)


def _deepstack(model: HFCheckpoint) -> Sequence[int]:
    """Return the numbers of the tower's blocks after which DeepStack features are taken."""
    return getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()


def _write_tensors(
    gguf: Any, writer: Any, names: Any, model: HFCheckpoint, specs: Sequence[TensorSpec]
) -> None:
    """Write the tensors one at a time, behind a header that is made with tensors on no device."""

    def written(spec: TensorSpec, value: Tensor) -> Named:
        for own, changed in _as_gguf(spec.name, value, model.sizes.text, _deepstack(model)):
            if (name := names.get_name(own, _SUFFIXES)) is None:
                raise CheckpointError(
                    "has no name in this version of the package gguf",
                    place=str(model.path),
                    key=own,
                    remedy="run pip install --upgrade gguf",
                )
            is_whole = changed.ndim == 1 or any(part in name for part in _IN_FP32)
            yield name, changed.float() if is_whole or changed.dtype not in _TYPES else changed

    for spec in specs:
        stored = next(iter(model.form_of(spec.name).stored(spec.name, spec.shape)))
        dtype = FLOATS[model.tensors[stored].dtype]
        for name, value in written(spec, torch.empty(spec.shape, dtype=dtype, device="meta")):
            kind = getattr(gguf.GGMLQuantizationType, _TYPES[value.dtype])
            writer.add_tensor_info(name, value.shape, value.dtype, value.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for spec in specs:
        for _, value in written(spec, model.read(spec.name, [(0, spec.shape[0])])):
            writer.write_tensor_data(value.contiguous().view(torch.uint8).numpy())
    writer.close()


def _as_gguf(name: str, value: Tensor, text: TextSizes, deepstack: Sequence[int]) -> Named:
    """Yield what a tensor becomes: values with which llama.cpp computes, under names that the
    package `gguf` translates."""
    if name.startswith(_TOWER):
        yield from _of_tower(name.removeprefix(_TOWER), value, deepstack)
        return
    name = name.replace("language_model.", "")
    if OF_EXPERTS in name:
        parts, layer = parts_of_expert(name), name.partition(OF_EXPERTS)[0]
        for part, matrices in zip(parts, value.chunk(len(parts), dim=1), strict=True):
            yield f"{layer}{OF_EXPERTS}{part}.weight", matrices
    elif _DELTA_NET in name:
        assert text.delta_net is not None
        leaf = name.partition(_DELTA_NET)[2]
        yield name.replace("dt_bias", "dt_proj.bias"), _of_delta_net(leaf, value, text.delta_net)
    else:
        is_centered = text.centered_norms and name.endswith("norm.weight")
        yield name, value.float() + 1 if is_centered else value


def _of_delta_net(leaf: str, value: Tensor, net: GatedDeltaNet) -> Tensor:
    """Return a tensor of a delta net with its value heads in another order. Value heads of one
    key head are neighbours in transformers, and llama.cpp repeats all key heads in turn."""

    def reordered(values: Tensor, dim: int = 0) -> Tensor:
        heads = values.unflatten(dim, (net.key_heads, net.value_heads // net.key_heads, -1))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        rows, keys = value.flatten(1), 2 * net.key_heads * net.key_dim
        return torch.cat([rows[:keys], reordered(rows[keys:])])
    if leaf == "norm.weight":
        return value
    value = reordered(value, dim=int(leaf == "out_proj.weight"))
    return -value.float().exp() if leaf == "A_log" else value


def _of_tower(name: str, value: Tensor, deepstack: Sequence[int]) -> Named:
    if name.startswith(_DEEPSTACK):
        number, _, leaf = name.removeprefix(_DEEPSTACK).partition(".")
        yield f"{_TOWER}{_DEEPSTACK}{deepstack[int(number)]}.{leaf}", value
    elif value.ndim == 5:  # llama.cpp adds two convolutions, one for each frame of a patch
        yield f"visual.{name}", value[:, :, 0]
        yield f"visual.{name}.1", value[:, :, 1]
    else:
        merger, _, leaf = name.partition("merger.")
        kind, _, suffix = leaf.partition(".")
        yield f"visual.{f'merger.{_MERGER[kind]}.{suffix}' if not merger and leaf else name}", value
