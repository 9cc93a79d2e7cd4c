# .venv/bin/python -m pytest tests/test_watch.py
"""Runs in the browser while they train: states, events with only the new lines, access, buttons."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest

from megatron_vlm.cli import main
from megatron_vlm.commands.watch.command import listen
from megatron_vlm.commands.watch.control import read_token, resume_command, stop_run
from megatron_vlm.commands.watch.live_run import LiveRun
from megatron_vlm.commands.watch.monitor import Monitor
from megatron_vlm.commands.watch.run_finder import watched_folders
from megatron_vlm.commands.watch.run_status import StatusReader
from megatron_vlm.commands.watch.watch_routes import Watch, make_watch_app
from megatron_vlm.commands.watch.web_server import make_server
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.report.metrics_lines import STOPPED, StepLine, from_json
from megatron_vlm.report.run import read_report
from megatron_vlm.report.run.growing_lines import GrowingLines
from megatron_vlm.report.run.step_rows import STEP_FIELDS, step_row
from megatron_vlm.run.job_lock import hold_job_lock, read_job
from tests.browser import start_browser
from tests.error_fields import raises
from tests.report_facts import Facts, in_a_browser
from tests.sets import write_set
from tests.test_rl_report import episode, prompt, rl
from tests.test_run_report import HOSTILE, evaluation, event, start, step, write_run
from tests.test_train import command, outside_of_jobs, steps_of

TOKEN = "a-token-of-more-than-20-letters"
USAGE = {
    "kind": "usage",
    "step": 2,
    "memory_gb": [2.5, 1.5],
    "seconds": {"data": 1, "optimizer": 3},
}


def append(run, *lines, tail=""):
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + tail)


@contextlib.contextmanager
def held(run):
    """Hold the lock of a run as its job does."""
    with open(run / "job.lock", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since now")
        file.flush()
        yield


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "first", [start(), *(step(i, 3 / i) for i in (1, 2))])


@contextlib.contextmanager
def served(folder, token=None, started=None):
    """Serve a folder on a free port, and yield the address. It looks at the runs as often as it
    can. The processes that it has started go into a list."""
    monitor = Monitor([folder], interval=0.01)
    watch = Watch(monitor, token, pause=0.0)
    server = make_server(make_watch_app(watch), monitor)
    listener = listen(0)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        if started is not None:
            started += watch.started


def events_of(lines):
    """Yield the name and the data of each event of a stream."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def state(run):
    return StatusReader(run).read()


def test_states_are_told_by_the_log_and_the_lock(run):
    assert state(run).state == "killed" and "after step 2" in state(run).why
    with held(run):
        now = state(run)
        assert (now.state, now.step, now.total, now.loss) == ("running", 2, 500, 1.5)
        assert (now.tokens_per_s, now.seconds_left) == (1000.0, 498 * 0.5)
    with hold_job_lock(run):
        assert state(run).state == "running"
    assert state(run).state == "finished"
    append(run, event(2, f"{STOPPED} 2 steps; start again to resume"))
    assert state(run).state == "stopped"
    append(run, start(2))
    with pytest.raises(DataError), hold_job_lock(run):
        raise DataError("is not as it should be", place="train.jsonl line 3")
    why = "train.jsonl line 3: is not as it should be"
    assert (state(run).state, state(run).why) == ("failed", why)
    (run / "job.lock").unlink()
    assert state(run).state == "killed"
    last = run / "checkpoints" / "step-00000002"
    last.mkdir(parents=True)
    (last / "complete.json").touch()
    append(run, start(2, total_steps=2))
    assert state(run).state == "finished"  # of a version that notes no end


