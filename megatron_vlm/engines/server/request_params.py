"""Parameters of vLLM's requests, and the answers that go back to the trainer."""

from array import array
from typing import Any

from frames import Message


def sampling_params(
    settings: Message, never: list[int], seed: int, special: list[str], streamed: bool
) -> Any:
    """Return vLLM's parameters. Only the settings end an answer. Log-probs are the model's own,
    which is vLLM's default, `raw_logprobs`. Stop strings are searched in the text without `special`
    tokens, as this package's own sampler does, unless a stop string contains such a token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    schema = settings["json_schema"]
    stops = settings["stop_strings"]
    shown = any(token in stop for stop in stops for token in special)
    return SamplingParams(
        max_tokens=settings["max_tokens"],
        temperature=settings["temperature"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        seed=seed,
        stop=stops or None,
        stop_token_ids=settings["stop_ids"],
        ignore_eos=True,
        logprobs=0,
        detokenize=bool(stops),
        skip_special_tokens=not shown,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        logit_bias=dict.fromkeys(never, float("-inf")),
        output_kind=RequestOutputKind.CUMULATIVE if streamed else RequestOutputKind.FINAL_ONLY,
    )


def is_mistake(error: Exception) -> bool:
    """Return whether vLLM takes an error for its client's."""
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError)


def answer_of(output: Any) -> Message:
    """Return the ids and log-probs of a sample, the reason why it ended, and the versions of the
    weights that sampled it with their numbers of tokens."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    log_probs = [
        candidates[token].logprob
        for token, candidates in zip(ids, completion.logprobs, strict=True)
    ]
    versions = [[int(each.version), each.end - each.start] for each in completion.weight_versions]
    return {
        "ids": ids,
        "log_probs": log_probs,
        "ended": completion.finish_reason,
        "versions": versions,
    }


def scoring_params(top_k: int) -> Any:
    """Return vLLM's parameters of a request that only scores its prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,  # vLLM draws one token at least
        prompt_logprobs=top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def table_of(ids: list[int], log_probs: list[Any], top_k: int) -> bytes:
    """Return the scores of a prompt. Nothing predicts its first token, whose scores are 0."""
    values = array("d")
    for token, candidates in zip(ids, log_probs, strict=True):
        if candidates is None:
            values.extend([0.0] * 2 * (1 + top_k))
            continue
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank)[:top_k]
        for other, scored in [(token, candidates[token]), *ranked]:
            values.extend((other, scored.logprob))
    return values.tobytes()
