# .venv/bin/python -m pytest tests/training/test_retrieval.py
"""Embeddings and rerankers: loss and every gradient equal those of sentence-transformers' formulas
on Hugging Face's model with the whole batch on one device, at each layout.
tests/training/test_sentence_transformers.py runs the library itself."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch import Tensor

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.data_sources import parse_sets, parse_sources
from megatron_vlm.config.objective_configs import EmbedConfig, RerankConfig, RetrievalForm
from megatron_vlm.config.objectives import check_embedding_size, records_of
from megatron_vlm.config.schema import Config, DataConfig, LoraConfig
from megatron_vlm.data.batches.dataset import DataSet, open_data
from megatron_vlm.data.batches.order import Position
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.records.formats import parse_record
from megatron_vlm.data.records.retrieval import parse_retrieval
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.hf.retrieval_files import rerank_template
from megatron_vlm.run.evaluation.evaluate import Evaluator
from megatron_vlm.run.evaluation.scores import ranks_of, retrieval_metrics
from megatron_vlm.training.data_feed import Feeder
from megatron_vlm.training.run_objective import objective_of
from megatron_vlm.training.worker import MegatronWorker
from tests.model import test_parity
from tests.run.test_train import run_rank, steps_of, values
from tests.support.batches import SHALLOW
from tests.support.chats import image, say, text
from tests.support.comparison import check_worst, relative_errors
from tests.support.peft_reference import Adapter, as_ours, peft_model, save, trained
from tests.support.reference import grads_of, inputs_of, load_reference
from tests.support.runs import Case, collect_grads
from tests.support.suites import FULL

# Relative, in fp32 on the CPU, as in tests/model/test_parity.py.
TOLERANCE = 2e-5
# Gradients that go through the decay of a delta net, of which transformers loses digits in fp32:
# tests/model/test_qwen3_5.py compares them with fp64. Measured: 2.0e-5.
DECAY, DECAY_TOLERANCE = (".A_log", ".dt_bias", ".in_proj_a.weight"), 1e-4
EXPERTS = SHALLOW | dict(experts=4, top_k=2)
GEMMA4 = dict(
    family="gemma4", layers=2, vision_depth=1, sliding_window=8, from_scratch=True
)  # logits that the cap bends
HYBRID = dict(family="qwen3_5", layers=2, full_attention_interval=2)
ADAPTER = Adapter(("attention", "mlp", "merger"))
TEMPLATES = Path(__file__).parents[1] / "support" / "templates"


def records() -> list[dict[str, Any]]:
    """Records of both formats, with pictures in queries and documents, and the same number of
    negatives."""
    return [
        {"anchor": "a red circle", "positive": [image(64, 96, 1)], "negative": "a blue square"},
        {
            "messages": [say("user", image(64, 64, 2), text("What is it?"))],
            "positive_messages": [[say("user", "A star.")]],
            "negative_messages": [[say("user", image(96, 64, 3), text("A big one."))]],
        },
        {"query": "2 + 2", "positive": "4", "negatives": ["a fish, perhaps"]},
        {"anchor": "sing a song", "positive": {"text": "la la la"}, "negative_1": "no"},
        {
            "anchor": [say("system", "Find the colour."), say("user", "the colour of the sky")],
            "positive": "blue",
            "negative": "a colour is what one sees",
        },
    ]


@dataclass(frozen=True)
class Trial:
    """An objective with its settings."""

    objective: str
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, path: str, case: Case, data: str) -> Config:
        cfg = case.config(path)
        kind = EmbedConfig if self.objective == "embed" else RerankConfig
        settings = {self.objective: kind(**self.settings)}
        sources = parse_sources(data, "data.train")
        return replace(
            cfg,
            data=DataConfig(train=sources, num_workers=0, cache_dir=None, shuffle=False),
            train=replace(cfg.train, objective=self.objective, global_batch_size=len(records())),
            **settings,
        )


WORDS = dict(positive_token="y", negative_token="n")  # the tiny tokenizer has few tokens
TRIALS = {
    "embed": Trial("embed", dict(temperature=0.1)),
    "matryoshka": Trial(
        "embed", dict(temperature=0.2, dimensions=(32, 8), dimension_weights=(1.0, 0.5))
    ),
    "pointwise": Trial("rerank", WORDS),
    "listwise": Trial("rerank", dict(WORDS, loss="listwise")),
}


def layout(micro: int = 1, **degrees: Any) -> Case:
    return replace(test_parity.layout(**degrees), train=dict(micro_batch_size=micro))


CASES: dict[tuple[str, str], tuple[Case, dict[str, Any]]] = {
    ("embed", "dp2"): (layout(dp=2), SHALLOW),
    ("embed", "dp4"): (layout(dp=4, micro=2), SHALLOW),
    ("embed", "pp2x2-tied"): (layout(pp=2, virtual_stages=2), {"tied": True}),
    ("embed", "experts-ep2"): (layout(dp=2, ep=2), EXPERTS),
    ("embed", "overlap-dp2"): (layout(dp=2, overlap_grad_reduce=True), SHALLOW),
    ("embed", "adapters-tp2-pp2"): (layout(tp=2, pp=2), SHALLOW),
    ("embed", "qwen3_5-tp2-pp2"): (layout(tp=2, pp=2), HYBRID),
    ("embed", "gemma4-tp2"): (layout(tp=2), GEMMA4),
    ("matryoshka", "tp2-dp2"): (layout(tp=2, dp=2), SHALLOW),
    ("pointwise", "dp2"): (layout(dp=2), SHALLOW),
    ("pointwise", "tp2-pp2"): (layout(tp=2, pp=2), SHALLOW),
    ("pointwise", "qwen3_5-adapters-pp2"): (layout(pp=2), HYBRID),
    ("pointwise", "gemma4-pp2"): (layout(pp=2), GEMMA4),
    ("listwise", "dp2"): (layout(dp=2, micro=2), SHALLOW),
}


@dataclass(frozen=True)
class Result:
    loss: float
    means: dict[str, float]
    grads: dict[str, Tensor]
    scores: dict[str, float]  # of the same records as an evaluation set


def step_of(path: str, cfg: Config) -> Result:
    worker = MegatronWorker(cfg)
    feeder = Feeder(cfg, worker.source.sizes, worker.grid, worker.platform.device, worker.watchdog)
    feeder.start(Position())
    batch, objective = feeder.batches.next(), objective_of(worker, cfg)
    if cfg.parallel.overlap_grad_reduce:
        objective.forward_backward(batch)  # Megatron overlaps from the second step on.
    metrics = objective.forward_backward(batch)
    grads = collect_grads(worker)
    held_out = replace(cfg, data=replace(cfg.data, eval=parse_sets(cfg.data.train[0].path)))
    [done] = Evaluator(worker, held_out, objective).evaluate()
    return Result(metrics.loss, metrics.means, grads, done.scores)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("retrieval") / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))
    return str(file)


def rows_of_data(path: str, cfg: Config) -> list[tuple[list[Row], list[bool]]]:
    """The rows of each record as Hugging Face takes them, and which documents are negatives."""
    sizes = read_sizes(path)
    data = open_data(cfg.data.train, "data.train", cfg.data, path, sizes, kind=records_of(cfg))
    assert isinstance(data, DataSet)
    tables = PixelTables(path, torch.device("cpu"))
    examples = []
    for sample in range(len(data.indexes[0])):
        rows = data.rows((0, sample))
        floats = [replace(row, pixel_values_PC=tables.images(row.pixel_values_PC)) for row in rows]
        examples.append((floats, [row.is_rejected for row in data.example((0, sample))]))
    return examples


def embedding(model: Any, row: Row) -> Tensor:
    hidden = model.model(**inputs_of(model, row)).last_hidden_state
    return F.normalize(hidden[0, -1], dim=0)


def logit(model: Any, row: Row) -> Tensor:
    yes, no = row.targets[-1].tolist()
    last = model(**inputs_of(model, row)).logits[0, -1]
    return last[yes] - last[no]


def embed_reference(model: Any, examples: list[Any], cfg: Config) -> Tensor:
    """MatryoshkaLoss over MultipleNegativesRankingLoss: documents by columns, and the positive of a
    query in its own place."""

    columns = zip(*[[embedding(model, row) for row in rows] for rows, _ in examples], strict=True)
    query, *documents = map(torch.stack, columns)
    loss = torch.zeros(())
    dimensions = cfg.embed.dimensions or (query.shape[1],)
    weights = cfg.embed.dimension_weights or (1.0,) * len(dimensions)
    for size, weight in zip(dimensions, weights, strict=True):
        all_documents = F.normalize(torch.cat(documents)[:, :size], dim=1)
        scores = F.normalize(query[:, :size], dim=1) @ all_documents.T / cfg.embed.temperature
        loss = loss + weight * F.cross_entropy(scores, torch.arange(len(query)))
    return loss


def rerank_reference(model: Any, examples: list[Any], cfg: Config) -> Tensor:
    """Cross-entropy of the difference of two logits, by document or by positive."""
    losses = []
    for rows, negatives in examples:
        logits = torch.stack([logit(model, row) for row in rows])
        labels = 1 - torch.tensor(negatives, dtype=logits.dtype)
        if cfg.rerank.loss == "listwise":
            losses.append(F.cross_entropy(logits[None], torch.tensor([0]))[None])
        else:
            losses.append(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
    return torch.cat(losses).mean()


@pytest.fixture(scope="module")
def adapter_of(tiny, tmp_path_factory) -> Callable[..., str]:
    """Return a function for the folder of a random adapter of a tiny model."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def write(path: str) -> str:
        return save(peft_model(path, ADAPTER), root / Path(path).name)

    return write


