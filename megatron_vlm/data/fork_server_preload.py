"""Module that only the server of the worker processes imports. It takes the server, and so its
workers, out of the trainer's process group. torchrun and Slurm signal that whole group to make the
trainer save; without its workers the trainer could not finish its current step.

The server ends when the trainer does, since a pipe between them closes then. The workers end with
the server, even in the middle of a task.
"""

import os
import signal

from megatron_vlm.io.parent_death import signal_when_parent_dies

os.setpgid(0, 0)
_SERVER = os.getpid()


def _end_with_server() -> None:
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != _SERVER:  # the server ended before the call above
        os._exit(1)


os.register_at_fork(after_in_child=_end_with_server)
