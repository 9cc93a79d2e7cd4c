"""Reinforcement learning with a WorkerGroup: a tiny Qwen3-VL learns by trial and error what colour
a shape has. It is told whether it was right, never the right answer. `make reinforce` runs it:
    torchrun --nproc-per-node 2 scripts/reinforce_shapes.py OUT parallel.pp=2
    python scripts/reinforce_shapes.py OUT --ray 2 parallel.pp=2

First it learns from answers that belong to other pictures: after that it names one of the eight
colours whatever it sees, and is right by chance. Then each step asks about some pictures several
times, and REINFORCE makes those answers likelier that were better than the others for the same
picture. A frozen copy of the initial model, a second worker in the same processes, keeps it from
drifting too far. The exit status is 1 if the mean reward stays below 0.8.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch import Tensor

from megatron_vlm.config import load_config
from megatron_vlm.config.schema import Config
from megatron_vlm.config.sources import SourceSpec
from megatron_vlm.data.batch.dataset import DataSet, open_data
from megatron_vlm.data.encode.row import continued
from megatron_vlm.data.tensors.rows import batch_of
from megatron_vlm.data.tensors.tensor_list import TensorList
from megatron_vlm.demo.shapes import ShapesSpec, write_shapes
from megatron_vlm.demo.tiny import TinySpec, write_tiny
from megatron_vlm.evaluation.scores import Voice
from megatron_vlm.evaluation.sets import Question, question_of
from megatron_vlm.family import read_sizes
from megatron_vlm.group import WorkerGroup, local_group
from megatron_vlm.step.completions import SamplingSettings
from megatron_vlm.worker import MegatronWorker

WANTED, ENOUGH = 0.8, 0.9  # mean reward of the last steps: to pass, to end early
WORDS_STEPS, WORDS_ROWS = 60, 64
PICTURES, COPIES = 32, 8
KL = 0.02  # to the initial model: a colour that is never tried is never learned
MOST = 4  # tokens of an answer, including its end
LAST = 10  # steps in a printed mean


def reinforce(log_probs_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy gradient on tokens that the policy has just sampled."""
    return -advantages_N * log_probs_N, {}


@dataclass(frozen=True)
class Quiz:
    """Questions in random order, and what counts as right."""

    data: DataSet
    voice: Voice

    @staticmethod
    def open(cfg: Config, path: Path) -> "Quiz":
        sizes = read_sizes(cfg.model.path)
        specs = (SourceSpec(str(path)),)
        data = open_data(specs, "data.train", cfg.data, cfg.model.path, sizes)
        assert isinstance(data, DataSet)
        return Quiz(data, Voice.of(cfg))

    def draw(self, count: int) -> Iterator[list[Question]]:
        """`count` questions at a time, one epoch after the other."""
        epoch = 0
        while True:
            order = self.data.order.epoch(epoch).tolist()
            for start in range(0, len(order) - count + 1, count):
                handles = order[start : start + count]
                yield [question_of(self.data, (source, index)) for source, index in handles]
            epoch += 1

    def rewards(self, asked: list[Question], answers: list[list[int]]) -> list[float]:
        """1 for an answer that is right, else 0."""
        return [
            float(self.voice.text(ids) == self.voice.text(question.answer_ids))
            for question, ids in zip(asked, answers, strict=True)
        ]

    @property
    def asking(self) -> SamplingSettings:
        """Answers as the model gives them."""
        return SamplingSettings(MOST, stop_ids=(self.voice.end_id,))


def learn_words(group: WorkerGroup, quiz: Quiz, lr: float) -> None:
    """Learn what an answer looks like, from answers to other pictures."""
    rng = random.Random(0)
    for _, questions in zip(range(WORDS_STEPS), quiz.draw(WORDS_ROWS), strict=False):
        answers = [question.answer_ids for question in questions]
        rng.shuffle(answers)
        rows = [
            continued(question.prompt, [*ids, quiz.voice.end_id])
            for question, ids in zip(questions, answers, strict=True)
        ]
        group.forward_backward(rows)
        group.optim_step(lr=lr).result()


