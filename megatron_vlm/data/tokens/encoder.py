"""Encoding of records as samples: the chat is rendered, placeholders are expanded by the tokens of
their images and videos, and what is too long is cut, dropped or refused.

Shapes: U tokens before placeholders are expanded, S tokens.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.media.media import MediaPolicy, image_size, resolve_path
from megatron_vlm.data.media.video_file import probe_video
from megatron_vlm.data.records.record import (
    Conversation,
    EncodedRecord,
    Image,
    ImageChunk,
    Record,
    Video,
)
from megatron_vlm.data.tokens.boxes_as_text import Size, write_boxes_as_text
from megatron_vlm.data.tokens.chat_renderer import ChatRenderer, Rendered
from megatron_vlm.data.tokens.sample import RecordDropped, Sample, Span, truncate, uneven_weights
from megatron_vlm.errors import DataError
from megatron_vlm.family.images import ImageReader, VideoReader
from megatron_vlm.family.video_plan import Grid, VideoInfo, VideoPlan


@dataclass
class Encoder:
    """An encoder that turns records into samples. It can be pickled, for worker processes."""

    renderer: ChatRenderer
    images: ImageReader
    videos: VideoReader
    cfg: DataConfig

    def encode(self, record: Record, policy: MediaPolicy, prompt: bool = False) -> Sample:
        """Encode a record. Raise DataError if it is wrong, RecordDropped if a rule leaves it out.
        No token of a prompt is trained, and a chat as a prompt ends where the answer begins."""
        sizes = image_sizes(record, policy)
        image_grids = [
            self.image_grid(image, size, f"{record.where}: image {i}")
            for i, (image, size) in enumerate(zip(record.media(Image), sizes, strict=True))
        ]
        plans = [
            self.video_plan(video, policy, f"{record.where}: video {i}")
            for i, video in enumerate(record.media(Video))
        ]
        if isinstance(record, Conversation):
            texts = [self.videos.text(plan) for plan in plans]
            bounded = partial(self._shorten_long_text, where=record.where, prompt=prompt)
            chat = write_boxes_as_text(record, sizes, self.renderer.chat_format.y_first)
            renderer = self.renderer.for_chat(chat)
            rendered = renderer.render(chat, texts, self.cfg, bounded, prompt)
        else:
            rendered = self._read_chunks(record, image_grids)
        whole, spans = self._expand(record, rendered, image_grids, plans)
        sample = self._fit(whole, spans, record.where, prompt)
        if prompt:
            return replace(sample, trained_S=np.zeros_like(sample.trained_S), weights_S=None)
        if not sample.num_supervised:
            more = "left to learn after the cut" if sample.is_truncated else "to learn"
            raise RecordDropped(f"nothing {more}")
        return sample

    def image_grid(self, image: Image, size: Size, where: str) -> Grid:
        """Return the grid of patches of an image with this height and width."""
        return self.images.with_bounds(image.min_pixels, image.max_pixels, where).grid(*size)

    def video_plan(self, video: Video, policy: MediaPolicy, where: str) -> VideoPlan:
        """Choose the frames of a video that the model sees, and their size."""
        if isinstance(video.source, str):
            path = resolve_path(video.source, policy, where)
            try:
                info = probe_video(path)
            except DataError as error:
                raise error.within(where) from error
            return self.videos.plan(info, True, where, video.options)
        size = image_size(video.source[0], policy, where)
        info = VideoInfo(len(video.source), video.options.fps, *size)
        return self.videos.plan(info, False, where, video.options)

    def _read_chunks(self, record: EncodedRecord, grids: Sequence[Grid]) -> Rendered:
        """Return the encoded tokens with a placeholder, and no mask, for each image."""
        ids: list[int] = []
        weights: list[float] = []
        cursor, image = 0, 0
        vocab = len(self.renderer.tokenizer)
        for index, chunk in enumerate(record.chunks):
            where = f"{record.where}: chunk {index}"
            if isinstance(chunk, ImageChunk):
                count = self.images.num_tokens(grids[image])
                if chunk.expected_tokens not in (None, count):
                    raise DataError(
                        f"differs from the {count} tokens that the image makes",
                        place=where,
                        key="expected_tokens",
                        found=chunk.expected_tokens,
                        remedy="encode it with this checkpoint's image processor",
                    )
                ids.append(self.renderer.image_id)
                weights.append(0)
                cursor, image = cursor + count, image + 1
                continue
            if max(chunk, default=0) >= vocab:
                raise DataError(
                    f"is outside the vocabulary of {vocab}",
                    place=where,
                    key=f"tokens[{chunk.index(max(chunk))}]",
                    found=max(chunk),
                )
            if {self.renderer.image_id, self.renderer.video_id} & set(chunk):
                raise DataError(
                    "has placeholder tokens", place=where, remedy="give images as image chunks"
                )
            end = cursor + len(chunk)
            ids += chunk
            weights += record.mask[cursor:end] if record.mask else [1] * len(chunk)
            cursor = end
        if record.mask is not None and len(record.mask) != cursor:
            raise DataError(
                f"has {len(record.mask)} entries for {cursor} tokens",
                place=record.where,
                key="mask",
            )
        return Rendered(np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32), ())

    def _expand(
        self,
        record: Record,
        rendered: Rendered,
        image_grids: Sequence[Grid],
        plans: Sequence[VideoPlan],
    ) -> tuple[Sample, list[Span]]:
        """Repeat each placeholder by its count. Return the sample and the spans of its media."""
        ids_U = rendered.ids_U
        video_grids = tuple(plan.grid for plan in plans)
        # One placeholder for each image, and one for each frame of a video.
        images = np.flatnonzero(ids_U == self.renderer.image_id)
        frames = np.flatnonzero(ids_U == self.renderer.video_id)
        frame_grids = [grid for grid in video_grids for _ in range(grid[0])]
        if (len(images), len(frames)) != (len(image_grids), len(frame_grids)):
            raise DataError(
                f": the chat template shows {len(images)} of {len(image_grids)} images and "
                f"{len(frames)} of {len(frame_grids)} video frames; most likely it takes images "
                "only in user and tool messages",
                place=record.where,
            )
        repeats_U = np.ones(len(ids_U), dtype=np.int64)
        repeats_U[images] = [self.images.num_tokens(grid) for grid in image_grids]
        repeats_U[frames] = [self.videos.num_tokens(grid) for grid in frame_grids]
        starts_U = repeats_U.cumsum() - repeats_U
        spans = [("image", place, place) for place in images.tolist()]
        ends = itertools.accumulate(grid[0] for grid in video_grids)
        for start, end in zip(rendered.video_starts, ends, strict=True):
            spans.append(("video", start, int(frames[end - 1])))
        weights_U = rendered.weights_U.copy()
        token_spans = []
        for kind, first, last in sorted(spans, key=lambda span: span[1]):
            first, last = self._with_brackets(ids_U, first, last)
            weights_U[first : last + 1] = 0  # Images are input and never predicted.
            token_spans.append(
                Span(kind, int(starts_U[first]), int(starts_U[last] + repeats_U[last]))
            )
        ids_S, weights_S = np.repeat(ids_U, repeats_U), np.repeat(weights_U, repeats_U)
        grids = tuple(image_grids), video_grids
        return Sample(ids_S, weights_S > 0, *grids, uneven_weights(weights_S)), token_spans

    def _with_brackets(self, ids_U: np.ndarray, first: int, last: int) -> tuple[int, int]:
        """Extend [first, last] by the special tokens around it."""
        while first > 0 and ids_U[first - 1] == self.renderer.vision_start_id:
            first -= 1
        while last + 1 < len(ids_U) and ids_U[last + 1] == self.renderer.vision_end_id:
            last += 1
        return first, last

    def _shorten_long_text(self, text: str, where: str, prompt: bool) -> str:
        """Apply data.truncation to a text far above it: its tokens could take gigabytes."""
        cfg, min_tokens = self.cfg, self.renderer.min_tokens_of(text)
        if min_tokens <= cfg.max_tokens:
            return text
        if cfg.truncation == "image_safe" and not prompt:
            return self.renderer.shorten(text, cfg.max_tokens)
        raise self._too_long({"max_tokens": f"{min_tokens} tokens or more"}, where)

    def _too_long(
        self, over: Mapping[str, str], where: str, sample: Sample | None = None
    ) -> DataError | RecordDropped:
        """Return the outcome of a record that is not cut, by its count over each limit, a key of
        the data. If a sample is passed, smaller images or videos would help."""
        if self.cfg.truncation != "error":  # image_safe cuts no prompt
            return RecordDropped("above data.max_tokens or data.max_images")
        smaller = f" lower {self.images.limits}," if sample and sample.image_grids else ""
        if sample and sample.video_grids:
            smaller += f" lower {self.videos.limits},"
        (key, counted), *others = over.items()
        too = (f", and data.{k}={getattr(self.cfg, k)} below its {count}" for k, count in others)
        return DataError(
            f"is below its {counted}" + "".join(too),
            place=where,
            key=f"data.{key}",
            found=getattr(self.cfg, key),
            remedy=f"raise the limit,{smaller} or set data.truncation to image_safe or drop",
        )

    def _fit(self, sample: Sample, spans: Sequence[Span], where: str, prompt: bool) -> Sample:
        """Return the sample within data.max_tokens and data.max_images, as data.truncation says. A
        prompt is never cut."""
        cfg, tokens, images = self.cfg, len(sample.ids_S), len(sample.image_grids)
        over = {}
        if tokens > cfg.max_tokens:
            over["max_tokens"] = f"{tokens} tokens"
        if cfg.max_images is not None and images > cfg.max_images:
            over["max_images"] = f"{images} images"
        if over and (prompt or cfg.truncation != "image_safe"):
            too_long = sample if tokens > cfg.max_tokens else None
            raise self._too_long(over, where, too_long)
        return truncate(sample, spans, cfg.max_tokens, cfg.max_images) if over else sample


def image_sizes(record: Record, policy: MediaPolicy) -> list[Size]:
    """Return height and width of each of the record's images, from its header."""
    return [
        image_size(image, policy, f"{record.where}: image {i}")
        for i, image in enumerate(record.media(Image))
    ]
