"""Scores of a prompt's tokens: vLLM's parameters, and the table that goes back to the trainer."""

from array import array
from typing import Any


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
