"""Loader of the function or class that a user names, in the process that calls it."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_vlm.config.schema import NAMED
from megatron_vlm.errors import ConfigError
from megatron_vlm.io.untrusted import home_path, real_path

_LONGEST = 300  # maximum characters of an exception's text
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# The key that names the user's code of each kind, and the key of the time that a call may take.
KEYS = {"reward": "rl.reward", "environment": "rl.environment", "metric": "eval.metrics"}
KEYS |= {"view": "teacher.view", "harness": "rl.environment"}  # a harness asks by itself
TIMEOUT_KEYS = dict.fromkeys(KEYS, "rl.timeout") | {"metric": "eval.metric_timeout"}
TIMEOUT_KEYS["harness"] = "rl.agent_timeout"
# {kind: (method, or "" for the object itself; sample arguments; the arguments in words)}
_CALLS: dict[str, list[tuple[str, tuple[Any, ...], str]]] = {
    "reward": [("", ({}, ""), "(record, answer)")],
    "metric": [("", ("", [], {}), "(prediction, answers, record)")],
    "view": [("", ({},), "(record)")],
    "environment": [
        ("", (), "()"),
        ("reset", (None, {}), "(self, record)"),
        ("step", (None, ""), "(self, answer)"),
    ],
}

_REMEDIES = {
    "reward": "give a function of a record and an answer",
    "metric": "give a function of the model's answer, the right answers and the record",
    "view": "give a function of a record",
}


def load_user_code(kind: str, target: str) -> tuple[Callable[..., Any], Path]:
    """Return the reward function, the metric or the class of environments, and its folder. `kind`
    is one of KEYS. Raise ConfigError, with the reason, if it cannot be loaded."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError("is neither FILE.py:NAME nor MODULE:NAME", key=KEYS[kind], found=target)
    if target.startswith(NAMED) and KEYS[kind] == "rl.environment":
        package, _, name = target.partition(":")
        with _loading(kind, target, Path.cwd(), f"pip install 'megatron_vlm[{package}]'"):
            module = importlib.import_module(f"megatron_vlm.user_code.{package}_episodes")
            return getattr(module, f"load_{package}")(name), Path.cwd()
    module, home = _module(kind, target, place)
    target_object = getattr(module, name, None)
    if target_object is None:
        none, remedy = _suggest_name(module, name)
        raise ConfigError(
            f": {place} has no {name!r}{none}", key=KEYS[kind], found=target, remedy=remedy
        )
    _check(kind, target, target_object)
    return target_object, home


def error_in_one_line(error: BaseException) -> str:
    """Return the type and the text of an exception in a single line."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def place_of_function(error: BaseException, home: Path) -> str:
    """Return the innermost place of the traceback in the user's folder; empty if there is none."""
    libraries = [library for library in _LIBRARIES if not home.is_relative_to(library)]
    frames = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(home)
        and not any(map(Path(frame.filename).is_relative_to, libraries))
    ]
    return f" at {frames[-1]}" if frames else ""


def _module(kind: str, target: str, place: str) -> tuple[ModuleType, Path]:
    """Import the file or module. The file's folder comes first in sys.path, as for a program; for a
    module, the working folder does."""
    is_file = place.endswith(".py")
    path = real_path(home_path(place))
    if is_file and not path.is_file():
        names = [each.name for each in path.parent.glob("*.py")]
        near = difflib.get_close_matches(path.name, names)
        hint = f"did you mean {near[0]}?" if near else ""
        raise ConfigError(f": there is no file {path}", key=KEYS[kind], found=target, remedy=hint)
    home = path.parent if is_file else Path.cwd()
    sys.path.insert(0, str(home))
    with _loading(kind, target, home):
        module = _of_file(path) if is_file else importlib.import_module(place)
    file = getattr(module, "__file__", None)
    return module, home if file is None else real_path(file).parent


@contextmanager
def _loading(kind: str, target: str, home: Path, install: str = "") -> Iterator[None]:
    """Raise ConfigError for any error. `install` is the remedy for a module that is missing."""
    try:
        yield
    except BaseException as error:  # SystemExit as well
        raise ConfigError(
            f"cannot be loaded: {error_in_one_line(error)}{place_of_function(error, home)}",
            key=KEYS[kind],
            found=target,
            remedy=install if isinstance(error, ModuleNotFoundError) else "",
        ) from error


def _of_file(path: Path) -> ModuleType:
    # The module has the name of its file, unless that is taken, so that its neighbours can import
    # it and its classes can refer to it.
    name = path.stem if path.stem not in sys.modules else f"_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _suggest_name(module: ModuleType, name: str) -> tuple[str, str]:
    """Return the end of the problem's text, and the remedy."""
    names = [
        each
        for each, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if near := difflib.get_close_matches(name, names, n=1):
        return "", f"did you mean {near[0]!r}?"
    return ("", f"give one of {', '.join(names)}") if names else (", nor any function or class", "")


def _check(kind: str, target: str, imported: Any) -> None:
    is_class = isinstance(imported, type)
    if kind == "environment" and not is_class:
        raise ConfigError(
            f"is a {type(imported).__name__}",
            key="rl.environment",
            found=target,
            remedy="give a class with `reset` and `step`, or give a function of a record and an "
            "answer as rl.reward",
        )
    if kind != "environment" and (is_class or not callable(imported)):
        remedy = _REMEDIES[kind]
        if kind == "reward" and is_class:
            remedy += ", or give a class with `reset` and `step` as rl.environment"
        what = "class" if is_class else type(imported).__name__
        raise ConfigError(f"is a {what}", key=KEYS[kind], found=target, remedy=remedy)
    for method, arguments, expected in _CALLS[kind]:
        called = getattr(imported, method, None) if method else imported
        if not callable(called):
            raise ConfigError(
                f"has no method {method}{expected}", key="rl.environment", found=target
            )
        try:
            signature = inspect.signature(called)
        except ValueError:  # written in C
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            name = f" of {method}" if method else ""
            raise ConfigError(
                f": the arguments{name} are {signature}, not {expected}",
                key=KEYS[kind],
                found=target,
            ) from None
