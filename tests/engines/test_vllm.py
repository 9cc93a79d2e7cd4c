# make vllm-env, then .venv/bin/python -m pytest tests/engines/test_vllm.py
"""Real vLLM serves what we export: the same ids and patches, answers and log-probs as ours and
Hugging Face's, weights replaced in place, and adapters of PEFT."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import IGNORE, Row, continue_row
from megatron_vlm.family.qwen.images import ImageSettings
from tests.model.test_parity import layout
from tests.run.test_train import go_pooled
from tests.support.batches import token_ids
from tests.support.chats import picture, say, text
from tests.support.engine import Engine, as_prompt, write_seen
from tests.support.reference import load_reference, row_logits
from tests.support.runs import call
from tests.support.sets import write_set
from tests.training.test_decode import answer

pytestmark = [
    pytest.mark.slow,  # each engine takes 15 s to start
    pytest.mark.engine("vllm"),
]

PROMPTS, NEW_TOKENS = 120, 8
# fp32 on the CPU; log-probs of a random model that was trained a little, so of -3 to -12.
# Measured worst case: 2.9e-6, with an adapter; 2.4e-6 without, at TP2 x PP2, too.
TOLERANCE = 1e-5
# Of pixel values, which are between -1 and 1: vLLM multiplies and adds where Hugging Face divides.
# Measured: 1.2e-7.
PIXEL_TOLERANCE = 1e-6
# What vLLM makes of a picture's file is another picture: torchvision's bicubic filter and Pillow's,
# which Hugging Face's processor without torchvision takes, as we do. Of 256 levels; measured: 26,
# where the height shrinks, otherwise 1 or 2. The pictures are noise.
RESIZE_LEVELS = 40
# How far the token that vLLM then takes is behind the likeliest, in log-prob. Measured: 0.0062.
RESIZE_MARGIN = 0.05

WORDS = ["what", "colour", "is", "the", "circle", "square", "photo", "red", "how", "many", "0", "7"]


@dataclass(frozen=True)
class Prompt:
    """A question about pictures: as the trainer's row, and as files."""

    row: Row
    files: list[Path]  # as they were given
    seen: list[Path]  # as the trainer sees them

    def served(self, answer: list[int] = [], files: bool = False) -> dict[str, Any]:  # noqa: B006
        """As vLLM takes it, with an answer."""
        pictures = self.files if files else self.seen
        return as_prompt(continue_row(self.row, answer), token_ids().image, pictures)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Hugging Face's model is tiny, and two threads of it wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tiny) -> str:
    """32 is the least width of a head that vLLM's attention on the CPU takes."""
    return tiny(head_dim=32, from_scratch=True)


@pytest.fixture(scope="module")
def export(base, pool, tmp_path_factory) -> str:
    """What a run of a few steps at PP2 has exported."""
    folder = tmp_path_factory.mktemp("run")
    write_set(folder)
    status, _, said = go_pooled(pool, 2, folder, base, "run", "train.steps=4", "optim.lr=1e-4")
    assert status == 0, said
    return str(folder / "run" / "export")


@pytest.fixture(scope="module")
def settings(export) -> ImageSettings:
    return ImageSettings.from_checkpoint(export)


@pytest.fixture(scope="module")
def prompts(export, settings, tmp_path_factory) -> list[Prompt]:
    """With 0 to 3 pictures of odd sizes each: some are made larger, some smaller, some narrower."""
    folder = tmp_path_factory.mktemp("pictures")
    maker, rng = RowMaker(export, image_root=str(folder)), random.Random(0)
    return [ask_about(number, maker, rng, settings, folder) for number in range(PROMPTS)]


def ask_about(
    number: int, maker: RowMaker, rng: random.Random, settings: ImageSettings, folder: Path
) -> Prompt:
    files = [folder / f"{number}-{place}.png" for place in range(number % 4)]
    for place, path in enumerate(files):
        picture(rng.randint(20, 330), rng.randint(20, 330), 10 * number + place).save(path)
    parts: list[dict[str, Any]] = [{"type": "image", "image": path.name} for path in files]
    at = rng.randint(0, len(parts))
    parts.insert(at, text(" ".join(rng.choices(WORDS, k=rng.randint(1, 12)))))
    row = maker.row({"messages": [say("user", *parts)]}, prompt=True)
    return Prompt(row, files, write_seen(row, settings, folder / f"seen-{number}"))


