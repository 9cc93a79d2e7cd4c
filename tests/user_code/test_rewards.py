# .venv/bin/python -m pytest tests/user_code/test_rewards.py
"""Users' reward functions and environments: valid results, time limits and ways to end."""

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from decimal import Decimal
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import PIL.Image
import pytest

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.pool import _MAX_LOST, RewardPool, RewardSettings
from megatron_vlm.user_code.serialize import PackingError, pack_and_unpack
from tests.run.test_train import outside_of_jobs
from tests.support.exit_cases import END_S, Marked
from tests.support.suites import full

PATIENCE_S = 30.0
SHORT_S = 0.5  # a time limit
Judging = Callable[..., RewardPool]


@pytest.fixture
def judging(tmp_path) -> Iterator[Judging]:
    """Yield judging(source, "rewards.py:score") -> judges of this file, closed at the end."""
    made = []

    def make(
        source: str,
        reward: str = "rewards.py:score",
        environment: str | None = None,
        processes: int = 1,
        timeout_s: float = 20.0,
        failed_reward: float | None = None,
    ) -> RewardPool:
        (tmp_path / "rewards.py").write_text(dedent(source))
        kind = "reward" if environment is None else "environment"
        what = kind, str(tmp_path / (environment or reward))
        made.append(RewardPool(RewardSettings(*what, processes, timeout_s, failed_reward)))
        return made[-1]

    yield make
    for reward_pool in made:
        reward_pool.close()


def answers(
    reward_pool: RewardPool, *said: str, record: Any = None, first: int = 0
) -> list[Future[EnvStep]]:
    """Submit all answers at once, each in its own episode, and return the futures."""
    for place in range(first, first + len(said)):
        reward_pool.begin(place, record or {}, f"data.jsonl:{place}").result(PATIENCE_S)
    return [reward_pool.step(first + place, answer) for place, answer in enumerate(said)]


def rewards(futures: list[Future[EnvStep]]) -> list[float | str]:
    """Return the reward of each future, or the text of its error."""
    return [
        str(error) if (error := future.exception(PATIENCE_S)) else future.result().reward
        for future in futures
    ]


EVAL = """
    import numpy as np
    import os

    def score(record, answer):
        return eval(answer)
"""
RIGHT = {
    "1": EnvStep(1.0),
    "True": EnvStep(1.0),
    "-0.5": EnvStep(-0.5),
    "np.float32(0.5)": EnvStep(0.5),
    "np.array(2)": EnvStep(2.0),
    "-1e6": EnvStep(-1e6),
    "{'reward': 1, 'form': False}": EnvStep(1.0, (), {"form": 0.0}),
}
WRONG = {
    "None": "returned None (NoneType), not a finite number",
    "'1'": "returned '1' (str), not a finite number",
    "float('nan')": "returned nan (float), not a finite number",
    "10**400": "not a finite number",
    "-1.1e6": "returned -1100000.0 (float), which is beyond -1e+06 to 1e+06",
    "{'reward': 1e308}": "gave as reward 1e+308 (float), which is beyond -1e+06 to 1e+06",
    "{'reward': 1, 'n': -1e200}": "gave as figure 'n' -1e+200 (float), which is beyond -1e+100 to",
    "[1.0]": "returned [1.0] (list), not a finite number",
    "np.ones(1)": "returned array([1.]) (ndarray), not a finite number",
    "{'score': 1}": "returned a mapping without \"reward\": {'score': 1} (dict)",
    "{'reward': None}": "gave as reward None (NoneType), not a finite number",
    "{'reward': 1, 'n': 'x'}": "gave as figure 'n' 'x' (str), not a finite number",
    "{'reward': 1, 2: 3}": "gave as figures {2: 3} (dict), not numbers by name",
    "{'reward': 1, '\\udc80': 2}": "gave as figures {'\\udc80': 2} (dict), of which one",
    "{'reward': 1, 'n' * 101: 2}": "gave as figures {'nnn",
    "{'reward': 1, 'a\\x1b[2J': 2}": "gave as figures {'a\\x1b[2J': 2} (dict), of which one",
    "1 / 0": "raised ZeroDivisionError: division by zero at ",
    "exit(3)": "raised SystemExit: 3 at ",
    "iter(())": "not a finite number",
}


