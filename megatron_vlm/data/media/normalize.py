"""Conversion of patches in bytes to pixel values, on the device that needs them.

Shapes: P patches, C values of a patch.
"""

from functools import cached_property

import torch
from torch import Tensor

from megatron_vlm.data.media.images import ImageSettings, expand_patches, normalisation_table
from megatron_vlm.data.media.processor_settings import VideoSettings
from megatron_vlm.data.media.video import video_normalisation_table


class PixelTables:
    """The checkpoint's normalisation of images and of videos, read when it is first needed."""

    def __init__(self, folder: str, device: torch.device):
        self.folder, self.device = folder, device

    def images(self, patches_PC: Tensor | None) -> Tensor | None:
        """Return the pixel values of images. Bytes are normalised, floats are returned
        unchanged."""
        if patches_PC is None or patches_PC.dtype != torch.uint8:
            return patches_PC
        return expand_patches(patches_PC, *self._image_table)

    def videos(self, patches_PC: Tensor | None) -> Tensor | None:
        """Return the pixel values of videos. Bytes are normalised, floats are returned
        unchanged."""
        if patches_PC is None or patches_PC.dtype != torch.uint8:
            return patches_PC
        return expand_patches(patches_PC, *self._video_table)

    @cached_property
    def _image_table(self) -> tuple[Tensor, int]:
        settings = ImageSettings.from_checkpoint(self.folder)
        width = 3 * settings.temporal_patch_size * settings.patch_size**2
        table = normalisation_table(settings.mean, settings.std, settings.rescale_factor)
        return table.to(self.device), width

    @cached_property
    def _video_table(self) -> tuple[Tensor, int]:
        settings = VideoSettings.from_checkpoint(self.folder)
        width = 3 * settings.temporal_patch_size * settings.patch_size**2
        return video_normalisation_table(settings).to(self.device), width
