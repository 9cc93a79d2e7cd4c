# .venv/bin/python -m pytest tests/family/test_added_tokens.py
"""data.add_tokens grows the vocabulary as transformers does, also in exports and answers."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.commands.eval import run_eval
from megatron_vlm.config.checks import MAX_NEW_TOKENS, check_values
from megatron_vlm.config.schema import Config, DataConfig, ModelConfig
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.errors import ConfigError
from megatron_vlm.family import read_sizes
from megatron_vlm.family.added_tokens import find_new_tokens
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.untrusted import UntrustedFile
from tests.model.test_parity import TOLERANCE, errors, full, layout
from tests.run.test_train import events_of, go_pooled
from tests.support.batches import ALL_TEXT, MIXED, make_rows
from tests.support.chats import say
from tests.support.comparison import check_worst
from tests.support.error_fields import raises
from tests.support.reference import Reference, load_reference, row_log_probs, run_reference
from tests.support.runs import Case, loss_and_grads

# The tiny tokenizer has 481 tokens, and its checkpoints have 512 rows: 31 are spare, and 40 new
# tokens make 521.
KNOWN, ROWS = 481, 512
SPARE = tuple(f"<spare {i}>" for i in range(30))
MORE = tuple(f"<more {i}>" for i in range(40))


def grown(base: str, names: tuple[str, ...], folder: Path) -> str:
    """Write the same model as transformers makes it, the reference, without a tokenizer."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(base)
    rows = max(ROWS, KNOWN + len(names))
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            mean = layer.weight[:KNOWN].double().mean(0).float()  # the rows are still unchanged
            layer.weight[KNOWN : KNOWN + len(names)] = mean
            if model.config.tie_word_embeddings:
                break
    model.save_pretrained(folder)
    return str(folder)


def rows_with(names: tuple[str, ...]) -> list[Row]:
    """Return rows in which some of the text, trained or not, consists of new tokens."""
    rows = make_rows((MIXED[0], *ALL_TEXT[:2], MIXED[5]))
    generator = torch.Generator().manual_seed(1)
    for row in rows:
        text = (row.ids_S < 250) & (torch.rand(len(row.ids_S), generator=generator) < 0.3)
        text[-1] = True
        ids = torch.randint(KNOWN, KNOWN + len(names), (int(text.sum()),), generator=generator)
        row.ids_S[text] = ids
        row.labels_S[text & (row.labels_S != IGNORE)] = ids[row.labels_S[text] != IGNORE]
    return rows


LAYOUTS = {
    "1x1": (layout(), MORE),
    "tp2": (layout(tp=2), MORE),
    "pp2": (layout(pp=2), MORE),
    "spare-rows-tp2": (layout(tp=2), SPARE),
}


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    @cache
    def compute(tied: bool, names: tuple[str, ...]) -> Reference:
        folder = grown(tiny(tied=tied), names, tmp_path_factory.mktemp("grown"))
        return run_reference(folder, rows_with(names))

    return compute


CASES = [(name, tied) for name in LAYOUTS for tied in (False, True)][:-1]
QUICK = (("tp2", True), ("spare-rows-tp2", False))


def test_the_tokenizer_file_is_looked_through_once(tiny, monkeypatch):
    """A real one has 11 MB. The model reads it, and the tokenizer reuses the result."""
    opened = []
    read = UntrustedFile.text
    monkeypatch.setattr(
        UntrustedFile,
        "text",
        lambda self, *most: opened.append(Path(self.name).name) or read(self, *most),
    )
    source = HFCheckpoint(tiny(), SPARE)
    tokenizer = read_tokenizer(tiny(), SPARE)
    assert opened.count("tokenizer.json") == 1
    assert source.new_tokens is not None and source.new_tokens.first == KNOWN
    assert tokenizer.convert_tokens_to_ids(SPARE[0]) == KNOWN


