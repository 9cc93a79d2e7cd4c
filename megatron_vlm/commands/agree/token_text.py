"""Tokens as text and prompts with their pictures, for the terminal and the page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_vlm.commands.agree.compare import ComparedPrompt, TokenPair
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.prompts import seen_by_trainer, seen_videos
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.spec import Tokens

_TEXT = 300  # characters of a prompt around the token shown
_SIDE = 360  # maximum of a picture's longer side, in pixels
_FRAMES = 4  # frames of a video


@dataclass(frozen=True)
class TokenText:
    """Decoder of the tokens and pictures of one model."""

    tokenizer: PreTrainedTokenizerBase
    images: ImageReader
    tokens: Tokens

    @staticmethod
    def from_folder(folder: str) -> "TokenText":
        """Read the tokenizer and the settings of a checkpoint's folder."""
        tokens = read_sizes(folder).tokens
        return TokenText(read_tokenizer(folder), read_family(folder).images(folder, {}), tokens)

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens. A run of placeholders becomes one word."""
        return "".join(self._parts(ids))

    def _parts(self, ids: Sequence[int]) -> Iterator[str]:
        visual = {self.tokens.image_id: "image", self.tokens.video_id: "frame"}
        for name, run in groupby(ids, visual.get):
            part = list(run)
            text = f"[{name}: {len(part):,} tokens]" if name else self.tokenizer.decode(part)
            yield str(text)

    def split_around(self, prompt: ComparedPrompt, token: TokenPair) -> tuple[str, str, str]:
        """Return the text before a token of an answer, its own text, and the text after it."""
        answer = [each.id for each in prompt.tokens]
        place = token.place
        before = self.text([*prompt.prompt.ids_S.tolist(), *answer[:place]])
        return before[-_TEXT:], self.text(answer[place : place + 1]), self.text(answer[place + 1 :])

    def pictures(self, row: Row) -> list[np.ndarray]:
        """Return the pictures and a few frames of the videos as the model sees them, but not larger
        than a page needs."""
        images = seen_by_trainer(row, self.images)
        for frames in seen_videos(row, self.images):
            images += list(frames[:: math.ceil(len(frames) / _FRAMES)])
        return [_shrink(pixels) for pixels in images]


def _shrink(pixels: np.ndarray) -> np.ndarray:
    step = math.ceil(max(pixels.shape[:2]) / _SIDE)
    return np.ascontiguousarray(pixels[::step, ::step])
