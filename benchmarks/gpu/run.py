"""Measurements of a GPU in one call: correctness and speed.

    make gpu          on a machine with CUDA; PY=python3 for another interpreter
    make gpu-dry      the same script at tiny sizes on the CPU

Nothing is installed. Packages that the interpreter lacks are unpacked from wheels in a folder
(`make wheels` fills .wheels). Each step is a process of its own with a deadline. Each figure
becomes a line in OUT/figures.jsonl as soon as it is measured, so that a run that is cut off keeps
its figures. At the end, it writes OUT/tables.md, for docs/verified.md and docs/benchmarks.md. A
step whose program or device is missing says which, and is "not run". The status is 0 if every other
step finished and every comparison held.

A machine that is lent for ten minutes at a time runs it again with `--earlier FOLDER...`: the steps
that were done there are not repeated, and their figures go into the same table.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FIGURES, LOG = "figures.jsonl", "log.txt"
MAX_TOGETHER, TOGETHER_DRY = 14, 2
NOT_RUN = 77  # the exit status of a step without its program or device, as in step.py
FEW_THREADS = "2"  # for steps that run together
LEAST = 10  # minimum of seconds for which a step is worth starting
DRY_SECONDS = 1800  # a guard against hangs: how fast the CPU is says nothing


@dataclass(frozen=True)
class Step:
    """A function of a module in this folder, and its maximum of seconds. Steps that are not timed
    run at the same time on a GPU, which costs them nothing but time."""

    module: str
    name: str
    seconds: int
    is_timed: bool = False


# The order is that of importance if time runs out: first correctness, then speed.
STEPS = (
    Step("machine", "ceilings", 100, is_timed=True),  # reads torch from a cold disk
    Step("correct", "command_line", 200),
    Step("parity", "parity", 180),
    Step("parity", "families", 180),
    Step("correct", "features", 200),
    Step("training", "objectives", 120),
    Step("training", "checkpoint", 90),
    Step("training", "blocks", 60),
    Step("correct", "syncs", 90),
    Step("sampling", "agree", 180),
    Step("correct", "demo", 200),
    Step("correct", "reinforcement", 200),
    Step("sampling", "rl_through_host", 110),
    Step("parity", "nccl", 180),
    Step("communicators", "communicators", 180),
    Step("speed", "whole", 120, is_timed=True),
    Step("speed", "stack", 80, is_timed=True),
    Step("speed", "hybrid", 80, is_timed=True),
    Step("kernels", "experts", 45, is_timed=True),
    Step("offload", "offload", 70, is_timed=True),
    Step("sampling", "rl_with_vllm", 110, is_timed=True),
    Step("speed", "engine", 60, is_timed=True),
    Step("machine", "attention", 30, is_timed=True),
)


def unpack(wheels: Path, site: Path) -> None:
    """Unpack the packages that the interpreter lacks from wheels, without a package manager."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def run_step(step: Step, arguments: list[str], log: Path, left: float, env: dict[str, str]) -> str:
    """Run a step in a process; return its status."""
    seconds = min(DRY_SECONDS if "--dry" in arguments else step.seconds, left)
    if seconds < LEAST:
        return "not begun: no time left"
    command = [sys.executable, "-m", "gpu.step", step.module, step.name, *arguments]
    with log.open("w") as output:
        # The step has a session of its own, so that its child processes are stopped with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {seconds:.0f} s"
    if status == NOT_RUN:
        return "not run"
    return "done" if status == 0 else f"failed with status {status}"


def read_done(folders: Sequence[Path]) -> tuple[set[str], list[str]]:
    """Return the steps that these folders have to their ends, and their lines. The last folder that
    has a step counts."""
    lines_by_step: dict[str, list[str]] = {}
    for folder in folders:
        of_folder: dict[str, list[str]] = {}
        for line in (folder / FIGURES).read_text().splitlines():
            of_folder.setdefault(json.loads(line)["step"], []).append(line)
        for name, lines in of_folder.items():
            if json.loads(lines[-1])["value"].startswith("done"):
                lines_by_step[name] = lines
    return set(lines_by_step), [line for lines in lines_by_step.values() for line in lines]


def main() -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".gpu")))
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, help="for all steps together, default: 900")
    parser.add_argument("--only", nargs="*", default=[step.name for step in STEPS])
    earlier = "folders of earlier calls, whose steps are kept"
    parser.add_argument("--earlier", nargs="*", type=Path, default=[], help=earlier)
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = 2 * DRY_SECONDS if args.dry else 900
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        statuses = run_steps(args, out, Path(scratch))
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu.tables import write_tables

    right = write_tables(out / FIGURES, out / "tables.md")
    print((out / "tables.md").read_text())
    return int(not right or any(status not in ("done", "not run") for status in statuses))


def run_steps(args: argparse.Namespace, out: Path, scratch: Path) -> list[str]:
    """Run the steps; return the status of each."""
    start = time.monotonic()
    done, kept = read_done(args.earlier)
    (out / LOG).unlink(missing_ok=True)
    (out / FIGURES).write_text("".join(f"{line}\n" for line in kept))
    if args.wheels.is_dir():
        unpack(args.wheels, scratch / "site")
    paths = (ROOT, ROOT / "benchmarks", scratch / "site")
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if args.dry:
        env["OMP_NUM_THREADS"] = "1"  # one thread, because others use the small machine, too
    given = [path for path in [env.get("PYTHONPATH")] if path]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *given])
    arguments = [str(out), str(scratch), *(["--dry"] if args.dry else [])]

    def run(step: Step) -> str:
        step_start = time.monotonic()
        step_env = env if step.is_timed else {**env, "OMP_NUM_THREADS": FEW_THREADS}
        log = scratch / f"{step.name}.log"
        status = run_step(step, arguments, log, args.seconds - (step_start - start), step_env)
        took = f"{status}, {time.monotonic() - step_start:.0f} s"
        with (out / FIGURES).open("a") as lines:
            lines.write(json.dumps({"step": step.name, "key": "status", "value": took}) + "\n")
        print(f"{step.name:14} {took}", flush=True)
        text = log.read_text(errors="replace") if log.exists() else ""
        with (out / LOG).open("a") as logs:
            logs.write(f"==== {step.name}: {took}\n{text}\n")
        if status != "done":
            print("\n".join(f"    {line}" for line in text.splitlines()[-12:]), flush=True)
        return status

    statuses: list[str] = []
    chosen = [step for step in STEPS if step.name in args.only and step.name not in done]
    for is_timed, steps in itertools.groupby(chosen, lambda s: s.is_timed and not args.dry):
        together = TOGETHER_DRY if args.dry else 1 if is_timed else MAX_TOGETHER
        with ThreadPoolExecutor(together) as threads:
            statuses += threads.map(run, steps)
    return statuses


if __name__ == "__main__":
    sys.exit(main())
