"""Time limit for foreign Python code that may never end by itself, such as a chat template."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TemplateTimeout(Exception):  # noqa: N818 - its text ends a sentence
    """An error that is raised by its class alone, without arguments."""

    def __str__(self) -> str:
        return "it takes so long that it may never end"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TemplateTimeout in the current thread once the code has run for `seconds`. Code that is
    not Python must return first."""
    here = ctypes.c_ulong(threading.get_ident())
    timer = threading.Timer(seconds, _raise_in, (here, ctypes.py_object(TemplateTimeout)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _raise_in(here, None)  # A timeout that came too late is not raised elsewhere.
