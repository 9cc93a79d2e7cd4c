"""`megatron-vlm plan`: which layout of a number of GPUs is the fastest, before there are any."""
