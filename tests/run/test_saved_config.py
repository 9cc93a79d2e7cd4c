# .venv/bin/python -m pytest tests/run/test_saved_config.py
"""What a run kept of its configuration: one that cannot go on is refused by name, everywhere."""

from pathlib import Path

import pytest

from megatron_vlm.checkpoint.manifest import Manifest, write_manifest
from megatron_vlm.cli import main
from megatron_vlm.config import ConfigFile, load_config, read_saved, to_yaml
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.atomic import write_mark
from megatron_vlm.report.metrics_lines import StartLine, to_json
from megatron_vlm.run.run_folder import changes, saved_config
from tests.support.error_fields import raises
from tests.support.sets import write_set

START = StartLine(
    *("2026-11-20T08:30:00", 0, "cpu", 1, {}, 1, 1, "x", 1, 1, {"megatron_vlm": "0.0.9"})
)
REMEDY = "finish the run with megatron_vlm 0.0.9, which began it on 2026-11-20, or give another"


def keep(folder: Path, text: str) -> Path:
    """Write the configuration of a run or of a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    write_mark(folder, "a", kind="run")
    return folder


@pytest.fixture
def old(tmp_path) -> Path:
    """Return a run of a version that had two more keys, in the default folder."""
    text = to_yaml(load_config(["model.path=x", "data.train=a.jsonl"]))
    text = (
        text.replace("\noptim:\n", "\noptim:\n  vision_weight_decay: 0.5\n") + "packing: {on: 1}\n"
    )
    run = keep(tmp_path / "runs" / "run", text)
    (run / "metrics.jsonl").write_text(to_json(START) + "\nmore")
    write_manifest(keep(run / "checkpoints" / "step-00000003", text), Manifest(()))
    return run


def test_a_configuration_of_another_version_is_no_missing_one(old, tmp_path):
    for folder in (old, old / "checkpoints" / "step-00000003"):
        place = str(folder / "config.yaml")
        for read in (saved_config, read_saved, lambda each: ConfigFile.read(f"{each}/config.yaml")):
            keys = "optim.vision_weight_decay, packing"
            with raises(ConfigError, place=place, key=keys, remedy_has=REMEDY):
                read(folder)
    (old / "metrics.jsonl").write_text("[1]\n")
    with raises(ConfigError, remedy_has="finish the run with the version that began it, or give"):
        read_saved(old)
    wrong = keep(
        tmp_path / "wrong", to_yaml(load_config(["model.path=x"])).replace("lr: ", "lr: a")
    )
    with raises(ConfigError, place=f"{wrong}/config.yaml", key="optim.lr", remedy_has="finish"):
        saved_config(wrong)
    assert saved_config(tmp_path) is None
    (tmp_path / "config.yaml").write_text("of somebody else")
    assert saved_config(tmp_path) is None


def test_commands_that_would_go_on_refuse_it_and_those_that_look_do_not(
    old, tiny, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    model, data = f"model.path={tiny()}", f"data.train={write_set(tmp_path)}"
    (tmp_path / "r.py").write_text("def f(record, answer):\n    return 0\n")
    for words in (
        ["train", model, data],
        ["train", model, data, f"run={old}"],
        ["train", model, data, "--dry-run"],
        ["train", "--config", str(old / "config.yaml"), "run=other"],
        ["rl", model, data, "rl=grpo", "rl.reward=r.py:f"],
        ["serve", model],
        ["eval", str(old), data],
        ["export", str(old), "out"],
    ):
        before = sorted(old.rglob("*"))
        assert main(words) == 2, words
        (line,) = capfd.readouterr().err.splitlines()
        assert "config.yaml: optim.vision_weight_decay, packing" in line and REMEDY in line, words
        assert sorted(old.rglob("*")) == before
    for words in (["plan", model, "--gpus", "2"], ["inspect", model, data], ["report", str(old)]):
        assert main(words) == 0, words


def test_a_default_that_names_what_null_means_is_no_change():
    words = ["model.path=x", "data.train=a.jsonl"]
    learns = [*words, "train.objective=distill", "teacher.path=y", "teacher.top_k=4"]
    for same in (words, learns):
        assert not changes(load_config([*same, "distill.divergence=forward"]), load_config(same))
    rl = [*words, "teacher.path=y", "teacher.top_k=4"]
    assert not changes(load_config([*rl, "distill.divergence=reverse"]), load_config(rl))
    assert changes(load_config([*rl, "distill.divergence=forward"]), load_config(rl)) == {
        "distill.divergence": "distill.divergence='reverse', was 'forward'"
    }
