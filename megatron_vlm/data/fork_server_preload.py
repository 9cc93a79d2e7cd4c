"""Imported by the server of the worker processes alone: it takes the server, and so its workers,
out of the trainer's process group. torchrun and Slurm signal that whole group to ask the trainer to
save; without its workers it could not finish the step it is in.

The server ends when the trainer does, since a pipe between them closes then. The workers end with
the server, whatever they are doing.
"""

import os
import signal

from megatron_vlm.io.parent_death import signal_when_parent_dies

os.setpgid(0, 0)
_SERVER = os.getpid()


def _end_with_server() -> None:
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != _SERVER:  # it was gone before we asked
        os._exit(1)


os.register_at_fork(after_in_child=_end_with_server)
