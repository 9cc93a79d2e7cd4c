"""A service in separate processes, and a minimal client for it. The public client is in another
environment (tests/support/tinker_client)."""

import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from megatron_vlm.cli import main
from megatron_vlm.serve.protocol.protobuf import message
from tests.support.ports import descendants
from tests.support.process_tree import Child, ProcessTree
from tests.support.serve_requests import Chunks, Picture, request

START_S = 120.0


class FailedError(Exception):
    """A failed call; the message has its category and reason."""


@dataclass
class Running:
    process: "subprocess.Popen[bytes] | ForkedProcess"
    url: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    @contextmanager
    def paused(self, rank: int) -> Any:
        """Stop a process of the service meanwhile. A pass waits for it, and calls are accepted.

        The processes that it has started come after it.
        """
        mine = f"RANK={rank}".encode()
        environments = {pid: Path(f"/proc/{pid}/environ") for pid in descendants(self.process.pid)}
        pid, *_ = [p for p, path in environments.items() if mine in path.read_bytes().split(b"\0")]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill all of its processes at once, as a failing machine does."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


@dataclass
class ForkedProcess:
    """The methods of subprocess.Popen that tests use, for a service in the fork of a process that
    has imported everything."""

    child: Child
    args: list[str]
    status: int | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    def poll(self) -> int | None:
        if self.status is None and self.child.connection.poll():
            try:
                self.status = self.child.connection.recv()
            except EOFError:
                self.status = -signal.SIGKILL
        return self.status

    def wait(self, timeout: float) -> int:
        ends = time.monotonic() + timeout
        while self.poll() is None or self.child.alive:
            if time.monotonic() > ends:
                raise TimeoutError
            time.sleep(0.01)
        assert self.status is not None
        return self.status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _serve(connection: Connection, words: list[str], said: Path) -> None:
    os.setsid()
    with said.open("ab") as log:
        os.dup2(log.fileno(), 2)
    connection.send(main(words))


def start(
    model: str, run: Path, port: int, *settings: str, tree: ProcessTree | None = None
) -> Running:
    words = ["serve", f"model.path={model}", f"run={run}", f"serve.port={port}", "platform=cpu"]
    words, said = [*words, *settings], run / "said.txt"
    run.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | ForkedProcess
    if tree is not None:
        process = ForkedProcess(tree.fork(_serve, words, said), words)
    else:
        command = [sys.executable, "-m", "megatron_vlm.cli", *words]
        with said.open("ab") as log:
            process = subprocess.Popen(command, stderr=log, start_new_session=True)
    return wait_for(Running(process, f"http://127.0.0.1:{port}"), said)


def wait_for(running: Running, said: Path | None = None) -> Running:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        assert running.process.poll() is None, said and said.read_text()
        try:
            httpx.get(f"{running.url}/healthz")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return running
    raise TimeoutError(said and said.read_text())


@contextmanager
def served(
    model: str, run: Path, port: int, *settings: str, tree: ProcessTree | None = None
) -> Any:
    """Start a service that is ended in any case."""
    running = start(model, run, port, *settings, tree=tree)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


@dataclass
class Client:
    url: str
    model_name: str
    session: str = ""
    patience_s: float = 0.0  # seconds for which a service may be gone
    key: str | None = None
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=100))
    numbers: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        if self.key is not None:
            self.http.headers["X-API-Key"] = self.key
        self.session = self.session or self.post("create_session", tags=[])["session_id"]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, what: str, /, **fields: Any) -> Any:
        return self.send(what, json.dumps(fields).encode(), "application/json").json()

    def send(self, path: str, body: bytes, kind: str) -> httpx.Response:
        headers = {"Content-Type": kind}
        answer = self._sent(path, content=body, headers=headers)
        if answer.status_code != 200:
            raise FailedError(f"{answer.status_code}: {answer.text}")
        return answer

    def result(self, promise: str) -> Any:
        """Return the result: JSON, or the bytes of a protobuf."""
        headers = {"Accept": "application/x-protobuf, application/json"}
        while True:
            fields = {"request_id": promise}
            answer = self._sent("retrieve_future", json=fields, headers=headers)
            if answer.status_code == 408:
                continue
            if answer.status_code != 200:
                raise FailedError(f"{answer.status_code}: {answer.text}")
            if answer.headers["content-type"].startswith("application/x-protobuf"):
                return answer.content
            result = answer.json()
            if "error" in result:
                raise FailedError(f"{result['category']}: {result['error']}")
            return result

    def sampled(self, promise: str) -> Any:
        answer = message("SampleResponse")
        answer.ParseFromString(self.result(promise))
        return answer

    def _sent(self, path: str, **content: Any) -> httpx.Response:
        """Send a request, and send the same one again while the service is gone, as the public
        client does."""
        ends = time.monotonic() + self.patience_s
        while True:
            try:
                return self.http.post(f"{self.url}/api/v1/{path}", **content)
            except httpx.TransportError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)

    def do(self, what: str, /, **fields: Any) -> Any:
        return self.result(self.post(what, **fields)["request_id"])

    def model(self, rank: int, seed: int = 0, **parts: bool) -> "Model":
        lora = {"rank": rank, "seed": seed, **parts}
        reply = self.do(
            "create_model",
            session_id=self.session,
            model_seq_id=next(self.numbers),
            base_model=self.model_name,
            lora_config=lora,
        )
        return Model(self, reply["model_id"])

    def loaded(self, path: str, optimizer: bool) -> "Model":
        reply = self.do(
            "load_weights",
            session_id=self.session,
            model_seq_id=next(self.numbers),
            path=path,
            optimizer=optimizer,
        )
        return Model(self, reply["model_id"])

    def sampler(self, **of: str) -> "Sampler":
        reply = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=next(self.numbers),
            **of,
        )
        return Sampler(self, reply["sampling_session_id"])


