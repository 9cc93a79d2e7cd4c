# .venv/bin/python -m pytest tests/serve/test_journal.py
"""The journal of a service.

Each call is done once and in order, regardless of the order of arrival, of repeats, and of where
the process dies. The tests also cover what is released and what is kept.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.serve.journal.calls import Bounds
from megatron_vlm.serve.journal.cleanup import JournalExpiry
from megatron_vlm.serve.journal.database import Store
from megatron_vlm.serve.journal.journal import MAX_ATTEMPTS, Journal
from megatron_vlm.serve.journal.journal_records import (
    Accepted,
    Call,
    Changes,
    Conflict,
    Failure,
    Model,
    ModelChange,
    NamedCheckpoint,
    Outcome,
    QuotaExceeded,
    SamplingSession,
    Saved,
    tinker_path,
)
from tests.support.error_fields import raises
from tests.support.fake_calls import opened

DONE = Outcome(b"{}")
AT_ONCE = JournalExpiry(fetched=-1, unfetched=-1, rows=-1, finished=-1, released=-1)


def a_model(journal, number=0, source=None, key="k"):
    """Return a session, and a model of it that is ready."""
    session = journal.create_session(key, {}, None)
    name = f"{session}:train:{number}"
    made = Model(name, session, "base", 8, source=source)
    promise = journal.accept(Call("create_model", session, number, key, b"{}", model=made))
    ready = Changes(models=(ModelChange(name, state="ready"),))
    assert journal.finish(promise.request_id, DONE, ready)
    return session, name


def a_step(model, seq, body=b"step", key="k", **more):
    return Call("optim_step", model, seq, key, body, changes_state=True, **more)


def a_sample(sampler, seq, body=b"sample"):
    return Call("asample", sampler, seq, "k", body)


def seqs(calls):
    return [(call.kind, call.seq) for call in calls]


def do_all(journal):
    """Do all calls as an engine does, and return (owner, seq) in the order of doing."""
    done = []
    while calls := journal.next_calls():
        for call in calls:
            assert journal.begin_calls(call.request_id) == [call.request_id]
            done.append((call.owner, call.seq))
            assert journal.finish(call.request_id, Outcome(journal.body(call.request_id)))
    return done


def folder(journal, name):
    made = journal.run / name
    made.mkdir(parents=True)
    (made / "weights").write_text("w")
    return made


def test_the_calls_of_a_model_wait_for_the_ones_before_them(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        for seq in (3, 2, 5):
            journal.accept(a_step(model, seq))
        assert journal.next_calls() == []
        journal.accept(a_step(model, 1))
        assert seqs(journal.next_calls()) == [("optim_step", 1)]
        assert seqs(journal.next_calls(ahead=8)) == [("optim_step", s) for s in (1, 2, 3)]
        assert [seq for _, seq in do_all(journal)] == [1, 2, 3]
        assert journal.next_calls() == [] and seqs(journal.open_calls()) == [("optim_step", 5)]
        journal.accept(a_step(model, 4))
        assert [seq for _, seq in do_all(journal)] == [4, 5]


def test_calls_of_a_model_wait_for_the_model_and_samples_for_nobody(tmp_path):
    with opened(tmp_path) as journal:
        session = journal.create_session("k", {}, None)
        model = Model(f"{session}:train:3", session, "base", 0)
        made = journal.accept(Call("create_model", session, 3, "k", b"{}", model=model))
        journal.accept(a_step(model.id, 1))
        for seq in (7, 2_000_000_001, 0):
            journal.accept(a_sample("sampler", seq))
        samples = [("asample", 7), ("asample", 2_000_000_001), ("asample", 0)]
        assert seqs(journal.next_calls()) == [("create_model", 3), *samples]
        ready = Changes(models=(ModelChange(model.id, state="ready"),))
        journal.finish(made.request_id, DONE, ready)
        assert seqs(journal.next_calls()) == [("optim_step", 1), *samples]


def test_a_call_that_failed_or_was_refused_counts_as_done(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        refused = Failure("learning_rate: -1", "user")
        promises = [
            journal.accept(a_step(model, seq, failure=refused if seq == 2 else None))
            for seq in (4, 3, 2, 1)
        ]
        assert journal.result(promises[2].request_id).outcome == refused
        first = journal.next_calls()[0]
        journal.finish(first.request_id, Failure("no memory"))
        assert [seq for _, seq in do_all(journal)] == [3, 4]
        assert seqs(journal.replay(model)) == [("optim_step", 3), ("optim_step", 4)]
        assert journal.result(first.request_id).outcome == Failure("no memory", "server")


def test_a_refused_call_lets_the_next_one_go_on_at_once(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        journal.accept(a_step(model, 2))
        assert journal.next_calls() == []
        journal.accept(a_step(model, 1, failure=Failure("wrong", "user")))
        assert seqs(journal.next_calls()) == [("optim_step", 2)]


def test_eight_threads_in_any_order_with_duplicates_are_done_once_and_in_order(tmp_path):
    chance = random.Random(5)
    with opened(tmp_path) as journal:
        models = [a_model(journal)[1] for _ in range(3)]
        sent = [a_step(model, seq) for model in models for seq in range(1, 31)] * 2
        sent += [a_sample("sampler", seq) for seq in range(40)] * 2
        chance.shuffle(sent)
        promised, stop, done = [], threading.Event(), []

        def send(part):
            for new in part:
                promised.append((new.owner, new.seq, journal.accept(new)))

        def engine():
            while not stop.is_set() or journal.next_calls():
                journal.wait(0.01)
                done.extend(do_all(journal))

        threads = [threading.Thread(target=send, args=(sent[i::8],)) for i in range(8)]
        doing = threading.Thread(target=engine)
        for thread in (doing, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        doing.join(60)
        assert len(promised) == 2 * (90 + 40)
        ids = {}
        for owner, seq, promise in promised:
            assert ids.setdefault((owner, seq), promise.request_id) == promise.request_id
        assert sum(promise.new for _, _, promise in promised) == 130
        assert len(done) == len(set(done)) == 130
        for model in models:
            assert [s for owner, s in done if owner == model] == list(range(1, 31))
        assert journal.contradictions == 0


def test_another_call_under_a_number_that_was_given_is_refused(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        first = journal.accept(a_step(model, 1, b"one"))
        assert journal.accept(a_step(model, 1, b"one")) == Accepted(first.request_id, new=False)
        assert journal.contradictions == 0
        second = journal.accept(a_step(model, 1, b"two"))
        assert isinstance(second, Conflict) and journal.contradictions == 1
        assert second.text.startswith("seq_id") and f"1 of {model} was sent before" in second.text
        assert journal.body(first.request_id) == b"one"
        do_all(journal)
        assert journal.accept(a_step(model, 1, b"one")).request_id == first.request_id
        assert journal.next_calls() == []


def test_a_sample_has_a_seed_of_its_own_that_stays(tmp_path):
    with opened(tmp_path) as journal:
        for seq in range(20):
            journal.accept(a_sample("s", seq))
        seeds = [call.seed for call in journal.next_calls()]
        assert len(set(seeds)) == 20 and all(0 <= seed < 2**62 for seed in seeds)
    with opened(tmp_path) as journal:
        assert [call.seed for call in journal.next_calls()] == seeds


def test_a_result_is_written_once(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        call = journal.accept(a_step(model, 1)).request_id
        finished = []
        journal.listen(lambda kept: finished.extend((k.request_id, k.succeeded) for k in kept))
        assert journal.finish(call, Outcome(b"first"))
        late = Changes(models=(ModelChange(model, state="failed"),))
        assert not journal.finish(call, Outcome(b"second"), late)
        assert journal.result(call).outcome == Outcome(b"first")
        assert journal.model(model).state == "ready"
        assert journal.begin_calls(call) == [] and finished == [(call, True)]


def test_replay_is_what_the_durable_state_lacks(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        for seq in range(1, 7):
            journal.accept(
                Call("forward_backward", model, seq, "k", b"%d" % seq, changes_state=seq != 4)
            )
        for seq in range(1, 7):
            (call,) = journal.next_calls()
            journal.finish(call.request_id, Failure("x") if seq == 5 else DONE)
        assert [call.seq for call in journal.replay(model)] == [1, 2, 3, 6]
        journal.record_saved(model, 2, folder(journal, "state-2"))
        assert [call.seq for call in journal.replay(model)] == [3, 6]
    with opened(tmp_path) as journal:
        assert [journal.body(c.request_id) for c in journal.replay(model)] == [b"3", b"6"]
        restored = journal.model(model)
        assert (restored.saved, restored.folder) == (2, tmp_path / "state-2")
        # A late report of an older state changes nothing.
        journal.record_saved(model, 1, folder(journal, "state-1"))
        assert journal.model(model).folder == tmp_path / "state-2"


def test_bodies_go_when_nothing_needs_them(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        first = journal.accept(a_step(model, 1, b"k")).request_id
        for new in (
            Call("forward_backward", model, 2, "k", b"forward only"),
            a_step(model, 3, b"failing"),
            a_sample("s", 1),
        ):
            journal.accept(new)
        while calls := journal.next_calls():
            failing = calls[0].seq == 3
            journal.finish(calls[0].request_id, Failure("x") if failing else DONE)
        assert _bodies(tmp_path) == [b"k"]
        assert journal.body(first) == b"k"
        journal.accept(a_step(model, 4, b"waits"))
        journal.record_saved(model, 4, folder(journal, "state"))  # before call 4 is done
        assert _bodies(tmp_path) == [b"waits"]


def _bodies(run):
    with sqlite3.connect(run / "journal.sqlite") as db:
        rows = db.execute("SELECT body FROM bodies ORDER BY number").fetchall()
    db.close()
    return [body for (body,) in rows if body != b"{}"]


def test_a_creation_that_fails_takes_the_calls_of_its_model_along(tmp_path):
    with opened(tmp_path) as journal:
        session = journal.create_session("k", {}, None)
        model = Model(f"{session}:train:0", session, "base", 0)
        made = journal.accept(Call("create_model", session, 0, "k", b"{}", model=model))
        waiting = journal.accept(a_step(model.id, 2)).request_id
        finished = []
        journal.listen(lambda kept: finished.extend(k.request_id for k in kept))
        journal.finish(made.request_id, Failure("no room", "server"))
        assert finished == [made.request_id, waiting]
        assert journal.model(model.id).state == "failed" and journal.open_calls() == []
        late = journal.accept(a_step(model.id, 1))
        assert "could not be made" in journal.result(late.request_id).outcome.text


def test_an_unloaded_model_is_done_with(tmp_path):
    with opened(tmp_path, keep=AT_ONCE) as journal:
        _, model = a_model(journal)
        state = folder(journal, "state")
        journal.record_saved(model, 0, state)
        waiting = journal.accept(a_step(model, 2)).request_id
        unload = journal.accept(Call("unload_model", f"{model}:unload", 0, "k", b"{}"))
        assert seqs(journal.next_calls()) == [("unload_model", 0)]
        ended = Changes(models=(ModelChange(model, state="unloaded"),))
        journal.finish(unload.request_id, DONE, ended)
        assert "was unloaded" in journal.result(waiting).outcome.text
        journal.sweep()
        assert not state.exists()


def test_a_call_that_the_process_dies_of_three_times_is_not_tried_again(tmp_path):
    for attempt in range(MAX_ATTEMPTS):
        with opened(tmp_path) as journal:
            if attempt == 0:
                _, model = a_model(journal)
                poison = journal.accept(a_step(model, 1)).request_id
                journal.accept(a_step(model, 2))
            (call,) = journal.next_calls()
            assert (call.request_id, call.attempts) == (poison, attempt)
            journal.begin_calls(poison)
            if attempt == 1:  # an orderly stop is not a death
                journal.undo_attempts(poison)
                journal.begin_calls(poison)
    with opened(tmp_path) as journal:
        outcome = journal.result(poison).outcome
        assert outcome.category == "server" and "3 times" in outcome.text
        assert seqs(journal.next_calls()) == [("optim_step", 2)]


def test_only_a_waiting_sample_can_be_cancelled(tmp_path):
    with opened(tmp_path) as journal:
        first, second = (journal.accept(a_sample("s", seq)).request_id for seq in (1, 2))
        listed = [call.request_id for call in journal.next_calls()]
        assert not journal.cancel(first, "another key")
        assert journal.cancel(first, "k") and not journal.cancel(first, "k")
        assert journal.begin_calls(*listed) == [second]
        assert not journal.cancel(second, "k")
        assert journal.finish(second, DONE) and journal.result(first).outcome.category == "user"


def test_a_key_has_bounds_but_never_waits_for_itself(tmp_path):
    bounds = Bounds(open_calls=3, open_bytes=100, models=1)
    with opened(tmp_path, bounds=bounds) as journal:
        session, model = a_model(journal)
        other = Model(f"{session}:train:9", session, "base", 0)
        full = journal.accept(Call("create_model", session, 9, "k", b"{}", model=other))
        assert isinstance(full, QuotaExceeded) and "limit models is 1" in full.text
        for seq in (2, 3, 4):
            assert isinstance(journal.accept(a_step(model, seq)), Accepted)
        full = journal.accept(a_step(model, 5))
        assert isinstance(full, QuotaExceeded) and "limit open_calls is 3" in full.text
        assert isinstance(journal.accept(a_step(model, 4)), Accepted)  # a retry takes no room
        # The others wait for the first, so there is always room for it.
        assert isinstance(journal.accept(a_step(model, 1)), Accepted)
        assert [seq for _, seq in do_all(journal)] == [1, 2, 3, 4]
        journal.accept(a_step(model, 6, b"x" * 60))
        full = journal.accept(a_step(model, 7, b"x" * 60))
        assert isinstance(full, QuotaExceeded) and "limit open_bytes is 100" in full.text
        assert isinstance(journal.accept(a_sample("s", 0)), Accepted)


def pass_time(journal, seconds):
    """Move the times of all sessions, models and samplers back by `seconds`."""
    with journal._store.write() as db:
        db.execute("UPDATE sessions SET heard = heard - ?", (seconds,))
        for table in ("models", "samplers"):
            db.execute(
                f"UPDATE {table} SET created = created - ?, used = used - ?", (seconds, seconds)
            )


def test_models_of_silent_clients_are_not_counted(tmp_path):
    def made(journal, session, number):
        new = Model(f"{session}:train:{number}", session, "base", 8)
        return journal.accept(Call("create_model", session, number, "k", b"{}", model=new))

    with opened(tmp_path, bounds=Bounds(models=2)) as journal:
        silent, _ = a_model(journal)
        finished, _ = a_model(journal)
        here = journal.create_session("k", {}, None)
        full = made(journal, here, 0)
        assert isinstance(full, QuotaExceeded) and not full.passing
        assert "limit models is 2" in full.text
        journal.finish_session(finished, "success")
        promise = made(journal, here, 0)
        ready = ModelChange(f"{here}:train:0", state="ready")
        journal.finish(promise.request_id, DONE, Changes(models=(ready,)))
        pass_time(journal, 200)
        journal.touch_session(here)
        journal.sweep()
        assert journal.live_models() == {f"{here}:train:0"}
        waiting = journal.accept(a_step(f"{silent}:train:0", 1)).request_id
        assert journal.live_models() == {f"{here}:train:0", f"{silent}:train:0"}
        journal.finish(waiting, DONE)
        assert f"{silent}:train:0" in journal.live_models()  # it has just had a call
        assert isinstance(made(journal, here, 1), QuotaExceeded)


def test_checkpoints_are_named_replaced_and_let_go_of_when_nothing_needs_them(tmp_path):
    with opened(tmp_path, keep=AT_ONCE) as journal:
        _, model = a_model(journal)
        session = journal.create_session("k", {}, None)  # a session that samples
        first, second = folder(journal, "c/1"), folder(journal, "c/2")

        def save(seq, at, name="final"):
            made = NamedCheckpoint(model, "training", name, at, 1)
            call = journal.accept(Call("save_weights", model, seq, "k", b"{}")).request_id
            saved = Saved(model, seq, at)
            assert journal.finish(call, DONE, Changes(checkpoints=(made,), saved=(saved,)))

        save(1, first)
        path = tinker_path(model, "training", "final")
        assert path == f"tinker://{model}/weights/final"
        assert journal.checkpoint(path).folder == first and journal.model(model).folder == first
        journal.create_sampler(SamplingSession("s1", session, model, "base", first, path))
        save(2, second)
        assert [c.folder for c in journal.checkpoints("k")] == [second]
        journal.sweep()
        assert first.exists()  # the sampler uses it
        journal.finish_session(session, "success")
        time.sleep(0.01)
        journal.sweep()
        assert not first.exists() and second.exists() and journal.samplers() == []
        journal.delete_checkpoint(path)
        journal.sweep()
        assert second.exists() and journal.checkpoints() == []  # the model's durable state
        _, other = a_model(journal, source=second)
        journal.record_saved(model, 2, folder(journal, "c/3"))
        journal.sweep()
        assert second.exists()  # the other model starts from it
        journal.record_saved(other, 0, folder(journal, "c/4"))
        journal.sweep()
        assert not second.exists()
        assert (tmp_path / "c/3").exists() and (tmp_path / "c/4").exists()


@pytest.fixture
def clock(monkeypatch):
    """The journal's clock, which stands until a test moves it."""
    clock = SimpleNamespace(now=time.time())
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


