# make embed-env vllm-env, then python -m pytest tests/training/test_sentence_transformers.py
"""The library sentence-transformers itself: it loads an export, its embeddings are the trainer's,
and its MultipleNegativesRankingLoss and MatryoshkaLoss with the whole batch on one device have our
loss and every one of our gradients. vLLM's pooling runner has the same embeddings. Both give the
scores of a reranker."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.order import Position
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.model_card import TrainingSummary, vllm_overrides
from megatron_vlm.model.head import embedding_head
from megatron_vlm.training.data_feed import Feeder
from megatron_vlm.training.global_rows import GlobalRows
from megatron_vlm.training.row_objectives import EmbeddingObjective, RerankObjective
from megatron_vlm.training.worker import MegatronWorker
from tests.support.chats import picture
from tests.support.comparison import check_worst, relative_errors
from tests.support.runs import collect_grads
from tests.training.test_retrieval import TRIALS, layout, rows_of_data

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-embed" / "bin" / "python"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = pytest.mark.slow  # each library takes 15 s to start
needs_library = pytest.mark.engine("embed")
# Relative, norm over norm, of gradients; and the largest difference of an embedding. Measured worst
# cases: 1.8e-6, and 1.8e-7 in the library and 3.0e-7 in vLLM.
TOLERANCE, EMBEDDING_TOLERANCE = 2e-5, 2e-6
LOGIT_TOLERANCE = 1e-5  # measured: 1.8e-6
CASES = {
    "embed-dp1": ("embed", layout()),
    "embed-dp2": ("embed", layout(dp=2)),
    "embed-dp4": ("embed", layout(dp=4, micro=2)),
    "embed-tp2": ("embed", layout(tp=2)),
    "embed-pp2": ("embed", layout(pp=2)),
    "matryoshka-tp2-dp2": ("matryoshka", layout(tp=2, dp=2)),
}


@pytest.fixture(scope="module")
def columns(tmp_path_factory) -> tuple[str, list[list[Any]]]:
    """Records with pictures in files, and the same as columns of messages."""
    folder = tmp_path_factory.mktemp("columns")
    for number in range(4):
        picture(64, 96, number).save(folder / f"{number}.png")

    def show(number: int, *words: str) -> list[dict[str, Any]]:
        texts = [{"type": "text", "text": word} for word in words]
        image = {"type": "image", "image": str(folder / f"{number}.png")}
        return [{"role": "user", "content": [image, *texts]}]

    def say(words: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": words}]}]

    table = [
        [say("a red circle"), say("2 + 2"), show(0, "What is it?"), show(1)],
        [show(2), say("four"), say("A star."), say("la la la")],
        [say("a blue square"), say("a fish, perhaps"), show(3, "A big one."), say("no")],
    ]
    lines = [
        json.dumps(dict(zip(("anchor", "positive", "negative"), row, strict=True)))
        for row in zip(*table, strict=True)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "train.jsonl"), table


def our_step(path: str, cfg: Config, export: str) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients and embeddings of a step; the untrained model is exported."""
    worker = MegatronWorker(cfg)
    feeder = Feeder(cfg, worker.source.sizes, worker.grid, worker.platform.device, worker.watchdog)
    feeder.start(Position())
    batch = feeder.batches.next()
    metrics = EmbeddingObjective(worker, cfg).forward_backward(batch)
    outputs = worker.stage.evaluate(batch.micro_batches, embedding_head)
    embeddings = torch.zeros(0)
    if worker.grid.is_last_stage:
        found = [each.embeddings_NH for each in outputs if each.embeddings_NH is not None]
        group, device = worker.grid.dp.group, worker.platform.device
        embeddings = GlobalRows.gather(found, batch.micro_batches, group, device).values_TH
    grads = collect_grads(worker)
    worker.export_hf(export, done=TrainingSummary(cfg, 1))
    return metrics.loss, grads, embeddings.clone()


def run_library(folder: Path) -> dict[str, Tensor]:
    """Run sentence-transformers on the export and the task in a folder."""
    script = "sentence_transformers_reference.py"
    return run_script(PYTHON, script, folder, {**os.environ, "HF_HUB_OFFLINE": "1"})


