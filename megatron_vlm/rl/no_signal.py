"""A hint where a run cannot learn, because the answers to each prompt all get the same reward."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_vlm.config.schema import RlConfig
from megatron_vlm.io.numbers_as_text import number
from megatron_vlm.rl.episode import Episode, Group

PATIENCE_STEPS = 3  # steps without a signal in a row
_LONGEST = 200  # characters of the answer that is shown


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
        if all(_are_alike(group.episodes) for group in groups):
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


def _are_alike(episodes: Sequence[Episode]) -> bool:
    return len({tuple(each.answers) for each in episodes}) == 1


def _short(text: str) -> str:
    shown = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return repr(shown)
