"""Journal of a service: one SQLite file with its calls and its objects, which outlives the
process."""