def run_vllm(folder: Path) -> dict[str, Tensor]:
    """Run vLLM on the export and the task in a folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_"))}
    return run_script(VLLM, "vllm_engine/pooling.py", folder, env)


def run_script(python: Path, script: str, folder: Path, env: dict[str, str]) -> dict[str, Tensor]:
    files = [folder / name for name in ("export", "task.json", "out.safetensors")]
    done = subprocess.run(
        [python, ROOT / "tests" / "support" / script, *files],
        capture_output=True,
        text=True,
        timeout=400,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(files[-1])


@needs_library
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_library(name, pool, tiny, columns, tmp_path, record_property):
    trial, case = CASES[name]
    data, table = columns
    cfg = TRIALS[trial].config(tiny(), case, data)
    answers = pool.run(our_step, case.world, tiny(), cfg, str(tmp_path / "export"))
    loss, grads = answers[0][:2]
    embeddings = answers[-1][2]  # of the last stage
    settings = ("temperature", "dimensions", "dimension_weights")
    task = {"columns": table} | {key: getattr(cfg.embed, key) for key in settings}
    (tmp_path / "task.json").write_text(json.dumps(task))
    expected = run_library(tmp_path)
    assert loss == pytest.approx(float(expected.pop("loss")), rel=TOLERANCE)
    by_row = torch.stack([expected.pop(f"column {n}") for n in range(3)], dim=1).flatten(0, 1)
    difference = float((embeddings - by_row).abs().max())
    record_property("embedding", difference)
    assert difference < EMBEDDING_TOLERANCE
    check_worst(relative_errors(grads, expected), TOLERANCE, record_property)


@pytest.mark.engine("vllm")
def test_vllm_has_the_same_embeddings(pool, tiny, columns, tmp_path, record_property):
    data, table = columns
    path = tiny(
        head_dim=32, from_scratch=True
    )  # as tests/engines/test_vllm.py: vLLM takes no narrower head
    cfg = TRIALS["embed"].config(path, layout(), data)
    [(_, _, embeddings)] = pool.run(our_step, 1, path, cfg, str(tmp_path / "export"))
    rows = [row for rows, _ in rows_of_data(path, cfg) for row in rows]
    image_id = read_sizes(path).tokens.image_id
    items = [item for record in zip(*table, strict=True) for item in record]
    prompts = [
        {
            # vLLM repeats the placeholder of a picture itself.
            "ids": [
                i
                for i, before in zip(ids, [None, *ids], strict=False)
                if i != image_id or before != image_id
            ],
            "pictures": [part["image"] for part in item[0]["content"] if "image" in part],
        }
        for item, ids in zip(items, [row.ids_S.tolist() for row in rows], strict=True)
    ]
    (tmp_path / "task.json").write_text(json.dumps({"prompts": prompts}))
    served = run_vllm(tmp_path)["embeddings"]
    difference = float((embeddings - served).abs().max())
    record_property("embedding", difference)
    assert difference < EMBEDDING_TOLERANCE


# vLLM takes no narrower heads, and its delta net for the CPU computes in bf16. Scores of these
# documents are between 0.42 and 0.48, and between 0.09 and 0.69.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": dict(head_dim=32),
    "qwen3_5": dict(family="qwen3_5", head_dim=64, linear_key_dim=128, linear_value_dim=128),
}
DTYPES = {"qwen3_vl": "float32", "qwen3_5": "bfloat16"}
SCORE_TOLERANCES = {"float32": 1e-6, "bfloat16": 0.05}  # measured: 1.2e-7, 0.010


def our_scores(path: str, cfg: Config, export: str) -> list[float]:
    """Logits of a step's documents; the untrained model is exported."""
    worker = MegatronWorker(cfg)
    feeder = Feeder(cfg, worker.source.sizes, worker.grid, worker.platform.device, worker.watchdog)
    feeder.start(Position())
    rows = RerankObjective(worker, cfg).scored(feeder.batches.next().micro_batches)
    worker.export_hf(export, done=TrainingSummary(cfg, 1))
    return [row.logit for row in rows]


@pytest.fixture
def reranker(request, pool, tiny, columns, tmp_path) -> tuple[Path, list[float]]:
    """An exported reranker in a folder with its task, and our logits."""
    data, table = columns
    path = tiny(from_scratch=True, **FAMILIES[request.param])
    cfg = TRIALS["pointwise"].config(path, layout(), data)
    [logits] = pool.run(our_scores, 1, path, cfg, str(tmp_path / "export"))
    records = zip(*table, strict=True)
    pairs = [
        [query[0]["content"], document[0]["content"]]
        for query, *documents in records
        for document in documents
    ]
    task = {"pairs": pairs, "overrides": vllm_overrides(cfg), "dtype": DTYPES[request.param]}
    task["template"] = str(tmp_path / "export" / "reranker.jinja")
    (tmp_path / "task.json").write_text(json.dumps(task))
    return tmp_path, logits


@needs_library
@pytest.mark.parametrize("reranker", FAMILIES, indirect=True)
def test_the_library_has_the_same_scores(reranker, record_property):
    folder, logits = reranker
    theirs = run_library(folder)
    difference = float((torch.tensor(logits) - theirs["logits"]).abs().max())
    record_property("logit", difference)
    assert difference < LOGIT_TOLERANCE
    assert torch.equal(theirs["scores"], theirs["logits"].sigmoid())


@pytest.mark.engine("vllm")
@pytest.mark.parametrize("reranker", FAMILIES, indirect=True)
def test_vllm_has_the_same_scores(reranker, record_property):
    folder, logits = reranker
    dtype = json.loads((folder / "task.json").read_text())["dtype"]
    difference = float((torch.tensor(logits).sigmoid() - run_vllm(folder)["scores"]).abs().max())
    record_property("score", difference)
    assert difference < SCORE_TOLERANCES[dtype]
