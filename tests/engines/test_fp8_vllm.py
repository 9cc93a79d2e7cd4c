# make vllm-env, then .venv/bin/python -m pytest tests/engines/test_fp8_vllm.py
"""vLLM loads an export in FP8. It has no product of these blocks on a CPU without AMX, so the test
gives it one; names, fused layers and scales are vLLM's own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vlm.cli import main
from tests.hf.test_fp8_folder import SIDES, spread
from tests.run.test_train import go_pooled
from tests.support.engine import Engine
from tests.support.reference import load_reference
from tests.support.sets import write_set

pytestmark = [pytest.mark.slow, pytest.mark.engine("vllm")]

IDS = [[7 + (11 * n + 5 * m) % 200 for m in range(24)] for n in range(16)]
TOLERANCE = 1e-5  # log-probs in fp32, as in test_vllm.py
# What the format costs a random tiny model: at most 0.334, 0.077 on average.
COST = 0.5


@pytest.fixture(scope="module")
def exports(tiny, pool, tmp_path_factory) -> tuple[Path, Path]:
    """The export of a run, and the same in FP8 from its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    write_set(folder)
    base = tiny(**SIDES, from_scratch=True)
    status, _, said = go_pooled(pool, 2, folder, base, "run", "train.steps=4", "optim.lr=1e-4")
    assert status == 0, said
    assert main(["export", str(folder / "run"), str(folder / "fp8"), "--as", "fp8"]) == 0
    return folder / "run" / "export", folder / "fp8"


def log_probs(engine: Engine) -> torch.Tensor:
    return torch.tensor(engine.ask("score", prompts=[{"ids": ids, "pictures": []} for ids in IDS]))


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor:
    ids = torch.tensor(IDS)
    model = load_reference(str(folder)).eval()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def test_vllm_has_the_values_that_the_codes_stand_for(exports, tmp_path):
    whole, fp8 = exports
    tensors = load_file(fp8 / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].float() * spread(scale)
    plain = shutil.copytree(whole, tmp_path / "plain")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    expected = theirs(plain)
    engine = Engine(str(fp8), blocks_by_hand=True)
    try:
        found = log_probs(engine)
        served = [{"ids": ids, "pictures": []} for ids in IDS]
        answers = engine.ask("generate", prompts=served, max_new_tokens=4)
    finally:
        engine.close()
    assert (found - expected).abs().max() < TOLERANCE
    model = load_reference(str(plain)).eval()
    for ids, each in zip(IDS, answers, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *each["ids"]]])).logits[0, -5:-1].float()
        taken = logits.gather(-1, torch.tensor(each["ids"])[:, None])[:, 0]
        assert (logits.max(-1).values - taken).max() < TOLERANCE
    cost = (expected - theirs(whole)).abs()
    print(json.dumps({"worst": float(cost.max()), "mean": float(cost.mean())}))
    assert 1e-3 < cost.max() < COST
