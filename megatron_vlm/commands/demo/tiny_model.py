"""A complete random Qwen3-VL checkpoint, small enough for a laptop: weights, config, a tokenizer
that is trained here, the ChatML template and the image processor. Tests use it as their
reference."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers import Qwen3VLForConditionalGeneration as Qwen3VL
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from megatron_vlm.commands.demo.tiny_spec import TinySpec
from megatron_vlm.errors import ConfigError

_NAMES = """endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start
quad_end vision_start vision_end vision_pad image_pad video_pad"""
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
    model = Qwen3VLMoeForConditionalGeneration(config) if spec.experts else Qwen3VL(config)
    _randomise_vectors(model, spec.seed)
    if spec.from_scratch:
        _show_positions(model, spec.seed)
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    model.save_pretrained(out)
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


def _show_positions(model: Any, seed: int) -> None:
    """Enlarge the position embeddings. In fresh weights they are a fiftieth of the patch
    embeddings, so that a model would learn the positions of objects last."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.model.visual.pos_embed.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator))


def tiny_config(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """Return the same fields as the config.json of a released Qwen3-VL."""
    token = tokenizer.convert_tokens_to_ids
    # A released model splits 64 frequencies into 24, 20, 20; here 12 are split into 6, 3, 3.
    part = spec.head_dim // 8
    section = [spec.head_dim // 2 - 2 * part, part, part]
    depth, count = spec.vision_depth, spec.deepstack
    spread = [(i + 1) * depth // (count + 1) for i in range(count)]
    # 0.02 suits thousands of inputs; with a hundred, the outputs would be almost 0.
    std = 0.08 if spec.from_scratch else 0.02
    experts: dict[str, Any] = {}
    if spec.experts:
        experts = dict(
            num_experts=spec.experts,
            num_experts_per_tok=spec.top_k,
            moe_intermediate_size=spec.expert_intermediate,
            decoder_sparse_step=spec.sparse_step,
            mlp_only_layers=list(range(spec.dense_layers)),
        )
    config_class: Any = Qwen3VLMoeConfig if experts else Qwen3VLConfig
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    config: Qwen3VLConfig | Qwen3VLMoeConfig = config_class(
        architectures=[f"{name}ForConditionalGeneration"],
        tie_word_embeddings=spec.tied,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        text_config=dict(
            vocab_size=spec.vocab,
            initializer_range=std,
            hidden_size=spec.hidden,
            intermediate_size=spec.intermediate,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=32768,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": section,
                "mrope_interleaved": True,
            },
            tie_word_embeddings=spec.tied,
            bos_token_id=token("<|endoftext|>"),
            eos_token_id=token("<|im_end|>"),
            pad_token_id=token("<|endoftext|>"),
            **experts,
        ),
        vision_config=dict(
            initializer_range=std,
            depth=depth,
            hidden_size=spec.vision_hidden,
            intermediate_size=spec.vision_intermediate,
            num_heads=spec.vision_heads,
            out_hidden_size=spec.hidden,
            patch_size=spec.patch_size,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=64,
            deepstack_visual_indexes=spread if depth > count else list(range(depth)),
        ),
    )
    return config


def train_tokenizer(vocab: int) -> Qwen2Tokenizer:
    """Train a BPE on a few sentences for Qwen's own tokenizer class, with the special tokens
    last."""
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
    """Write preprocessor_config.json and its video counterpart, as released checkpoints have
    them."""
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
