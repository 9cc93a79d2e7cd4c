# make vllm-env, then .venv/bin/python -m pytest tests/engines/test_drafts.py
"""vLLM drafts with the model's own head (`engine.draft_tokens`): its answers are the same, and its
rounds and accepted drafts are those of the formula in tests/support/mtp_reference.py."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron_vlm.config import load_config
from megatron_vlm.data.media.pixel_tables import PixelTables
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings, accepted_drafts
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import Row, continue_row
from megatron_vlm.engines.engine_kinds import EngineSettings, check_engine
from megatron_vlm.engines.sampler import Checkpoint
from megatron_vlm.engines.vllm_process import SERVER
from megatron_vlm.engines.vllm_sampler import VllmSampler
from megatron_vlm.errors import ConfigError
from tests.support.chats import picture, say, text
from tests.support.engine import ENVIRONMENT
from tests.support.error_fields import raises
from tests.support.mtp_reference import Trunk, draft_logits, read_head, trunk_of, write_head
from tests.support.reference import load_reference

GREEDY = SamplingSettings(32, temperature=0.0)
TOLERANCE = 0.03  # of log-probs, in bf16; measured worst case: 0.0033
NEAR = 0.05  # guesses whose logits are nearer than this may be others in bf16
SIZES = dict(head_dim=32, linear_key_dim=64, linear_value_dim=64)


def with_floats(row: Row, tables: PixelTables) -> Row:
    return replace(row, pixel_values_PC=tables.images(row.pixel_values_PC))


class Formula:
    """What the model and its head say after prompts and their answers."""

    def __init__(self, folder: str) -> None:
        self.model = load_reference(folder).eval()
        config = self.model.config
        self.never = [config.image_token_id, config.video_token_id]
        self.tables = PixelTables(folder, torch.device("cpu"))
        self.head = read_head(self.model, folder)

    def trunk(self, prompt: Row, answer: tuple[int, ...]) -> Trunk:
        with torch.no_grad():
            return trunk_of(self.model, with_floats(continue_row(prompt, answer), self.tables))

    def greedy(self, prompt: Row) -> tuple[int, ...]:
        ids: list[int] = []
        for _ in range(GREEDY.max_tokens):
            with torch.no_grad():
                hidden_1SH = self.trunk(prompt, tuple(ids)).hidden_1SH
                logits_V = hidden_1SH[0, -1] @ self.model.lm_head.weight.T
                logits_V[self.never] = -torch.inf
                ids.append(int(logits_V.argmax()))
        return tuple(ids)

    def fit(self, prompts: list[Row], steps: int = 80) -> None:
        """Fit the head to the model's greedy answers."""
        answers = [self.greedy(prompt) for prompt in prompts]
        trunks = [self.trunk(*pair) for pair in zip(prompts, answers, strict=True)]
        optimizer = torch.optim.Adam(self.head.parameters(), lr=5e-3)
        for _ in range(steps):
            losses = []
            for prompt, answer, trunk in zip(prompts, answers, trunks, strict=True):
                start = len(prompt.ids_S) - 1
                logits = draft_logits(self.model, self.head, trunk)[start:-2]
                losses.append(F.cross_entropy(logits, torch.tensor(answer[1:])))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()

    def behind(self, prompt: Row, answer: Completion) -> float:
        """Return how far a token is behind the likeliest one, or a log-prob from the model's."""
        with torch.no_grad():
            trunk = self.trunk(prompt, answer.ids)
            logits = trunk.hidden_1SH[0, len(prompt.ids_S) - 1 : -1] @ self.model.lm_head.weight.T
        log_probs, ids = logits.log_softmax(-1), torch.tensor(answer.ids)[:, None]
        drawn = log_probs.gather(1, ids)[:, 0]
        log_probs[:, self.never] = -torch.inf
        apart = (drawn - torch.tensor(answer.log_probs)).abs()
        return float(torch.maximum(log_probs.amax(-1) - drawn, apart).max())

    def rounds(self, prompt: Row, answer: tuple[int, ...]) -> tuple[list[int], bool]:
        """Return the rounds that accept no draft and one, and whether a guess is a near tie."""
        with torch.no_grad():
            logits = draft_logits(self.model, self.head, self.trunk(prompt, answer))
        counts, is_near, known = [0, 0], False, 0
        while known < len(answer) - 1:
            top = logits[len(prompt.ids_S) + known - 1].topk(2)
            is_near |= float(top.values[0] - top.values[1]) < NEAR
            is_right = int(top.indices[0]) == answer[known + 1]
            counts[is_right] += 1
            known += 1 + is_right
        return counts, is_near


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """A checkpoint whose head was fitted to its answers."""
    made = tmp_path_factory.mktemp("drafts") / "model"
    source = tiny("bfloat16", family="qwen3_5", mtp_layers=1, **SIZES)
    shutil.copytree(source, made)
    return made


