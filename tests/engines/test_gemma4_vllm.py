# make vllm-env, then .venv/bin/python -m pytest tests/engines/test_gemma4_vllm.py
"""Gemma 4 in vLLM: it sees our pictures, draws from text as the trainer does, with new weights and
with adapters, and on a CPU is not asked about pictures, which it would get wrong."""

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from megatron_vlm.commands.agree.compare import BOUNDS, Agreement, compare, token_pairs
from megatron_vlm.config.schema import EngineConfig
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.completions import SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row
from megatron_vlm.data.tokens.tokenizer import read_tokenizer
from megatron_vlm.engines.engine_kinds import EngineSettings, engine_for
from megatron_vlm.engines.prompts import Prompts, seen_by_trainer, seen_videos
from megatron_vlm.engines.sampler import Adapter, Checkpoint
from megatron_vlm.engines.vllm_sampler import VllmSampler
from megatron_vlm.errors import CheckpointError, ConfigError, DataError
from megatron_vlm.family import read_family, read_sizes
from megatron_vlm.family.video_plan import VideoInfo, VideoOptions
from tests.engines.test_vllm_sampler import (
    DRAWN,
    GREEDY,
    NEW_TOKENS,
    ONE_THREAD,
    answered,
    ask_all,
    ours,
    worst,
)
from tests.model.test_parity import layout
from tests.support.chats import picture
from tests.support.engine import ENVIRONMENT, ROOT
from tests.support.error_fields import raises
from tests.support.reference import load_reference
from tests.training.test_decode import answer

TINY: dict[str, Any] = {"family": "gemma4", "head_dim": 32, "from_scratch": True}
FORMS = {"dense": TINY, "experts": TINY | {"experts": 4}}
# fp32 on the CPU, as for Qwen; measured worst case: see each test.
TOLERANCE = 1e-5
SHORT = SamplingSettings(4)


class Rows:
    """Rows of text, pictures and videos, built from a checkpoint's parts."""

    def __init__(self, folder: str):
        self.family, self.tokens = read_family(folder), read_sizes(folder).tokens
        self.images, self.videos = self.family.images(folder, {}), self.family.videos(folder, {})
        self.tokenizer = read_tokenizer(folder)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def row(self, *parts: Any) -> Row:
        """A text is a str, a picture has two sides, and a video frames and two sides."""
        ids, media = [self.tokenizer.bos_token_id], {1: ([], []), 0: ([], [])}
        marks = self.family.chat.marks
        for number, part in enumerate(parts):
            if isinstance(part, str):
                ids += self.ids(part)
                continue
            is_video = len(part) == 3
            if is_video:
                frames, high, wide = part
                seconds = tuple(1.5 * frame + 58 for frame in range(frames))
                options = VideoOptions(times=seconds)
                info = VideoInfo(frames, None, high, wide)
                plan = self.videos.plan(info, False, "x", options)
                grid, text, token = plan.grid, self.videos.text(plan), self.tokens.video_id
                rng = np.random.default_rng(number)
                pixels = rng.integers(0, 256, (frames, high, wide, 3), dtype=np.uint8)
                patches = self.videos.patches(pixels, plan)
            else:
                shown = picture(*part, number)
                grid, patches = self.images.grid(*part), self.images.patches(shown)
                text, token = marks.start + marks.image + marks.end, self.tokens.image_id
            count = self.images.num_tokens(grid)
            for id in self.ids(text):
                ids += [id] * (count if id == token else 1)
            grids, values = media[not is_video]
            grids.append(grid)
            values.append(torch.from_numpy(patches))
        found = [
            each
            for grids, values in media.values()
            for each in ((torch.cat(values), torch.tensor(grids)) if grids else (None, None))
        ]
        ids_S = torch.tensor(ids)
        return Row(ids_S, torch.full_like(ids_S, IGNORE), *found)


SHOWN: list[tuple[Any, ...]] = [
    ("what is this?", (64, 64)),
    ((100, 60), "and", (333, 500), "the same?"),
    ("look:", (2, 90, 160), "or at the colour", (30, 900)),
    ((4, 64, 48), " red?", (3, 70, 50)),
]


