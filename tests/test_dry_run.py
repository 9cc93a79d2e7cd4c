# .venv/bin/python -m pytest tests/test_dry_run.py
"""The plan of a run: its counts are those of the built model, its batches those of the loader."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from megatron_vlm.config.schema import LaunchConfig, ParallelConfig, TrainConfig
from megatron_vlm.config.sources import SourceSpec
from megatron_vlm.data.batch.batching import Limits
from megatron_vlm.data.batch.loader import Loader, Replica
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.hf.names import name_table
from megatron_vlm.hf.source import HFCheckpoint
from megatron_vlm.tools.dry_run import dry_run, plan_steps, size_text, warning
from megatron_vlm.tools.memory import BatchSizes, StageMemory, estimate, in_flight
from megatron_vlm.worker import MegatronWorker
from tests.batches import RowSpec, make_rows
from tests.runs import Case
from tests.sets import data_config, open_set, write_set
from tests.test_parity import layout

# Measured worst case 4.5 % (full recompute); the estimate leaves out small things.
TOLERANCE = 0.1
ROWS = (RowSpec(150, images=((16, 12), (6, 8))), RowSpec(90, images=((20, 10),)))


def kept_bytes(worker: MegatronWorker) -> tuple[int, int]:
    """Weights, and what autograd keeps of a forward: each storage once, parameters not."""
    own = {
        t.untyped_storage().data_ptr()
        for t in (*worker.chunks[0].parameters(), *worker.chunks[0].buffers())
    }
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: no address comes twice
        return tensor

    [batch] = worker.stage.arrivals(worker.micro_batches(make_rows(ROWS)), worker.chunks[0])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.stage.call(worker.chunks[0], batch, labels=batch.targets_N, loss_mask=batch.places_N)
    weights = sum(param.nbytes for param in worker.chunks[0].parameters())
    return weights, sum(size for size, _ in kept.values())


def kept_by(path: str, case: Case) -> tuple[int, int]:
    return kept_bytes(MegatronWorker(case.config(path)))


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"recompute_vision": True}])
def test_activations_are_what_autograd_keeps(options, tiny, pool):
    path, case = tiny(hidden=128, heads=8, kv_heads=2, layers=3), layout(**options)
    [(weights, kept)] = pool.run(kept_by, 1, path, case)
    source, cfg = HFCheckpoint(path), case.config(path)
    source.read_headers()
    dims = ParallelDims.create(cfg.parallel, 1, 3)
    table = name_table(source.family, source.sizes, "torch", dims)
    rows = make_rows(ROWS)
    sizes = BatchSizes(
        rows=2,
        tokens=max(len(row.ids_S) for row in rows),
        supervised=sum(int((row.labels_S[1:] != -100).sum()) for row in rows),
        patches=16 * 12 + 6 * 8 + 20 * 10,
        largest_image=200,
    )
    [memory] = estimate(cfg, source.sizes, dims, table, [sizes], 4)
    assert memory.weights == weights and memory.gradients == weights
    assert memory.optimizer == 2 * weights  # moments; fp32 weights are their own main weights
    # What is added for logits on their way is not kept.
    vocab = source.sizes.text.vocab
    assert memory.activations - 2 * 4 * sizes.supervised * vocab == pytest.approx(
        kept, rel=TOLERANCE
    )


def test_stages_tp_and_dp_share_what_they_should(tiny):
    path = tiny()
    source = HFCheckpoint(path)
    source.read_headers()
    batches = [BatchSizes(1, tokens, 10, 64, 64) for tokens in (100, 80, 60)]

    def of(world, itemsize=2, **parallel):
        cfg = replace(Case().config(path), parallel=ParallelConfig(**parallel))
        dims = ParallelDims.create(cfg.parallel, world, source.sizes.text.layers)
        table = name_table(source.family, source.sizes, "torch", dims)
        return estimate(cfg, source.sizes, dims, table, batches, itemsize)

    [alone] = of(1)
    assert alone.optimizer == 6 * alone.weights and alone.gradients == 2 * alone.weights
    [sharded] = of(4)
    assert sharded.optimizer == alone.optimizer // 4 and sharded.weights == alone.weights
    [whole] = of(4, distributed_optimizer=False)
    assert whole.optimizer == alone.optimizer
    assert sum(stage.weights for stage in of(2, pp=2)) == alone.weights
    few, many = of(2, pp=2, layers_per_stage=[1, 3]), of(2, pp=2, layers_per_stage=[3, 1])
    assert few[0].activations < many[0].activations and few[1].activations > many[1].activations
    assert of(2, tp=2)[0].weights < alone.weights
    # Interleaved stages work further ahead, and the first chunk of stage 0 also keeps the tower's.
    two, chunks = of(2, pp=2), of(2, pp=2, virtual_stages=2)
    for plain, interleaved in zip(two, chunks, strict=True):
        assert interleaved.weights == plain.weights
        assert interleaved.activations > plain.activations
    # Two micro-batches are under way on the first of two stages, one on the second.
    two = of(2, pp=2)
    del batches[1:]
    one = of(2, pp=2)
    assert one[0].activations < two[0].activations < 2 * one[0].activations  # 80 tokens and 100
    assert one[1].activations == two[1].activations


def test_what_each_chunk_keeps_at_once():
    """As Megatron's schedules count: PP=2, two chunks, four micro-batches."""
    dims = ParallelDims(1, 2, 1, 1, (1, 1, 1, 1), 2)
    # Forward 0 0 1 1 0, a backward of 1, a forward of 0, a backward of 1, a forward of 1 ...
    assert in_flight(dims, 0, 4) == {(3, 2), (4, 1)}
    assert in_flight(dims, 1, 4) == {(2, 1), (3, 0)}
    assert in_flight(dims, 0, 1) == {(2, 2)}  # a group with a filler: no backward before the end
    plain = ParallelDims(1, 4, 1, 1, (1, 1, 1, 1))
    assert [in_flight(plain, stage, 8) for stage in range(4)] == [{(4,)}, {(3,)}, {(2,)}, {(1,)}]
    assert in_flight(plain, 0, 0) == {(0,)}


