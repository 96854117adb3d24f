"""Which rank encodes which item: numpy only, the same answer on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bascule.plan.costs.cost_models import Cost, evaluate
from bascule.plan.limits import Limits
from bascule.plan.loaded.forward_passes import ForwardPass, forward_passes
from bascule.plan.metrics import imbalance
from bascule.plan.routes import Ints
from bascule.plan.solver.solve import assign

_NUM_NUMBERS = 5  # of an item


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
        num_ranks: All ranks.
        num_getting: Of items that all ranks gave: so many ranks, the first ones, get the features.
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
    num_getting: int = 0

    @classmethod
    def of(cls, said: Sequence[Ints], rank: int, num_getting: int = 0) -> "Loaded":
        """From what ranks said: two flags, and five numbers of each item.

        With `num_getting` all of them said the same.
        """
        numbers = [part[1:].reshape(-1, _NUM_NUMBERS) for part in said]
        owner = np.repeat(np.arange(len(said)), [len(own) for own in numbers])
        if num_getting:
            numbers = numbers[:1]
            owner = np.full(len(numbers[0]), -1)
        lens, bits, forms, rows, num_bytes = np.ascontiguousarray(np.concatenate(numbers).T)
        flags = [int(part[0]) for part in said]
        wants = any(flag & 1 for flag in flags)
        args = lens, bits.view(np.float64), forms, rows, num_bytes
        return cls(rank, owner, *args, wants, any(flags), len(said), num_getting)

    @property
    def num_items(self) -> int:
        """Of all ranks."""
        return self.owner.size

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
    """What a step of a balanced encoder moved.

    Attributes:
        num_items: Items of all ranks.
        num_moved: Those that another rank than their owner encoded; all of those that all ranks
            gave.
        loads_as_given: What the items of each rank cost, as they were given.
        loads: The same as they were encoded.
    """

    num_items: int
    num_moved: int
    loads_as_given: tuple[float, ...]
    loads: tuple[float, ...]

    @property
    def loaded(self) -> float:
        """Imbalance (slowest rank over the mean) as the items were given."""
        return imbalance(np.array(self.loads_as_given))

    @property
    def balanced(self) -> float:
        """Imbalance as they were encoded."""
        return imbalance(np.array(self.loads))

    def __str__(self) -> str:
        if not self.num_moved:
            return (
                f"none of {self.num_items} items moved: no plan gains enough over the imbalance "
                f"of {self.loaded:.2f} as given"
            )
        moved = f"{self.num_moved} of {self.num_items} items moved"
        return f"{moved}: imbalance {self.balanced:.2f} instead of {self.loaded:.2f}"


@dataclass(frozen=True, eq=False)
class ItemPlan:
    """Which rank encodes which item.

    Attributes:
        loaded: The items.
        rank_of: (n,) rank that encodes each.
        passes: Calls of the module, by rank.
        report: What it moves.
    """

    loaded: Loaded
    rank_of: Ints
    passes: list[list[ForwardPass]]
    report: Encoding

    @cached_property
    def needed(self) -> tuple[Ints, Ints]:
        """Ids of the items that each rank needs, rank by rank, and these ranks."""
        ids = [np.unique(np.concatenate([of.ids for of in own])) for own in self.passes]
        return np.concatenate(ids), np.repeat(np.arange(len(ids)), [own.size for own in ids])

    @cached_property
    def moves(self) -> bool:
        """Whether any item leaves its rank."""
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

    def sent(self, with_gradients: bool) -> tuple[Ints, Ints]:
        """Ids of the items whose features are sent, and to which ranks; by who computed them.

        Without gradients, what a rank computed for itself stays. With them it goes along, if any
        item moves: then no rank's backward pass reaches the module before the exchange. Items of
        owners are listed owner by owner, so those of a rank that computed them are in their order.
        """
        ids, dest = self.wanted
        is_sent = self.rank_of[ids] != dest
        if with_gradients:
            is_sent[:] = self.moves
        found = np.flatnonzero(is_sent)
        order = found[np.lexsort((ids[found], dest[found], self.rank_of[ids[found]]))]
        return ids[order], dest[order]

    def starts(self, rows: Ints) -> Ints:
        """First row of each that is sent without gradients, on the rank that computed it.

        Args:
            rows: (n,) rows of the features of each item that is sent.
        """
        ids, _ = self.sent(False)
        starts = np.zeros(self.rank_of.size, np.int64)
        for rank in range(self.loaded.num_ranks):
            own = np.unique(ids[self.rank_of[ids] == rank])
            starts[own] = np.cumsum(rows[own]) - rows[own]
        return starts[ids]


def plan_items(
    loaded: Loaded,
    cost: Cost,
    limits: Limits | None,
    home_tolerance: float,
    is_aligned: bool,
    is_alone: bool = False,
) -> ItemPlan:
    """Spread items over ranks by cost, so that the slowest rank ends early.

    Of the plans that are as good as `home_tolerance` allows, the one that moves the fewest tokens.

    Args:
        loaded: The items, one at least.
        cost: What one costs.
        limits: What a rank can hold.
        home_tolerance: By how much the slowest rank may take longer than in the best plan.
        is_aligned: Whether all ranks need as many calls of the module.
        is_alone: Whether every item is a call of its own.

    Raises:
        ConfigError: The cost model is wrong. PlanError: The limits cannot be kept.
    """
    pairs = np.where(loaded.pairs >= 0, loaded.pairs, loaded.lens.astype(np.float64) ** 2)
    has_pairs = bool((loaded.pairs >= 0).any())
    costs = evaluate(cost, loaded.lens, pairs if has_pairs else None)
    found = assign(
        costs,
        loaded.num_ranks,
        limits=limits,
        sizes={"tokens": loaded.lens, "bytes": loaded.num_bytes},
        home=loaded.owner,
        home_tolerance=home_tolerance,
    )
    one, most = np.ones(loaded.num_ranks, np.int64), 1 if is_alone else None
    args = found.bin_of, loaded.lens, loaded.forms, one
    passes = forward_passes(*args, max_tokens=most, is_aligned=is_aligned)
    before, after = (
        tuple(np.bincount(ranks, costs, loaded.num_ranks).tolist())
        for ranks in (np.maximum(loaded.owner, 0), found.bin_of)
    )
    num_moved = int((found.bin_of != loaded.owner).sum()) if loaded.num_ranks > 1 else 0
    report = Encoding(loaded.num_items, num_moved, before, after)
    return ItemPlan(loaded, np.asarray(found.bin_of), passes, report)