def started_with(loop: asyncio.Runner, folder: str, **more: Any) -> VllmSampler:
    python = str(ENVIRONMENT / "bin" / "python")
    options = {"skip_mm_profiling": True}
    media = dict(pictures=3, videos=2, is_inspected=True)
    settings = EngineSettings(
        python, folder, dtype="float32", max_len=1024, options=options, **media, **more
    )
    return loop.run(VllmSampler.start(settings, [ONE_THREAD]))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=FORMS)
def base(request, tiny) -> str:
    return tiny(**FORMS[request.param])


@pytest.fixture(scope="module")
def sampler(loop, base) -> Iterator[VllmSampler]:
    sampler = started_with(loop, base)
    yield sampler
    loop.run(sampler.close())


@pytest.fixture(scope="module")
def texts(base) -> list[Row]:
    return texts_of(base)


def texts_of(base: str) -> list[Row]:
    """Return rows from a few tokens to three windows."""
    words, rng, made = ["what", "red", "circle", "0", "is"], random.Random(0), Rows(base)
    return [made.row(" ".join(rng.choices(words, k=1 + 4 * n))) for n in range(24)]


def test_prompts_have_no_marks_around_placeholders(tiny):
    """vLLM writes the marks, and the times of frames, itself."""
    folder = tiny(**TINY)
    made = Rows(folder)
    row = made.row(*SHOWN[2])
    prompts = Prompts(EngineSettings("python", folder, videos=1))
    request = prompts.request(row, SHORT, [0])
    text = made.tokenizer.decode(request.fields["prompt"])
    assert text == "<bos>look:<|video|>or at the colour<|image|>"
    assert request.fields["expected"] == row.ids_S.tolist()
    [video] = request.fields["videos"]
    assert video["facts"]["frames_indices"] == [58, 59] and video["facts"]["fps"] == 1
    seen = [*seen_by_trainer(row, made.images), *seen_videos(row, made.images)]
    assert [each.tobytes() for each in seen] == request.pixels


def without(row: Row, id: int) -> Row:
    """Leave out the first token of this id."""
    ids_S = row.ids_S
    place = int((ids_S == id).nonzero()[0])
    ids_S = torch.cat([ids_S[:place], ids_S[place + 1 :]])
    return replace(row, ids_S=ids_S, labels_S=ids_S)


def test_rows_without_what_vllm_writes_are_refused(tiny):
    folder = tiny(**TINY)
    made = Rows(folder)
    prompts = Prompts(EngineSettings("python", folder, videos=1))
    token = made.tokenizer.convert_tokens_to_ids
    for parts, id, problem in (
        (SHOWN[0], token("<|image>"), "a picture between '?' and '<image|>'"),
        (SHOWN[0], token("<image|>"), "a picture between '<|image>' and ''"),
        (SHOWN[2], made.ids(":")[-1], "as '00:01 '"),
    ):
        row = without(made.row(*parts[-2:] if id == -1 else parts), id)
        if ":" in problem:
            row = without(row, id)  # the first one is in the text
        with raises(DataError, place="the prompt", problem_has=problem):
            prompts.request(row, SHORT, [0])


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_placeholders_are_counted_in_the_size_that_is_given():
    """For random sizes and all budgets. vLLM's own function counts as the trainer in the original
    size, and otherwise in the trainer's, most of which would change again."""
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", ROOT / "tests" / "support" / "gemma4_counts.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sizes, own, again, given = map(int, done.stdout.split()[-4:])
    assert own == given == sizes > 4000 and again < sizes // 2


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_vllm_sees_the_trainers_pictures(loop, sampler, base, monkeypatch):
    """Ids, grids and patches, of pictures and of videos with times. Measured: 1.2e-7."""
    monkeypatch.setattr(sampler.prompts, "is_on_cpu", False)
    tables, made = PixelTables(base, torch.device("cpu")), Rows(base)
    for parts in SHOWN:
        row = made.row(*parts)
        compared = compare("here", row, loop.run(sampler.inspect(row)), tables)
        assert compared.ids and compared.grids and compared.patches < 1e-6


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_text_is_drawn_as_by_the_trainer(loop, pool, sampler, base, texts, record_property):
    loop.run(sampler.update(Checkpoint(base), 0))
    found = loop.run(ask_all(sampler, texts, DRAWN, count=2))
    difference = worst(ours(pool, base, answered(texts, found)), found)
    record_property("worst", difference)
    print(f"{difference:.1e}")
    assert difference < TOLERANCE
    greedy = [each.ids for [each] in loop.run(ask_all(sampler, texts, GREEDY))]
    request = dict(prompts=texts, max_new_tokens=NEW_TOKENS, stop_ids=(), batch_rows=8)
    mine = pool.run(answer, 1, base, layout(), [request])[0][0]
    assert [tuple(each) for each in mine] == greedy
    assert len(set(greedy)) > len(greedy) // 2
    never = set(sampler.prompts.tokens.placeholders)
    assert not never & {id for samples in found for each in samples for id in each.ids}


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_all_new_weights_are_in_use(loop, pool, sampler, base, texts, tmp_path):
    """Every tensor is another one, so are the scalars of layers and the tied head."""
    generator, folder = torch.Generator().manual_seed(0), tmp_path / "new"
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    new = {
        name: value * (1 + 0.2 * torch.randn(value.shape, generator=generator))
        for name, value in load_file(file).items()
    }
    save_file(new, file, {"format": "pt"})
    scalar = "model.language_model.layers.1.layer_scalar"
    with raises(CheckpointError, place="the weights", key=scalar):
        part = {name: value for name, value in new.items() if name != scalar}
        loop.run(sampler.update(part.items(), 1))
    for weights in (Checkpoint(base), new.items(), Checkpoint(str(folder))):
        loop.run(sampler.update(weights, 2))
        expected = base if weights == Checkpoint(base) else str(folder)
        found = loop.run(ask_all(sampler, texts, DRAWN))
        assert worst(ours(pool, expected, answered(texts, found)), found) < TOLERANCE
    loop.run(sampler.update(Checkpoint(base), 0))


