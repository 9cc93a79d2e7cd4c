# .venv/bin/python -m pytest tests/test_moe_train.py
"""Steps, checkpoints and generation of Qwen3-VL-MoE at each layout; a recomputed layer routes as it
did the first time; and the comparisons with Hugging Face can fail."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_vlm.checkpoint.retention import step_folder
from megatron_vlm.controller import WorkerGroup, local_group
from megatron_vlm.controller.split_batch import even_parts
from megatron_vlm.data.tensors.rows import batch_of, rows_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.errors import DataError
from megatron_vlm.model import experts, router
from megatron_vlm.training import stage_inputs
from megatron_vlm.training.expert_routing import percent_of_mean
from megatron_vlm.training.worker import MegatronWorker
from tests.batches import MIXED, make_rows
from tests.reference import inputs_of, load_reference, run_reference
from tests.runs import Case, Outcome, call, collect_grads, loss_and_grads, my_rows
from tests.sets import write_set
from tests.test_checkpoint import Part, go, whole
from tests.test_decode import answer, ask, continue_rows
from tests.test_evaluation import examine
from tests.test_moe import EXPERTS, UNEVEN
from tests.test_parity import TOLERANCE, errors, layout
from tests.test_steps import check_weights, reference_steps

OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
STEPS = {
    "ep2": layout(dp=2, ep=2),
    "ep2-dp2-overlap-all": layout(dp=4, ep=2, **OVERLAP),
    "ep2-dp2-plain-optimizer": layout(dp=4, ep=2, distributed_optimizer=False),
    "ep2-pp2-dp2": layout(pp=2, dp=4, ep=2, layers_per_stage=[0, 4]),
    "ep4-plain-optimizer": layout(dp=4, ep=4, distributed_optimizer=False),
    "ep2-pp2-plain-optimizer": layout(pp=2, dp=2, ep=2, distributed_optimizer=False),
}
QUICK = {"ep2-dp2-overlap-all"}


@pytest.fixture(scope="module")
def expected(tiny):
    return run_reference(tiny(**EXPERTS), make_rows(MIXED))


def named(cases: dict[str, Any], quick: set[str]) -> list[Any]:
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


@pytest.fixture(scope="module")
def reference() -> Callable[..., Any]:
    return cache(lambda path, frozen: reference_steps(path, frozen))


@pytest.mark.parametrize("case", named(STEPS, QUICK))
def test_weights_after_three_steps(case, pool, tiny, reference, record_property):
    """And the norms: experts of all ranks count once."""
    check_weights(case, tiny(**EXPERTS), False, pool, reference, record_property)


RESUMED = {
    "ep2": (layout(dp=2, ep=2), layout(pp=2, dp=2)),
    "ep2-dp2": (layout(dp=4, ep=2), layout(dp=4, ep=4)),
    "ep2-dp2-plain-optimizer": (layout(dp=4, ep=2, distributed_optimizer=False), layout()),
    "pp2-ep2": (layout(pp=2, dp=2, ep=2, layers_per_stage=[0, 4]), layout(dp=4, ep=2)),
    "1": (layout(), layout(pp=2, dp=2, ep=2, virtual_stages=2)),
}


@pytest.mark.parametrize("cases", named(RESUMED, {"ep2-dp2"}))
def test_a_run_resumes_and_moves(cases, pool, tiny, tmp_path):
    """Bit for bit at its own layout; another one holds the same bits."""
    case, other = cases
    path, run = tiny(**EXPERTS), tmp_path / "run"
    figures = pool.run(go, case.world, path, case, Part(run, range(3), None, (2, 3), True))[0]
    again = Part(tmp_path / "again", range(2, 3), step_folder(run, 2), (3,))
    assert pool.run(go, case.world, path, case, again)[0] == figures[2:]
    moved = Part(tmp_path / "moved", range(3, 3), step_folder(run, 3), (3,))
    pool.run(go, other.world, path, other, moved)
    expected = whole(step_folder(run, 3))
    for folder in (tmp_path / "again", tmp_path / "moved"):
        found = whole(step_folder(folder, 3))
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


CHAIN = (
    layout(dp=2, ep=2),
    layout(dp=4, ep=4, distributed_optimizer=False),
    layout(pp=2, dp=2, ep=2, layers_per_stage=[3, 1]),
    layout(pp=2, dp=2),
    layout(),
)


@pytest.mark.slow
def test_a_run_ends_its_moves_as_it_began(pool, tiny, tmp_path):
    """From one process over every way to share out experts and back: after each move the same
    bits, of weights and of the optimizer's state, and at the end the next step is that of the run
    that stayed, bit for bit."""
    path, stayed = tiny(**EXPERTS), tmp_path / "stayed"
    figures = pool.run(go, 1, path, layout(), Part(stayed, range(3), None, (2, 3)))[0]
    before, expected = step_folder(stayed, 2), whole(step_folder(stayed, 2))
    assert {key.partition("/")[0] for key in expected if "/" in key} == {"exp_avg", "exp_avg_sq"}
    for number, case in enumerate(CHAIN):
        run, back = tmp_path / str(number), number == len(CHAIN) - 1
        part = Part(run, range(2, 3 if back else 2), before, (3 if back else 2,))
        done = pool.run(go, case.world, path, case, part)[0]
        before = step_folder(run, part.save_at[0])
        if not back:
            found = whole(before)
            assert found.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert done == figures[2:]
    found, expected = whole(before), whole(step_folder(stayed, 3))
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


GENERATE = {
    "1": layout(),
    "ep2": layout(dp=2, ep=2),
    "ep2-pp2x2": layout(pp=2, dp=2, ep=2, virtual_stages=2),
    "ep4": layout(dp=4, ep=4),
}


@pytest.mark.parametrize("case", named(GENERATE, {"ep2"}))
def test_replicas_that_share_experts_generate_together(case, pool, tiny):
    """They have different prompts, or none, and stop at different times."""
    path, rows = tiny(**EXPERTS), make_rows(MIXED)
    free = continue_rows(path, rows)
    stop_ids = {free[0][4], free[2][0], free[4][7]}
    stopped = continue_rows(path, rows, stop_ids=stop_ids)
    requests = [ask(rows), ask(rows, stop_ids=stop_ids), ask(rows[:1])]
    answers = pool.run(answer, case.world, path, case, requests, True)
    pp = case.parallel["pp"]
    for request, want in enumerate((free, stopped, free[:1])):
        replicas = [found[request] for found in answers[: case.world // pp]]
        assert [row for replica in replicas for row in replica] == want


def count_tokens(worker: MegatronWorker) -> tuple[list[list[list[int]]], int]:
    """What each layer of this rank has sent, for each micro-batch; and the tokens that it has."""
    rows = my_rows(make_rows(UNEVEN))
    found, right = [], stage_inputs.Routing

    def noted(*args: Any) -> router.Routing:
        found.append(right(*args))
        return found[-1]

    with mock.patch.object(stage_inputs, "Routing", noted):
        worker.forward(rows)
    sent = [list(each.counts.values()) for each in found]
    mine = [[sum(layer[worker.grid.ep.rank]) for layer in layers] for layers in sent]
    return mine, sum(len(row.ids_S) for row in rows)


def test_padding_and_fillers_go_to_no_expert(pool, tiny):
    """Two rows of 100 and of 3 tokens are 103 tokens to the experts, whatever they are padded to;
    and one replica has fewer micro-batches."""
    for sent, tokens in pool.run(call, 2, tiny(**EXPERTS), layout(dp=2, ep=2), count_tokens):
        assert len(sent) == 2 and len(sent[0]) == 4  # of two micro-batches, in four layers
        assert [sum(layer) for layer in zip(*sent, strict=True)] == [2 * tokens] * 4


def loads(worker: MegatronWorker) -> list[tuple[float, list[list[float]]]]:
    """Of two steps, the busiest and all; evaluation between them does not count."""
    found = []
    for seed in range(2):
        rows = my_rows(make_rows(MIXED, seed=seed))
        worker.forward(rows)
        metrics = worker.forward_backward(rows)
        assert metrics.expert_load_LE is not None
        found.append((metrics.means["expert_load"], metrics.expert_load_LE.tolist()))
    return found


def test_the_load_of_experts(pool, tiny):
    """By the routers of transformers, over all rows and for each layer; the worst one is the
    busiest. In whole percent of the mean, too."""
    path, want = tiny(**EXPERTS, dense_layers=1), []
    model = load_reference(path)
    for seed in range(2):
        load_LE = torch.zeros(3, 8)
        for row in make_rows(MIXED, seed=seed):
            with torch.no_grad():
                logits = model(**inputs_of(model, row), output_router_logits=True).router_logits
            for layer, logits_SE in enumerate(logits):
                load_LE[layer] += logits_SE.topk(2).indices.flatten().bincount(minlength=8)
        want.append((float((load_LE.amax(1) / load_LE.mean(1)).amax()), load_LE.tolist()))
        shares = [[round(100 * 8 * n / sum(row)) for n in row] for row in load_LE.tolist()]
        assert percent_of_mean(load_LE) == shares
    assert all(busiest > 1.1 for busiest, _ in want)
    for case in (layout(recompute="full"), layout(pp=2, dp=2, ep=2)):
        for found in pool.run(call, case.world, path, case, loads):
            assert [load for _, load in found] == [load for _, load in want]
            assert [busiest for busiest, _ in found] == pytest.approx([each for each, _ in want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_for_all_experts_is_one_after_the_other(dtype):
    """As GPUs run them, here on the CPU: outputs and gradients; one expert has no rows."""
    generator, counts, found = torch.Generator().manual_seed(0), [8, 0, 13, 3], []
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 64), (4, 32, 64))]
    for times in (experts.times_grouped, experts.times_in_turn):
        tensors = [each.clone().requires_grad_() for each in given]
        out = times(*tensors, counts)
        out.float().square().sum().backward()
        found.append([out, *(each.grad for each in tensors)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=0.01 * float(other.detach().abs().max())
        )


def score_with_nothing(worker: MegatronWorker) -> list[list[torch.Tensor]]:
    """The second replica scores one time more than the first, which joins in with nothing."""
    rows, second = make_rows(MIXED), worker.grid.dp.rank == 1
    mine = [rows[:2], rows[2:3]] if second else [rows[4:8]]
    more = worker.stage.global_max(len(mine)) - len(mine)
    found = [worker.forward(part) for part in mine]
    for _ in range(more):
        assert worker.stage.score([]) == []
    return found


def test_a_replica_with_nothing_to_score_takes_part(pool, tiny, expected):
    first, second = pool.run(call, 2, tiny(**EXPERTS), layout(dp=2, ep=2), score_with_nothing)
    for found, want in zip(
        [*first[0], *second[0], *second[1]],
        [*expected.log_probs[4:8], *expected.log_probs[:3]],
        strict=True,
    ):
        assert float((found - want).abs().max() / want.abs().max()) <= TOLERANCE


@pytest.mark.slow
def test_replicas_that_share_experts_are_examined_together(pool, tiny, tmp_path):
    """Of 13 questions one has 7 and the other 6, each with all its candidates."""
    file, path = write_set(tmp_path, 13), tiny(**EXPERTS)
    records = map(json.loads, Path(file).read_text().splitlines())
    answers = dict.fromkeys(record["messages"][-1]["content"].strip() for record in records)
    options = {"generate": True, "max_new_tokens": 4, "candidates": list(answers)}
    [alone] = pool.run(examine, 1, path, layout(), file, options)[0]
    for found in pool.run(examine, 2, path, layout(dp=2, ep=2), file, options):
        [(name, scores, _)] = found
        del scores["seconds"]
        assert name == alone[0]
        assert scores == pytest.approx({key: alone[1][key] for key in scores}, rel=TOLERANCE)


# Recompute.


@contextmanager
def second_choices(replayed: bool) -> Iterator[None]:
    """Whoever asks a router a second time hears something else, as rounding can have it. Without a
    replay a recomputed layer asks."""
    right_route, right_choose = experts.route, router.choose_experts
    asked = set()

    def route(hidden, weight, top_k, kept, layer):
        again = layer in kept.chosen
        if again and not replayed:
            kept.chosen.pop(layer)
            kept.counts.pop(layer)

        def choose(probs, top_k):
            if not again:
                return right_choose(probs, top_k)
            asked.add(layer)
            noise = torch.rand(probs.shape, generator=torch.Generator().manual_seed(layer))
            return right_choose(probs + 0.05 * noise, top_k)

        with mock.patch.object(router, "choose_experts", choose):
            return right_route(hidden, weight, top_k, kept, layer)

    with mock.patch.object(experts, "route", route):
        yield
    assert bool(asked) != replayed


def recomputed(path: str, case: Case, rows: list, replayed: bool) -> Outcome:
    with second_choices(replayed):
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_recomputed_layer_routes_as_before(pp, pool, tiny):
    """However its router would choose the second time."""
    path, rows = tiny(**EXPERTS), make_rows(MIXED)
    kept = layout(pp=pp, dp=2, ep=2)
    case = layout(pp=pp, dp=2, ep=2, recompute="full")
    want = pool.run(loss_and_grads, case.world, path, kept, rows)[0].grads
    found = pool.run(recomputed, case.world, path, case, rows, True)[0].grads
    assert [name for name in want if not torch.equal(found[name], want[name])] == []
    broken = pool.run(recomputed, case.world, path, case, rows, False)[0].grads
    wrong = {name: float((broken[name] - want[name]).norm() / want[name].norm()) for name in want}
    assert max(wrong.values()) > 0.05


# Routing that a batch says.


def routed(path: str, case: Case, given: list[torch.Tensor | None] | None) -> tuple[Any, ...]:
    """With the routing that is given, or else with that of the model: what it was, log-probs, and
    gradients."""
    worker, rows = MegatronWorker(case.config(path)), make_rows(MIXED)
    if given is not None:
        rows = [replace(row, routing_SLK=each) for row, each in zip(rows, given, strict=True)]
    mine = my_rows(rows)
    found = worker.routing(mine), worker.forward(mine)
    worker.forward_backward(mine)
    return *found, collect_grads(worker)


def of_replicas(answers: list[Any], which: int) -> list[torch.Tensor]:
    """The rows of both replicas."""
    return [*answers[0][which], *answers[1][which]]


@pytest.mark.parametrize("pp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_routing_that_was_written_out_is_followed(pp, pool, tiny):
    """By a model with other weights, as a trainer is ahead of its sampler: with the routing of the
    first one its own choices do not count; and the first one's own routing changes nothing."""
    path, other = tiny(**EXPERTS, dense_layers=1), tiny(**EXPERTS, dense_layers=1, seed=3)
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
    path, rows = tiny(**EXPERTS), make_rows(MIXED)
    model = load_reference(path)
    written = of_replicas(pool.run(routed, 2, path, layout(dp=2, ep=2), None), 0)
    for row, found_SLK in zip(rows, written, strict=True):
        with torch.no_grad():
            logits = model(**inputs_of(model, row), output_router_logits=True).router_logits
        for layer, logits_SE in enumerate(logits):
            want_SK = logits_SE.topk(2).indices.sort().values
            assert torch.equal(found_SLK[:, layer].long().sort().values, want_SK)


