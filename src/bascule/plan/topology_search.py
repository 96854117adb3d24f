"""Search for the topology on which a batch ends first, among aligned bags of 2^k ranks.

A unit is a few nodes. A bound, for which sequences may be split at will, ranks all sets of bags
that fill a unit. The solver plans the most promising, until no next bound beats the best plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats, Ints
from bascule.checks import listed, of_type
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import BagShape, Cluster
from bascule.machine.costs import Cost, heads_of
from bascule.plan import metrics
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.offer import Offer, offer_of
from bascule.plan.prices import RankState, check_sizes, checked, kinds_of, price
from bascule.plan.solver.portfolio import solve
from bascule.plan.solver.problem import Assignment
from bascule.plan.topology import Topology
from bascule.quantities import number

_UNIT_RANKS = 32  # most ranks in a unit of several nodes
_MAX_SOLVED = 8  # most candidates that the solver plans, for a batch and for a ranking
_WORTH = 5e-4  # least share of the makespan for which the search goes on
_TIE = 0.005  # share of the seconds below which no prediction tells topologies apart
_HALVINGS = 24  # of the interval in which a bound lies
_MAX_SLOTS = 64  # longest sequences that are compared with the slots of bags
_MAX_NODES = 512  # most nodes among which bags are swapped


@dataclass(frozen=True, slots=True)
class RankedTopology:
    """A unit of bags, with predictions averaged over the batches."""

    spec: str
    seconds: float  # makespan of a forward pass, with wires, launches and exposed host
    imbalance: float  # max over mean of the ranks' seconds
    gap: float  # how far a batch may be from the best on these bags: makespan / bound - 1
    reasons: tuple[str, ...]  # the sequences that forced each size of bags, in words


@dataclass(frozen=True, slots=True)
class TopologyRanking:
    """Unit topologies, fastest first; within 0.5 %, fewest bags first.

    Attributes:
        best: The first topology, over the whole cluster.
        rows: The topologies that were planned in full.
        num_candidates: Number of topologies that were ranked by their bound.
    """

    best: Topology
    rows: tuple[RankedTopology, ...]
    num_candidates: int


def suggest_topology(
    batches: Sequence[Sequence[npt.ArrayLike] | Offer],
    cost: Cost,
    cluster: Cluster,
    *,
    limits: Limits | None = None,
) -> TopologyRanking:
    """Rank the topologies of a cluster for batches, with all that have bags of only one size.

    Args:
        batches: Sequences of each batch, as `plan_batch` accepts them.
        cost: Predicts the cost of a sequence on one rank.
        cluster: The machines.
        limits: Hard limits of a rank; topologies that cannot keep them are left out.

    Raises:
        ConfigError: No batch, or a wrong number of ranks. PlanError: No topology keeps the limits.
    """
    of_type("cluster", cluster, Cluster, "a Cluster(num_nodes, ranks_per_node, ..)")
    limits = in_tokens(limits, cost, cluster)
    offers: list[Offer] = []
    for batch in listed("batches", batches):
        if not isinstance(batch, Offer):
            cluster.check_world(len(listed("sequence lengths", batch)))
            batch = offer_of(batch, cluster.num_ranks)
        offers.append(batch)
    if not offers:
        raise ConfigError("no batches to rank topologies for: give at least one")
    units = _candidates(cluster)
    bounds = np.mean([_bounds(batch, cost, cluster, units, 0.0) for batch in offers], axis=0)
    order = np.argsort(bounds, kind="stable")
    even = np.flatnonzero((units > 0).sum(axis=1) == 1)
    rows: list[RankedTopology] = []
    error = PlanError("no candidate")
    for candidate in np.unique(np.concatenate([even, order[:_MAX_SOLVED]])).tolist():
        try:
            rows.append(_rank(_topology(units[candidate], cluster), offers, cost, cluster, limits))
        except PlanError as failure:
            error = failure
    if not rows:
        raise error
    rows = _in_order(rows)
    best = Topology.parse(rows[0].spec, world_size=cluster.num_ranks)
    return TopologyRanking(best, tuple(rows), len(units))


def _in_order(rows: Sequence[RankedTopology]) -> list[RankedTopology]:
    """Sort rows: of those tied with the fastest left, the one with the fewest bags comes next."""
    left, order = sorted(rows, key=lambda row: row.seconds), list[RankedTopology]()
    while left:
        tied = [row for row in left if row.seconds <= left[0].seconds * (1.0 + _TIE)]
        order.append(min(tied, key=lambda row: (Topology.parse(row.spec).num_bags, row.seconds)))
        left.remove(order[-1])
    return order


def _rank(
    topology: Topology,
    batches: Sequence[Offer],
    cost: Cost,
    cluster: Cluster,
    limits: Limits | None,
) -> RankedTopology:
    idle = RankState.of(topology.num_ranks)
    decisions: list[Assignment] = []
    loads: list[Floats] = []
    for batch in batches:
        prices = price(batch, topology, cost, cluster, idle)
        decisions.append(decision := solve(prices.problem(limits)))
        loads.append(decision.loads + prices.exposed_host(decision.bin_of))
    imbalances = [metrics.imbalance(of_bags[topology.bag_of_rank]) for of_bags in loads]
    sizes = np.unique(topology.bag_sizes)[::-1].tolist()
    return RankedTopology(
        spec=str(topology.for_heads(heads_of(cost))),
        seconds=float(np.mean([of_bags.max() for of_bags in loads])),
        imbalance=float(np.mean(imbalances)),
        gap=float(np.mean([decision.gap for decision in decisions])),
        reasons=tuple(_reason(size, topology, batches, decisions, cost, cluster) for size in sizes),
    )


def _reason(
    size: int,
    topology: Topology,
    batches: Sequence[Offer],
    decisions: Sequence[Assignment],
    cost: Cost,
    cluster: Cluster,
) -> str:
    """Name the sequences on bags of a size that end too late on the next smaller one."""
    if size == 1:
        return "g1: single ranks, no communication"
    smaller, forced = size // 2, list[int]()
    (bag,) = _kinds([smaller], cost, cluster)
    for batch, decision in zip(batches, decisions, strict=True):
        lens = batch.lens[topology.bag_sizes[decision.bin_of] == size]
        each = cluster.sequence_seconds(cost, bag, lens)
        taken = (each.compute_s + each.heads_s + each.ring_s) / smaller
        forced += lens[taken > decision.makespan].tolist()
    ranks = "1 rank" if smaller == 1 else f"{smaller} ranks"
    if not forced:
        return f"g{size}: no sequence needs such bags; they even out the loads"
    often = number(len(forced) / len(batches))
    lens = " to ".join(f"{length:,}" for length in sorted({min(forced), max(forced)}))
    return f"g{size}: sequences of {lens} tokens ({often} per batch) would end too late on {ranks}"


def choose_topology(
    batch: Offer, cost: Cost, cluster: Cluster, limits: Limits | None, ranks: RankState
) -> Topology:
    """Choose the bags of one batch; each node gets the set that suits what it loaded."""
    units = _candidates(cluster)
    largest = int(units.sum(axis=1).argmin())
    check_sizes(batch, _topology(units[largest], cluster), limits)
    bounds = _bounds(batch, cost, cluster, units, float(ranks.carried.mean()))
    solved: list[tuple[float, Topology, Ints]] = []
    shortest, error = math.inf, PlanError("no candidate")
    order = np.argsort(bounds, kind="stable").tolist()
    # Where no quick answer keeps the limits, the largest bags get all the time.
    for candidate, quickly in [*((candidate, True) for candidate in order), (largest, False)]:
        if len(solved) == _MAX_SOLVED or bounds[candidate] >= shortest * (1 - _WORTH):
            break
        if solved and not quickly:
            break
        topology = _topology(units[candidate], cluster)
        try:
            prices = price(batch, topology, cost, cluster, ranks)
            decision = solve(prices.problem(limits), quick=quickly)
        except PlanError as failure:
            error = failure
            continue
        solved.append((decision.makespan, topology, decision.bin_of))
        shortest = min(shortest, decision.makespan)
    if not solved:
        raise error
    _, topology, bag_of = min(solved, key=lambda answer: answer[0])
    if limits is None or limits.are_alike:  # otherwise a swapped bag might pass its limits
        topology = _settle(topology, bag_of, batch.owner, batch.lens, cluster)
    return topology.for_heads(heads_of(cost))


def _candidates(cluster: Cluster) -> Ints:
    """Return (num_candidates, K) numbers of bags of 1, 2, .. 2^(K - 1) ranks in a unit."""
    per_node, sizes = cluster.ranks_per_node, [1]
    while per_node % (sizes[-1] * 2) == 0:
        sizes.append(sizes[-1] * 2)
    most = max(_UNIT_RANKS // per_node, 1)
    num_nodes = max(n for n in range(1, most + 1) if cluster.num_nodes % n == 0)
    return np.array(_fillings(per_node * num_nodes, tuple(sizes)))


@lru_cache(maxsize=64)
def _fillings(num_ranks: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all numbers of bags by size that fill `num_ranks` ranks."""
    if len(sizes) == 1:
        return ((num_ranks,),)
    largest = sizes[-1]
    return tuple(
        (*rest, count)
        for count in range(num_ranks // largest + 1)
        for rest in _fillings(num_ranks - count * largest, sizes[:-1])
    )


def _topology(counts: Ints, cluster: Cluster) -> Topology:
    """Return the bags of a candidate, largest first, so that all of them are aligned."""
    bags = [(2**power, count) for power, count in enumerate(counts.tolist()) if count]
    return Topology.parse(Topology(tuple(reversed(bags))), world_size=cluster.num_ranks)


def _kinds(sizes: Sequence[int], cost: Cost, cluster: Cluster) -> list[BagShape]:
    """Return an aligned bag of each size, smallest first."""
    bags = Topology(tuple((size, 1) for size in sorted(sizes, reverse=True)))
    return kinds_of(bags.for_heads(heads_of(cost)), cluster)[0]


def _bounds(batch: Offer, cost: Cost, cluster: Cluster, units: Ints, carried: float) -> Floats:
    """Return (num_candidates,) lower bounds of the makespan, all bisected at once.

    A makespan is too short if sequences, cut at will, do not fit, or if the bags do not have k
    slots for sequences as long as the k-th longest, for any k.
    """
    sizes = np.left_shift(np.int64(1), np.arange(units.shape[1], dtype=np.int64))
    num_units = cluster.num_ranks // int((units[0] * sizes).sum())
    lens, pairs = batch.lens, batch.num_pairs
    compute_s = checked(cluster.compute_seconds(cost, lens, pairs), batch)
    order = np.argsort(-lens if pairs is None else -compute_s, kind="stable")
    kinds = _kinds(sizes.tolist(), cost, cluster)
    seconds_of = [cluster.sequence_seconds(cost, bag, lens, pairs) for bag in kinds]
    work = np.stack([s.compute_s + s.heads_s + s.ring_s for s in seconds_of])[:, order]
    before = carried + np.array([seconds.launch_s for seconds in seconds_of])
    sums = np.concatenate([np.zeros((sizes.size, 1)), np.cumsum(work, axis=1)], axis=1)
    bags = units * num_units
    low: Floats = np.where(bags > 0, before, 0.0).max(axis=1)
    high: Floats = low + sums[:, -1].max() / (bags * sizes).max(axis=1) + work.max(initial=0.0)
    for _ in range(_HALVINGS):
        middle: Floats = (low + high) / 2
        room = np.maximum(middle[:, None] - before, 0.0)
        fits = _fluid_fits(work, sums, bags, sizes * room) & _slots_fit(work, bags, sizes * room)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return low


def _fluid_fits(work: Floats, sums: Floats, bags: Ints, room: Floats) -> Bools:
    """Mark (num_candidates,) the candidates that hold the work, cut at will; largest bags first."""
    index = np.arange(sums.shape[1], dtype=np.float64)
    done = np.zeros(room.shape[0])  # sequences, the last one in part
    legal = np.ones(done.size, dtype=bool)
    for kind in reversed(range(room.shape[1])):
        longest = np.append(work[kind], 0.0)[done.astype(np.int64)]
        legal &= (bags[:, kind] == 0) | (longest <= room[:, kind] * (1 + 1e-12))
        reached: Floats = np.interp(done, index, np.asarray(sums[kind], dtype=np.float64))
        reached += bags[:, kind] * room[:, kind]
        ends = np.searchsorted(sums[kind], reached, side="right") - 1
        step = np.append(np.diff(sums[kind]), np.inf)[ends]
        part = np.divide(reached - sums[kind][ends], step, out=np.zeros_like(done), where=step > 0)
        done = np.minimum(np.maximum(ends + part, done), index[-1])
    return legal & (done >= index[-1])


def _slots_fit(work: Floats, bags: Ints, room: Floats) -> Bools:
    """Mark (num_candidates,) candidates with k slots for the k-th longest sequence, for all k."""
    longest = work[:, :_MAX_SLOTS]
    num = longest.shape[1]
    slots = np.zeros((bags.shape[0], num))
    for kind in range(bags.shape[1]):
        cost = np.maximum(longest[kind], np.finfo(np.float64).tiny)
        each = np.floor(room[:, kind, None] / cost * (1 + 1e-12))
        slots += bags[:, kind, None] * np.minimum(each, num)
    return np.all(slots >= np.arange(1.0, num + 1), axis=1)


def _settle(
    topology: Topology, bag_of: Ints, ranks: Ints, lens: Ints, cluster: Cluster
) -> Topology:
    """Put each set of bags that fills a node on the node that loaded most of its tokens."""
    from scipy.optimize import linear_sum_assignment

    if not 1 < cluster.num_nodes <= _MAX_NODES:
        return topology
    slot = topology.first_ranks // cluster.ranks_per_node
    pairs = slot[bag_of] * cluster.num_nodes + ranks // cluster.ranks_per_node
    gains = np.bincount(pairs, lens, cluster.num_nodes**2).reshape(cluster.num_nodes, -1)
    _, node_of_slot = linear_sum_assignment(gains, maximize=True)
    order = np.argsort(node_of_slot[slot], kind="stable")
    sizes = groupby(topology.bag_sizes[order].tolist())
    return Topology(tuple((size, len(list(same))) for size, same in sizes))
