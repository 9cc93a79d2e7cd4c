"""Tiny checkpoints of Gemma 4 in the form of the released 31B, or with experts of the 26B-A4B."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, GemmaTokenizer, PretrainedConfig

from megatron_vlm.family.added_tokens import changed_json
from megatron_vlm.family.gemma4.chat import CHAT
from megatron_vlm.family.tiny import CORPUS, TinyParts, TinySpec, check_vocab

_BUDGET = 70  # tokens of a picture: the fewest that Hugging Face allows
_FRAMES = 4  # A video has so many; released checkpoints take 32.
_SIDE = 2**10  # patches along a side of a picture that have position embeddings
_BASE = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # for what has no token
_BLANKS = ["▁" * 2**n for n in range(1, 6)]  # runs of blanks, which are tokens
_LETTERS = ["▁", "\n", *map(chr, range(ord("!"), ord("~") + 1))]
# The tokens with the names that tokenizer_config.json gives them.
_NAMED = {
    **dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>"),
    **dict(audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>"),
    **dict(sot_token="<|turn>", eot_token="<turn|>", think_token="<|think|>"),
    **dict(soc_token="<|channel>", eoc_token="<channel|>", escape_token='<|"|>'),
    **dict(std_token="<|tool>", etd_token="<tool|>"),
    **dict(stc_token="<|tool_call>", etc_token="<tool_call|>"),
    **dict(str_token="<|tool_response>", etr_token="<tool_response|>"),
}
_VIDEO = "<|video|>"


def train_tokenizer(vocab: int) -> GemmaTokenizer:
    """Train a BPE on a few sentences for Gemma's own tokenizer class, with named tokens last."""
    named = len(_NAMED) + 1
    fewest = sum(map(len, (_BASE, _BYTES, _LETTERS, _BLANKS)))
    check_vocab(vocab, fewest, named)
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - named - len(_BLANKS),
        initial_alphabet=_LETTERS,
        special_tokens=[*_BASE, *_BYTES],
        show_progress=False,
    )
    # No token of Gemma has a letter behind a line's end: answers begin there.
    core.train_from_iterator([CORPUS.replace("\n", " ")], trainer)
    model = json.loads(core.to_str())["model"]
    pieces = model["vocab"] | {blanks: vocab - named - n for n, blanks in enumerate(_BLANKS, 1)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = GemmaTokenizer(
        vocab=pieces,
        merges=[*((half, half) for half in ("▁", *_BLANKS[:-1])), *merges],
        add_bos_token=True,
        extra_special_tokens=[*_NAMED.values(), _VIDEO],
        model_specific_special_tokens=_NAMED,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(),
        model_max_length=32768,
    )
    return tokenizer


def tiny_config(spec: TinySpec, tokenizer: GemmaTokenizer) -> PretrainedConfig:
    """Return the fields of the config.json of a released model, as transformers holds them."""
    token = tokenizer.convert_tokens_to_ids
    std = 0.08 if spec.from_scratch else 0.02
    every = spec.full_attention_interval
    ends = range(every - 1, spec.layers - 1, every)  # the last layer has full attention, too
    full = {*ends, spec.layers - 1}
    text: dict[str, Any] = dict(
        vocab_size=spec.vocab,
        vocab_size_per_layer_input=spec.vocab,
        hidden_size_per_layer_input=0,
        initializer_range=std,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        layer_types=[
            "full_attention" if n in full else "sliding_attention" for n in range(spec.layers)
        ],
        num_attention_heads=spec.heads,
        attention_k_eq_v=True,
        use_bidirectional_attention="vision",
        sliding_window=spec.sliding_window,
        final_logit_softcapping=30.0,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=token("<pad>"),
        bos_token_id=token("<bos>"),
        eos_token_id=[token("<eos>"), *(token(end) for end in CHAT.ends)],
        **_heads(spec),
    )
    if spec.experts:
        text |= dict(
            enable_moe_block=True,
            num_experts=spec.experts,
            top_k_experts=spec.top_k,
            moe_intermediate_size=spec.expert_intermediate,
        )
    vision = dict(
        initializer_range=std,
        hidden_size=spec.vision_hidden,
        intermediate_size=spec.vision_intermediate,
        num_hidden_layers=spec.vision_depth,
        num_attention_heads=spec.vision_heads,
        num_key_value_heads=spec.vision_heads,
        head_dim=spec.vision_hidden // spec.vision_heads,
        patch_size=spec.patch_size,
        pooling_kernel_size=spec.pooling,
        position_embedding_size=_SIDE,
        default_output_length=_BUDGET,
        standardize=True,
    )
    return AutoConfig.for_model(
        "gemma4",
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image|>"),
        video_token_id=token(_VIDEO),
        audio_token_id=token("<|audio|>"),
        boi_token_id=token("<|image>"),
        eoi_token_id=token("<image|>"),
        boa_token_id=token("<|audio>"),
        eoa_token_index=token("<audio|>"),
        vision_soft_tokens_per_image=_BUDGET,
        tie_word_embeddings=True,
    )


def _heads(spec: TinySpec) -> dict[str, int]:
    """Return the heads of sliding layers, and the wider and fewer heads of full layers."""
    return dict(
        head_dim=spec.head_dim,
        num_key_value_heads=min(2 * spec.kv_heads, spec.heads),
        global_head_dim=2 * spec.head_dim,
        num_global_key_value_heads=spec.kv_heads,
    )


def _change_weights(model: Any, spec: TinySpec) -> None:
    """Draw what transformers sets to ones and zeros, which would hide a fault: the scalars of
    layers, the tower's last step and its position embeddings. The norms of queries and keys are
    halved, since scores have no other scale."""
    generator = torch.Generator().manual_seed(spec.seed)
    scale = 0.1 if spec.from_scratch else 0.3
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("position_embedding_table"):
                param.copy_(scale * torch.randn(param.shape, generator=generator))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                param.mul_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.3 * torch.rand(1, generator=generator))
            elif name.endswith(("std_bias", "std_scale")):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def _write_processor(out: Path, spec: TinySpec) -> None:
    """Write the settings of the processors, as released checkpoints have them."""
    common: dict[str, Any] = {
        **dict.fromkeys(("do_convert_rgb", "do_rescale", "do_resize"), True),
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "max_soft_tokens": _BUDGET,
        "patch_size": spec.patch_size,
        "pooling_kernel_size": spec.pooling,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    image = {"do_normalize": False, "image_processor_type": "Gemma4ImageProcessor"}
    video = {
        **dict(do_normalize=True, do_sample_frames=True, num_frames=_FRAMES),
        "video_processor_type": "Gemma4VideoProcessor",
    }
    settings = {
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "image_processor": common | image,
        "image_seq_length": _BUDGET,
        "processor_class": "Gemma4Processor",
        "video_processor": common | video,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (out / "processor_config.json").write_text(text)


def _add_files(out: Path, spec: TinySpec, _: PretrainedConfig) -> None:
    with changed_json(out / "config.json") as config:
        # transformers has these fields of a released file in another form.
        del config["text_config"]["per_layer_config"]
        config["text_config"] |= _heads(spec)
    _write_processor(out, spec)


TINY = TinyParts(train_tokenizer, tiny_config, _change_weights, _add_files)
