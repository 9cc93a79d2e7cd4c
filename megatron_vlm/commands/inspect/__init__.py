"""`megatron-vlm inspect`: the model's view of a data set, in the terminal and as a page."""
