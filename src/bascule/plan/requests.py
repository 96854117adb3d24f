"""Requests in balance: which one runs next, on which ranks, at which degree.

Ranks form blocks: aligned runs of 1, 2, 4, .. of them. A request takes its denoising steps on one
block, and may go on with another one at a step boundary. A policy is asked when a request arrives,
ends, or was recalled by it and reached a boundary; it is pure and the same for simulation and use.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, ranges
from bascule.errors import ConfigError
from bascule.plan.checks import fields, number, whole

NEVER = float("inf")


class Block(NamedTuple):
    """Ranks `first`, `first` + 1, ..: a power of two of them, from a multiple of it on.

    So two blocks have no rank in common, or one lies within the other. The first rank leads.
    """

    first: int
    degree: int

    @property
    def ranks(self) -> range:
        """Its ranks, the leader first."""
        return range(self.first, self.first + self.degree)

    def __str__(self) -> str:
        last = self.first + self.degree - 1
        return f"rank {last}" if self.degree == 1 else f"ranks {self.first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A picture or clip to make.

    Attributes:
        step_s: Seconds of a denoising step by degree, all guidance passes included.
        steps: Denoising steps.
        arrival_s: When it is asked for.
        deadline_s: When it should be done; `NEVER` if that is not said.
        once_s: Seconds of its text and its pixels, on one rank.
        kind: Name of its class, for reports.
    """

    step_s: Mapping[int, float]
    steps: int
    arrival_s: float = 0.0
    deadline_s: float = NEVER
    once_s: float = 0.0
    kind: str = ""

    def __post_init__(self) -> None:
        fields(self, steps=(whole, 1, 10**6), arrival_s=number, once_s=number)
        are_legal = all(map(_is_power, self.step_s)) and min(self.step_s.values(), default=0) > 0
        if not are_legal:
            raise ConfigError(
                f"Request(step_s={dict(self.step_s)}): give seconds above 0 for degrees 1, 2, 4, .."
            )

    def seconds(self, degree: int, steps: int | None = None) -> float:
        """Return the seconds of some steps (default: all) at a degree, and of what is done once."""
        return (self.steps if steps is None else steps) * self.step_s[degree] + self.once_s

    @property
    def alone_s(self) -> float:
        """Seconds at its fastest degree."""
        return min(map(self.seconds, self.step_s))

    @property
    def work_s(self) -> float:
        """Rank-seconds at its cheapest degree."""
        return self.steps * min(d * s for d, s in self.step_s.items()) + self.once_s


