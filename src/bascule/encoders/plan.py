"""Which rank encodes which item: numpy only, the same answer on every rank."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.comm.items import ROW_BYTES
from bascule.encoders.item_prices import Prices, step_factor
from bascule.plan.batching import ForwardPass, forward_passes
from bascule.plan.costs import Cost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.metrics import imbalance
from bascule.plan.solver.problem import build_problem
from bascule.plan.solver.solve import assign

_NUM_FIRST, _NUM_NUMBERS = 3, 5  # of a rank, and of an item


@dataclass(frozen=True, eq=False)
class Loaded:
    """The items of all ranks, rank by rank.

    Attributes:
        rank: This rank.
        owner: (n,) rank that gave each, and gets its features; -1 where all ranks gave it.
        lens: (n,) its tokens.
        pairs: (n,) pairs that attention computes, or -1 where nobody said.
        forms: (n,) items of the same form fit into one call.
        rows: (n,) its rows on the wire.
        num_bytes: (n,) its bytes.
        items_need_gradient: Whether an item of any rank requires a gradient.
        needs_gradient: Whether an item or a parameter does.
        num_ranks: Number of ranks.
        num_getting: Of items that all ranks gave: so many ranks, the first ones, get the features.
        spent_ns: What each rank's own calls of the encoder took until now; see `OwnSpeed`.
        at_once: Most items of a call; None: any number.
    """

    rank: int
    owner: Ints
    lens: Ints
    pairs: npt.NDArray[np.float64]
    forms: Ints
    rows: Ints
    num_bytes: Ints
    items_need_gradient: bool
    needs_gradient: bool
    num_ranks: int
    spent_ns: tuple[int, ...]
    num_getting: int = 0
    at_once: int | None = None

    @classmethod
    def of(cls, said: Sequence[Ints], rank: int, num_getting: int = 0) -> "Loaded":
        """From what ranks said: flags, nanoseconds, items at once, and five numbers of each item.

        Of items at once the fewest count that a rank said; 0 are any number.

        With `num_getting` all of them said the same items.
        """
        numbers = [part[_NUM_FIRST:].reshape(-1, _NUM_NUMBERS) for part in said]
        owner = np.repeat(np.arange(len(said)), [len(own) for own in numbers])
        if num_getting:
            numbers = numbers[:1]
            owner = np.full(len(numbers[0]), -1)
        lens, bits, forms, rows, num_bytes = np.ascontiguousarray(np.concatenate(numbers).T)
        flags = [int(part[0]) for part in said]
        wants = any(flag & 1 for flag in flags)
        args = lens, bits.view(np.float64), forms, rows, num_bytes
        spent_ns = tuple(int(part[1]) for part in said)
        at_once = min((int(part[2]) for part in said if part[2]), default=None)
        has_gradients = wants, any(flags)
        return cls(rank, owner, *args, *has_gradients, len(said), spent_ns, num_getting, at_once)

    @property
    def digest(self) -> str:
        """Equal where what ranks loaded is."""
        digest = hashlib.blake2b(bytes([self.items_need_gradient, self.needs_gradient]))
        for numbers in (self.owner, self.lens, self.pairs, self.forms, self.rows, self.num_bytes):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        return digest.hexdigest()

    @property
    def num_items(self) -> int:
        """Of all ranks."""
        return self.owner.size

    def costs(self, cost: Cost, prices: Prices) -> npt.NDArray[np.float64]:
        """(n,) what each costs: in seconds where a cluster says so, else in the model's unit."""
        pairs = np.where(self.pairs >= 0, self.pairs, self.lens.astype(np.float64) ** 2)
        args = cost, self.lens, pairs if bool((self.pairs >= 0).any()) else None
        cluster = prices.cluster
        return evaluate(*args) if cluster is None else cluster.compute_seconds(*args)

    @cached_property
    def own(self) -> Ints:
        """Ids of the items that this rank gave."""
        return np.flatnonzero((self.owner == self.rank) | (self.owner < 0))

    @property
    def first(self) -> int:
        """Id of the first of this rank's items, where it has one."""
        return int(self.own[0]) if self.own.size else 0


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
            where no plan was weighed, as there is no better one, or no time was measured yet.
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
            said = f"{moved}: imbalance {self.balanced:.2f} instead of {self.loaded:.2f}"
            return f"{said}; {priced}" if priced else said
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
        """With the calls that it takes."""
        args = rank_of, loaded.lens, loaded.forms, np.ones(loaded.num_ranks, np.int64)
        passes = forward_passes(*args, max_items=loaded.at_once, is_aligned=is_aligned)
        return cls(loaded, rank_of, passes)

    @cached_property
    def needed(self) -> tuple[Ints, Ints]:
        """Ids of the items that each rank needs, rank by rank, and these ranks."""
        ids = [np.unique(np.concatenate([of.ids for of in own])) for own in self.passes]
        return np.concatenate(ids), np.repeat(np.arange(len(ids)), [own.size for own in ids])

    @cached_property
    def leaves(self) -> npt.NDArray[np.bool_]:
        """(n,) whether another rank than its owner encodes it."""
        return self.rank_of != self.loaded.owner

    @cached_property
    def moves(self) -> bool:
        """Whether any item leaves its rank, be it to be encoded once more."""
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
        found = np.flatnonzero(self.rank_of[ids] != dest)
        order = found[np.lexsort((ids[found], dest[found], self.rank_of[ids[found]]))]
        return ids[order], dest[order]

    def starts(self, rows: Ints) -> Ints:
        """First row of each that is sent, on the rank that computed it.

        Args:
            rows: (n,) rows of the features of each item that is sent.
        """
        ids, _ = self.sent
        starts = np.zeros(self.rank_of.size, np.int64)
        for rank in range(self.loaded.num_ranks):
            own = np.unique(ids[self.rank_of[ids] == rank])
            starts[own] = np.cumsum(rows[own]) - rows[own]
        return starts[ids]

    def exchange(self, prices: Prices) -> tuple[float, int]:
        """Seconds and bytes of all exchanges of a step: items and features, and their gradients."""
        loaded, (ids, dest) = self.loaded, self.needed
        seconds, num_bytes = 0.0, 0.0
        rows = loaded.rows.astype(np.float64) * ROW_BYTES
        per_token = prices.feature_bytes
        features = rows if per_token is None else loaded.lens * np.float64(per_token)
        for times, source, target, each in (
            (1 + loaded.items_need_gradient, loaded.owner[ids], dest, rows[ids]),
            (1 + loaded.needs_gradient, self.rank_of, loaded.owner, features),
        ):
            away = source != target
            if away.any():
                seconds += times * prices.wires.seconds(source, target, each)
                num_bytes += times * each[away].sum()
        return seconds, round(num_bytes)


