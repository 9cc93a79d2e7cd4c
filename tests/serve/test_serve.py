# .venv/bin/python -m pytest tests/serve/test_serve.py
"""A service as its clients see it.

Training equals plain PyTorch on Hugging Face's model, and samples come from weights that stay
unchanged. Results are the same when models wait on disk or the service was killed.
"""

import math
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from tests.support.batches import Ids, token_ids
from tests.support.pool import free_port
from tests.support.ports import descendants
from tests.support.process_tree import ProcessTree
from tests.support.reference import load_reference, row_logits
from tests.support.serve_client import (
    Client,
    FailedError,
    Model,
    Running,
    log_probs_of,
    read_output,
    served,
    start,
    tokens_of,
)
from tests.support.serve_requests import Chunks, around, ids_in, picture, row_of, targeted_log_probs
from tests.support.suites import full, slow

pytestmark = pytest.mark.alone  # it starts jobs and kills them

VOCAB = 509  # at TP2 one row of the vocabulary is padding
# fp32 on the CPU, absolute, after three steps of AdamW. Measured worst: 9.6e-7.
TOLERANCE = 5e-6


def prompts(ids: Ids) -> list[Chunks]:
    return [
        [[1, 2, 3, 4, 5]],
        [[7], *around(picture(70, 45, 1), ids), [8, 9, 10]],
        [[3, 3, 3]],
        [[20, 21, 22, 23, 24, 25, 26]],
    ]


PROMPTS = prompts(token_ids())
# Each step has its own settings, and the second clips. With a small eps, the rounding of a gradient
# near 0 would become a step.
STEPS = (
    dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-2, weight_decay=0.0),
    dict(learning_rate=5e-3, beta1=0.8, beta2=0.9, eps=1e-2, weight_decay=0.1, grad_clip_norm=1.0),
    dict(learning_rate=2e-3, beta1=0.9, beta2=0.99, eps=1e-1, weight_decay=0.01),
)


@pytest.fixture(scope="module")
def path(tiny) -> str:
    return tiny(vocab=VOCAB)


@pytest.fixture(scope="module")
def running(
    path: str, tmp_path_factory: pytest.TempPathFactory, process_tree: ProcessTree
) -> Iterator[Running]:
    folder, words = tmp_path_factory.mktemp("service"), "train.micro_batch_size=2"
    with served(path, folder, free_port(), words, tree=process_tree) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: Running, path: str) -> Iterator[Client]:
    with Client(running.url, path) as connected:
        yield connected


def data_of(path: str, step: int) -> list[tuple[Chunks, dict[str, Any]]]:
    """Return data with random targets, and weights of both signs."""
    random = np.random.default_rng(step)
    data = []
    for chunks in prompts(ids_in(path)):
        count = len(row_of(chunks, path).ids_S)
        inputs = {
            "target_tokens": random.integers(0, VOCAB, count),
            "weights": random.normal(size=count),
        }
        data.append((chunks, inputs))
    return data


def trained(model: Model, path: str, steps: int = 3) -> list[Any]:
    """Take steps of two calls each, the second sent before the first result; return the results."""
    rounds = []
    for step in range(steps):
        data = data_of(path, step)
        first, second = model.ask_gradients(data[:3]), model.ask_gradients(data[3:])
        results = [read_output(model.client.result(promise)) for promise in (first, second)]
        applied = model.step(**STEPS[step])
        rounds.append(([metrics["loss:sum"] for metrics, _ in results], applied["grad_norm"]))
        rounds[-1] += ([row for _, rows in results for row in rows],)
    return rounds


def reference(model: Any, path: str, steps: int = 3) -> list[Any]:
    """Train in plain PyTorch, and return the same results."""
    params = [param for param in model.parameters() if param.requires_grad]
    flat = [param for param in params if param.dim() < 2]  # norms and biases, which do not decay
    groups = [dict(params=[param for param in params if param.dim() > 1])]
    adam = torch.optim.AdamW([*groups, *([dict(params=flat)] if flat else [])])
    results = []
    for step, options in enumerate(STEPS[:steps]):
        losses, log_probs = [], []
        for chunks, inputs in data_of(path, step):
            logits = row_logits(model, row_of(chunks, path))
            p = targeted_log_probs(logits, inputs["target_tokens"])
            loss = -(p * torch.tensor(inputs["weights"]).float()).sum()
            loss.backward()
            losses.append(float(loss.detach()))
            log_probs.append(p.detach().numpy())
        norm = torch.nn.utils.clip_grad_norm_(params, options.get("grad_clip_norm", math.inf))
        for group, decay in zip(adam.param_groups, (options["weight_decay"], 0.0), strict=False):
            group["lr"], group["eps"] = options["learning_rate"], options["eps"]
            group["betas"], group["weight_decay"] = (options["beta1"], options["beta2"]), decay
        adam.step()
        adam.zero_grad()
        results.append(([sum(losses[:3]), losses[3]], float(norm), log_probs))
    return results