@pytest.fixture(scope="module")
def engine(export) -> Iterator[Engine]:
    engine = Engine(export)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def answers(engine, prompts) -> list[dict[str, Any]]:
    """vLLM's greedy ones."""
    served = [prompt.served() for prompt in prompts]
    found: list[dict[str, Any]] = engine.ask("generate", prompts=served, max_new_tokens=NEW_TOKENS)
    assert len({tuple(each["ids"]) for each in found}) > PROMPTS // 2
    return found


def supervised(prompt: Prompt, answer: list[int]) -> Row:
    """The row with its answer; every token counts but the first and placeholders."""
    row = continue_row(prompt.row, answer)
    labels_S = row.ids_S.masked_fill(row.ids_S == token_ids().image, IGNORE)
    labels_S[0] = IGNORE
    return replace(row, labels_S=labels_S)


def as_floats(row: Row, settings: ImageSettings) -> Row:
    """With pixel values as Hugging Face's model takes them."""
    if row.pixel_values_PC is None:
        return row
    pixels = settings.pixel_values(row.pixel_values_PC, settings.table())
    return replace(row, pixel_values_PC=pixels)


def worst(ours: list[Tensor], theirs: list[list[float]], rows: list[Row]) -> float:
    """The largest difference of a supervised token's log-prob."""
    found = [
        (one_S[1:] - torch.tensor(other)).abs()[row.labels_S[1:] != IGNORE].max()
        for one_S, other, row in zip(ours, theirs, rows, strict=True)
    ]
    return float(torch.stack(found).max())


@torch.no_grad()
def behind(model: torch.nn.Module, row: Row, count: int) -> float:
    """How far the tokens of an answer are behind Hugging Face's likeliest, at most; in log-prob."""
    log_probs_NV = row_logits(model, row)[-count - 1 : -1].float().log_softmax(-1)
    taken_N = log_probs_NV.gather(-1, row.ids_S[-count:, None])[:, 0]
    return float((log_probs_NV.max(-1).values - taken_N).max())


def patches(engine: Engine, prompts: list[dict[str, Any]], out: Path) -> dict[str, Tensor]:
    engine.ask("patches", prompts=prompts, out=str(out))
    return load_file(out)


def in_time(row: Row) -> Tensor:
    """A row's bytes with each frame twice, as patches are written."""
    assert row.pixel_values_PC is not None
    bytes_P31F = row.pixel_values_PC.view(len(row.pixel_values_PC), 3, 1, -1)
    return bytes_P31F.expand(-1, -1, 2, -1).flatten(1)


def test_ids_and_patches_are_the_trainers(engine, prompts, answers, settings, tmp_path):
    for prompt, each in zip(prompts, answers, strict=True):
        assert each["prompt"] == prompt.row.ids_S.tolist()
    found = patches(engine, [each.served() for each in prompts], tmp_path / "seen.safetensors")
    shown = [place for place, each in enumerate(prompts) if each.files]
    assert found.keys() == {f"{kind}.{place}" for kind in ("bytes", "values") for place in shown}
    for place in shown:
        row = prompts[place].row
        assert torch.equal(found[f"bytes.{place}"], in_time(row))
        values_PC = as_floats(row, settings).pixel_values_PC
        assert (found[f"values.{place}"] - values_PC).abs().max() < PIXEL_TOLERANCE


@pytest.mark.parametrize("case", [layout(), layout(tp=2, pp=2)], ids=["1x1x1", "tp2-pp2"])
def test_greedy_answers_are_ours(case, pool, export, prompts, answers, settings):
    request = dict(
        prompts=[each.row for each in prompts], max_new_tokens=NEW_TOKENS, stop_ids=(), batch_rows=8
    )
    ours = pool.run(answer, case.world, export, case, [request])[0][0]
    model, other = load_reference(export).eval(), []
    for prompt, mine, each in zip(prompts, ours, answers, strict=True):
        if mine != each["ids"]:
            row = as_floats(continue_row(prompt.row, each["ids"]), settings)
            other.append(behind(model, row, NEW_TOKENS))
    # None was seen to differ; a tie closer than the log-probs agree may fall either way.
    assert len(other) <= 2 and max(other, default=0.0) < 2 * TOLERANCE


def test_greedy_answers_are_hugging_faces(export, prompts, answers, settings):
    model = load_reference(export).eval()
    for prompt, each in zip(prompts, answers, strict=True):
        row = as_floats(continue_row(prompt.row, each["ids"]), settings)
        assert behind(model, row, NEW_TOKENS) < 2 * TOLERANCE


