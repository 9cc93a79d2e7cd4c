"""Change of an exported folder to GGUF files, which llama.cpp and programs on it load: model.gguf
has the decoder and its tokenizer, and mmproj.gguf the tower. Names come from the package `gguf`.

Matrices keep their dtype. Vectors, routers, small kernels and the tower's patches and positions are
in fp32, as llama.cpp wants them. Nothing is quantized: llama-quantize does that. An MTP head
is left out."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as _QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as _QWEN3_5

from megatron_vlm.errors import CheckpointError, require_extra
from megatron_vlm.family.decoder_layers import Attention, FullAttention, GatedDeltaNet
from megatron_vlm.family.processor_files import read_processor
from megatron_vlm.family.spec import Part, TensorSpec, TextSizes
from megatron_vlm.hf.expert_layouts import OF_EXPERTS, parts_of_expert
from megatron_vlm.hf.hf_checkpoint import FLOATS, INDEX, HFCheckpoint, weight_files
from megatron_vlm.hf.write_export import ChangeFolder

# llama.cpp's names of tokenizers, by the pattern that splits a text, or by what blanks become.
_TOKENIZERS = {_QWEN2: "qwen2", _QWEN3_5: "qwen35", "▁": "gemma4"}
_READ = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
_READ |= {"<|tool_response>", "<tool_response|>"}  # llama.cpp's reader of answers needs their text
_IN_FP32 = ("ffn_gate_inp", "ssm_conv1d", "position_embd", "patch_embd")
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SUFFIXES = (".weight", ".bias", ".weight.1", ".scale")
_NORM_EPS = 1e-6  # in Qwen's tower
_TOWER, _DEEPSTACK, _DELTA_NET = "model.visual.", "deepstack_merger_list.", ".linear_attn."
_MERGER = {"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"}
_GEMMA4_NAMES = {
    "model.language_model.": "model.",
    "model.vision_tower.encoder.": "vision_model.model.",
    ".linear.weight": ".weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
_WITHOUT_SUFFIX = ("layer_scalar", "gate_up_proj", "down_proj", "position_embedding_table")
_TOWER_THETA, _POOLING = 100.0, 3  # llama.cpp computes Gemma's towers with these alone

Named = Iterator[tuple[str, Tensor]]
Fields = dict[str, Any]


class _Form(NamedTuple):
    """Parts of the change that a family has of its own."""

    projector: tuple[str, str]  # its field, and its name in gguf.VisionProjectorType
    lacks: Callable[[HFCheckpoint], dict[str, bool]]  # what has no form, and if the model has it
    decoder: Callable[[HFCheckpoint], Fields]  # fields that other families do not have
    tower: Callable[[HFCheckpoint], Fields]
    # What a tensor becomes: values with which llama.cpp computes, under names that the package
    # `gguf` translates.
    as_gguf: Callable[[str, Tensor, HFCheckpoint], Named]


def gguf_change() -> ChangeFolder:
    """Return the change of a folder. Raise ConfigError if the package `gguf` is missing."""
    require_extra("gguf", "gguf", key="--as", found="gguf")
    return partial(_to_gguf, import_module("gguf"))


def _to_gguf(gguf: Any, source: HFCheckpoint, folder: Path) -> None:
    decoder, form = _check_model(gguf, source)
    model = HFCheckpoint(folder)
    model.read_headers()
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
            _describe_decoder(writer, model, form)
            _describe_tokenizer(gguf, writer, folder, model.sizes.text.vocab)
        else:
            _describe_tower(gguf, writer, model, form)
        _write_tensors(gguf, writer, kind, model, form)
    model.close()
    for path in (*weight_files(folder), folder / INDEX):
        path.unlink(missing_ok=True)


def _check_model(gguf: Any, source: HFCheckpoint) -> tuple[Any, _Form]:
    """Return the decoder in gguf.MODEL_ARCH and the family's form. Refuse models without them."""
    kind = source.family.model_type
    decoder = getattr(gguf.MODEL_ARCH, kind.replace("_", "").upper(), None)
    form = _FORMS.get(kind) if decoder else None
    lacks = {f"models of model_type {kind}": form is None, "reward models": source.sizes.has_score}
    lacks |= form.lacks(source) if form else {}
    for what, is_true in lacks.items():
        if is_true:
            raise CheckpointError(
                f": this exporter has no GGUF for {what}",
                place=str(source.path),
                key="--as",
                found="gguf",
                allowed=f"models of model_type {', '.join(_FORMS)}",
            )
    assert form is not None
    return decoder, form


def _qwen_lacks(source: HFCheckpoint) -> dict[str, bool]:
    text, net = source.sizes.text, source.sizes.text.delta_net
    full, interval = _full_layers(text)
    return {
        "experts in some of the layers": 0 < len(text.expert_layers) < text.num_layers,
        f"full attention in layers {full}": full
        != [*range(interval - 1, text.num_layers, interval)],
        "keys and values of delta nets of other widths": net is not None
        and net.key_dim != net.value_dim,
    }


