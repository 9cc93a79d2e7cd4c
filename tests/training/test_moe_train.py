# .venv/bin/python -m pytest tests/training/test_moe_train.py
"""Steps, checkpoints and generation of Qwen3-VL-MoE at each layout. A recomputed layer routes as it
did the first time, and the comparisons with Hugging Face can fail."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vlm.checkpoint.run_checkpoints import step_folder
from megatron_vlm.controller import WorkerGroup, local_group
from megatron_vlm.controller.worker_group import filled_rows, split_batch
from megatron_vlm.data.tensors.tensor_batch import batch_of, rows_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.errors import DataError
from megatron_vlm.model import experts, router
from megatron_vlm.model.router import RowCounts
from megatron_vlm.training import expert_routing, row_scores, stage_inputs
from megatron_vlm.training.worker import MegatronWorker
from tests.checkpoint.test_checkpoint import Part, go, whole
from tests.model.test_moe import EXPERTS, UNEVEN
from tests.model.test_mutants import Mutant, replaced, scaled_by
from tests.model.test_parity import TOLERANCE, errors, layout
from tests.run.test_evaluation import examine
from tests.support.batches import MIXED, SHALLOW, make_rows
from tests.support.comparison import relative_errors
from tests.support.reference import inputs_of, load_reference, run_reference
from tests.support.runs import Case, Outcome, call, collect_grads, loss_and_grads, my_rows
from tests.support.sets import write_set
from tests.support.suites import FULL, slow
from tests.training.test_decode import answer, ask, continue_rows
from tests.training.test_steps import check_weights, reference_steps

OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
STEPS = {
    "ep2": layout(dp=2, ep=2),
    "ep2-dp2-overlap-all": layout(dp=4, ep=2, **OVERLAP),
    "ep2-dp2-plain-optimizer": layout(dp=4, ep=2, distributed_optimizer=False),
    "ep2-pp2-dp2": layout(pp=2, dp=4, ep=2, layers_per_stage=[0, 4]),
    "ep4-plain-optimizer": layout(dp=4, ep=4, distributed_optimizer=False),
    "ep2-pp2-plain-optimizer": layout(pp=2, dp=2, ep=2, distributed_optimizer=False),
}
# The model of tests whose layout needs no more layers.
SMALL = EXPERTS | SHALLOW


@pytest.fixture(scope="module")
def expected(tiny):
    return run_reference(tiny(**SMALL), make_rows(MIXED))


def named(cases: dict[str, Any], often: str) -> list[Any]:
    marks = {name: FULL if name == often else pytest.mark.slow for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


@pytest.fixture(scope="module")
def reference() -> Callable[..., Any]:
    return cache(lambda path, frozen: reference_steps(path, frozen))


@pytest.mark.parametrize("case", named(STEPS, "ep2-dp2-overlap-all"))
def test_weights_after_three_steps(case, pool, tiny, reference, record_property):
    """The norms agree as well: experts of all ranks count once."""
    check_weights(case, tiny(**EXPERTS), False, pool, reference, record_property)


RESUMED = {
    "ep2": (layout(dp=2, ep=2), layout(pp=2, dp=2)),
    "ep2-dp2": (layout(dp=4, ep=2), layout(dp=4, ep=4)),
    "ep2-dp2-plain-optimizer": (layout(dp=4, ep=2, distributed_optimizer=False), layout()),
    "pp2-ep2": (layout(pp=2, dp=2, ep=2, layers_per_stage=[0, 4]), layout(dp=4, ep=2)),
    "1": (layout(), layout(pp=2, dp=2, ep=2, virtual_stages=2)),
}


@pytest.mark.parametrize("cases", named(RESUMED, "ep2-dp2"))
def test_a_run_resumes_and_moves(cases, pool, tiny, tmp_path):
    """A run resumes bit for bit at its own layout, and another layout holds the same bits."""
    case, other = cases
    path, run = tiny(**EXPERTS), tmp_path / "run"
    figures = pool.run(go, case.world, path, case, Part(run, range(3), None, (2, 3), True))[0]
    again = Part(tmp_path / "again", range(2, 3), step_folder(run, 2), (3,))
    assert pool.run(go, case.world, path, case, again)[0] == figures[2:]
    moved = Part(tmp_path / "moved", range(3, 3), step_folder(run, 3), (3,))
    pool.run(go, other.world, path, other, moved)
    expected = whole(step_folder(run, 3))
    for folder in (tmp_path / "again", tmp_path / "moved"):
        actual = whole(step_folder(folder, 3))
        assert actual.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []


GENERATE = {
    "1": layout(),
    "ep2": layout(dp=2, ep=2),
    "ep2-pp2x2": layout(pp=2, dp=2, ep=2, virtual_stages=2),
    "ep4": layout(dp=4, ep=4),
}


@pytest.mark.parametrize("case", named(GENERATE, "ep2"))
def test_replicas_that_share_experts_generate_together(case, pool, tiny):
    """The replicas have different prompts, or none, and stop at different times."""
    path, rows = tiny(**EXPERTS), make_rows(MIXED)
    free = continue_rows(path, rows)
    stop_ids = {free[0][4], free[2][0], free[4][7]}
    stopped = continue_rows(path, rows, stop_ids=stop_ids)
    requests = [ask(rows), ask(rows, stop_ids=stop_ids), ask(rows[:1])]
    answers = pool.run(answer, case.world, path, case, requests, True)
    pp = case.parallel["pp"]
    for request, expected in enumerate((free, stopped, free[:1])):
        replicas = [results[request] for results in answers[: case.world // pp]]
        assert [row for replica in replicas for row in replica] == expected


def count_tokens(worker: MegatronWorker) -> tuple[list[list[list[int]]], int]:
    """Return the tokens that each layer of this rank has sent for each micro-batch, and the number
    of tokens of the rank."""
    rows = my_rows(make_rows(UNEVEN))
    routings, right = [], stage_inputs.Routing

    def noted(*args: Any) -> router.Routing:
        routings.append(right(*args))
        return routings[-1]

    with mock.patch.object(stage_inputs, "Routing", noted):
        worker.forward(rows)
    sent = [list(each.counts.values()) for each in routings]
    own_sent = [[sum(layer[worker.grid.ep.rank]) for layer in layers] for layers in sent]
    return own_sent, sum(len(row.ids_S) for row in rows)


def test_padding_and_fillers_go_to_no_expert(pool, tiny):
    """Two rows of 100 and of 3 tokens are 103 tokens to the experts, however they are padded. One
    replica has fewer micro-batches than the other."""
    for sent, tokens in pool.run(call, 2, tiny(**SMALL), layout(dp=2, ep=2), count_tokens):
        assert len(sent) == 2 and len(sent[0]) == 2  # two micro-batches, in two layers
        assert [sum(layer) for layer in zip(*sent, strict=True)] == [2 * tokens] * 2


def loads(worker: MegatronWorker) -> list[tuple[float, list[list[float]]]]:
    """Return the loads of the busiest expert and of all experts in two steps. The evaluation
    between the steps does not count."""
    step_loads, right = [], expert_routing.busiest_expert_ratio
    for seed in range(2):
        rows = my_rows(make_rows(MIXED, seed=seed))
        worker.forward(rows)
        with mock.patch.object(expert_routing, "busiest_expert_ratio", wraps=right) as busiest:
            means = worker.forward_backward(rows).means
        [(load_LE,)] = [call.args for call in busiest.call_args_list]
        step_loads.append((means["expert_load"], load_LE.tolist()))
    return step_loads


@FULL
def test_the_load_of_experts(pool, tiny):
    """The loads are those of transformers' routers over all rows, for each layer. The reported load
    is that of the busiest expert."""
    path, expected = tiny(**EXPERTS, dense_layers=1, deepstack=1, vision_depth=1), []
    model = load_reference(path)
    for seed in range(2):
        load_LE = torch.zeros(3, 8)
        for row in make_rows(MIXED, seed=seed):
            with torch.no_grad():
                logits = model(**inputs_of(model, row), output_router_logits=True).router_logits
            for layer, logits_SE in enumerate(logits):
                load_LE[layer] += logits_SE.topk(2).indices.flatten().bincount(minlength=8)
        expected.append((float((load_LE.amax(1) / load_LE.mean(1)).amax()), load_LE.tolist()))
    assert all(busiest > 1.1 for busiest, _ in expected)
    for case in (layout(recompute="full"), layout(pp=2, dp=2, ep=2)):
        for actual in pool.run(call, case.world, path, case, loads):
            assert [load for _, load in actual] == [load for _, load in expected]
            assert [busiest for busiest, _ in actual] == pytest.approx(
                [each for each, _ in expected]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_experts_is_one_after_the_other(dtype):
    """The grouped kernel of GPUs, run here on the CPU, gives the outputs and gradients of experts
    in turn. One expert has no rows."""
    generator, counts, results = torch.Generator().manual_seed(0), [8, 0, 13, 3], []
    inputs = [
        torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 64), (4, 32, 64))
    ]
    for times in (experts.times_grouped, experts.times_in_turn):
        tensors = [each.clone().requires_grad_() for each in inputs]
        out = times(*tensors, RowCounts(torch.tensor(counts)))
        out.float().square().sum().backward()
        results.append([out, *(each.grad for each in tensors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=0.01 * float(other.detach().abs().max())
        )


def test_an_unset_gradient_of_an_idle_expert_becomes_zero():
    weight = torch.randn(3, 2, 2, requires_grad=True)
    out = experts._NoGradient.apply(weight, torch.tensor([False, True, False]))
    out.backward(torch.tensor([1.0, torch.nan, 2.0])[:, None, None].expand(3, 2, 2))
    assert weight.grad[:, 0, 0].tolist() == [1, 0, 2]


def score_with_nothing(worker: MegatronWorker) -> list[list[torch.Tensor]]:
    """Score once more on the second replica than on the first, which takes part with nothing."""
    rows, second = make_rows(MIXED), worker.grid.dp.rank == 1
    parts = [rows[:2], rows[2:3]] if second else [rows[4:8]]
    more = worker.stage.global_max(len(parts)) - len(parts)
    scored = [worker.forward(part) for part in parts]
    for _ in range(more):
        assert row_scores.score_rows(worker.stage, [], 1.0) == []
    return scored


def test_a_replica_with_nothing_to_score_takes_part(pool, tiny, expected):
    first, second = pool.run(call, 2, tiny(**SMALL), layout(dp=2, ep=2), score_with_nothing)
    for actual, expected_row in zip(
        [*first[0], *second[0], *second[1]],
        [*expected.log_probs[4:8], *expected.log_probs[:3]],
        strict=True,
    ):
        assert float((actual - expected_row).abs().max() / expected_row.abs().max()) <= TOLERANCE


@pytest.mark.slow
def test_replicas_that_share_experts_are_examined_together(pool, tiny, tmp_path):
    """The 13 questions are 7 on one replica and 6 on the other, each with all its candidates."""
    file, path = write_set(tmp_path, 13), tiny(**SMALL)
    records = map(json.loads, Path(file).read_text().splitlines())
    answers = dict.fromkeys(record["messages"][-1]["content"].strip() for record in records)
    options = {"generate": True, "max_new_tokens": 4, "candidates": list(answers)}
    [alone] = pool.run(examine, 1, path, layout(), file, options)[0]
    for examined in pool.run(examine, 2, path, layout(dp=2, ep=2), file, options):
        [(name, scores, _)] = examined
        del scores["seconds"]
        assert scores.pop("remarks") == alone[1]["remarks"]
        assert name == alone[0]
        assert scores == pytest.approx({key: alone[1][key] for key in scores}, rel=TOLERANCE)


# Recompute.


@contextmanager
def second_choices(replayed: bool) -> Iterator[None]:
    """Give a router another result the second time, as rounding can. Only without a replay does a
    recomputed layer call its router again."""
    right_route, right_choose = experts.route, router.choose_experts
    repeated = set()

    def route(hidden, weight, top_k, kept, layer):
        again = layer in kept.chosen
        if again and not replayed:
            kept.chosen.pop(layer)
            kept.counts.pop(layer)

        def choose(probs, top_k):
            if not again:
                return right_choose(probs, top_k)
            repeated.add(layer)
            noise = torch.rand(probs.shape, generator=torch.Generator().manual_seed(layer))
            return right_choose(probs + 0.05 * noise, top_k)

        with mock.patch.object(router, "choose_experts", choose):
            return right_route(hidden, weight, top_k, kept, layer)

    with mock.patch.object(experts, "route", route):
        yield
    assert bool(repeated) != replayed


def recomputed(path: str, case: Case, rows: list, replayed: bool) -> Outcome:
    with second_choices(replayed):
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=FULL), slow(2)])
def test_a_recomputed_layer_routes_as_before(pp, pool, tiny):
    """The router would choose other experts the second time."""
    path, rows = tiny(**SMALL), make_rows(MIXED)
    plain = layout(pp=pp, dp=2, ep=2)
    case = layout(pp=pp, dp=2, ep=2, recompute="full")
    expected = pool.run(loss_and_grads, case.world, path, plain, rows)[0].grads
    actual = pool.run(recomputed, case.world, path, case, rows, True)[0].grads
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    broken = pool.run(recomputed, case.world, path, case, rows, False)[0].grads
    assert max(relative_errors(broken, expected).values()) > 0.05


# Routing that is given with a batch.


def routed(path: str, case: Case, given: list[torch.Tensor | None] | None) -> tuple[Any, ...]:
    """Return the routing, the log-probs and the gradients of rows, with the given routing or else
    with the model's own."""
    worker, rows = MegatronWorker(case.config(path)), make_rows(MIXED)
    if given is not None:
        rows = [replace(row, routing_SLK=each) for row, each in zip(rows, given, strict=True)]
    local_rows = my_rows(rows)
    results = worker.routing(local_rows), worker.forward(local_rows)
    worker.forward_backward(local_rows)
    return *results, collect_grads(worker)


