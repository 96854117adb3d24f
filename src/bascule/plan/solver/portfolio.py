"""The portfolio: starts by name, what improves them, and which of the answers is taken."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.errors import PlanError
from bascule.plan.solver.bounds import lower_bound
from bascule.plan.solver.exact import place_exactly, place_longest, place_relaxed
from bascule.plan.solver.homes import Homes, relabel
from bascule.plan.solver.improve import improve
from bascule.plan.solver.kinds import fluid, price_bound
from bascule.plan.solver.problem import Problem
from bascule.plan.solver.refine import refine
from bascule.plan.solver.starts import (
    by_speed,
    longest_first,
    longest_first_counted,
    topped_up,
)

_ROUNDING = 1e-9
"""Relative difference of sums of the same costs in another order, at most."""

_TOLERANCE = 1e-4
_MIXED_TOLERANCE = 5e-4
"""Gaps at which the search stops, for bins of equal and of different speeds: the last steps to 1e-4
take most of the time where a few short bins must be filled exactly."""

_LONG_SHARES = (0.5, 0.4, 0.3)
"""Items above this share of the fastest bin's time stay whole in a relaxation; all are tried."""

_MAX_LATE = 0.3
"""Share of all work above the ceiling from which on everything at home is not repaired where speeds
differ: it hardly ever succeeds."""

_GUESSES = 2
"""Times that the kind of bin of each item is guessed."""

MOST_IMPROVED = 2


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment found, what found it, and what none can beat.

    Attributes:
        bin_of: (items,) bin per item.
        found_by: The start, and what improved it.
        bound: In the caller's units of time.
    """

    bin_of: Ints
    found_by: str
    bound: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate of the portfolio."""

    name: str
    bin_of: Ints
    makespan: float

    @staticmethod
    def of(problem: Problem, name: str, bin_of: Ints) -> "_Found":
        return _Found(name, bin_of, problem.makespan(bin_of))


def solve(
    problem: Problem,
    tolerance: float | None = None,
    *,
    enough: float = 0.0,
    num_improved: int = MOST_IMPROVED,
    quick: bool = False,
) -> Solution:
    """The best assignment that the portfolio finds within the limits.

    Bins of one kind: starts without limits, the best of them refined. Several kinds: the same at
    the costs of guessed kinds, the best of which are improved at true costs. Limits: what was found
    so far repaired and improved, then starts that put the limits first.

    Args:
        problem: Items, bins and limits.
        tolerance: Gap at which the search stops; None for the default.
        enough: Completion time at which it stops too, in units of work per unit of speed.
        num_improved: Starts of a problem with several kinds that are improved, the best ones first.
        quick: Whether one start will do where only items are limited, within the tolerance or not.

    Raises:
        PlanError: No assignment within the limits was found; says what misses by how much.
    """
    if problem.num_items == 0:
        return Solution(np.empty(0, dtype=np.int64), "nothing to do", lower_bound(problem))
    bound = lower_bound(problem)
    if tolerance is None:
        is_plain = problem.identical or problem.num_kinds > 1
        tolerance = _TOLERANCE if is_plain else _MIXED_TOLERANCE
    if problem.num_kinds == 1:
        target = max(_target(problem, bound, tolerance), enough)
        counted = _counted(problem, target)
        if counted is not None and (quick or counted.makespan <= target):
            return Solution(counted.bin_of, counted.name, bound)
        found = _of_one_kind(problem, target)
        if problem.limited and problem.excess(found.bin_of):
            found = _within_limits(problem, target, [found])
        if counted is not None:
            found = _earliest([found, counted])
        return Solution(found.bin_of, found.name, bound)
    guess, weights = fluid(problem)
    starts = list[_Found]()
    for start in _of_kinds(problem, guess):
        starts.append(start)
        if start.makespan <= enough and not problem.limited:
            return Solution(start.bin_of, start.name, bound)
    starts = sorted(starts, key=lambda start: start.makespan)[:num_improved]
    least = starts[0].makespan * problem.unit
    early_bound = max(bound, min(price_bound(problem, weights, least), least))
    target = max(_target(problem, early_bound, tolerance), enough)
    found = _within_limits(problem, target, starts)
    makespan = float(problem.loads(found.bin_of).max())
    return Solution(found.bin_of, found.name, max(bound, price_bound(problem, weights, makespan)))


