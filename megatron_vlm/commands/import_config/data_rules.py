"""Data: held-out parts, columns, the length of a record, and sizes of pictures and videos."""

from collections.abc import Callable

from megatron_vlm.commands.import_config.source_settings import Setting
from megatron_vlm.commands.import_config.translation import Translation
from megatron_vlm.config.data_sources import MESSAGE_FIELDS, RECORD_FIELDS
from megatron_vlm.errors import show_value

_TRUNCATION = {
    **{"delete": "drop", "drop": "drop", "error": "error", "raise": "error"},
    **{"left": "image_safe", "right": "image_safe", "middle": "image_safe"},
    **{"truncate": "image_safe", "keep_start": "image_safe", "keep_end": "image_safe"},
}
_CUT_ELSEWHERE = ("left", "middle", "keep_end")  # not at the end of a record


def translate_split(t: Translation) -> None:
    """Set data.split, and say where data is missing."""
    if "data.train" not in t.lines:
        t.differ("the configuration names no data: give data.train")
    split = t.positive("val_size")
    if split is not None and "data.eval" in t.lines:
        t.differ("data.eval is held out already, so that nothing is split off", split)
    else:
        t.copy_setting("data.split", split)


def put_sets(t: Translation, train: str, held_out: str, find: Callable[[Setting], list]) -> None:
    """Set data.train and data.eval to what `find` makes of their settings."""
    for key, name in (("data.train", train), ("data.eval", held_out)):
        if (setting := t.given(name)) is not None:
            sources = find(setting)
            t.put(key, sources[0] if len(sources) == 1 else sources, setting)


def put_columns(t: Translation, columns: dict[str, str], *origins: Setting) -> None:
    """Set data.columns, and say which fields do not exist here."""
    fields = RECORD_FIELDS + MESSAGE_FIELDS
    known = {our_name: name for our_name, name in columns.items() if our_name in fields}
    others = [show_value(ours, name) for ours, name in columns.items() if ours not in known]
    if unknown := ", ".join(others):
        t.differ(f"{unknown}: there is no such field, see data.columns in docs/data.md", *origins)
    if known:
        t.put("data.columns", known, *origins)


def translate_lengths(t: Translation) -> None:
    """Set data.max_tokens and what becomes of longer records."""
    setting = (t.given("max_prompt_length") if t.is_rl else None) or t.take("max_length")
    if setting is not None and t.number(setting) > 0:
        t.copy_setting("data.max_tokens", setting)
    else:
        t.differ("data.max_tokens=8192 is the limit here, where none is set there")
    how, overlong = t.take("truncation_strategy"), t.switched_on("data.filter_overlong_prompts")
    if overlong is not None or t.method == "reward":  # the end is read
        t.put("data.truncation", "drop", overlong, how)
    elif how is not None:
        action = t.choose(how, _TRUNCATION)
        t.put("data.truncation", action, how)
        if t.is_rl and action == "image_safe":
            t.differ("a longer prompt is left out here, and never cut", how)
        elif how.value in _CUT_ELSEWHERE:
            t.differ("a longer record loses its end here, and never a part of an image", how)
    elif not t.is_rl:
        note = f"{t.trainer.title} cuts longer records; here never within an image"
        t.put("data.truncation", "image_safe", note=note)


def translate_new_tokens(t: Translation) -> None:
    """Set data.add_tokens, whose tokens may be special or not."""
    named = ("add_tokens", "add_special_tokens", "new_special_tokens", "tokens")
    given = [setting for name in named if (setting := t.given(name)) is not None]
    words = [word for setting in given for word in t.words(setting)]
    if file := next((word for word in words if word.endswith(".txt")), ""):
        raise t.source.error(given[-1], f"names the file {file}", remedy="write its tokens instead")
    if words:
        t.put("data.add_tokens", words, *given)
    t.skip("resize_vocab")


def translate_thinking(t: Translation) -> None:
    """Set the variable of the chat template that turns thinking on."""
    thinking = t.given("enable_thinking")
    if thinking is not None:
        t.put("data.template_kwargs", {"enable_thinking": t.flag(thinking)}, thinking)
