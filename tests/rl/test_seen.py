# .venv/bin/python -m pytest tests/rl/test_seen.py
"""How far answers depend on their pictures: figures, weights and gradients are those of the papers'
formulas on Hugging Face's models with the same pixels, at each layout."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.config.command_checks import check_rl
from megatron_vlm.config.load import load_config
from megatron_vlm.config.schema import Config, EngineConfig, RlConfig, TeacherConfig
from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.batches.collate import black_patches, pixelated
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import ConfigError
from megatron_vlm.rl.policy_update import PolicyUpdater
from megatron_vlm.rl.seen import (
    AnswerSums,
    SeenScores,
    answer_factors,
    hidden_view,
    largest,
    measure_seen,
    vppo_weights,
    weigh,
)
from megatron_vlm.rl.step_report import SightWatch
from megatron_vlm.rl.train_batch import (
    TrainBatch,
    TrainRow,
    Update,
    group_advantages,
    make_train_batch,
    train_batch_from_bytes,
    train_batch_to_bytes,
)
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.rl.test_rl import LEAN, TASKS, furthest, learnt, lines
from tests.rl.test_segments import groups_of
from tests.support.batches import MIXED, make_rows
from tests.support.error_fields import raises
from tests.support.reference import load_reference, row_logits
from tests.support.runs import Case, collect_grads
from tests.support.suites import quick
from tests.training.test_policy_losses import VOCAB, apart

STEP = 3
OWN_HEAD = dict(vocab=VOCAB, from_scratch=True, deepstack=1)
# Relative error in fp32 on the CPU against float64. Measured worst case: 4.1e-6.
TOLERANCE = 1e-5
LAYOUTS = {"dp2": layout(dp=2), "tp2-pp2": layout(tp=2, pp=2)}
P = {"vppo": 0.4, "va_opd": 0.2}
SETTINGS = {
    "report": (RlConfig(advantage="dr_grpo"), TeacherConfig()),
    "vppo": (RlConfig(advantage="dr_grpo", seen="vppo", seen_tokens=P["vppo"]), TeacherConfig()),
    "va_opd": (
        RlConfig(advantage="none", seen="va_opd", seen_tokens=P["va_opd"]),
        TeacherConfig("teacher", top_k=3),
    ),
}


def scaled(path: str, target: Path, factor: float, *parts: str) -> str:
    """Copy a checkpoint, with this factor before the weights with one of these parts in their
    names."""
    shutil.copytree(path, target)
    weights = load_file(target / "model.safetensors")
    names = [name for name in weights if any(part in name for part in parts)]
    assert names, list(weights)
    weights |= {name: factor * weights[name] for name in names}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.fixture(scope="module")
def paths(tiny, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    given = {"student": tiny(**OWN_HEAD), "teacher": tiny(**OWN_HEAD, layers=3, seed=1)}
    # Log-probs of a random model hardly depend on anything.
    return {name: scaled(path, folder / name, 3.0, "lm_head") for name, path in given.items()}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows as prompts are read, with bytes for pixels."""
    generator = torch.Generator().manual_seed(5)

    def bytes_like(pixels_PC: Tensor | None, width: int) -> Tensor | None:
        if pixels_PC is None:
            return None
        return torch.randint(256, (len(pixels_PC), width), generator=generator, dtype=torch.uint8)

    return [
        replace(
            row,
            pixel_values_PC=bytes_like(row.pixel_values_PC, 3 * 16 * 16),
            pixel_values_videos_PC=bytes_like(row.pixel_values_videos_PC, 3 * 2 * 16 * 16),
        )
        for row in make_rows(MIXED, VOCAB)
    ]


def config(cfg: Config, name: str, paths: Mapping[str, str]) -> Config:
    """Return the configuration of a setting. An engine's log-probs are not the trainer's, so the
    trainer scores both passes."""
    rl, teacher = SETTINGS[name]
    if teacher.path is not None:
        teacher = replace(teacher, path=paths["teacher"])
    rl = replace(rl, reward="a.py:b", max_new_tokens=40)
    return replace(cfg, rl=rl, teacher=teacher, engine=EngineConfig(name="vllm"))


