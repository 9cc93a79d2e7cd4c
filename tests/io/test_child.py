# .venv/bin/python -m pytest tests/io/test_child.py
"""Child processes that answer over a socket: answers, news, and every way to end."""

import asyncio
import gc
import os
import select
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from megatron_vlm.io.child import Child, ChildDiedError, ChildRefusedError

PATIENCE_S = 30.0
# A child that does what its requests say. `channel`, `number` and `body` are theirs.
SERVANT = """
    import os, queue, socket, subprocess, sys, time
    from megatron_vlm.io.parent import ParentChannel

    channel, inbox = ParentChannel(int(sys.argv[1])), queue.SimpleQueue()
    channel.listen(inbox.put)
    while True:
        request, body = inbox.get()
        number = request["id"]
        if request["do"] == "abort":
            print("aborted", number, flush=True)
        else:
            exec(request["do"])
"""


def with_child(
    tmp_path: Path, steps: Callable[[Child], Awaitable[Any]], keeps_output: bool = True
) -> Any:
    """Run `steps` with a child and return the result."""
    file = tmp_path / "servant.py"
    file.write_text(dedent(SERVANT))

    async def go() -> Any:
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(file)]
        child = await Child.start(command, [], path, keeps_output=keeps_output)
        try:
            return await asyncio.wait_for(steps(child), PATIENCE_S)
        finally:
            await child.end()

    return asyncio.run(go())


def ask(child: Child, do: str, *body: bytes, hear: Any = None) -> Awaitable[Any]:
    return child.call({"do": do}, body, hear).answered


def test_answers_arrive_with_their_bytes_and_news(tmp_path):
    async def steps(child: Child) -> None:
        heard: list[Any] = []
        news = "channel.tell(number, [1]); channel.tell(number, 2); channel.answer(number, None)"
        echo = "channel.answer(number, {'size': len(body)}, body[::-1])"
        answers = asyncio.gather(
            ask(child, news, hear=heard.append), ask(child, echo, b"ab", memoryview(b"c"))
        )
        assert await answers == [None, {"size": 3, "body": b"cba"}]
        assert heard == [[1], 2]
        with pytest.raises(ChildRefusedError) as caught:
            await ask(child, "channel.refuse(number, {'why': 1})")
        assert caught.value.error == {"why": 1} and not child.calls

    with_child(tmp_path, steps)


def test_a_child_is_told_of_a_call_that_is_cancelled(tmp_path):
    async def steps(child: Child) -> str:
        asyncio.ensure_future(ask(child, "pass")).cancel()
        await asyncio.sleep(0)  # the child is told by a callback of the call
        await ask(child, "channel.answer(number, 1)")
        return child.last_words()

    assert with_child(tmp_path, steps) == "aborted 0"


SHUT = "socket.socket(fileno=os.dup(int(sys.argv[1]))).shutdown(socket.SHUT_WR)"
# What a child does: what is said of it with its output, and without.
ENDINGS = {
    "os._exit(3)": ("^it ended with exit status 3, without", "^ended with exit status 3$"),
    "print('too much', flush=True); os._exit(3)": ("^too much$", "^ended with exit status 3$"),
    "os.kill(os.getpid(), 9)": ("^it was killed by SIGKILL, as", "^was killed by SIGKILL, as the"),
    "channel.stream.write(b'\\xff' * 12); channel.stream.flush()": ("WireError: a frame of ",) * 2,
    "channel.answer([], 1)": ("sent what cannot be read: TypeError: ",) * 2,
    "channel.answer(number, [1], b'x')": ("sent what cannot be read: TypeError: ",) * 2,
    SHUT: ("^it was killed by SIGKILL", "^was killed by SIGKILL"),
}


@pytest.mark.parametrize("keeps_output", [True, False])
@pytest.mark.parametrize("do", ENDINGS)
def test_all_calls_of_a_child_that_has_ended_fail(tmp_path, do, keeps_output):
    """Those that had begun are suspected of it."""

    async def steps(child: Child) -> None:
        calls = [child.call({"do": f"channel.tell(number); {each}"}) for each in ("pass", do)]
        calls.append(child.call({"do": "pass"}))
        for call, suspects in zip(calls, (2, 2, 0), strict=True):
            with pytest.raises(ChildDiedError, match=said) as caught:
                await call.answered
            assert caught.value.suspects == suspects
        with pytest.raises(ChildDiedError):
            ask(child, "pass")

    said = ENDINGS[do][not keeps_output]
    with_child(tmp_path, steps, keeps_output)


def test_the_processes_of_a_child_end_with_it(tmp_path):
    """They hold its output and its socket open."""

    async def steps(child: Child) -> None:
        popen = "subprocess.Popen(['sleep', '600'], pass_fds=[int(sys.argv[1])])"
        sleeper = os.pidfd_open(await ask(child, f"channel.answer(number, {popen}.pid)"))
        with pytest.raises(ChildDiedError, match="exit status 0"):
            await ask(child, "os._exit(0)")
        assert select.select([sleeper], [], [], PATIENCE_S)[0]  # its end makes it readable
        os.close(sleeper)

    with_child(tmp_path, steps)


def running() -> set[str]:
    """Return the processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_start_that_is_cancelled_leaves_nothing():
    """At each of its awaits. What stays open is an error of pytest when it is collected."""
    before = running()

    async def go() -> int:
        cancelled = 0
        while True:
            command = [sys.executable, "-c", "input()"]
            starting = asyncio.create_task(Child.start(command, [], dict(os.environ), (), True))
            for _ in range(cancelled):
                await asyncio.sleep(0)
            is_done = starting.done()
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await (await starting).end()
            if is_done:
                return cancelled
            cancelled += 1

    assert asyncio.run(go()) > 2
    gc.collect()
    assert running() <= before
