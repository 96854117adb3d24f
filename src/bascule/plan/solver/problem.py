"""The solver's input, checked once and brought to exact numbers.

Work is an integer number of units, where a unit is a power of two of the caller's cost, chosen so
that all work of a problem stays below 2**50. Integers of that size are exact in float64, so sums
do not depend on their order, comparisons do not depend on the machine, and one array serves for
adding, for dividing by speeds and for searching. Integer costs (blocks, tokens) stay exact.
"""

from dataclasses import dataclass
from math import frexp

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bascule.errors import ConfigError, PlanError
from bascule.plan.checks import MAX_NUMBER, amounts, of_type, whole
from bascule.plan.limits import Limits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WORK_BITS = 50

MAX_BINS = 2**20
"""Most bins of a problem: their tables and heaps stay small."""

_MAX_SHIFT = 1000
"""Keeps the unit a normal number; costs so small that this rounds them count as nothing."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Items with costs, bins with speeds, and what a bin can hold.

    ``costs``, ``speeds`` and ``carried`` are the caller's numbers; ``work`` and ``carried_work``
    are costs and carried costs in units of the search.

    Attributes:
        costs: Cost per item, in units of work (FLOPs, seconds on a bin of speed 1).
        speeds: Work per unit of time, per bin.
        carried: Completion time of each bin before any item, in units of time.
        work: Integer-valued cost per item.
        carried_work: Integer-valued work per bin before any item.
        unit: The caller's cost per unit of work, a power of two.
        order: Items, longest first; ties by index.
        sizes: Tokens or bytes per item; None if nothing limits them.
        capacity: Largest sum of sizes per bin; None if unlimited.
        max_items: Most items in a bin; None if unlimited.
        resource: What ``sizes`` counts, for messages.
    """

    costs: Floats
    speeds: Floats
    carried: Floats
    work: Floats
    carried_work: Floats
    unit: float
    order: Ints
    sizes: Floats | None = None
    capacity: Floats | None = None
    max_items: int | None = None
    resource: str = "tokens"

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.work.size

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return self.speeds.size

    @property
    def limited(self) -> bool:
        """Whether any limit applies."""
        return self.capacity is not None or self.max_items is not None

    @property
    def identical(self) -> bool:
        """Whether all bins have the same speed."""
        return bool((self.speeds == self.speeds[0]).all())

    def bin_work(self, bin_of: Ints) -> Floats:
        """Work per bin under an assignment, carried work included; exact."""
        items = np.bincount(bin_of, weights=self.work, minlength=self.num_bins)
        return self.carried_work + items

    def makespan(self, bin_of: Ints) -> float:
        """Latest completion time under an assignment, in units of work per unit of speed."""
        return float((self.bin_work(bin_of) / self.speeds).max())


def build_problem(
    costs: ArrayLike,
    num_bins: int | None,
    *,
    speeds: ArrayLike | None,
    limits: Limits | None,
    sizes: ArrayLike | None,
    ranks_per_bin: ArrayLike | None,
    carried_loads: ArrayLike | None,
) -> Problem:
    """Check every argument and bring it to exact numbers. O(n log n).

    Raises:
        ConfigError: An argument has a wrong shape or value; says which, the limit and the fix.
        PlanError: An item fits nowhere, or the items together exceed the limits.
    """
    if limits is not None:
        of_type("limits", limits, Limits, "Limits(tokens=..), or None")
    cost = _numbers("costs", costs)
    speed = _bin_speeds(num_bins, speeds)
    num = speed.size
    carried = (
        np.zeros(num)
        if carried_loads is None
        else _numbers("carried_loads", carried_loads, length=num)
    )
    ranks = speed if ranks_per_bin is None else _numbers("ranks_per_bin", ranks_per_bin, length=num)
    if ranks.min() == 0.0:
        raise ConfigError(f"ranks_per_bin[{int(ranks.argmin())}] is 0; a bin has at least 1 rank")
    size = None if sizes is None else _numbers("sizes", sizes, length=cost.size)
    resource, capacity = _capacity(limits, size, ranks)
    unit, work, carried_work = _exact_work(cost, carried * speed)
    problem = Problem(
        costs=cost,
        speeds=speed,
        carried=carried,
        work=work,
        carried_work=carried_work,
        unit=unit,
        order=np.argsort(-work, kind="stable"),
        sizes=size,
        capacity=capacity,
        max_items=None if limits is None else limits.items,
        resource=resource,
    )
    if problem.limited:
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


