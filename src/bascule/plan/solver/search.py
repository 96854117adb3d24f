"""The local search: within limits, over bins of several kinds, near home.

A bin gives a group of one or two items to another bin, and may take a group back. The `Score` of
the two bins decides which exchange is made. Late bins are paired with early ones, the latest with
the earliest: first single items within pairs, then items of the worst bin with any other bin, then
groups of two. With homes, items are then paired with the bins that they prefer.
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from bascule.arrays import Floats, Ints
from bascule.plan.solver.homes import Homes
from bascule.plan.solver.problem import Problem, excess

_MAX_ROUNDS = 256  # step budget of a search, in rounds
_MAX_WORK = 1 << 18  # step budget for bins of several kinds, in rounds times items
_MAX_NEAREST = 1 << 20  # step budget where returns are found by binary search, likewise
_FEWEST_ROUNDS = 8
_MAX_OPTIONS = 1 << 14  # step budget of a round, in exchanges scored
_MAX_SINGLES = 128  # most items of a bin that are tried one by one; of more, an even sample
_MOST_FOR_TWOS = 512  # most items of which groups of two are tried in bins of several kinds
_MAX_SAMPLED = 32  # most items of a bin that form groups of two
_MAX_GROUPS = 1 << 13  # most groups of two items in one round
_PENALTY = 1e6  # score of any excess, and of an excess of 1 limit; far above all wishes
_ROUNDING = 2.0**-46  # relative changes of the weight away from home below this are rounding

Moves = tuple[Ints, Ints]
"""Items, and the bin that each of them goes to."""


def improve(problem: Problem, bin_of: Ints, target: float, homes: Homes | None = None) -> Ints:
    """Repair an assignment that exceeds limits, then improve it; never make it worse.

    It stops at the completion time `target`, in units of work per unit of speed. With homes, the
    makespan only matters above their ceiling.
    """
    score = Score(problem, target, homes)
    is_large = problem.num_kinds > 1 and problem.num_items > _MOST_FOR_TWOS
    state, depth, deepest = score.state(bin_of.copy()), 0, 1 if is_large else 2
    for _ in range(_rounds(score)):
        if score.is_simple and (state.work <= target * problem.speeds).all():
            break
        pairing = _pair(score, state, alone=depth > 0)
        moves = pairing and _exchange(score, state, pairing, in_twos=depth == 2)
        if moves:
            state = score.moved(state, moves)
            depth %= 2  # the worst bin goes on as long as single items help it
        elif depth == deepest:
            break
        else:
            depth += 2 if score.is_simple else 1  # groups of two hold single items too
    every, times = np.arange(problem.num_bins), state.work / problem.speeds
    if homes is not None and not score.excess(every, times, state.used).any():
        state = _bring_home(score, state)
    return state.bin_of


def _rounds(score: "Score") -> int:
    """Return the most rounds: fewer where speed matters more than the last percent."""
    num_bins, num_items = score.problem.num_bins, max(score.problem.num_items, 1)
    if score.homes is not None:
        return min(4 * num_bins + 32, _MAX_ROUNDS)
    if score.problem.num_kinds > 1:
        affordable = max(_MAX_WORK // num_items, _FEWEST_ROUNDS)
        return min(num_bins + _FEWEST_ROUNDS, affordable, _MAX_ROUNDS)
    if score.is_simple:
        return min(max(_MAX_NEAREST // num_items, 2 * _FEWEST_ROUNDS), _MAX_ROUNDS // 4)
    return _MAX_ROUNDS


@dataclass(frozen=True, slots=True)
class State:
    """An assignment, and the contents of each bin."""

    bin_of: Ints
    work: Floats  # (bins,)
    used: Floats  # (limits, bins) of what is limited
    counts: Ints  # (bins,) items


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of one or two items of a bin, by slot, then by work; the last column is empty."""

    slot: Ints  # (groups,)
    members: Ints  # (2, groups + 1) items; -1 for none
    sums: Floats  # (kinds + limits, groups + 1) sums of the members in the rows of `Score.table`

    def take(self, index: Ints) -> "Groups":
        """Return some of the groups, and the empty column."""
        columns = np.append(index, -1)
        parts = np.take(self.members, columns, axis=1), np.take(self.sums, columns, axis=1)
        return Groups(self.slot[index], *parts)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges to score: one group goes from source to destination, another group comes back."""

    groups: Groups
    source: Ints
    dest: Ints
    give: Ints
    take: Ints

    def at(self, index: Ints) -> "Exchanges":
        """Return some of the exchanges."""
        parts = self.source[index], self.dest[index], self.give[index], self.take[index]
        return Exchanges(self.groups, *parts)

    def moves(self) -> Moves:
        """Return the items that change bins, and their new bins."""
        members = self.groups.members
        items = np.concatenate((*members[:, self.give], *members[:, self.take]))
        bins = np.concatenate((self.dest, self.dest, self.source, self.source))
        return items[items >= 0], bins[items >= 0]


class Score:
    """One number by which assignments and exchanges are compared.

    Excess over limits, or with homes over their ceiling, comes first. Then the later of two
    completions or, with homes, the weight away from home.
    """

    def __init__(self, problem: Problem, target: float, homes: Homes | None) -> None:
        self.problem, self.target, self.homes = problem, target, homes
        self.ascending = problem.order[::-1].copy()
        rows = np.vstack([problem.kind_work, problem.use])
        self.table: Floats = np.hstack([rows, np.zeros((rows.shape[0], 1))])
        """(kinds + limits, items + 1) work and limited amounts of each item; 0 of none."""
        is_plain = homes is None and problem.num_kinds == 1
        self.is_simple = is_plain and not problem.limited
        self.budget = _MAX_OPTIONS if is_plain else _MAX_OPTIONS // 2
        self.budget_of_twos = 4 * self.budget if is_plain else self.budget

    def state(self, bin_of: Ints) -> State:
        """Return the contents of the bins under an assignment."""
        problem, num = self.problem, self.problem.num_bins
        used, counts = problem.used(bin_of), np.bincount(bin_of, minlength=num)
        return State(bin_of, problem.bin_work(bin_of), used, counts)

    def moved(self, state: State, moves: Moves) -> State:
        """Return the state after some moves."""
        bin_of = state.bin_of.copy()
        bin_of[moves[0]] = moves[1]
        return self.state(bin_of)

    def excess(self, bins: Ints, times: Floats, used: Floats) -> Floats:
        """Sum the relative amounts by which bins exceed their room and the ceiling; 0 is legal."""
        over = excess(used, self.problem.room[:, bins])
        if self.homes is not None:
            over = over + np.maximum(times / self.homes.ceiling - 1.0, 0.0)
        return over

    def before(self, state: State, bins: Ints) -> Floats:
        """Return the score of each bin that its exchanges must stay below."""
        times = state.work[bins] / self.problem.speeds[bins]
        if self.is_simple:
            return times / self.target
        over = self.excess(bins, times, state.used[:, bins])
        return np.where(over > 0.0, _PENALTY * (1.0 + over), times / self.target)

    def after(self, state: State, options: Exchanges) -> Floats:
        """Return the score of each exchange, the lower the better.

        It is the excess over limits; without any, the later completion of the two bins or, with
        homes, the change of the weight away from home.
        """
        problem, source, dest = self.problem, options.source, options.dest
        sums, give, take = options.groups.sums, options.give, options.take
        here, there = problem.kind_of[source], problem.kind_of[dest]
        left = state.work[source] - (sums[here, give] - sums[here, take])
        full = state.work[dest] + (sums[there, give] - sums[there, take])
        left, full = left / problem.speeds[source], full / problem.speeds[dest]
        if self.homes is None:
            wish = np.maximum(left, full) / self.target
            if not problem.limited:
                return wish
        else:
            wish = self._newly_away(self.homes, state, options)
        change = sums[problem.num_kinds :, give] - sums[problem.num_kinds :, take]
        over = self.excess(source, left, state.used[:, source] - change)
        over = over + self.excess(dest, full, state.used[:, dest] + change)
        return np.where(over > 0.0, _PENALTY * (1.0 + over), 0.0) + wish

    def _newly_away(self, homes: Homes, state: State, options: Exchanges) -> Floats:
        """Change of the share of all weight that is away from home."""
        change = np.zeros(options.give.size)
        for members in options.groups.members:
            if members.max() < 0:
                continue
            for index, bins in ((options.give, options.dest), (options.take, options.source)):
                items = members[index]
                moved = homes.away(items, bins) - homes.away(items, state.bin_of[items])
                change += np.where(items >= 0, moved, 0.0)
        return change / homes.most_away


@dataclass(frozen=True, slots=True)
class Pairing:
    """(K,) late bins, latest first, and (M, K) early bins, with a column for each late bin."""

    late: Ints
    early: Ints


def _pair(score: Score, state: State, *, alone: bool) -> Pairing | None:
    """Pair bins above a limit with those below; without any, late bins with early ones.

    With `alone`, only the worst bin, and without excess with all bins that complete earlier.
    """
    problem = score.problem
    times = state.work / problem.speeds
    if score.homes is not None or problem.limited:
        over = score.excess(np.arange(problem.num_bins), times, state.used)
        if over.any():
            full = (state.used / problem.room).max(axis=0, initial=0.0)
            if score.homes is not None:
                full = np.maximum(full, times / score.homes.ceiling)
            late = _ranked(-over, (over > 0.0) & (state.counts > 0))
            return _match(late[: 1 if alone else None], _ranked(full, over == 0.0))
        if score.homes is not None:
            return None
    late = _ranked(-times, (times > score.target) & (state.counts > 0))
    if alone and late.size:
        return _match(late[:1], _ranked(times, times < times[late[0]]))
    # Where no bin can be expected to be early, those below the mean are.
    middle = max(score.target, float(state.work.sum() / problem.speeds.sum()))
    return _match(late[times[late] > middle], _ranked(times, times < middle))


def _ranked(rank: Floats, chosen: NDArray[np.bool_]) -> Ints:
    """Return the chosen bins by ascending rank; ties by index."""
    index = np.flatnonzero(chosen)
    return index[np.argsort(rank[index], kind="stable")]


def _match(late: Ints, early: Ints) -> Pairing | None:
    """Compare the k-th late bin with the k-th early one, and with every K-th after it."""
    if late.size == 0 or early.size == 0:
        return None
    late = late[: early.size]
    num_each = early.size // late.size
    return Pairing(late, early[: num_each * late.size].reshape(num_each, late.size))


def _exchange(score: Score, state: State, pairing: Pairing, *, in_twos: bool) -> Moves | None:
    """Return the best exchange of every late bin that lowers its score; None if there is none."""
    bins = np.concatenate((pairing.late, pairing.early.ravel()))
    slots = np.full(score.problem.num_bins, -1)  # 0..K-1 for the late bins, then the early ones
    slots[bins] = np.arange(bins.size)
    groups = _groups(score, slots[state.bin_of], in_twos=in_twos)
    if score.is_simple:
        options, after = _nearest(score, state, pairing, groups)
    else:
        options = _all_options(score, pairing, groups, in_twos=in_twos)
        after = score.after(state, options)
    best = _first_best(after, options.groups.slot[options.give])
    best = best[after[best] < score.before(state, pairing.late)]
    return options.at(best).moves() if best.size else None


def _groups(score: Score, slots: Ints, *, in_twos: bool) -> Groups:
    """Return groups of the items in the bins compared; negative slots of items are not."""
    num_items = slots.size
    keys = slots[score.ascending] * num_items + np.arange(num_items)
    keys = np.sort(keys[keys >= 0])
    slot, place = np.divmod(keys, num_items)
    members = np.full((2, keys.size + 1), -1)
    members[0, :-1] = score.ascending[place]
    singles = Groups(slot, members, np.take(score.table, members[0], axis=1))
    return _in_twos(singles) if in_twos else singles


def _in_twos(singles: Groups) -> Groups:
    """Add groups of two items of a bin, by an even sample of large bins, as the budget allows."""
    index = _sample(singles.slot, _MAX_SAMPLED)
    counts = np.bincount(singles.slot[index])
    allowed = np.cumsum(counts * (counts - 1) // 2) <= _MAX_GROUPS
    index = index[allowed[singles.slot[index]]]
    partners = np.cumsum(counts)[singles.slot[index]] - np.arange(index.size) - 1
    place, after = _spread(partners)
    first, second = index[place], index[place + 1 + after]
    slot = np.concatenate((singles.slot, singles.slot[first]))
    members, sums = singles.members, singles.sums
    pairs, pair_sums = members[0, np.stack((first, second))], sums[:, first] + sums[:, second]
    members = np.concatenate((members[:, :-1], pairs, members[:, -1:]), axis=1)
    sums = np.concatenate((sums[:, :-1], pair_sums, sums[:, -1:]), axis=1)
    return Groups(slot, members, sums).take(np.lexsort((sums[0, :-1], slot)))


def _sample(slot: Ints, most: int) -> Ints:
    """Return indices of at most `most` evenly spaced entries of each slot; slots ascend."""
    counts = np.bincount(slot)
    within = np.arange(slot.size) - (np.cumsum(counts) - counts)[slot]
    span = np.maximum(counts, most)[slot]
    return np.flatnonzero(within * most // span != (within - 1) * most // span)


def _all_options(score: Score, pairing: Pairing, groups: Groups, *, in_twos: bool) -> Exchanges:
    """Return every group of a late bin against those of its early bins, and against nothing."""
    num_late, budget = pairing.late.size, score.budget
    # Of a bin, so that one row of the pairing is affordable; twos are tried last, and more of them.
    most = isqrt((score.budget_of_twos if in_twos else budget) // num_late)
    most = most if in_twos else min(most, _MAX_SINGLES)
    counts = np.bincount(groups.slot, minlength=num_late + pairing.early.size)
    if counts.max() > most:
        groups = groups.take(_sample(groups.slot, most))
        counts = np.bincount(groups.slot, minlength=counts.size)
    lane_of, counts = groups.slot[: counts[:num_late].sum()], counts[num_late:]
    lanes = np.bincount(lane_of, minlength=num_late)
    cost_of_rows = np.cumsum(((counts + 1).reshape(pairing.early.shape) * lanes).sum(axis=1))
    rows = max(int(np.searchsorted(cost_of_rows, budget, side="right")), 1)
    slots = (lane_of[:, None] + num_late * np.arange(rows)).ravel()
    cell, within = _spread(counts[slots] + 1)
    slot, give = slots[cell], cell // rows
    opens = lane_of.size + np.cumsum(counts) - counts
    take = np.where(within < counts[slot], opens[slot] + within, -1)
    return Exchanges(groups, pairing.late[lane_of[give]], pairing.early.ravel()[slot], give, take)


def _nearest(
    score: Score, state: State, pairing: Pairing, groups: Groups
) -> tuple[Exchanges, Floats]:
    """Return for each group of a late bin the early bin and the return that end first.

    With an exchange that lowers the late bin by d, both complete together at the ideal
    d = (t_late - t_early) / (1 / s_late + 1 / s_early). Between bins of one kind without limits
    only the two returns nearest to it can be best. A binary search finds them in one sorted array:
    of each early bin nothing (work 0), its groups by work, and a stop that no search passes.
    """
    num_late, num_early, shape = pairing.late.size, pairing.early.size, pairing.early.shape
    split = int(np.searchsorted(groups.slot, num_late))
    lane, slot, work = groups.slot[:split], groups.slot[split:] - num_late, groups.sums[0, :-1]
    speeds, most_work = score.problem.speeds, 2.0 * float(score.table[0].max())
    bins = np.arange(num_early + 1)
    ends = np.searchsorted(slot, bins) + 2 * bins
    opens, stops = ends[:-1], ends[1:] - 1
    places = np.arange(slot.size) + 2 * slot + 1
    below, index = np.zeros(slot.size + 2 * num_early), np.full(slot.size + 2 * num_early, -1)
    below[places], index[places] = work[split:], np.arange(split, groups.slot.size)
    below[stops] = 1.5 * most_work
    keys = below + np.repeat(2.0 * most_work * bins[:-1], stops - opens + 1)
    below[stops] = -np.inf
    above = np.abs(below)
    late_speed, early_speed = speeds[pairing.late], speeds[pairing.early]
    late_load, early_load = state.work[pairing.late], state.work[pairing.early]
    ideal = (late_load / late_speed - early_load / early_speed) / (
        1.0 / late_speed + 1.0 / early_speed
    )
    give, opens = work[:split], opens.reshape(shape)
    wanted = (keys[opens] - ideal).take(lane, axis=1) + give
    returns = np.searchsorted(keys, wanted.ravel()).reshape(wanted.shape)
    returns = np.maximum(returns, opens.take(lane, axis=1))
    early_after = early_load.take(lane, axis=1) + give - below.take(returns - 1)
    early_after /= early_speed.take(lane, axis=1)
    late_after = (late_load[lane] - give + above.take(returns)) / late_speed[lane]
    after = np.minimum(early_after, late_after)
    row, column = after.argmin(axis=0), np.arange(split)
    place = returns[row, column]
    place -= early_after[row, column] <= late_after[row, column]
    dest = pairing.early[row, lane]
    options = Exchanges(groups, pairing.late[lane], dest, column, index[place])
    return options, after[row, column] / score.target


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Return each index as often as counted, and its number among its equals."""
    cell = np.repeat(np.arange(counts.size), counts)
    return cell, np.arange(cell.size) - (np.cumsum(counts) - counts)[cell]