def try_out(
    group: WorkerGroup, reference: WorkerGroup, quiz: Quiz, questions: list[Question], seed: int
) -> float:
    """One step of REINFORCE; the mean reward of its answers."""
    asked = [question for question in questions for _ in range(COPIES)]
    prompts = [question.prompt for question in questions]
    found = group.sample(prompts, quiz.asking, COPIES, seed, batch_rows=len(asked)).result()
    answers = [each.ids for of_prompt in found for each in of_prompt]
    rewards = quiz.rewards(asked, [quiz.asking.without_stop(ids) for ids in answers])
    usual = [fmean(rewards[i : i + COPIES]) for i in range(0, len(rewards), COPIES)]
    rows = [
        # To end an answer is a choice of the model, too.
        continued(question.prompt, ids, advantages=rewards[place] - usual[place // COPIES])
        for place, (question, ids) in enumerate(zip(asked, answers, strict=True))
    ]
    ref_log_probs = TensorList(reference.forward(rows).result())
    batch = batch_of(rows).with_fields(ref_log_probs=ref_log_probs)
    group.forward_backward(batch, loss=reinforce, kl_coef=KL)
    group.optim_step().result()
    return fmean(rewards)


def examine(group: WorkerGroup, quiz: Quiz) -> float:
    """The share of held-out questions that the likeliest answer gets right."""
    questions = next(quiz.draw(len(quiz.data.order)))
    prompts = [question.prompt for question in questions]
    answers = group.generate(prompts, MOST, (quiz.voice.end_id,), 64).result()
    return fmean(quiz.rewards(questions, answers))


def main(
    out: Path,
    group: WorkerGroup,
    beside: Callable[[Config], WorkerGroup],
    cfg: Config,
    steps: int,
    speaks: bool,
) -> int:
    """Train; the exit status. `beside` makes a group in the same processes that does not learn."""
    quiz, held_out = (
        Quiz.open(cfg, out / "shapes" / f"{name}.jsonl") for name in ("train", "eval")
    )
    start = time.perf_counter()
    learn_words(group, quiz, cfg.optim.lr)
    group.export(str(out / "words")).result()
    reference = beside(replace(cfg, model=replace(cfg.model, path=str(out / "words"))))
    rewards: list[float] = []
    last = 0.0
    for step, questions in zip(range(steps), quiz.draw(PICTURES), strict=False):
        rewards.append(try_out(group, reference, quiz, questions, seed=step))
        last = fmean(rewards[-LAST:])
        if speaks and (step == 0 or (step + 1) % LAST == 0):
            print(f"step {step + 1}/{steps}: mean reward {last:.3f}", flush=True)
        if len(rewards) >= LAST and last >= ENOUGH:
            break
    score = examine(group, held_out)
    group.export(str(out / "export")).result()
    if speaks:
        (out / "rewards.json").write_text(json.dumps(rewards))
        minutes = (time.perf_counter() - start) / 60
        print(
            f"mean reward {rewards[0]:.3f} at first, {last:.3f} at the end (needs {WANTED}); "
            f"{score:.1%} of the held-out questions right; {minutes:.1f} minutes"
        )
    return int(last < WANTED)


def make(out: Path) -> None:
    """Write a random model, and pictures of one shape each."""
    spec = TinySpec(layers=3, hidden=96, vision_depth=2, vision_hidden=64, deepstack=1)
    write_tiny(out / "base", replace(spec, from_scratch=True))
    write_shapes(out / "shapes", ShapesSpec(4000, 200, kinds=("colour",), max_shapes=1))


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="REINFORCE on the shapes in OUT/shapes.")
    parser.add_argument(
        "out", type=Path, help="has base (a checkpoint) and shapes; gets words and export"
    )
    parser.add_argument("--make", action="store_true", help="write base and shapes, and stop there")
    parser.add_argument("--ray", type=int, metavar="N", help="run in N Ray actors")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    recipe = ["model=tiny_cpu", "data=shapes", f"model.path={args.out}/base"]
    batch = ["train.micro_batch_size=64", "optim.lr=1e-3", "optim.beta2=0.98"]
    return args, [*recipe, *batch, *args.overrides]


def run() -> int:
    """Inside torchrun every rank makes the same calls; over Ray only this process does."""
    args, overrides = _parse()
    if args.make:
        make(args.out)
        return 0
    cfg = load_config(overrides)
    if args.ray is None:
        group = local_group(MegatronWorker(cfg))

        def beside(given: Config) -> WorkerGroup:
            return local_group(MegatronWorker(given, training=False))

        return main(args.out, group, beside, cfg, args.steps, dist.get_rank() == 0)
    import ray

    from megatron_vlm.group.ray_group import share_ray_group, start_ray_group

    ray.init(log_to_driver=False)
    group = start_ray_group(cfg, args.ray)
    try:
        share = partial(share_ray_group, group, training=False)
        return main(args.out, group, share, cfg, args.steps, True)
    finally:
        group.close()


if __name__ == "__main__":
    sys.exit(run())
