"""The one local search: within limits, over bins of several kinds, near home.

A search makes exchanges: a bin gives a group of one or two items to another bin, and may take a
group back. The `Score` of what it leaves behind in its two bins decides which exchange is made: a
search first repairs and then improves. Three neighbourhoods take turns, each where those before it
no longer help: single items between many pairs of bins, single items of the worst bin and any
other, and groups of two items of the worst bin. Where nothing passes a limit and homes are given,
items are paired with the bins they would rather be in.
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from bascule.arrays import Floats, Ints
from bascule.plan.solver.homes import Homes
from bascule.plan.solver.problem import Problem, excess

_MAX_ROUNDS = 256
"""Step budget of a search, in rounds."""

_MAX_WORK = 1 << 18
"""The same for bins of several kinds, in rounds times items."""

_MAX_SINGLES = 128
"""Most items of a bin that are tried one by one in a round; of more, an even sample by work."""

_WARM_UP = 8
"""Rounds after which a repair near home must keep to a schedule that ends with its budget."""

_MOST_FOR_TWOS = 128
"""Most items for bins of several kinds of which groups of two are tried; of more, single items fill
bins as well."""

_MORE_TWOS = 4
"""Times the budget that may be spent on groups of two of a bin within limits."""

_SIGNS = np.array([-1.0, 1.0])

_ROUNDING = 2.0**-46
"""Relative changes of the weight away from home below this are rounding."""


Moves = tuple[Ints, Ints]
"""Items, and the bin that each of them goes to."""

_MAX_GROUPS = 1 << 13
"""Most groups of two items in one round."""

_MAX_SAMPLED = 32
"""Most items of a bin that form groups of two."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Late bins and the early bins that each is compared with.

    Attributes:
        late: (K,) late bins, latest first.
        early: (M, K) early bins; column k is compared with late bin k; no bin occurs twice.
    """

    late: Ints
    early: Ints

    def slot_of_bin(self, num_bins: int) -> Ints:
        """(bins,) slots 0..K-1 for the late bins, then the early ones; -1 for all others."""
        bins = np.concatenate((self.late, self.early.ravel()))
        slots = np.full(num_bins, -1)
        slots[bins] = np.arange(bins.size)
        return slots


@dataclass(frozen=True, slots=True)
class Groups:
    """One or two items of a bin that leave it together, sorted by slot, then by work.

    Attributes:
        slot: Position of the bin among the bins compared.
        work: Work of the items together.
        first: The item.
        second: The second item; -1 if there is none.
    """

    slot: Ints
    work: Floats
    first: Ints
    second: Ints

    def take(self, index: Ints | slice) -> "Groups":
        """The groups at ``index``."""
        return Groups(self.slot[index], self.work[index], self.first[index], self.second[index])


@dataclass(frozen=True, slots=True)
class Offers:
    """The best exchange found for each group that a late bin could give.

    Attributes:
        score: What the exchange leaves behind; lower is better.
        row: Row of the early bin in ``Pairing.early``.
        taken: The group that comes back, an index; -1 if none does.
    """

    score: Floats
    row: Ints
    taken: Ints


def match_bins(late: Ints, early: Ints) -> Pairing | None:
    """Compare the k-th late bin with the k-th early one, and with every K-th after it."""
    if late.size == 0 or early.size == 0:
        return None
    late = late[: early.size]
    num_each = early.size // late.size
    return Pairing(late, early[: num_each * late.size].reshape(num_each, late.size))


def bin_groups(work: Floats, slots: Ints, *, in_twos: bool) -> Groups:
    """Groups of the items in the bins compared.

    Args:
        work: (items,) ascending.
        slots: (items,) slot of each item's bin; negative if it is not compared.
        in_twos: Whether to add groups of two.
    """
    num_items = work.size
    keys = slots * num_items + np.arange(num_items)
    keys = np.sort(keys[slots >= 0])
    slot, item = np.divmod(keys, num_items)
    singles = Groups(slot, work[item], item, np.full(item.size, -1))
    return _in_twos(singles) if in_twos else singles


def _in_twos(singles: Groups) -> Groups:
    """Add groups of two items of a bin, for as many bins as the budget allows.

    From a bin with many items, an even sample by work is taken.
    """
    sampled = singles.take(sample(singles.slot, _MAX_SAMPLED))
    counts = np.bincount(sampled.slot)
    allowed = np.cumsum(counts * (counts - 1) // 2) <= _MAX_GROUPS
    inside = sampled.take(np.flatnonzero(allowed[sampled.slot]))
    ends = np.cumsum(counts)[inside.slot]
    index = np.arange(inside.slot.size)
    partners = ends - index - 1
    one = np.repeat(index, partners)
    offset = np.arange(one.size) - np.repeat(np.cumsum(partners) - partners, partners)
    other = one + 1 + offset
    slot = np.concatenate((singles.slot, inside.slot[one]))
    work = np.concatenate((singles.work, inside.work[one] + inside.work[other]))
    first = np.concatenate((singles.first, inside.first[one]))
    second = np.concatenate((singles.second, inside.first[other]))
    order = np.lexsort((work, slot))
    return Groups(slot, work, first, second).take(order)


def sample(slot: Ints, most: int) -> Ints:
    """Indices of at most ``most`` evenly spaced entries of each slot; slots ascend."""
    counts = np.bincount(slot)
    within = np.arange(slot.size) - (np.cumsum(counts) - counts)[slot]
    span = np.maximum(counts, most)[slot]
    return np.flatnonzero(within * most // span != (within - 1) * most // span)


def split_groups(groups: Groups, num_late: int) -> tuple[Groups, Groups]:
    """The groups of the late bins, and those of the early ones with slots from 0."""
    split = int(np.searchsorted(groups.slot, num_late))
    late, early = groups.take(slice(split)), groups.take(slice(split, None))
    return late, Groups(early.slot - num_late, early.work, early.first, early.second)


def best_exchanges(
    pairing: Pairing, given: Groups, offered: Groups, offers: Offers, before: Floats
) -> Moves | None:
    """Per late bin, the offer with the lowest score, ties to the first, if below ``before``.

    Every late bin must have a group. None if no exchange lowers a score.
    """
    lanes = np.arange(pairing.late.size)
    best = np.minimum.reduceat(offers.score, np.searchsorted(given.slot, lanes))
    improved = np.flatnonzero(best < before)
    if improved.size == 0:
        return None
    hits = np.flatnonzero(offers.score == best[given.slot])[::-1]
    chosen = np.empty_like(lanes)
    chosen[given.slot[hits]] = hits  # of several hits in a slot the last written, first one stays
    chosen = chosen[improved]
    taken = offers.taken[chosen]
    some = taken >= 0
    early = pairing.early[offers.row[chosen], improved]
    late, taken = pairing.late[improved][some], taken[some]
    parts = (given.first[chosen], given.second[chosen], offered.first[taken], offered.second[taken])
    items, bins = np.concatenate(parts), np.concatenate((early, early, late, late))
    return items[items >= 0], bins[items >= 0]


_MAX_OPTIONS = 1 << 14
"""Step budget of a round, in exchanges scored."""

_PENALTY = 1e6
"""Score of any excess, and of an excess of 1 limit; far above all wishes."""


@dataclass(frozen=True, slots=True)
class Held:
    """An assignment, and what its bins hold: work, what is limited, and items."""

    bin_of: Ints
    work: Floats
    used: Floats
    counts: Ints


@dataclass(frozen=True, slots=True)
class Pool:
    """Groups that can be given and taken, with one more at the end that is no group.

    Attributes:
        groups: The groups.
        work: (kinds, groups + 1) their work; 0 for none.
        use: (limits, groups + 1) what they take of what is limited; 0 for none.
    """

    groups: Groups
    work: Floats
    use: Floats

    @staticmethod
    def of(groups: Groups, work: Floats, use: Floats) -> "Pool":
        """Sums over the members of each group."""
        members = np.stack([np.append(groups.first, -1), np.append(groups.second, -1)])
        nothing = np.zeros((work.shape[0] + use.shape[0], 1))
        values = np.hstack([np.vstack([work, use]), nothing])
        sums = values[:, members].sum(axis=1)
        return Pool(groups, sums[: work.shape[0]], sums[work.shape[0] :])


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges to score: from where a group goes where, and what comes back (-1: nothing)."""

    pool: Pool
    source: Ints
    dest: Ints
    give: Ints
    take: Ints

    def at(self, index: Ints) -> "Exchanges":
        """Some of the exchanges."""
        parts = self.source[index], self.dest[index], self.give[index], self.take[index]
        return Exchanges(self.pool, *parts)


