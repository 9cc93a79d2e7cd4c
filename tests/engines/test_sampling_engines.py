# .venv/bin/python -m pytest tests/engines/test_sampling_engines.py
"""The parts around vLLM: frames, balancing, updates, restarts and refusals.

A process that speaks the same protocol replaces vLLM; test_vllm_sampler.py has the real one.
"""

import asyncio
import ctypes
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.prompts import Prompts, seen_by_trainer, seen_videos
from megatron_vlm.engines.sampler import Adapter, Checkpoint, SamplerError
from megatron_vlm.engines.server.cuda_memory import CudaMemory
from megatron_vlm.engines.vllm_sampler import VllmSampler
from megatron_vlm.engines.weight_stream import SharedBuffer
from megatron_vlm.errors import NOT_GIVEN, CheckpointError, ConfigError, DataError, MegatronVLMError
from megatron_vlm.family.qwen.images import ImageSettings
from megatron_vlm.family.qwen.videos import VideoSettings
from megatron_vlm.family.video_plan import VideoPlan
from megatron_vlm.hf.expert_layouts import ExpertStorage
from megatron_vlm.io.parent import WireError, head, read_frame
from megatron_vlm.training.worker import MegatronWorker
from tests.model.test_parity import layout
from tests.support.batches import MIXED, make_rows
from tests.support.chats import image, say, text
from tests.support.error_fields import raises
from tests.support.fake_engine import DEADLY, DEADLY_ONCE, HELD, contents, number_of
from tests.support.moe import stored_as
from tests.support.runs import Case, call, my_rows
from tests.support.videos import make_video

STAND_IN = Path(__file__).parents[1] / "support" / "fake_engine.py"
PATIENCE_S = 60.0
SHORT = SamplingSettings(max_tokens=4)


@pytest.fixture
def settings(tiny, tmp_path) -> EngineSettings:
    """Return the settings of stand-in engines."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    options = {"release": str(tmp_path / "release"), "once": str(tmp_path / "died" / "once")}
    return EngineSettings(str(python), tiny(), max_len=64, options=options)


def row(*ids: int) -> Row:
    return Row(torch.tensor(ids), torch.tensor(ids))


@asynccontextmanager
async def sampling(settings: EngineSettings, replicas: int = 1) -> AsyncIterator[VllmSampler]:
    sampler = await VllmSampler.start(settings, [{}] * replicas)
    try:
        yield sampler
    finally:
        await sampler.close()


def run(
    settings: EngineSettings, steps: Callable[[VllmSampler], Awaitable[Any]], replicas: int = 1
) -> Any:
    """Run `steps` with a sampler and return the result."""

    async def go() -> Any:
        async with sampling(settings, replicas) as sampler:
            return await asyncio.wait_for(steps(sampler), PATIENCE_S)

    return asyncio.run(go())


def weights(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def number(folder: str) -> float:
    """Return the number that a stand-in with these weights answers."""
    checksum = 0
    for value in weights(folder).values():
        checksum = number_of(value.numpy().tobytes(), checksum)
    return float(checksum)


def version_of(sample: Completion) -> int:
    """Return the version of the weights that sampled all tokens of an answer."""
    [(version, tokens)] = sample.versions
    assert tokens == len(sample.ids)
    return version


def process_of(sample: Completion) -> int:
    return sample.ids[2]


def gone(pid: int) -> bool:
    """Return whether a process ends within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def _named(path: str, case: Case, out: str) -> list[tuple[str, Tensor]]:
    """Take a step, export the weights to `out`, and return the named weights of this rank."""
    worker = MegatronWorker(case.config(path))
    worker.forward_backward(my_rows(make_rows(MIXED)))
    worker.optim_step(lr=1e-2)
    worker.export_hf(out)
    return [(name, value.clone()) for name, value in worker.named_weights()]


