"""`megatron-vlm agree`: the comparison of an engine with the trainer on the same prompts."""
