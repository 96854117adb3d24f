"""Simple policies, with one queue for all ranks, and all policies by name."""

from collections.abc import Sequence

from bascule.errors import ConfigError
from bascule.plan.requests.balanced import Balanced
from bascule.plan.requests.state import Job, Line, Policy, Request, Starts, State


class Queue:
    """A policy with one queue for all ranks, and one degree for all requests.

    Its order is "fifo", "sjf" (shortest first), or "srtf" (shortest remaining time; recalls jobs).
    """

    def __init__(self, order: str, degree: int = 1) -> None:
        self._order, self._degree = order, degree
        self._recalls = order == "srtf"
        self._line = Line(lambda job: self.key(job, 0.0))  # waiting jobs do not change

    def degree_of(self, job: Job) -> int:
        """Return the degree of a job."""
        return self._degree

    def key(self, job: Job, now_s: float) -> tuple[float, int]:
        """Return the sort key of a job in the queue; the least goes first."""
        if self._order == "fifo":
            return 0.0, job.number
        return job.seconds(self.degree_of(job), now_s) / (1 + len(job.riders)), job.number

    def decide(self, state: State, act: Starts) -> None:
        """Start the first jobs of the queue while ranks are free."""
        self._line.update(state)
        while (job := self._line.first(state)) is not None:
            block = state.free_block(self.degree_of(job))
            if block is None:
                if self._recalls:
                    self._recall(state, act)
                return
            self._line.take()
            act.start(job, block)

    def _recall(self, state: State, act: Starts) -> None:
        running = [(self.key(job, state.now_s), job) for job in state.running.values()]
        running.sort(key=lambda entry: entry[0], reverse=True)
        waiting = self._line.firsts(state, len(running))
        for job, (key, longer) in zip(waiting, running, strict=False):
            if self.key(job, state.now_s) < key:
                act.recall(longer)


class EarliestDeadline:
    """A policy: earliest deadline first, at the fastest free degree; it recalls no request."""

    def __init__(self) -> None:
        self._line = Line(lambda job: (job.deadline_s, job.number))

    def choose(self, state: State, job: Job, degrees: Sequence[int]) -> int:
        """Return the degree for a job, one of the free ones, which ascend."""
        return min(degrees, key=job.seconds)

    def decide(self, state: State, act: Starts) -> None:
        """Start jobs, the earliest deadline first, until one does not fit the free ranks."""
        self._line.update(state)
        while (job := self._line.first(state)) is not None:
            blocks = {degree: state.free_block(degree) for degree in sorted(job.request.step_s)}
            free = [degree for degree, block in blocks.items() if block is not None]
            if not free:
                return
            block = blocks[self.choose(state, job, free)]
            assert block is not None
            self._line.take()
            act.start(job, block)


POLICIES = "fifo", "sjf", "srtf", "greedy", "balanced", "quick"
"""Names of policies; the first three may end in the degree of all requests: "sjf:4"."""
SERVED = "balanced"
"""Name of the policy that `bascule serve` uses by default."""


def policy_of(name: str, requests: Sequence[Request], num_ranks: int, seed: int = 0) -> Policy:
    """Return a new policy by its name, one of `POLICIES`, for these requests and ranks.

    No policy uses the seed. ConfigError: unknown policy, or a request lacks its degree in `step_s`.
    """
    del seed
    if name in ("balanced", "quick"):
        return Balanced(keeps_tails=name == "balanced")
    if name == "greedy":
        return EarliestDeadline()
    order, _, text = name.partition(":")
    if order not in ("fifo", "sjf", "srtf") or not (text or "0").isdecimal():
        names = f"{', '.join(POLICIES)}; the first three may have a degree, such as sjf:4"
        raise ConfigError(f"policy {name!r} is not known: give one of {names}")
    return Queue(order, common_degree(name, int(text or "0"), requests, num_ranks))


def common_degree(name: str, degree: int, requests: Sequence[Request], num_ranks: int) -> int:
    """Return the degree, for 0 the least of all requests; refuse one that a request lacks."""
    every = {d for request in requests for d in request.step_s if d <= num_ranks}
    common = {d for d in every if all(d in request.step_s for request in requests)}
    if not degree and common:
        return min(common)
    if degree not in common:
        degrees = ", ".join(map(str, sorted(common)))
        raise ConfigError(f"policy {name!r}: the degree of all requests can be {degrees}")
    return degree