def updates(path: str, case: Case, paths: dict[str, str], rows: list[Row]) -> dict[str, Any]:
    """Return figures, weights, metrics and gradients of each setting. Some answers have two
    rows."""
    worker = MegatronWorker(case.config(path))
    work = WorkModel.from_sizes(worker.source.sizes)
    results = {}
    for name in SETTINGS:
        worker.cfg = cfg = config(worker.cfg, name, paths)
        batch = make_train_batch(groups_of(rows, True), cfg, work, worker.grid.dp.size)
        batch = train_batch_from_bytes(train_batch_to_bytes(batch))
        updater = PolicyUpdater(worker)
        local_rows = updater.local_rows(batch)
        values = updater.values(batch, local_rows)
        scores = measure_seen(updater, batch, local_rows, values, STEP, True)
        values = weigh(cfg, batch, local_rows, values, scores)
        metrics = updater.gradients(batch.updates[0], local_rows, values)
        weights = values.loss_weights if name == "va_opd" else values.weights
        grads = collect_grads(worker)
        results[name] = (scores.seen, scores.blind), scores.gaps, dict(weights), metrics, grads
    return results


class Formulas:
    """The formulas over the answers, on Hugging Face's models in float64."""

    def __init__(self, paths: Mapping[str, str], rows: list[Row]):
        self.models = {name: load_reference(path, torch.float64) for name, path in paths.items()}
        self.pixels = PixelTables(paths["student"], torch.device("cpu"))
        self.groups, self.known = groups_of(rows, True), {}
        self.cfg = {name: config(Config(), name, paths) for name in SETTINGS}
        # Answer, advantage, row and drawn places of each segment, in the order of the train batch.
        self.segments = []
        for group in self.groups:
            advantages = group_advantages(group.rewards, "dr_grpo")
            for episode, advantage in zip(group.episodes, advantages, strict=True):
                for each in episode.segments:
                    drawn = [n for n, known in enumerate(each.log_probs) if known is not None]
                    self.segments.append((episode, advantage, each.pictures[0], drawn))

    def log_probs(self, name: str, number: int, hidden: str = "") -> Tensor:
        """Return the log-probs [N, V] of the drawn tokens of a row."""
        key = name, number, hidden
        if key not in self.known:
            self.known[key] = self._log_probs(*key)
        return self.known[key]

    def _log_probs(self, name: str, number: int, hidden: str) -> Tensor:
        *_, row, drawn = self.segments[number]
        if hidden:
            of = TrainRow(row, torch.zeros(0), 0.0, 1.0)
            row = hidden_view(self.cfg[hidden], STEP)(of)
        row = replace(
            row,
            pixel_values_PC=self.pixels.images(row.pixel_values_PC),
            pixel_values_videos_PC=self.pixels.videos(row.pixel_values_videos_PC),
        )
        with torch.set_grad_enabled(name == "student" and not hidden):
            return row_logits(self.models[name], row)[torch.tensor(drawn) - 1].log_softmax(-1)

    def of_drawn(self, log_probs_NV: Tensor, number: int) -> Tensor:
        *_, row, drawn = self.segments[number]
        return log_probs_NV.gather(-1, row.ids_S[drawn][:, None])[:, 0]

    def gap(self, name: str, number: int) -> Tensor:
        model = "teacher" if name == "va_opd" else "student"
        shown, hidden = self.log_probs(model, number), self.log_probs(model, number, name)
        return (self.of_drawn(shown, number) - self.of_drawn(hidden, number)).detach()

    def answers(self, name: str, score) -> dict[int, tuple[float, int]]:
        """Return the sum of a score over the drawn tokens of each answer with pictures, and their
        number."""
        sums: dict[int, tuple[float, int]] = {}
        for number, (episode, _, row, drawn) in enumerate(self.segments):
            if row.has_media:
                total, count = sums.get(episode.number, (0.0, 0))
                own = float(score(self.gap(name, number)).sum())
                sums[episode.number] = total + own, count + len(drawn)
        return sums

    def weights(self, name: str) -> list[Tensor]:
        """Return the weights of the drawn tokens of each row."""
        if name == "va_opd":
            return self.va_opd()
        factors: dict[int, float] = {}
        if name == "vppo":
            means = {n: total / count for n, (total, count) in self.answers(name, kl).items()}
            low, high = min(means.values()), max(means.values())
            shares = {n: (mean - low) / (high - low) for n, mean in means.items()}
            highest = 0.9 + 0.1 * len(shares) / sum(shares.values())
            factors = {n: 0.9 + share * (highest - 0.9) for n, share in shares.items()}
        found = []
        for number, (episode, _, row, drawn) in enumerate(self.segments):
            student_N = self.of_drawn(self.log_probs("student", number), number).detach()
            weights_N = (student_N + 2).exp().clamp(max=2)  # the sampler's are -2
            if factors and row.has_media:
                order = kl(self.gap(name, number)).argsort(descending=True).tolist()
                kept = set(order[: math.ceil(P[name] * len(drawn))])
                factor = factors[episode.number]
                weights_N *= torch.tensor([factor * (n in kept) for n in range(len(drawn))])
            found.append(weights_N)
        return found

    def va_opd(self) -> list[Tensor]:
        sums, shares = self.answers("va_opd", lambda gap: gap.clamp(min=0)), {}
        for group in self.groups:
            gains = [
                sums[e.number][0] / sums[e.number][1] if e.number in sums else 0.0
                for e in group.episodes
            ]
            mean = sum(gains) / len(gains)
            std = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / len(gains))
            exps = [math.exp((gain - mean) / (std + 1e-6)) for gain in gains]
            for episode, exp in zip(group.episodes, exps, strict=True):
                shares[episode.number] = exp / sum(exps)
        found = []
        for number, (episode, _, row, drawn) in enumerate(self.segments):
            count = len(drawn)
            own = shares[episode.number] * count / episode.trained
            high = math.ceil(P["va_opd"] * count)
            gain_N = (
                self.gap("va_opd", number).clamp(min=0) if row.has_media else torch.zeros(count)
            )
            if high == count or not gain_N.any():
                found.append(torch.full((count,), own / count))
                continue
            order = gain_N.argsort(descending=True, stable=True)
            weights_N = torch.full((count,), own / 2 / (count - high))
            weights_N[order[:high]] = own / 2 / high
            found.append(weights_N)
        return found

    def gradients(self, name: str) -> dict[str, Tensor]:
        student, losses, count = self.models["student"], [], 0
        student.zero_grad()
        for number, weights_N in enumerate(self.weights(name)):
            log_probs_NV = self.log_probs("student", number)
            own_N = self.of_drawn(log_probs_NV, number)
            count += len(own_N)
            if name == "va_opd":
                loss_N = lumped(log_probs_NV, self.log_probs("teacher", number), 3)
            else:
                loss_N = -self.segments[number][1] * (own_N - own_N.detach()).exp()
            losses.append((loss_N * weights_N).sum())
        divisor = len(self.groups) if name == "va_opd" else count
        (sum(losses) / divisor).backward(retain_graph=True)
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in student.named_parameters()
        }


