"""A source with what encodes it: the samples of one entry of data.train, and their pixels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.encode.positions import VisionTokens
from megatron_vlm.data.encode.row import IGNORE, PlacedRow, Row, place_row
from megatron_vlm.data.encode.sample import Encoder, Sample
from megatron_vlm.data.media.images import ImageSettings, image_patches
from megatron_vlm.data.media.media import MediaPolicy, read_image, resolve_path
from megatron_vlm.data.media.video import VideoSettings, video_patches
from megatron_vlm.data.media.video_file import iter_frames
from megatron_vlm.data.read.formats import parse_record
from megatron_vlm.data.read.records import Image, Record, Video
from megatron_vlm.errors import DataError


@dataclass(frozen=True)
class Reader:
    """Raw records of one source to samples and rows."""

    encoder: Encoder
    policy: MediaPolicy
    tokens: VisionTokens

    def encode(self, raw: object, where: str) -> Sample:
        """Tokens and grids; headers of images are read, pixels are not."""
        return self.encoder.encode(parse_record(raw, where), self.policy)

    def row(self, raw: object, where: str, sample: Sample) -> PlacedRow:
        """The sample with its pixels."""
        record = parse_record(raw, where)
        images = record.media(Image)[: len(sample.image_grids)]
        videos = record.media(Video)[: len(sample.video_grids)]
        image_patches = [
            self._image(image, grid, f"{where}: image {i}")
            for i, (image, grid) in enumerate(zip(images, sample.image_grids, strict=True))
        ]
        video_patches = [
            self._video(video, grid, f"{where}: video {i}")
            for i, (video, grid) in enumerate(zip(videos, sample.video_grids, strict=True))
        ]
        ids_S = torch.from_numpy(sample.ids_S.astype(np.int64))
        row = Row(
            ids_S,
            torch.where(torch.from_numpy(sample.trained_S), ids_S, IGNORE),
            _stack(image_patches),
            torch.tensor(sample.image_grids) if image_patches else None,
            _stack(video_patches),
            torch.tensor(sample.video_grids) if video_patches else None,
        )
        return place_row(row, self.tokens, where)

    def picture(self, image: Image, where: str) -> Tensor:
        """Decoded, resized, cut into patches: bytes [P, C]."""
        return torch.from_numpy(
            image_patches(read_image(image, self.policy, where), self.encoder.images)
        )

    def _image(self, image: Image, grid: tuple[int, int, int], where: str) -> Tensor:
        patches = self.picture(image, where)
        _check_unchanged(len(patches), grid, where)
        return patches

    def _video(self, video: Video, grid: tuple[int, int, int], where: str) -> Tensor:
        plan = self.encoder.video_plan(video, self.policy, where)
        if isinstance(video.source, str):
            frames = iter_frames(resolve_path(video.source, self.policy, where), plan.indices)
        else:
            frames = (np.asarray(read_image(f, self.policy, where)) for f in video.source)
        try:
            patches = video_patches(frames, plan, self.encoder.videos)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        _check_unchanged(len(patches), grid, where)
        return torch.from_numpy(patches)


def make_encoder(model_path: str, cfg: DataConfig) -> Encoder:
    """The checkpoint's tokenizer and processors with the configuration's rules."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    images = ImageSettings.from_checkpoint(model_path, cfg.min_pixels, cfg.max_pixels)
    return Encoder(tokenizer, images, VideoSettings.from_checkpoint(model_path), cfg)


def make_reader(
    encoder: Encoder, cfg: DataConfig, hf_config: PretrainedConfig, root: str
) -> Reader:
    """A reader for a source whose images lie in `root`."""
    policy = MediaPolicy(str(Path(root).expanduser()), cfg.allow_http, cfg.exif_orientation)
    return Reader(encoder, policy, VisionTokens.of(hf_config))


def media_names(record: Record) -> list[str]:
    """What a record's images and videos are called, for people."""
    return [item.name for kind in (Image, Video) for item in record.media(kind)]


def _check_unchanged(patches: int, grid: tuple[int, int, int], where: str) -> None:
    if patches != grid[0] * grid[1] * grid[2]:
        raise DataError(
            f"{where} makes {patches} patches now, {grid[0] * grid[1] * grid[2]} when its text was "
            "encoded: the file has changed; delete data.cache_dir and start again"
        )


def _stack(patches: list[Tensor]) -> Tensor | None:
    return torch.cat(patches) if patches else None
