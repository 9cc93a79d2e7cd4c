"""Version of the package, which has no import so that every module may read it."""

__version__ = "0.1.0"