def of_replicas(answers: list[Any], which: int) -> list[torch.Tensor]:
    """Return the rows of both replicas."""
    return [*answers[0][which], *answers[1][which]]


@pytest.mark.parametrize("pp", [pytest.param(2, marks=FULL), slow(1)])
def test_a_routing_that_was_written_out_is_followed(pp, pool, tiny):
    """A model with other weights follows it, as a trainer is ahead of its sampler: with the first
    model's routing its own choices do not count. The first model's own routing changes nothing for
    itself."""
    sizes = EXPERTS | dict(dense_layers=1, deepstack=1, vision_depth=1)
    path, other = tiny(**sizes), tiny(**sizes, seed=3)
    case = layout(pp=pp, dp=2, ep=2, recompute="full")
    answers = pool.run(routed, case.world, path, case, None)
    written = of_replicas(answers, 0)
    assert [tuple(each.shape) for each in written] == [
        (len(row.ids_S), 3, 2) for row in make_rows(MIXED)
    ]
    again = pool.run(routed, case.world, path, case, written)
    for which in (0, 1):
        for one, two in zip(of_replicas(answers, which), of_replicas(again, which), strict=True):
            assert torch.equal(one, two)
    assert all(torch.equal(again[0][2][name], grad) for name, grad in answers[0][2].items())
    free = pool.run(routed, case.world, other, case, None)
    half = [each if place % 2 else None for place, each in enumerate(written)]
    bound = pool.run(routed, case.world, other, case, half)
    for place, (own, forced) in enumerate(
        zip(of_replicas(free, 0), of_replicas(bound, 0), strict=True)
    ):
        assert not torch.equal(own, written[place])
        assert torch.equal(forced, written[place] if place % 2 else own)