EXPERTS = {"layers": 3, "experts": 4, "intermediate": 80}
LAYOUTS: dict[str, tuple[Case, dict[str, Any], ExpertStorage | None]] = {
    "tp2-pp2": (layout(tp=2, pp=2), {}, None),
    "pp2-dp2-tied-bf16": (layout(pp=2, dp=2), {"tied": True, "dtype": "bfloat16"}, None),
    "pp2-ep2": (layout(pp=2, dp=2, ep=2), EXPERTS, ExpertStorage.out_in),
    "ep2-released": (layout(dp=2, ep=2), EXPERTS, ExpertStorage.in_out),
    "ep2-single": (layout(dp=2, ep=2), EXPERTS, ExpertStorage.single),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "tp2-pp2" else pytest.mark.full) for name in LAYOUTS],
)
def test_named_weights_are_those_of_an_export(name, pool, tiny, tmp_path):
    """Rank 0 alone gets the weights, equal to the last bit, in the checkpoint's types and form."""
    case, sizes, form = LAYOUTS[name]
    folder = tiny(**sizes) if form is None else stored_as(tiny(**sizes), tmp_path / "in", form)
    named, *others = pool.run(_named, case.world, folder, case, str(tmp_path / "out"))
    assert all(each == [] for each in others)
    exported, before = weights(str(tmp_path / "out")), weights(folder)
    assert sorted(name for name, _ in named) == sorted(exported) == sorted(before)
    for name, value in named:
        assert value.dtype == exported[name].dtype and torch.equal(value, exported[name])
    assert sum(not torch.equal(before[name], value) for name, value in named) > len(named) / 2


def test_named_weights_are_refused_beside_adapters(pool, tiny):
    case = replace(layout(), lora={"rank": 4})
    with pytest.raises(RuntimeError, match=r"ConfigError: lora\.rank=4: the streamed weights"):
        pool.run(call, 1, tiny(), case, methodcaller("named_weights"))


def test_frames_arrive_as_they_were_sent():
    first, second = {"id": 1, "do": "sample", "ids": [1, 2]}, {"text": "caf\u00e9"}
    stream = io.BytesIO(head(first, 3) + b"abc" + head(second))
    assert read_frame(stream) == (first, b"abc")
    assert read_frame(stream) == (second, b"")
    assert read_frame(stream) is None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (head({"id": 1}, 3) + b"ab", "cut off: 2 of 3"),
        (head({"id": 1})[:-1], "cut off"),
        (b"\0\0", "cut off: 2 of 12"),
        (b"\xff" * 12, "at most 17179869184 are one of ours"),
        (b"\0\0\0\2" + b"\0" * 8 + b"{a", "without JSON"),
        (b"\0\0\0\2" + b"\0" * 8 + b"[]", "a list, not an object"),
    ],
)
def test_what_is_no_frame_is_refused(sent, said):
    with pytest.raises(WireError, match=said):
        read_frame(io.BytesIO(sent))


def test_each_seed_is_answered(settings):
    async def steps(sampler: VllmSampler) -> list[list[Completion]]:
        requests = [sampler.sample(row(1, 2), SHORT, [10 * n, 10 * n + 1]) for n in range(50)]
        assert await sampler.sample(row(1, 2), SHORT, []) == []
        return await asyncio.gather(*requests)

    for n, (first, second) in enumerate(run(settings, steps)):
        assert (first.ids[0], second.ids[0]) == (10 * n, 10 * n + 1)
        assert (first.versions, first.ended) == (((0, 3),), "stop")


def test_requests_go_to_the_engine_with_the_fewest_samples(settings, tmp_path):
    async def steps(sampler: VllmSampler) -> tuple[list[int], list[Completion]]:
        # Six samples, then two, then two: the first engine has the six alone.
        held = [
            asyncio.create_task(sampler.sample(row(HELD), SHORT, range(count)))
            for count in (6, 2, 2)
        ]
        while sum(each.in_flight for each in sampler.replicas) < 10:
            await asyncio.sleep(0.01)
        busy = [each.in_flight for each in sampler.replicas]
        free = await sampler.sample(row(1), SHORT, [0])
        (tmp_path / "release").touch()
        answers = await asyncio.gather(*held)
        assert [each.in_flight for each in sampler.replicas] == [0, 0]
        return busy, [*free, *(each[0] for each in answers)]

    busy, (free, *others) = run(settings, steps, replicas=2)
    assert busy == [6, 4]
    first, second, third = map(process_of, others)
    assert first != second == third == process_of(free)


GPUS = {"host": [], "the trainer's GPU": ["trainer"], "two GPUs": ["trainer", "other"]}


