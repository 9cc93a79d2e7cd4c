"""Pictures and videos of Gemma 4 go through the same code as Qwen's: a budget of tokens in place of
pixels, small pictures enlarged, 3 x 3 patches of one frame in a token. The pixel values are those
of its processors in transformers, bit for bit."""

import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.tokens.reader import make_encoder, make_reader
from megatron_vlm.data.tokens.sample_views import show_example
from megatron_vlm.family import read_sizes
from megatron_vlm.family.gemma4.images import Gemma4Images
from tests.support.chats import image, picture, say, text
from tests.support.engine import ENVIRONMENT, ROOT

MERGE = 3


@pytest.mark.parametrize("size", [(480, 336), (64, 64), (100, 60), (30, 900), (1, 300)])
def test_pictures_of_gemma_4_are_its_processors(tiny, size):
    images = Gemma4Images(max_soft_tokens=70)
    encoder = replace(make_encoder(tiny(), DataConfig()), images=images)
    reader = make_reader(encoder, DataConfig(), read_sizes(tiny()), root=None)
    reader = replace(reader, tokens=replace(reader.tokens, merge=MERGE))
    raw = {"messages": [say("user", image(*size), text("Which?")), say("assistant", "Red.")]}
    sample = reader.encode(raw, "x:1")
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=70)(
        images=[picture(*size)], return_tensors="pt"
    )
    count = int(theirs["num_soft_tokens_per_image"][0])
    assert int((sample.ids_S == reader.tokens.image_id).sum()) == count > 40  # none is small
    row = reader.row(raw, "x:1", sample)
    [(_, h, w)] = sample.image_grids
    places = (
        torch.arange(h * w).view(h // MERGE, MERGE, w // MERGE, MERGE).transpose(1, 2).flatten()
    )
    expected = 2 * (theirs["pixel_values"][0][: h * w][places] - 0.5)  # as its tower reads them
    actual = images.pixel_values(row.pixel_values_PC, images.table())
    # Only the first keeps its size. The resizer of the processor for Pillow rounds differently, and
    # its rescaling by an ulp.
    assert (actual - expected).abs().max() <= (2**-22 if size == (480, 336) else 0.2)
    shown = show_example(reader, raw, "x:1", (sample,), pictures=True)
    [view] = [piece.view for turn in shown.turns for piece in turn.pieces if piece.view]
    assert (view.height, view.width, view.num_tokens) == (h, w, count) and shown.problem is None
    assert view.pictures[0].shape == (16 * h, 16 * w, 3)
    if size == (480, 336):
        assert np.array_equal(view.pictures[0], np.asarray(picture(*size)))


@pytest.mark.slow
@pytest.mark.engine("vllm")  # it has torchvision
def test_bits_are_those_of_the_processors_for_torchvision():
    """Of pictures of several sizes, and of a video by three choices of frames."""
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", ROOT / "tests" / "support" / "gemma4_processors.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", "equal"]
