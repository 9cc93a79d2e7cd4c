"""Samples as the model sees them: turns of text with images in between, trained tokens marked.
Pictures are reassembled from their patches only if somebody looks at them.

Shapes: S tokens, P patches, C values of a patch, H W 3 a picture in RGB."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_vlm.config.objective_configs import RetrievalForm
from megatron_vlm.data.records.record import Conversation, Image, Record, Video
from megatron_vlm.data.tokens.boxes_as_text import Outline, outlines_of
from megatron_vlm.data.tokens.encoder import Encoder, image_sizes
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import Example, Sample
from megatron_vlm.data.tokens.visuals import GridQueue
from megatron_vlm.errors import DataError

MAX_SHOWN_FRAMES = 16  # temporal patches of a video that get pictures


@dataclass(frozen=True)
class View:
    """An image, or one temporal patch of a video: the content of one run of placeholders."""

    label: str  # image 0; video 1, frames 4 and 5
    name: str  # its path, for display
    height: int  # in patches
    width: int
    num_tokens: int
    pictures: tuple[np.ndarray, ...] = ()  # [H, W, 3] bytes; empty if none was decoded
    outlines: tuple[Outline, ...] = ()  # boxes and points that the record marks on it

    @property
    def text(self) -> str:
        return f"[{self.label}: {self.height}x{self.width} patches, {self.num_tokens} tokens]"


@dataclass(frozen=True)
class TextPiece:
    """Adjacent tokens of one kind: text, special tokens, or the placeholders of a view."""

    text: str
    trained: bool = False
    special: bool = False  # tokens of the template, not text that spells them
    view: View | None = None
    weight: float = 1.0  # weight of the loss of each token, if they are trained

    @property
    def mark(self) -> str:
        """Label of a trained piece whose tokens weigh more or less than others, otherwise empty."""
        return f"x{self.weight:.6g}" if self.trained and self.weight != 1 else ""


@dataclass(frozen=True)
class ShownTurn:
    """A turn without the frame that the template puts around each turn: the token that opens it and
    its role, and the newline after its end. Tokens outside turns, as in chunk lists, have no
    role."""

    role: str
    pieces: tuple[TextPiece, ...]


@dataclass(frozen=True)
class ShownSample:
    """A sample as the model sees it, and the place of its record."""

    number: int  # number over all sources, as --sample counts
    where: str
    sample: Sample
    turns: tuple[ShownTurn, ...]
    problem: str | None = None  # why its pictures cannot be shown, or its boxes cannot be right

    @property
    def figures(self) -> str:
        """Sizes of the sample in one line."""
        sizes = [f"{len(self.sample.ids_S):,} tokens", f"{self.sample.num_supervised:,} trained"]
        for kind, grids in (("image", self.sample.image_grids), ("video", self.sample.video_grids)):
            if grids:
                sizes.append(f"{len(grids)} {kind}{'s' if len(grids) > 1 else ''}")
        if self.sample.num_patches:
            sizes.append(f"{self.sample.num_patches:,} patches")
        return ", ".join(sizes)


def show_example(
    reader: Reader, raw: Any, where: str, example: Example, pictures: bool, number: int = 0
) -> ShownSample:
    """Return the rows of a raw record, with pictures if `pictures` is set."""
    shown = [
        _show_row(reader, chat, where, sample, pictures, number)
        for (chat, _), sample in zip(reader.chats(raw, where), example, strict=False)
    ]
    if reader.kind in ("chat", "prompt"):
        return shown[0]
    turns = list[ShownTurn]()
    for each in shown:
        if isinstance(reader.kind, RetrievalForm):
            is_query = not turns and reader.kind.answers is None
            name = "negative" if each.sample.is_rejected else "query" if is_query else "positive"
            turns += [replace(turn, role=f"{turn.role} ({name})") for turn in each.turns]
            continue
        name = "rejected" if each.sample.is_rejected else "chosen"
        answer = next(n for n, turn in enumerate(each.turns) if _is_trained(turn))
        turns += [
            replace(turn, role=f"{turn.role} ({name})") if _is_trained(turn) else turn
            for turn in each.turns[answer if turns else 0 :]
        ]
    problem = next((each.problem for each in shown if each.problem), None)
    return replace(shown[0], turns=tuple(turns), problem=problem)


def _is_trained(turn: ShownTurn) -> bool:
    return any(piece.trained for piece in turn.pieces)


def _show_row(
    reader: Reader, record: Record, where: str, sample: Sample, pictures: bool, number: int = 0
) -> ShownSample:
    """Return the sample of a parsed chat. Its views have pictures if `pictures` is set."""
    views, problem = _with_outlines(_views(sample, record, reader), sample, record, reader)
    if pictures and views:
        try:
            row = reader.row_of_chat(record, sample)
            views = _with_pictures(views, row, sample, reader.encoder)
        except DataError as error:
            problem = str(error)
    return ShownSample(number, where, sample, _turns(sample, reader, views, where), problem)


def _views(sample: Sample, record: Record, reader: Reader) -> list[View]:
    """Return first all images, then all temporal patches of all videos."""
    images = zip(sample.image_grids, record.media(Image), strict=False)  # a cut drops the last ones
    videos = zip(sample.video_grids, record.media(Video), strict=False)
    merged = reader.tokens.merge**2
    temporal = reader.encoder.videos.temporal_patch_size
    views = [
        View(f"image {i}", _short_name(image.name), h, w, h * w // merged)
        for i, ((_, h, w), image) in enumerate(images)
    ]
    for i, ((t, h, w), video) in enumerate(videos):
        name = _short_name(video.name)
        views += [
            View(f"video {i}, {_frames(j, temporal)}", name, h, w, h * w // merged)
            for j in range(t)
        ]
    return views


def _frames(place: int, count: int) -> str:
    """Name the frames that the model sees as one: frames 2 and 3 for the second pair."""
    first, last = place * count, place * count + count - 1
    return (
        f"frame {place}" if count == 1 else f"frames {first} {'and' if count == 2 else 'to'} {last}"
    )


def _with_outlines(
    views: list[View], sample: Sample, record: Record, reader: Reader
) -> tuple[list[View], str | None]:
    """Return the views of images with boxes and points, and the problem with these, if any."""
    count = len(sample.image_grids)  # the views of videos follow
    try:
        has_boxes = isinstance(record, Conversation) and record.objects is not None
        sizes = image_sizes(record, reader.policy) if has_boxes else []
        y_first = reader.encoder.renderer.chat_format.y_first
        image_outlines = outlines_of(record, sizes, len(record.media(Image)), y_first)
    except DataError as error:  # a picture was removed after the text was encoded
        return views, str(error)
    pairs = zip(views[:count], image_outlines, strict=False)
    views = [replace(view, outlines=tuple(outlines)) for view, outlines in pairs] + views[count:]
    numbers = (n for outlines in image_outlines for s in outlines for n in s.numbers)
    if (worst := max(numbers, default=0)) <= 1000:
        return views, None
    return views, (
        f"{record.where}: a box in the text has {worst:g}, above 1000: the model's coordinates are "
        "thousandths of the picture's sides, and text is learnt as it stands; to give pixels, use "
        "objects and <bbox> (docs/data.md)"
    )


def _short_name(name: str) -> str:
    return "inline" if name.startswith("data:") else name


def _with_pictures(views: Sequence[View], row: Row, sample: Sample, encoder: Encoder) -> list[View]:
    pictures: list[tuple[np.ndarray, ...]] = []
    for patches, grids, media in (
        (row.pixel_values_PC, sample.image_grids, encoder.images),
        (row.pixel_values_videos_PC, sample.video_grids, encoder.videos),
    ):
        parts = () if patches is None else patches.split([math.prod(grid) for grid in grids])
        for part, grid in zip(parts, grids, strict=True):
            frames = media.pictures(part.numpy(), grid)
            pictures += [tuple(shown) for shown in frames[:MAX_SHOWN_FRAMES]]
            pictures += [()] * (len(frames) - MAX_SHOWN_FRAMES)
    return [replace(view, pictures=p) for view, p in zip(views, pictures, strict=True)]


def _turns(
    sample: Sample, reader: Reader, views: Sequence[View], where: str
) -> tuple[ShownTurn, ...]:
    """Cut the tokens where a turn begins and, within a turn, where their kind changes."""
    renderer = reader.encoder.renderer
    tokenizer = renderer.tokenizer
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    kind_S = np.isin(sample.ids_S, special).astype(np.int64)  # 0: text, 1: special, below 0: a view
    placed_views = list(_views_in_order(sample, reader, views, where))
    for number, (start, view) in enumerate(placed_views):
        kind_S[start : start + view.num_tokens] = -1 - number
    turn_S = np.cumsum(sample.ids_S == renderer.start_id)
    trained_S = sample.trained_S.astype(np.float32)
    weight_S = trained_S if sample.weights_S is None else sample.weights_S
    change_S = np.stack([turn_S, kind_S, weight_S])
    cuts = np.flatnonzero((change_S[:, 1:] != change_S[:, :-1]).any(axis=0)) + 1
    turns: dict[int, list[TextPiece]] = {}
    for start, end in itertools.pairwise([0, *cuts.tolist(), len(kind_S)]):
        kind, trained = int(kind_S[start]), bool(sample.trained_S[start])
        weight = float(weight_S[start]) if trained else 1.0
        if kind < 0:
            view = placed_views[-1 - kind][1]
            piece = TextPiece(view.text, trained, view=view)
        else:
            ids = sample.ids_S[start:end].tolist()
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            piece = TextPiece(text, trained, special=kind == 1, weight=weight)
        turns.setdefault(int(turn_S[start]), []).append(piece)
    opens = renderer.chat_format.opens
    return tuple(_without_frame(pieces, opens) for pieces in turns.values())


def _views_in_order(
    sample: Sample, reader: Reader, views: Sequence[View], where: str
) -> Iterator[tuple[int, View]]:
    """Yield the views in the order of their tokens, each with the position of its first token."""
    images, videos = (
        torch.tensor(grids) if grids else None for grids in (sample.image_grids, sample.video_grids)
    )
    remaining = {
        reader.tokens.image_id: iter(views[: len(sample.image_grids)]),
        reader.tokens.video_id: iter(views[len(sample.image_grids) :]),
    }
    ids_S = torch.from_numpy(sample.ids_S.astype(np.int64))
    for run in GridQueue(images, videos, reader.tokens).runs_of(ids_S, where):
        yield run.start, next(remaining[int(ids_S[run.start])])


def _without_frame(pieces: list[TextPiece], opens: str) -> ShownTurn:
    """Return the pieces of a turn without its frame, unless the frame is trained."""
    role = ""
    if len(pieces) > 1 and pieces[0].text == opens and not (pieces[0].trained or pieces[1].trained):
        role, _, body = pieces[1].text.partition("\n")
        pieces = [*([replace(pieces[1], text=body)] if body else []), *pieces[2:]]
    if pieces and pieces[-1] == TextPiece("\n"):
        pieces = pieces[:-1]
    return ShownTurn(role, tuple(pieces))
