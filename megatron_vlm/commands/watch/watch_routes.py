"""The web application of `megatron-vlm watch`: pages, their events, and the two buttons.

A page is sent once. Its events then tell the new points of charts and, at times, that the rest has
changed, which the page fetches.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_vlm.commands.watch.access import LocalOnly
from megatron_vlm.commands.watch.control import can_resume, resume_command, resume_run, stop_run
from megatron_vlm.commands.watch.live_run import LiveRun, ReadPosition
from megatron_vlm.commands.watch.monitor import Monitor, WatchedRun
from megatron_vlm.commands.watch.pages import (
    broken_report,
    list_body,
    list_page,
    run_page,
    state_report,
    status_bar,
    with_remedy,
)
from megatron_vlm.commands.watch.run_status import BROKEN, RUNNING
from megatron_vlm.errors import MegatronVLMError
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.html import page_body
from megatron_vlm.report.sections import Report

_SILENCE = 20.0  # seconds after which a comment keeps a connection open
_TIMES_COST = 20  # a page is drawn again after so many times what that took


@dataclass
class Watch:
    """The state of the application. `pause` is the least number of seconds between two drawings of
    a page; between them its charts grow."""

    monitor: Monitor
    token: str | None = None
    pause: float = 2.0

    def __post_init__(self) -> None:
        self.costs: dict[str, float] = {}  # seconds that a drawing of a run took
        self.started: list[subprocess.Popen[bytes]] = []

    def draw(self, run: WatchedRun) -> tuple[Report, str]:
        """Return the report of a run as it is now, and the place up to which it has the lines."""
        if run.status.state == BROKEN:
            return state_report(run), ""
        live = self.monitor.open_run(run)
        try:
            with live.lock:
                live.read_on()
                if not live.place.rows and run.status.step is None:
                    return with_remedy(state_report(run), run), str(live.place)
                return with_remedy(live.report(), run), str(live.place)
        except (MegatronVLMError, OSError) as error:
            return broken_report(run, error), ""

    def end_of_started(self) -> None:
        """Let go of the processes of resumed runs that have ended."""
        self.started = [process for process in self.started if process.poll() is None]


def make_watch_app(watch: Watch) -> Starlette:
    """Build the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with watch.monitor.looking():
            yield

    def route(path: str, answer: Callable[..., Any], method: str = "GET") -> Route:
        return Route(path, functools.partial(answer, watch), methods=[method])

    return Starlette(
        routes=[
            route("/", _show_list),
            route("/parts/", _list_parts),
            route("/events/", _list_events),
            route("/runs/{name:path}", _show_run),
            route("/parts/{name:path}", _run_parts),
            route("/events/{name:path}", _run_events),
            route("/stop/{name:path}", _stop, "POST"),
            route("/resume/{name:path}", _resume, "POST"),
        ],
        middleware=[Middleware(LocalOnly)],
        lifespan=lifespan,
    )


async def _show_list(watch: Watch, _: Request) -> Response:
    return HTMLResponse(list_page(watch.monitor))


async def _list_parts(watch: Watch, _: Request) -> Response:
    return JSONResponse({"body": "".join(list_body(watch.monitor)), "place": ""})


async def _list_events(watch: Watch, _: Request) -> Response:
    async def events() -> AsyncIterator[str]:
        monitor, seen = watch.monitor, -1  # what came since the page was sent is not known
        yield "retry: 1000\n\n"
        while not monitor.is_closing:
            await monitor.wait_for_change(lambda: monitor.version, seen, _SILENCE)
            if monitor.version == seen:
                yield ": here\n\n"
                continue
            seen = monitor.version
            yield _event("refresh", {})
            await asyncio.sleep(watch.pause / 2)

    return _stream(events())


async def _show_run(watch: Watch, request: Request) -> Response:
    run = _find(watch, request)
    if run is None:
        return HTMLResponse(_no_run(request), 404)
    report, place = await asyncio.to_thread(watch.draw, run)
    return HTMLResponse(run_page(run, report, place, watch.token is not None))


async def _run_parts(watch: Watch, request: Request) -> Response:
    run = _find(watch, request)
    if run is None:
        return JSONResponse({"error": _no_run(request)}, 404)
    loop = asyncio.get_running_loop()
    began = loop.time()
    report, place = await asyncio.to_thread(watch.draw, run)
    body = await asyncio.to_thread(lambda: "".join(page_body(report)))
    watch.costs[run.name] = loop.time() - began
    return JSONResponse({"body": body, "place": place})


