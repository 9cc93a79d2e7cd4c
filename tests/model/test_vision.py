# .venv/bin/python -m pytest tests/model/test_vision.py
"""Sharing images over TP ranks, the patch embedding as a GEMM, and attention in few calls."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.data.even_split import deal
from megatron_vlm.family.qwen.model import LinearPatchEmbed
from megatron_vlm.family.tower_attention import attend_at_once, attend_by_runs
from megatron_vlm.model.vision import ImageShare, SharedFeatures, _TakeFeatures, image_cost
from tests.support import varlen

pytestmark = pytest.mark.newest  # it depends on the versions


def test_the_costliest_image_goes_first():
    assert deal([1, 9, 2, 8], 2) == [[1, 0], [3, 2]]
    assert deal([5], 2) == [[0], []]
    assert deal([1, 1, 1, 1], 4) == [[0], [1], [2], [3]]


def test_shares_are_balanced_on_a_heavy_tail():
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(2, 40, (47, 2), generator=generator) * 2
    costs = [image_cost((1, h, w), 1024) for h, w in sides.tolist()]
    loads = [sum(costs[image] for image in share) for share in deal(costs, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.05


def test_features_return_to_the_order_of_the_images():
    grid = torch.tensor([[1, 2, 2], [1, 4, 4], [1, 2, 4]])  # 1, 4, 2 features
    first = ImageShare.plan(grid, merge=2, width=32, rank=0, ranks=2)
    second = ImageShare.plan(grid, merge=2, width=32, rank=1, ranks=2)
    assert (first.local, second.local) == ([1], [2, 0])
    assert first.rows_per_rank == [4, 3]
    # Gathered: rank 0's four rows, then rank 1's three and one of padding.
    assert first.order_F.tolist() == [6, 0, 1, 2, 3, 4, 5]


def test_gradients_of_a_shared_image_are_added_in_fp32_and_rounded_once():
    """Of three images, the second is in eight rows and the third in one; the rows alternate."""
    grid = torch.tensor([[1, 2, 2], [1, 4, 4], [1, 2, 4]])  # 1, 4, 2 features
    visual = torch.tensor([1, 0, 1, 1, 2, *[1] * 4, 0, 1], dtype=torch.int32)
    shared = SharedFeatures.plan(grid, merge=2, visual_of_O=visual)
    spans = [[0], [1, 2, 3, 4], [5, 6]]
    expected = torch.tensor([feature for image in visual.tolist() for feature in spans[image]])
    assert shared.feature_of_V.equal(expected) and len(shared.parts) == 8
    assert torch.cat(shared.parts).sort().values.equal(torch.arange(len(expected)))
    features = torch.randn(3, 7, 16, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.randn(3, len(expected), 16, dtype=torch.bfloat16)
    taken = _TakeFeatures.apply(features, shared)
    assert taken.equal(features[:, expected])
    taken.backward(grads)
    exact = torch.zeros(3, 7, 16, dtype=torch.float64).index_add_(1, expected, grads.double())
    assert features.grad.equal(exact.to(torch.bfloat16))


def test_patch_embedding_equals_the_convolution():
    conv = torch.nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches = torch.randn(5, 3 * 2 * 4 * 4)
    expected = conv(patches.view(-1, 3, 2, 4, 4)).flatten(1)
    embed = LinearPatchEmbed(conv)
    torch.testing.assert_close(embed(patches), expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in embed.named_parameters()] == ["proj.weight", "proj.bias"]


# Frames of one video, two images alike that are not neighbours, one image of a single patch.
LENGTHS = [12, 12, 12, 20, 1, 20]
STARTS = torch.tensor([0, 12, 24, 36, 56, 57, 77], dtype=torch.int32)


def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers has it: [N, P, D]."""
    parts = [x.transpose(0, 1).split(LENGTHS, 1) for x in (query, key, value)]
    return torch.cat(
        [F.scaled_dot_product_attention(*part) for part in zip(*parts, strict=True)], 1
    )


@pytest.mark.parametrize("way", ["by runs", "at once"])
def test_patches_attend_within_their_image(way):
    varlen.register()
    given = [torch.randn(sum(LENGTHS), 3, 8, requires_grad=True) for _ in range(3)]
    weights = torch.randn(sum(LENGTHS), 3, 8)
    expected = one_by_one(*given).transpose(0, 1)
    wanted = torch.autograd.grad((expected * weights).sum(), given)
    found = (
        attend_by_runs(*given, LENGTHS)
        if way == "by runs"
        else attend_at_once(*given, LENGTHS, STARTS)
    )
    grads = torch.autograd.grad((found * weights).sum(), given)
    for mine, theirs in zip([found, *grads], [expected, *wanted], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_images_of_one_size_in_a_row_take_one_call():
    given = [torch.randn(sum(LENGTHS), 3, 8) for _ in range(3)]
    with mock.patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as calls:
        attend_by_runs(*given, LENGTHS)
    assert [tuple(call.args[0].shape) for call in calls.call_args_list] == [
        (3, 3, 12, 8),
        (1, 3, 20, 8),
        (1, 3, 1, 8),
        (1, 3, 20, 8),
    ]
