"""Prompts in vLLM's form, and their contents after vLLM's processor."""

from typing import Any

from frames import Message

_FPS = 10.0  # frames are numbered in tenths of a second, like the times in prompts


def to_vllm_prompt(
    prompt: list[int], pictures: list[list[int]], videos: list[Message], body: bytes
) -> Any:
    """Return vLLM's form of a prompt, which has one placeholder for each picture and each video.
    `pictures` are heights and widths. The body has the RGB pixels, already in the trainer's
    sizes."""
    import PIL.Image

    inputs: Message = {"prompt_token_ids": prompt}
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
        inputs["multi_modal_data"] = media
        inputs["mm_processor_kwargs"] = {"do_resize": False}
    return inputs


def _video(video: Message, pixels: bytes) -> tuple[Any, Message]:
    """Return all frames of a video, each with the time of its temporal patch."""
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


def inspect_request(request: Any, model: Any) -> tuple[Message, bytes]:
    """Return the ids of vLLM's own request, and the grids, types and shapes of its patches. The
    values follow as fp32: first all pictures, then all videos."""
    import torch

    about: Message = {"ids": list(request.prompt_token_ids), "image": [], "video": []}
    values: dict[str, list[bytes]] = {"image": [], "video": []}
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    for feature in request.mm_features or []:
        kind, data = feature.modality, feature.data.get_data()
        patches = normalise_patches(data[names[kind]], model.visual)
        about[kind].append(
            {
                "grid": data[f"{kind}_grid_thw"].flatten().tolist(),
                "dtype": str(patches.dtype).removeprefix("torch."),
                "shape": list(patches.shape),
            }
        )
        values[kind].append(patches.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return about, b"".join([*values["image"], *values["video"]])


def normalise_patches(patches: Any, tower: Any) -> Any:
    """Return patches as the tower's first layer receives them. vLLM may pass bytes to the tower,
    which normalises them itself (0.32 does)."""
    norm = getattr(tower, "input_norm", None)
    patches = patches.to(tower.device)
    return patches.to(tower.dtype) if norm is None else norm(patches, tower.dtype)
