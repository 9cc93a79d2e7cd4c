# .venv/bin/python -m pytest tests/training/test_worker.py
"""The worker's surface: what it returns, on which ranks, and its start-up report."""

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tensors.tensor_batch import TensorBatch, rows_of
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.errors import DataError
from megatron_vlm.report.run_overview import StageReport, stage_reports
from megatron_vlm.training.data_feed import share_batch
from megatron_vlm.training.worker import MegatronWorker, StepMetrics
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, SHALLOW, SHARED, RowSpec, make_rows
from tests.support.error_fields import raises
from tests.support.runs import call, my_rows
from tests.support.suites import full, slow
from tests.support.walk import walk_of_step


def _report(worker: MegatronWorker) -> tuple[list[StageReport], set[str]]:
    reports = stage_reports(worker.cfg, worker.dims, worker.table)
    held = worker.held.items()
    return reports, {str(entry.part) for entry, param in held if not param.requires_grad}


@pytest.mark.parametrize("tied", [False, full(True)])
def test_report_counts_every_parameter_once(tied, pool, tiny):
    from transformers import Qwen3VLForConditionalGeneration

    folder = tiny(vocab=509, tied=tied)
    case = layout(tp=2, pp=2, layers_per_stage=[1, 3], freeze_vision=True)
    answers = pool.run(call, 4, folder, case, _report)
    first, second = answers[0][0]
    assert [frozen for _, frozen in answers] == [{"vision"}, {"vision"}, set(), set()]
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    total = sum(p.numel() for p in model.parameters())
    assert first.total.total() + second.total.total() == total
    assert first.layers == (range(0, 1),) and second.layers == (range(1, 4),)
    assert set(first.total) == {"vision", "merger", "embed", "decoder"}
    assert set(second.total) == {"decoder"} | ({"head"} if not tied else set())
    assert first.trainable["vision"] == 0
    assert first.trainable["merger"] == first.total["merger"] > 0


def _use_twice(path: str) -> list[bool]:
    dist.destroy_process_group()  # the pool's
    cfg, seen = layout().config(path), []
    for _ in range(2):
        with MegatronWorker(cfg) as worker:
            with MegatronWorker(cfg, training=False, base=worker):
                pass
            seen.append(dist.is_initialized())
            worker.forward(my_rows(make_rows(MIXED)))
        seen.append(dist.is_initialized())
    return seen


def test_the_groups_end_with_the_block_of_the_worker_that_made_them(pool, tiny):
    assert pool.run(_use_twice, 1, tiny(**SHALLOW)) == [[True, False, True, False]]


def _same_everywhere(worker: MegatronWorker) -> tuple:
    rows = my_rows(make_rows(MIXED))
    with_outputs = worker.forward_backward(rows, return_per_token_outputs=True)
    without = worker.forward_backward(rows)
    step = worker.optim_step(lr=3e-4)
    return (
        [row.tolist() for row in with_outputs.log_probs],
        without.log_probs,
        [row.tolist() for row in worker.forward(rows)],
        with_outputs.loss == without.loss,
        step,
    )


def test_results_are_the_same_on_every_rank(pool, tiny):
    answers = pool.run(call, 4, tiny(**SHALLOW), layout(tp=2, pp=2), _same_everywhere)
    assert all(answer == answers[0] for answer in answers)
    before, without, after, equal, (grad_norm, lr) = answers[0]
    assert without is None and equal
    assert before != after  # the step moved the weights
    assert grad_norm > 0 and lr == 3e-4


def _tokens_of_mlps(worker: MegatronWorker) -> tuple[list[int], int, int]:
    rows, seen = make_rows(MIXED[:2]), []
    for layer in worker.stage.chunks[0].decoder.layers:
        layer.mlp.register_forward_pre_hook(
            lambda _, given: seen.append(given[0].shape[:-1].numel())
        )
    worker.forward(rows)
    tokens = max(len(row.ids_S) for row in rows) * len(rows)
    return seen, tokens, sum(int((row.labels_S[1:] != -100).sum()) for row in rows)


def test_the_last_mlp_computes_supervised_tokens_alone(pool, tiny):
    [(seen, tokens, supervised)] = pool.run(call, 1, tiny(**SHALLOW), layout(), _tokens_of_mlps)
    assert seen == [*[tokens] * (len(seen) - 1), supervised]
    assert 0 < supervised < tokens


