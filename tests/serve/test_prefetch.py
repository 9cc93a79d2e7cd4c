# .venv/bin/python -m pytest tests/serve/test_prefetch.py
"""Requests that are read before their turn.

Their pixels are limited, and a refused one keeps no data. Requests that cannot fit into memory are
refused. A process that dies of a request has made an attempt.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vlm.config.schema import Config, DataConfig, ParallelConfig, TrainConfig
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import DataError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.serve.journal import journal as journal_module
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import SAMPLE, Call, Failure, Model
from megatron_vlm.serve.model_calls import check_fits
from megatron_vlm.serve.protocol.payloads import ForwardBackward, RequestError
from megatron_vlm.serve.protocol.requests import read_forward_backward
from megatron_vlm.serve.request_prefetch import RequestPrefetcher
from megatron_vlm.serve.requests_as_rows import RowReader, read_batch
from megatron_vlm.serve.sample_calls import SampleAsk, SampleBounds, StopWords
from tests.support.error_fields import raises
from tests.support.fake_calls import CallJournal, opened
from tests.support.serve_requests import Picture, around, picture, request

PIXELS = 2**16  # a picture of 256 x 256, which needs no resizing


@pytest.fixture(scope="module")
def reader(tiny) -> RowReader:
    path = tiny()
    return RowReader(Config(), path, HFCheckpoint(path, ()).sizes)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with opened(tmp_path) as journal:
        yield journal


def prefetcher(journal: Journal, reader: RowReader, most: int) -> RequestPrefetcher:
    stops = StopWords((0,), lambda text: None)
    return RequestPrefetcher(journal, reader, stops, SampleBounds(4, reader.longest), 1, most)


def asample(seq: int, shown: Sequence[Picture]) -> Call:
    def chunks(one: Picture) -> list[Any]:
        before, _, after = around(one)
        data = base64.b64encode(one.data).decode()
        text = [{"type": "encoded_text", "tokens": each} for each in (before, after)]
        return [text[0], {"type": "image", "data": data, "format": one.format}, text[1]]

    prompt = {"chunks": [chunk for one in shown for chunk in chunks(one)]}
    body = {"sampling_session_id": "s", "seq_id": seq, "prompt": prompt, "num_samples": 1}
    body |= {"sampling_params": {"max_tokens": 1}}
    return Call(SAMPLE, "s", seq, "key", json.dumps(body).encode())


def cut(shown: Picture) -> Picture:
    """Return the picture with a correct header and incomplete pixels."""
    return replace(shown, data=shown.data[: len(shown.data) // 2])


def parsed(data: Sequence[Any]) -> ForwardBackward:
    return read_forward_backward(request("m", 1, data, "cross_entropy"))


def frames_of(error: BaseException | None) -> list[Any]:
    frames = []
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return frames


def test_pixels_of_a_request_are_counted_before_one_is_decoded(reader):
    inputs = {"target_tokens": [0] * 66}
    data = [(around(cut(picture(256, 256, seed))), inputs) for seed in range(3)]
    few = RowReader.for_request(reader, lambda pixels: None)
    few.most_pixels = 2 * PIXELS
    problem = f"{3 * PIXELS} pixels, and limit pixels is {2 * PIXELS}"
    with raises(RequestError, key="data[2].model_input", problem_has=problem):
        read_batch(parsed(data), few, 1)
    with pytest.raises(DataError, match=r"data\[0\].*cannot be decoded"):
        read_batch(parsed(data[:2]), few, 1)
    long = [([[1] * (reader.longest + 1)], inputs)]
    with raises(RequestError, key="data[1].model_input", problem_has=reader.longest):
        read_batch(parsed(data[:1] + long), few, 1)


def test_pictures_are_resized_as_the_configuration_says(tiny, reader):
    path, data = tiny(), DataConfig(max_pixels=PIXELS // 4)
    small = RowReader(replace(Config(), data=data), path, HFCheckpoint(path, ()).sizes)
    assert reader.images.grid(256, 256) == (1, 16, 16) and small.images.grid(256, 256) == (1, 8, 8)


def test_what_waits_has_few_pixels_and_an_error_none(journal, reader):
    shown = picture(256, 256, 0)
    for seq, pictures in enumerate([[shown] * 2, [shown] * 2, [shown, cut(shown)], []]):
        journal.accept(asample(seq, pictures or [picture(32, 32, 1)]))
    first, second, broken, small = journal.next_calls()
    fetcher = prefetcher(journal, reader, 4 * PIXELS)
    fetcher.begin([first, broken])
    assert isinstance(fetcher.look(first), SampleAsk)
    assert fetcher.look(broken) is None and fetcher.look(second) is None  # no room for another two
    error = fetcher.futures[broken.request_id].exception()
    values = [value for frame in frames_of(error) for value in frame.f_locals.values()]
    assert isinstance(error, DataError)
    assert not any(isinstance(value, list | np.ndarray | bytes) for value in values), values
    assert len(fetcher.take(second).prompt.pixel_values_PC) == 512  # it is read in its turn
    fetcher.take(first)
    with pytest.raises(DataError, match="cannot be decoded"):
        fetcher.take(broken)
    fetcher.begin([second, small])
    assert (
        fetcher.look(second)
        and fetcher.look(small)
        and sum(fetcher.pixels.values()) == 2 * PIXELS + 32 * 32
    )
    fetcher.close()


def test_a_training_request_is_parsed_once_until_a_restart(tmp_path, reader, monkeypatch):
    """Its body is no request here, so that whoever parses it again meets an error."""
    monkeypatch.setattr(journal_module, "MAX_PARSED_BYTES", 600)
    shape = {"target_tokens": [1] * 20}  # 20 tokens of 4 bytes, 20 targets of 8
    call = Call("forward_backward", "m", 1, "key", b"?", True, parsed=parsed([([[1] * 20], shape)]))
    assert call.parsed is not None and call.parsed.size == 240
    with opened(tmp_path) as journal:
        session = journal.create_session("key", {}, None)
        model = Model("m", session, "base", 0)
        journal.accept(Call("create_model", session, 0, "key", model=model))
        names = [journal.accept(replace(call, seq=seq)).request_id for seq in (1, 2, 3)]
        calls = [replace(call, request_id=name, parsed=None) for name in names]
        fetcher = prefetcher(journal, reader, PIXELS)
        assert fetcher.take(calls[0]).tokens == 20
        with raises(RequestError, problem_has="is not a protobuf message"):
            fetcher.take(calls[2])  # found no room
        journal.finish(names[1], Failure("cancelled"))
        with raises(RequestError, problem_has="no longer kept"):
            fetcher.take(calls[1])
    with opened(tmp_path) as journal, raises(RequestError, problem_has="is not a protobuf message"):
        prefetcher(journal, reader, PIXELS).take(calls[0])


def test_datums_that_cannot_fit_into_memory_are_refused(tiny):
    sizes = HFCheckpoint(tiny(), ()).sizes
    dims = ParallelDims.create(ParallelConfig(), 1, sizes.text.num_layers)
    ids_S = torch.ones(3000, dtype=torch.long)
    rows = [Row(ids_S, ids_S, targets=ids_S[:, None])] * 64
    alone, together = (Config(train=TrainConfig(micro_batch_size=size)) for size in (1, 64))
    check_fits(rows, alone, sizes, dims, 4, 2**27)
    with raises(RequestError, key="data", problem_has="192000 tokens (64 datums"):
        check_fits(rows, together, sizes, dims, 4, 2**27)
    check_fits(rows[:1], together, sizes, dims, 4, 2**27)
    check_fits(rows, together, sizes, dims, 4, 2**34)


def test_a_process_that_dies_of_what_it_reads_has_made_an_attempt(tmp_path):
    journal = CallJournal(tmp_path)
    for seq in range(2):
        journal.accept(asample(seq, [picture(32, 32, 1)]))
    deadly, other = journal.next_calls()
    with journal.reads.record_attempt(other.request_id):
        pass
    died: list[Any] = []  # references keep the attempts open
    for attempts in (1, 2, 3):
        died.append(journal.reads.record_attempt(deadly.request_id))
        died[-1].__enter__()
        journal.close()
        journal = CallJournal(tmp_path)
        pending = {call.request_id: call.attempts for call in journal.next_calls()}
        assert pending.pop(other.request_id) == 0
        assert pending == ({} if attempts == 3 else {deadly.request_id: attempts})
    result = journal.result(deadly.request_id)
    assert result is not None and isinstance(result.outcome, Failure)
    journal.close()


def test_a_sample_whose_client_has_gone_is_refused_alone(journal, reader):
    """Others of its turn are drawn: only a refusal concerns one request."""
    promise = journal.accept(asample(1, [picture(32, 32, 1)]))
    [call] = journal.next_calls(1)
    journal.drop_sample(promise.request_id, call.key)
    with raises(RequestError, place=call.request_id, problem_has="no longer kept"):
        prefetcher(journal, reader, PIXELS).take(call)
