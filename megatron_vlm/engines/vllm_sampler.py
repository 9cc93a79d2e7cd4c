"""vLLM as a sampler, with engines in processes of their own; see vllm_process.py. Any of them may
die. With experts, the samples come back with the experts of their tokens.

Shapes: S tokens of a prompt and its answer, R tokens whose experts the engine returns, L layers
with experts, K experts of a token."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.prompts import Prompts
from megatron_vlm.engines.sampler import (
    Adapter,
    Capacity,
    Checkpoint,
    Hear,
    ProcessedPrompt,
    SamplerError,
    Weights,
    read_processed_prompt,
)
from megatron_vlm.engines.vllm_process import EngineProcess, EngineReplica, UpdateLock, engine_args
from megatron_vlm.engines.weight_stream import (
    BUFFER_BYTES,
    SharedBuffer,
    WeightCache,
    ask_each,
    complete_weights,
    read_folder,
    stream,
)
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.io.child import ChildDiedError


def first_unrouted(prompt: Row) -> int:
    """Return the number of leading tokens whose experts are known from earlier answers."""
    if prompt.routing_SLK is None:
        return 0
    is_known_S = prompt.routing_SLK[:, 0, 0] >= 0
    return int(is_known_S.int().cumprod(0).sum())


def routings_of(answer: Mapping[str, Any], start: int) -> Iterator[Tensor | None]:
    """Yield the experts [S, L, K] of each sample, or None if the engine returns none. They are -1
    for the tokens before `start`, and for the last one, which was drawn and never read."""
    values = torch.from_numpy(np.frombuffer(answer.get("body", b""), np.int16).copy())
    for sample in answer["samples"]:
        if (shape := sample.get("routing")) is None:
            yield None
            continue
        routing_RLK, values = values[: prod(shape)].view(shape), values[prod(shape) :]
        unknown = routing_RLK.new_full((1, *shape[1:]), -1)
        yield torch.cat([unknown.expand(start, -1, -1), routing_RLK, unknown])


MAX_TRIES = 3  # attempts for a request whose engines die
_SAMPLES_AT_ONCE = 512  # requests in progress of an engine: more than it draws at a time
_SCORES_AT_ONCE = 64  # rows that an engine scores at a time


@dataclass(frozen=True)
class EngineState:
    """The state for an engine that is restarted. Without `base` it has the weights of its first
    start."""

    version: int = 0
    base: Checkpoint | WeightCache | None = None
    adapter: Adapter | None = None


class VllmSampler:
    """An Engine (see sampler.py) that `start` makes. Use it in the event loop in which `start` ran.

    A request goes to the engine with the fewest samples in progress. An engine that dies is
    restarted with the newest weights, and its pending requests are sent again.
    """

    def __init__(
        self, settings: EngineSettings, replicas: Sequence[Mapping[str, str]], keep: str | None
    ):
        self.prompts = Prompts(settings)
        of_family = self.prompts.engine_prompt.args(self.prompts.images)
        source = HFCheckpoint(settings.folder)
        source.read_headers()
        if settings.draft_tokens and not source.passthrough:  # its only kind: MTP heads
            raise ConfigError(
                f"needs an MTP head (mtp.*), and {settings.folder} has none",
                key="engine.draft_tokens",
                found=settings.draft_tokens,
                remedy="give a checkpoint that has one, or set engine.draft_tokens=0",
            )
        # With less room than a round takes, vLLM's gated delta net on a CPU fails (0.32).
        room = min(settings.max_len + settings.draft_tokens, source.sizes.text.max_positions)
        self.settings = replace(
            settings, max_len=max(room, settings.max_len), options={**of_family, **settings.options}
        )
        self.names = frozenset(source.tensors) | frozenset(source.passthrough)
        self.buffer, self.kept = SharedBuffer(BUFFER_BYTES), WeightCache(keep)
        self.newest = EngineState()
        self.gate = UpdateLock()
        self.suspects = asyncio.Lock()  # held by a request during its last attempt
        self.renewing = asyncio.Lock()  # held by a transfer of weights: there is one buffer
        # Requests that an engine would only hold in its queue wait here, so that their time-out
        # counts from the start of their work.
        self.scoring = asyncio.Semaphore(_SCORES_AT_ONCE * len(replicas))
        self.replicas = [EngineReplica(each, self._start, self._renew) for each in replicas]

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        replicas: Sequence[Mapping[str, str]] = ({},),
        keep: str | None = None,
    ) -> "VllmSampler":
        """Start an engine for each of `replicas`, which are additional environment variables such
        as CUDA_VISIBLE_DEVICES. The newest weights, if they arrive as tensors, are kept in a folder
        inside `keep`, by default inside TMPDIR."""
        sampler = cls(settings, replicas, keep)
        starting = [asyncio.create_task(sampler._place(each)) for each in sampler.replicas]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await sampler.close()
            raise
        return sampler

    @property
    def capacity(self) -> Capacity:
        """The sum over all replicas, and the adapters of each, which the options may replace."""
        count, settings = len(self.replicas), self.settings
        adapters = int(settings.options.get("max_loras", settings.adapters))
        return Capacity(_SAMPLES_AT_ONCE * count, _SCORES_AT_ONCE * count, adapters)

    async def _place(self, replica: EngineReplica) -> None:
        replica.engine = await self._start(replica.environment)
        self.prompts.is_on_cpu = not replica.engine.gpus

    async def _start(self, environment: Mapping[str, str]) -> EngineProcess:
        return await EngineProcess.start(self.settings, environment, self.buffer.file, 0)

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
        hear: Hear | None = None,
    ) -> list[Completion]:
        """Sample an answer for each seed. `adapter` is used by this request alone, on top of whole
        weights; its folder must not change. At most `settings.adapters` different adapters are in
        use at the same time. `hear` receives the tokens while they are drawn. If an engine
        dies, `hear` receives its tokens again from the next one."""
        request = self.prompts.request(prompt, settings, seeds)
        if not seeds:
            return []
        more: dict[str, Any] = {} if adapter is None else {"adapter": adapter.folder}
        if hear is not None:
            more["streamed"] = True
        if self.settings.routing_layers:
            more["routing_start"] = first_unrouted(prompt)
        async with self.gate.shared_with_requests():
            fields = {**request.fields, **more}
            answer = await self._ask("sample", fields, request.pixels, len(seeds), hear=hear)
        routings = routings_of(answer, more.get("routing_start", 0))
        return [
            Completion(
                tuple(sample["ids"]),
                tuple(sample["log_probs"]),
                sample["ended"],
                tuple(map(tuple, sample["versions"])),
                routing_SLK,
                tuple(sample["accepted"]),
            )
            for sample, routing_SLK in zip(answer["samples"], routings, strict=True)
        ]

    async def score(self, row: Row, top_k: int, timeout_s: float) -> Tensor:
        """Return the scores of a row's tokens under the engines' first weights, as
        the worker scores them on the ranks: [S, 1 + k, 2] in float64, at the position that
        predicts a token. An engine that takes longer than `timeout_s` is taken for dead."""
        request = self.prompts.request(row, SamplingSettings(1), [])
        names = ("prompt", "expected", "pictures", "videos", "processor")
        fields = {name: request.fields[name] for name in names} | {"top_k": top_k}
        async with self.scoring, self.gate.shared_with_requests():
            answer = await self._ask("score", fields, request.pixels, 1, timeout_s)
        table = torch.frombuffer(bytearray(answer["body"]), dtype=torch.float64)
        table_SJ2 = table.view(len(row.ids_S), 1 + top_k, 2)
        if not table_SJ2.isfinite().all():
            raise SamplerError("a score is not a finite number", place="the engine")
        return torch.cat([table_SJ2[1:], torch.zeros_like(table_SJ2[:1])])

    async def inspect(self, prompt: Row) -> ProcessedPrompt | None:
        """Return vLLM's own view of the prompt, or None: engines of several processes do not show
        it, nor those with a cache."""
        args = engine_args(self.settings)
        if args.get("mm_processor_cache_gb") != 0 or args.get("tensor_parallel_size", 1) > 1:
            return None
        prompts = self.prompts
        request = prompts.request(prompt, SamplingSettings(1), [])
        names = ("prompt", "pictures", "videos", "processor")
        fields = {name: request.fields[name] for name in names} | {"names": prompts.names}
        async with self.gate.shared_with_requests():
            answer = await self._ask("inspect", fields, request.pixels, 1)
        return read_processed_prompt(answer, prompts.engine_prompt, prompts.tokens.merge)

    async def _ask(
        self,
        do: str,
        fields: Mapping[str, Any],
        pixels: Sequence[bytes],
        samples: int,
        timeout_s: float | None = None,
        hear: Hear | None = None,
    ) -> dict[str, Any]:
        died: ChildDiedError | None = None
        for attempt in range(MAX_TRIES):
            # In the last attempt, requests whose engines have died run one by one: if a prompt
            # kills engines, it does not affect the other requests.
            async with self.suspects if attempt == MAX_TRIES - 1 else nullcontext():
                replica, engine = await self._wait_for_idlest()
                replica.in_flight += samples
                try:
                    asking = engine.ask(do, body=pixels, hear=hear, **fields)
                    answer: dict[str, Any] = await asyncio.wait_for(asking, timeout_s)
                    replica.deaths = 0
                    return answer
                except (ChildDiedError, TimeoutError) as error:
                    died = _as_death(error, timeout_s)
                    replica.replace_engine(engine, died)
                finally:
                    replica.in_flight -= samples
        length = len(fields.get("expected", fields["prompt"]))
        raise SamplerError(
            f"the engine died each of the {MAX_TRIES} times that it was asked; its last "
            f"words:\n{died}",
            place=f"a prompt of {length} tokens",
        ) from died

    async def _wait_for_idlest(self) -> tuple[EngineReplica, EngineProcess]:
        """Return the replica with the fewest samples in progress, once there is one."""
        while True:
            if live := self._live_engines():
                return min(live, key=lambda pair: pair[0].in_flight)
            mending = [replica.mending for replica in self.replicas if not replica.given_up]
            if not mending:
                raise next(replica.given_up for replica in self.replicas if replica.given_up)
            await asyncio.wait(filter(None, mending), return_when=asyncio.FIRST_COMPLETED)

    def _live_engines(self) -> list[tuple[EngineReplica, EngineProcess]]:
        return [(each, each.engine) for each in self.replicas if each.engine is not None]

    async def update(self, weights: Weights, version: int, interrupt: bool = False) -> None:
        """Send new weights to all engines: once the samples in progress have ended, or with
        `interrupt` at once, between two tokens of these samples. If this fails, samples have the
        former weights, and those that were interrupted begin again. An iterable of tensors is read
        to its end in any case: on other ranks that may be part of collectives."""
        if isinstance(weights, Checkpoint | Adapter):
            async with self.gate.exclusive(interrupt), self.renewing:
                await self._update(weights, version)
            return
        tensors = iter(weights)
        try:
            async with self.gate.exclusive(interrupt), self.renewing:
                await self._update(tensors, version)
        finally:
            for _ in tensors:
                pass

    async def _update(self, weights: Weights, version: int) -> None:
        if isinstance(weights, Checkpoint):
            newest = EngineState(version, weights)
        elif isinstance(weights, Adapter):
            newest = replace(self.newest, version=version, adapter=weights)
        else:
            newest = EngineState(version, self.kept)
            weights = self.kept.write_through(complete_weights(weights, self.names))
        live = self._live_engines()
        try:
            died = await self._give(weights, [engine for _, engine in live], version)
        except BaseException as error:
            for replica, engine in live:  # its weights are unknown now
                replica.replace_engine(engine, ChildDiedError(f"an update has failed: {error}"))
            raise
        self.newest = newest
        for replica, engine in live:
            if engine in died:
                replica.replace_engine(engine, died[engine])

    async def _give(
        self, weights: Weights, engines: Sequence[EngineProcess], version: int
    ) -> dict[EngineProcess, ChildDiedError]:
        """Send weights to the engines, and return the engines that died with their errors."""
        if isinstance(weights, Checkpoint) and self.settings.draft_tokens:
            # vLLM's own reloading leaves the MTP head as it is.
            weights = complete_weights(read_folder(weights.folder), self.names)
        if not isinstance(weights, Checkpoint | Adapter):
            return await stream(weights, engines, self.buffer, version)
        do = "folder" if isinstance(weights, Checkpoint) else "adapt"
        return await ask_each(engines, do, folder=weights.folder, version=version)

    async def _renew(self, replica: EngineReplica, engine: EngineProcess) -> None:
        """Give the newest weights to an engine that was restarted, and put it into use."""
        async with self.renewing:
            newest = self.newest
            base = newest.base.read() if isinstance(newest.base, WeightCache) else newest.base
            updates: list[Weights | None] = [base, newest.adapter]
            for weights in (update for update in updates if update is not None):
                for died in (await self._give(weights, [engine], newest.version)).values():
                    raise died
            replica.engine = engine

    async def close(self) -> None:
        """End all engines."""
        for replica in self.replicas:
            await replica.close()
        self.buffer.close()
        self.kept.close()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # transports need it to end


def _as_death(error: ChildDiedError | TimeoutError, timeout_s: float | None) -> ChildDiedError:
    if isinstance(error, ChildDiedError):
        return error
    return ChildDiedError(f"it has not answered within {timeout_s:g} s, and was ended")
