"""Scores of records: what a model says about their supervised tokens, in files."""
