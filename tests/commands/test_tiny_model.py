# .venv/bin/python -m pytest tests/commands/test_tiny_model.py
"""The tiny checkpoint and its command."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_vlm.cli import main
from megatron_vlm.commands.demo.tiny_model import SPECIAL_TOKENS, TinySpec, write_tiny
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
    for token in SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1, token
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


def test_the_same_spec_gives_the_same_bytes(tiny, tmp_path):
    write_tiny(tmp_path / "again")
    assert len({file.stat().st_mode for file in (tmp_path / "again").iterdir()}) == 1
    assert files(tmp_path / "again") == files(Path(tiny()))


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


def test_too_small_a_vocabulary(tmp_path, capsys):
    assert main(["demo", "tiny", "--out", str(tmp_path / "t"), "--vocab", "100"]) == 2
    err = capsys.readouterr().err
    assert "vocab=100" in err and "at least 270" in err


@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_mrope_section_splits_the_frequencies(head_dim, tmp_path):
    write_tiny(tmp_path / "t", TinySpec(head_dim=head_dim))
    config = AutoConfig.from_pretrained(tmp_path / "t").text_config
    assert sum(config.rope_parameters["mrope_section"]) == head_dim // 2