def may_end_by(problem: Problem, makespan: float) -> bool:
    """Whether no bound shows that a bin must complete later. O(n log n).

    Args:
        problem: Items and bins.
        makespan: In units of work per unit of speed.
    """
    time = makespan * problem.unit * (1.0 + _ROUNDING)
    if lower_bound(problem) > time:
        return False
    return not problem.num_items or price_bound(problem, fluid(problem)[1], time) <= time


def _target(problem: Problem, bound: float, tolerance: float) -> float:
    """Completion time at which a search may stop, in units of work per unit of speed."""
    return bound / problem.unit * (1.0 + tolerance) if bound else np.inf


def _of_one_kind(problem: Problem, target: float) -> _Found:
    """The best of the starts that ignore the limits, refined; stops at ``target``."""
    best = longest = _Found.of(problem, "longest first", longest_first(problem))
    if not problem.identical:  # also the greedy's, so that no answer is worse than it
        greedy = by_speed(problem, fill_first=True)
        best = _earliest([longest, _Found.of(problem, "knapsack", greedy)])
        filled = topped_up(problem, longest.bin_of, target) if best.makespan > target else None
        if filled is not None:
            best = _earliest([best, _Found.of(problem, "slow bins by pairs", filled)])
    if best.makespan <= target:
        return best
    return _Found.of(problem, f"{best.name}, refined", refine(problem, best.bin_of, target))


def _counted(problem: Problem, target: float) -> _Found | None:
    """What keeps a limit on items from the start, improved; None where anything else limits it."""
    if problem.resources != ("items",) or not problem.identical:
        return None
    found = _Found.of(problem, "longest first, counted", longest_first_counted(problem))
    if found.makespan <= target:
        return found
    bin_of = improve(problem, found.bin_of, target)
    return _Found.of(problem, f"{found.name}, improved", bin_of)


def _earliest(found: Sequence[_Found]) -> _Found:
    return min(found, key=lambda candidate: candidate.makespan)


def _of_kinds(problem: Problem, guess: Ints) -> Iterator[_Found]:
    """Assignments without limits at the costs of guessed kinds, with their true makespans.

    The first guess is the fluid optimum, once so that no item leaves its kind; it is corrected
    where items end up elsewhere.
    """

    def at(
        costs: Floats, items: Ints | slice = slice(None), bins: Ints | slice = slice(None)
    ) -> Ints:
        part = problem.at_costs(costs, items, bins)
        tolerance = _TOLERANCE if part.identical else _MIXED_TOLERANCE
        return _of_one_kind(part, _target(part, lower_bound(part), tolerance)).bin_of

    every = np.arange(problem.num_items)
    yield _Found.of(problem, "least costs", at(problem.costs))
    apart = np.zeros_like(guess)
    for kind in np.unique(guess).tolist():
        items, bins = np.flatnonzero(guess == kind), np.flatnonzero(problem.kind_of == kind)
        apart[items] = bins[at(problem.kind_costs[kind], items, bins)]
    yield _Found.of(problem, "kinds apart", apart)
    for turn in range(_GUESSES):
        bin_of = at(problem.kind_costs[guess, every])
        yield _Found.of(problem, f"guess {turn + 1} of kinds", bin_of)
        if np.array_equal(guess, problem.kind_of[bin_of]):
            break
        guess = problem.kind_of[bin_of]


