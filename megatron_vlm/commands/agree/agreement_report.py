"""An agreement as a report: figures, two plots, a table of prompts, the tokens that differ most."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_vlm.commands.agree.compare import Agreement, ComparedPrompt, TokenPair, TokenText
from megatron_vlm.data.tokens.completions import accepted_drafts
from megatron_vlm.io.printable import number
from megatron_vlm.report import sections

PROMPTS = ("prompt", "tokens", "shows", "ids", "grids", "patches", "answer", "worst", "mean")

_UNLIKE = 3  # prompts with different ids whose first difference is shown
_WORST = 8  # tokens that are shown
_MAX_POINTS = 4000  # points of a plot; the largest differences are always among them


def agreement_report(agreement: Agreement, words: TokenText) -> sections.Report:
    """Return the whole report; its verdict is the end of the summary."""
    title = "They differ" if agreement.faults else "Engine and trainer agree"
    figures = [
        (small_number(agreement.worst), "worst difference of a log-prob"),
        (small_number(agreement.mean), "mean difference"),
        (f"{len(agreement.differences):,}", "tokens"),
        (f"{len(agreement.prompts):,}", "prompts"),
        (small_number(agreement.patches), "largest difference of patches"),
    ]
    rounds, shares = accepted_drafts(each.accepted for each in agreement.prompts)
    if rounds:
        by_place = " + ".join(f"{share:.2f}" for share in shares)
        figures.append((by_place, f"drafted tokens accepted a round, in {rounds:,} rounds"))
    summary = [sections.Tiles(figures), _verdict(agreement)]
    lead = [agreement.model, _settings(agreement)]
    return sections.Report(
        "Engine and trainer", title, lead, summary, [*_sections(agreement, words)]
    )


def _sections(agreement: Agreement, words: TokenText) -> Iterator[sections.Section]:
    for sentence in _unlike_ids(agreement, words):
        yield sections.Note(sentence, "alarm")
    if len(agreement.differences):
        yield sections.Heading("Log-probs of the tokens that were drawn")
        yield sections.SideBySide(_plots(agreement))
    yield sections.Heading("Prompts")
    caption = (
        "Shows: sizes of pictures in patches. Patches: the largest difference of normalised values "
        "as the vision tower gets them; two bytes that follow each other are "
        f"{2 * agreement.prompts[0].half_step:.2g} apart."
    )
    yield sections.Table(PROMPTS, [*map(prompt_cells, agreement.prompts)], caption)
    if worst := agreement.worst_tokens(_WORST):
        yield sections.Heading("The tokens that differ most")
        yield sections.SideBySide([_card(*each, words) for each in worst])


def _verdict(agreement: Agreement) -> sections.Note:
    if agreement.faults:
        return sections.Note(f"They differ: {'; '.join(agreement.faults)}.", "alarm")
    text = (
        "They agree: ids and grids are equal, and log-probs differ by "
        f"{small_number(agreement.worst)} at most, within {agreement.bound:g}."
    )
    return sections.Note(text, "good")


def _settings(agreement: Agreement) -> str:
    heat = f"at temperature {agreement.temperature:g}"
    if agreement.temperature == 0:
        heat = "greedily"
    return (
        f"{agreement.engine} and the trainer at {agreement.layout}, both in {agreement.precision}; "
        f"answers drawn {heat} by the engine."
    )


def _plots(agreement: Agreement) -> list[sections.Scatter]:
    tokens = [token for prompt in agreement.prompts for token in prompt.tokens]
    finite = [t for t in tokens if math.isfinite(t.trainer) and math.isfinite(t.engine)]
    finite.sort(key=lambda token: -token.difference)
    if len(finite) > _MAX_POINTS:
        half = _MAX_POINTS // 2
        rest = np.linspace(half, len(finite) - 1, half).astype(int)
        finite = [*finite[:half], *(finite[place] for place in rest)]
    labels = [
        f"trainer {t.trainer:.4f}, engine {t.engine:.4f}, difference {t.difference:.1e}"
        for t in finite
    ]
    count, bound = f"{len(finite):,} log-probs", agreement.bound
    return [
        sections.Scatter(
            "by the engine, against by the trainer",
            f"{count} by the engine against those by the trainer",
            "log-prob by the trainer",
            [(t.trainer, t.engine) for t in finite],
            labels,
        ),
        sections.Scatter(
            "difference, against the log-prob by the trainer",
            f"differences of {count}, and the bound {bound:g}",
            "log-prob by the trainer",
            [(t.trainer, t.difference) for t in finite],
            labels,
            bound,
        ),
    ]


def _card(prompt: ComparedPrompt, token: TokenPair, words: TokenText) -> sections.Card:
    before, text, after = words.split_around(prompt, token)
    details = (
        f"engine {token.engine:.6f} \u00b7 trainer {token.trainer:.6f} \u00b7 id {token.id} "
        f"{text!r}"
    )
    parts = [
        sections.Pictures(words.pictures(prompt.prompt)),
        sections.Said([before, sections.Marked([text or "\u2400"]), after]),
        sections.Note(details, "quiet"),
    ]
    where = f"{prompt.where}, token {token.place} of the answer"
    return sections.Card(small_number(token.difference), where, parts)


def prompt_cells(prompt: ComparedPrompt) -> tuple[str, ...]:
    """Return the cells of a prompt in the order of PROMPTS."""
    differences = [token.difference for token in prompt.tokens]
    mean = sum(differences) / len(differences) if differences else math.nan
    return (
        prompt.where.rpartition("/")[2],
        f"{len(prompt.prompt.ids_S):,}",
        _shows(prompt),
        "equal" if prompt.ids else "differ",
        "-" if not prompt.prompt.has_media else "equal" if prompt.grids else "differ",
        small_number(prompt.patches) if prompt.prompt.has_media else "-",
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


def _unlike_ids(agreement: Agreement, words: TokenText) -> list[str]:
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
