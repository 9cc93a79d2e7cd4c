"""Row: one sample as tensors, its placeholders checked against its images. Rows share the tensors
of pictures and videos that several turns of a conversation show.

Shapes: S tokens of a row, I images, P patches of all images, C values of a patch, 3 the axes time,
height, width, 5 the columns of a token: its id, its target (the token that it predicts) and its
position on three axes, F the values of a token that a loss reads, J targets of a position, L
decoder layers with experts, K experts of a token, N supervised tokens, R a teacher's log-probs of
J tokens and of all others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.tokens.placeholder_grids import GridQueue
from megatron_vlm.data.tokens.visuals import pixel_fault
from megatron_vlm.errors import DataError
from megatron_vlm.family.spec import Tokens

PROBABILITY_TOLERANCE = 1e-3  # by which a teacher's probabilities may miss 1: those of bf16 do
IGNORE = -100  # a label that carries no loss, as in Hugging Face


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
    joined: tuple[JoinedPixels, ...] = ()  # see joined_pictures.py

    @property
    def has_media(self) -> bool:
        """True if it has a picture or a video."""
        return self.image_grid_I3 is not None or self.video_grid_I3 is not None

    def check_pixels(self, where: str, tokens: Tokens) -> None:
        """Raise a DataError if patches and grids do not come together, or cannot be right."""
        for pixels, grid, name in (
            (self.pixel_values_PC, self.image_grid_I3, "pixel_values"),
            (self.pixel_values_videos_PC, self.video_grid_I3, "pixel_values_videos"),
        ):
            if fault := pixel_fault(pixels, grid, tokens):
                remedy = "take both from make_visuals, or from one call of the image processor"
                raise DataError(fault, place=where, key=name, remedy=remedy)


@dataclass(frozen=True)
class PlacedRow:
    """A checked row, with tokens, targets and positions in one table to be copied at once."""

    row: Row
    tokens_S5: np.ndarray  # int32
    values_SF: np.ndarray | None = None  # float32, shifted like the targets
    weights_S: np.ndarray | None = None  # float32, weights of the loss, shifted like the targets
    # Set if positions have several targets. The table then has the first target of each position.
    targets_SJ: np.ndarray | None = None
    values_SJF: np.ndarray | None = None

    @property
    def is_supervised(self) -> bool:
        """True if any position has a target."""
        return bool((self.tokens_S5[:, 1] != IGNORE).any())


def place_row(row: Row, tokens: Tokens, where: str, names: Sequence[str] = ()) -> PlacedRow:
    """Check images against placeholders, shift labels and these values, compute positions."""
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
    if row.routing_SLK is not None and len(row.routing_SLK) != len(row.ids_S):
        raise DataError(
            f"has shape {tuple(row.routing_SLK.shape)}, and ids has {tuple(row.ids_S.shape)}",
            place=where,
            key="routing",
            remedy="give the experts of each token, -1 where the routers are to choose",
        )
    queue = GridQueue(row.image_grid_I3, row.video_grid_I3, tokens)
    runs = queue.runs_of(row.ids_S, where)
    queue.check_used_up(where)
    tokens_S5 = np.empty((len(row.ids_S), 5), dtype=np.int32)
    tokens_S5[:, 0] = row.ids_S.numpy()
    tokens_S5[:, 2:] = tokens.positions(len(row.ids_S), runs).T
    values = _values(row, targets, names, where) if names else None
    if targets.ndim == 1:
        tokens_S5[:, 1] = targets
        return PlacedRow(row, tokens_S5, values, _shifted_weights(row, where))
    first_S1 = (targets != IGNORE).argmax(axis=1)[:, None]
    tokens_S5[:, 1] = np.take_along_axis(targets, first_S1, axis=1)[:, 0]
    return PlacedRow(row, tokens_S5, targets_SJ=targets, values_SJF=values)


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


def _shifted_weights(row: Row, where: str) -> np.ndarray | None:
    loss_weights_S = row.loss_weights_S
    if loss_weights_S is None:
        return None
    if loss_weights_S.shape != row.ids_S.shape:
        raise DataError(
            f"has shape {tuple(loss_weights_S.shape)}, and ids has {tuple(row.ids_S.shape)}",
            place=where,
            key="loss_weights",
            remedy="give a weight for each token, in its own place",
        )
    weights_S = np.zeros(len(row.ids_S), dtype=np.float32)
    weights_S[:-1] = loss_weights_S[1:].detach().float().numpy()
    supervised_S = row.labels_S[1:].numpy() != IGNORE
    is_valid_S = np.isfinite(weights_S[:-1]) & (weights_S[:-1] > 0)
    if (wrong := (supervised_S & ~is_valid_S).nonzero()[0]).size:
        raise DataError(
            ": the token is supervised",
            place=where,
            key=f"loss_weights[{wrong[0] + 1}]",
            found=float(loss_weights_S[wrong[0] + 1]),
            remedy="give a finite number above 0, or the label -100",
        )
    return weights_S


def _values(row: Row, targets: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
    """Return the values [..., F] with these names, each at the position of its target."""
    shape, is_target = targets.shape, targets != IGNORE  # Labels have this shape, too.
    values = np.zeros((*shape, len(names)), dtype=np.float32)
    expected, remedy, shift = f"targets {shape}", "give one number for each target", 0
    if row.targets is None:
        expected, shift = f"{len(row.ids_S)} tokens", 1
        remedy = "give one number per token, in the place of that token"
    for place, name in enumerate(names):
        tensor = row.values_S.get(name)
        if tensor is None and not is_target.any():
            continue
        if tensor is None or tuple(tensor.shape) != shape:
            problem = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            problem += f", and the loss reads it for each of the row's {expected}"
            raise DataError(problem, place=where, key=name, remedy=remedy)
        numbers = tensor.detach().float().numpy()
        values[: len(values) - shift, ..., place] = numbers[shift:]
        if len(wrong := np.argwhere(is_target & ~np.isfinite(values[..., place]))):
            first = wrong[0] + shift
            raise DataError(
                ": the token is supervised",
                place=where,
                key=f"{name}[{','.join(map(str, first))}]",
                found=float(numbers[tuple(first)]),
                remedy="give a finite number, or the label -100",
            )
    return values


def continue_row(prompt: Row, ids: Sequence[int], **values: float) -> Row:
    """Return the prompt followed by supervised tokens, each of which gets these values."""
    answer_S = torch.tensor(ids, dtype=torch.long)
    ids_S = torch.cat([prompt.ids_S, answer_S])
    labels_S = torch.cat([torch.full_like(prompt.ids_S, IGNORE), answer_S])
    values_S = {name: torch.full(ids_S.shape, value) for name, value in values.items()}
    new = {"ids_S": ids_S, "labels_S": labels_S, "values_S": values_S}
    others = ("loss_weights_S", "routing_SLK", "teacher_ids_NJ", "teacher_log_probs_NR", "targets")
    return replace(prompt, **new, **dict.fromkeys(others))  # type: ignore[arg-type]


def cut_row(row: Row, end: int, tokens: Tokens) -> Row:
    """Return the row's first tokens, with the images and videos among them."""
    ids_S = row.ids_S[:end]

    def visible(
        token: int, pixels: Tensor | None, grid: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if pixels is None or grid is None:
            return None, None
        patches = grid.prod(1).cumsum(0)
        count = int((patches <= int((ids_S == token).sum()) * tokens.merge**2).sum())
        return (pixels[: patches[count - 1]], grid[:count]) if count else (None, None)

    images = visible(tokens.image_id, row.pixel_values_PC, row.image_grid_I3)
    videos = visible(tokens.video_id, row.pixel_values_videos_PC, row.video_grid_I3)
    return Row(ids_S, row.labels_S[:end], *images, *videos)


GRID_OF = {"pixel_values_PC": "image_grid_I3", "pixel_values_videos_PC": "video_grid_I3"}
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
