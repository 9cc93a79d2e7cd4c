"""A prompt as vLLM takes it, and what its processor makes of it."""

from typing import Any

from frames import Message

_FPS = 10.0  # frames are numbered in tenths of a second, as times are written


def given(prompt: list[int], pictures: list[list[int]], videos: list[Message], body: bytes) -> Any:
    """`prompt` has one placeholder for each of `pictures`, whose heights and widths these are, and
    for each of `videos`. The body has their pixels, RGB, which have the trainer's sizes already."""
    import PIL.Image

    found: Message = {"prompt_token_ids": prompt}
    media: dict[str, list[Any]] = {}
    start = 0
    for high, wide in pictures:
        end = start + 3 * high * wide
        picture = PIL.Image.frombytes("RGB", (wide, high), body[start:end])
        media.setdefault("image", []).append(picture)
        start = end
    for video in videos:
        frames, high, wide = video["shape"]
        end = start + 3 * frames * high * wide
        media.setdefault("video", []).append(_video(video, body[start:end]))
        start = end
    if media:
        found["multi_modal_data"] = media
        found["mm_processor_kwargs"] = {"do_resize": False}
    return found


def _video(video: Message, pixels: bytes) -> tuple[Any, Message]:
    """All its frames, each with the time of its temporal patch."""
    import numpy as np

    frames, high, wide = video["shape"]
    places = [place for place in video["tenths"] for _ in range(frames // len(video["tenths"]))]
    about = {
        "fps": _FPS,
        "frames_indices": places,
        "total_num_frames": places[-1] + 1,
        "duration": (places[-1] + 1) / _FPS,
        "do_sample_frames": False,
    }
    return np.frombuffer(pixels, np.uint8).reshape(frames, high, wide, 3), about


def seen(request: Any, model: Any) -> tuple[Message, bytes]:
    """The ids of vLLM's own request, and the grids, types and shapes of its patches, whose values
    follow as fp32: first all of pictures, then all of videos."""
    import torch

    about: Message = {"ids": list(request.prompt_token_ids), "image": [], "video": []}
    values: dict[str, list[bytes]] = {"image": [], "video": []}
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    for feature in request.mm_features or []:
        kind, data = feature.modality, feature.data.get_data()
        patches = normalised(data[names[kind]], model.visual)
        about[kind].append(
            {
                "grid": data[f"{kind}_grid_thw"].flatten().tolist(),
                "dtype": str(patches.dtype).removeprefix("torch."),
                "shape": list(patches.shape),
            }
        )
        values[kind].append(patches.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return about, b"".join([*values["image"], *values["video"]])


def normalised(patches: Any, tower: Any) -> Any:
    """Patches as the tower's first layer gets them: vLLM may hand it bytes, which it normalises
    itself (0.32 does)."""
    norm = getattr(tower, "input_norm", None)
    patches = patches.to(tower.device)
    return patches.to(tower.dtype) if norm is None else norm(patches, tower.dtype)
