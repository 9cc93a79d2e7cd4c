"""vLLM's own server with the interface of OpenAI, for one model at a time, on loopback."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from megatron_vlm.distributed.process import environment_elsewhere
from megatron_vlm.errors import DataError
from megatron_vlm.io.atomic import MARK
from megatron_vlm.io.parent import signal_when_parent_dies

_ADDRESS = "127.0.0.1"
# Settings of vLLM's build for the CPU, which would otherwise ask for nearly all of the memory.
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_PAUSE_S = 0.5
_START_S = 3600.0  # for the server to load
_END_S = 30.0  # for the server to end by itself
_ERROR = re.compile(r"(?:^|\s)(\w*(?:Error|Exception): \S.*)$")
_MAX_CAUSE = 400  # characters


@dataclass(frozen=True)
class BenchSettings:
    """Settings of the command, checked."""

    tasks: tuple[str, ...]
    engine: str  # Python of an environment that has vLLM
    engine_args: list[str]  # additional arguments of `vllm serve`
    devices: str | None  # CUDA_VISIBLE_DEVICES of the engine
    suite_python: str  # Python of an environment that has the suite
    suite_args: list[str]  # additional arguments of `lmms_eval eval`
    limit: int | None  # samples of each task
    include: str | None  # folder with tasks of the user's own
    concurrent: int  # requests in progress


@dataclass(frozen=True)
class BenchModel:
    """A model to be scored: a Hugging Face folder, and an adapter for it or none."""

    name: str  # in requests
    folder: str
    adapter: Path | None = None
    adapter_rank: int = 0

    @property
    def files(self) -> list[Path]:
        """The files that decide its answers."""
        folders = [Path(self.folder), *([self.adapter] if self.adapter else [])]
        endings = (".safetensors", ".json", ".jinja", ".txt")
        return [
            path
            for folder in folders
            for path in sorted(folder.iterdir())
            if path.suffix in endings and path.name != MARK and path.is_file()
        ]


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a server."""

    url: str
    key: str


@contextlib.contextmanager
def served_model(settings: BenchSettings, model: BenchModel, log: Path) -> Iterator[Endpoint]:
    """Serve a model as long as the body runs. The server's output goes to a file."""
    endpoint = Endpoint(f"http://{_ADDRESS}:{_free_port()}", secrets.token_urlsafe(16))
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(settings, model, endpoint),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(settings, endpoint),
            start_new_session=True,  # keeps Ctrl-C from it, and lets its processes be ended
            preexec_fn=lambda: signal_when_parent_dies(signal.SIGTERM),
        )
    try:
        _wait_until_ready(process, endpoint, log)
        yield endpoint
    except DataError as error:
        if process.poll() is not None:
            raise _died(process, log) from error
        raise
    finally:
        _end(process)


def _command(settings: BenchSettings, model: BenchModel, endpoint: Endpoint) -> list[str]:
    port = endpoint.url.rpartition(":")[2]
    words = [settings.engine, "-m", "vllm.entrypoints.openai.api_server", "--model", model.folder]
    words += ["--host", _ADDRESS, "--port", port, "--served-model-name"]
    if model.adapter is None:
        words.append(model.name)
    else:
        words += [f"{model.name}-base", "--enable-lora", "--max-lora-rank", str(model.adapter_rank)]
        words += ["--lora-modules", f"{model.name}={model.adapter}"]
    return [*words, *settings.engine_args]


def _environment(settings: BenchSettings, endpoint: Endpoint) -> dict[str, str]:
    env = environment_elsewhere("OMP_")
    env = _ON_CPU | env | {"VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": endpoint.key}
    if settings.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = settings.devices
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: "subprocess.Popen[bytes]", endpoint: Endpoint, log: Path) -> None:
    """Return when the server answers; raise a DataError if it ends or takes too long."""
    until = time.monotonic() + _START_S
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{endpoint.url}/health").status_code == httpx.codes.OK:
                    return
            if time.monotonic() > until:
                raise DataError(
                    f"does not answer after {_START_S:,.0f} s",
                    place="vLLM's server",
                    remedy=f"read {log}",
                )
            time.sleep(_PAUSE_S)
    raise _died(process, log)


def _died(process: "subprocess.Popen[bytes]", log: Path) -> DataError:
    return DataError(
        f"has ended with status {process.returncode}: {cause_in(log)}",
        place="vLLM's server",
        remedy=f"read {log}; arguments of vLLM are given as --engine-args",
    )


def cause_in(log: Path) -> str:
    """Return the first error that an output names, or else its last line."""
    lines = log.read_text(errors="replace").splitlines()
    errors = (found[1] for line in lines if (found := _ERROR.search(line)))
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
    return next(errors, last)[:_MAX_CAUSE]


def _end(process: "subprocess.Popen[bytes]") -> None:
    # Its processes are in its group, and may live a little longer than the server itself.
    for number, patience in ((signal.SIGTERM, _END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
