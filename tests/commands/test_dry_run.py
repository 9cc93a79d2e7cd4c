# .venv/bin/python -m pytest tests/commands/test_dry_run.py
"""The plan of a run: its counts are those of the built model, its batches those of the loader."""

import json
import re
import shutil
import socket
from dataclasses import replace

import pytest
import torch

from megatron_vlm.cli.parser import make_parser
from megatron_vlm.commands.dry_run.command import dry_run, fit_verdict, target_machine
from megatron_vlm.config.arguments import parse_arguments
from megatron_vlm.config.command_checks import check_rl
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.load import from_yaml, load_config, to_yaml
from megatron_vlm.config.schema import LaunchConfig, ModelConfig, TrainConfig
from megatron_vlm.data.batches.balance import Limits
from megatron_vlm.data.batches.loader import Loader, Replica
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.printable import short_name, size_text
from megatron_vlm.planner.auto_layout import plan_steps
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.memory import StageMemory
from megatron_vlm.planner.search import RunPlan
from tests.model.test_parity import layout
from tests.support import rl_tasks
from tests.support.chats import image, say
from tests.support.error_fields import raises
from tests.support.sets import data_config, open_set, write_set
from tests.support.tables import in_one_test


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
    cut = {"messages": [say("user", "a"), say("assistant", "b " * 200)]}
    with open(file, "a") as end:
        end.write(f"{json.dumps(long)}\n{json.dumps(cut)}\n")
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
    assert "1 of 25 records dropped: nothing left to learn after the cut" in out
    assert "'meta' (1)" in out
    assert "may take 64 of data.max_tokens=100: data.max_pixels=25600 makes that 25" in out
    assert "tp=1 pp=2 dp=2" in out and "First batches" in out and "activations" in out
    assert "nccl" not in out  # on a CPU, ranks communicate by gloo
    assert "of them warm-up, 1 epoch\n" in out
    flat = " ".join(out.split())
    assert "records left out: 1 dropped; 1 record cut" in flat
    assert "24 samples, 4 steps of 7" in out
    assert "in this machine" in flat
    without_wraps = "".join(out.split())  # a long path is broken over lines
    assert f"{tmp_path / 'run'}:checkpointsevery30minutes" in without_wraps
    assert "begins anew" in out and "none: data.eval is not set" in out
    assert dry_run(replace(cfg, parallel=replace(cfg.parallel, virtual_stages=2))) == 0
    interleaved = capsys.readouterr().out
    assert "pp=2 virtual_stages=2 dp=2" in interleaved and "with its 2 chunks" in interleaved
    assert "0-0, 2-2" in interleaved and "1-1, 3-3" in interleaved  # the layers of each stage
    assert "run out of memory" not in out
    assert not (tmp_path / "run").exists()


def test_a_real_model_is_judged_for_the_machine_that_is_named(tiny, tmp_path, capsys):
    """The sizes are those of Qwen3-VL 32B. The memory of a machine without a GPU says nothing about
    GPUs."""
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
        run=str(tmp_path / "run"),
        data=replace(data_config(None), train=(SourceSpec(write_set(tmp_path)),)),
    )

    def said(cfg, **machine) -> str:
        assert dry_run(cfg, **machine) == 0
        return " ".join(capsys.readouterr().out.split())

    if not torch.cuda.is_available():
        out = said(cfg)
        assert "whether this fits is open: --memory 80GiB judges it" in out
        assert "cuda, torch.bfloat16" in out and "run out of memory" not in out
    out = said(cfg, gpus=1, memory="80GiB")
    assert "there are 80.0 GiB: it will most likely run out of memory" in out
    assert re.search(r"Try optim.offload=1 \(saves [\d.]+ GiB\), optim.states=int8 \(saves", out)
    saves = ModelConfig(path=str(folder), recompute="full", recompute_vision=True)
    out = said(replace(cfg, model=saves), gpus=2, memory="80GiB")
    assert "dp=2 in 2 processes" in out and "model.recompute" not in out.partition("Try ")[2]
    assert "in place of replicas. megatron-vlm plan ranks" in out
    wide = replace(cfg, parallel=replace(cfg.parallel, tp=8))
    out = said(wide, gpus=8, memory="141GiB")
    assert "of 141.0 GiB in a GPU" in out and "run out of memory" not in out
    with raises(ConfigError, key="--gpus", found=4, problem_has="launch.processes=8"):
        dry_run(replace(cfg, launch=LaunchConfig(processes=8)), gpus=4)
    with raises(ConfigError, key="--memory", found="much"):
        dry_run(cfg, memory="much")
    with raises(ConfigError, key="--gpus", problem_has="platform=cpu"):
        dry_run(replace(cfg, platform="cpu"), gpus=4)


