"""A model that says given texts: the service itself trains it until it knows them by heart."""

import base64
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.support.batches import token_ids
from tests.support.serve_client import Client, Model
from tests.support.serve_requests import Picture

END = "<|im_end|>"
MOST_STEPS = 400
LIKELY = 0.7  # probability that each token of an answer must have


def prompt_ids(client: Client, **chat: Any) -> list[int]:
    """Return the tokens of a chat of OpenAI's form."""
    body = {"model": client.model_name, "max_tokens": 1, "return_token_ids": True, **chat}
    reply = client.http.post(f"{client.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["prompt_token_ids"]
    return ids


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Picture]:
    parts = [part for each in messages for part in each["content"] if isinstance(part, Mapping)]
    uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Picture(base64.b64decode(uri.partition(",")[2]), "png") for uri in uris]


def with_pictures(ids: list[int], pictures: Sequence[Picture]) -> list[list[int] | Picture]:
    """Put pictures in place of their tokens."""
    left, chunks, image = iter(pictures), [], token_ids().image
    for is_picture, run in groupby(ids, key=lambda token: token == image):
        chunks.append(next(left) if is_picture else list(run))
    return chunks


def teach(client: Client, chats: Sequence[tuple[Mapping[str, Any], str]]) -> Model:
    """Return a model whose likeliest answer to each chat is the text beside it."""
    tokenizer = AutoTokenizer.from_pretrained(client.model_name)
    data = []
    for chat, said in chats:
        prompt, answer = prompt_ids(client, **chat), tokenizer(said + END).input_ids
        ids = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        chunks = with_pictures(ids[:-1], pictures_of(chat["messages"]))
        data.append((chunks, {"target_tokens": ids[1:], "weights": weights}))
    model = client.model(rank=0)
    for _ in range(MOST_STEPS):
        _, log_probs = model.gradients(data)
        answers = zip(log_probs, (inputs["weights"] for _, inputs in data), strict=True)
        least = min(float(each[np.array(weights) > 0].min()) for each, weights in answers)
        if least > math.log(LIKELY):
            return model
        model.step(learning_rate=4e-3)
    raise AssertionError(f"after {MOST_STEPS} steps a token has a log-prob of {least}")
