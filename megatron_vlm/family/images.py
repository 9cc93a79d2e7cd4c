"""Pictures and videos of a model family: what its checkpoints make of them is in an ImageReader and
a VideoReader, which are dataclasses of plain settings. Everything else knows grids of patches, and
that a square of patches becomes a token.

Patches are bytes, a quarter to an eighth of the size of floats. Those that become one token are
adjacent; within a patch, the values of a colour are.

Shapes: P patches, C values of a patch (3 colours x frames x side x side)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from megatron_vlm.errors import DataError
from megatron_vlm.family.video_plan import Grid, VideoInfo, VideoOptions, VideoPlan

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    from torch import Tensor

MAX_ASPECT = 200.0  # Hugging Face's smart_resize, for the Qwen families, refuses more


class PatchReader(Protocol):
    """Patches of one kind of media."""

    # Settings that make media smaller, for the remedy of an error.
    @property
    def limits(self) -> str: ...
    # Tokens of a picture, or of one frame of a video.
    def num_tokens(self, grid: Grid) -> int: ...
    # RGB pictures [patches in time, frames in each, height, width, 3] that became these patches.
    def pictures(self, patches_PC: "np.ndarray", grid: Grid) -> "np.ndarray": ...
    # The float for each byte of each colour [3, 256], on the host.
    def table(self) -> "Tensor": ...
    # The floats that the tower reads, by the table, on the device of both.
    def pixel_values(self, patches_PC: "Tensor", table: "Tensor") -> "Tensor": ...


class ImageReader(PatchReader, Protocol):
    """Pictures as a checkpoint sees them."""

    # The maximum number of tokens of a picture, and the setting with which it is another number.
    @property
    def most_tokens(self) -> int: ...
    def limit_of(self, tokens: int) -> str: ...
    # The largest ratio of its sides that a picture may have.
    @property
    def max_aspect(self) -> float: ...
    # The reader of a picture whose record bounds its pixels, or a DataError.
    def with_bounds(
        self, min_pixels: int | None, max_pixels: int | None, where: str
    ) -> "ImageReader": ...
    # The height and width to which a picture of this size is resized, and its grid.
    def resized_size(self, height: int, width: int) -> tuple[int, int]: ...
    def grid(self, height: int, width: int) -> Grid: ...
    # The patches [P, C] of an RGB picture.
    def patches(self, image: "PIL.Image.Image") -> "np.ndarray": ...


class VideoReader(PatchReader, Protocol):
    """Videos as a checkpoint sees them."""

    @property
    def temporal_patch_size(self) -> int: ...  # frames that a patch spans
    # Frames and their size. `sample` is false for lists of frames, all of which are taken.
    def plan(
        self, info: VideoInfo, sample: bool, where: str, options: VideoOptions
    ) -> VideoPlan: ...
    # The text in the place of the template's mark, with one placeholder a frame.
    def text(self, plan: VideoPlan) -> str: ...
    # The patches [P, C] of the plan's frames, which are RGB bytes.
    def patches(self, frames: "Iterable[np.ndarray]", plan: VideoPlan) -> "np.ndarray": ...


def check_aspect(height: int, width: int, where: str, size: str, most: float = MAX_ASPECT) -> None:
    """Refuse a picture that is too long or has no pixels. `size`: its unscaled size, as text."""
    if min(width, height) < 1:
        raise DataError(f"is {size} pixels and shows nothing", place=where, remedy="drop it")
    if max(width, height) > most * min(width, height):
        raise DataError(
            f"is {size} pixels, and sides may differ by a factor of {most:g} at most",
            place=where,
            remedy="crop or drop it",
        )


def resize_frame(frame: "np.ndarray", height: int, width: int) -> "np.ndarray":
    """Resize a frame to [3, height, width] bytes, by the same call that torchvision's resize makes
    for uint8 on a CPU. Its kernel rounds between two passes: floats would give other bytes."""
    import torch

    pixels = torch.tensor(frame).permute(2, 0, 1)[None]  # a copy: frames may be read-only
    if pixels.shape[2:] != (height, width):
        pixels = torch.nn.functional.interpolate(
            pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True
        )
    return pixels[0].numpy()
