"""Row: one sample as tensors, its placeholders checked against its images. Rows share the tensors
of pictures and videos that several turns of a conversation show.

Shapes: S tokens of a row, I images, P patches of all images, C values of a patch, 3 the axes time,
height, width, 5 the columns of a token: its id, its target (the token that it predicts) and its
position on three axes, J targets of a position, L decoder layers with experts, K experts of a
token, N supervised tokens, R a teacher's log-probs of J tokens and of all others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vlm.data.tokens.visuals import GridQueue, pixel_fault
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import Tokens

PROBABILITY_TOLERANCE = 1e-3  # by which a teacher's probabilities may miss 1: bf16 ones do
IGNORE = -100  # a label that carries no loss, as in Hugging Face


@dataclass(frozen=True)
class RowColumn:
    """Values of a row next to its ids and labels, concatenated in a micro-batch.

    There is one for each `token`, in its place; or for each `target`, in the place of its label or
    in the shape of `targets`; or for each `supervised` token, in order and without gaps."""

    per: Literal["token", "target", "supervised"]
    field: str = ""  # field of a Row; empty: `values_S` has it under the column's name
    fill: float | None = None  # in rows without it; None: every row with targets has it
    above: float = -np.inf  # the values of targets are finite, and larger
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # others become the last; (): all stay
    rank: int = 0  # dimensions of a value
    remedy: str = ""  # for another shape
    uneven: tuple[str, str] = ("is missing in rows of one micro-batch", "give it for all rows")


_TEACHER = RowColumn(
    "supervised",
    dtypes=(),
    rank=1,
    uneven=(
        "has several widths, or is missing, in rows of one micro-batch",
        "give the same number of tokens for each supervised token of all rows",
    ),
)
# A new value of a token is a line here, and a loss reads it as the parameter of its name. Any other
# name that a loss reads is a VALUE.
COLUMNS = {
    "loss_weights": RowColumn(
        "target",
        "loss_weights_S",
        fill=1,
        above=0,
        remedy="give a weight for each token, in its own place",
    ),
    "routing": RowColumn(
        "token",
        "routing_SLK",
        fill=-1,
        dtypes=(torch.int16, torch.int32),
        rank=2,
        remedy="give the experts of each token, -1 where the routers are to choose",
        uneven=(
            "has a different shape for the tokens of some rows of one batch",
            "give [tokens, layers with experts, experts of a token] for each row",
        ),
    ),
    "teacher_ids": replace(_TEACHER, field="teacher_ids_NJ"),
    "teacher_log_probs": replace(_TEACHER, field="teacher_log_probs_NR"),
}
VALUE = RowColumn("target")
GRID_OF = {"pixel_values_PC": "image_grid_I3", "pixel_values_videos_PC": "video_grid_I3"}
VISUAL_FIELDS = tuple(name for pair in GRID_OF.items() for name in pair)


@dataclass(frozen=True)
class JoinedPixels:
    """Pixels of a row that were concatenated from parts, each with its grids."""

    pixels_PC: Tensor
    parts: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Row:
    """A sample as tensors. Each label is at its own token (not shifted, as in Hugging Face), and so
    is each value of `values_S`, which holds by name the values that a loss reads (see losses.py).
    `loss_weights_S` multiplies the loss of each supervised token; None: all have the weight 1.
    Pixels are floats as the image processor returns them, or bytes as `image_patches` does.
    `routing_SLK` has the experts of each token, -1 where the routers choose; None: they choose all.

    A row to be distilled has, for each supervised token in order, a teacher's most likely tokens
    and its log-probs of these and of all others together. `targets`, in place of labels, are [S] or
    [S, J], those that each position predicts, filled with IGNORE; values have their shape and
    places."""

    ids_S: Tensor
    labels_S: Tensor
    pixel_values_PC: Tensor | None = None
    image_grid_I3: Tensor | None = None
    pixel_values_videos_PC: Tensor | None = None
    video_grid_I3: Tensor | None = None
    values_S: Mapping[str, Tensor] = field(default_factory=dict)
    loss_weights_S: Tensor | None = None
    routing_SLK: Tensor | None = None
    teacher_ids_NJ: Tensor | None = None
    teacher_log_probs_NR: Tensor | None = None
    targets: Tensor | None = None
    joined: tuple[JoinedPixels, ...] = ()
    # place_row adds them, and a copy with other fields lacks them: tokens, targets and positions as
    # int32 in one table to be copied at once, and COLUMNS and values that a loss reads by name.
    tokens_S5: np.ndarray = field(init=False, repr=False, compare=False)
    columns: Mapping[str, Tensor] = field(init=False, repr=False, compare=False)

    def given(self, name: str) -> Tensor | None:
        """Return what the row was given for a column."""
        own = COLUMNS.get(name, VALUE).field
        return getattr(self, own) if own else self.values_S.get(name)

    def with_table(self, tokens_S5: np.ndarray, columns: Mapping[str, Tensor]) -> "Row":
        """Return the row with its table and columns."""
        row = replace(self)
        object.__setattr__(row, "tokens_S5", tokens_S5)
        object.__setattr__(row, "columns", columns)
        return row

    @property
    def num_targets(self) -> int:
        """Number of targets of a placed row."""
        first_S = self.tokens_S5[:, 1]
        targets = first_S if self.targets is None else self.targets.numpy()
        return int((targets != IGNORE).sum())

    @property
    def has_media(self) -> bool:
        """True if it has a picture or a video."""
        return self.image_grid_I3 is not None or self.video_grid_I3 is not None

    def check_pixels(self, where: str, tokens: Tokens) -> None:
        """Raise a DataError if patches and grids do not come together, or cannot be right."""
        for field_name, grid_name in GRID_OF.items():
            pixels, name = getattr(self, field_name), field_name.removesuffix("_PC")
            if fault := pixel_fault(pixels, getattr(self, grid_name), tokens):
                remedy = "take both from make_visuals, or from one call of the image processor"
                raise DataError(fault, place=where, key=name, remedy=remedy)


def place_row(row: Row, tokens: Tokens, where: str, names: Sequence[str] = ()) -> Row:
    """Check images against placeholders and compute positions. Return the row with its table and
    its columns: the ones in COLUMNS and the values of these names."""
    if row.ids_S.shape != row.labels_S.shape or row.ids_S.dim() != 1 or not len(row.ids_S):
        raise DataError(
            f"has shape {tuple(row.labels_S.shape)}, and ids has {tuple(row.ids_S.shape)}",
            place=where,
            key="labels",
            remedy="give two vectors of the same length, at least 1",
        )
    check_ids(row.ids_S.numpy(), tokens, where, "ids")
    targets = _targets(row, tokens, where)
    row.check_pixels(where, tokens)
    _check_teacher(row, targets, tokens, where)
    queue = GridQueue(row.image_grid_I3, row.video_grid_I3, tokens)
    runs = queue.runs_of(row.ids_S, where)
    queue.check_used_up(where)
    tokens_S5 = np.empty((len(row.ids_S), 5), dtype=np.int32)
    tokens_S5[:, 0] = row.ids_S.numpy()
    tokens_S5[:, 2:] = tokens.positions(len(row.ids_S), runs).T
    tokens_S5[:, 1] = targets if targets.ndim == 1 else _first_targets(targets)
    columns = {
        name: _column(row, name, targets, names, where)
        for name in dict.fromkeys((*COLUMNS, *names))
        if name in names or row.given(name) is not None
    }
    return row.with_table(tokens_S5, columns)


def _first_targets(targets_SJ: np.ndarray) -> np.ndarray:
    first_S1 = (targets_SJ != IGNORE).argmax(axis=1)[:, None]
    return np.take_along_axis(targets_SJ, first_S1, axis=1)[:, 0]


def _targets(row: Row, tokens: Tokens, where: str) -> np.ndarray:
    """Return the targets, [S] or [S, J]: the next token's label, or the row's own targets."""
    if row.targets is None:
        labels_S = row.labels_S.numpy()
        check_ids(np.where(labels_S == IGNORE, 0, labels_S), tokens, where, "labels")
        return np.append(labels_S[1:], IGNORE)
    if (row.labels_S != IGNORE).any() or row.loss_weights_S is not None:
        raise DataError(
            "come together with labels or loss_weights",
            place=where,
            key="targets",
            remedy="give targets alone, with the label -100 everywhere, and weights as values "
            "that the loss reads",
        )
    targets, count = row.targets.numpy(), len(row.ids_S)
    if len(targets) != count or targets.ndim not in (1, 2) or not targets.size:
        raise DataError(
            f"has shape {targets.shape}, and there are {count} tokens",
            place=where,
            key="targets",
            remedy=f"give [{count}], what each token predicts, or [{count}, J], several for each, "
            "-100 where there is none",
        )
    check_ids(np.where(targets == IGNORE, 0, targets), tokens, where, "targets")
    return targets


def _check_teacher(row: Row, targets: np.ndarray, tokens: Tokens, where: str) -> None:
    """Refuse tokens and log-probs of a teacher that miss supervised tokens or do not add up."""
    ids_NJ, log_probs_NR = row.teacher_ids_NJ, row.teacher_log_probs_NR
    if ids_NJ is None and log_probs_NR is None:
        return
    count = int((targets != IGNORE).sum()) if targets.ndim == 1 else 0
    shapes = [() if part is None else tuple(part.shape) for part in (ids_NJ, log_probs_NR)]
    width = shapes[0][1] if len(shapes[0]) == 2 else 0
    if ids_NJ is None or log_probs_NR is None or shapes != [(count, width), (count, width + 1)]:
        raise DataError(
            f"and teacher_log_probs have the shapes {shapes[0]} and {shapes[1]}, and the row has "
            f"{count} supervised tokens",
            place=where,
            key="teacher_ids",
            remedy=f"give [{count}, J], J tokens for each supervised token in order, and "
            f"[{count}, J + 1], their log-probs and that of all other tokens together",
        )
    check_ids(ids_NJ.numpy(), tokens, where, "teacher_ids")
    ordered_NJ = ids_NJ.sort(dim=1).values
    if (ordered_NJ[:, 1:] == ordered_NJ[:, :-1]).any():
        raise DataError("has a token twice in one place", place=where, key="teacher_ids")
    sums_N = log_probs_NR.double().exp().sum(dim=1)
    if not bool(((sums_N - 1).abs() <= PROBABILITY_TOLERANCE).all()):
        worst = int((sums_N - 1).abs().nan_to_num(torch.inf).argmax())
        raise DataError(
            f"has probabilities whose sum is {float(sums_N[worst]):.6g}, and not 1",
            place=where,
            key=f"teacher_log_probs[{worst}]",
            remedy="give natural logarithms of the probabilities of the tokens of teacher_ids, and "
            "of all others together",
        )


def check_ids(ids: np.ndarray, tokens: Tokens, where: str, name: str = "tokens") -> None:
    """Raise a DataError for ids that the model has no embedding for. A rank that holds a part of
    the embedding would take them for ids of another rank, and the sum would be zero."""
    if len(wrong := np.argwhere((ids < 0) | (ids >= tokens.vocab))):
        raise DataError(
            f"is not one of the model's ids, 0 to {tokens.vocab - 1}",
            place=where,
            key=f"{name}[{','.join(map(str, wrong[0]))}]",
            found=int(ids[tuple(wrong[0])]),
            allowed=range(tokens.vocab),
            remedy="give the tokenizer that belongs to the model, without tokens that were added "
            "to it alone: data.add_tokens adds some to both",
        )


def _column(row: Row, name: str, targets: np.ndarray, names: Sequence[str], where: str) -> Tensor:
    """Return the checked values of a column, without values of tokens that are not supervised."""
    column, given = COLUMNS.get(name, VALUE), row.given(name)
    has_labels, at = row.targets is None, (targets != IGNORE).nonzero()
    count, shape = len(at[0]), () if given is None else tuple(given.shape)
    if given is None and (column.fill is not None or not count):
        return torch.full((count,), column.fill or 0, dtype=column.dtypes[-1])
    lengths = {"token": row.ids_S.shape, "supervised": (count,), "target": targets.shape}
    length = tuple(lengths[column.per])
    if given is None or (shape[: len(length)] if column.rank else shape) != length:
        own = "give one number per token, in the place of that token"
        expected = f"{len(row.ids_S)} tokens" if has_labels else f"targets {targets.shape}"
        wanted = f"the loss reads it for each of the row's {expected}"
        if name not in names:
            wanted = f"ids has {tuple(row.ids_S.shape)}"
        raise DataError(
            f"{'is missing' if given is None else f'has shape {shape}'}, and {wanted}",
            place=where,
            key=name,
            remedy=column.remedy or (own if has_labels else "give one number for each target"),
        )
    if column.per != "target":
        return given
    at = (at[0] + 1,) if has_labels else at  # the labels are not shifted
    values = given.detach().to(column.dtypes[-1]).numpy()[at]
    if len(wrong := (~np.isfinite(values) | (values <= column.above)).nonzero()[0]):
        bound = "" if column.above == -np.inf else f" above {column.above:g}"
        raise DataError(
            ": the token is supervised",
            place=where,
            key=f"{name}[{','.join(str(axis[wrong[0]]) for axis in at)}]",
            found=float(given[tuple(int(axis[wrong[0]]) for axis in at)]),
            remedy=f"give a finite number{bound}, or the label -100",
        )
    return torch.from_numpy(values)


def continue_row(prompt: Row, ids: Sequence[int], **values: float) -> Row:
    """Return the prompt followed by supervised tokens, each of which gets these values."""
    answer_S = torch.tensor(ids, dtype=torch.long)
    ids_S = torch.cat([prompt.ids_S, answer_S])
    labels_S = torch.cat([torch.full_like(prompt.ids_S, IGNORE), answer_S])
    values_S = {name: torch.full(ids_S.shape, value) for name, value in values.items()}
    visuals = {name: getattr(prompt, name) for name in (*VISUAL_FIELDS, "joined")}
    return Row(ids_S, labels_S, **visuals, values_S=values_S)


def without_targets(row: Row) -> Row:
    """Return the row as a prompt: without labels and what belongs to them."""
    of_tokens = [name for name, column in COLUMNS.items() if column.per == "token"]
    gone = (COLUMNS[name].field for name in COLUMNS if name not in of_tokens)
    changes: dict[str, Any] = dict.fromkeys(filter(None, gone))
    changes["values_S"] = {name: row.values_S[name] for name in of_tokens if name in row.values_S}
    return replace(row, labels_S=torch.full_like(row.ids_S, IGNORE), targets=None, **changes)


def slice_row(row: Row, end: int, tokens: Tokens, begin: int = 0) -> Row:
    """Return the row's tokens from `begin` to `end`, with the images and videos that end there."""
    visuals = dict[str, Any]()
    for token, names in zip((tokens.image_id, tokens.video_id), GRID_OF.items(), strict=True):
        pixels, grid = (getattr(row, name) for name in names)
        if pixels is not None and grid is not None:
            ends = F.pad(grid.prod(1).cumsum(0), (1, 0))  # patches up to the end of each
            counts = [int((row.ids_S[:n] == token).sum()) * tokens.merge**2 for n in (begin, end)]
            first, last = (int((ends <= patches).sum()) - 1 for patches in counts)
            if first < last:
                own = pixels[ends[first] : ends[last]], grid[first:last]
                visuals |= zip(names, own, strict=True)
    return Row(row.ids_S[begin:end], row.labels_S[begin:end], **visuals)