def _nothing_supervised(worker: MegatronWorker) -> tuple[float, int, float]:
    rows = [replace(row, labels_S=row.labels_S * 0 - 100) for row in make_rows(MIXED[:2])]
    metrics = worker.forward_backward(rows)
    return metrics.loss, metrics.num_tokens, worker.optim_step()[0]


def test_an_unsupervised_batch_moves_nothing(pool, tiny):
    for world, case in ((1, layout()), (4, layout(tp=2, pp=2))):
        assert set(pool.run(call, world, tiny(**SHALLOW), case, _nothing_supervised)) == {
            (0.0, 0, 0.0)
        }


def _patches_seen(worker: MegatronWorker) -> list[int]:
    """Return the patches that the tower gets in a forward, and in a step."""
    rows, seen = my_rows(make_rows(SHARED)), []
    if worker.grid.first:
        tower = worker.chunks[0].vision_model
        tower.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    local_batches = (worker.micro_batches(rows), None) if worker.grid.leads else None
    batches, _ = share_batch(local_batches, worker.grid, worker.platform.device)
    worker.forward(batches)  # as a loader's batches arrive
    worker.forward_backward(rows)
    return seen


def test_the_tower_sees_a_picture_of_several_rows_once(pool, tiny):
    once = [24 + 4 + 24, 8 + 48 + 8]  # in each of two micro-batches
    case = replace(layout(), train={"micro_batch_size": 4})
    assert pool.run(call, 1, tiny(**SHALLOW), case, _patches_seen) == [once * 2]
    case = replace(layout(tp=2, pp=2), train={"micro_batch_size": 4})
    shares = pool.run(call, 4, tiny(**SHALLOW), case, _patches_seen)
    assert [a + b for a, b in zip(*shares[:2], strict=True)] == once * 2 and shares[2:] == [[], []]


def _bad_row(worker: MegatronWorker) -> None:
    good, bad = make_rows((RowSpec(5), RowSpec(9, images=((4, 4),))))
    worker.forward_backward([good, replace(bad, image_grid_I3=bad.image_grid_I3 * 2)])


def test_a_bad_row_is_an_error_on_every_rank_not_a_hang(pool, tiny):
    with pytest.raises(RuntimeError, match="DataError: row 1: pixel_values has 16 patches"):
        pool.run(call, 4, tiny(**SHALLOW), layout(tp=2, pp=2), _bad_row)


def _norms(worker: MegatronWorker) -> list[tuple[float, float]]:
    """Of two steps: ours, and Megatron's, which asks the device for each tensor's."""
    found = []
    for seed in range(2):
        worker.forward_backward(my_rows(make_rows(MIXED, seed=seed)))
        worker.optimizer.prepare_grads()
        theirs = float(worker.optimizer.get_grad_norm())
        found.append((worker.optim_step()[0], theirs))
    return found


@pytest.mark.parametrize(
    "case",
    [layout(tp=2, dp=2), full(layout(tp=2, dp=2, distributed_optimizer=False)), full(layout(pp=2))],
    ids=["tp2-dp2", "tp2-dp2-plain-optimizer", "pp2"],
)
def test_the_gradient_norm_is_megatrons(case, pool, tiny):
    for found in pool.run(call, case.world, tiny(**SHALLOW), case, _norms):
        assert len(found) == 2 and all(ours == theirs > 0 for ours, theirs in found)


def _infinite(worker: MegatronWorker) -> tuple[float, bool]:
    worker.forward_backward(my_rows(make_rows(MIXED)))
    before = [param.detach().clone() for param in worker.chunks[0].parameters()]
    if worker.grid.rank == 0:
        worker.stage.wrapped[0].buffers[0].grad_data[0] = torch.inf
    norm, _ = worker.optim_step()
    after = worker.chunks[0].parameters()
    return norm, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_infinite_norm_moves_nothing_on_any_rank(pool, tiny):
    found = pool.run(call, 4, tiny(**SHALLOW), layout(tp=2, pp=2), _infinite)
    assert set(found) == {(torch.inf, True)}


def _parts(worker: MegatronWorker) -> set[str]:
    [row] = make_rows(MIXED[:1])
    rows = [replace(row, loss_weights_S=torch.ones(len(row.ids_S)))]
    [batch] = worker.stage.arrivals(worker.micro_batches(rows), worker.chunks[0])
    names = {item.name for item in fields(batch) if getattr(batch, item.name) is not None}
    return names - {"columns"} | set(batch.columns)


def test_each_stage_gets_its_part(pool, tiny):
    first, last = pool.run(call, 2, tiny(**SHALLOW), layout(pp=2), _parts)
    assert first == {"host", "number", "tokens_BS5", "pixel_values_PC", "visuals"}
    assert last == {"host", "number", "tokens_BS5", "places_N", "targets", "loss_weights"}


