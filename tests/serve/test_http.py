# .venv/bin/python -m pytest tests/serve/test_http.py
"""The HTTP front of a service, with a journal and an engine without a model.

The tests cover responses, keys and limits. Nothing that a client sends keeps the server from
answering the next client.
"""

import asyncio
import base64
import contextlib
import json
import queue
import random
import re
import socket
import sqlite3
import stat
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from fastapi import FastAPI
from pydantic import ValidationError

from megatron_vlm.config import load_config
from megatron_vlm.distributed.dims import ParallelDims
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.serve.http import api_keys
from megatron_vlm.serve.http.api_keys import ApiKeys, add_key
from megatron_vlm.serve.http.app import make_app
from megatron_vlm.serve.http.context import ResultWaiters
from megatron_vlm.serve.http.http_server import FrontServer
from megatron_vlm.serve.http.request_bodies import RequestLimits, add_handlers
from megatron_vlm.serve.http.schemas import AdamParams
from megatron_vlm.serve.journal.calls import Bounds
from megatron_vlm.serve.journal.cleanup import JournalExpiry
from megatron_vlm.serve.journal.journal import Journal
from megatron_vlm.serve.journal.journal_records import Outcome
from megatron_vlm.serve.protocol.protobuf import message
from megatron_vlm.serve.protocol.requests import read_place
from megatron_vlm.serve.startup import facts_of
from tests.support.error_fields import raises
from tests.support.fake_calls import FACTS, CallJournal, StandIn, opened
from tests.support.mutation import DEEP, mutate_bytes, mutate_json
from tests.training.test_decode import QWEN3_5

pytestmark = pytest.mark.alone  # it starts jobs and kills them

PROTOBUF = {"Accept": "application/x-protobuf"}
QUICK = RequestLimits(poll_seconds=60)


@dataclass
class Service:
    """A server, a client of it, and short methods for requests."""

    url: str
    http: httpx.Client
    journal: Journal
    engine: StandIn
    server: FrontServer
    app: FastAPI

    def post(self, path, value=None, status=200, **more) -> Any:
        answer = self.http.post(f"/api/v1/{path}", json={} if value is None else value, **more)
        return self.checked(answer, status)

    def get(self, path, status=200, **more) -> Any:
        return self.checked(self.http.get(f"/api/v1/{path}", **more), status)

    def checked(self, answer, status) -> Any:
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        if status != 200 and status != 408:
            assert answer.json()["error"] and answer.json()["detail"]
        return answer.json()

    def model(self, number=0, rank=8, **headers) -> str:
        session = self.post("create_session", {"tags": [], "user_metadata": {}}, **headers)
        value = {"session_id": session["session_id"], "model_seq_id": number}
        value |= {"base_model": "tiny/model", "lora_config": {"rank": rank}}
        return self.result(self.post("create_model", value, **headers), **headers)["model_id"]

    def result(self, promise, **headers) -> Any:
        return self.post("retrieve_future", promise, **headers)

    def message(self, promise, name) -> Any:
        """Return the result that is a protobuf message of this name."""
        answer = self.http.post("/api/v1/retrieve_future", json=promise, headers=PROTOBUF)
        assert answer.status_code == 200 and answer.headers["content-type"] == PROTOBUF["Accept"]
        read = message(name)
        read.ParseFromString(answer.content)
        return read

    def send(self, body, status=200, **headers) -> Any:
        """Send a forward_backward."""
        path = "/api/v1/forward_backward"
        kind = {"Content-Type": "application/x-protobuf"}
        return self.checked(self.http.post(path, content=body, headers=kind | headers), status)


class PolledJournal(CallJournal):
    """Journal that knows which results clients wait for. The front looks for a result before it
    waits, and once more when it can be woken."""

    def __init__(self, run: Path):
        self._looks, self._polled = Counter(), queue.SimpleQueue()
        super().__init__(run)

    def result(self, request_id):
        self._looks[request_id] += 1
        if self._looks[request_id] == 2:
            self._polled.put(request_id)
        return super().result(request_id)

    def wait_for_poll(self, request_id):
        """Wait until a client waits for this result."""
        while self._polled.get(timeout=60) != request_id:
            pass


def stop(server):
    server.stop()
    assert not server._thread.is_alive()


