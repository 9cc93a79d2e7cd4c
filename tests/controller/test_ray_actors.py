# .venv/bin/python -m pytest tests/controller/test_ray_actors.py
"""A group over Ray gives the results of one process; a process that dies ends the group."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vlm.controller import WorkerError, WorkerGroup
from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.errors import CheckpointError, ConfigError, DataError
from tests.controller.test_worker_group import ODD, TOLERANCE, check_same, in_turn, run_in_turn
from tests.model.test_moe import EXPERTS
from tests.model.test_parity import layout
from tests.support.error_fields import raises
from tests.support.runs import call
from tests.training.test_moe_train import check_group_routes, group_routes, routes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs the extra: pip install 'megatron_vlm[ray]'")
    from megatron_vlm.controller import ray_actors
    from megatron_vlm.controller.ray_actors import WorkerActor, share_ray_group, start_ray_group

# These warnings come from Ray and its imports, and cannot be fixed here.
pytestmark = [
    pytest.mark.alone,  # it starts jobs and kills them
    pytest.mark.slow,  # starting Ray and its actors takes most of a minute
    pytest.mark.usefixtures("ray_lock"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]
CPUS = 0.25  # the share of each actor: there are more actors than cores


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class WeighingActor(WorkerActor):
    """An actor that keeps the size of the pixel values of the last call."""

    def call_on_part(self, number: int, method: str, batch: Any, pixels: Any, *args: Any) -> Any:
        self.pixel_bytes = 0 if pixels is None else pixels.nbytes
        return super().call_on_part(number, method, batch, pixels, *args)

    def last_pixel_bytes(self) -> int:
        return self.pixel_bytes


@pytest.fixture(scope="module")
def group(cluster, tiny) -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actors, "WorkerActor", WeighingActor)
        made = start_ray_group(layout(pp=2).config(tiny()), processes=4, cpus=CPUS)
    yield made
    made.close()


def test_results_are_those_of_one_process(group, pool, tiny, tmp_path, record_property):
    alone = pool.run(run_in_turn, 1, tiny(), layout(), ODD, str(tmp_path / "alone"))[0]
    assert (group.dims.pp, group.dims.dp) == (2, 2)
    worst = check_same(in_turn(batch_of(ODD), group, str(tmp_path / "step")), alone)
    record_property("worst", max(worst.values()))
    assert max(worst.values()) <= TOLERANCE, worst
    assert (tmp_path / "step-hf" / "config.json").exists()


def test_routing_is_that_of_one_process(cluster, pool, tiny):
    path = tiny(**EXPERTS)
    [expected] = pool.run(call, 1, path, layout(), routes)
    made = start_ray_group(layout(dp=2, ep=2).config(path), processes=2, cpus=CPUS)
    try:
        check_group_routes(group_routes(made), expected)
    finally:
        made.close()


def test_a_dense_model_routes_nothing(group):
    with pytest.raises(ConfigError, match=r"rank \d: model.path=.* has no experts to route to"):
        group.routing(ODD).result()


def test_pixel_values_reach_stage_0_alone(group):
    batch = batch_of(ODD)
    group.forward(batch).result()
    received = ray.get([actor.last_pixel_bytes.remote() for actor in group.ranks.pool.actors])
    rows = [row.numel() * row.element_size() for row in batch["pixel_values"]]
    videos = [
        row.numel() * row.element_size() for row in batch.fields.get("pixel_values_videos", [])
    ]
    assert not videos
    for got, sent in zip(received[:2], (sum(rows[:3]), sum(rows[3:])), strict=True):
        assert sent <= got <= sent + 1024  # a header
    assert received[2:] == [0, 0]


def halved(log_probs_N: Tensor, weights_N: Tensor, *, part: float = 0.5) -> tuple[Any, Any]:
    """Compute a loss that the controller defines; the actors do not know it beforehand."""
    return -part * weights_N * log_probs_N, {"weight": weights_N}


def test_a_loss_may_be_the_controllers_own_function(group):
    batch = batch_of(ODD).with_fields(
        weights=TensorList([torch.full((len(row.ids_S),), 2.0) for row in ODD])
    )
    plain = group.forward_backward(batch)
    # Both calls precede the first wait for a result.
    own = group.forward_backward(batch, loss=halved)
    assert own.result().loss == pytest.approx(plain.result().loss, rel=1e-6)
    assert own.result().means == {"weight": 2.0}
    total = group.forward_backward(batch, divisor=1).result()
    assert total.loss == pytest.approx(plain.result().loss * total.num_tokens, rel=1e-6)


def test_a_reference_lives_beside_the_policy(group, tiny):
    reference = share_ray_group(group, layout(pp=2).config(tiny()), training=False)
    before = reference.forward(ODD).result()
    group.forward_backward(ODD).result()
    group.optim_step(lr=1e-3).result()
    again = reference.forward(ODD).result()
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    assert not torch.equal(group.forward(ODD).result()[0], before[0])
    degrees = "tp=1, pp=2"
    with raises(ConfigError, key="parallel.tp", found=2, place_has="rank ", problem_has=degrees):
        share_ray_group(group, layout(tp=2).config(tiny()), training=False)


def test_errors_are_the_workers_own(group):
    bad = [*ODD[:4], replace(ODD[0], image_grid_I3=ODD[0].image_grid_I3 * 2)]
    failed, step = group.forward_backward(bad), group.optim_step()
    with pytest.raises(DataError, match=r"^rank [13]: row 4: pixel_values has 24 patches but"):
        failed.result()
    with raises(WorkerError, place_has=": optim_step"):
        step.result()
    assert group.forward_backward(ODD).result().num_tokens > 0  # the group still works


def test_a_result_that_takes_long_can_be_asked_for_again(group):
    future = group.forward(ODD)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    assert not future.cancel() and not future.done()
    assert len(future.result()) == len(future.result(timeout=0)) == len(ODD)


def test_calls_are_done_in_order_though_nothing_is_waited_for(group):
    futures = [group.forward(ODD), group.forward_backward(ODD), group.optim_step(), group.load("")]
    assert isinstance(futures[-1].exception(), CheckpointError)
    assert all(future.done() and not future.exception() for future in futures[:-1])


def test_ray_may_be_shut_down_while_calls_are_under_way():
    """A process of its own ends while its calls are pending."""
    code = """
