"""A complete random checkpoint of a family, small enough for a laptop: weights, config, a tokenizer
that is trained here, the chat template and the image processor. Tests use it as their reference."""

import shutil
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig
from transformers.utils import logging

from megatron_vlm.errors import ConfigError
from megatron_vlm.family import families
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.hf.hf_checkpoint import WEIGHTS_FILE


def write_tiny(out: str | Path, spec: TinySpec = TinySpec(), dtype: str = "float32") -> None:
    """Write the checkpoint folder. The same spec gives the same bytes."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            "is not empty", place=str(out), remedy="choose a new folder for the tiny checkpoint"
        )
    tinies = {name: family.tiny for name, family in families().items() if family.tiny is not None}
    if (tiny := tinies.get(spec.family)) is None:
        raise ConfigError(key="family", found=spec.family, allowed=list(tinies))
    tokenizer = tiny.tokenizer(spec.vocab)
    config = tiny.config(spec, tokenizer)
    config.dtype = dtype
    torch.manual_seed(spec.seed)
    logging.disable_progress_bar()
    model = getattr(transformers, config.architectures[0])(config)
    _randomise_vectors(model, spec.seed)
    tiny.change_weights(model, spec)
    named = model.named_parameters()
    fp32 = {name: param.data.clone() for name, param in named if name.endswith(tiny.in_fp32)}
    model = model.to(getattr(torch, dtype))
    for name, value in fp32.items():
        model.get_parameter(name).data = value
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id,
        eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id,
    )
    model.save_pretrained(out)
    shutil.copymode(out / "config.json", out / WEIGHTS_FILE)  # safetensors lets only its owner read
    tokenizer.save_pretrained(out)
    tiny.add_files(out, spec, config)


def _randomise_vectors(model: torch.nn.Module, seed: int) -> None:
    """Add noise to all biases and norms. Fresh models have zero biases and unit norms, which would
    hide a swapped tensor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