@pytest.mark.parametrize("case", [layout(), layout(tp=2, pp=2)], ids=["1x1x1", "tp2-pp2"])
def test_log_probs_are_ours(case, pool, engine, export, prompts):
    """Of sampled tokens, and of each token of the prompt."""
    some = prompts[:40]
    asked: dict[str, Any] = dict(prompts=[each.served() for each in some], temperature=1.0)
    sampled = engine.ask("generate", max_new_tokens=NEW_TOKENS, seeds=list(range(40)), **asked)
    rows = [supervised(one, each["ids"]) for one, each in zip(some, sampled, strict=True)]
    ours = pool.run(call, case.world, export, case, methodcaller("forward", rows))[0]
    given = [one.served(each["ids"]) for one, each in zip(some, sampled, strict=True)]
    assert worst(ours, engine.ask("score", prompts=given), rows) < TOLERANCE
    for mine_S, each in zip(ours, sampled, strict=True):
        theirs_N = torch.tensor(each["log_probs"])
        assert (mine_S[-NEW_TOKENS:] - theirs_N).abs().max() < TOLERANCE


def test_files_of_pictures_are_resized_by_another_filter(
    engine, export, prompts, settings, tmp_path
):
    """What a client of vLLM gets that sends the files themselves: why some answers differ."""
    served = [each.served(files=True) for each in prompts]
    found = patches(engine, served, tmp_path / "files.safetensors")
    levels = [
        int((found[f"bytes.{place}"].int() - in_time(each.row).int()).abs().max())
        for place, each in enumerate(prompts)
        if each.files
    ]
    assert 1 < max(levels) < RESIZE_LEVELS
    model = load_reference(export).eval()
    answers = engine.ask("generate", prompts=served, max_new_tokens=NEW_TOKENS)
    for prompt, each in zip(prompts, answers, strict=True):
        assert each["prompt"] == prompt.row.ids_S.tolist()
        row = as_floats(continue_row(prompt.row, each["ids"]), settings)
        assert behind(model, row, NEW_TOKENS) < (RESIZE_MARGIN if prompt.files else 2 * TOLERANCE)


def test_new_weights_in_place_are_those_of_a_fresh_start(engine, base, export, prompts, settings):
    """To the last digit, from a folder and from a file of tensors: nothing that was computed with
    the former ones, of words or of pictures, is used again."""
    some = prompts[:24]
    rows, served = [supervised(each, []) for each in some], [each.served() for each in some]

    def all_it_says() -> list[Any]:
        more = engine.ask("generate", prompts=served, max_new_tokens=NEW_TOKENS)
        return [more, engine.ask("score", prompts=served)]

    fresh = all_it_says()
    for again in ({"folder": export}, {"tensors": f"{export}/model.safetensors"}):
        engine.ask("reload", folder=base)
        assert (
            worst(reference_scores(base, None, rows, settings), all_it_says()[1], rows) < TOLERANCE
        )
        engine.ask("reload", **again)
        assert all_it_says() == fresh


def test_an_export_of_qwen3_5_is_served(pool, tiny, tmp_path):
    """In bf16 and with heads 128 wide, as vLLM's gated delta net needs on a CPU (0.32), from its
    export and from its tensors with the MTP head, `mtp.*`, which vLLM does not load. Both
    answer alike."""
    sizes = dict(family="qwen3_5", mtp_layers=1, head_dim=32, dtype="bfloat16")
    sizes |= dict(linear_key_dim=128, linear_value_dim=128)
    path = tiny(**sizes)
    case, out = replace(layout(), train={"precision": "bf16"}), tmp_path / "out"
    pool.run(call, 1, path, case, methodcaller("export_hf", str(out)))
    served = [{"ids": list(range(1, 9 + number)), "pictures": []} for number in range(4)]
    engine = Engine(str(out), dtype="bfloat16")
    try:
        ask = partial(engine.ask, "generate", prompts=served, max_new_tokens=NEW_TOKENS)
        before = ask()
        engine.ask("reload", folder=tiny(**sizes, seed=1))
        assert ask() != before
        engine.ask("reload", tensors=str(out / "model.safetensors"))
        assert ask() == before and all(len(each["ids"]) == NEW_TOKENS for each in before)
    finally:
        engine.close()


LANGUAGE = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
VISION = r".*visual\.(blocks\.\d+\..*|merger\.|deepstack_merger_list\.\d+\.)(qkv|proj|linear_fc\d)"
BOTH = f"({LANGUAGE}|{VISION})"


