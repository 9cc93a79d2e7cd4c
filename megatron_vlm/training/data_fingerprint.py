"""Fingerprint of a run's data, and of the rules that turn records into rows. A resumed run compares
it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_vlm.config.data_sources import WITHOUT_EFFECT
from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.data.batches.dataset import DataSet, StreamSet
from megatron_vlm.hf.checkpoint_files import settings_digests
from megatron_vlm.io.hub import folder_of

# `order` contains what matters of these keys of data.*. All other keys that have an effect are
# compared, including those that are added later.
_IN_ORDER = ("train", "seed", "shuffle", "shuffle_window")
_KEYS = ("data.", "teacher.")  # groups of keys that are compared by name
_NOT_OF_ROWS = ("generation_config.json",)


@dataclass(frozen=True)
class Fingerprint:
    """Values and digests by name. They are equal on all replicas, and after a resume."""

    order: Mapping[str, str] = field(default_factory=dict)  # what a place in the data depends on
    rows: Mapping[str, str] = field(default_factory=dict)  # what else decides tokens and targets

    @staticmethod
    def from_json(saved: Any) -> "Fingerprint":
        return Fingerprint(saved["order"], saved["rows"])

    def changed_order(self, now: "Fingerprint") -> list[str]:
        """Return the differences that make a place in this data meaningless in the other data."""
        return list(_changes(self.order, now.order))

    def changed_rows(self, now: "Fingerprint") -> list[str]:
        """Return the other differences. A key that only one version has makes none."""
        known = {k: v for k, v in now.rows.items() if k in self.rows or not k.startswith(_KEYS)}
        return list(_changes(self.rows, known))


def fingerprint(data: DataSet | StreamSet, cfg: Config) -> Fingerprint:
    """Return the fingerprint of data.train as it was opened."""
    rows = {
        f"data.{item.name}": repr(getattr(cfg.data, item.name))
        for item in fields(DataConfig)
        if item.name not in (*WITHOUT_EFFECT, *_IN_ORDER)
    }
    for name, digest in settings_digests(folder_of(cfg.model.path)).items():
        if name not in _NOT_OF_ROWS:
            rows[f"{name} in model.path"] = digest
    if isinstance(data, StreamSet):
        order = _order_of_stream(data, cfg.data)
    else:
        order = _order_of_set(data)
        tokens = [index.tokens.tobytes() for index in data.indexes]
        rows["set of sample lengths in data.train"] = _digest(*tokens)
        if data.teacher is not None:
            rows["content of teacher.path"] = data.teacher.scores.index.digest
            rows["teacher.top_k"] = repr(cfg.teacher.top_k)
        if data.reference_log_probs is not None:
            tables = [table.tobytes() for table in data.reference_log_probs]
            rows["content of preference.reference"] = _digest(*tables)
    return Fingerprint(order, rows)


def _order_of_set(data: DataSet) -> dict[str, str]:
    order = {"data.shuffle": repr(data.order.shuffle)}
    if data.order.shuffle:
        order["data.seed"] = repr(data.order.seed)
    parts = zip(data.sources, data.indexes, data.order.weights, strict=True)
    for place, (source, index, weight) in enumerate(parts):
        name = f"data.train[{place}]"
        order |= {f"{name}.weight": repr(float(weight)), f"content of {name}": source.digest}
        order[f"choice of the records of {name} that are samples"] = _digest(
            index.records.tobytes()
        )
    return order


def _order_of_stream(data: StreamSet, cfg: DataConfig) -> dict[str, str]:
    order = {"data.train": repr(data.name), "data.shuffle": repr(cfg.shuffle)}
    if cfg.shuffle:
        order["data.shuffle_window"] = repr(cfg.shuffle_window)
    if cfg.shuffle or len(cfg.train) > 1:
        order["data.seed"] = repr(cfg.seed)
    for place, spec in enumerate(cfg.train):
        order[f"data.train[{place}].weight"] = repr(float(spec.weight))
        order[f"data.train[{place}].split"] = repr(spec.split)
        order[f"data.train[{place}].subset"] = repr(spec.subset)
        for name in ("columns", "roles"):
            if (names := getattr(spec, name)) is not None:
                order[f"data.train[{place}].{name}"] = repr(names)
    return order


def _digest(*parts: bytes) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the changes in words: both values of a key, but only the name of a digest."""
    for name in sorted(before.keys() | now.keys()):
        former, current = before.get(name, "absent"), now.get(name, "absent")
        if former == current:
            continue
        yield f"{name}={current}, was {former}" if name.startswith(_KEYS) else f"another {name}"
