"""Settings of a chat, checked before torch is imported."""

import math
from dataclasses import dataclass
from typing import get_args

from megatron_vlm.config.schema import PlatformName
from megatron_vlm.errors import ConfigError

PLATFORMS = get_args(PlatformName)


@dataclass(frozen=True)
class Settings:
    """Settings of the answers."""

    max_new_tokens: int = 512
    temperature: float = 0.0  # 0: the most likely token each time
    seed: int = 0  # seed of sampled answers
    platform: PlatformName = "auto"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                key="--max-new-tokens", found=self.max_new_tokens, allowed="at least 1"
            )
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                key="--temperature", found=self.temperature, allowed="a finite number, 0 or more"
            )
        if self.seed < 0:
            raise ConfigError(key="--seed", found=self.seed, allowed="at least 0")
