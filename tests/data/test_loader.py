# .venv/bin/python -m pytest tests/data/test_loader.py
"""Data from disk to the ranks: one order at every layout, exact resume, one decode a sample."""

import gzip
import json
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import torch

from megatron_vlm.config.schema import TrainConfig
from megatron_vlm.data.batches import loader as loading
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.tokens import reader as reading
from megatron_vlm.data.worker_processes import map_in_processes
from megatron_vlm.errors import DataError
from megatron_vlm.family.qwen import model as qwen
from megatron_vlm.training.data_feed import SharedBatches, share_batch
from megatron_vlm.training.lr_schedule import total_steps
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.chats import picture, say, text
from tests.support.error_fields import raises
from tests.support.runs import call
from tests.support.sets import data_config, open_set, write_set
from tests.support.suites import full

LIMITS = Limits(tokens=300)


def rows_of(batch):
    """Return the rows of a step's micro-batches as (place, tokens)."""
    rows = []
    for part in batch.micro_batches:
        for place, length, tokens in zip(part.rows, part.lengths, part.tokens_BS5, strict=False):
            rows.append((place, tokens[:length].tolist()))
    return sorted(rows)


def load(path, model, cache, ranks=1, start=Position(), epochs=2, batch=8, train=True, **options):
    """Return each step's rows over all replicas, and the position after it."""
    data = open_set(path, model, cache, train=train, **options)
    cfg = data_config(cache, **options)
    loaders = [
        Loader(data, cfg, batch, LIMITS, Replica(rank, ranks), start, epochs)
        for rank in range(ranks)
    ]
    steps = []
    for parts in zip(*loaders, strict=True):
        assert len({part.after == parts[0].after for part in parts}) == 1
        steps.append((sorted(row for part in parts for row in rows_of(part)), parts[0].after))
    return steps


class Standing:
    """The niceness and the number of threads of a worker."""

    def __getitem__(self, task: int) -> tuple[int, int]:
        return os.nice(0), torch.get_num_threads()


