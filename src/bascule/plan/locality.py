"""Fewer tokens on the wire: bags relabelled, and sequences kept where they were loaded.

Equal bags may trade places without any load changing, so a decision is first *relabelled*: each
bag takes the place where most of its tokens are at home already. Within a tolerance, sequences may
then also stay although another bag is emptier.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from bascule.plan.costs.hardware import Cluster
from bascule.plan.costs.prices import Decision, Prices, decide
from bascule.plan.limits import Limits
from bascule.plan.routes import Ints
from bascule.plan.solver.solve import assign
from bascule.plan.topology.spec import Topology

Floats = npt.NDArray[np.float64]

_MAX_EXACT = 256
"""Most equal bags that are relabelled optimally; the assignment problem is cubic."""

_MAX_SEARCHED = 256
"""Most sequences that the solver brings home one by one."""

_RELEASED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Shares of a bag's time that are freed, until what is freed fits elsewhere."""

_SAME = 1.0 + 1e-4
"""Makespans this close are certified to be equally good."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where sequences were loaded.

    Attributes:
        ranks: (num_seqs,) rank that loaded each sequence.
        lens: (num_seqs,) tokens.
        topology: The bags.
        cluster: Tells which ranks share a node; None if all do.
    """

    ranks: Ints
    lens: Ints
    topology: Topology
    cluster: Cluster | None

    @property
    def home(self) -> Ints:
        """(num_seqs,) bag of the rank that loaded each sequence."""
        return self.topology.bag_of_rank[self.ranks]

    @property
    def has_nodes(self) -> bool:
        """Whether leaving a rank may mean leaving a node."""
        return self.cluster is not None and self.cluster.num_nodes > 1

    def away(self, bag_of: Ints) -> tuple[float, float]:
        """Tokens that leave their node, and tokens that leave their rank (up to remainders)."""
        nodes, ranks = self._leaving(bag_of)
        return float(nodes.sum()), float(ranks.sum())

    def away_each(self, bag_of: Ints) -> Floats:
        """(num_seqs,) tokens that leave their node; those that leave their rank break ties."""
        nodes, ranks = self._leaving(bag_of)
        return nodes + ranks / (2.0 * self.lens.sum() + 1.0)

    def _leaving(self, bag_of: Ints) -> tuple[Floats, Floats]:
        ranks = np.where(
            self.home == bag_of, self.lens - self.lens / self.topology.bag_sizes[bag_of], self.lens
        )
        nodes = np.zeros(self.lens.size)
        if self.cluster is not None:
            share = node_shares(self.topology, self.cluster)
            nodes = self.lens * (1.0 - share[bag_of, self.ranks // self.cluster.ranks_per_node])
        return nodes, ranks.astype(np.float64)


def node_shares(topology: Topology, cluster: Cluster) -> Floats:
    """(num_bags, num_nodes) share of each bag's ranks in each node."""
    nodes = np.arange(topology.num_ranks) // cluster.ranks_per_node
    shares = np.zeros((topology.num_bags, cluster.num_nodes))
    np.add.at(shares, (topology.bag_of_rank, nodes), 1.0)
    return shares / topology.bag_sizes[:, None]


def bring_home(
    decision: Decision,
    prices: Prices,
    source: Source,
    limits: Limits | None,
    tolerance: float | None,
) -> Decision:
    """The same makespan, or one within the tolerance, with fewer tokens away from home.

    Args:
        decision: The earliest that was found.
        prices: What it was found with.
        source: Where the sequences were loaded.
        limits: What a rank can hold.
        tolerance: None only relabels equal bags, and moves nothing where the batch as loaded ends
            as early; 0.01 accepts a makespan 1 % above the one found.
    """
    if not source.lens.size or prices.sizes.size == 1:
        return decision
    good_enough = max(decision.makespan, decision.lower_bound * _SAME)
    if _legal(prices, source.home, limits, good_enough):
        return _with(decision, prices, source.home)
    found = [relabel(decision.bag_of, prices, source)]
    if tolerance is not None:
        ceiling = good_enough * (1.0 + tolerance)
        homely = _stay(decision.bag_of, prices, source, limits, ceiling)
        if homely is not None and _legal(prices, homely, limits, ceiling):
            found += [homely, relabel(homely, prices, source)]
    return _with(decision, prices, min(found, key=source.away))


def _with(decision: Decision, prices: Prices, bag_of: Ints) -> Decision:
    loads = prices.loads(bag_of)
    return Decision(bag_of, loads, min(decision.lower_bound, float(loads.max())))


def _legal(prices: Prices, bag_of: Ints, limits: Limits | None, ceiling: float) -> bool:
    if float(prices.loads(bag_of).max()) > ceiling:
        return False
    if limits is not None and limits.tokens is not None:
        held = np.bincount(bag_of, prices.lens, prices.sizes.size)
        if (held > float(limits.tokens) * prices.sizes).any():
            return False
    if limits is not None and limits.items is not None:
        return int(np.bincount(bag_of).max()) <= limits.items
    return True


def relabel(bag_of: Ints, prices: Prices, source: Source) -> Ints:
    """Permute bags of equal size, wires and carried load so that most tokens stay at home.

    Tokens that stay in their node count before those that stay on their rank. Optimal up to a few
    hundred equal bags; beyond, pairs that suit each other best are matched first.
    """
    alike = np.stack([prices.sizes, prices.kinds, prices.carried], axis=1)
    if (alike == alike[0]).all():
        groups = [np.arange(prices.sizes.size)]
    else:
        group_of = np.unique(alike, axis=0, return_inverse=True)[1].ravel()
        groups = [np.flatnonzero(group_of == group) for group in range(int(group_of.max()) + 1)]
    label = np.arange(prices.sizes.size)
    for bags in groups:
        if 1 < bags.size <= _MAX_EXACT:
            rows, columns = linear_sum_assignment(_gains(bag_of, bags, source), maximize=True)
            label[bags[rows]] = bags[columns]
        elif bags.size > 1:
            label[bags] = _match(bag_of, bags, source)
    return label[bag_of]


def _gains(bag_of: Ints, bags: Ints, source: Source) -> Floats:
    """(num_bags, num_bags) tokens that stay if the bag of a row takes the place of a column."""
    num_bags, num = source.topology.num_bags, bags.size
    row_of = np.full(num_bags, -1)
    row_of[bags] = np.arange(num)
    row, column = row_of[bag_of], row_of[source.home]
    there = (row >= 0) & (column >= 0)
    tokens = np.bincount(row[there] * num + column[there], source.lens[there], num * num)
    gains: Floats = tokens.reshape(num, num).astype(np.float64)
    if not source.has_nodes or source.cluster is None:
        return gains
    here, num_nodes = row >= 0, source.cluster.num_nodes
    node = source.ranks[here] // source.cluster.ranks_per_node
    by_node = np.bincount(row[here] * num_nodes + node, source.lens[here], num * num_nodes)
    shares = node_shares(source.topology, source.cluster)[bags]
    return by_node.reshape(num, num_nodes) @ shares.T + gains / (2.0 * source.lens.sum() + 1.0)


def _match(bag_of: Ints, bags: Ints, source: Source) -> Ints:
    """Places for many equal bags: in rounds, pairs that are each other's best choice."""
    num_bags = source.topology.num_bags
    member = np.zeros(num_bags, dtype=bool)
    member[bags] = True
    home = source.home
    useful = member[bag_of] & member[home]
    pairs, place = np.unique(bag_of[useful] * num_bags + home[useful], return_inverse=True)
    gain = np.bincount(place.ravel(), source.lens[useful], pairs.size)
    order = np.argsort(-gain, kind="stable")
    rows, columns = pairs[order] // num_bags, pairs[order] % num_bags
    label = np.full(num_bags, -1)
    taken = np.zeros(num_bags, dtype=bool)
    while rows.size:
        first_row, first_column = np.zeros((2, rows.size), dtype=bool)
        first_row[np.unique(rows, return_index=True)[1]] = True
        first_column[np.unique(columns, return_index=True)[1]] = True
        best = first_row & first_column
        label[rows[best]] = columns[best]
        taken[columns[best]] = True
        free = (label[rows] < 0) & ~taken[columns]
        rows, columns = rows[free], columns[free]
    label[bags[label[bags] < 0]] = bags[~taken[bags]]
    return label[bags]


def _stay(
    bag_of: Ints, prices: Prices, source: Source, limits: Limits | None, ceiling: float
) -> Ints | None:
    """Sequences at home as far as the ceiling allows; None if nothing was found."""
    few = source.lens.size <= _MAX_SEARCHED
    if few and prices.work.shape[0] == 1:
        return _stay_exactly(bag_of, prices, source, limits, ceiling)
    if limits is not None and limits != Limits():
        return None
    if few:
        return _pulled(relabel(bag_of, prices, source), prices, source, ceiling)
    return _stay_mostly(prices, source, ceiling)


def _pulled(bag_of: Ints, prices: Prices, source: Source, ceiling: float) -> Ints:
    """Longest first, each sequence makes the move or swap at true prices that saves most tokens.

    O(num_seqs * (num_seqs + num_bags)); for bags of several kinds.
    """
    num_bags, every = prices.sizes.size, np.arange(bag_of.size)
    away = np.stack([source.away_each(np.full(bag_of.size, bag)) for bag in range(num_bags)])
    times = prices.work[prices.kinds] / prices.sizes[:, None]
    bag_of, loads = bag_of.copy(), prices.loads(bag_of)
    for item in np.argsort(-source.lens, kind="stable").tolist():
        here = int(bag_of[item])
        bags = np.append(bag_of, np.arange(num_bags))  # swaps, then moves
        gone = np.append(times[bag_of, every], np.zeros(num_bags))
        back = np.append(times[here], np.zeros(num_bags))
        gain = away[here, item] - away[bags, item]
        gain[: every.size] += away[bag_of, every] - away[here]
        left = loads[here] - times[here, item] + back
        there = loads[bags] - gone + times[bags, item]
        gain[(np.maximum(left, there) > ceiling) | (bags == here)] = 0.0
        best = int(gain.argmax())
        if gain[best] > 0.0:
            loads[here], loads[bags[best]] = left[best], there[best]
            bag_of[item] = bags[best]
            if best < every.size:
                bag_of[best] = here
    return bag_of


def _stay_exactly(
    bag_of: Ints, prices: Prices, source: Source, limits: Limits | None, ceiling: float
) -> Ints | None:
    best = float(prices.loads(bag_of).max())
    found = assign(
        prices.work[0],
        speeds=prices.sizes,
        limits=limits,
        sizes=prices.lens,
        home=source.home,
        home_tolerance=max(ceiling / best - 1.0, 0.0) if best > 0 else 0.0,
        carried_loads=prices.carried,
    )
    return found.bin_of


def _stay_mostly(prices: Prices, source: Source, ceiling: float) -> Ints | None:
    """Keep a part of each bag, and place the rest anew; more of it until it works.

    The longest are kept, as short ones fill what is left; or the shortest, as long ones save most
    time a token moved. Of both, what leaves more tokens at home counts.
    """
    work = prices.work[prices.kinds[source.home], np.arange(source.lens.size)]
    found = (_keep_first(prices, source, ceiling, work, rank) for rank in (-work, work))
    return min((x for x in found if x is not None), key=source.away, default=None)


def _keep_first(
    prices: Prices, source: Source, ceiling: float, work: Floats, rank: Floats
) -> Ints | None:
    """The sequences of lowest rank kept in each bag, as many as leave the others a place."""
    home = source.home
    order = np.lexsort((rank, home))
    starts = np.searchsorted(home[order], np.arange(prices.sizes.size))
    sums = np.concatenate([np.zeros(1), np.cumsum(work[order])])
    within = sums[1:] - sums[starts][home[order]]
    for share in _RELEASED:
        room = np.maximum((1.0 - share) * ceiling - prices.carried, 0.0) * prices.sizes
        kept = np.zeros(home.size, dtype=bool)
        kept[order] = within <= room[home[order]]
        load = np.bincount(home[kept], work[kept], prices.sizes.size) / prices.sizes
        free = replace(
            prices,
            lens=prices.lens[~kept],
            work=prices.work[:, ~kept],
            carried=prices.carried + load,
        )
        found = decide("lpt", free, None)
        if found.makespan <= ceiling:
            bag_of = home.copy()
            bag_of[~kept] = found.bag_of
            return bag_of
    return None
