"""Run a command whose ranks meet with gloo under the rules of NCCL.

    python -m tests.nccl [--rules lazy,one-queue] [--mutant NAME] -- COMMAND...

Exit status: 3 if the referee had a remark, else that of the command.
"""

import argparse
import os
import subprocess
import sys

from tests.nccl.referee import Referee


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nccl")
    parser.add_argument("--rules", default="", help="options of tests/nccl/README.md")
    parser.add_argument("--mutant", default="", help="a name of tests/nccl/mutants.py")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    referee = Referee(options.rules, _show)
    variables = {**referee.environment(), "NCCL_RULES_MUTANT": options.mutant}
    words = options.command[options.command[:1] == ["--"] :]
    process = subprocess.Popen(words, env=os.environ | variables)
    while (status := _status(process)) is None:
        for text in filter(None, (job.stall() for job in list(referee.jobs.values()))):
            _show(text)
    remarks = referee.take_remarks()
    _show(f"{referee.summary()}; {len(remarks)} remarks; the command ended with {status}")
    return 3 if remarks else status


def _show(text: str) -> None:
    print(f"[referee] {text}", file=sys.stderr, flush=True)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status, or None if the process still runs after a second."""
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
