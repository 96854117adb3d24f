"""What each sequence costs on each kind of bag, and which bag computes it.

Bags of one *kind* have the same size and the same wires. Without a cluster a bag of P ranks simply
takes a P-th of a cost, so that there is one kind, whatever the sizes. With one, a sequence has a
price a kind: bags of different size are unrelated machines, and the solver, which knows one cost
an item, is called in a loop.

A bag of P = G * R ranks with a ring takes each rank, for a sequence of L tokens,

    compute(L) / P  +  all_to_alls(L / R, G)  +  (R - 1) * max(0, exchange - round)

seconds: the all-to-alls (see `Cluster`) of the L / R tokens of its G ranks; and for each pass of
keys and values to the next rank, 2 * 2 bytes of d / G values a token and layer for L / R tokens,
what is longer than the attention that hides it: the R-th part of a rank's attention, a round. A
sequence hides only its own passes, so that prices add up; where one bag holds several, the long
ones in fact hide some of the others' too. Source: the latency model of db-SP, ring attention as
`(R - 1) * max(compute, exchange) + compute`, double-buffered as in FastUSP.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import amounts, of_type, shown
from bascule.plan.costs.cost_models import Cost, TransformerCost, evaluate
from bascule.plan.costs.hardware import BYTES_PER_VALUE, Cluster
from bascule.plan.lengths import source_of
from bascule.plan.limits import Limits
from bascule.plan.routes import Ints
from bascule.plan.solver.solve import assign, knapsack
from bascule.plan.solver.swaps import exchange
from bascule.plan.topology.spec import Topology

Floats = npt.NDArray[np.float64]

_ROUNDS = 2
_HALVINGS = 40
_CLOSE = 1.0 + 1e-4
_MOST_WORK = 1e300
"""Largest sum of costs: what follows stays finite."""

_MAX_PAIRS = 1_000_000
"""Pairs of sequences that the final search looks at."""

_RING_VALUES = 2
"""Of the width of the model, what a token sends around a ring: its keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Sequences with a price a kind of bag, and the bags.

    Attributes:
        lens: (num_seqs,) tokens.
        sizes: (num_bags,) ranks of each bag.
        kinds: (num_bags,) kind of each bag.
        work: (num_kinds, num_seqs) cost of each sequence on a bag of each kind, times its ranks.
        carried: (num_bags,) cost of each bag before any sequence: carried loads and launches.
    """

    lens: Ints
    sizes: Ints
    kinds: Ints
    work: Floats
    carried: Floats

    def loads(self, bag_of: Ints) -> Floats:
        """(num_bags,) true cost of each bag."""
        work = self.work[self.kinds[bag_of], np.arange(bag_of.size)]
        return self.carried + np.bincount(bag_of, work, self.sizes.size) / self.sizes


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The bag of every sequence, the cost of every bag, and what no decision can beat."""

    bag_of: Ints
    loads: Floats
    lower_bound: float

    @property
    def makespan(self) -> float:
        """Cost of the slowest bag."""
        return float(self.loads.max())


def price(
    lens: Ints,
    counts: Ints,
    topology: Topology,
    cost: Cost,
    cluster: Cluster | None,
    carried: Floats,
) -> Prices:
    """The prices of a batch on the bags of a topology.

    Raises:
        ConfigError: The cost model gives an illegal cost, or no width although wires need one.
    """
    sizes = topology.bag_sizes
    if cluster is None:
        work = checked(evaluate(cost, lens), lens, counts)[None]
        return Prices(lens, sizes, np.zeros_like(sizes), work, carried)
    cluster.check_world(topology.num_ranks)
    compute = checked(cluster.compute_seconds(cost, lens), lens, counts)
    rows, kind_of = np.unique(_kind_rows(topology, cluster), axis=0, return_inverse=True)
    kinds = [_Kind(*row) for row in rows.tolist()]
    launch = np.array([kind.launch_seconds(cost, cluster) for kind in kinds])
    kind_of = kind_of.ravel()
    work = compute + np.stack([kind.wire_work(cost, cluster, lens) for kind in kinds])
    return Prices(lens, sizes, kind_of, work, carried + launch[kind_of])


