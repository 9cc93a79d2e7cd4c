"""Count placeholders with vLLM's own function, in the environment that has vLLM: in a random size,
in the trainer's size of it, and there with our server's count. It prints the number of sizes, and
how many of each count are the trainer's."""

import random
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import Gemma4Config
from vllm.model_executor.models.gemma4_mm import Gemma4MultiModalProcessor, Gemma4ProcessingInfo

from megatron_vlm.family.gemma4.images import BUDGETS, Gemma4Images

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron_vlm" / "engines" / "server"))

SIZES = 4000


class Info(Gemma4ProcessingInfo):
    """What vLLM's function reads, without an engine."""

    def __init__(self) -> None:
        pass

    @cached_property
    def config(self) -> Gemma4Config:
        return Gemma4Config(vision_config={})

    def get_hf_config(self) -> Gemma4Config:
        return self.config


class Processor(Gemma4MultiModalProcessor):
    """The processor around it, which is told of each request."""

    def __init__(self, info: Info):
        self.info = info


def random_sizes() -> list[tuple[int, int, int]]:
    rng = random.Random(0)
    sizes = [(1, 300), (300, 1), (64, 64), (48, 48), (3, 900), (4000, 3000)]
    sides = [round(2 ** rng.uniform(3, 12)) for _ in range(2 * SIZES)]
    sizes += zip(sides[::2], sides[1::2], strict=True)
    return [(*size, rng.choice(BUDGETS)) for size in sizes]


if __name__ == "__main__":
    from vllm_fixes import count_given_sizes

    info, sizes = Info(), random_sizes()
    own, resized, tokens = [], [], []
    for height, width, budget in sizes:
        images = Gemma4Images(max_soft_tokens=budget)
        new_h, new_w = images.resized_size(height, width)
        tokens.append(images.num_tokens(images.grid(height, width)))
        own.append(info._compute_num_soft_tokens(width, height, budget))
        resized.append((new_h, new_w, budget))
    again = [info._compute_num_soft_tokens(w, h, budget) for h, w, budget in resized]
    given: list[int] = []

    def count(self: Processor, inputs: Any, *_: Any) -> Any:
        """Count as vLLM does while it applies its processor."""
        given.extend(self.info._compute_num_soft_tokens(w, h, b) for h, w, b in inputs.sizes)
        raise StopIteration

    Gemma4MultiModalProcessor._cached_apply_hf_processor = count
    count_given_sizes()
    for options in ({"do_resize": False}, {}):
        inputs: Any = SimpleNamespace(hf_processor_mm_kwargs=options, sizes=resized)
        with suppress(StopIteration):
            Processor(info).apply(inputs, None)
    ours, dummies = given[: len(sizes)], given[len(sizes) :]
    assert dummies == again, "other requests are counted as before"
    print(len(sizes), *(sum(map(int.__eq__, tokens, each)) for each in (own, again, ours)))
