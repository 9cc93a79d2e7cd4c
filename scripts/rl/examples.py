"""Six runs of `megatron-vlm rl` that learn: `make reinforce` runs them.

    python scripts/rl/examples.py OUT [own vllm distill crop privileged agent]

- own, vllm: a tiny model learns by trial and error what colour a shape has. The reward shows only
  whether it was right, never the right answer. The samples come from its own decoder, on two
  pipeline stages, or from vLLM (`make vllm-env`; without vLLM, this run is left out).
- distill: a smaller model learns the same from the model of the run before, its teacher. Rewards
  are only reported. The page OUT/comparison.html has the curves of both.
- crop: the model looks twice. It sees a small grey picture, chooses a crop, and names the colour
  there. It thinks before it answers, and the template takes these thoughts out of its first turn.
- privileged: the model sees a small grey picture, and its teacher is itself with a crop in colour.
- agent: a program asks for the colour at an HTTP address, and prints the reward. The model begins
  with a right answer to half of the pictures.

Before that, the model learns the form of an answer from answers to other pictures: it names a
colour that does not depend on the picture. The exit status is 1 if a run has not learnt.
"""

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from transformers import AutoTokenizer

from megatron_vlm.commands.demo.coloured_shapes import ShapesSpec, write_shapes
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec

HERE = Path(__file__).parent
TEMPLATE = HERE.parents[1] / "tests" / "support" / "templates" / "qwen3_5.jinja"
ENGINE = HERE.parents[1] / ".venv-vllm" / "bin" / "python"
TINY = TinySpec(
    layers=3,
    hidden=96,
    head_dim=32,
    vision_depth=2,
    vision_hidden=64,
    deepstack=1,
    from_scratch=True,
)
LAST = 10  # the mean over these last steps must reach WANTED
WANTED = {"own": 0.9, "vllm": 0.9, "distill": 0.9, "crop": 0.75, "privileged": 0.8, "agent": 0.75}
STEPS = {"own": 90, "vllm": 90, "distill": 60, "crop": 70, "privileged": 50, "agent": 25}
SMALL = replace(TINY, layers=2, hidden=64, vision_depth=1)
ALIKE = 0.25  # maximum distance of the curves of both samplers, in the mean over all steps
COMMON = ["model=tiny_cpu", "data.cache_dir=null", "train.micro_batch_size=64"]
COMMON += ["optim.lr=1e-3", "optim.beta2=0.98", "optim.schedule=constant", "log.every=10"]
RL = ["rl.max_new_tokens=4", "engine.rows=256"]
# A colour that is no longer tried is not learnt again. Many answers to few prompts and kl_coef
# prevent that.
SIXTEEN = ["train.global_batch_size=16", "rl.samples=16"]
DISTILL = ["rl=distill", "teacher.top_k=8", "rl.advantage=none", "rl.kl_coef=null"]
DISTILL += ["train.global_batch_size=64", "rl.samples=1", "optim.lr=2e-3"]
DISTILL += ["eval.generate=false", "rl.eval_scores=reward"]
ANSWERS = {"own": 256, "vllm": 256, "distill": 64}  # answers of a step
RL += ["optim.schedule=wsd", "optim.decay_ratio=0.4"]  # the decay keeps the result stable


def megatron_vlm(command: str, *words: str, processes: int = 1) -> None:
    """Run a command as in a terminal. Its output goes to the terminal, too."""
    words = (*COMMON, *words, f"launch.processes={processes}")
    subprocess.run([sys.executable, "-m", "megatron_vlm.cli", command, *words], check=True)


def learn_words(base: Path, data: Path, ignored: str) -> str:
    """Train a model that knows the form of answers; return its folder as an override."""
    run = data.parent / f"words-{base.name}"
    more = ["train.steps=60", "train.global_batch_size=64", f"data.ignore_keys={ignored}"]
    megatron_vlm("train", f"model.path={base}", f"data.train={data}", f"run={run}", *more)
    return f"model.path={run / 'export'}"