def test_a_group_hands_routing_on():
    """As a field of its batch; the row that fills up the parts has none, as others may."""
    rows = make_rows(MIXED)[:3]
    given = torch.randint(0, 8, (len(rows[1].ids_S), 4, 2), dtype=torch.int32)
    parts = even_parts([rows[0], replace(rows[1], routing_SLK=given), rows[2]], 2)
    found = [row.routing_SLK for part in parts for row in rows_of(part.batch)]
    assert [each is None for each in found] == [True, False, True, True]
    assert torch.equal(found[1], given)


def group_routes(group: WorkerGroup) -> tuple[TensorList, ...]:
    """What a controller gets of five rows, and of them again with others' choices; log-probs with
    its own choices, and without."""
    batch = batch_of(make_rows(MIXED)[:5])
    free = group.routing(batch).result()
    others = TensorList([(row + 1) % 8 for row in free])
    bound = group.routing(batch.with_fields(routing=others)).result()
    again = group.forward(batch.with_fields(routing=free)).result()
    return free, others, bound, TensorList(again), TensorList(group.forward(batch).result())


def local_routes(path: str, case: Case) -> tuple[TensorList, ...]:
    return group_routes(local_group(MegatronWorker(case.config(path))))


def check_group_routes(found: tuple[TensorList, ...], want: list[torch.Tensor]) -> None:
    """`want` is what the workers of one process choose."""
    free, others, bound, again, log_probs = found
    assert free == TensorList(want) and free.dtype is torch.int32
    assert bound == others != free and again == log_probs


