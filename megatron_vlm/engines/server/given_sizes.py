"""Numbers of placeholders of pictures that keep their sizes (vLLM 0.32).

vLLM's processor of Gemma 4 counts the tokens of a picture that it would resize, also where it was
told not to. A second resize would change every third size (with 280 tokens for a picture), and such
a prompt would have another number of placeholders than features.
"""

import sys
from functools import cache
from typing import Any

_MODULE = "vllm.model_executor.models.gemma4_mm"  # it is imported for a model of Gemma 4 alone


@cache
def count_given_sizes() -> None:
    """Let vLLM count the tokens of the pictures as they are in requests with do_resize=False. It
    measures its memory with others. The engine must have loaded its model."""
    if (module := sys.modules.get(_MODULE)) is None:
        return
    processor, info = module.Gemma4MultiModalProcessor, module.Gemma4ProcessingInfo
    apply, count = processor.apply, info._compute_num_soft_tokens

    def apply_and_tell(self: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        self.info.resizes = inputs.hf_processor_mm_kwargs.get("do_resize", True)
        return apply(self, inputs, *more, **named)

    def count_as_told(
        self: Any, image_width: int, image_height: int, *more: Any, **named: Any
    ) -> Any:
        if getattr(self, "resizes", True):
            return count(self, image_width, image_height, *more, **named)
        vision = self.get_hf_config().vision_config
        side = vision.patch_size * vision.pooling_kernel_size
        return (image_height // side) * (image_width // side)

    processor.apply, info._compute_num_soft_tokens = apply_and_tell, count_as_told
