"""Imported by the server of the worker processes alone: it takes the server, and so its workers,
out of the trainer's process group. torchrun and Slurm signal that whole group to ask the trainer to
save; without its workers it could not finish the step it is in."""

import os

os.setpgid(0, 0)
