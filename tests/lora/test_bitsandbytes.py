# .venv/bin/python -m pytest tests/lora/test_bitsandbytes.py -m slow
"""lora.base=nf4 equals PEFT on the same weights in bitsandbytes' own layers, from plain checkpoints
and from those that it has stored."""

from dataclasses import replace

import pytest

from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.lora.targets import entries_in_blocks
from megatron_vlm.training.worker import MegatronWorker
from tests.lora.test_lora import ALL, BLOCKS, DELTA_NET_IN_BLOCKS, OF_LARGE_LOGITS
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.comparison import check_worst, relative_errors
from tests.support.peft_reference import peft_model, save
from tests.support.reference import inputs_of
from tests.support.runs import loss_and_grads
from tests.support.trl_environment import run_on_tensors

# The error is relative, as in test_lora.py. Measured worst cases: 2.5e-6, and 5.9e-6 for Gemma 4.
TOLERANCE = 5e-6
GEMMA4_IN_BLOCKS = dict(family="gemma4", head_dim=32, intermediate=128)
NF4 = replace(ALL, base="nf4")

pytestmark = [
    pytest.mark.slow,  # bitsandbytes and transformers are imported in a process of their own
    pytest.mark.engine("trl"),
]


def layers_in_blocks(path: str, case) -> list[str]:
    worker = MegatronWorker(case.config(path), training=False)
    entries = entries_in_blocks(worker.cfg.lora, worker.table, worker.source)
    return [name.removesuffix(".weight") for entry in entries for name in entry.names]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "sizes", [BLOCKS, DELTA_NET_IN_BLOCKS, GEMMA4_IN_BLOCKS], ids=["qwen3_vl", "qwen3_5", "gemma4"]
)
def test_equals_peft_on_bitsandbytes(sizes, nested, pool, tiny, tmp_path, record_property):
    family = sizes.get("family")
    path = tiny(**sizes)
    rows = make_rows(MIXED, family=family if family == "gemma4" else "qwen3_vl")
    model = peft_model(path, NF4)
    adapter = save(model, tmp_path / "adapter")
    inputs = [inputs_of(model, row) | {"labels": row.labels_S} for row in rows]
    case = {"model": path, "adapter": adapter, "nested": nested, "rows": inputs}
    theirs = run_on_tensors("bitsandbytes_peft.py", case, tmp_path)

    stored = HFCheckpoint(tmp_path / "stored")
    stored.read_headers()
    layers = {name.removesuffix(".weight") for name in stored.in_blocks}
    assert layers == set(theirs["linears"])
    # The scales of a nested checkpoint are other ones than those of the plain checkpoint.
    for folder in (str(tmp_path / "stored"), *([] if nested else [path])):
        for each in (layout(), layout(tp=2, pp=2)):
            each = replace(each, lora=dict(NF4.ours, path=adapter))
            assert set(pool.run(layers_in_blocks, each.world, folder, each)[0]) == layers
            ours = pool.run(loss_and_grads, each.world, folder, each, rows)[0]
            errors = {"loss": abs(ours.loss / theirs["loss"] - 1)}
            pairs = zip(ours.log_probs, theirs["log_probs"], strict=True)
            errors["log-probs"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            assert ours.grads.keys() == theirs["grads"].keys()
            errors |= relative_errors(ours.grads, theirs["grads"])
            tolerance = OF_LARGE_LOGITS if family == "gemma4" else TOLERANCE
            check_worst(errors, tolerance, record_property)
