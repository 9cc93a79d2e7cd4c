# .venv/bin/python -m pytest tests/model/test_flash_windows.py
"""Attention in windows by FlashAttention equals attention with today's mask, and its gradients."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_vlm.distributed.device import Platform
from megatron_vlm.family.gemma4.model import gemma4_sizes
from megatron_vlm.family.spec import Tokens
from megatron_vlm.model import flash_windows
from megatron_vlm.model.attention import window_mask
from megatron_vlm.model.attention_kernels import AttentionShape, as_added, attend, choose_kernels
from megatron_vlm.model.flash_windows import PictureTokens, Window, window_attention
from tests.support import varlen
from tests.support.flash_attention4 import flash_attention4
from tests.support.gemma4 import IMAGE, VIDEO, TinyGemma4

SCALE = 0.4
TOLERANCE = 2e-6  # of norms
# Window, and rows in which t is text, and i and v are tokens of a picture and a frame.
CASES: dict[str, tuple[int, list[str]]] = {
    "longer pictures": (5, ["ttiiiiiiiiittttvvvvvvt", "tiiiiiiiiiiiiiiiiiitttt"]),
    "a window's length": (6, ["tiiiiitiiiiiitiiiiiiit", "ttttttvvvvvtvvvvvvtvvv"]),
    "a wider window": (64, ["tiiiitttvvvvtiit", "tttttiiiiiiiit"]),
    "first and last": (7, ["iiiitttttttttttiiiii", "vvvvvvvvvvvvvvvvvvvv"]),
    "at a row's end": (4, ["ttttiiiiii", "iiiiiitttt", "tttttttttt"]),
    "of one token": (3, ["tititttt", "ttttvtit"]),
    "one of many": (9, ["tttttttttttttttttttttttttt", "tttttttttttttiiitttt"]),
    "text": (7, ["t" * 40, "t" * 23]),
}


def ids_of(rows: list[str]) -> Tensor:
    ids = {"t": 7, "i": IMAGE, "v": VIDEO}
    longest = max(map(len, rows))  # rows are padded on the right
    return torch.tensor([[ids[each] for each in row] + [0] * (longest - len(row)) for row in rows])


def tokens() -> Tokens:
    return gemma4_sizes(TinyGemma4().config()).tokens


def results(call: Callable[..., Tensor], rows: int, length: int) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    generator = torch.Generator().manual_seed(rows + length)
    parts = [
        torch.randn(length, rows, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    slope = torch.randn(length, rows, 32, generator=generator)
    out = call(*parts)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), parts)]


def by_mask(window: int, rows: list[str]) -> list[Tensor]:
    ids_BS = ids_of(rows)
    mask = as_added(window_mask(ids_BS, tokens(), window, has_pictures(rows)), torch.float)

    def call(*parts: Tensor) -> Tensor:
        out = attend(*(x.permute(1, 2, 0, 3) for x in parts), mask, SCALE)
        return out.permute(2, 0, 1, 3).flatten(2)

    return results(call, *ids_BS.shape)


def by_flash(window: int, rows: list[str]) -> list[Tensor]:
    ids_BS = ids_of(rows)
    pictures = PictureTokens.of_rows(ids_BS, tokens()) if has_pictures(rows) else None
    given = Window(window, pictures)
    return results(lambda *parts: window_attention(*parts, given, SCALE), *ids_BS.shape)


def has_pictures(rows: list[str]) -> bool:
    return any(row.strip("t") for row in rows)


def worst_of(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((ours - mask).norm() / mask.norm()) for ours, mask in pairs)


def apart(window: int, rows: list[str]) -> float:
    """Return the largest deviation of an output or a gradient."""
    varlen.register()
    return worst_of(by_flash(window, rows), by_mask(window, rows))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_mask(name, record_property):
    worst = apart(*CASES[name])
    record_property("worst", worst)
    assert worst <= TOLERANCE  # measured: 2.5e-7


@pytest.mark.parametrize("name", ["a window's length", "text"])
def test_flash_attention_4_gets_our_arguments(name):
    """Key heads are not repeated, and the second call, among pictures, is causal."""
    window, rows = CASES[name]
    gpu = Platform("cuda", torch.device("cpu"), "gloo", torch.float32)
    with flash_attention4() as calls, mock.patch.object(Platform, "wait", lambda _: None):
        choose_kernels("fa4", {0: AttentionShape(1, 4, 2, 9, 8, 1, torch.float)}, gpu)
        calls.clear()
        found = by_flash(window, rows)
    assert worst_of(found, by_mask(window, rows)) <= TOLERANCE
    seen = [(call["causal"], call["window_size_left"], call["window_size_right"]) for call in calls]
    near, later = (False, window - 1, 0), (True, None, 0)
    assert seen == ([near, later, near, later] if name != "text" else [near, near])
    assert {call["heads"] for call in calls} == {(4, 2)}


def wider(*given: Any) -> Any:
    starts, longest, left, scale = given
    return RIGHT(starts, longest, left + (left >= 0), scale)


def forwards(*given: Any, **named: Any) -> Tensor:
    made = ARANGE(*given, **named)
    return made.flip(0) if given[2:] == (-1,) else made


RIGHT, ARANGE = flash_windows._FlashCall, torch.arange
MUTANTS: dict[str, Any] = {
    "window one too wide": (flash_windows, "_FlashCall", wider),
    "pictures not reversed": (torch, "arange", forwards),
    "outputs added": (torch, "logaddexp", lambda near, later: torch.zeros_like(near)),
    "the first call's output": (torch, "logaddexp", lambda near, later: near),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_notices(name):
    with mock.patch.object(*MUTANTS[name]):
        assert apart(*CASES["a window's length"]) > 100 * TOLERANCE
