"""Keeps tokens where they were loaded, by renaming equal bags and moving fewer sequences.

First, each bag takes the place of an equal one where most of its tokens are at home; within a
tolerance, sequences then stay although another bag is emptier.
"""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.machine.cluster import Cluster
from bascule.plan.solver.homes import Homes, Regions, relabel
from bascule.plan.solver.portfolio import may_end_by, near_home, solve
from bascule.plan.solver.problem import Assignment, Problem
from bascule.plan.topology import Topology

_MAX_SEARCHED = 256  # most sequences that are brought home one by one; of more, a part is kept
_RELEASED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)  # shares of a bag's time, until it fits
_SAME = 1.0 + 1e-4  # makespans this close are certified to be equally good


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The ranks that loaded the sequences of a plan."""

    ranks: Ints  # (num_seqs,)
    lens: Ints  # (num_seqs,) tokens
    topology: Topology
    cluster: Cluster | None  # None: all ranks are on one node

    @property
    def home(self) -> Ints:
        """(num_seqs,) bag of the rank that loaded each sequence."""
        return self.topology.bag_of_rank[self.ranks]

    def homes(self, ceiling: float) -> Homes:
        """Return the bags that sequences prefer, by tokens that leave their node, then rank."""
        lens, kept = self.lens.astype(np.float64), 1.0 / self.topology.bag_sizes
        if self.cluster is None or self.cluster.num_nodes == 1:
            return Homes(self.home, lens, ceiling, kept)
        bags, per_node = self.topology.bag_of_rank, self.cluster.ranks_per_node
        shares = np.zeros((self.topology.num_bags, self.cluster.num_nodes))  # of a bag's ranks
        np.add.at(shares, (bags, np.arange(bags.size) // per_node), 1.0)
        shares /= self.topology.bag_sizes[:, None]
        regions = Regions(lens, self.ranks // per_node, shares)
        return Homes(self.home, lens / (2.0 * lens.sum() + 1.0), ceiling, kept, regions)


def bring_home(
    problem: Problem, decision: Assignment, source: Source, tolerance: float | None
) -> Assignment:
    """Change the earliest plan so that fewer tokens leave home.

    A tolerance of 0.01 accepts a makespan 1 % later; None only relabels equal bags, and moves
    nothing where the batch as loaded is as early and as even.
    """
    if not source.lens.size or problem.num_bins == 1:
        return decision
    good_enough = max(decision.makespan, decision.lower_bound * _SAME)
    home = Assignment.of(problem, source.home, decision.lower_bound)
    if (
        home.makespan <= good_enough
        and (tolerance is not None or _is_as_even(home, decision))
        and not problem.excess(home.bin_of)
    ):
        return home
    ceiling = good_enough * (1.0 + (tolerance or 0.0)) / problem.unit
    homes = source.homes(max(ceiling, problem.makespan(decision.bin_of)))  # both are rounded
    if tolerance is not None and source.lens.size <= _MAX_SEARCHED:
        bag_of, _ = near_home(problem, decision.bin_of, homes)
    else:
        bag_of = relabel(problem, decision.bin_of, homes)
        if tolerance is not None and not problem.limited:
            kept = (_keep_part(problem, homes, rank) for rank in (-problem.work, problem.work))
            mostly = [part for part in kept if part is not None]
            relabelled = [relabel(problem, part, homes) for part in mostly]
            bag_of = min([bag_of, *mostly, *relabelled], key=homes.total_away)
    return Assignment.of(problem, bag_of, decision.lower_bound)


def _is_as_even(first: Assignment, second: Assignment) -> bool:
    """Compare sorted loads: return whether the first pair that differs is lower in `first`."""
    loads, others = np.sort(first.loads)[::-1], np.sort(second.loads)[::-1]
    differ = np.flatnonzero((loads > others * _SAME) | (others > loads * _SAME))
    return not differ.size or bool(loads[differ[0]] < others[differ[0]])


def _keep_part(problem: Problem, homes: Homes, rank: Floats) -> Ints | None:
    """Keep the sequences of lowest rank in each bag, as long as the others have a place.

    None if nothing ends by the ceiling. Knows no limits.
    """
    home = homes.bins
    work = problem.kind_work[problem.kind_of[home], np.arange(home.size)]
    order = np.lexsort((rank, home))
    starts = np.searchsorted(home[order], np.arange(problem.num_bins))
    sums = np.concatenate([np.zeros(1), np.cumsum(work[order])])
    within = sums[1:] - sums[starts][home[order]]
    tried = np.ones(home.size, dtype=bool)
    for share in _RELEASED:
        room = (1.0 - share) * homes.ceiling * problem.speeds - problem.carried_work
        kept = np.zeros(home.size, dtype=bool)
        kept[order] = within <= np.maximum(room, 0.0)[home[order]]
        if np.array_equal(kept, tried):
            continue
        tried, rest = kept, problem.without(kept, home)
        if not may_end_by(rest, homes.ceiling):
            continue
        bag_of = home.copy()
        bag_of[~kept] = solve(rest, enough=homes.ceiling, quick=True).bin_of
        if problem.makespan(bag_of) <= homes.ceiling:
            return bag_of
    return None
