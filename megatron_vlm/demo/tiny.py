"""A complete random Qwen3-VL checkpoint, small enough for a laptop: weights, config, a tokenizer
trained on the spot, the ChatML template and the image processor. The oracle of our tests."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3VLConfig
from transformers import Qwen3VLForConditionalGeneration as Qwen3VL
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from megatron_vlm.demo.tiny_spec import TinySpec as TinySpec
from megatron_vlm.errors import ConfigError

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

# Renders what the template of the released Qwen3-VL renders.
CHAT_TEMPLATE = """\
{%- macro show(content) %}
{%- if content is string %}
{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- set has_system = messages[0].role == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if has_system %}{{- show(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif has_system %}
{{- '<|im_start|>system\\n' + show(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + show(message.content) + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + show(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\\n{\\"name\\": \\"' + call.name + '\\", \\"arguments\\": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_CORPUS = """system user assistant You are a helpful assistant. What is the name of the subject in
this photo? The subject in this photo is: What colour is the circle, the square, the triangle? How
many shapes are there? Where is the red one: left, right, above, below? one two three four five six
seven eight nine ten red green blue yellow black white orange purple. Describe this image. It shows
a picture of a large, small, round thing. Answer with a single word. yes no 0123456789"""


def write_tiny(out: str | Path, spec: TinySpec = TinySpec(), dtype: str = "float32") -> None:
    """Write the checkpoint folder. The same spec gives the same bytes."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose a new folder for the tiny checkpoint")
    tokenizer = train_tokenizer(spec.vocab)
    config = tiny_config(spec, tokenizer)
    config.dtype = dtype
    torch.manual_seed(spec.seed)
    logging.disable_progress_bar()
    model = Qwen3VL(config)
    _spread(model, spec.seed)
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


def _spread(model: torch.nn.Module, seed: int) -> None:
    """Fresh models have zero biases and unit norms, behind which a swapped tensor could hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))


def _show_positions(model: Qwen3VL, seed: int) -> None:
    """As fresh weights the positions of patches are a fiftieth of what the patches are: where
    something lies is then the last thing to be learned."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.model.visual.pos_embed.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator))


def tiny_config(spec: TinySpec, tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    """The same fields as the config.json of a released Qwen3-VL."""
    token = tokenizer.convert_tokens_to_ids
    # A released model splits 64 frequencies as 24, 20, 20: here 6, 3, 3 of 12.
    part = spec.head_dim // 8
    section = [spec.head_dim // 2 - 2 * part, part, part]
    depth, count = spec.vision_depth, spec.deepstack
    # 0.02 suits thousands of inputs: of a hundred it leaves next to nothing.
    std = 0.08 if spec.from_scratch else 0.02
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
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
            deepstack_visual_indexes=[(i + 1) * depth // (count + 1) for i in range(count)]
            if depth > count
            else list(range(min(depth, count))),
        ),
    )


def train_tokenizer(vocab: int) -> Qwen2Tokenizer:
    """Qwen's own tokenizer class with a BPE trained on a few sentences, special tokens last."""
    size = vocab - len(SPECIAL_TOKENS)
    if size < 256:
        raise ConfigError(
            f"vocab={vocab} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens; "
            f"choose at least {256 + len(SPECIAL_TOKENS)}"
        )
    qwen = Qwen2Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    core.train_from_iterator(
        [_CORPUS],
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
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
    """preprocessor_config.json and its video twin, as the released checkpoints have them."""
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    processor = Qwen2VLImageProcessorPil(
        patch_size=spec.patch_size,
        temporal_patch_size=2,
        merge_size=2,
        size=size,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    processor.save_pretrained(out)
    path = out / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config["image_processor_type"] = "Qwen2VLImageProcessorFast"  # the released name
    config["processor_class"] = "Qwen3VLProcessor"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": spec.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    text = json.dumps(video, indent=2, sort_keys=True) + "\n"
    (out / "video_preprocessor_config.json").write_text(text)
