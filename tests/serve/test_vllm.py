# make vllm-env tinker-env, then .venv/bin/python -m pytest tests/serve/test_vllm.py
"""A service whose samples real vLLM draws: they are those of the trainer's own decoder, with the
same log-probs, of all models at a time. tests/serve/test_vllm_samples.py has what needs no vLLM."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_vlm.commands.demo.tiny_model import write_tiny
from megatron_vlm.family.tiny import TinySpec
from tests.serve.test_tinker_recipes import ROWS, SHORT, check_sums
from tests.support.engine import ENVIRONMENT
from tests.support.pool import free_port
from tests.support.recipes import Cookbook, write_sums
from tests.support.reference import load_reference, row_logits
from tests.support.serve_client import (
    Client,
    Running,
    Sampler,
    log_probs_of,
    served,
    start,
    tokens_of,
)
from tests.support.serve_requests import Chunks, around, picture, row_of, targeted_log_probs

pytestmark = [
    pytest.mark.slow,  # each engine takes 15 s to start
    pytest.mark.engine("vllm"),
]

# fp32 on the CPU, of log-probs from -3 to -9. Measured worst case: see each test.
TOLERANCE = 1e-5
TOLERANCE_BF16 = 0.25
PATIENCE_S = 120.0
ENGINE = [
    "engine.name=vllm",
    f"engine.python={ENVIRONMENT}/bin/python",
    "engine.options={skip_mm_profiling: true}",
    "engine.max_len=512",
    "serve.max_rank=8",
]
PROMPTS: list[Chunks] = [
    [[1, 2, 3, 4, 5]],
    [[7], *around(picture(70, 45, 1)), [8, 9, 10]],
    [[5, 6], *around(picture(130, 91, 2)), *around(picture(33, 64, 3, "jpeg")), [8]],
    [[20, 21, 22, 23, 24, 25, 26]],
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For each process: the models are tiny, and others use the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def path(tiny) -> str:
    """32 is the least width of a head that vLLM's attention on the CPU takes."""
    return tiny(head_dim=32, from_scratch=True)