def test_given_experts_are_those_of_transformers_routers(pool, tiny):
    path, rows = tiny(**SMALL), make_rows(MIXED)
    model = load_reference(path)
    written = of_replicas(pool.run(routed, 2, path, layout(dp=2, ep=2), None), 0)
    for row, actual_SLK in zip(rows, written, strict=True):
        with torch.no_grad():
            logits = model(**inputs_of(model, row), output_router_logits=True).router_logits
        for layer, logits_SE in enumerate(logits):
            expected_SK = logits_SE.topk(2).indices.sort().values
            assert torch.equal(actual_SLK[:, layer].long().sort().values, expected_SK)


def test_a_group_hands_routing_on():
    """Routing is a field of the parts' batches. The row that fills up the parts has none, as other
    rows may."""
    rows = make_rows(MIXED)[:3]
    routing = torch.randint(0, 8, (len(rows[1].ids_S), 4, 2), dtype=torch.int32)
    batch = filled_rows([rows[0], replace(rows[1], routing_SLK=routing), rows[2]], 2)
    parts = split_batch(batch, 2)
    routings = [row.routing_SLK for part in parts for row in rows_of(part.batch)]
    assert [each is None for each in routings] == [True, False, True, True]
    assert torch.equal(routings[1], routing)


def group_routes(group: WorkerGroup) -> tuple[TensorList, ...]:
    """Return a controller's results for five rows: the routing, other choices, the routing with
    those choices given, and the log-probs with its own choices given and without any."""
    batch = batch_of(make_rows(MIXED)[:5])
    free = group.routing(batch).result()
    others = TensorList([(row + 1) % 8 for row in free])
    bound = group.routing(batch.with_fields(routing=others)).result()
    again = group.forward(batch.with_fields(routing=free)).result()
    return free, others, bound, TensorList(again), TensorList(group.forward(batch).result())