def test_the_verdict_names_the_stage_or_all_processes(tiny):
    path = tiny()
    cfg, sizes = replace(layout(pp=2).config(path), platform="auto"), read_sizes(path)
    dims = ParallelDims(tp=1, pp=2, dp=1, ep=1, layers_per_stage=(2, 2))
    gpu = target_machine(cfg, 0, memory="1GiB")

    def verdict(target, *memory: StageMemory) -> str:
        return fit_verdict(RunPlan(ModelLayout(cfg, sizes, dims, 2), [], memory), target)

    half = 2**29
    small, large = StageMemory(half, 0, 0, 0), StageMemory(half, half, half, 0)
    said = verdict(gpu, small, large)
    assert said.startswith("Stage 1 needs about 1.5 GiB a rank")
    assert "optim.offload=1 (saves" in said and "recompute_vision" not in said
    assert verdict(gpu, small) == ""
    cpu = target_machine(replace(cfg, platform="cpu"), 0)
    assert cpu.memory is not None
    most = StageMemory(int(cpu.memory * 0.6), 0, 0, 0)
    assert verdict(cpu, most) == ""
    assert verdict(cpu, most, most).startswith("2 processes need about")
    assert [size_text(n) for n in (1500, 3 * 2**20, 5 * 2**30)] == ["1.5 KiB", "3.0 MiB", "5.0 GiB"]


REWARDS = """
def score(record, answer):
    right = answer == record["messages"][-1]["content"]
    return {"reward": float(right), "length": len(answer)}


def divides(record, answer):
    return 1 / len(answer)
"""


def run_command(*words: str) -> int:
    """Run a command in this process."""
    parser = make_parser()
    args = parse_arguments(parser, words)
    return args.run(args)


@pytest.fixture
def asked(tiny, tmp_path):
    """Words of a model, a set of prompts with answers, and a file of rewards."""
    turns = [[say("user", str(n)), say("assistant", f"number {n}")] for n in range(4)]
    lines = [json.dumps({"messages": turn}) + "\n" for turn in turns]
    (tmp_path / "asks.jsonl").write_text("".join(lines))
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = ["model=tiny_cpu", f"model.path={tiny()}", "data.cache_dir=null"]
    return tmp_path, [*words, "data.num_workers=0", f"run={tmp_path / 'run'}"]


