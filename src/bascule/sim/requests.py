"""A cluster that serves requests, on paper, from event to event: hundreds of thousands fit."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.plan.requests import (
    NEVER,
    Block,
    Job,
    Policy,
    Request,
    State,
    policy_of,
    request_bound,
)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The ends of requests under a policy.

    Attributes:
        requests: In the order of arrival.
        end_s: When each was done, (n,).
        num_ranks: Of the cluster.
        rank_s_of: Rank-seconds that each took, (n,).
        run_s_of: Seconds that each ran, (n,).
        num_moves: Times that a request went on with other ranks.
    """

    requests: Sequence[Request]
    end_s: Floats
    num_ranks: int
    rank_s_of: Floats
    run_s_of: Floats
    num_moves: int

    @property
    def rank_s(self) -> float:
        """Rank-seconds that were spent."""
        return float(self.rank_s_of.sum())

    @property
    def latency_s(self) -> Floats:
        """Seconds from arrival to the end, (n,)."""
        return self.end_s - np.array([request.arrival_s for request in self.requests])

    @property
    def on_time(self) -> Floats:
        """1.0 for each request that was done by its deadline, (n,)."""
        deadlines = np.array([request.deadline_s for request in self.requests])
        return (self.end_s <= deadlines + 1e-9).astype(float)

    def on_time_by_kind(self) -> dict[str, float]:
        """Return the share within deadlines of each class."""
        return {kind: float(self.on_time[of].mean()) for kind, of in self._kinds().items()}

    def _kinds(self) -> dict[str, Ints]:
        """Return the places of each class, the least work first."""
        kinds = np.array([request.kind for request in self.requests])
        work = {request.kind: (request.work_s, request.kind) for request in self.requests}
        return {kind: np.flatnonzero(kinds == kind) for kind in sorted(work, key=work.__getitem__)}

    def figures(self) -> dict[str, float]:
        """Return the figures of a `Row`, by name."""
        late = self.latency_s
        alone = np.array([request.alone_s for request in self.requests])
        p50, p95, p99 = np.percentile(late, [50, 95, 99]).tolist()
        lasts = self.end_s.max() - self.requests[0].arrival_s
        degrees = {k: self.rank_s_of[of] / self.run_s_of[of] for k, of in self._kinds().items()}
        return {
            "on_time": float(self.on_time.mean()),
            **{f"on_time of {kind}": share for kind, share in self.on_time_by_kind().items()},
            "mean_s": float(late.mean()),
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
            "slowdown": float((late / alone).max()),
            "rank_s": self.rank_s / late.size,
            "idle": float(1.0 - self.rank_s / (self.num_ranks * lasts)),
            "moves": self.num_moves / late.size,
            **{f"degree of {kind}": float(of.mean()) for kind, of in degrees.items()},
        }


class _Cluster:
    """Runs what a policy starts."""

    def __init__(self, num_requests: int, num_ranks: int, move_s: float) -> None:
        self.state = State.of(num_ranks, move_s=move_s)
        self.events: list[tuple[float, int, str, Job, int]] = []
        self.spent = [np.zeros(num_requests), np.zeros(num_requests)]  # rank-seconds, seconds
        self.num_moves = 0
        self._num_events = 0
        self._versions: dict[int, int] = {}  # of a job's event: a later one takes its place
        self._since: dict[int, float] = {}  # when a job came to its block
        self._before: dict[int, Block] = {}  # the block that a job had last

    def start(self, job: Job, block: Block) -> None:
        """Let a waiting job run on free ranks."""
        state = self.state
        state.leave(job)
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
        if job.rest(self.state.now_s):
            self._push(job.boundary_s(self.state.now_s), "recalled", job)

    def next_event(self) -> tuple[str, Job] | None:
        """Go to the next event; None if another one took its place."""
        time_s, _, what, job, version = heapq.heappop(self.events)
        if self._versions[job.number] != version:
            return None
        self.state.now_s = time_s
        assert job.block is not None
        seconds = time_s - self._since[job.number]
        for spent, by in zip(self.spent, (job.block.degree, 1), strict=True):
            spent[job.number] += by * seconds
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
    cluster = _Cluster(len(requests), num_ranks, move_s)
    state = cluster.state
    jobs = [Job(i, request, request.steps) for i, request in enumerate(requests)]
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
                step = job.request.step_s[job.block.degree]
                job.left = round((job.steps_end_s - state.now_s) / step)
                state.wait(job)
            else:
                state.release(job.block)
                if job.block.degree > 1 and job.request.once_s:
                    cluster.finish(job)
                else:
                    end[job.number] = state.now_s
        policy.decide(state, cluster)
    rank_s, run_s = cluster.spent
    return Served(requests, end, num_ranks, rank_s, run_s, cluster.num_moves)


BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a policy with a workload at a load.

    Attributes:
        load: The load, or the requests a second.
        policy: Its name; `BOUND` for what no policy can exceed.
        figures: Those of `Served.figures`, means over seeds; of the bound fewer.
    """

    load: float
    policy: str
    figures: dict[str, float]


def compare(
    draw: Callable[[float, int], Sequence[Request]],
    loads: Sequence[float],
    policies: Sequence[str],
    *,
    num_ranks: int,
    num_seeds: int = 1,
    move_s: float = 0.05,
    within: float = 3.0,
    make: Callable[[str, Sequence[Request], int, int], Policy] = policy_of,
) -> list[Row]:
    """Serve a workload by policies at loads.

    Args:
        draw: Gives the requests at a load for a seed.
        loads: Of which there is a row of each policy and of the bound.
        policies: Names that `make` knows.
        num_ranks: Ranks of the cluster.
        num_seeds: Draws at each load.
        move_s: Seconds that a request loses when it goes on with other ranks.
        within: Requests without a deadline count as on time within so many times their seconds on
            the fewest ranks; policies do not know of it.
        make: Makes a policy of its name, the requests, the number of ranks and the seed.
    """
    rows = list[Row]()
    for load in loads:
        figures = dict[str, list[dict[str, float]]]()
        for seed in range(num_seeds):
            requests = draw(load, seed)
            due = [_due(request, within) for request in requests]
            for name in policies:
                policy = make(name, requests, num_ranks, seed)
                served = serve(requests, policy, num_ranks, move_s=move_s)
                figures.setdefault(name, []).append(replace(served, requests=due).figures())
            bound = request_bound(due, num_ranks)
            limits = {"on_time": bound.on_time, "mean_s": bound.mean_latency_s}
            figures.setdefault(BOUND, []).append(limits)
        rows += [Row(load, name, _mean(of_seeds)) for name, of_seeds in figures.items()]
    return rows


def _due(request: Request, within: float) -> Request:
    if request.deadline_s < NEVER:
        return request
    fastest_s = request.seconds(min(request.step_s))
    return replace(request, deadline_s=request.arrival_s + within * fastest_s)


def _mean(of_seeds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for result in of_seeds for name in result)
    values = {name: [result[name] for result in of_seeds if name in result] for name in names}
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}
