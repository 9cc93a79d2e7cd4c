"""An agreement in the terminal: a line for each prompt, the worst token, the verdict."""

from rich.console import Console
from rich.text import Text

from megatron_vlm.commands.agree import agree_tables
from megatron_vlm.commands.agree.compare import Agreement
from megatron_vlm.commands.agree.token_text import TokenText
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.terminal import plain_table

_CONTEXT = 40  # characters before the worst token


def print_agreement(agreement: Agreement, words: TokenText, console: Console) -> None:
    """Print the whole agreement. Text of a record is never markup."""

    def line(text: str) -> None:
        console.print(Text(escape_controls(text)), soft_wrap=True)

    line(agree_tables.settings(agreement))
    table = plain_table()
    for place, name in enumerate(agree_tables.PROMPTS):
        table.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
    for prompt in agreement.prompts:
        table.add_row(*(Text(escape_controls(cell)) for cell in agree_tables.prompt_cells(prompt)))
    console.print(table)
    for sentence in agree_tables.unlike_ids(agreement, words):
        line(sentence)
    for prompt, token in agreement.worst_tokens(1):
        before, text, _ = words.split_around(prompt, token)
        line(
            f"worst token: {text!r} after {before[-_CONTEXT:]!r}, token {token.place} of the "
            f"answer to {prompt.where}: engine {token.engine:.6f}, trainer {token.trainer:.6f}"
        )
    line(", ".join(f"{name}: {value}" for value, name in agree_tables.agree_figures(agreement)))
    line(agree_tables.verdict_sentence(agreement))
