"""Exit statuses of a job, and of each of its processes."""

FAILED = 1
MISTAKE = 2  # of its user, said in one sentence: starting again would not help
STUCK = 70  # a rank stood still
PREEMPTED = 75  # saved after a signal: start again to go on
INTERRUPTED = 130  # Ctrl-C twice: nothing was saved
