"""Samples that people can look at: RUN/samples.jsonl, which the report shows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.data.media.media import data_uri
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.prompts import seen
from megatron_vlm.report.metrics_lines import SAMPLES
from megatron_vlm.rl.episode import Episode, Group
from megatron_vlm.rl.episode_runner import Table
from megatron_vlm.run.log_sinks import JsonLines

_MOST = 32  # episodes of a prompt


def write_samples(run: Path, step: int, groups: Sequence[Group], table: Table) -> None:
    """Append a line for each of the first prompts of a step: what was asked with its pictures, and
    every episode with its reward."""
    file = JsonLines(run / SAMPLES)
    try:
        for group in groups[: table.cfg.rl.shown]:
            file.add(json.dumps(_line(step, group, table), ensure_ascii=False))
    finally:
        file.close()


def _line(step: int, group: Group, table: Table) -> dict[str, Any]:
    first = group.episodes[0]
    return {
        "step": step,
        "where": first.where,
        "question": group.question,
        "images": _images(first.shown[0], table),
        "episodes": [_episode(each, table) for each in group.episodes[:_MOST]],
    }


def _episode(episode: Episode, table: Table) -> dict[str, Any]:
    heard = [{"text": table.words(row), "images": _images(row, table)} for row in episode.shown[1:]]
    return {
        "answers": episode.answers,
        "heard": heard,  # after each answer but the last
        "reward": episode.reward,
        "figures": episode.figures,
        "tokens": episode.trained,
        "cut": episode.cut,
    }


def _images(row: Row, table: Table) -> list[str]:
    """The pictures of a row as the model sees them."""
    pictures = seen(row, table.data.readers[0].encoder.images)
    return [data_uri(each) for each in pictures]
