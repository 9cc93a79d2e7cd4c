"""A complete random checkpoint of Qwen3-VL or Qwen3.5, small enough for a laptop: weights, config,
a tokenizer that is trained here, the chat template and the image processor. Tests use it as their
reference."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from megatron_vlm.commands.demo.tiny_spec import TinySpec
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import families
from megatron_vlm.hf.hf_checkpoint import WEIGHTS_FILE

_NAMES = """endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start
quad_end vision_start vision_end vision_pad image_pad video_pad"""
_TASK = "ForConditionalGeneration"
_CLASSES = {"qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
_FP32 = (".linear_attn.A_log", ".linear_attn.norm.weight")
_TYPICAL = "model.language_model.embed_tokens.weight"  # it has the dtype of the model
SPECIAL_TOKENS = [f"<|{name}|>" for name in _NAMES.split()]

# It renders the same text as the template of the released Qwen3-VL.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()

_CORPUS = """system user assistant You are a helpful assistant. What is the name of the subject in
this photo? The subject in this photo is: What colour is the circle, the square, the triangle? How
many shapes are there? Where is the red one: left, right, above, below? one two three four five six
seven eight nine ten red green blue yellow black white orange purple. Describe this image. It shows
a picture of a large, small, round thing. Answer with a single word. yes no 0123456789"""


def write_tiny(out: str | Path, spec: TinySpec = TinySpec(), dtype: str = "float32") -> None:
    """Write the checkpoint folder. The same spec gives the same bytes."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            "is not empty", place=str(out), remedy="choose a new folder for the tiny checkpoint"
        )
    tokenizer = train_tokenizer(spec.vocab)
    config = tiny_config(spec, tokenizer)
    config.dtype = dtype
    torch.manual_seed(spec.seed)
    logging.disable_progress_bar()
    model = getattr(transformers, config.architectures[0])(config)
    _randomise_vectors(model, spec.seed)
    _set_decays(model, spec)
    if spec.from_scratch:
        _show_positions(model, spec.seed)
    fp32 = {n: param.data.clone() for n, param in model.named_parameters() if n.endswith(_FP32)}
    model = model.to(getattr(torch, dtype))
    for name, value in fp32.items():  # released checkpoints have these in fp32, never rounded
        model.get_parameter(name).data = value
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    model.save_pretrained(out)
    shutil.copymode(out / "config.json", out / WEIGHTS_FILE)  # safetensors lets only its owner read
    if spec.mtp_layers and spec.family == "qwen3_5":
        _add_draft_head(out / WEIGHTS_FILE, config, spec.seed)
    tokenizer.save_pretrained(out)
    write_processor(out, spec)


def _randomise_vectors(model: torch.nn.Module, seed: int) -> None:
    """Add noise to all biases and norms. Fresh models have zero biases and unit norms, which would
    hide a swapped tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))


def _set_decays(model: Any, spec: TinySpec) -> None:
    """Draw the decays of gated delta nets anew, up to the largest one."""
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".A_log"):
                shares = torch.rand(param.shape, generator=generator)
                param.copy_((0.01 + (spec.max_decay - 0.01) * shares).log())


def _add_draft_head(weights: Path, config: PretrainedConfig, seed: int) -> None:
    """Add the tensors of a head for drafts ("multi-token prediction"), which transformers leaves
    out: a product that joins two hidden states, and layers of full attention."""
    text = families()[config.model_type].sizes_of(config).text
    width = text.hidden
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (width, 2 * width)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{name}.weight"] = (width,)
    layer = next(layer for layer in text.layers if layer.mixer is text.attention)
    for number in range(config.text_config.mtp_num_hidden_layers):
        for tensor in chain.from_iterable(param.tensors for param in layer.params(width)):
            shapes[f"mtp.layers.{number}.{tensor.name}"] = tensor.shape
    generator, tensors = torch.Generator().manual_seed(seed), load_file(weights)
    for name, shape in sorted(shapes.items()):
        value = 0.1 * torch.randn(shape, generator=generator)
        tensors[name] = value.to(tensors[_TYPICAL].dtype)
    save_file(tensors, weights, metadata={"format": "pt"})


def _show_positions(model: Any, seed: int) -> None:
    """Enlarge the position embeddings. In fresh weights they are a fiftieth of the patch
    embeddings, so that a model would learn the positions of objects last."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.model.visual.pos_embed.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator))