def prompt_parts(row: Row, size: int, tokens: Tokens) -> list[Row]:
    """Divide a placed prompt into parts of `size` tokens. A part ends earlier where it would cut an
    image or a video, which is never divided, even if it has more tokens."""
    assert not row.columns
    if len(row.ids_S) <= size:
        return [row]
    can_end = torch.ones(len(row.ids_S) + 1, dtype=torch.bool)
    for token, grid_name in zip((tokens.image_id, tokens.video_id), GRID_OF.values(), strict=True):
        if (grid := getattr(row, grid_name)) is not None:
            counts = F.pad((row.ids_S == token).cumsum(0), (1, 0)) * tokens.merge**2
            can_end &= torch.isin(counts, F.pad(grid.prod(1).cumsum(0), (1, 0)))
    ends, places = [0], can_end.nonzero()[:, 0]
    while ends[-1] < len(row.ids_S):
        within = places[(places > ends[-1]) & (places <= ends[-1] + size)]
        ends.append(int(within[-1] if len(within) else places[places > ends[-1]][0]))
    return [
        slice_row(row, end, tokens, begin).with_table(row.tokens_S5[begin:end], {})
        for begin, end in pairwise(ends)
    ]


Part = tuple[Tensor, Tensor]  # pixels [P, C] and grids [I, 3]


