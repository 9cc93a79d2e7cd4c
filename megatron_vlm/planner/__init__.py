"""Cost of a layout in numbers: parameters, bytes and seconds of each pipeline stage, from the sizes
of a model and of its micro-batches. Nothing here computes with tensors."""
