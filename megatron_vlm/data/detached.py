"""Imported by the server of the worker processes, and by nobody else: it leaves the group of
processes of its trainer, and its workers with it. A signal to the group, as torchrun and Slurm send
it, asks the trainer to save; without workers it could not get to the end of its step."""

import os

os.setpgid(0, 0)
