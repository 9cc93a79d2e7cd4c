"""Pages of `megatron-vlm watch`: the list of runs, and the report of a run under a line with its
state."""

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from megatron_vlm.commands.watch.control import resume_words
from megatron_vlm.commands.watch.monitor import Monitor, WatchedRun
from megatron_vlm.commands.watch.run_status import STATES, RunStatus
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.io.numbers_as_text import number, time_spent
from megatron_vlm.io.printable import show_count
from megatron_vlm.report.charts import chart_css, chart_scripts
from megatron_vlm.report.heat import heat_css, heat_script
from megatron_vlm.report.html import copy_script, document, page_body, paging_script
from megatron_vlm.report.markup import Html, tag
from megatron_vlm.report.sections import Command, Heading, Note, Report, Section

_HERE = Path(__file__).parent
_HEADER = ("run", "state", "step", "loss", "time left", "tokens/s", "changed")
_MAX_ROWS = 1000


def list_page(monitor: Monitor) -> str:
    """Return the page with all runs."""
    return _live_page("Runs", "/", "", [], list_body(monitor))


def run_page(run: WatchedRun, report: Report, place: str, has_control: bool) -> str:
    """Return the page of a run with the lines up to a place."""
    top = [status_bar(run.status), *(_buttons() if has_control else ())]
    return _live_page(report.tab, run_address(run), place, top, [*page_body(report)])


def run_address(run: WatchedRun) -> str:
    """Return the path of a run on the server, which begins with a slash."""
    return "/" + quote(run.name, errors="surrogateescape")


def list_body(monitor: Monitor) -> list[Html]:
    """Return the elements of the list."""
    runs = sorted(monitor.runs.values(), key=_newest_first)
    counts = Counter(run.status.state for run in runs)
    tiles = [
        tag("div", tag("b", f"{counts[state]:,}"), tag("span", state), class_="card")
        for state in STATES
        if counts[state]
    ]
    where = " \u00b7 ".join(str(folder) for folder in monitor.folders)
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
    known = [
        tag("td", tag("a", run.name, href=f"/runs{run_address(run)}")),
        tag(
            "td",
            _badge(status),
            *([tag("span", status.why, title=status.why)] if status.why else []),
        ),
        tag("td", _steps(status)),
        tag("td", "-" if status.loss is None else number(status.loss)),
        tag("td", "-" if status.seconds_left is None else time_spent(status.seconds_left)),
        tag("td", "-" if status.tokens_per_s is None else number(status.tokens_per_s)),
        tag("td", _time(status.changed)),
    ]
    return tag("tr", *known)


def _badge(status: RunStatus) -> Html:
    return tag("b", tag("i"), status.state, class_=f"state {status.state.replace(' ', '-')}")


def _steps(status: RunStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step:,}" + (f" / {status.total:,}" if status.total else "")


def _time(stamp: float) -> str:
    if not stamp:
        return "-"
    return datetime.datetime.fromtimestamp(stamp).isoformat(" ", "minutes")


def status_bar(status: RunStatus) -> Html:
    """Return the line with the state of a run, and the figures of its last steps."""
    facts = []
    if status.step is not None:
        facts.append(f"step {_steps(status)}")
    if status.loss is not None:
        facts.append(f"loss {number(status.loss)}")
    if status.tokens_per_s is not None:
        facts.append(f"{number(status.tokens_per_s)} tokens/s")
    if status.seconds_left is not None:
        facts.append(f"{time_spent(status.seconds_left)} left")
    words = [tag("span", fact) for fact in facts]
    why = [tag("em", status.why, class_="quiet")] if status.why else []
    known = {"class_": "status", "data_state": status.state}
    return tag("span", _badge(status), " ", *words, *why, **known)


def state_report(run: WatchedRun) -> Report:
    """Return the report of a run that has no lines to show."""
    tone = "quiet" if run.status.is_active else "alarm"
    note = Note(run.status.why or "It has no lines yet.", "alarm" if tone == "alarm" else "quiet")
    return Report(f"{run.name}: training report", run.name, [], [note], [])


def broken_report(run: WatchedRun, error: MegatronVLMError | OSError) -> Report:
    """Return the report of a run whose files cannot be read."""
    return Report(f"{run.name}: training report", run.name, [], [Note(str(error), "alarm")], [])


def with_remedy(report: Report, run: WatchedRun) -> Report:
    """Return the report with the command that goes on with a run that has ended too early."""
    words = resume_words(run.folder, run.status)
    if words is None:
        return report
    told: list[Section] = [Heading("Resume", "Resume"), Command("It goes on with: ", words)]
    sections: Sequence[Section] = [*report.sections, *told]
    return Report(report.tab, report.title, report.lead, report.summary, sections)


def _buttons() -> Iterator[Html]:
    for name, title in (
        ("stop", "save a checkpoint and stop, as SIGTERM does"),
        ("resume", "start the run again from its newest checkpoint"),
    ):
        yield tag("button", name, title=title, data_act=name, hidden="")
    yield tag("output", class_="quiet")


def _live_page(
    title: str, address: str, place: str, top: Sequence[Html], body: Sequence[Html]
) -> str:
    crumb = [tag("a", "\u2190 runs", href="/")] if address != "/" else []
    lost = tag("span", "The server does not answer.", class_="lost alarm", hidden="")
    bar = tag("header", *crumb, *top, lost)
    off = tag("noscript", tag("p", "This page grows by JavaScript, which is off.", class_="alarm"))
    main = tag("main", *body, data_address=address, data_place=place)
    css = chart_css() + heat_css() + (_HERE / "watch.css").read_text()
    scripts = [
        (_HERE / "live.js").read_text(),
        *(*chart_scripts(), heat_script(), copy_script(), paging_script()),
    ]
    return document(title, css, [bar, off, main], scripts, is_served=True)
