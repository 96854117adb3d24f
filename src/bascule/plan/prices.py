"""What each sequence costs on each kind of bag, and which bag computes it.

Bags of one *kind* have the same size and the same wires. Without a cluster a bag of P ranks simply
takes a P-th of a cost, so that there is one kind, whatever the sizes. With one, a sequence has a
price a kind: bags of different size are unrelated machines.

A bag of P = G * R ranks with a ring takes each rank, for a sequence of L tokens,

    compute(L) / P  +  all_to_alls(L / R, G)  +  (R - 1) * max(0, exchange - round)

seconds: the all-to-alls (see `Cluster`) of the L / R tokens of its G ranks; and for each pass of
keys and values to the next rank, 2 * 2 bytes of d / G values a token and layer for L / R tokens,
what is longer than the attention that hides it: the R-th part of a rank's attention, a round. A
sequence hides only its own passes, so that prices add up; where one bag holds several, the long
ones in fact hide some of the others' too. Source: the latency model of db-SP, ring attention as
`(R - 1) * max(compute, exchange) + compute`, double-buffered as in FastUSP.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import amounts, of_type, shown
from bascule.plan.costs import Cost, TransformerCost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.machine import BYTES_PER_VALUE, Cluster
from bascule.plan.sequences import Batch, source_of
from bascule.plan.solver.portfolio import MOST_IMPROVED, solve
from bascule.plan.solver.problem import Problem, build_problem
from bascule.plan.solver.solve import knapsack
from bascule.plan.topology import Topology

_MOST_WORK = 1e300
"""Largest sum of costs: what follows stays finite."""

_SLOWEST = 1e-3
"""Speed below which a rank is taken for broken; as many times faster, the others for wrong."""

_RING_VALUES = 2
"""Of the width of the model, what a token sends around a ring: its keys and values."""


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """What ranks are like before a plan.

    Attributes:
        carried: (num_ranks,) cost that each has already.
        speeds: (num_ranks,) of each, 1 where a cost takes as long as the cost model says.
    """

    carried: Floats
    speeds: Floats

    @classmethod
    def of(
        cls,
        num_ranks: int,
        carried_loads: npt.ArrayLike | None = None,
        speeds: npt.ArrayLike | None = None,
    ) -> "RankState":
        """As given to `plan_batch`.

        Raises:
            ConfigError: There is not one legal number a rank.
        """
        carried, fast = np.zeros(num_ranks), np.ones(num_ranks)
        if carried_loads is not None:
            carried = amounts("carried_loads", carried_loads)
            if carried.size != num_ranks:
                raise ConfigError(
                    f"carried_loads of shape {carried.shape}: give a finite cost of at least 0 "
                    f"for each of the {num_ranks} ranks"
                )
        if speeds is not None:
            fast = amounts("speeds", speeds)
            is_legal = ((fast >= _SLOWEST) & (fast <= 1 / _SLOWEST)).all()
            if fast.size != num_ranks or not is_legal:
                raise ConfigError(
                    f"speeds={shown(fast.tolist())}: give one from {_SLOWEST} to {1 / _SLOWEST:g} "
                    f"for each of the {num_ranks} ranks; 1 is the speed that the cost model knows"
                )
        return cls(carried, fast)

    def bag_carried(self, topology: Topology) -> Floats:
        """(num_bags,) cost carried by the slowest rank of each bag, for which the others wait."""
        return np.maximum.reduceat(self.carried, topology.first_ranks)

    def bag_speeds(self, topology: Topology) -> Floats:
        """(num_bags,) ranks of each bag, times the speed of the slowest of them."""
        slowest: Floats = np.minimum.reduceat(self.speeds, topology.first_ranks)
        return slowest * topology.bag_sizes


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Sequences with a price a kind of bag, and the bags.

    Attributes:
        lens: (num_seqs,) tokens.
        sizes: (num_bags,) ranks of each bag.
        speeds: (num_bags,) the same, times the speed of its slowest rank.
        kinds: (num_bags,) kind of each bag.
        compute: (num_seqs,) cost of each sequence on one rank.
        ulysses: (num_kinds, num_seqs) seconds in all-to-alls of each on a bag, times its ranks.
        ring: (num_kinds, num_seqs) the same of keys and values that travel without being hidden.
        carried: (num_bags,) cost of each bag before any sequence: carried loads and launches.
        host: (num_kinds,) seconds of the host for each sequence of a bag.
    """

    lens: Ints
    sizes: Ints
    speeds: Floats
    kinds: Ints
    compute: Floats
    ulysses: Floats
    ring: Floats
    carried: Floats
    host: Floats

    @property
    def work(self) -> Floats:
        """(num_kinds, num_seqs) cost of each sequence on a bag of each kind, times its ranks."""
        return self.compute + self.ulysses + self.ring

    def loads(self, bag_of: Ints) -> Floats:
        """(num_bags,) true cost of each bag."""
        work = self.work[self.kinds[bag_of], np.arange(bag_of.size)]
        return self.carried + np.bincount(bag_of, work, self.sizes.size) / self.speeds

    def exposed_host(self, bag_of: Ints) -> Floats:
        """(num_bags,) seconds by which the host of each bag is behind the compute it launches.

        An assignment that is priced by sequences does not see it: it is no sum over them.
        """
        host = np.bincount(bag_of, minlength=self.sizes.size) * self.host[self.kinds]
        compute = np.bincount(bag_of, self.compute, self.sizes.size) / self.speeds
        return np.where(host > 0, np.maximum(host - compute, 0.0), 0.0)

    def problem(self, limits: Limits | None) -> Problem:
        """The sequences as items and the bags as bins, within limits on tokens and items.

        Raises:
            PlanError: The sequences together exceed the limits.
        """
        return build_problem(
            self.work,
            None,
            speeds=self.speeds,
            limits=limits,
            sizes=self.lens,
            carried_loads=self.carried,
            kind_of=self.kinds,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The bag of every sequence, the cost of every bag, and what no decision can beat.

    Attributes:
        problem: What was decided: sequences as items, bags as bins.
        bag_of: (num_seqs,) bag of each sequence.
        loads: (num_bags,) cost of each bag.
        lower_bound: No decision has a smaller makespan.
    """

    problem: Problem
    bag_of: Ints
    loads: Floats
    lower_bound: float

    @staticmethod
    def of(problem: Problem, bag_of: Ints, bound: float) -> "Decision":
        """A decision with its loads."""
        loads = problem.loads(bag_of)
        return Decision(problem, bag_of, loads, min(bound, float(loads.max())))

    @property
    def makespan(self) -> float:
        """Cost of the slowest bag."""
        return float(self.loads.max())


def price(
    batch: Batch,
    topology: Topology,
    cost: Cost,
    cluster: Cluster | None,
    ranks: RankState,
) -> Prices:
    """The prices of a batch on the bags of a topology.

    A slow rank is slow in all that its bag does, also on wires.

    Raises:
        ConfigError: The cost model gives an illegal cost, or no width although wires need one.
    """
    lens, sizes, carried = batch.lens, topology.bag_sizes, ranks.bag_carried(topology)
    speeds = ranks.bag_speeds(topology)
    if cluster is None:
        costs = checked(evaluate(cost, lens, batch.num_pairs), lens, batch.counts)
        free, kind_of = np.zeros((1, lens.size)), np.zeros_like(sizes)
        return Prices(lens, sizes, speeds, kind_of, costs, free, free, carried, np.zeros(1))
    cluster.check_world(topology.num_ranks)
    seconds = cluster.compute_seconds(cost, lens, batch.num_pairs)
    compute = checked(seconds, lens, batch.counts)
    rows, kind_of = np.unique(_kind_rows(topology, cluster), axis=0, return_inverse=True)
    kinds = [_Kind(*row) for row in rows.tolist()]
    launch = np.array([kind.launch_seconds(cost, cluster) for kind in kinds])
    kind_of = kind_of.ravel()
    ulysses = np.stack([kind.ulysses_work(cost, cluster, batch) for kind in kinds])
    ring = np.stack([kind.ring_work(cost, cluster, batch) for kind in kinds])
    host = np.array([cluster.host_seconds(cost, kind.size // kind.ring) for kind in kinds])
    carried = carried + launch[kind_of]
    return Prices(lens, sizes, speeds, kind_of, compute, ulysses, ring, carried, host)


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

    def ulysses_work(self, cost: Cost, cluster: Cluster, batch: Batch) -> Floats:
        """(num_seqs,) seconds in all-to-alls of each sequence, times the ranks of the bag."""
        degree = self.size // self.ring
        per_token = degree * cluster.wire_seconds(cost, degree, self.ranks_in_node)
        return per_token * batch.lens.astype(np.float64)

    def ring_work(self, cost: Cost, cluster: Cluster, batch: Batch) -> Floats:
        """(num_seqs,) seconds that keys and values travel without being hidden, times the ranks."""
        if self.ring == 1:
            return np.zeros(batch.lens.size)
        model, lens = _transformer(cost), batch.lens
        speed = cluster.intra_bytes_per_s if self.is_in_node else cluster.inter_bytes_per_s
        num_bytes = BYTES_PER_VALUE * _RING_VALUES * model.d_model * model.num_layers
        linear = cluster.compute_seconds(replace(model, gamma=0.0), lens)
        attention = cluster.compute_seconds(model, lens, batch.num_pairs) - linear
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


def decide(
    planner: str, prices: Prices, limits: Limits | None, *, quickly: bool = False
) -> Decision:
    """A bag for every sequence, so that the last bag finishes early.

    Args:
        planner: As for `plan_batch`.
        prices: Of the sequences on all kinds of bags.
        limits: As for `plan_batch`.
        quickly: Whether a makespan will do that a plan may come below by a little.

    Raises:
        ConfigError: There is no such planner, or it keeps no limits.
        PlanError: The limits cannot be kept.
    """
    of_type("planner", planner, str, '"lpt" or "knapsack"')
    if planner == "lpt":
        problem = prices.problem(limits)
        found = solve(problem, num_improved=1 if quickly else MOST_IMPROVED)
        return Decision.of(problem, found.bin_of, found.bound)
    if planner != "knapsack":
        raise ConfigError(f'planner {shown(planner)}: choose "lpt" or "knapsack"')
    if limits is not None and limits != Limits():
        raise ConfigError(f'planner "knapsack" cannot keep {limits}: use "lpt"')
    # The paper's greedy knows one cost a sequence: the least that it can have.
    least = prices.work.min(axis=0)
    found = knapsack(least, speeds=prices.speeds, carried_loads=prices.carried)
    return Decision.of(prices.problem(None), found.bin_of, found.lower_bound)


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
