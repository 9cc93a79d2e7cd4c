# .venv/bin/python -m pytest tests/rl/test_on_policy_distill.py
"""On-policy distillation: advantages and gradients are those of the formulas on Hugging Face's
models, at each kind of layout, also of teachers that see another prompt than the student, and a
teacher that is the student and sees the same teaches exactly nothing."""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.config.objective_configs import DistillConfig
from megatron_vlm.config.schema import RlConfig, TeacherConfig
from megatron_vlm.config.teachers import SELF
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.rl.episode import Episode, Group, Segment
from megatron_vlm.rl.policy_update import PolicyUpdater
from megatron_vlm.rl.train_batch import (
    group_advantages,
    make_train_batch,
    train_batch_from_bytes,
    train_batch_to_bytes,
)
from megatron_vlm.training.worker import MegatronWorker
from tests.engines.test_sampling_engines import STAND_IN
from tests.model.test_parity import layout
from tests.rl.test_rl import LEAN, TASKS, furthest, go, learnt, lines, run_rank, samples, words
from tests.support.batches import MIXED, RowSpec, make_rows, token_ids
from tests.support.reference import load_reference, row_logits
from tests.support.runs import Case, collect_grads
from tests.support.sets import write_set
from tests.training.test_policy_losses import VOCAB, apart, picked

# Relative error in fp32 on the CPU against float64. Measured worst case: 2.9e-6.
TOLERANCE = 5e-6
TEACHERS = {"teacher": {}, "other": dict(layers=5, hidden=48, seed=2)}
LAYOUTS = {
    "dp2": replace(layout(dp=2), train=dict(micro_batch_size=3)),
    "tp2-pp2": replace(layout(tp=2, pp=2), train=dict(micro_batch_tokens=100)),
}


@dataclass(frozen=True)
class Distillation:
    """Settings of rl.* and teacher.*, and what the formula needs in addition."""

    keys: dict[str, Any]
    teacher: dict[str, Any] = field(default_factory=dict)
    sources: bool = False  # every other prompt has a teacher of its own
    rewarded: bool = False
    beta: float | None = None  # of the generalised divergence; None: the reverse KL
    view: bool = False  # the teacher sees another prompt; that of the last has none


DISTILLATIONS = {
    "sampled": Distillation({}),
    "sampled, rewards, sequences": Distillation(
        dict(aggregate="sequences", advantage="dr_grpo"), dict(coef=0.3), rewarded=True
    ),
    "two teachers": Distillation(dict(loss="ppo", aggregate="constant"), sources=True),
    "top 3": Distillation({}, dict(top_k=3)),
    "top 5, rewards, two teachers": Distillation(
        dict(aggregate="sequences", advantage="dr_grpo"),
        dict(top_k=5, coef=0.3),
        sources=True,
        rewarded=True,
    ),
    "top 1, constant": Distillation(
        dict(aggregate="constant", loss="gspo", kl_coef=0.0), dict(top_k=1)
    ),
    "sampled, view": Distillation({}, dict(path=SELF), view=True),
    "top 1, view, live": Distillation({}, dict(path=SELF, top_k=1, weights="live"), view=True),
    "top 3, view, forward": Distillation({}, dict(path=SELF, top_k=3), beta=0.0, view=True),
    "top 5, view, jsd, rewards": Distillation(
        dict(aggregate="sequences", advantage="dr_grpo"),
        dict(path=SELF, top_k=5, coef=0.3),
        rewarded=True,
        beta=0.3,
        view=True,
    ),
    "top 3, view, another teacher": Distillation({}, dict(top_k=3), view=True),
}
NO_VIEW, OWN_VIEW, OTHER_VIEW = "none", "own", "other"
Settings = tuple[RlConfig, TeacherConfig, DistillConfig, str]
# What teachers see of the first three groups in place of their prompts; the last has no view.
PROMPTS = (RowSpec(40, ((8, 8),)), RowSpec(9, ((6, 4),)), RowSpec(3))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(MIXED, VOCAB)


@pytest.fixture(scope="module")
def paths(tiny) -> dict[str, str]:
    student = tiny(vocab=VOCAB)
    sizes = {"seed": 1, "layers": 3, "vocab": VOCAB}
    return {"student": student} | {
        name: tiny(**{**sizes, **more}) for name, more in TEACHERS.items()
    }