def local_routes(path: str, case: Case) -> tuple[TensorList, ...]:
    return group_routes(local_group(MegatronWorker(case.config(path))))


def check_group_routes(found: tuple[TensorList, ...], want: list[torch.Tensor]) -> None:
    """Check the routing of a group. `want` is what the workers of one process choose."""
    free, others, bound, again, log_probs = found
    assert free == TensorList(want) and free.dtype is torch.int32
    assert bound == others != free and again == log_probs


def routes(worker: MegatronWorker) -> list[torch.Tensor]:
    return worker.routing(make_rows(MIXED)[:5])


@pytest.mark.parametrize("case", [layout(dp=2, ep=2), slow(layout(pp=2, dp=2, ep=2))])
def test_a_group_routes_as_its_workers_do(case, pool, tiny):
    """Five rows do not divide over two replicas. The rows that fill them up are not in the result,
    which every rank has whole."""
    path = tiny(**SMALL)
    [expected] = pool.run(call, 1, path, layout(), routes)
    for actual in pool.run(local_routes, case.world, path, case):
        check_group_routes(actual, expected)


def refusals(worker: MegatronWorker) -> list[DataError]:
    row, refused = make_rows(MIXED)[0], []
    good = torch.tensor([0, 1]).expand(len(row.ids_S), 4, 2)
    twice, beyond = good.clone(), good.clone()
    twice[3, 1], beyond[0, 2] = 5, torch.tensor([-1, 3])
    for wrong in (good[:-1], good[:, :3], good[..., :1], twice, beyond, good + 7):
        with pytest.raises(DataError) as caught:
            worker.forward([replace(row, routing_SLK=wrong)])
        refused.append(caught.value)
    return refused


