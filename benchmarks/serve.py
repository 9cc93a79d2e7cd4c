"""Cost of the service: calls over HTTP compared with the same calls of a worker, which take turns;
and the shares of its time that clients with constant load get.

    make bench   (or: .venv/bin/python benchmarks/serve.py)
"""

import multiprocessing
import os
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record

from megatron_vlm import AdamStep, Config, MegatronWorker, Row, SamplingSettings
from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from megatron_vlm.data.tokens.row import IGNORE
from megatron_vlm.family.tiny import TinySpec
from megatron_vlm.serve.http.api_keys import add_key
from megatron_vlm.training.backward import LossCall, run_backward
from megatron_vlm.training.multi_model import run_together

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.pool import free_port
from tests.support.serve_client import Client, Model, served

VOCAB = 509
WARM_UP = 1
SMALL, LARGE, SAMPLES = 20, 2, 3  # repetitions
CHUNKS, CHUNK_ROWS, LONG = 4, 16, 256  # shape of the large calls
ASKED, PROMPT, ANSWER = 64, 16, 32  # number of samples, and tokens of each
MICRO_BATCH = 8
ADAM = AdamStep(0.9, 0.95, 1e-8, 0.0, 0.0, without_gradients=True)
LEARNING_RATE = 1e-4
CLIENTS, SHARED_S = 8, 10.0
PIPELINED_MODELS, PIPELINED = 4, 5  # models with a micro-batch each at PP2, and repetitions
SETTINGS = (f"train.micro_batch_size={MICRO_BATCH}", "serve.loaded={adapters: 8}")


def tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(1, 400, (rows, length))


class Worker:
    """Worker that does the calls without a service, one after the other."""

    def __init__(self, path: str):
        train = TrainConfig(micro_batch_size=MICRO_BATCH)
        self.worker = MegatronWorker(
            Config(model=ModelConfig(path=path), train=train, platform="cpu")
        )

    def _gradients(self, ids: np.ndarray) -> float:
        done = self.worker.forward_backward(
            targeted(ids), True, "cross_entropy", divisor=1.0, accumulate=True
        )
        return done.loss

    def small(self) -> float:
        loss = self._gradients(tokens(1, 32))
        self.worker.optim_step(LEARNING_RATE, ADAM)
        return loss

    def large(self) -> float:
        ids = tokens(CHUNKS * CHUNK_ROWS, LONG)
        loss = sum(self._gradients(part) for part in np.split(ids, CHUNKS))
        self.worker.optim_step(0.0, ADAM)
        return loss

    def samples(self) -> float:
        prompts = []
        for ids_S in torch.from_numpy(tokens(ASKED, PROMPT)):
            prompts.append(Row(ids_S, torch.full_like(ids_S, IGNORE)))
        settings = SamplingSettings(ANSWER)
        results = self.worker.sample(prompts, settings, 1, list(range(ASKED)), ASKED)
        return float(sum(len(answers[0].ids) for answers in results))


def targeted(ids: np.ndarray) -> list[Row]:
    rows = []
    for row in ids:
        ids_S = torch.from_numpy(row)
        labels_S = torch.full_like(ids_S, IGNORE)
        rows.append(Row(ids_S, labels_S, targets=ids_S.roll(-1)[:, None]))
    return rows


def work(pipe: Connection, path: str) -> None:
    """Run the worker in a process of its own: answer the name of a call with its result."""
    worker = Worker(path)
    pipe.send(None)
    while name := pipe.recv():
        pipe.send(getattr(worker, name)())


class Service:
    """Client that does the same calls over HTTP."""

    def __init__(self, client: Client):
        self.model = client.model(0)
        self.sampler = client.sampler(base_model=client.model_name)
        self.pool = ThreadPoolExecutor(16)

    def small(self) -> float:
        metrics, _ = self.model.gradients(data(tokens(1, 32)))
        self._step(LEARNING_RATE)
        return metrics["loss:sum"]

    def large(self) -> float:
        parts = np.split(tokens(CHUNKS * CHUNK_ROWS, LONG), CHUNKS)
        promises = [self.model.ask_gradients(data(part)) for part in parts]
        for promise in promises:
            self.model.client.result(promise)
        self._step(0.0)
        return 0.0

    def samples(self) -> float:
        def one(place: int) -> Any:
            chunks = [tokens(ASKED, PROMPT)[place].tolist()]
            promise = self.sampler.ask(chunks, max_tokens=ANSWER, stop=[], seed=place)
            return self.sampler.client.result(promise)

        return float(len(list(self.pool.map(one, range(ASKED)))))

    def _step(self, lr: float) -> None:
        self.model.step(learning_rate=lr, beta1=0.9, beta2=0.95, eps=1e-8)


def data(ids: np.ndarray) -> list[Any]:
    return [([each.tolist()], {"target_tokens": np.roll(each, -1)}) for each in ids]


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> list[float]:
    """Return the median seconds of each function."""
    taken: list[list[float]] = [[], []]
    for repeat in range(WARM_UP + count):
        for call, seconds in zip((ours, theirs), taken, strict=True):
            start = time.perf_counter()
            call()
            if repeat >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(each) for each in taken]


