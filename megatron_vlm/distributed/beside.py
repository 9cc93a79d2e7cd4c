"""Long work beside the ranks', of which the others hear meanwhile: they would take it for stuck."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 0.5


def result_of(work: "Future[T]", meanwhile: Callable[[], None], every_s: float = EVERY_S) -> T:
    """Its result; `meanwhile` is called until then."""
    while True:
        try:
            return work.result(every_s)
        except TimeoutError:
            if work.done():  # the work's own error, or it has just ended
                return work.result()
            meanwhile()


def beside(work: Callable[[], T], meanwhile: Callable[[], None], every_s: float = EVERY_S) -> T:
    """What `work` returns, done in a thread. What `meanwhile` raises is raised at once, and the
    work is left to itself: the process is about to end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="beside").start()
    return result_of(done, meanwhile, every_s)