def test_a_folder_that_is_broken_or_unfinished_says_so(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    with held(new):
        assert state(new).state == "being written"
    foreign = write_run(tmp_path / "foreign", [{"some": "log"}])
    assert state(foreign).state == "broken" and "no line of a start" in state(foreign).why
    (tmp_path / "secret").write_text("secret\n")
    linked = write_run(tmp_path / "linked", [start()])
    (linked / "config.yaml").symlink_to(tmp_path / "secret")
    assert state(linked).state == "broken" and "is a link" in state(linked).why


def test_a_step_line_is_read_as_by_the_exact_reader():
    lines = [step(3, 1.5), step(3, None), step(4, 2.0, samples=8, wall_s=1.5, unknown=7)]
    for line in lines:
        exact, row = from_json(json.dumps(line)), step_row(json.dumps(line))
        assert isinstance(exact, StepLine) and row is not None
        wanted = [vars(exact)[name] for name in STEP_FIELDS]
        assert np.array_equal(np.array(wanted, dtype=float), row, equal_nan=True)
    doubled = json.dumps(step(1, 2.0))[:-1] + ', "loss": 3.0}'
    closer = [step(1, 1e300), step(None, 1.0), step(1, "x"), {"kind": "step", "step": 1}]
    for text in (doubled, '{"kind": "step", ', *map(json.dumps, closer), json.dumps(start())):
        assert step_row(text) is None


def test_lines_are_read_once_and_a_new_file_from_its_beginning(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntw")
    lines = GrowingLines(path, 10)

    def new():
        return lines.has_begun_anew(), [line for _, line in lines.new_lines()]

    assert new() == (False, [b"one\n"])
    with open(path, "a") as file:
        file.write("o\n" + "x" * 25 + "\n")
    assert new() == (False, [b"two\n", b"x" * 10])
    assert new() == (False, [])
    path.write_text("1\n")  # truncated
    assert new() == (True, [b"1\n"])
    path.write_text("2\nand much more\n")  # rewritten, and longer
    assert new() == (True, [b"2\n", b"and much m"])


def test_points_are_those_after_a_place(run):
    live = LiveRun(run, "first")
    live.read_on()
    before = live.place
    append(run, step(3, 1.25), step(4, 1.0), tail='{"kind": "step", "st')
    live.read_on()
    points = live.points_after(before)
    loss = next(chart for chart in points["charts"] if chart["title"] == "Loss")
    assert loss["curves"] == [{"name": "training", "x": [3.0, 4.0], "y": [1.25, 1.0]}]
    assert points["axes"]["tokens"] == [500.0, 1000.0]
    append(run, tail='ep": 5}\n')  # half a line is completed
    append(run, start(3), step(4, 7.0))
    live.read_on()
    assert live.points_after(before) is None  # the run has resumed: step 4 is another one
    assert Facts(live.report()).curves("Loss") == Facts(read_report(run)).curves("Loss")


def test_time_and_memory_are_shown(run):
    append(run, USAGE, dict(USAGE, step=4))
    facts = Facts(read_report(run))
    assert ("optimizer", "6.0 s", "75.0%") in facts.rows and ("rank 1", "1.5 GB") in facts.rows


def test_events_bring_only_what_is_new(run):
    """Every wait is for an event of the stream; none is for a time."""
    with held(run), served(run.parent) as url, httpx.Client(base_url=url, timeout=60) as client:
        page = client.get("/runs/first").text
        place = page.split('data-place="')[1].split('"')[0]
        with client.stream("GET", "/events/first", params={"after": place}) as stream:
            events = events_of(stream.iter_lines())
            name, status = next(events)
            assert name == "status" and status["acts"] == ["stop"] and ">running<" in status["html"]
            append(run, step(3, 1.25))
            points = next(data for name, data in events if name == "points")
            [loss] = [c for c in points["charts"] if c["title"] == "Loss"]
            assert loss["curves"][0]["x"] == [3.0]
            next(None for name, _ in events if name == "refresh")
            assert "of 500 steps" in client.get("/parts/first").json()["body"]
            write_run(run.parent / "second", [start()])  # a run that begins later
            append(run, evaluation(3, 1.0))
            next(None for name, _ in events if name == "refresh")
            assert "Evaluation" in client.get("/parts/first").json()["body"]
            sample = prompt(3, episode(1.0, "a plum answer"))
            (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
            append(run, rl(3, 0.75))  # after its samples, as rl writes both
            points = next(data for name, data in events if name == "points")
            [reward] = [c for c in points["charts"] if c["title"] == "Reward"]
            assert reward["curves"][0]["y"] == [0.75]
            next(None for name, _ in events if name == "refresh")
            assert "a plum answer" in client.get("/parts/first").json()["body"]
        with client.stream("GET", "/events/") as stream:
            events = events_of(stream.iter_lines())
            while '"/runs/second"' not in client.get("/parts/").json()["body"]:
                next(events)


def test_a_run_that_is_killed_while_it_is_watched_shows_it(run):
    program = (
        f"import tests.test_watch as w, pathlib, time\nwith w.held(pathlib.Path({str(run)!r})):"
    )
    program += "\n print('held', flush=True)\n time.sleep(600)"
    job = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert job.stdout.readline() == b"held\n"
        with served(run.parent) as url, httpx.stream("GET", f"{url}/events/first") as stream:
            states = (d["html"] for name, d in events_of(stream.iter_lines()) if name == "status")
            assert ">running<" in next(states)
            job.kill()
            assert ">killed<" in next(html for html in states if ">running<" not in html)
    finally:
        job.kill()
        job.communicate()


@contextlib.contextmanager
def client_of(folder, token=None):
    with served(folder, token) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_names_and_texts_of_runs_are_escaped(tmp_path):
    name = "x<img src=x onerror=alert(1)>?#%"
    lines = [start(model=HOSTILE), step(1, 1.0), event(1, HOSTILE)]
    write_run(tmp_path / name, lines, config=HOSTILE)
    with client_of(tmp_path) as client:
        listed = client.get("/").text
        address = listed.split('href="')[1].split('"')[0]
        for text in (listed, client.get(address).text):
            assert "<img src=x" not in text and "<script>alert" not in text
            assert "connect-src &#x27;self&#x27;" in text
        assert client.get(address).status_code == 200
        assert client.get("/runs/../../etc/passwd").status_code == 404
        assert client.get("/runs/%2e%2e/secret").status_code == 404


def test_other_pages_and_hosts_are_refused(run):
    with client_of(run.parent, TOKEN) as client:
        ask = {"authorization": f"Bearer {TOKEN}"}
        own = {"origin": str(client.base_url)}
        assert client.get("/", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        for headers in ({"origin": "http://evil.example"}, {}, {"origin": "null"}):
            done = client.post("/stop/first", headers=ask | headers)
            assert done.status_code == 403
        assert client.post("/stop/first", headers=own).status_code == 403  # no token
        wrong = client.post("/stop/first", headers=own | {"authorization": "Bearer x"})
        assert wrong.status_code == 403 and client.get("/stop/first").status_code == 405
        done = client.post("/stop/first", headers=ask | own)
        assert done.status_code == 409 and "is not running" in done.json()["said"]
        assert "no-store" in done.headers["cache-control"]
        assert 'data-act="stop"' in client.get("/runs/first").text
    with client_of(run.parent) as client:
        own = {"origin": str(client.base_url)}
        assert client.post("/stop/first", headers=ask | own).status_code == 403
        assert 'data-act="stop"' not in client.get("/runs/first").text


def test_a_run_is_stopped_by_the_signal_that_saves(run):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with held(run):
            assert "stops" in stop_run(run)
            assert received == [signal.SIGTERM]
            there = f"process {os.getpid()} on elsewhere, since now"
            (run / "job.lock").write_text(there)
            with raises(DataError, problem="runs on elsewhere"):
                stop_run(run)
            (run / "job.lock").write_text(there.replace("elsewhere", socket.gethostname()))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_is_resumed_by_its_own_command_alone(run):
    (run / "config.yaml").write_text("train: {steps: 3}")
    mark = {"run": "x", "kind": "run", "last_serial": 0, "command": "rl", "started_in": "/"}
    (run / "megatron_vlm.json").write_text(json.dumps(mark))
    words, folder = resume_command(run)
    assert words[0] == "rl" and f"run={run}" in words and str(folder) == "/"
    for changed in ({"command": "rm"}, {"command": None}, {"started_in": 3}):
        (run / "megatron_vlm.json").write_text(json.dumps(mark | changed))
        assert resume_command(run) is None
    assert read_job(run) is None


def test_mistakes_end_in_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "RUNS=" in (said := capsys.readouterr().err) and "does not exist; give" in said
    with contextlib.closing(listen(0)) as taken:
        port = taken.getsockname()[1]
        with raises(ConfigError, key="--port", found=port):
            listen(port)
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    token = tmp_path / "token"
    assert len(made := read_token(str(token))) > 20 and read_token(str(token)) == made
    assert token.stat().st_mode & 0o077 == 0
    token.write_text("short")
    with raises(ConfigError, key="--control"):
        read_token(str(token))
    (tmp_path / "file").touch()
    with raises(ConfigError, problem="is a file"):
        watched_folders([str(tmp_path / "file")])


@in_a_browser
def test_a_chart_grows_without_a_reload(run, tmp_path):
    legend = "document.querySelector('figure.chart .keys').textContent"
    grown = """(text) => new Promise((done) => {
      const look = () => document.body.textContent.includes(text) ? done(true)
        : requestAnimationFrame(look);
      look();
    })"""
    with (
        held(run),
        served(run.parent) as url,
        start_browser(tmp_path) as browser,
    ):
        browser.open(f"{url}/runs/first")
        browser.run("window.wasHere = true")
        assert browser.run(legend).startswith("step 2")
        append(run, step(3, 0.125))
        assert browser.run(f"({grown})('step 3training0.125')")
        append(run, evaluation(3, 0.625), event(3, "an event <b>of the run</b>"))
        assert browser.run(f"({grown})('an event <b>of the run</b>')")
        assert browser.run("window.wasHere") and browser.wider_than_page() == []
        assert browser.errors == []


WAIT_FOR_STATE = """(wanted, after) => new Promise((done) => {
  const look = () => {
    const { textContent, dataset } = document.querySelector("header .status");
    const step = Number((/step ([\\d,]+)/.exec(textContent) || ["", "0"])[1].replaceAll(",", ""));
    const has = dataset.state === wanted && step > after;
    return has || dataset.state === "failed" ? done([dataset.state, step])
      : requestAnimationFrame(look);
  };
  look();
})"""


@in_a_browser
@pytest.mark.slow
def test_the_buttons_stop_and_resume_a_run_that_trains(tmp_path, tiny):
    """The run would need hours. It loses no step between the two buttons."""
    write_set(tmp_path)
    words = command(tmp_path, tiny(), "run", "train.steps=100000", "checkpoint.export=false")
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=outside_of_jobs(), cwd=tmp_path)
    run = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        stack.callback(job.communicate)
        stack.callback(job.kill)
        while not (run / "metrics.jsonl").exists():  # the folder of a run, or the end of its job
            assert job.poll() is None
        url = stack.enter_context(served(tmp_path, TOKEN, resumed := []))
        browser = stack.enter_context(start_browser(tmp_path))
        browser.open(f"{url}/runs/run#token={TOKEN}")
        seen, stopped = 0, []
        for _ in range(2):
            state, seen = browser.run(f"({WAIT_FOR_STATE})('running', {seen})")
            assert state == "running"
            browser.run("document.querySelector('[data-act=stop]').click()")
            state, seen = browser.run(f"({WAIT_FOR_STATE})('stopped', 0)")
            assert state == "stopped" and seen == steps_of(run)[-1]["step"]
            stopped.append(seen)
            browser.run("document.querySelector('[data-act=resume]').click()")
        state, seen = browser.run(f"({WAIT_FOR_STATE})('running', {seen})")
        stop_run(run)
        assert browser.run(f"({WAIT_FOR_STATE})('stopped', 0)")[0] == "stopped"
        assert job.wait() == 75 and browser.errors == []
    assert {process.wait() for process in resumed} == {75}
    steps = [line["step"] for line in steps_of(run)]
    assert steps == list(range(1, len(steps) + 1)) and stopped[0] < stopped[1] < len(steps)
