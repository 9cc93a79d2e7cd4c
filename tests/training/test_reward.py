# .venv/bin/python -m pytest tests/training/test_reward.py
"""Reward models: loss and every gradient equal those of TRL's formula on Hugging Face's model in
fp64, at each layout. test_trl_reward.py runs TRL itself."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.objective_configs import PreferenceConfig, RewardConfig
from megatron_vlm.config.schema import Config, DataConfig, LoraConfig
from megatron_vlm.data.batches.micro_batch import REJECTED
from megatron_vlm.data.records.preferences import split_margin
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.distributed.grid import RankGroups
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.lora.peft_folder import ADAPTER_FILE
from megatron_vlm.training import run_objective
from megatron_vlm.training.stage_inputs import RowInputs
from tests.run.test_train import run_rank
from tests.support.batches import SHALLOW
from tests.support.chats import hf_encode, hf_processor, say
from tests.support.comparison import check_worst, relative_errors
from tests.support.error_fields import raises
from tests.support.peft_reference import Adapter, as_ours, peft_model, save, trained
from tests.support.reference import grads_of, inputs_of, load_reference
from tests.support.runs import Case
from tests.support.suites import FULL
from tests.training.test_distill import eval_rank
from tests.training.test_preferences import GEMMA4, logged, pairs, run_words
from tests.training.test_retrieval import EXPERTS, HYBRID, Result, layout, rows_of_data, step_of

# Relative, of fp32 on the CPU to fp64. Measured worst case: see the suite's figures.
TOLERANCE = 2e-5
ADAPTER = Adapter(("attention", "mlp", "merger"))
CENTER = 0.125
SCORE = "score.weight"
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "one": (layout(micro=2), SHALLOW),
    "tp2": (layout(tp=2), SHALLOW),
    "pp2": (layout(pp=2), SHALLOW),
    "dp2": (layout(dp=2, micro=2), SHALLOW),
    "pp2-tied": (layout(pp=2), SHALLOW | {"tied": True}),
    "recompute-tp2-dp2": (layout(tp=2, dp=2, recompute="full"), SHALLOW),
    "experts-ep2": (layout(dp=2, ep=2), EXPERTS),
    "qwen3_5-tp2-pp2": (layout(tp=2, pp=2), HYBRID),
    "gemma4-pp2": (layout(pp=2), GEMMA4),
    "adapters-tp2-pp2": (layout(tp=2, pp=2), SHALLOW),
}
MARKS: dict[str, Any] = {"tp2": (), "dp2": ()}
PARAMS = [pytest.param(name, marks=MARKS.get(name, FULL)) for name in CASES]


def records() -> list[dict[str, Any]]:
    """Pairs of answers of unequal lengths, most of them with a margin."""
    margins = [{"margin": 0.5}, {}, {"margin": -0.75}, {"margin": 2}, {"margin": 1.25}]
    return [pair | margin for pair, margin in zip(pairs(), margins, strict=True)]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("reward") / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))
    return str(file)


@pytest.fixture(scope="module")
def scored(tiny, tmp_path_factory) -> Callable[..., str]:
    """Return a function for a tiny model with a scalar head."""
    root = tmp_path_factory.mktemp("scored")

    @cache
    def write(sizes: tuple[tuple[str, Any], ...]) -> str:
        folder = root / str(len(list(root.iterdir())))
        shutil.copytree(tiny(**dict(sizes)), folder)
        add_score(folder / "model.safetensors", SCORE)
        return str(folder)

    return lambda sizes: write(tuple(sizes.items()))


def add_score(file: Path, name: str) -> None:
    tensors = load_file(file)
    hidden = next(v.shape[1] for k, v in tensors.items() if k.endswith(("embed_tokens.weight",)))
    tensors[name] = score_of(hidden)
    save_file(tensors, file, {"format": "pt"})


def score_of(hidden: int) -> Tensor:
    return 0.5 * torch.randn(1, hidden, generator=torch.Generator().manual_seed(3))


def config_of(path: str, case: Case, data: str) -> Config:
    cfg = case.config(path)
    sources = parse_sources(data, "data.train")
    return replace(
        cfg,
        data=DataConfig(train=sources, num_workers=0, cache_dir=None, shuffle=False),
        reward=RewardConfig(CENTER),
        train=replace(cfg.train, objective="reward", global_batch_size=len(records())),
    )


@dataclass(frozen=True)
class Expected:
    loss: float
    grads: dict[str, Tensor]
    margin: float
    accuracy: float


def rewards(model: Any, score: Tensor, path: str, cfg: Config) -> Tensor:
    """The rewards [pairs, 2] as `GenericForSequenceClassification` has them."""
    rows = [row for rows, _ in rows_of_data(path, cfg) for row in rows]
    hidden = [model.model(**inputs_of(model, as_double(row))).last_hidden_state for row in rows]
    return torch.cat([each[0, -1:] @ score.T for each in hidden]).view(-1, 2)


def as_double(row: Any) -> Any:
    pixels = row.pixel_values_PC
    return row if pixels is None else replace(row, pixel_values_PC=pixels.double())


def trl_loss(rewards_E2: Tensor) -> Tensor:
    """TRL 1.16's RewardTrainer.compute_loss, with center_rewards_coefficient."""
    chosen, rejected = rewards_E2.unbind(1)
    margin = torch.tensor([record.get("margin", 0.0) for record in records()])
    loss = -nn.functional.logsigmoid(chosen - rejected - margin).mean()
    return loss + CENTER * torch.mean((chosen + rejected) ** 2)