@pytest.mark.parametrize("where", GPUS)
def test_tensors_reach_every_engine_in_pieces(where, settings, tiny, tmp_path, monkeypatch):
    """Many tensors exceed the buffer, whose size divides few of them. The same holds in bf16. If
    all engines are on the trainer's GPU, the pieces are there as well: here they are in a file."""
    monkeypatch.setattr("megatron_vlm.engines.vllm_sampler.BUFFER_BYTES", 4093)
    monkeypatch.setattr("megatron_vlm.engines.weight_stream.CudaMemory", partial(FileGpu, tmp_path))
    if GPUS[where]:
        memory_for = SharedBuffer.memory_for
        gpu = torch.device("cuda", 0)
        on_gpu = lambda buffer, _, gpus: memory_for(buffer, gpu, gpus)  # noqa: E731
        monkeypatch.setattr(SharedBuffer, "memory_for", on_gpu)
        settings = replace(settings, options={**settings.options, "gpus": GPUS[where]})

    async def steps(sampler: VllmSampler) -> list[Completion]:
        completions = []
        for version, folder in enumerate((tiny(seed=1), tiny("bfloat16", seed=2)), start=1):
            await sampler.update(weights(folder).items(), version)
            requests = [sampler.sample(row(1), SHORT, [0]) for _ in range(2)]
            completions += [each[0] for each in await asyncio.gather(*requests)]
        return completions

    completions = run(settings, steps, replicas=2)
    assert (tmp_path / "memory").exists() == (where == "the trainer's GPU")
    assert len({process_of(each) for each in completions}) == 2
    assert [version_of(each) for each in completions] == [1, 1, 2, 2]
    assert [each.log_probs[0] for each in completions] == [number(tiny(seed=1))] * 2 + [
        _bf16_number(tiny("bfloat16", seed=2))
    ] * 2


class FileGpu:
    """Memory of a GPU that is a file."""

    def __init__(self, folder: Path, gpu: int) -> None:
        self.file = folder / "memory"

    def uuid(self) -> str:
        return "trainer"

    def allocate(self, size: int) -> tuple[Tensor, str]:
        self.file.touch(exist_ok=False)
        memory = torch.from_file(str(self.file), shared=True, size=size, dtype=torch.uint8)
        return memory, bytes(self.file).hex()