def test_a_routing_that_cannot_be_is_refused(pool, tiny):
    [refused] = pool.run(call, 1, tiny(**EXPERTS), layout(), refusals)
    assert "give the experts of each token" in str(refused[0])
    tokens = len(make_rows(MIXED)[0].ids_S)
    assert [(each.key, each.found) for each in refused[1:3]] == [
        ("routing.shape", (tokens, 3, 2)),
        ("routing.shape", (tokens, 4, 1)),
    ]
    assert [(each.place, each.key, each.found) for each in refused[3:]] == [
        ("micro-batch 0: token 3 in layer 1", "routing", [5, 5]),
        ("micro-batch 0: token 0 in layer 2", "routing", [-1, 3]),
        ("micro-batch 0: token 0 in layer 0", "routing", [7, 8]),
    ]
    assert "from 0 to 7" in refused[3].allowed


# Mutants.


def of_route(change: Callable[[Any, Any], Any]) -> Mutant:
    return replaced(experts, "route", lambda right: lambda *args: change(*right(*args)))


def gate_and_up_swapped(_right: Any) -> Any:
    def wrong(self, x, counts):
        swapped = torch.cat(self.gate_up(x, counts).chunk(2, dim=1)[::-1], dim=1)
        return self.down(self.activation(swapped), counts)

    return wrong