def kl(gap_N: Tensor) -> Tensor:
    gap_N = gap_N.clamp(-20, 20)
    return (torch.exp(-gap_N) - 1 + gap_N).clamp(max=10)


def lumped(student_NV: Tensor, teacher_NV: Tensor, count: int) -> Tensor:
    """Return the reverse KL over the teacher's most likely tokens and the sum of all others."""
    order = teacher_NV.argsort(descending=True)
    parts = [
        each.gather(-1, order).split([count, VOCAB - count], -1)
        for each in (student_NV, teacher_NV)
    ]
    p, q = (torch.cat([top, rest.logsumexp(-1, keepdim=True)], -1) for top, rest in parts)
    return (p.exp() * (p - q)).sum(-1)


@pytest.fixture(scope="module")
def formulas(paths, rows) -> Formulas:
    return Formulas(paths, rows)


@pytest.mark.parametrize("name", quick(["tp2-pp2"], LAYOUTS))
def test_weights_and_gradients_are_those_of_the_formulas(
    name, pool, paths, rows, formulas, record_property
):
    case = replace(LAYOUTS[name], train=dict(micro_batch_size=3))
    outcomes = pool.run(updates, case.world, paths["student"], case, paths, rows)
    worst: dict[str, float] = {}
    for key in SETTINGS:
        figures, _, _, metrics, grads = outcomes[0][key]
        assert all(each[key][0] == figures for each in outcomes)  # every rank reports the same
        sums = formulas.answers(key, kl).values()
        worst[f"{key}: seen"] = abs(
            figures[0] - sum(total for total, _ in sums) / sum(count for _, count in sums)
        )
        assert figures[1] == sum(total / count < 1e-3 for total, count in sums) / len(sums)
        weights = {number: w for each in outcomes for number, w in each[key][2].items()}
        expected = formulas.weights(key)
        assert sorted(weights) == list(range(len(expected)))
        for number, weights_N in enumerate(expected):
            error_N = (weights[number].double() - weights_N).abs()
            worst[f"{key}: weights"] = max(worst.get(f"{key}: weights", 0.0), float(error_N.max()))
        worst[f"{key}: gradients"] = apart(grads, formulas.gradients(key))
        assert metrics.num_tokens == sum(map(len, expected))
    record_property("worst", worst)
    assert max(worst.values()) <= TOLERANCE, worst


