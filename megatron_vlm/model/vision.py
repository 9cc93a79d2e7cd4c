"""Vision tower: Hugging Face's module, with its images divided among the TP ranks.

Shapes: I images (or videos), P patches of all images, C values of a patch, O the images of all
rows, which may share some, V visual tokens of all rows, F visual features of all images (as many as
V, unless rows share images), f features of this rank's images, H width of the decoder, K DeepStack
features.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vlm.data.even_split import deal
from megatron_vlm.family.spec import VisionSizes


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
    order_F: Tensor  # gathered row of each feature

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
        order_F = torch.cat([spans[image] for image in range(len(grids))])
        return ImageShare(shares[rank], rows, order_F)


@dataclass(frozen=True)
class SharedFeatures:
    """Assignment of features to visual tokens, of which several have the same feature, because rows
    share images."""

    feature_of_V: Tensor
    # Visual tokens that have their feature as its first, as its second and so on. In each part all
    # features are different, so a sum over the parts has a fixed order on any device.
    parts: tuple[Tensor, ...]

    @staticmethod
    def plan(grid_I3: Tensor, merge: int, visual_of_O: Tensor) -> "SharedFeatures":
        """Plan the assignment from the grids on the host."""
        ends_I = (grid_I3.prod(-1) // merge**2).cumsum(0).tolist()
        features = list(torch.arange(ends_I[-1]).tensor_split(ends_I[:-1]))
        parts, times, cursor = defaultdict[int, list[Tensor]](list), Counter[int](), 0
        for image in visual_of_O.tolist():
            parts[times[image]].append(torch.arange(cursor, cursor + len(features[image])))
            times[image] += 1
            cursor += len(features[image])
        feature_of_V = torch.cat([features[image] for image in visual_of_O.tolist()])
        return SharedFeatures(feature_of_V, tuple(map(torch.cat, parts.values())))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "SharedFeatures":
        """Return it with its tensors moved to the device by `move`."""
        return SharedFeatures(move(self.feature_of_V), tuple(map(move, self.parts)))


@dataclass(frozen=True)
class VisualPlan:
    """Images and videos of a pass, without their patches, planned on the host: grids determine
    shapes, and the host would have to wait for the device to read one from there."""

    places_V: Tensor  # places of the visual tokens in the flattened [S * B]: images, then videos
    patches: list[int]  # number of patches of each image
    share: ImageShare | None  # None unless TP ranks share the images
    of_patches: Mapping[str, Tensor]  # inputs of the tower for the patches of all images
    of_host: Mapping[str, Any]  # other inputs for this rank's images, on the host
    starts: Tensor  # int32, their images' and frames' first patches, and the end of the last
    shared: SharedFeatures | None = None  # None unless rows share images

    @staticmethod
    def create(
        sizes: VisionSizes,
        grid_I3: Tensor,
        places_V: Tensor,
        share_group: dist.ProcessGroup | None,
        of_patches: Mapping[str, Tensor],
        visual_of_O: Tensor | None = None,
    ) -> "VisualPlan":
        """Create the plan. Each rank of a `share_group` encodes a share of the images.
        `of_patches` is what the sizes make of all grids, or empty to make it here."""
        share, local_I3 = None, grid_I3
        ranks = 1 if share_group is None else dist.get_world_size(share_group)
        if ranks > 1 and len(grid_I3):
            rank = dist.get_rank(share_group)
            share = ImageShare.plan(grid_I3, sizes.merge, sizes.hidden, rank, ranks)
            local_I3 = grid_I3[share.local]
        if len(grid_I3) and not of_patches:
            of_patches = sizes.patch_inputs(grid_I3)
        lengths = local_I3[:, 1:].prod(-1).repeat_interleave(local_I3[:, 0])
        starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # transformers' tower would read each of these from the device, and the host would wait.
        of_host = {"grid_thw": local_I3, "cu_seqlens": starts, "lengths": lengths.tolist()}
        shared = None
        if visual_of_O is not None:
            shared = SharedFeatures.plan(grid_I3, sizes.merge, visual_of_O)
        patches = grid_I3.prod(-1).tolist()
        return VisualPlan(places_V, patches, share, of_patches, of_host, starts, shared)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "VisualPlan":
        """Return the plan for a pass, with its tensors moved to the device by `move`."""
        share = self.share and replace(self.share, order_F=move(self.share.order_F))
        return replace(
            self,
            places_V=move(self.places_V),
            share=share,
            of_patches={name: move(value) for name, value in self.of_patches.items()},
            starts=move(self.starts),
            shared=self.shared and self.shared.moved(move),
        )


class _GatherFeatures(torch.autograd.Function):
    """Features of all ranks, in image order. Backward takes this rank's rows and nothing else: the
    decoder's gradient of a replicated tensor is already whole on every TP rank, and the tower's
    partial weight gradients are summed over TP once per step (see training/data_parallel.py)."""

    @staticmethod
    def forward(ctx: Any, local_fH: Tensor, share: ImageShare, group: dist.ProcessGroup) -> Tensor:
        widest = max(share.rows_per_rank)
        padded = local_fH.new_zeros(widest, local_fH.shape[1])
        padded[: len(local_fH)] = local_fH
        gathered = local_fH.new_empty(widest * dist.get_world_size(group), local_fH.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        ctx.save_for_backward(share.order_F)
        ctx.span = (dist.get_rank(group) * widest, len(local_fH))
        ctx.num_gathered = len(gathered)
        return gathered[share.order_F]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_FH,) = grads
        (order_F,) = ctx.saved_tensors
        gathered = grad_FH.new_zeros(ctx.num_gathered, grad_FH.shape[1])
        gathered[order_F] = grad_FH
        start, count = ctx.span
        return gathered[start : start + count], None, None


class _TakeFeatures(torch.autograd.Function):
    """Features of the visual tokens of all rows. Backward adds the gradients of a feature in fp32
    and rounds once, since a sum in bf16 would lose more with each row that shares an image."""

    @staticmethod
    def forward(ctx: Any, features_KFH: Tensor, shared: SharedFeatures) -> Tensor:
        ctx.shared, ctx.shape = shared, features_KFH.shape
        return features_KFH.index_select(1, shared.feature_of_V)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_KVH,) = grads
        total_KFH = grad_KVH.new_zeros(ctx.shape, dtype=torch.float32)
        for part in ctx.shared.parts:
            features = ctx.shared.feature_of_V[part]
            total_KFH.index_add_(1, features, grad_KVH.index_select(1, part).float())
        return total_KFH.to(grad_KVH.dtype), None


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
    """Return the features [1 + K, V, H] of all visual tokens from the family's tower: the merged
    ones, then one set for each DeepStack layer. An image that rows share is encoded once."""
    features_KFH = _encode_images(tower, sizes, patches_PC.to(tower.dtype), plan, share_group)
    return features_KFH if plan.shared is None else _TakeFeatures.apply(features_KFH, plan.shared)


def _encode_images(
    tower: Any,
    sizes: VisionSizes,
    patches_PC: Tensor,
    plan: VisualPlan,
    share_group: dist.ProcessGroup,
) -> Tensor:
    """Return the features [1 + K, F, H] of all images. Where the plan shares the images, each rank
    encodes its own."""
    if plan.share is None:
        return _run_tower(tower, patches_PC, plan, lambda of_P: of_P)
    width, levels = sizes.out_hidden, sizes.levels
    if local := plan.share.local:

        def own(of_P: Tensor) -> Tensor:
            by_image = of_P.split(plan.patches)
            return torch.cat([by_image[image] for image in local])

        local_fH = _run_tower(tower, patches_PC, plan, own).permute(1, 0, 2).flatten(1)
    else:
        local_fH = mark_ready_with_zero_grads(patches_PC.new_zeros(0, levels * width), tower)
    features_FH = _GatherFeatures.apply(local_fH, plan.share, share_group)
    return features_FH.unflatten(1, (levels, width)).permute(1, 0, 2)


def _run_tower(
    tower: Any, patches_PC: Tensor, plan: VisualPlan, own: Callable[[Tensor], Tensor]
) -> Tensor:
    of_patches = {name: own(value) for name, value in plan.of_patches.items()}
    out = tower(own(patches_PC), **of_patches, **plan.of_host, starts=plan.starts)
    return torch.stack([out.pooler_output, *getattr(out, "deepstack_features", ())])
