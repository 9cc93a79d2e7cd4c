"""Compare Gemma 4's pictures and videos with transformers' processors for torchvision, in an
environment that has it. It prints how many are equal bit for bit."""

import numpy as np
import PIL.Image
import torch
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.video_utils import VideoMetadata

from megatron_vlm.family.gemma4.images import Gemma4Images
from megatron_vlm.family.gemma4.videos import Gemma4Videos
from megatron_vlm.family.video_plan import VideoInfo, VideoOptions

MERGE, FRAMES, FPS = 3, 77, 12.5


def in_our_order(theirs: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return patches [frames, P, C] as our tower reads them, without padding."""
    places = torch.arange(height * width).view(height // MERGE, MERGE, width // MERGE, MERGE)
    return 2 * (theirs[:, places.transpose(1, 2).flatten()] - 0.5)


def same_picture(height: int, width: int) -> bool:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, ours = PIL.Image.fromarray(pixels), Gemma4Images(max_soft_tokens=70)
    theirs = Gemma4ImageProcessor(max_soft_tokens=70)(images=[image], return_tensors="pt")
    _, h, w = ours.grid(height, width)
    actual = ours.pixel_values(torch.from_numpy(ours.patches(image)), ours.table())
    return torch.equal(actual, in_our_order(theirs["pixel_values"], h, w)[0])


def same_video(**options: float) -> bool:
    frames = np.random.default_rng(0).integers(0, 256, (FRAMES, 90, 160, 3), dtype=np.uint8)
    ours = Gemma4Videos()
    plan = ours.plan(VideoInfo(FRAMES, FPS, 90, 160), True, "x", VideoOptions(**options))
    named = {"num_frames" if name == "nframes" else name: value for name, value in options.items()}
    theirs = Gemma4VideoProcessor(**({"num_frames": None} if "fps" in named else {}))(
        [frames],
        video_metadata=[VideoMetadata(total_num_frames=FRAMES, fps=FPS, duration=FRAMES / FPS)],
        return_tensors="pt",
        return_metadata=True,
        **named,
    )
    [facts] = theirs["video_metadata"]
    assert list(plan.indices) == [int(index) for index in facts.frames_indices]
    assert np.allclose(plan.timestamps, [float(time) for time in facts.timestamps])
    patches = torch.from_numpy(ours.patches([frames[i] for i in plan.indices], plan))
    expected = in_our_order(theirs["pixel_values_videos"][0], *plan.grid[1:]).flatten(0, 1)
    return torch.equal(ours.pixel_values(patches, ours.table()), expected)


if __name__ == "__main__":
    sizes = ((64, 64), (100, 60), (333, 500), (30, 900))
    equal = [same_picture(*size) for size in sizes]
    equal += [same_video(), same_video(nframes=5), same_video(fps=2.0)]
    print(sum(equal), "equal")
