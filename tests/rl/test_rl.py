# .venv/bin/python -m pytest tests/rl/test_rl.py
"""Training on samples, started as a user starts it.

Every layout draws and learns the same, a run resumes bit for bit, and the model is trained on the
tokens that it has seen and produced.
"""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_vlm.cli import main
from megatron_vlm.config.schema import Config, DataConfig, RlConfig
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.distributed.agreement import Signals
from megatron_vlm.distributed.process import PREEMPTED, STOPPED_EARLY, run_guarded
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.episode import Episode, Group
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.rl.rl_train import run_rl
from megatron_vlm.rl.step_report import SignalWatch
from megatron_vlm.run.run_folder import read_job
from tests.support.often_drawn import drawing_often
from tests.support.pool import free_port
from tests.support.suites import full, quick, slow
from tests.support.uniform_engine import registered

TASKS = Path(__file__).parents[1] / "support" / "rl_tasks.py"
STEPS = 3
LEAN = ["data.eval=null", "checkpoint.export=false"]  # where only the figures of steps matter
# Weights after three steps of Adam with lr 1e-3. Measured worst case: 1.2e-7.
TOLERANCE = 1e-6


def thinking(path: str, folder: Path) -> str:
    """Copy a random model, with Qwen3.5's chat template, which takes thoughts out of earlier turns,
    and let it think in some turns."""
    shutil.copytree(path, folder / "template")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (TASKS.parent / "templates" / "qwen3_5.jinja").read_text()
    tokenizer.save_pretrained(folder / "template")
    often = "<|im_end|>", "</think>"
    return drawing_often(str(folder / "template"), folder / "model", *often, strength=7.0)


def check_rows(run: Path) -> None:
    """Check that each turn of an environment is a row, and that the model thinks in some turns."""
    for line in lines(run, "rl"):
        assert line["rows"] == line["turns"] == 3 and line["reread"] > 1.5
    episodes = [each for line in samples(run) for each in line["episodes"]]
    thoughts = ["</think>" in answer for each in episodes for answer in each["answers"][:2]]
    assert {*thoughts} == {True, False}


def words(folder: Path, model: str, run: str, *more: str) -> list[str]:
    keys = {
        "model": "tiny_cpu",
        "model.path": model,
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "train.jsonl",
        "eval.samples": 4,
        "data.num_workers": 0,
        "data.cache_dir": folder / "cache",
        "run": folder / run,
        "train.steps": STEPS,
        "train.global_batch_size": 3,
        "train.micro_batch_size": 4,
        "optim.lr": 1e-3,
        "optim.eps": 1e-3,  # a smaller one turns rounding of gradients near zero into steps
        "optim.schedule": "constant",
        "log.report": False,
        "launch.timeout_minutes": 2,
        "rl.samples": 4,
        "rl.max_new_tokens": 6,
        "rl.kl_coef": 0.1,
        "rl.entropy_coef": 0.0,
        "rl.processes": 1,
        "rl.shown": 9,
    }
    if not any(word.startswith(("rl.reward=", "rl.environment=", "rl.agent=")) for word in more):
        keys["rl.reward"] = f"{TASKS}:letters"
    return [*(f"{key}={value}" for key, value in keys.items()), *more]


def run_rank(given: list[str]) -> tuple[int, str, str]:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = run_guarded(run_rl, given)
    return status, out.getvalue(), err.getvalue()


def go(pool, world: int, folder: Path, *args: str) -> tuple[int, str, str]:
    """Run all ranks and return the status, stdout and stderr of rank 0."""
    answers = pool.run(run_rank, world, words(folder, *args))
    assert len({status for status, _, _ in answers}) == 1, answers
    return answers[0]


def learnt(pool, world: int, folder: Path, *args: str) -> Path:
    status, _, err = go(pool, world, folder, *args)
    assert status == 0, err
    return folder / args[1]


def lines(run: Path, kind: str) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in records if line["kind"] == kind]


