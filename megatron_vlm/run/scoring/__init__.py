"""Scores of whole data sets by a model: `megatron-vlm score`."""
