"""The score of the local search: limits before makespan, or before what is away from home."""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.solver.exchanges import Groups
from bascule.plan.solver.homes import Homes
from bascule.plan.solver.problem import Problem, excess

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
