"""An agreement as one HTML page: figures, two plots, a table of prompts, the worst tokens."""

from collections.abc import Iterator
from pathlib import Path

from megatron_vlm.commands.agree import agree_tables
from megatron_vlm.commands.agree.compare import Agreement, ComparedPrompt, TokenPair
from megatron_vlm.commands.agree.plots import plots
from megatron_vlm.commands.agree.token_text import TokenText
from megatron_vlm.data.media.media import data_uri
from megatron_vlm.report.html import Html, document, table, tag, tiles

_WORST = 8  # tokens that are shown


def render_agreement(agreement: Agreement, words: TokenText) -> str:
    """Return the whole page."""
    css = Path(__file__).with_name("agreement.css").read_text()
    return document("Engine and trainer", css, _body(agreement, words))


def _body(agreement: Agreement, words: TokenText) -> Iterator[Html]:
    yield tag("h1", "They differ" if agreement.faults else "Engine and trainer agree")
    yield tag("p", agreement.model, class_="quiet")
    yield tag("p", f"{agree_tables.settings(agreement)}.", class_="quiet")
    yield tiles(agree_tables.agree_figures(agreement))
    kind = "alarm" if agreement.faults else "right"
    yield tag("p", agree_tables.verdict_sentence(agreement), class_=f"verdict {kind}")
    for sentence in agree_tables.unlike_ids(agreement, words):
        yield tag("p", sentence, class_="alarm")
    if len(agreement.differences):
        yield tag("h2", "Log-probs of the tokens that were drawn")
        yield plots(agreement)
    yield tag("h2", "Prompts")
    caption = (
        "Shows: sizes of pictures in patches. Patches: the largest difference of normalised values "
        "as the vision tower gets them; two bytes that follow each other are 0.0078 apart."
    )
    yield table(agree_tables.PROMPTS, map(agree_tables.prompt_cells, agreement.prompts), caption)
    if worst := agreement.worst_tokens(_WORST):
        yield tag("h2", "The tokens that differ most")
        yield tag("div", *(_card(*each, words) for each in worst), class_="tokens")


def _card(prompt: ComparedPrompt, token: TokenPair, words: TokenText) -> Html:
    before, text, after = words.split_around(prompt, token)
    pictures = [tag("img", src=data_uri(p), alt="") for p in words.pictures(prompt.prompt)]
    where = f"{prompt.where}, token {token.place} of the answer"
    details = (
        f"engine {token.engine:.6f} \u00b7 trainer {token.trainer:.6f} \u00b7 id {token.id} "
        f"{text!r}"
    )
    return tag(
        "article",
        tag(
            "p",
            tag("b", agree_tables.small_number(token.difference)),
            " ",
            tag("span", where, class_="quiet"),
        ),
        *([tag("div", *pictures, class_="pictures")] if pictures else []),
        tag("p", before, tag("mark", text or "\u2400"), after, class_="said"),
        tag("p", details, class_="quiet"),
        class_="card",
    )