def test_results_of_a_reward(judging):
    reward_pool = judging(EVAL)
    results = [future.result(PATIENCE_S) for future in answers(reward_pool, *RIGHT)]
    assert [(each.reward, list(each.messages), each.figures) for each in results] == [
        (each.reward, [], each.figures) for each in RIGHT.values()
    ]
    futures = answers(reward_pool, *WRONG, first=100)
    for place, (future, expected) in enumerate(zip(futures, WRONG.values(), strict=True)):
        error = future.exception(PATIENCE_S)
        assert isinstance(error, DataError)
        assert str(error).startswith(f"data.jsonl:{100 + place}: ")
        assert error.key == "rl.reward" and str(error.found).endswith("rewards.py:score")
        assert error.problem.startswith(expected) or expected.startswith("not a finite")
        assert expected in error.problem and "rl.failed_reward=0" in error.remedy


def test_an_error_says_where_it_was_raised(judging, tmp_path, capfd):
    """The place is in the user's own folder, even if a library or a neighbour module raised it."""
    (tmp_path / "neighbour.py").write_text("def parse(text):\n    return {}[text]\n")
    reward_pool = judging("""
        import json
        from neighbour import parse
        from megatron_vlm.io.untrusted import require_file

        def score(record, answer):
            return globals()[record["by"]](answer)

        def loads(answer):
            return json.loads(answer)

        def opened(answer):
            return require_file(answer)
    """)
    [library] = rewards(answers(reward_pool, "x", record={"by": "loads"}))
    [elsewhere] = rewards(answers(reward_pool, "/no", record={"by": "opened"}, first=1))
    [neighbours] = rewards(answers(reward_pool, "x", record={"by": "parse"}, first=2))
    assert "raised json.decoder.JSONDecodeError: Expecting value" in library
    assert f" at {tmp_path / 'rewards.py'}:10; mend it" in library
    assert f" at {tmp_path / 'rewards.py'}:13; mend it" in elsewhere and "/no" in elsewhere
    assert f"raised KeyError: 'x' at {tmp_path / 'neighbour.py'}:2; mend it" in neighbours
    said = capfd.readouterr().err
    assert said.count("Traceback") == 3 and "neighbour.py" in said
    assert "reward_child.py" not in said  # only the user's own frames, and what they call


def test_what_is_raised_is_shown_as_text_and_within_bounds(judging, capfd):
    reward_pool = judging("""
        def score(record, answer):
            raise ValueError("\\x1b[2J\\x9b31m\\udc80" + "y" * 2**20 + "\\x07")
    """)
    [error] = rewards(answers(reward_pool, "x"))
    assert "raised ValueError: " in error and len(error) < 1000
    shown = capfd.readouterr().err
    assert "Traceback" in shown and "in score" in shown and "ValueError: \\x1b[2J" in shown
    assert len(shown) < 10_000 and not set(shown) & set("\x1b\x9b\x07")


def test_messages_that_cannot_be_sent_are_wrong_at_once(judging):
    """A process that cannot reply for another reason reports that, too, so nobody waits."""
    reward_pool = judging(
        """
        from megatron_vlm.user_code.environment import EnvStep

        class Odd:
            __slots__ = ()
            @property
            def tolist(self):
                raise RuntimeError("no list")

        class Wrong:
            def reset(self, record):
                pass

            def step(self, answer):
                deep = []
                for _ in range(5000):
                    deep = [deep]
                found = {"deep": deep, "odd": Odd()}[answer]
                return EnvStep(1, [{"role": "user", "content": found}])
        """,
        environment="rewards.py:Wrong",
    )
    deep, odd = rewards(answers(reward_pool, "deep", "odd"))
    assert "rewards.py:Wrong: step " in deep and ": RecursionError: " in deep
    assert "rewards.py:Wrong: step " in odd and ": RuntimeError: no list" in odd


