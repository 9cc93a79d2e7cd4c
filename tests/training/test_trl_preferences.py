# make trl-env, then .venv/bin/python -m pytest tests/training/test_trl_preferences.py
"""Losses over preferences are those of TRL's DPOTrainer, KTOTrainer, ORPOTrainer and CPOTrainer,
which get our log-probs: values and gradients."""

import base64
import json
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.objective_configs import PreferenceConfig, RewardConfig
from megatron_vlm.config.schema import Config, DataConfig, TrainConfig
from megatron_vlm.hf.gather_weights import gather_tensors
from megatron_vlm.training.losses import Objective
from megatron_vlm.training.row_losses import GLOBAL_LOSSES, bradley_terry
from megatron_vlm.training.row_objectives import PreferenceObjective, log_prob_grads, loss_function
from megatron_vlm.training.stage_inputs import RowInputs
from megatron_vlm.training.worker import MegatronWorker
from tests.support.chats import image, say, text
from tests.support.comparison import check_worst
from tests.support.runs import Case, of_interest
from tests.support.trl_environment import check_trl, run_trl
from tests.training.test_preferences import batches_of

# TRL is imported, and makes a trainer for each case.
pytestmark = [pytest.mark.slow, pytest.mark.engine("trl")]
LENGTHS, MAX_TOKENS = [7, 3, 11, 5, 2, 9, 4, 12], 12  # four chosen answers, then four rejected


@dataclass(frozen=True)
class Both:
    """A loss in TRL's words, and in ours. TRL rounds some values to fp32, which `tolerance`
    allows."""

    trainer: str
    theirs: dict[str, Any]
    objective: str = "dpo"
    ours: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-14


def dpo(*losses: str, **more: Any) -> Both:
    """A case of dpo whose keys have the same names."""
    tolerance = more.pop("tolerance", 2e-14)
    theirs = dict(loss_type=list(losses), **more)
    return Both("dpo", theirs, "dpo", dict(losses=losses, **more), tolerance)


KTO = dict(beta=0.3, desirable_weight=1.25, undesirable_weight=0.5)
CASES = {
    "sigmoid": dpo("sigmoid", beta=0.3),
    "hinge": dpo("hinge", beta=0.3),
    "ipo": dpo("ipo", beta=0.4),
    "ipo by its name": Both("dpo", dict(loss_type=["ipo"], beta=0.4), "ipo", dict(beta=0.4)),
    "exo_pair": dpo("exo_pair", beta=0.3, label_smoothing=0.125, tolerance=1e-7),
    "nca_pair": dpo("nca_pair", beta=0.3),
    "robust": dpo("robust", beta=0.3, label_smoothing=0.125),
    "bco_pair": dpo("bco_pair", beta=0.3),
    "sppo_hard": dpo("sppo_hard", beta=0.3),
    "aot": dpo("aot", beta=0.3, label_smoothing=0.125),
    "aot_unpaired": dpo("aot_unpaired", beta=0.3, label_smoothing=0.125),
    "apo_zero": dpo("apo_zero", beta=0.3),
    "apo_down": dpo("apo_down", beta=0.3),
    "discopop": dpo("discopop", beta=0.3, discopop_tau=0.25),
    "sft": dpo("sft", beta=0.3),
    "sigmoid_norm": dpo("sigmoid_norm", beta=0.3),
    "several, weighted": dpo(
        "sigmoid", "bco_pair", "sft", "aot", beta=0.2, loss_weights=[0.8, 0.2, 1.5, 0.5]
    ),
    "kto": Both("kto", KTO, "kto", KTO),
    "apo_zero_unpaired": Both(
        "kto",
        dict(beta=0.3, loss_type="apo_zero_unpaired"),
        "kto",
        dict(beta=0.3, losses=["apo_zero_unpaired"]),
    ),
    # TRL rounds the log-probs to fp32.
    "orpo": Both("orpo", dict(beta=0.3), "orpo", dict(beta=0.3), tolerance=1e-6),
    "simpo": Both(
        "cpo",
        dict(beta=2.0, loss_type="simpo", simpo_gamma=0.7, cpo_alpha=0.0, label_smoothing=0.1),
        "simpo",
        dict(beta=2.0, simpo_gamma=0.7, label_smoothing=0.1),
    ),
    "cpo": Both(
        "cpo",
        dict(beta=0.2, loss_type="sigmoid", cpo_alpha=0.5, label_smoothing=0.1),
        "cpo",
        dict(beta=0.2, sft_coef=0.5, label_smoothing=0.1),
    ),
    "reward": Both("reward", dict(center_rewards_coefficient=None), "reward"),
    "reward, margins and centring": Both(
        "reward",
        dict(center_rewards_coefficient=0.25, margin=[0.5, -1.0, 0.0, 2.0]),
        "reward",
        dict(center_coef=0.25),
    ),
    "cpo, hinge": Both(
        "cpo",
        dict(beta=0.2, loss_type="hinge", cpo_alpha=1.0),
        "cpo",
        dict(beta=0.2, losses=["hinge"]),
    ),
    "cpo, ipo": Both(
        "cpo", dict(beta=0.2, loss_type="ipo", cpo_alpha=1.0), "cpo", dict(beta=0.2, losses=["ipo"])
    ),
}


