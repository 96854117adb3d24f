"""Plans of items over the ranks that encode them; numpy only, the same on every rank."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.batching import ForwardPass, forward_passes
from bascule.machine.cluster import WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import Cost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.metrics import imbalance
from bascule.plan.offer import Offer
from bascule.plan.plan import weigh
from bascule.plan.solver.solve import assign

Trip = tuple[Ints, Ints, Ints]
"""Ids of items that move, the ranks that have them, and those that get them: (n,) each."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings of a call, alike on all ranks."""

    num_ranks: int
    # The first ranks that get the features, where all ranks have the same items. 0: each rank has
    # items of its own, and gets their features.
    num_getting: int = 0
    items_need_gradient: bool = False  # those of some rank do
    needs_gradient: bool = False  # an item or a parameter does
    at_once: int | None = None  # most items of one call of the module; None: any number
    is_aligned: bool = False  # every rank makes as many calls, as under FSDP


@dataclass(frozen=True, slots=True)
class Encoding:
    """The items that a step of a balanced encoder moved, or why none.

    Gain, seconds and bytes are those of the plan that was weighed, even if items then stay.
    """

    num_items: int  # of all ranks
    num_moved: int  # to another rank than their owner; all, where all ranks have the same items
    loads_as_given: tuple[float, ...]  # cost of the items of each rank, before any moves
    loads: tuple[float, ...]  # as encoded; in seconds with a cluster, else in the cost model's unit
    gain_s: float | None = None  # of the slowest rank, backward pass included; None without a price
    exchange_s: float | None = None  # more than without moving; None without a price
    exchange_bytes: int = 0  # of all ranks, more than without moving

    @property
    def loaded(self) -> float:
        """Imbalance (slowest rank over the mean) as the items were given."""
        return imbalance(np.array(self.loads_as_given))

    @property
    def balanced(self) -> float:
        """Imbalance as they were encoded."""
        return imbalance(np.array(self.loads))

    def __str__(self) -> str:
        priced = ""
        if self.gain_s is not None and self.exchange_s is not None:
            takes = f"{self.exchange_bytes / 1e6:.3g} MB take {1e3 * self.exchange_s:.3g} ms"
            priced = f"{takes} and save {1e3 * self.gain_s:.3g} ms"
        if self.num_moved:
            moved = f"{self.num_moved} of {self.num_items} items moved"
            text = f"{moved}: imbalance {self.balanced:.2f} instead of {self.loaded:.2f}"
            return f"{text}; {priced}" if priced else text
        why = f"at the imbalance of {self.loaded:.2f} as given, {priced}"
        if not priced:
            why = f"no plan gains enough over the imbalance of {self.loaded:.2f} as given"
        return f"none of {self.num_items} items moved: {why}"


@dataclass(frozen=True, eq=False)
class ItemPlan:
    """The rank that encodes each item, and the calls of the module on each rank."""

    offer: Offer
    settings: CallSettings
    owner: Ints  # (n,) rank that has an item, and gets its features; -1 where all ranks have it
    rank_of: Ints  # (n,) rank that encodes it

    @cached_property
    def passes(self) -> list[list[ForwardPass]]:
        """The calls of the module on each rank."""
        return forward_passes(
            self.rank_of,
            self.offer.lens,
            self.offer.forms,
            np.ones(self.settings.num_ranks, np.int64),
            max_items=self.settings.at_once,
            is_aligned=self.settings.is_aligned,
        )

    def first(self, rank: int) -> int:
        """Return the id of the first item that a rank has, if it has any."""
        return int(np.argmax((self.owner == rank) | (self.owner < 0))) if self.owner.size else 0

    @cached_property
    def needed(self) -> list[Ints]:
        """Ids of the items that each rank encodes, be it once more."""
        return [np.unique(np.concatenate([of.ids for of in calls])) for calls in self.passes]

    @cached_property
    def brought(self) -> Trip:
        """The items that leave their owner."""
        ids, dest = _by_rank(self.needed)
        source = self.owner[ids]
        away = (source != dest) & (source >= 0)
        return ids[away], source[away], dest[away]

    def received(self, rank: int) -> Ints:
        """Return the ids of the items whose features a rank gets."""
        num = self.settings.num_getting
        return np.flatnonzero((self.owner < 0) & (rank < num) if num else self.owner == rank)

    @cached_property
    def returned(self) -> Trip:
        """The items whose features leave the rank that encoded them."""
        ids, dest = _by_rank([self.received(rank) for rank in range(self.settings.num_ranks)])
        source = self.rank_of[ids]
        away = source != dest
        return ids[away], source[away], dest[away]

    def leaving(self, rank: int) -> Ints:
        """Return ids of the items whose features leave a rank."""
        ids, source, _ = self.returned
        return np.unique(ids[source == rank])

    def exchange(self, cluster: Cluster) -> tuple[float, int]:
        """Return seconds and bytes of all exchanges of a step; features count as their items."""
        seconds, num_bytes = 0.0, 0.0
        for times, (ids, source, dest) in (
            (1 + self.settings.items_need_gradient, self.brought),
            (1 + self.settings.needs_gradient, self.returned),
        ):
            if ids.size:
                each = self.offer.num_bytes[ids].astype(np.float64)
                seconds += times * _exchange_seconds(cluster, source, dest, each)
                num_bytes += times * each.sum()
        return seconds, round(num_bytes)