@pytest.fixture(scope="module")
def expected(scored, written, adapter_of) -> Callable[[str], Expected]:
    @cache
    def compute(name: str) -> Expected:
        case, sizes = CASES[name]
        path, has_adapters = scored(sizes), "adapters" in name
        cfg = config_of(path, case, written)
        whole = peft_model(path, ADAPTER).double() if has_adapters else None
        model = whole.get_base_model() if whole else load_reference(path, torch.float64)
        score = score_of(model.get_input_embeddings().weight.shape[1]).double().requires_grad_()
        both = rewards(model, score, path, cfg)
        loss = trl_loss(both)
        loss.backward()
        if whole:
            grads = as_ours(whole, grads_of(trained(whole).items()))
        else:
            grads = grads_of((k, v) for k, v in model.named_parameters() if v.grad is not None)
        assert score.grad is not None
        margins = both.detach()[:, 0] - both.detach()[:, 1]
        figures = float(margins.mean()), float((margins > 0).double().mean())
        return Expected(float(loss.detach()), {**grads, SCORE: score.grad}, *figures)

    return compute


@pytest.fixture(scope="module")
def adapter_of(tmp_path_factory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def write(path: str) -> str:
        folder = save(peft_model(path, ADAPTER), root / Path(path).name)
        file = Path(folder) / ADAPTER_FILE
        tensors = load_file(file)
        score = load_file(Path(path) / "model.safetensors")[SCORE]
        save_file(tensors | {f"base_model.model.{SCORE}": score}, file, {"format": "pt"})
        return folder

    return write


def outcome_of(name: str, pool, scored, written, adapter_of, mutant: str | None = None) -> Result:
    case, sizes = CASES[name]
    path = scored(sizes)
    cfg = config_of(path, case, written)
    if "adapters" in name:
        cfg = replace(cfg, lora=LoraConfig(**ADAPTER.ours, path=adapter_of(path)))
    result: Result = pool.run(mutated_step, case.world, mutant, path, cfg)[0]
    return result


def errors_of(result: Result, theirs: Expected) -> dict[str, float]:
    errors = relative_errors(result.grads, theirs.grads)
    pairs = {"loss": (result.loss, theirs.loss), "score": (result.scores["loss"], theirs.loss)}
    pairs["margin"] = (result.means["rewards_margin"], theirs.margin)
    pairs["margin of eval"] = (result.scores["rewards_margin"], theirs.margin)
    return errors | {name: abs(a - b) / abs(b) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("name", PARAMS)
def test_loss_and_gradients(name, pool, scored, written, adapter_of, expected, record_property):
    theirs = expected(name)
    result = outcome_of(name, pool, scored, written, adapter_of)
    others = {key: grad for key, grad in result.grads.items() if key not in theirs.grads}
    assert not any(grad.nan_to_num().any() for grad in others.values())  # frozen ones are nan
    assert result.scores["reward_accuracy"] == pytest.approx(theirs.accuracy)
    assert 0 < theirs.accuracy < 1
    check_worst(errors_of(result, theirs), TOLERANCE, record_property)


def test_a_new_head_is_as_in_transformers_and_the_same_in_every_run(tiny):
    values = []
    for _ in range(2):
        source = HFCheckpoint(tiny(hidden=256), (), "score")
        source.read_headers()
        assert source.has_new_score
        values.append(source.read(SCORE, ()))
    assert torch.equal(*values) and values[0].shape == (1, 256)
    assert float(values[0].std()) == pytest.approx(0.02, rel=0.15)


def test_settings_and_margins_that_cannot_work(tiny):
    base = config_of(tiny(), layout(), "x.jsonl")
    check_values(base)
    wrong = {
        "eval.generate": replace(base, eval=replace(base.eval, generate=True)),
        "data.truncation": replace(base, data=replace(base.data, truncation="image_safe")),
        "preference.losses": replace(base, preference=PreferenceConfig(losses=("sigmoid",))),
    }
    for key, cfg in wrong.items():
        with raises(ConfigError, key=key):
            check_values(cfg)
    assert split_margin({"a": 1, "margin": -2}) == ({"a": 1}, -2.0)
    assert split_margin({"a": 1, "margin": None}) == ({"a": 1}, 0.0)
    assert split_margin({"a": 1, "margin": "much"}, ["margin"]) == ({"a": 1}, 0.0)
    for margin in ("1", True, float("nan"), [1]):
        with raises(DataError, key="margin"):
            split_margin({"margin": margin})


def patched_loss(change: Callable[..., tuple[Any, ...]]) -> Any:
    right = run_objective.bradley_terry

    def loss(center_coef: float, scores_N: Tensor, rows: RowInputs, margin_N: Tensor) -> Any:
        return right(*change(center_coef, scores_N, rows, margin_N))

    return mock.patch.object(run_objective, "bradley_terry", loss)


def swapped(center_coef: float, scores_N: Tensor, rows: RowInputs, margin_N: Tensor) -> Any:
    others = replace(rows, values={REJECTED: ~rows.is_rejected_R})
    return center_coef, scores_N, others, margin_N


def one_before(self: Reader, row: Any, answers: Any = None) -> Any:
    row = READ_AT_END(self, row, answers)
    return replace(row, targets=row.targets.roll(-1))


READ_AT_END = Reader._read_at_end
MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    # name: the case, and the patch
    "sign of the margin": ("one", lambda: patched_loss(lambda k, s, r, m: (k, s, r, -m))),
    "no centring": ("one", lambda: patched_loss(lambda k, s, r, m: (0.0, s, r, m))),
    "answers swapped": ("one", lambda: patched_loss(swapped)),
    "token before": ("one", lambda: mock.patch.object(Reader, "_read_at_end", one_before)),
    "divisor of one replica": (
        "dp2",
        lambda: mock.patch.object(RankGroups, "sum_of_replicas", lambda self, *local: [*local]),
    ),
}


def mutated_step(mutant: str | None, path: str, cfg: Config) -> Result:
    with nullcontext() if mutant is None else MUTANTS[mutant][1]():
        return step_of(path, cfg)


@FULL
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_far_from_trl(mutant, pool, scored, written, adapter_of, expected):
    name = MUTANTS[mutant][0]
    result = outcome_of(name, pool, scored, written, adapter_of, mutant)
    assert max(errors_of(result, expected(name)).values()) > 1000 * TOLERANCE


# Whole runs.


def words_of(tiny, run: Path, data: str, *more: str) -> list[str]:
    given = ("train.objective=reward", "eval.generate=false", f"reward.center_coef={CENTER}")
    return run_words(tiny, run, data, f"model.path={tiny(**HYBRID)}", *given, *more)


def by_transformers(folder: Path) -> Tensor:
    """The rewards [pairs, 2] of a folder, by transformers alone: its class, processor and chat
    template. Two rows are also scored together, with padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    processor = hf_processor(folder)
    rows = []
    for record in records():
        prompt, *answers = (record[name] for name in ("prompt", "chosen", "rejected"))
        begun = [say("user", prompt)] if isinstance(prompt, str) else prompt
        for answer in answers:
            ended = [say("assistant", answer)] if isinstance(answer, str) else answer
            given = hf_encode(processor, {"messages": [*begun, *ended]})
            types = (given["input_ids"] == model.config.image_token_id).int()
            rows.append({**given, "mm_token_type_ids": types})
    with torch.no_grad():
        rewards = torch.cat([model(**row).logits for row in rows]).view(-1, 2)
        pair = pad_sequence(
            [row["input_ids"][0] for row in rows[2:4]],
            batch_first=True,
            padding_value=model.config.text_config.pad_token_id,
        )
        torch.testing.assert_close(model(pair).logits.view(2), rewards[1], rtol=1e-4, atol=1e-5)
    return rewards


@pytest.mark.parametrize("tuned", ["whole", pytest.param("lora", marks=FULL)])
def test_a_run_resumes_bit_for_bit_and_transformers_reads_its_export(
    tuned, pool, tiny, written, tmp_path
):
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    more = ["parallel.tp=2"]
    more += ["lora=default", "checkpoint.export=both"] if tuned == "lora" else []
    status, _, err = pool.run(run_rank, 2, words_of(tiny, run, written, *more))[0]
    assert status == 0, err
    steps, [*_, scores] = logged(run, "step"), logged(run, "eval")
    assert {"rewards_chosen", "rewards_margin", "reward_accuracy"} <= {*steps[-1]}
    shutil.copytree(run / "checkpoints/step-00000002", resumed / "checkpoints/step-00000002")
    status, _, err = pool.run(run_rank, 2, words_of(tiny, resumed, written, *more))[0]
    assert status == 0, err
    assert logged(resumed, "step") == steps[2:]
    export = "merged" if tuned == "lora" else "export"
    file = f"{export}/model.safetensors"
    assert (run / file).read_bytes() == (resumed / file).read_bytes()
    assert "lm_head.weight" not in load_file(run / file)
    rewards = by_transformers(run / export)
    figures = ("rewards_chosen", "rewards_rejected", "rewards_margin")
    theirs = [*rewards.mean(0).tolist(), float((rewards[:, 0] - rewards[:, 1]).mean())]
    assert [scores["metrics"][name] for name in figures] == pytest.approx(theirs, abs=2e-5)
    given = ["train.objective=reward", f"data.eval={written}", "data.cache_dir=null"]
    given += ["data.num_workers=0"]
    for where in (run, run / "export"):
        more = given if where != run else [*given[1:], "parallel.tp=1"]
        status, out, err = pool.run(eval_rank, 1, [str(where), *more])[0]
        assert status == 0, err
        done = json.loads(out.splitlines()[0])
        assert [done[name] for name in figures] == pytest.approx(theirs, abs=2e-5)
    if tuned == "whole":
        status, _, err = pool.run(eval_rank, 1, [str(run / "export"), *given[1:]])[0]
        assert status == 2 and "score.weight is the scalar head of a reward model" in err
        return
    base = AutoModelForSequenceClassification.from_pretrained(tiny(**HYBRID), num_labels=1)
    adapted = PeftModel.from_pretrained(base, run / "export").merge_and_unload()
    merged = load_file(run / file)
    for name, value in adapted.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-5, atol=1e-6)