def _first_best(scores: Floats, lane: Ints) -> Ints:
    """Return for each lane (ascending, all present) the place of its lowest score, the first."""
    starts = np.flatnonzero(np.diff(lane, prepend=-1))
    best = np.minimum.reduceat(scores, starts)
    hits = np.flatnonzero(scores == best[lane])[::-1]
    chosen = np.empty(starts.size, dtype=np.int64)
    chosen[lane[hits]] = hits  # the first hit of a lane is written last
    return chosen


def _bring_home(score: Score, state: State) -> State:
    """Move items to bins they would rather be in, or swap them with items of these bins.

    In windows over the items: of each, the exchanges that gain most and share no bin are made.
    """
    every = np.arange(state.bin_of.size)
    members = np.stack([np.append(every, -1), np.full(every.size + 1, -1)])
    groups = Groups(every, members, score.table)
    start, gained = 0, False
    for _ in range(_MAX_ROUNDS):
        wishes = _wishes(score, state.bin_of, start)
        if wishes is None:
            if not gained:
                break
            start, gained = 0, False
            continue
        moves = _homeward(score, state, groups, *wishes[:2])
        if moves is None:
            gained &= start > 0  # nothing has changed since this sweep began
            start = wishes[2]
            continue
        gained, state = True, score.moved(state, moves)
    return state


