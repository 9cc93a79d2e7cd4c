"""Files that run in the engine's process. They import nothing of this package; see
engine_server.py."""