@pytest.mark.parametrize(
    ("name", "tied"), [case if case in QUICK else full(*case) for case in CASES]
)
def test_equals_hugging_face_with_more_rows(name, tied, pool, tiny, reference, record_property):
    shape, names = LAYOUTS[name]
    case = Case(world=shape.world, parallel=shape.parallel, data={"add_tokens": names})
    outcomes = pool.run(loss_and_grads, case.world, tiny(tied=tied), case, rows_with(names))
    embedding = "model.language_model.embed_tokens.weight"
    assert outcomes[0].grads[embedding].shape[0] == max(ROWS, KNOWN + len(names))
    assert outcomes[0].grads[embedding][KNOWN : KNOWN + len(names)].any()
    check_worst(errors(outcomes, reference(tied, names), case), TOLERANCE, record_property)


def test_new_rows_are_the_mean_of_those_of_known_tokens(tiny):
    """Slices have the checkpoint's type, and spare rows behind the new ones stay."""
    for dtype, names in (("float32", MORE), ("bfloat16", SPARE)):
        stored = load_file(Path(tiny(dtype)) / "model.safetensors")
        source = HFCheckpoint(tiny(dtype), names)
        source.read_headers()
        for name in (source.sizes.names.embedding, source.sizes.names.head):
            before, last = stored[name], KNOWN + len(names)
            mean = before[:KNOWN].double().mean(0).to(before.dtype)
            expected = torch.cat([before[:KNOWN], mean.repeat(len(names), 1), before[last:]])
            assert source.tensors[name].shape == expected.shape
            assert torch.equal(source.read(name, ()), expected)
            for span in (
                (0, 100),
                (470, 480),
                (480, len(expected)),
                (513, 515),
                (508, len(expected)),
            ):
                rows = slice(span[0], min(span[1], len(expected)))
                if rows.start < rows.stop:
                    assert torch.equal(source.read(name, [(rows.start, rows.stop)]), expected[rows])
        source.close()


def test_text_that_spells_a_token_becomes_it(tiny):
    names = ("<point>", "</point>", "a b")
    record = {"messages": [say("user", "Where?"), say("assistant", "<point>3</point>a b!")]}
    row = RowMaker(tiny(), add_tokens=names).row(record)
    tokenizer = read_tokenizer(tiny(), names)
    trained = row.ids_S[row.labels_S != IGNORE].tolist()
    assert [i for i in trained if i >= KNOWN] == [KNOWN, KNOWN + 1, KNOWN + 2]
    assert tokenizer.decode(trained, skip_special_tokens=True) == "<point>3</point>a b!"
    plain = RowMaker(tiny()).row(record)
    assert len(plain.ids_S) > len(row.ids_S) and plain.ids_S.max() < KNOWN


def older_files(folder: Path) -> None:
    """Write the files that transformers 4 writes, and that Qwen's checkpoints hold."""
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    kinds = {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in known}
    settings["added_tokens_decoder"] = kinds
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {each["content"]: each["id"] for each in known}
    (folder / "added_tokens.json").write_text(json.dumps(ids))


@pytest.fixture(scope="module")
def points(tiny, tmp_path_factory, pool):
    """Train a run at TP2 that learns to point with new tokens; return its folder and model."""
    folder = tmp_path_factory.mktemp("points")
    model = shutil.copytree(tiny(tied=True), folder / "model")
    older_files(model)
    answers = [f"<more {i % 40}> {i} <more 39>" for i in range(14)]
    lines = [json.dumps({"messages": [say("user", "?"), say("assistant", a)]}) for a in answers]
    (folder / "train.jsonl").write_text("\n".join(lines))
    status, _, err = go_pooled(pool, 2, folder, str(model), "run", *run_words())
    assert status == 0, err
    return folder, model


def run_words(names: tuple[str, ...] = MORE, steps: int = 2) -> tuple[str, ...]:
    named = "data.add_tokens=" + json.dumps(names)
    return (
        "optim.lr=1e-2",
        "checkpoint.every=1",
        named,
        f"train.steps={steps}",
        "parallel.tp=2",
        "parallel.pp=1",
    )


