"""Model families: the fields of config.json, tensors, the vision tower. docs/architecture.md says
how to add one. This file, config_json.py and the tables of fields import neither torch nor
transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vlm.family.added_tokens import find_new_tokens
from megatron_vlm.family.config_json import check_model_type, no_config_json, read_fields
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import require_files_in

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatron_vlm.family.family import Family
    from megatron_vlm.family.spec import ModelSizes


def families() -> "dict[str, Family]":
    """Return the families by the model_type of config.json."""
    # These import torch and transformers.
    from megatron_vlm.family.gemma4.model import GEMMA4
    from megatron_vlm.family.qwen3_5.model import QWEN3_5, QWEN3_5_MOE
    from megatron_vlm.family.qwen3_vl.model import QWEN3_VL, QWEN3_VL_MOE

    every_family = (QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE, GEMMA4)
    return {family.model_type: family for family in every_family}


def read_config(folder: str | Path) -> "PretrainedConfig":
    """Read the config.json of a checkpoint: a folder, or a name on the Hub."""
    folder = folder_of(folder)
    if not (folder / "config.json").is_file():
        raise no_config_json(folder)
    fields = read_fields(folder)
    from transformers import AutoConfig

    require_files_in(folder)  # transformers opens every file whose name it knows
    with fields.file.wrap_errors("transformers cannot read it"):
        # The folder's code is never run, and transformers does not ask for permission to run it.
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


def family_of(config: "PretrainedConfig", path: str | Path) -> "Family":
    """Return the family that a config.json names. Raise a ConfigError for other models."""
    check_model_type(config.model_type, path)
    return families()[config.model_type]


def read_family(folder: str | Path) -> "Family":
    """Return the family of a checkpoint."""
    return family_of(read_config(folder), folder)


def read_sizes(
    folder: str | Path, add_tokens: Sequence[str] = (), extra_head: str | None = None
) -> "ModelSizes":
    """Read the sizes in config.json, in our own names, with the added tokens and with a scalar head
    (`score`) or the MTP head (`mtp`)."""
    config = read_config(folder)
    if (new_tokens := find_new_tokens(folder, add_tokens)) is not None:
        new_tokens.grow(config)
    sizes = family_of(config, folder).sizes_of(config)
    return sizes.with_extra_head(extra_head, str(folder))
