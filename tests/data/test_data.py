# .venv/bin/python -m pytest tests/data/test_data.py
"""Rows and micro-batches: positions equal Hugging Face's, and each mismatch names its row."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from megatron_vlm.data.batches.collate import split_micro_batches
from megatron_vlm.data.batches.micro_batch import MicroBatch
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.data.tokens.visuals import check_placeholders
from megatron_vlm.errors import DataError
from megatron_vlm.family.qwen.model import mrope_positions
from megatron_vlm.family.spec import Tokens
from tests.support.batches import MIXED, RowSpec, make_rows, token_ids

IDS = token_ids()
TOKENS = Tokens(512, IDS.image, IDS.video, 2, mrope_positions)


def collate_rows(rows: list[Row]) -> MicroBatch:
    return split_micro_batches(rows, len(rows), TOKENS)[0]


def test_positions_equal_hugging_face(tiny):
    config = AutoConfig.from_pretrained(tiny())
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    for row in make_rows(MIXED):
        types = (row.ids_S == IDS.image).int() + 2 * (row.ids_S == IDS.video).int()
        expected, _ = model.get_rope_index(
            row.ids_S[None], types[None], row.image_grid_I3, row.video_grid_I3
        )
        assert torch.equal(collate_rows([row]).position_ids_3BS, expected)


def test_positions_of_one_image_by_hand():
    """Two words, an image of 2 x 3 tokens, one word: positions continue after the longer side."""
    ids = torch.tensor([1, 2, *[IDS.image] * 6, 3])
    row = Row(ids, ids, torch.zeros(24, 4), torch.tensor([[1, 4, 6]]))
    time, height, width = collate_rows([row]).position_ids_3BS[:, 0].tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5]


def test_two_images_with_nothing_between_them():
    ids = torch.tensor([1, *[IDS.image] * 3, 2])
    row = Row(ids, ids, torch.zeros(12, 4), torch.tensor([[1, 2, 2], [1, 2, 4]]))
    assert collate_rows([row]).position_ids_3BS[0, 0].tolist() == [0, 1, 2, 2, 4]


def test_collate_pads_right_and_shifts():
    a = Row(torch.tensor([5, 6, 7]), torch.tensor([IGNORE, 6, 7]))
    b = Row(torch.tensor([8, 9]), torch.tensor([IGNORE, 9]))
    batch = collate_rows([a, b])
    assert batch.ids_BS.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.targets_BS.tolist() == [[6, 7, IGNORE], [9, IGNORE, IGNORE]]
    assert (batch.lengths, batch.num_supervised) == ((3, 2), 3)
    rows = batch.log_probs_by_row(torch.tensor([-1.0, -2.0, -3.0]))
    assert [row.tolist() for row in rows] == [[0, -1, -2], [0, -3]]


def test_micro_batches_keep_order_and_length():
    parts = split_micro_batches(make_rows(MIXED), 3, TOKENS)
    assert [len(part.lengths) for part in parts] == [3, 3, 2]
    assert [part.ids_BS.shape[1] for part in parts] == [max(part.lengths) for part in parts]
    assert len({part.ids_BS.shape[1] for part in parts}) > 1  # no common length


def image_row() -> Row:
    return make_rows((RowSpec(9, images=((4, 6), (2, 2))),))[0]


def broken_rows() -> dict[str, tuple[Row, str]]:
    row = image_row()
    more = torch.cat([row.ids_S, torch.tensor([IDS.start, IDS.image, IDS.end])])
    fewer = row.ids_S.clone()
    fewer[(fewer == IDS.image).nonzero()[0]] = 1
    no_pads = torch.where(row.ids_S == IDS.image, 1, row.ids_S)
    video = torch.tensor([1, IDS.video, IDS.video, 2])
    two_frames = dict(
        pixel_values_videos_PC=torch.zeros(32, 4), video_grid_I3=torch.tensor([[2, 4, 4]])
    )
    return {
        "too many tokens": (replace(row, ids_S=more, labels_S=more), "left over after 2 images"),
        "too few tokens": (
            replace(row, ids_S=fewer),
            r"image 0 has 2 x 3 = 6 features but 5 placeholder tokens",
        ),
        "no tokens": (replace(row, ids_S=no_pads), r"2 images but placeholder tokens for only 0"),
        "no image": (Row(row.ids_S, row.labels_S), "left over after 0 images"),
        "patches without grid": (
            replace(row, image_grid_I3=None),
            "pixel_values has 28 patches but .* 0",
        ),
        "labels of another length": (
            replace(row, labels_S=row.labels_S[1:]),
            "labels has .* and ids",
        ),
        "an id too high": (
            replace(row, ids_S=torch.where(row.ids_S == IDS.end, 512, row.ids_S)),
            r"ids\[\d+\]=512 .* 0 to 511",
        ),
        "an id below 0": (replace(row, ids_S=row.ids_S - 2**40), r"ids\[0\]=-\d{13} "),
        "a label that is none": (
            replace(row, labels_S=torch.where(row.labels_S == IGNORE, IGNORE, -1)),
            r"labels\[\d+\]=-1 .* 0 to 511",
        ),
        "frames joined": (Row(video, video, **two_frames), "video frame 0 has 2 x 2 = 4 features"),
    }


@pytest.mark.parametrize("name", broken_rows())
def test_mismatch_names_the_row(name):
    row, message = broken_rows()[name]
    good = image_row()
    with pytest.raises(DataError, match=rf"row 2: .*{message}"):
        split_micro_batches([good, good, row], 2, TOKENS)


def test_counts_that_agree_only_in_total_are_found():
    """5 + 2 tokens for images of 6 and 1 features: the sum is right, and each image is wrong."""
    row = image_row()
    ids = row.ids_S[row.ids_S < 250].tolist()[:2]
    tokens = torch.tensor([*ids, *[IDS.image] * 5, 3, *[IDS.image] * 2])
    with pytest.raises(DataError, match="row 0: image 0 has 2 x 3 = 6 features but 5"):
        collate_rows([replace(row, ids_S=tokens, labels_S=tokens)])
    with pytest.raises(DataError, match="row 0 of the micro-batch: image 0 has"):
        check_placeholders(tokens[None], row.image_grid_I3, None, TOKENS)


def test_empty_batch():
    with pytest.raises(DataError, match="at least one row"):
        split_micro_batches([], 2, TOKENS)
