# .venv/bin/python -m pytest tests/commands/test_watch.py
"""Runs in the browser while they train: states, only what a page lacks, odd files, access."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import socket
import threading

import httpx
import numpy as np
import pytest

from megatron_vlm.cli import main
from megatron_vlm.commands.watch.command import open_server
from megatron_vlm.commands.watch.watched_runs import OpenRun, StatusReader, watched_folders
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.report.metrics_lines import STEP_FIELDS, STOPPED, from_json, line_or_row
from megatron_vlm.report.run import read_report
from megatron_vlm.report.run.rl_samples import GrowingLines
from megatron_vlm.run.run_folder import hold_job_lock
from tests.report.test_rl_report import episode, prompt, rl
from tests.report.test_run_report import HOSTILE, evaluation, event, start, step, write_run
from tests.support.browser import start_browser
from tests.support.error_fields import raises
from tests.support.report_facts import Facts, in_a_browser

USAGE = {"kind": "usage", "step": 2, "memory_gb": [2.5, 1.5]}
USAGE |= {"seconds": {"data": 1, "optimizer": 3}}


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
def served(folder):
    """Serve a folder on a free port, and yield the address."""
    with open_server(0, [folder]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def client_of(folder):
    with served(folder) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def state(run):
    return StatusReader(run).read()


def test_states_are_told_by_the_log_and_the_lock(run):
    assert state(run).state == "killed" and "after step 2" in state(run).why
    with held(run):
        now = state(run)
        assert (now.state, now.step, now.total, now.figure) == ("running", 2, 500, ("loss", 1.5))
        assert (now.tokens_per_s, now.seconds_left) == (1000.0, 498 * 0.5)
    with hold_job_lock(run):
        append(run, rl(2, 0.75))
        now = state(run)
        assert (now.state, now.figure) == ("running", ("reward", 0.75))
    assert state(run).state == "finished"
    append(run, event(2, f"{STOPPED} 2 steps; start again to resume"))
    assert state(run).state == "stopped"
    append(run, start(2))
    for has_begun, expected in ((True, "failed"), (False, "failed"), (True, "failed")):
        with pytest.raises(DataError), hold_job_lock(run) as job:
            job.has_begun = has_begun
            raise DataError("is wrong", place=f"train.jsonl line {int(has_begun)}")
        why = "train.jsonl line 1: is wrong"  # a start that is refused tells nothing about a run
        assert (state(run).state, state(run).why) == (expected, why)
    (run / "job.lock").unlink()
    assert state(run).state == "killed"


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


def test_a_step_is_a_row_of_its_fields():
    for line in (step(3, 1.5), step(3, None), step(4, 2.0, samples=8, wall_s=1.5, unknown=7)):
        exact, row = from_json(json.dumps(line)), line_or_row(json.dumps(line))
        wanted = [getattr(exact, name) for name in STEP_FIELDS]
        assert np.array_equal(np.array(wanted, dtype=float), row, equal_nan=True)
    with raises(DataError, problem_has="KeyError: 'epoch'"):
        line_or_row('{"kind": "step", "step": 1}')


def test_lines_are_read_once_and_a_new_file_from_its_beginning(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntw")
    lines = GrowingLines(path, 10)

    def new():
        return lines.was_replaced(), [line for _, line in lines.new_lines()]

    assert new() == (False, [b"one\n"])
    with open(path, "a") as file:
        file.write("o\n" + "x" * 25 + "\n")
    assert new() == (False, [b"two\n", b"x" * 10])
    assert new() == (False, [])
    path.write_text("1\n")  # truncated
    assert new() == (True, [b"1\n"])
    path.write_text("2\nand much more\n")  # rewritten, and longer
    assert new() == (True, [b"2\n", b"and much m"])


def test_a_page_that_grew_is_that_of_all_lines(run):
    live = OpenRun(run, "first")
    for lines, tail in (
        ([step(3, 1.25), rl(3)], '{"kind": "step", "st'),  # half a line, which is completed
        ([start(3), step(4, 7.0), evaluation(4, 1.0)], ""),  # the run has resumed
    ):
        live.report(state(run))
        append(run, *lines, tail=tail)
        if tail:
            live.report(state(run))
            append(run, tail='ep": 4}\n')
    assert Facts(live.report(state(run))).words == Facts(read_report(run)).words
    write_run(run, [start(), step(1, 5.0)])  # another run in its place
    assert Facts(live.report(state(run))).words == Facts(read_report(run)).words


def test_time_and_memory_are_shown(run):
    append(run, USAGE, dict(USAGE, step=4))
    facts = Facts(read_report(run))
    assert ("optimizer", "6.0 s", "75.0%") in facts.rows and ("rank 1", "1.5 GB") in facts.rows


def test_a_page_gets_only_what_it_lacks(run):
    with client_of(run.parent) as client:

        def new_parts(page="/parts/first"):
            got = client.get(page, params={"have": ",".join(known)}).json()
            known[:] = [key for key, _ in got["parts"]]
            return got["status"], "".join(html for _, html in got["parts"] if html is not None)

        with held(run):
            known = client.get("/runs/first").text.split('data-keys="')[1].split('"')[0].split()
            assert new_parts()[1] == ""
            append(run, step(3, 1.25))
            status, new = new_parts()
            assert ">running<" in status and "loss 1.25" in status
            assert "last loss, step 3" in new and "<h1>" not in new and "History" not in new
            append(run, evaluation(3, 1.0))
            assert "Evaluation" in new_parts()[1]
            sample = prompt(3, episode(1.0, "a plum answer"))
            (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
            append(run, rl(3, 0.75))
            status, new = new_parts()
            assert "a plum answer" in new and "reward 0.75" in status and "loss" not in status
        assert ">killed<" in new_parts()[0]
        write_run(run.parent / "second", [start()])  # a run that begins later
        assert '"/runs/second"' in new_parts("/parts/")[1]
        (run / "metrics.jsonl").unlink()
        (run / "job.lock").unlink()
        os.rename(run, run.parent / "moved")
        assert client.get("/parts/first").status_code == 404


def test_names_and_texts_of_runs_are_escaped(tmp_path):
    name = "x<img src=x onerror=alert(1)>?#%\n\u202e'"
    lines = [start(model=HOSTILE), step(1, 1.0), event(1, HOSTILE)]
    write_run(tmp_path / name, lines, config=HOSTILE)
    with client_of(tmp_path) as client:
        listed = client.get("/").text
        address = listed.split('href="')[1].split('"')[0]
        for text in (listed, client.get(address).text):
            assert "<img src=x" not in text and "<script>alert" not in text
            assert "connect-src &#39;self&#39;" in text
        assert client.get(address).status_code == 200
        assert client.get("/runs/../../etc/passwd").status_code == 404
        assert client.get("/runs/%2e%2e/secret").status_code == 404


def test_other_pages_and_hosts_are_refused(run):
    with client_of(run.parent) as client:
        for headers in (
            {"host": "evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
        ):
            assert client.get("/", headers=headers).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200
        done = client.get("/", headers={"origin": str(client.base_url)})
        assert done.status_code == 200 and "no-store" in done.headers["cache-control"]
        assert client.post("/runs/first").status_code == 501


ODD = (None, "x", [], {}, [[]], True, -1, 1e308, -1e308, 2**64, 10**400, math.nan, math.inf, "\n")


def test_no_value_of_a_file_stops_a_page(tmp_path, run):
    """Each value in each field of each line, and in each field of scores.json."""
    lines = [start(), step(2, 1.0, samples=8), rl(2), evaluation(2, 1.0), event(2, "x"), USAGE]
    scores = {"task": "t", "metric": "m", "before": 0.5, "after": 0.75, "standard_error": 0.1}
    scores |= {"samples": 7, "is_paired": True}
    (run / "bench").mkdir()
    with held(run), client_of(run.parent) as client:
        for odd in ODD:
            changed = [line | {key: odd} for line in lines for key in line]
            write_run(run, [*lines, *changed, *changed])
            benches = [{"suite": "s", "time": "t", "lines": [scores | {k: odd}]} for k in scores]
            for content in (odd, *({**benches[0], key: odd} for key in benches[0]), *benches):
                (run / "bench" / "scores.json").write_text(json.dumps(content))
                assert Facts(read_report(run)).names.count("Benchmarks") == 1
            page, listed = client.get("/runs/first"), client.get("/")
            assert page.status_code == 200 and "cannot be drawn" not in page.text, odd
            assert listed.status_code == 200 and ">running<" in listed.text


def test_a_folder_or_a_pipe_in_place_of_a_file_hides_no_other_run(run):
    """Also where it appears while the server runs."""
    names = ("job.lock", "metrics.jsonl", "samples.jsonl", "examples.json", "config.yaml")
    names += ("bench/scores.json", "megatron_vlm.json")
    kinds = {"folder": os.makedirs, "pipe": os.mkfifo, "socket": make_socket}
    with client_of(run.parent) as client:
        for place, (name, make) in enumerate(itertools.product(names, kinds.values())):
            odd = write_run(run.parent / f"odd{place}", [start(), step(1, 1.0), rl(1)])
            assert client.get(f"/runs/{odd.name}").status_code == 200
            (odd / name).parent.mkdir(exist_ok=True)
            (odd / name).unlink(missing_ok=True)
            make(odd / name)
            page, listed = client.get(f"/runs/{odd.name}"), client.get("/")
            assert page.status_code == listed.status_code == 200, odd
            assert "cannot be drawn" not in page.text, name
            assert "Its state cannot be read" not in listed.text, name
            assert '"/runs/first"' in listed.text and f'"/runs/{odd.name}"' in listed.text


def make_socket(path):
    folder = os.open(path.parent, os.O_RDONLY)  # the path may be too long for a socket
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def test_what_goes_wrong_is_on_the_page(run, monkeypatch):
    write_run(run.parent / "second", [start(), step(1, 1.0)])

    def fail(found):
        if getattr(found, "folder", run) == run:
            raise RuntimeError("a mistake of ours")
        return read(found)

    read = StatusReader.read
    monkeypatch.setattr(StatusReader, "read", fail)
    with client_of(run.parent) as client:
        for page in ("/", "/runs/first"):
            told = client.get(page)
            assert told.status_code == 200 and "RuntimeError: a mistake of ours" in told.text
        assert "last loss, step 1" in client.get("/runs/second").text
        monkeypatch.setattr("megatron_vlm.commands.watch.watched_runs.find_runs", fail)
        told = client.get("/parts/")
        assert told.status_code == 500 and "RuntimeError: a mistake of ours" in told.text


@pytest.mark.full  # the server waits eight seconds for them
def test_silent_connections_lock_nobody_out(run):
    with client_of(run.parent) as client, contextlib.ExitStack() as opened:
        address = ("127.0.0.1", client.base_url.port)
        silent = [opened.enter_context(socket.create_connection(address)) for _ in range(500)]
        assert client.get("/").status_code == 200
        assert {each.recv(1) for each in silent} == {b""}  # they are closed


def test_mistakes_end_in_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "RUNS=" in (said := capsys.readouterr().err) and "does not exist; give" in said
    with open_server(0, [tmp_path]) as taken:
        port = taken.server_address[1]
        with raises(ConfigError, key="--port", found=port):
            open_server(port, [tmp_path])
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "file").touch()
    with raises(ConfigError, problem="is a file"):
        watched_folders([str(tmp_path / "file")])


@pytest.mark.full
@in_a_browser
def test_a_chart_grows_without_a_reload(run, tmp_path):
    legend = "document.querySelector('figure.chart .keys').textContent"
    # The page asks at once when it is seen again, and otherwise every five seconds.
    grown = """(text) => new Promise((done) => {
      document.dispatchEvent(new Event("visibilitychange"));
      const look = () => document.body.textContent.includes(text) ? done(true)
        : requestAnimationFrame(look);
      look();
    })"""
    with held(run), served(run.parent) as url, start_browser(tmp_path) as browser:
        browser.open(f"{url}/runs/first")
        browser.run("window.chart = document.querySelector('figure.chart')")
        assert browser.run(legend).startswith("step 2")
        append(run, step(3, 0.125))
        assert browser.run(f"({grown})('step 3training0.125')")
        append(run, evaluation(3, 0.625), event(3, "an event <b>of the run</b>"))
        assert browser.run(f"({grown})('an event <b>of the run</b>')")
        assert not browser.run("chart.isConnected")  # the loss has another curve by now
        browser.run("window.chart = document.querySelector('figure.chart')")
        append(run, step(4, 0.25))
        assert browser.run(f"({grown})('step 4training0.25')")
        assert browser.run("chart.isConnected") and browser.wider_than_page() == []
        browser.open(url, width=390)
        wide = "(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth)"
        assert not browser.run(f"{wide}(document.querySelector('.runs-table'))")
        assert browser.errors == []
