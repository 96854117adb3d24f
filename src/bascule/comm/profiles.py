"""Ranges with names in a running profile of torch; without a profiler they cost nothing."""

import torch

from bascule.plan.marks import Origin, marks_of
from bascule.plan.plan import Plan

is_profiled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
"""Return true while a profiler runs on this thread."""


def begin_range(where: str) -> "torch.profiler.record_function":
    """Return a range "bascule::route" of "step 3: route", begun."""
    step, _, what = where.rpartition(": ")
    begun = torch.profiler.record_function(f"bascule::{what}", step)
    begun.__enter__()
    return begun


def mark_lengths(origin: Origin, plan: Plan, rank: int) -> None:
    """Mark, in a running profile, the lengths that a rank computes on, and those it loaded."""
    if not is_profiled():
        return
    bag = int(plan.topology.bag_of_rank[rank])
    lens, loaded = plan.seq_lens[plan.bag_of == bag], plan.seq_lens[plan.source_ranks == rank]
    shared_by = int(plan.topology.bag_sizes[bag])
    for name in marks_of(origin, lens.tolist(), loaded.tolist(), shared_by):
        with torch.profiler.record_function(name):
            pass
