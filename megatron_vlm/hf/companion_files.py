"""Files of a Hugging Face checkpoint next to its weights: their names, and which of them an export
copies."""

import re
import shutil
from pathlib import Path

from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.hf.hf_checkpoint import INDEX
from megatron_vlm.io.atomic import MARK
from megatron_vlm.io.untrusted import real_path

# Files that transformers and vLLM read, and files that determine how a record becomes tokens and
# patches.
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PAPERS = re.compile(r"(LICENSE|LICENCE|NOTICE)(\.md|\.txt)?")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_SHOWN = 12  # maximum number of names in the line about files that are left out


def copy_files(source: Path, target: Path) -> None:
    """Copy the settings and the licence, and log the names of the other files."""
    left = []
    for file in sorted(source.iterdir()):
        listed = file.name in SETTINGS or _PAPERS.fullmatch(file.name)
        if listed and is_regular_file(file):
            shutil.copyfile(file, target / file.name)
        elif not (_WEIGHTS.fullmatch(file.name) or file.name in (INDEX, "README.md", MARK)):
            left.append(repr(file.name))
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        print_to_user(
            f"the export leaves out {', '.join(left[:_SHOWN])}{more} of {source}: it takes the "
            "files that transformers and vLLM read and the licence, and writes a model card"
        )


def is_regular_file(file: Path) -> bool:
    """Return whether a file is regular, or a link that only points to where such a file is stored.
    The cache of the hub stores files in models--NAME/blobs, and a folder of links keeps their
    names. Any other link could publish a file that its owner never meant to publish; config.json is
    exempt because it has been read already."""
    target = real_path(file)
    cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return target.is_file() and (target.name == file.name or cached or file.name == "config.json")
