"""Data: sources and held-out sets, the length of a record, sizes of pictures and videos."""

import json
from typing import Any

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation, is_off
from megatron_vlm.config.data_sources import MESSAGE_FIELDS, RECORD_FIELDS

_TOKEN_PIXELS = 32 * 32  # pixels of a picture that become a token of Qwen3-VL and Qwen3.5
_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".tar")
_TRUNCATION = {
    **{"delete": "drop", "drop": "drop", "error": "error", "raise": "error"},
    **{"left": "image_safe", "right": "image_safe", "middle": "image_safe"},
    **{"truncate": "image_safe", "keep_start": "image_safe", "keep_end": "image_safe"},
}
_LENGTHS = ("cutoff_len", "max_seq_length", "max_length", "sequence_len", "data.max_prompt_length")
_HUB = (
    "names of data sets are those of the Hugging Face Hub here; ms-swift takes them from "
    "ModelScope unless use_hf is true"
)
_SAMPLED = "whole data sets are read here: write the part that you want into a file of its own"


def translate_data(t: Translation) -> None:
    """Set data.train, data.eval and data.split."""
    if t.trainer == "llamafactory":
        _described_sets(t)
    elif t.trainer == "ms-swift":
        _swift_sets(t)
    elif t.trainer == "trl":
        _trl_sets(t)
    elif t.trainer == "axolotl":
        _axolotl_sets(t)
    else:
        _verl_sets(t)
    if "data.train" not in t.lines:
        t.differ("the configuration names no data: give data.train")
    split = t.given("val_size", "split_dataset_ratio", "val_set_size")
    if split is not None and t.number(split) > 0:
        if "data.eval" in t.lines:
            t.differ("data.eval is held out already, so that nothing is split off", split)
        else:
            t.put("data.split", t.number(split), split)
    t.given("val_size", "split_dataset_ratio", "val_set_size")


def _described_sets(t: Translation) -> None:
    """Set the sets that LLaMA-Factory's dataset_info.json describes."""
    folder = t.take("dataset_dir")
    for key, name in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        setting = t.given(name)
        if setting is None:
            continue
        info = f"{str(folder.value if folder else 'data').rstrip('/')}/dataset_info.json"
        sets = [f"{info}:{each}" for each in t.words(setting)]
        origins = [setting, *([folder] if folder else [])]
        t.put(key, sets[0] if len(sets) == 1 else sets, *origins)


def _swift_sets(t: Translation) -> None:
    """Set files, and names such as ORG/NAME:SUBSET#COUNT."""
    has_names, drawn = False, []
    for key, name in (("data.train", "dataset"), ("data.eval", "val_dataset")):
        setting = t.given_path(name)
        if setting is None:
            continue
        sources: list[Any] = []
        for text in setting.value if isinstance(setting.value, list) else [str(setting.value)]:
            path, _, count = str(text).partition("#")
            if count:
                drawn.append(f"{count} of {path}")
            sources += _swift_sources(path)
            has_names = has_names or not path.endswith(_FILES)
        t.put(key, sources[0] if len(sources) == 1 else sources, setting)
    if drawn:
        t.differ(f"samples are drawn there ({', '.join(drawn)}), and {_SAMPLED}")
    hub = t.given("use_hf")
    if has_names and not (hub is not None and t.flag(hub)):
        t.differ(_HUB)
    columns = t.given("columns")
    if columns is not None:
        _put_columns(t, {ours: theirs for theirs, ours in _mapping(t, columns).items()}, columns)


def _swift_sources(path: str) -> list[Any]:
    name, colon, subsets = path.partition(":")
    if not colon or path.endswith(_FILES):
        return [path]
    return [{"path": name, "subset": subset} for subset in subsets.split("/")]


