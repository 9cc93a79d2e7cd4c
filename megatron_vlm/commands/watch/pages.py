"""Pages of `megatron-vlm watch`: the list of runs, and the report of a run under a line with its
state."""

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from megatron_vlm.commands.watch.run_status import STATES, RunStatus
from megatron_vlm.commands.watch.watched_runs import WatchedRun
from megatron_vlm.io.printable import number, show_count, time_spent
from megatron_vlm.report.charts import chart_css, chart_scripts
from megatron_vlm.report.html import document, script_of
from megatron_vlm.report.markup import Html, tag

_HERE = Path(__file__).parent
_HEADER = ("run", "state", "step", "loss or reward", "time left", "tokens/s", "changed")
_MAX_ROWS = 1000


def list_page(body: Sequence[Html], keys: Sequence[str]) -> str:
    """Return the page with all runs."""
    return _live_page("Runs", "/", [], body, keys)


def run_page(run: WatchedRun, body: Sequence[Html], keys: Sequence[str]) -> str:
    """Return the page of a run. The keys tell its elements apart."""
    tab = f"{run.name}: training report"
    return _live_page(tab, run_address(run), [status_bar(run.status)], body, keys)


def run_address(run: WatchedRun) -> str:
    """Return the path of a run on the server, which begins with a slash."""
    return "/" + quote(run.name, errors="surrogateescape")


def list_body(folders: Sequence[Path], found: Sequence[WatchedRun]) -> list[Html]:
    """Return the elements of the list of runs below some folders."""
    runs = sorted(found, key=_newest_first)
    counts = Counter(run.status.state for run in runs)
    tiles = [
        tag("div", tag("b", f"{counts[state]:,}"), tag("span", state), class_="card")
        for state in STATES
        if counts[state]
    ]
    where = " \u00b7 ".join(map(str, folders))
    body = [tag("h1", "Runs"), tag("p", where, class_="quiet")]
    if not runs:
        none = "There is no run yet. A run appears here as soon as its folder is written."
        return [*body, tag("p", none, class_="note")]
    body.append(tag("div", *tiles, class_="tiles", style=f"--columns: {max(4, len(tiles))}"))
    rows = [tag("tr", *(tag("th", name) for name in _HEADER))]
    rows += [_row(run) for run in runs[:_MAX_ROWS]]
    more = len(runs) - _MAX_ROWS
    caption = [tag("caption", f"and {show_count(more, 'run')} more")] if more > 0 else []
    body.append(tag("div", tag("table", *caption, *rows), class_="card scroll runs-table"))
    return body


def _newest_first(run: WatchedRun) -> tuple[bool, float, str]:
    # A run that is active stays in its place: its last change is always the newest.
    active = run.status.is_active
    return not active, 0.0 if active else -run.status.changed, run.name


def _row(run: WatchedRun) -> Html:
    status = run.status
    why = [tag("span", status.why, title=status.why)] if status.why else []
    figure, value = status.figure or ("loss", None)
    cells = {
        "step": _steps(status),
        figure: "" if value is None else number(value),
        "time left": "" if status.seconds_left is None else time_spent(status.seconds_left),
        "tokens/s": "" if status.tokens_per_s is None else number(status.tokens_per_s),
        "changed": _time(status.changed),
    }
    return tag(
        "tr",
        tag("td", tag("a", run.name, href=f"/runs{run_address(run)}")),
        tag("td", _badge(status), *why),
        *(tag("td", text, data_name=name) for name, text in cells.items()),
    )


def _badge(status: RunStatus) -> Html:
    return tag("b", tag("i"), status.state, class_=f"state {status.state.replace(' ', '-')}")


def _steps(status: RunStatus) -> str:
    if status.step is None:
        return ""
    return f"{status.step:,}" + (f" / {status.total:,}" if status.total else "")


def _time(stamp: float) -> str:
    if not stamp:
        return ""
    return datetime.datetime.fromtimestamp(stamp).isoformat(" ", "minutes")


def status_bar(status: RunStatus) -> Html:
    """Return the line with the state of a run, and the figures of its last steps."""
    facts = []
    if status.step is not None:
        facts.append(f"step {_steps(status)}")
    if status.figure is not None:
        name, value = status.figure
        facts.append(f"{name} {number(value)}")
    if status.tokens_per_s is not None:
        facts.append(f"{number(status.tokens_per_s)} tokens/s")
    if status.seconds_left is not None:
        facts.append(f"{time_spent(status.seconds_left)} left")
    words = [tag("span", fact) for fact in facts]
    why = [tag("em", status.why, class_="quiet")] if status.why else []
    known = {"class_": "status", "data_state": status.state}
    return tag("span", _badge(status), " ", *words, *why, **known)


def _live_page(
    title: str, address: str, top: Sequence[Html], body: Sequence[Html], keys: Sequence[str]
) -> str:
    crumb = [tag("a", "\u2190 runs", href="/")] if address != "/" else []
    lost = tag("span", class_="lost alarm", hidden="")
    bar = tag("header", *crumb, *top, lost)
    off = tag("noscript", tag("p", "This page grows by JavaScript, which is off.", class_="alarm"))
    main = tag("main", *body, data_address=address, data_keys=" ".join(keys))
    css = chart_css() + (_HERE / "watch.css").read_text()
    live = (_HERE / "live.js").read_text()
    scripts = [live, *chart_scripts(), script_of("copy"), script_of("paging")]
    return document(title, css, [bar, off, main], scripts, is_served=True)
