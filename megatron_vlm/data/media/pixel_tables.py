"""Patches as the vision tower reads them.

Shapes: P patches, C values of a patch."""

import torch
from torch import Tensor

from megatron_vlm.family import read_family
from megatron_vlm.family.images import PatchReader


class PixelTables:
    """The checkpoint's normalisation of images and of videos, read when it is first needed. Bytes
    are normalised, floats are unchanged."""

    def __init__(self, folder: str, device: torch.device):
        self.folder, self.device = folder, device
        self._tables: dict[str, tuple[PatchReader, Tensor]] = {}

    def images(self, patches_PC: Tensor | None) -> Tensor | None:
        """Return the pixel values of images."""
        return self._pixel_values("images", patches_PC)

    def videos(self, patches_PC: Tensor | None) -> Tensor | None:
        """Return the pixel values of videos."""
        return self._pixel_values("videos", patches_PC)

    def _pixel_values(self, kind: str, patches_PC: Tensor | None) -> Tensor | None:
        if patches_PC is None or patches_PC.dtype != torch.uint8:
            return patches_PC
        reader, table = self._table(kind)
        return reader.pixel_values(patches_PC, table)

    @property
    def half_step(self) -> float:
        """Half the distance between adjacent bytes as floats: smaller differences are rounding."""
        return float(self._table("images")[1].diff().abs().min()) / 2

    def _table(self, kind: str) -> tuple[PatchReader, Tensor]:
        if kind not in self._tables:
            reader: PatchReader = getattr(read_family(self.folder), kind)(self.folder, {})
            self._tables[kind] = reader, reader.table().to(self.device)
        return self._tables[kind]