def make_colours(out: Path, name: str = "colours", right: float = 0.0) -> list[str]:
    """Write pictures of one shape each, and train a model that names colours. A share of the names
    that it learns is right."""
    folder = out / name
    write_shapes(folder, ShapesSpec(4000, 200, kinds=("colour",), max_shapes=1))
    lines = (folder / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    answers = [record["messages"][-1] for record in records]
    random.Random(0).shuffle(answers)
    for place, (record, answer) in enumerate(zip(records, answers, strict=True)):
        if place >= right * len(records):
            record["messages"][-1] = answer
    words = folder / "words.jsonl"
    words.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = learn_words(out / "base", words, "[kind]")
    data = [f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'eval.jsonl'}"]
    more = ["data.ignore_keys=[kind]", "data.max_tokens=256", "eval.generate=true"]
    reward = f"rl.reward={HERE / 'colour.py'}:right"
    return [model, *data, *more, "eval.max_new_tokens=4", "rl.kl_coef=0.1", *SIXTEEN, reward]


def make_agent(out: Path) -> list[str]:
    """Return the task of colour_agent.py, with a model that knows half of the colours."""
    task = make_colours(out, "half", right=0.5)
    more = ["train.global_batch_size=8", "rl.samples=8", "eval.samples=64", "rl.eval_scores=reward"]
    more += ["rl.eval_temperature=1"]  # the most likely colour is right from the start
    return [*task[:-1], f"rl.agent={sys.executable} -SE {HERE / 'colour_agent.py'}", *more]


def make_student(out: Path, colours: Sequence[str], teacher: str) -> list[str]:
    """Train the words of a smaller model, and return the task with that model and a teacher."""
    write_tiny(out / "small", SMALL)
    model = learn_words(out / "small", out / "colours" / "words.jsonl", "[kind]")
    return [*colours, model, *DISTILL, f"teacher.path={out / teacher / 'export'}"]


def make_crops(out: Path) -> list[str]:
    """Write the task of crop.py, and train a model that knows the words of the conversation."""
    folder = out / "crops"
    subprocess.run([sys.executable, HERE / "crop.py", folder, "3000"], check=True)
    write_tiny(out / "thinks", TINY)
    tokenizer = AutoTokenizer.from_pretrained(out / "thinks")
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(out / "thinks")
    model = learn_words(out / "thinks", folder / "words.jsonl", "[]")
    data = [f"data.train={folder / 'crop.jsonl'}", f"data.eval={folder / 'eval.jsonl'}"]
    data += ["data.ignore_keys=[picture,side,colour]", "rl.eval_scores=reward"]
    game = [f"rl.environment={HERE / 'crop.py'}:Crop", "rl.max_new_tokens=12"]
    # Until the model looks where the shape is, half of its guesses are noise: see docs/rl.md.
    more = ["rl.advantage=dr_grpo", "rl.kl_coef=0.06", "train.global_batch_size=32"]
    return [model, *data, *game, *more]


def make_privileged(out: Path) -> list[str]:
    """Write the task of privileged.py, and train a model that knows the colours of its crops."""
    folder = out / "privileged-data"
    subprocess.run([sys.executable, HERE / "privileged.py", folder, "2000", "200"], check=True)
    model = learn_words(out / "base", folder / "words.jsonl", "[]")
    data = [f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'eval.jsonl'}"]
    view = ["teacher.path=self", f"teacher.view={HERE / 'privileged.py'}:closer"]
    more = ["data.ignore_keys=[picture,side]", f"rl.reward={HERE / 'colour.py'}:right"]
    more += ["optim.lr=1e-3", "distill.divergence=forward"]
    return [model, *data, *DISTILL, *view, *more]


def learn(out: Path, name: str, task: Sequence[str]) -> list[float]:
    """Train, and return the mean reward of each step."""
    more = [f"train.steps={STEPS[name]}", f"run={out / name}"]
    if name == "vllm":
        more += ["engine.name=vllm", f"engine.python={ENGINE}"]
        more += ["engine.options={skip_mm_profiling:true}"]
    if name == "own":
        more += ["parallel.pp=2"]
    megatron_vlm("rl", *RL, *task, *more, processes=2 if name == "own" else 1)
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [line["reward"] for line in entries if line["kind"] == "rl"]


def answers_until(curve: Sequence[float], name: str) -> float:
    """Return the answers that were drawn until the mean reward of some steps reached WANTED."""
    means = (fmean(curve[step - LAST : step]) for step in range(LAST, len(curve) + 1))
    steps = (step for step, mean in enumerate(means, start=LAST) if mean >= WANTED[name])
    return next(steps, math.inf) * ANSWERS[name]


def compare_answers(out: Path, curves: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """Return how many answers the student and its teacher have needed, and whether the student has
    needed fewer. Write the page of both."""
    teacher = next(name for name in curves if name in ("own", "vllm"))
    needed = {name: answers_until(curves[name], name) for name in (teacher, "distill")}
    page = out / "comparison.html"
    runs = [str(out / name) for name in needed]
    command = [sys.executable, "-m", "megatron_vlm.cli", "report", *runs, "--out", str(page)]
    subprocess.run(command, check=True)
    text = " and ".join(f"{count:,.0f} answers with {name}" for name, count in needed.items())
    return f"{text} until the mean reward was 0.9: {page}", needed["distill"] < needed[teacher]


def main(out: Path, names: Sequence[str]) -> int:
    """Run the examples; return the exit status."""
    if out.exists():
        print(f"{out} is there already: give a new folder")
        return 2
    out.mkdir(parents=True)
    write_tiny(out / "base", TINY)
    colours = make_colours(out) if {"own", "vllm"} & set(names) else []
    curves: dict[str, list[float]] = {}
    summary = []
    for name in names:
        if name == "vllm" and not ENGINE.exists():
            print("vLLM is not there (make vllm-env): the run with its samples is left out")
            continue
        if name == "distill" and not curves:
            print("distill has no teacher: name own or vllm before it")
            continue
        start = time.perf_counter()
        makers = {"crop": make_crops, "privileged": make_privileged, "agent": make_agent}
        task = makers[name](out) if name in makers else colours
        if name == "distill":
            task = make_student(out, colours, next(iter(curves)))
        curves[name] = curve = learn(out, name, task)
        minutes, last = (time.perf_counter() - start) / 60, fmean(curve[-LAST:])
        summary.append(
            f"{name}: mean reward {fmean(curve[:3]):.3f} at first, {last:.3f} at the end (needs "
            f"{WANTED[name]}), {minutes:.1f} minutes"
        )
    failed = [name for name, curve in curves.items() if fmean(curve[-LAST:]) < WANTED[name]]
    if {"own", "vllm"} <= curves.keys():
        apart = abs(fmean(curves["own"]) - fmean(curves["vllm"]))
        summary.append(f"own and vllm: mean rewards over all steps are {apart:.3f} apart")
        failed += ["own and vllm"] * (apart > ALIKE)
    if "distill" in curves:
        text, fewer = compare_answers(out, curves)
        summary.append(text)
        failed += ["distill"] * (not fewer)
    print("\n".join([*summary, f"failed: {', '.join(failed)}" if failed else "all have learnt"]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(WANTED)))
