"""Requests, blocks of ranks, the state of a job, and what a policy decides."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple, Protocol

from bascule.checks import fields, number, whole
from bascule.errors import ConfigError

NEVER = float("inf")


class Block(NamedTuple):
    """A run of 2^k consecutive ranks that begins at a multiple of 2^k.

    Two blocks are disjoint, or one lies within the other. The first rank is the leader.
    """

    first: int
    degree: int

    @property
    def ranks(self) -> range:
        """The ranks of the block, the leader first."""
        return range(self.first, self.first + self.degree)

    def __str__(self) -> str:
        last = self.first + self.degree - 1
        return f"rank {last}" if self.degree == 1 else f"ranks {self.first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a picture or clip."""

    step_s: Mapping[int, float]  # seconds of a denoising step by degree, with all guidance passes
    steps: int  # denoising steps
    arrival_s: float = 0.0  # time at which it arrives
    deadline_s: float = NEVER  # time by which it should end; `NEVER` without a deadline
    once_s: float = 0.0  # seconds that the text encoder and the decoder need on one rank
    kind: str = ""  # name of its class, for reports
    batch_key: Hashable = None  # requests of equal keys may share a batch; None: it shares none
    # Seconds of a step of 1, 2, .. requests in a batch, by degree; the first is that of `step_s`.
    batch_s: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])

    def __post_init__(self) -> None:
        fields(self, steps=(whole, 1, 10**6), arrival_s=number, once_s=number)
        are_powers = all(degree > 0 and degree & (degree - 1) == 0 for degree in self.step_s)
        if not are_powers or min(self.step_s.values(), default=0) <= 0:
            raise ConfigError(f"step_s={self.step_s}: give seconds above 0 for degrees 1, 2, 4, ..")
        if not all(curve and min(curve) > 0 for curve in self.batch_s.values()):
            raise ConfigError(f"batch_s={self.batch_s}: give seconds above 0 for each batch size")

    def together_s(self, degree: int, num: int) -> float:
        """Return the seconds of a step of a batch of `num` such requests at a degree.

        A batch that `batch_s` does not have is computed one request after another.
        """
        curve = self.batch_s.get(degree, ())
        return curve[num - 1] if 1 < num <= len(curve) else num * self.step_s[degree]

    def spans(self, degree: int, members: "Sequence[tuple[int, Job]]") -> list[float]:
        """Return the seconds to the end of each job of a batch, by their steps left, which ascend.

        Steps get shorter as jobs end. While a job decodes, the others wait.
        """
        done, now, spans = 0, 0.0, list[float]()
        for num, (rest, job) in zip(range(len(members), 0, -1), members, strict=True):
            if rest > done:
                now += (rest - done) * self.together_s(degree, num)
            now, done = now + job.request.once_s, rest
            spans.append(now)
        return spans

    def seconds(self, degree: int, steps: int | None = None) -> float:
        """Return the seconds of some steps (default: all) at a degree, plus `once_s`."""
        return (self.steps if steps is None else steps) * self.step_s[degree] + self.once_s

    @property
    def alone_s(self) -> float:
        """Seconds of the request at its fastest degree."""
        return min(map(self.seconds, self.step_s))

    @property
    def work_s(self) -> float:
        """Rank-seconds of the request at its cheapest degree, in its cheapest batch."""
        steps = [d * seconds for d, seconds in self.step_s.items()]
        for d, curve in self.batch_s.items() if self.batch_key is not None else ():
            steps += (d * seconds / num for num, seconds in enumerate(curve, 1))
        return self.steps * min(steps) + self.once_s


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits or runs, alone or as the lead of a batch, or rides in a batch.

    A state and its policy know the lead alone, which has the ranks. Riders take steps with it.
    """

    number: int  # in the order of arrival
    request: Request
    left: int  # steps to take; of a running job, at `from_s`
    block: Block | None = None  # ranks on which it runs; None: it waits
    from_s: float = 0.0  # time of the last change of its batch, maybe the next step boundary
    steps_end_s: float = 0.0  # predicted end of a running job's steps if its batch stays the same
    free_s: float = 0.0  # predicted time at which a running job and its riders free this block
    riders: "list[Job]" = field(default_factory=list["Job"])  # the rest of the batch that it leads
    lead: "Job | None" = None  # the lead of the batch in which it rides

    @property
    def deadline_s(self) -> float:
        """The first deadline of it and its riders."""
        if not self.riders:
            return self.request.deadline_s
        return min(job.request.deadline_s for job in (self, *self.riders))

    def step_s(self, degree: int) -> float:
        """Return the seconds of a step with its riders at a degree."""
        if not self.riders:
            return self.request.step_s[degree]
        return self.request.together_s(degree, 1 + len(self.riders))

    def rest(self, now_s: float) -> int:
        """Return the number of steps left at the next step boundary; until it, a job runs one."""
        if self.block is None or not self.left or now_s < self.from_s:  # or one rank decodes
            return self.left
        degree, is_alone = self.block.degree, self.lead is None and not self.riders
        step = self.request.step_s[degree] if is_alone else (self.lead or self).step_s(degree)
        to_end = math.floor((self.steps_end_s - now_s) / step + 1e-9)
        return 0 if to_end < 0 else min(to_end, self.left - 1)

    def present(self, now_s: float) -> float:
        """Return the time before all steps if none has begun, as when it just started; else now."""
        return now_s if now_s > self.from_s else -NEVER

    def boundary_s(self, now_s: float) -> float:
        """Return the time of the next step boundary of a running job."""
        assert self.block is not None
        rest = self.rest(now_s)
        return self.steps_end_s - (rest and rest * self.step_s(self.block.degree))

    def members(self, now_s: float) -> "list[tuple[int, Job]]":
        """Return the jobs of its batch with their steps left at the next boundary, ascending."""
        return sorted(((job.rest(now_s), job) for job in (self, *self.riders)), key=_rest)

    def seconds(self, degree: int, now_s: float = 0.0) -> float:
        """Return the seconds that it and its riders need from the next step boundary on."""
        if not self.riders:
            return self.request.seconds(degree, self.rest(now_s))
        return self.request.spans(degree, self.members(now_s))[-1]

    def plan(self, begin_s: float) -> None:
        """Predict the ends of a running job and its riders, whose `left` steps begin then."""
        assert self.block is not None
        degree, step_s = self.block.degree, self.step_s(self.block.degree)
        members = self.members(-NEVER)  # all steps left
        spans = self.request.spans(degree, members)
        for (_, job), span_s in zip(members, spans, strict=True):
            job.block, job.from_s = self.block, begin_s
            job.steps_end_s, job.free_s = begin_s + job.left * step_s, begin_s + span_s
        last = members[-1][1].request
        self.free_s = begin_s + spans[-1] - (last.once_s if degree > 1 else 0.0)


_number, _rest = attrgetter("number"), itemgetter(0)


@dataclass(slots=True)
class State:
    """The waiting and running jobs, and the free ranks."""

    num_ranks: int
    now_s: float = 0.0
    waiting: list[Job] = field(default_factory=list[Job])  # in the order of arrival
    running: dict[int, Job] = field(default_factory=dict[int, Job])  # by the first of its ranks
    free: set[Block] = field(default_factory=set[Block])  # the largest free blocks
    num_free: int = 0  # free ranks
    move_s: float = 0.0  # seconds that a request loses when it goes on with other ranks
    num_changes: int = 0  # updates of the measured seconds of requests
    since: dict[int, float] = field(default_factory=dict[int, float])  # when blocks were taken

    @classmethod
    def of(cls, num_ranks: int, *, move_s: float = 0.0) -> "State":
        """Return a state without jobs."""
        state = cls(whole("num_ranks", num_ranks, 1), move_s=move_s)
        first = 0
        while first < num_ranks:
            largest = 1 << (num_ranks - first).bit_length() - 1
            state.free.add(Block(first, min(largest, first & -first or largest)))
            first += min(largest, first & -first or largest)
        state.num_free = num_ranks
        return state

    def after(self, number: int) -> list[Job]:
        """Return the waiting jobs with a higher number, ascending."""
        return self.waiting[bisect_right(self.waiting, number, key=_number) :]

    def wait(self, job: Job) -> None:
        """Make a job wait with its riders, and free its block."""
        if job.block is not None:
            self.release(job.block)
        for member in (job, *job.riders):
            member.block = None
        insort(self.waiting, job, key=_number)

    def waits(self, job: Job) -> bool:
        """Return whether a job waits."""
        if job.block is not None:
            return False
        at = bisect_left(self.waiting, job.number, key=_number)
        return at < len(self.waiting) and self.waiting[at] is job

    def everyone(self) -> Iterator[Job]:
        """Yield all jobs, also riders."""
        for job in (*self.waiting, *self.running.values()):
            yield job
            yield from job.riders

    def leave(self, job: Job) -> None:
        """Remove a waiting job."""
        del self.waiting[bisect_left(self.waiting, job.number, key=_number)]

    def runs(self, job: Job) -> bool:
        """Return whether a job runs."""
        return job.block is not None and self.running.get(job.block.first) is job

    def board(self, job: Job, lead: Job) -> None:
        """Let a waiting job ride in the batch of a lead."""
        self.leave(job)
        lead.riders.append(job)
        job.lead, job.block = lead, lead.block

    def part(self, job: Job) -> Job | None:
        """Take a job out of its batch, and return the lead of the others, which takes its place.

        None: it was alone, and stays where it is.
        """
        lead = job.lead
        if lead is not None:
            lead.riders.remove(job)
        elif job.riders:
            lead, *others = job.riders
            lead.from_s, lead.lead, lead.riders, job.riders = job.from_s, None, others, []
            for rider in others:
                rider.lead = lead
            if job.block is not None:
                self.running[job.block.first] = lead
            else:
                self.leave(job)
                insort(self.waiting, lead, key=_number)
        if lead is not None:
            job.lead = job.block = None
        return lead

    def release(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.running.pop(block.first, None)
        self.since.pop(block.first, None)
        self.num_free += block.degree
        while (other := Block(block.first ^ block.degree, block.degree)) in self.free:
            self.free.remove(other)
            block = Block(min(block.first, other.first), 2 * block.degree)
        self.free.add(block)

    def take(self, block: Block) -> None:
        """Take free ranks, and split a larger free block."""
        around = block
        while around not in self.free:
            if around.degree > self.num_ranks:
                raise ConfigError(f"{block} is not free: free blocks are {sorted(self.free)}")
            around = Block(around.first & ~around.degree, 2 * around.degree)
        self.free.remove(around)
        self.since[block.first] = self.now_s
        self.num_free -= block.degree
        while around.degree > block.degree:
            half = around.degree // 2
            halves = Block(around.first, half), Block(around.first + half, half)
            is_right = block.first >= halves[1].first
            self.free.add(halves[not is_right])
            around = halves[is_right]

    def free_block(self, degree: int) -> Block | None:
        """Return free ranks of a degree, from the smallest free block that has them."""
        wide = [(block.degree, block.first) for block in self.free if block.degree >= degree]
        return Block(min(wide)[1], degree) if wide else None


class Line:
    """A heap for thousands of waiting jobs, whose order does not change while they wait."""

    def __init__(self, key: Callable[[Job], tuple[float, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, int], Job]] = []
        self._away: list[Job] = []  # jobs that run or ride, which may wait again
        self._last = -1
        self._num_changes = 0  # as of the last update

    def update(self, state: State) -> None:
        """Add the jobs that have begun to wait, also those that wait again."""
        new = [*state.after(self._last), *filter(state.waits, self._away)]
        self._last = max([self._last, *(job.number for job in new)])
        if self._num_changes != state.num_changes:
            self._away += (job for _, job in self._heap if not state.waits(job))
            self._num_changes, self._heap, new = state.num_changes, [], state.waiting
        self._away = [job for job in self._away if state.runs(job) or job.lead is not None]
        for job in new:
            heapq.heappush(self._heap, (self._key(job), job))

    def first(self, state: State) -> Job | None:
        """Return the first waiting job."""
        while self._heap and not state.waits(self._heap[0][1]):
            self.take()
        return self._heap[0][1] if self._heap else None

    def take(self) -> None:
        """Remove the first job, which starts."""
        self._away.append(heapq.heappop(self._heap)[1])

    def firsts(self, state: State, most: int) -> list[Job]:
        """Return up to `most` first waiting jobs, which stay in the line."""
        seen = list[tuple[tuple[float, int], Job]]()
        while len(seen) < most and self.first(state) is not None:
            seen.append(heapq.heappop(self._heap))
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return [job for _, job in seen]


class Starts(Protocol):
    """The receiver of a policy's decisions."""

    def start(self, job: Job, block: Block) -> None:
        """Let a waiting job run on free ranks."""

    def recall(self, job: Job) -> None:
        """Stop a running job at its next step boundary; the policy then decides again."""


class Policy(Protocol):
    """A rule that decides which requests run on which ranks."""

    def decide(self, state: State, act: Starts) -> None:
        """Start waiting jobs on free ranks, and recall running ones."""
