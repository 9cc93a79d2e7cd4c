"""`megatron-vlm inspect`: what the model will see of a data set, in the terminal and as a page."""
