"""Fill a card of cards/ with what is measured here and now.

    make card CARD=tiny-qwen3-vl                 # run its parity tests
    make card CARD=qwen3-vl-8b GPU=.gpu          # read the figures of `make gpu`
    make card CARD=qwen3-vl-8b BENCH=runs/first  # read the scores of `megatron-vlm bench`

The card has to exist: a file with the model, its family, its recipe and `status: not measured`.
Figures of the same kind are replaced by the new ones.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from verification_card import (
    CARDS,
    ROOT,
    CardStatus,
    LayoutError,
    Score,
    Speed,
    VerificationCard,
    read_card,
    write_card,
)

from megatron_vlm.commands.doctor import installed_version
from megatron_vlm.report.bench_table import read_benchmark

# How the step `families` of `make gpu` calls a family; `parity` has all figures of Qwen3-VL.
_FAMILIES = {
    "qwen3_vl_moe": "Qwen3-VL with experts",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 with experts",
    "gemma4": "Gemma 4",
}
_PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


def fill_from_tests(card: VerificationCard) -> VerificationCard:
    """Run the card's parity tests, each case of them, and return the card with their figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--junitxml={report}"]
        subprocess.run(
            [*command, *card.parity_tests], cwd=ROOT, env={**os.environ, "LONG": "1"}, check=False
        )
        parity = _errors_of(report, card.parity_tests)
    return replace(
        card,
        parity=parity,
        machine=_machine(),
        versions=_versions(),
        log=f"pytest {' '.join(card.parity_tests)}",
    )


def _errors_of(report: Path, tests: list[str]) -> list[LayoutError]:
    """Return the figures of a JUnit report. A case that recorded none has failed before."""
    tolerances = {_module_of(test): importlib.import_module(_module_of(test)) for test in tests}
    errors = []
    for case in ElementTree.parse(report).iter("testcase"):
        values = {each.get("name"): each.get("value") for each in case.iter("property")}
        layout = case.get("name", "").partition("[")[2].removesuffix("]")
        tolerance = tolerances[case.get("classname", "")].TOLERANCE
        errors.append(LayoutError(layout, float(values.get("worst") or "inf"), tolerance))
    return errors


def _module_of(test: str) -> str:
    """Return the module of a test's node id."""
    return test.partition("::")[0].removesuffix(".py").replace("/", ".")


def fill_from_gpu(card: VerificationCard, folder: Path) -> VerificationCard:
    """Return the card with the figures that `make gpu` left in a folder."""
    lines = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    by_step = {(line["step"], line["key"]): line["value"] for line in lines}
    parity, speeds = [], []
    family = _FAMILIES.get(card.family)
    for (step, key), value in by_step.items():
        name = key.partition(" (")[0]
        is_of_card = step == "parity" if family is None else name.partition(" by ")[0] == family
        if is_of_card and isinstance(value, dict) and "bound" in value:
            parity.append(LayoutError(name, value["found"], value["bound"]))
        if isinstance(value, dict) and "tokens_per_s" in value:
            name = f"{by_step[step, 'model']}: {key}"
            speeds.append(Speed(name, float(f"{value['tokens_per_s']:.4g}")))
    versions = {**_versions(), **by_step["ceilings", "versions"]}
    return replace(
        card,
        parity=parity,
        throughput=speeds,
        machine=str(by_step["ceilings", "device"]),
        versions={name: text for name, text in versions.items() if text != "not installed"},
        log="make gpu",
    )


def fill_from_bench(card: VerificationCard, run: Path) -> VerificationCard:
    """Return the card with the scores of the benchmarks of a run."""
    benchmark = read_benchmark(run)
    if benchmark is None:
        raise SystemExit(f"{run} has no scores: run megatron-vlm bench {run} first")
    scores = [
        Score(f"{line.task} {line.metric}", line.before, line.after, line.standard_error)
        for line in benchmark.lines
    ]
    if not card.parity:
        card = replace(card, machine=_machine(), log="megatron-vlm bench")
    versions = {**_versions(), **card.versions, "suite": benchmark.suite}
    return replace(card, scores=scores, versions=versions)


def _machine() -> str:
    return f"{os.cpu_count()} cores of {_cpu_name()}"


def _versions() -> dict[str, str]:
    found = {package: installed_version(package) for package in _PACKAGES}
    installed = {name: version for name, version in found.items() if version is not None}
    return {"python": platform.python_version(), **installed}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def main() -> int:
    """Fill the card; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of a file in cards/, without .yaml")
    parser.add_argument("--gpu", type=Path, help="the folder that `make gpu` wrote")
    parser.add_argument("--bench", type=Path, help="a run that `megatron-vlm bench` has scored")
    args = parser.parse_args()
    card = read_card(CARDS / f"{args.name}.yaml")
    if args.gpu:
        card = fill_from_gpu(card, args.gpu)
    if args.bench:
        card = fill_from_bench(card, args.bench)
    elif not args.gpu:
        card = fill_from_tests(card)
    held = all(error.worst <= error.tolerance for error in card.parity)
    passed = held and bool(card.parity or card.scores)
    head = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    card = replace(
        card,
        status=str(CardStatus.passed if passed else CardStatus.failed),
        date=str(date.today()),
        commit=head.stdout.strip() or "unknown",
    )
    write_card(args.name, card)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
