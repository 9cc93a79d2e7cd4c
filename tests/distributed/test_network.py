# .venv/bin/python -m pytest tests/distributed/test_network.py
"""The reach of a job's ports, and the powers of a stranger who can reach them."""

import json
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_vlm.distributed.agreement import job_store
from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.job_store import SignedStore
from megatron_vlm.distributed.launch.local_launcher import variables_of
from megatron_vlm.distributed.process import LAUNCHER, ON_ALL_RANKS, SECRET
from megatron_vlm.distributed.rendezvous import join_world
from megatron_vlm.distributed.watchdog import Watchdog
from megatron_vlm.errors import DataError
from tests.support.pool import free_port
from tests.support.ports import is_loopback, listening, outward_address
from tests.support.process_tree import Child, ProcessTree

pytestmark = pytest.mark.alone  # it starts jobs and kills them

WORLD, TIMEOUT_S = 2, 2.0


def be_rank(connection: Connection, variables: dict[str, str]) -> None:
    """Run a rank of a job without a model, which is watched and follows orders."""
    os.environ.update(variables)
    del os.environ[LAUNCHER]  # the launcher is not this process's parent
    join_world(pick_platform("cpu"), minutes=0.5)
    dist.all_reduce(torch.ones(1))
    time.sleep(dist.get_rank() * TIMEOUT_S / 8)  # each rank sees what the other has not renewed
    watchdog = Watchdog(dist.get_rank(), TIMEOUT_S)
    watchdog.join(job_store(), WORLD)
    watchdog.begin_phase(0, "waiting")
    connection.send([os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")])
    while True:
        while not connection.poll(TIMEOUT_S / 8):
            watchdog.alive()
        connection.send(connection.recv())


@pytest.fixture
def job(process_tree: ProcessTree) -> Iterator[tuple[list[Child], int]]:
    """Yield the ranks of a job as the launcher starts them, and the port of its store."""
    variables = variables_of(WORLD, 0, free_port())
    ranks = [process_tree.fork(be_rank, variables | {"RANK": str(rank)}) for rank in range(WORLD)]
    # Without these variables gloo would listen at the address that the machine's name resolves to.
    assert [hear(rank, 60) for rank in ranks] == [["lo", "lo"]] * WORLD
    yield ranks, int(variables["MASTER_PORT"])
    for rank in ranks:
        rank.kill()


def hear(rank: Child, seconds: float) -> Any:
    assert rank.connection.poll(seconds), "no answer"
    return rank.connection.recv()


def test_a_job_of_one_machine_listens_on_loopback(job):
    ranks, port = job
    addresses = listening([rank.pid for rank in ranks])
    # The store listens, and so does gloo.
    assert port in {number for _, number in addresses} and len(addresses) > WORLD
    assert {address for address, _ in addresses if not is_loopback(address)} == set()
    if (outside := outward_address()) is not None:
        for _, number in addresses:
            with pytest.raises(ConnectionRefusedError), socket.create_connection((outside, number)):
                pass


def forge_all(port: int) -> None:
    """Write forged messages, then old true ones, to every key and those that will be written."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    until = time.monotonic() + 30
    while sum("watchdog/" in key for key in store.list_keys()) < WORLD:
        assert time.monotonic() < until
        time.sleep(0.05)
    stuck = json.dumps([10**9, [0, 0], 0, "forged", 10**6]).encode()
    keys = store.list_keys()
    written = {key: store.get(key) for key in keys}
    for forge in (
        lambda own: stuck,
        lambda own: own[: own.find(b"[")] + stuck,  # with the seal of another message
        lambda own: b"\xff\xfe",
    ):
        for key, own in written.items():
            store.set(key, forge(own))
        time.sleep(TIMEOUT_S / 2)
    for key, own in written.items():
        store.set(key, own)  # an old true message
    time.sleep(2 * TIMEOUT_S)


@pytest.mark.slow
def test_a_stranger_cannot_end_the_job(job, process_tree):
    """A stranger can reach the store, list its keys and write to them, but does not have the
    secret. The stranger runs in a process of its own, because a client closes a file twice once its
    store is gone (torch 2.13)."""
    ranks, port = job
    process_tree.printed(forge_all, port)
    assert all(rank.alive for rank in ranks)


def board(secret: str, monkeypatch: pytest.MonkeyPatch) -> SignedStore:
    monkeypatch.setenv(SECRET, secret)
    return SignedStore(dist.HashStore())


def test_only_what_a_rank_wrote_to_this_key_is_read(monkeypatch):
    signed = board("one", monkeypatch)
    assert signed.read("key") is None
    signed.write("key", "text \N{SNOWMAN}")
    assert signed.read("key") == "text \N{SNOWMAN}"
    seal, foreign = signed.store.get("key")[:64], SignedStore(dist.HashStore())
    signed.write("other", "text \N{SNOWMAN}")
    monkeypatch.setenv(SECRET, "two")
    foreign.write("key", "text \N{SNOWMAN}")
    monkeypatch.setenv(SECRET, "one")
    for forged in (
        seal + b"other",
        signed.store.get("other"),
        foreign.store.get("key"),
        b"",
        b"\xff",
    ):
        signed.store.set("key", forged)
        assert signed.read("key") is None
        assert signed.read_all(["key", "other"]) == [None, "text \N{SNOWMAN}"]
    assert signed.read_all(["other", "absent"]) == ["text \N{SNOWMAN}", None]


class CountedStore:
    """A store that counts its requests."""

    def __init__(self, store: dist.Store):
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_an_exchange_asks_the_store_as_often_for_a_thousand_ranks_as_for_two():
    counts = []
    for world in (2, 1000):
        store = CountedStore(dist.HashStore())
        for rank in range(world):
            Watchdog(rank, None).exchange(SignedStore(store.store), rank + 1, 1)
        watchdog = Watchdog(0, None)
        watchdog.exchange(SignedStore(store), world, 1)
        assert [sign.rank for sign in watchdog.signs] == list(range(world))
        counts.append(store.requests)
    assert counts[0] == counts[1] == 4  # it writes its own, and asks for all and for a failure


def shared_error() -> DataError:
    """Return an error that all ranks have agreed on."""
    error = DataError("is empty", key="data.train")
    setattr(error, ON_ALL_RANKS, True)
    return error


def test_an_old_message_put_back_is_not_news(monkeypatch):
    watchdog, signed = Watchdog(0, None), board("one", monkeypatch)
    for beat, step in ((5, 7), (4, 1), (6, 8)):
        signed.write("watchdog/1", json.dumps([beat, [1, 0], step, "step", 0.0]))
        assert watchdog._status_of(1, signed.read("watchdog/1")).step == max(step, 7)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("is empty", key="data.train"), "rank 1 has failed: data.train is empty"),
        (KeyError("size"), "rank 1 has failed: KeyError: 'size'"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:80"), None),  # another rank's words
        (shared_error(), None),  # every rank raises it
    ],
)
def test_a_rank_that_waits_for_a_failed_one_ends_with_its_words(error, words, monkeypatch):
    signed = board("one", monkeypatch)
    with pytest.raises(type(error)), Watchdog.watch_rank(1, 1.0) as failed:
        failed.board = signed
        raise error
    waiting = Watchdog(0, None)
    waiting.every_s = 5.0
    waiting.exchange(signed, 2, 1)
    assert waiting._complaint(60, 0.0) is None  # it may be about to fail by itself
    waiting.clock += 10.1
    complaint = waiting._complaint(60, 0.0)
    assert complaint == (words and f"{words}; this rank was at step 0: start")
    waiting.alive()
    assert waiting._complaint(60, 0.0) is None
