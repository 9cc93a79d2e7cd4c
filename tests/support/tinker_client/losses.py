"""losses.py MODEL: a loss of the client's own, and sparse targets, with the public client. Run in
its environment by tests/serve/test_tinker_client.py; prints JSON."""

import json
import sys
import warnings

import numpy as np
import tinker
import torch
from tinker import types

warnings.simplefilter("ignore", FutureWarning)
VOCAB = 400
ADAM = types.AdamParams(learning_rate=1e-2)


def tensor(values: np.ndarray) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(values)


def datum(seed: int, length: int) -> types.Datum:
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCAB, length + 1)
    inputs = {
        "target_tokens": tensor(ids[1:]),
        "weights": tensor(random.normal(size=length).astype(np.float32)),
    }
    return types.Datum(types.ModelInput.from_ints(ids[:-1].tolist()), inputs)


def cross_entropy(data, log_probs):
    """What the service computes by itself."""
    weights = [torch.tensor(each.loss_fn_inputs["weights"].to_numpy()) for each in data]
    loss = sum(-(p * w).sum() for p, w in zip(log_probs, weights, strict=True))
    return loss, {"mine": float(loss.detach())}


def several() -> tuple[types.Datum, types.Datum]:
    """Two targets at some places: sparse, and the same dense."""
    targets = torch.zeros(6, 3, dtype=torch.long)
    weights = torch.zeros(6, 3)
    for row, column, target, weight in ((1, 0, 7, 0.5), (1, 2, 9, -1.5), (4, 1, 250, 2.0)):
        targets[row, column], weights[row, column] = target, weight
    prompt = types.ModelInput.from_ints([5, 6, 7, 8, 9, 10])
    sparse = {
        "target_tokens": tinker.TensorData.from_torch_sparse(targets),
        "weights": tinker.TensorData.from_torch_sparse(weights),
    }
    dense = {"target_tokens": tensor(targets.numpy()), "weights": tensor(weights.numpy())}
    return types.Datum(prompt, sparse), types.Datum(prompt, dense)


def chosen(sampler: tinker.SamplingClient) -> list[list[list[float]]]:
    """Log-probs of chosen tokens of a prompt, sparse, and the same dense."""
    ids = torch.full((5, 4), -1)
    ids[1, 2], ids[4, 0], ids[4, 3] = 7, 9, 250
    found = []
    for asked in (
        tinker.TensorData.from_torch_sparse(ids, pad_value=-1),
        tinker.TensorData.from_torch(ids),
    ):
        done = sampler.sample(
            types.ModelInput.from_ints([5, 6, 7, 8, 9, 10]),
            1,
            types.SamplingParams(max_tokens=1),
            target_prompt_logprobs=asked,
        ).result()
        found.append(done.target_prompt_logprobs.to_torch().tolist())
    return found


def main(model: str) -> None:
    service = tinker.ServiceClient()
    made = [service.create_lora_training_client(model, rank=4, seed=1).result() for _ in range(2)]
    data = [datum(number, 5 + number) for number in range(4)]
    found = {"built in": [], "own": [], "sparse": [], "dense": []}
    for _ in range(2):
        first = made[0].forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        second = made[1].forward_backward_custom(data, cross_entropy).result().metrics["mine"]
        norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in made]
        found["built in"].append([first, norms[0]])
        found["own"].append([second, norms[1]])
    for name, each in zip(("sparse", "dense"), several(), strict=True):
        done = made[0].forward_backward([each], "cross_entropy").result()
        still = made[0].optim_step(types.AdamParams(learning_rate=0.0)).result()
        shape = list(done.loss_fn_outputs[0]["logprobs"].to_numpy().shape)
        found[name] = [done.metrics["loss:sum"], still.metrics["grad_norm"], shape]
    found["chosen"] = chosen(service.create_sampling_client(base_model=model))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