@pytest.fixture(scope="module")
def prompts(folder, tmp_path_factory) -> list[Row]:
    """Prompts with 0 to 2 pictures."""
    pictures = tmp_path_factory.mktemp("pictures")
    maker = RowMaker(str(folder), image_root=str(pictures))
    rows = []
    for number in range(6):
        parts = [text("what red 0"[: 4 + number])]
        for place in range(number % 3):
            name = f"{number}-{place}.png"
            picture(40 + 30 * number, 100 - 20 * place, 10 * number + place).save(pictures / name)
            parts.insert(place, {"type": "image", "image": name})
        rows.append(maker.row({"messages": [say("user", *parts)]}, prompt=True))
    return rows


@pytest.fixture(scope="module")
def formula(folder, prompts) -> Formula:
    formula = Formula(str(folder))
    formula.fit(prompts)
    write_head(formula.head, folder)
    return Formula(str(folder))


def settings(folder: Path, drafts: int, max_len: int = 512) -> EngineSettings:
    return EngineSettings(
        str(ENVIRONMENT / "bin" / "python"),
        str(folder),
        dtype="bfloat16",
        max_len=max_len,
        pictures=2,
        options={"skip_mm_profiling": True},
        draft_tokens=drafts,
    )


def answers(
    folder: Path, prompts: Sequence[Row], drafts: int, new: Path | None = None, way: str = "tensors"
) -> list[Completion]:
    """Return answers of an engine, which gets the weights of the folder `new` after its start."""

    async def ask() -> list[Completion]:
        longest = max(len(prompt.ids_S) for prompt in prompts)  # room for answers alone
        asked = settings(folder, drafts, longest + GREEDY.max_tokens)
        sampler = await VllmSampler.start(asked, [{"OMP_NUM_THREADS": "1"}])
        try:
            if new is not None:
                tensors = load_file(new / "model.safetensors").items()
                await sampler.update(tensors if way == "tensors" else Checkpoint(str(new)), 1)
            if way == "folder-restarted":
                os.kill(sampler.replicas[0].engine.child.process.pid, signal.SIGKILL)
            return [(await sampler.sample(prompt, GREEDY, [0]))[0] for prompt in prompts]
        finally:
            await sampler.close()

    return asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_drafts_change_no_answer_and_are_those_of_the_formula(folder, prompts, formula):
    """The answers are greedy with and without drafts, up to near ties in bf16."""
    plain, same, counted = answers(folder, prompts, 0), 0, 0
    assert all(each.accepted == () for each in plain)
    for drafts in (1, 2):
        for prompt, before, now in zip(
            prompts, plain, answers(folder, prompts, drafts), strict=True
        ):
            assert formula.behind(prompt, now) < TOLERANCE
            same += now.ids == before.ids
            rounds, shares = accepted_drafts([now.accepted])
            assert len(shares) == drafts
            assert 0 <= 1 + rounds * (1 + sum(shares)) - len(now.ids) <= drafts
            counts, is_near = formula.rounds(prompt, now.ids)
            if drafts == 1 and not is_near:
                assert list(now.accepted) == counts
                counted += counts[1]
    assert same >= len(prompts) and counted > 2 * GREEDY.max_tokens


@pytest.mark.slow
@pytest.mark.engine("vllm")
@pytest.mark.parametrize("way", ["tensors", "folder", "folder-restarted"])
def test_new_weights_reach_the_head(way, folder, prompts, formula, tiny):
    """An engine that started with a random head drafts as that of new weights does."""
    source, counted = Path(tiny("bfloat16", family="qwen3_5", mtp_layers=1, **SIZES)), 0
    for prompt, answer in zip(prompts, answers(source, prompts, 1, folder, way), strict=True):
        counts, is_near = formula.rounds(prompt, answer.ids)
        if not is_near:
            assert list(answer.accepted) == counts
            counted += counts[1]
    assert counted > 2 * GREEDY.max_tokens


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_places_with_drafts_have_the_settings_of_their_requests():
    """Without the correction they have what was in memory."""
    script = """
import sys, torch
from vllm.v1.sample import rejection_sampler
sys.path.append(sys.argv[1])
import vllm_fixes
vllm_fixes._draw_beside_drafts()
ends = torch.tensor([2, 2, 3], dtype=torch.int32)
for values in (torch.tensor([0.5, 7.0, 0.0]), torch.tensor([5, 7, 0], dtype=torch.int32)):
    print(rejection_sampler.expand_batch_to_tokens(values, ends, 3, 0, 1).tolist())
"""
    command = [ENVIRONMENT / "bin" / "python", "-c", script, SERVER.parent]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-3:-1] == ["[0.5, 0.5, 1.0]", "[5, 5, 1]"]


def test_a_model_without_an_mtp_head_is_refused(tiny):
    with raises(ConfigError, key="engine.draft_tokens", found=2) as refused:
        VllmSampler(settings(Path(tiny(head_dim=32)), 2), [], None)
    assert "has none" in str(refused.value)


def test_an_engine_that_cannot_draft_is_refused():
    with raises(ConfigError, key="engine.draft_tokens", found=1) as refused:
        check_engine(load_config(["model.path=x", "engine.draft_tokens=1"]), "rl")
    assert "engine.name=own does not" in str(refused.value)