import ray
from megatron_vlm.controller.ray_actors import ActorPool

@ray.remote
class Slow:
    def call(self):
        import time
        time.sleep(600)

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
pool = ActorPool([Slow.remote()], None)
futures = [pool.promise([pool.actors[0].call.remote()], list) for _ in range(3)]
if SHUT_DOWN:
    ray.shutdown()
    print({str(future.exception(20))[:20] for future in futures}, ray.is_initialized())
"""
    for shut_down in (True, False):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code.replace("SHUT_DOWN", str(shut_down))],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and "SIGTERM handler" not in done.stderr, done.stderr
        # Ray was shut down or, if that is noticed first, "rank 0: its process has died".
        assert done.stdout.strip() == ("{'the group has ended:'} False" if shut_down else "")


def test_no_room_is_an_error(cluster, tiny, monkeypatch):
    import megatron_vlm.distributed.ray_cluster as ray_cluster

    monkeypatch.setattr(ray_cluster, "PLACE_S", 0.5)
    with raises(ConfigError, place="the Ray cluster", problem_has="0 s for 3 times {'CPU': 1"):
        start_ray_group(layout().config(tiny()), processes=3)
    with raises(ConfigError, key="parallel.tp", found=2, problem_has="3 processes"):
        start_ray_group(layout(tp=2).config(tiny()), processes=3)


@pytest.mark.slow  # a cluster of its own
def test_actors_get_a_gpu_where_there_are_some():
    """Ray accepts the number of GPUs that it is given."""
    code = (
        "import ray; from megatron_vlm.distributed.ray_cluster import gpus_of_rank as g\n"
        "for count in (0, 2):\n"
        "    ray.init(num_cpus=1, num_gpus=count, include_dashboard=False, log_to_driver=False)\n"
        "    print(g('auto'), g('cuda'), g('cpu')); ray.shutdown()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == ["0.0 0.0 0.0", "1.0 1.0 0.0"], done.stderr


def test_a_process_that_dies_ends_the_group(group, monkeypatch):
    """The group ends here, so this is its last test."""
    monkeypatch.setattr(ray_actors, "RAY_GRACE_S", 1.0)
    ray.kill(group.ranks.pool.actors[3])
    for future in (group.forward(ODD), group.optim_step()):
        with raises(WorkerError, place="the group has ended: rank 3"):
            future.result()
    with raises(WorkerError, place="the group has ended: rank 3"):
        group.optim_step().result()  # called on a group that has already ended
