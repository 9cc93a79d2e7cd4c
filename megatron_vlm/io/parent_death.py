"""End of a process with its parent, which it must not outlive."""

import ctypes
import sys


def signal_when_parent_dies(number: int) -> None:
    """Have Linux send this process a signal as soon as its parent is gone for any reason. Call this
    in the new process, whose parent may be gone already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))
