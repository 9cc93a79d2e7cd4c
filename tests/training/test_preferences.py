# .venv/bin/python -m pytest tests/training/test_preferences.py
"""Losses over preferences and every gradient equal Hugging Face's, at each layout, for a policy
that differs from the reference. test_trl_preferences.py compares the losses with TRL's."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.config import load_config
from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.objective_configs import PreferenceConfig
from megatron_vlm.config.objectives import reference_of, spec_of
from megatron_vlm.config.schema import Config, DataConfig
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.scores.score_index import ScoredSet, ScoreIndex
from megatron_vlm.data.tokens.row import IGNORE, Row, slice_row
from megatron_vlm.errors import CheckpointError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.load_weights import load_hf
from megatron_vlm.lora.layers import fill_adapters, initial_values
from megatron_vlm.lora.peft_folder import ADAPTER_FILE
from megatron_vlm.run.progress import Progress
from megatron_vlm.training import frozen_models, reference
from megatron_vlm.training.data_feed import Feeder, SharedBatches
from megatron_vlm.training.frozen_inputs import (
    FrozenInput,
    changed_inputs,
    frozen_inputs,
    inputs_from_json,
)
from megatron_vlm.training.reference import with_reference
from megatron_vlm.training.row_losses import GLOBAL_LOSSES, PAIR_LOSSES, Pairs, kto
from megatron_vlm.training.row_objectives import PreferenceObjective
from megatron_vlm.training.stage_inputs import RowInputs
from megatron_vlm.training.worker import MegatronWorker
from tests.commands.test_score import records_of, score
from tests.model.test_gemma4 import without_constants
from tests.model.test_parity import layout
from tests.run.test_train import run_rank
from tests.support.batches import SHALLOW
from tests.support.chats import image, picture, say, text
from tests.support.comparison import check_worst
from tests.support.error_fields import raises
from tests.support.peft_reference import Adapter, as_ours, peft_model, save, trained
from tests.support.reference import grads_of, load_reference, row_log_probs
from tests.support.runs import Case, collect_grads
from tests.support.suites import FULL, slow
from tests.training.test_distill import eval_rank

# Relative, in fp32 on the CPU, as in tests/model/test_parity.py. Measured worst case: see below.
TOLERANCE = 2e-5
ADAPTER = Adapter(("attention", "mlp", "merger"))
SIZES: dict[str, Any] = SHALLOW
EXPERTS = SHALLOW | dict(experts=4, top_k=2)
GEMMA4 = dict(
    family="gemma4", layers=2, vision_depth=1, sliding_window=8, from_scratch=True
)  # logits that the cap bends
PAIRS = 5  # not a multiple of the replicas


def answer(value: str) -> list[dict[str, Any]]:
    return [say("assistant", value)]


def pairs() -> list[dict[str, Any]]:
    """Pairs with pictures in the prompt and in later turns, of several turns, and of text alone."""
    return [
        {
            "prompt": [say("user", image(64, 96, 1), text("What is it?"))],
            "chosen": answer("a red circle"),
            "rejected": answer("it might be something like a circle, I think"),
        },
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "I would say it is 5"},
        {
            "prompt": [
                say("user", image(96, 64, 2), text("Colour?")),
                say("assistant", "blue"),
                say("user", "And its shape?"),
            ],
            "chosen": answer("a square"),
            "rejected": answer("no"),
        },
        {
            "prompt": [say("user", "Look.")],
            "chosen": [
                say("assistant", "Show me."),
                say("user", image(64, 64, 3)),
                say("assistant", "A star."),
            ],
            "rejected": [
                say("assistant", "Show me the picture."),
                say("user", image(64, 128, 4)),
                say("assistant", "I see nothing here"),
            ],
        },
        {
            "prompt": [say("user", "Sing.")],
            "chosen": answer("la la la la"),
            "rejected": answer("no"),
        },
    ]


def labelled() -> list[dict[str, Any]]:
    """The answers of the pairs one by one, some good and some bad."""
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for number, pair in enumerate(pairs()[:3] + pairs()[4:])
        for name in (("chosen", "rejected") if number != 1 else ("rejected",))
    ]


@dataclass(frozen=True)
class Trial:
    """An objective, with its settings."""

    objective: str
    preference: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> list[dict[str, Any]]:
        return labelled() if self.objective == "kto" else pairs()

    def config(self, path: str, case: Case, data: str) -> Config:
        cfg = case.config(path)
        sources = parse_sources(data, "data.train")
        return replace(
            cfg,
            data=DataConfig(train=sources, num_workers=0, cache_dir=None, shuffle=False),
            preference=PreferenceConfig(**self.preference),
            train=replace(cfg.train, objective=self.objective, global_batch_size=len(self.records)),
        )


SIGMOID, KTO = Trial("dpo", dict(beta=0.3)), Trial("kto", dict(beta=0.3, undesirable_weight=0.5))
SEVERAL = Trial("dpo", dict(beta=0.2, losses=("sigmoid", "aot", "sft"), loss_weights=(1, 0.5, 0.2)))
ORPO = Trial("orpo", dict(beta=0.2))


CASES: dict[str, tuple[Trial, Case, dict[str, Any]]] = {
    "dpo": (SIGMOID, layout(), SIZES),
    "dpo-tp2": (SIGMOID, layout(tp=2), SIZES),
    "dpo-pp2": (SIGMOID, layout(pp=2), SIZES),
    "dpo-dp2": (SIGMOID, layout(dp=2), SIZES),
    "dpo-pp2x2": (SIGMOID, layout(pp=2, virtual_stages=2), {}),
    "dpo-experts-ep2": (SIGMOID, layout(dp=2, ep=2), EXPERTS),
    "dpo-gemma4-tp2": (SIGMOID, layout(tp=2), GEMMA4),
    "orpo-gemma4-experts-ep2": (ORPO, layout(dp=2, ep=2), GEMMA4 | dict(experts=4)),
    "dpo-model-tp2-pp2": (
        Trial("dpo", dict(beta=0.3, reference="model")),
        layout(tp=2, pp=2),
        SIZES,
    ),
    "dpo-adapters-tp2": (SIGMOID, layout(tp=2), SIZES),
    "several-dp2": (SEVERAL, layout(dp=2), SIZES),
    "several-adapters-pp2": (SEVERAL, layout(pp=2), SIZES),
    "orpo-tp2-dp2": (ORPO, layout(tp=2, dp=2), SIZES),
    # Fewer layers would give a divergence below 0.
    "kto-dp2": (KTO, layout(dp=2), {}),
    "kto-dp4": (KTO, layout(dp=4), {}),
    "kto-pp2": (KTO, layout(pp=2), {}),
    "kto-adapters-tp2": (KTO, layout(tp=2), {}),
}


@dataclass(frozen=True)
class Result:
    loss: float
    means: dict[str, float]
    scores: dict[str, float]  # the same loss and figures without gradients
    grads: dict[str, Tensor]


def batches_of(worker: MegatronWorker, cfg: Config) -> SharedBatches:
    """Return the batches of a run, with the reference of the worker's current weights."""
    feeder = Feeder(cfg, worker.source.sizes, worker.grid, worker.platform.device, worker.watchdog)
    if reference_of(cfg) == "keep":
        feeder.data = with_reference(worker, cfg, feeder.data, "data.train", None)
    feeder.start(Position())
    return feeder.batches