@pytest.mark.full
def test_rl_tries_its_reward(asked, capsys):
    folder, words = asked
    words = [*words, f"data.train={folder / 'asks.jsonl'}", "rl.samples=2", "rl.max_new_tokens=8"]
    words += ["train.global_batch_size=2", "train.steps=3"]
    reward = f"rl.reward={folder / 'rewards.py'}"
    assert run_command("rl", "--dry-run", *words, f"{reward}:score") == 0
    out = capsys.readouterr().out
    assert "2 answers of at most 8 tokens to each of 2 prompts" in " ".join(out.split())
    assert "the trainer's own decoder" in out and "4 samples, 3 steps of 2" in out
    assert out.count("'number ") == 3 and out.count("length 8") == 3  # right answers
    assert out.count("length 0") == 3  # empty ones
    with raises(DataError, key="rl.reward", problem_has="ZeroDivisionError"):
        run_command("rl", "--dry-run", *words, f"{reward}:divides")
    failing = [*words, f"{reward}:divides", "rl.failed_reward=-1"]
    assert run_command("rl", "--dry-run", *failing, "launch.processes=4") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "failed 1" in out and "2 of the 4 replicas get no row" in out
    only = folder / "only.jsonl"  # records that only ask
    only.write_text('{"prompt": "1?", "solution": "1"}\n' * 4)
    given = [f"data.train={only}", f"data.eval={only}", f"run={folder}", "parallel=auto"]
    (folder / "my.yaml").write_text("serve: {port: 1}")
    given += ["--config", str(folder / "my.yaml")]
    assert run_command("rl", "--dry-run", *failing, *given) == 0
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert "my.yaml has keys without effect: serve.port in megatron-vlm rl" in err
    assert "only (4 samples)" in out and "(among the data)" in out
    engine = ["engine.name=vllm", f"engine.python={folder / 'python'}", f"{reward}:score"]
    with raises(ConfigError, key="engine.python", problem_has="cannot be started: No such file"):
        run_command("rl", "--dry-run", *words, *engine)
    (folder / "python").write_text("#!/bin/sh\necho 0.32.0\n")
    (folder / "python").chmod(0o755)
    assert run_command("rl", "--dry-run", *words, *engine) == 0
    assert "vLLM 0.32.0 of" in capsys.readouterr().out
    (folder / "python").write_text("#!/bin/sh\nexit 1\n")
    with raises(ConfigError, key="engine.python", problem="has no vLLM"):
        run_command("rl", "--dry-run", *words, *engine)
    assert not (folder / "run").exists()


@pytest.mark.full
def test_rl_describes_its_teachers(asked, tiny, capsys):
    """They are checked as in a run, and need no reward."""
    folder, words = asked
    words = [*words, f"data.train={folder / 'asks.jsonl'}", "rl=distill", "train.steps=3"]
    teacher = tiny(layers=6, hidden=128)
    alone = [*words, f"teacher.path={teacher}", "teacher.top_k=4", "parallel.pp=2"]
    assert run_command("rl", "--dry-run", *alone) == 0
    out = "".join(capsys.readouterr().out.split())  # long paths are broken over lines
    assert f"{teacher};reverseKLofits4mostlikelytokensandtherest,times1" in out
    sizes = read_sizes(teacher)
    assert f"iBfor{short_name(sizes.num_values)}parametersof{teacher}" in out
    (folder / "python").write_text("#!/bin/sh\necho 0.32.0\n")
    (folder / "python").chmod(0o755)
    both = f"teacher.path={{asks: {teacher}, b: {tiny()}}}"
    engines = ["teacher.engine=vllm", f"engine.python={folder / 'python'}"]
    assert run_command("rl", "--dry-run", *words, both, *engines) == 0
    out = "".join(capsys.readouterr().out.split())
    assert f"{teacher}forasks,{tiny()}forb;reverseKLofthesampledtoken" in out
    assert "vLLM0.32.0of" in out and "2engines" in out
    itself = ["teacher.path=self", f"teacher.view={rl_tasks.__file__}:itself"]
    assert run_command("rl", "--dry-run", *words, *itself) == 0
    out = "".join(capsys.readouterr().out.split())
    assert "initialweightsofself;reverseKLofthesampledtoken" in out
    assert re.search(r"tokensofthefirstprompts:(\d+)for\1", out)
    assert "needinaddition:nothing" in out and "Theinitialmodelneeds" in out
    with raises(ConfigError, key="teacher.path", problem_has="another tokenizer"):
        run_command("rl", "--dry-run", *words, f"teacher.path={tiny(vocab=300)}")
    with raises(
        ConfigError, place=f"teacher.path={tiny(layers=1, deepstack=1)}", key="parallel.pp"
    ):
        run_command(
            "rl",
            "--dry-run",
            *words,
            f"teacher.path={tiny(layers=1, deepstack=1)}",
            "parallel.pp=2",
        )


