"""Tokens that a run adds to a checkpoint's vocabulary (data.add_tokens), and what grows with them.

They follow the existing tokens, so they take the spare rows of the embedding first. They are
ordinary tokens: text that spells one becomes this token, and decoded answers show it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vlm.errors import ConfigError
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import UntrustedFile, what_is_at

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

MAX_TOKENIZER_BYTES = 2**27  # limit of tokenizer.json, the largest of its files; Qwen's has 11 MB
_TOKENIZER, _SETTINGS, _OLDER = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
# Qwen adds its own ordinary tokens, such as <tool_call>, in this way: they match the text as it was
# written.
_KIND = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@dataclass(frozen=True)
class NewTokens:
    """The added tokens, and the id of the first; the others follow. All lower ids existed before:
    the new rows are the mean of their rows."""

    names: tuple[str, ...]
    first: int

    def vocab(self, before: int) -> int:
        """Return the rows of an embedding that had `before` rows: only as many as are needed."""
        return max(before, self.first + len(self.names))

    def grow(self, config: "PretrainedConfig") -> None:
        """Make room in the config that transformers has read."""
        text = config.text_config
        if self.first > text.vocab_size:
            raise ConfigError(
                f": the tokenizer has {self.first} tokens already, and the vocab_size in "
                f"config.json is {text.vocab_size}",
                key="data.add_tokens",
                allowed="a checkpoint whose files belong together",
            )
        text.vocab_size = self.vocab(text.vocab_size)

    def write(self, folder: Path) -> None:
        """Add the tokens to the files of a copy of the checkpoint."""
        ids = dict(zip(self.names, range(self.first, self.first + len(self.names)), strict=True))
        with changed_json(folder / "config.json") as config:
            text = config["text_config"]
            text["vocab_size"] = self.vocab(text["vocab_size"])
        with changed_json(folder / _TOKENIZER) as tokenizer:
            entries = [{"id": i, "content": name} | _KIND for name, i in ids.items()]
            tokenizer["added_tokens"] += entries
        # Two files of older versions list the tokens again.
        listing, older = folder / _SETTINGS, folder / _OLDER
        if listing.is_file() and "added_tokens_decoder" in json.loads(listing.read_text("utf-8")):
            with changed_json(listing) as settings:
                settings["added_tokens_decoder"] |= {
                    str(i): {"content": name} | _KIND for name, i in ids.items()
                }
        if older.is_file():
            with changed_json(older) as tokens:
                tokens |= ids


def find_new_tokens(model: str | Path, names: Sequence[str]) -> NewTokens | None:
    """Return the tokens that data.add_tokens adds to a checkpoint, a folder or a name on the Hub;
    None if it adds no token. Tokens that the tokenizer already has are refused. This needs no
    torch."""
    if not names:
        return None
    from tokenizers import Tokenizer

    file = folder_of(model) / _TOKENIZER
    if what_is_at(file) == "nothing":
        raise ConfigError(
            f": {file.parent} has no {_TOKENIZER}",
            key="data.add_tokens",
            remedy="load its tokenizer in transformers and save it with save_pretrained, which "
            "writes one",
        )
    outside = UntrustedFile(
        str(file), ConfigError, "data.add_tokens needs the checkpoint's own file"
    )
    text = outside.text(MAX_TOKENIZER_BYTES)
    with outside.wrap_errors("cannot be read"):
        tokenizer = Tokenizer.from_str(text)
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    for name in names:
        encoded = tokenizer.encode(name, add_special_tokens=False)
        if tokenizer.token_to_id(name) is not None or len(encoded) == 1:
            raise ConfigError(
                f"is a token of {file} already",
                key="data.add_tokens",
                found=name,
                remedy="leave it out",
            )
        if (part := next((token for token in special if token in name), None)) is not None:
            raise ConfigError(
                f"contains the special token {part}, which would be read as part of the new one",
                key="data.add_tokens",
                found=name,
                allowed="another name",
            )
    first = max(tokenizer.get_vocab().values()) + 1
    _add(tokenizer, names)
    ids = [tokenizer.token_to_id(name) for name in names]
    if ids != list(range(first, first + len(names))):
        raise ConfigError(
            f": the ids in {file} have gaps: {first - 1} is the highest, and {names[0]!r} would "
            f"get {ids[0]}",
            key="data.add_tokens",
            allowed="a tokenizer whose ids follow each other",
        )
    return NewTokens(tuple(names), first)


def add_to(tokenizer: "PreTrainedTokenizerBase", names: Sequence[str]) -> None:
    """Add tokens, which must be new, to a checkpoint's tokenizer."""
    if names:
        first = max(tokenizer.get_vocab().values()) + 1
        _add(tokenizer, names)
        ids = tokenizer.convert_tokens_to_ids(list(names))
        assert ids == list(range(first, first + len(names))), (first, ids)


def _add(tokenizer: Any, names: Sequence[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(name, **_KIND) for name in names])


@contextmanager
def changed_json(file: Path) -> Iterator[dict[str, Any]]:
    """Give the object in a JSON file to be changed, and write it in transformers' form."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    yield content
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    file.write_text(text, encoding="utf-8")
