"""Verification cards: what was checked of a model, with which versions, where and when.

Each file of cards/ is one card. `python scripts/verification_card.py` checks them all.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_vlm.family import families

ROOT = Path(__file__).parent.parent
CARDS = ROOT / "cards"


class CardStatus(StrEnum):
    """The result of a card."""

    passed = "passed"
    failed = "failed"
    not_measured = "not measured"


@dataclass
class LayoutError:
    """The worst relative error of loss, log-probs and gradients at a layout."""

    layout: str
    worst: float
    tolerance: float


@dataclass
class Speed:
    """Tokens per second of a training step."""

    setting: str
    tokens_per_s: float


@dataclass
class Score:
    """The score of a task before and after training."""

    task: str
    before: float
    after: float
    standard_error: float | None  # The difference has this error. None if it is not known.


@dataclass
class VerificationCard:
    """A file of cards/."""

    model: str
    family: str  # its model_type in config.json
    status: str
    recipe: str | None = None  # a file of configs/model
    parity_tests: list[str] = field(default_factory=list)  # with the node ids of pytest
    date: str | None = None
    commit: str | None = None
    machine: str | None = None
    log: str | None = None  # the command that measured
    versions: dict[str, str] = field(default_factory=dict)
    parity: list[LayoutError] = field(default_factory=list)
    throughput: list[Speed] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def has_figures(self) -> bool:
        """True if anything was measured."""
        return bool(self.parity or self.throughput or self.scores)


class CardError(ValueError):
    """A card that is not right, with its file and field."""


def read_card(path: Path) -> VerificationCard:
    """Return a card, or raise a CardError that names its first mistake."""
    try:
        values = yaml.safe_load(path.read_text())
        card = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(VerificationCard), values))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise CardError(f"{path.name}: {str(error).splitlines()[0]}") from None
    assert isinstance(card, VerificationCard)
    for problem in _problems(card):
        raise CardError(f"{path.name}: {problem}")
    return card


def _problems(card: VerificationCard) -> Iterator[str]:
    """Yield what is wrong with a card, in the order of its fields."""
    if card.family not in families():
        yield f"family: {card.family} is none of {', '.join(families())}"
    if card.status not in set(CardStatus):
        yield f"status: {card.status} is none of {', '.join(CardStatus)}"
    recipes = {path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")}
    if card.recipe is not None and card.recipe not in recipes:
        yield f"recipe: there is no configs/model/{card.recipe}.yaml"
    is_measured = card.status != CardStatus.not_measured
    origin = {
        name: getattr(card, name) for name in ("date", "commit", "machine", "log", "versions")
    }
    for name, value in {**origin, "figures": card.has_figures}.items():
        if bool(value) != is_measured:
            yield f"{name}: a card that is {card.status} has {'some' if is_measured else 'none'}"
    if card.date is not None and not _is_date(card.date):
        yield f"date: {card.date} is not YYYY-MM-DD"
    held = all(error.worst <= error.tolerance for error in card.parity)
    if is_measured and held != (card.status == CardStatus.passed):
        yield f"status: {card.status}, but the errors are {'' if held else 'not '}all in tolerance"


def _is_date(text: str) -> bool:
    try:
        return str(date.fromisoformat(text)) == text
    except ValueError:
        return False


def read_cards() -> dict[str, VerificationCard]:
    """Return all cards by their name, the smallest model first."""
    return {path.stem: read_card(path) for path in sorted(CARDS.glob("*.yaml"), key=_by_size)}


def _by_size(path: Path) -> list[str | float]:
    """Return the words and numbers of a name, by which 8b comes before 32b."""
    parts = re.split(r"(\d+(?:\.\d+)?)", path.stem)
    return [float(part) if number % 2 else part for number, part in enumerate(parts)]


def write_card(name: str, card: VerificationCard) -> None:
    """Write a card, without the fields that are empty."""
    values = {key: value for key, value in asdict(card).items() if value not in (None, [], {})}
    path = CARDS / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))
    read_card(path)


def main() -> int:
    """Check all cards."""
    try:
        read_cards()
    except CardError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
