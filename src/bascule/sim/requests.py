"""A cluster that serves requests, on paper, from event to event: hundreds of thousands fit."""

import heapq
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
        self._num_events = 0
        self._versions: dict[int, int] = {}  # of a job's event: a later one takes its place
        self._since: dict[int, float] = {}  # when a job came to its block
        self._before: dict[int, Block] = {}  # the block that a job had last

    def start(self, job: Job, block: Block) -> None:
        """Let a waiting job run on free ranks."""
        state = self.state
        state.waiting.remove(job)
        moved = self._before.get(job.number, block) != block
        self.num_moves += moved
        job.steps_end_s = state.now_s + job.left * job.request.step_s[block.degree]
        job.steps_end_s += state.move_s * moved
        self._before[job.number] = block
        self._place(job, block)

    def finish(self, job: Job) -> None:
        """Let a job whose steps are done make its pixels, on the first of its ranks."""
        assert job.block is not None
        job.left = 0
        self._place(job, Block(job.block.first, 1))

    def _place(self, job: Job, block: Block) -> None:
        self.state.take(block)
        self.state.running[block.first] = job
        job.block, job.free_s = block, job.steps_end_s
        if block.degree == 1:
            job.free_s += job.request.once_s
        self._since[job.number] = self.state.now_s
        self._push(job.free_s, "end", job)

    def recall(self, job: Job) -> None:
        """Let a running job wait at its next boundary."""
        assert job.block is not None
        boundary = job.boundary_s(self.state.now_s)
        left = round((job.steps_end_s - boundary) / job.request.step_s[job.block.degree])
        if left > 0:
            job.left = left
            self._push(boundary, "recalled", job)

    def next_event(self) -> tuple[str, Job] | None:
        """Go to the next event; None if another one took its place."""
        time_s, _, what, job, version = heapq.heappop(self.events)
        if self._versions[job.number] != version:
            return None
        self.state.now_s = time_s
        assert job.block is not None
        self.rank_s += job.block.degree * (time_s - self._since[job.number])
        return what, job

    def _push(self, time_s: float, what: str, job: Job) -> None:
        self._num_events += 1
        version = self._versions[job.number] = self._versions.get(job.number, 0) + 1
        heapq.heappush(self.events, (time_s, self._num_events, what, job, version))


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
    while upcoming < len(jobs) or cluster.events:
        arrives = jobs[upcoming].request.arrival_s if upcoming < len(jobs) else NEVER
        if not cluster.events or arrives <= cluster.events[0][0]:
            state.now_s = max(arrives, state.now_s)
            state.wait(jobs[upcoming])
            upcoming += 1
            if upcoming < len(jobs) and jobs[upcoming].request.arrival_s <= state.now_s:
                continue  # all that come at once are decided about together
        else:
            event = cluster.next_event()
            if event is None:
                continue
            what, job = event
            assert job.block is not None
            if what == "recalled":
                state.wait(job)
            else:
                state.release(job.block)
                if job.block.degree > 1 and job.request.once_s:
                    cluster.finish(job)
                else:
                    end[job.number] = state.now_s
        policy.decide(state, cluster)
    return Served(requests, end, num_ranks, cluster.rank_s, cluster.num_moves)
