"""What must be the same on all ranks is compared before any of it is used."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_vlm.config.schema import Config, get, leaves
from megatron_vlm.distributed.messages import all_gather_bytes
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
    texts = all_gather_bytes(mine, None, device)
    raise ConfigError(
        f"{'; '.join(_differences(texts))}; start every rank with the same arguments, and give "
        "all machines the same model"
    )


def _differences(texts: list[bytes]) -> Iterator[str]:
    """One sentence for all ranks that differ from rank 0 in the same way."""
    first = json.loads(texts[0])
    for text in dict.fromkeys(texts[1:]):
        if text == texts[0]:
            continue
        parts = list(_parts(first, json.loads(text)))
        if len(parts) > _SHOWN:
            parts = [*parts[:_SHOWN], f"{len(parts) - _SHOWN} more"]
        ranks = [rank for rank, other in enumerate(texts) if other == text]
        who = f"ranks {spans(ranks)} differ" if len(ranks) > 1 else f"rank {ranks[0]} differs"
        yield f"{who} from rank 0: {', '.join(parts)}"


def _parts(first: Any, other: Any) -> Iterator[str]:
    """What differs between two ranks: the model's files first."""
    (values, digests), (other_values, other_digests) = first, other
    for name in sorted(digests.keys() | other_digests.keys()):
        if digests.get(name) != other_digests.get(name):
            yield f"the model's {name}"
    for name in sorted(values.keys() | other_values.keys()):
        if values.get(name) != other_values.get(name):
            yield f"{name}={other_values.get(name)} instead of {values.get(name)}"


def spans(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as 1-3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in found)
