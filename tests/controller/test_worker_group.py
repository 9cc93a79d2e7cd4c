# .venv/bin/python -m pytest tests/controller/test_worker_group.py
"""A group gives what one worker gives, in row order, at any layout, and errors name the rank."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_vlm.controller import WorkerError, WorkerGroup, local_group
from megatron_vlm.controller.worker_group import filled_rows, split_batch, without_labels
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, batch_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, RowSpec, make_rows
from tests.support.error_fields import raises
from tests.support.runs import Case

ODD = make_rows(MIXED)[:5]  # two replicas do not divide it
# Between layouts, relative (measured worst: 1.2e-6, the gradient norm).
TOLERANCE = 5e-6

SAMPLING = SamplingSettings(5, 1.2, top_k=90, stop_ids=tuple(range(30)), stop_strings=("e",))

pytestmark = pytest.mark.slow  # four processes, and a group over every layout


def in_turn(batch: TensorBatch, group: WorkerGroup, folder: str) -> dict[str, Any]:
    """What a controller does in a step, with results as plain numbers."""
    log_probs = group.forward(batch).result()
    rl = batch.with_fields(
        advantages=TensorList([torch.linspace(-1, 1, len(row)) for row in log_probs]),
        old_log_probs=TensorList(log_probs),
    )
    metrics = group.forward_backward(rl, True, loss="ppo", clip_low=0.1).result()
    norm, lr = group.optim_step(lr=1e-4).result()
    group.save(folder, {"step": 7}).result()
    after = group.forward(batch).result()
    steps = [group.forward_backward(rl), group.optim_step(lr=0.1)]  # not waited for
    norm_2 = steps[1].result()[0]
    progress = group.load(folder).result()
    back = group.forward(batch).result()
    group.export(folder + "-hf").result()
    assert metrics.log_probs is not None
    return {
        "log_probs": [row.tolist() for row in log_probs],
        "train_log_probs": [row.tolist() for row in metrics.log_probs],
        "loss": metrics.loss,
        "means": metrics.means,
        "num_tokens": metrics.num_tokens,
        "norm": norm,
        "norm_2": norm_2,
        "lr": lr,
        "after": [row.tolist() for row in after],
        "back": [row.tolist() for row in back],
        "progress": progress,
        "answers": group.generate(batch, 4, ()).result(),
        "sampled": group.generate(batch, 4, (), temperature=1.5, seed=3).result(),
        "samples": group.sample(batch, SAMPLING, 3, seed=3, batch_rows=4).result(),
    }


def run_in_turn(path: str, case: Case, rows: list[Row], folder: str) -> dict[str, Any]:
    group = local_group(MegatronWorker(case.config(path)))
    assert group.dims.replica_of(dist.get_rank()) == parallel_state.get_data_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    assert group.dims.stage_of(dist.get_rank()) == stage
    return in_turn(batch_of(rows), group, folder)


def flat(rows: list[list[float]]) -> Tensor:
    return torch.cat([torch.tensor(row) for row in rows])


def check_same(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The relative differences of two turns; rows must have their lengths and tokens."""
    worst = {}
    for key in ("log_probs", "train_log_probs", "after", "back"):
        assert [len(row) for row in ours[key]] == [len(row) for row in expected[key]]
        error = (flat(ours[key]) - flat(expected[key])).abs().max()
        worst[key] = float(error / flat(expected[key]).abs().max())
    for key in ("loss", "norm", "norm_2", "lr"):
        worst[key] = abs(ours[key] - expected[key]) / abs(expected[key])
    for key, value in expected["means"].items():
        worst[key] = abs(ours["means"][key] - value) / max(abs(value), 1e-2)
    for key in ("num_tokens", "progress", "answers", "sampled"):
        assert ours[key] == expected[key]
    assert [len(each) for each in ours["samples"]] == [3] * len(ODD)
    for one, other in zip(answers_of(ours), answers_of(expected), strict=True):
        assert replace(one, log_probs=()) == replace(other, log_probs=()) and one.versions == (
            (1, len(one.ids)),
        )
        worst["samples"] = error_of(one.log_probs, other.log_probs, worst.get("samples", 0.0))
    return worst


def answers_of(turn: dict[str, Any]) -> list[Completion]:
    return [each for answers in turn["samples"] for each in answers]


def error_of(ours: Sequence[float], theirs: Sequence[float], least: float) -> float:
    """The largest relative difference of an answer's log-probs, or `least`."""
    error = (torch.tensor(ours) - torch.tensor(theirs)).abs().max()
    return max(least, float(error) / abs(min(theirs)))