REFUSED_TEACHERS = {
    "teacher.top_k=2": "teacher.top_k",
    "rl.advantage=none": "rl.advantage",
    "teacher.path=[a]": "teacher.path",
    "teacher.path={a: 3}": "teacher.path",
    "teacher.path=a teacher.engine=vllm": "engine.python",
    "teacher.path=self": "teacher.path",
    "teacher.path=self teacher.view=views.py": "teacher.view",
    "teacher.path={a: self} teacher.weights=live": "teacher.path",
    "teacher.path=a teacher.weights=live": "teacher.weights",
    "teacher.path=a distill.divergence=jsd": "distill.divergence",
    "teacher.path=a teacher.view=m:f teacher.engine=vllm engine.python=p": "teacher.engine",
    "teacher.path=a teacher.devices=[0]": "teacher.engine",
    "teacher.path=a teacher.top_k=2 rl.entropy_coef=0": "rl.entropy_coef",
    "teacher.path=a rl.dynamic_sampling=true rl.reward=null": "rl.dynamic_sampling",
    "teacher.path=a rl.eval_scores=reward rl.reward=null": "rl.eval_scores",
    "teacher.path={a: x, b: y} teacher.engine=vllm engine.python=p teacher.devices=[0]": (
        "teacher.devices"
    ),
}


DEFAULTS = to_yaml(load_config(["model.path=m"]))


@in_one_test("given", REFUSED_TEACHERS)
def test_settings_of_teachers_are_refused(given):
    words = ["model.path=m", "data.train=d.jsonl", "train.steps=1", "rl.reward=a:b"]
    words += re.split(r" (?=rl\.|engine\.|teacher\.|distill\.)", given)
    with raises(ConfigError, key=REFUSED_TEACHERS[given]):
        check_rl(cfg := from_yaml(DEFAULTS, words))
        check_engine(cfg, "rl")


def test_eval_and_serve_have_a_dry_run(asked, tiny, capsys):
    folder, words = asked
    held_out = [f"data.eval={folder / 'asks.jsonl'}", "eval.generate=true", "eval.samples=3"]
    words = [word for word in words if not word.startswith("model.path")]
    assert run_command("eval", tiny(), "--dry-run", *words, *held_out) == 0
    out = capsys.readouterr().out
    assert "3 samples:" in out and "exact_match of answers of at most 32 tokens" in out
    assert "weights of" in out and "only the scores, to the screen" in out
    words = [*words, f"model.path={tiny()}", "serve.port=0"]
    assert run_command("serve", "--dry-run", *words) == 0
    out = capsys.readouterr().out
    assert "a free port" in out and "none: only clients on this machine" in out
    assert "for the base model, up to" in out
    run_command("serve", "--add-client", "ada", str(folder / "keys"))
    assert run_command("serve", "--dry-run", *words, f"serve.keys={folder / 'keys'}") == 0
    assert "API keys    ada" in capsys.readouterr().out
    with raises(ConfigError, key="serve.host"):
        run_command("serve", "--dry-run", *words, "serve.host=0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"serve.port={taken.getsockname()[1]}"
        with raises(ConfigError, key="serve.port"):
            run_command("serve", "--dry-run", *words, port)
    assert not (folder / "run").exists()


def test_options_of_a_dry_run_belong_to_it():
    with raises(ConfigError, key="--memory", remedy_has="add --dry-run"):
        run_command("train", "model.path=m", "--memory", "80GiB")
    with raises(ConfigError, key="--dry-run", problem="is not an option of inspect"):
        run_command("inspect", "--dry-run", "model.path=m")
