"""Settings of a checkpoint's image and video processors, read from its files. Each value is checked
for its type, and for bounds that keep nonsense from taking hours and memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.field_rules import SWITCH
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

_MAX_FILE_BYTES = 2**20  # bytes
_MAX_PIXELS = 2**40  # bounds are often set far beyond any picture
_OF_PATCHES = ("patch_size", "temporal_patch_size", "merge_size", "pooling_kernel_size")


def read_processor(folder: str | Path, kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the file with the settings of the image or the video processor, and its content. As in
    transformers 5, processor_config.json comes before the file with this name."""
    path, settings = Path(folder) / "processor_config.json", None
    if os.path.lexists(path):
        settings = _file(path).get(f"{kind}_processor")
    if settings is None or not settings.object():
        path = Path(folder) / name
        if not os.path.lexists(path):
            raise ConfigError(
                f"is missing: the checkpoint's {kind} processor settings are needed",
                place=str(path),
            )
        settings = _file(path)
    return path, check_settings(settings, folder)


def _file(path: Path) -> JsonField:
    return UntrustedFile(str(path), ConfigError, "give the file as the checkpoint has it").json(
        _MAX_FILE_BYTES
    )


def check_settings(settings: JsonField, folder: str | Path) -> dict[str, Any]:
    """Return the settings as plain values; any of them may be null. Patches must be the tower's."""
    config = Path(folder) / "config.json"
    vision = _file(config).get("vision_config") if os.path.lexists(config) else None
    tower = {} if vision is None else vision.object()
    for key, field in settings.object().items():
        if key in _CHECKS and field.value is not None:
            _CHECKS[key](field)
            size = tower.get("spatial_merge_size" if key == "merge_size" else key)
            if key in _OF_PATCHES and size is not None and size.value not in (None, field.value):
                raise field.error(f"{size.value}, as in the vision_config of config.json")
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


def _switch(field: JsonField) -> None:
    if not SWITCH.fits(field.value):
        raise field.error(SWITCH.what)


_CHECKS: dict[str, Callable[[JsonField], object]] = {
    **dict.fromkeys(_OF_PATCHES, lambda field: field.whole(1, 1024)),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), _switch),
    **dict.fromkeys(("do_sample_frames", "cap_pixels_per_frame"), _switch),
    **dict.fromkeys(("min_pixels", "max_pixels"), lambda field: field.whole(0, _MAX_PIXELS)),
    **dict.fromkeys(
        ("min_frames", "max_frames", "num_frames"), lambda field: field.whole(1, 2**20)
    ),
    "size": _size,
    "image_mean": _colours,
    "image_std": _deviations,
    "rescale_factor": lambda field: field.number(1e-9, 1e9),
    "resample": lambda field: field.whole(0, 5),  # Pillow's filters
    "fps": lambda field: field.number(1e-3, 1e6),
    **dict.fromkeys(("max_video_tokens", "max_soft_tokens"), lambda field: field.whole(1, 2**31)),
}