@pytest.fixture(scope="module")
def alone(pool, tiny, tmp_path_factory) -> dict[str, Any]:
    """One process, without parts and fillers."""
    folder = tmp_path_factory.mktemp("alone") / "step"
    return pool.run(run_in_turn, 1, tiny(), layout(), ODD, str(folder))[0]


def test_a_turn_does_what_it_says(alone, pool, tiny):
    assert alone["log_probs"] == alone["train_log_probs"] == alone["back"][:0] + alone["log_probs"]
    assert alone["back"] == alone["after"] != alone["log_probs"]
    assert alone["progress"] == {"step": 7} and alone["lr"] == 1e-4
    assert alone["means"]["ratio"] == pytest.approx(1)
    assert alone["norm_2"] != alone["norm"]
    assert alone["sampled"] != alone["answers"]
    samples = answers_of(alone)
    assert {each.ended for each in samples} == {"stop", "length"}
    ids = [each.ids for each in samples]
    assert len(set(ids)) == len(ids)  # each has a seed of its own


@pytest.mark.parametrize("name", ["dp2", "tp2-dp2", "pp2-dp2"])
def test_results_do_not_depend_on_the_layout(name, alone, pool, tiny, tmp_path, record_property):
    case = layout(**{part[:2]: int(part[2:]) for part in name.split("-")})
    found = pool.run(run_in_turn, case.world, tiny(), case, ODD, str(tmp_path / "step"))
    assert all(each == found[0] for each in found)  # every rank has the whole
    worst = check_same(found[0], alone)
    record_property("worst", max(worst.values()))
    print(worst)
    assert max(worst.values()) <= TOLERANCE, worst
    assert (tmp_path / "step-hf" / "config.json").exists()


def test_parts_are_filled_up_with_rows_of_no_loss():
    parts = split_batch(filled_rows(ODD, 3), 3)
    assert [len(part.batch) for part in parts] == [2, 2, 2]
    assert [part.first_row for part in parts] == [0, 2, 4]
    filler = parts[2].batch[1]
    assert filler["ids"].tolist() == [0] and filler["labels"].tolist() == [IGNORE]
    assert not len(filler["pixel_values"]) and not len(filler["image_grid_thw"])
    dense = TensorBatch(
        {
            "ids": torch.ones(3, 4, dtype=torch.long),
            "response_mask": torch.ones(3, 4, dtype=torch.bool),
            "advantages": torch.ones(3, 4),
            "rewards": torch.ones(3),
        }
    )
    last = split_batch(filled_rows(dense, 2, ("advantages",)), 2)[1].batch
    assert set(last.keys()) == {"ids", "response_mask", "advantages"}  # what the call reads
    assert last[1]["response_mask"].tolist() == [False]
    assert [len(part.batch) for part in split_batch(filled_rows(dense, 3), 3)] == [1, 1, 1]
    with raises(DataError, place="the batch", problem="there are no rows"):
        filled_rows([], 2)


def test_parts_have_patches_without_values():
    whole = batch_of(ODD)
    first = split_batch(filled_rows(ODD, 2), 2)[0]
    assert first.batch["pixel_values"].shapes == ((24, 0), (28, 0), (0, 0))
    assert first.all_fields()["pixel_values"] == whole["pixel_values"][:3]
    bare = TensorBatch.from_bytes(first.batch.to_bytes())
    assert bare["pixel_values"].shapes[0] == (24, 0)
    prompts = split_batch(without_labels(whole.without("labels")), 4)
    assert [len(part.batch) for part in prompts] == [2, 1, 1, 1]


def watched(path: str, case: Case) -> list[tuple[int, ...]]:
    """Shapes of the pixels that this rank's worker is handed."""
    worker = MegatronWorker(case.config(path))
    seen: list[Any] = []
    micro_batches = worker.micro_batches

    def watch(batch: TensorBatch, *args: Any) -> Any:
        if isinstance(batch, TensorBatch):  # not again what was made of it
            seen.extend(batch["pixel_values"].shapes)
        return micro_batches(batch, *args)

    worker.micro_batches = watch
    local_group(worker).forward(ODD[:2]).result()
    return seen


def test_pixel_values_go_to_stage_0_alone(pool, tiny):
    assert pool.run(watched, 2, tiny(), layout(pp=2)) == [
        [(24, 1536), (28, 1536)],
        [(24, 0), (28, 0)],
    ]