class HostDriver:
    """CUDA's driver for memory of this process."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        self.buffers.append((ctypes.c_ubyte * size.value)())
        address._obj.value = ctypes.addressof(self.buffers[-1])
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        handle._obj.reserved[:] = address.value.to_bytes(64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        address._obj.value = int.from_bytes(bytes(handle.reserved))
        return 0 if flags.value == 1 else 3

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:
        uuid._obj[:] = bytes(range(16))
        return device.value

    def cuDeviceGet(self, device: Any, gpu: int) -> int:
        device._obj.value = gpu
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1 + device.value
        return 0

    def cuInit(self, flags: int) -> int:
        return flags

    def cuCtxSetCurrent(self, context: Any) -> int:
        return int(context.value == 0)


def test_memory_of_a_gpu_is_opened_by_its_handle():
    def bytes_at(address: int, size: int) -> Tensor:
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    driver = HostDriver()
    trainer, worker = (CudaMemory(0, driver, bytes_at) for _ in range(2))
    memory, handle = trainer.allocate(100)
    memory.copy_(torch.arange(100))
    assert worker.open(handle, 100).tolist() == list(range(100))
    assert trainer.uuid() == bytes(range(16)).hex()
    with pytest.raises(OSError, match="cuDeviceGetUuid of CUDA's driver has failed with status 1"):
        CudaMemory(1, driver, bytes_at).uuid()


def _bf16_number(folder: str) -> float:
    checksum = 0
    for value in weights(folder).values():
        checksum = number_of(value.flatten().view(torch.uint8).numpy().tobytes(), checksum)
    return float(checksum)


def test_an_update_waits_for_samples_under_way_and_later_ones_for_it(settings, tiny, tmp_path):
    async def steps(sampler: VllmSampler) -> tuple[list[Completion], list[Completion]]:
        held = asyncio.create_task(sampler.sample(row(HELD), SHORT, [0]))
        await asyncio.sleep(0.1)
        update = asyncio.create_task(sampler.update(Checkpoint(tiny(seed=1)), 7))
        await asyncio.sleep(0.1)
        later = asyncio.create_task(sampler.sample(row(1), SHORT, [1]))
        await asyncio.sleep(0.3)
        assert not (held.done() or update.done() or later.done())
        (tmp_path / "release").touch()
        await update
        return await held, await later

    [[before], [after]] = run(settings, steps)
    assert (version_of(before), before.ids[1], before.log_probs) == (0, 0, (0.0,))
    assert (version_of(after), after.ids[1]) == (7, 7) and after.log_probs != (0.0,)


def test_an_update_that_interrupts_waits_for_no_sample(settings, tiny, tmp_path, monkeypatch):
    """Samples in progress go on with each new weights. A request that comes between the pieces of
    an update waits for its end, and one that is cancelled then does not disturb it."""
    monkeypatch.setattr("megatron_vlm.engines.vllm_sampler.BUFFER_BYTES", 4093)

    async def steps(sampler: VllmSampler) -> tuple[list[Completion], list[Completion]]:
        held = asyncio.create_task(sampler.sample(row(HELD), SHORT, [0]))
        cancelled = asyncio.create_task(sampler.sample(row(HELD), SHORT, [1]))
        while sampler.replicas[0].in_flight < 2:
            await asyncio.sleep(0)
        await sampler.update(Checkpoint(tiny(seed=1)), 7, interrupt=True)
        later: list[asyncio.Task[list[Completion]]] = []
        in_flight = []

        def named() -> Iterator[tuple[str, Tensor]]:
            for place, pair in enumerate(weights(tiny(seed=2)).items()):
                if place == 3:
                    later.append(asyncio.create_task(sampler.sample(row(1), SHORT, [2])))
                    cancelled.cancel()
                in_flight.append(sampler.replicas[0].in_flight)
                yield pair

        await sampler.update(named(), 8, interrupt=True)
        assert cancelled.cancelled() and in_flight[0] == 2 and in_flight[-1] == 1
        [after] = await later[0]
        assert (version_of(after), after.log_probs) == (8, (number(tiny(seed=2)),))
        (tmp_path / "release").touch()
        return await held

    [found] = run(settings, steps)
    assert found.versions == ((0, 1), (7, 1), (8, 1)) and found.ids[0] == 0
    assert found.log_probs == (0.0, checkpoint_number(tiny(seed=1)), number(tiny(seed=2)))


def test_a_sample_whose_engine_dies_in_an_interruption_begins_again(
    settings, tiny, tmp_path, monkeypatch
):
    """It has the newest weights from its first token on. The other engine's goes on."""
    monkeypatch.setattr("megatron_vlm.engines.vllm_sampler.BUFFER_BYTES", 4093)

    async def steps(sampler: VllmSampler) -> list[Completion]:
        held = [asyncio.create_task(sampler.sample(row(HELD), SHORT, [seed])) for seed in range(2)]
        while min(each.in_flight for each in sampler.replicas) == 0:
            await asyncio.sleep(0)
        first = sampler.replicas[0].engine
        assert first is not None

        await sampler.update(_killing(tiny, first.child.process.pid), 1, interrupt=True)
        (tmp_path / "release").touch()
        return [each for [each] in await asyncio.gather(*held)]

    again, continued = run(settings, steps, replicas=2)
    assert (again.versions, continued.versions) == (((1, 3),), ((0, 1), (1, 2)))
    assert [each.ids[0] for each in (again, continued)] == [0, 1]
    assert again.log_probs == continued.log_probs[1:] == (number(tiny(seed=1)),)


def checkpoint_number(folder: str) -> float:
    """Return the number of a stand-in that has loaded this folder."""
    return float(number_of(contents(folder)))


def _tensors(tiny) -> Any:
    return weights(tiny(seed=1)).items()