def test_weights_do_not_depend_on_the_layout(pool, paths, rows):
    """Minimum, maximum and mean are those of the update, to the last digit."""
    found = []
    for dp in (1, 2):
        case = replace(layout(dp=dp), train=dict(micro_batch_size=1))
        outcomes = pool.run(updates, dp, paths["student"], case, paths, rows)
        found.append(
            {
                (key, number): weights_N.tolist()
                for each in outcomes
                for key in SETTINGS
                for number, weights_N in each[key][2].items()
            }
        )
        assert [each["vppo"][0] for each in outcomes] == [outcomes[0]["vppo"][0]] * dp
    assert found[0] == found[1]


def test_a_view_that_is_the_same_leaves_exactly_nothing(pool, paths, rows):
    """Where the pictures are grey already, every gap is 0 to the last digit."""
    plain = [
        replace(
            row,
            pixel_values_PC=each_is(row.pixel_values_PC, 128),
            pixel_values_videos_PC=each_is(row.pixel_values_videos_PC, 128),
        )
        for row in rows
    ]
    case = replace(layout(tp=2), train=dict(micro_batch_size=3))
    for each in pool.run(updates, case.world, paths["student"], case, paths, plain):
        for key in ("report", "va_opd"):
            assert each[key][0] == (0.0, 1.0)
            assert each[key][1] and not any(gap_N.any() for gap_N in each[key][1].values())


def each_is(pixels_PC: Tensor | None, value: int) -> Tensor | None:
    return None if pixels_PC is None else torch.full_like(pixels_PC, value)


def test_hidden_pictures_have_the_same_patches_for_all_answers(rows):
    cfg = Config(rl=RlConfig(seen="vppo"))
    of = TrainRow(rows[4], torch.zeros(0), 0.0, 1.0)
    view, shown = hidden_view(cfg, STEP), rows[4].pixel_values_PC
    hidden = view(of).pixel_values_PC
    assert hidden is view(replace(of, advantage=1.0)).pixel_values_PC
    assert hidden.equal(hidden_view(cfg, STEP)(of).pixel_values_PC)
    assert not hidden.equal(hidden_view(cfg, STEP + 1)(of).pixel_values_PC)
    is_black = (hidden == 0).all(1)
    assert hidden[~is_black].equal(shown[~is_black]) and 0.2 < is_black.float().mean() < 0.8
    many = black_patches(torch.ones(4000, 12, dtype=torch.uint8), seed=1)
    assert abs(float(many.float().mean()) - 0.5) < 0.03
    coarse = pixelated(shown).view(-1, 3, 256)
    assert (coarse == coarse[:, :, :1]).all()
    assert ((coarse[..., 0] - shown.view(-1, 3, 256).float().mean(2)).abs() <= 0.5).all()


def test_all_tokens_and_equal_answers_leave_grpo_as_it_is():
    """With p = 1 and b = 1 every factor is exactly 1."""
    generator = torch.Generator().manual_seed(1)
    gaps = {n: torch.randn(5, generator=generator) for n in range(4)}
    row = make_rows(MIXED[:1], VOCAB)[0]
    batch = TrainBatch(
        [TrainRow(row, torch.zeros(5), 1.0, 1.0, episode=n, group=0) for n in range(4)],
        [Update([[[0, 1]], [[2, 3]]], None, None)],
    )
    sums = {n: AnswerSums(5, float(kl(gap_N).sum()), 1.0) for n, gap_N in gaps.items()}
    scores = SeenScores(gaps, sums)
    plain = vppo_weights(batch, batch.updates[0], scores, 1.0, lowest=1.0)
    assert [weights_N.tolist() for weights_N in plain.values()] == [[1.0] * 5] * 4
    weights = vppo_weights(batch, batch.updates[0], scores, 0.2)
    assert [int((weights_N > 0).sum()) for weights_N in weights.values()] == [1] * 4
    assert sum(float(weights_N.sum()) for weights_N in weights.values()) == pytest.approx(4)


