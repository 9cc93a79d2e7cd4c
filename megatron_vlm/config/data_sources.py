"""The entries of data.train and data.eval: each source of records, and each evaluation set."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError

# The keys of data.* that change no row of data.train.
WITHOUT_EFFECT = (
    *("eval", "image_root", "unknown_keys", "lone_marks", "max_errors", "cache_dir"),
    *("num_workers", "prefetch"),
)
HUB = "hub:"  # before the name of a data set: it is on the Hub, whatever is in this folder


@dataclass(frozen=True)
class SourceSpec:
    """One source of records; docs/data.md has a table of these options."""

    path: str  # file, glob, folder, or the name of a Hugging Face data set: NAME or hub:NAME
    weight: float = 1.0  # how often each record comes in an epoch; 0.5: every other epoch
    split: str = "train"  # of a Hugging Face data set
    subset: str | None = None  # its configuration
    streaming: bool = False  # read a Hugging Face data set as it comes
    image_root: str | None = None  # null: data.image_root
    revision: str | None = None  # of a Hugging Face data set: branch, tag or commit


@dataclass(frozen=True)
class EvalSource:
    """One evaluation set."""

    name: str  # as scores, predictions and checkpoint.best call it
    source: SourceSpec


def parse_sources(value: Any, key: str) -> tuple[SourceSpec, ...]:
    """The sources of a path, a mapping, or a list of those; none of null."""
    if value is None:
        return ()
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise ConfigError("is an empty list", key=key, allowed="at least one source")
    return tuple(_parse_source(entry, key) for entry in entries)


def _parse_source(entry: Any, key: str) -> SourceSpec:
    given = {"path": entry} if isinstance(entry, str) else entry
    known = [item.name for item in fields(SourceSpec)]
    valid = isinstance(given, dict) and isinstance(given.get("path"), str)
    if not valid or set(given) - set(known):
        raise ConfigError(f"is not a path or an object of {', '.join(known)}", key=key, found=entry)
    spec = SourceSpec(**given)
    # A weight stays an int where it was one: the fingerprint of the data, by which a run resumes,
    # spells it out.
    if type(spec.weight) not in (int, float) or not 0 < spec.weight < 1000:
        raise ConfigError(
            place=spec.path,
            key=f"{key}.weight",
            found=spec.weight,
            allowed="more than 0 and less than 1000",
        )
    for item in fields(SourceSpec):
        value = getattr(spec, item.name)
        if item.name != "weight" and not isinstance(value, item.type):  # type: ignore[arg-type]
            is_switch = item.type is bool
            raise ConfigError(
                "is not true or false" if is_switch else "is not text",
                place=spec.path,
                key=f"{key}.{item.name}",
                found=value,
                remedy="" if is_switch else "put it in quotes",
            )
    return spec


def parse_sets(value: Any) -> tuple[EvalSource, ...]:
    """data.eval, each source a set of its own, named as in {name: SOURCE} or after its file."""
    if isinstance(value, dict) and "path" not in value:
        return tuple(EvalSource(str(name), _only(name, entry)) for name, entry in value.items())
    specs = parse_sources(value, "data.eval")
    names = [Path(spec.path.removeprefix(HUB)).name.split(".")[0] for spec in specs]
    return tuple(
        EvalSource(name if names.count(name) == 1 else f"{name}-{place}", spec)
        for place, (name, spec) in enumerate(zip(names, specs, strict=True))
    )


def _only(name: Any, entry: Any) -> SourceSpec:
    specs = parse_sources(entry, key := f"data.eval.{name}")
    if len(specs) != 1:
        raise ConfigError(f"has {len(specs)} sources", key=key, remedy="give each set exactly one")
    return specs[0]


def plain_sources(specs: Sequence[SourceSpec]) -> Any:
    """What `parse_sources` reads back as these, in its shortest form."""
    entries = [_plain_source(spec) for spec in specs]
    return entries[0] if len(entries) == 1 else entries or None


def _plain_source(spec: SourceSpec) -> Any:
    given = {key: value for key, value in vars(spec).items() if value != vars(SourceSpec).get(key)}
    return given if len(given) > 1 else spec.path


def plain_sets(sets: Sequence[EvalSource]) -> Any:
    """What `parse_sets` reads back as these: without names where they are the files' own."""
    plain = plain_sources([held_out.source for held_out in sets])
    if parse_sets(plain) == tuple(sets):
        return plain
    return {held_out.name: _plain_source(held_out.source) for held_out in sets}