@dataclass(frozen=True)
class Expected:
    """Loss, gradients and scores of Hugging Face's model, or of PEFT's."""

    loss: float
    grads: dict[str, Tensor]
    recall: float
    ndcg: float


@cache
def expected(path: str, trial: str, data: str, has_adapters: bool) -> Expected:
    cfg = TRIALS[trial].config(path, layout(), data)
    whole = peft_model(path, ADAPTER) if has_adapters else load_reference(path)
    model = whole.get_base_model() if has_adapters else whole
    examples = rows_of_data(path, cfg)
    reference = embed_reference if cfg.train.objective == "embed" else rerank_reference
    loss = reference(model, examples, cfg)
    loss.backward()
    scores = expected_scores(model, examples, cfg)
    grads = grads_of(trained(whole).items() if has_adapters else model.named_parameters())
    grads = as_ours(whole, grads) if has_adapters else grads
    return Expected(float(loss.detach()), grads, *scores)


MARKS: dict[tuple[str, str], Any] = {
    ("embed", "dp2"): (),
    ("pointwise", "tp2-pp2"): (),
    ("pointwise", "qwen3_5-adapters-pp2"): pytest.mark.slow,
}
PARAMS = [pytest.param(*case, marks=MARKS.get(case, FULL)) for case in CASES]