def _killing(tiny: Any, engine: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and kill the engine's process after the first three."""
    for place, pair in enumerate(_tensors(tiny)):
        if place == 3:
            os.kill(engine, signal.SIGKILL)
        yield pair


UPDATES: dict[str, Callable[[Any], list[Any]]] = {
    "none": lambda tiny: [],
    "tensors": lambda tiny: [_tensors(tiny)],
    "folder": lambda tiny: [_tensors(tiny), Checkpoint("/some/export")],
    "adapter": lambda tiny: [Adapter("/an/adapter")],
    "adapter on tensors": lambda tiny: [_tensors(tiny), Adapter("/a"), Adapter("/b")],
    "tensors after an adapter": lambda tiny: [Adapter("/a"), _tensors(tiny)],
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_killed_engine_starts_again_with_the_newest_weights(name, settings, tiny, tmp_path):
    """The requests of the killed engine are sent again, with the same seeds."""

    async def steps(sampler: VllmSampler) -> None:
        for version, item in enumerate(UPDATES[name](tiny), start=1):
            await sampler.update(item, version)
        [before] = await sampler.sample(row(1), SHORT, [5])
        held = [
            asyncio.create_task(sampler.sample(row(HELD), SHORT, [seed, seed + 1]))
            for seed in range(3)
        ]
        await asyncio.sleep(0.1)
        os.kill(process_of(before), signal.SIGKILL)
        await asyncio.sleep(0.1)
        (tmp_path / "release").touch()
        for seed, completions in enumerate(await asyncio.gather(*held)):
            assert [each.ids[0] for each in completions] == [seed, seed + 1]
            for item in completions:
                assert process_of(item) != process_of(before)
                if name != "adapter on tensors":  # the stand-in also counted the former adapter
                    assert item.log_probs == before.log_probs
                assert version_of(item) == version_of(before) == len(UPDATES[name](tiny))

    run(settings, steps)


def test_another_engine_takes_over_at_once(settings):
    async def steps(sampler: VllmSampler) -> None:
        first, second = (each.engine.child.process.pid for each in sampler.replicas if each.engine)
        held = asyncio.create_task(sampler.sample(row(HELD), SHORT, [0]))
        await asyncio.sleep(0.1)
        starting = asyncio.Event()

        async def never(environment: Any) -> Any:
            starting.set()
            await asyncio.Event().wait()

        sampler.replicas[0].start = never
        os.kill(first, signal.SIGKILL)
        await starting.wait()
        while sampler.replicas[1].in_flight == 0:
            await asyncio.sleep(0.01)
        [completion] = await sampler.sample(row(1), SHORT, [3])
        assert process_of(completion) == second
        held.cancel()

    run(settings, steps, replicas=2)


def test_a_prompt_that_kills_engines_is_given_up_and_no_other(settings, caplog):
    async def steps(sampler: VllmSampler) -> None:
        [completion] = await sampler.sample(row(DEADLY_ONCE), SHORT, [4])
        assert completion.ids[0] == 4
        for _ in range(2):  # more deaths than an engine may have without an answer in between
            place = "a prompt of 1 tokens"
            with raises(SamplerError, place=place, problem_has="the 3 times") as caught:
                await sampler.sample(row(DEADLY), SHORT, [0])
            assert "too much" in caught.value.problem
            assert "started again. Its last words:\nthe prompt was too much" in caplog.text
            [completion] = await sampler.sample(row(1), SHORT, [1])
            assert completion.ids[0] == 1

    run(settings, steps)


def test_scores_outlive_an_engine(settings):
    """A row whose engine dies, or does not answer, is scored again by the next one."""

    async def steps(sampler: VllmSampler) -> None:
        scores = await sampler.score(row(DEADLY_ONCE, 20, 30), 1, PATIENCE_S)
        expected = [[[20, -20], [21, -21]], [[30, -30], [31, -31]], [[0, 0], [0, 0]]]
        assert scores.tolist() == expected
        first = sampler.replicas[0].engine
        with raises(SamplerError, place="a prompt of 2 tokens", problem_has="within 0.05 s"):
            await sampler.score(row(HELD, 20), 0, 0.05)
        assert (await sampler.score(row(1, 20), 0, PATIENCE_S)).shape == (2, 1, 2)
        assert sampler.replicas[0].engine is not first

    run(settings, steps)


def test_an_engine_that_dies_while_it_starts_again_is_started_once_more(settings, tmp_path):
    stumble = tmp_path / "stumble"

    async def steps(sampler: VllmSampler) -> None:
        [before] = await sampler.sample(row(1), SHORT, [0])
        stumble.touch()
        os.kill(process_of(before), signal.SIGKILL)
        [completion] = await sampler.sample(row(1), SHORT, [0])
        assert process_of(completion) != process_of(before) and not stumble.exists()

    settings = replace(settings, options={**settings.options, "stumble": str(stumble)})
    run(settings, steps)
    stumble.touch()
    with raises(SamplerError, place="the engine", problem_has="ended with exit status 4, without"):
        run(settings, steps)


def test_an_engine_that_always_dies_is_given_up(settings):
    async def steps(sampler: VllmSampler) -> None:
        deadly = [sampler.sample(row(DEADLY), SHORT, [0]) for _ in range(4)]
        await asyncio.gather(*deadly, return_exceptions=True)
        await asyncio.gather(
            *(sampler.sample(row(DEADLY), SHORT, [0]) for _ in range(4)), return_exceptions=True
        )
        with raises(SamplerError, place="an engine", problem_has="died 5 times"):
            await sampler.sample(row(1), SHORT, [0])

    run(settings, steps)


def test_an_update_that_fails_leaves_the_former_weights(settings, tiny):
    """The update takes all tensors, because other ranks must not be left in a collective."""
    good, taken = weights(tiny(seed=1)), []

    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, value in weights(tiny(seed=2)).items():
            taken.append(name)
            yield ("model.unknown" if len(taken) == 5 else name), value

    async def steps(sampler: VllmSampler) -> Completion:
        await sampler.update(good.items(), 1)
        engine = sampler.replicas[0].engine
        with raises(CheckpointError, place="the weights", key="model.unknown"):
            await sampler.update(broken(), 2)
        assert sampler.replicas[0].engine is not engine  # its weights are unknown now
        assert len(taken) == len(good)
        *lacking, (last, _) = weights(tiny(seed=2)).items()
        numbers = f"the 1 tensors out of {len(good)} "
        with raises(CheckpointError, place="the weights", key=last, problem_has=numbers):
            await sampler.update(lacking, 3)
        [completion] = await sampler.sample(row(1), SHORT, [0])
        return completion

    completion = run(settings, steps)
    assert (version_of(completion), completion.log_probs[0]) == (1, number(tiny(seed=1)))


def test_an_engine_that_refuses_a_tensor_says_so(settings, tiny):
    name = sorted(weights(tiny()))[3]
    options = {**settings.options, "refused": name}

    async def steps(sampler: VllmSampler) -> Completion:
        with raises(SamplerError, place="the engine", problem_has="ValueError: no such tensor"):
            await sampler.update(_tensors(tiny), 1)
        [completion] = await sampler.sample(row(1), SHORT, [0])
        return completion

    assert version_of(run(replace(settings, options=options), steps)) == 0


def test_an_engine_that_dies_during_an_update_is_left_behind(settings, tiny):
    async def steps(sampler: VllmSampler) -> list[Completion]:
        first = sampler.replicas[0].engine
        assert first is not None

        await sampler.update(_killing(tiny, first.child.process.pid), 1)
        completions = await sampler.sample(row(1), SHORT, [0])
        while sampler.replicas[0].engine is None:
            await asyncio.sleep(0.01)
        return [*completions, *await sampler.sample(row(1), SHORT, [0])]

    survivor, restarted = run(settings, steps, replicas=2)
    assert process_of(survivor) != process_of(restarted)
    for completion in (survivor, restarted):
        assert (version_of(completion), completion.log_probs[0]) == (1, number(tiny(seed=1)))


def test_a_request_that_is_cancelled_is_forgotten(settings, tiny):
    async def steps(sampler: VllmSampler) -> None:
        held = asyncio.create_task(sampler.sample(row(HELD), SHORT, [0]))
        await asyncio.sleep(0.1)
        held.cancel()
        await asyncio.wait({held})
        await sampler.update(Checkpoint(tiny()), 1)  # waits for no request
        assert [each.in_flight for each in sampler.replicas] == [0]

    run(settings, steps)


def _trainer(connection: Connection, settings: EngineSettings) -> None:
    async def steps(sampler: VllmSampler) -> None:
        [completion] = await sampler.sample(row(1), SHORT, [0])
        fork = os.fork()  # it also has the sampler's end of the socket
        if fork == 0:
            time.sleep(2 * PATIENCE_S)
            os._exit(0)
        connection.send((process_of(completion), fork))
        await asyncio.Event().wait()

    run(settings, steps)


def test_no_engine_outlives_a_killed_trainer(settings, process_tree):
    trainer = process_tree.fork(_trainer, settings)
    engine, fork = trainer.connection.recv()
    try:
        assert not gone_already(engine)
        os.kill(trainer.pid, signal.SIGKILL)
        assert gone(engine)
        assert not gone_already(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def gone_already(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_closing_leaves_nothing_behind(settings, tiny, tmp_path):
    files = set(os.listdir("/proc/self/fd"))

    async def steps(sampler: VllmSampler) -> tuple[int, str]:
        await sampler.update(_tensors(tiny), 1)
        [completion] = await sampler.sample(row(1), SHORT, [0])
        assert Path(sampler.kept.folder.name).is_dir()
        return process_of(completion), sampler.kept.folder.name

    pid, kept_folder = run(settings, steps)
    assert gone(pid) and not Path(kept_folder).exists()
    assert len(set(os.listdir("/proc/self/fd"))) <= len(files)


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"python": "/no/such/python"}, "python", ": No such file"),
        ({"python": sys.executable}, "python", "make vllm-env"),
        (
            {"fail": "RuntimeError: Unsupported CPU attention configuration"},
            "folder",
            "32, 64, 80, 96, 112, 128",
        ),
        (
            {"fail": "AssertionError: CPU GDN attention requires BF16."},
            "dtype",
            "train.precision=bf16",
        ),
        (
            {"fail": "RuntimeError: Unexpected head dim size, 32"},
            "folder",
            "both 64 or both 128 wide",
        ),
        (
            {"fail": "AttributeError: module 'triton.language' has no attribute 'bfloat16'"},
            "lora_rank",
            "no adapters for a model with experts",
        ),
        ({"fail": "ValueError: something else"}, "", "ValueError: something else"),
    ],
)
def test_what_keeps_an_engine_from_starting(change, key, said, settings):
    if "fail" in change:
        change = {"options": change}

    async def steps(sampler: VllmSampler) -> None:
        raise AssertionError("it has started")

    changed = replace(settings, **change)
    with pytest.raises(MegatronVLMError) as caught:
        run(changed, steps)
    error = caught.value
    assert (error.place, error.key) == ("the engine", key) and said in str(error)
    assert not key or error.found == getattr(changed, key)


