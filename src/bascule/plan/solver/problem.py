"""The solver's input, checked once and brought to exact numbers.

Work is an integer number of units, where a unit is a power of two of the caller's cost, chosen so
that all work of a problem stays below 2**50. Integers of that size are exact in float64, so sums
do not depend on their order, comparisons do not depend on the machine, and one array serves for
adding, for dividing by speeds and for searching. Integer costs (blocks, tokens) stay exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import frexp

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import MAX_NUMBER, amounts, of_type, whole
from bascule.plan.limits import Limits

_WORK_BITS = 50

MAX_BINS = 2**20
"""Most bins of a problem: their tables and heaps stay small."""

_MAX_SHIFT = 1000
"""Keeps the unit a normal number; costs so small that this rounds them count as nothing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Items with costs, bins with speeds, and what a bin can hold.

    An item may have another cost on each *kind* of bin (unrelated machines); in most problems all
    bins are of one kind. ``costs``, ``speeds`` and ``carried`` are the caller's numbers; ``work``
    and ``carried_work`` are costs and carried costs in units of the search.

    Attributes:
        costs: (items,) least cost on any kind of bin, in time on a bin of speed 1.
        speeds: (bins,) work per unit of time.
        carried: (bins,) completion time before any item.
        work: (items,) integer-valued ``costs``.
        carried_work: (bins,) integer-valued work before any item.
        unit: The caller's cost per unit of work, a power of two.
        order: (items,) longest first, by ``work``; ties by index.
        kind_costs: (kinds, items) cost on each kind of bin.
        kind_work: (kinds, items) the same as integer-valued work.
        kind_of: (bins,) kind of each bin.
        use: (limits, items) what each item takes of what is limited: tokens, bytes, 1 item.
        room: (limits, bins) how much of it each bin holds.
        resources: Names of what is limited, for messages.
    """

    costs: Floats
    speeds: Floats
    carried: Floats
    work: Floats
    carried_work: Floats
    unit: float
    order: Ints
    kind_costs: Floats
    kind_work: Floats
    kind_of: Ints
    use: Floats
    room: Floats
    resources: tuple[str, ...] = ()

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.work.size

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return self.speeds.size

    @property
    def num_kinds(self) -> int:
        """Number of kinds of bins."""
        return self.kind_work.shape[0]

    @property
    def limited(self) -> bool:
        """Whether any limit applies."""
        return bool(self.resources)

    @property
    def identical(self) -> bool:
        """Whether all bins have the same speed."""
        return bool((self.speeds == self.speeds[0]).all())

    def bin_work(self, bin_of: Ints) -> Floats:
        """(bins,) work under an assignment, carried work included; exact."""
        own = self._of_kinds(self.work, self.kind_work, bin_of)
        return self.carried_work + np.bincount(bin_of, own, self.num_bins)

    def makespan(self, bin_of: Ints) -> float:
        """Latest completion time under an assignment, in units of work per unit of speed."""
        return float((self.bin_work(bin_of) / self.speeds).max())

    def loads(self, bin_of: Ints) -> Floats:
        """(bins,) completion times under an assignment, in the caller's units."""
        own = self._of_kinds(self.costs, self.kind_costs, bin_of)
        return self.carried + np.bincount(bin_of, own, self.num_bins) / self.speeds

    def used(self, bin_of: Ints) -> Floats:
        """(limits, bins) what an assignment takes of what is limited."""
        sums = [np.bincount(bin_of, use, self.num_bins) for use in self.use]
        return np.array(sums, dtype=np.float64).reshape(self.room.shape)

    def excess(self, bin_of: Ints) -> float:
        """By how much an assignment passes the limits, relative to them; 0 keeps all of them."""
        return float(excess(self.used(bin_of), self.room).sum()) if self.limited else 0.0

    def at_costs(
        self, costs: Floats, items: Ints | slice = slice(None), bins: Ints | slice = slice(None)
    ) -> "Problem":
        """Some items at one cost each on some of the bins, as of one kind and without limits."""
        work = np.rint(costs[items] / self.unit)
        return replace(
            self,
            costs=costs[items],
            speeds=self.speeds[bins],
            carried=self.carried[bins],
            work=work,
            carried_work=self.carried_work[bins],
            order=np.argsort(-work, kind="stable"),
            kind_costs=costs[None, items],
            kind_work=work[None],
            kind_of=np.zeros_like(self.kind_of[bins]),
            use=np.empty((0, work.size)),
            room=np.empty((0, self.speeds[bins].size)),
            resources=(),
        )

    def without(self, kept: NDArray[np.bool_], bin_of: Ints) -> "Problem":
        """The items that are not kept, in bins that carry those that are; without limits."""
        held, rest = np.flatnonzero(kept), np.flatnonzero(~kept)
        at, kinds = bin_of[held], self.kind_of[bin_of[held]]
        costs = np.bincount(at, self.kind_costs[kinds, held], self.num_bins)
        work = np.bincount(at, self.kind_work[kinds, held], self.num_bins)
        return replace(
            self,
            costs=self.costs[rest],
            carried=self.carried + costs / self.speeds,
            work=self.work[rest],
            carried_work=self.carried_work + work,
            order=np.argsort(-self.work[rest], kind="stable"),
            kind_costs=self.kind_costs[:, rest],
            kind_work=self.kind_work[:, rest],
            use=np.empty((0, rest.size)),
            room=self.room[:0],
            resources=(),
        )

    def _of_kinds(self, least: Floats, by_kind: Floats, bin_of: Ints) -> Floats:
        if self.num_kinds == 1:
            return least
        return by_kind[self.kind_of[bin_of], np.arange(bin_of.size)]


