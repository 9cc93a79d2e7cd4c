"""Greedy or sampled answers of the model, and the ranking of candidates, with the weights in
training."""

from collections.abc import Collection, Sequence

from megatron_vlm.data.batches.collate import cut_micro_batches
from megatron_vlm.data.tokens.completions import Completion, SamplingSettings
from megatron_vlm.data.tokens.row import Row, continue_row
from megatron_vlm.errors import ConfigError, DataError
from megatron_vlm.training.continuous_batching import Decoder, Hear
from megatron_vlm.training.generation_batch import Texts
from megatron_vlm.training.pipeline import Stage
from megatron_vlm.training.row_scores import score_rows

ROWS = 16  # default number of rows in a pass


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
    """Generate `n` answers to each prompt.

    Sampled answers need a seed for each prompt. Answer k depends on seed + k alone, at every layout
    and with any other requests. Placeholders of images and videos are never sampled, because such
    an answer cannot be trained on. Stop strings are searched in the text that `texts` decodes.

    All ranks of a replica pass the same prompts and get the same answers. Replicas may pass
    different prompts, or none. The other arguments are Decoder's.
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
    requests = [
        decoder.prompt(number, row, settings, n, seed)
        for number, (row, seed) in enumerate(zip(prompts, seeds or [0] * len(prompts), strict=True))
    ]
    decoder.join(requests)
    decoder.advance()
    return [[draw.completion for draw in prompt.draws] for prompt in requests]


def generate(
    stage: Stage,
    prompts: Sequence[Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = ROWS,
) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, up to the first of `stop_ids` (left out)
    or to `max_new_tokens`, as Hugging Face's `generate(do_sample=False)` does. See `sample`."""
    settings = SamplingSettings(max_new_tokens, 0.0, stop_ids=tuple(stop_ids))
    answers = sample(stage, prompts, settings, batch_rows=batch_rows)
    return [settings.without_stop(completion.ids) for (completion,) in answers]


def candidate_log_probs(
    stage: Stage, prompt: Row, candidates: Sequence[Sequence[int]], batch_rows: int
) -> list[float]:
    """Return the summed log-prob of each candidate's tokens after the prompt. A collective."""
    for place, candidate in enumerate(candidates):
        if not len(candidate):
            raise DataError(
                "it has 0 tokens, so it would always rank first",
                place=f"candidate {place} of {len(candidates)}",
                remedy="give at least one, such as the end of the turn",
            )
    rows = [continue_row(prompt, candidate) for candidate in candidates]
    batches = cut_micro_batches(rows, batch_rows, stage.sizes.tokens)
    return [float(log_probs_S.double().sum()) for log_probs_S in score_rows(stage, batches, 1.0)]
