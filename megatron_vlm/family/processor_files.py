"""Settings of a checkpoint's image and video processors, read from its files. Each value is checked
for its type, and for bounds that keep nonsense from taking hours and memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

_MAX_FILE_BYTES = 2**20  # bytes
_MAX_PIXELS = 2**40  # bounds are often set far beyond any picture


def read_processor(folder: str | Path, kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the file with the settings of the image or the video processor, and its content. As in
    transformers 5, processor_config.json comes before the file with this name."""
    nested, path = Path(folder) / "processor_config.json", Path(folder) / name
    if os.path.lexists(nested):
        part = _file(nested).get(f"{kind}_processor")
        if part is not None and (settings := check_settings(part)):
            return nested, settings
    if not os.path.lexists(path):
        raise ConfigError(
            f"is missing: the checkpoint's {kind} processor settings are needed", place=str(path)
        )
    return path, check_settings(_file(path))


def _file(path: Path) -> JsonField:
    return UntrustedFile(str(path), ConfigError, "give the file as the checkpoint has it").json(
        _MAX_FILE_BYTES
    )


def check_settings(settings: JsonField) -> dict[str, Any]:
    """Return the settings as plain values; any of them may be null."""
    for key, field in settings.object().items():
        if key in _CHECKS and field.value is not None:
            _CHECKS[key](field)
    return dict(settings.value)


def _size(field: JsonField) -> None:
    for key in ("shortest_edge", "longest_edge"):
        if (edge := field.get(key)) is not None:
            edge.whole(1, _MAX_PIXELS)


def _colours(field: JsonField) -> None:
    values = [each.number(-1e9, 1e9) for each in field.items()]
    if len(values) != 3:
        raise field.error("three numbers, one for each colour")


def _deviations(field: JsonField) -> None:
    _colours(field)
    for deviation in field.items():
        deviation.number(1e-9, 1e9)


_CHECKS: dict[str, Callable[[JsonField], object]] = {
    **dict.fromkeys(
        ("patch_size", "temporal_patch_size", "merge_size"), lambda field: field.whole(1, 1024)
    ),
    **dict.fromkeys(("min_pixels", "max_pixels"), lambda field: field.whole(0, _MAX_PIXELS)),
    **dict.fromkeys(("min_frames", "max_frames"), lambda field: field.whole(1, 2**20)),
    "size": _size,
    "image_mean": _colours,
    "image_std": _deviations,
    "rescale_factor": lambda field: field.number(1e-9, 1e9),
    "resample": lambda field: field.whole(0, 5),  # Pillow's filters
    "fps": lambda field: field.number(1e-3, 1e6),
    "max_video_tokens": lambda field: field.whole(1, 2**31),
}
