"""This trainer beside TRL's SFTTrainer, LLaMA-Factory and ms-swift, with the same chats,
photographs, model and batch, from the files to the optimizer step. They take turns step by step.
Where the loss of another trainer is defined differently, a loop in plain Transformers with that
definition must have the same loss.

    make bench   (or: make trl-env llamafactory-env swift-env, then
                  .venv/bin/python benchmarks/sft/compare.py)
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron_vlm.family.cpu_matmul import enable_onednn

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from hf_ratio import BASE  # noqa: E402
from record import record, write_section  # noqa: E402
from sft.rows import MIXED, MIXED_QWEN3_5, UNIFORM, Mix, write_inputs  # noqa: E402

WARM_UP, REPEATS = 1, 6
COMPARED = 3  # the losses of these first steps must agree
APART = 1e-5  # maximum relative difference; 3.5e-7 in the first step
OURS = Path(sys.executable)
TRL, LLAMA_FACTORY, SWIFT = (
    ROOT / f".venv-{name}" / "bin" / "python" for name in ("trl", "llamafactory", "swift")
)
# How a trainer defines its loss: arguments of plain.py.
OUR_LOSS, NEWLINE, BOTH = ("turn", "step"), ("newline", "step"), ("newline", "micro_batch")


@dataclass(frozen=True)
class Side:
    """One of those that take turns."""

    title: str
    python: Path
    program: str
    last: str  # precision of products of the others, number of data workers of this package
    loss: tuple[str, str] = OUR_LOSS


def same_products() -> str:
    """Return the setting with which torch uses this package's library for matrix products
    elsewhere, too: see megatron_vlm/family/cpu_matmul.py."""
    enable_onednn(BASE.hidden, has_experts=False)
    return torch.get_float32_matmul_precision()


DEFAULT, SAME = "highest", same_products()
SUFFIX = "_same_products"
SIDES = {
    "ours": Side("this package", OURS, "ours.py", "0"),
    "two_workers": Side("with two data workers", OURS, "ours.py", "2"),
    "trl": Side("TRL", TRL, "theirs_trl.py", DEFAULT),
    "llamafactory": Side(
        "LLaMA-Factory", LLAMA_FACTORY, "theirs_llamafactory.py", DEFAULT, loss=BOTH
    ),
    "swift": Side("ms-swift", SWIFT, "theirs_swift.py", DEFAULT, loss=NEWLINE),
}


@dataclass
class Measured:
    """What a side did."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mib: float = 0.0


