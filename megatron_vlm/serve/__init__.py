"""Tinker service: the ranks of this package serve the requests of the public Tinker client."""