def test_coroutines_run_at_the_same_time(judging):
    reward_pool = judging("""
        import asyncio
        now = most = 0

        async def score(record, answer):
            global now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.3)
            now -= 1
            return most
    """)
    assert rewards(answers(reward_pool, *"x" * 20)) == [20.0] * 20


def test_a_coroutine_has_a_time_of_its_own(judging):
    """A late coroutine is cancelled; its process and the other coroutines stay."""
    reward_pool = judging(
        """
        import asyncio, os

        async def score(record, answer):
            await asyncio.sleep(float(answer))
            return os.getpid()
        """,
        timeout_s=1.0,
    )
    *right, late = rewards(answers(reward_pool, "0.1", "0.5", "60"))
    assert right == rewards(answers(reward_pool, "0", "0", first=3))
    assert "rewards.py:score took longer than rl.timeout=1 seconds; " in late
    assert late.startswith("data.jsonl:2: ")


# Nothing in a plain function can be cancelled. The last one keeps Python's lock.
HANGING = ("time.sleep(60)", full("while_true()"), "sum(range(10**13))")


@pytest.mark.parametrize("hanging", HANGING)
def test_a_function_that_hangs_ends_its_process(judging, hanging):
    reward_pool = judging(
        """
        import os, time

        def while_true():
            while True:
                pass

        def score(record, answer):
            return eval(answer)
        """,
        timeout_s=SHORT_S,
    )
    before, late, after = rewards(answers(reward_pool, "os.getpid()", hanging, "os.getpid()"))
    assert "data.jsonl:1: " in late and "took longer than rl.timeout=0.5 seconds" in late
    assert before != after  # another process


def test_waiting_for_others_takes_none_of_the_time(judging):
    reward_pool = judging(
        """
        import time

        def score(record, answer):
            time.sleep(0.3)
            return float(answer)
        """,
        timeout_s=2.0,
    )
    assert rewards(answers(reward_pool, *"12345678")) == [*map(float, range(1, 9))]


def test_what_returns_late_is_late(judging):
    """The call returns before its process would have been ended, and the process stays."""
    reward_pool = judging(
        """
        import os, time

        def score(record, answer):
            time.sleep(float(answer))
            return os.getpid()
        """,
        timeout_s=2.0,
    )
    before, late, after = rewards(answers(reward_pool, "0", "2.3", "0"))
    assert "took longer than rl.timeout=2 seconds" in late and before == after


@pytest.mark.parametrize("blocking", ["time.sleep(60)", "await refuse()"])
def test_a_coroutine_that_cannot_be_cancelled_is_known(judging, blocking):
    """The coroutine ends its process, and the other calls of the process are made again."""
    reward_pool = judging(
        f"""
        import asyncio, time

        async def refuse():
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass

        async def score(record, answer):
            await asyncio.sleep(0.1)
            if answer == "hang":
                {blocking}
            await asyncio.sleep(0.1)
            return float(answer)
        """,
        timeout_s=SHORT_S,
    )
    first, late, *later = rewards(answers(reward_pool, "1", "hang", "2", "3", "4"))
    assert [first, *later] == [1.0, 2.0, 3.0, 4.0]
    assert "data.jsonl:1: " in late and "took longer than rl.timeout=0.5 seconds" in late


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    "deadly, words",
    [
        full("os._exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL, as the kernel does where memory"),
        full("ctypes.string_at(0)", "was killed by SIGSEGV"),
    ],
)
def test_a_call_that_kills_its_process_three_times(judging, tmp_path, kind, deadly, words):
    reward_pool = judging(f"""
        import asyncio, ctypes, os, pathlib

        {kind} score(record, answer):
            if answer != "die":
                return float(answer)
            with open({str(tmp_path / "deaths")!r}, "a") as file:
                file.write("x")
            {deadly}
    """)
    first, died, *later = rewards(answers(reward_pool, "1", "die", "2", "3"))
    assert [first, *later] == [1.0, 2.0, 3.0]
    assert f"rewards.py:score was asked 3 times, and its process {words}" in died
    assert "data.jsonl:1: " in died and "mend it, or set rl.failed_reward=0" in died
    # A write to a process that has just died may lose its report that the call began. Such a death
    # does not count as one of the three, and the call is made again, up to _MAX_LOST times.
    assert 3 <= len((tmp_path / "deaths").read_text()) <= _MAX_LOST