def test_checkpoints_expire(tmp_path, clock):
    with opened(tmp_path, keep=AT_ONCE) as journal:
        _, model = a_model(journal)
        at = folder(journal, "c")
        made = NamedCheckpoint(model, "sampler", "a", at, 1, expires=clock.now + 5)
        call = journal.accept(Call("save_weights_for_sampler", model, 1, "k", b"{}"))
        journal.finish(call.request_id, DONE, Changes(checkpoints=(made,)))
        path = tinker_path(model, "sampler", "a")
        assert journal.checkpoint(path) is not None
        clock.now += 6
        assert journal.checkpoint(path) is None and journal.checkpoints() == []
        journal.sweep()
        assert not at.exists()


def test_nothing_outside_the_run_is_removed(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub" / "file").write_text("x")
    with opened(run, keep=AT_ONCE) as journal:
        _, model = a_model(journal)
        for wrong in (outside, run, run / "a/../..", Path("../outside")):
            with pytest.raises(AssertionError, match="is not inside"):
                journal.record_saved(model, 0, wrong)
        link = run / "link"
        link.symlink_to(outside)
        inner = folder(journal, "a/b")
        journal.record_saved(model, 0, link)
        journal.record_saved(model, 0, link / "sub")
        journal.record_saved(model, 0, run / "a")
        journal.record_saved(model, 0, inner)
        journal.sweep()
        assert (outside / "sub" / "file").exists() and link.is_symlink()
        assert inner.exists()  # it is inside a released folder


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "a b", "a\n", "a" * 129, "\u00e9"])
def test_names_are_one_part_of_a_path(name):
    with raises(DataError, key="path", found=name):
        tinker_path("m", "training", name)


