"""Rewards by a reward model, which the ranks run: rl.reward=model:FOLDER. It has its own tokenizer
and chat template. All answers to a prompt are scored together, so that no reward depends on how
long other prompts take."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from megatron_vlm.config.schema import Config
from megatron_vlm.data.records.record import ChatMessage, Conversation
from megatron_vlm.data.tokens.reader import Reader, make_encoder
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.errors import DataError
from megatron_vlm.family import read_sizes
from megatron_vlm.rl.episode import Episode
from megatron_vlm.user_code.environment import EnvStep

_NO_LIMIT = 2**31 - 1  # tokens: rl.max_new_tokens limits the answers


class ModelRewards:
    """The reward model of a run, on rank 0. `score` asks the ranks for the rewards of rows."""

    def __init__(
        self, cfg: Config, folder: str, score: Callable[[Sequence[Row]], "Future[list[float]]"]
    ):
        whole: dict[str, Any] = {"truncation": "error", "max_tokens": _NO_LIMIT, "max_images": None}
        written: dict[str, Any] = {"special_tokens": "escape", "train_on": "all_assistant"}
        data = replace(cfg.data, add_tokens=(), **whole, **written)
        self.encoder, self.sizes = make_encoder(folder, data), read_sizes(folder)
        self.score = score

    async def rate(self, episodes: Sequence[Episode], prompts: Reader) -> None:
        """Add the rewards of the answers to a prompt, which `prompts` reads."""
        rows = await asyncio.to_thread(lambda: [self._row(each, prompts) for each in episodes])
        rewards = await asyncio.wrap_future(self.score(rows))
        for episode, reward in zip(episodes, rewards, strict=True):
            if not math.isfinite(reward):
                raise DataError("is not finite", place=episode.where, key="reward", found=reward)
            episode.take(EnvStep(reward))

    def _row(self, episode: Episode, prompts: Reader) -> Row:
        """Return the prompt with its answer, as the reward model reads them."""
        chat = prompts.parse(episode.record, episode.where)
        if not isinstance(chat, Conversation):
            raise DataError(
                ": a reward model with its own tokenizer cannot read a prompt of tokens",
                place=episode.where,
                key="chunks",
                remedy="give the prompt as messages",
            )
        answer = "".join(map(str, episode.said[-1].parts))  # with what its prompt has opened
        chat = replace(chat, turns=(*chat.turns, ChatMessage("assistant", (answer,))))
        patches = self.sizes.vision.patch_inputs
        own: dict[str, Any] = {"encoder": self.encoder, "tokens": self.sizes.tokens}
        reader = replace(prompts, **own, patch_inputs=patches, kind="rated_pair")
        return reader.row_of_chat(chat, reader.encode_chat(chat), margin=0.0)
