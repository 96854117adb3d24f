"""A cluster that serves requests, on paper, from event to event: hundreds of thousands fit."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats
from bascule.plan.requests import NEVER, Block, Job, Policy, Request, State


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What became of requests under a policy.

    Attributes:
        requests: In the order of arrival.
        end_s: When each was done, (n,).
        num_ranks: Of the cluster.
        rank_s: Rank-seconds that were spent.
        num_moves: Times that a request went on with other ranks.
    """

    requests: Sequence[Request]
    end_s: Floats
    num_ranks: int
    rank_s: float
    num_moves: int

    @property
    def latency_s(self) -> Floats:
        """Seconds from arrival to the end, (n,)."""
        return self.end_s - np.array([one.arrival_s for one in self.requests])

    @property
    def on_time(self) -> Floats:
        """1.0 for each request that was done by its deadline, (n,)."""
        deadlines = np.array([one.deadline_s for one in self.requests])
        return (self.end_s <= deadlines + 1e-9).astype(float)

    @property
    def slowdown(self) -> Floats:
        """Latency over the time alone at the fastest degree, (n,)."""
        return self.latency_s / np.array([one.alone_s for one in self.requests])

    def on_time_by_kind(self) -> dict[str, float]:
        """Return the share within deadlines of each class."""
        kinds = [one.kind for one in self.requests]
        on_time = self.on_time.tolist()
        return {
            kind: float(np.mean([x for x, of in zip(on_time, kinds, strict=True) if of == kind]))
            for kind in dict.fromkeys(kinds)
        }


class _Cluster:
    """Runs what a policy starts."""

    def __init__(self, num_ranks: int, move_s: float) -> None:
        self.state = State.of(num_ranks, move_s=move_s)
        self.events: list[tuple[float, int, str, Job, int]] = []
        self.rank_s, self.num_moves = 0.0, 0
        self._order = 0
        self._versions: dict[int, int] = {}
        self._before: dict[int, Block] = {}  # the block that a job had last

    def push(self, time_s: float, what: str, job: Job) -> None:
        self._order += 1
        version = self._versions[job.number] = self._versions.get(job.number, 0) + 1
        heapq.heappush(self.events, (time_s, self._order, what, job, version))

    def is_due(self, job: Job, version: int) -> bool:
        return self._versions[job.number] == version

    def start(self, job: Job, block: Block) -> None:
        state = self.state
        state.take(block)
        state.waiting.remove(job)
        state.running[block] = job
        moved = self._before.get(job.number) not in (None, block)
        self.num_moves += moved
        begin = state.now_s + (state.move_s if moved else 0.0)
        self._before[job.number] = block
        job.block = block
        job.free_s = begin + job.left * job.request.step_s[block.degree]
        if block.degree == 1:
            job.free_s += job.request.once_s
        self.push(job.free_s, "steps", job)

    def look(self, job: Job) -> None:
        """Note a running job's next boundary, after one step on its block at least."""
        end, step = self._last_boundary(job)
        to_end = math.floor((end - self.state.now_s) / step + 1e-9)
        job.boundary_s = end - max(0, min(to_end, job.left - 1)) * step

    def recall(self, job: Job) -> None:
        self.look(job)
        end, step = self._last_boundary(job)
        left = round((end - job.boundary_s) / step)
        if left > 0:
            job.left = left
            self.push(job.boundary_s, "recalled", job)

    def _last_boundary(self, job: Job) -> tuple[float, float]:
        """Return when all its steps are done, and the seconds of one."""
        assert job.block is not None
        once = job.request.once_s if job.block.degree == 1 else 0.0
        return job.free_s - once, job.request.step_s[job.block.degree]


def serve(
    requests: Sequence[Request], policy: Policy, num_ranks: int, *, move_s: float = 0.0
) -> Served:
    """Serve requests by a policy; deterministic.

    Args:
        requests: In the order of arrival.
        policy: A new one; it remembers what it saw.
        num_ranks: Ranks of the cluster.
        move_s: Seconds that a request loses when it goes on with other ranks.
    """
    cluster = _Cluster(num_ranks, move_s)
    state = cluster.state
    jobs = [Job(i, one, one.steps) for i, one in enumerate(requests)]
    end = np.full(len(jobs), NEVER)
    upcoming = 0
    began: dict[int, float] = {}
    while upcoming < len(jobs) or cluster.events:
        arrives = jobs[upcoming].request.arrival_s if upcoming < len(jobs) else NEVER
        if not cluster.events or arrives <= cluster.events[0][0]:
            state.now_s = max(arrives, state.now_s)
            state.wait(jobs[upcoming])
            upcoming += 1
            if upcoming < len(jobs) and jobs[upcoming].request.arrival_s <= state.now_s:
                continue  # all that come at once are decided about together
        else:
            time_s, _, what, job, version = heapq.heappop(cluster.events)
            if not cluster.is_due(job, version):
                continue
            state.now_s = time_s
            assert job.block is not None
            block = job.block
            cluster.rank_s += block.degree * (time_s - began.pop(job.number, time_s))
            if what == "recalled":
                state.wait(job)
            elif what == "steps" and block.degree > 1 and job.request.once_s:
                state.release(block)
                one = Block(block.first, 1)
                state.take(one)
                state.running[one] = job
                job.block, job.left, job.free_s = one, 0, time_s + job.request.once_s
                job.boundary_s = job.free_s
                began[job.number] = time_s
                cluster.push(job.free_s, "steps", job)
            else:
                state.release(block)
                end[job.number] = time_s
        for job in state.running.values():
            if job.left:
                cluster.look(job)
        policy.decide(state, cluster)
        for job in state.running.values():
            began.setdefault(job.number, state.now_s)
    return Served(requests, end, num_ranks, cluster.rank_s, cluster.num_moves)