def test_results_stay_until_some_time_after_they_were_fetched(tmp_path, clock):
    with opened(tmp_path, keep=JournalExpiry(fetched=5, unfetched=100, rows=100)) as journal:
        _, model = a_model(journal)
        step = journal.accept(a_step(model, 1)).request_id
        sample = journal.accept(a_sample("s", 1)).request_id
        do_all(journal)
        journal.touch_result(step)
        journal.sweep()
        assert journal.result(step).outcome is not None
        clock.now += 6
        journal.sweep()
        gone = journal.result(step)
        assert gone.outcome is None and gone.dropped
        assert journal.result(sample).outcome == Outcome(b"sample")
        # The call keeps its place and its body, so it is not done twice and may be replayed.
        assert journal.accept(a_step(model, 1)) == Accepted(step, new=False)
        assert [call.seq for call in journal.replay(model)] == [1]


def test_old_samples_leave_no_rows(tmp_path):
    with opened(tmp_path, keep=AT_ONCE) as journal:
        _, model = a_model(journal)
        step = journal.accept(a_step(model, 1)).request_id
        sample = journal.accept(a_sample("s", 1)).request_id
        waiting = journal.accept(a_sample("s", 2)).request_id
        journal.finish(sample, DONE)
        journal.finish(step, DONE)
        journal.sweep()
        assert journal.result(sample) is None and journal.result(step).dropped
        assert not journal.result(waiting).dropped


