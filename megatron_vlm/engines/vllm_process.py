"""One engine: a process in an environment of its own, which is asked over a socket.

server/serve.py is what runs there. Many requests may be under way. When the process has died, all
of them end in an EngineDiedError; when this process dies, so does the engine.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from megatron_vlm.distributed.process import without_job
from megatron_vlm.engines.sampler import SamplerError
from megatron_vlm.engines.server.frames import HEADER, Message, head, parse, sizes
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.io.scratch import socket_folder

SERVER = Path(__file__).parent / "server" / "engine_server.py"
_OURS = ("PYTHON", "OMP_")  # the engine's Python and threads are others
_SAID = 4000  # characters of its last words that a message has


@dataclass(frozen=True)
class EngineSettings:
    """How engines are started."""

    python: str  # of the environment that has vLLM
    folder: str  # the checkpoint to begin with
    dtype: str = "auto"  # of weights and activations
    max_len: int = 4096  # tokens of a prompt and its answer together
    pictures: int = 8  # of a prompt, at most
    videos: int = 0  # likewise
    lora_rank: int = 0  # of the adapters that it may be given, at most; 0: none
    adapters: int = 1  # different ones that requests under way may name
    lora_vision: bool = False  # whether they have parts in the vision tower and its mergers
    options: Mapping[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs
    start_s: float = 1800.0  # how long it may take to load

    @property
    def most_adapters(self) -> int:
        """`adapters`, or what the options say in its place."""
        return int(self.options.get("max_loras", self.adapters))


class EngineDiedError(Exception):
    """The process is gone; says its last words."""


@dataclass(eq=False)
class Engine:
    """A process that was started, and what it has not answered yet."""

    settings: EngineSettings
    process: "subprocess.Popen[bytes]"
    reader: StreamReader
    writer: StreamWriter
    said: BinaryIO
    waiting: dict[int, "Future[Any]"] = field(default_factory=dict)
    numbers: Any = field(default_factory=count)
    listening: "asyncio.Task[None] | None" = None

    @staticmethod
    async def start(
        settings: EngineSettings, environment: Mapping[str, str], buffer: int, version: int
    ) -> "Engine":
        """Start one and have it load the checkpoint, as this version. It inherits `buffer`, the
        memory that weights come through."""
        ours, theirs = socket.socketpair()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - close() does
        try:
            process = subprocess.Popen(
                [settings.python, SERVER, str(theirs.fileno()), str(buffer)],
                pass_fds=(theirs.fileno(), buffer),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**_environment(), **environment},
                start_new_session=True,  # Ctrl-C is ours, and what it starts is ended with it
            )
        except OSError as error:
            said.close()
            ours.close()
            raise ConfigError(
                f"cannot be started: {error.strerror}",
                place="the engine",
                key="python",
                found=settings.python,
                remedy="give the python of an environment that has vLLM, such as that of "
                "`make vllm-env`: .venv-vllm/bin/python",
            ) from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        engine = Engine(settings, process, reader, writer, said)
        engine.listening = asyncio.create_task(engine._listen())
        try:
            await asyncio.wait_for(engine._load(version), settings.start_s)
        except BaseException as error:
            words = engine.last_words()
            engine.close()
            if (known := _of_start(error, words, settings)) is None:
                raise
            raise known from error
        return engine

    async def _load(self, version: int) -> None:
        names = ["folder", "dtype", "max_len", "pictures", "videos"]
        names += ["lora_rank", "lora_vision", "adapters"]
        given = {name: getattr(self.settings, name) for name in names}
        await self.ask("load", **given, version=version, options=dict(self.settings.options))

    async def ask(self, do: str, body: Sequence[Any] = (), **fields: Any) -> Any:
        """The answer to a request, whose raw bytes are those of `body`. Where the answer has some,
        it is an object, and they are its "body"."""
        number = next(self.numbers)
        future: Future[Any] = asyncio.get_running_loop().create_future()
        if not self.alive:
            raise EngineDiedError(self.last_words())
        self.waiting[number] = future
        self._send({"id": number, "do": do, **fields}, body)
        try:
            with contextlib.suppress(ConnectionError):  # the listener hears of it, too
                await self.writer.drain()
            return await future
        except asyncio.CancelledError:
            if do == "sample" and self.alive:
                self._send({"id": number, "do": "abort"})
            raise
        finally:
            self.waiting.pop(number, None)

    def _send(self, message: Message, body: Sequence[Any] = ()) -> None:
        self.writer.write(head(message, sum(memoryview(part).nbytes for part in body)))
        for part in body:
            self.writer.write(part)

    async def _listen(self) -> None:
        """Hand out answers until the process is gone."""
        try:
            while True:
                text, size = sizes(await self.reader.readexactly(HEADER.size))
                answer = parse(await self.reader.readexactly(text))
                if size:
                    answer["answer"]["body"] = await self.reader.readexactly(size)
                future = self.waiting.get(answer["id"])
                if future is not None and not future.done():
                    self._settle(future, answer)
        except Exception:  # it has ended, or says what cannot be understood
            self._end()
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(EngineDiedError(self.last_words()))

    @staticmethod
    def _settle(future: "Future[Any]", answer: Message) -> None:
        if "error" in answer:
            future.set_exception(_explained(answer["error"]))
        else:
            future.set_result(answer["answer"])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and not self.writer.is_closing()

    def last_words(self) -> str:
        """The end of what it has written."""
        if self.said.closed:
            return "it was closed"
        self.said.seek(0, os.SEEK_END)
        self.said.seek(max(0, self.said.tell() - _SAID))
        return self.said.read().decode(errors="replace").strip()

    def _end(self) -> None:
        """With whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.writer.close()

    def close(self) -> None:
        """End the process, now."""
        if self.listening is not None:
            self.listening.cancel()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(EngineDiedError("it was closed"))
        self._end()
        self.said.close()


