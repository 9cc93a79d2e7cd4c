# make test-nccl, or: .venv/bin/python -m pytest -m slow tests/nccl/test_suites.py
"""The quick tests of ranks once more, under the rules of NCCL. A remark of the referee fails the
test during which it comes."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.random_runs import ROOT

SUITES = (
    "tests/model/test_parity.py",
    "tests/model/test_moe.py",
    "tests/model/test_qwen3_5.py",
    "tests/model/test_gemma4.py",
    "tests/training/test_steps.py",
    "tests/training/test_moe_train.py",
    "tests/training/test_muon.py",
    "tests/training/test_offload_activations.py",
    "tests/training/test_preferences.py",
    "tests/training/test_distill.py",
    "tests/training/test_retrieval.py",
    "tests/training/test_sampler.py",
    "tests/training/test_multi_model.py",
    "tests/lora/test_lora.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/run/test_train.py",
    "tests/run/test_evaluation.py",
    "tests/rl/test_rl.py",
)
QUICK = "not slow and not full"  # the cases of `make test`


@pytest.mark.slow
@pytest.mark.rotate(1)
@pytest.mark.parametrize("suite", SUITES)
def test_ranks_break_no_rule(suite):
    command = [sys.executable, "-m", "pytest", "-m", QUICK, "--timeout", "300", suite]
    variables = os.environ | {"NCCL_RULES": "no-objects"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    judged = re.search(r"^referee: (\d+) jobs", done.stdout, re.MULTILINE)
    assert judged and int(judged[1]), done.stdout
