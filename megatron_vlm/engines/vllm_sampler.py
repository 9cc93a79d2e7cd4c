"""vLLM as a sampler: engines in processes of their own, see vllm_process.py, of which any may
die."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.inspection import EngineView, seen_of
from megatron_vlm.engines.prompts import Prompts
from megatron_vlm.engines.sampler import Adapter, Checkpoint, SamplerError, Weights
from megatron_vlm.engines.supervisor import EngineReplica
from megatron_vlm.engines.update_lock import UpdateLock
from megatron_vlm.engines.vllm_process import Engine, EngineDiedError, EngineSettings
from megatron_vlm.engines.weight_stream import (
    BUFFER_BYTES,
    SharedBuffer,
    WeightCache,
    complete_weights,
    stream,
)
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.training.completions import Completion, SamplingSettings

ASKED = 3  # times that a request is asked whose engines die of it, or with it


@dataclass(frozen=True)
class EngineState:
    """What an engine that is started again is given. Without `base` it has the weights that it
    began with."""

    version: int = 0
    base: Checkpoint | WeightCache | None = None
    adapter: Adapter | None = None


class VllmSampler:
    """A Sampler, see sampler.py; made by `start`, and used in the event loop that this ran in.

    A request goes to the engine with the fewest samples under way. An engine that dies is started
    again with the newest weights, and what it was asked is asked again.
    """

    def __init__(
        self, settings: EngineSettings, replicas: Sequence[Mapping[str, str]], keep: str | None
    ):
        self.settings = settings
        self.prompts = Prompts(settings)
        source = HFCheckpoint(settings.folder)
        source.read_headers()
        self.names = frozenset(source.tensors)
        self.buffer, self.kept = SharedBuffer(BUFFER_BYTES), WeightCache(keep)
        self.newest = EngineState()
        self.gate = UpdateLock()
        self.suspects = asyncio.Lock()  # of a request that is asked for the last time
        self.renewing = asyncio.Lock()  # whoever gives weights: the buffer is one
        self.replicas = [EngineReplica(each, self._start, self._renew) for each in replicas]

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        replicas: Sequence[Mapping[str, str]] = ({},),
        keep: str | None = None,
    ) -> "VllmSampler":
        """Start an engine for each of `replicas`, which are more variables of its environment, such
        as its CUDA_VISIBLE_DEVICES. The newest weights, where they come as tensors, are kept in a
        folder inside `keep`, by default of TMPDIR."""
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

    async def _place(self, replica: EngineReplica) -> None:
        replica.engine = await self._start(replica.environment)

    async def _start(self, environment: Mapping[str, str]) -> Engine:
        return await Engine.start(self.settings, environment, self.buffer.file, 0)

    async def sample(
        self,
        prompt: Row,
        settings: SamplingSettings,
        seeds: Sequence[int],
        adapter: Adapter | None = None,
    ) -> list[Completion]:
        """An answer for each seed, all with the weights of one version. `adapter`: one for this
        request alone, beside whole weights, in a folder that stays as it is; up to
        `settings.adapters` different ones are drawn with at the same time."""
        request = self.prompts.request(prompt, settings, seeds)
        if not seeds:
            return []
        named = {} if adapter is None else {"adapter": adapter.folder}
        async with self.gate.among_others():
            fields = {**request.fields, **named}
            answer = await self._ask("sample", fields, request.pixels, len(seeds))
        return [
            Completion(
                tuple(each["ids"]), tuple(each["log_probs"]), each["ended"], answer["version"]
            )
            for each in answer["samples"]
        ]

    async def inspect(self, prompt: Row) -> EngineView:
        """What vLLM itself makes of the prompt. For engines that were started with the option
        mm_processor_cache_gb=0."""
        request = self.prompts.request(prompt, SamplingSettings(1), [])
        fields = {name: request.fields[name] for name in ("prompt", "pictures", "videos")}
        async with self.gate.among_others():
            return seen_of(await self._ask("inspect", fields, request.pixels, 1))

    async def _ask(
        self, do: str, fields: Mapping[str, Any], pixels: Sequence[bytes], samples: int
    ) -> dict[str, Any]:
        died: EngineDiedError | None = None
        for again in range(ASKED):
            # The last time, those whose engines have died come one by one: the prompt that they
            # died of, if it was one, takes none of the others along.
            async with self.suspects if again == ASKED - 1 else nullcontext():
                replica, engine = await self._idlest()
                replica.in_flight += samples
                try:
                    answer: dict[str, Any] = await engine.ask(do, body=pixels, **fields)
                    replica.answered()
                    return answer
                except EngineDiedError as error:
                    died = error
                    replica.lost(engine, error)
                finally:
                    replica.in_flight -= samples
        length = len(fields.get("expected", fields["prompt"]))
        raise SamplerError(
            f"the engine died each of the {ASKED} times that it was asked; its last words:\n{died}",
            place=f"a prompt of {length} tokens",
        ) from died

    async def _idlest(self) -> tuple[EngineReplica, Engine]:
        """The replica with the fewest samples under way, once there is one."""
        while True:
            if live := self._live():
                return min(live, key=lambda pair: pair[0].in_flight)
            mending = [each.mending for each in self.replicas if not each.given_up]
            if not mending:
                raise next(each.given_up for each in self.replicas if each.given_up)
            await asyncio.wait(filter(None, mending), return_when=asyncio.FIRST_COMPLETED)

    def _live(self) -> list[tuple[EngineReplica, Engine]]:
        return [(each, each.engine) for each in self.replicas if each.engine is not None]

    async def update(self, weights: Weights, version: int) -> None:
        """Give new weights to all engines, when the samples under way have ended. Where this fails,
        samples have the former weights. Tensors are taken from an iterable to the end, whatever
        happens: on other ranks that may be a part of collectives."""
        if isinstance(weights, Checkpoint | Adapter):
            async with self.gate.alone(), self.renewing:
                await self._update(weights, version)
            return
        named = iter(weights)
        try:
            async with self.gate.alone(), self.renewing:
                await self._update(named, version)
        finally:
            for _ in named:
                pass

    async def _update(self, weights: Weights, version: int) -> None:
        if isinstance(weights, Checkpoint):
            newest = EngineState(version, weights)
        elif isinstance(weights, Adapter):
            newest = replace(self.newest, version=version, adapter=weights)
        else:
            newest = EngineState(version, self.kept)
            weights = self.kept.through(complete_weights(weights, self.names))
        live = self._live()
        try:
            died = await self._give(weights, [engine for _, engine in live], version)
        except BaseException as error:
            for replica, engine in live:  # nobody knows what it has now
                replica.lost(engine, EngineDiedError(f"an update has failed: {error}"))
            raise
        self.newest = newest
        for replica, engine in live:
            if engine in died:
                replica.lost(engine, died[engine])

    async def _give(
        self, weights: Weights, engines: Sequence[Engine], version: int
    ) -> dict[Engine, EngineDiedError]:
        """Those that have died of it, and of what."""
        if not isinstance(weights, Checkpoint | Adapter):
            return await stream(weights, engines, self.buffer, version)
        do = "folder" if isinstance(weights, Checkpoint) else "adapt"
        asked = [engine.ask(do, folder=weights.folder, version=version) for engine in engines]
        found = await asyncio.gather(*asked, return_exceptions=True)
        died = {}
        for engine, each in zip(engines, found, strict=True):
            if isinstance(each, EngineDiedError):
                died[engine] = each
            elif isinstance(each, BaseException):
                raise each
        return died

    async def _renew(self, replica: EngineReplica, engine: Engine) -> None:
        """Give the newest weights to an engine that was started again, and put it to work."""
        async with self.renewing:
            newest = self.newest
            base = newest.base.read() if isinstance(newest.base, WeightCache) else newest.base
            given: list[Weights | None] = [base, newest.adapter]
            for weights in (each for each in given if each is not None):
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
            await asyncio.sleep(0)  # for transports to end
