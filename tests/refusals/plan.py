"""What plans are made from: lengths, topologies, costs, limits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np

from bascule import Limits, Sequences, Span, TransformerCost, plan_batch
from bascule.costs import Cluster, PolynomialCost
from bascule.plan import Topology, assign, plan_step

COST = TransformerCost(64)


def planned(lens: Any, topology: Any = "g2n1", **settings: Any) -> Callable[[], object]:
    return partial(plan_batch, [lens, [1]], topology, COST, **settings)


def steps(second: Any) -> Callable[[], object]:
    """Two microbatches, of which the first is right."""
    return partial(plan_step, [[[1], [2]], second], "g1n2", COST)


def by_cost(cost: Callable[[Any], Any]) -> Callable[[], object]:
    return partial(plan_batch, [[9], [10]], "g1n2", cost)


MEETINGS = '"microbatch" or "step"'
BYTES, BOTH = Limits(num_bytes=10), Limits(tokens=9, num_bytes=9)
ITEMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"costs": [1.0, -2.0]}, ("costs[1] is -2",)),
    ({"costs": [math.nan]}, ("costs[0] is nan",)),
    ({"costs": ["a"]}, ("costs must be",)),
    ({"costs": [[1.0]]}, ("costs must have one dimension, got shape (1, 1)",)),
    ({"costs": [1e308, 1e308]}, ("overflow",)),
    ({"num_bins": None}, ("num_bins and speeds are both missing",)),
    ({"num_bins": 0}, ("num_bins is 0",)),
    ({"num_bins": 2, "speeds": [1.0]}, ("num_bins is 2, but speeds has 1",)),
    ({"num_bins": None, "speeds": []}, ("speeds is empty",)),
    ({"num_bins": None, "speeds": [1.0, 0.0]}, ("speeds from 0 to 1.00: leave out bins",)),
    ({"num_bins": 2, "initial_loads": [1.0]}, ("initial_loads has 1 entries; give 2",)),
    ({"sizes": [1, 2]}, ("sizes has 2 entries; give 1",)),
    ({"ranks_per_bin": [0]}, ("ranks_per_bin[0] is 0",)),
    ({"limits": Limits(tokens=9)}, ("sizes is missing",)),
    ({"sizes": [1], "limits": BOTH}, ("only one of them",)),
    ({"sizes": {"tokens": [1]}, "limits": BOTH}, ("pass bytes",)),
    ({"location": [1]}, ("location[0] is 1",)),
    ({"location": [0.0]}, ("location must be 1 integers",)),
    ({"locality_tolerance": -0.1}, ("locality_tolerance is -0.1",)),
]
FULL: list[tuple[list[int], dict[str, Any], tuple[str, ...]]] = [
    ([1, 2], {"sizes": [5, 11]}, ("item 1 has 11 bytes", "limit of 10 by 1")),
    ([1] * 3, {"sizes": [8] * 3}, ("24 bytes of 3 items exceed the 20 of", "by 4")),
    ([1] * 5, {"limits": Limits(items=2)}, ("5 items exceed the 4 of the 2 bins by 1",)),
    ([1] * 2, {"speeds": [1, 4], "sizes": [25] * 2}, ("50", "exceed the 40 of the 1 bins with")),
    ([1] * 3, {"sizes": [6] * 3}, ("12 bytes on bin", "above its limit of 10 by 2")),
]
TOPOLOGIES: list[tuple[Any, ...]] = [
    *(((),), (((0, 1),),), (((1, -1),),), (((1, 2),), 0), (((1, 2),), 1.5), (((1.0, 2),),)),
    *((((4, 1), (1, 2)), 1, rings) for rings in ((2,), (1, 2), (3, 1), (1.0, 1), (2, 1, 1))),
    *((((1, 2, 3),),), (5,)),
]
WORLDS = (("g8n4", 31, 32), ("g8n4", 0, 32), ("g8n4", 63, 64), ("g1n1+g2n1", 7, 6))
MASKED: list[tuple[Any, tuple[str, ...]]] = [
    (Sequences([4], "casual"), ('rank 1: masks=\'casual\': give "full", "causal", or a list',)),
    (Sequences([4], ["casual"]), ("rank 1, sequence 0: mask 'casual'",)),
    (Sequences([4], ["causal", "full"]), ("rank 1: 2 masks for 1 sequences",)),
    (Sequences([4], [[Span(3)]]), ("rank 1, sequence 0: spans have 3 tokens in all",)),
    (Sequences([4], cast(Any, [[4]])), ("rank 1, sequence 0: a span is 4: give a list",)),
    (Sequences([4], context_lens=[1, 2]), ("rank 1: 2 context_lens for 1 sequences",)),
    (Sequences([4], context_lens=[-1]), ("context_lens: rank 1, sequence 0: length -1",)),
    (Sequences([-4]), ("rank 1, sequence 0: length -4",)),
    ([4], ("ranks [1] give no masks",)),
]
EIGHT = Cluster(2, 4, 400e12, 80e9, 150e9, 25e9, 1e-5)


def by_lengths_alone(lens: Any) -> Any:
    return np.asarray(lens, np.float64) ** 2


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
    ("lengths that are no list", planned({1: 2}), ("rank 0", "flat list")),
    ("ragged lengths", planned([7, [8]]), ("rank 0", "cannot be read as an array")),
    ("a batch that is no list", partial(plan_batch, 5, "g1n2", COST), ("list per source rank",)),  # pyright: ignore[reportArgumentType]
    ("lengths of two dims", planned(np.ones((2, 2), int)), ("rank 0", "flat list")),
    ("a small integer below 0", planned(np.array([4, -5], np.int8)), ("rank 0", "length -5")),
    ("lengths of truth", planned(np.array([True])), ("rank 0, sequence 0", "length True")),
    ("a load too few", planned([1], initial_loads=[1.0]), ("initial_loads", "2 in all")),
    ("a load of nan", planned([1], initial_loads=[1.0, math.nan]), ("initial_loads[1] is nan",)),
    ("no cost", by_cost(lambda lens: lens * math.nan), ("rank 0, sequence 0", "nan for 9 tokens")),
    ("a cost below 0", by_cost(lambda lens: lens - 10.0), ("rank 0", "-1.0 for 9 tokens")),
    ("a cost too few", by_cost(lambda lens: lens[:1]), ("(1,) costs for (2,) lengths",)),
    ("no cluster", planned([1], cluster=5), ("cluster=5", "a Cluster(")),
    ("tolerance", planned([1], locality_tolerance=-1.0), ("locality_tolerance=-1.0", "at least 0")),
    ("bags without a cluster", planned([1], "auto"), ("auto", "needs cluster=")),
    ("no meeting", partial(plan_step, [], "g1n1", COST, sync="never"), ("'never'", MEETINGS)),  # pyright: ignore[reportArgumentType]
    ("a length of a step", steps([[-1], [2]]), ("microbatch 1: rank 0, sequence 0: length -1",)),
    ("a step of two worlds", steps([[1]]), ("give all the same ranks",)),
    ("causal of text", partial(Span, 1, "yes"), ("causal='yes'", "True or False")),  # pyright: ignore[reportArgumentType]
    ("above its limit", planned([50], limits=Limits(tokens=20)), ("rank 0", "50 tokens", "20")),
    *(
        (f"items {n}", partial(assign, **{"costs": [1.0], "num_bins": 1, **wrong}), words)
        for n, (wrong, words) in enumerate(ITEMS)
    ),
    *(
        (f"full {n}", partial(assign, costs, 2, **{"limits": BYTES, **options}), words)
        for n, (costs, options, words) in enumerate(FULL)
    ),
    *((f"topology {x}", partial(Topology, *x), ("opology",)) for x in TOPOLOGIES),
    *(
        (
            f"{spec} on {size} ranks",
            partial(Topology.parse, spec, world_size=size),
            (f"there are {size}: use {nearest} ranks",),
        )
        for spec, size, nearest in WORLDS
    ),
    *(
        (f"masks {n}", partial(plan_batch, [Sequences([3], "full"), x], "g1n2", COST), words)
        for n, (x, words) in enumerate(MASKED)
    ),
    (
        "a cost without pairs",
        partial(plan_batch, [Sequences([4], "causal")], "g1n1", by_lengths_alone),
        ("called with tokens and, as there are masks",),
    ),
    ("a cluster of others", planned([], "auto", cluster=EIGHT), ("8 ranks, not 2",)),
    (
        "no bags within limits",
        partial(plan_batch, [[1000]] * 8, "auto", COST, cluster=EIGHT, limits=Limits(tokens=10)),
        ("1000",),
    ),
]
