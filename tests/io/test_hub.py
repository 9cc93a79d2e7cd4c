# .venv/bin/python -m pytest tests/io/test_hub.py
"""Names on the Hub, resolved by the real client against a server that speaks its API."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_vlm.checkpoint.export_checkpoint import export_checkpoint
from megatron_vlm.cli import main
from megatron_vlm.commands.doctor import MISSING, OK, WARNING, Check, model_check
from megatron_vlm.commands.dry_run.command import dry_run
from megatron_vlm.commands.eval import locate, with_data_beside
from megatron_vlm.config import load_config, read_saved, to_yaml
from megatron_vlm.config.data_sources import parse_sources
from megatron_vlm.config.schema import DataConfig
from megatron_vlm.data.sources.source import open_source
from megatron_vlm.data.sources.stream import open_stream
from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.errors import ConfigError
from megatron_vlm.hf.hf_checkpoint import HFCheckpoint
from megatron_vlm.hf.hub_upload import check_push, push
from megatron_vlm.io.atomic import write_mark
from megatron_vlm.io.hub import HubName, folder_of, hub_name, pin
from megatron_vlm.run.run_folder import saved_config, with_commit, with_model
from tests.run.test_train import command, outside_of_jobs, run_rank, steps_of
from tests.support.chats import say, text
from tests.support.error_fields import raises
from tests.support.hub_server import HubServer, Repo, hub_server
from tests.support.sets import write_set
from tests.support.single_process import ROOT
from tests.support.suites import full, slow

NAME = "some/tiny-vl"
LOCAL = [
    "/srv/a/b", "./a/b", "../a", "~/a", "a", "a/b/c", "a/", "/a", ".a/b", "a b/c", "-a/b", "a/b@",
    "a/b@c@d", "hub:a/b", "",
]  # fmt: skip


@pytest.fixture
def hub(monkeypatch, tmp_path, tiny):
    """Yield a server with a tiny model; this process is its client, and the cache is empty."""
    with hub_server() as server:
        server.model(NAME, tiny())
        use(monkeypatch, server.address, tmp_path / "hf")
        monkeypatch.chdir(tmp_path)
        yield server


def use(monkeypatch, address: str, home: Path, offline: bool = False) -> None:
    """Set the constants that HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE set on import."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def refusal(path: str, weights: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        folder_of(path, weights)
    error = caught.value
    assert error.key == "model.path" and error.found == path
    return str(error)


def test_doctor_checks_a_model_of_the_hub(hub, tiny, tmp_path):
    """A model is checked like a folder, and no weights are downloaded for that."""
    commit = hub.repos[f"models/{NAME}"].branches["main"]
    check = model_check(NAME)
    assert check.status == OK and check.found.startswith(f"{NAME}@{commit}: ")
    assert not any("safetensors" in request for request in hub.requests if "resolve" in request)
    count = check.found.split(": ")[1]
    assert model_check(tiny()) == Check("model.path", OK, f"{tiny()}: {count}")
    tensors = load_file(Path(tiny()) / "model.safetensors").values()
    assert count == f"{sum(tensor.numel() for tensor in tensors):,} parameters"
    shutil.copy(Path(tiny()) / "config.json", tmp_path)
    bare = model_check(str(tmp_path))
    assert bare.status == WARNING and bare.found == f"{tmp_path}: {count}, and no weights in it"
    missing = model_check("some/typo")
    assert missing.status == MISSING and "the Hub shows no model of this name" in missing.found


def test_doctor_takes_nothing_but_a_model(hub, capsys):
    for words in ("data.train=x", "model.path=", "optim.lr=1"):
        assert main(["doctor", words]) == 2
        assert f"doctor: {words} is not model.path=PATH" in capsys.readouterr().err


@pytest.mark.parametrize("path", LOCAL)
def test_what_looks_like_a_path_is_one(path):
    assert hub_name(path) is None


