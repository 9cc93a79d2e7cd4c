"""Process that runs a user's reward function, metric or view, or the environments of a class.

    python -P -m megatron_vlm.user_code.reward_child SOCKET PARENT

Requests arrive over a socket. Coroutines run concurrently, and plain functions run in the order of
their requests. The process imports neither torch nor Megatron, and ends with the trainer.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_vlm.data.records.keys import Keys
from megatron_vlm.data.records.messages import parse_messages
from megatron_vlm.distributed.error_json import error_to_json
from megatron_vlm.errors import DataError, MegatronVLMError
from megatron_vlm.io.parent import ParentChannel, read_frame
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.user_code import load_code
from megatron_vlm.user_code.environment import Environment, EnvStep
from megatron_vlm.user_code.serialize import PackingError, deserialize, pack_and_unpack, serialize

Request = dict[str, Any]
_MAX_SHOWN = 200  # maximum characters of a wrong result
_MAX_TRACED = 4000  # maximum characters of either end of a traceback
_LONGEST_NAME = 100  # maximum characters of a figure's name
# Maximum absolute values. The trainer sums the squares of a step's rewards and averages its
# figures, which would overflow far beyond these bounds.
_MAX_REWARD, _MAX_FIGURE = 1e6, 1e100


class WrongResultError(Exception):
    """Error of a user's function. The text is the end of a sentence that begins with its name."""


