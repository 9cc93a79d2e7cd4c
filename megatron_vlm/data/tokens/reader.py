"""Reader: from raw records to samples, and from samples to rows with pixels. RowMaker is its public
form, for rows without a configuration file, e.g. in a service."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.objective_configs import RecordKind, RetrievalForm
from megatron_vlm.config.schema import Config, DataConfig, VideoLimits
from megatron_vlm.data.media.media import MediaPolicy, read_image, resolve_path
from megatron_vlm.data.media.video_file import iter_frames
from megatron_vlm.data.records.formats import VARIABLE_KEYS, parse_record
from megatron_vlm.data.records.preferences import MARGIN, parse_labelled, parse_pair, split_margin
from megatron_vlm.data.records.record import ChatMessage, Conversation, Image, Record, Video
from megatron_vlm.data.records.retrieval import parse_retrieval
from megatron_vlm.data.tokens.chat_renderer import ChatRenderer
from megatron_vlm.data.tokens.encoder import Encoder
from megatron_vlm.data.tokens.row import IGNORE, Row, check_ids, place_row
from megatron_vlm.data.tokens.sample import Example, RecordDropped, Sample
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.errors import DataError, within
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.spec import ModelSizes, Tokens
from megatron_vlm.family.video_plan import Grid
from megatron_vlm.io.hub import folder_of, pin
from megatron_vlm.io.untrusted import home_path

# This function adds targets to the row of a sample, whose record is at this place.
Teach = Callable[[Row, Sample, str], Row]


@dataclass(frozen=True)
class Reader:
    """A reader that makes samples and rows from the raw records of one source."""

    encoder: Encoder
    policy: MediaPolicy
    tokens: Tokens
    patch_inputs: Callable[[Tensor], dict[str, Tensor]]  # VisionSizes.patch_inputs
    kind: RecordKind = "chat"  # prompt: an answer that ends a record is left out

    @property
    def prompts_only(self) -> bool:
        """True if every record is a prompt."""
        return self.kind == "prompt"

    def encode(
        self, raw: object, where: str, prompt: bool = False, unused_keys: Counter[str] | None = None
    ) -> Sample:
        """Encode a record of one chat. Of images, only the headers are read."""
        return self.encode_chat(self.parse(raw, where, unused_keys), prompt)

    def encode_example(
        self, raw: object, where: str, unused_keys: Counter[str] | None = None
    ) -> Example:
        """Encode a record of any kind: one row for each of its chats."""
        example = tuple(
            replace(self.encode_chat(chat), is_rejected=is_rejected)
            for chat, is_rejected in self.chats(raw, where, unused_keys)
        )
        if self.kind in ("pair", "rated_pair", "label"):
            _check_weights(example, where)
        if len(example) == 2 and np.array_equal(example[0].ids_S, example[1].ids_S):
            raise DataError(
                "and chosen have the same tokens: nothing can be learnt from the pair",
                place=where,
                key="rejected",
                remedy="leave the record out, or set data.max_errors=100",
            )
        return example

    def encode_chat(self, record: Record, prompt: bool = False) -> Sample:
        """Encode a parsed chat."""
        is_retrieval = isinstance(self.kind, RetrievalForm)
        prompt = prompt or self.prompts_only or is_retrieval
        sample = self.encoder.encode(record, self.policy, prompt)
        if is_retrieval:
            sample = with_end(sample, self.encoder.renderer.end_of_text)
        check_ids(sample.ids_S, self.tokens, record.where)
        return sample

    def chats(
        self, raw: object, where: str, unused_keys: Counter[str] | None = None
    ) -> list[tuple[Record, bool]]:
        """Parse a record of any kind. Return its chats, each with whether it is rejected."""
        if self.kind in ("chat", "prompt"):
            return [(self.parse(raw, where, unused_keys), False)]
        counts = Counter[str]()
        parse, ignored = partial(self.parse, unused_keys=counts), self.encoder.cfg.ignore_keys
        with within(where):
            if isinstance(self.kind, RetrievalForm):
                chats = parse_retrieval(raw, parse, self.kind, ignored)
            elif self.kind == "rated_pair":
                chats = parse_pair(split_margin(raw, ignored)[0], parse)
            else:
                read = parse_pair if self.kind == "pair" else parse_labelled
                chats = read(raw, parse, ignored)
        if unused_keys is not None:
            unused_keys.update({*counts})  # a key counts once for a record
        places = [": ".join(filter(None, (where, chat.where))) for chat, _ in chats]
        return [
            (replace(chat, where=place), is_rejected)
            for place, (chat, is_rejected) in zip(places, chats, strict=True)
        ]

    def parse(self, raw: object, where: str, unused_keys: Counter[str] | None = None) -> Record:
        """Parse a raw record of one chat."""
        cfg = self.encoder.cfg
        record = parse_record(
            raw,
            where,
            cfg.ignore_keys,
            strict=cfg.unknown_keys == "refuse",
            lone_marks=cfg.lone_marks,
            unused_keys=unused_keys,
            caption_prompt=cfg.caption_prompt,
            prompts_only=self.prompts_only,
        )
        record = record if cfg.system is None else with_system(record, cfg.system)
        return without_answer(record) if self.prompts_only else record

    def is_contrary(self, raw: object, sample: Sample) -> bool:
        """Return whether an answer begins in another way than its prompt asks for, and neither the
        configuration nor the record says whether the model is to think."""
        if isinstance(self.kind, RetrievalForm):
            return False
        if isinstance(raw, Mapping) and any(raw.get(key) is not None for key in VARIABLE_KEYS):
            return False
        return self.encoder.renderer.is_contrary(sample.ids_S, sample.trained_S)

    def row(self, raw: object, where: str, sample: Sample) -> Row:
        """Return the sample of a record of one chat with its pixels."""
        return self.row_of_chat(self.parse(raw, where), sample)

    def rows(
        self, raw: object, where: str, example: Example, teach: Teach | None = None
    ) -> list[Row]:
        """Return the rows of a record with their pixels. `teach` adds the targets of a teacher."""
        chats, margin = self.chats(raw, where), None
        if self.kind == "rated_pair":
            margin = split_margin(raw, self.encoder.cfg.ignore_keys)[1]
        return [
            self.row_of_chat(chat, sample, teach, margin)
            for (chat, _), sample in zip(chats, example, strict=True)
        ]

    def row_of_chat(
        self,
        record: Record,
        sample: Sample,
        teach: Teach | None = None,
        margin: float | None = None,
    ) -> Row:
        """Return the sample of a parsed chat with its pixels, and with the margin of its pair."""
        where = record.where
        images = _read(record.media(Image), sample.image_grids, self.picture, f"{where}: image")
        videos = _read(record.media(Video), sample.video_grids, self._video, f"{where}: video")
        ids_S = torch.from_numpy(sample.ids_S.astype(np.int64))
        labels_S = torch.where(torch.from_numpy(sample.trained_S), ids_S, IGNORE)
        weights_S = None if sample.weights_S is None else torch.from_numpy(sample.weights_S)
        row = replace(Row(ids_S, labels_S, *images, *videos), loss_weights_S=weights_S)
        row = row if teach is None else teach(row, sample, where)
        if isinstance(self.kind, RetrievalForm):
            row = self._read_at_end(row, self.kind.answers)
        elif margin is not None:
            values_S = {MARGIN: torch.full(row.ids_S.shape, margin)}
            row = replace(self._read_at_end(row), values_S=values_S)
        return place_row(row, self.tokens, where, tuple(row.values_S))

    def _read_at_end(self, row: Row, answers: tuple[str, str] | None = None) -> Row:
        """Return the row with its last token as the only place that is read: for the logits of yes
        and no, or for its hidden state, where the target has no meaning."""
        targets = [int(row.ids_S[-1])]
        if answers is not None:
            targets = self.encoder.renderer.ids_of(answers)
        targets_SJ = torch.full((len(row.ids_S), len(targets)), IGNORE)
        targets_SJ[-1] = torch.tensor(targets)
        labels_S = torch.full_like(row.ids_S, IGNORE)
        return replace(row, labels_S=labels_S, targets=targets_SJ.squeeze(1))

    def media_files(self, raw: object, where: str) -> list[Path]:
        """Return the files with the pictures and videos of a record. Raise a DataError if one of
        them is no file in the root, as on the network."""
        sources: list[Any] = []
        for chat, _ in self.chats(raw, where):
            media = [each.source for each in (*chat.media(Image), *chat.media(Video))]
            sources += [each for each in media if not isinstance(each, tuple)]
            sources += [frame.source for each in media if isinstance(each, tuple) for frame in each]
        names = [each for each in sources if isinstance(each, str) and not each.startswith("data:")]
        return [resolve_path(name, self.policy, where) for name in dict.fromkeys(names)]

    def picture(self, image: Image, where: str) -> Tensor:
        """Decode an image, resize it and cut it into patches: bytes [P, C]."""
        images = self.encoder.images.with_bounds(image.min_pixels, image.max_pixels, where)
        return torch.from_numpy(images.patches(read_image(image, self.policy, where)))

    def _video(self, video: Video, where: str) -> Tensor:
        plan = self.encoder.video_plan(video, self.policy, where)
        if isinstance(video.source, str):
            frames = iter_frames(resolve_path(video.source, self.policy, where), plan.indices)
        else:
            frames = (np.asarray(read_image(f, self.policy, where)) for f in video.source)
        try:
            return torch.from_numpy(self.encoder.videos.patches(frames, plan))
        except DataError as error:
            raise error.within(where) from error


def _check_weights(example: Example, where: str) -> None:
    """Refuse weights of tokens, which losses over whole answers have no place for."""
    if any(sample.weights_S is not None for sample in example):
        raise DataError(
            "has no meaning where whole answers are compared",
            place=where,
            key="weight",
            remedy="give 0 or 1, or leave it out",
        )


def make_encoder(model_path: str, cfg: DataConfig) -> Encoder:
    """Return an encoder with the checkpoint's tokenizer and processors."""
    folder = folder_of(model_path)
    tokenizer = read_tokenizer(model_path, cfg.add_tokens)
    family = read_family(folder)
    renderer = ChatRenderer(tokenizer, family.chat, cfg.template_kwargs)
    images, videos = family.images(folder, vars(cfg)), family.videos(folder, vars(cfg.video))
    return Encoder(renderer, images, videos, cfg)