def samples(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    """Return the largest difference of a weight."""
    others = weights(other)
    return max(float((value - others[name]).abs().max()) for name, value in weights(one).items())


@pytest.fixture(scope="module")
def alone(pool, folder, model) -> Path:
    return learnt(pool, 1, folder, model, "alone")


LOOKS = [f"rl.environment={TASKS}:Looks", "data.eval=null", "train.steps=2"]


@pytest.fixture(scope="module")
def looks(pool, folder, model) -> Path:
    return learnt(pool, 1, folder, model, "looks", *LOOKS)


LAYOUTS = {
    "pp2": (2, ["parallel.pp=2"]),
    "tp2pp2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "dp3": (3, []),
    "pp2dp2": (4, ["parallel.pp=2", "parallel.distributed_optimizer=true"]),
}


@pytest.mark.parametrize("name", quick(["tp2pp2"], ["tp2pp2", "dp3", "pp2dp2"]))
def test_every_layout_draws_and_learns_the_same(pool, folder, model, alone, name):
    world, parallel = LAYOUTS[name]
    run = learnt(pool, world, folder, model, name, *parallel)
    assert samples(run) == samples(alone)
    assert furthest(run, alone) < TOLERANCE
    for actual, expected in zip(lines(run, "rl"), lines(alone, "rl"), strict=True):
        assert actual["reward"] == expected["reward"]
        assert actual["kl"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-7)
    assert held_out(run) == held_out(alone)
    # The four answers to a picture are in one micro-batch, and the tower encodes it once.
    assert {line["shared_patches"] for line in lines(alone, "step")} == {0.75}


def held_out(run: Path) -> list[tuple[int, float]]:
    """Return step and reward of each evaluation."""
    return [(line["step"], line["reward"]) for line in lines(run, "eval")]


@pytest.mark.full
def test_held_out_prompts_are_answered_greedily_and_rewarded(pool, folder, model, alone):
    """The baseline comes before the first step, and belongs to the same answers in every run."""
    [(first, before), (last, _)] = held_out(alone)
    assert (first, last) == (0, STEPS) and all("loss" in line for line in lines(alone, "eval"))
    more = ["train.steps=2", "eval.every=1", "checkpoint.export=false"]
    again = learnt(pool, 1, folder, model, "every", *more, "rl.eval_scores=reward")
    assert [step for step, _ in held_out(again)] == [0, 1, 2]
    assert held_out(again)[0] == (0, before)
    assert not any("loss" in line for line in lines(again, "eval"))
    hot = learnt(pool, 1, folder, model, "hot", *more, "rl.eval_temperature=3", "train.steps=1")
    assert held_out(hot)[0][1] != before
    loss = learnt(pool, 1, folder, model, "loss", *more, "rl.eval_scores=loss", "train.steps=1")
    assert [line["step"] for line in lines(loss, "eval")] == [1]
    assert "reward" not in lines(loss, "eval")[0]


def test_a_hint_names_the_cause():
    def group(*episodes: tuple[str, float, bool]) -> Group:
        of_prompt = [
            Episode(0, 0, 0, "a.jsonl:1", {}, answers=[text], reward=reward, cut=cut)
            for text, reward, cut in episodes
        ]
        return Group("What?", of_prompt)

    def hint(*groups: Group) -> str | None:
        watch = SignalWatch(RlConfig(max_new_tokens=7))
        hints = [watch.check(groups, "red") for _ in range(5)]
        assert [each is not None for each in hints] == [False, False, True, False, False]
        return hints[2]

    assert "raise rl.temperature" in hint(group(("a", 0, False), ("a", 0, False)))
    assert "rl.max_new_tokens=7" in hint(group(("a", 0, True), ("b", 0, True)))
    assert "in the form" in hint(group(("a", 0, False), ("b", 0, True)))
    easy, hard = group(("a", 1, False), ("b", 1, False)), group(("a", 0, False), ("b", 0, False))
    assert "too easy or too hard" in hint(easy, hard)
    watch, learns = SignalWatch(RlConfig()), group(("a", 1, False), ("b", 0, False))
    steps = [hard, hard, learns, hard, hard, hard]
    hints = [watch.check([each], None) for each in steps]
    assert [each is not None for each in hints] == [False] * 5 + [True]


def test_the_right_answer_is_that_of_the_reward_or_of_the_chat(model):
    reader = make_reader(make_encoder(model, DataConfig()), DataConfig(), read_sizes(model), None)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for record, right in (
        ({"messages": chat[:1], "solution": 4}, "4"),
        ({"messages": chat, "answer": ["four", "4"]}, '["four", "4"]'),
        ({"messages": chat}, "4"),
        ({"messages": chat[:1]}, None),
    ):
        assert right_answer(record, "a record", replace(reader, kind="prompt")) == right


@pytest.mark.full
def test_prompts_alone_are_learnt_from_by_the_keys_beside_them(pool, folder, model):
    """Data as for GRPO in TRL: no record has an answer, in training or held out, and so none whose
    loss could be measured."""
    pictured = json.loads((folder / "train.jsonl").read_text().splitlines()[0])["messages"][:1]
    prompts = [pictured, [{"role": "user", "content": "1+1?"}], "Say 2."]
    asks = folder / "asks.jsonl"
    records = [{"prompt": prompt, "solution": "2", "level": 3} for prompt in prompts]
    asks.write_text("".join(json.dumps(record) + "\n" for record in records))
    more = [f"data.{name}={asks}" for name in ("train", "eval")]
    more += [f"rl.reward={TASKS}:solved", "train.steps=1"]
    status, out, err = go(pool, 2, folder, model, "asks", *more)
    assert status == 0, err
    run, pictures = folder / "asks", sum(p["type"] == "image" for p in pictured[0]["content"])
    assert f"tokens, in prompts; {pictures} image{'s' * (pictures != 1)}\n" in out
    assert sorted((line["where"][-1], line["right"]) for line in samples(run)) == [
        ("1", "2"),
        ("2", "2"),
        ("3", "2"),
    ]
    [figures], [step] = lines(run, "rl"), lines(run, "step")
    assert "solved" in figures["figures"] and step["grad_norm"] > 0
    assert [step for step, _ in held_out(run)] == [0, 1]
    assert not any("loss" in line for line in lines(run, "eval"))


def test_turns_of_a_question_have_their_roles(model):
    reader = make_reader(make_encoder(model, DataConfig()), DataConfig(), read_sizes(model), None)
    runner = EpisodeRunner(Config(), SimpleNamespace(readers=[reader]), None)

    def words(*turns):
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
        ids = runner.tokenizer(f"{text}<|im_start|>assistant\n")["input_ids"]
        return runner.words(SimpleNamespace(ids_S=torch.tensor(ids)))

    assert words(("user", "Which colour?")) == "Which colour?"
    turns = ("user", "2+2?"), ("assistant", "4"), ("user", "Sure?")
    assert words(*turns) == "user: 2+2?\nassistant: 4\nuser: Sure?"


@pytest.mark.full
def test_steps_without_a_signal_get_one_hint(pool, folder, model):
    """The hint shows an answer with its reward, and the right answer of the record."""
    more = [f"rl.reward={TASKS}:never", "train.steps=4", *LEAN]
    status, out, err = go(pool, 1, folder, model, "silent", *more)
    assert status == 0, err
    assert [line["alike"] for line in lines(folder / "silent", "rl")] == [1.0] * 4
    hints = [line for line in lines(folder / "silent", "event") if "advantage is 0" in line["text"]]
    assert [line["step"] for line in hints] == [3]
    text = hints[0]["text"]
    assert "An answer with the reward 0, where '" in text and "no answer in this step" in text
    assert text in out
    third = next(each for each in samples(folder / "silent") if each["step"] == 3)
    assert third["right"] and f"{third['right'][:200]!r} is right ({third['where']})" in text
    assert repr(third["episodes"][0]["answers"][0]) in text


@pytest.mark.parametrize("name", [full("pp2"), slow("pp2dp2")])
def test_so_do_they_over_several_turns(pool, folder, model, looks, name):
    world, parallel = LAYOUTS[name]
    run = learnt(pool, world, folder, model, f"looks-{name}", *LOOKS, *parallel)
    assert samples(run) == samples(looks)
    assert furthest(run, looks) < TOLERANCE


def test_the_weights_do_learn(alone, model):
    """Training moves all weights, so that the equality above is not trivial."""
    start = load_file(Path(model) / "model.safetensors")
    moved = [float((value - start[name]).abs().max()) for name, value in weights(alone).items()]
    assert min(moved) > 100 * TOLERANCE


RECIPES = ["grpo", full("cispo")]
OTHERS = ("rloo", "dr_grpo", "dapo", "gspo")
RECIPES += map(slow, OTHERS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_better_becomes_likelier(pool, folder, model, recipe):
    """A random model learns short answers with every recipe."""
    more = [f"rl={recipe}", f"rl.reward={TASKS}:short", "train.steps=12", "rl.samples=8", *LEAN]
    more += ["optim.lr=5e-3", "optim.eps=1e-8", "train.micro_batch_size=16", "rl.kl_coef=null"]
    run = learnt(pool, 1, folder, model, f"recipe-{recipe}", *more)
    rewards = [line["reward"] for line in lines(run, "rl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1.5  # measured: 3.4 to 4.2


@pytest.mark.slow
def test_gemma4_learns_from_its_own_samples(pool, folder, tiny):
    """Its policy begins as its reference, and its answers get shorter."""
    path = tiny(family="gemma4", layers=2, vision_depth=1, from_scratch=True)
    more = [f"rl.reward={TASKS}:short", "train.steps=12", "rl.samples=8", "parallel.tp=2", *LEAN]
    more += ["optim.lr=5e-3", "optim.eps=1e-8", "train.micro_batch_size=16"]
    run = learnt(pool, 2, folder, path, "gemma4", *more)
    kl, rewards = ([line[name] for line in lines(run, "rl")] for name in ("kl", "reward"))
    assert abs(kl[0]) < 1e-7 < kl[2]
    assert sum(rewards[-3:]) > sum(rewards[:3])


@pytest.mark.full
def test_an_mtp_head_follows_the_policy(pool, folder, tiny):
    """The policy learns as it does without."""
    path = tiny(family="qwen3_5", mtp_layers=1, head_dim=64, vision_depth=1, from_scratch=True)
    more = [f"rl.reward={TASKS}:short", "train.steps=6", "rl.samples=8"]
    more += ["optim.lr=5e-3", "optim.eps=1e-8", "train.micro_batch_size=16"]
    plain, trained = (
        learnt(pool, 1, folder, path, f"mtp-{mtp}", f"model.mtp={mtp}", *more)
        for mtp in ("carry", "train")
    )
    one, other = ([line["reward"] for line in lines(run, "rl")] for run in (plain, trained))
    assert one == other
    before, after = weights(plain), weights(trained)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("mtp.")}
    losses = [line["mtp_loss"] for line in lines(trained, "step")]
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_prompts_that_are_alike_get_other_answers(pool, folder, model):
    record = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    twice = folder / "twice.jsonl"
    twice.write_text(2 * (json.dumps(record) + "\n"))
    more = [f"data.train={twice}", "train.global_batch_size=2", "train.steps=1"]
    run = learnt(pool, 2, folder, model, "twice", *LEAN, *more, "rl.max_new_tokens=12")
    first, second = ([each["answers"] for each in line["episodes"]] for line in samples(run))
    assert len(first) == 4 and all(a != b for a in first for b in second)


@pytest.mark.full
def test_a_run_resumes_bit_for_bit(pool, folder, model, alone):
    """With another model in the place of its reference, it does not resume."""
    name, saving, copied = "resumed", ["checkpoint.every=1", "data.eval=null"], folder / "copied"
    shutil.copytree(model, copied)
    learnt(pool, 1, folder, str(copied), name, *saving, "train.steps=2", *LEAN)
    run = learnt(pool, 1, folder, str(copied), name, *saving)
    assert furthest(run, alone) == 0
    assert samples(run) == samples(alone)
    assert [line["step"] for line in lines(run, "rl")] == [1, 2, 3]
    save_file(weights(run), copied / "model.safetensors", {"format": "pt"})
    status, _, err = go(pool, 1, folder, str(copied), name, *saving, "train.steps=4")
    assert status == 2 and f"model.path={copied} has another content" in err, err


@pytest.mark.full
def test_episodes_of_several_rows_resume_bit_for_bit(pool, folder, model):
    forgetting = thinking(model, folder / "forgetting")
    more = [*LOOKS, "parallel.pp=2", "checkpoint.every=1"]
    whole = learnt(pool, 2, folder, forgetting, "rows", *more)
    learnt(pool, 2, folder, forgetting, "rows-resumed", *more, "train.steps=1")
    resumed = learnt(pool, 2, folder, forgetting, "rows-resumed", *more)
    assert furthest(whole, resumed) == 0 and samples(whole) == samples(resumed)
    check_rows(whole)


def stopped_after_a_step(given: list[str], metrics: Path) -> int:
    """Train, with a SIGTERM to one rank in the middle of the second step; return the status."""
    signals = Signals()

    def stop() -> None:
        while not (metrics.exists() and '"rl"' in metrics.read_text()):
            time.sleep(0.005)
        signals.received = signal.SIGTERM

    if int(os.environ["RANK"]) == 1:
        threading.Thread(target=stop, daemon=True).start()
    with redirect_stdout(StringIO()):
        return run_rl(given, signals)


@pytest.mark.full
def test_a_run_that_is_stopped_goes_on_bit_for_bit(pool, folder, model):
    more = ["parallel.pp=2", "data.eval=null"]
    arguments = words(folder, model, "stopped", *more, "train.steps=40")
    metrics = folder / "stopped" / "metrics.jsonl"
    assert pool.run(stopped_after_a_step, 2, arguments, metrics) == [PREEMPTED] * 2
    done = len(lines(folder / "stopped", "rl"))
    assert 1 <= done < 40
    more += [f"train.steps={done + 1}"]
    run = learnt(pool, 2, folder, model, "stopped", *more)
    whole = learnt(pool, 2, folder, model, "not-stopped", *more)
    assert furthest(run, whole) == 0
    assert samples(run) == samples(whole) and len(lines(run, "rl")) == done + 1


BLOCKS = """
import pathlib, time

def block(*args):
    pathlib.Path("begun").touch()
    time.sleep(3600)
"""
EARLY = {
    "a reward is imported": (BLOCKS + "block()", [], 2),
    "held-out prompts are rated": (BLOCKS, [], 1),
    "an engine starts": (BLOCKS, ["engine.name=uniform", "engine.options={begun: begun}"], 1),
}


def run_in(
    connection: Connection, folder: Path, given: list[str], rank: int, variables: dict[str, str]
) -> None:
    """Run a rank with `folder` as its working folder, and send its exit status."""
    os.chdir(folder)
    with open(f"output-{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(variables, RANK=str(rank), MEGATRON_VLM_SAID=str(folder))
    with registered(folder):
        try:
            status = main(["rl", *given])
        except SystemExit as end:
            status = end.code
    connection.send(status)


@pytest.mark.parametrize("name", EARLY)
def test_a_signal_before_the_first_step(name, process_tree, folder, model, tmp_path):
    """It has its own status and one sentence, whatever rank 0 waits for."""
    code, more, world = EARLY[name]
    (tmp_path / "rewards.py").write_text(code)
    given = words(folder, model, str(tmp_path / "run"), f"rl.reward={tmp_path}/rewards.py:block")
    place = dict(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    jobs = [
        process_tree.fork(run_in, tmp_path, [*given, *more], rank, place) for rank in range(world)
    ]
    try:
        while not (tmp_path / "begun").exists():
            assert all(job.alive for job in jobs), (tmp_path / "output-0").read_text()
            time.sleep(0.01)
        for job in jobs:
            os.kill(job.pid, signal.SIGTERM)
        assert jobs[0].connection.recv() == PREEMPTED, (tmp_path / "output-0").read_text()
    finally:
        for job in jobs:
            job.kill()
    said = "".join((tmp_path / f"output-{rank}").read_text() for rank in range(world))
    assert said == f"megatron-vlm: {STOPPED_EARLY}\n"
    # A run that has not begun leaves nothing.
    has_begun = name == "held-out prompts are rated"
    job = read_job(tmp_path / "run")
    assert job.has_ended if has_begun else job is None and not (tmp_path / "run").exists()


def stopped_at_once(given: list[str]) -> tuple[int, str]:
    """Run a rank that has been told to stop by a call, as Ray's actors are."""
    signals = Signals()
    signals.received = signal.SIGTERM
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as err:
        return run_rl(given, signals), err.getvalue()


def test_a_call_before_the_first_step_does_the_same(pool, folder, model):
    given = words(folder, model, "at-once")
    assert pool.run(stopped_at_once, 1, given) == [(PREEMPTED, f"megatron-vlm: {STOPPED_EARLY}\n")]
    assert read_job(folder / "at-once").has_ended


def test_the_reference_is_the_model_at_the_start(alone):
    """The reference is read from model.path, also after a resume."""
    kl = [line["kl"] for line in lines(alone, "rl")]
    assert abs(kl[0]) < 1e-7 < 1e-4 < kl[1] < kl[2]
    entropy = [line["entropy"] for line in lines(alone, "rl")]
    assert all(1 < each < 8 for each in entropy)  # a vocabulary of a few hundred tokens


@pytest.mark.full
def test_dynamic_sampling_replaces_prompts_that_teach_nothing(pool, folder, model):
    """Rewards differ only for the 3 of 7 records that have two pictures or more."""
    more = [f"rl.reward={TASKS}:equal", "rl.dynamic_sampling=true", "train.global_batch_size=2"]
    run = learnt(pool, 2, folder, model, "dynamic", *LEAN, *more, "data.shuffle=false")
    for line in lines(run, "rl"):
        assert line["prompts"] == 2 < line["asked"]
        assert line["alike"] == pytest.approx(1 - 2 / line["asked"])
    for sample in samples(run):
        assert len({each["reward"] for each in sample["episodes"]}) > 1
    # Records 2, 3 and 6 of 0 to 6 are used, in the order of the file and across epochs.
    prompt_counts = [line["asked"] for line in lines(run, "rl")]
    assert prompt_counts == [4, 6, 4]
    assert [line["epoch"] for line in lines(run, "step")] == [0, 1, 1]


@pytest.mark.full
def test_without_it_such_prompts_stay(pool, folder, model):
    more = [f"rl.reward={TASKS}:equal", "data.shuffle=false", "train.steps=1", *LEAN]
    run = learnt(pool, 1, folder, model, "static", *more, "train.global_batch_size=7")
    [line] = lines(run, "rl")
    assert (line["prompts"], line["asked"], line["alike"]) == (7, 7, pytest.approx(4 / 7))


@pytest.mark.full
def test_what_is_averaged_over_scales_the_gradient(pool, folder, model):
    """Dr. GRPO divides by the number of answers and the maximum length, not by actual lengths."""
    norms, metrics = {}, {}
    for name in ("tokens", "constant"):
        more = [f"rl.aggregate={name}", "train.steps=1", "rl.kl_coef=null", "optim.clip_grad=0"]
        run = learnt(pool, 1, folder, model, f"over-{name}", *more, *LEAN)
        [line], [metrics[name]] = lines(run, "step"), lines(run, "rl")
        norms[name] = line["grad_norm"]
    assert metrics["tokens"]["answer_tokens"] == metrics["constant"]["answer_tokens"]
    share = metrics["tokens"]["answer_tokens"] / 6  # divided by rl.max_new_tokens
    assert 0.3 < share < 0.95  # outside this range the test would show nothing
    assert norms["constant"] / norms["tokens"] == pytest.approx(share, rel=1e-5)


@pytest.mark.full
@pytest.mark.rotate(1)
@pytest.mark.parametrize("loss", ["gspo", "cispo", "ppo"])
def test_several_updates_of_one_step_clip(pool, folder, model, loss):
    more = [f"rl.loss={loss}", "rl.updates=3", "optim.lr=1e-2", "rl.aggregate=sequences", *LEAN]
    run = learnt(pool, 1, folder, model, f"updates-{loss}", *more, "train.steps=2")
    records = lines(run, "rl")
    assert len(records) == 2 and any(line["drift"] > 1e-3 for line in records)
    assert 0 < sum(line["clip_fraction"] for line in records) / 2 < 1


@pytest.mark.full
def test_adapters_learn_against_the_model_without_them(pool, folder, model):
    more = ["lora=default", "parallel.pp=2", "optim.lr=1e-2", "data.eval=null"]
    run = learnt(pool, 2, folder, model, "lora", *more)
    kl = [line["kl"] for line in lines(run, "rl")]
    assert abs(kl[0]) < 1e-7 < 1e-4 < kl[2]
    assert (run / "export" / "adapter_config.json").exists()


def test_a_wrong_reward_names_the_record_on_every_rank(pool, folder, model):
    answers = pool.run(
        run_rank, 2, words(folder, model, "wrong", f"rl.reward={TASKS}:wrong", "parallel.pp=2")
    )
    assert [status for status, _, _ in answers] == [2, 2]
    for _, _, err in answers:
        assert "train.jsonl" in err and "KeyError" in err and "rl_tasks.py" in err


@pytest.mark.full
def test_a_reward_that_fails_may_have_a_value(pool, folder, model):
    more = [f"rl.reward={TASKS}:wrong", "rl.failed_reward=0", "train.steps=1", *LEAN]
    run = learnt(pool, 1, folder, model, "failing", *more)
    [line] = lines(run, "rl")
    assert line["reward"] == 0 and line["figures"] == {"failed": 1}


REFUSED = {
    "rl.reward=null": "rl.reward is not set, and neither is rl.environment",
    f"rl.environment={TASKS}:Looks": "rl.reward is set, and so is rl.environment",
    "rl.samples=1": "rl.samples=1",
    "rl.temperature=0": "rl.temperature=0",
    "engine.name=vllm": "engine.python is not set, and engine.name=vllm",
    "rl.off_policy_steps=1": "give engine.name=vllm",
    "rl.mask_weight=[0.5,5]": "only the tokens of engines have; give engine.name=vllm",
    "rl.mask_weight=[1.5,5]": "give [low, high] with low below 1 and high above 1",
    "rl.mask_weight=[0.5]": "such as [0.5,5]",
    "rl.interrupt=true": "rl.interrupt=true interrupts nothing",
    "rl.updates=4": "rl.updates=4 exceeds train.global_batch_size=3",
    "engine.python=/usr/bin/python3": "starts no engine",
    "rl.los=ppo": "rl.loss",
    "rl.reward=rewards.py": "rl.reward",
    "rl.agent=http://127.0.0.1:99999/run": "99999/run cannot be read: Port out of range",
    "rl.agent=ftp://127.0.0.1/run": "ftp://127.0.0.1/run is not an address of HTTP",
    'rl.agent="python agent\'s.py"': "cannot be read: No closing quotation; give a command",
    "rl.agent=no-such-program a.py": "there is no program 'no-such-program'",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_refused_at_once(folder, model, word):
    arguments = words(folder, model, "refused", f"rl.reward={TASKS}:letters", word)
    status, _, err = run_rank(arguments)
    assert status == 2 and REFUSED[word] in err
    assert not (folder / "refused").exists()