def test_a_process_that_dies_once_is_started_again(judging):
    reward_pool = judging("""
        import os
        from pathlib import Path

        def score(record, answer):
            if not (mark := Path(__file__).parent / "mark").exists():
                mark.touch()
                os._exit(1)
            return os.getpid()
    """)
    [pid] = rewards(answers(reward_pool, "x"))
    os.kill(int(pid), signal.SIGKILL)  # between calls
    time.sleep(0.05)
    [new_pid] = rewards(answers(reward_pool, "x", first=1))
    assert new_pid != pid


COUNTING = """
    import os, time
    from pathlib import Path
    from megatron_vlm.user_code.environment import EnvStep

    class Counting:
        def reset(self, record):
            self.said = [record["name"]]
            self.log("reset")

        def step(self, answer):
            self.log(answer)
            if answer == "hang":
                time.sleep(60)
            self.said.append(answer)
            text = " ".join(self.said)
            return EnvStep(len(self.said), [{"role": "user", "content": text}], {"turns": 1})

        def log(self, what):
            with open(Path(__file__).parent / "log", "a") as file:
                file.write(f"{self.said[0]} {what}\\n")
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_environment_gets_its_state_again(judging, tmp_path, asynchronous):
    source = COUNTING
    for method in ("reset", "step") if asynchronous else ():
        source = source.replace(f" def {method}", f" async def {method}")
    reward_pool = judging(source, environment="rewards.py:Counting", timeout_s=SHORT_S)
    for place, name in enumerate("AB"):
        assert reward_pool.begin(place, {"name": name}, name).result(PATIENCE_S) is None
    assert reward_pool.step(0, "one").result(PATIENCE_S).reward == 2
    assert reward_pool.step(0, "two").result(PATIENCE_S).reward == 3
    late = reward_pool.step(1, "hang").exception(PATIENCE_S)
    assert "B: " in str(late) and "rewards.py:Counting: step took" in str(late)
    result = reward_pool.step(0, "three").result(PATIENCE_S)
    assert (result.reward, result.figures) == (4, {"turns": 1})
    [message] = result.messages
    assert dict(message) == {"role": "user", "content": "A one two three"}
    # There is no replay where the environment is alive.
    assert reward_pool.step(0, "four").result(PATIENCE_S).reward == 5
    log = [line[2:] for line in (tmp_path / "log").read_text().split("\n") if line[:1] == "A"]
    assert log == ["reset", "one", "two", "reset", "one", "two", "three", "four"]


def picture(mode: str = "RGB") -> PIL.Image.Image:
    grey = np.arange(60, dtype=np.uint8).reshape(6, 10) * 4
    image = PIL.Image.fromarray(np.stack([grey, grey.T.reshape(6, 10), 255 - grey], -1))
    return image.convert(mode)


def test_an_environment_sees_and_shows_pictures(judging, tmp_path):
    reward_pool = judging(
        """
        from pathlib import Path
        import PIL.Image
        from megatron_vlm.user_code.environment import EnvStep

        class Turning:
            async def reset(self, record):
                self.image = record["image"]
                return self.shown()

            def step(self, answer):
                self.image = self.image.transpose(PIL.Image.Transpose[answer])
                return EnvStep(messages=self.shown())

            def shown(self):
                image = {"type": "image", "image": self.image}
                path = {"type": "image", "image": Path("a.png")}
                raw = {"type": "image", "image": b"PNG"}
                return ({"role": "user", "content": [image, path, raw, "?"]},)
        """,
        environment="rewards.py:Turning",
    )
    [first] = reward_pool.begin(0, {"image": picture()}, "turning").result(PATIENCE_S).messages
    image, path, raw, text = first["content"]
    assert image["image"].tobytes() == picture().tobytes() and image["image"].mode == "RGB"
    assert (path["image"], raw["image"], text) == ("a.png", b"PNG", "?")
    [shown] = reward_pool.step(0, "ROTATE_90").result(PATIENCE_S).messages
    turned = picture().transpose(PIL.Image.Transpose.ROTATE_90)
    assert shown["content"][0]["image"].tobytes() == turned.tobytes()
    assert shown["content"][0]["image"].size == (6, 10)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_pictures_of_every_mode_travel(mode):
    image = picture("L").convert("I").convert(mode) if mode == "I;16" else picture(mode)
    image.info["exif"] = b"Exif"
    unpacked = pack_and_unpack({"pictures": [b"before", image]})["pictures"][1]
    assert (unpacked.mode, unpacked.size, unpacked.info) == (mode, image.size, {"exif": b"Exif"})
    assert unpacked.tobytes() == image.tobytes()
    assert unpacked.getpalette() == image.getpalette()


def test_transparency_of_a_palette_travels():
    image = picture("P")
    image.info["transparency"] = 3
    assert pack_and_unpack(image).convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


VALUES = {
    "plain": [None, True, 3, 0.1, float("inf"), "\ud800 text", {}],
    "raw": [b"", b"\0\xff", {"bytes": b"abc", "path": None}],
    "marks": {"\0": "bytes", "at": [0, 1]},
    "keys": {1: "one", None: 2},
    "times": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.date(2026, 1, 2),
        datetime.time(3, 4),
        datetime.timedelta(-1, 2, 3),
    ],
    "decimal": Decimal("0.10"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_travel(name):
    assert repr(pack_and_unpack({"v": VALUES[name], "raw": b"x"})["v"]) == repr(VALUES[name])


def test_values_of_numpy_travel_as_pythons():
    unpacked = pack_and_unpack([np.float32(0.5), np.bool_(True), np.arange(3), (1, 2), Path("a/b")])
    assert repr(unpacked) == "[0.5, True, [0, 1, 2], [1, 2], 'a/b']"


def test_what_cannot_travel_is_named(judging):
    with pytest.raises(PackingError, match=r"^a\.b\[1\] is of type set$"):
        pack_and_unpack({"a": {"b": [1, {2}]}})
    reward_pool = judging("def score(record, answer): return 1")
    [error] = rewards(answers(reward_pool, "x", record={"label": {2}}))
    assert "data.jsonl:0: " in error and "cannot be given it: record.label is of type set" in error
    assert rewards(answers(reward_pool, "x", first=1)) == [1.0]


WRONG_STEPS = {
    "1.0": "returned 1.0 (float), not an EnvStep",
    "EnvStep(None)": "gave as reward None (NoneType), not a finite number",
    "EnvStep(1e200)": "gave as reward 1e+200 (float), which is beyond -1e+06 to 1e+06",
    "EnvStep(1, 'next')": "gave as messages 'next' (str), not a list of messages",
    "EnvStep(1, ['next'])": "what it says: message 0: must be an object, not a str",
    "EnvStep(1, [{'role': 'usr', 'content': ''}])": "message 0: role=usr; give system, user",
    "EnvStep(1, [{'role': 'user', 'content': [{'type': 'image', 'image': 1}]}])": (
        "an image must be a path, URL, bytes or PIL image, not"
    ),
    "EnvStep(1, [{'role': 'user', 'content': {1}}])": "[0].content is of type set",
    "EnvStep(1, [], {'n': float('inf')})": "gave as figure 'n' inf (float), not a finite number",
    "1 / 0": "raised ZeroDivisionError: division by zero at ",
}


def test_wrong_results_of_an_environment(judging):
    reward_pool = judging(
        """
        from megatron_vlm.user_code.environment import EnvStep

        class Wrong:
            def reset(self, record):
                return eval(record["first"])

            def step(self, answer):
                return eval(answer)
        """,
        environment="rewards.py:Wrong",
    )
    futures = answers(reward_pool, *WRONG_STEPS, record={"first": "None"})
    for expected, error in zip(WRONG_STEPS.values(), rewards(futures), strict=True):
        assert "rewards.py:Wrong: step " in error and expected in error, error
    for place, (first, expected) in enumerate(
        {"[]": "returned no messages; for those of the record it is None", "1": "messages 1 (int)"}
        .items()
    ):  # fmt: skip
        error = reward_pool.begin(100 + place, {"first": first}, "w").exception(PATIENCE_S)
        assert isinstance(error, DataError) and (error.place, error.key) == ("w", "rl.environment")
        assert "reset " in error.problem and expected in error.problem


NAMES = {
    "rewards.py": "FILE.py:NAME nor MODULE:NAME",
    "reward.py:score": "mean rewards.py?",
    "rewards.py:scores": "mean 'score'?",
    "rewards.py:zzz": "of score, short, Game",
    "rewards.py:number": "is a int;",
    "rewards.py:Game": "is a class;",
    "rewards.py:short": "are (answer), not (record, answer)",
    "broken.py:score": "cannot be loaded: SyntaxError",
    "missing.py:score": "cannot be loaded: ModuleNotFoundError: No module named 'no_such'",
    "dying.py:score": "its process ended with exit status 7 while it was imported",
}
ENVIRONMENTS = {
    "rewards.py:score": "is a function;",
    "rewards.py:Game": "has no method step(self, answer)",
}


@pytest.mark.parametrize("kind, name", [*(("reward", name) for name in NAMES)] + [
    *(("environment", name) for name in ENVIRONMENTS)
])  # fmt: skip
def test_names_that_are_refused(judging, tmp_path, kind, name):
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "missing.py").write_text("\nimport no_such\n")
    (tmp_path / "dying.py").write_text("import os\nos._exit(7)\n")
    source = """
        number = 1
        def score(record, answer): return 1
        def short(answer): return 1
        class Game:
            def reset(self, record): pass
    """
    expected = (NAMES if kind == "reward" else ENVIRONMENTS)[name]
    with pytest.raises(ConfigError) as refused:
        judging(source, **{kind: name}, processes=2 if "dying" in name else 1)
    error = refused.value
    assert (error.key, error.found) == (f"rl.{kind}", str(tmp_path / name))
    assert expected in str(error)
    if name == "missing.py:score":
        assert str(refused.value).endswith(f" at {tmp_path / 'missing.py'}:2")


def test_a_module_is_found_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text("async def score(record, answer): return 2")
    monkeypatch.chdir(tmp_path)
    reward_pool = RewardPool(RewardSettings("reward", "some_rewards:score", 1, 9.0, None))
    try:
        assert rewards(answers(reward_pool, "x")) == [2.0]
    finally:
        reward_pool.close()


def test_a_failed_reward_stands_for_errors(judging):
    reward_pool = judging(
        """
        import os, time
        from megatron_vlm.user_code.environment import EnvStep

        class Failing:
            def reset(self, record):
                eval(record["first"])

            def step(self, answer):
                eval(answer)
                return EnvStep(1.0, [{"role": "user", "content": "more"}])
        """,
        environment="rewards.py:Failing",
        timeout_s=SHORT_S,
        failed_reward=-1.0,
    )
    failed = EnvStep(-1.0, (), {"failed": 1.0})
    said = ("1 / 0", "time.sleep(60)", "os._exit(3)", "1")
    futures = answers(reward_pool, *said, record={"first": "0"})
    *wrong, right = [future.result(PATIENCE_S) for future in futures]
    assert wrong == [failed] * 3 and right.reward == 1.0 and len(right.messages) == 1
    assert reward_pool.begin(9, {"first": "1 / 0"}, "begin").result(PATIENCE_S) is None
    assert reward_pool.step(9, "1").result(PATIENCE_S) == failed


def test_episodes_are_dealt_to_those_with_the_fewest(judging):
    """An episode stays in one process. Its environment is released when the episode ends."""
    reward_pool = judging(
        """
        import gc, os
        from megatron_vlm.user_code.environment import EnvStep

        class Where:
            def reset(self, record): pass

            def step(self, answer):
                alive = sum(isinstance(each, Where) for each in gc.get_objects())
                return EnvStep(os.getpid(), [], {"alive": alive})
        """,
        environment="rewards.py:Where",
        processes=2,
    )
    pids = rewards(answers(reward_pool, *"xxxx"))
    assert pids[0] == pids[2] != pids[1] == pids[3]
    assert rewards([reward_pool.step(place, "x") for place in range(4)]) == pids
    for place in (1, 3):
        reward_pool.end(place)
    again = [future.result(PATIENCE_S) for future in answers(reward_pool, "x", "x", first=4)]
    assert [each.reward for each in again] == [pids[1]] * 2
    assert [each.figures["alive"] for each in again] == [2.0, 2.0]


def test_a_process_is_small_and_apart(judging, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    reward_pool = judging("""
        import os, sys

        def score(record, answer):
            print("said by a user")
            large = [name for name in ("torch", "megatron", "numpy") if name in sys.modules]
            assert not large, large
            assert "RANK" not in os.environ
            return os.getpgrp()
    """)
    [group] = rewards(answers(reward_pool, "x"))
    assert isinstance(group, float), group
    assert group != os.getpgrp()  # Ctrl-C is sent to the trainer's group
    out, err = capfd.readouterr()
    assert "said by a user" in err and not out


def test_closing_cancels_what_waits(judging):
    reward_pool = judging("import time\ndef score(record, answer): time.sleep(60)")
    futures = answers(reward_pool, "x", "x")
    assert not futures[0].cancel()
    reward_pool.close()
    assert all(isinstance(future.exception(0), CancelledError) for future in futures)
    reward_pool.close()
    reward_pool.end(0)
    assert isinstance(reward_pool.step(0, "x").exception(0), CancelledError)


HOLDING = """
import sys
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