@dataclass(frozen=True)
class Answers:
    """Log-probs [R, T] of the tokens of answers, zero where there is none, and of whole rows [R]
    under the reference; for kto, of mismatched rows."""

    log_probs: Tensor
    mask: Tensor
    reference: Tensor
    labels: Tensor
    mismatched: Tensor  # [2, R]: model and reference


@pytest.fixture(scope="module")
def answers() -> Answers:
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(MAX_TOKENS) < torch.tensor(LENGTHS)[:, None]
    log_probs = torch.where(mask, -1 - noise(0.4, len(LENGTHS), MAX_TOKENS).abs(), 0.0)
    labels = torch.tensor([True, False, True, True, False, True, False, True])
    rows = -9 + noise(1.0, 2, len(LENGTHS))
    rows[0] += 0.5
    return Answers(log_probs, mask, log_probs.sum(1) + noise(1.5, len(LENGTHS)), labels, rows)


@pytest.fixture(scope="module")
def theirs(tiny, answers) -> dict[str, Any]:
    cases = [
        {
            "trainer": both.trainer,
            "config": both.theirs,
            "log_probs": answers.log_probs.tolist(),
            "lengths": LENGTHS,
            "reference": answers.reference.tolist(),
            "labels": answers.labels.tolist(),
            "kl": answers.mismatched.tolist(),
        }
        for both in CASES.values()
    ]
    done = run_trl("trl_preference_losses.py", tiny(), given=cases)
    return dict(zip(CASES, done, strict=True))


def config_of(both: Both) -> Config:
    preference = PreferenceConfig(**both.ours)
    cfg = replace(Config(), train=TrainConfig(objective=both.objective), preference=preference)
    check_values(cfg)
    return cfg