def _by_rank(ids: list[Ints]) -> tuple[Ints, Ints]:
    """Return the ids of each rank, rank by rank, and these ranks."""
    return np.concatenate(ids), np.repeat(np.arange(len(ids)), [one.size for one in ids])


def _exchange_seconds(cluster: Cluster, source: Ints, dest: Ints, num_bytes: Floats) -> float:
    """Return the seconds of an all-to-all, until the busiest rank has sent and got its bytes."""
    is_near = source // cluster.ranks_per_node == dest // cluster.ranks_per_node
    each = cluster.wires.sending(num_bytes * is_near, num_bytes * ~is_near)
    busiest = max(np.bincount(ends, each).max(initial=0.0) for ends in (source, dest))
    return cluster.latency_s + float(busiest)


def plan_items(
    offer: Offer,
    settings: CallSettings,
    cost: Cost,
    *,
    cluster: Cluster | None = None,
    limits: Limits | None = None,
    locality_tolerance: float = 0.0,
) -> tuple[ItemPlan, Encoding]:
    """Spread items over ranks by cost; with a cluster, only where gains exceed the exchanges."""
    num_ranks, is_shared = settings.num_ranks, settings.num_getting > 0
    costs_of = evaluate if cluster is None else cluster.compute_seconds
    costs = costs_of(cost, offer.lens, offer.num_pairs)
    owner = np.full_like(offer.lens, -1) if is_shared else offer.owner
    before = after = np.bincount(np.maximum(owner, 0), costs, num_ranks).astype(np.float64)
    sizes = {"tokens": offer.lens, "bytes": offer.num_bytes}
    may_stay = not is_shared and (limits is None or _keeps(limits, offer))
    least = max(before.mean(), costs.max())
    min_gain = 1.0 - 1.0 / (1.0 + locality_tolerance)  # a share of the makespan as given
    plan = stays = ItemPlan(offer, settings, owner, owner)
    gain_s, exchange_s, exchange_bytes = None, None, 0
    if not may_stay or weigh(before.max(), least, min_gain=min_gain) == "balanced":
        result = assign(
            costs,
            num_ranks,
            location=owner,
            locality_tolerance=locality_tolerance,
            limits=limits,
            sizes=sizes,
        )
        plan, after = ItemPlan(offer, settings, owner, np.asarray(result.bin_of)), result.loads
    if cluster is not None and (plan.rank_of != owner).any() and not is_shared:
        (more_s, more_bytes), (least_s, least_bytes) = (
            each.exchange(cluster) for each in (plan, stays)
        )
        exchange_s, exchange_bytes = float(more_s - least_s), more_bytes - least_bytes
        passes = WITHOUT_RECOMPUTING.linear if settings.needs_gradient else 1.0
        gain_s = float(before.max() - after.max()) * passes
        reason = weigh(before.max() * passes, after.max() * passes, exchange=exchange_s)
        if may_stay and reason != "balanced":
            plan, after = stays, before
    num_moved = int((plan.rank_of != owner).sum()) if num_ranks > 1 else 0
    loads = tuple(before.tolist()), tuple(after.tolist())
    return plan, Encoding(offer.lens.size, num_moved, *loads, gain_s, exchange_s, exchange_bytes)


def _keeps(limits: Limits, offer: Offer) -> bool:
    """True if every rank can encode the items that it has."""
    tokens, num_bytes = (offer.sums(offer.owner, x) for x in (offer.lens, offer.num_bytes))
    return limits.keeps(tokens=tokens, items=offer.counts, num_bytes=num_bytes)