def routes(worker: MegatronWorker) -> list[torch.Tensor]:
    return worker.routing(make_rows(MIXED)[:5])


@pytest.mark.parametrize(
    "case",
    [layout(dp=2, ep=2), pytest.param(layout(pp=2, dp=2, ep=2), marks=pytest.mark.slow)],
)
def test_a_group_routes_as_its_workers_do(case, pool, tiny):
    """Two replicas do not divide five rows: what fills them up is not in the answer, which every
    rank has whole."""
    path = tiny(**EXPERTS)
    [want] = pool.run(call, 1, path, layout(), routes)
    for found in pool.run(local_routes, case.world, path, case):
        check_group_routes(found, want)


def refusals(worker: MegatronWorker) -> list[DataError]:
    row, said = make_rows(MIXED)[0], []
    good = torch.tensor([0, 1]).expand(len(row.ids_S), 4, 2)
    twice, beyond = good.clone(), good.clone()
    twice[3, 1], beyond[0, 2] = 5, torch.tensor([-1, 3])
    for wrong in (good[:-1], good[:, :3], good[..., :1], twice, beyond, good + 7):
        with pytest.raises(DataError) as caught:
            worker.forward([replace(row, routing_SLK=wrong)])
        said.append(caught.value)
    return said


def test_a_routing_that_cannot_be_is_refused(pool, tiny):
    [said] = pool.run(call, 1, tiny(**EXPERTS), layout(), refusals)
    assert "give the experts of each token" in str(said[0])
    tokens = len(make_rows(MIXED)[0].ids_S)
    assert [(each.key, each.found) for each in said[1:3]] == [
        ("routing.shape", (tokens, 3, 2)),
        ("routing.shape", (tokens, 4, 1)),
    ]
    assert [(each.place, each.key, each.found) for each in said[3:]] == [
        ("micro-batch 0: token 3 in layer 1", "routing", [5, 5]),
        ("micro-batch 0: token 0 in layer 2", "routing", [-1, 3]),
        ("micro-batch 0: token 0 in layer 0", "routing", [7, 8]),
    ]
    assert "from 0 to 7" in said[3].allowed