def test_answers_that_do_not_differ_weigh_the_same():
    assert answer_factors([]) == [] and answer_factors([0.3]) == [1.0]
    assert answer_factors([1e-12, 3e-12, 0.0]) == [1.0] * 3  # the order of rounding errors
    factors = answer_factors([0.0, 0.1, 0.5])
    assert min(factors) == factors[0] == 0.9 and sum(factors) == pytest.approx(3)
    assert largest(torch.tensor([1.0, 1.0, 0.0, 2.0]), 0.5).tolist() == [True, False, False, True]
    assert int(largest(torch.rand(30), 0.1).sum()) == 3


def test_a_hint_comes_once_after_three_blind_steps():
    def measured(mean: float | None) -> SeenScores:
        return SeenScores(answers={} if mean is None else {0: AnswerSums(2, 2 * mean)})

    watch = SightWatch()
    steps = [1e-4, 0.2, 1e-4, None, 9e-4, 0.0, 0.0]
    hints = [watch.check(measured(each)) for each in steps]
    assert [each is not None for each in hints] == [False] * 5 + [True, False]
    assert "seen 0)" in hints[5] and "the pictures change nothing" in hints[5]


def hints_of(run: Path) -> list[int]:
    return [each["step"] for each in lines(run, "event") if "pictures change" in each["text"]]


def test_a_model_that_gets_no_pictures_is_reported(pool, folder, model):
    """A hint is a line, and the run goes on. It costs no digit of the weights."""
    blind = scaled(model, folder / "zeroed", 0.0, "merger")
    more = ["rl.temperature=1", "data.eval=null", "train.global_batch_size=7"]
    run = learnt(pool, 1, folder, blind, "blind", *more)
    assert hints_of(run) == [3]
    assert all(each["seen"] < 1e-9 and each["blind"] == 1 for each in lines(run, "rl"))
    sharp = scaled(model, folder / "sharp", 3.0, "lm_head")
    run = learnt(pool, 2, folder, sharp, "sighted", *more, "parallel.pp=2")
    assert not hints_of(run) and min(each["seen"] for each in lines(run, "rl")) > 0.01
    off = learnt(pool, 2, folder, sharp, "off", *more, "parallel.pp=2", "rl.seen=off")
    assert furthest(run, off) == 0 and "seen" not in lines(off, "rl")[0]
    keys = [("loss", "grad_norm"), ("reward", "kl")]
    for kind, names in zip(("step", "rl"), keys, strict=True):
        figures = [[[each[n] for n in names] for each in lines(at, kind)] for at in (run, off)]
        assert figures[0] == figures[1]


@pytest.mark.full
def test_runs_learn_by_both_weights(pool, folder, model):
    run = learnt(pool, 2, folder, model, "vppo", *LEAN, "rl.seen=vppo", "rl.updates=2")
    assert all(each["seen"] >= 0 for each in lines(run, "rl")) and len(lines(run, "rl")) == 3
    distil = ["rl=distill", "rl.reward=null", "rl.kl_coef=null", "rl.entropy_coef=null"]
    distil += ["teacher.top_k=2", f"teacher.path={model}", "rl.seen=va_opd", *LEAN]
    run = learnt(pool, 2, folder, model, "va_opd", *distil, "parallel.tp=2")
    assert all(each["grad_norm"] == 0 for each in lines(run, "step"))  # it teaches itself
    assert all(each["seen"] >= 0 for each in lines(run, "rl"))


@pytest.mark.parametrize(
    ("overrides", "key", "found"),
    [
        (["rl.seen=vppo", "teacher.path=t"], "rl.seen", "vppo"),
        (["rl.seen=vppo", "teacher.path=t", "rl.advantage=none"], "rl.seen", "vppo"),
        (["rl.seen=va_opd"], "rl.seen", "va_opd"),
        (["rl.seen=va_opd", "teacher.path=t", "teacher.engine=vllm"], "rl.seen", "va_opd"),
        (["rl.seen=va_opd", "teacher.path=t"], "rl.advantage", "grpo"),
        (
            ["rl.seen=va_opd", "teacher.path=t", "rl.advantage=none", "rl.aggregate=constant"],
            "rl.aggregate",
            "constant",
        ),
    ],
)
def test_weights_that_cannot_be_are_refused(overrides, key, found):
    fixed = ["model.path=x", "data.train=a.jsonl", "train.steps=3", f"rl.reward={TASKS}:letters"]
    with raises(ConfigError, key=key, found=found):
        check_rl(load_config([*fixed, *overrides]))