def make_reader(
    encoder: Encoder,
    cfg: DataConfig,
    sizes: ModelSizes,
    root: str | None,
    kind: RecordKind = "chat",
) -> Reader:
    """Return a reader for records whose images are in `root`; with None it opens no local files."""
    if isinstance(kind, RetrievalForm) and kind.answers is not None:
        encoder.renderer.ids_of(kind.answers)  # checked before anything is read
    root = None if root is None else str(home_path(root))
    most = encoder.images.max_aspect
    policy = MediaPolicy(root, cfg.allow_http, cfg.exif_orientation, most)
    return Reader(encoder, policy, sizes.tokens, sizes.vision.patch_inputs, kind)


def with_end(sample: Sample, end_ids: Sequence[int]) -> Sample:
    """Return a sample that ends with these tokens. Only the last of them counts."""
    ids_S = np.concatenate([sample.ids_S, np.array(end_ids, dtype=sample.ids_S.dtype)])
    trained_S = np.zeros(len(ids_S), dtype=bool)
    trained_S[-1] = True
    return replace(sample, ids_S=ids_S, trained_S=trained_S)


def with_system(record: Record, text: str) -> Record:
    """Return a chat that begins with a system message: its own, or else this text."""
    if not isinstance(record, Conversation) or record.turns[0].role == "system":
        return record
    return replace(record, turns=(ChatMessage("system", (text,)), *record.turns))


