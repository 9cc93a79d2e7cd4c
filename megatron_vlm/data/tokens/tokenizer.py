"""The tokenizer of a checkpoint, with the chat template that belongs to it."""

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_vlm.errors import ConfigError
from megatron_vlm.family.added_tokens import MAX_TOKENIZER_BYTES, add_to
from megatron_vlm.io.hub import folder_of
from megatron_vlm.io.untrusted import UntrustedFile, require_files_in

_REMEDY = "give the tokenizer's files as the checkpoint has them"
_JSON = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")
_TEXT = ("chat_template.jinja", "merges.txt")


def read_tokenizer(model_path: str, add_tokens: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder, or of a name on the Hub, and add the tokens of
    data.add_tokens, which `find_new_tokens` has verified to be new."""
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


def stop_ids(folder: Path, end: int) -> tuple[int, ...]:
    """Return the tokens that end an answer: <|im_end|>, and those at which transformers stops."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return (end,)
    file = UntrustedFile(str(path), ConfigError, "give the file as the checkpoint has it, or none")
    eos = file.json(2**20).get("eos_token_id")
    if eos is None:
        return (end,)
    entries = eos.items() if isinstance(eos.value, list) else [eos]
    return (end, *(each.whole() for each in entries))
