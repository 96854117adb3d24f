"""Predict what each sequence costs on each kind of bag.

Bags of one *kind* have the same size and the same links. Without a cluster, P ranks each have 1/P
of a cost, and only uneven shares of heads make further kinds. With a cluster, each kind has its own
cost (`Cluster.sequence_seconds`). A sequence hides only its own ring exchanges, so costs add up.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import amounts, shown, source_of
from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import BagShape, Cluster, Seconds
from bascule.machine.costs import Cost, evaluate, heads_of, in_bag
from bascule.plan.limits import Limits
from bascule.plan.offer import Offer
from bascule.plan.solver.problem import Problem, build_problem
from bascule.plan.topology import Topology
from bascule.quantities import number

_SLOWEST = 1e-3  # least speed of a rank that is not broken; 1 / _SLOWEST is the highest


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """(num_ranks,) costs that ranks already carry, and speeds, 1 if the cost model is right."""

    carried: Floats
    speeds: Floats

    @classmethod
    def of(
        cls,
        num_ranks: int,
        initial_loads: npt.ArrayLike | None = None,
        speeds: npt.ArrayLike | None = None,
    ) -> "RankState":
        """Check the initial loads and speeds that users give."""
        carried, fast = np.zeros(num_ranks), np.ones(num_ranks)
        if initial_loads is not None:
            carried = amounts("initial_loads", initial_loads)
            if carried.size != num_ranks:
                needed = f"give one cost per rank, {num_ranks} in all"
                raise ConfigError(f"initial_loads of shape {carried.shape}: {needed}")
        if speeds is not None:
            fast = amounts("speeds", speeds)
            is_legal = ((fast >= _SLOWEST) & (fast <= 1 / _SLOWEST)).all()
            if fast.size != num_ranks or not is_legal:
                wrong = f"speeds={shown(fast.tolist())}: give one for each of the {num_ranks} ranks"
                raise ConfigError(f"{wrong}, {_SLOWEST} to {number(1 / _SLOWEST)}; 1 is usual")
        return cls(carried, fast)


@dataclass(frozen=True, eq=False)
class Prices:
    """The bags, and the cost of each sequence on each kind of bag, times the bag's ranks."""

    lens: Ints  # (num_seqs,) tokens
    topology: Topology  # the bags
    ranks: RankState
    speeds: Floats  # (num_bags,) ranks, times the speed of the slowest
    kinds: Ints  # (num_bags,) kind of each bag
    # (3, num_kinds, num_seqs) on one rank: compute, all-to-alls, and a ring's exchanges that
    # attention does not hide.
    parts: Floats
    carried: Floats  # (num_bags,) before any sequence: carried loads and launches
    host: Floats  # (num_kinds,) seconds of the host for each sequence of a bag

    @cached_property
    def work(self) -> Floats:
        """(num_kinds, num_seqs) costs of the sequences on a bag of each kind, times its ranks."""
        return self.parts.sum(axis=0)

    def loads(self, bag_of: Ints) -> Floats:
        """Return (num_bags,) costs of the bags under an assignment."""
        work = self.work[self.kinds[bag_of], np.arange(bag_of.size)]
        return self.carried + np.bincount(bag_of, work, self.speeds.size) / self.speeds

    def exposed_host(self, bag_of: Ints) -> Floats:
        """Return (num_bags,) seconds by which the host lags behind; it is no sum over sequences."""
        host = np.bincount(bag_of, minlength=self.speeds.size) * self.host[self.kinds]
        compute = self.parts[0, self.kinds[bag_of], np.arange(bag_of.size)]
        compute = np.bincount(bag_of, compute, self.speeds.size) / self.speeds
        return np.where(host > 0, np.maximum(host - compute, 0.0), 0.0)

    def problem(self, limits: Limits | None) -> Problem:
        """Return the assignment problem: sequences are items, bags are bins."""
        return build_problem(
            self.work,
            self.speeds,
            carried=self.carried,
            kind_of=self.kinds,
            limits=limits and limits.of_bags(self.topology.first_ranks, self.topology.num_ranks),
            sizes={"": self.lens.astype(np.float64)},
            ranks=self.topology.bag_sizes.astype(np.float64),
        )


