"""Batches for the parity tests. The rows have chosen lengths and images with chosen grids; all
values are random and seeded."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from megatron_vlm.data.tokens.row import IGNORE, VISUAL_FIELDS, Row
from megatron_vlm.family import families

PATCH_VALUES = 3 * 2 * 16 * 16
# Sizes of a tiny model, for tests to which more layers are only more of the same.
SHALLOW = dict(layers=2, deepstack=1, vision_depth=1)


@dataclass(frozen=True)
class Ids:
    image: int
    video: int
    start: int
    end: int
    text: int  # ordinary ids are below this one


@cache  # it trains a tokenizer
def token_ids(vocab: int = 512, family: str = "qwen3_vl") -> Ids:
    model = families()[family]
    tokenizer, marks = model.tiny.tokenizer(vocab), model.chat.marks
    names = [marks.image, marks.video, marks.start, marks.end]
    return Ids(*tokenizer.convert_tokens_to_ids(names), text=250)


@dataclass(frozen=True)
class RowSpec:
    """A row of text with images (height, width in patches, two of them a token) and videos (frames,
    height, width)."""

    text: int
    images: tuple[tuple[int, int], ...] = ()
    videos: tuple[tuple[int, int, int], ...] = ()
    supervised: float = 0.4
    shares: int | None = None  # an earlier row with the same grids, whose pictures are shown


# Rows have 0 to 4 images and grids that are not square. A text-only micro-batch (rows 2 and 3 at a
# micro-batch of two) lies between others with images, and there is a video.
MIXED = (
    RowSpec(9, images=((4, 6),)),
    RowSpec(21, images=((2, 2), (6, 4))),
    RowSpec(13),
    RowSpec(7),
    RowSpec(11, images=((2, 8), (4, 4), (6, 2), (2, 2))),
    RowSpec(17, videos=((2, 4, 6),), images=((4, 2),)),
    RowSpec(10),
    RowSpec(25, images=((8, 2),)),
)
ALL_TEXT = (RowSpec(12), RowSpec(5), RowSpec(9), RowSpec(14))
# Two groups take turns in the first micro-batch of four. The second has a video in three rows, and
# a picture of the same grid as another one.
SHARED = (
    RowSpec(9, images=((4, 6),)),
    RowSpec(21, images=((2, 2), (6, 4))),
    RowSpec(13, images=((4, 6),), shares=0),
    RowSpec(25, images=((2, 2), (6, 4)), shares=1),
    RowSpec(17, images=((4, 2),), videos=((2, 4, 6),)),
    RowSpec(10, images=((4, 2),)),
    RowSpec(6, images=((4, 2),), videos=((2, 4, 6),), shares=4),
    RowSpec(11, images=((4, 2),), videos=((2, 4, 6),), shares=4),
)
SHARED_ON_ONE_RANK = (SHARED[0], RowSpec(6, images=((4, 6),), shares=0), RowSpec(13), RowSpec(7))
# At DP2 the second replica's only micro-batch has no image.
TEXT_ON_ONE_RANK = (MIXED[0], RowSpec(8, images=((2, 4),)), RowSpec(13), RowSpec(7))


def make_rows(
    specs: tuple[RowSpec, ...], vocab: int = 512, seed: int = 0, family: str = "qwen3_vl"
) -> list[Row]:
    """Return rows for a tiny model of this family. In Gemma 4, three patches are a token."""
    ids, is_gemma = token_ids(vocab, family), family == "gemma4"
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for spec in specs:
        row = _make_row(spec, ids, generator, *((3, PATCH_VALUES // 2, 1.0) if is_gemma else ()))
        if spec.shares is not None:
            row = replace(row, **{name: getattr(rows[spec.shares], name) for name in VISUAL_FIELDS})
        rows.append(row)
    return rows


def _make_row(
    spec: RowSpec,
    ids: Ids,
    generator: torch.Generator,
    merge: int = 2,
    values: int = PATCH_VALUES,
    largest: float = torch.inf,
) -> Row:
    blocks = [[ids.start] + [ids.image] * (h * w // 4) + [ids.end] for h, w in spec.images]
    for frames, h, w in spec.videos:
        for _ in range(frames):
            blocks.append([ids.start] + [ids.video] * (h * w // 4) + [ids.end])
    text = torch.randint(0, ids.text, (spec.text,), generator=generator).tolist()
    places = torch.randint(1, max(spec.text, 2), (len(blocks),), generator=generator)
    cuts = places.sort().values.tolist()
    tokens: list[int] = []
    for start, end, block in zip([0, *cuts], [*cuts, spec.text], [*blocks, []], strict=True):
        tokens += text[start:end] + block
    ids_S = torch.tensor(tokens)
    labels_S = ids_S.clone()
    visual = torch.isin(ids_S, torch.tensor([ids.image, ids.video, ids.start, ids.end]))
    unsupervised = torch.rand(len(tokens), generator=generator) >= spec.supervised
    labels_S[visual | unsupervised] = IGNORE
    labels_S[0] = IGNORE
    labels_S[-1] = ids_S[-1]  # every row has a supervised token
    scale = torch.tensor([2, merge, merge])
    image_grid = torch.tensor([(1, h, w) for h, w in spec.images]).reshape(-1, 3) * scale // 2
    video_grid = torch.tensor(spec.videos).reshape(-1, 3) * scale // 2

    def pixels(grid: Tensor) -> Tensor | None:
        count = int(grid.prod(-1).sum())
        pixels_PC = torch.randn(count, values, generator=generator).clamp(-largest, largest)
        return pixels_PC if count else None

    return Row(
        ids_S,
        labels_S,
        pixels(image_grid),
        image_grid if len(image_grid) else None,
        pixels(video_grid),
        video_grid if len(video_grid) else None,
    )