def _full_layers(text: TextSizes) -> tuple[list[int], int]:
    """Return the layers with full attention, and their interval if it is even."""
    full = [n for n, layer in enumerate(text.layers) if isinstance(layer.mixer, FullAttention)]
    return full, full[0] + 1 if full else text.num_layers


def _gemma4_lacks(source: HFCheckpoint) -> dict[str, bool]:
    text, vision = source.sizes.text, source.sizes.vision
    kinds = [each.window is None for each in text.attentions]
    sees_image = source.config.text_config.use_bidirectional_attention
    theta = source.config.vision_config.rope_parameters["rope_theta"]
    return {
        "single layers with heads of another width": len({*kinds}) < len(kinds),
        f"use_bidirectional_attention={sees_image}": sees_image != "vision",
        f"rope_theta={theta} in the tower": theta != _TOWER_THETA,
        f"pooling_kernel_size={vision.merge}": vision.merge != _POOLING,
        "heads of a tower that are not as wide as it": vision.query != vision.hidden,
    }


def _describe_decoder(writer: Any, model: HFCheckpoint, form: _Form) -> None:
    text, experts = model.sizes.text, model.sizes.text.experts
    attention = _full_attention(text)
    width = getattr(model.config.text_config, "intermediate_size", None)
    values: Fields = {
        **dict(block_count=text.num_layers, context_length=text.max_positions),
        **dict(embedding_length=text.hidden, feed_forward_length=width),
        **dict(head_count=attention.heads, head_count_kv=attention.kv_heads),
        **dict.fromkeys(("key_length", "value_length"), attention.head_dim),
        **dict(layer_norm_rms_eps=text.norm_eps, rope_freq_base=attention.rotary.theta),
    }
    if experts is not None:
        values |= dict(expert_count=experts.count, expert_used_count=experts.top_k)
        values["expert_feed_forward_length"] = experts.width
        values["expert_shared_feed_forward_length"] = experts.shared_width or None
    for name, value in (values | form.decoder(model)).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def _full_attention(text: TextSizes) -> Attention:
    return next(each for each in text.attentions if each.window is None)


def _qwen_decoder(model: HFCheckpoint) -> Fields:
    text, attention = model.sizes.text, model.sizes.text.attentions[0]
    assert isinstance(attention, FullAttention)
    values: Fields = {"rope_dimension_sections": [*attention.rotary.section, 0]}
    if (net := text.delta_net) is None:
        values["num_deepstack_layers"] = model.sizes.vision.deepstack
    else:
        values |= dict(ssm_conv_kernel=net.kernel, ssm_state_size=net.key_dim)
        values |= dict(ssm_group_count=net.key_heads, ssm_time_step_rank=net.value_heads)
        values["ssm_inner_size"] = net.value_dim * net.value_heads
        values["full_attention_interval"] = _full_layers(text)[1]
        values["rope_dimension_count"] = attention.rotary.dim
    return values


def _gemma4_decoder(model: HFCheckpoint) -> Fields:
    text, config = model.sizes.text, model.config.text_config
    full, mixers = _full_attention(text), [layer.mixer for layer in text.layers]
    sliding = next((each for each in text.attentions if each.window is not None), full)
    return {
        "head_count_kv": [each.kv_heads for each in mixers if isinstance(each, Attention)],
        **dict.fromkeys(("key_length_swa", "value_length_swa"), sliding.head_dim),
        **dict(rope_dimension_count=full.head_dim, rope_dimension_count_swa=sliding.head_dim),
        **dict(rope_freq_base_swa=sliding.rotary.theta, sliding_window=config.sliding_window),
        "sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "final_logit_softcapping": text.logit_cap,
        **dict(shared_kv_layers=0, embedding_length_per_layer_input=0),
    }