def _capacity(
    limits: Limits | None, sizes: Floats | None, ranks: Floats
) -> tuple[str, Floats | None]:
    """Name of the limited resource, and how much of it each bin holds."""
    if limits is None or (limits.tokens is None and limits.num_bytes is None):
        return "tokens", None
    if limits.tokens is not None and limits.num_bytes is not None:
        raise ConfigError(
            f"limits has tokens={limits.tokens} and num_bytes={limits.num_bytes}, but sizes can "
            "count only one of them; keep the tighter limit"
        )
    resource = "bytes" if limits.tokens is None else "tokens"
    if sizes is None:
        raise ConfigError(f"limits restricts {resource}, but sizes is missing; pass {resource}")
    per_rank = limits.num_bytes if limits.tokens is None else limits.tokens
    assert per_rank is not None
    return resource, per_rank * ranks


def _exact_work(costs: Floats, carried_costs: Floats) -> tuple[float, Floats, Floats]:
    """The unit, and costs and carried costs as whole numbers of units.

    With every entry below 2**e and k entries in all, a unit of 2**(e + bits(k) - 50) keeps the sum
    below 2**50. The exponent depends on maxima only, never on a rounded sum.
    """
    largest = max(float(costs.max(initial=0.0)), float(carried_costs.max(initial=0.0)))
    if not np.isfinite(largest * (costs.size + carried_costs.size)):
        raise ConfigError(f"costs up to {largest} overflow in a sum; use a larger unit of cost")
    entries = (costs.size + carried_costs.size).bit_length()
    shift = min(_WORK_BITS - frexp(largest)[1] - entries, _MAX_SHIFT) if largest else 0
    work, carried_work = np.rint(np.ldexp(costs, shift)), np.rint(np.ldexp(carried_costs, shift))
    return float(np.ldexp(1.0, -shift)), work, carried_work


def _check_totals(problem: Problem) -> None:
    """Refuse what no assignment can hold, whatever it is."""
    if problem.max_items is not None:
        room = problem.max_items * problem.num_bins
        if problem.num_items > room:
            raise PlanError(
                f"{problem.num_items} items exceed limits.items={problem.max_items} a bin in "
                f"{problem.num_bins} bins by {problem.num_items - room}; raise the limit or send "
                "fewer items"
            )
    if problem.sizes is None or problem.capacity is None or problem.num_items == 0:
        return
    largest, item = float(problem.capacity.max()), int(problem.sizes.argmax())
    needed = float(problem.sizes[item])
    if needed > largest:
        raise PlanError(
            f"item {item} has {needed:.15g} {problem.resource}, which misses the "
            f"largest bin's limit of {largest:.15g} by {needed - largest:.15g}; use a "
            "larger bag, raise the limit, or shorten the item"
        )
    for below in np.unique(problem.capacity)[:-1]:
        _check_large(problem, problem.sizes, problem.capacity, float(below))
    total, room = float(problem.sizes.sum()), float(problem.capacity.sum())
    if total > room:
        raise PlanError(
            f"the items' {total:.15g} {problem.resource} exceed the limit over all "
            f"{problem.num_bins} bins, {room:.15g}, by {total - room:.15g}; raise the limit or "
            "send fewer items"
        )


def _check_large(problem: Problem, sizes: Floats, capacity: Floats, below: float) -> None:
    """Refuse items that only the bins with more than ``below`` can hold, but not all of them."""
    large, bins = sizes > below, capacity > below
    total, room = float(sizes[large].sum()), float(capacity[bins].sum())
    if total > room:
        raise PlanError(
            f"{int(large.sum())} items have more {problem.resource} than the {below:.15g} of the "
            f"smaller bins; together they exceed the {room:.15g} of the {int(bins.sum())} larger "
            f"bins by {total - room:.15g}; use more large bags, raise the limit, or send fewer"
        )