def _within_limits(problem: Problem, target: float, starts: Sequence[_Found]) -> _Found:
    """The earliest assignment within the limits; stops at ``target``.

    Args:
        problem: Items, bins and limits.
        target: Completion time that is good enough.
        starts: Assignments that may pass the limits, best first.
    """
    by_room = cache(lambda: place_longest(problem))
    portfolio: list[tuple[str, Callable[[], Ints | None]]] = [
        (start.name, partial(np.copy, start.bin_of)) for start in starts
    ]
    if problem.limited:
        portfolio.append(("room first", by_room))
        for share in _LONG_SHARES:
            make = partial(_relaxed, problem, by_room, target, share)
            portfolio.append((f"relaxation of items below {share:g}", make))
    closest, least, legal = starts[0].bin_of, problem.excess(starts[0].bin_of), list[_Found]()
    for name, make in portfolio:
        start = make()
        if start is None:
            continue
        bin_of = improve(problem, start, target)
        excess = problem.excess(bin_of)
        if not excess:
            legal.append(_Found.of(problem, f"{name}, improved", bin_of))
            if legal[-1].makespan <= target:
                break
        elif excess < least:
            closest, least = bin_of, excess
    if not legal:
        exact = place_exactly(problem)
        if exact is None or problem.excess(exact):
            raise PlanError(_missed(problem, closest))
        legal.append(_Found.of(problem, "exact, improved", improve(problem, exact, target)))
    return _earliest(legal)


def _relaxed(
    problem: Problem, by_room: Callable[[], Ints], target: float, share: float
) -> Ints | None:
    return place_relaxed(problem, by_room(), target, share)


def _missed(problem: Problem, closest: Ints) -> str:
    """What the assignment closest to the limits still passes, and by how much."""
    used = problem.used(closest)
    over = used - problem.room
    for row in reversed(range(len(problem.resources))):
        resource, full = problem.resources[row], int(over[row].argmax())
        if over[row, full] <= 0.0 or resource == "items":
            continue
        members = np.flatnonzero(closest == full)
        item = int(members[problem.use[row, members].argmin()])
        return (
            f"no assignment keeps every bin within its limit of {resource}: the closest one found "
            f"puts {used[row, full]:.15g} {resource} on bin {full}, above its limit of "
            f"{problem.room[row, full]:.15g} by {over[row, full]:.15g} (the smallest of its "
            f"{members.size} items is item {item} with {problem.use[row, item]:.15g}); raise the "
            "limit or send fewer items"
        )
    counts = np.bincount(closest, minlength=problem.num_bins)
    full, most = int(counts.argmax()), int(problem.room[problem.resources.index("items"), 0])
    return (
        f"no assignment keeps every bin within its limits: the closest one found puts "
        f"{counts[full]} items on bin {full}, and limits.items is {most}; raise it or send fewer "
        "items"
    )


def near_home(problem: Problem, bin_of: Ints, homes: Homes) -> tuple[Ints, str]:
    """Bring items to their preferred bins, with no bin later than the ceiling.

    First every item is put into its preferred bin, and bins that are then too late are repaired by
    the cheapest moves and swaps. If that fails, the search starts from the given assignment, with
    equal bins renamed so that more items are where they prefer to be.

    Args:
        problem: Items, bins and limits.
        bin_of: An assignment within the limits and the ceiling.
        homes: What items prefer, and the ceiling.

    Returns:
        The assignment, and what found it.
    """
    relabelled = relabel(problem, bin_of, homes)
    home, name = np.where(homes.bins >= 0, homes.bins, bin_of), "everything at home, improved"
    late = np.maximum(problem.bin_work(home) - homes.ceiling * problem.speeds, 0.0).sum()
    total = homes.ceiling * problem.speeds.sum()
    is_far = problem.num_kinds > 1 or (not problem.identical and late > _MAX_LATE * total)
    if not is_far:
        home = improve(problem, home, homes.ceiling, homes)
    if is_far or problem.makespan(home) > homes.ceiling or problem.excess(home):
        home, name = improve(problem, relabelled, homes.ceiling, homes), "relabelled, improved"
    candidates = [(bin_of, ""), (relabelled, "relabelled"), (home, name)]
    return min(candidates, key=lambda candidate: homes.total_away(candidate[0]))