def _wishes(score: Score, bin_of: Ints, start: int) -> tuple[Ints, Ints, int] | None:
    """Return items, those with most to gain first, and better bins for them; from `start` on.

    As many as a round affords, and where the next window starts; None at the end.
    """
    homes = score.homes
    assert homes is not None
    every, home = np.arange(bin_of.size), np.where(homes.bins < 0, bin_of, homes.bins)
    gain = homes.away(every, bin_of) - homes.away(every, home)
    items = np.flatnonzero(gain > 0.0)
    items = items[np.argsort(-gain[items], kind="stable")][start:]
    if items.size == 0:
        return None
    items = items[: score.budget]
    pair_items, dest = items, homes.bins[items]
    lane = np.arange(items.size)
    if homes.regions is not None:
        regions, bins = np.nonzero(homes.regions.shares.T > 0.0)
        wanted = homes.regions.of_items[items]
        counts = np.bincount(regions, minlength=homes.regions.shares.shape[1])
        opens = np.searchsorted(regions, wanted)
        lane, within = _spread(counts[wanted])
        pair_items, dest = items[lane], bins[opens[lane] + within]
        better = homes.away(pair_items, dest) < homes.away(pair_items, bin_of[pair_items])
        lane, pair_items, dest = lane[better], pair_items[better], dest[better]
    options = np.cumsum(np.bincount(bin_of, minlength=score.problem.num_bins)[dest] + 1)
    fitting = max(int(np.searchsorted(options, score.budget)), 1)
    last = int(lane[min(fitting, lane.size) - 1]) if lane.size else items.size - 1
    inside = lane <= last
    return pair_items[inside], dest[inside], start + last + 1


def _homeward(score: Score, state: State, groups: Groups, items: Ints, dest: Ints) -> Moves | None:
    """Return the moves of items to bins, and swaps with items there, that gain most."""
    if items.size == 0:
        return None
    members = np.append(np.argsort(state.bin_of, kind="stable"), -1)
    cell, within = _spread(state.counts[dest] + 1)
    opens = np.cumsum(state.counts) - state.counts
    swap = within < state.counts[dest[cell]]
    take = np.where(swap, members[opens[dest[cell]] + within], -1)
    give = items[cell]
    options = Exchanges(groups, state.bin_of[give], dest[cell], give, take)
    after = score.after(state, options)
    chosen = _first_best(after, cell)
    chosen = chosen[after[chosen] < -_ROUNDING]
    if chosen.size == 0:
        return None
    options = options.at(chosen[np.argsort(after[chosen], kind="stable")])
    bins = np.stack((options.source, options.dest), axis=1)
    is_first = np.zeros(bins.size, dtype=bool)
    is_first[np.unique(bins, return_index=True)[1]] = True
    return options.at(np.flatnonzero(is_first.reshape(bins.shape).all(axis=1))).moves()
