"""All settings of other trainers: the fields of their argument classes, read from their source.
This writes tests/golden/trainer_fields.json:

    .venv/bin/python -m tests.support.trainer_fields FOLDER...

A folder has installed or unpacked packages, as .venv-trl/lib/python3.11/site-packages has. Nothing
in it is imported.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megatron_vlm.commands.import_config.command import TRAINERS
from megatron_vlm.commands.import_config.config_text import find_counterpart
from megatron_vlm.commands.import_config.model_rules import translate_frozen_parts, translate_method
from megatron_vlm.commands.import_config.source_settings import Setting, SourceSettings
from megatron_vlm.commands.import_config.translation import Translation
from megatron_vlm.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "trainer_fields.json"
# Of each trainer: the files with its classes, and those classes; their bases are read, too.
CLASSES = {
    "trl": (
        ("trl/trainer/*config.py", "trl/scripts/utils.py", "transformers/training_args.py"),
        "SFTConfig DPOConfig KTOConfig GRPOConfig RLOOConfig RewardConfig ScriptArguments "
        "ModelConfig",
    ),
    "llamafactory": (
        ("llamafactory/hparams/*.py", "transformers/training_args.py"),
        "ModelArguments DataArguments TrainingArguments FinetuningArguments GeneratingArguments",
    ),
    "ms-swift": (
        ("swift/**/*arg*.py", "transformers/training_args.py"),
        "SftArguments RLHFArguments MegatronSftArguments MegatronRLHFArguments",
    ),
    "qwen-vl-finetune": (
        ("qwenvl/train/argument.py", "transformers/training_args.py"),
        "ModelArguments DataArguments TrainingArguments",
    ),
    "axolotl": (("axolotl/utils/schemas/*.py",), "AxolotlInputConfig"),
}
VERL = "verl/trainer/config/_generated_ppo_trainer.yaml"
METHODS = ("sft", "dpo", "kto", "grpo", "rloo", "reward")


def fields_of(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the fields of each trainer whose source is in one of these folders."""
    found = {}
    for trainer, (patterns, classes) in CLASSES.items():
        files = [*chain.from_iterable(f.glob(p) for f in folders for p in patterns)]
        bases, names = _classes(files)
        waiting, seen = classes.split(), list[str]()
        for name in waiting:  # grows while it is read
            waiting += [base for base in bases.get(name, ()) if base not in waiting]
            seen += names.get(name, [])
        if any(name in names for name in classes.split()):
            found[trainer] = sorted(set(seen))
    for file in (folder / VERL for folder in folders if (folder / VERL).exists()):
        found["verl"] = sorted(_leaves(yaml.safe_load(file.read_text())))
    return found


def _classes(files: Sequence[Path]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the names of the bases, and of the fields, of each class."""
    bases: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for node in chain.from_iterable(ast.walk(ast.parse(file.read_text())) for file in files):
        if isinstance(node, ast.ClassDef):
            bases[node.name] = bases.get(node.name, []) + [
                ast.unparse(base).rpartition(".")[2] for base in node.bases
            ]
            names[node.name] = names.get(node.name, []) + [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and not each.target.id.startswith("_")
            ]
    return bases, names


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{name}.")
        elif name not in ("_target_", "defaults"):
            yield f"{before}{name}"


def outcomes(trainer: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings that rules read, those that tables or classes answer, and those that the
    user is asked about."""
    read = {"model_name_or_path", "model", "base_model"} & {*names}
    for method in METHODS:
        source = SourceSettings({name: Setting(name, None) for name in names})
        t = Translation(source, TRAINERS[trainer], task=method, method=method)
        for rule in (translate_method, *TRAINERS[trainer].rules, translate_frozen_parts):
            try:
                rule(t)
            except ConfigError:  # a setting that must be given
                continue
        read |= t.read
    read |= {*TRAINERS[trainer].same.values()} & {*names}
    left = set(names) - read
    asked = {name for name in left if find_counterpart(name) is None}
    return {"read": sorted(read), "answered": sorted(left - asked), "asked": sorted(asked)}


if __name__ == "__main__":
    table = {
        trainer: outcomes(trainer, names)
        for trainer, names in fields_of([*map(Path, sys.argv[1:])]).items()
    }
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")
    for trainer, kinds in table.items():
        print(trainer, {kind: len(names) for kind, names in kinds.items()})
