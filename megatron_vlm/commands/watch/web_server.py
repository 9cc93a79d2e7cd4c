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

from markupsafe import Markup

from megatron_vlm.commands.watch.watched_runs import STATES, RunStatus, WatchedRun, WatchedRuns
from megatron_vlm.io.loopback import is_loopback_host
from megatron_vlm.io.untrusted import reason
from megatron_vlm.report.charts import chart_css, chart_scripts
from megatron_vlm.report.html import document, fill_template, script_of

_HERE = Path(__file__).parent


def live_page(body: Sequence[Markup], run: WatchedRun | None = None) -> str:
    """Return the page of a run, or of the list of runs, whose elements have keys to tell them
    apart."""
    title, address, status = "Runs", "/", Markup()
    if run is not None:
        title, address = f"{run.name}: training report", run_address(run)
        status = status_bar(run.status)
    keys = [*keyed(body)]
    known = dict(address=address, status=status, body=body, keys=keys)
    css = chart_css() + (_HERE / "watch.css").read_text()
    live = (_HERE / "live.js").read_text()
    scripts = [live, *chart_scripts(), script_of("copy"), script_of("paging")]
    return document(
        title, css, [fill_template("commands/watch/page", **known)], scripts, is_served=True
    )


def run_address(run: WatchedRun) -> str:
    """Return the path of a run on the server, which begins with a slash."""
    return "/" + quote(run.name, errors="surrogateescape")


def list_body(folders: Sequence[Path], found: Sequence[WatchedRun]) -> list[Markup]:
    """Return the list of runs below some folders."""
    runs = sorted(found, key=_newest_first)
    counts = Counter(run.status.state for run in runs)
    known = {state: counts[state] for state in STATES if counts[state]}
    where = " \u00b7 ".join(map(str, folders))
    texts = dict(address=run_address, date_time=_date_time)
    return [fill_template("commands/watch/list", where=where, counts=known, runs=runs, **texts)]


def _newest_first(run: WatchedRun) -> tuple[bool, float, str]:
    # A run that is active stays in its place: its last change is always the newest.
    active = run.status.is_active
    return not active, 0.0 if active else -run.status.changed, run.name


def _date_time(stamp: float) -> str:
    return datetime.datetime.fromtimestamp(stamp).isoformat(" ", "minutes")


def status_bar(status: RunStatus) -> Markup:
    """Return the line with the state of a run, and the figures of its last steps."""
    return fill_template("commands/watch/status", now=status)


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
            return _Answer(live_page(body))
        if kind in ("runs", "parts") and (run := runs.get(name)) is not None:
            body = runs.page(run)
            if kind == "parts":
                return _parts(status_bar(run.status), body, known)
            return _Answer(live_page(body, run))
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


def _parts(status: str, body: Sequence[Markup], known: Sequence[str]) -> _Answer:
    """Return the keys of all elements, and the elements that the page lacks."""
    parts = [(key, None if key in known else each) for key, each in keyed(body).items()]
    return _Answer(json.dumps({"status": status, "parts": parts}), 200, "application/json")


def keyed(body: Sequence[Markup]) -> dict[str, Markup]:
    """Return elements by keys that tell them apart: equal elements are numbered."""
    counts: Counter[str] = Counter()
    elements = {}
    for each in body:
        counts[each] += 1
        text = f"{counts[each]} {each}".encode(errors="replace")
        elements[hashlib.blake2b(text, digest_size=8).hexdigest()] = each
    return elements
