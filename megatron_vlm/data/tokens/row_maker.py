"""RowMaker: rows for training or generation without a configuration file, e.g. in a service."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_vlm.config.checks import check_values
from megatron_vlm.config.schema import Config, DataConfig, VideoLimits
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.data.tokens.sample import RecordDropped
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.io.hub import pin


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
