# .venv/bin/python -m pytest tests/distributed/test_rendezvous.py
"""Attempts of one job, which share a store and do not see each other's keys in it."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from megatron_vlm.distributed.device import pick_platform
from megatron_vlm.distributed.job_store import SignedStore
from megatron_vlm.distributed.rendezvous import MeetingError, join_world, of_this_attempt
from megatron_vlm.errors import MegatronVLMError
from tests.support.error_fields import raises
from tests.support.pool import free_port
from tests.support.process_tree import Child


def attempt(store: dist.Store, world: int) -> list[dist.Store]:
    """Return each rank's store, that of the last rank first."""
    with ThreadPoolExecutor(world) as pool:
        ranks = [pool.submit(of_this_attempt, store, rank, world) for rank in range(world)][::-1]
        return [rank.result() for rank in ranks]


@pytest.fixture
def store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def test_ranks_of_an_attempt_share_what_is_new(store):
    for count in range(3):
        stores = attempt(store, 4)
        assert not any(each.check(["key"]) for each in stores)
        stores[0].set("key", str(count))
        assert [each.get("key") for each in stores] == [str(count).encode()] * 4


def test_a_rank_that_died_before_it_was_told_is_not_waited_for(store):
    SignedStore(store).write("joined/1", "killed before rank 0 looked")
    last, first = attempt(store, 2)
    first.set("key", "here")
    assert last.get("key") == b"here"


def test_a_rank_that_did_not_join_is_named(store):
    store.set_timeout(timedelta(seconds=0.3))
    with raises(MeetingError, place="rank 1", remedy_has="WORLD_SIZE"):
        of_this_attempt(store, 0, 2)
    with raises(MeetingError, place="rank 0", remedy_has="WORLD_SIZE"):
        of_this_attempt(store, 1, 2)


def rank_variables(rank: int, host: str, port: str, world: int = 2) -> dict[str, str]:
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return of_rank | {"MASTER_ADDR": host, "MASTER_PORT": port}


def join_in_vain(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    with pytest.raises(MeetingError) as caught:
        join_world(pick_platform("cpu"), 0.01)
    print(caught.value)


def test_a_silent_port_is_not_waited_for(process_tree):
    """The port accepts connections. The rank runs in a process of its own: the thread that is left
    behind closes a file twice once the port is gone (torch 2.13), and the file may belong to
    something else by then."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        port = str(server.getsockname()[1])
        message = process_tree.printed(join_in_vain, rank_variables(1, "127.0.0.1", port))
    assert message.startswith("rank 0: ") and f" at 127.0.0.1:{port} in 0.01 minutes" in message


def test_ranks_that_disagree_about_their_number_both_say_so(store):
    with ThreadPoolExecutor(2) as pool:
        worlds = {0: 2, 1: 3}
        ranks = [pool.submit(of_this_attempt, store, rank, worlds[rank]) for rank in worlds]
        errors = [rank.exception() for rank in ranks]
    for rank, error in enumerate(errors):
        assert isinstance(error, MeetingError)
        own, other = worlds[rank], worlds[1 - rank]
        assert (error.place, error.key, error.found) == (f"rank {rank}", "WORLD_SIZE", own)
        assert f"the {other} of rank {1 - rank}" in error.problem


def test_a_port_that_another_job_has_is_a_sentence(process_tree):
    """A job on several machines listens with torch's own store."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        variables = rank_variables(0, socket.gethostname(), port)
        message = process_tree.printed(join_in_vain, variables | {"LOCAL_WORLD_SIZE": "1"})
    assert message.startswith("rank 0 of 2: ") and f" at {socket.gethostname()}:{port}: " in message
    assert "MASTER_PORT" in message and "WORLD_SIZE=2" in message


def join(connection: Connection, variables: dict[str, str]) -> None:
    """Run a rank that stays, or sends the reason why it cannot."""
    os.environ.update(variables)
    try:
        join_world(pick_platform("cpu"), minutes=10)
        connection.send("joined")
    except MegatronVLMError as error:
        connection.send(str(error))
    connection.recv()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("machines", ["one", "several"])
def test_a_second_job_at_the_same_port_ends_at_once(machines, world, process_tree):
    """The first job keeps its ranks, and all ranks of the second end, however many they are."""
    host = "127.0.0.1" if machines == "one" else socket.gethostname()
    port = str(free_port())

    def start(count: int) -> list[Child]:
        more = {"GLOO_SOCKET_IFNAME": "lo"}
        more["LOCAL_WORLD_SIZE"] = str(count) if machines == "one" else "1"
        ranks = [rank_variables(rank, host, port, count) for rank in range(count)]
        return [process_tree.fork(join, variables | more) for variables in ranks]

    def heard(ranks: list[Child]) -> list[str]:
        assert all(rank.connection.poll(20) for rank in ranks), "a rank waits for ever"
        return [rank.connection.recv() for rank in ranks]

    first = start(2)
    assert heard(first) == ["joined"] * 2
    second = start(world)
    for message in heard(second):
        assert port in message and host in message and "MASTER_PORT" in message, message
    for rank in (*first, *second):
        rank.kill()
