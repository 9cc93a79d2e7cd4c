"""Check a grammar in a process of its own, since some small ones take forever: reads its kind as an
argument, and its text from stdin; writes what is wrong with it."""

import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, grammar_from

WORK_S = 0.5  # seconds of this process that a grammar may take; usual ones take 0.01
MEMORY = 4 * 2**30
# A token may take as many steps as the grammar has symbols. Below this they take milliseconds.
SYMBOLS = 50_000


def write_fault() -> None:
    """Write what is wrong with the grammar, or nothing."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, WORK_S)  # it ends the process
    text = sys.stdin.buffer.read().decode()
    limits = LLParserLimits(max_grammar_size=SYMBOLS, verbose_errors=False)
    try:
        found = LLMatcher.validate_grammar(grammar_from(sys.argv[1], text), limits=limits)  # type: ignore[arg-type]
    except ValueError as error:
        found = str(error)
    print(found.splitlines()[0] if found else "", end="")


if __name__ == "__main__":
    write_fault()
