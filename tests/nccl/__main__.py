"""Run a command whose ranks meet with gloo under the rules of NCCL.

    python -m tests.nccl [--one-queue] [--lazy] [--no-objects] [--mutant NAME] -- COMMAND...

Exit status: 3 if the referee had a remark, else that of the command.
"""

import argparse
import os
import subprocess
import sys

from tests.nccl.referee import Referee


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nccl")
    add = parser.add_argument
    add("--one-queue", action="store_true", help="no two kernels run at the same time")
    add("--lazy", action="store_true", help="each pair of ranks has a communicator for its sends")
    add("--no-objects", action="store_true", help="report collectives of pickled objects")
    add("--mutant", default="", help="break the trainer: see tests/nccl/mutants.py")
    add("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rules = [name for name in ("one-queue", "lazy", "no-objects") if _given(options, name)]
    referee = Referee(",".join(rules), _show)
    variables = {**referee.environment(), "NCCL_RULES_MUTANT": options.mutant}
    words = options.command[options.command[:1] == ["--"] :]
    process = subprocess.Popen(words, env=os.environ | variables)
    while (status := _status(process)) is None:
        for text in filter(None, (job.stall() for job in list(referee.jobs.values()))):
            _show(text)
    remarks = referee.take_remarks()
    _show(f"{referee.summary()}; {len(remarks)} remarks; the command ended with {status}")
    return 3 if remarks else status


def _given(options: argparse.Namespace, name: str) -> bool:
    return bool(getattr(options, name.replace("-", "_")))


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
