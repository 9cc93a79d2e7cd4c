# .venv/bin/python -m pytest tests/test_dry_run.py
"""The plan of a run: its counts are those of the built model, its batches those of the loader."""

import json
import shutil
from dataclasses import replace

from megatron_vlm.commands.dry_run import dry_run, plan_steps, size_text, warning
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import LaunchConfig, TrainConfig
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.planner.memory import StageMemory
from tests.chats import image, say
from tests.sets import data_config, open_set, write_set
from tests.test_parity import layout


def test_planned_batches_are_those_of_the_loader(tiny, tmp_path):
    path, file = tiny(), write_set(tmp_path)
    cfg = replace(
        layout(dp=2).config(path),
        data=replace(data_config(None), train=(SourceSpec(file),)),
        train=TrainConfig(global_batch_size=7, micro_batch_tokens=400),
    )
    source = HFCheckpoint(path)
    dims = ParallelDims.create(cfg.parallel, 2, source.sizes.text.num_layers)
    data = open_set(file, path, None)
    planned = list(plan_steps(data, cfg, dims))
    assert len(planned) == 4  # 23 samples: the last step has two
    for rank in range(2):
        loader = Loader(data, cfg.data, 7, Limits(1, 400), Replica(rank, 2), epochs=1)
        for step, shares in zip(loader, planned, strict=True):
            actual = [
                (len(batch.lengths), max(batch.lengths), batch.num_supervised)
                for batch in step.micro_batches
            ]
            assert actual == [(b.rows, b.tokens, b.supervised) for b in shares[rank]]


def test_it_prints_the_plan_without_weights(tiny, tmp_path, capsys):
    """config.json and the tokenizer are enough, and nothing is written."""
    folder = tmp_path / "bare"
    shutil.copytree(tiny(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = write_set(tmp_path)
    pictures = [image(400, 400, seed) for seed in range(2)]
    long = {"messages": [say("user", *pictures), say("assistant", "a")], "meta": 1}
    with open(file, "a") as end:
        end.write(json.dumps(long) + "\n")
    cfg = replace(
        layout(pp=2).config(str(folder)),
        run=str(tmp_path / "run"),
        data=data_config(None, train=(SourceSpec(file),), truncation="image_safe", max_tokens=100),
        train=TrainConfig(global_batch_size=7, micro_batch_tokens=400),
        launch=LaunchConfig(processes=4),
    )
    auto = replace(cfg, parallel=replace(cfg.parallel, layers_per_stage="auto"))
    assert dry_run(auto) == 0
    assert "parallel.layers_per_stage=auto is [" in capsys.readouterr().out
    assert dry_run(cfg) == 0
    out = capsys.readouterr().out
    assert "1 of 24 records dropped: nothing left to learn after the cut" in out
    assert "'meta' (1)" in out
    assert "may take 64 of data.max_tokens=100: data.max_pixels=25600 makes that 25" in out
    assert "tp=1 pp=2 dp=2" in out and "First batches" in out and "activations" in out
    assert dry_run(replace(cfg, parallel=replace(cfg.parallel, virtual_stages=2))) == 0
    interleaved = capsys.readouterr().out
    assert "pp=2 virtual_stages=2 dp=2" in interleaved and "with its 2 chunks" in interleaved
    assert "0-0, 2-2" in interleaved and "1-1, 3-3" in interleaved  # the layers of each stage
    assert "run out of memory" not in out
    assert not (tmp_path / "run").exists()


def test_a_real_model_that_does_not_fit_is_said(tiny, tmp_path, capsys):
    """The sizes are those of Qwen3-VL 32B, the memory is that of this machine."""
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
        platform="auto",
        data=replace(data_config(None), train=(SourceSpec(write_set(tmp_path)),)),
    )
    assert dry_run(cfg) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "will most likely run out of memory. Try model.recompute_vision=true" in out
    unchosen = "on the CPU, which is slow; platform=cpu says that this is meant"
    assert pick_platform().is_cuda or unchosen in out


def test_the_warning_names_the_stage():
    platform = pick_platform("cpu")
    half = platform.memory_total() // 2
    memory = [StageMemory(half, 0, 0, 0), StageMemory(half, half, half, 0)]
    assert warning(memory, platform).startswith("Stage 1 needs about")
    assert "recompute_vision" not in warning(memory, platform)
    assert warning(memory[:1], platform) == ""
    assert [size_text(n) for n in (1500, 3 * 2**20, 5 * 2**30)] == ["1.5 KiB", "3.0 MiB", "5.0 GiB"]