def _describe_tokenizer(gguf: Any, writer: Any, folder: Path, vocab: int) -> None:
    tokenizer, kind = json.loads((folder / "tokenizer.json").read_text("utf-8")), gguf.TokenType
    steps = tokenizer["pre_tokenizer"].get("pretokenizers", [tokenizer["pre_tokenizer"]])
    [pattern] = [step["pattern"].get("Regex") for step in steps if "pattern" in step] or [None]
    pattern = pattern or (tokenizer.get("normalizer") or {}).get("content")
    if pattern not in _TOKENIZERS:
        raise CheckpointError(
            "splits text by a pattern that llama.cpp does not know from Qwen's or Gemma's models",
            place=str(folder / "tokenizer.json"),
            key="pre_tokenizer",
            found=pattern,
        )
    tokens = {n: (piece, kind.NORMAL) for piece, n in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        piece = token["content"]
        is_special = token["special"] or (piece.startswith("<|") and piece.endswith("|>"))
        tokens[token["id"]] = piece, kind.CONTROL if is_special else kind.USER_DEFINED
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)
    if is_gemma := _TOKENIZERS[pattern] == "gemma4":
        for number, (piece, _, role) in enumerate(gguf.LlamaHfVocab(folder).all_tokens()):
            shown = piece.decode()
            tokens[number] = shown, kind.USER_DEFINED if shown in _READ else role
        writer.add_token_scores([-1000.0] * vocab)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
    else:
        writer.add_tokenizer_pre(_TOKENIZERS[pattern])
    pieces, kinds = zip(
        *(tokens.get(number, (f"[PAD{number}]", kind.UNUSED)) for number in range(vocab)),
        strict=True,
    )
    writer.add_tokenizer_model("gemma4" if is_gemma else "gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)


def _describe_tower(gguf: Any, writer: Any, model: HFCheckpoint, form: _Form) -> None:
    vision, (field, projector) = model.sizes.vision, form.projector
    writer.add_clip_has_vision_encoder(True)
    getattr(writer, f"add_clip_{field}")(getattr(gguf.VisionProjectorType, projector))
    values = {
        **dict(projection_dim=model.sizes.text.hidden, head_count=vision.query // vision.head_dim),
        **dict(embedding_length=vision.hidden, feed_forward_length=vision.ffn),
        **dict(block_count=vision.depth, patch_size=model.config.vision_config.patch_size),
        "use_gelu": True,  # else llama.cpp takes a coarser one
    }
    for name, value in (values | form.tower(model)).items():
        getattr(writer, f"add_vision_{name}")(value)


def _qwen_tower(model: HFCheckpoint) -> Fields:
    vision, deepstack = model.config.vision_config, _deepstack(model)
    _, settings = read_processor(model.path, "image", "preprocessor_config.json")
    return {
        **dict(spatial_merge_size=vision.spatial_merge_size, attention_layernorm_eps=_NORM_EPS),
        "image_size": isqrt(vision.num_position_embeddings) * vision.patch_size,
        "is_deepstack_layers": [number in deepstack for number in range(vision.depth)],
        "image_mean": settings.get("image_mean") or [0.5] * 3,
        "image_std": settings.get("image_std") or [0.5] * 3,
    }


def _gemma4_tower(model: HFCheckpoint) -> Fields:
    return {
        "attention_layernorm_eps": model.config.vision_config.rms_norm_eps,
        "image_size": 224,  # it must be there, and llama.cpp does not read it
        **dict(image_mean=[0.0] * 3, image_std=[1.0] * 3),
    }


def _deepstack(model: HFCheckpoint) -> Sequence[int]:
    """Return the numbers of the tower's blocks after which DeepStack features are taken."""
    return getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()


def _write_tensors(gguf: Any, writer: Any, kind: Any, model: HFCheckpoint, form: _Form) -> None:
    """Write the tensors one at a time, behind a header that is made with tensors on no device."""
    is_tower = kind is gguf.MODEL_ARCH.MMPROJ
    specs = [x for x in model.sizes.tensors if (x.part in (Part.vision, Part.merger)) == is_tower]
    # The second product of a merger counts as block 2 even in a tower with fewer blocks.
    blocks = max(3, model.sizes.text.num_layers, model.sizes.vision.depth)
    names = gguf.get_tensor_name_map(kind, blocks)

    def written(spec: TensorSpec, value: Tensor) -> Named:
        for own, changed in form.as_gguf(spec.name, value, model):
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


def _of_qwen(name: str, value: Tensor, model: HFCheckpoint) -> Named:
    text = model.sizes.text
    if name.startswith(_TOWER):
        yield from _of_tower(name.removeprefix(_TOWER), value, _deepstack(model))
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


def _of_gemma4(name: str, value: Tensor, model: HFCheckpoint) -> Named:
    if name == model.sizes.names.embedding:
        rotary: Any = _full_attention(model.sizes.text).rotary
        # What divides the frequencies of full layers: with 1e30, a pair does not turn.
        still = [1e30] * (rotary.head_dim // 2 - rotary.count)
        yield "rope_freqs.weight", torch.tensor([1.0] * rotary.count + still)
    for theirs, own in _GEMMA4_NAMES.items():
        name = name.replace(theirs, own)
    if name.endswith("patch_embedder.input_proj.weight"):  # the colours of a pixel are adjacent
        side = model.config.vision_config.patch_size
        value = value.unflatten(1, (side, side, 3)).movedim(3, 1)
    yield f"{name}.weight" if name.endswith(_WITHOUT_SUFFIX) else name, value


_QWEN = _Form(("projector_type", "QWEN3VL"), _qwen_lacks, _qwen_decoder, _qwen_tower, _of_qwen)
_GEMMA4 = _Form(
    ("vision_projector_type", "GEMMA4V"), _gemma4_lacks, _gemma4_decoder, _gemma4_tower, _of_gemma4
)
_FORMS = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN)
_FORMS["gemma4"] = _GEMMA4