async def _run_events(watch: Watch, request: Request) -> Response:
    run = _find(watch, request)
    if run is None:
        return Response(status_code=404)
    after = request.headers.get("last-event-id") or request.query_params.get("after", "")
    return _stream(_events_of_run(watch, run, ReadPosition.parse(after)))


async def _events_of_run(
    watch: Watch, run: WatchedRun, place: ReadPosition | None
) -> AsyncIterator[str]:
    """Yield what changes: the state, new points, and that the page is to be drawn again."""
    monitor, loop = watch.monitor, asyncio.get_running_loop()
    live = monitor.open_run(run)
    version, drawn = -1, loop.time()
    is_stale = place is None
    yield "retry: 1000\n\n"
    while not monitor.is_closing:
        pause = max(watch.pause, _TIMES_COST * watch.costs.get(run.name, 0.0))
        left = max(0.0, drawn + pause - loop.time()) if is_stale else _SILENCE
        await monitor.wait_for_change(lambda: _version(monitor, run), version, left)
        if monitor.runs.get(run.name) is not run:
            yield _event("gone", {})
            return
        if run.version != version:
            is_first, version = version < 0, run.version
            yield _event("status", _status(run))
            points, now = await asyncio.to_thread(_new_points, live, place)
            if points is not None:
                yield _event("points", points, str(now))
            # After a pause the tiles and tables follow, and what is in other files.
            is_stale = is_stale or now != place or not is_first
            place = now
        elif not is_stale:
            yield ": here\n\n"
        if is_stale and loop.time() >= drawn + pause:
            yield _event("refresh", {}, str(place))
            is_stale, drawn = False, loop.time()


def _version(monitor: Monitor, run: WatchedRun) -> int:
    return run.version if monitor.runs.get(run.name) is run else -2


def _new_points(
    live: LiveRun, place: ReadPosition | None
) -> tuple[dict[str, Any] | None, ReadPosition]:
    """Return the points after a place, or None where there are none to send, and the new place."""
    with live.lock:
        with contextlib.suppress(MegatronVLMError, OSError):  # the state tells it
            live.read_on()
        now = live.place
        return None if place is None or now == place else live.points_after(place), now


def _status(run: WatchedRun) -> dict[str, Any]:
    acts = []
    if run.status.state == RUNNING:
        acts.append("stop")
    if can_resume(run.status) and resume_command(run.folder) is not None:
        acts.append("resume")
    return {"html": status_bar(run.status), "acts": acts}


async def _stop(watch: Watch, request: Request) -> Response:
    return await _act(watch, request, lambda run: stop_run(run.folder))


async def _resume(watch: Watch, request: Request) -> Response:
    def act(run: WatchedRun) -> str:
        watch.end_of_started()
        watch.started.append(resume_run(run.folder, run.status))
        return "It is started again; its output goes to resumed.log in its folder."

    return await _act(watch, request, act)


async def _act(watch: Watch, request: Request, act: Callable[[WatchedRun], str]) -> Response:
    if watch.token is None:
        return JSONResponse({"said": "This server was started without --control."}, 403)
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), watch.token.encode()):
        return JSONResponse({"said": "The token is not that of the server."}, 403)
    run = _find(watch, request)
    if run is None:
        return JSONResponse({"said": _no_run(request)}, 404)
    try:
        return JSONResponse({"said": await asyncio.to_thread(act, run)})
    except (MegatronVLMError, OSError) as error:
        return JSONResponse({"said": escape_controls(str(error))}, 409)


def _find(watch: Watch, request: Request) -> WatchedRun | None:
    """Return the run with the name in the address. Only runs that were found have one, so no
    address leads anywhere else."""
    return watch.monitor.runs.get(request.path_params["name"])


def _no_run(_: Request) -> str:
    return "There is no run of this name."


def _event(name: str, data: dict[str, Any], place: str = "") -> str:
    """Return an event. JSON has no line breaks, which would end it."""
    text = f"event: {name}\ndata: {json.dumps(data)}\n"
    return text + (f"id: {place}\n\n" if place else "\n")


def _stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream")