# Mutants.


def patched_route(change: Callable[[Any, Any], Any]) -> Any:
    right = experts.route

    def wrong(*args: Any) -> Any:
        return change(*right(*args))

    return mock.patch.object(experts, "route", wrong)


def gate_and_up_swapped() -> Any:
    right = experts.apply_experts

    def wrong(x, gate_up, *more):
        def swapped(rows, counts):
            return torch.cat(gate_up(rows, counts).chunk(2, dim=1)[::-1], dim=1)

        return right(x, swapped, *more)

    return mock.patch.object(experts, "apply_experts", wrong)


def not_normalised() -> Any:
    right = experts.route

    def wrong(hidden, weight, *more):
        chosen, _ = right(hidden, weight, *more)
        return chosen, (hidden @ weight.T).softmax(-1).gather(1, chosen)

    return mock.patch.object(experts, "route", wrong)


def rows_by_rank() -> Any:
    """Rows as they arrive from the ranks, not put in the order of the experts."""
    right = experts._by_expert
    return mock.patch.object(experts, "_by_expert", lambda held: right(held).sort().values)


def gradients_of_all_ranks() -> Any:
    """What comes back of a row is summed once for each rank, as an average would divide it."""
    right = experts._Exchange.backward

    def wrong(ctx, grad):
        first, *rest = right(ctx, grad)
        return 2 * first, *rest

    return mock.patch.object(experts._Exchange, "backward", staticmethod(wrong))


