# .venv/bin/python -m pytest tests/test_vision.py
"""Sharing images over TP ranks, and the patch embedding as a GEMM."""

import torch

from megatron_vlm.data.deal import deal
from megatron_vlm.family.qwen3_vl import LinearPatchEmbed
from megatron_vlm.model.vision import ImageShare, image_cost


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
    assert (first.mine, second.mine) == ([1], [2, 0])
    assert first.rows_per_rank == [4, 3]
    # Gathered: rank 0's four rows, then rank 1's three and one of padding.
    assert first.order_V.tolist() == [6, 0, 1, 2, 3, 4, 5]


def test_patch_embedding_equals_the_convolution():
    conv = torch.nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches = torch.randn(5, 3 * 2 * 4 * 4)
    expected = conv(patches.view(-1, 3, 2, 4, 4)).flatten(1)
    embed = LinearPatchEmbed(conv)
    torch.testing.assert_close(embed(patches), expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in embed.named_parameters()] == ["proj.weight", "proj.bias"]
