"""Traces made by hand, whose parts are known; in the form in which torch.profiler writes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

US = 1e6
TRANSFER_S, GAP_S = 0.010, 0.004
"""Seconds of each collective once all ranks are there, and of nothing at the end of a step."""


def event(
    category: str, name: str, start: float, end: float, tid: int = 7, **args: object
) -> dict[str, Any]:
    """A complete event; times in seconds."""
    row = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "args": args}
    return row | {"ts": start * US, "dur": (end - start) * US}


@dataclass
class Run:
    """Ranks that compute, then reduce their gradients, then do nothing for a moment."""

    own: Sequence[Sequence[float]]  # (S, R) seconds of compute
    clocks: Sequence[float] = ()  # by how many seconds each rank's clock is ahead
    on_device: bool = True  # kernels of a GPU are written; else operators and gloo's events
    first: int = 5  # number of the first step
    lens: Sequence[Sequence[Sequence[int]]] = ()  # tokens of each sequence, as names of ranges
    extra: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])

    @property
    def num_ranks(self) -> int:
        return len(self.own[0])

    def starts(self) -> list[float]:
        """(S,) when each step begins, and when the last one ends."""
        lasting = [max(step) + TRANSFER_S + GAP_S for step in self.own]
        return (100.0 + np.cumsum([0.0, *lasting])).tolist()

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Those of one rank, on its clock."""
        ahead = self.clocks[rank] if self.clocks else 0.0
        starts, found = self.starts(), list(self.extra.get(rank, []))
        for place, own in enumerate(self.own):
            begin, end = starts[place] + ahead, starts[place + 1] + ahead
            arrives, done = begin + own[rank], begin + max(own) + TRANSFER_S
            name = f"ProfilerStep#{self.first + place}"
            # The host runs ahead of the device, by a millisecond.
            lead = 0.001 if self.on_device else 0.0
            found.append(event("user_annotation", name, begin - lead, end - lead, 1))
            if self.lens:
                text = ",".join(map(str, self.lens[place][rank]))
                found.append(
                    event("user_annotation", f"bascule::lens [{text}]", begin - lead, begin, 1)
                )
            if self.on_device:
                found += [
                    event("gpu_user_annotation", name, begin, done),
                    event("kernel", "gemm", begin, begin + own[rank] * 0.7),
                    event("gpu_memcpy", "Memcpy DtoD", begin + own[rank] * 0.6, arrives),
                    event("kernel", "ncclDevKernel_AllReduce_Sum_f32(x)", arrives, done, 20),
                ]
            else:
                found += [
                    event("cpu_op", "aten::linear", begin, arrives, 1),
                    event("cpu_op", "aten::addmm", begin, begin + own[rank] / 2, 1),
                    event("cpu_op", "c10d::allreduce_", arrives, arrives, 1),
                    event("user_annotation", "gloo:all_reduce", arrives, done, 99),
                    event("cpu_op", "aten::copy_", begin, end, 55),  # a loader's thread
                ]
        return found

    def trace(self, rank: int) -> dict[str, Any]:
        """The content of one rank's file."""
        return {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": self.num_ranks},
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
                *self.events(rank),
            ],
        }

    def write(self, folder: Path) -> Path:
        """One file a rank."""
        for rank in range(self.num_ranks):
            (folder / f"host_{rank}.pt.trace.json").write_text(json.dumps(self.trace(rank)))
        return folder
