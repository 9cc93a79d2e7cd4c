"""Pool of processes that run users' reward functions, environments, metrics and views.

Messages between the processes are JSON and bytes, never pickles. A process that dies or hangs is
restarted. The call of a reward function is then repeated. An environment has lost its state: a new
one receives the same record and the same answers, and its results for them are ignored. This is
correct for environments that depend on the record and the answers alone.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_vlm.config.evaluation_checks import reward_model_of
from megatron_vlm.config.schema import Config, RlConfig
from megatron_vlm.errors import DataError
from megatron_vlm.io.child import Child, ChildDiedError
from megatron_vlm.user_code.environment import EnvStep, Opening
from megatron_vlm.user_code.load_code import KEYS
from megatron_vlm.user_code.reward_process import RewardCallError, RewardWorker
from megatron_vlm.user_code.serialize import PackingError

_MAX_DEATHS = 3  # maximum deaths of processes while they run a call
_MAX_LOST = 10  # maximum attempts of a call whose processes die, whichever call is at fault

T = TypeVar("T")


@dataclass(frozen=True)
class RewardSettings:
    """Settings of the rewards, of a metric or of a view."""

    kind: str  # one of KEYS, or none
    target: str  # FILE.py:NAME or MODULE:NAME of a function or a class
    processes: int
    timeout_s: float  # seconds per call
    failed_reward: float | None  # reward of a call that fails or times out; None: raise an error

    @staticmethod
    def from_config(rl: RlConfig, processes: int) -> "RewardSettings":
        """Return the settings of a run, which has a reward, an environment or neither."""
        kind, target, timeout_s = "reward", rl.reward, rl.timeout
        if rl.environment is not None:
            kind, target = "environment", rl.environment
        elif target is None or reward_model_of(rl) is not None:
            return NO_REWARDS
        if rl.has_harness:
            kind, timeout_s = "harness", rl.agent_timeout
        return RewardSettings(kind, target, processes, timeout_s, rl.failed_reward)

    @staticmethod
    def of_view(cfg: Config, processes: int) -> "RewardSettings":
        """Return the settings of teacher.view, which is set."""
        assert cfg.teacher.view is not None
        return RewardSettings("view", cfg.teacher.view, processes, cfg.rl.timeout, None)


# An episode has one answer, with reward 0: it is judged elsewhere, or not at all.
NO_REWARDS = RewardSettings("none", "", 0, 0.0, None)


@dataclass(eq=False)
class _Episode:
    number: int
    record: Mapping[str, Any]
    where: str
    worker: RewardWorker
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time
    life: Child | None = None  # process that has its environment
    answers: list[str] = field(default_factory=list)  # answers that the environment has received
    failed: bool = False


class RewardPool:
    """Pool of reward processes. Its methods may be called from any thread. Where the user's code is
    wrong, a future raises a DataError that names the record. Futures cannot be cancelled."""

    def __init__(self, settings: RewardSettings):
        """Start the processes. Raise ConfigError if the function cannot be loaded or called."""
        self.settings, self.kind, self.target = settings, settings.kind, settings.target
        self._episodes: dict[int, _Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        # The processes end with the thread that starts them, and so with this one.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._workers: list[RewardWorker] = []
        try:
            self._do(self._start()).result()
        except BaseException:
            self.close()
            raise

    def begin(
        self, episode: int, record: Mapping[str, Any], where: str
    ) -> "Future[EnvStep | None]":
        """Begin an episode with this number, and return its first messages, or None for the
        record's. `where`: the record's name in error messages."""
        return self._do(self._begin(episode, record, where))

    def step(self, episode: int, answer: str) -> "Future[EnvStep]":
        """Return the response to an answer. A failure that has a reward ends the episode."""
        return self._do(self._step(episode, answer))

    def measure(
        self, prediction: str, references: Sequence[str], record: Mapping[str, Any], where: str
    ) -> "Future[dict[str, float]]":
        """Return the numbers of a metric by name; a single number has an empty name."""
        request = {"answer": prediction, "references": list(references), "record": record}
        return self._do(self._call(request, where))

    def view(self, record: Mapping[str, Any], where: str) -> "Future[Opening]":
        """Return the messages of a view of the record, or None if it has none."""
        return self._do(self._call({"record": record}, where))

    def end(self, episode: int) -> None:
        """Forget the episode, as soon as its calls have ended."""
        self._do(self._end(episode))

    def close(self) -> None:
        """End the processes. Pending futures raise CancelledError."""
        if not self._loop.is_closed():
            self._do(self._close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _do(self, steps: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop. The calls of a thread start in their order."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        if self._loop.is_closed():
            steps.close()
            future.set_exception(CancelledError("the reward workers are closed"))
            return future

        async def run() -> None:
            try:
                future.set_result(await steps)
            except asyncio.CancelledError:
                future.set_exception(CancelledError("the reward workers were closed"))
            except BaseException as error:
                future.set_exception(error)

        def begin() -> None:
            task = self._loop.create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)
        return future

    async def _start(self) -> None:
        what = self.kind, self.target, self.settings.timeout_s
        self._workers = [RewardWorker(*what) for _ in range(self.settings.processes)]
        starting = (worker.alive() for worker in self._workers)
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _close(self) -> None:
        current = asyncio.current_task()
        if tasks := [task for task in self._tasks if task is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _begin(self, number: int, record: Mapping[str, Any], where: str) -> EnvStep | None:
        if self.settings is NO_REWARDS:
            return None
        assert number not in self._episodes, f"episode {number} has begun already"
        episode = self._episodes[number] = self._new_episode(number, record, where)
        if self.kind != "environment":
            return None
        async with episode.lock:
            first = await self._ask_or_fail(episode, _begin_request(episode), "reset")
            return first and EnvStep(**first)

    def _new_episode(self, number: int, record: Mapping[str, Any], where: str) -> _Episode:
        """Return an episode on the worker that has the fewest."""
        worker = min(self._workers, key=lambda worker: worker.episodes)
        worker.episodes += 1
        return _Episode(number, record, where, worker)

    async def _step(self, number: int, answer: str) -> EnvStep:
        if self.settings is NO_REWARDS:
            return EnvStep()
        episode = self._episodes[number]
        async with episode.lock:
            response: dict[str, Any] = {}
            if not episode.failed:
                request = {"do": "step", "episode": number, "answer": answer}
                if self.kind != "environment":
                    request |= {"do": self.kind, "record": episode.record}
                response = await self._ask_or_fail(episode, request, "step")
            if episode.failed:
                assert self.settings.failed_reward is not None
                return EnvStep(self.settings.failed_reward, (), {"failed": 1.0})
            episode.answers.append(answer)
            return EnvStep(**response)

    async def _call(self, request: Mapping[str, Any], where: str) -> Any:
        """Return the response to a call that belongs to no episode."""
        episode = self._new_episode(0, request["record"], where)
        try:
            request = {"do": self.kind, "episode": 0, **request}
            return await self._ask_processes(episode, request)
        except RewardCallError as error:
            raise DataError(
                str(error), place=where, key=KEYS[self.kind], found=self.target
            ) from None
        finally:
            episode.worker.episodes -= 1

    async def _end(self, number: int) -> None:
        if (episode := self._episodes.pop(number, None)) is None:
            return
        async with episode.lock:
            episode.worker.episodes -= 1
            if episode.life is not None:
                episode.life.send({"do": "end", "episode": number})

    async def _ask_or_fail(self, episode: _Episode, request: Mapping[str, Any], method: str) -> Any:
        """Return the response to a request. If there is none, return None where rl.failed_reward is
        set, and otherwise raise an error that names the record."""
        try:
            return await self._ask_processes(episode, request)
        except RewardCallError as error:
            if self.settings.failed_reward is not None:
                episode.failed = True
                return None
            method_prefix = f": {method}" if self.kind == "environment" else ""
            raise DataError(
                f"{method_prefix} {error}".lstrip(),
                place=episode.where,
                key=KEYS[self.kind],
                found=self.target,
                remedy="mend it, or set rl.failed_reward=0 to give such answers this reward",
            ) from None

    async def _ask_processes(self, episode: _Episode, request: Mapping[str, Any]) -> Any:
        """Return the response to a request, and repeat it on a new process where one dies."""
        lost, deaths, suspected = 0, 0, False
        while True:
            try:
                async with episode.worker.turn(alone=suspected):
                    process = await episode.worker.alive()
                    if request["do"] == "step":
                        await self._restore(episode, process)
                    answer = await episode.worker.ask(process, request)
                    episode.life = process
                    return answer
            except PackingError as error:
                raise RewardCallError(f"cannot be given it: {error}") from None
            except ChildDiedError as error:
                lost += 1
                deaths += error.suspects > 0
                suspected = suspected or error.suspects > 1
                if deaths >= (1 if self.kind == "harness" else _MAX_DEATHS) or lost >= _MAX_LOST:
                    times = lost if lost >= _MAX_LOST else deaths
                    text = f"was asked {times} times, and its process {error}"
                    raise RewardCallError(text) from None

    async def _restore(self, episode: _Episode, life: Child) -> None:
        """Rebuild the environment in a new process, with the same record and answers."""
        if episode.life is not life:
            await episode.worker.ask(life, _begin_request(episode))
            for answer in episode.answers:
                request = {"do": "step", "episode": episode.number, "answer": answer}
                await episode.worker.ask(life, request)
            episode.life = life


def _begin_request(episode: _Episode) -> dict[str, Any]:
    return {"do": "begin", "episode": episode.number, "record": episode.record}
