"""The tables of an agreement, for the terminal and the page."""

import math
from collections import Counter
from collections.abc import Sequence

from megatron_vlm.commands.agree.compare import Agreement, ComparedPrompt
from megatron_vlm.commands.agree.token_text import TokenText
from megatron_vlm.io.numbers_as_text import number

PROMPTS = ("prompt", "tokens", "shows", "ids", "grids", "patches", "answer", "worst", "mean")

_UNLIKE = 3  # prompts with different ids whose first difference is shown


def agree_figures(agreement: Agreement) -> list[tuple[str, str]]:
    """Return the main figures: (figure, its meaning)."""
    return [
        (small_number(agreement.worst), "worst difference of a log-prob"),
        (small_number(agreement.mean), "mean difference"),
        (f"{len(agreement.differences):,}", "tokens"),
        (f"{len(agreement.prompts):,}", "prompts"),
        (small_number(agreement.patches), "largest difference of patches"),
    ]


def verdict_sentence(agreement: Agreement) -> str:
    """Return the result of the comparison in one sentence."""
    if agreement.faults:
        return f"They differ: {'; '.join(agreement.faults)}."
    return (
        "They agree: ids and grids are equal, and log-probs differ by "
        f"{small_number(agreement.worst)} at most, within {agreement.bound:g}."
    )


def settings(agreement: Agreement) -> str:
    """Describe the engine, the trainer and the sampling that were compared."""
    heat = f"at temperature {agreement.temperature:g}"
    if agreement.temperature == 0:
        heat = "greedily"
    return (
        f"{agreement.engine} and the trainer at {agreement.layout}, both in {agreement.precision}; "
        f"answers drawn {heat} by the engine"
    )


def prompt_cells(prompt: ComparedPrompt) -> tuple[str, ...]:
    """Return the cells of a prompt in the order of PROMPTS."""
    differences = [token.difference for token in prompt.tokens]
    mean = sum(differences) / len(differences) if differences else math.nan
    has_media = prompt.prompt.image_grid_I3 is not None or prompt.prompt.video_grid_I3 is not None
    return (
        prompt.where.rpartition("/")[2],
        f"{len(prompt.prompt.ids_S):,}",
        _shows(prompt),
        "equal" if prompt.ids else "differ",
        "-" if not has_media else "equal" if prompt.grids else "differ",
        small_number(prompt.patches) if has_media else "-",
        f"{len(prompt.tokens):,}",
        small_number(prompt.worst),
        small_number(mean),
    )


def _shows(prompt: ComparedPrompt) -> str:
    """Return the sizes in patches as height x width, followed by the engine's if they differ."""
    row = prompt.prompt
    images = [] if row.image_grid_I3 is None else row.image_grid_I3.tolist()
    videos = [] if row.video_grid_I3 is None else row.video_grid_I3.tolist()
    sizes = _sizes(images, videos)
    if prompt.grids:
        return sizes
    view = prompt.seen
    return f"{sizes}; engine: {_sizes(*([m.grid for m in k] for k in (view.images, view.videos)))}"


def _sizes(images: Sequence[Sequence[int]], videos: Sequence[Sequence[int]]) -> str:
    sizes = Counter(f"{high}x{wide}" for _, high, wide in images)
    sizes.update(f"video {time}x{high}x{wide}" for time, high, wide in videos)
    words = [f"{size} (x{count})" if count > 1 else size for size, count in sizes.items()]
    return ", ".join(words) or "text"


def unlike_ids(agreement: Agreement, words: TokenText) -> list[str]:
    """Describe in sentences where the ids of the first few prompts differ."""
    sentences = []
    for prompt in [each for each in agreement.prompts if not each.ids][:_UNLIKE]:
        place, our_id, engine_id = prompt.first_unlike
        sentences.append(
            f"{prompt.where}: the trainer has {len(prompt.prompt.ids_S):,} ids and the engine "
            f"{len(prompt.seen.ids):,}; at {place} the trainer has {_token(our_id, words)}, the "
            f"engine {_token(engine_id, words)}"
        )
    return sentences


def _token(id: int | None, words: TokenText) -> str:
    return "nothing" if id is None else f"{id} ({words.tokenizer.decode([id])!r})"


def small_number(value: float) -> str:
    """Format a number with two digits."""
    if value == math.inf:
        return "other shape"
    return f"{value:.1e}" if 0 < abs(value) < 1e-2 else number(value)
