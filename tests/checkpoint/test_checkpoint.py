# .venv/bin/python -m pytest tests/checkpoint/test_checkpoint.py
"""Tests of checkpoints. A run that was saved, killed and resumed equals the run without a break:
bit for bit at its own layout, within rounding at another. These tests are about tensors;
test_retention.py has the files."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.checkpoint.save_load import load, save
from megatron_vlm.checkpoint.tensor_pieces import Piece, PieceReader, make_index
from megatron_vlm.errors import CheckpointError
from megatron_vlm.hf.matrices import RowBlock, flat_rectangles, rectangles
from megatron_vlm.io.atomic import partial_of
from megatron_vlm.training import offload
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.checkpoints import find_latest
from tests.support.error_fields import raises
from tests.support.limits import files_of_at_most
from tests.support.pool import Pool
from tests.support.process_tree import ProcessTree
from tests.support.runs import Case, my_rows, refusal
from tests.support.suites import in_turn, quick, slow

pytestmark = [
    pytest.mark.newest,  # it depends on the versions
    pytest.mark.alone,  # it starts jobs and kills them
]

LR = 1e-3
# A checkpoint at another layout has the same bits, but the steps after it round differently. The
# tolerances are in units of the learning rate, as in test_steps.py, after two steps at each of
# three layouts.
MEAN_TOLERANCE_LR = 1.2e-4  # mean difference of the worst tensor; measured 1.2e-5
MAX_TOLERANCE_LR = 0.09  # worst single weight; measured 0.0086


def bf16(case: Case) -> Case:
    return replace(case, train={"precision": "bf16"})


def moments(states: str, case: Case) -> Case:
    return replace(case, optim={"states": states})


def in_host_memory(share: float, case: Case) -> Case:
    return replace(case, optim={**case.optim, "offload": share})


def muon(case: Case, **optim: object) -> Case:
    return replace(case, optim={"name": "muon", **optim})


# Its A_log and the norms of gated delta nets are F32 beside BF16.
QWEN3_5 = dict(family="qwen3_5", dtype="bfloat16", vision_depth=1)
MTP_SIZES = QWEN3_5 | {"mtp_layers": 1}
GEMMA4 = dict(family="gemma4", layers=2, vision_depth=1)
GEMMA4_EXPERTS = dict(family="gemma4", dtype="bfloat16", experts=4, vision_depth=1)

CASES = {
    "1x1": (layout(), {}),
    "1x1-bf16": (bf16(layout()), {}),
    "dp2": (layout(dp=2), {}),
    "dp2-bf16": (bf16(layout(dp=2)), {}),
    "dp2-plain-optimizer": (layout(dp=2, distributed_optimizer=False), {}),
    "tp2-pp2": (layout(tp=2, pp=2, layers_per_stage=[0, 4]), {}),
    "tp2-odd-vocab": (layout(tp=2), {"vocab": 509}),
    "pp2-tied-odd-vocab": (layout(pp=2, layers_per_stage=[1, 3]), {"vocab": 509, "tied": True}),
    "pp2x2-dp2": (layout(pp=2, dp=2, virtual_stages=2, layers_per_stage=[0, 1, 1, 2]), {}),
    "pp2-vision-frozen": (layout(pp=2, freeze_vision=True, freeze_merger=True), {}),
    "dp2-language-frozen": (layout(dp=2, freeze_language=True), {}),
    "qwen3_5-dp2-bf16": (bf16(layout(dp=2)), QWEN3_5),
    "qwen3_5-dp2-plain-bf16": (bf16(layout(dp=2, distributed_optimizer=False)), QWEN3_5),
    "qwen3_5-drafts-tp2-pp2-bf16": (bf16(layout(tp=2, pp=2, mtp="train")), MTP_SIZES),
    "qwen3_5-drafts-ep2": (layout(dp=2, ep=2, mtp="train"), MTP_SIZES | {"experts": 4}),
    "gemma4-tp2-pp2": (layout(tp=2, pp=2), {"family": "gemma4"}),
    "gemma4-experts-ep2-bf16": (bf16(layout(dp=2, ep=2)), GEMMA4_EXPERTS),
    "tp2-dp2-bf16-moments": (moments("bf16", bf16(layout(tp=2, dp=2))), {}),
    "pp2-dp2-tied-int8-moments": (moments("int8", bf16(layout(pp=2, dp=2))), {"tied": True}),
    "gemma4-pp2-dp2-int8-moments": (moments("int8", layout(pp=2, dp=2)), GEMMA4),
    "gemma4-ep2-bf16-moments": (moments("bf16", bf16(layout(dp=2, ep=2))), GEMMA4_EXPERTS),
    "dp2-plain-int8-moments": (moments("int8", layout(dp=2, distributed_optimizer=False)), {}),
    "tp2-dp2-bf16-muon": (muon(bf16(layout(tp=2, dp=2))), {}),
    "ep2-muon-int8": (muon(layout(dp=2, ep=2), states="int8"), {"experts": 4}),
}
# With a share of the main weights and moments in host memory, no bit changes.
OFFLOADED = {
    "1x1": 0.5,
    "dp2-bf16": 0.5,
    "pp2-vision-frozen": 1.0,
    "qwen3_5-dp2-plain-bf16": 1.0,
    "tp2-dp2-bf16-moments": 0.7,
    "pp2-dp2-tied-int8-moments": 1.0,
    "gemma4-pp2-dp2-int8-moments": 0.5,
    "gemma4-ep2-bf16-moments": 1.0,
}


@dataclass(frozen=True)
class Part:
    """Some steps of a run, from a checkpoint or from the beginning."""

    run: Path
    steps: range
    start: Path | None = None
    save_at: tuple[int, ...] = ()
    async_save: bool = False
    vocab: int = 512
    family: str = "qwen3_vl"


def kind_of_rows(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what rows for a model of these sizes depend on."""
    kept = {name: sizes[name] for name in ("vocab", "family") if name in sizes}
    return kept if kept.get("family") != "qwen3_5" else {}  # its rows are Qwen3-VL's


