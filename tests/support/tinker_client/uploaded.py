"""Runs in the environment of the public client: it trains and samples an uploaded adapter.

uploaded.py TINKER_PATH: prints JSON of log-probs before and after a step.
"""

import json
import sys

import tinker
from tinker import types

TOKENS = [1, 2, 3, 4, 5]


def main():
    service = tinker.ServiceClient()
    prompt = types.ModelInput.from_ints(TOKENS)
    first = service.create_sampling_client(model_path=sys.argv[1]).result()
    training = service.create_training_client_from_state(sys.argv[1]).result()
    inputs = {
        "target_tokens": types.TensorData(data=[*TOKENS[1:], 0], dtype="int64", shape=[5]),
        "weights": types.TensorData(data=[1.0] * 4 + [0.0], dtype="float32", shape=[5]),
    }
    datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
    output = training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    second = training.save_weights_and_get_sampling_client().result()
    print(
        json.dumps(
            {
                "sampled": first.compute_logprobs(prompt).result(),
                "trained": list(output.loss_fn_outputs[0]["logprobs"].data),
                "after": second.compute_logprobs(prompt).result(),
                "rank": training.get_info().lora_rank,
            }
        )
    )
    service.close("success").result()


if __name__ == "__main__":
    main()