def policy_and_reference(path: str, case: Case) -> tuple[Any, ...]:
    """A frozen worker beside one that learns."""
    policy = local_group(MegatronWorker(case.config(path)))
    reference = local_group(MegatronWorker(case.config(path), training=False))
    batch = batch_of(ODD)
    before = reference.forward(batch).result()
    scored = batch.with_fields(
        ref_log_probs=TensorList(before),
        old_log_probs=TensorList(before),
        advantages=TensorList([torch.ones(len(row)) for row in before]),
    )
    steps = []
    for _ in range(2):
        metrics = policy.forward_backward(scored, loss="ppo", kl_coef=0.1).result()
        policy.optim_step(lr=1e-3).result()
        steps.append(metrics.means["kl"])
    after, frozen = policy.forward(batch).result(), reference.forward(batch).result()
    same = all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return steps, same, moved


def test_policy_and_reference_in_one_set_of_processes(pool, tiny):
    for steps, same, moved in pool.run(policy_and_reference, 2, tiny(), layout(tp=2)):
        assert abs(steps[0]) < 1e-9 and steps[1] > 1e-6  # from where they are one, away
        assert same and moved


def two_layouts(path: str) -> str:
    MegatronWorker(layout(tp=2).config(path))
    with raises(ConfigError, key="parallel.tp", found=1) as error:
        MegatronWorker(layout(pp=2).config(path), training=False)
    return error.value.problem


def test_workers_of_one_process_have_one_layout(pool, tiny):
    ours = "tp=1, pp=2, ep=1, virtual_stages=1"
    theirs = "tp=2, pp=1, ep=1, virtual_stages=1"
    assert all(ours in found and theirs in found for found in pool.run(two_layouts, 2, tiny()))


def wrong_calls(path: str, case: Case) -> list[str]:
    """Messages of calls that fail; the group can be used after each."""
    group = local_group(MegatronWorker(case.config(path)))
    rows = make_rows((RowSpec(5), RowSpec(9, images=((4, 4),)), RowSpec(5), RowSpec(6)))
    bad = [*rows[:3], replace(rows[1], image_grid_I3=rows[1].image_grid_I3 * 2)]
    calls: list[Callable[[], Future]] = [
        lambda: group.forward(bad),
        lambda: group.forward_backward(bad),
        lambda: group.optim_step(),
        lambda: group.forward_backward(rows, loss="ppo"),
        lambda: group.generate(bad, 2, ()),
        lambda: group.load("/nowhere"),
        lambda: group.sample(rows, SamplingSettings(1), 0),
    ]
    errors = [make().exception() for make in calls]
    found = [f"{type(error).__name__}: {error}" for error in errors]
    assert group.forward_backward(rows).result().num_tokens > 0
    assert group.optim_step().result()[0] > 0
    return found


def test_errors_are_the_workers_own_with_the_rank(pool, tiny):
    """The bad row is the second replica's, whose ranks are 1 and 3; all ranks learn of it."""
    found = pool.run(wrong_calls, 4, tiny(), layout(pp=2, dp=2))
    assert found[0] == found[1] == found[2] == found[3]
    pixels = "DataError: rank 1: row 3: pixel_values has 16 patches but its grid needs 128"
    assert found[0][0].startswith(pixels) and found[0][1].startswith(pixels)
    assert found[0][2].startswith("WorkerError: rank 0: optim_step: there are no gradients")
    assert found[0][3].startswith("DataError: rank 0: row 0: advantages ")
    assert found[0][4].startswith("DataError: rank 1: prompt 1: pixel_values has 16 patches")
    assert found[0][5].startswith("CheckpointError: rank 0: ")
    assert found[0][6].startswith("ConfigError: rank 0: sampling: n=0; give at least 1")


def broken(log_probs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if log_probs_N.numel():  # not where it is only tried
        raise RuntimeError("of the loss")
    return log_probs_N, {}


def break_inside(connection: Connection, path: str, rank: int, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = local_group(MegatronWorker(layout(pp=2).config(path)))
    with pytest.raises(WorkerError) as error:
        group.forward_backward(ODD, loss=broken)
    connection.send(str(error.value))


def test_an_error_inside_the_schedule_does_not_wait_for_the_others(process_tree, tiny, tmp_path):
    """The last stage fails while the first waits for it; both processes end at once."""
    children = [
        process_tree.fork(break_inside, tiny(), rank, f"{tmp_path}/store") for rank in range(2)
    ]
    first, last = (child.connection for child in children)
    assert last.poll(60) and last.recv() == "rank 1: RuntimeError: of the loss"
    # The kernel says "reset" where the end had unread data (one time in 40).
    assert first.poll(60) and re.search("Connection (closed|reset) by peer", first.recv())
    for child in children:
        child.kill()
