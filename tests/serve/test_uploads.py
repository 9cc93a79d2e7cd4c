# .venv/bin/python -m pytest tests/serve/test_uploads.py
"""Adapters that clients upload: what is refused, and that nothing is left of it; and that the
service serves and trains them as PEFT does."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save

from megatron_vlm.config import load_config
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.serve.adapter_checks import AdapterChecks
from megatron_vlm.serve.http.api_keys import ApiKeys, add_key
from megatron_vlm.serve.http.schemas import LoraForm
from megatron_vlm.serve.journal.cleanup import JournalExpiry
from tests.run.test_train import go
from tests.serve.test_http import QUICK
from tests.serve.test_http import served as front
from tests.serve.test_serve import (
    PROMPTS,
    TOLERANCE,
    apart,
    compare,
    hf_log_probs,
    reference,
    trained,
)
from tests.support.peft_reference import Adapter, peft_model
from tests.support.pool import free_port
from tests.support.recipes import Cookbook
from tests.support.reference import load_reference
from tests.support.serve_client import Client, FailedError, served
from tests.support.sets import write_set
from tests.support.suites import full, slow

pytestmark = pytest.mark.alone  # it starts jobs

VOCAB = 509
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = {"rank": 4, "train_unembed": False}


@pytest.fixture(scope="module")
def path(tiny):
    return tiny(vocab=VOCAB)


@pytest.fixture(scope="module")
def checks(path):
    cfg = load_config([f"model.path={path}", "run=run"])
    return AdapterChecks(cfg, HFCheckpoint(path).sizes)


@pytest.fixture(scope="module")
def files(path, tmp_path_factory):
    """The files of an adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    peft_model(path, Adapter()).save_pretrained(folder)
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def begin(service, lora=LORA, status=200, headers=None, base="tiny"):
    value = {"base_model": base, "lora_config": lora}
    return service.post("external_weights_upload_start", value, status, headers=headers)


def put(upload, files, status=200):
    for name, content in files.items():
        answer = httpx.put(upload["urls"][name]["url"], content=content)
        assert answer.status_code == status, answer.text


def finish(service, upload, status=200, headers=None):
    value = {"upload_id": upload["upload_id"]}
    return service.post("external_weights_upload_finish", value, status, headers=headers)


def nothing_is_left(service):
    journal = service.journal
    rows = (journal.models(), journal.checkpoints(), [*journal.run.glob("uploads/*")])
    return rows == ([], [], [])


def edited(files, name, edit):
    """Return the files with another configuration, or with other tensors."""
    if name == CONFIG:
        value = json.loads(files[CONFIG])
        return files | {CONFIG: json.dumps({**value, **edit}).encode()}
    tensors = load(files[WEIGHTS])
    edit(tensors)
    return files | {WEIGHTS: save(tensors)}


def shorten(tensors):
    name = min(tensors)
    tensors[name] = tensors[name][:, :-1].contiguous()


def spoil(tensors):
    tensors[max(tensors)].view(-1)[-1] = torch.nan


def round_off(tensors):
    tensors[min(tensors)] = tensors[min(tensors)].to(torch.int8)


REFUSED = {
    "another rank": ({"rank": 8}, {}, "lora_config.rank=8 differs from the adapter's r, 4; set"),
    "no head": ({"train_unembed": True}, {}, r"lora_config=.* need tensors that the adapter lacks"),
    "more": ({"train_mlp": False}, {}, r"lora_config=\[attention\] do not need tensors"),
    "a shape": ({}, (WEIGHTS, shorten), r"\.shape=.* is \[.*\] in this model"),
    "not a number": ({}, (WEIGHTS, spoil), "has values that are NaN or infinite"),
    "integers": ({}, (WEIGHTS, round_off), r"\.dtype=I8 cannot be trained"),
    "no safetensors": ({}, {WEIGHTS: b"nonsense" * 9}, f"{WEIGHTS}: the header has"),
    "an empty file": ({}, {WEIGHTS: b""}, f"{WEIGHTS}: the header has"),
    "no JSON": ({}, {CONFIG: b"{"}, CONFIG),
    "another kind": ({}, (CONFIG, {"peft_type": "LOHA"}), "peft_type=LOHA is not supported"),
    "another formula": ({}, (CONFIG, {"use_dora": True}), "use_dora=true is not supported"),
    "no alpha": ({}, (CONFIG, {"lora_alpha": None}), "lora_alpha"),
}  # fmt: skip


