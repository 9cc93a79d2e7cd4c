"""Metrics and samples of a step of reinforcement learning, and a hint where it cannot learn."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from megatron_vlm.config.schema import RlConfig
from megatron_vlm.data.tokens.completions import accepted_drafts
from megatron_vlm.data.tokens.row import Row
from megatron_vlm.engines.prompts import seen_by_trainer
from megatron_vlm.io.printable import number
from megatron_vlm.report.metrics_lines import SAMPLES, RlLine
from megatron_vlm.report.picture_uri import data_uri
from megatron_vlm.rl.episode import Episode, Group
from megatron_vlm.rl.episode_runner import EpisodeRunner
from megatron_vlm.rl.policy_update import LogProbGap
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.rl.rollouts import Rollout
from megatron_vlm.rl.seen import BLIND, SeenScores
from megatron_vlm.run.log import JsonLines
from megatron_vlm.run.trackers import TrackedSample
from megatron_vlm.training.worker import StepMetrics

PATIENCE_STEPS = 3  # steps without a signal in a row
_LONGEST = 200  # characters of the answer that is shown


def rl_line(
    step: int,
    done: Rollout,
    metrics: StepMetrics,
    apart: LogProbGap | None,
    rewarded: bool = True,
    seen: SeenScores | None = None,
) -> RlLine:
    """Return the metrics line of a step. The version of an engine's weights is the number of
    steps that were done before. Without rewards there are no figures of them."""
    episodes = [each for group in done.groups for each in group.episodes]
    rewards = [each.reward for each in episodes]
    lengths = [each.trained for each in episodes]
    spans = [(step - 1 - version, tokens) for each in episodes for version, tokens in each.versions]
    tokens = sum(count for _, count in spans)
    means = metrics.means
    read = sum(len(part.ids) for each in episodes for part in each.segments)
    # A program that fails early has asked for nothing.
    distinct = sum(len(part.ids) for each in episodes for part in each.segments[-1:])
    rounds, shares = accepted_drafts(part for each in episodes for part in each.accepted)
    taught = [each for each in episodes if each.teacher_kl is not None]
    share = sum(each.trained for each in taught) / sum(lengths)
    return RlLine(
        step=step,
        reward=fmean(rewards) if rewarded else None,
        reward_std=pstdev(rewards) if rewarded else None,
        prompts=len(done.groups),
        asked=done.num_prompts,
        alike=done.alike / done.num_prompts if rewarded else None,
        answer_tokens=fmean(lengths),
        longest_answer=max(lengths),
        cut=fmean(each.cut for each in episodes),
        turns=fmean(len(each.answers) for each in episodes),
        sampling_s=done.seconds,
        kl=means.get("kl"),
        teacher_kl=_teacher_kl(taught, means.get("teacher_kl"), share),
        taught=share if taught else None,
        entropy=means.get("entropy"),
        ratio=means.get("ratio"),
        clip_fraction=means.get("clip_fraction"),
        drift=means.get("old_kl"),
        apart=None if apart is None else apart.largest,
        apart_mean=None if apart is None else apart.mean,
        weights_cut=None if apart is None else apart.weights_cut,
        masked=None if apart is None else apart.masked,
        rerouted=means.get("rerouted"),
        rounds=rounds / len(episodes) if rounds else None,
        accepted=sum(shares) if rounds else None,
        accepted_at=shares if rounds else None,
        behind=None if apart is None else sum(age * count for age, count in spans) / tokens,
        behind_max=None if apart is None else max(age for age, _ in spans),
        rows=fmean(len(each.segments) for each in episodes),
        reread=read / distinct,
        seen=None if seen is None else seen.seen,
        blind=None if seen is None else seen.blind,
        figures=_means([each.figures for each in episodes]),
    )


def _teacher_kl(taught: Sequence[Episode], exact: float | None, share: float) -> float | None:
    """Return the mean over the tokens of the episodes that have a teacher. `exact` is that over all
    tokens, if it was computed, where those without a teacher have 0."""
    if not taught:
        return None
    if exact is not None:
        return exact / share
    total = sum(each.trained for each in taught)
    return sum((each.teacher_kl or 0.0) * each.trained for each in taught) / total


def _means(figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it."""
    names = dict.fromkeys(name for each in figures for name in each)
    return {name: fmean(each[name] for each in figures if name in each) for name in names}


# The next part writes readable samples to RUN/samples.jsonl, which the report shows.

_MAX_EPISODES = 32  # maximum episodes of a prompt