def _is_power(degree: int) -> bool:
    return degree > 0 and degree & (degree - 1) == 0


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way."""

    number: int  # in the order of arrival
    request: Request
    left: int  # steps to take; of a running one when it came to its block
    block: Block | None = None  # where it runs; None: it waits
    steps_end_s: float = 0.0  # of a running one: when its steps are done, as it is
    free_s: float = 0.0  # of a running one: when its block is free, as it is

    def rest(self, now_s: float) -> int:
        """Return the steps to take from its next boundary on; one that runs takes one before."""
        if self.block is None or not self.left:  # at last one rank makes the pixels
            return self.left
        to_end = (self.steps_end_s - now_s) / self.request.step_s[self.block.degree]
        return max(0, min(math.floor(to_end + 1e-9), self.left - 1))

    def boundary_s(self, now_s: float) -> float:
        """Return the next boundary of one that runs."""
        assert self.block is not None
        rest = self.rest(now_s)
        return self.steps_end_s - (rest and rest * self.request.step_s[self.block.degree])

    def seconds(self, degree: int, now_s: float = 0.0) -> float:
        """Return the seconds from its next boundary on, at a degree."""
        return self.request.seconds(degree, self.rest(now_s))


@dataclass(slots=True)
class State:
    """The requests of a job, and its ranks."""

    num_ranks: int
    now_s: float = 0.0
    waiting: list[Job] = field(default_factory=list[Job])  # in the order of arrival
    running: dict[int, Job] = field(default_factory=dict[int, Job])  # by the first of its ranks
    free: set[Block] = field(default_factory=set[Block])  # the largest free blocks
    num_free: int = 0  # ranks of theirs
    move_s: float = 0.0  # that a request loses when it goes on with other ranks
    num_changes: int = 0  # of the seconds of requests, which a server measures

    @classmethod
    def of(cls, num_ranks: int, *, move_s: float = 0.0) -> "State":
        """Return a state without requests."""
        state = cls(whole("num_ranks", num_ranks, 1), move_s=move_s)
        first = 0
        while first < num_ranks:
            degree = 1 << min((num_ranks - first).bit_length() - 1, _alignment(first))
            state.free.add(Block(first, degree))
            first += degree
        state.num_free = num_ranks
        return state

    def after(self, number: int) -> list[Job]:
        """Return those that wait and came after a number, in that order."""
        return self.waiting[bisect_right(self.waiting, number, key=_number) :]

    def wait(self, job: Job) -> None:
        """Add a job that waits; free its block."""
        if job.block is not None:
            self.release(job.block)
        job.block = None
        insort(self.waiting, job, key=_number)

    def release(self, block: Block) -> None:
        """Free the ranks of a block; join neighbours."""
        self.running.pop(block.first, None)
        self.num_free += block.degree
        while (other := Block(block.first ^ block.degree, block.degree)) in self.free:
            self.free.remove(other)
            block = Block(min(block.first, other.first), 2 * block.degree)
        self.free.add(block)

    def take(self, block: Block) -> None:
        """Take free ranks."""
        around = block
        while around not in self.free:
            if around.degree > self.num_ranks:
                raise ConfigError(f"{block} is not free: free blocks are {sorted(self.free)}")
            around = Block(around.first & ~around.degree, 2 * around.degree)
        self.free.remove(around)
        self.num_free -= block.degree
        while around.degree > block.degree:
            half = around.degree // 2
            halves = Block(around.first, half), Block(around.first + half, half)
            is_right = block.first >= halves[1].first
            self.free.add(halves[not is_right])
            around = halves[is_right]

    def is_free(self, block: Block) -> bool:
        """Return whether the ranks of a block are free."""
        return any(_is_within(block, one) for one in self.free)

    def free_block(self, degree: int) -> Block | None:
        """Return free ranks of a degree, from the smallest free block that has them."""
        wide = [one for one in self.free if one.degree >= degree]
        return Block(min(wide, key=_by_degree).first, degree) if wide else None


def _number(job: Job) -> int:
    return job.number


def _alignment(first: int) -> int:
    return 64 if first == 0 else (first & -first).bit_length() - 1


def _by_degree(block: Block) -> tuple[int, int]:
    return block.degree, block.first


class Starts(Protocol):
    """Takes what a policy decides."""

    def start(self, job: Job, block: Block) -> None:
        """Let a waiting job run on free ranks."""

    def recall(self, job: Job) -> None:
        """Let a running job wait at its next boundary, and ask again then."""


class Policy(Protocol):
    """Decides which requests run where."""

    def decide(self, state: State, act: Starts) -> None:
        """Start waiting jobs on free ranks, and recall running ones."""


# --- policies of other systems --------------------------------------------------------------------


class Dispatch:
    """Gives each request to a replica when it arrives; replicas take one after the other.

    Args:
        by: "random", "round robin", "least in flight", or "least work" (predicted).
        degree: Ranks of a replica.
        seed: Of the random choice.
    """

    def __init__(self, by: str, degree: int = 1, *, seed: int = 0) -> None:
        self._by, self._degree, self._random = by, degree, np.random.default_rng(seed)
        self._queues: dict[int, list[Job]] = {}  # by first rank
        self._waiting = set[int]()  # those with a queue
        self._free_s: Floats = np.zeros(0)  # when each has done what it has
        self._last = -1
        self._turn = 0

    def decide(self, state: State, act: Starts) -> None:
        """Queue what has arrived, and let each free replica take its next."""
        if not self._queues:
            firsts = range(0, state.num_ranks - self._degree + 1, self._degree)
            self._queues = {first: [] for first in firsts}
            self._free_s = np.zeros(len(self._queues))
        for job in state.after(self._last):
            self._last = job.number
            first = self._replica(state, job)
            self._queues[first].append(job)
            self._waiting.add(first)
        for first in sorted(self._waiting - state.running.keys()):
            act.start(self._queues[first].pop(0), Block(first, self._degree))
            if not self._queues[first]:
                self._waiting.remove(first)

    def _replica(self, state: State, job: Job) -> int:
        firsts = list(self._queues)
        self._turn += 1
        if self._by == "random":
            return firsts[int(self._random.integers(len(firsts)))]
        if self._by == "round robin":
            return firsts[self._turn % len(firsts)]

        at = self._turn % len(firsts)
        if self._by == "least work":
            rest = np.roll(np.maximum(self._free_s, state.now_s), -at)
            place = (int(rest.argmin()) + at) % len(firsts)
            self._free_s[place] = rest.min() + job.seconds(self._degree)
            return firsts[place]

        def in_flight(first: int) -> int:
            return len(self._queues[first]) + (first in state.running)

        return min(firsts[at:] + firsts[:at], key=in_flight)


class Queue:
    """One queue for all ranks.

    Args:
        order: "fifo", "sjf" (the shortest first), "srtf" (the shortest rest, which recalls longer
            ones), or "pause" (the smallest, which recalls larger ones; GF-DiT).
        degree: Of all requests, or by kind, as from `best_degrees`.
    """

    def __init__(self, order: str, degree: int | Mapping[str, int] = 1) -> None:
        self._order, self._degree = order, degree

    def degree_of(self, job: Job) -> int:
        """Return the degree of a job."""
        return self._degree if isinstance(self._degree, int) else self._degree[job.request.kind]

    def _key(self, job: Job, now_s: float) -> tuple[float, int]:
        if self._order == "fifo":
            return 0.0, job.number
        steps = job.request.steps if self._order == "pause" else job.rest(now_s)
        return job.request.seconds(self.degree_of(job), steps), job.number

    def decide(self, state: State, act: Starts) -> None:
        """Start the first of the queue while there are ranks."""
        waiting = sorted(state.waiting, key=lambda one: self._key(one, state.now_s))
        for place, job in enumerate(waiting):
            block = state.free_block(self.degree_of(job))
            if block is None:
                if self._order in ("srtf", "pause"):
                    self._recall(state, act, waiting[place:])
                return
            act.start(job, block)

    def _recall(self, state: State, act: Starts, waiting: Sequence[Job]) -> None:
        running = [(self._key(one, state.now_s), one) for one in state.running.values()]
        running.sort(key=lambda one: one[0], reverse=True)
        for job, (key, longer) in zip(waiting, running, strict=False):
            if self._key(job, state.now_s) < key:
                act.recall(longer)


def best_degrees(requests: Iterable[Request], most: int) -> dict[str, int]:
    """Return the degree that is best for each kind, with a `Queue` RSSP of TetriServe's paper.

    It is the largest that makes steps 1.4 times as fast as half of it does.
    """
    degrees: dict[str, int] = {}
    for one in requests:
        if one.kind not in degrees:
            best = min(one.step_s)
            while 2 * best <= most and one.step_s.get(2 * best, NEVER) * 1.4 <= one.step_s[best]:
                best *= 2
            degrees[one.kind] = best
    return degrees


class Elastic:
    """One queue whose degrees follow the load (GF-DiT).

    Args:
        by: "load": first come, first served, on as many ranks as each has if all in flight share
            them. "demote": the smallest first on the widest free ranks, and the largest that runs
            goes on with a single rank when others wait.
    """

    def __init__(self, by: str) -> None:
        self._by = by
        self._demoted: set[int] = set()

    def decide(self, state: State, act: Starts) -> None:
        """Start while there are ranks; demote for those who wait."""
        share = state.num_ranks // max(len(state.waiting) + len(state.running), 1)
        for job in sorted(state.waiting, key=self._key):
            most = share if self._by == "load" else 1 if job.number in self._demoted else NEVER
            degrees = sorted(job.request.step_s)
            wanted = [d for d in degrees if d <= max(most, degrees[0])]
            free = [d for d in wanted if state.free_block(d) is not None]
            if free:
                block = state.free_block(min(free, key=job.seconds))
                assert block is not None
                act.start(job, block)
                continue
            wide = [one for one in state.running.values() if one.block and one.block.degree > 1]
            if self._by == "demote" and wide:
                largest = max(wide, key=lambda one: (one.request.work_s, -one.number))
                if 1 in largest.request.step_s:
                    self._demoted.add(largest.number)
                    act.recall(largest)
            return

    def _key(self, job: Job) -> tuple[bool, float, int]:
        size = 0.0 if self._by == "load" else job.request.work_s
        return job.number not in self._demoted, size, job.number


class EarliestDeadline:
    """Earliest deadline first; nobody is recalled.

    Args:
        fit: "greedy" takes the fastest free degree, "best fit" the smallest that meets the
            deadline.
    """

    def __init__(self, fit: str) -> None:
        self._fit = fit

    def decide(self, state: State, act: Starts) -> None:
        """Start in the order of deadlines."""
        for job in sorted(state.waiting, key=lambda one: (one.request.deadline_s, one.number)):
            degrees = [d for d in sorted(job.request.step_s) if state.free_block(d) is not None]
            if not degrees:
                return
            degree = min(degrees, key=job.seconds)
            if self._fit == "best fit":
                ends = {d: state.now_s + job.seconds(d) for d in degrees}
                degree = next((d for d in degrees if ends[d] <= job.request.deadline_s), degree)
            block = state.free_block(degree)
            assert block is not None
            act.start(job, block)


class SuperP95:
    """Each 20th arrival lets one of the longest requests wait for all others (vLLM-Omni 3916)."""

    def __init__(self) -> None:
        self._late: set[int] = set()
        self._credit, self._longest, self._last = 0.0, 0.0, -1

    def decide(self, state: State, act: Starts) -> None:
        """Start those that do not wait for others, then the others; recall the latter."""
        for job in state.after(self._last):
            self._last, self._credit = job.number, self._credit + 0.05
            self._longest = max(self._longest, job.request.work_s)
            if self._credit >= 1 and job.request.work_s >= 0.8 * self._longest:
                self._credit -= 1
                self._late.add(job.number)
        key = self._key
        waiting = sorted(state.waiting, key=key)
        for place, job in enumerate(waiting):
            block = state.free_block(1)
            if block is None:
                late = [one for one in state.running.values() if one.number in self._late]
                on_time = sum(one.number not in self._late for one in waiting[place:])
                for one in late[:on_time]:
                    act.recall(one)
                return
            act.start(job, block)

    def _key(self, job: Job) -> tuple[bool, int]:
        return job.number in self._late, job.number


# --- the policy of bascule ------------------------------------------------------------------------


_Order = tuple[int, float, int]  # of urgency: what is less goes first


@dataclass(slots=True)
class _Known:
    """The facts of a request that a policy keeps from its arrival on."""

    step_s: dict[int, float]  # seconds of a step at degrees, each faster than those before
    narrow: int  # the first of these degrees
    due_s: float
    later_s: float  # when it is due once `due_s` is lost


class _View(NamedTuple):
    """A job at a decision."""

    need: int  # the least degree that meets its deadline, else the fastest
    own_s: float  # what is left to do, at its least degree
    narrow_slack_s: float  # by which it meets its deadline there
    slack_s: float  # the same at its fastest degree
    work: float  # rank-seconds at the degree that it needs


class Balanced:
    """Meets deadlines with the fewest ranks, and spends ranks that nobody waits for on speed.

    At each decision it sets a target for all requests, waiting or running: in the order of urgency
    each gets the smallest degree that meets its deadline, and ranks that are left widen those that
    gain the most. Then it starts what has ranks, and recalls what holds more than its target while
    others wait. With hundreds of jobs it sets targets from time to time, and in between starts what
    waits in the order of the last time.

    A request without a deadline gets two. The first is `soft` times its own time. When that is lost
    on its fewest ranks, the second is what first come, first served on these would have done for
    it, or for 95 % of the last thousand, times `tail`. When its latest start comes it goes before
    all others. A deadline of a user that no degree can meet any more, or that costs others theirs,
    is lost: the request waits for others, until it has waited `patience` times its own time.

    Args:
        soft: Times of its own after which a request without a deadline should be done.
        tail: Factor of the second deadlines.
        patience: Times of its own that a request waits at most for those who came later.
        degrees: Allowed degrees. Default: all that a request knows.
    """

    def __init__(
        self,
        *,
        soft: float = 3.0,
        tail: float = 0.97,
        patience: float = 30.0,
        degrees: Sequence[int] | None = None,
    ) -> None:
        self._soft, self._tail, self._patience, self._degrees = soft, tail, patience, degrees
        self._known: dict[int, _Known] = {}  # by number of the job
        self._last = -1
        self._virtual: list[float] = []  # when ranks would be free, first come first served
        self._recent: deque[float] = deque()  # latencies there, of the last requests
        self._latencies: list[float] = []  # the same, sorted
        self._line: list[tuple[_Order, Job]] = []  # what waits, as of the last targets
        self._turns = 0  # decisions until new targets
        self._num_changes = 0  # of seconds that are known

    def decide(self, state: State, act: Starts) -> None:
        """Set targets, start what fits, and recall what has more than its target."""
        if self._num_changes != state.num_changes:
            self._num_changes = state.num_changes
            for job in (*state.waiting, *state.running.values()):
                if job.number in self._known:
                    self._known[job.number].step_s = self._fast(job.request)
        for job in state.after(self._last):
            self._last = job.number
            self._admit(state, job)
        needs, room, self._turns = dict[Job, int](), state.num_free, self._turns - 1
        for job in state.waiting:
            needs[job] = self._view(state, job).need
            room -= needs[job]
            if room < 0:
                break
        if room < 0 and self._turns > 0:
            self._start_next(state, act)
            return
        order = dict[Job, _Order]()
        if room < 0:
            jobs = [*state.running.values(), *state.waiting]
            needs, order = self._targets(state, jobs)
            self._turns = len(jobs) // 32 if len(jobs) > _MANY else 0
            self._line = sorted((order[job], job) for job in state.waiting) if self._turns else []
        else:  # nobody need be recalled
            self._widen(state, needs, room)
        missing = 0
        for job in sorted(state.waiting, key=lambda one: -needs[one]):
            if needs[job] and not self._start(state, act, job, needs[job]):
                missing += needs[job]
        if missing and order:
            self._recall(state, act, needs, order, missing)
        elif not missing:
            self._use_idle(state, act)

    def _start(self, state: State, act: Starts, job: Job, degree: int) -> bool:
        """Start a job at a degree, or at a smaller one if there is no such block."""
        block = state.free_block(degree)
        while block is None and degree > 1:
            degree //= 2
            is_known = degree in self._known[job.number].step_s
            block = state.free_block(degree) if is_known else None
        if block is not None:
            act.start(job, block)
        return block is not None

    def _start_next(self, state: State, act: Starts) -> None:
        """Start the first of the line while there are ranks."""
        if not state.num_free:
            return
        line = {job for _, job in self._line}
        for job in [one for one in state.waiting if one not in line]:
            insort(self._line, (self._order(state, job, self._view(state, job), False), job))
        here = set(state.waiting)
        while state.num_free and self._line:
            job = self._line[0][1]
            if job in here and not self._start(state, act, job, self._view(state, job).need):
                return
            del self._line[0]

    def _targets(
        self, state: State, jobs: Sequence[Job]
    ) -> tuple[dict[Job, int], dict[Job, _Order]]:
        """Return the degree that each job should have, 0 to wait, and its order."""
        views = {job: self._view(state, job) for job in jobs}
        lost = self._without_hope(state, views)
        order = {job: self._order(state, job, view, job in lost) for job, view in views.items()}
        room, targets = state.num_ranks, dict.fromkeys(jobs, 0)
        for job in sorted(jobs, key=order.__getitem__):
            known = self._known[job.number]
            need = known.narrow if job in lost else views[job].need
            while need > room:
                need //= 2
            if need in known.step_s:
                targets[job] = need
                room -= need
        self._widen(state, targets, room)
        return targets, order

    def _recall(
        self,
        state: State,
        act: Starts,
        targets: Mapping[Job, int],
        order: Mapping[Job, _Order],
        missing: int,
    ) -> None:
        """Recall jobs above their targets, the least urgent first."""
        for job in sorted(state.running.values(), key=order.__getitem__, reverse=True):
            assert job.block is not None
            more = job.block.degree - targets[job]
            if more > 0 and job.free_s - job.boundary_s(state.now_s) > state.move_s:
                act.recall(job)
                missing -= more
                if missing <= 0:
                    return

    def _use_idle(self, state: State, act: Starts) -> None:
        """Recall the job that gains the most by the idle ranks beside it."""
        best, most = None, 4 * state.move_s
        for block in state.free:
            job = state.running.get(block.first ^ block.degree)
            if job is None or job.block is None or job.block.degree != block.degree:
                continue
            step_s = self._known[job.number].step_s
            if job.left and (wide := step_s.get(2 * block.degree)) is not None:
                gain = job.rest(state.now_s) * (job.request.step_s[block.degree] - wide)
                gain += job.free_s - job.steps_end_s - job.request.once_s
                if gain > most:
                    best, most = job, gain
        if best is not None:
            act.recall(best)

    def _fast(self, request: Request) -> dict[int, float]:
        """Return the seconds of a step at degrees that are each faster than those before."""
        step_s = dict[int, float]()
        for degree, seconds in sorted(request.step_s.items()):
            if self._degrees is None or degree in self._degrees:
                if seconds < min(step_s.values(), default=NEVER):
                    step_s[degree] = seconds
        return step_s

    def _admit(self, state: State, job: Job) -> None:
        request, step_s = job.request, self._fast(job.request)
        due = later = request.deadline_s
        if due == NEVER:
            self._virtual = self._virtual or [0.0] * state.num_ranks
            fewest = min(request.step_s)
            own = request.seconds(fewest)
            free_s = [heapq.heappop(self._virtual) for _ in range(min(fewest, state.num_ranks))]
            end = max(free_s[-1], request.arrival_s) + own
            for _ in free_s:
                heapq.heappush(self._virtual, end)
            self._recent.append(end - request.arrival_s)
            insort(self._latencies, self._recent[-1])
            if len(self._recent) > _RECENT:
                del self._latencies[bisect_left(self._latencies, self._recent.popleft())]
            usual = self._latencies[int(0.95 * (len(self._latencies) - 1))]
            later = request.arrival_s + self._tail * max(usual, end - request.arrival_s)
            due = min(later, request.arrival_s + self._soft * own)
        num_here = len(state.waiting) + len(state.running)
        if len(self._known) > 2 * num_here + _MANY:  # forget those that ended
            here = {one.number for one in (*state.waiting, *state.running.values())}
            self._known = {number: self._known[number] for number in here & self._known.keys()}
        self._known[job.number] = _Known(step_s, min(step_s), due, later)

    def _view(self, state: State, job: Job) -> _View:
        known, request, rest = self._known[job.number], job.request, job.rest(state.now_s)
        at, begin = 0, state.now_s
        if job.block is not None:
            at = job.block.degree
            begin = job.steps_end_s - (rest and rest * request.step_s[at])
        if at or job.left < request.steps:
            begin += state.move_s
        room, step_s = known.due_s - begin - request.once_s, known.step_s
        slacks = [room - rest * step for step in step_s.values()]
        if at in step_s:
            slacks[list(step_s).index(at)] = known.due_s - job.free_s
        need = known.narrow
        if request.deadline_s < NEVER:  # idle ranks widen others
            fits = (d for d, slack in zip(step_s, slacks, strict=True) if slack >= 0)
            need = next(fits, max(step_s))
        own_s = rest * step_s[known.narrow] + request.once_s
        work = need * rest * step_s[need] + request.once_s
        return _View(need, own_s, slacks[0], max(slacks), work)

    def _without_hope(self, state: State, views: Mapping[Job, _View]) -> set[Job]:
        """Return jobs whose deadlines are lost, or cost others theirs (Moore and Hodgson)."""
        lost = set[Job]()
        load, kept = 0.0, list[tuple[float, int, Job]]()
        due = {job: self._known[job.number].due_s for job in views}
        for job in sorted(views, key=lambda one: (due[one], one.number)):
            if job.request.deadline_s == NEVER:
                continue
            if views[job].slack_s < 0:
                lost.add(job)
                continue
            heapq.heappush(kept, (-views[job].work, job.number, job))
            load += views[job].work
            while load > state.num_ranks * max(due[job] - state.now_s, 1e-9) and kept:
                work, _, dropped = heapq.heappop(kept)
                load += work
                lost.add(dropped)
        return lost

    def _order(self, state: State, job: Job, view: _View, is_lost: bool) -> _Order:
        request, known = job.request, self._known[job.number]
        if is_lost:
            alone = request.seconds(known.narrow)
            if state.now_s - request.arrival_s - alone > self._patience * alone:
                return 0, request.arrival_s, job.number
            return 3, view.own_s, job.number
        if request.deadline_s < NEVER:
            return 1, known.due_s, job.number
        if job.block is not None:  # its latest start, as when it waited
            return 1, known.due_s - request.seconds(known.narrow), job.number
        slack = view.slack_s
        if view.narrow_slack_s < 0:
            slack += known.later_s - known.due_s
            known.due_s = known.later_s
        if slack >= view.own_s:
            return 2, view.own_s, job.number
        return 1, known.due_s - view.own_s, job.number

    def _widen(self, state: State, targets: dict[Job, int], room: int) -> None:
        """Double degrees where that gains the most seconds, while there are ranks."""
        if not room:
            return
        gains: list[tuple[float, int, Job]] = []

        def offer(job: Job, degree: int) -> None:
            step_s = self._known[job.number].step_s
            if 0 < degree <= room and 2 * degree in step_s:
                gain = job.rest(state.now_s) * (step_s[degree] - step_s[2 * degree])
                heapq.heappush(gains, (-gain, job.number, job))

        for job, degree in targets.items():
            offer(job, degree)
        while gains and room:
            job = heapq.heappop(gains)[2]
            if targets[job] <= room:
                room -= targets[job]
                targets[job] *= 2
                offer(job, targets[job])


_MANY = 256  # jobs for which targets are set at each decision
_RECENT = 1000


class TetriServe(Balanced):
    """Keeps most requests alive for a round, by a knapsack over the ranks (TetriServe's paper).

    A request asks for the smallest degree that meets its deadline. Alive is one that runs, or could
    still meet its deadline if it idled for the round. Ranks that are left go to requests that are
    late anyway, and then widen others. It decides at each event and not at the end of each round.

    Args:
        round_steps: Steps of a round, of the largest request at its fastest degree.
    """

    def __init__(self, round_steps: int = 5) -> None:
        super().__init__()
        self._round_steps = round_steps

    def _targets(
        self, state: State, jobs: Sequence[Job]
    ) -> tuple[dict[Job, int], dict[Job, _Order]]:
        num, room = state.num_ranks, state.num_ranks
        round_s = self._round_steps * max(min(one.request.step_s.values()) for one in jobs)
        views = {job: self._view(state, job) for job in jobs}
        alive = [job for job in jobs if views[job].slack_s >= 0]
        most, runs = np.zeros(num + 1), list[npt.NDArray[np.bool_]]()  # requests alive, by ranks
        for job in alive:
            idle, need = most + (views[job].slack_s >= round_s), views[job].need
            run = np.full(num + 1, -1.0)
            if need <= num:
                run[need:] = most[: num + 1 - need] + 1 + 1e-6  # rather run than idle
            runs.append(run > idle)
            most = np.maximum(run, idle)
        targets = dict.fromkeys(jobs, 0)
        for job, is_taken in zip(alive[::-1], runs[::-1], strict=True):
            if is_taken[room]:
                targets[job] = views[job].need
                room -= targets[job]
        due = {job: self._known[job.number].due_s for job in jobs}
        order = {job: (int(not targets[job]), due[job], job.number) for job in jobs}
        for job in sorted(jobs, key=order.__getitem__):
            narrow = self._known[job.number].narrow
            if not targets[job] and narrow <= room:
                targets[job] = narrow
                room -= narrow
        self._widen(state, targets, room)
        return targets, order


POLICIES = (
    "random", "round-robin", "least-in-flight", "least-work", "fifo", "sjf", "srtf", "pause",
    "rssp", "load", "demote", "greedy", "best-fit", "tetriserve", "super-p95", "balanced",
)  # fmt: skip
"""Names of policies; the first eight may end in the degree of all requests: "sjf:4"."""


def policy_of(name: str, requests: Sequence[Request], num_ranks: int, *, seed: int = 0) -> Policy:
    """Return a new policy by its name.

    Args:
        name: One of `POLICIES`; the first eight may have a degree: "sjf:4".
        requests: That it will serve.
        num_ranks: Ranks that it will have.
        seed: Of a random choice.

    Raises:
        ConfigError: There is no such policy, or requests do not know its degree.
    """
    word, _, text = name.partition(":")
    place, degree = POLICIES.index(word) if word in POLICIES else -1, text or "1"
    if place < 0 or (text and place >= 8) or not degree.isdecimal():
        raise ConfigError(
            f"policy {name!r} is not known: give one of {', '.join(POLICIES)}; the first eight may "
            "have a degree, such as sjf:4"
        )
    if place < 8:
        known = {d for one in requests for d in one.step_s if d <= num_ranks}
        known = {d for d in known if all(d in one.step_s for one in requests)}
        if int(degree) not in known:
            degrees = ", ".join(map(str, sorted(known)))
            raise ConfigError(f"policy {name!r}: the degree of all requests can be {degrees}")
        if place < 4:
            return Dispatch(word.replace("-", " "), int(degree), seed=seed)
        return Queue(word, int(degree))
    if word in ("load", "demote"):
        return Elastic(word)
    if word in ("greedy", "best-fit"):
        return EarliestDeadline(word.replace("-", " "))
    if word == "rssp":
        return Queue("fifo", best_degrees(requests, num_ranks))
    return {"tetriserve": TetriServe, "super-p95": SuperP95, "balanced": Balanced}[word]()


def _is_within(block: Block, other: Block) -> bool:
    return other.first <= block.first < other.first + other.degree and block.degree <= other.degree


# --- what no policy can exceed --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestBound:
    """Figures that no policy exceeds; see `request_bound`."""

    on_time: float  # share of requests within their deadlines
    mean_latency_s: float
    makespan_s: float


_MOST_GROUPS = 4000  # of requests that one linear program tells apart


def request_bound(requests: Sequence[Request], num_ranks: int) -> RequestBound:
    """Bound the deadlines kept, the mean latency and the makespan of any policy.

    The relaxation: all ranks are one machine that takes a request's cheapest rank-seconds in parts,
    at any time between arrival and deadline; nobody is faster than alone at its fastest degree.
    Deadlines: a linear program in which a part of a request counts in part. Latency: the shortest
    rest first is optimal on one machine. Makespan: what comes after any moment must still be done.
    """
    if not requests:
        return RequestBound(1.0, 0.0, 0.0)
    arrival = np.array([one.arrival_s for one in requests])
    deadline = np.array([one.deadline_s for one in requests])
    alone = np.array([one.alone_s for one in requests])
    work = np.array([one.work_s for one in requests]) / num_ranks
    order = np.argsort(arrival, kind="stable")
    after = np.cumsum(work[order][::-1])[::-1]
    makespan = max(float((arrival[order] + after).max()), float((arrival + alone).max()))
    mean = max(_shortest_rest_first(arrival[order], work[order]), float(alone.mean()))
    on_time = _most_on_time(arrival, deadline, alone, work)
    return RequestBound(on_time, mean, makespan)


def _shortest_rest_first(arrival: Floats, work: Floats) -> float:
    """Return the mean latency on one machine."""
    now, total, rest = 0.0, 0.0, list[tuple[float, float]]()
    upcoming = [*arrival[1:].tolist(), NEVER]
    for begin, needs, following in zip(arrival.tolist(), work.tolist(), upcoming, strict=True):
        now = max(now, begin)
        heapq.heappush(rest, (needs, begin))
        while rest and now < following:
            needs, came = heapq.heappop(rest)
            if now + needs > following:
                heapq.heappush(rest, (needs - (following - now), came))
                now = following
            else:
                now += needs
                total += now - came
    return total / arrival.size


def _most_on_time(arrival: Floats, deadline: Floats, alone: Floats, work: Floats) -> float:
    """Bound the share of requests that meet their deadlines, by a linear program."""
    from scipy import optimize, sparse

    possible = arrival + alone <= deadline * (1 + 1e-12)
    has_deadline = deadline < NEVER
    always = int((~has_deadline).sum())
    chosen = np.flatnonzero(possible & has_deadline)
    if not chosen.size:
        return always / arrival.size
    # Rounding outwards, so that more fits: arrivals down and deadlines up to a grid of moments.
    begin, end = arrival[chosen], deadline[chosen]
    num_moments = min(240, 2 * chosen.size + 2)
    grid = np.quantile(np.concatenate([begin, end]), np.linspace(0, 1, num_moments))
    grid = np.unique(np.concatenate([[begin.min()], grid, [end.max()]]))
    first = np.searchsorted(grid, begin, side="right") - 1
    last = np.searchsorted(grid, end, side="left")
    rows = np.stack([first, last, np.round(work[chosen], 12)], axis=1)
    groups, counts = np.unique(rows, axis=0, return_counts=True)
    if len(groups) > _MOST_GROUPS:
        raise ConfigError(
            f"a bound for {len(groups)} unlike requests: at most {_MOST_GROUPS} can be told apart"
        )
    spans = np.diff(grid)
    starts, stops = groups[:, 0].astype(int), np.maximum(groups[:, 1].astype(int), 1)
    lens = stops - starts
    of_group = np.repeat(np.arange(len(groups)), lens)
    slot: Ints = ranges(starts, lens)
    # Variables: requests on time of each group, then its work in each slot.
    num = len(groups)
    variables = num + slot.size
    enough = sparse.csr_array(
        (
            np.concatenate([groups[:, 2], -np.ones(slot.size)]),
            (
                np.concatenate([np.arange(num), of_group]),
                np.concatenate([np.arange(num), num + np.arange(slot.size)]),
            ),
        ),
        (num, variables),
    )
    fits = sparse.csr_array(
        (np.ones(slot.size), (slot, num + np.arange(slot.size))), (spans.size, variables)
    )
    upper = np.concatenate([counts, np.full(slot.size, np.inf)])
    solve: Any = optimize.linprog
    result = solve(
        -np.concatenate([np.ones(num), np.zeros(slot.size)]),
        A_ub=sparse.vstack([enough, fits], format="csr"),
        b_ub=np.concatenate([np.zeros(num), spans]),
        bounds=np.stack([np.zeros(variables), upper], axis=1).tolist(),
        method="highs",
    )
    on_time: float = -result.fun
    return min(1.0, (always + np.floor(on_time + 1e-6)) / arrival.size)
