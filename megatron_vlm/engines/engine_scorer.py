"""Scores of rows by engines, for one process."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from megatron_vlm.data.tokens.row import Row
from megatron_vlm.distributed.rank0 import result_of
from megatron_vlm.engines.engine_thread import EngineThread
from megatron_vlm.engines.processed_prompt import describe_difference
from megatron_vlm.errors import MegatronVLMError

_TIMEOUT_S = 600.0  # maximum seconds in which an engine scores a row


@dataclass
class EngineScorer:
    """Engines that score rows under their first weights, after a check that they see a picture as
    the trainer does. `waiting` is called while this process waits for them."""

    engines: EngineThread
    trainer: Path  # checkpoint whose processor the trainer has
    error_of: Callable[[str], MegatronVLMError]  # makes the error about engines that see another
    waiting: Callable[[], None]
    is_checked: bool = field(default=False, init=False)

    def start(self, row: Row, top_k: int) -> "Future[Tensor]":
        """Begin to score a row: see Engine.score. Refuse engines whose own processor makes other
        patches of the first row with pictures. Engines that show no patches are not checked."""
        engine = self.engines.engine
        if row.has_media and not self.is_checked:
            self.is_checked = True
            view = result_of(self.engines.submit(engine.inspect(row)), self.waiting)
            if view and (what := describe_difference(row, view, self.trainer)):
                raise self.error_of(f": {view.version} makes {what} of a picture")
        return self.engines.submit(engine.score(row, top_k, _TIMEOUT_S))

    def result(self, scores: "Future[Tensor]") -> Tensor:
        """Return the scores of a row that `start` has begun with."""
        return result_of(scores, self.waiting)