def test_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen3-VL-2B-Instruct") == HubName("Qwen/Qwen3-VL-2B-Instruct")
    assert hub_name("a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    assert str(hub_name("a/b@v1.0")) == "a/b@v1.0"
    assert hub_name("a/b@" + "0a" * 20).commit == "0a" * 20 and hub_name("a/b@0a").commit is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to("nowhere")
    assert hub_name("a/b") is None and hub_name("a/b@main") == HubName("a/b", "main")


def test_only_what_is_read_is_downloaded_and_only_once(hub, tiny):
    extra = {"pytorch_model.bin": b"x", "run.py": b"x", "onnx/model.safetensors": b"x",
             "consolidated.safetensors": b"x", "optimizer.pt": b"x"}  # fmt: skip
    files = hub.repos[f"models/{NAME}"].files
    commit = hub.repos[f"models/{NAME}"].commit({**files, **extra})
    pinned = pin(NAME)
    assert pinned == f"{NAME}@{commit}"
    assert "model.safetensors" not in hub.downloads()
    folder = folder_of(pinned, weights=True)
    assert sorted(hub.downloads()) == sorted(files)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert all(path.is_symlink() for path in folder.iterdir())
    hub.requests.clear()
    assert folder_of(pinned, weights=True) == folder
    assert hub.requests == []  # a cached commit needs no request


def test_a_checkpoint_on_the_hub_is_read_like_the_folder(hub, tiny):
    actual, expected = HFCheckpoint(NAME), HFCheckpoint(tiny())
    assert "model.safetensors" not in hub.downloads()  # sizes need no weights
    actual.read_headers()
    expected.read_headers()
    assert {name: info.shape for name, info in actual.tensors.items()} == {
        name: info.shape for name, info in expected.tensors.items()
    }
    record = {"messages": [say("user", text("what?")), say("assistant", "that")]}
    rows = [RowMaker(where).row(record) for where in (NAME, tiny())]
    assert rows[0].ids_S.tolist() == rows[1].ids_S.tolist()


def test_a_revision_is_taken(hub):
    repo = hub.repos[f"models/{NAME}"]
    first = repo.branches["main"]
    second = repo.commit({**repo.files, "merges.txt": b"other"}, branch="v2")
    assert pin(NAME) == f"{NAME}@{first}" and pin(f"{NAME}@v2") == f"{NAME}@{second}"
    assert (folder_of(f"{NAME}@v2") / "merges.txt").read_bytes() == b"other"


def test_a_folder_of_that_name_wins(hub, tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / NAME)
    assert pin(NAME) == NAME and HFCheckpoint(NAME).path == Path(NAME)
    assert hub.requests == []


def test_what_the_hub_refuses_is_said(hub, monkeypatch, tmp_path):
    repo = hub.repos[f"models/{NAME}"]
    missing = refusal("some/typo")
    assert "no folder 'some/typo' here" in missing and "the Hub shows no model" in missing
    assert "HF_TOKEN" in missing
    assert f"{NAME} has no revision 'v9'" in refusal(f"{NAME}@v9")
    repo.gated = True
    assert "agree on its page" in refusal(NAME)
    repo.gated = False
    hub.refused["GET /api/models/some/broken"] = 418
    assert "cannot be reached" in refusal("some/broken")


def test_a_private_model_needs_a_token(hub, monkeypatch):
    hub.repos[f"models/{NAME}"].private = True
    assert "if it is private" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert folder_of(NAME, weights=True).is_dir()


def test_without_a_network(hub, monkeypatch, tmp_path):
    home = tmp_path / "hf"
    use(monkeypatch, hub.address, home, offline=True)
    assert "HF_HUB_OFFLINE is set, and not all files" in refusal(NAME)
    use(monkeypatch, hub.address, home)
    pinned = pin(NAME)
    use(monkeypatch, hub.address, home, offline=True)
    assert pin(NAME) == pin(pinned) == pinned
    # The settings are cached, the weights are not.
    assert "not all files of the model" in refusal(NAME)
    use(monkeypatch, hub.address, home)
    folder_of(pinned, weights=True)
    use(monkeypatch, "http://127.0.0.1:1", home)  # no server listens on port 1
    assert pin(NAME, weights=True) == pinned
    assert "cannot be reached" in refusal("some/other")


def test_a_cache_that_cannot_be_written(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    use(monkeypatch, hub.address, tmp_path / "file")
    assert "cache" in refusal(NAME)


def test_a_missing_run_is_no_name(tmp_path, monkeypatch, capfd):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("eval", "chat"):
        assert main([name, "runs/none"]) == 2
        said = capfd.readouterr().err
        assert "runs/none: does not exist; give a run that does, such as runs/first" in said


def test_relative_paths_of_a_run_are_found_from_elsewhere(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    data = ["data.train=[a.jsonl,{path: b.jsonl, image_root: pictures}]", "data.eval={held: gone}"]
    words = ["model.path=base", "data.image_root=pictures", *data]
    (run / "config.yaml").write_text(to_yaml(load_config(words)))
    assert read_saved(run).model.path == "base"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    for name in ("a.jsonl", "b.jsonl", "pictures"):
        (tmp_path / name).touch()
    monkeypatch.chdir(run)
    cfg = read_saved(run)
    found, given = (with_data_beside(cfg, run, keys).data for keys in (set(), {"data.train"}))
    assert [spec.path for spec in found.train] == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert found.train[1].image_root == found.image_root == f"{tmp_path}/pictures"
    assert found.train[0].image_root is None and found.eval == cfg.data.eval
    assert given.train == cfg.data.train and given.image_root == found.image_root
    assert read_saved(run).model.path == str(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert read_saved(run).model.path == "base"
    assert with_data_beside(read_saved(run), run, set()) == read_saved(run)


def test_eval_takes_a_name(hub, tmp_path):
    (tmp_path / "a, [b]").mkdir()
    (tmp_path / "a, [b]" / "config.json").touch()
    assert locate("a, [b]", ["data.eval=x"])[0].model.path == "a, [b]"
    cfg, checkpoint = locate(NAME, [f"data.eval={write_set(tmp_path)}", "model=tiny_cpu"])
    assert checkpoint is None and hub_name(cfg.model.path).commit
    with pytest.raises(ConfigError, match="no folder 'runs/typo' here"):
        locate("runs/typo", [f"data.eval={write_set(tmp_path)}"])


def run(folder: Path, hub: HubServer, *words: str, **more: str) -> subprocess.CompletedProcess:
    environment = outside_of_jobs() | hub.environment(folder / "hf", **more)
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=280, cwd=folder
    )


def launched(folder: Path, *overrides: str) -> list[str]:
    words = command(folder, NAME, "run", "train.steps=2", "checkpoint.every=1", *overrides)
    return [word for word in words if not word.startswith("launch.timeout")]


@pytest.mark.full
def test_a_run_stays_on_the_commit_that_it_began_with(hub, pool, tmp_path, monkeypatch):
    write_set(tmp_path)
    repo, run = hub.repos[f"models/{NAME}"], tmp_path / "run"
    first, files, home = repo.branches["main"], repo.files, str(tmp_path / "pool")
    words = launched(tmp_path)[4:]
    for status, _, err in pool.run(client_rank, 2, hub.address, home, "hf_reader", words):
        assert status == 0, err
    assert sorted(hub.downloads()) == sorted(files)  # once, although both ranks need them
    start = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert start["model"] == f"{NAME}@{first}"
    assert f"path: {NAME}@{first}" in (run / "config.yaml").read_text()
    repo.commit({**files, "merges.txt": b"#version: 0.2\n"})
    hub.requests.clear()
    for status, _, err in pool.run(offline_rank, 2, home, [*words, "train.steps=3"]):
        assert status == 0, err
    assert hub.requests == [] and len(steps_of(run)) == 3
    assert f"path: {NAME}@{first}" in (run / "config.yaml").read_text()
    use(monkeypatch, hub.address, Path(home), offline=True)
    export_checkpoint("run", "again")
    exported = contents(run / "export")
    assert exported == contents(tmp_path / "again")
    assert exported.keys() >= {"config.json", "tokenizer.json", "model.safetensors", "README.md"}
    assert f"base_model: {NAME}\n" in exported["README.md"].decode()
    assert not any(path.is_symlink() for path in (run / "export").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("is_torchrun", [False, True])
def test_files_are_downloaded_once(is_torchrun, tiny, tmp_path):
    """Our launcher downloads, and its ranks do not. Each rank of torchrun resolves the name by
    itself, and one of them downloads the files."""
    write_set(tmp_path)
    words = launched(tmp_path)
    if is_torchrun:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        words = [sys.executable, *torchrun, "megatron_vlm.train", *words[4:]]
    with hub_server() as hub:
        repo = hub.model(NAME, tiny())
        done = run(tmp_path, hub, *words)
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(hub.downloads()) == sorted(repo.files)
        if not is_torchrun:
            assert done.stderr.count(f"getting {NAME} from the Hub") == 1
            resolved = [text for text in hub.requests if "/revision/" in text]
            assert len(resolved) == 1, hub.requests


def offline_rank(home: str, words: list[str]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, "http://127.0.0.1:1", Path(home), offline=True)
        return run_rank(words)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.full
def test_a_run_does_not_go_on_with_another_commit(hub, tmp_path):
    repo = hub.repos[f"models/{NAME}"]
    first = repo.branches["main"]
    words = ["model=tiny_cpu", f"model.path={NAME}", f"run={tmp_path / 'run'}"]
    cfg = load_config([*words, f"teacher.path={{a: {NAME}, b: x, c: {NAME}@main}}"])
    (tmp_path / "run").mkdir()
    resolved = with_model(cfg)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(resolved))
    write_mark(tmp_path / "run", "a", kind="run")
    saved = saved_config(tmp_path / "run")
    second = repo.commit({**repo.files, "merges.txt": b"#version: 0.2\n"})
    assert with_model(cfg, saved=saved).model.path == resolved.model.path == f"{NAME}@{first}"
    teachers = {"a": f"{NAME}@{first}", "b": "x", "c": f"{NAME}@{second}"}
    assert with_model(cfg, saved=saved).teacher.path == teachers
    [_, argument] = with_commit([], with_model(cfg, saved=saved))
    assert load_config([*words, argument]).teacher.path == teachers
    with raises(ConfigError, key="model.path", found=f"{NAME}@main", problem_has=first):
        with_model(replace(cfg, model=replace(cfg.model, path=f"{NAME}@main")), saved=saved)
    chosen = replace(cfg, model=replace(cfg.model, path=f"{NAME}@{second}"))
    assert with_model(chosen, saved=saved).model.path == f"{NAME}@{second}"
    assert with_model(cfg).model.path == f"{NAME}@{second}"


def test_a_dry_run_needs_no_weights(hub, tmp_path, capsys):
    overrides = ["model=tiny_cpu", f"model.path={NAME}", f"data.train={write_set(tmp_path)}"]
    assert dry_run(load_config([*overrides, "data.cache_dir=null", "train.steps=1"])) == 0
    assert "First batches" in capsys.readouterr().out
    assert "config.json" in hub.downloads() and "model.safetensors" not in hub.downloads()


# Data sets.


@pytest.fixture
def sets(hub, monkeypatch, tmp_path):
    """Yield the first of two revisions of a data set on the Hub."""
    from datasets import config
    from huggingface_hub import HfFileSystem

    monkeypatch.setattr(config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    HfFileSystem.clear_instance_cache()
    repo = hub.repos["datasets/some/chats"] = Repo()
    first = repo.commit({"train.jsonl": lines("old")})
    repo.commit({"train.jsonl": lines("new", "newer")})
    yield first
    HfFileSystem.clear_instance_cache()


def lines(*answers: str) -> bytes:
    records = [{"prompt": "what?", "completion": answer} for answer in answers]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def answers(value: object) -> list[str]:
    (spec,) = parse_sources(value, "data.train")
    if spec.streaming:
        stream = open_stream([spec], DataConfig(), train=False)
        return [record.raw()["completion"] for record in stream.records(0, None)]
    source = open_source(spec, None, Path("unpacked"))
    return [source[index]["completion"] for index in range(len(source))]


@pytest.mark.parametrize("streaming", [False, full(True)])
def test_data_sets_of_the_hub(streaming, sets, tmp_path):
    def read(path: str, **more: object) -> list[str]:
        return answers({"path": path, "streaming": streaming, **more})

    assert read("some/chats") == read("hub:some/chats") == ["new", "newer"]
    assert read("some/chats", revision=sets) == ["old"]
    (tmp_path / "some" / "chats").mkdir(parents=True)
    (tmp_path / "some" / "chats" / "train.jsonl").write_bytes(lines("mine"))
    assert read("some/chats") == ["mine"]
    assert read("hub:some/chats") == ["new", "newer"]
    assert read("hub:some/chats", revision=sets) == ["old"]
    with pytest.raises(ConfigError, match=r"hub:some/other: .* `datasets` cannot"):
        read("hub:some/other")


FORMATS = {
    "json lines": ({"data/train-0.jsonl.gz": gzip.compress(lines("007", '"yes"'))}, None),
    "list": ({"a.json": b"[" + lines("007", '"yes"').strip().replace(b"\n", b",") + b"]"}, None),
    "cells": ({"train.tsv": b'prompt\tcompletion\nq\t007\nq\t"""yes"""\n'}, None),
    "option": ({"a.csv": b"x", "README.md": b"---\nconfigs:\n- config_name: default\n  data_files: "
                b"a.csv\n  sep: ;\n---\n"}, "sep"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_texts_of_the_hub_are_kept(streaming, sets, hub, monkeypatch, tmp_path):
    """What was downloaded is read without a network."""
    for kind, (files, option) in FORMATS.items():
        name = f"some/{kind.replace(' ', '-')}"
        hub.repos[f"datasets/{name}"] = Repo()
        hub.repos[f"datasets/{name}"].commit(files)
        what = {"path": name, "streaming": streaming}
        if option:
            with raises(ConfigError, place=name, key=option, found=";"):
                answers(what)
            continue
        assert answers(what) == ["007", '"yes"'], kind
        with raises(ConfigError, key="split", found="test", allowed=("train",)):
            answers({**what, "split": "test"})
        if not streaming:
            with monkeypatch.context() as patch:
                patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
                patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
                assert answers(what) == ["007", '"yes"'], kind


def test_the_name_of_a_set_on_the_hub():
    cfg = load_config(["model.path=x", "data.train=hub:some/chats", "data.eval=hub:some/chats"])
    assert cfg.data.train[0].path == "hub:some/chats" and cfg.data.eval[0].name == "chats"


# Uploads.


def client_rank(address: str, home: str, token: str, words: list[str]) -> tuple[int, str, str]:
    """Run one rank as a client of this server."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, address, Path(home))
        patch.setenv("HF_TOKEN", token)
        return run_rank(words)


@pytest.mark.parametrize("world", [1, slow(2)])
def test_the_export_is_uploaded(world, hub, pool, tiny, tmp_path, monkeypatch):
    write_set(tmp_path)
    keys = ["train.steps=1", f"parallel.pp={world}", "checkpoint.push=somebody/tuned"]
    words = command(tmp_path, tiny(), "run", *keys)[4:]

    def train(*more: str) -> tuple[int, str]:
        home = str(tmp_path / "pool")
        done = pool.run(client_rank, world, hub.address, home, "hf_writer", [*words, *more])
        assert {status for status, _, _ in done} == {done[0][0]}
        return done[0][0], done[0][1] + done[0][2]

    hub.refused["POST /api/models/somebody/tuned/commit"] = 403
    status, output = train()
    export, target = tmp_path / "run" / "export", hub.repos["models/somebody/tuned"]
    assert status == 2 and "step 1/1" in output
    assert "somebody/tuned cannot be written: " in output and "(403)" in output
    assert f"{export} is whole: try again with megatron-vlm push {export} somebody/tuned" in output
    assert target.private and target.files.keys() == {".gitattributes"}
    hub.refused.clear()
    target.commit({**target.files, "model-00001-of-00002.safetensors": b"old", "mine.txt": b"my"})
    status, output = train()
    assert status == 0 and f"uploaded to {hub.address}/somebody/tuned/commit/" in output
    others = {".gitattributes": b"", "mine.txt": b"my"}
    assert target.files == contents(export) | others
    assert target.messages[-1] == "Step 1, exported by megatron_vlm"
    assert {line["kind"] for line in lines_in(tmp_path / "run")} >= {"event"}
    assert "uploaded to" in lines_in(tmp_path / "run")[-1]["text"]
    # The upload is read back as a model to train.
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    back = folder_of("somebody/tuned", weights=True)
    same = contents(export).keys() & contents(back).keys()
    assert {name: contents(back)[name] for name in same} == {n: contents(export)[n] for n in same}
    assert same >= {"model.safetensors", "config.json", "README.md", "tokenizer.json"}
    HFCheckpoint("somebody/tuned").read_headers()
    # The command makes no commit of files that exist already.
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    assert main(["push", str(export), "somebody/tuned"]) == 0
    assert main(["push", str(export), "some-org/other"]) == 0
    assert hub.repos["models/some-org/other"].files.keys() == contents(export).keys() | {
        ".gitattributes"
    }


def lines_in(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_could_not_be_uploaded_is_refused_before_the_first_step(hub, tmp_path, monkeypatch):
    def check(repo: str, token: str | None = "hf_writer") -> ConfigError:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ConfigError) as caught:
            check_push(repo)
        assert caught.value.key == "checkpoint.push" and caught.value.found == repo
        return caught.value

    assert "HF_TOKEN" in check("somebody/a", None).problem
    assert "401" in check("somebody/a", "hf_unknown").problem
    assert "'test'" in check("somebody/a", "hf_reader").problem
    hub.tokens |= {
        "hf_narrow": "fineGrained repo.content.read",
        "hf_fine": "fineGrained repo.write",
    }
    assert "'test'" in check("somebody/a", "hf_narrow").problem
    assert re.search("others .*somebody, some-org", check("others/a").problem)
    assert check("a").allowed == check("a/b@main").allowed == "ORG/NAME"
    for repo, token in (("somebody/a", "hf_writer"), ("some-org/a", "hf_fine")):
        monkeypatch.setenv("HF_TOKEN", token)
        check_push(repo)
    use(monkeypatch, hub.address, tmp_path, offline=True)
    assert "HF_HUB_OFFLINE" in check("somebody/a").problem
    use(monkeypatch, "http://127.0.0.1:1", tmp_path)
    assert "http://127.0.0.1:1" in check("somebody/a").problem
    (tmp_path / "train.jsonl").write_text("{}")
    status, _, err = run_rank(command(tmp_path, NAME, "run", "checkpoint.push=somebody/a")[4:])
    assert status == 2 and "checkpoint.push=somebody/a " in err
    assert not (tmp_path / "run").exists()
    problem = "checkpoint.export=false"
    with raises(ConfigError, key="checkpoint.push", found="a/b", problem_has=problem):
        load_config(["model.path=x", "checkpoint.push=a/b", "checkpoint.export=false"])


def test_only_an_export_is_uploaded(hub, tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    with raises(ConfigError, place=tiny()):
        push(Path(tiny()), "somebody/a")
    assert "models/somebody/a" not in hub.repos
    monkeypatch.delenv("HF_TOKEN")  # the folder is checked before the token
    assert main(["push", tiny(), "somebody/a"]) == 2
    assert f"{tiny()}: the folder is not the whole export of a run" in capfd.readouterr().err
