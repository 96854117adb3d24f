"""Microbatches in which groups of ranks share packs of sequences: dynamic context parallelism.

A microbatch has a level: the seconds that its ranks may take. Sequences go, longest first, to the
smallest groups that hold them within the level, there to the fullest group. A few levels are tried;
the level that wastes the smallest share of the ranks' time makes the next microbatch.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from bascule.arrays import Bools, Floats, Ints
from bascule.errors import PlanError

_LESS_WASTE = 0.003
"""A lower level, which makes more microbatches, must waste a share smaller by this."""

_MORE = (1.01, 1.03, 1.1, 1.2, 1.5)
"""Levels over the even share of the work; the last are for one microbatch of all sequences."""


@dataclass(frozen=True)
class ContextGroup:
    """Neighbouring ranks that share a pack."""

    num_ranks: int
    load: float  # seconds of each rank
    members: list[int]  # places of the sequences


@dataclass(frozen=True, eq=False)
class GroupPrices:
    """What sequences cost in groups of each possible size."""

    sizes: tuple[int, ...]  # (k,) ranks that a group may have, ascending; the last is all ranks
    tokens: Ints  # (n,) of the sequences, descending; all ranks together hold any of them
    seconds: Floats  # (n, k) seconds of a sequence on each rank of its group
    launches: Floats  # (k,) seconds that a group takes besides
    most_tokens: int  # of a rank


def plan_groups(prices: GroupPrices, multiple: int = 1) -> list[list[ContextGroup]]:
    """Return microbatches that take few seconds in all; their number divides by `multiple`.

    Groups come by descending size and fill all ranks: if sizes are powers of two, or all ranks, a
    group begins at a multiple of its size. PlanError: too few sequences for `multiple`.
    """
    left, made = np.arange(prices.tokens.size), list[list[ContextGroup]]()
    while left.size:
        made.append(_Filler(prices, left).best())
        left = np.delete(left, np.searchsorted(left, _members(made[-1])))
    while len(made) % multiple:
        richest = max(range(len(made)), key=lambda place: len(_members(made[place])))
        members = np.sort(_members(made.pop(richest)))
        if members.size < 2:
            what = f"{prices.tokens.size} sequences do not fill a multiple of {multiple}"
            raise PlanError(f"{what} microbatches: raise the global batch size")
        made += [_Filler(prices, members[first::2]).together() for first in (0, 1)]
    return made


def _members(groups: list[ContextGroup]) -> list[int]:
    return [member for group in groups for member in group.members]


class _Filler:
    """Fills a microbatch with some sequences."""

    def __init__(self, prices: GroupPrices, chosen: Ints) -> None:
        self.sizes, self.chosen = prices.sizes, chosen.tolist()
        self.room = [prices.most_tokens * size for size in prices.sizes]
        self.launches: list[float] = prices.launches.tolist()
        self.steps = [*np.diff(prices.sizes).tolist(), np.inf]
        # Negative, so ascending: bisection finds the next sequence that is short enough.
        self.tokens: list[int] = (-prices.tokens[chosen]).tolist()
        self.seconds: list[list[float]] = (-prices.seconds[chosen]).T.tolist()
        is_held = -np.array(self.tokens)[:, None] <= self.room
        fitting = np.where(is_held, prices.seconds[chosen], np.inf)
        self.alone, self.work = fitting + prices.launches, (fitting * prices.sizes).min(1)

    def best(self) -> list[ContextGroup]:
        """Return the groups of the level that wastes least."""
        alone, work, num_ranks = self.alone, self.work, self.sizes[-1]
        fewest = -(sum(self.tokens) // self.room[-1])
        even = work.sum() / (num_ranks * np.arange(fewest, fewest + 3))
        shares = [max(self.launches) + even * more for more in _MORE[:2]]
        levels = np.concatenate([alone[0], *shares])
        levels = np.maximum(levels[levels < np.inf], alone[0].min())
        best, least = list[ContextGroup](), np.inf
        for level in np.unique(levels)[::-1].tolist():
            groups, is_left = self.fill(level)
            first, idle = int(is_left.argmax()), num_ranks * max(group.load for group in groups)
            useful = float(work[~is_left].sum())
            if is_left[first]:  # the last microbatch may have one long sequence, and little else
                idle += max(num_ranks * alone[first].min() - work[is_left].sum(), 0.0)
            if idle / useful < least - _LESS_WASTE:
                best, least = groups, idle / useful
        return best

    def together(self) -> list[ContextGroup]:
        """Return one microbatch of all sequences; if need be, all ranks share them."""
        for more in _MORE:
            even = self.work.sum() / self.sizes[-1]
            groups, is_left = self.fill(max(self.launches) + more * even)
            if not is_left.any():
                return groups
        return [self._group(-1, list(range(len(self.chosen))))]

    def fill(self, level: float) -> tuple[list[ContextGroup], Bools]:
        """Return groups of all ranks, and (n,) which sequences are left."""
        free, at, packs = self.sizes[-1], 0, list[tuple[int, list[int]]]()
        # By size, ascending: seconds left, tokens left, place among the packs.
        opened: list[list[tuple[float, int, int]]] = [[] for _ in self.sizes]
        while at < len(self.chosen):
            length, following = -self.tokens[at], len(self.chosen)
            for size, groups in enumerate(opened):
                seconds, launch = -self.seconds[size][at], self.launches[size]
                is_new = self.sizes[size] <= free
                place = bisect_left(groups, (seconds,))
                while place < len(groups) and groups[place][1] < length:
                    place += 1
                if place < len(groups):
                    spare, room, number = groups.pop(place)
                elif is_new and length <= self.room[size] and launch + seconds <= level:
                    spare, room, number = level - launch, self.room[size], len(packs)
                    free -= self.sizes[size]
                    packs.append((size, []))
                else:
                    spare, room = (level - launch, self.room[size]) if is_new else (0.0, 0)
                    if groups and not is_new:
                        spare, room = groups[-1][0], max(room for _, room, _ in groups)
                    short = bisect_left(self.seconds[size], -spare, at + 1)
                    fits = max(short, bisect_left(self.tokens, -room, at + 1))
                    following = min(following, fits)  # the next sequence that may fit
                    continue
                packs[number][1].append(at)
                insort(groups, (spare - seconds, room - length, number))
                following = at + 1
                break
            at = following
        is_left = np.ones(len(self.chosen), dtype=bool)
        is_left[[at for _, members in packs for at in members]] = False
        made = [self._group(*pack) for pack in packs]
        while free:  # the longest pack is split, or gets more ranks; if none can, all ranks share
            split = [n for n, (k, pack) in enumerate(packs) if pack[1:] and self.sizes[k] <= free]
            growing = split or [n for n, (k, _) in enumerate(packs) if self.steps[k] <= free]
            if not growing:
                return [self._group(-1, np.flatnonzero(~is_left).tolist())], is_left
            longest = max(growing, key=lambda number: made[number].load)
            size, members = packs[longest]
            free -= self.sizes[size] if split else self.steps[size]
            parts = [(size, members[::2]), (size, members[1::2])]
            packs[longest : longest + 1] = parts if split else [(size + 1, members)]
            made = [self._group(*pack) for pack in packs]
        return sorted(made, key=lambda group: -group.num_ranks), is_left

    def _group(self, size: int, places: list[int]) -> ContextGroup:
        seconds = self.launches[size] - sum(map(self.seconds[size].__getitem__, places))
        return ContextGroup(self.sizes[size], seconds, [self.chosen[at] for at in places])