def test_calls_that_wait_for_what_was_never_sent_end_with_their_session(tmp_path):
    with opened(tmp_path, keep=JournalExpiry(finished=-1)) as journal:
        session, model = a_model(journal)
        _, other = a_model(journal)
        gap = journal.accept(a_step(model, 2)).request_id
        journal.accept(a_step(other, 2))
        journal.finish_session(session, "success")
        journal.finish_session(session, "errored")  # the first reason stays
        ended = []
        journal.listen(lambda kept: ended.extend(k.request_id for k in kept))
        journal.sweep()
        assert ended == [gap] and "call 1, which was never sent" in journal.result(gap).outcome.text
        assert [call.owner for call in journal.open_calls()] == [other]


def test_models_end_with_their_session_and_their_checkpoints_stay(tmp_path):
    with opened(tmp_path, keep=JournalExpiry(finished=-1, released=-1)) as journal:
        session, model = a_model(journal)
        _, other = a_model(journal)
        state, named = folder(journal, "states/1"), folder(journal, "weights/1")
        journal.record_saved(model, 0, state)
        made = NamedCheckpoint(model, "sampler", "a", named, 1)
        call = journal.accept(Call("save_weights_for_sampler", model, 1, "k", b"{}"))
        journal.finish(call.request_id, DONE, Changes(checkpoints=(made,)))
        step = journal.accept(a_step(model, 2)).request_id
        journal.finish_session(session, "success")
        journal.sweep()
        assert journal.model(model).state == "ready"  # until its pending call is done
        journal.finish(step, DONE)
        journal.sweep()
        assert journal.model(model).state == "unloaded" and journal.model(other).state == "ready"
        journal.sweep()
        assert not state.exists() and named.exists()
        assert journal.checkpoint(tinker_path(model, "sampler", "a")) is not None


