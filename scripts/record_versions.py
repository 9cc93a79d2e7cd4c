"""Write into docs/verified.md what a run of tests passed with, as `make test-newest` does.

    .venv-newest/bin/python scripts/record_versions.py newest .venv-newest/results.xml

The versions belong to the environment whose Python runs this script, and pytest wrote the results
(--junitxml). The section is the one between the marks of that name.
"""

import argparse
import datetime
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.commands.doctor import installed_version

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verified.md"
PACKAGES = ("megatron-core", "torch", "transformers", "tokenizers", "numpy", "datasets", "ray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", help="the name in the marks of docs/verified.md")
    parser.add_argument("results", type=Path, nargs="+", help="what pytest --junitxml wrote")
    arguments = parser.parse_args()
    results = ElementTree.Element("runs")
    results.extend(ElementTree.parse(path).getroot() for path in arguments.results)
    text = section_text(results)
    PAGE.write_text(with_section(PAGE.read_text(), arguments.section, text))


def with_section(page: str, name: str, text: str) -> str:
    """Return the page with this text between the marks of the name."""
    begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        sys.exit(f"{PAGE.name} has no section {name}")
    return page[: page.index(begin)] + begin + text + page[page.index(end) :]


def section_text(results: ElementTree.Element) -> str:
    """Return the versions of this environment, and the results of each file of tests."""
    versions = [installed_version(package) or "none" for package in PACKAGES]
    lines = [
        f"{datetime.date.today()}, Python {platform.python_version()}, {platform.machine()}:",
        "",
        *_table(PACKAGES, [versions]),
        "",
        *_table(("tests", "passed", "skipped"), list(_count(results))),
        "",
        "The largest relative difference from Hugging Face, of losses, log-probs and gradients: "
        f"{_largest_difference(results):.1e}.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in ([*head], ["---"] * len(head), *rows)]


def _count(results: ElementTree.Element) -> Iterator[list[str]]:
    """Yield a row for each file of tests. A file with a failure has no place on this page."""
    counts: dict[str, Counter[str]] = {}
    for case in results.iter("testcase"):
        outcome = next((part.tag for part in case if part.tag != "properties"), "passed")
        if outcome in ("failure", "error"):
            sys.exit(f"{case.get('name')} failed, so docs/verified.md stays as it is")
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        counts.setdefault(file, Counter())[outcome] += 1
    for file, count in sorted(counts.items()):
        yield [f"`{file}`", str(count.total() - count["skipped"]), str(count["skipped"])]


def _largest_difference(results: ElementTree.Element) -> float:
    """Return the largest value that test_parity.py and its like have recorded."""
    recorded = (one for one in results.iter("property") if one.get("name") == "worst")
    return max((float(one.get("value", "nan")) for one in recorded), default=0.0)


if __name__ == "__main__":
    main()
