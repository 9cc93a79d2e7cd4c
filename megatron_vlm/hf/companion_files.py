"""The files of a Hugging Face checkpoint beside its weights: which there are, and what of them an
export takes along."""

import re
import shutil
from pathlib import Path

from megatron_vlm.distributed.process import say
from megatron_vlm.hf.hf_checkpoint import INDEX
from megatron_vlm.io.untrusted import real_path

# What transformers and vLLM read, and what decides how a record becomes tokens and patches.
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
_SHOWN = 12  # names in the line about what is left out


def copy_files(source: Path, target: Path) -> None:
    """Copy settings and licence; say which other files stay behind."""
    left = []
    for file in sorted(source.iterdir()):
        listed = file.name in SETTINGS or _PAPERS.fullmatch(file.name)
        if listed and is_own(file):
            shutil.copyfile(file, target / file.name)
        elif not (_WEIGHTS.fullmatch(file.name) or file.name in (INDEX, "README.md")):
            left.append(repr(file.name))
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        say(
            f"the export leaves out {', '.join(left[:_SHOWN])}{more} of {source}: it takes the "
            "files that transformers and vLLM read and the licence, and writes a model card"
        )


def is_own(file: Path) -> bool:
    """Whether it is a regular file, or a link that only says where such a file is kept: the cache
    of the hub keeps them in models--NAME/blobs, and a folder of links keeps their names. Any other
    link could publish a file that its owner never meant to; but config.json has been read as such.
    """
    kept = real_path(file)
    cached = kept.parent.name == "blobs" and kept.parent.parent.name.startswith("models--")
    return kept.is_file() and (kept.name == file.name or cached or file.name == "config.json")