def price(
    offer: Offer, topology: Topology, cost: Cost, cluster: Cluster | None, ranks: RankState
) -> Prices:
    """Predict the costs of a microbatch on a topology's bags; a slow rank slows its whole bag."""
    lens, num_heads = offer.lens, heads_of(cost)
    bags = topology.for_heads(num_heads)
    if cluster is None:
        degrees = bags.bag_sizes // bags.ring_degrees
        uneven = np.where((num_heads or 0) % degrees, degrees, 1)
        degrees, kind_of = np.unique(uneven, return_inverse=True)
        kinds = list(map(BagShape, degrees.tolist()))
    else:
        cluster.check_world(topology.num_ranks)
        kinds, kind_of = kinds_of(bags, cluster)
    parts, (launch, host) = np.zeros((3, len(kinds), lens.size)), np.zeros((2, len(kinds)))
    for place, bag in enumerate(kinds):
        if cluster is None:
            seconds = Seconds(evaluate(in_bag(cost, bag.size), lens, offer.num_pairs))
        else:
            seconds = cluster.sequence_seconds(cost, bag, lens, offer.num_pairs)
            host[place] = cluster.host_seconds(cost, bag)
        parts[0, place] = checked(np.asarray(seconds.compute_s), offer)
        parts[1, place], parts[2, place] = seconds.heads_s, seconds.ring_s
        launch[place] = seconds.launch_s
    # All ranks of a bag wait for the rank that carries most.
    carried: Floats = np.maximum.reduceat(ranks.carried, topology.first_ranks) + launch[kind_of]
    slowest: Floats = np.minimum.reduceat(ranks.speeds, topology.first_ranks)
    speeds = slowest * topology.bag_sizes
    return Prices(lens, topology, ranks, speeds, kind_of, parts, carried, host)


def kinds_of(topology: Topology, cluster: Cluster) -> tuple[list[BagShape], Ints]:
    """Return the kinds of bags, by their worst Ulysses group, and the (num_bags,) kinds."""
    groups, sizes = topology.ulysses_groups, topology.bag_sizes
    first_groups = groups.bag_of_rank[topology.first_ranks]
    in_node = np.minimum.reduceat(_ranks_in_node(groups, cluster), first_groups)
    is_in_node = _ranks_in_node(topology, cluster) == sizes
    rows = np.stack([sizes, topology.ring_degrees, in_node, is_in_node], axis=1)
    kinds, kind_of = np.unique(rows, axis=0, return_inverse=True)
    return [BagShape(*row) for row in kinds.tolist()], kind_of.ravel()


def _ranks_in_node(topology: Topology, cluster: Cluster) -> Ints:
    """Return (num_bags,) the fewest ranks that a bag has in one of its nodes."""
    first, sizes, per_node = topology.first_ranks, topology.bag_sizes, cluster.ranks_per_node
    last = first + sizes - 1
    at_ends = np.minimum(per_node - first % per_node, last % per_node + 1)
    return np.where(first // per_node == last // per_node, sizes, at_ends)


def checked(costs: Floats, offer: Offer) -> Floats:
    """Return the costs that a user's model gave; refuse costs that are not finite or below 0."""
    legal = np.isfinite(costs) & (costs >= 0)
    if not legal.all():
        bad = int(np.argmin(legal))
        rank, place = source_of(bad, offer.counts[0])
        wrong = f"the cost model gave {costs[bad]} for {offer.lens[bad]} tokens"
        raise ConfigError(f"rank {rank}, sequence {place}: {wrong}; give finite costs >= 0")
    with np.errstate(over="ignore"):
        if costs.sum() > 1e300:  # later sums must stay finite
            raise ConfigError(f"costs up to {costs.max()} overflow when summed; use a larger unit")
    return costs


def check_sizes(offer: Offer, topology: Topology, limits: Limits | None) -> None:
    """Refuse a sequence that no bag can hold."""
    if limits is None or limits.tokens is None or not offer.lens.size:
        return
    of_bags = limits.of_bags(topology.first_ranks, topology.num_ranks)
    each = of_bags.room("tokens", topology.num_bags).astype(np.int64)
    rooms, worst = each * topology.bag_sizes, int(offer.lens.argmax())
    room, fewest = int(rooms.max()), int(each[rooms.argmax()])
    if (longest := int(offer.lens[worst])) > room:
        rank, place = source_of(worst, offer.counts[0])
        raise PlanError(
            f"rank {rank}, sequence {place}: {longest} tokens exceed the limit of the largest bag, "
            f"{room} ({fewest} per rank), by {longest - room}: use a larger bag, or raise the limit"
        )