def without_answer(record: Record) -> Record:
    """Return the record without its last answer, if it ends with one."""
    if not isinstance(record, Conversation) or record.turns[-1].role != "assistant":
        return record
    turns = record.turns[:-1]
    if not turns:
        raise DataError(
            "has only an answer", place=record.where, remedy="give the question before it"
        )
    return replace(record, turns=turns)


def _read(
    media: Sequence[Any], grids: Sequence[Grid], read: Callable[[Any, str], Tensor], where: str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the patches and the grids of a sample's media. A cut drops the last ones."""
    patches = []
    for i, (medium, grid) in enumerate(zip(media[: len(grids)], grids, strict=True)):
        part = read(medium, f"{where} {i}")
        patches.append(part)
        if len(part) != math.prod(grid):
            raise DataError(
                f"makes {len(part)} patches now, and made {math.prod(grid)} when its text was "
                "encoded: the file has changed",
                place=f"{where} {i}",
                remedy="delete data.cache_dir and start again",
            )
    return (torch.cat(patches), torch.tensor(grids)) if patches else (None, None)


class RowMaker:
    """A maker of rows with the tokenizer and the processors of a checkpoint: a folder, or a name on
    the Hub. `settings` are keys of the configuration's `data`. Local files are opened only inside
    `image_root`. Unknown keys of records are refused, unless `settings` allow them."""

    def __init__(self, checkpoint: str, **settings: Any):
        video = VideoLimits(**settings.pop("video", {}))
        cfg = DataConfig(**{"unknown_keys": "refuse", **settings}, video=video)
        check_values(replace(Config(), data=cfg))
        checkpoint = pin(checkpoint)
        sizes = read_sizes(checkpoint, cfg.add_tokens)  # refuses tokens that are not new
        encoder = make_encoder(checkpoint, cfg)
        self.reader = make_reader(encoder, cfg, sizes, cfg.image_root)

    def row(
        self, record: Mapping[str, Any], prompt: bool = False, where: str = "the record"
    ) -> Row:
        """Return the row of a record in any format of docs/data.md. Labels follow `train_on` and
        the record's weights or mask. A prompt has no labels, and ends where the answer begins.
        Errors call the record `where`."""
        try:
            sample = self.reader.encode(record, where, prompt)
        except RecordDropped as rule:
            more = "" if prompt else ", or pass prompt=True for a row without labels"
            remedy = f"change the record or the limits{more}"
            raise DataError(f": {rule}", place=where, remedy=remedy) from None
        return self.reader.row(record, where, sample)
