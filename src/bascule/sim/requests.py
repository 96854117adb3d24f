"""Simulate a cluster that serves hundreds of thousands of requests, event by event."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bascule.arrays import Floats
from bascule.plan.requests import (
    NEVER,
    Block,
    Job,
    Policy,
    Request,
    State,
    board,
    policy_of,
    request_bound,
)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The result of a cluster that served n requests by a policy.

    Attributes:
        requests: The requests in the order of arrival.
        end_s: Time at which each request was done, (n,).
        num_ranks: Ranks of the cluster.
        rank_s_of: Rank-seconds that each request took, (n,); a batch shares its own evenly.
        run_s_of: Seconds that each request ran, (n,).
        num_moves: How often a request moved to other ranks.
    """

    requests: Sequence[Request]
    end_s: Floats
    num_ranks: int
    rank_s_of: Floats
    run_s_of: Floats
    num_moves: int

    @property
    def rank_s(self) -> float:
        """Rank-seconds of all requests together."""
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

    def figures(self) -> dict[str, float]:
        """Return the figures of a `Row` by name; request kinds with the least work come first."""
        latency, on_time, degree = self.latency_s, self.on_time, self.rank_s_of / self.run_s_of
        alone = np.array([request.alone_s for request in self.requests])
        p50, p95, p99 = np.percentile(latency, [50, 95, 99]).tolist()
        duration = self.end_s.max() - self.requests[0].arrival_s
        kinds = np.array([request.kind for request in self.requests])
        work = {request.kind: (request.work_s, request.kind) for request in self.requests}
        masks = {kind: kinds == kind for kind in sorted(work, key=work.__getitem__)}
        return {
            "on_time": float(on_time.mean()),
            **{f"on_time of {kind}": float(on_time[mask].mean()) for kind, mask in masks.items()},
            "mean_s": float(latency.mean()),
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
            "slowdown": float((latency / alone).max()),
            "rank_s": self.rank_s / latency.size,
            "idle": float(1.0 - self.rank_s / (self.num_ranks * duration)),
            "moves": self.num_moves / latency.size,
            **{f"degree of {kind}": float(degree[mask].mean()) for kind, mask in masks.items()},
        }


class _Cluster:
    """A simulated cluster whose jobs a policy starts and recalls."""

    def __init__(self, num_requests: int, num_ranks: int, move_s: float) -> None:
        self.state = State.of(num_ranks, move_s=move_s)
        self.events: list[tuple[float, int, str, Job, int]] = []
        self.rank_s, self.run_s = np.zeros(num_requests), np.zeros(num_requests)
        self.num_moves = 0
        self._num_events = 0
        self._versions: dict[int, int] = {}  # of a job's valid event; earlier events are stale
        self._since: dict[int, float] = {}  # time up to which a running job is charged
        self.recalled = set[Job]()  # that have not stopped yet
        self._before: dict[int, Block] = {}  # the block on which a job ran last

    def start(self, job: Job, block: Block) -> None:
        """Let a waiting job run on free ranks."""
        state = self.state
        state.leave(job)
        moved, *_ = [self._moves(member, block) for member in (job, *job.riders)]
        move_s = state.move_s * moved
        job.from_s = state.now_s
        job.steps_end_s = state.now_s + job.left * job.request.step_s[block.degree] + move_s
        self._place(job, block)
        if job.riders:
            self._go_on(job, state.now_s + move_s)

    def board(self, job: Job, lead: Job) -> None:
        """Let a waiting job ride with a running one from its next boundary on."""
        assert lead.block is not None
        now_s = lead.present(self.state.now_s)
        begin = max(self.state.now_s, lead.boundary_s(now_s))
        self.take_steps(lead, lead.left - lead.rest(now_s))
        self._charge(lead, begin)
        begin += self.state.move_s * self._moves(job, lead.block)
        self._since[job.number] = begin
        self.state.board(job, lead)
        self._go_on(lead, begin)

    def end_first(self, lead: Job) -> tuple[Job, float]:
        """Let the first of a batch leave it; return the job, and when it has decoded."""
        assert lead.block is not None
        job = min((lead, *lead.riders), key=lambda member: member.left)
        once_s = job.request.once_s
        end = self.state.now_s + once_s
        self.take_steps(lead, job.left)
        self.rank_s[job.number] += lead.block.degree * once_s
        self.run_s[job.number] += once_s
        rest = self.state.part(job)
        assert rest is not None
        for member in (rest, *rest.riders):
            self._since[member.number] = end
        self._go_on(rest, end)
        return job, end

    def _moves(self, job: Job, block: Block) -> bool:
        """Return whether a job that starts on a block moves to it, and note it."""
        moved = self._before.get(job.number, block) != block
        self.num_moves += moved
        self._before[job.number] = block
        self._since[job.number] = self.state.now_s
        return moved

    @staticmethod
    def take_steps(lead: Job, num: int) -> None:
        """Count the steps that a batch has taken."""
        for job in (lead, *lead.riders):
            job.left -= num

    def _go_on(self, lead: Job, begin_s: float) -> None:
        """Let a batch take its steps from then on until its first job ends."""
        assert lead.block is not None
        lead.plan(begin_s)
        fewest = min(job.left for job in (lead, *lead.riders))
        end = begin_s + fewest * lead.step_s(lead.block.degree)
        self._push(end if lead.riders else lead.free_s, "end", lead)

    def _charge(self, lead: Job, until_s: float) -> None:
        """Charge the rank-seconds of a batch to its jobs."""
        assert lead.block is not None
        num, seconds = 1 + len(lead.riders), until_s - self._since[lead.number]
        for job in (lead, *lead.riders):
            self.rank_s[job.number] += lead.block.degree * seconds / num
            self.run_s[job.number] += seconds
            self._since[job.number] = until_s

    def finish(self, job: Job) -> None:
        """Let a job whose steps are done decode, on the first of its ranks."""
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
        """Let a running job and its riders wait at their next boundary, unless one ends there."""
        if all(member.rest(self.state.now_s) for member in (job, *job.riders)):
            self.recalled.add(job)
            self._push(job.boundary_s(self.state.now_s), "recalled", job)

    def next_event(self) -> tuple[str, Job] | None:
        """Pop an event and advance the clock to it; None if a later event replaced it."""
        time_s, _, what, job, version = heapq.heappop(self.events)
        if self._versions[job.number] != version:
            return None
        self.state.now_s = time_s
        self._charge(job, time_s)
        return what, job

    def _push(self, time_s: float, what: str, job: Job) -> None:
        self._num_events += 1
        version = self._versions[job.number] = self._versions.get(job.number, 0) + 1
        heapq.heappush(self.events, (time_s, self._num_events, what, job, version))


