"""The Tinker service: what the public Tinker client asks for, done by the ranks of this package."""
