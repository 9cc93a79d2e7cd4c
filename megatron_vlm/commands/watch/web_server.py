"""The server of `megatron-vlm watch` and its pages: the list of runs, and the report of a run under
a line with its state. It answers only on this machine."""

import datetime
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from megatron_vlm.commands.watch.run_status import STATES, RunStatus
from megatron_vlm.commands.watch.watched_runs import WatchedRun, WatchedRuns
from megatron_vlm.io.loopback import is_loopback_host
from megatron_vlm.io.printable import number, show_count, time_spent
from megatron_vlm.io.untrusted import reason
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


_ADDRESS = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SILENCE_S = 5  # after which a connection is closed
_SENDING_S = 60  # for an answer, through a slow tunnel too


@dataclass(frozen=True)
class _Answer:
    text: str
    code: int = 200
    kind: str = "text/html"


_FOREIGN = _Answer(
    "megatron-vlm watch answers only its own pages, at a loopback address\n", 403, "text/plain"
)


class WatchServer(ThreadingHTTPServer):
    """A server on loopback with a thread for each request, so that none waits for another."""

    request_queue_size = 128

    def __init__(self, port: int, folders: Sequence[Path]):
        self.runs = WatchedRuns(folders)
        super().__init__((_ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer would ask for the name of the machine

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a reader who leaves in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENCE_S
    server: WatchServer

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def version_string(self) -> str:
        return "megatron-vlm"

    def do_GET(self) -> None:
        try:
            answer = _FOREIGN if self._is_foreign() else self._answer()
        except Exception as error:  # the page tells it, and the server goes on
            answer = _Answer(f"The server failed: {reason(error)}.", 500, "text/plain")
        self._send(answer)

    def _answer(self) -> _Answer:
        url = urlsplit(self.path)
        _, kind, name = [*unquote(url.path).split("/", 2), "", ""][:3]
        known = parse_qs(url.query).get("have", [""])[0].split(",")
        runs = self.server.runs
        if kind == "" or (kind, name) == ("parts", ""):
            body = list_body(runs.folders, runs.all())
            if kind == "parts":
                return _parts("", body, known)
            return _Answer(list_page(body, [*keyed(body)]))
        if kind in ("runs", "parts") and (run := runs.get(name)) is not None:
            body = runs.page(run)
            if kind == "parts":
                return _parts(status_bar(run.status), body, known)
            return _Answer(run_page(run, body, [*keyed(body)]))
        return _Answer("There is no run of this name.", 404, "text/plain")

    def _send(self, answer: _Answer) -> None:
        content = answer.text.encode(errors="replace")
        self.connection.settimeout(_SENDING_S)
        self.send_response(answer.code)
        if "gzip" in self.headers.get("Accept-Encoding", ""):  # a tunnel may be slow
            content = gzip.compress(content, 1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _is_foreign(self) -> bool:
        """Return whether the request is for another host, or comes from a page of another one. A
        reader may follow a link from there."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not is_loopback_host(host):
            return True
        site = self.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and origin is None:
            return self.headers.get("Sec-Fetch-Mode") != "navigate"
        return origin not in (None, f"http://{host}", f"https://{host}")


def _parts(status: str, body: Sequence[Html], known: Sequence[str]) -> _Answer:
    """Return the keys of all elements, and the elements that the page lacks."""
    parts = [(key, None if key in known else each) for key, each in keyed(body).items()]
    return _Answer(json.dumps({"status": status, "parts": parts}), 200, "application/json")


def keyed(body: Sequence[Html]) -> dict[str, Html]:
    """Return elements by keys that tell them apart: equal elements are numbered."""
    counts: Counter[str] = Counter()
    elements = {}
    for each in body:
        counts[each] += 1
        text = f"{counts[each]} {each}".encode(errors="replace")
        elements[hashlib.blake2b(text, digest_size=8).hexdigest()] = each
    return elements