def serve(
    requests: Sequence[Request],
    policy: Policy,
    num_ranks: int,
    *,
    move_s: float = 0.0,
    batch: int = 1,
) -> Served:
    """Simulate a cluster that serves requests by a policy; deterministic.

    Args:
        requests: The requests in the order of arrival.
        policy: A new policy, because policies have state.
        num_ranks: Ranks of the cluster.
        move_s: Seconds that a request loses when it moves to other ranks.
        batch: Most requests in a batch.
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
                continue  # the policy decides once about all that arrive together
        else:
            if (event := cluster.next_event()) is None:
                continue
            what, job = event
            assert job.block is not None
            if what == "recalled":
                left = round((job.steps_end_s - state.now_s) / job.step_s(job.block.degree))
                cluster.take_steps(job, job.left - left)
                cluster.recalled.remove(job)
                state.wait(job)
            elif job.riders:
                job, end_s = cluster.end_first(job)
                end[job.number] = end_s
            else:
                state.release(job.block)
                if job.block.degree > 1 and job.request.once_s:
                    cluster.finish(job)
                else:
                    end[job.number], job.block = state.now_s, None
        policy.decide(state, cluster)
        if batch > 1:
            recalled = [job.block.degree for job in cluster.recalled if job.block is not None]
            board(state, cluster.board, batch, cluster.recalled, sum(recalled))
    return Served(requests, end, num_ranks, cluster.rank_s, cluster.run_s, cluster.num_moves)


BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a policy with a workload at a load.

    Attributes:
        load: The load, or the requests per second.
        policy: The name of the policy; `BOUND` for the bound that no policy can exceed.
        by_seed: `Served.figures` of each draw; a bound has only on_time and mean_s.
    """

    load: float
    policy: str
    by_seed: Sequence[dict[str, float]]

    @property
    def figures(self) -> dict[str, float]:
        """Average each figure over the draws that have it; a draw may lack a kind of requests."""
        names = dict.fromkeys(name for figures in self.by_seed for name in figures)
        return {
            name: float(np.mean([figures[name] for figures in self.by_seed if name in figures]))
            for name in names
        }

    def difference(self, other: "Row", figure: str) -> float:
        """Return another policy's figure minus this policy's; 0.0 unless all draws agree on it."""
        least = 0.01 if figure.startswith("on_time") else 0.05 * self.figures[figure]
        pairs = zip(self.by_seed, other.by_seed, strict=True)
        differences = [b[figure] - a[figure] for a, b in pairs if figure in a]
        is_clear = min(differences) >= least or max(differences) <= -least
        return float(np.mean(differences)) if is_clear else 0.0


def compare(
    draw: Callable[[float, int], Sequence[Request]],
    loads: Sequence[float],
    policies: Sequence[str],
    *,
    num_ranks: int,
    num_seeds: int = 1,
    move_s: float = 0.05,
    within: float = 3.0,
    batch: int = 1,
    make: Callable[[str, Sequence[Request], int, int], Policy] = policy_of,
) -> list[Row]:
    """Simulate a workload under each policy at each load, and return the rows of a table.

    Args:
        draw: Returns the requests at a load for a seed.
        loads: Loads; each gets a row for every policy and for the bound.
        policies: Names of policies that `make` knows.
        num_ranks: Ranks of the cluster.
        num_seeds: Number of draws at each load.
        move_s: Seconds that a request loses when it moves to other ranks.
        within: A request without a deadline counts as on time within this multiple of its time on
            the fewest ranks. Policies ignore it.
        batch: Most requests in a batch.
        make: Makes a policy from its name, the requests, the number of ranks and the seed.
    """
    rows = list[Row]()
    for load in loads:
        figures = dict[str, list[dict[str, float]]]()
        for seed in range(num_seeds):
            requests = draw(load, seed)
            due = [with_deadline(request, within) for request in requests]
            for name in policies:
                policy = make(name, requests, num_ranks, seed)
                served = serve(requests, policy, num_ranks, move_s=move_s, batch=batch)
                figures.setdefault(name, []).append(replace(served, requests=due).figures())
            bound = request_bound(due, num_ranks)
            limits = {"on_time": bound.on_time, "mean_s": bound.mean_latency_s}
            figures.setdefault(BOUND, []).append(limits)
        rows += [Row(load, name, by_seed) for name, by_seed in figures.items()]
    return rows


def with_deadline(request: Request, within: float) -> Request:
    """Return a request with a deadline: its own, or a multiple of its time on the fewest ranks."""
    if request.deadline_s < NEVER:
        return request
    fastest_s = request.seconds(min(request.step_s))
    return replace(request, deadline_s=request.arrival_s + within * fastest_s)
