"""Assignments within hard limits, and assignments near home.

Both are one local search: late bins give a group of one or two items to an early bin and may take
a group back, and the exchange with the lowest score is made. The score puts what must not be
(tokens or items above a limit, completion after a ceiling) before what should be low (the
makespan, or what lies away from home), so the search first repairs and then improves.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bascule.plan.solver.problem import Floats, Ints, Problem
from bascule.plan.solver.refine import (
    Groups,
    Offers,
    Pairing,
    State,
    bin_groups,
    make_exchanges,
    match_bins,
    sample,
    split_groups,
)

_MAX_ROUNDS = 256
"""Step budget of a search, in rounds."""

_MAX_OPTIONS = 1 << 14
"""Step budget of a round, in exchanges scored."""

_MAX_SINGLES = 128
"""Most items of a bin that are tried one by one in a round; of more, an even sample by work."""

_PENALTY = 1e6
"""Score of any excess, and of an excess of 1 limit; far above all wishes."""


@dataclass(frozen=True, slots=True)
class Homes:
    """Where items would rather be.

    Attributes:
        bins: Preferred bin per item; -1 for none.
        weights: What it costs per item to be elsewhere.
        ceiling: Completion time that no bin may pass, in units of work per unit of speed.
    """

    bins: Ints
    weights: Floats
    ceiling: float

    def away(self, bin_of: Ints) -> float:
        """Weight of the items that are away from home."""
        return float(self.weights[(self.bins >= 0) & (self.bins != bin_of)].sum())


@dataclass(frozen=True, slots=True)
class _View:
    """A problem with its items by ascending work, as the search numbers them."""

    problem: Problem
    sizes: Floats
    homes: Homes | None

    @staticmethod
    def of(problem: Problem, homes: Homes | None) -> "_View":
        """Renumber the items."""
        order = problem.order[::-1]
        sizes = np.zeros(order.size) if problem.sizes is None else problem.sizes[order]
        if homes is not None:
            homes = Homes(homes.bins[order], homes.weights[order], homes.ceiling)
        return _View(problem, sizes, homes)

    def excess(self, bins: Ints, loads: Floats, sizes: Floats, counts: Floats) -> Floats:
        """By how much bins pass their limits, relative to the limits, summed; 0 is legal."""
        excess = np.zeros(np.broadcast(bins, loads).shape)
        if self.problem.capacity is not None:
            excess += np.maximum(sizes / self.problem.capacity[bins] - 1.0, 0.0)
        if self.problem.max_items is not None:
            excess += np.maximum(counts / self.problem.max_items - 1.0, 0.0)
        if self.homes is not None:
            times = loads / self.problem.speeds[bins]
            excess += np.maximum(times / self.homes.ceiling - 1.0, 0.0)
        return excess


def total_excess(problem: Problem, bin_of: Ints) -> float:
    """By how much an assignment passes the limits, relative to them; 0 is legal."""
    view = _View(problem, np.empty(0), None)
    sizes = np.bincount(bin_of, weights=problem.sizes, minlength=problem.num_bins)
    sizes, counts = sizes.astype(np.float64), _counts(bin_of, problem.num_bins)
    bins = np.arange(problem.num_bins)
    return float(view.excess(bins, problem.bin_work(bin_of), sizes, counts).sum())


def constrain(problem: Problem, bin_of: Ints, target: float, homes: Homes | None = None) -> Ints:
    """Repair an assignment that passes limits, then improve it; never makes it worse.

    O(_MAX_ROUNDS) rounds of O(n log n + _MAX_OPTIONS).

    Args:
        problem: Items, bins and limits.
        bin_of: The start; it may pass the limits.
        target: Completion time that is good enough, in units of work per unit of speed.
        homes: If given, the makespan only matters above its ceiling, and being away counts.
    """
    order = problem.order[::-1]
    view = _View.of(problem, homes)
    state = State(problem, problem.work[order], bin_of[order], problem.bin_work(bin_of))
    depth = 0
    for _ in range(_MAX_ROUNDS):
        pairing = _pair(view, state, target, alone=depth > 0)
        if pairing is None:
            break
        groups = bin_groups(state, pairing, in_twos=depth > 1)
        if depth < 2:
            groups = groups.take(sample(groups.slot, _MAX_SINGLES))
        given, offered = split_groups(groups, pairing.late.size)
        offers, before = _search(view, state, target, pairing, given, offered)
        if make_exchanges(state, pairing, given, offered, offers, before):
            depth = 0
        elif depth == 2:
            break
        else:
            depth += 1
    result = np.empty_like(bin_of)
    result[order] = state.bin_of
    return result


def _totals(view: _View, state: State) -> tuple[Floats, Floats]:
    """Sizes and counts per bin."""
    num_bins = view.problem.num_bins
    sizes = np.bincount(state.bin_of, weights=view.sizes, minlength=num_bins)
    return sizes.astype(np.float64), _counts(state.bin_of, num_bins)


def _counts(bin_of: Ints, num_bins: int) -> Floats:
    return np.bincount(bin_of, minlength=num_bins).astype(np.float64)


def _pair(view: _View, state: State, target: float, *, alone: bool) -> Pairing | None:
    """Bins above a limit against those below; without any, late bins against early ones.

    With ``alone``, only the worst bin, and without excess against all bins that complete earlier.
    """
    bins = np.arange(view.problem.num_bins)
    sizes, counts = _totals(view, state)
    times = state.loads / view.problem.speeds / target
    excess = view.excess(bins, state.loads, sizes, counts)
    if excess.any():
        full = _fullness(view, times, sizes, counts)
        late = _ranked(-excess, (excess > 0.0) & (counts > 0))
        return match_bins(late[: 1 if alone else None], _ranked(full, excess == 0.0))
    if view.homes is not None:
        return None
    late = _ranked(-times, (times > 1.0) & (counts > 0))
    if alone and late.size:
        return match_bins(late[:1], _ranked(times, times < times[late[0]]))
    return match_bins(late, _ranked(times, times < 1.0))


def _ranked(rank: Floats, chosen: NDArray[np.bool_]) -> Ints:
    """Indices of the chosen bins by ascending rank; ties by index."""
    index = np.flatnonzero(chosen)
    return index[np.argsort(rank[index], kind="stable")]


def _fullness(view: _View, times: Floats, sizes: Floats, counts: Floats) -> Floats:
    """How full bins are in what they have least of."""
    fullness = times if view.homes is not None else np.zeros_like(times)
    if view.problem.capacity is not None:
        fullness = np.maximum(fullness, sizes / view.problem.capacity)
    if view.problem.max_items is not None:
        fullness = np.maximum(fullness, counts / view.problem.max_items)
    return fullness


def _search(
    view: _View, state: State, target: float, pairing: Pairing, given: Groups, offered: Groups
) -> tuple[Offers, Floats]:
    """Score every given group against every group of its early bins, and against nothing.

    Returns:
        The best offer per given group, and the score per late bin that it must stay below.
    """
    num_late = pairing.late.size
    counts = np.bincount(offered.slot, minlength=pairing.early.size)
    opens = np.cumsum(counts) - counts
    rows = _affordable_rows(given, counts.reshape(pairing.early.shape))
    slots = given.slot[:, None] + num_late * np.arange(rows)
    options = counts[slots] + 1
    starts = np.cumsum(options.ravel()) - options.ravel()
    cell = np.repeat(np.arange(slots.size), options.ravel())
    within = np.arange(cell.size) - starts[cell]
    slot, give = slots.ravel()[cell], cell // rows
    taken = np.where(within < counts[slot], opens[slot] + within, -1)
    score = _score(view, state, target, pairing, _Options(given, offered, give, slot, taken))
    best = np.minimum.reduceat(score, starts[::rows])
    hits = np.flatnonzero(score == best[give])[::-1]
    chosen = np.empty(given.slot.size, dtype=np.int64)
    chosen[give[hits]] = hits  # the first hit of a group is written last
    offers = Offers(best, slot[chosen] // num_late, taken[chosen])
    return offers, _score_before(view, state, target, pairing.late)


def _affordable_rows(given: Groups, counts: Ints) -> int:
    """Rows of the pairing whose options fit the budget; at least 1."""
    lanes = np.bincount(given.slot, minlength=counts.shape[1])
    options = np.cumsum(((counts + 1) * lanes).sum(axis=1))
    return max(int(np.searchsorted(options, _MAX_OPTIONS, side="right")), 1)


@dataclass(frozen=True, slots=True)
class _Options:
    """Exchanges to score: a given group, the slot of an early bin, a group taken back or -1."""

    given: Groups
    offered: Groups
    give: Ints
    slot: Ints
    taken: Ints

    def delta(self, values: Floats) -> Floats:
        """What the late bin loses of a value per item, and the early bin gains."""
        returned = np.append(_group_sums(self.offered, values), 0.0)
        return _group_sums(self.given, values)[self.give] - returned[self.taken]


def _group_sums(groups: Groups, values: Floats) -> Floats:
    return np.append(values, 0.0)[groups.first] + np.append(values, 0.0)[groups.second]


def _score(view: _View, state: State, target: float, pairing: Pairing, options: _Options) -> Floats:
    """Excess of both bins first; then the later completion, or the weight away from home."""
    late = pairing.late[options.given.slot][options.give]
    early = pairing.early.ravel()[options.slot]
    work = options.delta(state.work)
    late_load, early_load = state.loads[late] - work, state.loads[early] + work
    late_size = early_size = late_count = early_count = np.zeros(1)
    if view.problem.limited:
        sizes, counts = _totals(view, state)
        size, count = options.delta(view.sizes), options.delta(np.ones_like(state.work))
        late_size, early_size = sizes[late] - size, sizes[early] + size
        late_count, early_count = counts[late] - count, counts[early] + count
    excess = view.excess(late, late_load, late_size, late_count)
    excess += view.excess(early, early_load, early_size, early_count)
    if view.homes is None:
        speeds = view.problem.speeds
        wish = np.maximum(late_load / speeds[late], early_load / speeds[early]) / target
    else:
        wish = _newly_away(view.homes, pairing, options, late, early)
    return np.where(excess > 0.0, _PENALTY * (1.0 + excess), 0.0) + wish


def _score_before(view: _View, state: State, target: float, late: Ints) -> Floats:
    """Score of the late bins as they are: an exchange that resolves or lowers it is accepted."""
    sizes, counts = _totals(view, state)
    excess = view.excess(late, state.loads[late], sizes[late], counts[late])
    times = state.loads[late] / view.problem.speeds[late] / target
    return np.where(excess > 0.0, _PENALTY * (1.0 + excess), times)


def _newly_away(
    homes: Homes, pairing: Pairing, options: _Options, late: Ints, early: Ints
) -> Floats:
    """Change of the share of all weight that is away from home, per option."""
    change = np.zeros(late.size)
    for groups, index, sources, destination in (
        (options.given, options.give, pairing.late, early),
        (options.offered, options.taken, pairing.early.ravel(), late),
    ):
        for members in (groups.first, groups.second):
            real = members >= 0
            if not real.any():
                continue
            # One more entry, at -1: no item, which weighs nothing.
            home = np.append(np.where(real, homes.bins[members], -1), -1)
            weight = np.append(np.where(real, homes.weights[members], 0.0), 0.0)
            leaves = weight * (home == np.append(sources[groups.slot], -2))
            change += leaves[index]
            change -= weight[index] * (home[index] == destination)
    return change / max(float(homes.weights.sum()), 1e-300)
