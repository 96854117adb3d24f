"""What a process holds: what must not grow with what is made and undone."""

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    threads: int
    python_threads: int
    files: int
    groups: int
    kilobytes: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
        return cls(
            threads=len(os.listdir("/proc/self/task")),
            # Each request to the store has a thread of its own, for less than a millisecond.
            python_threads=sum(one.name != "bascule store" for one in threading.enumerate()),
            files=len(os.listdir("/proc/self/fd")),
            groups=len(distributed_c10d._world.pg_map),  # pyright: ignore[reportPrivateUsage]
            kilobytes=int(status.split()[0]),
        )


def check_held(before: Held, after: Held, kilobytes: int) -> None:
    counts = [(held.python_threads, held.files, held.groups) for held in (before, after)]
    assert counts[0] == counts[1], (before, after)
    assert after.threads <= before.threads + 2  # pools of torch and of the system may start late
    assert after.kilobytes <= before.kilobytes + kilobytes
