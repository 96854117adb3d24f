"""Simulated steps as segments, so that they are written and read as measured ones are."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from bascule.sim.seconds import KINDS
from bascule.sim.simulation import SimulatedRun
from bascule.workload.traces.writing import Kind, Segment

_ORDER: tuple[tuple[str, Kind], ...] = (
    ("loader", "communication"),
    ("routing", "communication"),
    ("all_gather", "communication"),
    ("compute", "compute"),
    ("ulysses", "communication"),
    ("ring", "communication"),
)
"""Work of a rank in a microbatch, one after the other: the simulator knows sums, not an order.
Encoders come after the first. Before it all the host is at work, which shows as a gap; at its end
ranks meet to reduce gradients."""


def segments_of(run: SimulatedRun) -> Iterator[Segment]:
    """Yield the work of each rank in each step, on one clock."""
    ends, ranks = np.cumsum(run.microbatch_s), range(run.seconds.shape[2])
    begins = ends - run.microbatch_s
    for step, (begin, end) in enumerate(
        zip(begins[:: run.accumulate], ends[run.accumulate - 1 :: run.accumulate], strict=True)
    ):
        for rank in ranks:
            yield Segment(rank, "step", str(step), float(begin), float(end - begin))
    for m, rank in product(range(ends.size), ranks):
        spent = dict(zip(KINDS, run.seconds[m, :, rank].tolist(), strict=True))
        spent |= dict(zip(run.stages, run.stage_s[m, :, rank].tolist(), strict=True))
        now = float(begins[m]) + spent["host"]
        stages: list[tuple[str, Kind]] = [(name, "compute") for name in run.stages]
        for name, kind in (_ORDER[0], *stages, *_ORDER[1:]):
            if spent[name] > 0:  # its name keeps readers from matching calls of unlike bags
                shown = name if kind == "compute" else f"{name} of rank {rank}"
                yield Segment(rank, kind, shown, now, spent[name])
            now += spent[name]
        yield Segment(rank, "waiting", "waiting", now, spent["waiting"])
        yield Segment(rank, "communication", "reduce_scatter", now, max(float(ends[m]) - now, 0.0))