def test_sessions_that_were_not_heard_of_end(tmp_path, clock):
    with opened(tmp_path, keep=JournalExpiry(silent=20, released=-1)) as journal:
        said = {"a": {"b": [1, "\u00e9\x00"]}}
        quiet, active = (journal.create_session("k", said, "name") for _ in range(2))
        for session in (quiet, active):
            at = folder(journal, f"eph/{session}")
            journal.create_sampler(
                SamplingSession(f"{session}:sample:0", session, None, "base", at)
            )
            journal.create_sampler(SamplingSession(f"{session}:sample:0", session, None, "other"))
        journal.accept(a_sample(f"{quiet}:sample:0", 1))
        clock.now += 25
        journal.touch_session(active)
        journal.sweep()
        assert len(journal.samplers("k")) == 2  # a sample of the quiet session waits
        do_all(journal)
        journal.sweep()
        assert [s.session for s in journal.samplers()] == [active]
        assert not (tmp_path / "eph" / quiet).exists() and (tmp_path / "eph" / active).exists()
        assert journal.active_sessions("k", 20) == 1
        assert journal.session(quiet).user_metadata == said


def test_a_newer_snapshot_takes_the_place_of_older_ones(tmp_path):
    with opened(tmp_path, keep=JournalExpiry(superseded=100, released=-1)) as journal:
        session, model = a_model(journal)
        at = {name: folder(journal, f"weights/{name}") for name in ("old", "asked", "new", "named")}

        def sampler(name, path=None):
            journal.create_sampler(SamplingSession(name, session, model, "base", at[name], path))
            pass_time(journal, 1)

        def left():
            journal.sweep()
            return sorted(s.id for s in journal.samplers())

        for name in ("old", "asked", "new"):
            sampler(name)
        sampler("named", "tinker://m/sampler_weights/n")
        assert left() == ["asked", "named", "new", "old"]
        waiting = journal.accept(a_sample("asked", 1)).request_id
        pass_time(journal, 200)
        assert left() == ["asked", "named", "new"]
        assert not at["old"].exists() and at["asked"].exists()
        journal.finish(waiting, DONE)
        assert left() == ["asked", "named", "new"]  # it answered a moment ago
        pass_time(journal, 200)
        assert left() == ["named", "new"] and not at["asked"].exists()
        assert journal.folders() == {at["new"], at["named"]}