def video_row(folder: str, root: Path, *content: Any) -> Row:
    """Return a prompt with videos of `root`, whose pixels are bytes."""
    make_video(root / "a.mp4", 23)
    make_video(root / "b.mp4", 9, size=(100, 70))
    record = {"messages": [say("user", *content)]}
    return RowMaker(folder, image_root=str(root)).row(record, prompt=True)


def shows(name: str) -> dict[str, str]:
    return {"type": "video", "video": name}


def test_prompts_that_the_engine_would_see_otherwise_are_refused(settings, tiny, tmp_path):
    prompts = Prompts(settings)
    [with_floats] = make_rows(MIXED[:1])
    two = video_row(tiny(), tmp_path, shows("a.mp4"), shows("b.mp4"))
    cut = replace(two, pixel_values_videos_PC=two.pixel_values_videos_PC[1:])
    three = RowMaker(tiny(), max_tokens=999).row(
        {"messages": [say("user", *[image(64, 64)] * 3)]}, prompt=True
    )
    for prompt, error, key, value, problem in (
        (two, ConfigError, "videos", 2, "the 1 that"),
        (with_floats, DataError, "pixels", "torch.float32", ""),
        (cut, DataError, "pixel_values_videos", NOT_GIVEN, "patches but its grid needs"),
        (row(*[1] * 61), ConfigError, "max_len", 64, "61 tokens and max_tokens=4 "),
        (three, ConfigError, "pictures", 3, "the 2 that"),
    ):
        with raises(error, place="the prompt", key=key, found=value, problem_has=problem):
            Prompts(replace(settings, pictures=2, videos=1)).request(prompt, SHORT, [0])
    with raises(ConfigError, key="seed", found=-1, allowed="a number from 0 to 2**63 - 1"):
        prompts.request(row(1), SHORT, [3, -1])
    assert prompts.request(row(*[1] * 60), SHORT, [0]).fields["prompt"] == [1] * 60


