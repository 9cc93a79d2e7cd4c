# .venv/bin/python -m pytest tests/commands/test_tiny_model.py
"""The tiny checkpoint and its command."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_vlm.cli import main
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.qwen.tiny import BLOCK_TOKENS, SPECIAL_TOKENS
from megatron_vlm.family.tiny import TinySpec
from tests.training.test_properties import files

pytestmark = pytest.mark.newest  # it depends on the versions


def test_everything_a_loader_looks_for(tiny):
    folder = Path(tiny())
    assert {file.name for file in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"),
        "video_preprocessor_config.json",
    }
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "Qwen2VLImageProcessorFast"
    assert processor["patch_size"] == 16 and processor["merge_size"] == 2


def test_tokenizer_has_qwens_tokens_and_the_chatml_template(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    for token in SPECIAL_TOKENS + BLOCK_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1, token
        assert tokenizer.decode(tokenizer(token).input_ids, skip_special_tokens=True) == (
            token if token in BLOCK_TOKENS else ""
        )
    text = "A café, 日本 and <|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "red"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\nred<|im_end|>\n"
    )


def test_image_processor_makes_the_patches_the_model_takes(tiny):
    processor = Qwen2VLImageProcessorPil.from_pretrained(tiny())
    out = processor(images=[Image.new("RGB", (64, 96))], return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert out["pixel_values"].shape == (24, 3 * 2 * 16 * 16)


@pytest.mark.parametrize("sizes", [{}, {"family": "gemma4", "experts": 4}])
def test_the_same_spec_gives_the_same_bytes(sizes, tiny, tmp_path):
    write_tiny(tmp_path / "again", TinySpec(**sizes))
    assert len({file.stat().st_mode for file in (tmp_path / "again").iterdir()}) == 1
    assert files(tmp_path / "again") == files(Path(tiny(**sizes)))


@pytest.mark.parametrize("experts", [0, 4])
def test_gemma_4_is_laid_out_as_released(experts, tiny):
    """In config.json full layers have fields of their own, and the last token of an answer is one
    of three. Nothing is one or zero that a model has otherwise."""
    folder = Path(tiny(family="gemma4", experts=experts))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in text
    assert (text["head_dim"], text["global_head_dim"]) == (24, 48)
    assert (text["num_key_value_heads"], text["num_global_key_value_heads"]) == (4, 2)
    assert text["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "GemmaTokenizer"
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<eos>", "<turn|>", "<|tool_response>"]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == {tensor.name for tensor in read_sizes(folder).tensors}
    for end in ("layer_scalar", "std_bias", "std_scale", "q_norm.weight", "embedding_table"):
        named = [value for name, value in model.state_dict().items() if name.endswith(end)]
        assert named and not any(set(value.flatten().tolist()) & {0.0, 1.0} for value in named), end
    images, videos = read_family(folder).images(folder, {}), read_family(folder).videos(folder, {})
    assert (images.most_tokens, images.resized_size(64, 64)) == (70, (384, 384))
    assert (videos.max_soft_tokens, videos.num_frames) == (70, 4)


def test_the_tokenizer_of_gemma_4_keeps_any_text(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny(family="gemma4"))
    text = "A  café, 日本:\n\n<|turn>model\nsix<turn|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer(text)["input_ids"] == [2, *ids]
    assert "<0xC3>" in tokenizer.convert_ids_to_tokens(ids)
    # Answers begin behind a line's end, and no token crosses it.
    assert [token for token in tokenizer.get_vocab() if "\n" in token] == ["\n"]


def test_command(tmp_path, capsys):
    out = tmp_path / "t"
    options = ["--layers", "5", "--kv-heads", "4", "--tied", "--vision-depth", "6"]
    assert main(["demo", "tiny", "--out", str(out), *options, "--dtype", "bfloat16"]) == 0
    config = AutoConfig.from_pretrained(out)
    assert config.text_config.num_hidden_layers == 5 and config.tie_word_embeddings
    assert config.vision_config.deepstack_visual_indexes == [1, 3, 4]
    model = Qwen3VLForConditionalGeneration.from_pretrained(out)
    assert next(model.parameters()).dtype is torch.bfloat16
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert main(["demo", "tiny", "--out", str(out)]) == 2
    assert f"{out}: is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("family, fewest", [("qwen3_vl", 276), ("gemma4", 381)])
def test_too_small_a_vocabulary(family, fewest, tmp_path, capsys):
    options = ["--family", family, "--vocab", str(fewest - 1)]
    assert main(["demo", "tiny", "--out", str(tmp_path / "t"), *options]) == 2
    err = capsys.readouterr().err
    assert f"vocab={fewest - 1}" in err and f"at least {fewest}" in err
    write_tiny(tmp_path / "t", TinySpec(family, vocab=fewest))


@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_mrope_section_splits_the_frequencies(head_dim, tmp_path):
    write_tiny(tmp_path / "t", TinySpec(head_dim=head_dim))
    config = AutoConfig.from_pretrained(tmp_path / "t").text_config
    assert sum(config.rope_parameters["mrope_section"]) == head_dim // 2


def test_a_family_changes_the_random_weights(tiny):
    """Decays of gated delta nets are small and stay in fp32, as in released checkpoints."""
    weights = load_file(Path(tiny("bfloat16", family="qwen3_5")) / "model.safetensors")
    decays = [value for name, value in weights.items() if name.endswith(".A_log")]
    assert decays and all(value.dtype == torch.float32 for value in decays)
    assert max(float(value.exp().max()) for value in decays) <= 1
