"""Answers of the model, greedy or sampled, and the ranking of candidates, on the weights that are
trained."""

from collections.abc import Collection, Sequence

from megatron_vlm.data.batches.micro_batch import cut_micro_batches
from megatron_vlm.data.tokens.row import Row, continued
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.training.completions import Completion, SamplingSettings
from megatron_vlm.training.continuous_batching import Decoder, Hear
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.stop_strings import Texts

ROWS = 16  # of a pass, where nothing else is asked for


def sample(
    stage: Stage,
    prompts: Sequence[Row],
    settings: SamplingSettings,
    n: int = 1,
    seeds: Sequence[int] | None = None,
    batch_rows: int = ROWS,
    texts: Texts | None = None,
    on_token: Hear | None = None,
    routing: bool = False,
) -> list[list[Completion]]:
    """`n` answers to each prompt, as `settings` say.

    Drawn answers need a seed for each prompt: answer k is the one that seed + k alone gives, at
    every layout and whatever else is asked at the same time. Placeholders of images and videos are
    never drawn: nobody could be trained on such an answer. Stop strings are looked for in what
    `texts` say of an answer.

    All ranks of a replica pass the same prompts and get the same answers; replicas may pass
    different ones, or none. The rest is as for Decoder; what `on_token` raises ends the generation.
    """
    if settings.temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ConfigError(
            f"needs a seed for each of the {len(prompts)} prompts, but there are "
            f"{'no' if seeds is None else len(seeds)} seeds",
            place="sampling",
            key="temperature",
            found=settings.temperature,
            remedy="give seeds",
        )
    decoder = Decoder(stage, batch_rows, texts, on_token, routing)
    asked = [
        decoder.prompt(number, row, settings, n, seed)
        for number, (row, seed) in enumerate(zip(prompts, seeds or [0] * len(prompts), strict=True))
    ]
    decoder.join(asked)
    decoder.advance()
    return [[draw.completion for draw in prompt.draws] for prompt in asked]


def generate(
    stage: Stage,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = ROWS,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    on_token: Hear | None = None,
) -> list[list[int]]:
    """The most likely next tokens of each prompt, up to the first of `stop_ids` (left out) or to
    `max_new_tokens`: what Hugging Face's `generate(do_sample=False)` gives. With a `temperature`
    above 0 they are drawn. The rest is as for `sample`."""
    settings = SamplingSettings(max_new_tokens, temperature, stop_ids=tuple(stop_ids))
    found = sample(stage, prompts, settings, 1, seeds, batch_rows, on_token=on_token)
    return [settings.without_stop(each.ids) for (each,) in found]


def candidate_log_probs(
    stage: Stage, prompt: Row, candidates: Sequence[Sequence[int]], batch_rows: int
) -> list[float]:
    """The summed log-prob of each candidate's tokens after the prompt. Called as `generate` is."""
    for place, candidate in enumerate(candidates):
        if not len(candidate):
            raise DataError(
                "it has 0 tokens, so it would always rank first",
                place=f"candidate {place} of {len(candidates)}",
                remedy="give at least one, such as the end of the turn",
            )
    rows = [continued(prompt, candidate) for candidate in candidates]
    batches = cut_micro_batches(rows, batch_rows, stage.sizes.tokens)
    return [float(log_probs_S.double().sum()) for log_probs_S in stage.score(batches)]
