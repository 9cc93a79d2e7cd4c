# .venv/bin/python -m pytest tests/package/test_slow_tests.py
"""The choice of slow tests: a change picks the tests that it may break, the nearest first."""

import pytest

from tests.support import slow_tests
from tests.support.random_runs import ROOT
from tests.support.slow_tests import PARTS, choose, due

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize(
    ("changed", "picked", "spared"),
    [
        ("megatron_vlm/serve/journal/journal.py", "serve/test_faults.py", "model/test_moe.py"),
        ("megatron_vlm/hf/write_export.py", "engines/test_vllm.py", "distributed/test_network.py"),
        ("megatron_vlm/report/gone.py", "report/test_rl_report.py", "distributed/test_network.py"),
        ("configs/model/qwen3_vl_2b.yaml", "run/test_elastic.py", "distributed/test_network.py"),
        ("scripts/train_nodes.sh", "run/test_elastic.py", "serve/test_faults.py"),
        # Its environment has a python of its own, so no import leads to this program.
        (
            "tests/support/tinker_client/front_client.py",
            "serve/test_tinker_client.py",
            "run/test_elastic.py",
        ),
        ("tests/support/vllm_engine/serve.py", "engines/test_vllm.py", "run/test_elastic.py"),
        ("tests/lora/test_lora.py", "lora/test_lora.py", "serve/test_faults.py"),
        # A program of the client's environment names this file, and is no module of the graph.
        ("tests/serve/test_tinker_client.py", "serve/test_tinker_client.py", None),
        ("constraints.txt", "package/test_docker.py", None),
        ("README.md", None, "engines/test_vllm.py"),
    ],
)
def test_a_change_picks_what_it_may_break(changed, picked, spared):
    files = due(FILES, [changed])
    assert picked is None or f"tests/{picked}" in files
    assert f"tests/{spared}" not in files


def test_the_nearest_files_play_first_and_the_others_stay_due(monkeypatch, capsys):
    """Files are due by the commit at which they passed, and a part of all files plays anyway."""
    near, far = "tests/serve/test_faults.py", "tests/rl/test_engine.py"
    record = {file: {"commit": "new", "seconds": 50.0} for file in FILES}
    record[near]["commit"] = record[far]["commit"] = "old"
    journal = ["megatron_vlm/serve/journal/journal.py", "megatron_vlm/errors.py"]
    changes = {"old": journal, "new": []}
    monkeypatch.setattr(slow_tests, "changed_since", changes.__getitem__)
    part = next(part for part in range(PARTS) if not {near, far} & {*FILES[part::PARTS]})
    monkeypatch.setattr(slow_tests, "SECONDS", 60.0)
    assert choose(FILES, record, part).keys() == {*FILES[part::PARTS], near}
    assert f"stays due: {far}" in capsys.readouterr().out
    monkeypatch.setattr(slow_tests, "SECONDS", 100.0)
    assert choose(FILES, record, part).keys() == {*FILES[part::PARTS], near, far}


def test_every_part_plays_and_a_file_without_a_record_is_due(monkeypatch):
    monkeypatch.setattr(slow_tests, "changed_since", lambda commit: [])
    record = {file: {"commit": "new", "seconds": 1.0} for file in FILES}
    parts = [set(choose(FILES, record, part)) for part in range(PARTS)]
    assert sum(map(len, parts)) == len(FILES) and set.union(*parts) == set(FILES)
    del record[FILES[1]]
    assert FILES[1] in choose(FILES, record, 0)


def test_a_choice_that_fails_plays_all(monkeypatch, capfd):
    """A commit that this clone does not have, such as in a shallow one."""
    played = []
    record = {file: {"commit": "0" * 40, "seconds": 1.0} for file in FILES}
    monkeypatch.setattr(slow_tests, "read_record", lambda: {"slow": record})
    monkeypatch.setattr(slow_tests.sys, "argv", ["slow_tests"])
    monkeypatch.setattr(slow_tests, "play", played.append)
    monkeypatch.setattr(slow_tests, "slow_files", lambda: FILES)
    slow_tests.main()
    assert played == [FILES]
    assert "because the choice failed" in capfd.readouterr().out
