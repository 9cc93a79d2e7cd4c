"""Sampling requests: their answers, and the log-probs of prompts.

Shapes: S tokens of a prompt, J targets of a place, k most likely tokens.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from megatron_vlm.data.tensors.tensor_batch import batch_of
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import IGNORE, Row, check_ids, continue_row
from megatron_vlm.family.spec import Tokens
from megatron_vlm.serve.http import schemas
from megatron_vlm.serve.protocol.answers import write_samples
from megatron_vlm.serve.protocol.payloads import (
    NO_LOG_PROB,
    NO_TOKEN,
    Chunk,
    RequestError,
    Sampled,
    Samples,
    TopK,
)
from megatron_vlm.serve.protocol.request_tensors import NOTHING, PromptTargets, read_prompt_targets
from megatron_vlm.serve.protocol.requests import read_prompt
from megatron_vlm.serve.served_models import ModelCommands


@dataclass(frozen=True, eq=False)
class SampleAsk:
    """Parsed request of samples."""

    prompt: Row
    settings: SamplingSettings
    n: int
    seed: int
    prompt_log_probs: bool
    top_prompt: int
    top_sample: int
    targets: PromptTargets | None
    # True where no log-prob is returned: at the first token, and, if the client requests only the
    # last tokens, before these. Tokens of pictures have log-probs, because clients multiply them by
    # weights of 0.
    hidden_S: np.ndarray
    streamed: bool = False  # its client receives tokens while they are drawn
    answers: tuple[Completion, ...] = ()  # set once they are drawn

    @property
    def needs_ranks(self) -> bool:
        """True if only the ranks can compute a part of the response. An engine returns only the
        log-probs of the answers' tokens, at temperature 1."""
        scores_more = self.prompt_log_probs or self.top_prompt or self.top_sample
        return bool(scores_more) or self.targets is not None or self.lacks_temperature

    @property
    def lacks_temperature(self) -> bool:
        """True if the answers have log-probs at temperature 1 and are drawn at another one."""
        return not self.settings.tempered and self.settings.temperature not in (0, 1)


@dataclass(frozen=True)
class StopWords:
    """Stop tokens: the defaults for requests that set none, and the ids of special tokens."""

    ends: tuple[int, ...]  # ids of the default stop tokens
    special: Callable[[str], int | None]  # returns the id of a special token

    def ids_and_texts(
        self, stop: str | list[str] | list[int] | None
    ) -> tuple[list[int], list[str]]:
        """Return stop ids and stop texts. Decoding skips special tokens, so they stop by id."""
        if stop is None:
            return list(self.ends), []
        stops = [stop] if isinstance(stop, str) else stop
        ids = [each for each in stops if isinstance(each, int)]
        texts = [each for each in stops if isinstance(each, str)]
        special = {text: self.special(text) for text in texts}
        ids += [id for id in special.values() if id is not None]
        return ids, [text for text in texts if special[text] is None]


@dataclass(frozen=True)
class SampleBounds:
    """Bounds of sampling requests."""

    max_tokens: int  # default of max_tokens
    longest: int  # maximum tokens of a prompt and its answer together
    whose: str = "the model"  # subject of the error messages
    min_temperature: float = 0.0  # lowest temperature above 0; 0 is always allowed


class PromptReader(Protocol):
    """Reader of the chunks of a prompt, such as a RowReader."""

    tokens: Tokens

    def prompt(self, chunks: Sequence[Chunk], where: str) -> Row: ...