@pytest.mark.full
def test_data_workers_leave_the_cores_to_the_step():
    (standing,) = map_in_processes(Standing(), range(1), 1, 1)
    assert standing == (min(19, os.nice(0) + 10), 1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    return write_set(folder), folder / "cache"


@pytest.fixture(scope="module")
def expected(dataset, tiny):
    return load(dataset[0], tiny(), dataset[1])


def test_steps_and_epochs(expected):
    assert [len(rows) for rows, _ in expected] == [8, 8, 7, 8, 8, 7]  # the last one is not filled
    assert [after.epoch for _, after in expected] == [0, 0, 1, 1, 1, 2]
    assert total_steps(TrainConfig(global_batch_size=8, epochs=2.0), 23) == len(expected)
    for epoch in (expected[:3], expected[3:]):
        ids = [str(row[1]) for rows, _ in epoch for row in rows]
        assert len(set(ids)) == 23  # each sample exactly once
    assert expected[0][0] != expected[3][0]  # another order in the second epoch


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_the_order_does_not_depend_on_the_data_parallel_degree(ranks, dataset, expected, tiny):
    assert load(dataset[0], tiny(), dataset[1], ranks) == expected


@pytest.mark.full
def test_the_order_does_not_depend_on_worker_processes(dataset, expected, tiny, monkeypatch):
    """Nor does this process plan patches or open pictures."""
    monkeypatch.setattr(qwen, "get_vision_position_ids", None)
    monkeypatch.setattr(reading, "read_image", None)
    assert load(dataset[0], tiny(), dataset[1], num_workers=2) == expected


@pytest.mark.full
def test_a_large_batch_is_planned_in_another_process(dataset, expected, tiny, monkeypatch):
    """The steps are the same, and none is planned in this process."""

    def planned_here(*_):
        raise AssertionError("planned in the process that trains")

    monkeypatch.setattr(loading, "PLANNED_APART", 8)
    monkeypatch.setattr(loading.balance, "plan_batch", planned_here)
    start = expected[1][1]
    assert load(dataset[0], tiny(), dataset[1], 2, start, num_workers=1) == expected[2:]
    with pytest.raises(AssertionError, match="planned in the process that trains"):
        load(dataset[0], tiny(), dataset[1], batch=7, num_workers=1)


@pytest.mark.parametrize("done", range(1, 6))
@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_goes_on_exactly(done, ranks, dataset, expected, tiny):
    start = expected[done - 1][1]
    assert load(dataset[0], tiny(), dataset[1], ranks, start) == expected[done:]


def count_decodes(monkeypatch):
    opened = []
    read = reading.read_image
    monkeypatch.setattr(reading, "read_image", lambda *args: opened.append(args[2]) or read(*args))
    return opened


def test_resume_decodes_nothing_that_was_consumed(dataset, expected, tiny, monkeypatch):
    """The pictures of the two steps that remain in the second epoch are decoded, and no others."""
    opened = count_decodes(monkeypatch)
    rest = load(dataset[0], tiny(), dataset[1], 1, expected[3][1])
    data = open_set(dataset[0], tiny(), dataset[1])
    remaining = data.indexes[0].records[data.order.epoch(1)[8:, 1]].tolist()
    expected_lines = sorted(line + 1 for line in remaining for _ in range(line % 4))
    assert (
        sorted(int(place.split("train.jsonl:")[1].split(":")[0]) for place in opened)
        == expected_lines
    )
    assert sum(len(rows) for rows, _ in rest) == len(remaining) == 15


def test_evaluation_is_in_order(dataset, tiny):
    data = open_set(dataset[0], tiny(), dataset[1], train=False)
    assert data.order.epoch(0)[:, 1].tolist() == list(range(23))


def test_a_broken_picture_is_skipped_when_it_is_met(tmp_path, tiny):
    """The header of the picture is intact, so only decoding reveals the damage."""
    path = write_set(tmp_path, 6)
    broken = tmp_path / "images" / "3-1.png"
    broken.write_bytes(broken.read_bytes()[:-2000])
    with pytest.raises(
        DataError, match=r"train\.jsonl:4: image 1: images/3-1\.png: cannot be decoded"
    ):
        load(path, tiny(), tmp_path / "cache")
    data = open_set(path, tiny(), tmp_path / "cache", max_errors=100)
    loader = Loader(data, data_config(None, max_errors=100), 6, LIMITS, epochs=1)
    (step,) = loader
    assert len(rows_of(step)) == 5
    assert "images/3-1.png: cannot be decoded" in step.skipped[0] == loader.errors[0]


def _shared(worker: MegatronWorker, *, path: str, model: str, cache) -> dict:
    """Return the images that one rank opened, how often its steps planned patches, its batches, its
    losses, and those where the stage plans."""
    opened, planned, unplanned = [], [], []
    with ExitStack() as stack:
        for module, name, calls in (
            (reading, "read_image", opened),
            (qwen, "get_vision_position_ids", planned),
        ):
            noted = _noting(getattr(module, name), calls)
            stack.enter_context(mock.patch.object(module, name, noted))
        device = worker.platform.device
        steps, losses = [], []
        batches = None
        if worker.grid.leads:
            data = open_set(path, model, cache)
            batches = iter(Loader(data, data_config(cache), 8, LIMITS, epochs=1))
        for _ in range(3):
            local_batch = None
            if batches is not None:
                before = len(planned)
                batch = next(batches)
                del planned[before:]
                local_batch = (batch.micro_batches, None)
            shared, _ = share_batch(local_batch, worker.grid, device)
            steps.append(
                [(b.tokens_BS5.tolist(), b.rows, b.pixel_values_PC is not None) for b in shared]
            )
            losses.append(worker.forward_backward(shared).loss)
            until_now = len(planned)
            bare = [replace(batch, patch_inputs={}) for batch in shared]
            unplanned.append(worker.forward_backward(bare).loss)
            del planned[until_now:]
    return {
        "opened": [args[2] for args in opened],
        "planned": len(planned),
        "steps": steps,
        "losses": losses,
        "unplanned": unplanned,
        "first": worker.grid.first,
    }


def _noting(right, calls):
    return lambda *args, **more: calls.append(args) or right(*args, **more)


def test_one_decode_a_sample_at_tp2_pp2(dataset, tiny, pool):
    sharing = partial(_shared, path=dataset[0], model=tiny(), cache=dataset[1])
    answers = pool.run(call, 4, tiny(), layout(tp=2, pp=2), sharing)
    images = sum(row % 4 for row in range(23))
    assert [len(answer["opened"]) for answer in answers] == [images, 0, 0, 0]
    assert len(set(answers[0]["opened"])) == images
    for answer in answers:
        assert [[part[:2] for part in step] for step in answer["steps"]] == [
            [part[:2] for part in step] for step in answers[0]["steps"]
        ]
        pixels = [part[2] for step in answer["steps"] for part in step]
        assert any(pixels) == answer["first"]
        assert answer["unplanned"] == answer["losses"]
    (alone,) = pool.run(call, 1, tiny(), layout(), sharing)
    assert [answer["planned"] for answer in (*answers, alone)] == [0] * 5
    assert alone["unplanned"] == alone["losses"]
    assert answers[0]["losses"] == pytest.approx(alone["losses"], rel=1e-6)


class _Broken:
    """A loader whose first batch is wrong."""

    def __iter__(self):
        raise DataError("train.jsonl:4: is broken")
        yield


def _fails(worker: MegatronWorker) -> str:
    loader = _Broken() if worker.grid.leads else None
    try:
        SharedBatches(loader, worker.grid, worker.platform.device).next()
    except DataError as error:
        return str(error)
    return "no error"


def test_an_error_of_the_loading_rank_is_raised_on_all(tiny, pool):
    errors = pool.run(call, 4, tiny(), layout(tp=2, pp=2), _fails)
    elsewhere = "another rank could not load its data; see its message"
    assert errors == ["train.jsonl:4: is broken", *[elsewhere] * 3]


def _grouped(worker: MegatronWorker, *, path: str, model: str, cache) -> list[list[float]]:
    """Return the losses of the same global batches under several groupings."""
    replica = Replica(worker.grid.dp.rank, worker.grid.dp.size)
    data = open_set(path, model, cache)
    losses = []
    for limits in (Limits(1), Limits(3), Limits(100), Limits(tokens=300), Limits(tokens=2000)):
        loader = Loader(data, data_config(cache), 11, limits, replica, epochs=1)
        losses.append([worker.forward_backward(step.micro_batches).loss for step in loader])
    return losses


@pytest.mark.full
def test_the_loss_does_not_depend_on_the_grouping(dataset, tiny, pool):
    grouped = partial(_grouped, path=dataset[0], model=tiny(), cache=dataset[1])
    (alone,) = pool.run(call, 1, tiny(), layout(), grouped)
    # 23 samples in batches of 11: the last has one row, and at DP2 a rank has none.
    assert [len(losses) for losses in alone] == [3] * 5
    for losses in alone:
        assert losses == pytest.approx(alone[0], rel=1e-6)
    for answer in pool.run(call, 2, tiny(), layout(dp=2), grouped):
        for losses in answer:
            assert losses == pytest.approx(alone[0], rel=1e-6)


def _planned(worker: MegatronWorker, *, path: str, model: str, cache) -> list[list[torch.Tensor]]:
    data = open_set(path, model, cache)
    log_probs = []
    for limits in (Limits(100), Limits(tokens=300)):
        (step, *_) = Loader(data, data_config(cache), 23, limits, epochs=1)
        log_probs.append(worker.forward(step.micro_batches))
    return log_probs


def test_log_probs_come_in_the_order_of_the_batch(dataset, tiny, pool):
    """Row i is sample i of the global batch under every grouping."""
    planned = partial(_planned, path=dataset[0], model=tiny(), cache=dataset[1])
    ((whole, grouped),) = pool.run(call, 1, tiny(), layout(), planned)
    data = open_set(dataset[0], tiny(), dataset[1])
    order = data.order.epoch(0)[:, 1]
    assert [len(row) for row in whole] == data.indexes[0].tokens[order].tolist()
    for one, other in zip(whole, grouped, strict=True):
        assert torch.allclose(one, other, atol=5e-6, rtol=0)


@pytest.fixture(scope="module")
def stream(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("stream")
    lines = Path(write_set(folder)).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for message in (message for record in records for message in record["messages"]):
        if isinstance(message["content"], str):  # a column has one type
            message["content"] = [{"type": "text", "text": message["content"]}]
    for shard in range(3):
        table = pyarrow.Table.from_pylist(records[shard * 8 : shard * 8 + 8])
        pyarrow.parquet.write_table(table, folder / f"{shard}.parquet")
    spec = {"path": str(folder / "*.parquet"), "streaming": True, "image_root": str(folder)}
    return spec, tiny(), folder / "cache"


def test_a_stream_gives_each_sample_once(streamed, expected):
    assert [len(rows) for rows, _ in streamed] == [8, 8, 7, 8, 8, 7]
    for first in (0, 3):
        found, wanted = (
            sorted(str(row[1]) for rows, _ in steps[first : first + 3] for row in rows)
            for steps in (streamed, expected)
        )
        assert found == wanted
    assert streamed[0][0] != streamed[3][0]


@pytest.fixture(scope="module")
def streamed(stream):
    return load(*stream, shuffle_window=6)


@pytest.mark.parametrize("done", [full(1), 2, full(3), full(5)])
def test_a_stream_resumes_exactly(done, stream, streamed, monkeypatch):
    steps, opened = streamed, count_decodes(monkeypatch)
    rest = load(*stream, 1, steps[done - 1][1], shuffle_window=6)
    assert without_state(rest) == without_state(steps[done:])
    images = sum(row % 4 for row in range(23))
    assert len(opened) < 2 * images - (done > 2) * images + 1
    for ranks in (2, 3):
        rest = load(*stream, ranks, steps[done - 1][1], shuffle_window=6)
        assert without_state(rest) == without_state(steps[done:])


def without_state(steps):
    """Drop the state, since `datasets` may write the same place of a stream in two ways."""
    return [(rows, after.epoch, after.taken) for rows, after in steps]


@pytest.mark.full
def test_a_stream_with_worker_processes(stream, streamed):
    assert load(*stream, shuffle_window=6, num_workers=2) == streamed


@pytest.mark.slow
def test_mixed_streams(stream, tiny):
    spec, _, cache = stream
    both = [{**spec, "weight": 3}, {**spec, "weight": 1}]
    steps = load(both, tiny(), cache, epochs=1)
    assert sum(len(rows) for rows, _ in steps) == 46
    resumed = load(both, tiny(), cache, 1, steps[2][1], epochs=1)
    assert without_state(resumed) == without_state(steps[3:])


def write_wrong(folder):
    """Write a right record and one of each wrong kind. Return the patterns of their errors."""
    (folder / "pictures").mkdir()
    picture(40, 40).save(folder / "pictures" / "0.png")
    (folder / "pictures" / "broken.png").write_bytes(b"no picture")
    whole = (folder / "pictures" / "0.png").read_bytes()
    (folder / "pictures" / "cut.png").write_bytes(whole[: len(whole) // 2])

    def record(name, answer="c"):
        parts = [{"type": "image", "image": name}, text("?")]
        return json.dumps({"messages": [say("user", *parts), say("assistant", answer)]})

    lines = {
        record("pictures/0.png"): None,
        "{": "not a line of JSON",
        "[" * 100_000: "is nested too deeply|not a line of JSON",
        '{"prompt": "a"}': "has a question, and none",
        record("pictures/1.png"): "no file pictures/1.png",
        record("pictures/\x1b[2J.png"): r"no file pictures/\\x1b\[2J\.png",
        record("../a.jsonl"): "lies outside",
        record("pictures/broken.png"): "is not an image that can be opened",
        record("http://localhost/a.png"): "is on the network",
        record("pictures/0.png", "word " * 9999): "data.max_tokens=2048",
        record("pictures/0.png", "<|im_end|>"): r"<\|im_end\|>.*data.special_tokens=escape",
        record("pictures/cut.png"): "cannot be decoded",
    }
    (folder / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    with gzip.open(folder / "a.jsonl.gz", "wt") as packed:
        packed.write((folder / "a.jsonl").read_text())
    return [words for words in lines.values() if words]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_of_wrong_record_is_skipped_and_counted(name, streaming, tiny, tmp_path, caplog):
    """Indexed and streamed files behave as docs/troubleshooting.md says."""
    expected = write_wrong(tmp_path)
    spec = {"path": str(tmp_path / name), "streaming": streaming}
    options = dict(shuffle=False, epochs=1, max_tokens=2048)
    with pytest.raises(DataError, match=rf"{name}:2: is not a line of JSON"):
        load(spec, tiny(), tmp_path / "cache", **options)
    count = len(expected)
    steps = load(spec, tiny(), tmp_path / "cache", max_errors=count, **options)
    skipped = [m for m in caplog.messages if m.startswith("skipped")]
    assert sum(len(rows) for rows, _ in steps) == 1
    assert len(skipped) == count
    for place, words in enumerate(expected, 2):
        assert any(re.search(f"{name}:{place}: .*({words})", message) for message in skipped), words
    with raises(DataError, key="data.max_errors", found=count - 1, problem_has=f" {count} "):
        load(spec, tiny(), tmp_path / "cache", max_errors=count - 1, **options)


def test_a_stream_of_wrong_records_stops_at_the_limit(tiny, tmp_path):
    """The stream stops before its end, which may be far."""
    (tmp_path / "a.jsonl").write_text("{\n" * 50)
    spec = {"path": str(tmp_path / "a.jsonl"), "streaming": True}
    with raises(DataError, key="data.max_errors", found=3, problem_has=" 4 "):
        load(spec, tiny(), None, max_errors=3)


@pytest.mark.parametrize("processes", [0, full(1)])
def test_a_stream_that_breaks_off_is_an_error(processes, tiny, tmp_path):
    """No record can follow, so the error is not skipped."""
    lines = [json.dumps({"prompt": str(i), "completion": "a"}) + "\n" for i in range(9)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode())[:-9])
    spec = {"path": str(tmp_path / "a.jsonl.gz"), "streaming": True}
    with pytest.raises(DataError, match=r"^\S+a\.jsonl\.gz: cannot be unpacked"):
        load(spec, tiny(), None, max_errors=100, num_workers=processes)


def test_a_stream_says_keys_that_are_passed_over_where_they_first_come(tiny, tmp_path, caplog):
    record = {"prompt": "a", "completion": "b", "score": 1}
    lines = [record, record, record | {"meta": 2, "imagse": []}, record | {"meta": 3}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = {"path": str(tmp_path / "a.jsonl"), "streaming": True}
    for mode, count in (("ignore", 0), ("warn", 2)):
        caplog.clear()
        load(spec, tiny(), None, shuffle=False, epochs=1, unknown_keys=mode)
        assert len(caplog.messages) == count
    first, second = caplog.messages
    assert "a.jsonl:1: the model does not see 'score': its meaning is not known" in first
    assert "a.jsonl:3: the model does not see 'meta'" in second
