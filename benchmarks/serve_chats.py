"""Time of chats of unlike lengths that are asked at once, as a multiple of that of the same prompts
as samples of the Tinker protocol.

    .venv/bin/python benchmarks/serve_chats.py
"""

import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.pool import free_port
from tests.support.serve_client import Client, Sampler, served, tokens_of

ASKED, REPEATS = 64, 3
KINDS: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 5})
random = np.random.default_rng(0)
WORDS = [" ".join(["word"] * int(n)) for n in random.integers(1, 40, ASKED)]
ANSWERS = random.integers(4, 96, ASKED).tolist()  # tokens of the longest answer of each


def chat(client: Client, place: int, **fields: Any) -> Any:
    messages = [{"role": "user", "content": WORDS[place]}]
    body = {"model": client.model_name, "messages": messages, "max_tokens": ANSWERS[place]}
    body |= {"seed": place, "return_token_ids": True, **fields}
    reply = client.http.post(f"{client.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return None if "stream" in fields else reply.json()


def sample(sampler: Sampler, prompt: list[int], place: int) -> list[int]:
    return tokens_of(sampler.sample([prompt], max_tokens=ANSWERS[place], seed=place))[0]


def measure(client: Client) -> dict[str, float]:
    """Return the ratio for each kind of request."""
    sampler, ratios = client.sampler(base_model=client.model_name), {}
    with ThreadPoolExecutor(ASKED) as pool:
        replies = list(pool.map(lambda place: chat(client, place), range(ASKED)))
        prompts = [reply["prompt_token_ids"] for reply in replies]

        def samples() -> Any:
            return list(pool.map(lambda n: sample(sampler, prompts[n], n), range(ASKED)))

        assert samples() == [reply["choices"][0]["token_ids"] for reply in replies]
        for kind in KINDS:
            taken: list[list[float]] = [[], []]
            for _ in range(REPEATS):
                start = time.perf_counter()
                list(pool.map(lambda place, kind=kind: chat(client, place, **kind), range(ASKED)))
                middle = time.perf_counter()
                samples()
                taken[0].append(middle - start)
                taken[1].append(time.perf_counter() - middle)
            chats, plain = map(statistics.median, taken)
            name = " ".join(kind) or "chat"
            print(f"{name}: {chats:.2f} s, as samples {plain:.2f} s", flush=True)
            ratios[name] = chats / plain
    return ratios


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_tiny(path, TinySpec(vocab=509))
        with (
            served(path, Path(folder) / "run", free_port()) as running,
            Client(running.url, path) as client,
        ):
            print(measure(client))
