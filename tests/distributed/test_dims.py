# .venv/bin/python -m pytest tests/distributed/test_dims.py
"""The grid of ranks: its layouts, and refusals that name both numbers."""

import pytest

from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from tests.support.error_fields import raises


@pytest.mark.parametrize(
    ("pp", "layers", "stages"),
    [
        (1, 28, (28,)),
        (2, 28, (14, 14)),
        (2, 5, (2, 3)),  # stage 0 has the vision tower
        (4, 28, (7, 7, 7, 7)),
        (4, 30, (7, 8, 8, 7)),  # extra layers go to the middle stages first
        (4, 31, (7, 8, 8, 8)),
        (8, 36, (4, 5, 5, 5, 5, 4, 4, 4)),
    ],
)
def test_balanced_stages(pp, layers, stages):
    dims = ParallelDims.create(ParallelConfig(pp=pp), pp, layers)
    assert dims.layers_per_stage == stages
    assert [layer for stage in range(pp) for layer in dims.layers_of(stage)] == list(range(layers))


@pytest.mark.parametrize(
    ("pp", "virtual", "layers", "chunks"),
    [
        (2, 2, 28, (7, 7, 7, 7)),
        (2, 2, 30, (7, 8, 8, 7)),
        (2, 3, 7, (1, 2, 1, 1, 1, 1)),
        (4, 2, 36, (4, 5, 5, 5, 5, 4, 4, 4)),
    ],
)
def test_balanced_chunks(pp, virtual, layers, chunks):
    dims = ParallelDims.create(ParallelConfig(pp=pp, virtual_stages=virtual), pp, layers)
    assert dims.layers_per_stage == chunks
    parts = [dims.layers_of(stage, chunk) for chunk in range(virtual) for stage in range(pp)]
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_chunks_are_in_the_order_of_the_pipeline():
    cfg = ParallelConfig(pp=2, virtual_stages=3, layers_per_stage=[0, 1, 2, 1, 1, 2])
    dims = ParallelDims.create(cfg, 2, 7)
    assert [dims.layers_of(0, chunk) for chunk in range(3)] == [range(0), range(1, 3), range(4, 5)]
    assert [list(dims.layers_of(1, chunk)) for chunk in range(3)] == [[0], [3], [5, 6]]
    assert [dims.features_after(place, 3) for place in range(6)] == [3, 2, 0, 0, 0, 0]
    assert dims.features_after(0, 0) == 0
    assert dims.megatron_layout()[0] == ["embedding"]
    assert dims.megatron_layout()[5] == ["decoder", "decoder", "loss"]


def test_asked_stages():
    cfg = ParallelConfig(pp=4, tp=2, layers_per_stage=[0, 12, 12, 12])
    dims = ParallelDims.create(cfg, 16, 36)
    assert (dims.dp, dims.world_size, dims.num_layers) == (2, 16, 36)
    assert [len(dims.layers_of(stage)) for stage in range(4)] == [0, 12, 12, 12]
    assert dims.layers_of(1) == range(0, 12)
    # Ranks count over tp, then dp, then pp.
    assert [dims.stage_of(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 3]
    assert [dims.replica_of(rank) for rank in (0, 1, 2, 7, 14)] == [0, 0, 1, 1, 1]
    assert dims.tp_rank_of(5) == 1 and dims.leader_of(1) == 2
    assert dims.megatron_layout()[0] == ["embedding"]
    assert dims.megatron_layout()[3] == ["decoder"] * 12 + ["loss"]


@pytest.mark.parametrize(
    ("cfg", "world", "key", "numbers"),
    [
        (dict(tp=3), 4, "tp", ("parallel.pp=1 = 3", "the 4", "of 3")),
        (dict(tp=0), 4, "tp", ("1 or more",)),
        (dict(pp=8), 8, "pp", ("the model's 4",)),
        (dict(ep=3), 4, "ep", ("degree 4", "divisor of 4")),
        (dict(pp=2, layers_per_stage=[4]), 2, "layers_per_stage", ("has 1", "parallel.pp=2")),
        (dict(pp=2, layers_per_stage=[1, 2]), 2, "layers_per_stage", ("to 3", "has 4")),
        (dict(pp=2, layers_per_stage=[-1, 5]), 2, "layers_per_stage", (">= 0",)),
        (dict(pp=2, layers_per_stage=[4, 0]), 2, "layers_per_stage", ("stage 1",)),
        (dict(virtual_stages=2), 1, "virtual_stages", ("parallel.pp=1", "virtual_stages=1")),
        (dict(pp=2, virtual_stages=0), 2, "virtual_stages", ("1 or more",)),
        (
            dict(pp=2, virtual_stages=3),
            2,
            "pp",
            ("x parallel.virtual_stages=3 = 6", "the model's 4"),
        ),
        (dict(pp=5), 5, "pp", ("4 layers", "parallel.layers_per_stage=[0, 1, 1, 1, 1]")),
        (
            dict(pp=2, virtual_stages=2, layers_per_stage=[2, 2]),
            2,
            "layers_per_stage",
            ("has 2", "parallel.pp=2 x parallel.virtual_stages=2 = 4 chunks"),
        ),
        (
            dict(pp=2, virtual_stages=2, layers_per_stage=[2, 1, 0, 1]),
            2,
            "layers_per_stage",
            ("chunk 2", "chunk 0"),
        ),
    ],
)
def test_refused(cfg, world, key, numbers):
    with raises(ConfigError, key=f"parallel.{key}", found=cfg[key]) as caught:
        ParallelDims.create(ParallelConfig(**cfg), world, 4)
    assert all(number in str(caught.value) for number in numbers), caught.value


def test_vocabulary_is_padded_to_tp_and_no_further():
    def padded(tp):
        return ParallelDims(tp, 1, 1, 1, (1,)).padded_vocab(151_936)

    assert (padded(1), padded(2), padded(8)) == (151_936, 151_936, 151_936)
    assert padded(6) == 151_938