def plan_items(
    loaded: Loaded,
    cost: Cost,
    prices: Prices,
    *,
    limits: Limits | None = None,
    home_tolerance: float = 0.0,
    is_aligned: bool = False,
) -> tuple[ItemPlan, Encoding]:
    """Spread items over ranks by cost, so that the slowest rank ends early, where that pays.

    Of the plans that are as good as `home_tolerance` allows, the one that moves the fewest tokens.
    Items stay where they are if the slowest rank gains no more than the exchanges take.

    Args:
        loaded: The items, one at least.
        cost: What one costs.
        prices: What computing and exchanging take.
        limits: What a rank can hold.
        home_tolerance: By how much the slowest rank may take longer than in the best plan.
        is_aligned: Whether all ranks need as many calls of the module.

    Raises:
        ConfigError: The cost model is wrong. PlanError: The limits cannot be kept.
    """
    costs, owner, num_ranks = loaded.costs(cost, prices), loaded.owner, loaded.num_ranks
    limited = {"limits": limits, "sizes": {"tokens": loaded.lens, "bytes": loaded.num_bytes}}
    before = np.bincount(np.maximum(owner, 0), costs, num_ranks).astype(np.float64)
    may_stay = not loaded.num_getting and (
        limits is None or not build_problem(costs, num_ranks, **limited).excess(owner)
    )
    rank_of, least = owner, max(before.mean(), costs.max())
    if not may_stay or before.max() > least * (1.0 + home_tolerance):  # else nothing is better
        found = assign(*(costs, num_ranks), home=owner, home_tolerance=home_tolerance, **limited)
        rank_of = np.asarray(found.bin_of)
    plan = ItemPlan.of(loaded, rank_of, is_aligned)
    after = np.bincount(rank_of, costs, num_ranks).astype(np.float64)
    weighed: tuple[float | None, float | None, int] = None, None, 0
    if prices.unit_s is not None and plan.leaves.any() and not loaded.num_getting:
        stays = ItemPlan.of(loaded, owner, is_aligned)
        more = zip(plan.exchange(prices), stays.exchange(prices), strict=True)
        exchange_s, exchange_bytes = (moving - staying for moving, staying in more)
        gain_s = (before.max() - after.max()) * prices.unit_s * step_factor(loaded.needs_gradient)
        weighed = float(gain_s), float(exchange_s), int(exchange_bytes)
        if may_stay and round(1e9 * gain_s) <= round(1e9 * exchange_s):
            plan, after = stays, before
    num_moved = int(plan.leaves.sum()) if num_ranks > 1 else 0
    loads = tuple(before.tolist()), tuple(after.tolist())
    return plan, Encoding(loaded.num_items, num_moved, *loads, *weighed)
