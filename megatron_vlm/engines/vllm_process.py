"""An engine: a child process in an environment of its own, which runs server/engine_server.py, and
the supervisor of one engine among several, which restarts it when it has died."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.distributed.process import environment_elsewhere
from megatron_vlm.engines.engine_kinds import EngineSettings
from megatron_vlm.engines.sampler import Hear, SamplerError
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.atomic import socket_folder
from megatron_vlm.io.child import OUTPUT_CHARACTERS, Child, ChildDiedError, ChildRefusedError

SERVER = Path(__file__).parent / "server" / "engine_server.py"
_MAX_LOG_PROBS = 20  # vLLM's own limit of tokens in a place


@dataclass(eq=False)
class EngineProcess:
    """An engine that was started."""

    child: Child
    gpus: Sequence[str] = ()  # names of the GPUs that it uses, as in server/cuda_memory.py

    @staticmethod
    async def start(
        settings: EngineSettings, environment: Mapping[str, str], buffer: int, version: int
    ) -> "EngineProcess":
        """Start an engine, which loads the checkpoint as this version. It inherits `buffer`, the
        memory for weights."""
        command, environment = [settings.python, str(SERVER)], {**_environment(), **environment}
        try:
            child = await Child.start(command, [str(buffer)], environment, [buffer], True)
        except OSError as error:
            raise ConfigError(
                f"cannot be started: {error.strerror}",
                place="the engine",
                key="python",
                found=settings.python,
                remedy="give the python of an environment that has vLLM, such as that of "
                "`make vllm-env`: .venv-vllm/bin/python",
            ) from error
        engine = EngineProcess(child)
        try:
            await asyncio.wait_for(engine._load(settings, version), settings.start_s)
        except BaseException as error:
            words = child.last_words()
            await child.end()
            if (cause := _of_start(error, words, settings)) is None:
                raise
            raise cause from error
        return engine

    async def _load(self, settings: EngineSettings, version: int) -> None:
        names = ["folder", "dtype", "max_len", "lora_rank", "lora_vision", "adapters"]
        fields = {name: getattr(settings, name) for name in [*names, "routing_layers"]}
        fields["media"] = {"image": settings.pictures, "video": settings.videos}
        options = engine_args(settings)
        self.gpus = await self.ask("load", **fields, version=version, options=options)

    async def ask(
        self, do: str, body: Sequence[Any] = (), hear: Hear | None = None, **fields: Any
    ) -> Any:
        """Send a request with the raw bytes of `body`, and return its answer. If the answer has raw
        bytes, it is an object, and they are its "body". `hear` receives what comes before it."""
        try:
            return await self.child.call({"do": do, **fields}, body, hear).answered
        except ChildRefusedError as refused:
            raise _explain_failure(refused.error) from None


def engine_args(settings: EngineSettings) -> dict[str, Any]:
    """Return the EngineArgs of vLLM that these settings need, after which its options come."""
    parallel = max((each.count(",") + 1 for each in settings.devices), default=1)
    args: dict[str, Any] = {
        "tensor_parallel_size": parallel if parallel > 1 else None,
        # Without a cache, an engine can show what it sees.
        "mm_processor_cache_gb": 0 if settings.is_inspected else None,
        "skip_mm_profiling": None if settings.reserves_media else True,
        "max_logprobs": settings.top_k if settings.top_k > _MAX_LOG_PROBS else None,
        "gpu_memory_utilization": settings.memory_share,
    }
    if (drafts := settings.draft_tokens) > 0:
        args |= {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts},
            "per_request_spec_decode_metrics": "summary",
        }
    return {name: value for name, value in args.items() if value is not None} | {**settings.options}


def _environment() -> dict[str, str]:
    # vLLM's own processes meet in this folder. By default they use TMPDIR, whose name may be too
    # long for sockets.
    return {"VLLM_RPC_BASE_PATH": str(socket_folder()), **environment_elsewhere("OMP_")}


def _explain_failure(output: str) -> Exception:
    """Turn vLLM's traceback into an error for the user."""
    last = output.strip().splitlines()[-1]
    if last.startswith("PromptError: "):
        return DataError(last.removeprefix("PromptError: "))
    return SamplerError(
        f"vLLM has failed: {last}\n{output[-OUTPUT_CHARACTERS:]}", place="the engine"
    )