@contextmanager
def experts_summed_over_all_replicas() -> Iterator[None]:
    """The mark of Megatron's is forgotten: gradients of different experts are added up."""
    right = experts.ExpertMLP.__init__

    def wrong(self, *args, **kwargs):
        right(self, *args, **kwargs)
        for param in self.parameters():
            param.allreduce = True

    with mock.patch.object(experts.ExpertMLP, "__init__", wrong):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "gate and up swapped": gate_and_up_swapped,
    "weights not normalised": not_normalised,
    "weights all equal": lambda: patched_route(lambda c, w: (c, torch.full_like(w, 0.5))),
    "router learns nothing": lambda: patched_route(lambda c, w: (c, w.detach())),
    "router in bf16": lambda: patched_route(lambda c, w: (c, w.bfloat16().float())),
    "another expert": lambda: patched_route(lambda c, w: ((c + 1) % 8, w)),
    "rows by rank": rows_by_rank,
    "gradients of all ranks": gradients_of_all_ranks,
    "experts summed over all": experts_summed_over_all_replicas,
}


def broken(path: str, case: Case, rows: list, name: str) -> Outcome:
    with MUTANTS[name]():
        return loss_and_grads(path, case, rows)


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_notices(name, pool, tiny, expected, record_property):
    case = layout(dp=2, ep=2)
    outcomes = pool.run(broken, 2, tiny(**EXPERTS), case, make_rows(MIXED), name)
    worst = max(errors(outcomes, expected, case).values())
    record_property("worst", worst)
    assert worst > 100 * TOLERANCE