class _Kind(NamedTuple):
    """What decides the price of a sequence on a bag.

    Attributes:
        size: Ranks.
        ring: Ring degree.
        ranks_in_node: Of the ranks that share heads, the fewest in one node.
        is_in_node: Whether all ranks are in one node.
    """

    size: int
    ring: int
    ranks_in_node: int
    is_in_node: bool

    def launch_seconds(self, cost: Cost, cluster: Cluster) -> float:
        """Seconds that a rank spends on launching the exchanges of a forward pass."""
        seconds = cluster.launch_seconds(cost, self.size // self.ring)
        if self.ring == 1:
            return seconds
        return seconds + (self.ring - 1) * _transformer(cost).num_layers * cluster.latency_s

    def wire_work(self, cost: Cost, cluster: Cluster, lens: Ints) -> Floats:
        """(num_seqs,) seconds on wires of each sequence, times the ranks of the bag."""
        degree = self.size // self.ring
        per_token = degree * cluster.wire_seconds(cost, degree, self.ranks_in_node)
        seconds = per_token * lens.astype(np.float64)
        return seconds if self.ring == 1 else seconds + self._exposed(cost, cluster, lens)

    def _exposed(self, cost: Cost, cluster: Cluster, lens: Ints) -> Floats:
        """(num_seqs,) seconds that keys and values travel without being hidden, times the ranks."""
        model = _transformer(cost)
        speed = cluster.intra_bytes_per_s if self.is_in_node else cluster.inter_bytes_per_s
        num_bytes = BYTES_PER_VALUE * _RING_VALUES * model.d_model * model.num_layers
        linear = cluster.compute_seconds(replace(model, gamma=0.0), lens)
        attention = cluster.compute_seconds(model, lens) - linear
        return (self.ring - 1) * np.maximum(lens * (num_bytes / speed) - attention / self.ring, 0.0)


def _kind_rows(topology: Topology, cluster: Cluster) -> Ints:
    """(num_bags, 4) the `_Kind` of each bag; a bag takes as long as its worst Ulysses group."""
    groups, sizes = topology.ulysses_groups, topology.bag_sizes
    first_groups = groups.bag_of_rank[topology.first_ranks]
    in_node = np.minimum.reduceat(cluster.nodes_of(groups)[1], first_groups)
    is_in_node = cluster.nodes_of(topology)[1] == sizes
    return np.stack([sizes, topology.ring_degrees, in_node, is_in_node], axis=1)


def _transformer(cost: Cost) -> TransformerCost:
    if not isinstance(cost, TransformerCost):
        raise ConfigError(
            f"a ring carries keys and values, but {type(cost).__name__} does not know the width of "
            "the model: use a TransformerCost, or bags without a ring"
        )
    return cost


def checked(costs: Floats, lens: Ints, counts: Ints) -> Floats:
    """The costs, if all are finite and at least 0.

    Raises:
        ConfigError: Names the rank and the sequence.
    """
    legal = np.isfinite(costs) & (costs >= 0)
    if not legal.all():
        bad = int(np.argmin(legal))
        rank, place = source_of(bad, counts)
        raise ConfigError(
            f"rank {rank}, sequence {place}: the cost model gave {costs[bad]} for {lens[bad]} "
            "tokens; a cost is finite and at least 0"
        )
    with np.errstate(over="ignore"):
        if costs.sum() > _MOST_WORK:
            raise ConfigError(f"costs up to {costs.max()} overflow in a sum; use a larger unit")
    return costs


def decide(planner: str, prices: Prices, limits: Limits | None) -> Decision:
    """A bag for every sequence, so that the last bag finishes early.

    Raises:
        ConfigError: There is no such planner, or it keeps no limits.
        PlanError: The limits cannot be kept.
    """
    of_type("planner", planner, str, '"lpt" or "knapsack"')
    if planner == "lpt":
        if prices.work.shape[0] == 1:
            return _solve(prices, prices.work[0], limits)
        return _decide_by_kind(prices, limits)
    if planner != "knapsack":
        raise ConfigError(f'planner {shown(planner)}: choose "lpt" or "knapsack"')
    if limits is not None and limits != Limits():
        raise ConfigError(f'planner "knapsack" cannot keep {limits}: use "lpt"')
    # The paper's greedy knows one cost a sequence: the least that it can have.
    least = prices.work.min(axis=0)
    found = knapsack(least, speeds=prices.sizes, carried_loads=prices.carried)
    if prices.work.shape[0] == 1:
        return Decision(found.bin_of, found.loads, found.lower_bound)
    return _certified(prices, found.bin_of, found.lower_bound)


def _solve(prices: Prices, work: Floats, limits: Limits | None) -> Decision:
    """By one cost a sequence, which the loads of the answer then show."""
    sizes = None if limits is None or limits.tokens is None else prices.lens
    found = assign(
        work, speeds=prices.sizes, limits=limits, sizes=sizes, carried_loads=prices.carried
    )
    return Decision(found.bin_of, found.loads, found.lower_bound)


def _decide_by_kind(prices: Prices, limits: Limits | None) -> Decision:
    """Guess the kind of bag that each sequence ends on, solve at those prices, correct the guess.

    The first guess is the fluid optimum: the longest sequences on the largest bags, cut where all
    kinds of bag finish together. The second is that no sequence leaves its kind.
    """
    every = np.arange(prices.lens.size)
    guess, weights = _fluid(prices)
    least = _solve(prices, prices.work.min(axis=0), limits)
    answers = [least.bag_of]
    if limits is None:
        answers.append(_within_kinds(prices, guess))
    for _ in range(_ROUNDS):
        answers.append(_solve(prices, prices.work[guess, every], limits).bag_of)
        if np.array_equal(guess, prices.kinds[answers[-1]]):
            break
        guess = prices.kinds[answers[-1]]
    best = _earliest(prices, answers)
    makespan = float(prices.loads(best).max())
    bound = max(least.lower_bound, _price_bound(prices, weights, makespan))
    answers.sort(key=lambda bag_of: float(prices.loads(bag_of).max()))
    best = _earliest(prices, (_polish(prices, bag_of, limits, bound) for bag_of in answers[:2]))
    makespan = float(prices.loads(best).max())
    return _certified(prices, best, max(bound, _price_bound(prices, weights, makespan)))


def _polish(prices: Prices, bag_of: Ints, limits: Limits | None, bound: float) -> Ints:
    """Moves and swaps at true prices."""
    kinds = np.unique(prices.kinds, return_index=True)[1]
    num_bags, tokens = prices.sizes.size, None if limits is None else limits.tokens
    return exchange(
        prices.work / prices.sizes[kinds][:, None],
        prices.kinds,
        prices.carried,
        bag_of,
        tokens=prices.lens,
        room=None if tokens is None else tokens * prices.sizes.astype(np.float64),
        limits=limits,
        target=bound * _CLOSE,
        max_steps=min(4 * num_bags, _MAX_PAIRS * num_bags // max(bag_of.size, 1) ** 2),
    )


def _earliest(prices: Prices, answers: Iterable[Ints]) -> Ints:
    return min(answers, key=lambda bag_of: float(prices.loads(bag_of).max()))


def _certified(prices: Prices, bag_of: Ints, bound: float) -> Decision:
    loads = prices.loads(bag_of)
    return Decision(bag_of, loads, min(bound, float(loads.max())))


def _within_kinds(prices: Prices, guess: Ints) -> Ints:
    """Every sequence on a bag of the kind guessed, each kind solved by itself."""
    bag_of = np.zeros(guess.size, dtype=np.int64)
    for kind in np.unique(guess).tolist():
        bags, seqs = np.flatnonzero(prices.kinds == kind), np.flatnonzero(guess == kind)
        speeds, carried = prices.sizes[bags], prices.carried[bags]
        found = assign(prices.work[kind, seqs], speeds=speeds, carried_loads=carried)
        bag_of[seqs] = bags[found.bin_of]
    return bag_of


def _fluid(prices: Prices) -> tuple[Ints, Floats]:
    """Kinds that a fluid would choose, and what a second of each kind of bag is worth to it.

    Long sequences lose least to wires, so they take the largest bags: for a makespan, each kind in
    turn is filled with the longest sequences left. Bisection finds where the last kind is full.
    """
    num_kinds = prices.work.shape[0]
    order = np.argsort(-prices.lens, kind="stable")
    sums = np.cumsum(prices.work[:, order], axis=1)
    ranks = prices.sizes.astype(np.float64)
    speeds: Floats = np.bincount(prices.kinds, ranks, num_kinds).astype(np.float64)
    before: Floats = np.bincount(prices.kinds, ranks * prices.carried, num_kinds).astype(np.float64)
    low, high = 0.0, float((before.sum() + sums[:, -1:].max(initial=0.0)) / speeds.min())
    ends = np.zeros(num_kinds + 1, dtype=np.int64)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ends, fits = _fill(sums, middle * speeds - before)
        low, high = (low, middle) if fits else (middle, high)
    ends, _ = _fill(sums, high * speeds - before)
    guess = np.empty(order.size, dtype=np.int64)
    for turn, kind in enumerate(reversed(range(num_kinds))):
        guess[order[ends[turn] : ends[turn + 1]]] = kind
    return guess, _weights(prices.work[:, order], ends, speeds)


def _fill(sums: Floats, room: Floats) -> tuple[Ints, bool]:
    """Where the sequences of each kind end, largest kind first; whether all of them fit."""
    num_kinds, num_seqs = sums.shape
    ends = np.zeros(num_kinds + 1, dtype=np.int64)
    for turn, kind in enumerate(reversed(range(num_kinds))):
        done = float(sums[kind, ends[turn] - 1]) if ends[turn] else 0.0
        end = int(np.searchsorted(sums[kind], done + max(float(room[kind]), 0.0), side="right"))
        ends[turn + 1] = max(end, ends[turn])
    fits = bool(ends[-1] == num_seqs)
    ends[-1] = num_seqs
    return ends, fits


def _weights(work: Floats, ends: Ints, speeds: Floats) -> Floats:
    """Prices at which the sequence between two kinds costs both the same; largest kind first."""
    num_kinds, num_seqs = work.shape
    weights = np.ones(num_kinds)
    for turn, kind in enumerate(reversed(range(num_kinds - 1))):
        last = min(int(ends[turn + 1]), num_seqs - 1)
        here, above = (float(work[k, last]) if num_seqs else 0.0 for k in (kind, kind + 1))
        weights[kind] = weights[kind + 1] * (above / here if here > 0 else 1.0)
    return weights / (weights * speeds).sum()


def _price_bound(prices: Prices, weights: Floats, makespan: float) -> float:
    """Linear programming duality: any weights of the kinds' time give a bound.

    With the work of kind k at most S_k T - R_k (speeds S, carried work R), and weights w with
    sum w S = 1: T >= sum_k w_k R_k + sum_i min_k w_k work_ki, the minimum over the kinds on which
    sequence i alone ends by the makespan of an answer at hand.
    """
    num_kinds, num_seqs = prices.work.shape
    earliest = np.full((num_kinds, num_seqs), np.inf)
    first = np.zeros(num_kinds)
    for kind in range(num_kinds):
        bags = prices.kinds == kind
        first[kind] = (prices.sizes[bags] * prices.carried[bags]).sum()
        size = prices.sizes[bags][0]
        earliest[kind] = prices.carried[bags].min() + prices.work[kind] / size
    priced = np.where(earliest <= makespan * (1 + 1e-12), weights[:, None] * prices.work, np.inf)
    alone = float(earliest.min(axis=0).max(initial=0.0))
    slack = 1.0 - 1e-12  # sums are rounded
    return max(alone, float(((weights * first).sum() + priced.min(axis=0).sum()) * slack))


def bag_carried(carried_loads: npt.ArrayLike | None, topology: Topology) -> Floats:
    """(num_bags,) cost carried by the slowest rank of each bag, for which its other ranks wait.

    Raises:
        ConfigError: There is not one legal load a rank.
    """
    if carried_loads is None:
        return np.zeros(topology.num_bags)
    carried = amounts("carried_loads", carried_loads)
    if carried.size != topology.num_ranks:
        raise ConfigError(
            f"carried_loads of shape {carried.shape}: give a finite cost of at least 0 "
            f"for each of the {topology.num_ranks} ranks"
        )
    return np.maximum.reduceat(carried, topology.first_ranks)


def check_sizes(lens: Ints, counts: Ints, topology: Topology, limits: Limits | None) -> None:
    """Refuse a sequence that no bag can hold.

    Raises:
        PlanError: Names the rank, the sequence, the limit and by how much it misses.
    """
    if limits is None or limits.tokens is None or not lens.size:
        return
    room = limits.tokens * int(topology.bag_sizes.max())
    worst = int(lens.argmax())
    if lens[worst] > room:
        rank, place = source_of(worst, counts)
        raise PlanError(
            f"rank {rank}, sequence {place}: {lens[worst]} tokens miss the limit of the largest "
            f"bag, {room} ({limits.tokens} a rank), by {lens[worst] - room}: use a larger bag, "
            "raise the limit, or shorten the sequence"
        )
