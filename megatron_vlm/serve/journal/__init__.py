"""What a service promised and what it holds, in one SQLite file that survives it."""