TARGETS = {
    "language": (LANGUAGE, "attention,mlp"),
    "vision": (VISION, "vision_attention,vision_mlp,merger"),
    "both": (BOTH, "attention,mlp,vision_attention,vision_mlp,merger"),
}


@pytest.fixture(scope="module")
def adapter_of(base, pool, tmp_path_factory) -> Callable[[str, str], Path]:
    """adapter_of(writer, targets) -> its folder: a random one by PEFT, or what a run of ours of a
    few steps leaves, with the merged model beside it."""

    def peft(targets: str, out: Path) -> Path:
        torch.manual_seed(3)
        chosen, _ = TARGETS[targets]
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=chosen, init_lora_weights=False)
        get_peft_model(load_reference(base), settings).save_pretrained(out)
        return out

    def ours(targets: str, out: Path) -> Path:
        _, parts = TARGETS[targets]
        write_set(out)
        lora = ["lora=default", "lora.rank=8", f"lora.targets=[{parts}]", "checkpoint.export=both"]
        given = ["run", *lora, "train.steps=4", "optim.lr=0.03"]
        status, _, said = go_pooled(pool, 2, out, base, *given)
        assert status == 0, said
        return out / "run" / "export"

    made: dict[tuple[str, str], Path] = {}

    def adapter_of(writer: str, targets: str) -> Path:
        out = tmp_path_factory.mktemp("adapter")
        if (writer, targets) not in made:
            made[writer, targets] = {"peft": peft, "ours": ours}[writer](targets, out)
        return made[writer, targets]

    return adapter_of


@pytest.fixture(scope="module")
def adapted(base) -> Iterator[Engine]:
    engine = Engine(base, lora_rank=8, lora_vision=True)
    yield engine
    engine.close()


@torch.no_grad()
def reference_scores(
    checkpoint: str, adapter: Path | None, rows: list[Row], settings: ImageSettings
) -> list[Tensor]:
    """Each token's log-prob [S] by Hugging Face's model, with an adapter by PEFT."""
    model: Any = load_reference(checkpoint)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    found = []
    for row in rows:
        logits_SV = row_logits(model.eval(), as_floats(row, settings)).float()
        picked_S = logits_SV[:-1].log_softmax(-1).gather(-1, row.ids_S[1:, None])[:, 0]
        found.append(torch.cat([picked_S.new_zeros(1), picked_S]))
    return found


@pytest.mark.rotate(3)
@pytest.mark.parametrize("writer", ["peft", "ours"])
@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_is_served(writer, targets, adapted, base, prompts, settings, adapter_of):
    adapter, some = adapter_of(writer, targets), prompts[:24]
    rows, served = [supervised(each, []) for each in some], [each.served() for each in some]
    plain = reference_scores(base, None, rows, settings)
    expected = reference_scores(base, adapter, rows, settings)
    found = adapted.ask("score", prompts=served, adapter=str(adapter))
    assert worst(expected, found, rows) < TOLERANCE
    assert worst(plain, found, rows) > 0.1
    assert worst(plain, adapted.ask("score", prompts=served), rows) < TOLERANCE  # it is off again


def test_a_merged_adapter_is_served(base, prompts, settings, adapter_of):
    adapter, some = adapter_of("ours", "both"), prompts[:24]
    rows, served = [supervised(each, []) for each in some], [each.served() for each in some]
    engine = Engine(str(adapter.parent / "merged"))
    found = engine.ask("score", prompts=served)
    engine.close()
    assert worst(reference_scores(base, adapter, rows, settings), found, rows) < TOLERANCE


def test_without_its_option_vllm_ignores_an_adapter_of_the_tower(
    base, prompts, settings, adapter_of, tmp_path
):
    """In silence, and serves its other parts: what our warning is about."""
    some = prompts[:12]
    rows, served = [supervised(each, []) for each in some], [each.served() for each in some]
    shutil.copytree(adapter_of("peft", "both"), tmp_path / "both")
    shutil.copytree(tmp_path / "both", tmp_path / "language")
    file = tmp_path / "language" / "adapter_model.safetensors"
    save_file({k: v * ("language_model" in k) for k, v in load_file(file).items()}, file)
    engine = Engine(base, lora_rank=8)
    found = engine.ask("score", prompts=served, adapter=str(tmp_path / "both"))
    engine.close()
    whole, language = (
        reference_scores(base, tmp_path / name, rows, settings) for name in ("both", "language")
    )
    assert worst(language, found, rows) < TOLERANCE
    assert worst(whole, found, rows) > 0.1
