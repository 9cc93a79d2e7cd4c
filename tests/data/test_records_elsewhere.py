# .venv/bin/python -m pytest tests/data/test_records_elsewhere.py
"""Records in the forms of other projects' documentation are read as those projects mean them, or
refused by name. `records_elsewhere.jsonl` has a record in each form and what is expected of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.records.record import Conversation, Image, Video
from megatron_vlm.data.tokens.chat_renderer import RenderedMessage, choose_trained
from megatron_vlm.errors import DataError

TABLE = Path(__file__).parent / "records_elsewhere.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text().splitlines()]
READ = [case for case in CASES if "refused" not in case]
REFUSED = [case for case in CASES if "refused" in case]


def name_of(case: dict[str, Any]) -> str:
    return f"{case['project']}: {case['name']}"


def test_the_table_has_enough_and_each_once():
    assert len(READ) >= 85 and len({name_of(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", READ, ids=name_of)
def test_a_record_is_read_as_its_project_means_it(case):
    record = parse_record(case["record"], "x:1", prompts_only=case.get("rl", False))
    assert isinstance(record, Conversation)
    assert [turn.role for turn in record.turns] == case["roles"]
    assert len(record.media(Image)) == case["images"]
    assert len(record.media(Video)) == case["videos"]
    messages = [RenderedMessage(turn.role, 0, 1, [turn]) for turn in record.turns]
    picked = choose_trained(messages, case.get("settings", {}).get("train_on", "all_assistant"))
    trained = [i for i, m in enumerate(messages) if picked[i] and m.weight != 0]
    assert trained == case["trained"]


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_a_record_is_refused_by_name(case):
    with pytest.raises(DataError) as error:
        parse_record(case["record"], "x:1")
    assert case["refused"] in str(error.value)
