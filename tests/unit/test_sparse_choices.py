"""Choices of a mesh for block-sparse attention by predicted seconds: switches are damped."""

import itertools

import numpy as np
import pytest

from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse.choose import Strategies, StrategyChoice
from tests.helpers.sparse_studies import even_load

A800 = AttentionLatency(40e-6, 6e-12, 15e-6, 9e-12, 2e-12, 30e-6, 2e-12)
PER_WORK = AttentionLatency(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""A call takes as many seconds as its work, so that tests say what is predicted."""


def choose_strategy(
    latency: AttentionLatency,
    loads: list[AttentionLoad],
    last: StrategyChoice | None = None,
    *,
    min_gain: float = 0.03,
    switch_s: float = 0.0,
) -> StrategyChoice:
    return Strategies(latency, min_gain=min_gain, switch_s=switch_s).choose(loads, last)


def calls(*seconds: float) -> list[AttentionLoad]:
    """Loads of (1, 1), (2, 1), ... that take these many seconds."""
    return [AttentionLoad(place + 1, 1, work, 0.0, 0.0) for place, work in enumerate(seconds)]


def brute_force(
    table: list[list[float]], min_gain: float, switch_s: float
) -> tuple[list[int], int]:
    """Places in each row, and the switches: the rule of the docstring, from the start each time."""
    places: list[int] = []
    for row, seconds in enumerate(table):
        best = min(seconds)
        if not places:
            places.append(seconds.index(best))
            continue
        here = places[-1]
        arrived = row - 1
        while arrived > 0 and places[arrived - 1] == here:
            arrived -= 1
        gains = [table[t][here] - min(table[t]) for t in range(arrived + 1, row + 1)]
        lost = [
            gain if gain > min_gain * table[t][here] else 0.0
            for gain, t in zip(gains, range(arrived + 1, row + 1), strict=True)
        ]
        leaves = lost[-1] > 0.0 and sum(lost) >= switch_s
        places.append(seconds.index(best) if leaves else here)
    return places, sum(a != b for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("min_gain", "switch_s"), [(0.0, 0.0), (0.1, 0.0), (0.0, 2.5), (0.1, 2.5)])
def test_choices_against_brute_force(seed: int, min_gain: float, switch_s: float) -> None:
    table = np.random.default_rng(seed).integers(1, 9, (40, 4)).astype(float).tolist()
    places: list[int] = []
    last: StrategyChoice | None = None
    for seconds in table:
        last = choose_strategy(
            PER_WORK, calls(*seconds), last, min_gain=min_gain, switch_s=switch_s
        )
        assert last.predicted_s == seconds[last.degrees[0] - 1]
        places.append(last.degrees[0] - 1)
    expected, switches = brute_force(table, min_gain, switch_s)
    assert places == expected
    assert last is not None
    assert last.num_switches == switches
    if min_gain == switch_s == 0.0:
        assert [row[place] for row, place in zip(table, places, strict=True)] == list(
            map(min, table)
        )


def test_small_gains_do_not_count_and_others_are_summed() -> None:
    choice = choose_strategy(PER_WORK, calls(1.0, 1.1))
    for seconds in [(1.02, 1.0), (1.0, 1.02)] * 10:
        choice = choose_strategy(PER_WORK, calls(*seconds), choice)
    assert choice == StrategyChoice((1, 1), 1.0, 0.0, 0)
    slow = calls(1.5, 1.0)
    for _ in range(3):
        choice = choose_strategy(PER_WORK, slow, choice, switch_s=2.0)
    assert (choice.degrees, choice.foregone_s) == ((1, 1), 1.5)
    choice = choose_strategy(PER_WORK, slow, choice, switch_s=2.0)
    assert choice == StrategyChoice((2, 1), 1.0, 0.0, 1)


def test_the_imbalance_decides() -> None:
    """Ring is cheaper to exchange for, until its ranks have to wait for the slowest."""

    def loads(ring_imbalance: float) -> list[AttentionLoad]:
        return [
            even_load(mesh, seq_len=75600, num_heads=40, head_dim=128, density=0.41, imbalance=rho)
            for mesh, rho in (((8, 1), 1.01), ((1, 8), ring_imbalance))
        ]

    assert choose_strategy(A800, loads(1.0)).degrees == (1, 8)
    assert choose_strategy(A800, loads(1.25)).degrees == (8, 1)
