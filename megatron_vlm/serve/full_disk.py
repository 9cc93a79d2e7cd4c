"""Handling of a full disk: work waits until the journal can be written again."""

import time

from megatron_vlm.distributed.process import print_to_user

PAUSE_S = 0.5
REPEAT_WARNING_S = 60.0  # seconds between two warnings


class FullDisk:
    """Pause between attempts to write the journal, with a warning from time to time."""

    def __init__(self) -> None:
        self.warned_at = -REPEAT_WARNING_S

    def wait(self, error: Exception) -> None:
        """Wait a moment before the next attempt."""
        if time.monotonic() - self.warned_at >= REPEAT_WARNING_S:
            self.warned_at = time.monotonic()
            print_to_user(
                f"the journal cannot be written: {error}; free space there: work waits until then"
            )
        time.sleep(PAUSE_S)
