"""Number of a record that depends on its content alone, such as for drawing held-out records."""

import hashlib
import json
from collections.abc import Collection
from typing import Any

import PIL.Image

from megatron_vlm.data.records.keys import METADATA


def digest_record(raw: Any, ignored: Collection[str]) -> int:
    """Return a signed number of 64 bits. Keys that are metadata or ignored do not count, unless the
    record has no others."""
    if isinstance(raw, dict):
        raw = {k: v for k, v in raw.items() if k not in METADATA and k not in ignored} or raw
    text = json.dumps(_plain(raw), sort_keys=True)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _plain(value: Any) -> Any:
    """Return a value of a record as JSON has it, with digests in place of pictures."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, PIL.Image.Image):
        value = repr((value.mode, value.size)).encode() + value.tobytes()
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value if isinstance(value, bool | int | float | str | None) else str(value)