def test_videos_are_those_of_the_trainers_patches(tiny, tmp_path):
    """A video has one placeholder in the template's brackets, and its frames give equal patches.

    At 10 frames a second, b has the frames 0, 3, 5 and 8, and a has 0, 7, 15 and 22. Times are
    midway between two frames, as the template rounds them.
    """
    content = (text("first"), shows("b.mp4"), image(50, 60), shows("a.mp4"), text("last"))
    made = video_row(tiny(), tmp_path, *content)
    engine = EngineSettings("python", tiny(), videos=2)
    prompts = Prompts(engine)
    fields = (request := prompts.request(made, SHORT, [0])).fields
    assert [each["facts"]["frames_indices"] for each in fields["videos"]] == [
        [1, 1, 7, 7],
        [3, 3, 19, 19],
    ]
    assert fields["expected"] == made.ids_S.tolist()
    words = AutoTokenizer.from_pretrained(tiny()).decode(fields["prompt"])
    mark = "<|vision_start|><|{}_pad|><|vision_end|>"
    assert f"first{mark.format('video') + mark.format('image') + mark.format('video')}last" in words
    settings, videos = VideoSettings.from_checkpoint(tiny()), seen_videos(made, prompts.images)
    assert [each.tobytes() for each in videos] == request.pixels[1:]
    assert [tuple(each["shape"]) for each in fields["videos"]] == [v.shape[:3] for v in videos]
    assert made.video_grid_I3 is not None
    again = [
        settings.patches(frames, VideoPlan(tuple(range(len(frames))), (), grid, *frames.shape[1:3]))
        for frames, grid in zip(videos, map(tuple, made.video_grid_I3.tolist()), strict=True)
    ]
    assert made.pixel_values_videos_PC is not None
    assert torch.equal(torch.from_numpy(np.concatenate(again)), made.pixel_values_videos_PC)