def step_of(path: str, cfg: Config, policy: str, adapter: str | None) -> Result:
    """One step of an objective in which the weights are those of another checkpoint, or the base
    with an adapter, and the reference is the initial model."""
    worker = MegatronWorker(cfg)
    batches = batches_of(worker, cfg)
    if adapter is None:
        source = HFCheckpoint(policy)
        source.read_headers()
        load_hf(worker.held, source, worker.grid, lambda: None)
    else:
        continued = replace(cfg, lora=replace(cfg.lora, path=adapter))
        fill_adapters(
            worker.held, worker.grid, initial_values(continued, worker.adapted, worker.source)
        )
    batch, objective = batches.next(), PreferenceObjective(worker, cfg)
    metrics = objective.forward_backward(batch)
    grads = collect_grads(worker)
    sums = objective.scores(batch.micro_batches, batch.mismatched)
    scores = {name: value / sums["examples"] for name, value in sums.items()}
    return Result(metrics.loss, metrics.means, scores, grads)


def rows_of(cfg: Config) -> tuple[list[Row], list[bool]]:
    """Return the rows of a data set in its order, with floats as pixels, and which are rejected."""
    sizes, pixels = read_sizes(cfg.model.path), PixelTables(cfg.model.path, torch.device("cpu"))
    kind = spec_of(cfg).records
    data = open_data(cfg.data.train, "data.train", cfg.data, cfg.model.path, sizes, kind=kind)
    assert isinstance(data, DataSet)
    rows, rejected = [], []
    for sample in range(len(data.order)):
        rejected += [row.is_rejected for row in data.example((0, sample))]
        for placed in data.rows((0, sample)):
            patches = pixels.images(placed.pixel_values_PC)
            rows.append(replace(placed, pixel_values_PC=patches))
    return rows, rejected


