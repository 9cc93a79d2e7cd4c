"""Agent of an episode, a program or a server: what it is given, and what it answers."""

import asyncio
import base64
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any

import httpx
import PIL.Image

from megatron_vlm.config.schema import AGENT_URLS
from megatron_vlm.data.media.media import read_image
from megatron_vlm.data.records.record import ChatMessage, Conversation, Image, Video
from megatron_vlm.data.tokens.chat_template import template_message
from megatron_vlm.data.tokens.reader import Reader
from megatron_vlm.errors import DataError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.picture_uri import picture_uri
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.reward_child import step_of_result

# Variables of the trainer's environment that a program gets. Others may be secrets.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PYTHON = ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# Keys of a record that its messages replace.
_SHOWN = ("messages", "conversations", "conversation", "texts", "prompt")
_PICTURES = ("image", "images", "video", "videos")
_OUTPUT_BYTES = 2**16  # last bytes of each output of a program that are kept
_LAST_S = 2.0  # seconds to read the output of a program that has ended
_COMPLAINT = 2000  # characters of standard error in a message


class AgentError(Exception):
    """Failure of an agent's episode. The text ends a sentence that begins with its command."""


def record_for_agent(reader: Reader, record: Mapping[str, Any], where: str) -> bytes:
    """Return a record as a program gets it, in JSON: its keys, and as `messages` its prompt in
    OpenAI's form. Bytes and pictures become data URLs, arrays lists, others text."""
    chat = reader.parse(record, where)
    if not isinstance(chat, Conversation) or chat.media(Video):
        raise DataError(
            "shows an agent what no message of OpenAI's API can hold: tokens, or a video",
            place=where,
            key="rl.agent",
            remedy="give the prompt as messages with texts and pictures",
        )

    def message(turn: ChatMessage) -> dict[str, Any]:
        shown = template_message(turn)
        if not isinstance(shown["content"], str):
            shown["content"] = list(map(part, turn.parts))
        return shown

    def part(given: Any) -> dict[str, Any]:
        if not isinstance(given, Image):
            return {"type": "text", "text": given}
        url = picture_uri(read_image(given, reader.policy, where), compress_level=1)
        return {"type": "image_url", "image_url": {"url": url}}

    rest = {name: value for name, value in record.items() if name not in (*_SHOWN, *_PICTURES)}
    if (right := right_answer(record, where, reader)) is not None:
        rest.setdefault("answer", right)
    tools = {"tools": list(chat.tools)} if chat.tools else {}
    shown = rest | tools | {"messages": [message(turn) for turn in chat.turns]}
    return json.dumps(shown, default=_portable, ensure_ascii=False).encode()


def _portable(value: Any) -> Any:
    if isinstance(value, bytes):
        return "data:application/octet-stream;base64," + base64.b64encode(value).decode()
    if isinstance(value, PIL.Image.Image):
        return picture_uri(value, compress_level=1)
    return value.tolist() if hasattr(value, "tolist") else str(value)


async def run_agent(
    agent: str, given: bytes, more: Mapping[str, str], timeout_s: float, reward: "Future[Any]"
) -> str:
    """Run a program with a record on its standard input and these variables, or post both to a URL.
    Return the end of the output or answer; a server that has only accepted the episode ends it with
    its `reward`. Raise AgentError if it fails or takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            if agent.startswith(AGENT_URLS):
                status, said = await _post(agent, {**json.loads(given), **more})
                if status == httpx.codes.ACCEPTED:  # the shield: a timeout leaves the reward open
                    await asyncio.shield(asyncio.wrap_future(reward))
                return said
            return await _run(shlex.split(agent), given, more)
    except TimeoutError:
        raise AgentError(f"took longer than rl.agent_timeout={timeout_s:g} seconds") from None


async def _post(url: str, given: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and the end of what a server answers."""
    kept, is_safe, head = b"", url.startswith("https:"), {"accept-encoding": "identity"}
    client = httpx.AsyncClient(timeout=None, verify=is_safe, trust_env=False)
    try:
        async with client, client.stream("POST", url, json=given, headers=head) as answer:
            async for more in answer.aiter_raw():
                kept = (kept + more)[-_OUTPUT_BYTES:]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AgentError(f"cannot be reached: {str(error) or type(error).__name__}") from None
    said = kept.decode(errors="replace").strip()
    if not answer.is_success:
        shown = escape_controls(said[-_COMPLAINT:])
        raise AgentError(f"answered with status {answer.status_code}: {shown}".rstrip(": "))
    return answer.status_code, said


class _Program(asyncio.SubprocessProtocol):
    """A program: its exit, and the ends of what it has printed."""

    def __init__(self) -> None:
        self.printed = {1: b"", 2: b""}  # by file descriptor
        # `Process.wait` waits for the outputs, too, in some Pythons. A process in a session of its
        # own may keep them open after the exit.
        self.has_exited, self.has_closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.printed[fd] = (self.printed[fd] + data)[-_OUTPUT_BYTES:]

    def process_exited(self) -> None:
        self.has_exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_closed.set()


async def _run(command: Sequence[str], given: bytes, more: Mapping[str, str]) -> str:
    """Return the end of a program's standard output. Its processes are killed when it has ended."""
    kept = {name: os.environ[name] for name in (*_KEPT, *_PYTHON) if name in os.environ}
    start = asyncio.get_running_loop().subprocess_exec
    try:
        own = {**kept, **more}
        process, program = await start(_Program, *command, env=own, start_new_session=True)
    except OSError as error:
        raise AgentError(f"cannot be started: {error.strerror}") from None
    stdin = process.get_pipe_transport(0)
    assert isinstance(stdin, asyncio.WriteTransport)
    try:
        stdin.write(given)
        stdin.close()  # once it has read all
        await program.has_exited.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.get_pid(), signal.SIGKILL)
        await program.has_exited.wait()
        with closing(process), suppress(TimeoutError):
            await asyncio.wait_for(program.has_closed.wait(), _LAST_S)
    said, complaint = (end.decode(errors="replace").strip() for end in program.printed.values())
    if status := process.get_returncode():
        shown = escape_controls(complaint[-_COMPLAINT:])
        raise AgentError(f"ended with exit status {status}: {shown}".rstrip(": "))
    return said


def reward_of(value: Any) -> EnvStep:
    """Return the end of an episode with this reward. Raise WrongResultError if it is none."""
    return EnvStep(**step_of_result(value))


def printed_reward(output: str) -> EnvStep | None:
    """Return the reward of a JSON object that is an output, or its last line, or None."""
    for text in (output, *output.splitlines()[-1:]):
        with suppress(ValueError, RecursionError):
            said = json.loads(text)
            if isinstance(said, dict) and "reward" in said:
                return reward_of(said)
    return None
