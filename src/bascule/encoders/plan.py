"""Plan which rank encodes which item; numpy only, with the same result on every rank."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Ints
from bascule.batching import ForwardPass, forward_passes
from bascule.machine.cluster import WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import Cost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.metrics import imbalance
from bascule.plan.offer import Offer
from bascule.plan.plan import weigh
from bascule.plan.solver.solve import assign
from bascule.quantities import count, num_bytes, number, seconds

Moves = tuple[Ints, Ints, Ints]
"""Ids of items that move, their source ranks, and their destination ranks: (n,) each."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings of a call, the same on all ranks."""

    num_ranks: int
    # Where all ranks have the same items: how many of the first ranks get the features. 0: each
    # rank has other items, and gets their features.
    num_getting: int = 0
    items_need_gradient: bool = False  # an item of some rank requires a gradient
    needs_gradient: bool = False  # an item or a parameter requires a gradient
    at_once: int | None = None  # most items of one call of the module; None: any number
    moving_s: float = 0.0  # what it takes to move anything, besides launches and bytes
    slower: float = 1.0  # measured over predicted seconds of exchanges
    is_aligned: bool = False  # all ranks make the same number of calls, as under FSDP


@dataclass(frozen=True, slots=True)
class Encoding:
    """Report of a step of a balanced encoder: the items that it moved, or why it moved none.

    Gain, seconds and bytes describe the plan that was weighed, even if its items then stayed.
    """

    num_items: int  # of all ranks
    num_moved: int  # to another rank than the owner; all, where all ranks have the same items
    loads_as_given: tuple[float, ...]  # cost of each rank's items before moves
    loads: tuple[float, ...]  # cost of what each rank encodes; seconds with a cluster
    gain_s: float | None = None  # saved by the slowest rank, with its backward pass; None: no price
    exchange_s: float | None = None  # more than if no item moved; None without a price
    exchange_bytes: int = 0  # of all ranks, more than if no item moved

    @property
    def loaded(self) -> float:
        """Imbalance (slowest rank over the mean) as the items were given."""
        return imbalance(np.array(self.loads_as_given))

    @property
    def balanced(self) -> float:
        """Imbalance (slowest rank over the mean) as the items were encoded."""
        return imbalance(np.array(self.loads))

    def __str__(self) -> str:
        priced = ""
        if self.gain_s is not None and self.exchange_s is not None:
            sending, took = num_bytes(self.exchange_bytes), seconds(self.exchange_s)
            priced = f"sending {sending} costs {took} to save {seconds(self.gain_s)}"
        if self.num_moved:
            moved = f"{number(self.num_moved)} of {count(self.num_items, 'item')} moved"
            text = f"{moved}: imbalance {number(self.balanced)} instead of {number(self.loaded)}"
            return f"{text}; {priced}" if priced else text
        why = f"imbalance {number(self.loaded)} as given; {priced or 'no plan gains enough'}"
        return f"none of {count(self.num_items, 'item')} moved: {why}"


@dataclass(frozen=True, eq=False)
class ItemPlan:
    """The rank that encodes each item, and the calls of the module on each rank."""

    offer: Offer
    settings: CallSettings
    owner: Ints  # (n,) rank that gave the item, and gets its features; -1: all ranks have it
    rank_of: Ints  # (n,) rank that encodes the item

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
        """Return the id of the first item that a rank gave, if it gave any."""
        return int(np.argmax((self.owner == rank) | (self.owner < 0))) if self.owner.size else 0

    @cached_property
    def needed(self) -> list[Ints]:
        """Ids of the items that each rank encodes, with the items of dummy calls."""
        return [np.unique(np.concatenate([call.ids for call in calls])) for calls in self.passes]

    @cached_property
    def item_moves(self) -> Moves:
        """Moves of items from their owners to the ranks that encode them."""
        ids, dest = _by_rank(self.needed)
        source = self.owner[ids]
        away = (source != dest) & (source >= 0)
        return ids[away], source[away], dest[away]

    def wanted(self, rank: int) -> Ints:
        """Return the ids of the items whose features a rank gets."""
        num = self.settings.num_getting
        return np.flatnonzero((self.owner < 0) & (rank < num) if num else self.owner == rank)

    @cached_property
    def feature_moves(self) -> Moves:
        """Moves of features from the ranks that encoded them to the ranks that get them."""
        ids, dest = _by_rank([self.wanted(rank) for rank in range(self.settings.num_ranks)])
        source = self.rank_of[ids]
        away = source != dest
        return ids[away], source[away], dest[away]

    @property
    def moves(self) -> bool:
        """Whether an item or its features travel."""
        return bool(self.item_moves[0].size or self.feature_moves[0].size)

    def leaving(self, rank: int) -> Ints:
        """Return the ids of the items whose features leave a rank."""
        ids, source, _ = self.feature_moves
        return np.unique(ids[source == rank])

    def exchange(self, cluster: Cluster) -> tuple[float, int]:
        """Predict seconds and bytes of a step's exchanges, with features as large as items.

        If anything moves, ranks also gather the sizes of features.
        """
        seconds, num_bytes = (self.settings.moving_s + cluster.latency_s) * self.moves, 0.0
        for times, (ids, source, dest) in (
            (1 + self.settings.items_need_gradient, self.item_moves),
            (1 + self.settings.needs_gradient, self.feature_moves),
        ):
            if ids.size:
                each = self.offer.num_bytes[ids].astype(np.float64)
                is_near = source // cluster.ranks_per_node == dest // cluster.ranks_per_node
                each_s = cluster.wires.sending(each * is_near, each * ~is_near)
                busiest_s = max(np.bincount(ends, each_s).max() for ends in (source, dest))
                seconds += times * (cluster.latency_s + float(busiest_s))
                num_bytes += times * each.sum()
        return self.settings.slower * seconds, round(num_bytes)

    def forward_s(self, cluster: Cluster) -> float:
        """Predict seconds of a step's exchanges, uncorrected, without its backward pass."""
        settings = CallSettings(self.settings.num_ranks, moving_s=self.settings.moving_s)
        return ItemPlan(self.offer, settings, self.owner, self.rank_of).exchange(cluster)[0]


