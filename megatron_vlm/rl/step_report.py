"""The figures of a step of learning from samples."""

from statistics import fmean, pstdev

from megatron_vlm.report.metrics_lines import RlLine
from megatron_vlm.rl.policy_update import Apart
from megatron_vlm.rl.rollouts import Rollout
from megatron_vlm.training.worker import StepMetrics


def rl_line(step: int, done: Rollout, metrics: StepMetrics, apart: Apart | None) -> RlLine:
    """What people see of a step. Engines call the weights before a step by its number."""
    episodes = [each for group in done.groups for each in group.episodes]
    rewards = [each.reward for each in episodes]
    lengths = [each.trained for each in episodes]
    versions = [each for episode in episodes for each in episode.versions]
    means = metrics.means
    return RlLine(
        step=step,
        reward=fmean(rewards),
        reward_std=pstdev(rewards),
        prompts=len(done.groups),
        asked=done.asked,
        alike=done.alike / done.asked,
        answer_tokens=fmean(lengths),
        longest_answer=max(lengths),
        cut=fmean(each.cut for each in episodes),
        turns=fmean(len(each.answers) for each in episodes),
        sampling_s=done.seconds,
        kl=means.get("kl"),
        entropy=means.get("entropy"),
        ratio=means.get("ratio"),
        clip_fraction=means.get("clip_fraction"),
        drift=means.get("old_kl"),
        apart=None if apart is None else apart.largest,
        apart_mean=None if apart is None else apart.mean,
        weights_cut=None if apart is None else apart.weights_cut,
        behind=None if apart is None else step - fmean(versions),
        figures=_means([each.figures for each in episodes]),
    )


def _means(found: list[dict[str, float]]) -> dict[str, float]:
    """Of each name, over the episodes that have it."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: fmean(each[name] for each in found if name in each) for name in names}