def mismatched(rows: Sequence[Row], cfg: Config) -> list[Row]:
    """Each prompt with the answer of the row before, as TRL's collator makes them."""
    tokens, made = read_sizes(cfg.model.path).tokens, []
    for number, row in enumerate(rows):
        start, other = first_label(row), rows[number - 1]
        prompt, answered = slice_row(row, start, tokens), first_label(other)
        ids = torch.cat([prompt.ids_S, other.ids_S[answered:]])
        labels = torch.cat([torch.full((start,), IGNORE), other.labels_S[answered:]])
        made.append(replace(prompt, ids_S=ids, labels_S=labels))
    return made


def first_label(row: Row) -> int:
    return int((row.labels_S != IGNORE).nonzero()[0])


def expected(trial: Trial, cfg: Config, policy: Any, initial: Any) -> float:
    """Return the loss by Hugging Face's models, after its backward to the policy's parameters."""
    rows, rejected = rows_of(cfg)

    def sums(model: Any, rows: Sequence[Row]) -> Tensor:
        return torch.stack([row_log_probs(model, row).double().sum() for row in rows])

    with torch.no_grad():
        initially = sums(initial, rows)
    own, p = sums(policy, rows), cfg.preference
    if trial.objective == "kto":
        with torch.no_grad():
            others = mismatched(rows, cfg)
            kl = float((sums(policy, others) - sums(initial, others)).mean().clamp(min=0))
        assert kl > 0
        loss = kto(own - initially, torch.tensor(rejected), p, kl).mean()
    else:
        counts = [int((row.labels_S != IGNORE).sum()) for row in rows]
        tokens = torch.tensor(counts, dtype=torch.float64)
        if trial.objective == "orpo":
            initially = torch.zeros_like(initially)
        split = [each.view(-1, 2).unbind(1) for each in (own, initially, tokens)]
        pairs = Pairs(*split[0], *split[1], *split[2])
        cross_entropy = -pairs.chosen_E.sum() / pairs.chosen_tokens_E.sum()
        if trial.objective == "orpo":
            loss = PAIR_LOSSES["orpo"](pairs, p).mean() + cross_entropy
        elif not p.losses:
            loss = PAIR_LOSSES["sigmoid"](pairs, p).mean()
        else:
            one, two, three = p.loss_weights
            loss = one * PAIR_LOSSES["sigmoid"](pairs, p).mean()
            loss = loss + two * GLOBAL_LOSSES["aot"](pairs, p).mean() + three * cross_entropy
    loss.backward()
    return float(loss.detach())


