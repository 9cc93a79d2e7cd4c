"""Settings of a chat, checked before torch is imported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]

from megatron_vlm.config.schema import PlatformName
from megatron_vlm.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Settings of the answers."""

    max_new_tokens: int = 512
    temperature: float = 0.0  # 0: the most likely token each time
    seed: int = 0  # seed of sampled answers
    platform: PlatformName = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # as data.template_kwargs

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


def parse_template_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the variables of the chat template that are given as NAME=VALUE."""
    variables: dict[str, Any] = {}
    for pair in pairs:
        name, mark, text = pair.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if not name.isidentifier() or not mark:
            raise ConfigError(
                key="--template-kwargs",
                found=pair,
                allowed="NAME=VALUE, such as enable_thinking=false",
            )
        variables[name] = value
    return variables
