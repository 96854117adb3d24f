"""The solver's input, in exact numbers.

Work is an integer number of units, a power of two of the caller's cost, and sums stay below 2**50:
exact in float64, whatever the order or the machine. Integer costs (blocks, tokens) stay exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import frexp
from typing import Self

import numpy as np

from bascule.arrays import Bools, Floats, Ints
from bascule.errors import ConfigError, PlanError
from bascule.plan.limits import Limits

_WORK_BITS = 50
_MAX_SHIFT = 1000  # keeps the unit normal; costs so small that this rounds them count as nothing


@dataclass(frozen=True, eq=False)
class Problem:
    """Items with costs, bins with speeds, and what a bin can hold.

    An item may have another cost on each *kind* of bin (unrelated machines).
    """

    speeds: Floats  # (bins,) work per unit of time
    carried: Floats  # (bins,) completion time before any item
    kind_of: Ints  # (bins,) kind of each bin
    kind_costs: Floats  # (kinds, items) cost on each kind of bin, in time on a bin of speed 1
    kind_work: Floats  # (kinds, items) the same as integer-valued work
    carried_work: Floats  # (bins,) integer-valued work before any item
    unit: float  # the caller's cost per unit of work, a power of two
    use: Floats  # (limits, items) what each item takes of what is limited: tokens, bytes, 1 item
    room: Floats  # (limits, bins) how much of it each bin holds
    resources: tuple[str, ...] = ()  # names of what is limited, for messages

    @cached_property
    def num_items(self) -> int:
        """Number of items."""
        return self.kind_work.shape[1]

    @cached_property
    def num_bins(self) -> int:
        """Number of bins."""
        return self.speeds.size

    @cached_property
    def num_kinds(self) -> int:
        """Number of kinds of bins."""
        return self.kind_work.shape[0]

    @cached_property
    def limited(self) -> bool:
        """Whether any limit applies."""
        return bool(self.resources)

    @cached_property
    def identical(self) -> bool:
        """Whether all bins have the same speed."""
        return bool((self.speeds == self.speeds[0]).all())

    @cached_property
    def costs(self) -> Floats:
        """(items,) least cost on any kind of bin."""
        return self.kind_costs[0] if self.num_kinds == 1 else self.kind_costs.min(axis=0)

    @cached_property
    def work(self) -> Floats:
        """(items,) least work on any kind of bin: costs in whole units."""
        return self.kind_work[0] if self.num_kinds == 1 else self.kind_work.min(axis=0)

    @cached_property
    def order(self) -> Ints:
        """(items,) longest first, by costs and so by work; ties by index."""
        return np.argsort(-self.costs, kind="stable")

    @cached_property
    def ranked(self) -> Floats:
        """(items,) costs, longest first."""
        return self.costs[self.order]

    def bin_work(self, bin_of: Ints) -> Floats:
        """Return (bins,) work under an assignment, carried work included; exact."""
        return self.carried_work + self._sums(self.kind_work, bin_of)

    def makespan(self, bin_of: Ints) -> float:
        """Return the latest completion time, in units of work per unit of speed."""
        return float((self.bin_work(bin_of) / self.speeds).max())

    def loads(self, bin_of: Ints) -> Floats:
        """Return (bins,) completion times under an assignment, in the caller's units."""
        return self.carried + self._sums(self.kind_costs, bin_of) / self.speeds

    def used(self, bin_of: Ints) -> Floats:
        """Return (limits, bins) amounts that an assignment uses of each limited resource."""
        sums = [np.bincount(bin_of, use, self.num_bins) for use in self.use]
        return np.array(sums, dtype=np.float64).reshape(self.room.shape)

    def excess(self, bin_of: Ints) -> float:
        """Sum the relative amounts by which an assignment exceeds limits; 0 if it keeps all."""
        return float(excess(self.used(bin_of), self.room).sum()) if self.limited else 0.0

    def unlimited(self) -> "Problem":
        """Return the problem without its limits."""
        return replace(self, use=self.use[:0], room=self.room[:0], resources=())

    def at_costs(self, costs: Floats, items: Ints, bins: Ints) -> "Problem":
        """Return the problem of some items with these costs on some bins of one kind, unlimited."""
        return replace(
            self,
            speeds=self.speeds[bins],
            carried=self.carried[bins],
            kind_of=np.zeros_like(bins),
            kind_costs=costs[None, items],
            kind_work=np.rint(costs[None, items] / self.unit),
            carried_work=self.carried_work[bins],
            use=self.use[:0, items],
            room=self.room[:0, bins],
            resources=(),
        )

    def without(self, staying: Bools, bin_of: Ints) -> "Problem":
        """Return the problem without `staying` items, whose work bins carry; without limits."""
        items, at, rest = np.flatnonzero(staying), bin_of[staying], np.flatnonzero(~staying)
        costs = np.bincount(at, self.kind_costs[self.kind_of[at], items], self.num_bins)
        work = np.bincount(at, self.kind_work[self.kind_of[at], items], self.num_bins)
        return replace(
            self,
            carried=self.carried + costs / self.speeds,
            kind_costs=self.kind_costs[:, rest],
            kind_work=self.kind_work[:, rest],
            carried_work=self.carried_work + work,
            use=self.use[:0, rest],
            room=self.room[:0],
            resources=(),
        )

    def _sums(self, by_kind: Floats, bin_of: Ints) -> Floats:
        work = by_kind[0]
        if self.num_kinds > 1:
            work = by_kind[self.kind_of[bin_of], np.arange(bin_of.size)]
        return np.bincount(bin_of, work, self.num_bins).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment of items to bins, with a lower bound. Arrays are read-only.

    Attributes:
        bin_of: Bin of each item.
        loads: Completion time of each bin: carried load + sum of costs / speed.
        makespan: Latest completion time.
        lower_bound: No assignment completes earlier.
        method: Name of the start and of the search that found it.
    """

    bin_of: Ints
    loads: Floats
    makespan: float
    lower_bound: float
    method: str = field(default="", kw_only=True)

    @classmethod
    def of(cls, problem: Problem, bin_of: Ints, bound: float, method: str = "") -> Self:
        """Compute the loads of an assignment, in the caller's units."""
        loads = problem.loads(bin_of)
        makespan = float(loads.max())
        bin_of.flags.writeable = loads.flags.writeable = False
        # Both are sums of rounded numbers: where they meet, the bound may be an ulp above.
        return cls(bin_of, loads, makespan, min(bound, makespan), method=method)

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the best: makespan / lower_bound - 1; 0 without work."""
        return self.makespan / self.lower_bound - 1.0 if self.lower_bound > 0.0 else 0.0


def excess(used: Floats, room: Floats) -> Floats:
    """Return (...) relative excess of (limits, ...) amounts over the room, summed; 0: legal."""
    return np.maximum(used / room - 1.0, 0.0).sum(axis=0)


def build_problem(
    costs: Floats,
    speeds: Floats,
    *,
    carried: Floats | None = None,
    kind_of: Ints | None = None,
    limits: Limits | None = None,
    sizes: Mapping[str, Floats] | None = None,
    ranks: Floats | None = None,
) -> Problem:
    """Make a problem of exact numbers; a PlanError names the limit that no assignment can keep.

    `costs` are (items,), or with `kind_of` (kinds, items); `sizes` are (items,) by "tokens",
    "bytes", or "" for the one that is limited. All else is (bins,). If `ranks` is None, the speeds
    are the ranks of bins. Limits hold for each rank of a bin.
    """
    costs, speeds = np.atleast_2d(np.asarray(costs, np.float64)), np.asarray(speeds, np.float64)
    num_items, num_bins = costs.shape[1], speeds.size
    carried = np.zeros(num_bins) if carried is None else carried
    resources, use, room = list[str](), list[Floats](), list[Floats]()
    if limits is not None:
        sizes = {} if sizes is None else sizes
        limit_of = {"items": "items", "tokens": "tokens", "bytes": "num_bytes"}
        for resource, name in limit_of.items():
            if getattr(limits, name) is None:
                continue
            most = limits.room(name, num_bins)
            resources.append(resource)
            if resource == "items":
                use.append(np.repeat(1.0, num_items))
                room.append(most)
            else:
                use.append(sizes[resource if resource in sizes else ""])
                room.append(most * (speeds if ranks is None else ranks))
            _check_fits(resource, use[-1], room[-1])
    unit, kind_work, carried_work = _exact_work(costs, carried * speeds)
    return Problem(
        speeds,
        carried,
        np.zeros(num_bins, np.int64) if kind_of is None else kind_of,
        costs,
        kind_work,
        carried_work,
        unit,
        np.array(use).reshape(len(use), num_items),
        np.array(room).reshape(len(room), num_bins),
        tuple(resources),
    )


def _exact_work(costs: Floats, carried_costs: Floats) -> tuple[float, Floats, Floats]:
    """Return the unit, and costs and carried costs as whole numbers of units.

    With k entries below 2**e, a unit of 2**(e + bits(k) - 50) keeps the sum below 2**50.
    """
    largest = max(float(costs.max(initial=0.0)), float(carried_costs.max(initial=0.0)))
    if not np.isfinite(largest * (costs.size + carried_costs.size)):
        raise ConfigError(f"costs up to {largest} overflow when summed; use a larger unit of cost")
    entries = (costs.shape[1] + carried_costs.size).bit_length()
    shift = min(_WORK_BITS - frexp(largest)[1] - entries, _MAX_SHIFT) if largest else 0
    work, carried_work = np.rint(np.ldexp(costs, shift)), np.rint(np.ldexp(carried_costs, shift))
    return float(np.ldexp(1.0, -shift)), work, carried_work


def _check_fits(resource: str, sizes: Floats, room: Floats) -> None:
    """Refuse what no assignment can hold, whatever it is."""
    largest = float(room.max())
    item = int(sizes.argmax()) if sizes.size else 0
    if sizes.size and sizes[item] > largest:
        wrong = f"item {item} has {sizes[item]:.15g} {resource}, which misses the largest bin's"
        by = f"limit of {largest:.15g} by {sizes[item] - largest:.15g}"
        raise PlanError(f"{wrong} {by}; use a larger bag, raise the limit, or shorten the item")
    # Items that only the larger bins can hold must fit into these; first all items into all bins.
    for below in (-1.0, *np.unique(room)[:-1].tolist()):
        bins, large = room > below, sizes > below
        total, capacity = float(sizes[large].sum()), float(room[bins].sum())
        if total > capacity:
            of = "" if resource == "items" else f" of {int(large.sum())} items"
            which = "bins" if below < 0.0 else f"bins with room for more than {below:.15g} each"
            wrong = f"{total:.15g} {resource}{of} exceed the {capacity:.15g} of the"
            fix = "raise the limit, use more or larger bins, or send fewer items"
            raise PlanError(f"{wrong} {int(bins.sum())} {which} by {total - capacity:.15g}; {fix}")