def read_ask(
    body: bytes, reader: PromptReader, stops: StopWords, drawn_seed: int, bounds: SampleBounds
) -> SampleAsk:
    """Read a sampling request. `drawn_seed` is the seed of a request that sets none."""
    form = schemas.SampleForm.model_validate_json(body)
    prompt = reader.prompt(read_prompt(form.prompt.chunks), "prompt")
    params, length = form.sampling_params, len(prompt.ids_S)
    room = bounds.longest - length
    if room < 1:
        raise RequestError(
            f"has {length} tokens, and {bounds.whose} takes {bounds.longest} with the answer",
            key="prompt",
        )
    if 0 < params.temperature < bounds.min_temperature:
        raise RequestError(
            f": {bounds.whose} draws with at least {bounds.min_temperature}",
            key="sampling_params.temperature",
            found=params.temperature,
            allowed="0, which takes the most likely token, or more",
        )
    ids, texts = stops.ids_and_texts(params.stop)
    settings = SamplingSettings(
        min(params.max_tokens or bounds.max_tokens, room),
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        tuple(sorted(ids)),
        tuple(sorted(texts)),
        tempered=True,
        grammar=form.grammar,
        **form.penalties.settings,
    )
    biased = np.array([*form.penalties.logit_bias])
    check_ids(biased, reader.tokens, "the request", "logit_bias")
    # The service may have accepted the request before a restart with another vocabulary.
    schemas.check_top_k(form, reader.tokens.vocab)
    if form.prompt_logprobs_last_n is not None and not form.prompt_logprobs:
        raise RequestError(
            "needs prompt_logprobs", key="prompt_logprobs_last_n", found=form.prompt_logprobs_last_n
        )
    targets = form.target_prompt_logprobs
    return SampleAsk(
        prompt,
        settings,
        form.num_samples,
        _spread_seed(drawn_seed if params.seed is None else params.seed),
        bool(form.prompt_logprobs),
        form.topk_prompt_logprobs,
        form.topk_sample_logprobs,
        None if targets is None else _targets(targets, length, reader.tokens),
        np.arange(length) < max(1, length - (form.prompt_logprobs_last_n or length)),
        form.stream_tokens,
    )


def complete(commands: ModelCommands, weights: str, asks: Sequence[SampleAsk]) -> list[bytes]:
    """Return the responses to requests whose answers are drawn. `weights` is the ranks' name for
    the model or weights that have drawn them."""
    asks = _at_temperature(commands, weights, asks)
    scored = _score_prompts(commands, weights, asks)
    return [
        write_samples(_samples(commands, weights, ask, log_probs))
        for ask, log_probs in zip(asks, scored, strict=True)
    ]


def answers_to_bytes(ask: SampleAsk) -> bytes:
    """Return the response to a request that needs nothing but an engine's answers."""
    assert ask.answers and not ask.needs_ranks
    return write_samples(Samples(as_sampled(ask.answers, [None] * len(ask.answers))))


def _at_temperature(
    commands: ModelCommands, weights: str, asks: Sequence[SampleAsk]
) -> list[SampleAsk]:
    """Return the requests with log-probs of their answers at the temperature that they were drawn
    at. An engine returns those at temperature 1, which cannot be converted token by token."""
    tempered = list(asks)
    for temperature in sorted({ask.settings.temperature for ask in asks if ask.lacks_temperature}):
        places = [p for p, ask in enumerate(asks) if ask.settings.temperature == temperature]
        pairs = [(asks[place].prompt, each) for place in places for each in asks[place].answers]
        rows = [replace(continue_row(prompt, each.ids), values_S={}) for prompt, each in pairs]
        forward = commands.models.forward
        scored = iter(commands.call(forward, weights, batch_of(rows), temperature))
        for place in places:
            answers = tuple(
                replace(each, log_probs=tuple(next(scored)[-len(each.ids) :].tolist()))
                for each in asks[place].answers
            )
            tempered[place] = replace(asks[place], answers=answers)
    return tempered