@pytest.fixture(scope="module")
def running(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(path, tmp_path_factory.mktemp("vllm"), free_port(), *ENGINE) as found:
        yield found


@pytest.fixture
def client(running: Running, path: str) -> Iterator[Client]:
    with Client(running.url, path) as found:
        yield found


def samplers_of(client: Client, path: str) -> list[Sampler]:
    """Of the base model, of two with adapters and of one that is trained as a whole; each of these
    is trained on afterwards. One is saved once more, and one as a PEFT folder."""
    models = [client.model(4, seed=1), client.model(8, seed=2), client.model(0)]
    found = [client.sampler(base_model=path)]
    data = [([[1, 2, 3, 4]], {"target_tokens": np.array([5, 6, 7, 8])})]
    for model in models:
        model.gradients(data)
        model.step(learning_rate=1e-2)
        found.append(model.sampler())
        model.gradients(data)
        model.step(learning_rate=3e-2)
    external = client.sampler(model_path=models[1].save_external("out"))
    return [*found, models[0].sampler(), external]


def all_answers(client: Client, path: str) -> list[Any]:
    """To all prompts, from all samplers, asked for all at a time."""
    samplers = samplers_of(client, path)
    asked = dict(max_tokens=6, temperature=0.0, stop=[])
    promises = [each.ask(chunks, **asked) for chunks in PROMPTS for each in samplers]
    more = {"prompt_logprobs": True, "topk_sample_logprobs": 3}
    promises += [each.ask(PROMPTS[1], 1, more, **asked) for each in samplers]
    return [client.sampled(promise) for promise in promises]


def test_answers_and_log_probs_are_those_of_our_own(client, path, tmp_path, record_property):
    """Greedy ones, with 0 to 2 pictures, of six sets of weights. None was seen to differ; a tie
    closer than the log-probs agree may fall either way. Measured: 2.4e-6."""
    found = all_answers(client, path)
    with (
        served(path, tmp_path, free_port(), "serve.max_rank=8") as own,
        Client(own.url, path) as other,
    ):
        expected = all_answers(other, path)
    pairs = list(zip(found, expected, strict=True))
    assert sum(tokens_of(ours) != tokens_of(theirs) for ours, theirs in pairs) <= 1
    # No two of the samplers have the same weights.
    assert len({round(log_probs_of(each)[0][0], 3) for each in expected[: 6 * len(PROMPTS)]}) > 15
    same = [pair for pair in pairs if tokens_of(pair[0]) == tokens_of(pair[1])]
    worst = [np.abs(np.array(log_probs_of(a)) - log_probs_of(b)).max() for a, b in same]
    for both in pairs[-6:]:
        a, b = (np.frombuffer(each.prompt_logprobs, "<f4")[1:] for each in both)
        worst.append(np.abs(a - b).max())
        tops = [each.sequences[0].topk_sampled_logprobs for each in both]
        a, b = (np.frombuffer(each.logprobs, "<f4") for each in tops)
        worst.append(np.abs(a - b).max())
    record_property("worst", float(max(worst)))
    assert max(worst) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_the_temperature(client, path, temperature, record_property):
    """Before anything is cut off. Measured: 3.3e-6."""
    hf, sampler = load_reference(path), client.sampler(base_model=path)
    cuts = [{}, {"top_k": 5}, {"top_p": 0.5}]
    asked = dict(max_tokens=8, temperature=temperature, seed=5, stop=[])
    promises = [sampler.ask(chunks, 3, **asked, **cut) for chunks in PROMPTS for cut in cuts]
    worst, answers = 0.0, set()
    for place, promise in enumerate(promises):
        answer, chunks = client.sampled(promise), PROMPTS[place // len(cuts)]
        for ids, log_probs in zip(tokens_of(answer), log_probs_of(answer), strict=True):
            answers.add(tuple(ids))
            with torch.no_grad():
                logits = row_logits(hf, row_of([*chunks, ids], path))[-len(ids) - 1 : -1]
            want = targeted_log_probs(logits / temperature, np.array(ids)).numpy()
            worst = max(worst, float(np.abs(want - np.array(log_probs)).max()))
    assert len(answers) > 3 * len(PROMPTS)
    record_property("worst", worst)
    assert worst < TOLERANCE
    again = [tokens_of(client.sampled(sampler.ask(PROMPTS[0], 3, **asked))) for _ in range(2)]
    assert again[0] == again[1]


def test_what_ends_an_answer_is_its_last_token(client, path):
    sampler = client.sampler(base_model=path)
    asked = dict(max_tokens=12, temperature=1.0, seed=9)
    free = sampler.sample(PROMPTS[1], **asked, stop=[])
    [ids] = tokens_of(free)
    assert len(ids) == 12 and free.sequences[0].stop_reason == 1
    stopped = sampler.sample(PROMPTS[1], **asked, stop=[ids[4]])
    end = ids.index(ids[4]) + 1
    assert tokens_of(stopped) == [ids[:end]] and stopped.sequences[0].stop_reason == 0


def test_strings_stop_as_with_our_own(client, path):
    """Also where a special token, which is no text, stands between the parts of one."""
    tokenizer, sampler = AutoTokenizer.from_pretrained(path), client.sampler(base_model=path)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def stop_of(ids: list[int]) -> str | None:
        """The last character before a special token, and the first behind it."""
        for place in range(1, len(ids) - 1):
            if ids[place] in tokenizer.all_special_ids:
                stop = text(ids[:place])[-1:] + text([ids[place + 1]])[:1]
                if len(stop) == 2 and stop.isascii() and stop not in text(ids[: place + 1]):
                    return stop
        return None

    def ask(seed: int, *stop: str) -> str:
        return sampler.ask(PROMPTS[0], max_tokens=48, seed=seed, stop=list(stop))

    frees = [tokens_of(client.sampled(each))[0] for each in [ask(seed) for seed in range(40)]]
    stops = {seed: stop for seed, free in enumerate(frees) if (stop := stop_of(free))}
    promises = {seed: ask(seed, stop) for seed, stop in stops.items()}
    for seed, promise in promises.items():
        found, free = client.sampled(promise), frees[seed]
        end = next(n for n in range(1, 49) if stops[seed] in text(free[:n]))
        assert tokens_of(found) == [free[:end]] and found.sequences[0].stop_reason == 0
    assert len(stops) > 3  # 11 were seen


def gauge(url: str, name: str) -> float:
    """Return a figure of the service."""
    words = httpx.get(f"{url}/metrics").text.split()
    places = [place for place, word in enumerate(words) if word == f"megatron_vlm_{name}"]
    return float(words[places[-1] + 1]) if places else 0.0


def test_what_was_under_way_when_it_died_is_the_same(path, tmp_path):
    """Long answers of a snapshot, of a service that is killed and of one that is not."""
    port = free_port()
    running = start(path, tmp_path, port, *ENGINE)
    try:
        with Client(running.url, path, patience_s=PATIENCE_S) as client:
            sampler = samplers_of(client, path)[1]
            asked = dict(max_tokens=400, seed=4, stop=[])
            [calm] = tokens_of(sampler.sample(PROMPTS[1], **asked))
            promises = [sampler.ask(PROMPTS[1], 2, **asked) for _ in range(3)]
            ends = time.monotonic() + PATIENCE_S
            while not gauge(running.url, "samples_under_way"):
                assert time.monotonic() < ends
            running.kill()
            running = start(path, tmp_path, port, *ENGINE)
            found = [tokens_of(client.sampled(promise)) for promise in promises]
            assert found[0][0] == calm and found[0] == found[1] == found[2]
    finally:
        running.kill()


@pytest.mark.rotate(1)
@pytest.mark.parametrize("drafts", [0, 1])
def test_samples_of_gated_delta_nets_are_of_their_weights(drafts, tiny, tmp_path, record_property):
    """vLLM on the CPU computes these in bf16 alone. The ranks score each answer with the weights of
    its sampler and with those of another one. Drafts change no answer, and are counted."""
    sizes = dict(family="qwen3_5", head_dim=32, linear_key_dim=64, linear_value_dim=64)
    path = tiny("bfloat16", from_scratch=True, mtp_layers=drafts, **sizes)
    given = [*ENGINE, "train.precision=bf16", f"engine.draft_tokens={drafts}"]
    with (
        served(path, tmp_path, free_port(), *given) as running,
        Client(running.url, path) as client,
    ):
        samplers = samplers_of(client, path)
        asked = dict(max_tokens=6, temperature=1.0, seed=3, stop=[])
        cuts = ({}, {"top_k": 1})  # at a temperature of 0, placeholders might be drawn
        cases = [(i, chunks, cut) for i in range(5) for chunks in PROMPTS for cut in cuts]
        drawn = [samplers[place].ask(chunks, **asked, **cut) for place, chunks, cut in cases]
        answers = [client.sampled(promise) for promise in drawn]
        counts = [gauge(running.url, f"rounds_accepting_{n}_drafts_total") for n in range(2)]
        own = differences(client, samplers, cases, answers, 0)
        other = differences(client, samplers, cases, answers, 1)
    record_property("own", [float(own.max()), own.mean(1).tolist()])
    record_property("other", [float(other.max()), other.mean(1).tolist()])
    assert own.max() < TOLERANCE_BF16
    assert (other.mean(1) > 2 * own.mean(1)).all()
    tokens = sum(len(ids) - 1 for answer in answers for ids in tokens_of(answer))  # after prefills
    over = counts[0] + 2 * counts[1] - tokens  # drafts behind the last token of an answer
    assert 0 <= over <= counts[1] if drafts else counts == [0, 0]


def differences(
    client: Client,
    samplers: list[Sampler],
    cases: list[tuple[int, Chunks, dict[str, int]]],
    answers: list[Any],
    step: int,
) -> np.ndarray:
    """Return the differences of log-probs by vLLM from those by the ranks: a row for each sampler.
    The ranks score with the weights of the sampler that is so many places further."""
    more, found = {"prompt_logprobs": True}, []
    promises = [
        samplers[(place + step) % len(samplers)].ask(
            [*chunks, tokens_of(answer)[0]], 1, more, max_tokens=1
        )
        for (place, chunks, _), answer in zip(cases, answers, strict=True)
    ]
    for promise, answer in zip(promises, answers, strict=True):
        scored = np.frombuffer(client.sampled(promise).prompt_logprobs, "<f4")
        [log_probs] = log_probs_of(answer)
        found.append(np.abs(scored[-len(log_probs) :] - log_probs))
    return np.array(found).reshape(len(samplers), -1)


@pytest.mark.engine("tinker")
def test_a_recipe_learns_from_its_samples(tmp_path, record_property):
    """Sums by reinforcement: `optim/kl_sample_train_v1` compares the log-probs of vLLM's samples
    with those of training. Measured: 1.6e-7."""
    base = tmp_path / "base" / "tiny"
    spec = TinySpec(layers=3, hidden=96, heads=8, head_dim=32, deepstack=1, from_scratch=True)
    write_tiny(base, spec)
    write_sums(tmp_path / "sums.jsonl", 480)
    given = [*(each for each in ENGINE if "max_rank" not in each), ROWS, "serve.max_rank=32"]
    with served(str(base), tmp_path / "run", free_port(), *given) as running:
        book = Cookbook(running.url, tmp_path, str(base))
        taught = book.trained(
            *("chat_sl.train", "taught", "dataset=sums.jsonl", "batch_size=16"),
            "learning_rate=1e-2",
        )
        sums = book.trained(
            *("math_rl.train", "sums", "env=arithmetic", f"load_checkpoint_path={taught.state}"),
            *("loss_fn=importance_sampling", "groups_per_batch=6", "group_size=6", "max_steps=3"),
            *("learning_rate=1e-3", "eval_every=0", SHORT),
        )
    check_sums(sums, record_property)