@pytest.mark.parametrize(("trial", "name"), PARAMS)
def test_loss_and_gradients(trial, name, pool, tiny, written, adapter_of, record_property):
    case, sizes = CASES[trial, name]
    path, has_adapters = tiny(**sizes), "adapters" in name
    cfg = TRIALS[trial].config(path, case, written)
    if has_adapters:
        cfg = replace(cfg, lora=LoraConfig(**ADAPTER.ours, path=adapter_of(path)))
    result = pool.run(step_of, case.world, path, cfg)[0]
    theirs = expected(path, trial, written, has_adapters)
    assert result.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert not has_adapters or result.grads.keys() == theirs.grads.keys()
    errors = relative_errors(result.grads, theirs.grads)
    decays = [errors.pop(key) for key in list(errors) if key.endswith(DECAY)]
    assert max(decays, default=0.0) < DECAY_TOLERANCE
    check_worst(errors, TOLERANCE, record_property)
    assert result.scores["recall@1"] == pytest.approx(theirs.recall)
    assert result.scores["ndcg@5"] == pytest.approx(theirs.ndcg)
    assert result.scores["loss"] == pytest.approx(theirs.loss, rel=TOLERANCE)  # a batch is the set


def expected_scores(model: Any, examples: list[Any], cfg: Config) -> tuple[float, float]:
    """Recall at 1 and nDCG at 5 of the positives, by sorting: among all documents of the set, or
    for a reranker among those of the record."""
    ranks = []
    with torch.no_grad():
        if cfg.train.objective == "embed":
            embedded = [[embedding(model, row) for row in rows] for rows, _ in examples]
            corpus = torch.stack([row for rows in embedded for row in rows[1:]])
            for number, rows in enumerate(embedded):
                order = (corpus @ rows[0]).argsort(descending=True).tolist()
                ranks.append(1 + order.index(2 * number))
        else:
            for rows, _ in examples:
                logits = [float(logit(model, row)) for row in rows]
                ranks.append(1 + sum(each > logits[0] for each in logits[1:]))
    recall = sum(rank == 1 for rank in ranks) / len(ranks)
    gains = [1 / math.log2(rank + 1) for rank in ranks if rank <= 5]
    return recall, sum(gains) / len(ranks)


