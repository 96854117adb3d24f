"""Requests, blocks of ranks, the state of a job, and what a policy decides."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Protocol

from bascule.checks import fields, number, whole
from bascule.errors import ConfigError

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
        are_powers = all(degree > 0 and degree & (degree - 1) == 0 for degree in self.step_s)
        if not are_powers or min(self.step_s.values(), default=0) <= 0:
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


_number = attrgetter("number")


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
            largest = 1 << (num_ranks - first).bit_length() - 1
            state.free.add(Block(first, min(largest, first & -first or largest)))
            first += min(largest, first & -first or largest)
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

    def waits(self, job: Job) -> bool:
        """Return whether a job waits."""
        at = bisect_left(self.waiting, job.number, key=_number)
        return at < len(self.waiting) and self.waiting[at] is job

    def leave(self, job: Job) -> None:
        """Take out a waiting job."""
        del self.waiting[bisect_left(self.waiting, job.number, key=_number)]

    def runs(self, job: Job) -> bool:
        """Return whether a job runs."""
        return job.block is not None and self.running.get(job.block.first) is job

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

    def free_block(self, degree: int) -> Block | None:
        """Return free ranks of a degree, from the smallest free block that has them."""
        wide = [(one.degree, one.first) for one in self.free if one.degree >= degree]
        return Block(min(wide)[1], degree) if wide else None


class Line:
    """Waiting jobs, in an order that stays while they wait: a heap, for thousands of jobs."""

    def __init__(self, key: Callable[[Job], tuple[float, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, int], Job]] = []
        self._away: list[Job] = []  # jobs that were taken, and may come back
        self._last = -1
        self._num_changes = 0  # how often known seconds changed

    def update(self, state: State) -> None:
        """Add the jobs that came, or came back."""
        came = [*state.after(self._last), *filter(state.waits, self._away)]
        self._last = max([self._last, *(job.number for job in came)])
        self._away = list(filter(state.runs, self._away))
        if self._num_changes != state.num_changes:
            self._num_changes, self._heap, came = state.num_changes, [], state.waiting
        for job in came:
            heapq.heappush(self._heap, (self._key(job), job))

    def first(self, state: State) -> Job | None:
        """Return the first waiting job."""
        while self._heap and not state.waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self) -> None:
        """Take out the first job, which starts."""
        self._away.append(heapq.heappop(self._heap)[1])

    def firsts(self, state: State, most: int) -> list[Job]:
        """Return the first few waiting jobs, which stay in the line."""
        seen = list[tuple[tuple[float, int], Job]]()
        while len(seen) < most and self.first(state) is not None:
            seen.append(heapq.heappop(self._heap))
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return [job for _, job in seen]


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
