"""Write the models of docs/verified.md from the cards: python scripts/make_models_table.py"""

import sys
from collections.abc import Iterator

from record_versions import with_section
from verification_card import ROOT, VerificationCard, read_cards

PAGE = ROOT / "docs" / "verified.md"


def with_models(page: str) -> str:
    """Return the page with the table and the figures of all cards."""
    cards = read_cards().values()
    lines = ["| model | status | layouts | worst | machine | date |", "|---" * 6 + "|"]
    lines += [_line(card) for card in cards]
    details = ["\n".join(_details(card)) for card in cards if card.throughput or card.scores]
    return with_section(page, "models", "\n" + "\n\n".join(["\n".join(lines), *details]) + "\n\n")


def _line(card: VerificationCard) -> str:
    worst = f"{max(error.worst for error in card.parity):.1e}" if card.parity else ""
    number = str(len(card.parity) or "")
    cells = (card.model, card.status, number, worst, card.machine or "", card.date or "")
    return f"| {' | '.join(cells)} |"


def _details(card: VerificationCard) -> Iterator[str]:
    """Yield the speeds and scores of a card."""
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    yield f"**{card.model}**: commit {card.commit}, `{card.log}`, {versions}."
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
    PAGE.write_text(with_models(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