def ask(url: str, path: str, key: str, rows: int, until: threading.Event) -> None:
    """Send calls without a pause, with two calls in flight."""
    with Client(url, path, key=key) as client:
        model: Model = client.model(4, seed=rows)
        promises = [model.ask_gradients(data(tokens(rows, 64))) for _ in range(2)]
        while not until.is_set():
            client.result(promises.pop(0))
            promises.append(model.ask_gradients(data(tokens(rows, 64))))


def shares(journal: Path, last_s: float) -> list[float]:
    """Return each key's share of the ranks' time in the last seconds. Calls are done one after the
    other, so that each took the time since the end of the call before it."""
    with closing(sqlite3.connect(journal)) as db:
        rows = db.execute("SELECT key, done FROM calls WHERE done IS NOT NULL ORDER BY done")
        done = rows.fetchall()
    had: Counter[str] = Counter()
    for (_, before), (key, moment) in pairwise(done):
        if moment > done[-1][1] - last_s:
            had[key] += moment - before
    return [seconds / sum(had.values()) for seconds in had.values()]


def crowd(url: str, path: str, keys: list[str], journal: Path) -> list[float]:
    """Run clients with calls of 1 to 8 rows at the same time; return their shares."""
    until = threading.Event()
    with ThreadPoolExecutor(len(keys)) as pool:
        asking = [pool.submit(ask, url, path, key, rows, until) for rows, key in enumerate(keys, 1)]
        time.sleep(SHARED_S * 1.5)  # the models are created in the meantime
        parts = shares(journal, SHARED_S)
        until.set()
        for future in asking:
            future.result()
    return parts


def stage(rank: int, port: int, path: str, pipe: Connection) -> None:
    """Run a pipeline stage in a process of its own. Send the seconds in which calls of several
    models go through the pipeline in turns, and in one pass."""
    launched = dict(RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1")
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    model, train = ModelConfig(path=path), TrainConfig(micro_batch_size=MICRO_BATCH)
    cfg = Config(model=model, train=train, parallel=ParallelConfig(pp=2), platform="cpu")
    base = MegatronWorker(cfg, training=False)
    lora = LoraConfig(rank=4, alpha=8)
    workers = [MegatronWorker(replace(cfg, lora=lora), base=base) for _ in range(PIPELINED_MODELS)]
    rows = targeted(tokens(MICRO_BATCH, LONG))

    call = LossCall(per_token=True, divisor=1.0, accumulate=True)

    def turns() -> float:
        for worker in workers:
            run_backward(worker.backward(rows, call))
        return 0.0

    def together() -> float:
        run_together([worker.backward(rows, call) for worker in workers])
        return 0.0

    pipe.send(in_turns(turns, together, PIPELINED))


def pipelined(path: str) -> float:
    """Return the ratio of the time in turns to the time in one pass."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    pipes = []
    for rank in range(2):
        pipe, child = context.Pipe()
        context.Process(target=stage, args=(rank, port, path, child), daemon=True).start()
        pipes.append(pipe)
    [(apart, together), _] = [pipe.recv() for pipe in pipes]
    return float(apart / together)


def measure(folder: Path, path: str) -> dict[str, float]:
    """Measure all figures."""
    keys = [add_key(f"client{place}", folder / "keys") for place in range(CLIENTS)]
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    context.Process(target=work, args=(child, path), daemon=True).start()
    pipe.recv()

    def worker(name: str) -> Callable[[], float]:
        def call() -> float:
            pipe.send(name)
            return float(pipe.recv())

        return call

    run, settings = folder / "run", (f"serve.keys={folder / 'keys'}", *SETTINGS)
    with served(path, run, free_port(), *settings) as running:
        with Client(running.url, path, key=keys[0]) as client:
            service = Service(client)
            small = in_turns(service.small, worker("small"), SMALL)
            large = in_turns(service.large, worker("large"), LARGE)
            samples = in_turns(service.samples, worker("samples"), SAMPLES)
        pipe.send("")
        parts = crowd(running.url, path, keys, run / "journal.sqlite")
    assert len(parts) == CLIENTS, parts
    count = CHUNKS * CHUNK_ROWS * LONG
    return {
        "serve_call_ms": 1000 * small[0],
        "serve_call_ms_worker": 1000 * small[1],
        "serve_tokens_per_s": count / large[0],
        "serve_worker_ratio": large[0] / large[1],
        "serve_samples_per_s": ASKED / samples[0],
        "serve_sample_ratio": samples[0] / samples[1],
        "serve_fairness": min(parts) * CLIENTS,
        "serve_shared_pass_gain": pipelined(path),
    }


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, TinySpec(vocab=VOCAB))
        record("serve", measure(Path(folder), path))


if __name__ == "__main__":
    main()