def test_misfit_adapters_are_refused_and_leave_nothing(tmp_path, checks, files):
    with front(tmp_path, adapters=checks) as service:
        for name, (lora, edit, problem) in REFUSED.items():
            upload = begin(service, LORA | lora)
            wrong = files | edit if isinstance(edit, dict) else edited(files, *edit)
            put(upload, wrong)
            text = finish(service, upload, 422)["error"]
            assert re.search(problem, text), (name, text)
            assert str(tmp_path) not in text and "lora.path" not in text, text
            finish(service, upload, 404)
            assert nothing_is_left(service), name
        for lora, base, problem in (
            ({"rank": 0}, "tiny", "lora_config: give the adapter's rank"),
            ({"rank": 4, **dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False)},
             "tiny", "lora_config: give the adapter's rank"),
            ({"rank": 129}, "tiny", "serve.max_rank=128"),
            ({"rank": 4}, "other", "this server trains tiny/model or tiny"),
        ):  # fmt: skip
            assert problem in begin(service, lora, 422, base=base)["error"]
        assert nothing_is_left(service)


def test_files_are_received_once_within_their_size(tmp_path, checks, files):
    limits = replace(QUICK, models=1)
    with front(tmp_path, limits, adapters=checks) as service:
        upload = begin(service)
        assert "1 uploads are not finished" in begin(service, status=422)["error"]
        assert sorted(upload["urls"]) == [CONFIG, WEIGHTS] and upload["expires"]
        assert "adapter_config.json and adapter_model" in finish(service, upload, 422)["error"]
        url = upload["urls"][WEIGHTS]["url"]
        base = url.removesuffix(WEIGHTS)
        for other in ("README.md", "..%2f..%2fjournal.sqlite", "%2e%2e/x", "", "a/b"):
            assert httpx.put(base + other, content=b"x").status_code == 404, other
        assert httpx.put(url.replace(upload["upload_id"], "x"), content=b"x").status_code == 404
        most = checks.file_limits(LoraForm(rank=4, train_unembed=False))[WEIGHTS]
        assert len(files[WEIGHTS]) < most < len(files[WEIGHTS]) + 2**20 + 1
        assert httpx.put(url, content=bytes(most + 1)).status_code == 413
        # A connection that ends in the middle leaves no file, and the file may come again.
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as raw:
            head = f"PUT {place.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
            raw.sendall(head.encode() + b"x" * 9)
        put(upload, {CONFIG: files[CONFIG]})
        assert f"{WEIGHTS} has not arrived" in finish(service, upload, 422)["error"]
        ends = time.monotonic() + 60
        while (answer := httpx.put(url, content=files[WEIGHTS])).status_code == 422:
            # The server has not heard yet that the connection has ended.
            assert time.monotonic() < ends
        assert answer.status_code == 200
        put(upload, files, 422)
        with ThreadPoolExecutor(8) as pool:
            paths = set(pool.map(lambda _: finish(service, upload)["tinker_path"], range(8)))
        (checkpoint,) = service.journal.checkpoints()
        assert paths == {checkpoint.path} and checkpoint.kind == "external"
        assert {f.name: f.read_bytes() for f in checkpoint.folder.iterdir()} == files
        assert checkpoint.size == sum(map(len, files.values()))
        begin(service)  # a finished one does not count