@pytest.fixture(scope="module")
def references(tiny, tmp_path_factory):
    """Return a function for what Hugging Face computes for a trial, and the files of the policy."""
    root = tmp_path_factory.mktemp("preferences")

    @cache
    def data_of(objective: str) -> str:
        records = labelled() if objective == "kto" else pairs()
        path = root / f"{objective}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    @cache
    def adapter_of(sizes: tuple[tuple[str, Any], ...]) -> str:
        return save(peft_model(tiny(**dict(sizes)), ADAPTER), root / f"adapter{len(sizes)}")

    @cache
    def compute(name: str) -> tuple[float, dict[str, Tensor]]:
        trial, case, sizes = CASES[name]
        cfg = trial.config(tiny(**sizes), case, data_of(trial.objective))
        initial = load_reference(tiny(**sizes)).eval()
        if "adapters" in name:
            policy = peft_model(tiny(**sizes), ADAPTER)
            loss = expected(trial, cfg, policy, initial)
            grads = {key: param.grad for key, param in trained(policy).items()}
            return loss, as_ours(policy, {k: g for k, g in grads.items() if g is not None})
        policy = load_reference(tiny(**sizes, seed=1))
        loss = expected(trial, cfg, policy, initial)
        return loss, grads_of(policy.named_parameters())

    return data_of, adapter_of, compute


def errors_of(name: str, pool, tiny, references, mutant: str | None = None) -> dict[str, float]:
    """Return the relative errors of rank 0, with a mutant of the package if it is named."""
    trial, case, sizes = CASES[name]
    data_of, adapter_of, compute = references
    has_adapters = "adapters" in name
    if has_adapters:
        case = replace(case, lora=ADAPTER.ours)
    cfg = trial.config(tiny(**sizes), case, data_of(trial.objective))
    adapter = adapter_of(tuple(sorted(sizes.items()))) if has_adapters else None
    loss, grads = compute(name)
    arguments = (cfg.model.path, cfg, tiny(**sizes, seed=1), adapter)
    actual, *_ = pool.run(mutated_step, case.world, mutant, *arguments)
    errors = {"loss": abs(actual.loss - loss) / abs(loss)}
    errors["score"] = abs(actual.scores["loss"] - loss) / abs(loss)
    [actual] = without_constants([actual])
    assert actual.grads.keys() == grads.keys()
    largest = max(float(grad.norm()) for grad in grads.values())
    for key, grad in grads.items():
        # Gradients that are zero but for rounding are compared with the largest one.
        scale = max(float(grad.norm()), 1e-4 * largest)
        errors[key] = float((actual.grads[key] - grad).norm()) / scale
    return errors


# `make test` runs the first two, `make test-full` also the others, and `make test-slow` the rest.
MARKS: dict[str, Any] = {"dpo-adapters-tp2": (), "several-dp2": ()}
MARKS |= dict.fromkeys(("dpo-experts-ep2", "orpo-tp2-dp2", "kto-dp4", "dpo-gemma4-tp2"), FULL)
PARAMS = [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in CASES]


@pytest.mark.parametrize("name", PARAMS)
def test_equals_hugging_face(name, pool, tiny, references, record_property):
    check_worst(errors_of(name, pool, tiny, references), TOLERANCE, record_property)


# Mutants that show that these comparisons can fail.


def swapped(log_probs_N: Tensor, rows: RowInputs) -> Pairs:
    """Take the rejected answers for the chosen ones."""
    right = FROM_ROWS(log_probs_N, rows)
    fields = [right.rejected_E, right.chosen_E, right.ref_rejected_E, right.ref_chosen_E]
    return Pairs(*fields, right.rejected_tokens_E, right.chosen_tokens_E)


def means(rows: RowInputs, values_M: Tensor) -> Tensor:
    """Average the log-probs of an answer in place of adding them up."""
    sums = SUMS(rows, values_M)
    return sums / SUMS(rows, torch.ones_like(values_M)).clamp(min=1)


