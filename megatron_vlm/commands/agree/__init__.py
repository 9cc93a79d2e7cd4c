"""`megatron-vlm agree`: whether an engine and the trainer see the same."""
