"""A disk that takes no more of the journal: work waits until it does."""

import time

from megatron_vlm.distributed.process import say

PAUSE_S = 0.5
EVERY_S = 60.0  # that it is said again


class FullDisk:
    """Says what is the matter, and how often not."""

    def __init__(self) -> None:
        self.said = -EVERY_S

    def wait(self, error: Exception) -> None:
        """A moment, before it is tried again."""
        if time.monotonic() - self.said >= EVERY_S:
            self.said = time.monotonic()
            say(f"the journal cannot be written: {error}; free space there: work waits until then")
        time.sleep(PAUSE_S)
