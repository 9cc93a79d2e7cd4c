"""Videos for the tests, and transformers' own video processor as their oracle.

The oracle is Qwen3VLVideoProcessor itself. It imports without torchvision, but three of its steps
call it; those are written out here.
"""

from pathlib import Path

import av
import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from megatron_vlm.family.qwen.videos import VideoSettings

# video_preprocessor_config.json of the released Qwen3-VL.
RELEASED = {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
}
SETTINGS = VideoSettings(min_pixels=4096, max_pixels=25165824)
SMALL = VideoSettings(min_pixels=4096, max_pixels=65536)
START, PAD, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
H264 = next(name for name in ("libx264", "libopenh264", "mpeg4") if name in av.codecs_available)


class WithoutTorchvision(BaseVideoProcessor):
    """Stands behind Qwen3VLVideoProcessor: torchvision's steps for RGB uint8 on a CPU."""

    def convert_to_rgb(self, video):
        return video

    def resize(self, image, size, resample):
        assert resample == PIL.Image.Resampling.BICUBIC
        if image.shape[-2:] == (size.height, size.width):
            return image
        options = dict(mode="bicubic", align_corners=False, antialias=True)
        return F.interpolate(image.flatten(0, 1), (size.height, size.width), **options)[None]

    def normalize(self, image, mean, std, inplace=False):
        return image.sub(mean[:, None, None]).div_(std[:, None, None])


class OnlySizes(BaseVideoProcessor):
    def resize(self, image, size, resample):
        return size.height, size.width


class Oracle(Qwen3VLVideoProcessor, WithoutTorchvision):
    pass


class SizeOracle(Qwen3VLVideoProcessor, OnlySizes):
    pass


def hf(kind: type, ours: VideoSettings):
    size = {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels}
    return kind(**{**RELEASED, "size": size, "cap_pixels_per_frame": ours.cap_pixels_per_frame})


def hf_processor(video_processor=None) -> Qwen3VLProcessor:
    """The real processor, without a tokenizer."""
    processor = object.__new__(Qwen3VLProcessor)
    processor.video_processor = video_processor
    processor.image_token, processor.video_token = "<|image_pad|>", PAD
    processor.vision_start_token, processor.vision_end_token = START, END
    return processor


def make_video(path: Path, count: int, codec="mpeg4", size=(64, 48), mux=(), **options) -> Path:
    """10 frames a second. Frame i is grey 8 i, its upper half red."""
    with av.open(str(path), "w", options=dict(mux)) as container:
        stream = container.add_stream(codec, rate=10, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        container.start_encoding()
        for index in range(count):
            pixels = np.full((size[1], size[0], 3), 8 * index, np.uint8)
            pixels[: size[1] // 2] = [255, 0, 0]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def number_of(frame: np.ndarray) -> int:
    """Which frame it is, by the grey of its lower half."""
    return round(float(frame[frame.shape[0] * 3 // 4 :].mean()) / 8)


def random_frames(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def pixel_values(patches: np.ndarray, ours: VideoSettings) -> torch.Tensor:
    table = ours.table()
    values_P3 = torch.from_numpy(patches).int().view(len(patches), 3, -1)
    return torch.stack([table[c][values_P3[:, c]] for c in range(3)], dim=1).flatten(1)