class Turns:
    """A trainer in a process and a folder of its own, which takes a step when it is told to."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.log = folder / f"{name}.log"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def step(self) -> tuple[float, float]:
        """Return the seconds and the loss of a step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        start_s = time.perf_counter()
        print("step", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        taken = time.perf_counter() - start_s
        if not line:
            raise SystemExit(f"a side ended:\n{self.log.read_text()[-3000:]}")
        return taken, float(json.loads(line)["loss"])

    def peak_mib(self) -> float:
        """Return the most memory that the process has had, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [line] = [line for line in status if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def start(name: str, side: Side, folder: Path, mix: Mix, *more: str) -> Turns:
    """Start a side."""
    command = [str(side.python), str(HERE / side.program), str(folder)]
    return Turns(name, [*command, str(mix.rows), str(mix.micro_batch), side.last, *more], folder)


def measure(mix: Mix, sides: dict[str, Side]) -> tuple[dict[str, Measured], dict[str, list[float]]]:
    """Return what each side did, and the first losses of plain Transformers for each definition."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, mix, WARM_UP + REPEATS + 1)
        turns = {name: start(name, side, folder, mix) for name, side in sides.items()}
        measured = {name: Measured() for name in sides}
        for repeat in range(WARM_UP + REPEATS):
            for name, side in turns.items():
                taken, loss = side.step()
                measured[name].losses.append(loss)
                if repeat >= WARM_UP:
                    measured[name].seconds.append(taken)
        for name, side in turns.items():
            measured[name].peak_mib = side.peak_mib()
            side.end()
        definitions = dict.fromkeys(side.loss for side in sides.values())
        plain = {" ".join(loss): plain_losses(folder, mix, loss) for loss in definitions}
    return measured, plain


def plain_losses(folder: Path, mix: Mix, loss: tuple[str, str]) -> list[float]:
    """Return the losses of the first steps of plain Transformers with this definition."""
    side = start("plain", Side("", TRL, "plain.py", DEFAULT), folder, mix, *loss)
    losses = [side.step()[1] for _ in range(COMPARED)]
    side.end()
    return losses


def distance(losses: list[float], reference: list[float]) -> float:
    """Return the greatest relative difference in the first steps."""
    pairs = list(zip(losses, reference, strict=False))[:COMPARED]
    return max(abs(a - b) / b for a, b in pairs)


def compare(mix: Mix, names: list[str]) -> tuple[list[str], dict[str, float]]:
    """Return the lines of the table for this mix, and its figures."""
    sides = {name: SIDES[name] for name in names}
    if SAME != DEFAULT:
        others = [name for name in names if sides[name].program != "ours.py"]
        sides |= {name + SUFFIX: replace(sides[name], last=SAME) for name in others}
    measured, plain = measure(mix, sides)
    ours = measured["ours"]
    assert measured["two_workers"].losses == ours.losses, (measured["two_workers"], ours)
    figures = {"two_workers_step": _median(measured["two_workers"]) / _median(ours)}
    lines = []
    for name in names:
        side, own = sides[name], measured[name]
        explained = distance(own.losses, plain[" ".join(side.loss)])
        if explained > APART:
            raise SystemExit(f"{mix.name}, {name}: {own.losses}, plain Transformers: {plain}")
        same = measured.get(name + SUFFIX, own)
        of_name = figures_of(name, mix, ours, own, same)
        figures |= of_name
        lines.append(line_of(mix, side, own, explained, list(of_name.values())))
        print(lines[-1], flush=True)
    return lines, {f"{key}_{mix.name}": value for key, value in figures.items()}


def figures_of(
    name: str, mix: Mix, ours: Measured, own: Measured, same: Measured
) -> dict[str, float]:
    """Return the figures of a side; `same` had the same products as this package."""
    ratios = [a / b for a, b in zip(own.seconds, ours.seconds, strict=True)]
    return {
        f"{name}_samples_per_s": mix.rows / _median(own),
        f"{name}_ratio": _median(own) / _median(ours),
        f"{name}_ratio{SUFFIX}": _median(same) / _median(ours),
        f"{name}_ratio_least_of_a_step": min(ratios),
        f"{name}_losses_apart": distance(own.losses, ours.losses),
    }


def line_of(mix: Mix, side: Side, own: Measured, explained: float, figures: list[float]) -> str:
    """Return a line of the table."""
    speed, ratio, same_ratio, least, apart = figures
    losses = ", ".join(f"{loss:.5f}" for loss in own.losses[:COMPARED])
    cells = [
        f"`{mix.name}`",
        side.title,
        losses,
        f"{apart:.1e}" if apart else "",
        f"{explained:.1e}",
    ]
    cells += [f"{speed:.2f}", f"{ratio:.2f}", f"{same_ratio:.2f}", f"{least:.2f}"]
    return "| " + " | ".join([*cells, f"{own.peak_mib:,.0f}"]) + " |"


def _median(side: Measured) -> float:
    return statistics.median(side.seconds)


HEAD = [
    "| rows | trainer | losses of the first steps | apart | apart from plain | samples/s | "
    "ratio | same products | least ratio | peak MiB |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    """Measure, print, and write docs/benchmarks.md and .bench/latest.json."""
    for python in (TRL, LLAMA_FACTORY, SWIFT):
        if not python.exists():
            raise SystemExit("make trl-env llamafactory-env swift-env builds the environments")
    mixed, figures = compare(MIXED, list(SIDES))
    uniform, more = compare(UNIFORM, list(SIDES))
    write_section("others", [*HEAD, *mixed, *uniform], {**figures, **more})
    _, figures = compare(MIXED_QWEN3_5, ["ours", "two_workers", "trl"])
    record("trl_qwen3_5", figures)


if __name__ == "__main__":
    main()