def agreement(loop: Any, pool: Any, sampler: VllmSampler, base: str, rows: list[Row]) -> Agreement:
    """Compare an answer to each row, as `megatron-vlm agree` does."""
    tables = PixelTables(base, torch.device("cpu"))
    found = loop.run(ask_all(sampler, rows, DRAWN))
    mine = ours(pool, base, answered(rows, found))
    prompts = [
        replace(
            compare("here", row, loop.run(sampler.inspect(row)), tables),
            tokens=token_pairs(each.ids, each.log_probs, one_S[-len(each.ids) :].tolist()),
        )
        for row, [each], one_S in zip(rows, found, mine, strict=True)
    ]
    return Agreement(base, "TP1", "float32", 1.0, BOUNDS["float32"], tuple(prompts))


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_pictures_are_refused_on_a_cpu(loop, pool, sampler, base, texts, monkeypatch):
    """If they were not, log-probs would differ, though ids and patches are equal: the tokens of a
    picture do not see its later ones there."""
    loop.run(sampler.update(Checkpoint(base), 0))
    shown = [Rows(base).row(*parts) for parts in SHOWN]
    refused = dict(key="engine.name", found="vllm on a CPU", remedy_has="engine.name=own")
    why = "vLLM's attention on a CPU hides"
    for work in (sampler.sample(shown[0], SHORT, [0]), sampler.score(shown[0], 0, 60.0)):
        with raises(ConfigError, place="the prompt", problem_has=why, **refused):
            loop.run(work)
    before = replace(sampler.settings, has_media=True)
    with raises(ConfigError, place="the data", problem_has=why, **refused):
        loop.run(engine_for(EngineConfig(name="vllm", python=before.python), before))
    monkeypatch.setattr(sampler.prompts, "is_on_cpu", False)
    assert agreement(loop, pool, sampler, base, texts[:6]).faults == []
    [fault] = agreement(loop, pool, sampler, base, shown).faults
    assert "log-probs differ by more than 0.0001" in fault


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_an_adapter_of_the_decoder_is_drawn_from(loop, pool, tiny, tmp_path):
    """Also where keys are the values: an adapter of a key is one of its value there."""
    base = tiny(**TINY)  # on a CPU, vLLM has no adapters for models with experts
    torch.manual_seed(3)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(load_reference(base), settings)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    sampler = started_with(loop, base, lora_rank=8)
    try:
        loop.run(sampler.update(Adapter(str(tmp_path / "adapter")), 1))
        texts = texts_of(base)
        found = loop.run(ask_all(sampler, texts, DRAWN))
        rows = answered(texts, found)
        assert worst(ours(pool, str(tmp_path / "merged"), rows), found) < TOLERANCE
        assert worst(ours(pool, base, rows), found) > 0.1
    finally:
        loop.run(sampler.close())