@dataclass
class Model:
    client: Client
    id: str
    seq: Any = field(default_factory=lambda: count(1))

    def ask_gradients(
        self,
        data: Sequence[tuple[Chunks, Mapping[str, Any]]],
        loss: str = "cross_entropy",
        forward_only: bool = False,
        **options: float,
    ) -> str:
        """Request gradients, and return the promise."""
        body = request(self.id, next(self.seq), data, loss, options, forward_only)
        answer = self.client.send("forward_backward", body, "application/x-protobuf")
        return str(answer.json()["request_id"])

    def gradients(self, *args: Any, **kwargs: Any) -> tuple[dict[str, float], list[np.ndarray]]:
        """Return metrics, and the log-probs of each datum."""
        return read_output(self.client.result(self.ask_gradients(*args, **kwargs)))

    def step(self, **adam: float) -> dict[str, float]:
        metrics = self._do("optim_step", adam_params=adam)["metrics"]
        assert isinstance(metrics, dict)
        return metrics

    def load(self, path: str, optimizer: bool = True) -> None:
        self._do("load_weights", path=path, optimizer=optimizer)

    def save(self, name: str, **more: Any) -> str:
        return str(self._do("save_weights", path=name, **more)["path"])

    def save_for_sampler(self, name: str) -> str:
        return str(self._do("save_weights_for_sampler", path=name)["path"])

    def save_external(self, name: str) -> str:
        return str(self._do("save_weights_external", path=name)["path"])

    def sampler(self) -> "Sampler":
        number = next(self.client.numbers)
        reply = self._do("save_weights_for_sampler", sampling_session_seq_id=number)
        return Sampler(self.client, reply["sampling_session_id"])

    def _do(self, what: str, /, **fields: Any) -> Any:
        return self.client.do(what, model_id=self.id, seq_id=next(self.seq), **fields)


@dataclass
class Sampler:
    client: Client
    id: str
    numbers: Any = field(default_factory=count)

    def ask(self, chunks: Chunks, n: int = 1, more: Any = None, **params: Any) -> str:
        reply = self.client.post(
            "asample",
            sampling_session_id=self.id,
            seq_id=next(self.numbers),
            prompt={"chunks": [_as_json(chunk) for chunk in chunks]},
            num_samples=n,
            sampling_params=params,
            **(more or {}),
        )
        assert len(reply["sample_sequence_ids"]) == n
        return str(reply["request_id"])

    def sample(self, chunks: Chunks, n: int = 1, more: Any = None, **params: Any) -> Any:
        return self.client.sampled(self.ask(chunks, n, more, **params))

    def log_probs(self, chunks: Chunks) -> np.ndarray:
        """Return the log-probs of the prompt; nan where a token has none."""
        response = self.sample(chunks, 1, {"prompt_logprobs": True}, max_tokens=1)
        return np.frombuffer(response.prompt_logprobs, "<f4")


def tokens_of(answer: Any) -> list[list[int]]:
    return [np.frombuffer(each.tokens, "<i4").tolist() for each in answer.sequences]


def log_probs_of(answer: Any) -> list[list[float]]:
    return [np.frombuffer(each.logprobs, "<f4").tolist() for each in answer.sequences]


def read_output(body: bytes) -> tuple[dict[str, float], list[np.ndarray]]:
    """Return metrics, and the log-probs of each datum. Losses of tokens add up to the metric."""
    output = message("ForwardBackwardOutput")
    output.ParseFromString(body)
    arrays: dict[str, list[np.ndarray]] = {"logprobs": [], "elementwise_loss": []}
    for record in output.loss_fn_outputs:
        for entry in record.fields:
            data, offsets = entry.value.data, np.frombuffer(entry.value.offsets, "<i8")
            shape = list(entry.value.trailing_shape)
            for first, last in pairwise(offsets):
                values = np.frombuffer(data[first:last], "<f4").reshape(-1, *shape)
                arrays[entry.key].append(values)
    metrics = {entry.key: entry.value for entry in output.metrics}
    if losses := arrays["elementwise_loss"]:
        total = math.fsum(float(each.sum(dtype=np.float64)) for each in losses)
        assert math.isclose(total, metrics["loss:sum"], rel_tol=1e-5, abs_tol=1e-4), total
    return metrics, arrays["logprobs"]


def _as_json(chunk: list[int] | Picture) -> dict[str, Any]:
    if isinstance(chunk, Picture):
        data = base64.b64encode(chunk.data).decode()
        return {"type": "image", "data": data, "format": chunk.format}
    return {"type": "encoded_text", "tokens": chunk}