@contextlib.contextmanager
def served(
    run, limits=QUICK, keys=None, hold=(), journal=None, facts=FACTS, adapters=None, **options
):
    with contextlib.ExitStack() as stack:
        if journal is None:
            journal = stack.enter_context(opened(run, **options))
        engine = stack.enter_context(StandIn(journal, hold))
        app = make_app(journal, limits, keys, facts, {"engine_busy": 0.5}, adapters=adapters)
        server = FrontServer(app)
        url = f"http://127.0.0.1:{server.start()}"
        stack.callback(stop, server)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        yield Service(url, http, journal, engine, server, app)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Yield a service with the usual limits, for tests that leave nothing behind."""
    with served(tmp_path_factory.mktemp("front")) as front:
        yield front


def batch(model, seq, tokens=(1, 2, 3), data=1, forward_only=False, loss="cross_entropy"):
    """Return the bytes of a ForwardBackwardRequest."""
    request = message("ForwardBackwardRequest")
    request.model_id, request.seq_id, request.loss_fn = model, seq, loss
    request.forward_only = forward_only
    for _ in range(data):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        entry = datum.loss_fn_inputs.add()
        entry.key = "target_tokens"
        entry.value.dense = np.array(tokens, "<i8").tobytes()
        entry.value.dtype, entry.value.shape[:] = 2, [len(tokens)]
    return request.SerializeToString()


def a_step(model, seq, **params):
    return {"model_id": model, "seq_id": seq, "adam_params": params}


def a_sample(sampler, seq, **more):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, **more}


def a_sampler(service, number=0):
    session = service.post("create_session", {"tags": []})["session_id"]
    value = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
    made = service.post("create_sampling_session", value)["sampling_session_id"]
    assert made == f"{session}:sample:{number}"
    return made


# -- responses


def test_a_model_is_made_trained_and_described(service):
    model = service.model(number=4)
    assert re.fullmatch(r"[0-9a-f-]{36}:train:4", model)
    two, one = service.send(batch(model, 2)), service.send(batch(model, 1, data=3))
    step = service.post("optim_step", a_step(model, 3, learning_rate=0.5))
    assert service.result(step)["metrics"] == {"lr:mean": 0.5}
    for promise, count in ((one, 3), (two, 1)):
        read = service.message(promise, "ForwardBackwardOutput")
        assert sum(record.num_datums for record in read.loss_fn_outputs) == count
    done = [seq for _, owner, seq in service.engine.done if owner == model]
    assert done == [1, 2, 3]
    info = service.post("get_info", {"model_id": model})
    assert (info["model_data"]["model_name"], info["lora_rank"]) == ("tiny/model", 8)
    run = service.get(f"training_runs/{model}")
    assert (run["training_run_id"], run["is_lora"], run["model_owner"]) == (
        model,
        True,
        "tml:organization_user:local",
    )


def test_packed_requests_are_unpacked(tmp_path):
    with served(tmp_path, hold={"forward_backward"}) as service:
        model = service.model()
        body = batch(model, 1, data=2)
        packed = zstandard.ZstdCompressor().compress(body)
        promise = service.send(packed, **{"Content-Encoding": "zstd"})
        assert service.journal.result(promise["request_id"]).kind == "forward_backward"
        assert promise["request_id"] in service.journal._parsed  # nobody parses it again
        # A retry that is not packed is the same call.
        assert service.send(body) == promise and service.journal.contradictions == 0


def test_the_same_call_sent_by_many_at_once_is_one(tmp_path):
    with served(tmp_path, hold={"optim_step", "asample"}) as service:
        model, sampler = service.model(), a_sampler(service)
        paths = [("optim_step", a_step(model, seq)) for seq in (1, 2, 3)]
        paths += [("asample", a_sample(sampler, seq, num_samples=3)) for seq in (0, 7)]
        sent = paths * 16
        random.Random(1).shuffle(sent)
        with ThreadPoolExecutor(16) as threads:
            promises = list(threads.map(lambda one: (one[1]["seq_id"], service.post(*one)), sent))
        assert len({promise["request_id"] for _, promise in promises}) == 5
        for sample in (each for _, each in promises if "sample_sequence_ids" in each):
            ids = [f"{sample['request_id']}:{i}" for i in range(3)]
            assert sample["sample_sequence_ids"] == ids
        assert len(service.journal.open_calls()) == 5


def test_a_result_comes_as_soon_as_it_is_there(tmp_path):
    limits = replace(QUICK, poll_seconds=3600)
    with (
        contextlib.closing(PolledJournal(tmp_path)) as journal,
        ThreadPoolExecutor(1) as threads,
        served(tmp_path, limits, hold={"optim_step"}, journal=journal) as service,
    ):
        promise = service.post("optim_step", a_step(service.model(), 1))
        poll = threads.submit(service.result, promise)
        journal.wait_for_poll(promise["request_id"])
        journal.finish(promise["request_id"], Outcome(b'{"metrics": {}}'))
        assert poll.result(60) == {"metrics": {}}


def test_a_result_that_is_not_there_is_asked_for_again(tmp_path):
    with served(tmp_path, replace(QUICK, poll_seconds=0.01), hold={"asample"}) as service:
        promise = service.post("asample", a_sample(a_sampler(service), 1))
        assert service.post("retrieve_future", promise, 408)["queue_state"] == "active"


def test_an_answer_that_is_protobuf_is_not_given_as_anything_else(service):
    promise = service.send(batch(service.model(), 1))
    service.post("retrieve_future", promise, 406, headers={"Accept": "application/json"})


def test_promises_that_nobody_knows(service):
    service.post("retrieve_future", {"request_id": "optim_step-1"}, 404)
    service.post("retrieve_future", {"request_id": "asample-1"}, 410)  # the client samples again


def test_results_that_are_no_longer_kept(tmp_path):
    keep = JournalExpiry(fetched=-1)
    with served(tmp_path, keep=keep) as service:
        model, sampler = service.model(), a_sampler(service)
        step = service.post("optim_step", a_step(model, 1))
        sample = service.post("asample", a_sample(sampler, 1))
        service.result(step)
        service.message(sample, "SampleResponse")
        service.journal.sweep()
        service.post("retrieve_future", step, 404)
        service.post("retrieve_future", sample, 410)


def test_samples_have_as_many_answers_as_were_asked_for(service):
    sampler = a_sampler(service)
    promise = service.post("asample", a_sample(sampler, 3, num_samples=2, prompt_logprobs=True))
    read = service.message(promise, "SampleResponse")
    assert len(read.sequences) == 2 and len(promise["sample_sequence_ids"]) == 2
    shown = service.get(f"samplers/{sampler}")
    assert shown == {"sampler_id": sampler, "base_model": "tiny", "model_path": None}
    for number in (1, 2):
        joined = service.post("join_sampling_session", {"sampling_session_id": sampler})
        assert joined["client_counter"] == number


def test_a_sample_may_be_cancelled(tmp_path):
    with served(tmp_path, hold={"asample"}) as service:
        promise = service.post("asample", a_sample(a_sampler(service), 1))
        assert service.post("cancel_future", promise) == {"cancelled": True}
        assert service.result(promise)["category"] == "user"
        assert service.post("cancel_future", {"request_id": "x"}) == {"cancelled": False}


def test_checkpoints_are_listed_loaded_given_an_end_downloaded_and_deleted(tmp_path):
    with served(tmp_path, keep=JournalExpiry(released=-1)) as service:
        model = service.model()
        named = {"model_id": model, "user_metadata": {"a": "b"}}
        paths = []
        for seq, kind in enumerate(("save_weights", "save_weights_for_sampler"), 1):
            value = {**named, "seq_id": seq, "path": f"c{seq}", "ttl_seconds": 3600}
            paths.append(service.result(service.post(kind, value))["path"])
        external = {**named, "seq_id": 3, "path": "out"}
        service.result(service.post("save_weights_external", external))
        run = f"training_runs/{model}/checkpoints"
        listed = {c["checkpoint_id"]: c for c in service.get(run)["checkpoints"]}
        assert sorted(listed) == ["external_weights/out", "sampler_weights/c2", "weights/c1"]
        assert listed["weights/c1"]["tinker_path"] == paths[0] == f"tinker://{model}/weights/c1"
        assert listed["weights/c1"]["user_metadata"] == {"a": "b"}
        assert (
            listed["weights/c1"]["expires_at"] and not listed["external_weights/out"]["expires_at"]
        )
        service.checked(service.http.put(f"/api/v1/{run}/weights/c1/ttl", json={}), 200)
        assert service.get(f"training_runs/{model}")["last_checkpoint"]["expires_at"] is None
        assert service.post("weights_info", {"tinker_path": paths[0]})["lora_rank"] == 8
        page = service.get("checkpoints", params={"limit": 2, "offset": 2})
        assert len(page["checkpoints"]) == 1 and page["cursor"]["total_count"] == 3
        session = model.split(":")[0]
        load = {"session_id": session, "model_seq_id": 1, "path": paths[0], "optimizer": True}
        promise = service.post("load_weights", load)
        assert service.result(promise)["model_id"] == f"{session}:train:1"
        assert service.post("load_weights", load)["request_id"] == promise["request_id"]
        into = {"model_id": model, "seq_id": 4, "path": paths[0], "optimizer": False}
        assert service.result(service.post("load_weights", into))["path"] == paths[0]
        folders = {c.id: c.folder for c in service.journal.checkpoints()}
        for name in ("weights/c1", "external_weights/out"):
            service.checked(service.http.delete(f"/api/v1/{run}/{name}"), 200)
            service.checked(service.http.delete(f"/api/v1/{run}/{name}"), 404)
        service.journal.sweep()
        # Another model starts from it, and the saving model has its state there.
        assert folders["weights/c1"].exists() and not folders["external_weights/out"].exists()
        service.checked(service.http.post(f"/api/v1/{run}/sampler_weights/c2/publish"), 422)


def test_downloads_are_for_who_knows_the_address_and_end(tmp_path):
    (tmp_path / "secret").write_text("s")
    with served(tmp_path / "run") as service:
        model = service.model()
        value = {"model_id": model, "seq_id": 1, "path": "out"}
        service.result(service.post("save_weights_external", value))
        (checkpoint,) = service.journal.checkpoints()
        (checkpoint.folder / "sub").mkdir()
        (checkpoint.folder / "sub" / "a b#.json").write_text("{}")
        (checkpoint.folder / "link").symlink_to(tmp_path / "secret")
        path = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        urls = service.get(path)["urls"]
        assert sorted(urls) == ["sub/a b#.json", "weights"]
        assert httpx.get(urls["sub/a b#.json"]).text == "{}"
        base = urls["weights"].removesuffix("/weights")
        for wrong in ("/link", "/..%2f..%2fsecret", "x/weights", "/%2e%2e/%2e%2e/journal.sqlite"):
            assert httpx.get(base + wrong).status_code == 404, wrong
        # A listed file may have been replaced since.
        (checkpoint.folder / "weights").unlink()
        assert httpx.get(urls["weights"]).status_code == 404
        value = {"model_id": model, "seq_id": 2, "path": "w"}
        service.result(service.post("save_weights", value))
        service.get(path.replace("external_weights/out", "weights/w"), 422)
    with served(tmp_path / "run", replace(QUICK, url_seconds=0.0)) as service:
        urls = service.get(path)["urls"]
        assert httpx.get(urls["sub/a b#.json"]).status_code == 404


def test_sessions_and_checkpoints_are_found(tmp_path):
    with served(tmp_path) as service:

        def found(what, id_name, limit=50, **fields):
            """Return the ids of all pages."""
            ids, cursor = [], None
            while True:
                value = {**fields, "limit": limit, **({"cursor": cursor} if cursor else {})}
                page = service.post(f"{what}/search", value)
                assert len(page[what]) == limit or page["next_cursor"] is None
                ids += [each[id_name] for each in page[what]]
                if (cursor := page["next_cursor"]) is None:
                    return ids

        made = [
            service.post(
                "create_session", {"display_name": name, "user_metadata": {"n": str(n), "all": "a"}}
            )["session_id"]
            for n, name in enumerate(("Sums of Two", "sums", "Pictures", None, "two PICTURES"))
        ]
        newest = [*reversed(made)]
        service.post(f"sessions/{made[0]}/finish", {"reason": {"type": "errored"}})
        service.post(f"sessions/{made[1]}/finish", {"reason": {"type": "success"}})
        sessions = partial(found, "sessions", "session_id")
        finished = {"type": "client_finished"}
        for fields, expected in (
            ({}, newest),
            ({"limit": 2}, newest),
            ({"limit": 5}, newest),
            ({"display_name": "pictures"}, [made[4], made[2]]),
            ({"display_name": "Two sums"}, [made[0]]),
            ({"display_name": "sums", "session_id": made[3]}, [made[3], made[1], made[0]]),
            ({"session_id": "x"}, []),
            ({"user_metadata": {"all": "a", "n": "3"}}, [made[3]]),
            ({"user_metadata": {"all": "b"}}, []),
            ({"statuses": [{"type": "active"}]}, newest[:3]),
            ({"statuses": [finished]}, [made[1], made[0]]),
            ({"statuses": [finished | {"reasons": ["errored"]}]}, [made[0]]),
            ({"statuses": [{"type": "failed"}, {"type": "cancelled"}]}, []),
            ({"owner": {"type": "user", "owner_urns": ["tml:organization_user:x"]}}, []),
            ({"owner": {"type": "user", "owner_urns": ["tml:organization_user:local"]}}, newest),
            ({"owner": {"type": "accessible"}, "project_ids": ["default"]}, newest),
        ):
            assert sessions(**fields) == expected, fields
        for what, wrong in product(
            ("sessions", "checkpoints"),
            (
                {"limit": 0},
                {"limit": 201},
                {"owner": {"type": "x"}},
                {"project_ids": ["p"]},
                {"cursor": {"last_created_at": "2026-01-01T00:00:00"}},
                {"cursor": {"last_created_at": "x", "last_session_id": "y"}},
                {"user_metadata": {"a": 1}},
                {"statuses": [{"type": "x"}], "checkpoint_type": "x"},
            ),
        ):
            service.post(f"{what}/search", wrong, 422)
        model = service.model()
        for seq, kind in enumerate(("save_weights", "save_weights_for_sampler") * 2, 1):
            value = {"model_id": model, "seq_id": seq, "path": f"c{seq}"}
            value["user_metadata"] = {"even": str(seq % 2 == 0)}
            service.result(service.post(kind, value))
        listed = [c["tinker_path"] for c in service.get("checkpoints")["checkpoints"]]
        names = ["c4", "c3", "c2", "c1"]
        assert [path.rpartition("/")[2] for path in listed] == names
        checkpoints = partial(found, "checkpoints", "tinker_path")
        for fields, expected in (
            ({}, listed),
            ({"limit": 3}, listed),
            ({"checkpoint_type": "training"}, listed[1::2]),
            ({"user_metadata": {"even": "True"}}, listed[::2]),
            ({"base_models": ["tiny/model"]}, listed),
            ({"base_models": ["other"]}, []),
            ({"base_models": []}, []),
        ):
            assert checkpoints(**fields) == expected, fields
        (summary,) = service.post("sessions/search", {"session_id": model.split(":")[0]})[
            "sessions"
        ]
        assert (summary["checkpoints_count"], summary["checkpoint_storage_bytes"]) == (4, 40)


def test_checkpoints_are_copied_and_counted(tmp_path):
    with served(tmp_path, keep=JournalExpiry(released=-1)) as service:
        model = service.model()
        session = model.split(":")[0]
        value = {"model_id": model, "seq_id": 1, "path": "mine", "user_metadata": {"a": "b"}}
        path = service.result(service.post("save_weights", value))["path"]
        (source,) = service.journal.checkpoints()
        project = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 3600}
        retry = {"headers": {"X-Idempotency-Key": "1"}}
        first = service.post("copy_weights", project, **retry)["tinker_path"]
        assert service.post("copy_weights", project, **retry)["tinker_path"] == first
        service.post("copy_weights", project | {"ttl_seconds": 7200}, 422, **retry)
        place = {"source_path": path, "session_id": session, "model_seq_id": 7}
        second = service.post("copy_weights", place)["tinker_path"]
        assert second == f"tinker://{session}:train:7/weights/mine"
        assert service.post("copy_weights", place)["tinker_path"] == second
        for wrong, problem in (
            (place | {"model_seq_id": 0}, "model_seq_id: the session has another run"),
            (place | {"model_seq_id": None}, "session_id, model_seq_id: give both"),
            (place | {"ttl_seconds": 0}, "ttl_seconds"),
            (place | {"source_path": 5}, "source_path"),
        ):
            assert problem in service.post("copy_weights", wrong, 422)["error"]
        other = {"headers": {"X-Tinker-Weights-Access-Token": "x"}}
        assert "weights_access_token" in service.post("copy_weights", place, 422, **other)["error"]
        service.post("copy_weights", place | {"source_path": path + "x"}, 404)
        service.post("copy_weights", place | {"session_id": "x"}, 404)
        copies = {c.path: c for c in service.journal.checkpoints()}
        assert {c.folder for c in copies.values()} == {source.folder} and len(copies) == 3
        assert copies[first].expires and not copies[second].expires
        assert copies[second].user_metadata == {"a": "b"}
        (usage,) = service.get("billing/usage/checkpoints/current")["data"]
        sizes = usage["checkpoint_count"], usage["size_bytes"], usage["size_gigabytes"]
        assert sizes == (3, 10, 1e-8)  # they share a folder
        service.get("billing/usage/checkpoints/current?project_id=x", 422)
        run = second.removeprefix("tinker://").split("/")[0]
        assert service.get(f"training_runs/{run}")["lora_rank"] == 8
        service.post("optim_step", a_step(run, 1), 404)
        for each in (model, first.split("/")[2]):
            url = f"/api/v1/training_runs/{each}/checkpoints/weights/mine"
            service.checked(service.http.delete(url), 200)
        service.post("unload_model", {"model_id": model})
        service.journal.sweep()
        load = {"session_id": session, "model_seq_id": 8, "path": second, "optimizer": True}
        assert service.result(service.post("load_weights", load))["path"] == second


def test_the_audit_log_has_what_happened_to_checkpoints(tmp_path):
    with served(tmp_path) as service:
        model = service.model()
        session = model.split(":")[0]
        value = {"model_id": model, "seq_id": 1, "path": "a"}
        path = service.result(service.post("save_weights", value))["path"]
        value |= {"seq_id": 2, "ttl_seconds": 3600}
        out = service.result(service.post("save_weights_external", value))["path"]
        checkpoint = f"training_runs/{model}/checkpoints"
        service.get(f"{checkpoint}/external_weights/a/external_weights_urls")
        copy = service.post("copy_weights", {"source_path": path})["tinker_path"]
        new = {"session_id": session, "model_seq_id": 8, "path": path, "optimizer": True}
        service.result(service.post("load_weights", new))
        into = {"model_id": model, "seq_id": 3, "path": copy, "optimizer": True}
        service.result(service.post("load_weights", into))
        sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": copy}
        service.post("create_sampling_session", sampling)
        service.http.put(f"/api/v1/{checkpoint}/weights/a/ttl", json={"ttl_seconds": 9})
        service.http.delete(f"/api/v1/{checkpoint}/weights/a")
        service.journal.set_expiry(copy, 1.0)
        service.journal.sweep()
        entries = service.get("audit")["entries"]
        details = [each["event_details"] for each in entries]
        assert [
            (e["event"][len("checkpoint_"):], e["tinker_path"], d.get("purpose", d.get("reason")))
            for e, d in zip(entries, details, strict=True)
        ] == [
            ("create", path, None),
            ("create", out, None),
            ("read", out, "download"),
            ("create", copy, None),
            ("read", path, "copy"),
            ("read", path, "load"),
            ("read", copy, "load"),
            ("read", copy, "sample"),
            ("update", path, None),
            ("delete", path, "deleted"),
            ("update", copy, None),
            ("delete", copy, "expired"),
        ]  # fmt: skip
        times = [each["timestamp"] for each in entries]
        assert times == sorted(times)
        assert {each["model_id"] for each in entries} == {model, copy.split("/")[2]}
        day = times[0][:10]
        for query, count in (
            ("event_type=checkpoints", len(times)),
            ("event_type=teams", 0),
            ("day=2020-01-01", 0),
            ("day=2099-01-01", 0),
            (f"event_type=all&day={day}", sum(each.startswith(day) for each in times)),
        ):
            assert len(service.get(f"audit?{query}")["entries"]) == count, query
        for query in ("event_type=x", "day=yesterday", "day=2026-13-01"):
            assert query.split("=")[0] in service.get(f"audit?{query}", 422)["error"]
    with served(tmp_path, keep=JournalExpiry(events=0)) as service:
        assert service.get("audit")["entries"] == entries  # also after a restart
        service.journal.sweep()
        assert service.get("audit")["entries"] == []
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:  # as an older program has written it
        for kind in ("create", "delete", "update", "read"):
            db.execute(f"DROP TRIGGER checkpoint_{kind}")
        db.execute("DROP TABLE events")
    with served(tmp_path) as service:
        service.post("copy_weights", {"source_path": out})
        events = [each["event"] for each in service.get("audit")["entries"]]
        assert events == ["checkpoint_create", "checkpoint_read"]


def test_sessions_are_heard_of_and_finished(service):
    made = service.post("create_session", {"tags": ["a"], "user_metadata": {"n": 1}})
    session = made["session_id"]
    service.post("session_heartbeat", {"session_id": session})
    shown = service.get(f"sessions/{session}")
    assert shown["user_metadata"] == {"n": "1"} and shown["training_run_ids"] == []
    assert session in service.get("sessions", params={"limit": 1000})["sessions"]
    service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": "x"})
    service.post("session_heartbeat", {"session_id": session}, 410)
    service.post("session_heartbeat", {"session_id": "x"}, 404)
    late = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model"}
    service.post("create_model", late, 410)


def test_what_is_not_supported_is_said_by_name(service):
    for path in ("create_custom_loss", "sessions/x/project", "retrieve_futures"):
        assert f"/api/v1/{path}" in service.post(path, {}, 404)["detail"]
    for method, path in (("GET", "/x"), ("GET", "/api/v1/asample"), ("PATCH", "/api/v1/healthz")):
        answer = service.http.request(method, path)
        assert answer.status_code in (404, 405) and path in answer.json()["detail"]
    session = service.post("create_session", {})["session_id"]
    value = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model"}
    for wrong, named in (
        ({"base_model": "other"}, "this server trains tiny/model or tiny"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type"),
        ({"lora_config": {"rank": -1}}, "lora_config.rank"),
    ):
        assert named in service.post("create_model", value | wrong, 422)["error"]
    sampler = a_sampler(service)
    for wrong, named in (
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"model_path": "tinker://a/weights/b"}, "model_path"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop: give a text, a list of"),
        ({"sampling_params": {"stop": [-1]}}, "sampling_params.stop: give"),
        ({"sampling_params": {"stop": {}}}, "sampling_params.stop: give"),
        ({"topk_sample_logprobs": 600}, "topk_sample_logprobs=600 exceeds the 509 tokens"),
        # The loss would be refused later, so no sample is drawn for it.
        ({"record_stability_info": True}, "record_stability_info: the loss stable_reinforce"),
        ({"seq_id": "x"}, "seq_id"),
    ):
        assert named in service.post("asample", a_sample(sampler, 0) | wrong, 422)["error"]


def test_a_request_that_is_wrong_takes_its_turn_and_the_model_goes_on(service):
    model = service.model()
    encrypted = {"path": "a", "age_encryption_recipients": ["age1"]}
    wrong = [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "x"}}, "optimizer_params"),
        ("save_weights", {"path": "a/b"}, "path=a/b"),
        ("save_weights", {}, "path"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": False}, "no checkpoint"),
        ("save_weights_external", encrypted, "age_encryption"),
    ]
    for seq, (path, value, named) in reversed([*enumerate(wrong, 1)]):
        failure = service.result(service.post(path, {"model_id": model, "seq_id": seq, **value}))
        assert failure["category"] == "user" and named in failure["error"], failure
    cut = batch(model, 7)[:-3]
    failure = service.result(service.send(cut))
    assert failure["category"] == "user" and "protobuf" in failure["error"]
    after = service.post("optim_step", a_step(model, 8))
    assert service.result(after)["metrics"] == {"lr:mean": 1e-4}
    # These requests name no turn of a model.
    service.post("optim_step", {"model_id": model, "seq_id": 0}, 422)
    service.post("optim_step", {"model_id": model}, 422)
    service.post("optim_step", a_step("no such model", 1), 404)
    for kind in ("optim_step", "load_weights", "save_weights", "unload_model", "get_info"):
        half = json.dumps({"model_id": "\ud800", "seq_id": 1})  # half of a pair of surrogates
        service.checked(service.http.post(f"/api/v1/{kind}", content=half), 422)
    service.send(b"\x0a\xff", 422)
    service.send(batch("no such model", 1), 404)


@pytest.mark.parametrize("given, taken", [("Infinity", 0.0), ("0", 0.0), ("1.5", 1.5)])
def test_a_norm_out_of_reach_clips_nothing(given, taken):
    form = AdamParams.model_validate_json(f'{{"grad_clip_norm": {given}}}')
    assert form.grad_clip_norm == taken
    with pytest.raises(ValidationError, match="0 or inf for none"):
        AdamParams.model_validate_json('{"grad_clip_norm": NaN}')


def test_a_number_is_that_of_one_call(service):
    """No client gets the result of another call, and no call waits forever."""
    model = service.model(number=3)
    first = service.post("optim_step", a_step(model, 1))
    assert "seq_id" in service.post("optim_step", a_step(model, 1, beta1=0.5), 422)["error"]
    assert "with another content" in service.send(batch(model, 1), 422)["error"]
    assert service.post("optim_step", a_step(model, 1)) == first
    again = {"session_id": model.split(":")[0], "model_seq_id": 3, "base_model": "tiny"}
    assert "model_seq_id" in service.post("create_model", again, 422)["error"]
    sampler = a_sampler(service)
    service.post("asample", a_sample(sampler, 1))
    service.post("asample", a_sample(sampler, 1, num_samples=2), 422)
    assert service.result(service.post("optim_step", a_step(model, 2)))["metrics"]


def test_a_model_that_was_unloaded_is_gone(service):
    model = service.model()
    promise = service.post("unload_model", {"model_id": model})
    assert service.result(promise)["type"] == "unload_model"
    assert service.post("unload_model", {"model_id": model}) == promise
    assert "was unloaded" in service.post("optim_step", a_step(model, 1), 404)["error"]


def test_what_was_promised_before_a_restart_is_found_after_it(tmp_path):
    with served(tmp_path, hold={"optim_step"}) as service:
        model = service.model()
        step, sample = a_step(model, 1), a_sample(a_sampler(service), 1)
        waiting, done = service.post("optim_step", step), service.post("asample", sample)
        service.message(done, "SampleResponse")
    with served(tmp_path) as service:
        assert service.post("optim_step", step) == waiting
        assert service.result(waiting)["metrics"] == {"lr:mean": 1e-4}
        assert service.post("asample", sample) == done
        service.message(done, "SampleResponse")
        assert [call[0] for call in service.engine.done] == ["optim_step"]


def test_a_server_that_stops_lets_go_of_who_waits(tmp_path):
    limits = replace(QUICK, poll_seconds=3600)
    with contextlib.closing(PolledJournal(tmp_path)) as journal, contextlib.ExitStack() as stack:
        service = stack.enter_context(
            served(tmp_path, limits, journal=journal, hold={"optim_step"})
        )
        promise = service.post("optim_step", a_step(service.model(), 1))
        with ThreadPoolExecutor(1) as threads:
            poll = threads.submit(
                httpx.post, f"{service.url}/api/v1/retrieve_future", json=promise, timeout=60
            )
            journal.wait_for_poll(promise["request_id"])
            stack.close()
            assert poll.result(60).status_code == 408


def test_who_asks_while_it_stops_does_not_wait(tmp_path):
    with opened(tmp_path) as journal:
        waiters = ResultWaiters(journal)
        waiters.close()
        asked = waiters.wait_until("x", lambda: None, 3600)
        assert asyncio.run(asyncio.wait_for(asked, 60)) is None


# -- keys


@pytest.fixture
def keyed(tmp_path):
    path = tmp_path / "keys"
    keys = {name: add_key(name, path) for name in ("alice", "bob")}
    with served(tmp_path / "run", keys=ApiKeys(path)) as service:
        yield service, keys, path


def test_a_stranger_learns_nothing(keyed):
    service, keys, _ = keyed
    assert service.get("healthz") == {"status": "ok"}
    assert service.http.get("/healthz").status_code == 200
    for wrong in (None, "", "tml-x", keys["alice"][:-1], keys["alice"] + "x", "\u00e9"):
        headers = {} if wrong is None else {"X-API-Key": wrong.encode()}
        service.post("create_session", {}, 401, headers=headers)
        for path in ("/", "/metrics", "/api/v1/training_runs", "/api/v1/get_server_capabilities"):
            answer = service.http.get(path, headers=headers)
            assert answer.status_code == 401 and "Basic" in answer.headers["www-authenticate"]
    for good in (
        {"X-API-Key": keys["alice"]},
        {"Authorization": f"Bearer {keys['alice']}"},
        {"Authorization": "Basic " + base64.b64encode(f"any:{keys['bob']}".encode()).decode()},
    ):
        assert service.http.get("/", headers=good).status_code == 200
    for bad in ("Basic !!!", "Basic " + base64.b64encode(b"\xff\xff").decode(), "Digest x"):
        assert service.http.get("/", headers={"Authorization": bad}).status_code == 401


def test_a_key_may_be_exchanged_for_a_token(keyed, monkeypatch):
    service, keys, path = keyed
    alice, bob = ({"X-API-Key": keys[name]} for name in ("alice", "bob"))
    assert service.post("client/config", {}, headers=alice)["pjwt_auth_enabled"] is True
    token = service.post("auth/token", {}, headers=alice)["jwt"]
    head, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims.pop("exp") - claims.pop("iat") == 3600
    owner = "tml:organization_user:alice"
    assert claims == {"sub": owner, "org_id": "megatron-vlm", "email": ""}
    model = service.model(**{"headers": {"X-API-Key": token}})
    assert service.get(f"training_runs/{model}", headers=alice)["model_owner"] == owner
    assert service.get("sessions", headers={"Authorization": f"Bearer {token}"})["sessions"]
    service.get(f"training_runs/{model}", 404, headers=bob)
    # A token is not exchanged for another, which would outlive its key.
    service.post("auth/token", {}, 401, headers={"X-API-Key": token})
    other = service.post("auth/token", {}, headers=bob)["jwt"].split(".")
    none = base64.urlsafe_b64encode(b'{"alg": "none", "typ": "JWT"}').decode().rstrip("=")
    for forged in (
        f"{head}.{body}.{signature[:-2]}AA",
        f"{head}.{body}.",
        f"{none}.{body}.",
        f"{none}.{body}.{signature}",
        f"{head}.{other[1]}.{signature}",
        f"{head}.{body}.{other[2]}",
        "..",
        "a.b.c",
        f"{head}.bnVsbA.{signature}",
        f"{head}.{body}.\u00e9",
    ):
        service_refuses(service, forged)
    with monkeypatch.context() as later:
        now = time.time
        later.setattr(api_keys.time, "time", lambda: now() + 3601)
        service_refuses(service, token)
    service.get("sessions", headers={"X-API-Key": token})
    renewed = {"X-API-Key": add_key("alice", path)}  # the old key and its tokens end at once
    service_refuses(service, token)
    token = service.post("auth/token", {}, headers=renewed)["jwt"]
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if "alice" not in line))
    service_refuses(service, token)


def service_refuses(service, token):
    for headers in ({"X-API-Key": token.encode()}, {"Authorization": f"Bearer {token}".encode()}):
        answer = service.http.get("/api/v1/sessions", headers=headers)
        assert answer.status_code == 401, token
        assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'


def test_what_belongs_to_another_key_is_not_there(keyed):
    service, keys, _ = keyed
    alice, bob = ({"headers": {"X-API-Key": keys[name]}} for name in ("alice", "bob"))
    model = service.model(**alice)
    session = model.split(":")[0]
    saved = {"model_id": model, "seq_id": 1, "path": "mine"}
    promise = service.post("save_weights", saved, **alice)
    path = service.result(promise, **alice)["path"]
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = service.post("create_sampling_session", sampling, **alice)["sampling_session_id"]
    own = service.post("create_session", {}, **bob)["session_id"]
    for name, value in (
        ("retrieve_future", promise),
        ("get_info", {"model_id": model}),
        ("optim_step", a_step(model, 2)),
        ("unload_model", {"model_id": model}),
        ("asample", a_sample(sampler, 0)),
        ("join_sampling_session", {"sampling_session_id": sampler}),
        ("create_sampling_session", {**sampling, "session_id": own}),
        ("create_sampling_session", {**sampling, "base_model": "tiny", "model_path": None}),
        ("load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}),
        ("weights_info", {"tinker_path": path}),
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {}),
        ("copy_weights", {"source_path": path}),
    ):
        service.post(name, value, 404, **bob)
    for search in ("sessions", "checkpoints"):
        for owner in ("own", "accessible", "user"):
            urns = ["tml:organization_user:alice"]
            value = {"owner": {"type": owner, "owner_urns": urns}}
            found = service.post(f"{search}/search", value, **bob)[search]
            assert found == [] or [each["session_id"] for each in found] == [own]
            (there,) = service.post(f"{search}/search", value, **alice)[search]
            assert path == there.get("tinker_path", path)
    assert service.get("billing/usage/checkpoints/current", **bob) == {"data": []}
    assert service.get("audit", **bob) == {"entries": []} != service.get("audit", **alice)
    run = f"training_runs/{model}"
    mine = f"{run}/checkpoints/weights/mine"
    others = (f"samplers/{sampler}", f"sessions/{session}", f"{mine}/external_weights_urls")
    for get in (run, f"{run}/checkpoints", *others):
        service.get(get, 404, **bob)
    for method, owned in (("DELETE", mine), ("PUT", f"{mine}/ttl")):
        service.checked(service.http.request(method, f"/api/v1/{owned}", **bob), 404)
    for listed in ("training_runs", "checkpoints"):
        assert service.get(listed, **bob)["cursor"]["total_count"] == 0
        assert service.get(listed, **alice)["cursor"]["total_count"] == 1
    assert model not in service.http.get("/", **bob).text
    assert model in service.http.get("/", **alice).text
    assert service.journal.checkpoint(path) is not None and service.journal.open_calls() == []


def test_a_key_is_written_as_its_digest_and_known_at_once(keyed):
    service, keys, path = keyed
    text = path.read_text()
    assert all(key not in text and key[4:] not in text for key in keys.values())
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", keys["alice"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    new = add_key("alice", path)
    service.post("create_session", {}, 401, headers={"X-API-Key": keys["alice"]})
    for key in (new, keys["bob"]):
        service.post("create_session", {}, headers={"X-API-Key": key})
    # A key file that breaks while the server runs admits nobody, and the server goes on.
    path.write_text("nonsense")
    service.post("create_session", {}, 503, headers={"X-API-Key": new})


WRONG_KEYS = [f"a {'0' * 63}", f"a {'G' * 64}", f"local {'0' * 64}", f"a/b {'0' * 64}"]


@pytest.mark.parametrize("text", ["a", *WRONG_KEYS, f"a {'0' * 64}\na {'1' * 64}"])
def test_files_of_keys_that_are_refused(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\n{text}\n")
    line = f"{path} line {2 + len(text.splitlines())}"
    with raises(ConfigError, place=line, problem_has="NAME SHA256"):
        ApiKeys(path)
    with raises(ConfigError, place=line, problem_has="NAME SHA256"):
        add_key("b", path)
    assert path.read_text() == f"# keys\n\n{text}\n"


def test_keys_need_a_file_and_a_name(tmp_path):
    with raises(ConfigError, key="serve.keys", found=str(tmp_path / "none")):
        ApiKeys(tmp_path / "none")
    for name in ("", "a b", "local", "a" * 65, "a\n"):
        with raises(ConfigError, key="--add-client NAME", found=name):
            add_key(name, tmp_path / "keys")


def test_without_keys_a_server_stays_on_loopback(tmp_path):
    path = tmp_path / "keys"
    add_key("a", path)
    with opened(tmp_path / "run") as journal:
        for host in ("0.0.0.0", "::", "example.org", "10.0.0.1"):
            with raises(ConfigError, key="serve.host", found=host):
                FrontServer(make_app(journal, QUICK, None, FACTS), host)
            FrontServer(make_app(journal, QUICK, ApiKeys(path), FACTS), host)
        FrontServer(make_app(journal, QUICK, None, FACTS), "127.0.0.2")


def test_a_page_of_somebody_else_in_the_browser_gets_nothing(service):
    port = service.url.rpartition(":")[2]
    origins = ("http://evil.example", "null", f"http://localhost:{port}")
    foreign = [("Host", f"rebound.example:{port}"), ("Host", "[::1")]
    for name, value in (*foreign, *(("Origin", origin) for origin in origins)):
        answer = service.http.post("/api/v1/create_session", json={}, headers={name: value})
        assert answer.status_code in (400, 403), (name, value)
    kinds = {"/v1/models": "invalid_request_error", "/v1/messages": "permission_error"}
    for path, kind in kinds.items():
        answer = service.http.post(path, headers={"Origin": "null"})
        assert answer.status_code == 403 and answer.json()["error"]["type"] == kind
    for host in (f"localhost:{port}", f"127.0.0.2:{port}", f"[::1]:{port}"):
        service.post("create_session", {}, headers={"Host": host})


def test_a_port_that_is_taken_is_said(tmp_path):
    with opened(tmp_path) as journal, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = FrontServer(make_app(journal, QUICK, None, FACTS), port=port)
        problem = "Address already in use"
        with raises(ConfigError, key="serve.port", found=port, problem_has=problem):
            server.start()


# -- limits


SMALL = RequestLimits(
    body_bytes=4000, unpacked_bytes=8000, sample_bytes=3000, form_bytes=2000, data=3, chunks=4,
    pictures=2, tokens=50, max_tokens=10, num_samples=4, top_k=5, stop=2, open_calls=4, sessions=3,
    models=2, header_bytes=8000,
)  # fmt: skip


@pytest.fixture
def small(tmp_path):
    bounds = Bounds(SMALL.open_calls, SMALL.open_bytes, SMALL.models)
    with served(tmp_path, SMALL, bounds=bounds, hold={"asample", "optim_step"}) as service:
        yield service


def test_what_a_batch_may_have(small):
    model = small.model()
    many = message("ForwardBackwardRequest")
    many.ParseFromString(batch(model, 2))
    for _ in range(4):
        many.data[0].model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    pictures = message("ForwardBackwardRequest")
    pictures.ParseFromString(batch(model, 3))
    for _ in range(3):
        picture = pictures.data[0].model_input.add().image
        picture.data, picture.format = b"\x89PNG\r\n\x1a\n", "png"
    bodies = [
        (batch(model, 1, data=4), "4 datums, and limit data is 3"),
        (many.SerializeToString(), "5 chunks, and limit chunks is 4"),
        (pictures.SerializeToString(), "3 pictures, and limit pictures is 2"),
        (batch(model, 4, tokens=range(51)), "51 tokens, and limit tokens is 50"),
        (batch(model, 5, tokens=range(400)), "more than 4000 bytes, which is limit body_bytes"),
    ]
    for body, named in bodies:
        failure = small.result(small.send(body))
        assert failure["category"] == "user" and named in failure["error"], failure
    packed = zstandard.ZstdCompressor().compress(batch(model, 6, tokens=[7] * 3000))
    failure = small.result(small.send(packed, **{"Content-Encoding": "zstd"}))
    assert "8000" in failure["error"]
    small.send(b"\x28\xb5\x2f\xfd" + packed[9:], 422, **{"Content-Encoding": "zstd"})
    small.send(b"nothing", 422, **{"Content-Encoding": "zstd"})
    small.send(batch(model, 7), 415, **{"Content-Encoding": "gzip"})
    # Each of these took its turn.
    assert "request_id" in small.send(batch(model, 7))
    _until(lambda: small.journal.model(model).next_seq == 8)


def test_what_a_sample_may_have(small):
    sampler = a_sampler(small)
    text = {"type": "encoded_text", "tokens": [1] * 20}
    for more, named in (
        ({"num_samples": 5}, "limit num_samples is 4"),
        ({"sampling_params": {"max_tokens": 11}}, "limit max_tokens is 10"),
        ({"sampling_params": {"stop": ["a", "b", "c"]}}, "limit stop is 2"),
        ({"topk_prompt_logprobs": 6}, "limit top_k is 5"),
        ({"topk_sample_logprobs": 6}, "limit top_k is 5"),
        ({"prompt": {"chunks": [text] * 5}}, "limit chunks is 4"),
        ({"prompt": {"chunks": [text] * 3}}, "60 tokens, and limit tokens is 50"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}] * 3}}, "limit pictures is 2"),
    ):
        refusal = small.post("asample", a_sample(sampler, 1) | more, 422)
        assert named in refusal["error"], refusal
    small.post("asample", a_sample(sampler, 1, sampling_params={"max_tokens": 10}))


def test_how_much_a_key_may_have_at_a_time(small):
    sampler, model = a_sampler(small), small.model()
    small.model(number=1)
    session = model.split(":")[0]
    another = {"session_id": session, "model_seq_id": 2, "base_model": "tiny"}
    # A limit that does not pass by itself is reported at once, as clients repeat a 429 silently.
    assert "limit models is 2" in small.post("create_model", another, 422)["error"]
    assert "limit sessions is 3" in small.post("create_session", {}, 422)["error"]
    for seq in range(3):
        small.post("asample", a_sample(sampler, seq))
    small.post("optim_step", a_step(model, 2))
    for path, value in (("asample", a_sample(sampler, 9)), ("optim_step", a_step(model, 3))):
        assert "limit open_calls is 4" in small.post(path, value, 429)["error"]
    small.post("asample", a_sample(sampler, 1))
    small.post("optim_step", a_step(model, 1))  # the others wait for it


def test_bodies_that_are_too_large(small):
    def pieces():
        for _ in range(100):
            yield b" " * int(limit * times / 100)

    failures, limits = [], (("asample", 3000), ("optim_step", 2000))
    for (path, limit), times, announced in product(limits, (1.5, 3, 3000), (True, False)):
        body = b"".join(pieces()) if announced else pieces()
        try:
            answer = small.http.post(f"/api/v1/{path}", content=body)
            text = f"more than {limit} bytes"
            refused = answer.status_code == 413 and text in answer.json()["error"]
        except httpx.TransportError:
            refused = times == 3000  # the connection may end before such a body does
        if not refused or small.journal.open_calls():
            failures.append((path, times, announced))
        _until(lambda: _bodies_bytes(small) == 0)
    assert not failures


def test_bodies_that_are_received_together_have_a_limit(tmp_path):
    with served(tmp_path, replace(QUICK, bodies_bytes=20_000)) as service:
        text = json.dumps({"session_id": "x" * 15_000}).encode()
        with _connected(service) as slow:
            slow.sendall(_head("session_heartbeat", len(text)) + text[:-1])
            _until(lambda: _bodies_bytes(service) == len(text) - 1)
            refusal = service.post("session_heartbeat", {"session_id": "x" * 15_000}, 429)
            assert "limit bodies_bytes is 20000" in refusal["error"]
        _until(
            lambda: service.http.post("/api/v1/session_heartbeat", content=text).status_code == 422
        )


@pytest.mark.slow
def test_slow_clients_do_not_hold_their_place(tmp_path):
    """Clients send a byte now and then: in the headers, after a first request, and in the body."""
    limits = replace(QUICK, body_seconds=1.0, headers_seconds=1.0)
    first = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with served(tmp_path, limits) as service:
        for sent, drops in (
            (b"", b""),
            (b"POST /api/v1/optim_step HTTP/1.1\r\nX-", b""),
            (first + b"POST /api/v1/optim_step HTTP/1.1\r\nX-", b'{"status":"ok"}'),
            (_head("optim_step", 1000), b"limit body_seconds"),
        ):
            with _connected(service) as slow:
                slow.sendall(sent)
                received, pauses = bytearray(), 0
                slow.settimeout(0.2)  # the client's pause between two bytes
                with contextlib.suppress(ConnectionError):
                    while pauses < 30:
                        try:
                            piece = slow.recv(4096)
                        except TimeoutError:
                            pauses += 1
                            if sent:
                                slow.sendall(b"a")
                            continue
                        if not piece:
                            break
                        received += piece
                assert pauses < 30, sent
                assert drops in bytes(received), received
        assert service.get("healthz") == {"status": "ok"}


def test_a_client_that_does_not_read_its_answer_loses_it(tmp_path):
    limits = replace(QUICK, answer_seconds=0.5)
    with served(tmp_path, limits) as service:
        model = service.model()
        value = {"model_id": model, "seq_id": 1, "path": "out"}
        service.result(service.post("save_weights_external", value))
        (checkpoint,) = service.journal.checkpoints()
        (checkpoint.folder / "weights").write_bytes(b"x" * 50_000_000)
        path = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        url = httpx.URL(service.get(path)["urls"]["weights"])
        with _connected(service) as slow:
            slow.sendall(b"GET " + url.raw_path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            received = len(slow.recv(1))
            state, client = service.server._server.server_state, slow.getsockname()
            _until(lambda: client not in {each.client for each in list(state.connections)})
            slow.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while piece := slow.recv(2**20):
                    received += len(piece)
            assert received < 50_000_000
        assert len(httpx.get(url).content) == 50_000_000


def test_long_headers_are_refused(small):
    with _connected(small) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"a" * 9000)
        connection.settimeout(60)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert small.get("healthz") == {"status": "ok"}


def test_more_connections_than_there_may_be_are_told_so(tmp_path):
    with served(tmp_path, replace(QUICK, connections=20)) as service:
        with contextlib.ExitStack() as stack:
            for _ in range(25):
                stack.enter_context(_connected(service))
            _until(lambda: httpx.get(f"{service.url}/healthz").status_code == 503)
            assert httpx.get(f"{service.url}/healthz").text
        _until(lambda: httpx.get(f"{service.url}/healthz").status_code == 200)


def _head(path, length):
    text = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n"
    return text.encode()


def _connected(service):
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def _bodies_bytes(service):
    return _figures(service.http.get("/metrics").text)["megatron_vlm_bodies_bytes"]


def _until(there, seconds=60):
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


# -- malformed input


def test_nothing_that_is_sent_keeps_the_server_from_answering(service):
    chance = random.Random(11)
    model, sampler = service.model(), a_sampler(service)
    session = model.split(":")[0]
    saved = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 3600}
    service.result(service.post("save_weights", saved))
    valid = {
        "client/config": {"sdk_version": "1"},
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "1"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "tiny",
                         "lora_config": {"rank": 8}},
        "load_weights": {"session_id": session, "model_seq_id": 5, "optimizer": True,
                         "path": f"tinker://{model}/weights/a"},
        "optim_step": a_step(model, 2, learning_rate=0.1, beta1=0.5),
        "save_weights": {**saved, "seq_id": 3},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 3},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 9,
                                    "model_path": f"tinker://{model}/weights/a"},
        "asample": a_sample(sampler, 1, sampling_params={"stop": ["a"], "max_tokens": 4}),
        "retrieve_future": {"request_id": "asample-1"},
        "cancel_future": {"request_id": "asample-1"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "get_info": {"model_id": model},
        "sessions/search": {"statuses": [{"type": "client_finished", "reasons": ["success"]}],
                            "cursor": {"last_created_at": "2026-01-01T00:00:00Z",
                                       "last_session_id": session}},
        "checkpoints/search": {"user_metadata": {"a": "b"}, "base_models": ["tiny"]},
        "copy_weights": {"source_path": f"tinker://{model}/weights/a", "session_id": session,
                         "model_seq_id": 9},
        "auth/token": {},
    }  # fmt: skip
    statuses = set()
    for _ in range(40):
        for path, value in valid.items():
            content = mutate_json(value, chance)
            answer = service.http.post(f"/api/v1/{path}", content=content)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 404, 406, 410, 415, 422, 429), (path, content)
            assert answer.json() is not None
    for path in valid:
        for content in (DEEP.encode(), b"", b"null", b"\xff\xfe", b"[]", b'"' * 99, b"{" * 9999):
            status = service.http.post(f"/api/v1/{path}", content=content).status_code
            assert status in (200, 422), (path, content, status)
    good = batch(model, 50, data=2)
    for _ in range(300):
        content = mutate_bytes(good, chance)
        encoding = chance.choice([{}, {}, {"Content-Encoding": "zstd"}])
        if encoding and chance.random() < 0.7:
            content = mutate_bytes(zstandard.ZstdCompressor().compress(content), chance)
        answer = service.http.post("/api/v1/forward_backward", content=content, headers=encoding)
        assert answer.status_code in (200, 404, 413, 422), (content, answer.text)
        assert answer.json() is not None
    assert 200 in statuses and 422 in statuses
    other = service.model()
    step = service.post("optim_step", a_step(other, 1))
    assert service.result(step)["metrics"] == {"lr:mean": 1e-4}


def test_nonsense_instead_of_http(service):
    chance = random.Random(2)
    valid = _head("optim_step", 2) + b"{}"
    for content in [chance.randbytes(500), b"\r\n" * 500, b"GET / HTTP/9.9\r\n\r\n"] + [
        mutate_bytes(valid, chance) for _ in range(60)
    ]:
        with _connected(service) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            connection.recv(4096)
    assert service.get("healthz") == {"status": "ok"}


@pytest.mark.parametrize("model, seq", [("m", 1), ("a:train:0", 300), ("x" * 300, 2**31 - 1)])
def test_the_place_of_a_request_is_read_from_its_head(model, seq):
    body = batch(model, seq, tokens=range(2000))
    assert read_place(body[:4096]) == (model, seq)
    for cut in range(len(model) + 4):
        assert read_place(body[:cut]) in (None, (model, seq))


def test_heads_that_say_nothing():
    cut = (b"", b"\x0a", b"\x0a\x05abc", b"\x0a\x01a", b"\x0a\x01a\x10", b"\x10\x01")
    wrong = (b"\x0a\x01a\x10\x00", b"\x0a\x01\xff\x10\x01")
    endless = (b"\x0a" + b"\xff" * 20, b"\x0a\x01a\x10" + b"\xff" * 10)
    for head in (*cut, *wrong, *endless):
        assert read_place(head) is None, head


def test_an_error_of_the_disk_is_sent_again_and_shows_no_path():
    """/dev/full fails in the same way as a full disk."""
    app = FastAPI()
    add_handlers(app)

    @app.post("/write")
    def write() -> None:
        Path("/dev/full").write_text("a result")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/write")

    answer = asyncio.run(ask())
    error = "/write: the server cannot read or write a file: No space left on device"
    assert answer.status_code == 503
    assert answer.json() == {"error": error, "detail": error, "category": "server"}


def test_a_disk_that_is_full_is_asked_again_later(tmp_path):
    """The client repeats a request after a 503."""
    with served(tmp_path) as service:
        model = service.model()
        store = service.journal._store
        store._writer.execute("PRAGMA max_page_count = 1")
        size = b"x" * 10**6
        value = a_step(model, 1) | {"ignored": size.decode()}
        assert "full" in service.post("optim_step", value, 503)["error"]
        store._writer.execute("PRAGMA max_page_count = 1000000")
        assert service.result(service.post("optim_step", value))["metrics"]


# -- metrics and pages


def test_figures_are_in_the_format_of_prometheus(tmp_path):
    with served(tmp_path, hold={"asample"}) as service:
        model = service.model()
        service.result(service.post("optim_step", a_step(model, 1)))
        service.result(service.post("optim_step", a_step(model, 2, learning_rate=-1)))
        service.post("asample", a_sample(a_sampler(service), 1))
        service.post("asample", a_sample(a_sampler(service), 1))
        answer = service.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        figures = _figures(answer.text)
    expected = {
        'calls_accepted_total{kind="optim_step"}': 2,
        'calls_done_total{kind="optim_step",outcome="succeeded"}': 1,
        'calls_done_total{kind="optim_step",outcome="failed"}': 1,
        'call_seconds_count{kind="optim_step"}': 2,
        'call_seconds_bucket{kind="optim_step",le="+Inf"}': 2,
        'call_seconds_bucket{kind="optim_step",le="1000"}': 2,
        **dict(open_calls=2, models=1, sessions=3, samplers=2, engine_busy=0.5),
    }
    assert {name: figures[f"megatron_vlm_{name}"] for name in expected} == expected
    assert 0 < figures['megatron_vlm_call_seconds_sum{kind="optim_step"}'] < 10
    assert figures["megatron_vlm_received_bytes_total"] > 100


def _figures(text):
    """Return the figures; check that each line is a comment or a figure of a declared type."""
    figures, types = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram")
            types[name] = kind
        elif not line.startswith("# HELP "):
            pattern = r'([a-z_][a-z0-9_]*)((\{([a-z]+="[^"\\\n]*",?)+\})?) (\S+)'
            match = re.fullmatch(pattern, line)
            assert match, line
            base = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in types or types[base] == "histogram", line
            assert match[1] + match[2] not in figures
            figures[match[1] + match[2]] = float(match[5])
    return figures


def test_the_page_shows_text_of_others_as_text(tmp_path):
    evil = "<script>alert(1)</script>"
    with served(tmp_path, hold={"asample"}) as service:
        session = service.post("create_session", {})["session_id"]
        value = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        value |= {"user_metadata": {"name": evil + "\u202e"}, "lora_config": {"rank": 0}}
        model = service.result(service.post("create_model", value))["model_id"]
        service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "c"}))
        service.post("asample", a_sample(a_sampler(service), 1))
        page = service.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert evil not in page.text and "&lt;script&gt;" in page.text and "\u202e" not in page.text
    for shown in (f"tinker://{model}/weights/c", "asample", "loss 1.5", "full", "tp1 pp1 dp1"):
        assert shown in page.text
    assert "Content-Security-Policy" in page.text or "content-security-policy" in page.text


def test_every_flag_of_the_client_is_said(service):
    flags = service.post("client/config", {"sdk_version": "0.38.0"})
    assert flags["proto_compress_fwdbwd"] is True and flags["pjwt_auth_enabled"] is False
    dynamic = service.post("client/dynamic_config", {"sdk_version": "0.38.0"})
    assert dynamic["sample_cancel_enabled"] is True
    models = service.get("get_server_capabilities")["supported_models"]
    assert [model["model_name"] for model in models] == ["tiny/model", "tiny"]
    assert service.post("telemetry", {"events": []}) == {"status": "accepted"}


def test_clients_are_told_the_type_of_the_model(tiny):
    path = tiny(**QWEN3_5, experts=4)
    cfg = load_config([f"model.path={path}", "run=run"])
    source = HFCheckpoint(path)
    dims = ParallelDims.create(cfg.parallel, 1, source.sizes.text.num_layers)
    facts = facts_of(cfg, source, dims)
    assert (facts.arch, facts.vocabulary) == ("qwen3_5_moe", source.sizes.text.vocab)