def excess(used: Floats, room: Floats) -> Floats:
    """(...) by how much (limits, ...) amounts pass the room, relative to it, summed; 0 is legal."""
    return np.maximum(used / room - 1.0, 0.0).sum(axis=0)


def build_problem(
    costs: ArrayLike,
    num_bins: int | None,
    *,
    speeds: ArrayLike | None = None,
    limits: Limits | None = None,
    sizes: ArrayLike | Mapping[str, ArrayLike] | None = None,
    ranks_per_bin: ArrayLike | None = None,
    carried_loads: ArrayLike | None = None,
    kind_of: Ints | None = None,
) -> Problem:
    """Check every argument and bring it to exact numbers. O(n log n).

    Args:
        costs: As for `assign`; with ``kind_of``, (kinds, items) checked costs on each kind of bin.
        num_bins: As for `assign`.
        speeds: As for `assign`.
        limits: As for `assign`.
        sizes: As for `assign`.
        ranks_per_bin: As for `assign`.
        carried_loads: As for `assign`.
        kind_of: (bins,) kind of each bin; None if there is one.

    Raises:
        ConfigError: An argument has a wrong shape or value; says which, the limit and the fix.
        PlanError: An item fits nowhere, or the items together exceed the limits.
    """
    if limits is not None:
        of_type("limits", limits, Limits, "Limits(tokens=..), or None")
    speed = _bin_speeds(num_bins, speeds)
    by_kind = _numbers("costs", costs)[None] if kind_of is None else np.asarray(costs, np.float64)
    cost = by_kind[0] if kind_of is None else by_kind.min(axis=0)
    num = speed.size
    carried = (
        np.zeros(num)
        if carried_loads is None
        else _numbers("carried_loads", carried_loads, length=num)
    )
    ranks = speed if ranks_per_bin is None else _numbers("ranks_per_bin", ranks_per_bin, length=num)
    if ranks.min() == 0.0:
        raise ConfigError(f"ranks_per_bin[{int(ranks.argmin())}] is 0; a bin has at least 1 rank")
    resources, use, room = _limited(limits, item_sizes(sizes, cost.size), ranks, cost.size)
    unit, kind_work, carried_work = _exact_work(by_kind, carried * speed)
    work = kind_work[0] if kind_of is None else kind_work.min(axis=0)
    problem = Problem(
        costs=cost,
        speeds=speed,
        carried=carried,
        work=work,
        carried_work=carried_work,
        unit=unit,
        order=np.argsort(-work, kind="stable"),
        kind_costs=by_kind,
        kind_work=kind_work,
        kind_of=np.zeros(num, np.int64) if kind_of is None else kind_of,
        use=use,
        room=room,
        resources=resources,
    )
    _check_totals(problem)
    return problem


def _numbers(name: str, values: ArrayLike, *, length: int | None = None) -> Floats:
    """A read-only vector of finite numbers that are not negative."""
    vector = amounts(name, values)
    if length is not None and vector.size != length:
        raise ConfigError(f"{name} has {vector.size} entries; {length} are needed, one each")
    return vector


def _bin_speeds(num_bins: int | None, speeds: ArrayLike | None) -> Floats:
    if speeds is None:
        if num_bins is None:
            raise ConfigError("num_bins and speeds are both missing; give one of them")
        return np.ones(whole("num_bins", num_bins, 1, MAX_BINS))
    speed = _numbers("speeds", speeds)
    if num_bins is not None and whole("num_bins", num_bins, 1, MAX_BINS) != speed.size:
        raise ConfigError(f"num_bins is {num_bins}, but speeds has {speed.size} entries; drop one")
    if speed.size == 0:
        raise ConfigError("speeds is empty; at least one bin is needed")
    if speed.min() == 0.0:
        raise ConfigError(f"speeds[{int(speed.argmin())}] is 0; leave out bins that do no work")
    if not 1.0 / MAX_NUMBER <= speed.min() <= speed.max() <= MAX_NUMBER:
        raise ConfigError(
            f"speeds from {speed.min()} to {speed.max()}: use a unit in which they are at least "
            f"{1.0 / MAX_NUMBER:g} and at most {MAX_NUMBER:g}"
        )
    return speed