def test_the_export_has_the_tokens_in_transformers(points, pool):
    """Ids, rows, config.json and log-probs are right when only the export's own files are read."""
    folder, base = points
    export = folder / "run" / "export"
    config = json.loads((export / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == KNOWN + len(MORE)
    before = json.loads((base / "config.json").read_text())
    before["text_config"]["vocab_size"] = KNOWN + len(MORE)
    assert config == before
    text = "x<more 0><|im_end|> <more 39>y"
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert len(tokenizer) == KNOWN + len(MORE)
    assert tokenizer(text) == read_tokenizer(base, MORE)(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == (
        "x<more 0> <more 39>y"
    )
    settings = json.loads((export / "tokenizer_config.json").read_text())
    assert settings["added_tokens_decoder"][str(KNOWN + 39)]["content"] == "<more 39>"
    assert json.loads((export / "added_tokens.json").read_text())["<more 39>"] == KNOWN + 39
    # The export is a checkpoint like any other: its log-probs are the same here and in
    # transformers.
    assert read_sizes(export).text.vocab == KNOWN + len(MORE)
    rows = rows_with(MORE)
    outcome = pool.run(loss_and_grads, 1, str(export), layout(), rows)[0]
    with torch.no_grad():
        model = load_reference(str(export))
        for row, actual in zip(rows, outcome.log_probs, strict=True):
            expected = row_log_probs(model, row)
            assert (expected - actual).abs().max() <= TOLERANCE * expected.abs().max()
    mean = load_file(base / "model.safetensors")["model.language_model.embed_tokens.weight"]
    learnt = model.get_input_embeddings().weight[KNOWN:]
    assert not torch.equal(learnt[0], mean[:KNOWN].mean(0)) and len(learnt.unique(dim=0)) > 1


@pytest.mark.full
def test_a_run_goes_on_at_another_layout_and_with_the_same_tokens(points, pool):
    folder, base = points
    run = shutil.copytree(folder / "run", folder / "again")
    status, _, err = go_pooled(
        pool, 2, folder, str(base), run, *run_words(steps=3), "parallel.tp=1", "parallel.pp=2"
    )
    assert status == 0, err
    assert [text for text in events_of(run) if "resumed with" in text] == []
    for names in (MORE[::-1], ()):
        status, _, err = go_pooled(pool, 2, folder, str(base), run, *run_words(names, 4))
        assert status == 2
        assert re.search(r"/step-\d+: data\.add_tokens=\[", err) and "Traceback" not in err


@pytest.mark.full
def test_a_run_and_its_exports_are_scored_alike(points, tmp_path, process_tree):
    folder, _ = points
    export_checkpoint(str(folder / "run"), str(tmp_path / "out"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        one, other = (tmp_path / "out" / name, folder / "run" / "export" / name)
        assert one.read_bytes() == other.read_bytes(), name
    settings = [f"data.eval={folder / 'train.jsonl'}", "eval.generate=true", "data.cache_dir=null"]
    settings += ["data.num_workers=0", "parallel.tp=1", "parallel.pp=1", "eval.max_new_tokens=8"]
    scores = []
    for where in (folder / "run", tmp_path / "out"):
        scores.append(
            json.loads(process_tree.printed(run_eval, [str(where), *settings]).splitlines()[-1])
        )
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-6)
    assert scores[0]["exact_match"] == scores[1]["exact_match"]


def test_limits_and_damaged_files(tiny, tmp_path):
    many = tuple(f"<{i}>" for i in range(MAX_NEW_TOKENS + 1))
    cfg = Config(model=ModelConfig("x"), data=DataConfig(add_tokens=many))
    with raises(ConfigError, key="data.add_tokens", problem_has="10001") as caught:
        check_values(cfg)
    assert "10000" in caught.value.problem
    folder = shutil.copytree(tiny(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 480
    (folder / "config.json").write_text(json.dumps(config))
    with raises(ConfigError, key="data.add_tokens", problem_has="481") as caught:
        HFCheckpoint(folder, ["<p>"])
    assert "vocab_size" in caught.value.problem and "480" in caught.value.problem
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json: cannot be read"):
        find_new_tokens(folder, ["<p>"])
    (folder / "tokenizer.json").unlink()
    with raises(ConfigError, key="data.add_tokens", problem_has="tokenizer.json"):
        find_new_tokens(folder, ["<p>"])