def ours(both: Both, answers: Answers) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, as the worker sums and divides. TRL has all chosen answers first,
    we have pairs."""
    if both.objective == "reward":
        return ours_of_rewards(both, answers)
    cfg = config_of(both)
    count = len(LENGTHS) // 2
    is_labelled = both.objective == "kto"
    order = torch.arange(2 * count)
    if not is_labelled:
        order = order.view(2, count).T.flatten()
    leaf = answers.log_probs.clone().requires_grad_()
    log_probs, mask, reference = leaf[order], answers.mask[order], answers.reference[order]
    row_M = torch.arange(2 * count)[:, None].expand_as(mask)[mask]
    rejected = ~answers.labels if is_labelled else torch.arange(2 * count) % 2 == 1
    example = torch.arange(2 * count) if is_labelled else torch.arange(2 * count) // 2
    has_reference = both.objective in ("dpo", "ipo", "kto")
    values = {"rejected": rejected} | ({"reference": reference} if has_reference else {})
    if GLOBAL_LOSSES.keys() & cfg.preference.losses:
        sums = answers.log_probs[order].sum(1)
        values["log_prob_grads"] = log_prob_grads(cfg, sums, reference)
    tokens = sum(LENGTHS[:count]) / count
    kl = max(float((answers.mismatched[0] - answers.mismatched[1]).mean()), 0.0)
    objective = Objective.create(loss_function(cfg, tokens, kl), {})
    rows = RowInputs(row_M, example, values)
    losses, _ = objective.of_tokens(log_probs[mask], None, {}, rows)
    loss = losses.mean()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def ours_of_rewards(both: Both, answers: Answers) -> tuple[Tensor, Tensor]:
    """The same for a reward model, whose rewards are the first numbers of the rows."""
    count = len(LENGTHS) // 2
    order, leaf = torch.arange(2 * count).view(2, count).T.flatten(), answers.log_probs.clone()
    rewards, number = leaf.requires_grad_()[order, 0], torch.arange(2 * count)
    rows = RowInputs(number, number // 2, {"rejected": number % 2 == 1})
    margins = torch.tensor(both.theirs.get("margin", [0.0] * count)).repeat_interleave(2)
    settings = RewardConfig(**both.ours)
    objective = Objective.create(partial(bradley_terry, settings.center_coef), {})
    losses, _ = objective.of_tokens(rewards, None, {"margin": margins}, rows)
    loss = losses.mean()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name, answers, theirs, record_property):
    grad = torch.tensor(theirs[name]["grad"], dtype=torch.float64).where(answers.mask, 0.0)
    want = {"loss": theirs[name]["loss"], "grad": grad.tolist()}
    check_trl(*ours(CASES[name], answers), want, CASES[name].tolerance, record_property)


# Runs of three steps with pictures, by TRL's trainers and by ours at several layouts.


def run_records(kind: str) -> list[dict[str, Any]]:
    """Records whose pictures need no resize: torchvision's differs from Pillow's in single levels
    of 255."""
    questions = [("What is it?", [1]), ("And here?", [2, 3]), ("2 + 2?", []), ("Colour?", [4])]
    answers = [
        ("a red circle", "it might be a circle, I think"),
        ("two", "I see nothing"),
        ("4", "most likely 5"),
        ("blue", "no"),
    ]
    records = []
    for number, ((question, seeds), (good, bad)) in enumerate(zip(questions, answers, strict=True)):
        pictures = [image(64, 96, seed) for seed in seeds]
        record = {"prompt": [say("user", *pictures, text(question))]}
        if kind == "dpo":
            record |= {"chosen": [say("assistant", good)], "rejected": [say("assistant", bad)]}
        else:
            value = bad if number % 2 else good
            record |= {"completion": [say("assistant", value)], "label": bool(number % 2)}
        records.append(record)
    return records


def as_trl(record: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """The record as text, with pictures in files."""
    [message] = record["prompt"]
    rendered, images = "<|im_start|>user\n", []
    for part in message["content"]:
        if part["type"] == "text":
            rendered += part["text"]
            continue
        rendered += "<|vision_start|><|image_pad|><|vision_end|>"
        path = folder / f"{number}-{len(images)}.png"
        path.write_bytes(base64.b64decode(part["image"].partition(",")[2]))
        images.append(str(path))
    prompt = rendered + "<|im_end|>\n<|im_start|>assistant\n"
    answers = {
        name: record[name][0]["content"] + "<|im_end|>"
        for name in ("chosen", "rejected", "completion")
        if name in record
    }
    labels = {"label": record["label"]} if "label" in record else {}
    return {"prompt": prompt, "images": images, **answers, **labels}


def three_steps(path: str, cfg: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the figures of each step, and the weights after the last one."""
    worker = MegatronWorker(cfg)
    batches, objective, steps = batches_of(worker, cfg), PreferenceObjective(worker, cfg), []
    for _ in range(3):
        metrics = objective.forward_backward(batches.next())
        norm, _ = worker.optim_step(cfg.optim.lr)
        steps.append({"loss": metrics.loss, "grad_norm": norm, **metrics.means})
    named = gather_tensors(worker.held, worker.table, worker.grid, of=of_interest(worker))
    return steps, {name: value.clone() for name, value in named if value is not None}


