# .venv/bin/python -m pytest tests/data/test_row_maker.py
"""Rows that a service makes without a configuration: equal to the data path and Hugging Face."""

import base64
import io
import json
import shutil
from dataclasses import fields
from functools import partial

import PIL.Image
import pytest
import torch

from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError, DataError
from tests.support.chats import (
    CHATS,
    check_continued,
    data_uri,
    hf_encode,
    hf_processor,
    image,
    picture,
    say,
    text,
)
from tests.support.error_fields import raises
from tests.support.sets import open_set, write_set

pytestmark = pytest.mark.newest  # it depends on the versions


@pytest.fixture
def maker(tiny):
    return RowMaker(tiny())


def same(one: Row, other: Row) -> bool:
    for item in (each for each in fields(Row) if each.compare):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            return False
    return True


def asking(source) -> dict:
    part = {"type": "image", "image": source}
    return {"messages": [say("user", part, text("What is it?")), say("assistant", "Red.")]}


def test_rows_are_those_of_the_data_path(tiny, tmp_path):
    data = open_set(write_set(tmp_path), tiny(), None)
    maker = RowMaker(tiny(), image_root=str(tmp_path))
    for sample in range(len(data.indexes[0])):
        assert same(maker.row(data.raw((0, sample))), data.row((0, sample)))


@pytest.mark.parametrize("name", CHATS)
def test_a_prompt_ends_where_the_answer_begins(name, maker, tiny):
    processor = hf_processor(tiny())
    check_continued(maker.reader, CHATS[name], partial(hf_encode, processor, CHATS[name]))
    row = maker.row(CHATS[name], prompt=True)
    opened = hf_encode(processor, CHATS[name], add_generation_prompt=True)
    assert torch.equal(row.ids_S, opened["input_ids"][0])
    assert (row.labels_S == IGNORE).all()
    assert processor.tokenizer.decode(row.ids_S).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_picture_may_come_in_any_form(maker, tiny, tmp_path):
    picture(100, 60).save(tmp_path / "a.png")
    file = (tmp_path / "a.png").read_bytes()
    expected = maker.row(asking(data_uri(100, 60)))
    for source in (picture(100, 60), PIL.Image.open(io.BytesIO(file)), file):
        assert same(maker.row(asking(source)), expected)
    inside = RowMaker(tiny(), image_root=str(tmp_path))
    assert same(inside.row(asking("a.png")), expected)


def test_token_ids_with_images_between(maker):
    """A chat's own tokens and pictures, sent as chunks, give the row of the chat."""
    chat = {"messages": [say("user", image(64, 64), text("Which?")), say("assistant", "red")]}
    expected = maker.row(chat)
    ids, trained = expected.ids_S.tolist(), (expected.labels_S != IGNORE).tolist()
    pad = maker.reader.tokens.image_id
    first, last = ids.index(pad), len(ids) - ids[::-1].index(pad)
    assert last - first == 4
    shown = {"data": base64.b64decode(data_uri(64, 64).split(",")[1]), "expected_tokens": 4}
    record = {"chunks": [{"tokens": ids[:first]}, shown, {"tokens": ids[last:]}]}
    assert same(maker.row({**record, "mask": [int(t) for t in trained]}), expected)
    prompt = maker.row(record, prompt=True)
    assert prompt.ids_S.tolist() == ids and (prompt.labels_S == IGNORE).all()
    with raises(DataError, place="the record: chunk 1", key="expected_tokens", found=5):
        maker.row({"chunks": [record["chunks"][0], {**shown, "expected_tokens": 5}]})


@pytest.mark.parametrize("source", ["a.png", "/etc/hostname", "file:///etc/hostname"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_local_file_is_opened_only_inside_a_root(kind, source, maker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(64, 64).save("a.png")
    record = {"messages": [say("user", {"type": kind, kind: source}), say("assistant", "a")]}
    with pytest.raises(DataError, match=r"is a local file, and no folder is open to records"):
        maker.row(record)
    with pytest.raises(DataError, match=r"is a local file, and no folder is open to records"):
        maker.row({"chunks": [{"location": source}, {"tokens": [1]}]})


def test_the_network_is_closed_by_default(maker):
    with pytest.raises(DataError, match="is on the network"):
        maker.row(asking("http://example.org/a.png"))


def test_settings_are_those_of_the_configuration(tiny):
    messages = {"messages": [say("user", "a"), say("assistant", "b"), say("assistant", "c")]}
    for train_on, learnt in (
        ("last_assistant", "c<|im_end|>"),
        ("all_assistant", "b<|im_end|>c<|im_end|>"),
    ):
        maker = RowMaker(tiny(), train_on=train_on)
        labels = maker.row(messages).labels_S
        decode = maker.reader.encoder.renderer.tokenizer.decode
        assert decode(labels[labels != IGNORE]) == learnt
    with raises(DataError, key="data.max_tokens", found=4):
        RowMaker(tiny(), max_tokens=4).row(messages, prompt=True)
    with raises(DataError, place="the record", remedy_has="prompt=True"):
        RowMaker(tiny(), train_on="record").row(messages)
    with raises(ConfigError, key="data.truncation", found="cut"):
        RowMaker(tiny(), truncation="cut")


def test_a_token_that_the_model_has_no_row_for_is_refused(tiny, tmp_path):
    """Such tokens exist after transformers' add_tokens if nobody enlarged the model."""
    model = shutil.copytree(tiny(), tmp_path / "model")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"] += [
        last | {"id": id, "content": f"<<{id}>>", "special": False}
        for id in range(last["id"] + 1, 514)
    ]
    file.write_text(json.dumps(content))
    maker = RowMaker(str(model), max_tokens=512)
    answer = {"role": "assistant", "content": "b"}
    maker.row({"messages": [{"role": "user", "content": "<<511>>"}, answer]})
    with raises(DataError, found=512, allowed=range(512)):
        maker.row({"messages": [{"role": "user", "content": "<<512>>"}, answer]})