def write_sample_lines(
    run: Path, step: int, groups: Sequence[Group], episode_runner: EpisodeRunner
) -> list[TrackedSample]:
    """Append a line for each of the first prompts of a step: the prompt with its pictures, and its
    episodes with their rewards. Return its episodes as samples."""
    lines = [_line(step, group, episode_runner) for group in groups[: episode_runner.cfg.rl.shown]]
    file = JsonLines(run / SAMPLES)
    try:
        for line in lines:
            file.add(json.dumps(line, ensure_ascii=False))
    finally:
        file.close()
    return [sample for line in lines for sample in TrackedSample.from_line(line)]


def _line(step: int, group: Group, episode_runner: EpisodeRunner) -> dict[str, Any]:
    first = group.episodes[0]
    return {
        "step": step,
        "where": first.where,
        "question": group.question,
        "right": right_answer(first.record, first.where, episode_runner.data.readers[0]),
        "images": _images(first.shown[0], episode_runner),
        "episodes": [_episode(each, episode_runner) for each in group.episodes[:_MAX_EPISODES]],
    }


def _episode(episode: Episode, episode_runner: EpisodeRunner) -> dict[str, Any]:
    heard = [
        {"text": episode_runner.words(row), "images": _images(row, episode_runner)}
        for row in episode.shown[1:]
    ]
    teacher = {} if episode.teacher_kl is None else {"teacher_kl": episode.teacher_kl}
    return {
        "answers": episode.answers,
        "heard": heard,  # messages before each answer; for the first, if it is not the prompt
        "rows": episode.rows,
        "reward": episode.reward,
        "figures": episode.figures,
        "tokens": episode.trained,
        "cut": episode.cut,
        **teacher,
    }


def _images(row: Row, episode_runner: EpisodeRunner) -> list[str]:
    """Return the pictures of a row as the model sees them."""
    pictures = seen_by_trainer(row, episode_runner.data.readers[0].encoder.images)
    return [data_uri(each) for each in pictures]


@dataclass
class SignalWatch:
    """Watch over the signal of the steps. It gives one hint in each row of steps without one."""

    rl: RlConfig
    silent: int = field(default=0)  # steps without a signal so far, in a row

    def check(self, groups: Sequence[Group], right: str | None) -> str | None:
        """Return a hint if this is the last step that is waited for, and None otherwise. `right` is
        the right answer to the first prompt."""
        self.silent = 0 if any(group.has_signal for group in groups) else self.silent + 1
        if self.silent != PATIENCE_STEPS:
            return None
        first = groups[0].episodes[0]
        known = "" if right is None else f", where {_short(right)} is right"
        return (
            f"in {PATIENCE_STEPS} steps in a row all answers to each prompt got the same reward, "
            f"so every advantage is 0 and nothing is learnt from them: {self._cause(groups)}. An "
            f"answer with the reward {number(first.reward)}{known} ({first.where}): "
            f"{_short(first.answers[-1] if first.answers else '')}"
        )

    def _cause(self, groups: Sequence[Group]) -> str:
        episodes = [each for group in groups for each in group.episodes]
        if all(len({tuple(each.answers) for each in group.episodes}) == 1 for group in groups):
            return "the answers to a prompt are the same text; raise rl.temperature"
        if all(each.cut for each in episodes):
            return (
                f"all are cut at a limit of length, such as rl.max_new_tokens="
                f"{self.rl.max_new_tokens}, before they can be right; raise it"
            )
        if len({each.reward for each in episodes}) == 1:
            return (
                "no answer in this step got another reward than any other; look whether the reward "
                "reads answers in the form in which the model writes them, and whether the prompt "
                "asks for that form"
            )
        return (
            "each prompt is too easy or too hard; give other prompts, more rl.samples, or "
            "rl.dynamic_sampling=true, which replaces such prompts"
        )


@dataclass
class SightWatch:
    """Watch over the steps in which `seen` is measured. It gives one hint in each row of those in
    which the pictures change nothing."""

    blind: int = 0  # such steps so far, in a row

    def check(self, scores: SeenScores) -> str | None:
        """Return a hint if this is the last step that is waited for, and None otherwise."""
        if (seen := scores.seen) is None:  # no row of the step has a picture
            return None
        self.blind = self.blind + 1 if seen < BLIND else 0
        if self.blind != PATIENCE_STEPS:
            return None
        return (
            f"the pictures change nothing: in {PATIENCE_STEPS} measured steps in a row the answers "
            f"were as likely with hidden pictures as with the real ones (seen {number(seen)}). The "
            "model does not get its pictures, the vision tower gives zeros, or the answers need "
            "no picture: see rl.seen in docs/rl.md"
        )


def _short(text: str) -> str:
    shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return repr(shown)