def _by_rank(ids: list[Ints]) -> tuple[Ints, Ints]:
    """Return the ids of all ranks one after another, and the rank of each id."""
    return np.concatenate(ids), np.repeat(np.arange(len(ids)), [part.size for part in ids])


def plan_items(
    offer: Offer,
    settings: CallSettings,
    cost: Cost,
    *,
    cluster: Cluster | None = None,
    limits: Limits | None = None,
    locality_tolerance: float = 0.0,
) -> tuple[ItemPlan, Encoding]:
    """Spread items over ranks by cost; with a cluster, only if the gain exceeds the exchange."""
    num_ranks, is_shared = settings.num_ranks, settings.num_getting > 0
    costs_of = evaluate if cluster is None else cluster.compute_seconds
    costs = costs_of(cost, offer.lens, offer.num_pairs)
    owner = np.full_like(offer.lens, -1) if is_shared else offer.owner
    before = after = np.bincount(np.maximum(owner, 0), costs, num_ranks).astype(np.float64)
    sizes = {"tokens": offer.lens, "bytes": offer.num_bytes}
    may_stay = not is_shared
    if may_stay and limits is not None:
        tokens, total_bytes = (offer.sums(offer.owner, x) for x in (offer.lens, offer.num_bytes))
        may_stay = limits.keeps(tokens=tokens, items=offer.counts, num_bytes=total_bytes)
    least = max(before.mean(), costs.max())
    passes = WITHOUT_RECOMPUTING.linear if settings.needs_gradient else 1.0
    host_s = 0.0 if cluster is None else settings.slower * settings.moving_s / passes
    min_gain = 1.0 - 1.0 / (1.0 + locality_tolerance)  # a share of the makespan as given
    plan = stays = ItemPlan(offer, settings, owner, owner)
    gain_s, exchange_s, exchange_bytes = None, None, 0
    reason = weigh(before.max(), least, min_gain=min_gain, exchange=host_s)  # of the best plan
    if not may_stay or reason == "balanced":
        result = assign(
            costs,
            num_ranks,
            location=owner,
            locality_tolerance=locality_tolerance,
            limits=limits,
            sizes=sizes,
            tolerance=locality_tolerance or None,  # items stay until they are this uneven
        )
        plan, after = ItemPlan(offer, settings, owner, np.asarray(result.bin_of)), result.loads
    if cluster is not None and (plan.rank_of != owner).any() and not is_shared:
        (more_s, more_bytes), (least_s, least_bytes) = (
            candidate.exchange(cluster) for candidate in (plan, stays)
        )
        exchange_s, exchange_bytes = float(more_s - least_s), more_bytes - least_bytes
        gain_s = float(before.max() - after.max()) * passes
        reason = weigh(before.max() * passes, after.max() * passes, exchange=exchange_s)
        if may_stay and reason != "balanced":
            plan, after = stays, before
    num_moved = int((plan.rank_of != owner).sum()) if num_ranks > 1 else 0
    loads = tuple(before.tolist()), tuple(after.tolist())
    return plan, Encoding(offer.lens.size, num_moved, *loads, gain_s, exchange_s, exchange_bytes)
