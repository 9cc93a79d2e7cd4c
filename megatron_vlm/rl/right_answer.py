"""The right answer of a record, as people want to see it beside the sampled ones."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_vlm.data.records.record import Conversation
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.errors import DataError

_KEYS = ("answer", "solution", "ground_truth")  # in data for GRPO, from which a reward takes it


def right_answer(record: Mapping[str, Any], where: str, reader: Reader) -> str | None:
    """Return the record's answer or solution, or else the answer at its end, which its prompt
    leaves out. Return None if it has neither."""
    for key in _KEYS:
        value = record.get(key)
        if isinstance(value, str | bool | int | float):
            return str(value)
        if value:
            return json.dumps(value, ensure_ascii=False, default=str)
    try:
        parsed = replace(reader, kind="chat").parse(record, where)
    except DataError:  # only its prompt is in a form that is read
        return None
    if not isinstance(parsed, Conversation) or parsed.turns[-1].role != "assistant":
        return None
    return "".join(part for part in parsed.turns[-1].parts if isinstance(part, str))
