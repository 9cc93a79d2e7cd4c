"""The line that a terminal shows while a run trains. It never has more columns than the terminal:
what matters least is left out."""

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 10
_BAR_AFTER = 4  # figures that are more important than the bar
_GAP = 2


class LiveProgress:
    """The last line of the terminal, which shows the newest figures of a run."""

    def __init__(self, console: Console, done: int, total: int):
        self.console, self.done, self.total = console, done, total
        self.left, self.figures = "-:--:--", list[str]()
        self.live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self.live.start()

    def update(self, done: int, left: str, figures: Sequence[str]) -> None:
        """Show that `done` steps are done. `left`: the remaining time; `figures`: the most
        important ones first."""
        self.done, self.left, self.figures = done, left, list(figures)

    def stop(self) -> None:
        """Leave the line as it is, and let the terminal go on below it."""
        self.live.stop()

    def _render(self) -> Table:
        return progress_line(self.console.width, self.done, self.total, self.left, self.figures)


def progress_line(width: int, done: int, total: int, left: str, figures: Sequence[str]) -> Table:
    """Return the bar, the number of the step, the time left and as many figures as fit into this
    number of columns. Step and time always come first; the bar is whole or absent."""
    parts = [f"step {done}/{total}", f"{left} left"]
    used, bar = len(f"{parts[0]}{parts[1]}") + _GAP, 0
    for place, figure in enumerate(figures):
        if place == _BAR_AFTER and used + _GAP + _BAR_WIDTH <= width:
            bar, used = _BAR_WIDTH, used + _GAP + _BAR_WIDTH
        if used + _GAP + len(figure) > width:
            break
        parts.append(figure)
        used += _GAP + len(figure)
    text = Text((" " * _GAP).join(parts), no_wrap=True, overflow="crop")
    line = Table.grid(padding=(0, _GAP, 0, 0))
    if bar:
        line.add_row(ProgressBar(total, done, width=bar), text)
    else:
        line.add_row(text)
    return line
