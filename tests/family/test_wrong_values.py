# .venv/bin/python -m pytest tests/family/test_wrong_values.py
"""Any value of JSON in the place of any field that is read, in config.json and in the files of the
processors of each family: it is refused by the field's name, or right to accept."""

import json
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from megatron_vlm.errors import ConfigError
from megatron_vlm.family import families, read_sizes
from megatron_vlm.family.config_json import _FIELDS, read_counts
from megatron_vlm.family.field_rules import SWITCH
from megatron_vlm.family.video_plan import VideoInfo
from tests.support.error_fields import raises
from tests.support.field_tables import TABLES
from tests.support.suites import full

pytestmark = pytest.mark.newest  # it depends on the versions

Place = tuple[str | int, ...]  # the keys and the indices that lead to a value
NUMBERS: list[Any] = [0, 1, -3, 2.5, 2**40, 10**400, math.nan, math.inf]
VALUES = [None, True, False, *NUMBERS, "0.25", "", [], [1], [None], {}, {"0": 5}]
PARTS = {
    **dict(top=(), text=("text_config",), vision=("vision_config",)),
    **dict(text_rope=("text_config", "rope_parameters")),
    **dict(vision_rope=("vision_config", "rope_parameters")),
}
IMAGES = "do_resize do_rescale do_normalize do_convert_rgb resample rescale_factor patch_size"
# Fields of processors that may be absent.
QWEN = f"{IMAGES} min_pixels max_pixels image_mean image_std temporal_patch_size merge_size".split()
OPTIONAL = {
    "images": QWEN,
    "videos": [*QWEN, *["fps", "min_frames", "max_frames", "num_frames", "cap_pixels_per_frame"]],
}
GEMMA4 = [*IMAGES.split(), "max_soft_tokens", "pooling_kernel_size"]
OPTIONAL_GEMMA4 = {"images": GEMMA4, "videos": [*GEMMA4, "num_frames", "do_sample_frames"]}
TYPES = {"do_": True, "cap_": True, "fps": 2.0, "image_": [0.5], "rescale": 0.5}

# Numbers that are right by themselves and contradict another field, which is named.
OTHERS = [("max_frames", 1), ("num_frames", 2**40), ("longest_edge", 1), ("shortest_edge", 2**40)]
OTHERS += [
    ("num_attention_heads", 1),
    ("vocab_size", 1),
    ("num_hidden_layers", 1),
    ("num_local_experts", 1),
    ("size", {"0": 5}),
]


def is_right(value: Any, own: Any) -> bool:
    """Return whether a value is of the kind of the field's own. Null counts as absent; null as the
    field's own value stands for a whole number."""
    own = 1 if own is None else own
    if value is None or (type(value) is type(own) is bool):
        return True
    if isinstance(value, list) and isinstance(own, list):
        return not own or all(is_right(each, own[0]) for each in value)
    if type(value) in (int, float) and type(own) in (int, float):
        return 0 <= value < 2**64 and not (type(value) is float and type(own) is int)
    return type(value) is type(own) and value != {"0": 5}


def inner(value: Any, place: Place) -> Iterator[Place]:
    """Yield this place and all places in its value."""
    yield place
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from inner(value[key], (*place, key))


def at(config: Any, place: Place) -> Any:
    for key in place:
        config = config[key]
    return config


def check(
    config: dict[str, Any], place: Place, own: Any, value: Any, read: Callable[[Any], object]
) -> None:
    """Put a value in a place, and read it."""
    changed = deepcopy(config)
    at(changed, place[:-1])[place[-1]] = value
    name = str([key for key in place if isinstance(key, str)][-1]).removeprefix("_")
    try:
        read(changed)
    except ConfigError as error:
        assert name in str(error), f"{place}, {value!r}: {error}"
    except Exception as error:
        raise AssertionError(f"{place}, {value!r}") from error
    else:
        assert is_right(value, own), f"{place} is accepted as {value!r}"


def some(places: dict[Place, Any], step: int) -> list[tuple[Place, Any, Any]]:
    """Return every `step`-th pair of a place, with its own value, and another value."""
    return [(place, own, value) for place, own in places.items() for value in VALUES][::step]