def go(path: str, case: Case, part: Part) -> list[tuple[float, float]]:
    """Run the steps of a part, and return losses and gradient norms."""
    optim = {"lr": LR, "weight_decay": 0.1, **case.optim}
    worker = MegatronWorker(replace(case, optim=optim).config(path))
    if part.start is not None:
        assert load(worker, part.start) == progress(part.steps.start)
    figures, pending = [], None
    for step in part.steps:
        loss = worker.forward_backward(
            my_rows(make_rows(MIXED, part.vocab, step, part.family))
        ).loss
        # Step 1 sets a rate, and the steps after it keep that rate.
        figures.append((loss, worker.optim_step(lr=LR / 2 if step == 1 else None)[0]))
        if pending is not None:
            pending.finish(blocking=False)
        if step + 1 in part.save_at:
            folder = step_folder(part.run, step + 1)
            pending = save(worker, folder, progress(step + 1), part.async_save)
    if part.steps.start in part.save_at:
        save(worker, step_folder(part.run, part.steps.start), progress(part.steps.start))
    elif pending is not None:
        assert pending.finish()
    return figures


def progress(step: int) -> dict[str, Any]:
    return {"step": step, "data": {"epoch": 0, "taken": 8 * step, "stream": None}, "best": 1 / 3}


def whole(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint."""
    reader, tensors = PieceReader(folder, json.loads((folder / "index.json").read_text())), {}
    for key, entry in reader.index.items():
        rows = entry["shape"][0]
        tensors[key] = torch.empty(rows, int(np.prod(entry["shape"])) // rows)
        reader.fill(Piece(key, 0, 0, tensors[key]))
    return tensors


@pytest.fixture(scope="module")
def straight(process_tree, tiny, tmp_path_factory):
    """Yield straight(name): it makes three steps of a case without a break, saved after two and
    three, and returns the run and its figures. The processes that resume it are others."""
    own_pool = Pool(process_tree.fork)

    @cache
    def go_straight(name: str) -> tuple[Path, list[tuple[float, float]]]:
        (case, sizes), run = CASES[name], tmp_path_factory.mktemp(name)
        part = Part(run, range(3), None, (2, 3), name != "1x1", **kind_of_rows(sizes))
        return run, own_pool.run(go, case.world, tiny(**sizes), case, part)[0]

    yield go_straight
    own_pool.close()


@pytest.mark.parametrize("name", quick(["dp2-bf16", "tp2-pp2"], CASES, in_turn(8, "resumed")))
def test_resumed_is_bit_for_bit_the_run_without_a_break(name, straight, pool, tiny, tmp_path):
    (case, sizes), (run, figures) = CASES[name], straight(name)
    assert find_latest(run) == step_folder(run, 3)
    part = Part(tmp_path, range(2, 3), step_folder(run, 2), (3,), False, **kind_of_rows(sizes))
    assert pool.run(go, case.world, tiny(**sizes), case, part)[0] == figures[2:]
    actual, expected = step_folder(tmp_path, 3), step_folder(run, 3)
    names = {path.name for path in expected.iterdir()}
    assert {"complete.json", "config.yaml", "index.json", "state.json"} < names
    for file in names:  # weights, moments, steps and learning rate
        assert (actual / file).read_bytes() == (expected / file).read_bytes(), file


def go_in_buckets(path: str, case: Case, part: Part) -> list[tuple[float, float]]:
    """Run the steps of a part with buckets that are smaller than most weights."""
    before, offload.OFFLOAD_BUCKET = offload.OFFLOAD_BUCKET, 2048
    try:
        return go(path, case, part)
    finally:
        offload.OFFLOAD_BUCKET = before


@pytest.mark.full
@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", OFFLOADED)
def test_offload_changes_no_bit(name, straight, pool, tiny, tmp_path):
    """A run with offload, and one that resumes it without, equal the run on the device alone."""
    (case, sizes), (run, figures) = CASES[name], straight(name)
    offloaded = in_host_memory(OFFLOADED[name], case)
    part = Part(tmp_path, range(2), None, (2,), True, **kind_of_rows(sizes))
    assert pool.run(go_in_buckets, case.world, tiny(**sizes), offloaded, part)[0] == figures[:2]
    part = replace(part, steps=range(2, 3), start=step_folder(tmp_path, 2), save_at=(3,))
    assert pool.run(go, case.world, tiny(**sizes), case, part)[0] == figures[2:]
    part = replace(part, run=tmp_path / "resumed", start=step_folder(run, 2), async_save=False)
    pool.run(go_in_buckets, case.world, tiny(**sizes), offloaded, part)
    expected = step_folder(run, 3)
    for folder in (step_folder(tmp_path, 3), step_folder(tmp_path / "resumed", 3)):
        for file in expected.glob("*.safetensors"):
            assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


TO_ANOTHER = {
    "dp2": layout(),
    "dp2-bf16": bf16(layout()),
    "1x1-bf16": layout(dp=2),
    "1x1": layout(tp=2, dp=2),
    "dp2-plain-optimizer": layout(pp=2, dp=2),
    "tp2-pp2": layout(dp=2),
    "tp2-odd-vocab": layout(pp=2),
    "pp2-tied-odd-vocab": layout(pp=2, dp=2, virtual_stages=2),
    "pp2x2-dp2": layout(tp=2),
    "pp2-vision-frozen": layout(tp=2, freeze_vision=True, freeze_merger=True),
    "dp2-language-frozen": layout(pp=2, dp=2, freeze_language=True),
    "qwen3_5-dp2-bf16": bf16(layout(tp=2)),
    "qwen3_5-dp2-plain-bf16": bf16(layout(pp=2, dp=2)),
    "qwen3_5-drafts-tp2-pp2-bf16": bf16(layout(pp=2, dp=2, virtual_stages=2, mtp="train")),
    "qwen3_5-drafts-ep2": layout(pp=2, mtp="train"),
    "gemma4-tp2-pp2": layout(dp=2),
    "gemma4-experts-ep2-bf16": bf16(layout(pp=2)),
    "tp2-dp2-bf16-moments": moments("bf16", bf16(layout(pp=2))),
    "pp2-dp2-tied-int8-moments": bf16(layout(tp=2)),  # with fp32 moments
    "gemma4-pp2-dp2-int8-moments": layout(tp=2),
    "gemma4-ep2-bf16-moments": moments("bf16", bf16(layout(dp=2))),
    "dp2-plain-int8-moments": layout(dp=2),
    "tp2-dp2-bf16-muon": muon(bf16(layout(pp=2))),
    "ep2-muon-int8": muon(layout(dp=2)),  # with an fp32 momentum
}


@pytest.mark.parametrize("name", quick(["dp2-bf16", "tp2-pp2"], TO_ANOTHER, in_turn(8, "moved")))
def test_another_layout_holds_the_same_bits(name, straight, pool, tiny, tmp_path):
    case, sizes = TO_ANOTHER[name], CASES[name][1]
    before = step_folder(straight(name)[0], 3)
    part = Part(tmp_path, range(3, 3), before, (3,), **kind_of_rows(sizes))
    pool.run(go, case.world, tiny(**sizes), case, part)
    actual, expected = whole(step_folder(tmp_path, 3)), whole(before)
    assert actual.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []
    embedding = "exp_avg/model.language_model.embed_tokens.weight"
    if embedding in actual:  # without padding
        assert len(actual[embedding]) == sizes.get("vocab", 512)


def load_and_export(path: str, case: Case, folder: Path, out: str) -> None:
    worker = MegatronWorker(case.config(path))
    load(worker, folder)
    worker.export_hf(out)


@pytest.mark.full
def test_fp32_weights_beside_bf16_are_never_rounded(straight, pool, tiny, tmp_path):
    """Exports, from training and from the checkpoint, have the bits of the main weights."""
    case, sizes = CASES["qwen3_5-dp2-bf16"]
    folder = step_folder(straight("qwen3_5-dp2-bf16")[0], 3)
    pool.run(load_and_export, 2, tiny(**sizes), case, folder, str(tmp_path / "ours"))
    export_checkpoint(str(folder), str(tmp_path / "theirs"), tiny(**sizes))
    weights, main = load_file(tmp_path / "ours" / "model.safetensors"), whole(folder)
    other = load_file(tmp_path / "theirs" / "model.safetensors")
    before = load_file(Path(tiny(**sizes)) / "model.safetensors")
    kept = [name for name, value in weights.items() if value.dtype is torch.float32]
    assert kept == [name for name in weights if re.search(r"A_log|linear_attn\.norm", name)]
    assert len(kept) == 2 * 3  # of three layers
    for name, value in weights.items():
        assert torch.equal(value, other[name]), name
        assert torch.equal(value, main[name].view(value.shape).to(value.dtype)), name
        if name in kept:
            assert not torch.equal(value, value.bfloat16().float()), name
            assert not torch.equal(value, before[name]), name


@pytest.mark.full
def test_steps_at_changing_layouts(pool, tiny, tmp_path, record_property):
    """A run at TP2, PP2, DP2 with sharded state, and in one process equals that in one process."""
    straight, path = tmp_path / "straight", tiny()
    pool.run(go, 1, path, layout(), Part(straight, range(8), save_at=(8,)))
    start = None
    for number, case in enumerate((layout(tp=2), layout(pp=2), layout(dp=2), layout())):
        steps = range(2 * number, 2 * number + 2)
        pool.run(go, case.world, path, case, Part(tmp_path, steps, start, (steps.stop,)))
        start = step_folder(tmp_path, steps.stop)
    actual, expected = whole(step_folder(tmp_path, 8)), whole(step_folder(straight, 8))
    errors = {
        key: (actual[key] - expected[key]).abs() / LR for key in expected if "exp_avg" not in key
    }
    mean = max(float(error.mean()) for error in errors.values())
    largest = max(float(error.max()) for error in errors.values())
    record_property("mean", mean)
    record_property("max", largest)
    assert mean <= MEAN_TOLERANCE_LR
    assert largest <= MAX_TOLERANCE_LR


def save_slowly(path: str, case: Case, run: Path) -> None:
    """Save, then save in the background while training continues; rank 1's disk is slow."""
    from megatron_vlm.checkpoint import save_load

    worker = MegatronWorker(replace(case, optim={"lr": LR}).config(path))
    save(worker, step_folder(run, 1), progress(1))
    gate, write_file = threading.Event(), save_load.write_file

    def write_late(path: Path, chunks: Any) -> save_load.FileRecord:
        if path.name == "rank-00001.safetensors":
            gate.wait()
        return write_file(path, chunks)

    save_load.write_file = write_late
    try:
        pending = save(worker, step_folder(run, 2), progress(1), async_save=True)
        worker.forward_backward(my_rows(make_rows(MIXED)))
        worker.optim_step()
        assert not pending.finish(blocking=False)
        assert not step_folder(run, 2).exists()
        threading.Timer(0.1, gate.set).start()
        save(worker, step_folder(run, 3), progress(3), async_save=True)
        assert step_folder(run, 2).exists()  # only one checkpoint is written at a time
        assert pending.finish(blocking=False) and pending.finish()
    finally:
        save_load.write_file = write_file


def test_training_goes_on_while_a_checkpoint_is_written(pool, tiny, tmp_path):
    pool.run(save_slowly, 2, tiny(), layout(dp=2), tmp_path)
    first, second = (whole(step_folder(tmp_path, step)) for step in (1, 2))
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert find_latest(tmp_path) == step_folder(tmp_path, 2)
    assert partial_of(step_folder(tmp_path, 3)).exists()  # no rank has finished it


def refused(pool: Pool, path: str, case: Case, folder: Path) -> list[str]:
    errors = pool.run(refusal, case.world, path, case, partial(load, folder=folder))
    assert {type(error) for error in errors} == {CheckpointError}
    return list(map(str, errors))


@pytest.mark.full
def test_what_does_not_fit_is_refused_on_every_rank(straight, pool, tiny, tmp_path):
    run = straight("pp2-vision-frozen")[0]
    for message in refused(pool, tiny(), layout(pp=2), step_folder(run, 3)):
        assert "exp_avg/model.visual.patch_embed.proj.weight" in message
    run = straight("tp2-dp2-bf16-muon")[0]
    for message in refused(pool, tiny(), bf16(layout(tp=2, dp=2)), step_folder(run, 3)):
        assert "optim.name=adamw keeps other states of the weights than muon" in message
    run = straight("tp2-odd-vocab")[0]
    for message in refused(pool, tiny(), layout(tp=2), step_folder(run, 3)):
        assert re.search(r"(embed_tokens|lm_head)\.weight.*\[509, 64\] .*\[512, 64\]", message)
    for message in refused(pool, tiny(), layout(tp=2), tmp_path / "none"):
        assert message.startswith(f"{tmp_path}/none/complete.json: ")
    embedding = "model.language_model.embed_tokens.weight"
    for sizes, count, name in (
        ({"layers": 2}, 22, "model.language_model.layers.2.input_layernorm.weight"),
        ({"vocab": 500}, 2, embedding),
    ):
        whole, out = step_folder(straight("1x1")[0], 3), tmp_path / "out"
        with raises(CheckpointError, place=str(whole), remedy_has="--model") as caught:
            export_checkpoint(str(whole), str(out), tiny(**sizes))
        assert len(caught.value.found) == count and name in caught.value.found
        assert not out.exists()
    assert re.search(r"\[512, 64\] .*\[500, 64\]", caught.value.found[embedding])
    shard = step_folder(run, 2) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for message in refused(pool, tiny(), layout(tp=2), step_folder(run, 2)):
        assert message.startswith(f"{shard}: ")


def full_disk(path: str, case: Case, run: Path, async_save: bool) -> tuple[str, Path | None]:
    """Save while rank 1 cannot write a file of more than 100 kB."""
    worker = MegatronWorker(case.config(path))
    save(worker, step_folder(run, 1), progress(1))
    is_full = torch.distributed.get_rank() == 1
    disk = files_of_at_most(100_000) if is_full else contextlib.nullcontext()
    with disk, pytest.raises(CheckpointError) as caught:
        save(worker, step_folder(run, 2), progress(2), async_save).finish()
    return str(caught.value), find_latest(run)


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_full_disk_on_one_rank(async_save, pool, tiny, tmp_path):
    for message, latest in pool.run(full_disk, 2, tiny(), layout(dp=2), tmp_path, async_save):
        assert "step-00000002.partial/rank-00001.safetensors: " in message
        assert "File too large" in message
        assert latest == step_folder(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_unwritable_folder(pool, tiny, tmp_path):
    (tmp_path / "run").write_text("a file")
    act = partial(save, folder=step_folder(tmp_path / "run", 1), progress={})
    for error in pool.run(refusal, 2, tiny(), layout(dp=2), act):
        assert type(error) is CheckpointError
        assert "step-00000001.partial: cannot be created: Not a directory" in str(error)


def test_rectangles_cover_a_range_once():
    width = 5
    for start in range(23):
        for end in range(start, 24):
            cells = [
                (row + i) * width + col + j
                for row, col, rows, cols in rectangles(start, end, width)
                for i in range(rows)
                for j in range(cols)
            ]
            assert cells == list(range(start, end))
            assert sum(1 for _ in rectangles(start, end, width)) <= 3


def test_cut_leaves_padding_out():
    blocks = [RowBlock("a", 0, 2, 10, 3), RowBlock("b", 2, 1, 0, 0)]  # row 3 is padding
    flat = torch.arange(2.0, 12.0)
    found = [(r.place[:3], r.view(flat).tolist()) for r in flat_rectangles(2, 10, 3, blocks)]
    assert found == [
        (("a", 10, 5), [[2.0]]),
        (("a", 11, 3), [[3.0, 4.0, 5.0]]),
        (("b", 0, 0), [[6.0, 7.0, 8.0]]),
    ]


def test_a_checkpoint_without_every_tensor_is_refused():
    shapes = {"a": (4, 3), "b": (2,)}
    whole = [[("a", (0, 0, 2, 3)), ("b", (0, 0, 2, 1))], [("a", (2, 0, 2, 3))]]
    assert set(make_index(shapes, whole)) == {"a", "b"}
    for blocks, names in (
        (whole[:1], ["a"]),
        (whole[1:], ["b", "a"]),
        ([whole[0], [("a", (0, 0, 2, 3))]], ["a"]),
    ):
        with raises(CheckpointError, problem_has=f"{len(names)} of 2 tensors") as caught:
            make_index(shapes, blocks)
        assert list(caught.value.found) == names and "6 of 12" in caught.value.found["a"]


def run_until_killed(
    connection: Connection, path: str, run: Path, steps: int, kill_at: int | None
) -> None:
    """Run steps from the latest checkpoint of the run, and send what each save does to files. With
    `kill_at`, the process is killed just before it does the one of this number in its second
    save."""
    saves: list[list[str]] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename") and str(arguments[0]).startswith(str(run)):
            saves[-1:] and saves[-1].append(f"{event} {Path(arguments[0]).suffix}")
            if len(saves) == 2 and len(saves[-1]) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    worker = MegatronWorker(replace(layout(), optim={"lr": LR}).config(path))
    latest = find_latest(run)
    done = 0 if latest is None else load(worker, latest)["step"]
    sys.addaudithook(watch)
    for step in range(done, steps):
        worker.forward_backward(make_rows(MIXED, seed=step))
        worker.optim_step()
        saves.append([])
        save(worker, step_folder(run, step + 1), progress(step + 1), step % 2 == 0).finish()
        connection.send(saves[-1])


def train_in_fork(
    process_tree: ProcessTree, path: str, run: Path, steps: int, kill_at: int | None = None
) -> list[list[str]]:
    """Train to the last step, or until the process is killed. Return what each save did."""
    child, saves = process_tree.fork(run_until_killed, path, run, steps, kill_at), []
    with contextlib.suppress(EOFError):
        while True:
            saves.append(child.connection.recv())
    return saves


@pytest.mark.parametrize("stride", [5, slow(1)])
def test_killed_run_ends_as_the_run_without_a_break(stride, tiny, tmp_path, process_tree):
    """The run is killed at each step of a save, or at some of them, and resumed in a new
    process."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    model = tiny(layers=2, vision_depth=1, deepstack=1)
    _, deeds, *_ = train_in_fork(process_tree, model, tmp_path / "first", 3)
    places = range(1, len(deeds) + 1, stride)
    steps, renamed = 2 * len(places) + 1, deeds.index("os.rename .partial") + 1
    assert 1 in places and any(renamed < place for place in places)
    for place in places:
        before = find_latest(run)
        assert len(train_in_fork(process_tree, model, run, steps, place)) == 1
        assert any(run.glob("*.partial")) == (1 < place <= renamed)
        after = find_latest(run)
        assert after is not None and (before is None or after > before)
    train_in_fork(process_tree, model, run, steps)
    train_in_fork(process_tree, model, straight, steps)
    for file in step_folder(straight, steps).iterdir():
        assert (step_folder(run, steps) / file.name).read_bytes() == file.read_bytes(), file.name
    assert not list(run.glob("*.partial"))
