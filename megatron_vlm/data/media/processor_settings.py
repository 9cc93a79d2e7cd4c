"""Settings of a checkpoint's image and video processors, read from its files. Each value is checked
for its type, and for bounds that keep nonsense from taking hours and memory."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import JsonField, UntrustedFile

_MAX_FILE_BYTES = 2**20  # bytes
_MAX_PIXELS = 2**40  # bounds are often set far beyond any picture
# Any other value than true would make other patches, and is refused.
_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames")
_FIXED = {"resample": 3, "num_frames": None, **dict.fromkeys(_ON, True)}


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


@dataclass(frozen=True)
class VideoSettings:
    """The settings in video_preprocessor_config.json; the defaults are Hugging Face's."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 128 * 32 * 32  # in all resized frames of a video together
    max_pixels: int = 768 * 32 * 32
    fps: float = 2  # frames to take per second
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768  # limit per frame, with cap_pixels_per_frame
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    @classmethod
    def from_checkpoint(
        cls, folder: str | Path, chosen: Mapping[str, float | None] = MappingProxyType({})
    ) -> "VideoSettings":
        """Read the checkpoint's settings, from the files that Hugging Face reads, in its order.
        Values in `chosen` that are not None replace them."""
        path, raw = read_processor(folder, "video", "video_preprocessor_config.json")
        for key, needed in _FIXED.items():
            if raw.get(key, needed) != needed:
                raise ConfigError(
                    "is not supported", place=str(path), key=key, found=raw[key], allowed=(needed,)
                )
        values = {item.name: raw[item.name] for item in fields(cls) if item.name in raw}
        # Hugging Face reads the two bounds from size alone, and ignores other fields for them.
        size = raw.get("size") or {"shortest_edge": cls.min_pixels, "longest_edge": cls.max_pixels}
        values |= {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        values["cap_pixels_per_frame"] = bool(raw.get("cap_pixels_per_frame"))
        for key, value in values.items():
            if value is None:
                raise ConfigError(
                    f"has no value (size: {size})", place=str(path), key=key, allowed="a value"
                )
            values[key] = tuple(value) if isinstance(value, list) else value
        values |= {key: value for key, value in chosen.items() if value is not None}
        settings = cls(**values)
        settings._check(chosen, path)
        return settings

    def _check(self, chosen: Mapping[str, float | None], path: Path) -> None:
        """Refuse bounds that contradict each other. A minimum of frames above the maximum is no
        contradiction where the minimum is the checkpoint's: Hugging Face takes the maximum."""
        for name in ("pixels", "frames"):
            lower, upper = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if lower > upper and (name == "pixels" or chosen.get("min_frames")):
                raise ConfigError(
                    f"is above data.video.max_{name}={upper}",
                    key=f"data.video.min_{name}",
                    found=lower,
                    remedy=f"set both, since one that is null has the value in {path}",
                )
