"""A trial of the reward: it scores an answer to a few prompts, as it will in the run."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from rich.table import Table

from megatron_vlm.config.schema import Config
from megatron_vlm.data.batches.data_position import Position
from megatron_vlm.data.batches.dataset import DataSet
from megatron_vlm.io.printable import escape_controls
from megatron_vlm.report.terminal import plain_table
from megatron_vlm.rl.right_answer import right_answer
from megatron_vlm.user_code.environment import EnvStep
from megatron_vlm.user_code.pool import RewardPool, RewardSettings

_RECORDS = 3
_LONGEST = 40  # characters of an answer


@dataclass(frozen=True)
class TriedAnswer:
    """An answer, and what the reward or the environment said about it."""

    where: str
    answer: str
    response: EnvStep


def try_reward(cfg: Config, data: DataSet) -> Iterator[TriedAnswer]:
    """Yield the rewards of answers to the first prompts: the right answer of a record, if it has
    one, and an empty answer, which a model may give. An error of the reward is raised."""
    rl = cfg.rl
    settings = RewardSettings(rl.reward, rl.environment, 1, rl.timeout, rl.failed_reward)
    with closing(RewardPool(settings)) as pool:
        number = 0
        for handle, _, _ in islice(data.epoch(Position()), _RECORDS):
            where, record = data.where(handle), data.raw(handle)
            own = right_answer(record, where, data.readers[handle[0]])
            for answer in [own, ""] if own else [""]:
                pool.begin(number, record, where).result()
                yield TriedAnswer(where, answer, pool.step(number, answer).result())
                pool.end(number)
                number += 1


def reward_table(tried: list[TriedAnswer]) -> Table:
    """Return a table with a line for each answer."""
    table = plain_table()
    for column in ("record", "answer", "reward", "figures"):
        table.add_column(column, overflow="fold")
    for each in tried:
        figures = "  ".join(f"{name} {value:g}" for name, value in each.response.figures.items())
        text = each.answer[:_LONGEST] + "..." * (len(each.answer) > _LONGEST)
        cells = (each.where, repr(text), f"{each.response.reward:g}", figures)
        table.add_row(*map(escape_controls, cells))
    return table
