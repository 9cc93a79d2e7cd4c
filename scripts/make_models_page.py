"""Write docs/models.md from the cards: python scripts/make_models_page.py"""

import sys
from collections.abc import Iterator

from verification_card import ROOT, CardStatus, VerificationCard, read_cards

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

Each model has a verification card in `cards/`: what was checked, with which versions, on which
machine and when. `make lint` checks the cards, and this page is made from them. `make card
CARD=tiny-qwen3-vl` fills one from its parity tests, `GPU=.gpu` from `make gpu`, and
`BENCH=runs/first` from [benchmarks](evaluation.md#public-benchmarks).

A model that is "not measured" has the architecture of the tiny one of its family, whose parity is
below, and its recipe is checked by the planner and by dry runs. Its own weights were not trained
here. Parity is the worst relative error of losses, log-probs and gradients against transformers
([parity](parity.md)).

"""


def models_page() -> str:
    """Return the page."""
    cards = read_cards()
    lines = ["| model | family | recipe | status | layouts | worst | date |", "|---" * 7 + "|"]
    lines += [_line(card) for card in cards.values()]
    measured = [card for card in cards.values() if card.status != CardStatus.not_measured]
    details = ["\n".join(_details(card)) for card in measured]
    return HEAD + "\n\n".join(["\n".join(lines), *details]) + "\n"


def _line(card: VerificationCard) -> str:
    recipe = f"`model={card.recipe}`" if card.recipe else ""
    worst = f"{max(error.worst for error in card.parity):.1e}" if card.parity else ""
    number = str(len(card.parity) or "")
    cells = (card.model, card.family, recipe, card.status, number, worst, card.date or "")
    return f"| {' | '.join(cells)} |"


def _details(card: VerificationCard) -> Iterator[str]:
    """Yield the lines of a card that has figures."""
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    yield f"## {card.model}\n"
    yield f"{card.date}, commit {card.commit}, {card.machine}: `{card.log}`.\n"
    yield f"{versions}.\n"
    if card.parity:
        yield "| layout | worst | tolerance |\n|---|---|---|"
        yield from (f"| {e.layout} | {e.worst:.1e} | {e.tolerance:.0e} |" for e in card.parity)
    if card.throughput:
        yield "\n| setting | tokens per second |\n|---|---|"
        yield from (f"| {each.setting} | {each.tokens_per_s:,.0f} |" for each in card.throughput)
    if card.scores:
        yield "\n| task | before | after | difference | standard error |\n|---|---|---|---|---|"
        for each in card.scores:
            change = f"{each.after - each.before:+.3f}"
            error = "" if each.standard_error is None else f"{each.standard_error:.3f}"
            yield f"| {each.task} | {each.before:.3f} | {each.after:.3f} | {change} | {error} |"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(models_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
