"""What depends on the model's family. To add one, write a module beside qwen3_vl.py and list its
Family here; nothing outside this room reads the fields of config.json."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.family import Family
from megatron_vlm.family.qwen3_vl import QWEN3_VL
from megatron_vlm.family.sizes import ModelSizes
from megatron_vlm.hub import folder_of
from megatron_vlm.paths import require_files_in

FAMILIES = {family.model_type: family for family in (QWEN3_VL,)}


def read_config(folder: str | Path) -> PretrainedConfig:
    """The config.json of a checkpoint: of a folder, or of a name on the Hub."""
    folder = folder_of(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path={str(folder)!r} has no config.json; give the folder of a Qwen3-VL "
            "checkpoint, or the name of one on the Hub, such as Qwen/Qwen3-VL-2B-Instruct"
        )
    require_files_in(folder)  # transformers opens whatever has a name that it knows
    try:
        # No code of the folder's is run, nor is anybody asked whether it may.
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers says in many ways what it cannot read
        raise ConfigError(
            f"model.path={str(folder)!r}: transformers cannot read its config.json: "
            f"{' '.join(str(error).split())}; give a folder of a Qwen3-VL checkpoint"
        ) from error
    return config


def family_of(config: PretrainedConfig, path: str | Path) -> Family:
    """The family that a config.json names; models of others are refused."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model.path={path}: its config.json says model_type={config.model_type!r}; this "
            "version trains dense Qwen3-VL (model_type='qwen3_vl')"
        )
    return FAMILIES[config.model_type]


def read_family(folder: str | Path) -> Family:
    """The family of a checkpoint."""
    return family_of(read_config(folder), folder)


def read_sizes(folder: str | Path) -> ModelSizes:
    """What config.json says, in our own names."""
    config = read_config(folder)
    return family_of(config, folder).sizes_of(config)
