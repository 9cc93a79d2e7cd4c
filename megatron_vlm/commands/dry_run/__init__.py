"""`--dry-run` of train, rl, eval and serve: everything that a run would refuse or report at its
start, without weights and without a GPU."""