def compare(ours: list[Any], theirs: list[Any]) -> float:
    """Return the largest difference; those of sums and norms are relative to their size."""
    worst = 0.0
    for (sums, norm, log_probs), (expected_sums, expected_norm, expected) in zip(
        ours, theirs, strict=True
    ):
        pairs = [*zip(sums, expected_sums, strict=True), (norm, expected_norm)]
        worst = max(worst, *(abs(a - b) / max(abs(b), 10.0) for a, b in pairs))
        worst = max(
            worst, *(float(abs(a - b).max()) for a, b in zip(log_probs, expected, strict=True))
        )
    return worst


def hf_log_probs(model: Any, chunks: Chunks, path: str) -> np.ndarray:
    row = row_of(chunks, path)
    with torch.no_grad():
        log_probs = targeted_log_probs(row_logits(model, row)[:-1], row.ids_S[1:].numpy())
    return np.concatenate([[np.nan], log_probs.numpy()])


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference between two lists of a prompt's log-probs.

    Log-probs of pictures must be numbers, too: the cookbook multiplies them by weights of 0.
    """
    assert np.isnan(ours[0]) and not np.isnan(ours[1:]).any()
    return float(abs(ours - theirs)[1:].max())


def test_full_training_is_that_of_plain_pytorch(client, path, record_property):
    check_training(client, path, record_property, TOLERANCE)


def check_training(client: Client, path: str, record_property: Any, tolerance: float) -> None:
    model, hf = client.model(0), load_reference(path)
    worst = [compare(trained(model, path), reference(hf, path))]
    sampler = model.sampler()
    for chunks in prompts(ids_in(path)):
        actual = sampler.log_probs(chunks)
        worst.append(apart(actual, hf_log_probs(hf, chunks, path)))
    record_property("worst", worst)
    assert max(worst) <= tolerance, worst


@pytest.mark.slow
def test_adapters_are_those_of_peft(client, path, running, record_property):
    check_against_peft(client.model(6, seed=5), path, running, record_property)


def check_against_peft(model: Model, path: str, running: Running, record_property: Any) -> None:
    """PEFT trains the initial adapter after a download, and the service trains it, too."""
    model.save_external("begin")
    begun = exported(running, model, "begin")
    peft = PeftModel.from_pretrained(load_reference(path), begun, is_trainable=True)
    worst = [compare(trained(model, path), reference(peft, path))]
    model.save_external("end")
    again = PeftModel.from_pretrained(load_reference(path), exported(running, model, "end"))
    sampler = model.sampler()
    for chunks in PROMPTS:
        actual = sampler.log_probs(chunks)
        worst += [apart(actual, hf_log_probs(each, chunks, path)) for each in (peft, again)]
    record_property("worst", worst)
    assert max(worst) <= TOLERANCE, worst


def exported(running: Running, model: Model, name: str) -> str:
    """Return the folder of a download, which the service keeps on this machine."""
    command = running.process.args
    run = next(Path(word[4:]) for word in command if str(word).startswith("run="))
    with sqlite3.connect(f"file:{run / 'journal.sqlite'}?mode=ro", uri=True) as db:
        (folder,) = db.execute(
            "SELECT folder FROM checkpoints WHERE model = ? AND name = ?", (model.id, name)
        ).fetchone()
    assert not (run / folder.removesuffix("-export")).exists()  # its source in our own form
    return str(run / folder)


def test_snapshots_stay_while_training_goes_on(client, path):
    model = client.model(4, seed=1)
    trained(model, path, 1)
    sampler, named = model.sampler(), model.save_for_sampler("first")
    before = [sampler.log_probs(chunks) for chunks in PROMPTS]
    data = data_of(path, 5)
    model.gradients(data)
    model.step(learning_rate=0.05)
    after = [sampler.log_probs(chunks) for chunks in PROMPTS]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
    loaded = client.sampler(model_path=named)
    again = [loaded.log_probs(chunks) for chunks in PROMPTS]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, again, strict=True))
    newer = model.sampler().log_probs(PROMPTS[0])
    assert float(np.nanmax(abs(newer - before[0]))) > 1e-3
    # Trainer and sampler give the same tokens the same log-probs, because they are one model.
    ids = [1, 2, 3, 4, 5]
    result = model.gradients([([ids], {"target_tokens": [*ids[1:], 0]})], forward_only=True)
    assert np.array_equal(result[1][0][:-1], newer[1:])


def test_samples_and_their_log_probs(client, path):
    check_samples(client, path, TOLERANCE)


def check_samples(client: Client, path: str, tolerance: float) -> None:
    model = client.model(0)
    trained(model, path, 1)
    sampler, chunks = model.sampler(), prompts(ids_in(path))[1]
    options = dict(max_tokens=6, temperature=0.7, seed=11, stop=[])
    first = sampler.sample(chunks, 3, **options)
    second = sampler.sample(chunks, 3, {"prompt_logprobs": True}, **options)
    assert tokens_of(first) == tokens_of(second)  # the same seed
    assert len({tuple(each) for each in tokens_of(first)}) == 3
    reseeded = sampler.sample(chunks, 3, **{**options, "seed": 12})
    assert tokens_of(reseeded) != tokens_of(first)
    assert tokens_of(sampler.sample(chunks, 3, max_tokens=6)) != tokens_of(
        sampler.sample(chunks, 3, max_tokens=6)
    )
    hf = load_reference(path)
    reference(hf, path, 1)
    for ids, log_probs in zip(tokens_of(first), log_probs_of(first), strict=True):
        row = row_of([*chunks, ids], path)
        with torch.no_grad():
            logits = row_logits(hf, row)[-len(ids) - 1 : -1] / 0.7
        expected = targeted_log_probs(logits, np.array(ids)).numpy()
        assert float(abs(expected - np.array(log_probs)).max()) <= tolerance
    greedy = sampler.sample(chunks, 1, temperature=0.0, max_tokens=4, stop=[])
    ids = tokens_of(greedy)[0]
    stopped = sampler.sample(chunks, 1, temperature=0.0, max_tokens=4, stop=[ids[1]])
    assert tokens_of(stopped)[0] == ids[:2] and stopped.sequences[0].stop_reason == 0
    assert greedy.sequences[0].stop_reason == 1


@pytest.mark.slow
def test_gemma4_trains_and_samples_as_by_transformers(
    tiny, tmp_path, process_tree, record_property
):
    """A picture has more tokens here. Measured worst: 8.6e-6."""
    path = tiny(family="gemma4", vocab=VOCAB, sliding_window=8)
    words = "train.micro_batch_size=2"
    with (
        served(path, tmp_path, free_port(), words, tree=process_tree) as service,
        Client(service.url, path) as connected,
    ):
        check_training(connected, path, record_property, 5e-5)
        check_samples(connected, path, 5e-5)


@pytest.mark.slow
def test_what_a_prompt_may_ask_besides(client, path):
    sampler, chunks = client.sampler(base_model=path), PROMPTS[1]
    hf, row = load_reference(path), row_of(PROMPTS[1], path)
    with torch.no_grad():
        log_probs = row_logits(hf, row).float().log_softmax(-1)
    count = len(row.ids_S)
    targets = np.random.default_rng(0).integers(-1, VOCAB, (count - 1, 3))
    more = {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 3,
        "topk_prompt_logprobs": 4,
        "topk_sample_logprobs": 5,
        "target_prompt_logprobs": {
            "data": targets.flatten().tolist(),
            "dtype": "int64",
            "shape": list(targets.shape),
        },
    }
    response = sampler.sample(chunks, 2, more, max_tokens=3, temperature=0.5, stop=[])
    prompt = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(prompt[:-3]).all() and not np.isnan(prompt[-3:]).any()
    top = response.topk_prompt_logprobs
    ids = np.frombuffer(top.token_ids, "<i4").reshape(-1, 4)
    values = np.frombuffer(top.logprobs, "<f4").reshape(-1, 4)
    expected = log_probs.topk(4)
    assert len(ids) == count and (values[:-3] == -99999.0).all()
    assert float(abs(values[-3:] - expected.values[-4:-1].numpy()).max()) <= TOLERANCE
    assert (ids[-3:, 0] == expected.indices[-4:-1, 0].numpy()).all()
    scored = np.frombuffer(response.target_prompt_logprobs.dense, "<f4").reshape(targets.shape)
    picked = log_probs[:-1].gather(1, torch.tensor(targets).clamp(min=0)).numpy()
    assert (scored[targets == -1] == 0).all()
    assert float(abs(scored - picked)[targets != -1].max()) <= TOLERANCE
    for sequence, ids_of in zip(response.sequences, tokens_of(response), strict=True):
        with torch.no_grad():
            logits = row_logits(hf, row_of([*chunks, ids_of], path))[-4:-1].float()
        expected = (logits / 0.5).log_softmax(-1).topk(5)
        values = np.frombuffer(sequence.topk_sampled_logprobs.logprobs, "<f4").reshape(-1, 5)
        assert float(abs(values - expected.values.numpy()).max()) <= TOLERANCE


@pytest.mark.slow
def test_checkpoints_go_on_or_begin_anew(client, path):
    model = client.model(3, seed=2)
    trained(model, path, 2)
    model.gradients(data_of(path, 8))  # pending gradients are not in a checkpoint
    saved = model.save("two")
    model.step(learning_rate=0.0, weight_decay=0.0)
    with pytest.raises(FailedError, match=r"user: path=two: tinker://.*overwrite=True"):
        model.save("two")
    assert model.save("two", overwrite=True) == saved
    data = data_of(path, 9)
    # The step without a learning rate has moved the moments, and the copy is older than it.
    first, anew = client.loaded(saved, True), client.loaded(saved, False)
    losses = []
    for copy in (model, first, anew):
        copy.gradients(data)
        copy.step(**STEPS[0])
        losses.append(copy.gradients(data, forward_only=True)[0]["loss:sum"])
    assert losses[0] == losses[1] != losses[2]
    first.gradients(data)  # gradients of weights that are replaced
    first.load(saved)
    first.gradients(data)
    first.step(**STEPS[0])
    assert first.gradients(data, forward_only=True)[0]["loss:sum"] == losses[0]


def test_mistakes_leave_a_model_usable(client, path):
    model = client.model(2, seed=3)
    good = data_of(path, 0)
    assert client.model(2).step() == {"grad_norm": 0.0}  # a step without gradients is not a mistake
    model.gradients(good[:1])
    for data, loss, problem in (
        ([([[1, VOCAB]], {"target_tokens": [1, 2]})], "cross_entropy", r"tokens\[1\]=509"),
        ([([[1, 2]], {"target_tokens": [1, 2, 3]})], "cross_entropy", "has 3 entries"),
        ([([[1, 2]], {"target_tokens": [1, 2]})], "ppo", r'loss_fn_inputs\["logprobs"\]'),
        (good, "stable_reinforce", "loss_fn=stable_reinforce"),
    ):
        with pytest.raises(FailedError, match=f"user: .*{problem}"):
            model.gradients(data, loss)
    with pytest.raises(FailedError, match=r"user: .*eps"):
        model.step(eps=0.0)
    assert model.gradients(good[1:])[0]["loss:sum"]
    clean = client.model(2, seed=3)
    clean.gradients(good[:1])
    clean.gradients(good[1:])
    assert model.step(**STEPS[0]) == clean.step(**STEPS[0])
    sampler = model.sampler()
    with pytest.raises(FailedError, match=r"user: .*tokens\[0\]=600"):
        sampler.sample([[600]], max_tokens=1)
    with pytest.raises(FailedError, match=r"user: .*rank=5000|422"):
        client.model(5000)
    assert sampler.sample([[5]], max_tokens=1).sequences


def test_a_sample_that_is_refused_takes_no_others_along(client, path):
    """Samples are drawn together, and only then is a placeholder without a picture noticed."""
    sampler = client.sampler(base_model=path)
    good = [sampler.ask([[place, 7]], max_tokens=2, seed=place, stop=[]) for place in range(3)]
    bad = sampler.ask([[5, token_ids().image, 6]], max_tokens=2, stop=[])
    good += [sampler.ask([[place, 7]], max_tokens=2, seed=place, stop=[]) for place in range(3)]
    with pytest.raises(FailedError, match=r"user: .*image"):
        client.result(bad)
    answers = [client.sampled(each) for each in good]
    for one, other in zip(answers[:3], answers[3:], strict=True):
        assert tokens_of(one) == tokens_of(other)
        # Which answers share a pass depends on when they arrive, and with it the last digit.
        np.testing.assert_allclose(log_probs_of(one), log_probs_of(other), rtol=0, atol=TOLERANCE)


def story(client: Client, path: str) -> Any:
    """Train models in turns, with gradients that wait meanwhile, and return all results."""
    models = [client.model(rank, seed=4) for rank in (0, 3, 0, 2)]
    results: list[Any] = []
    for step in range(2):
        for place, model in enumerate(models):
            results.append(model.gradients(data_of(path, 10 * place + step)[:2])[0])
        for place, model in enumerate(models):
            results.append(model.gradients(data_of(path, 10 * place + step)[2:])[0])
            results.append(model.step(**STEPS[step]))
    samplers = [model.sampler() for model in models]
    for sampler in samplers:
        results += [sampler.log_probs(chunks).tobytes() for chunks in PROMPTS]
        results += tokens_of(sampler.sample(PROMPTS[1], 2, max_tokens=4, seed=1))
    for model in models:
        results.append(model.gradients(data_of(path, 7), forward_only=True)[0])
    return results


@pytest.mark.slow
def test_models_that_wait_on_disk_are_the_same(client, path, tmp_path):
    expected = story(client, path)
    few = ("serve.loaded={adapters: 1, full_models: 1, snapshots: 1}",)
    few += ("train.micro_batch_size=2",)
    with served(path, tmp_path, free_port(), *few) as running, Client(running.url, path) as other:
        assert story(other, path) == expected


@contextmanager
def little_memory(running: Running, more: int, last: int = 0) -> Iterator[None]:
    """Limit the memory of the computing processes to `more` bytes above their present size.

    With `last`, only that many of the last processes are limited.
    """
    free, every = resource.RLIM_INFINITY, descendants(running.process.pid)
    ranks = [p for p in every if b"megatron_vlm.serve" in Path(f"/proc/{p}/cmdline").read_bytes()]
    pids = (ranks or every)[-last:]
    for pid in pids:
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size + more, free))
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (free, free))


MUCH = [([[7] * 4000], {"target_tokens": [7] * 4000})] * 128  # more than 500 MiB


@pytest.mark.parametrize(
    "layout", [full("parallel.pp=1"), slow("launch.processes=2"), slow("parallel.tp=2")]
)
def test_a_call_that_lacks_memory_fails_alone(layout, tiny, tmp_path):
    path, settings = tiny(vocab=VOCAB), (layout, "train.micro_batch_size=64")
    with served(path, tmp_path, free_port(), *settings) as running:
        with Client(running.url, path) as client:
            models = [client.model(rank, seed=3) for rank in (2, 2, 0)]
            good = data_of(path, 0)
            for model in models:
                model.gradients(good[:2])
            with little_memory(running, 500 * 2**20):
                for model in (models[0], models[2]):
                    with pytest.raises(FailedError, match="server: there is not enough memory"):
                        model.gradients(MUCH)
                assert models[1].gradients(good[2:])[0] == models[0].gradients(good[2:])[0]
            assert models[0].step(**STEPS[0]) == models[1].step(**STEPS[0])
            assert models[2].gradients(good[2:])[0]["loss:sum"]
            assert client.sampler(base_model=path).sample([[5]], max_tokens=1).sequences
        assert running.stop() == 75


@pytest.mark.slow
def test_memory_that_one_rank_lacks_ends_the_service(tiny, tmp_path):
    """The other rank is in the middle of its work. The next service does the promised call."""
    path, port = tiny(vocab=VOCAB), free_port()
    settings = "launch.processes=2", "train.micro_batch_size=64"
    first = start(path, tmp_path, port, *settings)
    try:
        with Client(first.url, path, patience_s=60) as client:
            model = client.model(2)
            with little_memory(first, 500 * 2**20, last=1):
                promise = model.ask_gradients(MUCH)
                assert first.process.wait(60) == 1
            with served(path, tmp_path, port, *settings):
                assert read_output(client.result(promise))[0]["loss:sum"]
    finally:
        first.kill()
