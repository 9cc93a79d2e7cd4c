"""How far a run has got: what a checkpoint stores besides tensors."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_vlm.config.schema import CheckpointConfig
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.training.data_fingerprint import Fingerprint


@dataclass(frozen=True)
class Progress:
    """Steps done, and where the data continues."""

    step: int = 0
    position: Position = field(default_factory=Position)
    data: Fingerprint = field(default_factory=Fingerprint)
    best_of: str | None = None  # the score that `best` is of: checkpoint.best
    best: float | None = None
    best_step: int | None = None
    tokens: int | None = 0  # trained ones; None where the run began in a version without this
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # of the last evaluation
    scored_step: int | None = None

    def better(
        self, checkpoint: CheckpointConfig, name: str, scores: Mapping[str, float]
    ) -> "Progress":
        """With these scores of a set, if they are the best so far by checkpoint.best."""
        wanted, _, score = (checkpoint.best or "").rpartition("/")
        if wanted != name or not math.isfinite(scores[score]):
            return self
        least = score == "loss"
        known = self.best if self.best_of == checkpoint.best else None
        if known is not None and (scores[score] >= known if least else scores[score] <= known):
            return self
        return replace(self, best_of=checkpoint.best, best=scores[score], best_step=self.step)

    def scored(self, name: str, scores: Mapping[str, float]) -> "Progress":
        """With these scores of a set; those of an earlier step go."""
        kept = self.scores if self.scored_step == self.step else {}
        mine = {key: value for key, value in scores.items() if key != "seconds"}
        return replace(self, scores={**kept, name: mine}, scored_step=self.step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Progress":
        known = {"tokens": None, **saved, "position": Position(**saved["position"])}
        return Progress(**{**known, "data": Fingerprint.from_json(saved["data"])})
