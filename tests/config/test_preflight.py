# .venv/bin/python -m pytest tests/config/test_preflight.py
"""Mistakes in the command line and in config.json, which are reported before torch is imported."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_vlm.config import load_config
from megatron_vlm.config.schema import ParallelConfig
from megatron_vlm.distributed.dims import ParallelDims, loads_data
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.config_json import Counts, read_counts
from megatron_vlm.training.preflight import check_data, check_model, check_run
from tests.family.test_model_fields import changed
from tests.support.field_tables import RELEASED, TABLES, released
from tests.support.suites import full, slow

# Each command line has a mistake, and its value is a part of the message. {base} is a checkpoint,
# {data} a data file.
MISTAKES = {
    "train optim.lrr=1": "optim.lrr is not a configuration key; did you mean 'optim.lr'",
    "train --lr 1e-5": "write optim.lr=1e-5",
    "train {ok} optim.lr=two": "optim.lr=two; give a number",
    "train {ok} train.steps=0": "train.steps=0; give at least 1",
    "train model.path={base}": "data.train is not set",
    "train {ok} model.path=nowhere": "model.path=nowhere has no config.json",
    "train {ok} model.path={llama}": "model_type='llama' ",
    "train {ok} model.path={gelu}": "text_config.hidden_act='gelu', and it computes only 'silu'",
    "train {ok} model.path={broken}": "config.json: is not JSON: Expecting",
    "train {ok} parallel.tp=3": "parallel.tp=3 does not divide the model's num_attention_heads=4",
    "train {ok} parallel.tp=4": "does not divide the model's num_key_value_heads=2",
    "train {ok} parallel.pp=9": "parallel.pp=9 is more than the model's 4 layers",
    "train {ok} parallel.virtual_stages=2": "cuts each stage of a pipeline into chunks",
    "train {ok} parallel.pp=2 parallel.layers_per_stage=[1,9]": "adds up to 10, but the model has",
    "train {ok} parallel.tp=2 launch.processes=3": "launch.processes=3 is not a multiple of",
    "train {ok} parallel.overlap_param_gather=true parallel.overlap_grad_reduce=false": "gather",
    "train {ok} data.train=missing.jsonl": "data.train=missing.jsonl: there is no such file",
    "train {ok} data.train=missing.jsonl run=a": "a relative path begins in this folder, /",
    "train {ok} data.train=a\\b.jsonl": "file or folder; separate folders by /, as in a/b.jsonl",
    "train {ok} data.train={data}.json:a": ".json: does not exist",
    "train {ok} data.eval=a/b/c": "data.eval=a/b/c: there is no such file",
    "train {ok} data.image_root=/no/where": "data.image_root=/no/where: there is no such folder",
    "train {ok} rl.samples=4": "rl.samples=4 has no effect in megatron-vlm train; change that, or",
    "train {ok} data.eval={data} eval.candidates=n.txt": "eval.candidates=n.txt: there is no such",
    "train {ok} data.add_tokens=[a]": "data.add_tokens=a is a token of",
    "train {ok} data.add_tokens=['<|im_end|>']": "data.add_tokens='<|im_end|>' is a token of",
    "train {ok} data.add_tokens=['a<|im_end|>']": "data.add_tokens='a<|im_end|>' contains",
    "train {ok} data.add_tokens=[point,point]": "data.add_tokens has 'point' more than once",
    "train {ok} data.add_tokens=['']": "data.add_tokens[0]=''; give texts of printable",
    "train {ok} data.add_tokens=[7]": "data.add_tokens[0]=7; give texts of printable",
    "train {ok} data.add_tokens=[<p>]": "data.add_tokens='[<p>]' cannot be read; put values with",
    "train {ok} data.add_tokens=['<p>'] model.freeze_language=true": "would never be learnt",
    "inspect {ok} data.add_tokens=['<|im_end|>']": "data.add_tokens='<|im_end|>' is a token of",
    "train --dry-run {ok} parallel.tp=3": "parallel.tp=3 does not divide",
    "train --config {base}/nothing.yaml": "nothing.yaml: does not exist",
    "inspect model.path={base}": "data.train is not set",
    "inspect {ok} model.path=nowhere": "nowhere has no config.json",
    "inspect {ok} data.train=missing.jsonl": "data.train=missing.jsonl: there is no such file",
    "eval nowhere {ok}": "nowhere: is neither a complete checkpoint nor",
    "eval {base}": "data.eval is not set",
    "eval {base} data.eval=missing.jsonl": "data.eval=missing.jsonl: there is no such file",
    "eval {base} data.eval={data} parallel.tp=3": "parallel.tp=3 does not divide",
}
SCRIPT = """
import json, sys
from megatron_vlm.cli import main
for words in json.loads(sys.argv[1]):
    print("\\nmain", main(words), file=sys.stderr)
