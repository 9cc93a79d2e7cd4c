"""What two have made of the same prompts, and by how much they differ.

Shapes: P patches, C values of a patch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from megatron_vlm.data.media.normalize import PixelTables
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.inspection import EngineMedia, EngineView

BOUNDS = {"float32": 1e-4, "bfloat16": 0.25}  # of a log-prob, by the type that both compute in
# Half the distance of two bytes of a channel, whose deviation is 0.5 in Qwen3-VL: smaller
# differences of patches are rounding.
HALF_STEP = 0.5 / 255 / 0.5


@dataclass(frozen=True)
class TokenPair:
    """A token that the engine drew, with both log-probs of it."""

    place: int  # in the answer
    id: int
    engine: float
    trainer: float

    @property
    def difference(self) -> float:
        return abs(self.engine - self.trainer)


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt. Without tokens, it was not asked: its ids differ."""

    where: str
    prompt: Row
    seen: EngineView
    grids: bool  # whether they are equal
    patches: float  # largest difference; 0 without any
    tokens: tuple[TokenPair, ...] = ()

    @cached_property
    def ids(self) -> bool:
        return tuple(self.prompt.ids_S.tolist()) == self.seen.ids

    @cached_property
    def first_unlike(self) -> tuple[int, int | None, int | None]:
        """The first place where the ids differ, with the trainer's and the engine's id there."""
        pairs = zip_longest(self.prompt.ids_S.tolist(), self.seen.ids)
        return next((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])

    @property
    def worst(self) -> float:
        """Of its tokens; nan where one has no number, and where there are none."""
        found = [token.difference for token in self.tokens]
        return float(np.max(found)) if found else math.nan

    @property
    def same_input(self) -> bool:
        """Whether ids, grids and patches are equal, but for rounding."""
        return self.ids and self.grids and self.patches < HALF_STEP


@dataclass(frozen=True)
class Agreement:
    """All prompts."""

    model: str
    layout: str  # of the trainer
    precision: str  # float32 or bfloat16
    temperature: float
    bound: float
    prompts: tuple[ComparedPrompt, ...]

    @property
    def engine(self) -> str:
        return self.prompts[0].seen.version

    @cached_property
    def differences(self) -> np.ndarray:
        """Of all tokens."""
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
        """Why they do not agree, in sentences; empty where they do."""
        found = []
        for name, bad in (
            ("other ids", [p for p in self.prompts if not p.ids]),
            ("other grids", [p for p in self.prompts if not p.grids]),
            ("other patches", [p for p in self.prompts if not p.patches < HALF_STEP]),
        ):
            if bad:
                share = f"{len(bad)} of {len(self.prompts)} prompts"
                found.append(f"{share} have {name}, the first {bad[0].where}")
        over = int((~(self.differences <= self.bound)).sum())  # also what is no number
        if over:
            found.append(
                f"{over:,} of {len(self.differences):,} log-probs differ by more than "
                f"{self.bound:g}, by {self.worst:.2g} at most"
            )
        return found

    def worst_tokens(self, most: int) -> list[tuple[ComparedPrompt, TokenPair]]:
        """Those that differ most; what is no number first."""
        pairs = [(prompt, token) for prompt in self.prompts for token in prompt.tokens]

        def rank(pair: tuple[ComparedPrompt, TokenPair]) -> float:
            difference = pair[1].difference
            return -math.inf if math.isnan(difference) else -difference

        return sorted(pairs, key=rank)[:most]


def compare(where: str, prompt: Row, seen: EngineView, tables: PixelTables) -> ComparedPrompt:
    """What the trainer makes of a prompt beside what the engine has made of it."""
    images = zip_longest(_media(prompt, tables, "image"), seen.images)
    videos = zip_longest(_media(prompt, tables, "video"), seen.videos)
    pairs = [*images, *videos]
    grids = all(a is not None and b is not None and a.grid == b.grid for a, b in pairs)
    patches = [patch_difference(a, b) for a, b in pairs]
    return ComparedPrompt(where, prompt, seen, grids, float(np.max(patches)) if patches else 0.0)


def patch_difference(ours: EngineMedia | None, theirs: EngineMedia | None) -> float:
    """The largest of two pictures' patches, in the engine's type; inf where their shapes differ."""
    if ours is None or theirs is None or ours.patches_PC.shape != theirs.patches_PC.shape:
        return math.inf
    mine_PC = ours.patches_PC.to(theirs.patches_PC.dtype).float()
    return float((mine_PC - theirs.patches_PC.float()).abs().max())


def token_pairs(
    ids: Sequence[int], engine: Sequence[float], trainer: Sequence[float]
) -> tuple[TokenPair, ...]:
    """The tokens of an answer."""
    found = enumerate(zip(ids, engine, trainer, strict=True))
    return tuple(TokenPair(place, *each) for place, each in found)


def _media(prompt: Row, tables: PixelTables, kind: str) -> list[EngineMedia]:
    """The pictures or videos of a row, as the trainer's tower gets them."""
    grid_I3, values_PC = prompt.image_grid_I3, tables.images(prompt.pixel_values_PC)
    if kind == "video":
        grid_I3 = prompt.video_grid_I3
        values_PC = tables.videos(prompt.pixel_values_videos_PC)
    if grid_I3 is None or values_PC is None:
        return []
    grids = [tuple(map(int, grid)) for grid in grid_I3.tolist()]
    parts = values_PC.split([math.prod(grid) for grid in grids])
    return [EngineMedia(grid, part) for grid, part in zip(grids, parts, strict=True)]