def test_planned_batches_are_those_of_the_loader(tiny, tmp_path):
    path, file = tiny(), write_set(tmp_path)
    cfg = replace(
        layout(dp=2).config(path),
        data=replace(data_config(None), train=(SourceSpec(file),)),
        train=TrainConfig(global_batch_size=7, micro_batch_tokens=400),
    )
    source = HFCheckpoint(path)
    dims = ParallelDims.create(cfg.parallel, 2, source.sizes.text.layers)
    planned = list(plan_steps(cfg, source.sizes, dims))
    assert len(planned) == 4  # 23 samples: the last step has two
    data = open_set(file, path, None)
    for rank in range(2):
        loader = Loader(data, cfg.data, 7, Limits(1, 400), Replica(rank, 2), epochs=1)
        for step, shares in zip(loader, planned, strict=True):
            found = [
                (len(batch.lengths), max(batch.lengths), batch.num_supervised)
                for batch in step.micro_batches
            ]
            assert found == [(b.rows, b.tokens, b.supervised) for b in shares[rank]]


def test_it_prints_the_plan_without_weights(tiny, tmp_path, capsys):
    """config.json and the tokenizer are enough; nothing is written."""
    folder = tmp_path / "bare"
    shutil.copytree(tiny(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = write_set(tmp_path)
    cfg = replace(
        layout(pp=2).config(str(folder)),
        run=str(tmp_path / "run"),
        data=replace(data_config(None), train=(SourceSpec(file),)),
        train=TrainConfig(global_batch_size=7, micro_batch_tokens=400),
        launch=LaunchConfig(processes=4),
    )
    assert dry_run(cfg) == 0
    out = capsys.readouterr().out
    assert "tp=1 pp=2 dp=2" in out and "First batches" in out and "activations" in out
    assert dry_run(replace(cfg, parallel=replace(cfg.parallel, virtual_stages=2))) == 0
    interleaved = capsys.readouterr().out
    assert "pp=2 virtual_stages=2 dp=2" in interleaved and "with its 2 chunks" in interleaved
    assert "0-0, 2-2" in interleaved and "1-1, 3-3" in interleaved  # the layers of each stage
    assert "run out of memory" not in out
    assert not (tmp_path / "run").exists()


def test_a_real_model_that_does_not_fit_is_said(tiny, tmp_path, capsys):
    """Sizes of Qwen3-VL 32B, on this machine's memory."""
    folder = tmp_path / "large"
    shutil.copytree(tiny(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= dict(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, head_dim=128
    )
    config["text_config"] |= dict(num_attention_heads=64, num_key_value_heads=8)
    config["vision_config"]["out_hidden_size"] = 5120
    (folder / "config.json").write_text(json.dumps(config))
    cfg = replace(
        layout().config(str(folder)),
        data=replace(data_config(None), train=(SourceSpec(write_set(tmp_path)),)),
    )
    assert dry_run(cfg) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "will most likely run out of memory. Try model.recompute_vision=true" in out


def test_the_warning_names_the_stage():
    platform = pick_platform("cpu")
    half = platform.memory_total() // 2
    memory = [StageMemory(half, 0, 0, 0), StageMemory(half, half, half, 0)]
    assert warning(memory, platform).startswith("Stage 1 needs about")
    assert "recompute_vision" not in warning(memory, platform)
    assert warning(memory[:1], platform) == ""
    assert [size_text(n) for n in (1500, 3 * 2**20, 5 * 2**30)] == ["1.5 KiB", "3.0 MiB", "5.0 GiB"]
