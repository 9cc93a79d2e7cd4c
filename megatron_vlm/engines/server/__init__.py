"""What runs in the engine's process: files that import nothing of this package, see
engine_server.py."""