judges = RewardPool(RewardSettings("reward", sys.argv[1], 2, 600.0, None))
for number, answer in enumerate(["time.sleep(600)", "sum(range(10**13))"]):
    judges.begin(number, {}, "record")
    future = judges.step(number, answer)
future.result()
"""


@pytest.mark.timeout(60)
def test_processes_end_with_a_killed_trainer(tmp_path):
    """The processes also hold the trainer's output open.

    The second one cannot run Python code that would notice the death of the trainer.
    """
    file = tmp_path / "rewards.py"
    wait = "print('asked' + sys.stdin.read())"
    file.write_text(f"import sys, time\ndef score(record, answer): {wait}; return eval(answer)\n")
    marked = Marked(outside_of_jobs())
    trainer = subprocess.Popen(
        [sys.executable, "-c", HOLDING, f"{file}:score"],
        env=marked.environment,
        stdin=subprocess.PIPE,  # the processes must not inherit it: they would wait for it
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        # Two processes print it, possibly at the same time.
        assert b"".join(trainer.stderr.readline() for _ in range(2)).count(b"asked") == 2
        assert len(marked.alive()) == 3
        trainer.kill()
        trainer.communicate(timeout=END_S)  # until every holder of its output is gone
    finally:
        trainer.kill()
        marked.check_all_gone()