def test_one_server_at_a_time(tmp_path):
    with opened(tmp_path), raises(ConfigError, key="run", found=str(tmp_path)):
        Journal(tmp_path)
    with opened(tmp_path) as journal:
        assert journal.models() == []


def test_a_journal_of_another_version_or_no_journal_is_refused(tmp_path):
    with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    file = str(tmp_path / "journal.sqlite")
    problem = "version 99, and this program reads version 1"
    with raises(ConfigError, place=file, problem_has=problem):
        Journal(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "journal.sqlite").write_bytes(b"no database" * 100)
    with raises(ConfigError, place=str(other / "journal.sqlite"), remedy_has="restore"):
        Journal(other)


def test_a_transaction_that_breaks_leaves_nothing(tmp_path):
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        call = journal.accept(a_step(model, 1)).request_id
        wrong = NamedCheckpoint("no such model", "training", "a", folder(journal, "c"), 1)
        with pytest.raises(AssertionError, match="is not in the journal"):
            journal.finish(call, DONE, Changes(checkpoints=(wrong,)))
        assert journal.result(call).outcome is None and journal.model(model).next_seq == 1
        assert journal.finish(call, DONE)


def test_what_waits_is_woken(tmp_path):
    with opened(tmp_path) as journal:
        journal.wait(0)
        assert not journal.wait(0.01)
        threading.Timer(0.05, journal.accept, [a_sample("s", 1)]).start()
        assert journal.wait(60)
        journal.ring()
        assert journal.wait(0)


