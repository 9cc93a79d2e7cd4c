"""scores.json: what a folder of scores was computed from. It is written first, and again at the end
with the results; every file of scores belongs to it.

This module needs files only, so that a run is refused before torch is imported.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import write_text
from megatron_vlm.io.untrusted import UntrustedFile, home_path

SCORES_FILE = "scores.json"
_VERSION = 1
_REMEDY = "give a folder that megatron-vlm score has written"


@dataclass(frozen=True)
class ScoredSet:
    """A data set of which every record is scored, in chunks of this many records."""

    name: str  # data.train, or the name of an evaluation set
    digest: str  # digest of the records, their order and their lengths
    samples: int
    chunk: int

    def files(self, number: int) -> list[str]:
        """Return the names of the files of the set with this number."""
        return [f"{number:02d}-{start:09d}.safetensors" for start in self.starts]

    @property
    def starts(self) -> range:
        """The first records of the chunks."""
        return range(0, self.samples, self.chunk)


@dataclass(frozen=True)
class ScoreIndex:
    """Content of scores.json."""

    model: str  # path or name, for people
    weights: str  # digest of the weights
    vocabulary: str  # digest of the tokenizer's tokens and their ids
    top_k: int  # tokens that are stored for each supervised token
    temperature: float  # divisor of the logits of these tokens
    precision: str
    sets: tuple[ScoredSet, ...] = ()
    is_complete: bool = False
    summary: list[dict[str, Any]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Names of all files of scores."""
        return [name for number, each in enumerate(self.sets) for name in each.files(number)]

    @property
    def digest(self) -> str:
        """Digest of what the scores were computed from."""
        content = {**asdict(self), "is_complete": None, "summary": None, "model": None}
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        """Write FOLDER/scores.json."""
        content = {"version": _VERSION, **asdict(self)}
        write_text(folder / SCORES_FILE, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    @staticmethod
    def read(folder: str | Path) -> "ScoreIndex":
        """Read FOLDER/scores.json."""
        file = UntrustedFile(str(home_path(folder) / SCORES_FILE), remedy=_REMEDY)
        content = file.json()
        if content["version"].whole() != _VERSION:
            found = content["version"].value
            raise file.error(
                "is of another version", key="version", found=found, allowed=(_VERSION,)
            )
        if not content["sets"].items():
            raise content["sets"].error("a list of data sets")
        sets = tuple(
            ScoredSet(
                each["name"].string(),
                each["digest"].string(),
                each["samples"].whole(1),
                each["chunk"].whole(1),
            )
            for each in content["sets"].items()
        )
        return ScoreIndex(
            model=content["model"].string(),
            weights=content["weights"].string(),
            vocabulary=content["vocabulary"].string(),
            top_k=content["top_k"].whole(),
            temperature=content["temperature"].number(0),
            precision=content["precision"].string(),
            sets=sets,
            is_complete=content["is_complete"].value is True,
        )

    def differences(self, other: "ScoreIndex") -> Iterator[tuple[str, Any, Any]]:
        """Yield what was computed from something else: a name, and both values."""
        for name in ("weights", "vocabulary", "top_k", "temperature", "precision"):
            if getattr(self, name) != getattr(other, name):
                yield name, getattr(self, name), getattr(other, name)
        names = [[each.name for each in index.sets] for index in (self, other)]
        if names[0] != names[1]:
            yield "the data sets", names[0], names[1]
            return
        for own, its in zip(self.sets, other.sets, strict=True):
            if own != its:
                yield f"the records of {own.name}", own.samples, its.samples


def digest_vocabulary(tokens: Mapping[str, int]) -> str:
    """Return a digest of a tokenizer's tokens with their ids."""
    text = json.dumps(sorted(tokens.items(), key=lambda token: (token[1], token[0])))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def read_complete(key: str, folder: str) -> ScoreIndex:
    """Read the index of a folder that a key names. Refuse one that is not complete."""
    index = ScoreIndex.read(folder)
    if not index.is_complete:
        raise DataError(
            "is not complete",
            key=key,
            found=folder,
            remedy="run the same megatron-vlm score again: it continues where it stopped",
        )
    named, there = sum(len(each.starts) for each in index.sets), len(os.listdir(home_path(folder)))
    if named > there:
        raise DataError(
            f"has {there:,} files, and its {SCORES_FILE} names {named:,}",
            key=key,
            found=folder,
            remedy=_REMEDY,
        )
    return index


def check_scores(folder: str, top_k: int | None, temperature: float | None = None) -> ScoreIndex:
    """Read the index of a teacher's folder. Refuse one that is not complete, that stores fewer than
    `top_k` tokens for each supervised token, or that was written at another temperature."""
    index = read_complete("teacher.path", folder)
    if not index.top_k:
        raise DataError(
            "has log-probs of the supervised tokens alone",
            key="teacher.path",
            found=folder,
            remedy="score the data again with --top-k 64",
        )
    if top_k is not None and top_k > index.top_k:
        raise DataError(
            f"is more than the {index.top_k} tokens that {folder} stores for each supervised token",
            key="teacher.top_k",
            found=top_k,
            allowed=range(1, index.top_k + 1),
        )
    if temperature not in (None, index.temperature):
        raise ConfigError(
            f"is not the temperature {index.temperature:g} at which {folder} was written",
            key="distill.temperature",
            found=temperature,
            remedy=f"give distill.temperature={index.temperature:g}, or score the data again with "
            f"--temperature {temperature:g}",
        )
    return index


def prepare_folder(folder: Path, index: ScoreIndex) -> Collection[str]:
    """Prepare a folder for these scores, and return the files that it has already. A folder with
    scores of something else is refused."""
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        index.write(folder)
        return ()
    if not (folder / SCORES_FILE).exists():
        raise DataError(
            "has files, and no scores.json among them",
            place=str(folder),
            remedy="give --out a new or empty folder, or one of an earlier megatron-vlm score",
        )
    for name, before, now in ScoreIndex.read(folder).differences(index):
        raise DataError(
            f"has scores of something else: {name} was {before!r} and is now {now!r}",
            place=str(folder),
            remedy="give --out another folder, or delete this one",
        )
    return {path.name for path in folder.iterdir()}