_ELSEWHERE = "sample from this model on GPUs, or with our own sampler"
_DELTA_NET_WIDTHS = (
    ": vLLM's gated delta nets on a CPU take keys and values that are both 64 or both 128 wide, "
    "and this model's are not",
    "folder",
    _ELSEWHERE,
)
# By what vLLM says: the problem, the key and the remedy.
_REFUSALS = {
    "No module named 'vllm'": (
        "has no vLLM",
        "python",
        "for the CPU run `make vllm-env` and give .venv-vllm/bin/python; on GPUs, install vllm in "
        "an environment of its own",
    ),
    "Unsupported CPU attention configuration": (
        ": vLLM's attention on a CPU takes heads that are 32, 64, 80, 96, 112, 128 or a larger "
        "multiple of 32 wide, and this model's are not",
        "folder",
        _ELSEWHERE,
    ),
    "CPU GDN attention requires BF16": (
        ": vLLM's gated delta nets on a CPU take bfloat16 alone",
        "dtype",
        f"set train.precision=bf16, or {_ELSEWHERE}",
    ),
    "expect head_dim to be multiples of 32": _DELTA_NET_WIDTHS,
    "expect head_dim to be equal to head_dim_v": _DELTA_NET_WIDTHS,
    "Unexpected head dim size": _DELTA_NET_WIDTHS,
    # Its kernel for adapters of experts is written in Triton, which a CPU lacks.
    "module 'triton.language' has no attribute": (
        ": vLLM on a CPU takes no adapters for a model with experts",
        "lora_rank",
        f"train all weights, or {_ELSEWHERE}",
    ),
}


def _of_start(error: BaseException, words: str, settings: EngineSettings) -> Exception | None:
    """Return the error of an engine that does not start, with the remedy, or None if the cause is
    unknown."""
    text = f"{error}\n{words}"
    for sign, (problem, key, remedy) in _REFUSALS.items():
        if sign in text:
            found = getattr(settings, key)
            return ConfigError(problem, place="the engine", key=key, found=found, remedy=remedy)
    if isinstance(error, TimeoutError):
        return SamplerError(
            f": vLLM has not loaded {settings.folder} in this time",
            place="the engine",
            key="start_s",
            found=settings.start_s,
            remedy=f"raise it, or see why vLLM waits:\n{words}",
        )
    if isinstance(error, ChildDiedError):
        return SamplerError(
            f": vLLM ended while it was loading this model:\n{words}",
            place="the engine",
            key="folder",
            found=settings.folder,
        )
    return None


_log = logging.getLogger(__name__)
DEATHS = 5  # deaths in a row, without an answer in between, until an engine is given up

Start = Callable[[Mapping[str, str]], Awaitable[EngineProcess]]
Renew = Callable[["EngineReplica", EngineProcess], Awaitable[None]]


class EngineReplica:
    """An engine, or the next one while it starts. `start` starts an engine with the replica's
    environment. `renew` gives it the newest weights and puts it into use."""

    def __init__(self, environment: Mapping[str, str], start: Start, renew: Renew):
        self.environment, self.start, self.renew = environment, start, renew
        self.engine: EngineProcess | None = None
        self.former: EngineProcess | None = None  # the one that has died
        self.in_flight = 0  # number of samples
        self.deaths = 0
        self.given_up: Exception | None = None
        self.mending: asyncio.Task[None] | None = None

    def replace_engine(self, engine: EngineProcess, died: ChildDiedError) -> None:
        """Start another engine, once, after this one has died. Many requests may report its
        death."""
        if self.engine is not engine:
            return
        _log.warning("An engine has ended, and is started again. Its last words:\n%s", died)
        self.engine, self.former = None, engine
        self._record_death(died)
        self.mending = asyncio.create_task(self._mend(engine))

    def _record_death(self, died: ChildDiedError) -> None:
        self.deaths += 1
        if self.deaths >= DEATHS:
            self.given_up = SamplerError(
                f"it has died {self.deaths} times without an answer in between, and is not "
                f"started again; its last words:\n{died}",
                place="an engine",
            )

    async def _mend(self, former: EngineProcess) -> None:
        await former.child.end()
        while self.given_up is None:
            try:
                engine = await self.start(self.environment)
            except SamplerError as error:
                self._record_death(ChildDiedError(str(error)))
                continue
            except Exception as error:  # a mistake, which another start would not correct
                self.given_up = error
                return
            try:
                await self.renew(self, engine)
                return
            except ChildDiedError as died:
                await engine.child.end()
                self._record_death(died)
            except BaseException as error:
                await engine.child.end()
                if not isinstance(error, Exception):
                    raise
                self.given_up = error

    async def close(self) -> None:
        self.given_up = self.given_up or SamplerError("it was closed", place="an engine")
        if self.mending is not None:
            self.mending.cancel()
            with suppress(asyncio.CancelledError):
                await self.mending
        for engine in (self.engine, self.former):
            if engine is not None:
                await engine.child.end()


class UpdateLock:
    """A lock for weight updates, during which no new holder enters."""

    def __init__(self) -> None:
        self.inside = 0
        self.closed = False
        self.changed = asyncio.Condition()

    @asynccontextmanager
    async def shared_with_requests(self) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            await asyncio.shield(self._notify())

    @asynccontextmanager
    async def exclusive(self, interrupt: bool) -> AsyncIterator[None]:
        """Keep new holders away, and wait until all holders have left unless they are to be
        interrupted."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.closed)
            self.closed = True
        try:
            async with self.changed:
                await self.changed.wait_for(lambda: interrupt or not self.inside)
            yield
        finally:
            self.closed = False
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
