"""Forms that OpenAI's responses have in common: errors, usage, and tokens with their log-probs."""

from megatron_vlm.serve.http.chat_prompt import ChatTexts
from megatron_vlm.serve.http.chat_routing import Json, safe_text
from megatron_vlm.serve.http.responses import HttpError
from megatron_vlm.serve.protocol.payloads import NO_LOG_PROB, TopK

DONE = "data: [DONE]\n\n"  # the last event of a stream
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: HttpError) -> Json:
    """Return the body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"type": _TYPES.get(error.status, kind), "param": error.param, "code": error.code}
    return {"error": {"message": safe_text(error), **fields}}


def usage(prompt: int, drawn: int) -> Json:
    """Return the tokens of a request, with those of pictures and those that end answers."""
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def token_text(texts: ChatTexts, token: int) -> str:
    """Return the text of a token, which may be a part of a character."""
    return texts.bytes_of(token).decode(errors="replace")


def token_entry(texts: ChatTexts, token: int, log_prob: float) -> Json:
    """Return a token with its log-prob."""
    raw = list(texts.bytes_of(token))
    return {"token": token_text(texts, token), "logprob": log_prob, "bytes": raw}


def top_entries(texts: ChatTexts, top: TopK | None, place: int) -> list[Json]:
    """Return the most likely tokens at a place."""
    if top is None:
        return []
    pairs = zip(top.ids[place].tolist(), top.log_probs[place].tolist(), strict=True)
    return [token_entry(texts, token, value) for token, value in pairs if value != NO_LOG_PROB]
