# .venv/bin/python -m pytest tests/planner/test_flops.py
"""Operations of a forward are those that torch counts."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_vlm.data.batches.balance import WorkModel
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.family import read_sizes
from megatron_vlm.family.decoder_layers import DELTA_CHUNK, Attention, Experts, GatedDeltaNet
from megatron_vlm.family.spec import TextSizes
from megatron_vlm.planner.flops import StepCost, micro_work
from megatron_vlm.planner.layout import ModelLayout
from megatron_vlm.planner.row_sizes import BatchSizes
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import RowSpec, make_rows
from tests.support.runs import call

TINY = {"family": "qwen3_5", "layers": 5, "head_dim": 64}
TOKENS = 3 * DELTA_CHUNK  # whole chunks: the rule pads the last one


def operations(worker: MegatronWorker) -> tuple[dict[str, int], int, int]:
    """Return the operations of a row's forward by kind, its tokens, and the supervised ones."""
    [row] = rows = make_rows((RowSpec(TOKENS),))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        worker.forward(rows)
    counts = counter.get_flop_counts()["Global"].items()
    by_kind = {str(kind).removeprefix("aten."): number for kind, number in counts}
    return by_kind, len(row.ids_S), int((row.labels_S[1:] != IGNORE).sum())


@pytest.mark.parametrize("experts", [0, 8])
def test_a_forward_of_gated_delta_nets_is_what_torch_counts(experts, pool, tiny):
    """The planner leaves out the weighted sum of the experts' outputs, which is small."""
    path = tiny(**TINY, experts=experts)
    [(by_kind, tokens, supervised)] = pool.run(call, 1, path, layout(), operations)
    sizes = read_sizes(path)
    work, text = WorkModel.from_sizes(sizes), sizes.text
    assert tokens == TOKENS
    expected = tokens * (work.per_token - uncounted(text) + weighted(text))
    expected += work.per_supervised * supervised
    # Torch's attention by matrix products computes every pair of tokens, and masks half of them.
    attentions = [x.mixer for x in text.layers if isinstance(x.mixer, Attention)]
    expected += sum(4 * each.query for each in attentions) * tokens**2
    assert sum(by_kind.values()) == expected
    assert by_kind["convolution"] == tokens * convolved(text)


def test_a_backward_computes_the_rule_again(tiny):
    """A frozen linear layer has one product in the backward, for the gradient of its input. The
    rule has no weights: it is computed again, and the gradients of both factors take twice as
    much."""
    path = tiny(**TINY)
    sizes, batch = read_sizes(path), BatchSizes(2, 100, 50, 0, 0)
    for frozen, products in ((True, 1), (False, 2)):
        cfg = layout(freeze_language=frozen).config(path)
        costs = micro_work(ModelLayout(cfg, sizes, ParallelDims(1, 1, 1, 1, (5,)), 4), batch).layers
        assert costs[-1].forward.matmul < costs[sizes.text.kind_of[-1]].forward.matmul
        for layer, cost in zip((*sizes.text.kinds, sizes.text.layers[-1]), costs, strict=True):
            rule = 200 * layer.mixer.flops_per_token
            assert (rule > 0) == isinstance(layer.mixer, GatedDeltaNet)
            linear = cost.forward.matmul - rule
            assert cost.backward.matmul == products * linear + 3 * rule


def step_operations(worker: MegatronWorker) -> int:
    """Return the operations of a row's forward and backward."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        worker.forward_backward(make_rows((RowSpec(TOKENS),)))
    return counter.get_total_flops()


def test_an_mtp_head_adds_what_torch_counts(pool, tiny):
    path, [row] = tiny(**TINY, mtp_layers=1), make_rows((RowSpec(TOKENS),))
    batch = BatchSizes(1, TOKENS, int((row.labels_S[1:] != IGNORE).sum()), 0, 0)
    counted, planned, work = [], [], []
    for mtp in ("train", "carry"):
        case, sizes = layout(mtp=mtp), read_sizes(path, (), "mtp" if mtp == "train" else None)
        counted += pool.run(call, 1, path, case, step_operations)
        of = ModelLayout(case.config(path), sizes, ParallelDims(1, 1, 1, 1, (5,)), 4)
        planned.append(micro_work(of, batch).last)
        work.append(WorkModel.from_sizes(sizes).row((TOKENS,), batch.supervised, 0, 0))
    added = [train - carry for train, carry in zip(*map(_matmul, planned), strict=True)]
    text = read_sizes(path).text
    pairs = 3 * 4 * text.attentions[0].query * TOKENS**2
    logits = 2 * text.hidden * text.vocab * batch.supervised
    in_place = logits  # torch does not count it
    assert counted[0] - counted[1] == sum(added) + pairs - in_place
    # MFU and the balance of ranks count the logits of a forward once.
    own_pairs = text.attentions[0].pair_flops((TOKENS,), 0)
    assert work[0] - work[1] == added[0] - 3 * logits + own_pairs


def _matmul(cost: StepCost) -> tuple[float, float]:
    return cost.forward.matmul, cost.backward.matmul


def uncounted(text: TextSizes) -> int:
    """Return the operations per token that torch does not count: the inversion of the rule's
    triangular equations, and the products that are added to a state in place."""
    nets = [layer.mixer for layer in text.layers if isinstance(layer.mixer, GatedDeltaNet)]
    return sum(net.value_heads * (DELTA_CHUNK**2 + 2 * net.key_dim * net.value_dim) for net in nets)


def convolved(text: TextSizes) -> int:
    """Return the operations per token of all causal convolutions."""
    nets = [layer.mixer for layer in text.layers if isinstance(layer.mixer, GatedDeltaNet)]
    return sum(2 * net.kernel * (2 * net.keys + net.values) for net in nets)


def weighted(text: TextSizes) -> int:
    """Return the operations per token that sum the outputs of its experts."""
    experts = [layer.ffn for layer in text.layers if isinstance(layer.ffn, Experts)]
    return sum(2 * each.top_k * text.hidden for each in experts)
