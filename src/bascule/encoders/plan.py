"""Plans of items: which rank encodes which; numpy only, the same answer on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.batching import ForwardPass, forward_passes
from bascule.plan.costs import Cost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.machine import WITHOUT_RECOMPUTING, Cluster
from bascule.plan.metrics import imbalance
from bascule.plan.solver.problem import build_problem
from bascule.plan.solver.solve import assign

_NUM_FIRST, _NUM_NUMBERS = 2, 4  # words of a rank, and of an item


@dataclass(frozen=True, eq=False)
class Loaded:
    """The items of all ranks, rank by rank.

    Attributes:
        rank: This rank.
        num_ranks: Number of ranks.
        owner: (n,) rank that gave each, and gets its features; -1 where all ranks gave it.
        lens: (n,) its tokens.
        pairs: (n,) pairs that attention computes, or -1 where nobody said.
        forms: (n,) items of the same form fit into one call.
        num_bytes: (n,) its bytes on the wire.
        items_need_gradient: An item of some rank requires a gradient.
        needs_gradient: An item or a parameter does.
        num_getting: Of items that all ranks gave: so many ranks, the first ones, get the features.
        at_once: Most items of a call; None: any number.
    """

    rank: int
    num_ranks: int
    owner: Ints
    lens: Ints
    pairs: Floats
    forms: Ints
    num_bytes: Ints
    items_need_gradient: bool
    needs_gradient: bool
    num_getting: int = 0
    at_once: int | None = None

    @classmethod
    def of(cls, words: Sequence[Ints], rank: int, num_getting: int = 0) -> "Loaded":
        """Read the words of all ranks: flags, most items of a call, and four words of each item.

        The flags are 1 if an item requires a gradient, plus 2 if a parameter does. The fewest items
        of a call that a rank asks for count; 0 is any number. With `num_getting` all ranks gave the
        same items.
        """
        numbers = [part[_NUM_FIRST:].reshape(-1, _NUM_NUMBERS) for part in words]
        owner = np.repeat(np.arange(len(words)), [len(own) for own in numbers])
        if num_getting:
            numbers = numbers[:1]
            owner = np.full(len(numbers[0]), -1)
        lens, bits, forms, num_bytes = np.ascontiguousarray(np.concatenate(numbers).T)
        flags = [int(part[0]) for part in words]
        return cls(
            *(rank, len(words), owner, lens, bits.view(np.float64), forms, num_bytes),
            items_need_gradient=any(flag & 1 for flag in flags),
            needs_gradient=any(flags),
            num_getting=num_getting,
            at_once=min((int(part[1]) for part in words if part[1]), default=None),
        )

    @property
    def num_items(self) -> int:
        """Items of all ranks."""
        return self.owner.size

    def costs(self, cost: Cost, cluster: Cluster | None) -> Floats:
        """(n,) cost of each: seconds on the cluster, or without one the unit of the model."""
        pairs = np.where(self.pairs >= 0, self.pairs, self.lens.astype(np.float64) ** 2)
        args = cost, self.lens, pairs if bool((self.pairs >= 0).any()) else None
        return evaluate(*args) if cluster is None else cluster.compute_seconds(*args)

    @cached_property
    def first(self) -> int:
        """Id of the first of this rank's items, where it has one."""
        own = np.flatnonzero((self.owner == self.rank) | (self.owner < 0))
        return int(own[0]) if own.size else 0


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a step of a balanced encoder moved, or why nothing.

    Gain, seconds and bytes are those of the plan that was weighed, also where its items then stay.

    Attributes:
        num_items: Items of all ranks.
        num_moved: Those that another rank than their owner encoded; all of those that all ranks
            gave.
        loads_as_given: What the items of each rank cost, as they were given.
        loads: Cost of the items that each rank encoded: in seconds if the encoder was given a
            cluster, else in the unit of its cost model.
        gain_s: Seconds by which the slowest rank ends earlier, the backward pass included; None
            without a cluster, or where there was no better plan.
        exchange_s: Seconds that the exchanges take more than without moving; None likewise.
        exchange_bytes: Bytes that all ranks together send more than without moving.
    """

    num_items: int
    num_moved: int
    loads_as_given: tuple[float, ...]
    loads: tuple[float, ...]
    gain_s: float | None = None
    exchange_s: float | None = None
    exchange_bytes: int = 0

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
    """Which rank encodes which item.

    Attributes:
        loaded: The items.
        rank_of: (n,) rank that encodes each.
        passes: Calls of the module, by rank.
    """

    loaded: Loaded
    rank_of: Ints
    passes: list[list[ForwardPass]]

    @classmethod
    def of(cls, loaded: Loaded, rank_of: Ints, is_aligned: bool) -> "ItemPlan":
        """Make the plan with its calls; aligned: as many calls on each rank."""
        args = rank_of, loaded.lens, loaded.forms, np.ones(loaded.num_ranks, np.int64)
        passes = forward_passes(*args, max_items=loaded.at_once, is_aligned=is_aligned)
        return cls(loaded, rank_of, passes)

    @cached_property
    def needed(self) -> tuple[Ints, Ints]:
        """Ids of the items that each rank needs, rank by rank, and these ranks."""
        ids = [np.unique(np.concatenate([of.ids for of in own])) for own in self.passes]
        return np.concatenate(ids), np.repeat(np.arange(len(ids)), [own.size for own in ids])

    @cached_property
    def moves(self) -> bool:
        """True if any item leaves its rank, be it to be encoded once more."""
        ids, dest = self.needed
        owner = self.loaded.owner[ids]
        return bool(((owner != dest) & (owner >= 0)).any())

    @cached_property
    def wanted(self) -> tuple[Ints, Ints]:
        """Ids of the items whose features each rank gets, and these ranks."""
        ids, num = np.arange(self.loaded.num_items), self.loaded.num_getting
        if not num:
            return ids, self.loaded.owner
        return np.tile(ids, num), np.repeat(np.arange(num), ids.size)

    @cached_property
    def sent(self) -> tuple[Ints, Ints]:
        """Ids of the items whose features are sent, and to which ranks; by who computed them."""
        ids, dest = self.wanted
        away = np.flatnonzero(self.rank_of[ids] != dest)
        order = away[np.lexsort((ids[away], dest[away], self.rank_of[ids[away]]))]
        return ids[order], dest[order]

    def exchange(self, cluster: Cluster) -> tuple[float, int]:
        """Seconds and bytes of all exchanges of a step: items and features, and their gradients.

        Features count as many bytes as their item, as their size is not known yet.
        """
        loaded, (ids, dest) = self.loaded, self.needed
        seconds, num_bytes = 0.0, 0.0
        each = loaded.num_bytes.astype(np.float64)
        for times, source, target, sizes in (
            (1 + loaded.items_need_gradient, loaded.owner[ids], dest, each[ids]),
            (1 + loaded.needs_gradient, self.rank_of, loaded.owner, each),
        ):
            away = source != target
            if away.any():
                seconds += times * _exchange_seconds(cluster, source, target, sizes)
                num_bytes += times * sizes[away].sum()
        return seconds, round(num_bytes)


def _exchange_seconds(cluster: Cluster, source: Ints, dest: Ints, num_bytes: Floats) -> float:
    """Seconds of an all-to-all of items, until the busiest rank has sent and got its bytes."""
    is_near = source // cluster.ranks_per_node == dest // cluster.ranks_per_node
    sent = num_bytes * (source != dest)
    each = cluster.wire_seconds(sent * is_near, sent * ~is_near)
    busiest = max(np.bincount(ends, each).max(initial=0.0) for ends in (source, dest))
    return cluster.latency_s + float(busiest)


def step_factor(has_backward: bool) -> float:
    """Seconds of an encoder in a step, in those of its forward pass."""
    return WITHOUT_RECOMPUTING.linear if has_backward else 1.0


def plan_items(
    loaded: Loaded,
    cost: Cost,
    *,
    cluster: Cluster | None = None,
    limits: Limits | None = None,
    home_tolerance: float = 0.0,
    is_aligned: bool = False,
) -> tuple[ItemPlan, Encoding]:
    """Spread items over ranks by cost, so that the slowest rank ends early, where that pays.

    Of the plans that are as good as `home_tolerance` allows, the one that moves the fewest tokens.
    With a cluster, items stay where they are if the slowest rank gains no more than the exchanges
    take; without one, moving is taken to pay.

    Raises:
        ConfigError: The cost model is wrong. PlanError: The limits cannot be kept.
    """
    costs, owner, num_ranks = loaded.costs(cost, cluster), loaded.owner, loaded.num_ranks
    limited = {"limits": limits, "sizes": {"tokens": loaded.lens, "bytes": loaded.num_bytes}}
    before = np.bincount(np.maximum(owner, 0), costs, num_ranks).astype(np.float64)
    may_stay = not loaded.num_getting and (
        limits is None or not build_problem(costs, num_ranks, **limited).excess(owner)
    )
    rank_of, least = owner, max(before.mean(), costs.max())
    if not may_stay or before.max() > least * (1.0 + home_tolerance):  # else nothing is better
        args = costs, num_ranks
        rank_of = np.asarray(
            assign(*args, home=owner, home_tolerance=home_tolerance, **limited).bin_of
        )
    plan = ItemPlan.of(loaded, rank_of, is_aligned)
    after = np.bincount(rank_of, costs, num_ranks).astype(np.float64)
    weighed: tuple[float | None, float | None, int] = None, None, 0
    if cluster is not None and (rank_of != owner).any() and not loaded.num_getting:
        stays = ItemPlan.of(loaded, owner, is_aligned)
        more = zip(plan.exchange(cluster), stays.exchange(cluster), strict=True)
        exchange_s, exchange_bytes = (moving - staying for moving, staying in more)
        gain_s = (before.max() - after.max()) * step_factor(loaded.needs_gradient)
        weighed = float(gain_s), float(exchange_s), int(exchange_bytes)
        if may_stay and round(1e9 * gain_s) <= round(1e9 * exchange_s):
            plan, after = stays, before
    num_moved = int((plan.rank_of != owner).sum()) if num_ranks > 1 else 0
    loads = tuple(before.tolist()), tuple(after.tolist())
    return plan, Encoding(loaded.num_items, num_moved, *loads, *weighed)
