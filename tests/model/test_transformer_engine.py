# make te-env, then .venv/bin/python -m pytest tests/model/test_transformer_engine.py
"""Transformer Engine itself without a GPU (te_stages.py and te_worker.py run in its environment).
Every stage of the recipes has the parameters of the weight map, by name and shape. A worker loads a
checkpoint, gives Hugging Face's losses and gradients, and saves what the torch backend resumes. The
extension takes the arguments of all calls."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from safetensors.torch import load_file

from megatron_vlm.checkpoint.save_load import load
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.training.worker import MegatronWorker
from tests.hf.test_moe_files import RELEASED as RELEASED_MOE
from tests.hf.test_moe_files import released_sizes
from tests.support.batches import MIXED, make_rows
from tests.support.comparison import check_worst
from tests.support.field_tables import released, released_5
from tests.support.runs import Case

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-te" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,  # an environment of 7 GB
    pytest.mark.engine("te"),
]
# Relative, as in test_parity.py. Measured worst case: 1.4e-6.
TOLERANCE = 5e-6
BF16_TOLERANCE = 5e-3  # of loss and log-probs. Measured worst case: 1.2e-3.
WEIGHTS_TOLERANCE = 1e-6  # largest difference after two steps, of which one is after a resume
TOKENS = 8  # as in te_worker.py
# recipe: the released model. Of the hybrid family Transformer Engine has no layers.
RECIPES = {
    "qwen3_vl_2b": "2B",
    "qwen3_vl_4b": "4B",
    "qwen3_vl_8b": "8B",
    "qwen3_vl_32b": "32B",
    "qwen3_vl_30b_a3b": "30B-A3B",
    "qwen3_vl_235b_a22b": "235B-A22B",
    "qwen3_5_9b": "9B",
    "qwen3_5_35b_a3b": "35B-A3B",
}
MOE = dict(experts=4, dense_layers=1)
# Layouts that the recipes do not have.
TINY = {
    "tiny-tp2-pp2": (dict(), ["parallel.tp=2", "parallel.pp=2"]),
    "tiny-tied-odd-vocab": (dict(vocab=509, tied=True), ["parallel.tp=2", "parallel.pp=2"]),
    "tiny-pp2x2": (dict(), ["parallel.pp=2", "parallel.virtual_stages=2"]),
    "tiny-empty-stage": (dict(), ["parallel.pp=2", "parallel.layers_per_stage=[0,4]"]),
    "tiny-experts": (dict(experts=4), ["parallel.ep=2", "parallel.pp=2"]),
    "tiny-dense-and-experts": (MOE, ["parallel.ep=2"]),
}


def run_script(name: str, *arguments: str, given: Any = None) -> Any:
    """Run a script in the environment, and return what its last line says. Modules in the folder
    of the last argument come first."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    paths = [*arguments[-1:], str(ROOT), str(ROOT / "benchmarks")]
    done = subprocess.run(
        [PYTHON, "-m", f"tests.support.{name}", *arguments],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stages(tiny, tmp_path_factory) -> dict[str, Any]:
    """Return what the script says about each recipe and layout. One process builds them all."""
    root = tmp_path_factory.mktemp("released")
    cases = {name: (tiny(**sizes), "tiny_cpu", layout) for name, (sizes, layout) in TINY.items()}
    for recipe, name in RECIPES.items():
        folder = root / recipe
        folder.mkdir()
        cases[recipe] = (str(folder), recipe, [])
        if name in RELEASED_MOE:
            released_sizes(name, folder)  # which writes it
            continue
        config = released_5(name) if recipe.startswith("qwen3_5") else released(name)
        (folder / "config.json").write_text(json.dumps(config))
    results: dict[str, Any] = run_script("te_stages", given=cases)
    return results


@pytest.mark.parametrize("name", [*RECIPES, *TINY])
def test_stages_have_the_parameters_of_the_weight_map(name, stages):
    result = stages[name]
    if name.startswith("qwen3_5"):
        assert "model.backend=te: only the torch backend has the gated delta" in result["refused"]
        return
    for stage, parameters in enumerate(result["stages"]):
        assert isinstance(parameters, int) and parameters > 0, (stage, parameters)


@pytest.fixture(scope="module", params=["TP2", "experts", "Megatron-Core of the tests"])
def trained(request, tiny, tmp_path_factory) -> tuple[str, Path, dict[str, Any]]:
    path = tiny(head_dim=32, **(MOE if request.param == "experts" else {}))
    folder = tmp_path_factory.mktemp("te")
    if request.param.startswith("Megatron"):
        (folder / "megatron").symlink_to(Path(megatron.core.__file__).parents[1])
    tp = "2" if request.param == "TP2" else "1"
    results: dict[str, Any] = run_script("te_worker", path, tp, str(folder))
    if request.param.startswith("Megatron"):
        assert results["megatron"].startswith(version("megatron-core"))
    return path, folder, results


def test_losses_and_gradients_are_those_of_hugging_face(trained, record_property):
    results = trained[2]
    check_worst(results["errors"], TOLERANCE, record_property)
    assert max(results["grouped errors"]) <= TOLERANCE
    rounded = results["bf16 errors"]
    assert max(rounded["loss"], rounded["train_log_probs"]) <= BF16_TOLERANCE


def test_the_extension_takes_every_call(trained):
    results = trained[2]
    assert results["never called"] == []
    if results["is_empty"]:
        pytest.skip("an empty extension takes every call: make te-env compiles it")
    assert results["refused"] == []
    assert results["careless"] == []  # each would refuse another last argument


def test_answers_are_those_of_the_torch_backend(trained):
    path, _, results = trained
    worker = MegatronWorker(Case().config(path), training=False)
    answers = worker.sample(make_rows(MIXED), SamplingSettings(TOKENS, temperature=0))
    assert [list(answer.ids) for (answer,) in answers] == results["answers"]


def test_checkpoints_resume_with_either_backend(trained):
    path, folder, results = trained
    straight, resumed = (
        load_file(folder / kind / "model.safetensors") for kind in ("straight", "resumed")
    )
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    worker = MegatronWorker(Case(optim={"lr": 1e-3}).config(path))
    load(worker, folder / "step")
    worker.forward_backward(make_rows(MIXED))
    worker.optim_step()
    worker.export_hf(str(folder / "torch"))
    exported = load_file(folder / "torch" / "model.safetensors")
    assert exported.keys() == straight.keys()
    worst = max(float((exported[name] - straight[name]).abs().max()) for name in exported)
    assert worst <= WEIGHTS_TOLERANCE, worst
    assert results["not shared"] == []
