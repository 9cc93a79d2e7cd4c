"""Defines the operators without which torchvision cannot be imported.

`make vllm-env` puts this file and its .pth into the environment of vLLM. torchvision's compiled
operators do not load beside torch's build for the CPU. What Qwen3-VL's processor does needs none of
them, but they have to be known before torchvision is imported, in every process.
"""

import sys
from importlib.abc import MetaPathFinder


class DefineFirst(MetaPathFinder):
    """Finds nothing: it is only asked, and hears of torchvision's import before it happens."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", boxes)


sys.meta_path.insert(0, DefineFirst())
