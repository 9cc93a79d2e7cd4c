"""Chats of Gemma 4 in tokens, by transformers alone. As a program, with a folder, it reads records
from standard input and prints their tokens by Gemma4Processor, which needs torchvision; as a
module, it fills the same template's marks itself."""

import base64
import io
import json
import sys
from functools import cache

import numpy as np
import PIL.Image
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.video_utils import VideoMetadata

START, END, IMAGE, VIDEO = "<|image>", "<image|>", "<|image|>", "<|video|>"


def opened(uri: str) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))


def media(record: dict) -> tuple[list, list, list[float]]:
    """Return the images of a record, and the frames and frame rates of its videos."""
    contents = (message.get("content") for message in record["messages"])
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [opened(part["image"]) for part in parts if part["type"] == "image"]
    videos = [part for part in parts if part["type"] == "video"]
    frames = [[opened(uri) for uri in part["video"]] for part in videos]
    return images, frames, [part["fps"] for part in videos]


def gemma_text(tokenizer, record: dict, **options) -> str:
    """Return the text of a record by the tokenizer's template."""
    return tokenizer.apply_chat_template(
        record["messages"], tools=record.get("tools"), tokenize=False, **options
    )


@cache
def load(folder: str) -> tuple[PreTrainedTokenizerBase, Gemma4ImageProcessorPil]:
    return AutoTokenizer.from_pretrained(folder), Gemma4ImageProcessorPil.from_pretrained(folder)


def gemma_ids(folder: str, record: dict, **options) -> list[int]:
    """Return the tokens, with as many for each picture as the image processor says."""
    tokenizer, processor = load(folder)
    images, videos, rates = media(record)

    def counts(pictures: list) -> list[int]:
        return processor([pictures])["num_soft_tokens_per_image"] if pictures else []

    def fill(text: str, mark: str, texts: list[str]) -> str:
        before, *rest = text.split(mark)
        return before + "".join(a + b for a, b in zip(texts, rest, strict=True))

    text = gemma_text(tokenizer, record, **options)
    text = fill(text, IMAGE, [START + count * IMAGE + END for count in counts(images)])
    shown = []
    for frames, fps in zip(videos, rates, strict=True):
        times = VideoMetadata(len(frames), fps=fps, frames_indices=range(len(frames))).timestamps
        shown.append(
            " ".join(
                f"{int(time // 60):02d}:{int(time % 60):02d} {START}{count * VIDEO}{END}"
                for time, count in zip(times, counts(frames), strict=True)
            )
        )
    return tokenizer(fill(text, VIDEO, shown), add_special_tokens=False)["input_ids"]


def main(folder: str) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    for record, options in json.load(sys.stdin):
        images, videos, rates = media(record)
        given = {"images": [images]} if images else {}
        if videos:
            given["videos"] = [[np.array(frame) for frame in frames] for frames in videos]
            given["do_sample_frames"] = False
            given["video_metadata"] = [
                VideoMetadata(len(frames), fps=fps, frames_indices=list(range(len(frames))))
                for frames, fps in zip(videos, rates, strict=True)
            ]
        text = processor.apply_chat_template(
            record["messages"], tools=record.get("tools"), tokenize=False, **options
        )
        ids = processor(text=[text], add_special_tokens=False, **given)["input_ids"]
        print(json.dumps(np.array(ids).reshape(-1).tolist()))


if __name__ == "__main__":
    main(sys.argv[1])