FROM_ROWS, SUMS = Pairs.from_rows, RowInputs.sums
MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    # name: the case, and the patch
    "adapters stay on": (
        "dpo-adapters-tp2",
        lambda: mock.patch.object(frozen_models, "without_adapters", lambda worker: nullcontext()),
    ),
    "answers swapped": (
        "dpo",
        lambda: mock.patch.object(Pairs, "from_rows", staticmethod(swapped)),
    ),
    "means for sums": ("dpo", lambda: mock.patch.object(RowInputs, "sums", means)),
    "divergence of one replica": (
        "kto-dp2",
        lambda: mock.patch.object(PreferenceObjective, "_gather", lambda self, value: [value]),
    ),
}


def mutated_step(mutant: str | None, *arguments: Any) -> Result:
    with nullcontext() if mutant is None else MUTANTS[mutant][1]():
        return step_of(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_far_from_hugging_face(mutant, pool, tiny, references):
    errors = errors_of(MUTANTS[mutant][0], pool, tiny, references, mutant)
    assert max(errors.values()) > 1000 * TOLERANCE


# Whole runs.


def run_words(tiny, run: Path, data: str, *more: str) -> list[str]:
    keys = {
        "model.path": tiny(**SIZES),
        "data.train": data,
        "data.eval": data,
        "data.cache_dir": "null",
        "data.num_workers": 0,
        "run": run,
        "train.steps": 4,
        "train.global_batch_size": 3,
        "eval.generate": "true",
        "eval.max_new_tokens": 3,
        "checkpoint.every": 2,
        "optim.lr": 1e-3,
        "launch.timeout_minutes": 2,
    }
    return [*(f"{key}={value}" for key, value in keys.items()), *more]


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind, without what depends on the clock."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    clock = ("seconds", "wall_s", "memory_gb")
    return [
        {k: v for k, v in line.items() if k not in clock and "per_s" not in k}
        for line in lines
        if line["kind"] == kind
    ]


RESUMED = {
    "dpo": (2, ["train.objective=dpo", "parallel.pp=2"]),
    "dpo-adapters": (2, ["train.objective=dpo", "lora=default", "parallel.tp=2"]),
    "kto": (2, ["train.objective=kto"]),
    "aot": (2, ["train.objective=dpo", "preference.losses=[aot]"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "dpo" else pytest.mark.slow) for n in RESUMED]
)
def test_resumed_is_bit_for_bit_the_run_without_a_break(name, pool, tiny, references, tmp_path):
    """The reference of a resumed run is still the initial model."""
    world, more = RESUMED[name]
    data_of, _, _ = references
    data = data_of("kto" if name == "kto" else "dpo")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    status, _, err = pool.run(run_rank, world, run_words(tiny, whole, data, *more))[0]
    assert status == 0, err
    steps, scores = logged(whole, "step"), logged(whole, "eval")
    assert {"rewards_chosen", "rewards_margin", "logps_rejected"} <= {*steps[-1]}
    assert scores[-1]["exact_match"] is not None
    assert scores[-1]["metrics"]["rewards_margin"] > 0
    checkpoint = Path("checkpoints", "step-00000002")
    shutil.copytree(whole / checkpoint, resumed / checkpoint)
    status, out, err = pool.run(run_rank, world, run_words(tiny, resumed, data, *more))[0]
    assert status == 0, err
    assert "resumed from" in out
    assert logged(resumed, "step") == steps[2:]
    assert logged(resumed, "eval") == scores
    exported = {path.name: path.read_bytes() for path in (whole / "export").glob("*.safetensors")}
    assert exported
    for file, content in exported.items():
        assert (resumed / "export" / file).read_bytes() == content


@FULL
@pytest.mark.parametrize("how", ["keep", "model"])
def test_another_reference_after_a_resume_is_refused(how, pool, tiny, references, tmp_path):
    """It is an event if model.path was changed on purpose. Earlier versions stored no digests."""
    run, model, other = tmp_path / "run", tmp_path / "model", Path(tiny(**SIZES, seed=1))
    shutil.copytree(tiny(**SIZES), model)

    def train(steps: int, path: Path) -> tuple[int, str]:
        few = ("eval.generate=false", "data.eval=null", "checkpoint.export=false")
        more = ("train.objective=dpo", f"preference.reference={how}", f"train.steps={steps}")
        words = run_words(tiny, run, references[0]("dpo"), *few, *more, f"model.path={path}")
        status, _, err = pool.run(run_rank, 1, words)[0]
        return status, err

    assert train(1, model)[0] == 0
    shutil.copy(other / "model.safetensors", model)
    evaluated = pool.run(eval_rank, 1, [str(run), f"data.eval={references[0]('dpo')}"])[0]
    for status, err in (refused := train(2, model), evaluated[::2]):
        assert status == 2 and f"model.path={model} has another content" in err, err
    assert "computing the reference" not in refused[1]
    status, err = train(2, other)
    assert status == 0, err
    events = [line["text"] for line in logged(run, "event")]
    assert "resumed with another content of model.path" in events
    saved = json.loads((run / "checkpoints/step-00000001/state.json").read_text())["progress"]
    assert saved.pop("frozen").keys() == {"model.path"}
    now = {"model.path": FrozenInput(str(model), "another")}
    assert changed_inputs(run, Progress.from_json(saved).frozen, now) == []


@FULL
def test_all_that_is_read_and_not_trained_has_its_digest(tiny, references, tmp_path):
    model, adapter, scores = tiny(**SIZES), tmp_path / "adapter", tmp_path / "scores"
    shutil.copytree(references[1](tuple(sorted(SIZES.items()))), adapter)
    teachers = [tmp_path / name for name in ("one", "two")]
    for number, teacher in enumerate(teachers):
        shutil.copytree(tiny(**SIZES, seed=number), teacher)
    scores.mkdir()
    sets = (ScoredSet("data.train", "records", 1, 1),)
    index = ScoreIndex("m", "weights", "vocabulary", 2, 1.0, "fp32", sets)
    index.write(scores)
    lora = ["lora.rank=4", f"lora.path={adapter}"]
    cases: list[tuple[list[str], bool, set[str]]] = [
        (["lora.rank=4"], False, set()),  # save_load.py compares the base of adapters
        (["train.objective=dpo"], False, {"model.path"}),
        (["train.objective=dpo", *lora], False, {"model.path", "lora.path"}),
        (
            ["train.objective=dpo", f"preference.reference={scores}"],
            False,
            {"preference.reference"},
        ),
        (["train.objective=distill", f"teacher.path={scores}"], False, {"teacher.path"}),
        (["rl.kl_coef=0.1"], True, {"model.path"}),
        ([f"rl.reward=model:{teachers[0]}"], True, {"rl.reward"}),
        (["rl.kl_coef=0.1", *lora], True, {"model.path", "lora.path"}),
        ([f"teacher.path={teachers[0]}"], True, {"teacher.path"}),
        (
            [f"teacher.path={{a: {teachers[0]}, b: {teachers[1]}}}"],
            True,
            {"teacher.path.a", "teacher.path.b"},
        ),
    ]

    def inputs() -> list[dict[str, FrozenInput]]:
        found = []
        for words, is_rl, _ in cases:
            cfg = load_config([f"model.path={model}", "data.train=x", "train.steps=1", *words])
            worker: Any = SimpleNamespace(cfg=cfg, base_digest=content)
            found.append(frozen_inputs(worker, is_rl))
        return found

    content = "before"
    before = inputs()
    assert [{*each} for each in before] == [keys for _, _, keys in cases]
    saved = {key: asdict(each) for key, each in before[-1].items()}
    assert inputs_from_json({"frozen": saved}) == before[-1]
    content = "after"
    replace(index, weights="others").write(scores)
    for file in (adapter / ADAPTER_FILE, *(each / "model.safetensors" for each in teachers)):
        tensors = load_file(file)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    for one, other in zip(before, inputs(), strict=True):
        for key in one:
            with raises(CheckpointError, key=key):
                changed_inputs(tmp_path, one, {key: other[key]})


@FULL
def test_the_reference_is_computed_once_and_only_for_what_is_trained(pool, tiny, tmp_path):
    """A second run reads it from the cache, and a run of few steps does not wait for all data.
    Another picture of the same size, and a damaged file, are noticed."""
    data, photo, cache = tmp_path / "data.jsonl", tmp_path / "photo.bmp", tmp_path / "cache"
    records = pairs()
    records[0]["prompt"][0]["content"][0]["image"] = photo.name
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    picture(64, 96, 1).save(photo)
    more = [f"data.cache_dir={cache}", "train.objective=dpo", "eval.generate=false"]
    more += ["checkpoint.export=false", "train.steps=2"]

    def run_of(name: str, *settings: str) -> tuple[list[dict[str, Any]], str]:
        words = run_words(tiny, tmp_path / name, str(data), *more, "data.eval=null", *settings)
        status, _, err = pool.run(run_rank, 2, words)[0]
        assert status == 0, err
        return logged(tmp_path / name, "step"), err

    few, said = run_of("few", "train.steps=1")
    assert "log-probs of 3 samples of data.train" in said
    whole, said = run_of("whole")
    assert "log-probs of 5 samples of data.train" in said
    again, said = run_of("again")
    assert "reference log-probs" not in said
    assert again == whole
    assert {**few[0], "lr": whole[0]["lr"]} == whole[0]
    before = set((cache / "reference").iterdir())
    assert len(before) == 2
    picture(64, 96, 2).save(photo)
    replaced, said = run_of("replaced")
    assert "log-probs of 5 samples of data.train" in said
    (file,) = set((cache / "reference").iterdir()) - before
    save_file({"log_probs": -torch.rand(PAIRS, 2, dtype=torch.float64)}, file)
    repaired, said = run_of("repaired")
    assert "log-probs of 5 samples of data.train" in said
    assert repaired == replaced


@pytest.mark.parametrize(
    "damage",
    ["none", "no checksum", "one bit", "int64", "bool", "fp8", "shape", "above 0", "nan", "FIFO"],
)
def test_damaged_log_probs_are_computed_again(damage, tmp_path, caplog):
    path = tmp_path / "stored"
    has_value = np.array([[True, True], [False, False], [True, False]])
    table = np.where(has_value, -np.arange(6.0).reshape(3, 2), np.nan)
    changed = {
        "int64": np.nan_to_num(table).astype(np.int64),
        "bool": has_value,
        "shape": table[:2],
        "above 0": np.where(has_value, -table + 1, np.nan),
        "nan": np.where([[True], [True], [False]], table, np.nan),
    }
    reference._write(path, changed.get(damage, table))
    content = path.read_bytes()
    if damage in ("no checksum", "fp8"):
        kind = torch.float64 if damage == "no checksum" else torch.float8_e4m3fn
        save_file({"log_probs": torch.from_numpy(table).to(kind)}, path)
    elif damage == "one bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "FIFO":
        path.unlink()
        os.mkfifo(path)
    stored = reference._read(path, has_value)
    if damage == "none":
        assert stored is not None and np.array_equal(stored, table, equal_nan=True)
        return
    assert stored is None
    assert f"{path}" in caplog.text and "they are computed again" in caplog.text
    reference._write(path, table)
    assert reference._read(path, has_value) is not None


class Scored:
    """Scores of the records of an objective, and runs that read them, in a folder."""

    def __init__(self, pool: Any, tiny: Any, folder: Path, data: str, *objective: str):
        self.pool, self.tiny, self.folder, self.data = pool, tiny, folder, data
        self.objective = objective

    def score(self, path: str, out: str, data: str, *more: str) -> str:
        """Score on two stages, and return the printed line of JSON."""
        keys = [f"data.train={data}", "data.cache_dir=null", "data.num_workers=0"]
        keys += ["eval.batch_size=2", "parallel.pp=2", *self.objective, *more]
        status, said, err = score(self.pool, [path, *keys, "--out", str(self.folder / out)], 2)
        assert status == 0, err
        return said

    def train(self, name: str, *more: str) -> tuple[int, str]:
        few = ("eval.generate=false", "train.steps=2", "checkpoint.export=false")
        words = run_words(self.tiny, self.folder / name, self.data, *few, *self.objective, *more)
        status, _, err = self.pool.run(run_rank, 1, words)[0]
        return status, err

    def figures(self, name: str) -> list[dict[str, float]]:
        """Return the numbers of each step and each evaluation. Before the first step only rounding
        decides which of two rewards is higher, so the accuracy is left out."""
        lines = [*logged(self.folder / name, "step"), *logged(self.folder / name, "eval")]
        merged = [line | line.get("metrics", {}) | {"reward_accuracy": None} for line in lines]
        return [{k: v for k, v in line.items() if isinstance(v, float)} for line in merged]


@pytest.mark.parametrize("name", [pytest.param("dpo", marks=FULL), slow("kto")])
def test_the_reference_is_read_from_scores(name, pool, tiny, references, tmp_path):
    """Its log-probs are those that the run would compute. The scores of another model are another
    reference."""
    data_of, _, _ = references
    objective = [f"train.objective={name}"]
    objective += ["preference.losses=[apo_zero_unpaired]"] if name == "kto" else []
    scored = Scored(pool, tiny, tmp_path, data_of(name), *objective)
    answers = 2 if name == "dpo" else 1
    said = json.loads(scored.score(tiny(**SIZES), "scores", scored.data, "--top-k", "2"))
    [records] = records_of(tmp_path / "scores")
    assert said["records"] == len(records) // answers
    if name == "dpo":
        places = [record.where.partition("jsonl:")[2] for record in records]
        assert places[2:4] == ["2, chosen answer", "2, rejected answer"]
    status, err = scored.train("computed", "preference.reference=keep")
    assert status == 0 and "computing the reference" in err, err
    status, err = scored.train("stored", f"preference.reference={tmp_path / 'scores'}")
    assert status == 0 and "reference log-probs" not in err, err
    computed, stored = scored.figures("computed"), scored.figures("stored")
    assert len(computed) == len(stored) > 2
    for one, other in zip(computed, stored, strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)
    scored.score(tiny(**SIZES, seed=1), "other", scored.data)
    status, err = scored.train("far", f"preference.reference={tmp_path / 'other'}")
    assert status == 0, err
    near, far = (scored.figures(name)[0]["rewards_chosen"] for name in ("computed", "far"))
    assert abs(near) < 1e-6 and abs(far) > 1e-3


@FULL
def test_scores_that_are_of_no_use_as_a_reference_are_refused(pool, tiny, references, tmp_path):
    data = references[0]("dpo")
    scored = Scored(pool, tiny, tmp_path, data, "train.objective=dpo")
    scored.score(tiny(**SIZES), "scores", data)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(data).read_text().splitlines(True)[:3]))
    scored.score(tiny(**SIZES), "few", str(few))
    changes: dict[str, dict[str, Any]] = {
        "stopped": {"is_complete": False},
        "foreign": {"vocabulary": "x", "is_complete": True},
    }
    for name, change in changes.items():
        shutil.copytree(tmp_path / "scores", tmp_path / name)
        replace(ScoreIndex.read(tmp_path / name), **change).write(tmp_path / name)
    cases = {
        "has no scores of 2 of 5 samples; the first is": ["few"],
        "is not complete": ["stopped"],
        "was scored with another tokenizer": ["foreign"],
        "has other tokens of": ["scores", "data.system=be brief"],
        "or a folder of megatron-vlm score": ["adapter_off"],
        "has no effect with train.objective=orpo": ["scores", "train.objective=orpo"],
        "kto compares each answer": ["scores", "train.objective=kto"],
    }
    for problem, (folder, *more) in cases.items():
        status, err = scored.train("refused", f"preference.reference={tmp_path / folder}", *more)
        assert status == 2 and "preference.reference=" in err and problem in err, err