def item_sizes(
    sizes: ArrayLike | Mapping[str, ArrayLike] | None, num_items: int
) -> dict[str, Floats]:
    """(items,) sizes by what they count; one array counts whatever is limited: the key is ""."""
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping):
        return {"": _numbers("sizes", sizes, length=num_items)}
    return {
        name: _numbers(f"sizes[{name!r}]", array, length=num_items) for name, array in sizes.items()
    }


def _limited(
    limits: Limits | None, sizes: Mapping[str, Floats], ranks: Floats, num_items: int
) -> tuple[tuple[str, ...], Floats, Floats]:
    """Names of what is limited, what each item takes of it, and how much each bin holds."""
    rows: list[tuple[str, Floats, Floats]] = []
    if limits is not None and limits.items is not None:
        rows.append(("items", np.ones(num_items), np.full(ranks.size, float(limits.items))))
    given = {} if limits is None else {"tokens": limits.tokens, "bytes": limits.num_bytes}
    given = {resource: most for resource, most in given.items() if most is not None}
    if len(given) > 1 and "" in sizes:
        raise ConfigError(
            f"limits has tokens={given['tokens']} and num_bytes={given['bytes']}, but sizes can "
            "count only one of them; keep the tighter limit, or give sizes as "
            '{"tokens": .., "bytes": ..}'
        )
    for resource, most in given.items():
        size = sizes.get(resource, sizes.get(""))
        if size is None:
            raise ConfigError(f"limits restricts {resource}, but sizes is missing; pass {resource}")
        rows.append((resource, size, most * ranks))
    if not rows:
        return (), np.empty((0, num_items)), np.empty((0, ranks.size))
    names, use, room = zip(*rows, strict=True)
    return tuple(names), np.stack(use), np.stack(room)


def _exact_work(costs: Floats, carried_costs: Floats) -> tuple[float, Floats, Floats]:
    """The unit, and costs and carried costs as whole numbers of units.

    With every entry below 2**e and k entries in all, a unit of 2**(e + bits(k) - 50) keeps the sum
    below 2**50. The exponent depends on maxima only, never on a rounded sum.
    """
    largest = max(float(costs.max(initial=0.0)), float(carried_costs.max(initial=0.0)))
    if not np.isfinite(largest * (costs.size + carried_costs.size)):
        raise ConfigError(f"costs up to {largest} overflow in a sum; use a larger unit of cost")
    entries = (costs.shape[-1] + carried_costs.size).bit_length()
    shift = min(_WORK_BITS - frexp(largest)[1] - entries, _MAX_SHIFT) if largest else 0
    work, carried_work = np.rint(np.ldexp(costs, shift)), np.rint(np.ldexp(carried_costs, shift))
    return float(np.ldexp(1.0, -shift)), work, carried_work


def _check_totals(problem: Problem) -> None:
    """Refuse what no assignment can hold, whatever it is."""
    for resource, use, room in zip(problem.resources, problem.use, problem.room, strict=True):
        if resource == "items":
            _check_count(problem, room)
        elif problem.num_items:
            _check_sizes(resource, use, room)


def _check_count(problem: Problem, room: Floats) -> None:
    most, over = int(room[0]), problem.num_items - int(room[0]) * problem.num_bins
    if over > 0:
        raise PlanError(
            f"{problem.num_items} items exceed limits.items={most} a bin in {problem.num_bins} "
            f"bins by {over}; raise the limit or send fewer items"
        )


def _check_sizes(resource: str, sizes: Floats, room: Floats) -> None:
    largest, item = float(room.max()), int(sizes.argmax())
    needed = float(sizes[item])
    if needed > largest:
        raise PlanError(
            f"item {item} has {needed:.15g} {resource}, which misses the "
            f"largest bin's limit of {largest:.15g} by {needed - largest:.15g}; use a "
            "larger bag, raise the limit, or shorten the item"
        )
    for below in np.unique(room)[:-1].tolist():  # what only the bins with more than this can hold
        large, bins = sizes > below, room > below
        total, held = float(sizes[large].sum()), float(room[bins].sum())
        if total > held:
            raise PlanError(
                f"{int(large.sum())} items have more {resource} than the {below:.15g} of the "
                f"smaller bins; together they exceed the {held:.15g} of the {int(bins.sum())} "
                f"larger bins by {total - held:.15g}; use more large bags, raise the limit, or "
                "send fewer"
            )
    total, held = float(sizes.sum()), float(room.sum())
    if total > held:
        raise PlanError(
            f"the items' {total:.15g} {resource} exceed the limit over all {room.size} bins, "
            f"{held:.15g}, by {total - held:.15g}; raise the limit or send fewer items"
        )