class _UserCodeRunner:
    """User's function or class, and the episodes in progress in this process."""

    def __init__(self, kind: str, target: Callable[..., Any], home: Path, timeout_s: float):
        self.found, self.home, self.timeout_s = target, home, timeout_s
        self.kind = kind
        self.episodes: dict[int, Environment] = {}
        self.shown: set[str] = set()  # places in the code whose errors were printed

    async def answer(self, request: Request) -> Any:
        """Return the answer to a request. Raise WrongResultError if the user's code is wrong."""
        episode = request["episode"]
        if request["do"] in ("reward", "harness"):
            record, answer = request["record"], request["answer"]
            return step_of_result(await self._call_in_time(lambda: self.found(record, answer)))
        if request["do"] == "metric":
            arguments = [request[name] for name in ("answer", "references", "record")]
            return _of_metric(await self._call_in_time(lambda: self.found(*arguments)))
        if request["do"] == "view":
            return _opening_messages(
                await self._call_in_time(lambda: self.found(request["record"])),
                "where a record has no teacher",
            )
        if request["do"] == "begin":

            def begin() -> Any:
                self.episodes[episode] = self.found()
                return self.episodes[episode].reset(request["record"])

            first = await self._call_in_time(begin)
            step = first if isinstance(first, EnvStep) else EnvStep(messages=first)
            said = _opening_messages(step.messages, "for those of the record")
            return said and _step(step.reward, step.figures, said) | {"tools": step.tools}
        environment = self.episodes[episode]
        return _of_step(await self._call_in_time(lambda: environment.step(request["answer"])))

    async def end(self, request: Request) -> None:
        """Forget an environment, and close it if it has a method for that."""
        environment = self.episodes.pop(request["episode"], None)
        if (close := getattr(environment, "close", None)) is not None:
            with contextlib.suppress(WrongResultError):
                await self._call_in_time(close)

    async def _call_in_time(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, if it returns in time."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                result = call()
                if inspect.isawaitable(result):
                    result = await result
        except BaseException as error:  # users' code may also raise SystemExit
            if not limit.expired():
                text = f"raised {load_code.error_in_one_line(error)}{self._place(error)}"
                raise WrongResultError(text) from None
        # A plain function cannot be cancelled, and a coroutine may refuse to be.
        if limit.expired() or time.monotonic() - began > self.timeout_s:
            key = load_code.TIMEOUT_KEYS[self.kind]
            raise WrongResultError(f"took longer than {key}={self.timeout_s:g} seconds")
        return result

    def _place(self, error: BaseException) -> str:
        """Return the place where an error was raised, and print its traceback the first time."""
        place = load_code.place_of_function(error, self.home)
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == _FILE:
            frames = frames.tb_next
        if frames is not None and place not in self.shown:
            self.shown.add(place)
            print(_traceback(error.with_traceback(frames)), file=sys.stderr, flush=True)
        return place


_FILE = _UserCodeRunner.answer.__code__.co_filename  # this file, whose frames say nothing to users


def _traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without control characters; a long one is cut."""
    text = escape_controls("".join(traceback.format_exception(error)).rstrip("\n"))
    if len(text) <= 2 * _MAX_TRACED:
        return text
    return f"{text[:_MAX_TRACED]}\n...\n{text[-_MAX_TRACED:]}"


def step_of_result(result: Any) -> Request:
    """Convert the result of a reward function into the step that ends an episode."""
    if not isinstance(result, Mapping):
        return _step(_number(result, "returned", _MAX_REWARD), {}, [])
    if "reward" not in result:
        raise WrongResultError(f'returned a mapping without "reward": {_quote(result)}')
    return _step(result["reward"], {k: v for k, v in result.items() if k != "reward"}, [])


def _of_metric(result: Any) -> dict[str, float]:
    """Convert the result of a metric into numbers by name; a single number has an empty name."""
    if isinstance(result, Mapping):
        figures: dict[str, float] = _step(0.0, result, [])["figures"]
        return figures
    return {"": _number(result, "returned", _MAX_FIGURE)}


def _of_step(result: Any) -> Request:
    if not isinstance(result, EnvStep):
        raise WrongResultError(f"returned {_quote(result)}, not an EnvStep")
    step = _step(result.reward, result.figures, _messages(result.messages))
    return step | {"tools": result.tools, "is_new": bool(result.is_new)}


def _opening_messages(result: Any, none: str) -> Any:
    if result is None:
        return None
    if messages := _messages(result):
        return messages
    raise WrongResultError(f"returned no messages; {none} it is None")


def _step(reward: Any, figures: Any, messages: Any) -> Request:
    if not isinstance(figures, Mapping) or not all(isinstance(name, str) for name in figures):
        raise WrongResultError(f"gave as figures {_quote(figures)}, not numbers by name")
    if not all(0 < len(n) <= _LONGEST_NAME and n == escape_controls(n) for n in figures):
        raise WrongResultError(
            f"gave as figures {_quote(figures)}, of which one has a name that is not a text of "
            f"1 to {_LONGEST_NAME} characters"
        )
    checked = {n: _number(v, f"gave as figure {n!r}", _MAX_FIGURE) for n, v in figures.items()}
    reward = _number(reward, "gave as reward", _MAX_REWARD)
    return {"reward": reward, "figures": checked, "messages": messages}


def _number(value: Any, doing: str, maximum: float) -> float:
    """Return a finite float from a number of Python or numpy, or a tensor without dimensions."""
    number = math.nan
    if hasattr(value, "__float__") and getattr(value, "shape", ()) == ():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise WrongResultError(f"{doing} {_quote(value)}, not a finite number")
    if abs(number) > maximum:
        raise WrongResultError(
            f"{doing} {_quote(value)}, which is beyond {-maximum:g} to {maximum:g}"
        )
    return number


def _messages(value: Any) -> Any:
    """Return the messages as they arrive in the trainer, if it can read them."""
    if not isinstance(value, list | tuple):
        raise WrongResultError(f"gave as messages {_quote(value)}, not a list of messages")
    try:
        arriving = pack_and_unpack(value)
        keys = Keys()
        with keys.record_at("what it says"):
            parse_messages(arriving, keys)
    except PackingError as error:
        raise WrongResultError(f"gave messages that cannot be sent: {error}") from None
    except DataError as error:
        raise WrongResultError(f"gave messages that cannot be read: {error}") from None
    except Exception as error:  # from users' objects, or from too deep nesting
        why = load_code.error_in_one_line(error)
        raise WrongResultError(f"gave messages that cannot be sent: {why}") from None
    return arriving


def _quote(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value"
    text = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return f"{text} ({type(value).__name__})"


async def _serve(channel: ParentChannel, runner: _UserCodeRunner) -> None:
    """Answer requests until the trainer is gone."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def carry_out(request: Request) -> None:
        number = request["id"]
        channel.tell(number)  # the timeout of the call starts now
        try:
            channel.answer(number, *serialize(await runner.answer(request)))
        except WrongResultError as error:
            channel.refuse(number, str(error))
        except Exception as error:  # a user's value may fail when it is inspected
            why = f"returned what cannot be read: {load_code.error_in_one_line(error)}"
            channel.refuse(number, why)

    def take(request: Request) -> None:
        if request["do"] != "abort":  # the trainer ignores the answer
            is_end = request["do"] == "end"
            task = loop.create_task(runner.end(request) if is_end else carry_out(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    channel.listen(lambda frame: loop.call_soon_threadsafe(take, deserialize(*frame)))
    await asyncio.Event().wait()


def run_reward_child(socket_file: str, parent: str) -> None:
    """Load the user's code, which the first request names, and then serve it."""
    channel = ParentChannel(int(socket_file))
    if os.getppid() != int(parent):  # the parent ended before its death had a signal
        os._exit(1)
    faulthandler.enable()  # prints the traceback of a crash in C
    if (frame := read_frame(channel.stream)) is None:
        return
    number, kind, target, timeout_s = (
        frame[0][name] for name in ("id", "kind", "target", "timeout_s")
    )
    try:
        function, home = load_code.load_user_code(kind, target)
    except MegatronVLMError as error:
        channel.refuse(number, error_to_json(error))
        return
    channel.answer(number, None)
    asyncio.run(_serve(channel, _UserCodeRunner(kind, function, home, timeout_s)))


if __name__ == "__main__":
    run_reward_child(*sys.argv[1:])
