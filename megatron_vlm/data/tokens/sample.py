"""Sample: a record in the form that the model takes, without the pixels. A cut never divides an
image.

Shapes: S tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vlm.family.video_plan import Grid


@dataclass(frozen=True)
class Sample:
    """A record's tokens, the flags of its trained tokens, and the grids of its images and videos.
    `weights_S` are the weights of the trained tokens' losses, or None if each is 1."""

    ids_S: np.ndarray  # int32
    trained_S: np.ndarray  # bool
    image_grids: tuple[Grid, ...] = ()
    video_grids: tuple[Grid, ...] = ()
    weights_S: np.ndarray | None = None  # float32
    is_rejected: bool = False  # the worse answer of a pair, or one that is labelled as bad
    is_truncated: bool = False  # data.truncation has cut its end off

    @property
    def num_supervised(self) -> int:
        """Number of trained tokens without the first, which no token predicts."""
        return int(self.trained_S[1:].sum())

    @property
    def num_patches(self) -> int:
        return sum(t * h * w for t, h, w in (*self.image_grids, *self.video_grids))

    @property
    def patch_pairs(self) -> int:
        """Number of pairs of patches that attend to each other: patches of the same frame."""
        return sum(t * (h * w) ** 2 for t, h, w in (*self.image_grids, *self.video_grids))


# The rows of a record: one, or the chosen and the rejected answer of a pair. They are trained in
# one micro-batch.
Example = tuple[Sample, ...]


class RecordDropped(Exception):  # noqa: N818 - not an error
    """A record that a rule of the configuration leaves out; the message is the rule."""


# What to do about the rules that leave out records.
_REMEDIES = {
    "nothing to learn": "give records that end with an answer, a message of the role assistant, or "
    "let megatron-vlm inspect show what data.train_on leaves; records that only ask are for "
    "megatron-vlm rl",
    "nothing left to learn after the cut": "raise data.max_tokens",
    "above data.max_tokens or data.max_images": "raise them",
}


def rules_and_remedy(dropped: Mapping[str, int]) -> tuple[str, str]:
    """Return how many records each rule left out, as text, and a remedy for the worst rule."""
    rules = ", ".join(f"{rule}: {count:,}" for rule, count in dropped.items())
    most = max(dropped, key=dropped.__getitem__, default="")
    return f" ({rules})" if rules else "", _REMEDIES.get(most, "")


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of an image or a whole video, with brackets and timestamps."""

    kind: str
    start: int
    end: int


def truncate(
    sample: Sample, spans: Sequence[Span], max_tokens: int, max_images: int | None
) -> Sample:
    """Return the longest prefix within both limits that does not end inside an image. Images past
    the cut are left out, and so are their patches."""
    end = min(max_tokens, len(sample.ids_S))
    images = [span for span in spans if span.kind == "image"]
    if max_images is not None and len(images) > max_images:
        end = min(end, images[max_images].start)
    end = min([end, *(span.start for span in spans if span.start < end < span.end)])
    kinds = [span.kind for span in spans if span.end <= end]
    return Sample(
        sample.ids_S[:end],
        sample.trained_S[:end],
        sample.image_grids[: kinds.count("image")],
        sample.video_grids[: kinds.count("video")],
        None if sample.weights_S is None else uneven_weights(sample.weights_S[:end]),
        sample.is_rejected,
        is_truncated=True,
    )


def uneven_weights(weights_S: np.ndarray) -> np.ndarray | None:
    """Return the weights, or None if each is 0 or 1, as the flags of trained tokens are."""
    return None if np.isin(weights_S, (0, 1)).all() else weights_S
