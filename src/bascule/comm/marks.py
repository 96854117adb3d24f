"""Write a rank's lengths as ranges of torch's profiler, for readers of traces of steps."""

import torch

from bascule.comm.failures import is_profiled
from bascule.marks import Origin, marks_of
from bascule.plan.plan import Plan


def mark_lengths(origin: Origin, plan: Plan, rank: int) -> None:
    """Mark, in a running profile, the lengths that a rank computes on and that it loaded."""
    if not is_profiled():
        return
    bag = int(plan.topology.bag_of_rank[rank])
    lens, loaded = plan.seq_lens[plan.bag_of == bag], plan.seq_lens[plan.source_ranks == rank]
    shared_by = int(plan.topology.bag_sizes[bag])
    for name in marks_of(origin, lens.tolist(), loaded.tolist(), shared_by):
        with torch.profiler.record_function(name):
            pass