def groups_of_keys(distillation: Distillation, paths: Mapping[str, str]) -> Settings:
    path: Any = paths["teacher"]
    if distillation.sources:
        path = {"shapes": paths["teacher"], "b": paths["other"]}
    keys = {"advantage": "none", "loss": "importance_sampling", **distillation.keys}
    rl = RlConfig(max_new_tokens=40, reward="a.py:b", **keys)
    view = "a.py:c" if distillation.view else None
    teacher = TeacherConfig(**{"path": path, "view": view, **distillation.teacher})
    beta = distillation.beta
    divergence = {None: None, 0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    distill = DistillConfig(divergence, beta if divergence == "jsd" else 0.5)
    return rl, teacher, distill, OTHER_VIEW if distillation.view else NO_VIEW


def prompt_length(row: Row) -> int:
    """Return the place after the last picture, and after the first token."""
    ends = (row.ids_S == token_ids(VOCAB).end).nonzero()[:, 0].tolist()
    return 1 + max([0, *ends])


def drawn_after_prompt(row: Row) -> Row:
    """Return the row without labels in its prompt, which has all of its pictures."""
    labels_S = row.labels_S.clone()
    labels_S[: prompt_length(row)] = IGNORE
    return replace(row, labels_S=labels_S)


def seen_by_teacher(rows: list[Row]) -> dict[int, Row]:
    """Return these rows behind other and longer prompts, which those of a group share."""
    seen = {}
    for number, row in enumerate(map(drawn_after_prompt, rows[: 2 * len(PROMPTS)])):
        prompt, length = make_rows(PROMPTS, VOCAB, seed=5)[number // 2], prompt_length(row)
        ids_S = torch.cat([prompt.ids_S, row.ids_S[length:]])
        nothing_S = torch.full_like(prompt.labels_S, IGNORE)
        labels_S = torch.cat([nothing_S, row.labels_S[length:]])
        seen[number] = replace(prompt, ids_S=ids_S, labels_S=labels_S)
    return seen


def groups_of(rows: list[Row], view: str = NO_VIEW) -> list[Group]:
    """Return groups of two episodes, by turns of two sources. The student's own log-probs are not
    the decoder's to the last digit, so the sampler's are only near them: here, they are zero."""
    prompts = [*make_rows(PROMPTS, VOCAB, seed=5), None]
    groups = []
    for place in range(0, len(rows), 2):
        episodes = []
        for number, row in enumerate(rows[place : place + 2], start=place):
            row = row if view == NO_VIEW else drawn_after_prompt(row)
            drawn = (row.labels_S != IGNORE).tolist()
            record = {"data_source": "shapes" if place % 4 else "b"}
            episode = Episode(number, place, number - place, f"row {number}", record)
            episode.shown = [row]
            log_probs = [0.0 if each else None for each in drawn]
            length = prompt_length(row)
            segment = Segment(row.ids_S.tolist(), log_probs, [row], length)
            if view == OWN_VIEW:
                episode.teacher_opening, segment.teacher_ids = row, row.ids_S[:length]
            if view == OTHER_VIEW and (prompt := prompts[place // 2]) is not None:
                episode.teacher_opening, segment.teacher_ids = prompt, prompt.ids_S
            episode.segments = [segment]
            episode.reward = math.sin(number)
            episodes.append(episode)
        groups.append(Group("?", episodes))
    return groups


def distil(path: str, case: Case, settings: Mapping[str, Settings], rows: list[Row]) -> Any:
    """Return loss, means, teacher KL of each row and gradients of each distillation."""
    worker = MegatronWorker(case.config(path))
    results = {}
    for name, (rl, teacher, distill, view) in settings.items():
        worker.cfg = cfg = replace(worker.cfg, rl=rl, teacher=teacher, distill=distill)
        work = WorkModel.from_sizes(worker.source.sizes)
        batch = make_train_batch(groups_of(rows, view), cfg, work, worker.grid.dp.size)
        batch = train_batch_from_bytes(train_batch_to_bytes(batch))
        updater = PolicyUpdater(worker)
        local_rows = updater.local_rows(batch)
        values = updater.values(batch, local_rows)
        metrics = updater.gradients(batch.updates[0], local_rows, values)
        kls = updater.teacher_kls(local_rows, values)
        results[name] = metrics, kls, collect_grads(worker)
    return results


@dataclass(frozen=True)
class Expected:
    loss: float
    kls: dict[int, float]  # student minus teacher of the drawn tokens, mean of each row
    taught: float  # share of the tokens that have a teacher
    exact_kl: float
    grads: dict[str, Tensor]


def lumped(student: Tensor, teacher: Tensor, count: int, beta: float | None) -> Tensor:
    """Return the divergence over the teacher's most likely tokens and the sum of all others."""
    order = teacher.argsort(descending=True)
    parts = [
        each.gather(-1, order).split([count, VOCAB - count], -1) for each in (student, teacher)
    ]
    p, q = (torch.cat([top, rest.logsumexp(-1, keepdim=True)], -1) for top, rest in parts)
    if beta is None:
        return (p.exp() * (p - q)).sum(-1)
    if beta == 0:
        return (q.exp() * (q - p)).sum(-1)
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)


@pytest.fixture(scope="module")
def expected(paths, rows):
    """Return the formula over whole vocabularies on Hugging Face's models, in float64."""
    models = {name: load_reference(path, torch.float64) for name, path in paths.items()}
    rows_of = {False: dict(enumerate(rows)), True: dict(enumerate(map(drawn_after_prompt, rows)))}
    seen = {False: rows_of[False], True: seen_by_teacher(rows)}

    @cache
    def log_probs(name: str, number: int, view: bool, teaches: bool) -> Tensor:
        row = (seen if teaches else rows_of)[view][number]
        with torch.set_grad_enabled(not teaches):
            return row_logits(models[name], row)[picked(row) - 1].log_softmax(-1)

    @cache
    def compute(name: str) -> Expected:
        distillation = DISTILLATIONS[name]
        rl, settings, *_ = groups_of_keys(distillation, paths)
        view, beta = distillation.view, distillation.beta
        models["student"].zero_grad()
        losses, exact, kls = [], [], {}
        for group in groups_of(rows):
            rewards = group_advantages(group.rewards, rl.advantage)
            for episode, advantage in zip(group.episodes, rewards, strict=True):
                row = rows_of[view][number := episode.number]
                source = episode.record["data_source"]
                teacher_name = "other" if distillation.sources and source == "b" else "teacher"
                if settings.path == SELF:
                    teacher_name = "student"
                student = log_probs("student", number, view, teaches=False)
                drawn = row.ids_S[picked(row), None]
                p = student.gather(-1, drawn)[:, 0]
                gain, kl = advantage, torch.zeros_like(p)
                if number in seen[view]:
                    teacher = log_probs(teacher_name, number, view, teaches=True)
                    apart = p.detach() - teacher.gather(-1, drawn)[:, 0]
                    kls[number] = float(apart.mean())
                    if count := settings.top_k:
                        kl = lumped(student, teacher, count, beta)
                        exact.append(kl.detach())
                    else:
                        gain = advantage - settings.coef * apart
                losses.append(settings.coef * kl - gain * (p - p.detach()).exp())
        total = {
            "tokens": lambda: torch.cat(losses).mean(),
            "sequences": lambda: torch.stack([each.mean() for each in losses]).mean(),
            "constant": lambda: torch.stack([each.sum() / 40 for each in losses]).mean(),
        }[rl.aggregate]()
        total.backward(retain_graph=True)
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in models["student"].named_parameters()
        }
        divergence = float(torch.cat(exact).mean()) if exact else 0.0
        taught = sum(map(len, exact)) / sum(map(len, losses))
        return Expected(float(total.detach()), kls, taught, divergence, grads)

    return compute


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_the_formula(name, pool, paths, rows, expected, record_property):
    case = LAYOUTS[name]
    settings = {key: groups_of_keys(each, paths) for key, each in DISTILLATIONS.items()}
    alone = {}
    for key in ("sampled", "top 3"):
        rl, teacher, distill, view = settings[key]
        itself = replace(teacher, path=paths["student"])
        alone[f"{key}, itself"] = rl, itself, distill, view
        for weights in ("initial", "live"):
            itself = replace(teacher, path=SELF, view="a.py:c", weights=weights)
            alone[f"{key}, {weights}"] = rl, itself, distill, OWN_VIEW
    for divergence in ("forward", "jsd"):
        alone[f"top 3, {divergence}"] = rl, itself, DistillConfig(divergence), OWN_VIEW
    outcomes = pool.run(distil, case.world, paths["student"], case, settings | alone, rows)
    for other in outcomes:  # every rank reports the same
        assert all(other[key][:2] == outcomes[0][key][:2] for key in outcomes[0])
    for key in alone:
        metrics, kls, grads = outcomes[0].pop(key)
        assert metrics.loss == 0, key
        # Over several tokens, the teacher's head sums the vocabulary in another order.
        assert max(map(abs, kls.values())) <= ("top" in key) * TOLERANCE, key
        assert max(float(grad.abs().max()) for grad in grads.values()) == 0, key
    worst: dict[str, float] = {}
    for key, (metrics, kls, grads) in outcomes[0].items():
        reference = expected(key)
        view = DISTILLATIONS[key].view
        trained = [drawn_after_prompt(row) if view else row for row in rows]
        assert metrics.num_tokens == sum(len(picked(row)) for row in trained)
        assert list(kls) == list(range(2 * len(PROMPTS) if view else len(rows)))
        gaps = map(float.__sub__, kls.values(), reference.kls.values())
        worst[f"{key}: KL"] = max(map(abs, gaps))
        worst[f"{key}: loss"] = abs(metrics.loss - reference.loss)
        if "top" in key:
            exact = metrics.means["teacher_kl"] / reference.taught
            worst[f"{key}: exact KL"] = abs(exact - reference.exact_kl)
            assert metrics.means["ratio"] == pytest.approx(1)
        if "constant" in key:  # the initial model is the student, but for rounding
            assert 0 <= metrics.means["kl"] < 1e-10
        worst[f"{key}: gradients"] = apart(grads, reference.grads)
    record_property("worst", worst)
    assert max(worst.values()) <= TOLERANCE, worst


# Whole runs.

EXTRA = 16  # rows of a padded vocabulary
STEPS = 2
DISTIL = ["rl=distill", "rl.reward=null", "rl.kl_coef=null", "rl.entropy_coef=null"]
DISTIL += ["data.eval=null", f"train.steps={STEPS}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    write_set(folder, rows=7)
    return folder


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return tiny(deepstack=1, from_scratch=True)


@pytest.fixture(scope="module")
def teacher(tiny, folder) -> str:
    """Return a larger model with the same tokenizer, and with more rows for the same vocabulary."""
    return pad_vocab(tiny(deepstack=1, from_scratch=True, layers=5, seed=3), folder / "teacher")


def pad_vocab(path: str, target: Path) -> str:
    """Copy a checkpoint, and add rows to its vocabulary that no token of its tokenizer has. The
    model draws them as often as its other tokens together."""
    shutil.copytree(path, target)
    weights = load_file(target / "model.safetensors")
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][-EXTRA:]])
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["text_config"]["vocab_size"] += EXTRA
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def without_kl(run: Path) -> list[dict[str, Any]]:
    """Return the samples without the KL, which differs by rounding between layouts."""
    found = samples(run)
    for episode in (each for line in found for each in line["episodes"]):
        assert math.isfinite(episode.pop("teacher_kl"))
    return found