def test_a_video_whose_frames_have_no_times_is_refused(tiny, tmp_path):
    """Token ids that users build themselves may lack the times."""
    made = video_row(tiny(), tmp_path, shows("a.mp4"))
    start = int(
        (made.ids_S == Prompts(EngineSettings("python", tiny())).tokens.video_id).nonzero()[0]
    )
    ids_S = torch.cat([made.ids_S[: start - 3], made.ids_S[start - 1 :]])
    short = replace(made, ids_S=ids_S, labels_S=ids_S)
    with raises(DataError, place="the prompt", problem_has="<0.5 seconds>"):
        Prompts(EngineSettings("python", tiny(), videos=1)).request(short, SHORT, [0])


def test_pictures_are_those_of_the_trainers_patches(tiny):
    """A picture has one placeholder, and gives equal patches when it is cut again."""
    record = {"messages": [say("user", image(100, 60), text("and"), image(70, 130, 2))]}
    made = RowMaker(tiny()).row(record, prompt=True)
    settings = ImageSettings.from_checkpoint(tiny())
    request = Prompts(EngineSettings("python", tiny())).request(made, SHORT, [0])
    sizes, pictures = request.fields["pictures"], seen_by_trainer(made, settings)
    assert [each.shape for each in pictures] == [(*size, 3) for size in sizes]
    assert [each.tobytes() for each in pictures] == request.pixels
    again = [settings.patches(picture_of(each)) for each in pictures]
    assert made.pixel_values_PC is not None
    assert torch.equal(torch.cat([torch.from_numpy(each) for each in again]), made.pixel_values_PC)
    image_id = Prompts(EngineSettings("python", tiny())).tokens.image_id
    assert request.fields["prompt"].count(image_id) == 2
    assert request.fields["expected"].count(image_id) == sum(h * w for h, w in sizes) // 32**2
    assert [i for i in request.fields["prompt"] if i != image_id] == [
        i for i in request.fields["expected"] if i != image_id
    ]


def picture_of(pixels: Any) -> Any:
    import PIL.Image

    return PIL.Image.fromarray(pixels)
