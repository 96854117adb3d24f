"""What plans are made from: lengths, topologies, costs, limits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bascule import Limits, Span, TransformerCost, plan_batch
from bascule.costs import PolynomialCost
from bascule.plan import plan_step

COST = TransformerCost(64)


def planned(lens: Any, topology: Any = "g2n1", **settings: Any) -> Callable[[], object]:
    return partial(plan_batch, [lens, [1]], topology, COST, **settings)


def by_cost(cost: Callable[[Any], Any]) -> Callable[[], object]:
    return partial(plan_batch, [[9], [10]], "g1n2", cost)


CASES: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
    ("no width", partial(TransformerCost, 0), ("d_model=0", "at least 1")),
    ("gamma below 0", partial(TransformerCost, 64, gamma=-1.0), ("gamma=-1.0", "at least 0")),
    ("cost below 0", partial(PolynomialCost, 0.0, -1.0, 0.0), ("linear=-1.0", "at least 0")),
    ("a cost that is a number", by_cost(5), ("the cost model is 5", "must be a function")),  # pyright: ignore[reportArgumentType]
    ("no tokens", partial(Limits, tokens=0), ("tokens=0", "at least 1")),
    ("bytes below 0", partial(Limits, num_bytes=-1), ("num_bytes=-1", "at least 1")),
    ("length below 0", planned([4, -1]), ("rank 0", "-1")),
    ("half a token", planned([2.5]), ("rank 0, sequence 0: length 2.5",)),
    ("length of nan", planned([math.nan]), ("rank 0, sequence 0: length nan",)),
    ("length beyond 2^40", planned([2**40 + 1]), ("rank 0, sequence 0: length 1099511627777",)),
    ("length of text", planned(["x"]), ("rank 0",)),
    ("a bag of no ranks", planned([1], "g0n1"), ("'g0n1'",)),
    ("another world", planned([1], "g3n1"), ("3", "2")),
    ("no topology", planned([1], ""), ("''",)),
    ("no planner", planned([1], planner="magic"), ("'magic'", "knapsack")),
    ("lengths that are no list", planned({1: 2}), ("rank 0", "flat list")),
    ("ragged lengths", planned([7, [8]]), ("rank 0", "cannot be read as an array")),
    ("a batch that is no list", partial(plan_batch, 5, "g1n2", COST), ("one list a source rank",)),  # pyright: ignore[reportArgumentType]
    ("lengths of two dims", planned(np.ones((2, 2), int)), ("rank 0", "flat list")),
    ("a small integer below 0", planned(np.array([4, -5], np.int8)), ("rank 0", "length -5")),
    ("lengths of truth", planned(np.array([True])), ("rank 0, sequence 0", "length True")),
    ("a load too few", planned([1], initial_loads=[1.0]), ("initial_loads", "2 ranks")),
    ("a load of nan", planned([1], initial_loads=[1.0, math.nan]), ("initial_loads[1] is nan",)),
    ("no cost", by_cost(lambda lens: lens * math.nan), ("rank 0, sequence 0", "nan for 9 tokens")),
    ("a cost below 0", by_cost(lambda lens: lens - 10.0), ("rank 0", "-1.0 for 9 tokens")),
    ("a cost too few", by_cost(lambda lens: lens[:1]), ("(1,) costs for (2,) lengths",)),
    ("no cluster", planned([1], cluster=5), ("cluster=5", "a Cluster(")),
    ("tolerance", planned([1], locality_tolerance=-1.0), ("locality_tolerance=-1.0", "at least 0")),
    ("bags without a cluster", planned([1], "auto"), ("auto", "needs a cluster")),
    ("no meeting", partial(plan_step, [[[1]]], "g1n1", COST, sync="never"), ("'never'", "step")),  # pyright: ignore[reportArgumentType]
    ("causal of text", partial(Span, 1, "yes"), ("causal='yes'", "True or False")),  # pyright: ignore[reportArgumentType]
    ("above its limit", planned([50], limits=Limits(tokens=20)), ("rank 0", "50 tokens", "20")),
]
