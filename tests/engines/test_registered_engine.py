# .venv/bin/python -m pytest tests/engines/test_registered_engine.py
"""An engine that another package registers by its name alone draws for `rl` and for `serve`."""

import json
from contextlib import ExitStack
from pathlib import Path

from megatron_vlm.config import load_config
from megatron_vlm.engines.engine_kinds import check_engine
from megatron_vlm.errors import ConfigError
from tests.rl.test_rl import run_rank, words
from tests.serve.test_vllm_samples import open_desk
from tests.support.error_fields import raises
from tests.support.sets import write_set
from tests.support.uniform_engine import IDS, registered


def learnt_with_it(folder: Path, model: str) -> int:
    """Run two steps whose answers the engine draws, and return the status."""
    with registered(folder):
        more = ["train.steps=2", "engine.name=uniform", "data.eval=null", "checkpoint.export=false"]
        return run_rank(words(folder, model, "run", *more))[0]


def test_an_engine_draws_by_its_name_alone(pool, tiny, tmp_path):
    write_set(tmp_path, rows=7)
    assert pool.run(learnt_with_it, 1, tmp_path, tiny(deepstack=1, from_scratch=True)) == [0]
    steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    drawn = [line for line in steps if line["kind"] == "rl"]
    assert [line["behind"] for line in drawn] == [0, 0]
    assert all(line["apart"] > 0 for line in drawn)  # not the trainer's own log-probs
    with registered(tmp_path), ExitStack() as opened:
        desk = open_desk(tiny(), tmp_path / "serve", opened, engine="uniform")
        [ids] = desk.answer(desk.ask(desk.sampler(), 1, 2))
    assert len(ids) == 4 and set(ids) <= set(IDS)


def test_unknown_engines_are_refused_with_the_known_ones(tmp_path):
    cfg = load_config(["model.path=x", "engine.name=uniform"])
    with registered(tmp_path):
        check_engine(cfg, "rl")
    with raises(ConfigError, key="engine.name", found="uniform", allowed=("own", "vllm")):
        check_engine(cfg, "rl")