@dataclass(frozen=True, slots=True)
class Score:
    """What assignments and exchanges are compared by, as one number.

    Excess comes first: what passes a limit or, with homes, the ceiling of the completion time. Then
    the later of two completions or, with homes, the weight away from home. Items are numbered by
    ascending work.

    Attributes:
        problem: Bins and their room.
        target: Completion time that is good enough.
        homes: If given, what counts once no bin passes its room or the ceiling.
        singles: Every item as a group.
    """

    problem: Problem
    target: float
    homes: Homes | None
    singles: Pool

    @property
    def is_plain(self) -> bool:
        """Whether there is one kind of bin, and no home."""
        return self.homes is None and self.problem.num_kinds == 1

    @property
    def budget(self) -> int:
        """Exchanges to score in a round: fewer where each of them takes longer."""
        return _MAX_OPTIONS if self.is_plain else _MAX_OPTIONS // 2

    @staticmethod
    def of(problem: Problem, target: float, homes: Homes | None, order: Ints) -> "Score":
        """Renumber the items."""
        homes = None if homes is None else homes.reordered(order)
        none = np.full(order.size, -1)
        groups = Groups(none, problem.work[order], np.arange(order.size), none)
        singles = Pool.of(groups, problem.kind_work[:, order], problem.use[:, order])
        return Score(problem, target, homes, singles)

    def held(self, bin_of: Ints) -> Held:
        """What bins hold under an assignment."""
        problem, num = self.problem, self.problem.num_bins
        if problem.num_kinds == 1:
            own = self.singles.work[0, :-1]
        else:
            own = self.singles.work[problem.kind_of[bin_of], np.arange(bin_of.size)]
        used = [np.bincount(bin_of, use[:-1], num) for use in self.singles.use]
        return Held(
            bin_of,
            problem.carried_work + np.bincount(bin_of, own, num),
            np.array(used, dtype=np.float64).reshape(len(used), num),
            np.bincount(bin_of, minlength=num),
        )

    def excess(self, bins: Ints, times: Floats, used: Floats) -> Floats:
        """By how much bins pass their room and the ceiling; 0 is legal."""
        over = excess(used, self.problem.room[:, bins])
        if self.homes is not None:
            over = over + np.maximum(times / self.homes.ceiling - 1.0, 0.0)
        return over

    def total_excess(self, held: Held) -> float:
        """Excess of all bins together."""
        every = np.arange(self.problem.num_bins)
        return float(self.excess(every, held.work / self.problem.speeds, held.used).sum())

    def before(self, held: Held, bins: Ints) -> Floats:
        """What exchanges of each bin must stay below."""
        times = held.work[bins] / self.problem.speeds[bins]
        over = self.excess(bins, times, held.used[:, bins])
        return np.where(over > 0.0, _PENALTY * (1.0 + over), times / self.target)

    def after(self, held: Held, options: Exchanges) -> Floats:
        """Excess of both bins first; then the later completion, or the weight newly away."""
        speeds, source, dest = self.problem.speeds, options.source, options.dest
        lost, gained = self.work_changes(options)
        left = (held.work[source] - lost) / speeds[source]
        there = (held.work[dest] + gained) / speeds[dest]
        if self.homes is None:
            wish = np.maximum(left, there) / self.target
            if not self.problem.limited:
                return wish
        else:
            wish = self._newly_away(self.homes, held, options)
        change = options.pool.use[:, options.give] - options.pool.use[:, options.take]
        over = self.excess(source, left, held.used[:, source] - change)
        over = over + self.excess(dest, there, held.used[:, dest] + change)
        return np.where(over > 0.0, _PENALTY * (1.0 + over), 0.0) + wish

    def work_changes(self, options: Exchanges) -> tuple[Floats, Floats]:
        """Work that the sources lose, and that the destinations gain."""
        work, give, take = options.pool.work, options.give, options.take
        if self.problem.num_kinds == 1:
            change = work[0, give] - work[0, take]
            return change, change
        here, there = (self.problem.kind_of[bins] for bins in (options.source, options.dest))
        return work[here, give] - work[here, take], work[there, give] - work[there, take]

    def _newly_away(self, homes: Homes, held: Held, options: Exchanges) -> Floats:
        """Change of the share of all weight that is away from home."""
        groups = options.pool.groups
        change = np.zeros(options.give.size)
        for members in (groups.first, groups.second):
            real = members >= 0
            if not real.any():
                continue
            now = np.append(np.where(real, homes.away(members, held.bin_of[members]), 0.0), 0.0)
            members, real = np.append(members, -1), np.append(real, False)
            for index, bins in ((options.give, options.dest), (options.take, options.source)):
                then = np.where(real[index], homes.away(members[index], bins), 0.0)
                change += then - now[index]
        return change / homes.most_away


