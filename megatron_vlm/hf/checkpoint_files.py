"""Files of a Hugging Face checkpoint: which of them an export copies and changes, and digests that
show whether ranks, or a run that resumes, have the same model and settings."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.distributed.process import print_to_user
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family.added_tokens import changed_json
from megatron_vlm.hf.hf_checkpoint import INDEX, HFCheckpoint, read_header, weight_files
from megatron_vlm.io.atomic import MARK
from megatron_vlm.io.untrusted import UntrustedFile, real_path

# Files that transformers and vLLM read, and files that determine how a record becomes tokens and
# patches.
SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_PAPERS = re.compile(r"(LICENSE|LICENCE|NOTICE)(\.md|\.txt)?")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_TIED = "tie_word_embeddings"
_SHOWN = 12  # maximum number of names in the line about files that are left out
# Number and size of the blocks that are read from each tensor: 32B in fp32 are 128 GB, their blocks
# 18 MB. Training changes values all over a tensor, so other weights differ in some block.
_BLOCKS = 4
_BLOCK = 4096


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


def untie(folder: Path) -> None:
    """Record that the head no longer shares the embedding's weight: at the top, where transformers
    reads it, and among the text fields where they repeat it."""
    with changed_json(folder / "config.json") as config:
        config[_TIED] = False
        if _TIED in config["text_config"]:
            config["text_config"][_TIED] = False


def remove_quantization(folder: Path) -> None:
    """Record that no weight is stored in 4 bits any longer."""
    with changed_json(folder / "config.json") as config:
        config.pop("quantization_config", None)


def set_score_class(folder: Path, family: str) -> None:
    """Record that the model has a scalar head: the class that transformers has for it, or would
    have, and the padding by which that finds the last token of each row."""
    with changed_json(folder / "config.json") as config:
        config["architectures"] = [f"{family}ForSequenceClassification"]
        config["id2label"], config["label2id"] = {"0": "reward"}, {"reward": 0}
        if config["text_config"].get("pad_token_id") is None:
            config["text_config"]["pad_token_id"] = read_tokenizer(str(folder)).pad_token_id


def digests(source: HFCheckpoint) -> dict[str, str]:
    """Return a digest of every file that affects training: of the whole file for settings, and of
    the size, the header and blocks of each tensor for weight files."""
    digests_by_file = settings_digests(source.path)
    for file in weight_files(source.path):
        digests_by_file[file.relative_to(source.path).as_posix()] = weight_file_digest(file)
    return digests_by_file


def weights_digest(folder: Path) -> str:
    """Return a single digest of all weight files of a checkpoint, independent of its folder."""
    hasher = hashlib.sha256()
    for file in weight_files(folder):
        hasher.update(f"{file.name} {weight_file_digest(file)}\n".encode())
    return hasher.hexdigest()


def settings_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file that determines sizes, or how a record becomes tokens."""
    return {
        name: hashlib.sha256(_untrusted_file(folder / name).content()).hexdigest()
        for name in SETTINGS
        if os.path.lexists(folder / name)
    }


def _untrusted_file(file: Path) -> UntrustedFile:
    return UntrustedFile(str(file), CheckpointError, "download the checkpoint again")


def weight_file_digest(file: Path) -> str:
    """Return a digest of a file's size, its header and blocks of each of its tensors."""
    header = read_header(file)
    with (
        _untrusted_file(file).wrap_errors("cannot be read"),
        open(file, "rb", buffering=0) as opened,
    ):
        descriptor = opened.fileno()
        size = os.fstat(descriptor).st_size
        hasher = hashlib.sha256(repr((size, sorted(header.items()))).encode())
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # prevents read-ahead
        start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        for _, info in sorted(header.items()):
            first, last = (start + offset for offset in info["data_offsets"])
            for place, length in _blocks(first, last):
                hasher.update(os.pread(descriptor, length, place))
    return hasher.hexdigest()


def _blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield places and sizes of blocks spread over [first, last), including both ends."""
    if last - first <= _BLOCKS * _BLOCK:
        yield first, last - first
        return
    for number in range(_BLOCKS):
        yield first + number * (last - first - _BLOCK) // (_BLOCKS - 1), _BLOCK