# Relative to the largest value of a figure, or to 0.01 if that is larger, in fp32. Measured worst
# case: 2.4e-6.
RUN_TOLERANCE = 1e-5
ROUNDING = 1e-4  # of a margin between log-probs that are equal
FIGURES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "rewards_chosen": "rewards/chosen",
    "rewards_rejected": "rewards/rejected",
    "rewards_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "logps_chosen": "logps/chosen",
    "logps_rejected": "logps/rejected",
    "kl_estimate": "kl",
}
RUNS = {
    "dpo": ("dpo", dict(tp=1)),
    "dpo-tp2-pp2": ("dpo", dict(tp=2, pp=2)),
    "dpo-dp2": ("dpo", dict(dp=2)),
    "kto": ("kto", dict(tp=1)),
    "kto-dp2": ("kto", dict(dp=2)),
}


@pytest.fixture(scope="module")
def trained_by_trl(tiny, tmp_path_factory):
    @cache
    def train(kind: str) -> tuple[list[dict[str, float]], dict[str, Tensor], str]:
        folder = tmp_path_factory.mktemp(kind)
        records = run_records(kind)
        ours = folder / "ours.jsonl"
        ours.write_text("".join(json.dumps(record) + "\n" for record in records))
        theirs = folder / "theirs.jsonl"
        made = [as_trl(record, folder, number) for number, record in enumerate(records)]
        theirs.write_text("".join(json.dumps(record) + "\n" for record in made))
        out = folder / "weights.pt"
        steps = run_trl("trl_preference_runs.py", kind, tiny(), theirs, out)
        return steps, torch.load(out), str(ours)

    return train


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_trl(name, pool, tiny, trained_by_trl, record_property):
    kind, parallel = RUNS[name]
    logged, want, data = trained_by_trl(kind)
    dp = parallel.pop("dp", 1)
    world = dp * parallel.get("tp", 1) * parallel.get("pp", 1)
    case = Case(world, parallel=parallel, optim=dict(lr=1e-3, schedule="constant", eps=1e-4))
    cfg = case.config(tiny())
    cfg = replace(
        cfg,
        data=DataConfig(
            train=parse_sources(data, "data.train"), num_workers=0, cache_dir=None, shuffle=False
        ),
        preference=PreferenceConfig(beta=0.3),
        train=replace(cfg.train, objective=kind, global_batch_size=4),
    )
    [(steps, weights), *_] = pool.run(three_steps, world, cfg.model.path, cfg)
    parallel["dp"] = dp
    errors = {}
    for key, their_key in FIGURES.items():
        pairs = [
            (ours[key], theirs[their_key])
            for ours, theirs in zip(steps, logged, strict=True)
            if key in ours and their_key in theirs
        ]
        # At step 0 the policy is the reference: rewards are rounding there, and it decides which
        # answer is ahead. So the largest of a figure's values is its scale.
        scale = max([1e-2, *(abs(value) for _, value in pairs)])
        for number, (ours_of_step, theirs_of_step) in enumerate(pairs):
            if (key, number) == ("reward_accuracy", 0):
                assert abs(logged[0]["rewards/margins"]) < ROUNDING
                continue
            errors[f"{key} {number}"] = abs(ours_of_step - theirs_of_step) / scale
    assert len(errors) >= 3 * 8 - 1
    if kind == "kto":
        assert max(line["kl"] for line in logged) > 0.01
    initial = load_file(Path(tiny()) / "model.safetensors")
    moved = {key: float((want[key] - initial[key]).norm()) for key in want}
    assert max(moved.values()) > 0.01
    total = sum(value**2 for value in moved.values()) ** 0.5
    apart = sum(float((weights[key] - want[key]).norm()) ** 2 for key in want) ** 0.5
    errors["weights"] = apart / total
    check_worst(errors, RUN_TOLERANCE, record_property)