def tiny_config(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> PretrainedConfig:
    """Return the same fields as the config.json of a released model of the family."""
    if spec.family not in _CLASSES:
        raise ConfigError(key="family", found=spec.family, allowed=list(_CLASSES))
    token = tokenizer.convert_tokens_to_ids
    # 0.02 suits thousands of inputs; with a hundred, the outputs would be almost 0.
    std = 0.08 if spec.from_scratch else 0.02
    is_qwen3_5 = spec.family == "qwen3_5"
    text_of_family = _qwen3_5_text(spec) if is_qwen3_5 else _qwen3_vl_text(spec)
    config: PretrainedConfig = AutoConfig.for_model(
        spec.family + "_moe" * bool(spec.experts),
        architectures=[f"{_CLASSES[spec.family]}{'Moe' * bool(spec.experts)}{_TASK}"],
        tie_word_embeddings=spec.tied,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        text_config=dict(
            vocab_size=spec.vocab,
            initializer_range=std,
            hidden_size=spec.hidden,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=32768,
            tie_word_embeddings=spec.tied,
            bos_token_id=token("<|endoftext|>"),
            eos_token_id=token("<|im_end|>"),
            **text_of_family,
            **({} if is_qwen3_5 else {"pad_token_id": token("<|endoftext|>")}),
        ),
        vision_config=dict(
            initializer_range=std,
            depth=spec.vision_depth,
            hidden_size=spec.vision_hidden,
            intermediate_size=spec.vision_intermediate,
            num_heads=spec.vision_heads,
            out_hidden_size=spec.hidden,
            patch_size=spec.patch_size,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=64,
            **({} if is_qwen3_5 else {"deepstack_visual_indexes": _deepstack_blocks(spec)}),
        ),
    )
    return config


def _rope(theta: float, frequencies: int, part: int) -> dict[str, Any]:
    """Return the settings of M-RoPE whose height and width have `part` frequencies each."""
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "mrope_section": [frequencies - 2 * part, part, part],
        "mrope_interleaved": True,
    }


def _qwen3_vl_text(spec: TinySpec) -> dict[str, Any]:
    # A released model splits 64 frequencies into 24, 20, 20; here 12 are split into 6, 3, 3.
    fields: dict[str, Any] = {
        "intermediate_size": spec.intermediate,
        "rope_parameters": _rope(5_000_000.0, spec.head_dim // 2, spec.head_dim // 8),
    }
    if spec.experts:
        fields |= dict(
            num_experts=spec.experts,
            num_experts_per_tok=spec.top_k,
            moe_intermediate_size=spec.expert_intermediate,
            decoder_sparse_step=spec.sparse_step,
            mlp_only_layers=list(range(spec.dense_layers)),
        )
    return fields


def _qwen3_5_text(spec: TinySpec) -> dict[str, Any]:
    # A released model splits 32 frequencies, of a quarter of each head, into 11, 11, 10.
    frequencies = spec.head_dim // 8
    rope = _rope(10_000_000.0, frequencies, frequencies // 3)
    fields: dict[str, Any] = {
        "rope_parameters": rope | {"partial_rotary_factor": 0.25},
        "layer_types": [
            "linear_attention" if (n + 1) % spec.full_attention_interval else "full_attention"
            for n in range(spec.layers)
        ],
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "linear_key_head_dim": spec.linear_key_dim,
        "linear_value_head_dim": spec.linear_value_dim,
        "linear_conv_kernel_dim": 4,
    }
    if spec.mtp_layers:
        fields |= {"mtp_num_hidden_layers": spec.mtp_layers, "mtp_use_dedicated_embeddings": False}
    if not spec.experts:
        return fields | {"intermediate_size": spec.intermediate}
    return fields | dict(
        num_experts=spec.experts,
        num_experts_per_tok=spec.top_k,
        moe_intermediate_size=spec.expert_intermediate,
        shared_expert_intermediate_size=spec.shared_expert_intermediate,
    )


def _deepstack_blocks(spec: TinySpec) -> list[int]:
    depth, count = spec.vision_depth, spec.deepstack
    spread = [(i + 1) * depth // (count + 1) for i in range(count)]
    return spread if depth > count else list(range(depth))


def train_tokenizer(vocab: int) -> Qwen2Tokenizer:
    """Train a BPE on a few sentences for Qwen's own tokenizer class, with special tokens last."""
    size = vocab - len(SPECIAL_TOKENS)
    if size < 256:
        raise ConfigError(
            f"is too small for 256 bytes and {len(SPECIAL_TOKENS)} special tokens",
            key="vocab",
            found=vocab,
            allowed=f"at least {256 + len(SPECIAL_TOKENS)}",
        )
    qwen = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    core.train_from_iterator([_CORPUS], trainer)
    model = json.loads(core.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )


def write_processor(out: Path, spec: TinySpec) -> None:
    """Write the files of the image and video processors, as released checkpoints have them."""
    settings: dict[str, Any] = {
        "patch_size": spec.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = Qwen2VLImageProcessorPil(**settings).to_dict()
    image["image_processor_type"] = "Qwen2VLImageProcessorFast"  # the name in released checkpoints
    video = {**settings, "video_processor_type": "Qwen3VLVideoProcessor"}
    for name, config in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        config["processor_class"] = "Qwen3VLProcessor"
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (out / f"{name}.json").write_text(text)