def _trl_sets(t: Translation) -> None:
    name, subset = t.given("dataset_name"), t.given("dataset_config", "dataset_config_name")
    train, test = t.take("dataset_train_split"), t.take("dataset_test_split")
    if name is None:
        return
    stream = t.given("dataset_streaming", "streaming")
    origins = [each for each in (name, subset, train) if each is not None]
    entry: dict[str, Any] = {"path": str(name.value)}
    if subset is not None:
        entry["subset"] = str(subset.value)
    if train is not None and train.value != "train":
        entry["split"] = str(train.value)
    is_plain = len(entry) == 1 and not t.flag(stream)
    streamed = {"streaming": True} if t.flag(stream) else {}
    t.put("data.train", entry["path"] if is_plain else entry | streamed, *origins)
    if t.flag(stream) and t.given("max_steps") is None:
        t.differ("a stream has no length: give train.steps", *([stream] if stream else []))
    strategy = t.given("eval_strategy", "evaluation_strategy")
    if strategy is not None and not is_off(strategy.value) and test is not None:
        t.put("data.eval", entry | {"split": str(test.value)}, name, test)


def _axolotl_sets(t: Translation) -> None:
    for key, name in (("data.train", "datasets"), ("data.eval", "test_datasets")):
        setting = t.given(name)
        if setting is None:
            continue
        if not isinstance(setting.value, list) or not all(
            isinstance(each, dict) and each.get("path") for each in setting.value
        ):
            raise t.source.error(setting, allowed="a list of data sets, each with a path")
        entries = [entry for each in setting.value for entry in _axolotl_entries(t, each, setting)]
        t.put(key, entries[0] if len(entries) == 1 else entries, setting)


def _axolotl_entries(t: Translation, theirs: dict[str, Any], setting: Setting) -> list[Any]:
    """Return our entries for one of axolotl's `datasets`."""
    known = {"path", "type", "split", "name", "data_files", "field_messages", "ds_type"}
    known |= {"message_property_mappings", "message_field_role", "message_field_content", "roles"}
    files = theirs.get("data_files")
    paths = [theirs["path"]] if not files else files if isinstance(files, list) else [files]
    entry: dict[str, Any] = {}
    if (split := theirs.get("split")) not in (None, "train"):
        entry["split"] = str(split)
    if theirs.get("name"):
        entry["subset"] = str(theirs["name"])
    mapping = theirs.get("message_property_mappings") or {}
    columns = {"messages": theirs.get("field_messages")}
    columns["role"] = theirs.get("message_field_role") or mapping.get("role")
    columns["content"] = theirs.get("message_field_content") or mapping.get("content")
    # Conversations with from and value are read without an entry.
    columns = {ours: str(name) for ours, name in columns.items() if name not in (None, ours)}
    if columns and columns != {"messages": "conversations", "role": "from", "content": "value"}:
        entry["columns"] = columns
    if isinstance(theirs.get("roles"), dict):
        entry["roles"] = theirs["roles"]
    rest = sorted(name for name in theirs.keys() - known if not is_off(theirs[name]))
    if rest:
        t.differ(f"{', '.join(rest)} of {theirs['path']} are not taken: see docs/data.md", setting)
    return [{"path": str(path)} | entry if entry else str(path) for path in paths]


def _verl_sets(t: Translation) -> None:
    for key, name in (("data.train", "data.train_files"), ("data.eval", "data.val_files")):
        setting = t.given_path(name)
        if setting is not None:
            paths = t.words(setting)
            t.put(key, paths[0] if len(paths) == 1 else paths, setting)
    columns, origins = {}, []
    for field, name in (("images", "image_key"), ("videos", "video_key"), ("prompt", "prompt_key")):
        setting = t.given(f"data.{name}")
        if setting is not None and setting.value != field:
            columns[field] = str(setting.value)
            origins.append(setting)
    if columns:
        _put_columns(t, columns, *origins)


