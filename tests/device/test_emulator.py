# .venv/bin/python -m pytest tests/device
"""The emulated device finds each operation that a GPU would wait for or refuse, and its line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.device.emulator import CUDA, Place, emulated, place_of
from tests.device.findings import Kind

# The entries are name: operation on x = [0, 1, 2] on the device.
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "assignment to a mask": lambda x: x.clone().__setitem__(x > 1, x[:1]),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "tensor": lambda x: torch.tensor([1.0], device=CUDA),
    "tensor of scalars": lambda x: torch.tensor([x[0]]),
    "index on the host": lambda x: x[torch.tensor([0])],
    "pageable memory": lambda x: torch.zeros(3).to(x.device, non_blocking=True),
    "pinned memory, but blocking": lambda x: torch.zeros(3).pin_memory().to(CUDA),
    "copy_": lambda x: torch.empty(3).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
    "backward": lambda x: [x.register_hook(lambda g: g * g.tolist()[0]), x.sum().backward()],
}
MIXES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + torch.zeros(3),
    "cat": lambda x: torch.cat([x, torch.zeros(3)]),
    "device's index of a host tensor": lambda x: torch.zeros(3)[x.long()],
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([0]), x[:, None]),
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(3)),
}
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(torch.zeros(3)),
    "all_gather": lambda x: dist.all_gather([torch.zeros(3)], x.detach()),
}


def beside(x: Tensor, waits: bool, records: bool) -> Tensor:
    """Return a copy that is made on a separate stream."""
    stream, host = torch.cuda.Stream(), torch.ones(3).pin_memory()
    with torch.cuda.stream(stream):
        copy = host.to(CUDA, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    if records:
        copy.record_stream(torch.cuda.current_stream())
    return copy


RACES: dict[str, Callable[[Tensor], Any]] = {
    "not waited for": lambda x: x + beside(x, waits=False, records=True),
    "memory not kept": lambda x: x + beside(x, waits=True, records=False),
}
FREE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0),
    "index on the device": lambda x: x[x.long()],
    "slice": lambda x: x[1:].clone(),
    "filled mask": lambda x: x.clone().__setitem__(x > 1, 0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "pinned memory": lambda x: torch.zeros(3).pin_memory().to(CUDA, non_blocking=True) + x,
    "factories": lambda x: torch.full((3,), 2.0, device=CUDA) + x.new_zeros(3) + torch.ones_like(x),
    "on the host alone": lambda x: torch.arange(3).nonzero().tolist(),
    "backward": lambda x: x.index_select(0, x.long()).sum().backward(),
    "all_reduce": lambda x: dist.all_reduce(x.detach()),
    "barrier": lambda x: dist.barrier(),
    "another stream": lambda x: x + beside(x, waits=True, records=True),
}
EXPECTED = [
    (Kind.sync, WAITS),
    (Kind.mixed, MIXES),
    (Kind.collective, COLLECTIVES),
    (Kind.race, RACES),
]


def findings_of_each() -> list[dict[str, list[tuple[str, str]]]]:
    """Return the findings of each function, as in EXPECTED, then those of the free ones."""
    findings_by_name: list[dict[str, list[tuple[str, str]]]] = []
    with emulated() as findings:
        for actions in (*(each for _, each in EXPECTED), FREE):
            findings_by_name.append({})
            for name, action in actions.items():
                x = torch.arange(3.0).pin_memory().to(CUDA, non_blocking=True).requires_grad_()
                action(x)
                findings_by_name[-1][name] = [(each.kind, each.where) for each in findings.all]
                findings.all.clear()
    return findings_by_name


@pytest.mark.filterwarnings("ignore")
def test_each_is_found_with_its_line(device_pool):
    *results, free = device_pool.run(findings_of_each, 1)[0]
    assert free == {name: [] for name in FREE}
    for (kind, actions), by_name in zip(EXPECTED, results, strict=True):
        for name, action in actions.items():
            line = f"tests/device/test_emulator.py:{action.__code__.co_firstlineno}"
            assert (str(kind), line) in by_name[name], f"{name}: {by_name[name]}"
            assert len(by_name[name]) == 1, f"{name} counts more than once: {by_name[name]}"


def places_of_new_tensors() -> set[str]:
    with emulated():
        for _ in range(50):
            torch.empty(1000, device=CUDA)
        return {str(place_of(torch.empty(1000))) for _ in range(50)}


def test_memory_that_is_freed_loses_its_mark(device_pool):
    assert device_pool.run(places_of_new_tensors, 1)[0] == {str(Place.host)}


def what_they_say() -> tuple[Any, ...]:
    with emulated():
        x = torch.zeros(3, device=CUDA, dtype=torch.bfloat16)
        view, back = x.float().view(1, 3).expand(2, 3).detach(), x.cpu()
        pinned = back.pin_memory()
        devices = [str(each.device) for each in (x, view, back, pinned)]
        return devices, x.type(), view.is_cuda, pinned.is_pinned(), back.is_pinned()


def test_tensors_say_where_they_are(device_pool):
    devices, *others = device_pool.run(what_they_say, 1)[0]
    assert devices == ["cuda:0", "cuda:0", "cpu", "cpu"]
    assert others == ["torch.cuda.BFloat16Tensor", True, True, False]
