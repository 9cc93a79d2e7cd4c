"""The tokenizer of a checkpoint, and protection against texts that spell its special tokens, which
would forge turns or images."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_vlm.data.records.record import Conversation
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family.added_tokens import MAX_TOKENIZER_BYTES, add_to
from megatron_vlm.family.chat_format import ChatFormat
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import UntrustedFile, require_files_in

_REMEDY = "give the tokenizer's files as the checkpoint has them"
_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
_TEXT = ("chat_template.jinja", "merges.txt")
PRIVATE_USE = range(0xE000, 0xF8FF)


def read_tokenizer(model_path: str, add_tokens: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Read a checkpoint's tokenizer, and add the tokens of data.add_tokens, which are new."""
    folder = folder_of(model_path)
    require_files_in(folder)
    for name in (*_JSON, *_TEXT):
        if os.path.lexists(folder / name):
            file = UntrustedFile(str(folder / name), ConfigError, _REMEDY)
            _ = (
                file.json(MAX_TOKENIZER_BYTES).object()
                if name in _JSON
                else file.text(MAX_TOKENIZER_BYTES)
            )
    with UntrustedFile(f"the tokenizer in {folder}", ConfigError, _REMEDY).wrap_errors(
        "cannot be read"
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )
    add_to(tokenizer, add_tokens)
    return tokenizer


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> None:
    """Make special tokens of those with these names that the files do not mark as such, as Hugging
    Face's processor of Gemma 4 does: text would never become them."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    vocab = tokenizer.get_vocab()
    loose: list[Any] = [name for name in names if name not in added and name in vocab]
    if loose:
        tokenizer.add_special_tokens({"extra_special_tokens": loose}, False)


def has_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether each character of a token in the vocabulary stands for a byte, as in Qwen's;
    in Gemma's, "▁" stands for a space, and tokens such as <0x0A> for single bytes."""
    return "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)


_GROUNDING = re.compile(r"<\|(?:box|quad|object_ref)_")  # Qwen2-VL's marks of boxes


def end_ids(tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer in a chat format."""
    return tuple(map(int, tokenizer.convert_tokens_to_ids(list(chat_format.ends))))


def stop_ids(folder: Path, ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end an answer: the chat format's, and transformers' own."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return ends
    file = UntrustedFile(str(path), ConfigError, "give the file as the checkpoint has it, or none")
    eos = file.json(2**20).get("eos_token_id")
    if eos is None:
        return ends
    entries = eos.items() if isinstance(eos.value, list) else [eos]
    return (*ends, *(each.whole() for each in entries))


def split_special_tokens(
    chat: Conversation, special: re.Pattern[str], mode: str
) -> tuple[Conversation, str]:
    """Cut in two every special token that the chat's text spells, or raise a DataError; `mode` is
    data.special_tokens. Return the chat and the character that marks the cuts."""
    contents = [
        (turn.parts, turn.tool_calls, turn.reasoning, turn.name, turn.call_id)
        for turn in chat.turns
    ]
    texts = list(_strings([chat.tools, *contents]))
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise DataError(
            ": the text has half of a surrogate pair, which is not valid Unicode", place=chat.where
        )
    hit = next((m for text in texts if (m := special.search(text))), None)
    if hit is None:
        return chat, ""
    if mode == "refuse":
        raise DataError(
            f": the text contains {hit[0]}, which would forge a turn or an image",
            place=chat.where,
            remedy="set data.special_tokens=escape to take it as plain text"
            if _GROUNDING.match(hit[0]) is None
            else "give boxes as objects, or as text without this mark of older models, such as "
            '{"bbox_2d": [221, 423, 569, 886], "label": "dog"} in thousandths (docs/data.md)',
        )
    whole = "".join(texts)
    mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in whole), None)
    if mark is None:
        raise DataError(
            f": the text contains {hit[0]} and every character from U+E000 to U+F8FF, so "
            "that none is left to escape it with",
            place=chat.where,
            remedy="drop the record",
        )

    def escape(text: str) -> str:
        return special.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    turns = tuple(
        replace(
            turn,
            parts=_map(turn.parts, escape),
            tool_calls=_map(turn.tool_calls, escape),
            reasoning=escape(turn.reasoning),
            name=escape(turn.name),
            call_id=escape(turn.call_id),
        )
        for turn in chat.turns
    )
    return Conversation(chat.where, turns, _map(chat.tools, escape)), mark


def _strings(value: Any) -> list[str]:
    """Return every string in nested tuples, lists and dicts, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for pair in value.items() for s in _strings(list(pair))]
    if isinstance(value, list | tuple):
        return [s for item in value for s in _strings(item)]
    return []


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same nested value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return value
