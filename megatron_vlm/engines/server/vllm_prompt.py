"""Prompts in vLLM's form, and their contents after vLLM's processor."""

from typing import Any

from frames import Message
from given_sizes import count_given_sizes


def to_vllm_prompt(
    prompt: list[int],
    pictures: list[list[int]],
    videos: list[Message],
    processor: Message,
    body: bytes,
) -> Any:
    """Return vLLM's form of a prompt, which has one placeholder for each picture and each video.
    `pictures` are heights and widths. The body has the RGB pixels, already in the trainer's sizes,
    in which the options of `processor` leave them."""
    import numpy as np
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
        frames_RGB = np.frombuffer(body[start:end], np.uint8).reshape(frames, high, wide, 3)
        media.setdefault("video", []).append((frames_RGB, video["facts"]))
        start = end
    if media:
        count_given_sizes()
        inputs["multi_modal_data"] = media
        inputs["mm_processor_kwargs"] = processor
    return inputs


def inspect_request(request: Any, model: Any, names: Message) -> tuple[Message, bytes]:
    """Return the ids of vLLM's own request, and the grids, types and shapes of its patches. The
    values follow as fp32: first all pictures, then all videos. `names` has those of the tower and
    of its inputs."""
    import torch

    about: Message = {"ids": list(request.prompt_token_ids), "image": [], "video": []}
    values: dict[str, list[bytes]] = {"image": [], "video": []}
    tower = getattr(model, names["tower"])
    for feature in request.mm_features or []:
        kind, data = feature.modality, feature.data.get_data()
        patches_name, grid_name = names[kind]
        patches = normalise_patches(data[patches_name], tower)
        about[kind].append(
            {
                "grid": data[grid_name].flatten().tolist(),
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
