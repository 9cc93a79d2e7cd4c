"""`megatron-vlm plan`: the fastest layout for a number of GPUs, before the GPUs are available."""