def improve(problem: Problem, bin_of: Ints, target: float, homes: Homes | None = None) -> Ints:
    """Repair an assignment that passes limits, then improve it; never makes it worse.

    O(_MAX_ROUNDS) rounds of O(n log n + score.budget).

    Args:
        problem: Items, bins and limits.
        bin_of: (items,) the start; it may pass the limits.
        target: Completion time that is good enough, in units of work per unit of speed.
        homes: If given, the makespan only matters above its ceiling, and being away counts.
    """
    order = problem.order[::-1]
    score = Score.of(problem, target, homes, order)
    found, rounds = bin_of[order], _rounds(problem, homes)
    at_first = score.total_excess(score.held(found)) if homes is not None else 0.0
    is_large = problem.num_kinds > 1 and problem.num_items > _MOST_FOR_TWOS
    depth, deepest, unloaded = 0, 1 if is_large else 2, False
    for turn in range(rounds):
        held = score.held(found)
        is_warm = homes is not None and turn >= _WARM_UP
        if is_warm and score.total_excess(held) > at_first * (1.0 - turn / rounds):
            break  # at this pace it is not repaired within the budget
        pairing = _pair(score, held, alone=depth > 0)
        if pairing is None:
            moves = None
        elif depth == 1:
            moves = _unload(score, held, pairing)
        else:
            moves = _exchange(score, held, pairing, in_twos=depth == 2)
        if moves is not None:
            found[moves[0]] = moves[1]
            unloaded = depth == 1
            depth = 1 if unloaded else 0
        elif depth == 1 and unloaded:  # other pairs of bins than before may help now
            depth, unloaded = 0, False
        elif depth == deepest:
            break
        else:
            depth += 1
    if homes is not None and not score.total_excess(score.held(found)):
        found = _bring_home(score, found)
    result = np.empty_like(bin_of)
    result[order] = found
    return result