def _score_prompts(
    commands: ModelCommands, weights: str, asks: Sequence[SampleAsk]
) -> list[dict[str, np.ndarray]]:
    """Compute the log-probs of the prompts, for all requests that need them, in one pass."""
    rows: list[Row] = []
    names: list[tuple[int, str]] = []
    for place, ask in enumerate(asks):
        if ask.prompt_log_probs and len(ask.prompt.ids_S) > 1:
            next_S = torch.cat([ask.prompt.ids_S[1:], torch.tensor([IGNORE])])
            rows.append(replace(ask.prompt, targets=next_S[:, None]))
            names.append((place, "prompt"))
        if ask.targets is not None:
            # The last token has no targets.
            ids_SJ = np.pad(ask.targets.ids_RJ, ((0, 1), (0, 0)), constant_values=NOTHING)
            targets_SJ = torch.from_numpy(np.where(ids_SJ == NOTHING, IGNORE, ids_SJ))
            rows.append(replace(ask.prompt, targets=targets_SJ))
            names.append((place, "targets"))
    scored: list[dict[str, np.ndarray]] = [{} for _ in asks]
    if rows:
        scores = commands.call(commands.models.forward, weights, batch_of(rows))
        for (place, name), log_probs in zip(names, scores, strict=True):
            scored[place][name] = log_probs.numpy()
    return scored


def _samples(
    commands: ModelCommands, weights: str, ask: SampleAsk, scored: dict[str, np.ndarray]
) -> Samples:
    prompt_log_probs = top_prompt = targets = None
    hidden_S = ask.hidden_S
    if ask.prompt_log_probs:
        prompt_log_probs = np.full(len(hidden_S), np.nan, dtype=np.float32)
        if "prompt" in scored:
            prompt_log_probs[1:] = scored["prompt"][:-1, 0]
        prompt_log_probs[hidden_S] = np.nan
    if ask.top_prompt:
        row = replace(ask.prompt, targets=torch.zeros_like(ask.prompt.ids_S)[:, None])
        likeliest = commands.models.likeliest
        [top] = commands.call(likeliest, weights, batch_of([row]), ask.top_prompt, 1.0)
        top_Sk2 = top.numpy()
        top_prompt = _top(np.concatenate([top_Sk2[:1], top_Sk2[:-1]]))
        top_prompt.ids[hidden_S], top_prompt.log_probs[hidden_S] = NO_TOKEN, NO_LOG_PROB
    if ask.targets is not None:
        targets = ask.targets.answer(scored["targets"][:-1].astype(np.float32))
    tops = _tops(commands, weights, ask)
    return Samples(as_sampled(ask.answers, tops), prompt_log_probs, top_prompt, targets)


def as_sampled(answers: Sequence[Completion], tops: Sequence[TopK | None]) -> tuple[Sampled, ...]:
    return tuple(
        Sampled(
            np.array(answer.ids, dtype=np.int32),
            np.array(answer.log_probs, dtype=np.float32),
            answer.ended == "stop",
            top,
        )
        for answer, top in zip(answers, tops, strict=True)
    )


def _tops(commands: ModelCommands, weights: str, ask: SampleAsk) -> list[TopK | None]:
    """Return the most likely tokens at each place of the answers."""
    if not ask.top_sample:
        return [None] * len(ask.answers)
    length, rows = len(ask.prompt.ids_S), []
    for answer in ask.answers:
        row = continue_row(ask.prompt, answer.ids)
        targets_S = torch.full_like(row.ids_S, IGNORE)
        targets_S[length - 1 : -1] = 0
        labels_S = torch.full_like(row.ids_S, IGNORE)
        rows.append(replace(row, labels_S=labels_S, values_S={}, targets=targets_S[:, None]))
    temperature = ask.settings.temperature or 1.0
    likeliest = commands.models.likeliest
    tops = commands.call(likeliest, weights, batch_of(rows), ask.top_sample, temperature)
    return [_top(each[length - 1 : -1].numpy()) for each in tops]


def _top(found_Sk2: np.ndarray) -> TopK:
    return TopK(found_Sk2[..., 0].astype(np.int32), found_Sk2[..., 1].astype(np.float32))


def _targets(fields: Mapping[str, object], length: int, tokens: Tokens) -> PromptTargets:
    targets = read_prompt_targets(fields, length)
    target_ids = targets.ids_RJ[targets.ids_RJ != NOTHING]
    check_ids(target_ids, tokens, "target_prompt_logprobs")  # other requests share its pass
    return targets


def _spread_seed(seed: int) -> int:
    """Return a number far from neighbouring seeds' numbers, since answer k of a request is
    drawn with this number + k."""
    digest = hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
