# .venv/bin/python -m pytest tests/serve/test_fair_queue.py
"""Turns by a clock of our own: the same seconds for each key, and of a key for each model; nobody
saves up turns, and nobody waits longer than a call of each other key."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from megatron_vlm.serve.call_scheduler import FORGOTTEN_S, MANY, FairQueue
from megatron_vlm.serve.journal.journal_records import Call

_numbers = count(1)


def call(key: str, owner: str = "model") -> Call:
    number = next(_numbers)
    return Call(
        *("optim_step", owner, 1, key), changes_state=True, request_id=f"{number}", number=number
    )


def owner_of(asked: Call) -> str:
    return asked.owner


@dataclass
class Ranks:
    """What does the calls: only its clock goes on."""

    cost: Callable[[Call], float]
    now: float = 100.0
    keys: Counter[str] = field(default_factory=Counter)  # the seconds of each
    models: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.turns = FairQueue(lambda: self.now)

    def turn(self, calls: Sequence[Call]) -> Call:
        chosen = self.turns.next(calls, owner_of)
        seconds = self.cost(chosen)
        self.now += seconds
        self.turns.record_work(chosen, chosen.owner, seconds)
        self.keys[chosen.key] += seconds
        self.models[f"{chosen.key}/{chosen.owner}"] += seconds
        return chosen

    def work(self, calls: Sequence[Call], seconds: float) -> None:
        """While these always ask, each for more of the same."""
        until = self.now + seconds
        while self.now < until:
            self.turn(calls)


@pytest.mark.parametrize("costs", [(1.0, 0.1), (0.1, 1.0), (30.0, 0.7), (0.01, 0.02)])
def test_keys_get_the_same_seconds_whatever_their_calls_cost(costs):
    ranks = Ranks(lambda asked: dict(zip("ab", costs, strict=True))[asked.key])
    ranks.work([call("a"), call("b")], 100 * max(costs))
    assert abs(ranks.keys["a"] - ranks.keys["b"]) <= max(costs) + 1e-6


def test_a_key_gets_no_more_by_many_models():
    """And its models share what it gets."""
    costs = {"x": 1.0, "y": 0.1, "z": 0.3, "alone": 0.2}
    ranks = Ranks(lambda asked: costs[asked.owner])
    calls = [call("a", "x"), call("a", "y"), call("a", "z"), call("b", "alone")]
    ranks.work([*calls, *(call("a", "y") for _ in range(50))], 300)
    assert abs(ranks.keys["a"] - ranks.keys["b"]) <= 1.0 + 1e-6
    parts = [ranks.models[f"a/{name}"] for name in "xyz"]
    assert max(parts) - min(parts) <= 1.0 + 1e-6


def test_models_of_one_name_belong_to_their_keys():
    """Two keys sample from the base model: what one has had is not held against the other."""
    ranks = Ranks(lambda asked: 1.0 if asked.key == "a" else 0.1)
    ranks.work([call("a", "same"), call("a", "other"), call("b", "same"), call("b", "other")], 200)
    for key in "ab":
        assert abs(ranks.models[f"{key}/same"] - ranks.models[f"{key}/other"]) <= 1.0 + 1e-6


def test_eight_keys_share_to_within_a_call():
    costs = {f"{place}": 0.05 * 2**place for place in range(8)}
    ranks = Ranks(lambda asked: costs[asked.key])
    ranks.work([call(key) for key in costs for _ in range(3)], 1000)
    assert max(ranks.keys.values()) - min(ranks.keys.values()) <= max(costs.values()) + 1e-6


@pytest.mark.parametrize("away", [0.5, 2.0, 50.0, FORGOTTEN_S + 1, 5000.0])
def test_who_was_away_comes_next_but_has_saved_nothing(away):
    ranks = Ranks(lambda asked: 0.25)
    a, b = call("a"), call("b")
    ranks.work([a, b], 10)
    ranks.work([a], away)
    assert ranks.turn([a, b]).key == "b"
    ranks.keys.clear()
    ranks.work([a, b], 20)
    assert abs(ranks.keys["a"] - ranks.keys["b"]) <= 0.5 + 1e-6


def test_a_model_that_was_away_has_saved_nothing():
    ranks = Ranks(lambda asked: 0.25)
    x, y = call("a", "x"), call("a", "y")
    ranks.work([x, y], 10)
    ranks.work([x], 100)
    assert ranks.turn([x, y]).owner == "y"
    ranks.models.clear()
    ranks.work([x, y], 20)
    assert abs(ranks.models["a/x"] - ranks.models["a/y"]) <= 0.5 + 1e-6


@pytest.mark.parametrize("every", [2, 9])
def test_who_asks_for_little_saves_nothing(every):
    """Who waits for its answer before it asks again is away at each turn after its own, and never
    for long."""
    ranks = Ranks(lambda asked: 0.1 if asked.key == "a" else 0.01)
    a, b = call("a"), call("b")
    for turn in range(2000):
        ranks.turn([a, b] if turn % every else [a])
    ranks.keys.clear()
    ranks.work([a, b], 5)
    assert abs(ranks.keys["a"] - ranks.keys["b"]) <= 0.2


def test_who_has_had_much_does_not_get_rid_of_it_by_a_pause():
    """What a key has had counts also after it was away for a turn."""
    ranks = Ranks(lambda asked: 10.0 if asked.key == "a" else 0.5)
    a, b = call("a"), call("b")
    ranks.turn([a, b])
    ranks.turn([b])
    for _ in range(18):
        assert ranks.turn([a, b]).key == "b"


def test_one_call_waits_for_no_more_than_one_of_a_thousand():
    ranks = Ranks(lambda asked: 1.0)
    flood = [call("flood", f"{place % 7}") for place in range(1000)]
    ranks.work(flood, 50)
    for _ in range(5):
        assert ranks.turn([*flood, call("small")]).key == "small"
        ranks.work(flood, 3)


def test_of_a_model_the_first_call_is_next():
    calls = [call("a", "x"), call("a", "x"), call("a", "y")]
    assert FairQueue(lambda: 0.0).next(calls, owner_of) is calls[0]


def test_work_for_several_keys_counts_for_each():
    """Samples of one model are drawn together: whose turn it was is not the only one to pay."""
    ranks = Ranks(lambda asked: 1.0)
    a, b, c = call("a"), call("b"), call("c")
    assert ranks.turn([a, b, c]) is a
    ranks.turns.record_work(b, b.owner, 1.0)
    assert ranks.turn([a, b, c]) is c


def size(turns: FairQueue) -> int:
    return len(turns.had) + len(turns.seen) + len(turns.floor)


def test_what_is_long_gone_is_forgotten():
    ranks = Ranks(lambda asked: 1.0)
    for place in range(5000):
        ranks.turn([call(f"key {place % 50}", f"model {place}")])
    for place in range(3 * MANY):
        asked = call(f"key {place}", f"model {place}")
        ranks.turn([asked])
        ranks.turns.record_work(asked, "weights that another key has asked for", 0.1)
    ranks.now += 2 * FORGOTTEN_S
    ranks.turn([call("a", "x")])
    assert size(ranks.turns) <= 8


def test_memory_is_bounded_while_there_are_new_names():
    ranks, most = Ranks(lambda asked: 1.0), 0
    for place in range(4000):
        ranks.turn([call("always"), call(f"key {place}", f"model {place}")])
        most = max(most, size(ranks.turns))
    assert most <= 5 * FORGOTTEN_S + 3 * MANY


@pytest.mark.full
def test_who_asks_and_waits_is_not_forgotten():
    long, a = 2 * FORGOTTEN_S, call("a")
    ranks = Ranks(lambda asked: long if asked is a else FORGOTTEN_S / MANY / 2)
    for place in range(20 * MANY):
        ranks.turn([a, call("b", f"{place}")])
    assert abs(ranks.keys["a"] - ranks.keys["b"]) <= long + 1e-6


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "b")])
def test_who_has_to_be_brought_into_memory_waits_for_a_while(keys):
    """Two models of which one fits: they are swapped rarely, and have the same share."""
    there, swaps, had = "", 0, Counter[str]()
    turns = FairQueue(lambda: 0.0)
    calls = [call(key, owner) for key, owner in zip(keys, "xy", strict=True)]
    for _ in range(1000):
        delays = {owner: 0.0 if owner == there else 4.0 for owner in "xy"}
        chosen = turns.next(calls, owner_of, lambda asked, delays=delays: delays[asked.owner])
        swaps += chosen.owner != there
        there = chosen.owner
        had[there] += 0.1
        turns.record_work(chosen, there, 0.1)
    assert 11 <= swaps <= 15  # from 4 seconds behind to 4 ahead, not at every call
    assert abs(had["x"] - had["y"]) <= 8.2