def _environment() -> dict[str, str]:
    theirs = {name: value for name, value in without_job().items() if not name.startswith(_OURS)}
    # Where vLLM's own processes meet; it would take TMPDIR, whose name may be too long for sockets.
    return {"VLLM_RPC_BASE_PATH": str(socket_folder()), **theirs}


def _explained(said: str) -> Exception:
    """What vLLM's traceback means for a user."""
    last = said.strip().splitlines()[-1]
    if last.startswith("PromptError: "):
        return DataError(last.removeprefix("PromptError: "))
    return SamplerError(f"vLLM has failed: {last}\n{said[-_SAID:]}", place="the engine")


def _of_start(error: BaseException, words: str, settings: EngineSettings) -> Exception | None:
    """What keeps an engine from starting, as a sentence with its remedy where that is known."""
    known = f"{error}\n{words}"
    if "No module named 'vllm'" in known:
        return ConfigError(
            "has no vLLM",
            place="the engine",
            key="python",
            found=settings.python,
            remedy="for the CPU run `make vllm-env` and give .venv-vllm/bin/python; on GPUs, "
            "install vllm in an environment of its own",
        )
    if "Unsupported CPU attention configuration" in known:
        return ConfigError(
            ": vLLM's attention on a CPU takes heads that are 32, 64, 80, 96, 112, 128 or a larger "
            "multiple of 32 wide, and this model's are not",
            place="the engine",
            key="folder",
            found=settings.folder,
            remedy="sample from this model on GPUs, or with our own sampler",
        )
    if isinstance(error, TimeoutError):
        return SamplerError(
            f": vLLM has not loaded {settings.folder} in this time",
            place="the engine",
            key="start_s",
            found=settings.start_s,
            remedy=f"raise it, or see why vLLM waits:\n{words}",
        )
    if isinstance(error, EngineDiedError):
        return SamplerError(
            f": vLLM ended while it was loading this model:\n{words}",
            place="the engine",
            key="folder",
            found=settings.folder,
        )
    return None