def test_ranks_and_metrics():
    scores = torch.tensor([0.9, 0.5, 0.5, 0.1, 0.7])
    assert ranks_of(scores, [0]) == [1]
    assert ranks_of(scores, [1]) == [4]  # an equal document comes first
    assert ranks_of(scores, [1, 2, 3]) == [3, 4, 5]
    assert ranks_of(torch.zeros(9), [3]) == [9]  # a model that finds all alike finds nothing
    found = retrieval_metrics([[1], [3], [2, 7]], (1, 5))
    assert found["recall@1"] == pytest.approx(1 / 3)
    assert found["recall@5"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    ideal = 1 + 1 / math.log2(3)
    assert found["ndcg@5"] == pytest.approx((1 + 1 / 2 + 1 / math.log2(3) / ideal) / 3)


def chat(*texts: str) -> list[dict[str, Any]]:
    return [say("user", text) for text in texts]


FORM, JUDGE = RetrievalForm("Find."), RetrievalForm("Find.", answers=("y", "n"))
LIST = replace(JUDGE, needs_positive=True)
JUDGE = replace(JUDGE, needs_positive=False)
WRONG: list[tuple[dict[str, Any], RetrievalForm, str]] = [
    ({"positive": "a"}, FORM, "anchor"),
    ({"anchor": "a", "query": "b", "positive": "c"}, FORM, "anchor"),
    ({"anchor": "a", "negative": "b"}, FORM, "positive"),
    ({"anchor": " ", "positive": "a"}, FORM, "anchor"),
    ({"anchor": "a", "positive": {"text": ""}}, FORM, "positive"),
    ({"anchor": "a", "positive": "b", "negative_2": " "}, FORM, "negative_2"),
    ({"anchor": "a", "positive": "a"}, FORM, "positive"),
    (dict(anchor="a", positive="b", negative_1="c", negative_2="b"), FORM, "negative_2"),
    (
        {"messages": chat("a"), "positive_messages": [chat("b"), chat("c")]},
        FORM,
        "positive_messages[1]",
    ),
    ({"anchor": "a", "positive": "b"}, replace(FORM, hard_negatives=1), "negative"),
    ({"anchor": "a", "positive": "b", "negative": ["c"]}, FORM, "negative"),
    ({"anchor": "a", "positive": "b", "label": 1}, FORM, "label"),
    ({"anchor": "a", "positive": "b", "image": "c.png"}, FORM, "image"),
    ({"anchor": {"text": "a", "imgae": "b"}, "positive": "b"}, FORM, "anchor"),
    ({"messages": chat("a"), "positive_messages": chat("b")}, FORM, "positive_messages"),
    (
        {
            "messages": chat("a"),
            "positive_messages": [chat("<image>")],
            "positive_images": ["a.png", "b.png"],
        },
        FORM,
        "positive_images",
    ),
    ({"query": "a", "document": "b"}, JUDGE, "label"),
    ({"query": "a", "document": "b", "label": 0.5}, JUDGE, "label"),
    ({"query": "a", "documents": ["b", "c"], "labels": [1]}, JUDGE, "labels"),
    ({"query": "a", "positive": "b"}, LIST, "negative"),
    ({"query": chat("a", "b"), "positive": "c"}, JUDGE, "messages"),
]


@pytest.mark.parametrize(("raw", "form", "key"), WRONG)
def test_wrong_records_are_refused(raw, form, key):
    with pytest.raises(DataError) as error:
        parse_retrieval(raw, parse_record, form)
    assert error.value.key == key


def parsed(raw: dict[str, Any], form: RetrievalForm) -> list[tuple[str, bool]]:
    """The texts of each row, with its roles."""
    rows = parse_retrieval(raw, parse_record, form)
    return [
        ("|".join(f"{turn.role}:{''.join(map(str, turn.parts))}" for turn in row.turns), negative)
        for row, negative in rows
    ]


def test_records_become_rows():
    own = {"anchor": [say("system", "Own."), say("user", "a")], "positive": "b"}
    own |= {"negative_10": "e", "negative_2": "d", "negative": "c"}
    assert parsed(own, FORM) == [
        ("system:Own.|user:a", False),
        ("system:Find.|user:b", False),
        ("system:Find.|user:c", True),
        ("system:Find.|user:d", True),
        ("system:Find.|user:e", True),
    ]
    assert len(parsed(own, replace(FORM, hard_negatives=1))) == 3
    listed = {"query": "a", "documents": ["b", "c"], "labels": [0, True]}
    rows = parsed(listed, JUDGE)
    assert [negative for _, negative in rows] == [False, True]
    assert rows[0][0].endswith("|user:<Instruct>: Find.<Query>:a\n<Document>:c")
    swift = {"messages": chat("a"), "positive_messages": [[say("assistant", "b")]]}
    assert parsed(swift, FORM)[1] == ("system:Find.|user:b", False)


@pytest.mark.parametrize("released", [None, "qwen3_5", "qwen3_8"])
def test_template_of_a_reranker_makes_the_rows_of_training(released, tiny, tmp_path):
    picture, question = image(64, 96, 1), text("What is it?")
    sides: list[tuple[list[Any], list[Any]]] = [
        ([text("2 + 2")], [text("four\n ")]),
        ([picture, question], [text("A 'star' {{ 1 }}.")]),
        ([text("a star")], [image(64, 64, 2), text("Look."), image(96, 64, 3)]),
    ]
    own = say("system", 'Find the "sum".')
    file = tmp_path / "train.jsonl"
    raws = [
        {"query": [own, say("user", *query)], "document": document, "label": 1}
        for query, document in sides
    ]
    raws += [{"query": query, "document": document, "label": 0} for query, document in sides]
    file.write_text("".join(json.dumps(raw) + "\n" for raw in raws))
    shutil.copytree(tiny(), path := tmp_path / "model")
    if released:
        shutil.copy(TEMPLATES / f"{released}.jinja", path / "chat_template.jinja")
    trial = replace(TRIALS["pointwise"], settings=dict(WORDS, instruction="It's\n{% x %}"))
    cfg = trial.config(str(path), layout(), str(file))
    variables = {"enable_thinking": False} if released else {}
    cfg = replace(cfg, data=replace(cfg.data, template_kwargs=variables))
    tokenizer = read_tokenizer(str(path))
    template = rerank_template(str(tokenizer.chat_template), cfg)
    pad = read_sizes(path).tokens.image_id
    for number, (rows, _) in enumerate(rows_of_data(str(path), cfg)):
        query, document = sides[number % 3]
        messages = [say("query", *query), say("document", *document)]
        if number < 3:
            messages.insert(0, say("system", text('Find the "sum".')))
        shown = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        row = [key for key, _ in groupby(rows[0].ids_S.tolist(), lambda i: i)]
        assert row == [key for key, _ in groupby(tokenizer(shown)["input_ids"], lambda i: i)]
        assert (pad in row) == (number % 3 > 0)
    for wrong in ([say("query", "a")], [say("query", "a"), say("user", "b")]):
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(wrong, chat_template=template, tokenize=False)


def test_settings_that_cannot_work(tiny):
    base = TRIALS["embed"].config(tiny(), layout(), "x.jsonl")
    hidden = read_sizes(tiny()).text.hidden
    check_embedding_size(replace(base, embed=EmbedConfig(dimensions=(hidden,))), hidden)
    with pytest.raises(ConfigError) as error:
        check_embedding_size(replace(base, embed=EmbedConfig(dimensions=(hidden + 1,))), hidden)
    assert error.value.key == "embed.dimensions"
    wrong = {
        "lora.dropout": replace(base, lora=replace(base.lora, rank=4, dropout=0.1)),
        "eval.generate": replace(base, eval=replace(base.eval, generate=True)),
        "data.truncation": replace(base, data=replace(base.data, truncation="image_safe")),
        "data.system": replace(base, data=replace(base.data, system="Be brief.")),
        "embed.dimension_weights": replace(
            base, embed=EmbedConfig(dimensions=(8, 4), dimension_weights=(1.0,))
        ),
    }
    for key, cfg in wrong.items():
        with pytest.raises(ConfigError) as error:
            check_values(cfg)
        assert error.value.key == key


@pytest.mark.parametrize("objective", ["embed", pytest.param("rerank", marks=FULL)])
def test_a_run_resumes_bit_for_bit(objective, pool, tiny, written, tmp_path):
    def go(run: str) -> Path:
        words = {
            "model": "tiny_cpu",
            "model.path": tiny(**SHALLOW),
            "data.train": written,
            "data.eval": written,
            "data.cache_dir": "null",
            "data.num_workers": 0,
            "run": tmp_path / run,
            "train.objective": objective,
            "train.steps": 4,
            "train.global_batch_size": 3,
            "train.micro_batch_size": 1,
            "checkpoint.every": 2,
            "checkpoint.best": "train/recall@1",
            "launch.timeout_minutes": 2,
        }
        if objective == "rerank":
            words |= {"rerank.positive_token": "y", "rerank.negative_token": "n"}
        answers = pool.run(run_rank, 2, [f"{key}={value}" for key, value in words.items()])
        assert answers[0][0] == 0, answers[0][2]
        return tmp_path / run

    whole = go("whole")
    checkpoint = "checkpoints/step-00000002"
    shutil.copytree(whole / checkpoint, tmp_path / "resumed" / checkpoint)
    resumed = go("resumed")
    steps = steps_of(whole)
    assert values(steps_of(resumed)) == values(steps)[2:]
    assert 0 <= steps[-1]["accuracy"] <= 1
    one, other = (run / "export" / "model.safetensors" for run in (whole, resumed))
    assert one.read_bytes() == other.read_bytes()
    assert (whole / "export" / "modules.json").exists()
    assert (whole / "export" / "reranker.jinja").exists() == (objective == "rerank")
    scores = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    [last] = [line["metrics"] for line in scores if line["kind"] == "eval"]
    assert {"recall@1", "ndcg@10"} <= {*last}