@pytest.mark.parametrize(
    ("family", "step"), [("gemma4", 23), ("qwen3_5", 37), *(full(name, 1) for name in TABLES)]
)
def test_config_json(family, step, tiny, tmp_path):
    """Every field that is known, and every value inside one. What transformers would read for
    hours, or with a traceback, is refused before it reads the file."""
    folder, known = tiny(**TABLES[family].tiny), _FIELDS[family]
    config = json.loads((Path(folder) / "config.json").read_text())
    if family == "gemma4":
        config["text_config"]["per_layer_config"] = {"1": {"head_dim": 48}}
    places: dict[Place, Any] = {}
    for name, part in PARTS.items():
        fields, values = getattr(known, name), at(config, part)
        for key in (*fields.carried_out, *fields.fixed):
            absent = fields.fixed.get(
                key, [True if fields.carried_out.get(key) is SWITCH else None]
            )
            places[*part, key] = values.get(key, absent[0])
            if key not in ("text_config", "vision_config"):  # they are parts
                deeper = list(inner(values.get(key), (*part, key)))[1:]
                places |= {place: at(config, place) for place in deeper}

    def read(changed: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        read_counts(str(tmp_path))
        read_sizes(tmp_path)

    read(config)
    for place, own, value in some(places, step):
        if (place[-1], value) not in OTHERS:
            check(config, place, own, value, read)


@pytest.mark.parametrize("kind", ["images", "videos"])
@pytest.mark.parametrize(
    ("family", "step"), [("gemma4", 5), ("qwen3_vl", 11), full("gemma4", 1), full("qwen3_vl", 1)]
)
def test_processors(family, step, kind, tiny, tmp_path):
    """Settings that are accepted make patches, and their errors are no record's."""
    folder, part = Path(tiny(**TABLES[family].tiny)), f"{kind[:-1]}_processor"
    if (path := folder / "processor_config.json").exists():
        config = {part: json.loads(path.read_text())[part]}
    else:
        name = "video_preprocessor" if kind == "videos" else "preprocessor"
        config = {part: json.loads((folder / f"{name}_config.json").read_text())}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    optional = (OPTIONAL_GEMMA4 if family == "gemma4" else OPTIONAL)[kind]
    own_of = {key: next((v for n, v in TYPES.items() if key.startswith(n)), 1) for key in optional}
    own_of |= {key: own for key, own in config[part].items() if key in optional or key == "size"}
    places = {(part, key): own for key, own in own_of.items()}
    for key in own_of.keys() & config[part].keys():
        inside = list(inner(config[part][key], (part, key)))[1:]
        places |= {place: at(config, place) for place in inside}

    def read(changed: Any) -> None:
        (tmp_path / "processor_config.json").write_text(json.dumps(changed))
        reader: Any = getattr(families()[family], kind)(tmp_path, {})
        reader.table()
        if kind == "images":
            grid = reader.grid(70, 50)
            made = reader.patches(PIL.Image.new("RGB", (50, 70))) if math.prod(grid) < 2**12 else []
        else:
            plan = reader.plan(VideoInfo(2**6, 8.0, 70, 50), True, "the video")
            grid, frames = plan.grid, [np.zeros((70, 50, 3), np.uint8)] * len(plan.indices)
            made = reader.patches(frames, plan) if math.prod(grid) < 2**12 else []
        assert all(type(side) is int and side > 0 for side in grid)
        assert len(made) in (0, math.prod(grid))

    read(config)
    for place, own, value in some(places, step):
        if (place[-1], value) not in OTHERS and ("image_mean" not in place or value != -3):
            check(config, place, own, value, read)


@pytest.mark.parametrize(
    ("family", "name", "key"),
    [
        ("gemma4", "processor_config.json", "pooling_kernel_size"),
        ("gemma4", "processor_config.json", "patch_size"),
        ("qwen3_vl", "preprocessor_config.json", "merge_size"),
        ("qwen3_vl", "preprocessor_config.json", "temporal_patch_size"),
    ],
)
def test_patches_are_those_of_the_tower(family, name, key, tiny, tmp_path):
    """Each record would be blamed for the processor's file."""
    folder = Path(tiny(**TABLES[family].tiny))
    config = json.loads((folder / name).read_text())
    prefix = "image_processor." if "image_processor" in config else ""
    config.get("image_processor", config)[key] = 4
    (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with raises(ConfigError, place=str(tmp_path / name), key=prefix + key, found=4):
        families()[family].images(tmp_path, {})


@pytest.mark.parametrize("token", [512, -1, "image_token_id"])
def test_the_token_of_sounds_is_a_third_one_of_the_vocabulary(token, tiny, tmp_path):
    config = json.loads((Path(tiny(**TABLES["gemma4"].tiny)) / "config.json").read_text())
    config["audio_token_id"] = config.get(token, token)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises(ConfigError, problem_has="audio_token_id"):
        read_sizes(tmp_path)


def test_a_kind_of_layer_without_its_rotary_embedding_is_refused(tiny, tmp_path):
    config = json.loads((Path(tiny(**TABLES["gemma4"].tiny)) / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["sliding_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with raises(ConfigError, problem_has="rope_parameters of ['full_attention']"):
        read_sizes(tmp_path)
