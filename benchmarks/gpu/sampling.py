"""vLLM beside the trainer on this GPU: what both compute for the same tokens, and learning from
vLLM's samples. vLLM has an environment of its own, whose Python VLLM_PYTHON names; by default it is
that of `make vllm-env`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gpu.step import Figures, MissingError

from megatron_vlm.commands.agree.compare import BOUNDS
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec
from tests.support.sets import write_set

ROOT = Path(__file__).parents[2]
# Widths that vLLM's kernels take on a GPU and on a CPU.
SIZES: dict[str, Any] = {"head_dim": 64, "deepstack": 1, "from_scratch": True}
HYBRID: dict[str, Any] = {"family": "qwen3_5", "linear_key_dim": 64, "linear_value_dim": 64}
PROMPTS, STEPS = 8, 4
# Random answers differ in it, so that each step changes the weights.
REWARD = "def vowels(record, answer):\n    return sum(map(answer.count, 'aeiou')) / 16\n"
SENDING = "weights of the engines"  # the phase
HOST = """from megatron_vlm.engines.weight_stream import SharedBuffer
SharedBuffer.memory_for = lambda self, device, gpus: (self.memory, {})
"""
_DIFFERENCE = re.compile(r"of a log-prob: ([^\s,]+)")


def _vllm(figures: Figures) -> str:
    """Return the Python that has vLLM."""
    python = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    said = "import importlib.metadata as m; n = m.packages_distributions()['vllm'][0]"
    command = [python, "-c", f"{said}; print(n, m.version(n))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError("an environment with vLLM, whose Python VLLM_PYTHON names") from error
    figures.say("vLLM", done.stdout.strip())
    return python


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, and return its output."""
    command = [sys.executable, "-m", "megatron_vlm.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return done


def _precision(figures: Figures) -> str:
    """Return the precision of both programs: vLLM on a GPU has no kernels for fp32."""
    return "fp32" if figures.dry else "bf16"


def agree(figures: Figures) -> None:
    """Compare the log-probs of vLLM's answers with the trainer's, family by family."""
    python, folder = _vllm(figures), figures.scratch / "agree"
    folder.mkdir()
    data, precision = write_set(folder, PROMPTS), _precision(figures)
    for name, sizes in (("Qwen3-VL", {}), *([] if figures.dry else [("Qwen3.5", HYBRID)])):
        model = str(folder / name)
        write_tiny(model, TinySpec(**SIZES, **sizes))
        keys = [f"data.eval={data}", "data.cache_dir=null", f"platform={figures.platform}"]
        keys += [f"train.precision={precision}", f"--engine={python}"]
        done = _command("agree", model, *keys, f"--samples={PROMPTS}")
        bound = BOUNDS["float32" if figures.dry else "bfloat16"]
        found = _DIFFERENCE.search(done.stdout)
        figures.check(f"{name}: log-prob", float(found[1]) if found else float("inf"), bound)
        figures.check(f"{name}: status", done.returncode, 0)


def rl_with_vllm(figures: Figures) -> None:
    """Learn from samples of vLLM on the same device, which gets the weights of each step through
    memory that both share: the GPU's, or on a CPU the host's."""
    _learn(figures, "")


def rl_through_host(figures: Figures) -> None:
    """Learn so with weights that pass through the host's memory."""
    if figures.dry:
        raise MissingError("a GPU: without one, rl_with_vllm has taken this way")
    _learn(figures, HOST)


def _learn(figures: Figures, before: str) -> None:
    """Run `rl` as one rank after some Python. With weights that did not arrive, log-probs would be
    far apart from the second step on."""
    python = _vllm(figures)
    folder = figures.scratch / ("rl_through_host" if before else "rl_with_vllm")
    folder.mkdir()
    write_tiny(str(folder / "model"), TinySpec(**SIZES))
    (folder / "reward.py").write_text(REWARD)
    data, run = write_set(folder, PROMPTS), folder / "run"
    words = ["model=tiny_cpu", f"model.path={folder}/model", f"data.train={data}", f"run={run}"]
    words += ["data.cache_dir=null", "data.max_tokens=300", f"platform={figures.platform}"]
    words += [f"train.precision={_precision(figures)}", f"train.steps={STEPS}"]
    words += ["train.global_batch_size=4", "rl.samples=4", "rl.max_new_tokens=16", "optim.lr=1e-3"]
    words += [f"rl.reward={folder}/reward.py:vowels", "engine.name=vllm", "checkpoint.export=false"]
    options = "skip_mm_profiling:true" + ("" if figures.dry else ",gpu_memory_utilization:0.3")
    words += [f"engine.python={python}", f"engine.options={{{options}}}"]
    code = f"{before}import runpy; runpy.run_module('megatron_vlm.rl', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *words], check=False)
    figures.check("status", done.returncode, 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bound = BOUNDS["float32" if figures.dry else "bfloat16"]
    apart = [line["apart"] for line in lines if line["kind"] == "rl"]
    figures.check("log-probs of samples, apart", max(apart), bound)
    steps = [line for line in lines if line["kind"] == "step"]
    idle = [line["grad_norm"] for line in steps].count(0)
    figures.check("steps that learnt nothing", idle, 0)
    figures.say("seconds_of_a_step", median(line["seconds"] for line in steps[1:]))
    phases = [line["seconds"] for line in lines if line["kind"] == "usage"]
    spent = [each[SENDING] for each in phases if SENDING in each]
    figures.say("seconds_of_sending_weights", sum(spent) / STEPS)
