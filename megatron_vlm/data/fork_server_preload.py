"""Module that only the server of the worker processes imports. It takes the server, and so its
workers, out of the trainer's process group: torchrun and Slurm signal the whole group to make the
trainer save, which needs its workers for the current step. The workers end with the server, and the
server with the trainer, also in the middle of an import or a task."""

import os
import signal
from functools import partial

from megatron_vlm.io.parent import signal_when_parent_dies

# Linux means the thread that started the server, which may end earlier than the trainer, though not
# before the server has answered. So this is taken back before the first fork.
signal_when_parent_dies(signal.SIGKILL)
os.setpgid(0, 0)
_SERVER = os.getpid()


def _end_with_server() -> None:
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != _SERVER:  # the server ended before the call above
        os._exit(1)


os.register_at_fork(before=partial(signal_when_parent_dies, 0), after_in_child=_end_with_server)
