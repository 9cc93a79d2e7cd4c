"""Frames of videos."""

import numpy as np
import torch
import torch.nn.functional as F


def resize_frame(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize a frame to [3, height, width] bytes, by the same call that torchvision's resize makes
    for uint8 on a CPU. Its kernel rounds between two passes: floats would give other bytes."""
    pixels = torch.tensor(frame).permute(2, 0, 1)[None]  # a copy: frames may be read-only
    if pixels.shape[2:] != (height, width):
        pixels = F.interpolate(
            pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True
        )
    return pixels[0].numpy()
