# make tinker-env, then .venv/bin/python -m pytest tests/serve/test_tinker_client.py
"""The public Tinker client, in its own environment: against the front of the service and an engine
without a model (tests/support/tinker_client/front_client.py), with its converters (converters.py),
and with its losses (losses.py)."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vlm.data.tokens.reader import RowMaker
from megatron_vlm.serve.http.api_keys import ApiKeys, add_key
from megatron_vlm.serve.http.app import make_app
from megatron_vlm.serve.http.http_server import FrontServer
from megatron_vlm.serve.http.request_bodies import RequestLimits
from megatron_vlm.serve.journal.calls import Bounds
from tests.data.test_qwen3_5_templates import TEMPLATES, join_newlines
from tests.support.batches import token_ids
from tests.support.chats import FAMILY_CHATS
from tests.support.fake_calls import FACTS, StandIn, opened
from tests.support.pool import free_port
from tests.support.recipes import Cookbook
from tests.support.serve_client import served

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
PROGRAMS = "tests/support/tinker_client"
TOLERANCE = 1e-6  # relative, of losses; measured worst: 6.3e-8

pytestmark = [
    pytest.mark.slow,  # the client takes some seconds to import
    pytest.mark.engine("tinker"),
]


def run_client(*words, **environment):
    done = subprocess.run(
        [PYTHON, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the client saw, and what the server has of it."""
    root = tmp_path_factory.mktemp("client")
    key = add_key("laptop", root / "keys")
    with opened(root / "run", bounds=Bounds(models=2)) as journal, StandIn(journal) as engine:
        facts = replace(FACTS, base_models=("tiny/model",))
        server = FrontServer(make_app(journal, RequestLimits(), ApiKeys(root / "keys"), facts))
        try:
            words = f"http://127.0.0.1:{server.start()}", "tiny/model"
            given = {"TINKER_API_KEY": key, "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
            found = json.loads(run_client(f"{PROGRAMS}/front_client.py", *words, **given))
        finally:
            server.stop()
        found["sessions_there"] = [(s.key, s.finished) for s in journal.sessions()]
        found["done"] = engine.done
        found["waiting"] = journal.open_calls()
        found["contradictions"] = journal.contradictions
    return found


def test_it_trains(seen):
    model = seen["model_id"]
    assert seen["capabilities"] == ["tiny/model"] and seen["info"] == ["tiny/model", 8, True]
    assert seen["outputs"] == [2500, {"loss:sum": 1250.0}]
    assert seen["first"] == [-0.5] * 4 and seen["optim"] == {"lr:mean": 1e-4}
    assert seen["forward"] == 1 and seen["after"] == {"lr:mean": 0.5}
    done = [(kind, seq) for kind, owner, seq in seen["done"] if owner == model]
    assert done[:4] == [*(("forward_backward", s) for s in (1, 2, 3)), ("optim_step", 4)]
    assert [seq for _, seq in done] == sorted(seq for _, seq in done)


def test_what_is_wrong_is_told_and_the_model_goes_on(seen):
    for name, said in (
        ("bad_loss", 'loss_fn_config_v2["beta"]=nan'),
        ("bad_step", "adam_params.learning_rate: Input should be greater than or equal to 0"),
        ("bad_name", "path=a/b; give 1 to 128 letters"),
    ):
        assert seen[name].startswith("RequestFailedError") and said in seen[name]
    assert "limit num_samples is 256" in seen["too_many"]
    assert "this server trains tiny/model" in seen["other_model"]
    for name, said in (
        ("no_room", "limit models is 2: unload one"),
        ("unstable", "record_stability_info: the loss stable_reinforce"),
    ):
        assert seen[name].startswith("UnprocessableEntityError") and said in seen[name]


def test_its_checkpoints(seen):
    model = seen["model_id"]
    assert seen["saved"] == f"tinker://{model}/weights/step-1"
    assert seen["listed"] == ["external_weights/out", "sampler_weights/step-1", "weights/step-1"]
    assert seen["expiry"] == 1 and seen["files"] == {"weights": "w" * 10}
    assert seen["run"] == ["tiny/model", 8, {"renderer_name": "x"}, seen["saved"]]
    assert (seen["runs"], seen["weights_info"], seen["user"], seen["left"]) == (1, 8, 3, 2)
    assert seen["loaded"] == re.sub(r"\d+$", "1", model)
    assert seen["loaded_step"] == {"lr:mean": 1e-4}


def test_its_searches_copies_and_reports(seen):
    owner = "tml:organization_user:laptop"
    assert seen["whoami"] == [owner, "tml:organization:megatron-vlm", None]
    assert seen["copies"] == ["weights/step-1"] * 2
    copy = ["client_finished", "success", 1]
    assert sorted(seen["searched"]) == [["active", "", 2], copy, copy]
    assert seen["usage"] == [4, 20, "laptop"]
    assert seen["audit"] == [
        ["checkpoint_create", None],
        ["checkpoint_update", None],
        ["checkpoint_read", "load"],
        *[["checkpoint_read", "copy"]] * 2,
    ]
    assert seen["audit_at_another_time"] == [0, 0]


def test_its_samples(seen):
    assert seen["samples"] == [2] and seen["sequence"] == [[1, 2, 3], [-0.25] * 3, "stop"]
    assert seen["prompt"] == [None, -0.5, -0.5, -0.5]
    assert seen["from_path"] == seen["from_base"] == 1 and seen["base_model"] == "tiny/model"


def test_it_leaves_nothing_behind(seen):
    assert all(key == "laptop" and end is not None for key, end in seen["sessions_there"])
    assert seen["waiting"] == [] and seen["contradictions"] == 0


def test_the_clients_converters_and_ours():
    options = ["-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    words = ["-m", "pytest", *options, f"{PROGRAMS}/converters.py"]
    said = run_client(*words, PYTHONPATH=str(ROOT), PYTEST_ADDOPTS="")
    assert " passed" in said and "skipped" not in said, said


def test_losses_of_the_client_and_sparse_targets(tiny, tmp_path):
    """A loss that the client computes by itself gives the gradients of the one that the service
    computes, and sparse targets those of dense ones."""
    path = tiny(vocab=512)
    with served(path, tmp_path / "run", free_port(), "serve.name=tiny") as running:
        said = Cookbook(running.url, tmp_path, "tiny").script("losses.py", "tiny")
    found = json.loads(said.splitlines()[-1])
    assert found["built in"] == [pytest.approx(each, rel=TOLERANCE) for each in found["own"]]
    assert found["built in"][0][0] != found["built in"][1][0]
    *sparse, shape = found["sparse"]
    assert sparse == pytest.approx(found["dense"][:2], rel=TOLERANCE) and sparse[1] > 0
    assert shape == [6, 3]
    sparse, dense = found["chosen"]
    assert sparse == dense and len(sparse) == 5
    asked = [(r, c) for r in range(5) for c in range(4) if sparse[r][c] < -1]
    assert asked == [(1, 2), (4, 0), (4, 3)]


# Chats whose thoughts or calls the cookbook writes otherwise than the released template does.
OTHERWISE = (
    "call without words,",  # it escapes the letters of lists
    "pictures,",  # it keeps the newlines at the end of thoughts
    "no answer to a tool,",  # it forgets thoughts before results of tools
    "a spelled answer of a tool,",  # it takes this for a question
)
RENDERERS = {"qwen3_5": {}, "qwen3_5_disable_thinking": {"enable_thinking": False}}


@pytest.mark.parametrize("name", RENDERERS)
def test_the_cookbooks_renderer_of_qwen3_5_makes_our_tokens(name, tiny, tmp_path):
    """Prompts, whole chats, and the tokens of the last answer that are trained."""
    path = tmp_path / "model"
    shutil.copytree(tiny(family="qwen3_5"), path)
    shutil.copyfile(TEMPLATES / "qwen3_5.jinja", path / "chat_template.jinja")
    join_newlines(path / "tokenizer.json")
    chats = {
        title: chat
        for title, chat in FAMILY_CHATS.items()
        if not title.startswith(OTHERWISE) and "video" not in title and "two parts" not in title
    }
    if RENDERERS[name]:  # it refuses answers with thoughts
        chats = {t: chat for t, chat in chats.items() if "reasoning_content" not in str(chat)}
    assert len(chats) >= 10
    (tmp_path / "chats.json").write_text(json.dumps(list(chats.values())))
    words = [f"{PROGRAMS}/renderers.py", str(path), name, str(tmp_path / "chats.json")]
    found = json.loads(run_client(*words, PYTHONPATH="", HF_HUB_OFFLINE="1").splitlines()[-1])
    reader = RowMaker(str(path), train_on="last_assistant", template_kwargs=RENDERERS[name]).reader
    wholes = 0
    for (title, chat), theirs in zip(chats.items(), found, strict=True):
        asked = chat["messages"][: len(chat["messages"]) - ("ids" in theirs)]
        prompt = reader.encode({**chat, "messages": asked}, title, prompt=True)
        assert without_pictures(prompt) == theirs["prompt"], title
        # The two newlines of an empty block are one token, and the cookbook's are two.
        is_empty = not RENDERERS[name] and "reasoning_content" not in chat["messages"][-1]
        if "ids" in theirs and not is_empty:
            whole = reader.encode(chat, title)  # it ends with a newline, which they leave out
            assert without_pictures(whole)[:-1] == theirs["ids"], title
            # In chats with pictures the cookbook trains the end of the prompt, too.
            begins, weights = len(prompt.ids_S), enumerate(theirs["trained"])
            trained = [weight > 0 and place >= begins for place, weight in weights]
            assert whole.trained_S.tolist()[:-1] == trained, title
            wholes += 1
    assert wholes >= 4


def without_pictures(sample):
    image = token_ids().image
    return [-1 if token == image else token for token in sample.ids_S.tolist()]