def test_an_upload_that_is_left_alone_ends(tmp_path, checks, files):
    keep = JournalExpiry(released=-1)
    with front(tmp_path, adapters=checks) as service:
        done, open_one = begin(service), begin(service)
        put(done, files)
        path = finish(service, done)["tinker_path"]
        put(open_one, {CONFIG: files[CONFIG]})
        assert len([*tmp_path.glob("uploads/*")]) == 2
    with front(tmp_path, replace(QUICK, url_seconds=1e-6), adapters=checks, keep=keep) as service:
        assert len([*tmp_path.glob("uploads/*")]) == 1  # that of the checkpoint
        upload = begin(service)
        url = upload["urls"][CONFIG]["url"]
        assert httpx.put(url, content=b"{}").status_code == 404
        finish(service, upload, 404)
        service.app.state.uploads.sweep()
        assert len([*tmp_path.glob("uploads/*")]) == 1
        run, _, name = path.removeprefix("tinker://").partition("/")
        service.checked(service.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{name}"), 200)
        service.journal.sweep()
        assert not [*tmp_path.glob("uploads/*")]


def test_the_form_of_addresses_follows_the_client_and_keys_see_their_own(tmp_path, checks, files):
    path = tmp_path / "keys"
    alice, bob = ({"X-API-Key": add_key(name, path)} for name in ("alice", "bob"))
    with front(tmp_path / "run", keys=ApiKeys(path), adapters=checks) as service:
        begin(service, status=401)
        plain = begin(service, headers=alice | {"x-sdk-version": "0.39.2"})["urls"]
        assert all(url.startswith(service.url) for url in plain.values())
        for version in ("0.40.0", "1.0", "nonsense"):
            upload = begin(service, headers=alice | {"x-sdk-version": version})
            assert {url["url"].rpartition("/")[2] for url in upload["urls"].values()} == set(plain)
        put(upload, files)  # whoever knows an address may send
        finish(service, upload, 404, bob)
        loaded = finish(service, upload, headers=alice)["tinker_path"]
        info = {"tinker_path": loaded}
        service.post("weights_info", info, 404, headers=bob)
        assert service.post("weights_info", info, headers=alice) == {
            "base_model": "tiny",
            "is_lora": True,
            "lora_rank": 4,
            "optimizer_config": {"type": "adamw"},
            "train_unembed": False,
            "train_mlp": True,
            "train_attn": True,
        }
        session = service.post("create_session", {}, headers=alice)["session_id"]
        load_it = {"session_id": session, "model_seq_id": 0, "path": loaded, "optimizer": True}
        problem = service.post("load_weights", load_it, 422, headers=alice)["error"]
        assert "optimizer: " in problem and "has no state of an optimizer" in problem
        run = loaded.removeprefix("tinker://").partition("/")[0]
        step = {"model_id": run, "seq_id": 1, "adam_params": {}}
        assert "was unloaded" in service.post("optim_step", step, 404, headers=alice)["error"]


def upload_folder(client, folder, lora):
    """Upload the files of a PEFT folder, and return the tinker path."""
    upload = client.post(
        "external_weights_upload_start", base_model=client.model_name, lora_config=lora
    )
    for name, target in upload["urls"].items():
        content = (Path(folder) / name).read_bytes()
        assert client.http.put(target["url"], content=content).status_code == 200
    return client.post("external_weights_upload_finish", upload_id=upload["upload_id"])[
        "tinker_path"
    ]


@pytest.mark.slow
@pytest.mark.engine("tinker")
def test_the_public_client_trains_and_samples_an_uploaded_adapter(tiny, tmp_path):
    path = tiny(vocab=VOCAB)
    peft = peft_model(path, Adapter())
    peft.save_pretrained(tmp_path / "adapter")
    with (
        served(path, tmp_path / "run", free_port(), "serve.name=tiny") as running,
        Client(running.url, "tiny") as client,
    ):
        uploaded = upload_folder(client, tmp_path / "adapter", LORA)
        said = Cookbook(running.url, tmp_path, "tiny").script("uploaded.py", uploaded)
    found = json.loads(said.splitlines()[-1])
    expected = hf_log_probs(peft, [[1, 2, 3, 4, 5]], path)[1:]
    assert found["sampled"][1:] == pytest.approx(expected, abs=TOLERANCE)
    assert found["trained"][:-1] == pytest.approx(expected, abs=TOLERANCE)
    assert sum(found["after"][1:]) > sum(expected) and found["rank"] == 4


@pytest.mark.slow
def test_an_adapter_of_a_training_run_is_served(tiny, tmp_path, record_property):
    """Its alpha is not that of the service."""
    path = tiny(vocab=512)
    write_set(tmp_path)
    words = "lora=default", "lora.rank=3", "train.steps=2", "parallel.pp=1"
    done = go(tmp_path, path, "run", *words, "optim.lr=0.05")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "export"
    peft = PeftModel.from_pretrained(load_reference(path), folder)
    with (
        served(path, tmp_path / "service", free_port()) as running,
        Client(running.url, path) as client,
    ):
        sampler = client.sampler(
            model_path=upload_folder(client, folder, {"rank": 3, "train_unembed": False})
        )
        base = client.sampler(base_model=path)
        for chunks in PROMPTS:
            ours = sampler.log_probs(chunks)
            worst = apart(ours, hf_log_probs(peft, chunks, path))
            record_property("worst", worst)
            assert worst <= TOLERANCE
            assert abs(ours - base.log_probs(chunks))[1:].max() > 1e-3  # it has learnt something


@pytest.mark.parametrize(
    "adapter, layout",
    [
        full(Adapter(), "parallel.pp=1"),
        slow(
            Adapter(("attention", "mlp", "head"), rank=3, alpha=3.0, rslora=True), "parallel.tp=2"
        ),
        slow(Adapter(("attention",), alpha=32.0), "parallel.pp=2"),
    ],
)
def test_an_uploaded_adapter_is_that_of_peft(adapter, layout, tiny, tmp_path, record_property):
    """It is sampled, trained, loaded into a model, and is there after a restart."""
    path, port, settings = tiny(vocab=VOCAB), free_port(), (layout, "train.micro_batch_size=2")
    peft = peft_model(path, adapter)
    copies_head = "head" in adapter.targets  # which PEFT warns of, unless it is asked to
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=copies_head)
    switches = {"train_attn": "attention", "train_mlp": "mlp", "train_unembed": "head"}
    lora = {switch: part in adapter.targets for switch, part in switches.items()}
    with served(path, tmp_path / "run", port, *settings) as running:
        with Client(running.url, path) as client:
            uploaded = upload_folder(client, tmp_path / "adapter", lora | {"rank": adapter.rank})
            sampler = client.sampler(model_path=uploaded)
            before = [sampler.log_probs(chunks) for chunks in PROMPTS]
            begun = PeftModel.from_pretrained(load_reference(path), tmp_path / "adapter")
            worst = [
                apart(ours, hf_log_probs(begun, chunks, path))
                for ours, chunks in zip(before, PROMPTS, strict=True)
            ]
            model = client.loaded(uploaded, False)
            worst.append(compare(trained(model, path), reference(peft, path)))
            after = model.sampler()
            worst += [
                apart(after.log_probs(each), hf_log_probs(peft, each, path)) for each in PROMPTS
            ]
            record_property("worst", worst)
            assert max(worst) <= TOLERANCE, worst
            other = client.model(adapter.rank + 1)
            with pytest.raises(FailedError, match="load it as a new model"):
                other.load(uploaded, optimizer=False)
            with pytest.raises(FailedError, match=r"optimizer: .* has no state of an optimizer"):
                model.load(uploaded)
            saved = model.save("three")
            model.load(uploaded, optimizer=False)
            again = model.sampler()
            assert [again.log_probs(each).tobytes() for each in PROMPTS] == [
                each.tobytes() for each in before
            ]
        running.stop()
    # What is saved from it does not need the folder of the upload.
    configs = [each.read_text() for each in (tmp_path / "run").glob("*/*/config.yaml")]
    assert configs and not any("uploads" in each for each in configs)
    with (
        served(path, tmp_path / "run", port, *settings) as running,
        Client(running.url, path) as client,
    ):
        sampler = client.sampler(model_path=uploaded)
        assert [sampler.log_probs(each).tobytes() for each in PROMPTS] == [
            each.tobytes() for each in before
        ]
        sampler = client.sampler(model_path=saved)
        again = [sampler.log_probs(chunks) for chunks in PROMPTS]
        pairs = zip(again, PROMPTS, strict=True)
        assert max(apart(a, hf_log_probs(peft, each, path)) for a, each in pairs) <= TOLERANCE