from megatron_vlm.train import run_train
try: run_train(json.loads(sys.argv[2]))
except ValueError as error: print(error, file=sys.stderr)
print(sorted({"torch", "transformers", "pyarrow", "megatron.core"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def places(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("early")
    paths = {"base": tiny(), "data": str(root / "data.jsonl")}
    Path(paths["data"]).write_text("")
    paths["llama"] = str(changed(tiny(), root / "llama", {"model_type": "llama"}))
    paths["gelu"] = str(changed(tiny(), root / "gelu", {"text_config.hidden_act": "gelu"}))
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    paths["broken"] = str(root / "broken")
    paths["ok"] = f"model=tiny_cpu model.path={paths['base']} data.train={paths['data']}"
    return paths


# One process says many mistakes, each of which takes a tenth of a second.
QUICK, FULL = [*MISTAKES][::3], [line for place, line in enumerate(MISTAKES) if place % 3]


@pytest.mark.parametrize("lines", [QUICK, full(FULL)], ids=["quick", "full"])
def test_mistakes_are_said_before_torch_is_imported(lines, places, tmp_path):
    commands = [line.format(**places).split() for line in lines]
    rank = [*places["ok"].split(), "parallel.tp=3"]
    words = [sys.executable, "-c", SCRIPT, json.dumps(commands), json.dumps(rank)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    *messages, last = done.stderr.strip().split("\nmain 2\n")
    assert len(messages) == len(lines), done.stderr
    for message, line in zip(messages, lines, strict=True):
        assert message.strip().startswith("megatron-vlm: "), (line, message)
        assert MISTAKES[line] in message, (line, message)
        assert "\n" not in message.strip() or "describes another model" in message
    assert "parallel.tp=3 " in last and "num_attention_heads=4" in last
    assert done.stdout.strip() == "[]"


STOPPED_AT_TORCH = """
import sys
from multiprocessing import forkserver
class Imports:
    def find_spec(self, name, *_):
        if name == "torch":
            print(forkserver._forkserver._forkserver_pid is not None)
            sys.exit()
sys.meta_path.insert(0, Imports())
from megatron_vlm.cli import main
main(sys.argv[1:])
"""


SIGNALLED = """
import os, runpy, sys
module, at, number, *sys.argv[1:] = sys.argv[1:]
class Imports:
    def find_spec(self, name, *_):
        if name == at:
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Imports())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
RL, SERVE = "rl.reward=m:f train.global_batch_size=2 train.steps=1", "serve.port=0 run=run"
EVAL, LAUNCH = "{base} data.eval={data} data.num_workers=0", "megatron_vlm.distributed.launch"
RANK_2 = {"RANK": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("module", "line", "at", "number"),
    [
        # omegaconf is the first import that the command's arguments need.
        ("cli", "train {ok}", "omegaconf", signal.SIGTERM),
        ("cli", "rl {ok} " + RL, "torch", signal.SIGINT),
        ("serve", "model.path={base} " + SERVE, "torch", signal.SIGTERM),
        *(
            full(*case)
            for case in (
                ("cli", "train {ok} parallel.pp=2", LAUNCH, signal.SIGUSR1),
                ("cli", "serve model.path={base} " + SERVE, "torch", signal.SIGTERM),
                ("cli", "--debug eval {base} data.eval={data}", "torch", signal.SIGTERM),
                ("rl", "{ok} " + RL, "torch", signal.SIGTERM),
                # This one starts a process that imports for the workers of its data.
                ("train", "{ok}", "torch", signal.SIGTERM),
                ("commands.eval", EVAL, "torch", signal.SIGTERM),
            )
        ),
    ],
)
def test_a_signal_while_it_imports_ends_it_as_one_before_the_first_step(
    module, line, at, number, places, tmp_path
):
    """A signal has this effect at each entry point: nothing has begun yet, and the remedy is to
    start again."""
    script = [sys.executable, "-c", SIGNALLED, f"megatron_vlm.{module}", at, str(int(number))]
    words = [*script, *line.format(**places).split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 75, (done.returncode, done.stderr)
    assert done.stderr == "megatron-vlm: stopped by a signal: there is nothing to save\n"


AT_IMPORT = """
import os, signal, sys
class Imports:
    def find_spec(self, name, *_):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.meta_path.insert(0, Imports())
"""
SCRIPT_OF_PIP = "import sys\nfrom megatron_vlm.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("at", ["logging", "megatron_vlm.errors", "megatron_vlm.cli.parser"])
@pytest.mark.parametrize("form", ["module", full("script")])
def test_an_interrupt_while_the_command_is_imported_has_no_traceback(form, at, tmp_path):
    """A shell has status 130 for both: the process returns it, or SIGINT ends the process."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "megatron-vlm").write_text(SCRIPT_OF_PIP)
    words = ["-m", "megatron_vlm.cli"] if form == "module" else [str(tmp_path / "megatron-vlm")]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": path, "AT": at}
    words = [sys.executable, *words, "inspect"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (130, -signal.SIGINT) and done.stderr == ""


@pytest.mark.parametrize(
    ("line", "environment", "started"),
    [
        ("train {ok} data.num_workers=2", {}, True),
        full("train {ok} data.num_workers=0", {}, False),
        slow("eval {base} data.eval={data} platform=cpu", {}, True),
        full("train {ok} parallel.pp=2", RANK_2, False),
    ],
)
def test_what_data_workers_import_is_imported_meanwhile(
    line, environment, started, places, tmp_path
):
    """The server of ranks that load data runs before this process imports torch itself."""
    words = [sys.executable, "-c", STOPPED_AT_TORCH, *line.format(**places).split()]
    more = dict(cwd=tmp_path, capture_output=True, text=True, check=True)
    done = subprocess.run(words, env={**os.environ, **environment}, **more)
    assert done.stdout == f"{started}\n", done.stderr


@pytest.mark.full
def test_a_process_imports_only_what_it_needs():
    """inspect and plan start quickly, without megatron. In a worker, torch's compiler is for
    fusions that are not called; code that is compiled here loads it then. And wandb makes folders
    in TMPDIR that a killed process leaves; others may import it."""
    script = """
import importlib.util, sys
import megatron_vlm.commands.inspect.command, megatron_vlm.commands.plan.command
print("megatron" in sys.modules)
import megatron_vlm.training.worker
print(sorted({"torch._inductor.compile_fx", "wandb"} & set(sys.modules)))
print(importlib.util.find_spec("wandb") is not None)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n[]\nTrue\n"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_ranks_that_load_are_known_early(tp, pp):
    parallel = ParallelConfig(tp=tp, pp=pp)
    dims = ParallelDims.create(parallel, 8, num_layers=4)
    leaders = [dims.leader_of(replica) for replica in range(dims.dp)]
    assert [rank for rank in range(8) if loads_data(parallel, rank, 8)] == leaders


def by_tp(*counts):
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip(names, counts, strict=True))


def test_what_is_right_passes(places):
    cfg = load_config([*places["ok"].split(), f"data.eval={places['data']}"])
    assert check_model(cfg.model.path) == Counts(4, by_tp(4, 2, 176), 3)
    for right in ("*.jsonl", "org/name", "name", "hub:name", "~/.."):
        check_data(load_config(["model.path=x", f"data.train='{right}'"]), "data.train")
    assert check_model("Qwen/Qwen3-VL-2B-Instruct") is None


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_pass(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released(name)))
    layers, _, ffn, heads, *_, marks = RELEASED[name]
    assert read_counts(str(tmp_path)) == Counts(layers, by_tp(heads, 8, ffn), len(marks))


SAID_EARLY = {
    "gemma4": "audio_config text_config.hidden_size_per_layer_input "
    "text_config.num_kv_shared_layers vision_config.use_clipped_linears",
    "qwen3_vl": "model_type text_config.hidden_act text_config.attention_bias",
    "qwen3_vl_moe": "model_type text_config.norm_topk_prob text_config.output_router_logits",
    "qwen3_5": "model_type text_config.attn_output_gate text_config.mtp_use_dedicated_embeddings "
    "quantization_config language_model_only vision_config.deepstack_visual_indexes",
    "qwen3_5_moe": "model_type text_config.mlp_only_layers text_config.output_router_logits",
}


@pytest.mark.parametrize("family", TABLES)
def test_fields_are_refused_by_name_where_they_are_refused_later(family, tiny, tmp_path):
    of, early = TABLES[family], set()
    for place, (field, value) in enumerate(of.refused.items()):
        folder = str(changed(tiny(**of.tiny), tmp_path / str(place), {field: value}))
        try:
            read_counts(folder)
        except ConfigError as error:
            early.add(field)
            assert field.rpartition(".")[2] in str(error)
            with pytest.raises(ConfigError):
                read_sizes(folder)
    assert set(SAID_EARLY[family].split()) <= early
    read_counts(str(changed(tiny(**of.tiny), tmp_path / "carried", of.carried)))


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "qwen3_vl"}',
        '{"model_type": "qwen3_vl", '
        '"text_config": {"num_hidden_layers": null}, "vision_config": {}}',
    ],
)
def test_what_json_cannot_tell_is_left_to_transformers(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert read_counts(str(tmp_path)) is None


@pytest.mark.parametrize("given", [{}, {"deepstack_visual_indexes": None}])
def test_heads_and_experts_are_checked_without_a_deepstack_list(given, places, tmp_path):
    """transformers uses a list of its own then. Heads, widths and experts are those of the file."""
    folder = changed(places["base"], tmp_path / "model", {})
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["deepstack_visual_indexes"]
    config["vision_config"] |= given
    (folder / "config.json").write_text(json.dumps(config))
    assert check_model(str(folder)) == Counts(4, by_tp(4, 2, 176), None)
    for words in ("parallel.tp=3", "parallel.ep=2 launch.processes=2"):
        cfg = load_config([f"model.path={folder}", *words.split()])
        with pytest.raises(ConfigError, match=words.split()[0]):
            check_run(cfg)
    check_run(load_config([f"model.path={folder}", "parallel.tp=2"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[]",
            "config.json: its content is [], not an object; give a folder of a Qwen3-VL, "
            "Qwen3.5 or Gemma 4 checkpoint",
        ),
        (
            '{"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": "four"}}',
            "text_config.num_hidden_layers='four', not a whole number from 1 to 1024",
        ),
        ('{"model_type": "a", "model_type": "b"}', "'model_type' occurs twice in an object"),
        (" " * 2**20 + " ", "has more than 1,048,576 bytes"),
        ("[" * 10**5, "nested too deeply"),
        ("[" * 101 + "]" * 101, "nested too deeply, in more than 100 levels"),
    ],
)
def test_what_json_shows_to_be_wrong(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_counts(str(tmp_path))
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        read_sizes(tmp_path)
