"""Vision tower: Hugging Face's module, with its images divided among the TP ranks.

Shapes: I images (or videos), P patches of all images, C values of a patch, V visual features of all
images, v features of this rank's images, H width of the decoder, K DeepStack features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vlm.data.even_split import deal
from megatron_vlm.family.spec import TowerInputs, VisionSizes


def image_cost(grid_thw: Sequence[int], width: int) -> float:
    """Return the relative work of one image: per patch the linear layers (~12 width^2) and
    attention over the patches of its frame (~2 patches x width)."""
    t, h, w = grid_thw
    return t * h * w * (6 * width + h * w)


@dataclass(frozen=True)
class ImageShare:
    """Assignment of images to ranks, and the order that restores the gathered features."""

    local: list[int]
    rows_per_rank: list[int]
    order_V: Tensor  # gathered row of each feature

    @staticmethod
    def plan(grid_I3: Tensor, merge: int, width: int, rank: int, ranks: int) -> "ImageShare":
        """Plan the assignment from the grids on the host."""
        grids = grid_I3.tolist()
        shares = deal([image_cost(grid, width) for grid in grids], ranks)
        sizes = [t * h * w // merge**2 for t, h, w in grids]
        rows = [sum(sizes[image] for image in share) for share in shares]
        widest = max(rows)
        spans: dict[int, Tensor] = {}
        for owner, share in enumerate(shares):
            cursor = owner * widest  # all_gather moves equal blocks, each padded to the widest
            for image in share:
                spans[image] = torch.arange(cursor, cursor + sizes[image])
                cursor += sizes[image]
        order_V = torch.cat([spans[image] for image in range(len(grids))])
        return ImageShare(shares[rank], rows, order_V)


@dataclass(frozen=True)
class VisualPlan:
    """Images and videos of a pass, without their patches, planned on the host: grids determine
    shapes, and the host would have to wait for the device to read one from there."""

    places_V: Tensor  # places of the visual tokens in the flattened [S * B]: images, then videos
    patches: list[int]  # number of patches of each image
    share: ImageShare | None  # None unless TP ranks share the images
    of_host: TowerInputs  # inputs of the tower for this rank's images, on the host
    of_device: TowerInputs  # inputs of the tower on its device

    @staticmethod
    def create(
        tower: nn.Module,
        sizes: VisionSizes,
        grid_I3: Tensor,
        places_V: Tensor,
        share_group: dist.ProcessGroup | None,
    ) -> "VisualPlan":
        """Create the plan. Each rank of a `share_group` encodes a share of the images."""
        share, local_I3 = None, grid_I3
        ranks = 1 if share_group is None else dist.get_world_size(share_group)
        if ranks > 1 and len(grid_I3):
            rank = dist.get_rank(share_group)
            share = ImageShare.plan(grid_I3, sizes.merge, sizes.hidden, rank, ranks)
            local_I3 = grid_I3[share.local]
        inputs = sizes.inputs(tower, local_I3) if len(local_I3) else ({}, {})
        return VisualPlan(places_V, grid_I3.prod(-1).tolist(), share, *inputs)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "VisualPlan":
        """Return the plan for a pass, with its tensors moved to the device by `move`."""
        share = self.share and replace(self.share, order_V=move(self.share.order_V))
        of_device = {name: move(value) for name, value in self.of_device.items()}
        return replace(self, places_V=move(self.places_V), share=share, of_device=of_device)


class _GatherFeatures(torch.autograd.Function):
    """Features of all ranks, in image order. Backward takes this rank's rows and nothing else: the
    decoder's gradient of a replicated tensor is already whole on every TP rank, and the tower's
    partial weight gradients are summed over TP once per step (see training/optimizer.py)."""

    @staticmethod
    def forward(ctx: Any, local_vH: Tensor, share: ImageShare, group: dist.ProcessGroup) -> Tensor:
        widest = max(share.rows_per_rank)
        padded = local_vH.new_zeros(widest, local_vH.shape[1])
        padded[: len(local_vH)] = local_vH
        gathered = local_vH.new_empty(widest * dist.get_world_size(group), local_vH.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        ctx.save_for_backward(share.order_V)
        ctx.span = (dist.get_rank(group) * widest, len(local_vH))
        ctx.num_gathered = len(gathered)
        return gathered[share.order_V]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_VH,) = grads
        (order_V,) = ctx.saved_tensors
        gathered = grad_VH.new_zeros(ctx.num_gathered, grad_VH.shape[1])
        gathered[order_V] = grad_VH
        start, count = ctx.span
        return gathered[start : start + count], None, None


class _Touch(torch.autograd.Function):
    """Identity on a tensor, with a zero gradient for every given parameter.

    A micro-batch without images must still mark the tower's parameters as ready. Otherwise an
    overlapped gradient reduction never starts, and the data parallel ranks wait for each other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.params = params
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # The zero is expanded: autograd materialises each gradient only when its turn comes.
        return (grads[0], *(param.new_zeros(()).expand_as(param) for param in ctx.params))


def mark_ready_with_zero_grads(x: Tensor, tower: nn.Module) -> Tensor:
    """Return x with the tower's trainable parameters in its graph."""
    params = [p for p in tower.parameters() if p.requires_grad]
    if not params or not torch.is_grad_enabled():
        return x
    return _Touch.apply(x, *params)


def encode(
    tower: Any,
    sizes: VisionSizes,
    patches_PC: Tensor,
    plan: VisualPlan,
    share_group: dist.ProcessGroup,
) -> Tensor:
    """Return the features [1 + K, V, H] of all images from the family's tower: the merged ones,
    then one set for each DeepStack layer. Where the plan shares the images, each rank encodes its
    own."""
    patches_PC = patches_PC.to(tower.dtype)
    inputs = plan.of_host | plan.of_device
    if plan.share is None:
        return _run_tower(tower, patches_PC, inputs)
    width, levels = sizes.out_hidden, sizes.levels
    if plan.share.local:
        by_image = patches_PC.split(plan.patches)
        local_PC = torch.cat([by_image[image] for image in plan.share.local])
        local_vH = _run_tower(tower, local_PC, inputs).permute(1, 0, 2).flatten(1)
    else:
        local_vH = mark_ready_with_zero_grads(patches_PC.new_zeros(0, levels * width), tower)
    features_VH = _GatherFeatures.apply(local_vH, plan.share, share_group)
    return features_VH.unflatten(1, (levels, width)).permute(1, 0, 2)


def _run_tower(tower: Any, patches_PC: Tensor, inputs: TowerInputs) -> Tensor:
    out = tower(patches_PC, **inputs)
    return torch.stack([out.pooler_output, *getattr(out, "deepstack_features", ())])
