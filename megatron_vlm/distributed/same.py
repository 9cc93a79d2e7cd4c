"""What must be the same on all ranks is compared before any of it is used."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.distributed.collectives import all_gather_bytes
from megatron_vlm.distributed.error_json import ShownValue
from megatron_vlm.errors import ConfigError

_SHOWN = 5  # differences in a message
# Where a machine keeps its copies; what is in the model's folder is compared.
_LOCAL = ("model.path", "data.cache_dir")


def compared(cfg: Config) -> dict[str, str]:
    """The keys that all ranks must have the same values of."""
    return {key: repr(get(cfg, key)) for key in leaves() if key not in _LOCAL}


def check_same(values: Mapping[str, str], digests: Mapping[str, str], device: torch.device) -> None:
    """End all ranks, with one message, where one has other values or digests than rank 0; of
    digests only the names are told. A collective."""
    mine = json.dumps([dict(values), dict(digests)], sort_keys=True).encode()
    if len(set(all_gather_bytes(hashlib.sha256(mine).digest(), None, device))) == 1:
        return
    first, *others = _differences(all_gather_bytes(mine, None, device))
    fields = first.fields() | {
        "problem": "; ".join([first.problem, *map(str, others)]),
        "remedy": "start every rank with the same arguments, and give all machines the same model",
    }
    raise ConfigError(**fields)


def _differences(texts: list[bytes]) -> Iterator[ConfigError]:
    """One error for all ranks that differ from rank 0 in the same way; its key is the first one."""
    first = json.loads(texts[0])
    for text in dict.fromkeys(texts[1:]):
        if text == texts[0]:
            continue
        part, *more = _parts(first, json.loads(text))
        words = [part.problem, *map(str, more[: _SHOWN - 1])]
        words += [f"{len(more) - _SHOWN + 1} more"] if len(more) >= _SHOWN else []
        ranks = [rank for rank, other in enumerate(texts) if other == text]
        place = f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
        yield ConfigError(**part.fields() | {"problem": ", ".join(words), "place": place})


def _parts(first: Any, other: Any) -> Iterator[ConfigError]:
    """What differs between two ranks: the model's files first."""
    (values, digests), (other_values, other_digests) = first, other
    for name in sorted(digests.keys() | other_digests.keys()):
        if digests.get(name) != other_digests.get(name):
            yield ConfigError("differs from that of rank 0", key=f"the model's {name}")
    for name in sorted(values.keys() | other_values.keys()):
        if values.get(name) != other_values.get(name):
            yield ConfigError(
                f"instead of rank 0's {values.get(name)}",
                key=name,
                found=ShownValue(other_values.get(name)),
            )


def spans(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as 1-3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found)