@pytest.fixture(scope="module")
def alone(pool, folder, model, teacher) -> Path:
    return learnt(pool, 1, folder, model, "alone", *DISTIL, f"teacher.path={teacher}")


@pytest.mark.full
def test_every_layout_learns_the_same(pool, folder, model, teacher, alone):
    """A run needs no reward. The second replica has fewer rows than the first, and the vocabularies
    of student and teacher are cut at other places. The run with an engine has PP2."""
    arguments = [*DISTIL, f"teacher.path={teacher}", "parallel.tp=2"]
    run = learnt(pool, 4, folder, model, "layout", *arguments, f"data.eval={folder}/train.jsonl")
    assert without_kl(run) == without_kl(alone)
    assert furthest(run, alone) < 1e-6
    for actual, expected in zip(lines(run, "rl"), lines(alone, "rl"), strict=True):
        assert actual["teacher_kl"] == pytest.approx(expected["teacher_kl"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_student_comes_near_its_teacher(pool, folder, model, tiny, top_k):
    teacher = tiny(deepstack=1, from_scratch=True, layers=5, seed=3)
    more = ["train.steps=16", "optim.lr=4e-3", "optim.eps=1e-8", "train.micro_batch_size=24"]
    more += [f"teacher.top_k={top_k or 'null'}", "optim.clip_grad=10", "rl.samples=8"]
    name = f"near-{top_k}"
    run = learnt(pool, 1, folder, model, name, *DISTIL, f"teacher.path={teacher}", *more)
    kls = [line["teacher_kl"] for line in lines(run, "rl")]
    assert sum(kls[-3:]) < 0.8 * sum(kls[:3]), kls  # measured: 0.60 and 0.20


SELF_TAUGHT = ["teacher.path=self", f"teacher.view={TASKS}:itself"]


@pytest.mark.full
@pytest.mark.rotate(1)
@pytest.mark.parametrize("name", ["0", "2", "self"])
def test_a_teacher_that_is_the_student_teaches_nothing(pool, folder, model, name):
    more = ["optim.weight_decay=0", f"teacher.top_k={name if name == '2' else 'null'}"]
    more += SELF_TAUGHT if name == "self" else [f"teacher.path={model}"]
    run = learnt(pool, 2, folder, model, f"itself-{name}", *DISTIL, *more, "parallel.pp=2")
    assert [line["grad_norm"] for line in lines(run, "step")] == [0.0] * STEPS
    assert [line["teacher_kl"] for line in lines(run, "rl")] == [0.0] * STEPS
    start = load_file(Path(model) / "model.safetensors")
    end = load_file(run / "export" / "model.safetensors")
    assert all(torch.equal(value, end[name]) for name, value in start.items())


@pytest.mark.full
def test_weights_of_a_teacher_are_those_before_the_run_or_the_step(pool, folder, model):
    """The view is the student's, so that the KL is that of the weights. Rewards move these, twice
    in a step. With adapters the initial weights are those without them."""
    more = ["rl=dr_grpo", *LEAN, *SELF_TAUGHT, "rl.updates=2", "train.steps=2", "rl.kl_coef=null"]
    kls = {}
    for weights, rank in (("initial", 0), ("live", 0), ("initial", 4)):
        keys = [*more, f"teacher.weights={weights}", "optim.lr=1e-2", f"lora.rank={rank}"]
        run = learnt(pool, 1, folder, model, f"{weights}-{rank}", *keys)
        kls[weights, rank] = [line["teacher_kl"] for line in lines(run, "rl")]
        assert all(line["grad_norm"] > 0 for line in lines(run, "step"))
    assert kls.pop(("live", 0)) == [0, 0]
    assert all(first == 0 != later for first, later in kls.values()), kls


@pytest.mark.full
def test_a_better_view_teaches_and_resumes_bit_for_bit(pool, folder, model):
    """Records without a view have no teacher."""
    more = [*DISTIL, "teacher.path=self", f"teacher.view={TASKS}:closer", "teacher.weights=live"]
    more += ["teacher.top_k=3", "distill.divergence=jsd", "train.global_batch_size=6"]
    alone = learnt(pool, 1, folder, model, "view", *more)
    whole = learnt(pool, 2, folder, model, "view-pp2", *more, "parallel.pp=2")
    saving = [*more, "parallel.pp=2", "checkpoint.every=1"]
    learnt(pool, 2, folder, model, "view-resumed", *saving, "train.steps=1")
    resumed = learnt(pool, 2, folder, model, "view-resumed", *saving)
    assert furthest(whole, resumed) == 0 and samples(whole) == samples(resumed)
    assert furthest(whole, alone) < 1e-6
    episodes = [each for line in samples(whole) for each in line["episodes"]]
    taught = [each["tokens"] for each in episodes if "teacher_kl" in each]
    total = sum(each["tokens"] for each in episodes)
    shares = [line["taught"] for line in lines(whole, "rl")]
    assert 0 < sum(taught) / total < 1 and all(0 < share < 1 for share in shares)
    assert all(line["teacher_kl"] > 0 for line in lines(whole, "rl"))


@pytest.mark.full
def test_a_view_that_fails_names_the_record(pool, folder, model):
    arguments = [*DISTIL, "teacher.path=self", f"teacher.view={TASKS}:failing"]
    status, _, err = go(pool, 2, folder, model, "failing", *arguments, "parallel.pp=2")
    assert status == 2 and "train.jsonl" in err and "teacher.view=" in err, err
    assert "raised ValueError: no such crop at" in err and not lines(folder / "failing", "step")


@pytest.mark.full
def test_rewards_may_be_reported_alone(pool, folder, model, teacher, alone):
    """With rl.advantage=none a reward changes nothing but the figures."""
    reward = next(word for word in words(folder, model, "x") if word.startswith("rl.reward="))
    more = [*DISTIL, f"teacher.path={teacher}", reward, "rl.advantage=none", "rl.samples=4"]
    run = learnt(pool, 1, folder, model, "reported", *more)
    assert furthest(run, alone) == 0
    assert any(line["reward"] for line in lines(run, "rl"))
    mixed = learnt(pool, 1, folder, model, "mixed", *more, "rl.advantage=dr_grpo")
    assert furthest(mixed, alone) > 1e-4


@pytest.mark.full
def test_a_source_has_its_own_teacher(pool, folder, model, teacher):
    """The name is that of the record's data_source, or else that of its file."""
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    named = folder / "named.jsonl"
    marked = [{**record, "data_source": "own"} for record in records[:3]]
    named.write_text("".join(json.dumps(record) + "\n" for record in [*marked, *records[3:]]))
    more = [f"data.train={named}", "train.steps=1", "train.global_batch_size=7"]
    more = [*DISTIL, *LEAN, *more, "data.shuffle=false", "rl.shown=7"]
    both = f"teacher.path={{own: {model}, named: {teacher}}}"
    run = learnt(pool, 2, folder, model, "sources", *more, both)
    kls = [[each["teacher_kl"] for each in line["episodes"]] for line in samples(run)]
    assert [set(each) == {0.0} for each in kls] == [True] * 3 + [False] * 4
    status, _, err = run_rank(
        words(folder, model, "unknown", *more, f"teacher.path={{own: {model}}}")
    )
    assert status == 2 and "named.jsonl" in err and "no teacher for its source 'named'" in err


def changed(path: str, target: Path, file: str, **values: Any) -> str:
    """Copy a checkpoint, and change values of a JSON file."""
    shutil.copytree(path, target)
    fields = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps({**fields, **values}))
    return str(target)


@pytest.mark.full
def test_a_teacher_that_reads_other_things_is_refused(pool, folder, model, teacher, tiny):
    smaller = tiny(deepstack=1, vocab=300)
    processor = "preprocessor_config.json"
    blurred = changed(model, folder / "mean", processor, image_mean=[0.4, 0.5, 0.5])
    bounded = changed(
        model, folder / "pixels", processor, size={"shortest_edge": 4096, "longest_edge": 8192}
    )
    for path, key, text in (
        (smaller, "teacher.top_k=null", "has another tokenizer than model.path"),
        (blurred, "teacher.top_k=null", "image processor has mean="),
        (bounded, "teacher.top_k=null", "set data.min_pixels"),
        (teacher, "teacher.top_k=2", "rows in its vocabulary"),
        (str(folder / "none"), "teacher.top_k=null", "none"),
    ):
        status, _, err = run_rank(
            words(folder, model, "refused", *DISTIL, f"teacher.path={path}", key)
        )
        assert status == 2 and text in err, (path, err)
        assert "teacher.path" in err and path in err


def by_engine(folder: Path, teacher: str, name: str, **options: Any) -> list[str]:
    """Return the arguments for a stand-in engine, whose log-prob of a token is minus its id."""
    python = folder / f"python-{name}"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    options["mm_processor_cache_gb"] = 1  # it has no processor whose patches could be compared
    entries = ", ".join(f"{key}: {value}" for key, value in options.items())
    return [
        *(*DISTIL, f"teacher.path={teacher}", "teacher.engine=vllm", f"engine.python={python}"),
        f"teacher.options={{{entries}}}",
    ]


@pytest.mark.full
def test_the_scores_of_engines_are_learnt_from_whole_or_not_at_all(pool, folder, model, teacher):
    """An engine that dies in the middle of a step is asked again. One that always dies ends the
    run, before anything was learnt."""
    arguments = by_engine(folder, teacher, "well")
    run = learnt(pool, 1, folder, model, "engine", *arguments)
    for episode in (each for line in samples(run) for each in line["episodes"]):
        assert episode["teacher_kl"] > 20  # the mean id of a token, and more
    once = folder / "once"
    arguments = by_engine(folder, teacher, "dying", lives=5, once=once)
    again = learnt(pool, 4, folder, model, "dying", *arguments, "parallel.pp=2")
    assert once.exists() and without_kl(again) == without_kl(run)
    assert furthest(again, run) < 1e-6
    arguments = by_engine(folder, teacher, "dead", lives=3)
    status, _, err = run_rank(words(folder, model, "dead", *arguments))
    assert status == 2 and f"teacher.path={teacher}" in err and "died" in err
    assert not lines(folder / "dead", "step")


@pytest.mark.full
def test_a_token_that_the_teacher_lacks_is_refused(pool, folder, model, teacher):
    """The student has 16 rows more than its tokenizer has tokens, and draws one of them."""
    status, _, err = run_rank(
        words(folder, teacher, "lacks", *DISTIL, f"teacher.path={model}", "rl.max_new_tokens=40")
    )
    assert status == 2 and "has 512 rows" in err and "the student has drawn it" in err
