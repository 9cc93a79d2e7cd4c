"""`megatron-vlm import CONFIG`: the configuration of another trainer as one of this package."""