def _arriving(worker: MegatronWorker) -> list[int]:
    """Return how many micro-batches were taken when each of them has arrived."""
    taken = []

    def given() -> Iterator[MicroBatch]:
        for batch in worker.micro_batches(make_rows(MIXED)):
            taken.append(batch)
            yield batch

    return [len(taken) for _ in worker.stage.arrivals(given(), worker.chunks[0])]


def test_a_micro_batch_is_planned_when_the_one_before_is_queued(pool, tiny):
    [found] = pool.run(call, 1, tiny(**SHALLOW), layout(), _arriving)
    assert found == list(range(1, len(found) + 1)) and len(found) > 1


def _metrics(worker: MegatronWorker) -> list[StepMetrics]:
    """Return metrics that are read at once, with the norm of their step, and in another process."""
    rows = my_rows(make_rows(MIXED))
    at_once = worker.forward_backward(rows, entropy_coef=0.0)
    assert at_once.loss > 0
    late = worker.forward_backward(rows, entropy_coef=0.0)
    later = worker.forward_backward(rows, accumulate=True, entropy_coef=0.0)
    assert "loss" not in vars(late) | vars(later)
    worker.optim_step(lr=1e-2)
    worker.forward_backward(rows)  # its figures are others
    return [at_once, late, pickle.loads(pickle.dumps(later))]


@pytest.mark.parametrize("case", [layout(), slow(layout(pp=2, dp=2))], ids=["1", "pp2-dp2"])
def test_metrics_are_the_same_whenever_they_are_read(case, pool, tiny):
    for at_once, *others in pool.run(call, case.world, tiny(**SHALLOW), case, _metrics):
        assert set(at_once.means) == {"entropy"} and others == [at_once] * 2


def test_a_dense_step_of_one_model_passes_nothing_of_several_models_or_of_routers(tiny):
    walk = walk_of_step(tiny(**SHALLOW))
    assert walk.entries("training/losses.py", "loss_of") == 1
    assert walk.entries("training/pipeline.py", "run") == 1
    foreign = ("multi_model", "router", "experts", "expert_routing", "lora/")
    assert not [file for file in walk.files if any(name in file for name in foreign)]


@pytest.mark.full
def test_the_routers_look_ahead_is_found_in_the_walk(tiny):
    routed = walk_of_step(tiny(**EXPERTS), router_balance_loss=0.1)
    assert "training/router_losses.py" in routed.files
    assert routed.entries("training/pipeline.py", "run") == 2


def _as_hugging_face_calls(worker: MegatronWorker) -> tuple[bool, str]:
    """Plain tensors, from which the model finds out itself what a stage's input has made ready."""
    equal, chunk, rows = [], worker.chunks[0], make_rows(MIXED)
    with worker.stage.evaluating():
        for batch in worker.micro_batches(rows):
            plain = dict(
                input_ids=batch.ids_BS,
                position_ids=batch.position_ids_3BS,
                pixel_values=batch.pixel_values_PC,
                image_grid_thw=batch.image_grid_I3,
                pixel_values_videos=batch.pixel_values_videos_PC,
                video_grid_thw=batch.video_grid_I3,
            )
            [ready] = worker.stage.arrivals([batch], chunk)
            made = worker.stage.predict(chunk, ready).log_probs_M
            logits = worker.stage.call(chunk, ready, loss_mask=ready.places_N)
            mask = batch.targets_BS != IGNORE
            equal.append(
                torch.equal(chunk(**plain, labels=batch.targets_BS).log_probs_M, made)
                and torch.equal(chunk(**plain, loss_mask=mask), logits)
            )
        grid = plain["image_grid_thw"]
        with pytest.raises(DataError) as refused:
            chunk(**plain | {"image_grid_thw": grid * torch.tensor([1, 2, 1])})
    return all(equal), str(refused.value)


def test_the_model_takes_what_hugging_face_takes(pool, tiny):
    for case in (layout(), layout(tp=2)):
        for equal, refused in pool.run(
            call, case.world, tiny(**SHALLOW), case, _as_hugging_face_calls
        ):
            assert equal
            assert "row 1 of the micro-batch: image 0 has 8 x 1 = 8 features but 4" in refused


def test_a_batch_without_ids_is_refused():
    with raises(DataError, place="the batch", key="ids", problem_has="labels"):
        rows_of(TensorBatch({"labels": torch.zeros(2, 3)}))
