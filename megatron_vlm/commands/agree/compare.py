"""Comparison of the engine and the trainer on the same prompts, and the tokens and prompts as text.

Shapes: P patches, C values of a patch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.prompts import seen_by_trainer, seen_videos
from megatron_vlm.engines.sampler import ProcessedPrompt, compare_media
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.images import ImageReader
from megatron_vlm.family.spec import Tokens

BOUNDS = {"float32": 1e-4, "bfloat16": 0.25}  # bounds of a log-prob, by the compute type


@dataclass(frozen=True)
class TokenPair:
    """A token that the engine drew, with its log-probs in the engine and in the trainer."""

    place: int  # position in the answer
    id: int
    engine: float
    trainer: float

    @property
    def difference(self) -> float:
        return abs(self.engine - self.trainer)


@dataclass(frozen=True)
class ComparedPrompt:
    """Comparison of a prompt. It has no tokens if its ids differ, because it was not sent then."""

    where: str
    prompt: Row
    seen: ProcessedPrompt
    grids: bool  # True if the grids are equal
    patches: float  # largest difference of patches; 0 without patches
    half_step: float  # smaller differences of patches are rounding
    tokens: tuple[TokenPair, ...] = ()
    accepted: tuple[int, ...] = ()  # see Completion.accepted

    @cached_property
    def ids(self) -> bool:
        return tuple(self.prompt.ids_S.tolist()) == self.seen.ids

    @cached_property
    def first_unlike(self) -> tuple[int, int | None, int | None]:
        """The first position where the ids differ, with the ids of trainer and engine there."""
        pairs = zip_longest(self.prompt.ids_S.tolist(), self.seen.ids)
        return next((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])

    @property
    def worst(self) -> float:
        """The largest difference of its tokens; nan without tokens or if one is not a number."""
        differences = [token.difference for token in self.tokens]
        return float(np.max(differences)) if differences else math.nan


@dataclass(frozen=True)
class Agreement:
    """Results of all prompts."""

    model: str
    layout: str  # parallel degrees of the trainer
    precision: str  # float32 or bfloat16
    temperature: float
    bound: float
    prompts: tuple[ComparedPrompt, ...]

    @property
    def engine(self) -> str:
        return self.prompts[0].seen.version

    @cached_property
    def differences(self) -> np.ndarray:
        """The differences of all tokens."""
        return np.array([t.difference for prompt in self.prompts for t in prompt.tokens])

    @property
    def worst(self) -> float:
        return float(self.differences.max()) if len(self.differences) else math.nan

    @property
    def mean(self) -> float:
        return float(self.differences.mean()) if len(self.differences) else math.nan

    @property
    def patches(self) -> float:
        return float(np.max([prompt.patches for prompt in self.prompts]))

    @property
    def faults(self) -> list[str]:
        """The differences beyond the bounds, in sentences; empty if engine and trainer agree."""
        sentences = []
        for name, bad in (
            ("other ids", [p for p in self.prompts if not p.ids]),
            ("other grids", [p for p in self.prompts if not p.grids]),
            ("other patches", [p for p in self.prompts if not p.patches < p.half_step]),
        ):
            if bad:
                share = f"{len(bad)} of {len(self.prompts)} prompts"
                sentences.append(f"{share} have {name}, the first {bad[0].where}")
        over = int((~(self.differences <= self.bound)).sum())  # a difference of nan is counted, too
        if over:
            sentences.append(
                f"{over:,} of {len(self.differences):,} log-probs differ by more than "
                f"{self.bound:g}, by {self.worst:.2g} at most"
            )
        return sentences

    def worst_tokens(self, max_count: int) -> list[tuple[ComparedPrompt, TokenPair]]:
        """Return the tokens that differ most; those whose difference is nan come first."""
        pairs = [(prompt, token) for prompt in self.prompts for token in prompt.tokens]

        def rank(pair: tuple[ComparedPrompt, TokenPair]) -> float:
            difference = pair[1].difference
            return -math.inf if math.isnan(difference) else -difference

        return sorted(pairs, key=rank)[:max_count]


def compare(where: str, prompt: Row, view: ProcessedPrompt, tables: PixelTables) -> ComparedPrompt:
    """Compare the trainer's encoding of a prompt with the engine's."""
    grids, patches = compare_media(prompt, view, tables)
    return ComparedPrompt(where, prompt, view, grids, patches, tables.half_step)


def token_pairs(
    ids: Sequence[int], engine: Sequence[float], trainer: Sequence[float]
) -> tuple[TokenPair, ...]:
    """Return the tokens of an answer with both log-probs."""
    numbered = enumerate(zip(ids, engine, trainer, strict=True))
    return tuple(TokenPair(place, *each) for place, each in numbered)


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
        visual = {self.tokens.image_id: "image", self.tokens.video_id: "frame"}
        parts = [(name, list(run)) for name, run in groupby(ids, visual.get)]
        return "".join(
            f"[{name}: {len(part):,} tokens]" if name else str(self.tokenizer.decode(part))
            for name, part in parts
        )

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
        steps = [math.ceil(max(pixels.shape[:2]) / _SIDE) for pixels in images]
        return [
            np.ascontiguousarray(p[::step, ::step]) for p, step in zip(images, steps, strict=True)
        ]