def _rounds(problem: Problem, homes: Homes | None) -> int:
    """Step budget: what is only worth something if it is quick gets less."""
    if homes is not None:
        return min(4 * problem.num_bins + 32, _MAX_ROUNDS)
    if problem.num_kinds > 1:
        affordable = max(_MAX_WORK // problem.num_items, _WARM_UP)
        return min(problem.num_bins + _WARM_UP, affordable, _MAX_ROUNDS)
    return _MAX_ROUNDS


def _pair(score: Score, held: Held, *, alone: bool) -> Pairing | None:
    """Bins above a limit with those below; without any, late bins with early ones.

    With ``alone``, only the worst bin, and without excess with all bins that complete earlier.
    """
    problem = score.problem
    times = held.work / problem.speeds
    over = score.excess(np.arange(problem.num_bins), times, held.used)
    if over.any():
        full = (held.used / problem.room).max(axis=0, initial=0.0)
        if score.homes is not None:
            full = np.maximum(full, times / score.homes.ceiling)
        late = _ranked(-over, (over > 0.0) & (held.counts > 0))
        return match_bins(late[: 1 if alone else None], _ranked(full, over == 0.0))
    if score.homes is not None:
        return None
    late = _ranked(-times, (times > score.target) & (held.counts > 0))
    if alone and late.size:
        return match_bins(late[:1], _ranked(times, times < times[late[0]]))
    # Where no bin can be expected to be early, those below the mean are.
    middle = max(score.target, float(held.work.sum() / problem.speeds.sum()))
    return match_bins(late[times[late] > middle], _ranked(times, times < middle))


def _ranked(rank: Floats, chosen: NDArray[np.bool_]) -> Ints:
    """Indices of the chosen bins by ascending rank; ties by index."""
    index = np.flatnonzero(chosen)
    return index[np.argsort(rank[index], kind="stable")]


def _exchange(score: Score, held: Held, pairing: Pairing, *, in_twos: bool) -> Moves | None:
    """Score the groups of late bins against those of their early bins, and against nothing.

    Returns:
        The best exchange of every late bin whose score it lowers; None if there is none.
    """
    slots = pairing.slot_of_bin(score.problem.num_bins)[held.bin_of]
    groups = bin_groups(score.singles.groups.work, slots, in_twos=in_twos)
    num_late = pairing.late.size
    # Of a bin, so that one row of the pairing is affordable; twos are tried last, and more of them.
    wide = _MORE_TWOS if in_twos and score.is_plain else 1
    most = isqrt(wide * score.budget // num_late)
    most = most if in_twos else min(most, _MAX_SINGLES)
    if np.bincount(groups.slot).max() > most:
        groups = groups.take(sample(groups.slot, most))
    given, offered = split_groups(groups, num_late)
    counts = np.bincount(offered.slot, minlength=pairing.early.size)
    rows = _affordable_rows(score.budget, given, counts.reshape(pairing.early.shape))
    slots = given.slot[:, None] + num_late * np.arange(rows)
    cell, within = _spread((counts[slots] + 1).ravel())
    slot, give = slots.ravel()[cell], cell // rows
    taken = np.where(within < counts[slot], (np.cumsum(counts) - counts)[slot] + within, -1)
    late, early = pairing.late[given.slot][give], pairing.early.ravel()[slot]
    take = np.where(taken >= 0, taken + given.slot.size, -1)
    pool = Pool.of(groups, score.singles.work[:, :-1], score.singles.use[:, :-1])
    after = score.after(held, Exchanges(pool, late, early, give, take))
    chosen = _first_best(after, give)
    offers = Offers(after[chosen], slot[chosen] // num_late, taken[chosen])
    return best_exchanges(pairing, given, offered, offers, score.before(held, pairing.late))


def _unload(score: Score, held: Held, pairing: Pairing) -> Moves | None:
    """The best move or swap of one late bin with any early one, if it lowers the score."""
    late, early = int(pairing.late[0]), pairing.early[:, 0]
    own = np.flatnonzero(held.bin_of == late)
    own = own[sample(np.zeros(own.size, dtype=np.int64), _MAX_SINGLES)]
    fitting = np.searchsorted(np.cumsum(held.counts[early] + 1), score.budget // own.size, "right")
    early = early[: max(int(fitting), 1)]
    offers = np.zeros(held.counts.size, dtype=bool)
    offers[early] = True
    others = np.flatnonzero(offers[held.bin_of])
    take = np.concatenate((np.full(early.size, -1), others))
    dest = np.concatenate((early, held.bin_of[others]))
    give, cell = np.repeat(own, take.size), np.tile(np.arange(take.size), own.size)
    source = np.full(give.size, late)
    options = Exchanges(score.singles, source, dest[cell], give, take[cell])
    after = score.after(held, options)
    best = int(after.argmin())
    if after[best] >= score.before(held, pairing.late)[0]:
        return None
    items = np.array([give[best], options.take[best]])
    bins = np.array([options.dest[best], late])
    return items[items >= 0], bins[items >= 0]


def _affordable_rows(budget: int, given: Groups, counts: Ints) -> int:
    """Rows of the pairing whose options fit the budget; at least 1."""
    lanes = np.bincount(given.slot, minlength=counts.shape[1])
    options = np.cumsum(((counts + 1) * lanes).sum(axis=1))
    return max(int(np.searchsorted(options, budget, side="right")), 1)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Each index as often as counted, and its number among its equals."""
    cell = np.repeat(np.arange(counts.size), counts)
    return cell, np.arange(cell.size) - (np.cumsum(counts) - counts)[cell]


def _first_best(scores: Floats, lane: Ints) -> Ints:
    """Per lane (ascending, all present), the place of its lowest score; ties to the first."""
    starts = np.flatnonzero(np.diff(lane, prepend=-1))
    best = np.minimum.reduceat(scores, starts)
    hits = np.flatnonzero(scores == best[lane])[::-1]
    chosen = np.empty(starts.size, dtype=np.int64)
    chosen[lane[hits]] = hits  # the first hit of a lane is written last
    return chosen


def _bring_home(score: Score, bin_of: Ints) -> Ints:
    """Move items to bins they would rather be in, or swap them with items of these bins.

    In windows over the items, those with most to gain first, until none gains: of each window the
    exchanges that gain most and are legal together are made. All are legal at the start.
    """
    assert score.homes is not None
    held, start, gained = score.held(bin_of), 0, False
    for _ in range(_MAX_ROUNDS):
        wishes = _wishes(score, held.bin_of, start)
        if wishes is None:
            if not gained:
                break
            start, gained = 0, False
            continue
        moves = _homeward(score, held, *wishes[:2])
        if moves is None:
            gained &= start > 0  # nothing has changed since this sweep began
            start = wishes[2]
            continue
        gained = True
        bin_of = held.bin_of.copy()
        bin_of[moves[0]] = moves[1]
        held = score.held(bin_of)
    return held.bin_of


def _wishes(score: Score, bin_of: Ints, start: int) -> tuple[Ints, Ints, int] | None:
    """Items, those with most to gain first, and bins that are better for them; from ``start`` on.

    Returns:
        Items and bins whose exchanges fit a round, and where the next window starts; None at the
        end.
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


def _homeward(score: Score, held: Held, items: Ints, dest: Ints) -> Moves | None:
    """Of moves of items to bins, and swaps with items there, those that gain most."""
    if items.size == 0:
        return None
    members = np.argsort(held.bin_of, kind="stable")
    cell, within = _spread(held.counts[dest] + 1)
    opens = np.cumsum(held.counts) - held.counts
    swap = within < held.counts[dest[cell]]
    take = np.where(swap, np.append(members, -1)[opens[dest[cell]] + within], -1)
    give = items[cell]
    options = Exchanges(score.singles, held.bin_of[give], dest[cell], give, take)
    after = score.after(held, options)
    chosen = _first_best(after, cell)
    chosen = chosen[after[chosen] < -_ROUNDING]
    if chosen.size == 0:
        return None
    return _together(score, held, options.at(chosen[np.argsort(after[chosen], kind="stable")]))


def _together(score: Score, held: Held, options: Exchanges) -> Moves:
    """Of exchanges that are legal one by one, best first, those that are legal together."""
    speeds, work, used = score.problem.speeds, held.work.copy(), held.used.copy()
    lost, gained = score.work_changes(options)
    changes = score.singles.use[:, options.give] - score.singles.use[:, options.take]
    bins = np.stack([options.source, options.dest], axis=1)
    signed = np.stack([-lost, gained], axis=1)
    items = np.stack([options.give, options.take], axis=1)
    moved = np.zeros(held.bin_of.size + 1, dtype=bool)
    made: list[int] = []
    for index in range(lost.size):
        pair = bins[index]
        if moved[items[index]].any():
            continue
        now = work[pair] + signed[index]
        uses = used[:, pair] + np.multiply.outer(changes[:, index], _SIGNS)
        if not score.excess(pair, now / speeds[pair], uses).any():
            work[pair], used[:, pair] = now, uses
            moved[items[index]] = True
            moved[-1] = False  # taking nothing back
            made.append(index)
    back = np.array(made)[options.take[made] >= 0]
    source, dest = options.source, options.dest
    return (
        np.concatenate((options.give[made], options.take[back])),
        np.concatenate((dest[made], source[back])),
    )