def _put_columns(t: Translation, columns: dict[str, str], *origins: Setting) -> None:
    known = {ours: name for ours, name in columns.items() if ours in RECORD_FIELDS + MESSAGE_FIELDS}
    if len(known) < len(columns):
        names = ", ".join(columns.keys() - known.keys())
        t.differ(f"{names}: there is no such field, see data.columns in docs/data.md", *origins)
    if known:
        t.put("data.columns", known, *origins)


def _mapping(t: Translation, setting: Setting) -> dict[str, str]:
    value = setting.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise t.source.error(setting, allowed="a JSON object of names")
    return value


def translate_lengths(t: Translation) -> None:
    """Set data.max_tokens and what becomes of longer records."""
    setting = (t.given("max_prompt_length") if t.is_rl else None) or t.take(*_LENGTHS)
    if setting is not None and t.number(setting) > 0:
        t.put("data.max_tokens", t.whole(setting), setting)
    else:
        t.differ("data.max_tokens=8192 is the limit here, where none is set there")
    how = t.take("truncation_strategy", "excess_length_strategy", "data.truncation")
    how = how or t.given("truncation_mode")
    overlong = t.given("data.filter_overlong_prompts")
    if overlong is not None and t.flag(overlong):
        t.put("data.truncation", "drop", overlong)
    elif how is not None:
        t.put("data.truncation", t.choose(how, _TRUNCATION), how)
    else:
        note = f"{t.title} cuts longer records"
        t.put("data.truncation", "image_safe", note=f"{note}; here never within an image")


def translate_media(t: Translation) -> None:
    """Set the bounds of pictures and videos. ms-swift reads them from the environment."""
    for bound in ("max", "min"):
        tokens = t.variable(f"IMAGE_{bound.upper()}_TOKEN_NUM")
        pixels = t.variable(f"{bound.upper()}_PIXELS") or t.take(
            f"image_{bound}_pixels", f"{bound}_pixels"
        )
        if pixels is not None:
            t.put(f"data.{bound}_pixels", t.whole(pixels), pixels)
        elif tokens is not None:
            note = f"{_TOKEN_PIXELS} pixels of a token"
            t.put(f"data.{bound}_pixels", t.whole(tokens) * _TOKEN_PIXELS, tokens, note=note)
    fps = t.variable("FPS") or t.take("video_fps", "fps")
    if fps is not None:
        t.put("data.video_fps", t.number(fps), fps)
    for bound, name in (("max", "video_maxlen"), ("min", "video_minlen")):
        frames = t.variable(f"FPS_{bound.upper()}_FRAMES") or t.take(name, f"fps_{bound}_frames")
        if frames is not None:
            t.put(f"data.video_{bound}_frames", t.whole(frames), frames)
    for name in ("VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM"):
        if (setting := t.variable(name)) is not None:
            t.differ(
                "the bound of a frame there; data.video_max_pixels counts all frames of a video, "
                "and beside a video in a record max_pixels is of each frame",
                setting,
            )


def translate_supervision(t: Translation) -> None:
    """Set which messages are learnt, and say where another part of a chat is."""
    thinking = t.given("enable_thinking")
    if thinking is not None:
        t.put("data.template_kwargs", {"enable_thinking": t.flag(thinking)}, thinking)
    everything = t.given("train_on_prompt", "train_on_inputs")
    scale, history = t.given("loss_scale"), t.given("mask_history")
    only = t.take("assistant_only_loss") if t.method == "sft" else None
    if everything is not None and t.flag(everything):
        t.put("data.train_on", ["system", "user", "assistant", "tool"], everything)
    elif (history is not None and t.flag(history)) or (scale and scale.value == "last_round"):
        origins = [each for each in (history, scale) if each is not None]
        t.put("data.train_on", "last_assistant", *origins)
    elif scale is not None and scale.value != "default":
        t.differ("every message of data.train_on has the weight 1, or its `weight`", scale)
    elif only is not None and not t.flag(only):
        t.differ(
            "only messages of the assistant are learnt, where TRL learns whole chats; "
            "data.train_on=[system,user,assistant] learns the others, too",
            only,
        )