def not_normalised(right: Any) -> Any:
    def wrong(hidden, weight, *more):
        chosen, _ = right(hidden, weight, *more)
        return chosen, (hidden @ weight.T).softmax(-1).gather(1, chosen)

    return wrong


def summed_over_all_replicas(right: Any) -> Any:
    """Remove Megatron's mark, so that gradients of different experts are added up."""

    def wrong(self, *args, **kwargs):
        right(self, *args, **kwargs)
        for param in self.parameters():
            param.allreduce = True

    return wrong


MUTANTS: dict[str, Mutant] = {
    "gate and up swapped": replaced(experts.ExpertMLP, "_mlp", gate_and_up_swapped),
    "weights not normalised": replaced(experts, "route", not_normalised),
    "weights all equal": of_route(lambda c, w: (c, torch.full_like(w, 0.5))),
    "router learns nothing": of_route(lambda c, w: (c, w.detach())),
    "router in bf16": of_route(lambda c, w: (c, w.bfloat16().float())),
    "another expert": of_route(lambda c, w: ((c + 1) % 8, w)),
    # Rows stay as they arrive from the ranks, not in the order of the experts.
    "rows by rank": replaced(
        experts, "_by_expert", lambda right: lambda held: right(held).sort().values
    ),
    # The gradient of a row is summed once for each rank, as if an average divided it later.
    "gradients of all ranks": replaced(experts._Exchange, "backward", scaled_by(2)),
    "experts summed over all": replaced(experts.ExpertMLP, "__init__", summed_over_all_replicas),
}


def broken(path: str, case: Case, rows: list, names: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for name in names:
        with MUTANTS[name]():
            outcomes.append(loss_and_grads(path, case, rows))
    return outcomes


QUICK = ("rows by rank", "gradients of all ranks", "experts summed over all")
OTHERS = tuple(name for name in MUTANTS if name not in QUICK)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(OTHERS, marks=FULL)], ids=["exchange", "others"]
)
def test_parity_notices(names, pool, tiny, expected, record_property):
    case = layout(dp=2, ep=2)
    answers = pool.run(broken, 2, tiny(**SMALL), case, make_rows(MIXED), names)
    worst = {
        name: max(errors(outcomes, expected, case).values())
        for name, *outcomes in zip(names, *answers, strict=True)
    }
    record_property("worst", worst)
    assert [name for name, error in worst.items() if error <= 100 * TOLERANCE] == []
