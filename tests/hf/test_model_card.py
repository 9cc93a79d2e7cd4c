# .venv/bin/python -m pytest tests/hf/test_model_card.py
"""Model cards of exports are true, the same from each command, and plain text for any names."""

import json
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from megatron_vlm import __version__
from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.config.data_sources import SourceSpec
from megatron_vlm.config.schema import Config, DataConfig, ModelConfig, OptimConfig
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.model_card import TrainingSummary, model_card, versions
from tests.run.test_run_folder import Folder
from tests.run.test_train import steps_of
from tests.support.sets import write_set

SOURCES: dict[str, HFCheckpoint] = {}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def head_of(card: str) -> dict:
    before, head, _ = card.split("---\n", 2)
    assert before == ""
    return yaml.safe_load(head)


def done(*paths: str, base: str = f"Qwen/Tiny@{COMMIT}", **more) -> TrainingSummary:
    specs = tuple(SourceSpec(path) for path in paths)
    cfg = Config(model=ModelConfig(path=base), data=DataConfig(train=specs))
    return TrainingSummary(cfg, 1000, **more)


def test_what_a_card_says(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\nbase_model: x\n---\n# Q\n"
    )
    scores = {"held": {"loss": 0.25, "token_accuracy": float("nan"), "samples": 20}}
    training = done(
        "/home/me/chats.jsonl", "hub:some/chats", tokens=12345, scores=scores, scored_step=900
    )
    optim = OptimConfig(name="muon", lr=2e-5, muon_lr=2e-4, states="bf16", warmup_ratio=0.03)
    model = replace(training.cfg.model, freeze_vision=True)
    new = ("<point>", "<a`b>", *(f"<{i}>" for i in range(40)))
    data = replace(training.cfg.data, add_tokens=new)
    training = replace(training, cfg=replace(training.cfg, optim=optim, model=model, data=data))
    card = model_card(HFCheckpoint(tmp_path / "base"), training)
    assert head_of(card) == {
        "base_model": "Qwen/Tiny",
        "base_model_relation": "finetune",
        "datasets": ["some/chats"],
        "library_name": "transformers",
        "license": "other",
        "license_link": "LICENSE",
        "license_name": "qwen",
        "pipeline_tag": "image-text-to-text",
        "tags": ["megatron_vlm"],
    }
    for part in (
        f"Fine-tuned from `Qwen/Tiny` at commit `{COMMIT}` with megatron_vlm, for 1,000 steps and "
        "12,345 trained tokens.",
        "- `chats.jsonl`\n- `some/chats`\n",
        "after 900 steps:\n\n- `held`: loss 0.25, samples 20\n",
        "- Muon for matrices (momentum 0.95, 5 Newton-Schulz steps, match_rms_adamw) and AdamW for "
        "the rest, with bf16 moments: learning rate 2e-05, Muon's 0.0002, cosine, warm-up in the "
        "first 3% of them",
        "- added to the vocabulary: `<point>`, `` <a`b> ``, `<0>`, ",
        ", `<37>` and 2 more\n- frozen: vision tower\n",
        "- transformers 5.",
    ):
        assert part in card, part
    assert "/home" not in card and str(tmp_path) not in card


@pytest.mark.parametrize(
    "text",
    [None, "", "no yaml", "---\n- a\n---\n", "---\n{\n---\n", "---\nlicense: [a]\n---\n",
     "---\nlicense: " + "a" * 999 + "\n---\n", "---\nlicense: !!python/object:os.system x\n---\n",
     "---\nlicense: 2026-11-22\n---\n"],
)  # fmt: skip
def test_a_base_without_a_licence_that_can_be_read(text, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "base")
    if text is not None:
        (tmp_path / "base" / "README.md").write_text(text)
    head = head_of(model_card(HFCheckpoint(tmp_path / "base")))
    assert head.keys() == {"library_name", "pipeline_tag", "tags"}


def test_a_licence_is_one_line(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "base")
    text = '---\nlicense: "a\\n---\\n# b"\n---\n'
    (tmp_path / "base" / "README.md").write_text(text)
    assert head_of(model_card(HFCheckpoint(tmp_path / "base")))["license"] == "a --- # b"


def test_a_link_to_a_card_elsewhere_is_not_read(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "base")
    (tmp_path / "secret").write_text("---\nlicense: secret\n---\n")
    (tmp_path / "base" / "README.md").symlink_to(tmp_path / "secret")
    assert "secret" not in model_card(HFCheckpoint(tmp_path / "base"))


@settings(max_examples=300)
@example("a`b\n---\n# <script>", "``x``]( http://evil \x1b[2J|")
@example("\nlicense: mit\n---\n- [x](y)", " ")
@given(st.text(max_size=30), st.text(max_size=30))
@pytest.mark.full
def test_names_stay_text(tiny, data, name):
    """No name becomes a key, a heading, a link or HTML when YAML and Markdown are parsed."""
    scores = {name: {"loss": 1.0}}
    training = done(f"/a/{data}", f"hub:{data}", base=f"/b/{name}", scores=scores, scored_step=1)
    source = SOURCES.get("tiny") or SOURCES.setdefault("tiny", HFCheckpoint(tiny()))
    card = model_card(source, training)
    head = head_of(card)
    assert head.keys() - {"datasets"} == {"library_name", "pipeline_tag", "tags"}
    assert head.get("datasets", [data]) == [data]
    body = card.split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    kinds = {token.type for token in tokens}
    kinds |= {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {
        "heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "text",
        "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "code_inline",
    }  # fmt: skip
    titles = [token.tag for token in tokens if token.type == "heading_open"]
    assert titles == ["h1", "h2", "h2", "h2", "h2"]


@pytest.mark.full
def test_training_and_the_command_write_the_same_card(pool, tiny, tmp_path):
    """Scores and counts come from the checkpoint, also when it lies in another folder."""
    held = tmp_path / "held.jsonl"
    folder = Folder(tmp_path, pool, tiny())
    held.write_text("".join(Path(write_set(tmp_path)).read_text().splitlines(True)[::4]))
    folder.train(2, "checkpoint.every=1", data__eval=held, eval__every=1)
    folder.check_export(2)
    card = (folder.run / "export" / "README.md").read_text()
    tokens = sum(
        round(line["trained_tokens_per_s"] * line["seconds"]) for line in steps_of(folder.run)
    )
    assert f"for 2 steps and {tokens:,} trained tokens." in card
    last = [line for line in lines_of(folder) if line["kind"] == "eval"][-1]
    assert f"- `held`: loss {last['loss']:.4g}, token accuracy " in card
    assert "after 2 steps" in card and f"- {chr(96)}train.jsonl{chr(96)}\n" in card
    shutil.copytree(folder.step(1), tmp_path / "alone")
    export_checkpoint(str(tmp_path / "alone"), str(tmp_path / "first"))
    assert "after 1 steps" in (tmp_path / "first" / "README.md").read_text()
    folder.train(3, "checkpoint.every=1", data__eval=held)
    folder.check_export(3)


def lines_of(folder: Folder) -> list[dict]:
    return [json.loads(line) for line in (folder.run / "metrics.jsonl").read_text().splitlines()]


def test_versions_where_only_the_checkout_is(tmp_path, monkeypatch):
    """The path has no packages but those that are linked here."""
    before = versions()
    for name in ("torch", "megatron-core", "transformers"):
        site = Path(str(metadata.distribution(name).locate_file("")))
        folder = next(site.glob(f"{name.replace('-', '_')}-*.dist-info"))
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("megatron_vlm")
    assert versions() == before and before["megatron_vlm"] == __version__