_CHILD = """
import sys
from pathlib import Path
from megatron_vlm.serve.journal.journal_records import Call, Outcome
from tests.support.fake_calls import CallJournal
journal = CallJournal(Path(sys.argv[1]))
model = sys.argv[2]
start = int(sys.argv[3])
for seq in range(start, start + 100000):
    promise = journal.accept(Call("optim_step", model, seq, "k", b"%d" % seq * 50, True))
    print("promised", seq, promise.request_id, flush=True)
    if seq % 3 == 0:
        for call in journal.next_calls():
            journal.begin_calls(call.request_id)
            if journal.finish(call.request_id, Outcome(b"%d" % call.seq)):
                print("done", call.seq, call.request_id, flush=True)
"""


def test_a_killed_process_keeps_each_promise_once(tmp_path):
    """The process is killed six times while it accepts and finishes; all it printed is there."""
    chance = random.Random(3)
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
    promised, done = {}, {}
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for _ in range(6):
        command = [sys.executable, "-c", _CHILD, str(tmp_path), model, str(len(promised) + 1)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        lines = [child.stdout.readline() for _ in range(chance.randrange(5, 60))]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        for event, seq, name in (line.split() for line in lines if line.count(" ") == 2):
            names = promised if event == "promised" else done
            assert names.setdefault(int(seq), name) == name
        with opened(tmp_path) as journal:
            for seq, name in promised.items():
                again = journal.accept(a_step(model, seq, b"%d" % seq * 50))
                assert again == Accepted(name, new=False)
            for seq, name in done.items():
                assert journal.result(name).outcome == Outcome(b"%d" % seq)
            # The journal may have one more call, whose promise was never printed.
            waiting = [call.seq for call in journal.open_calls()]
            assert waiting == sorted(waiting)
            # So it may have one more that is finished, which each kill can leave behind.
            finished = {call.seq: call.request_id for call in journal.replay(model)}
            assert done.items() <= finished.items() and len(finished) <= len(done) + 1
            done = finished
            for seq in range(len(promised) + 1, max([len(promised), *waiting]) + 1):
                promised[seq] = journal.accept(a_step(model, seq, b"%d" % seq * 50)).request_id
        assert journal.contradictions == 0
    with opened(tmp_path) as journal:
        rest = [seq for _, seq in do_all(journal)]
        assert rest == list(range(max(done, default=0) + 1, len(promised) + 1))
        assert [call.seq for call in journal.replay(model)] == list(range(1, len(promised) + 1))
        db = sqlite3.connect(tmp_path / "journal.sqlite")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


def test_what_clients_send_is_for_nobody_else_to_read(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    with opened(run) as journal:
        a_model(journal)
        modes = {path.name: path.stat().st_mode & 0o777 for path in run.iterdir()}
        assert run.stat().st_mode & 0o777 == 0o700
        assert modes.keys() >= {"journal.sqlite", "journal.sqlite-wal"}
        assert set(modes.values()) == {0o600}
    for path in (run, run / "journal.sqlite"):  # files of an earlier service
        path.chmod(0o755)
    with opened(run):
        assert run.stat().st_mode & 0o777 == 0o700
        assert (run / "journal.sqlite").stat().st_mode & 0o777 == 0o600


def test_failures_do_not_say_where_our_files_are(tmp_path, caplog):
    texts = {
        "/data/runs/a-1/weights/3f/rank-0.safetensors: No space left": "rank-0.safetensors: No",
        "no '/data/x/y.json' of tinker://m:0/weights/n": "no 'y.json' of tinker://m:0/weights/n",
        "a loss of 1.5/2 in 3 s": "a loss of 1.5/2 in 3 s",
    }
    with opened(tmp_path) as journal:
        _, model = a_model(journal)
        for seq, (text, expected) in enumerate(texts.items(), 1):
            promise = journal.accept(a_step(model, seq)).request_id
            journal.finish(promise, Failure(text))
            assert journal.result(promise).outcome.text.startswith(expected)
            assert (text in caplog.text) == (expected not in text or "/data" in text)


def test_what_is_promised_waits_for_the_disk(tmp_path):
    """Attempts are counted for processes that die, so their count need not outlive the machine."""
    store = Store(tmp_path)
    levels = []
    for on_disk in (True, False, True):
        with store.write(on_disk) as db:
            levels.append(db.execute("PRAGMA synchronous").fetchone()[0])
    store.close()
    assert levels == [2, 1, 2]  # FULL, NORMAL, FULL