def parts_of(row: Row, name: str) -> Sequence[Part]:
    """Return the pixels of this field and their grids, in the parts that other rows may have."""
    pixels_PC, grid_I3 = getattr(row, name), getattr(row, GRID_OF[name])
    if pixels_PC is None or grid_I3 is None or not len(pixels_PC):
        return []
    for joined in row.joined:
        if joined.pixels_PC is pixels_PC:  # pixels that took their place have no such parts
            return joined.parts
    return [(pixels_PC, grid_I3)]


def join_parts(parts: Mapping[str, Sequence[Part]]) -> dict[str, Any]:
    """Return the visual fields of a Row with these parts of each field with pixels, in order."""
    visuals: dict[str, Any] = {}
    joined = []
    for name, own_parts in parts.items():
        if own_parts:
            pixels, grids = zip(*own_parts, strict=True)
            is_one = len(own_parts) == 1
            visuals[name] = pixels[0] if is_one else torch.cat(pixels)
            visuals[GRID_OF[name]] = grids[0] if is_one else torch.cat(grids)
            joined += [] if is_one else [JoinedPixels(visuals[name], tuple(own_parts))]
    return {**visuals, "joined": tuple(joined)}


def prompt_row(ids: Sequence[int] | np.ndarray, shown: Sequence[Row] = ()) -> Row:
    """Return a row of tokens without labels, with the pictures and videos of other rows."""
    ids_S = torch.tensor(ids, dtype=torch.long)
    parts = {name: [part for row in shown for part in parts_of(row, name)] for name in GRID_OF}
    return Row(ids_S, torch.full_like(ids_S, IGNORE), **join_parts(parts))
