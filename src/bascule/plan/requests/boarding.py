"""The rule by which waiting requests board batches of requests of equal shapes."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import itemgetter

from bascule.plan.requests.state import NEVER, Job, State


@dataclass(slots=True, eq=False)
class Ride:
    """A batch at a step boundary, where others may board."""

    degree: int
    since_s: float  # when it got its ranks
    begin_s: float  # the boundary
    members: Sequence[tuple[int, Job]]  # by the steps left there, which ascend
    ends: Sequence[float] = field(init=False)  # of the members

    def __post_init__(self) -> None:
        spans = self.members[0][1].request.spans(self.degree, self.members)
        self.ends = [self.begin_s + span for span in spans]

    @classmethod
    def of(cls, lead: Job, state: State) -> "Ride":
        """Return the batch of a running job at its next boundary."""
        assert lead.block is not None
        now_s, since_s = lead.present(state.now_s), state.since[lead.block.first]
        return cls(lead.block.degree, since_s, lead.boundary_s(now_s), lead.members(now_s))

    def offer(self, most: int) -> tuple[float, int]:
        """Return the steps per second and rank that each other job adds, and the most steps left.

        Less than 2 % counts as 0, as it may be noise. The greatest offer is the best.
        """
        here, (left, job) = len(self.members), self.members[-1]
        sizes = range(here, most + 1) if left and job.request.batch_key is not None else ()
        rates = {num: num / job.request.together_s(self.degree, num) for num in sizes}
        best = max(rates, key=lambda num: rates[num], default=here)
        if best == here or rates[best] < _LEAST_GAIN * rates[here]:
            return 0.0, left
        return (rates[best] - rates[here]) / (best - here) / self.degree, left


class Waiting:
    """Jobs that wait for ranks, by deadline, then by seconds, then by arrival.

    No boarding goes through all of them.

    Attributes:
        jobs: By place: deadline, seconds on the fewest ranks, number, these ranks, and the job.
        here: By place, whether the job still waits.
    """

    def __init__(self, jobs: Iterable[Job], state: State) -> None:
        narrow = ((min(job.request.step_s), job) for job in jobs)
        self.jobs = sorted((j.deadline_s, j.seconds(d), j.number, d, j) for d, j in narrow)
        self.here = bytearray(b"\1" * len(self.jobs))
        works = (narrow * seconds for _, seconds, _, narrow, _ in self.jobs)
        self._state, self._works = state, list(accumulate(works, initial=0.0))
        places = range(len(self.jobs))
        self._arrivals = deque(sorted(places, key=lambda place: self.jobs[place][2]))
        self._dues = deque(place for place in places if self.jobs[place][0] < NEVER)
        self._queues = defaultdict[Hashable, deque[int]](deque)
        for place, (*_, job) in enumerate(self.jobs):
            if not job.riders:
                self._queues[job.request.batch_key].append(place)

    def first(self, places: deque[int], most: int) -> list[int]:
        """Return the places of those that wait of up to so many first jobs."""
        while places and not self.here[places[0]]:
            places.popleft()
        return [place for place in islice(places, most) if self.here[place]]

    def boardings(
        self, rides: Mapping[Job, Ride], leads: Iterable[Job], most: int
    ) -> Iterator[tuple[Job, Job, Ride]]:
        """Yield the jobs that board batches of some leads, each after the lead, and the batch then.

        `rides` has all batches by lead; the receiver replaces one that a job has boarded.
        """
        offers = {lead: rides[lead].offer(most) for lead in leads}
        while offers:
            lead = max(offers, key=offers.__getitem__)
            ride, (gain, _) = rides[lead], offers.pop(lead)
            others_s = [other.ends[-1] for other in rides.values() if other is not ride]
            queue = self._queues[lead.request.batch_key] if gain else deque[int]()
            for place in self.first(queue, _MOST_TRIED):
                *_, job = self.jobs[place]
                members = sorted([*ride.members, (job.left, job)], key=itemgetter(0))  # stable
                moves = job.left < job.request.steps  # it was on other ranks
                begin_s = ride.begin_s + moves * self._state.move_s
                after = Ride(ride.degree, ride.since_s, begin_s, members)
                if self._gains(place, ride, after, others_s):
                    self.here[place] = False
                    yield lead, job, after
                    offers[lead] = rides[lead].offer(most)
                    break

    def _gains(self, place: int, ride: Ride, after: Ride, others_s: Sequence[float]) -> bool:
        """Return whether the job at a place should board; `others_s`: when other ranks are free."""
        _, alone_s, number, narrow, job = self.jobs[place]
        now_s, num_ranks, degree = self._state.now_s, self._state.num_ranks, ride.degree
        pairs = zip(after.members, after.ends, strict=True)
        if losers := [member for (_, member), end_s in pairs if member.request.deadline_s < end_s]:
            soonest_s = now_s + min(map(job.seconds, job.request.step_s))
            ends = dict(zip((member for _, member in ride.members), ride.ends, strict=True))
            if any(ends.get(member, soonest_s) <= member.request.deadline_s for member in losers):
                return False
        free_s, longer = after.ends[-1], after.ends[-1] - ride.ends[-1]
        saved = narrow * alone_s - degree * longer
        is_late = free_s > ride.since_s + _MOST_TIMES * job.request.seconds(degree)
        firsts = self.first(self._arrivals, _MOST_TRIED) if is_late else ()
        earlier = [self.jobs[first][-1] for first in firsts if self.jobs[first][2] < number]
        if saved <= 0 or {other.request.batch_key for other in earlier} - {job.request.batch_key}:
            return False
        num_before, num_behind = self.here.count(1, 0, place), self.here.count(1, place + 1)
        wait_s = self._works[place] * num_before / max(1, place) / num_ranks
        own_s = max(now_s, min([ride.ends[-1], *others_s])) + wait_s + alone_s
        gain_s = (num_behind * saved - num_before * degree * longer) / num_ranks
        if own_s + sum(ride.ends) + gain_s <= sum(after.ends):
            return False
        dues = [self.jobs[due][:2] for due in self.first(self._dues, _MOST_DUE) if due != place]
        before_s, after_s = [*others_s, ride.ends[-1]], [*others_s, free_s]
        return not dues or _kept(dues, before_s) <= _kept(dues, after_s)


def board(
    state: State, act: Callable[[Job, Job], None], most: int, closed: Container[Job], coming: int
) -> None:
    """Let jobs that still wait after a policy's decision board batches of their keys.

    A job boards if the block then takes at least 2 % more steps per second, if no deadline of the
    batch or of waiting jobs is lost by it, as predicted, and if the predicted ends of all jobs
    together get earlier: its own, which no longer waits for ranks, and those of the jobs behind it,
    against those of the batch and of the jobs before it. While a job of another key waits that came
    before it, it must also end soon, so that no batch lasts for ever.

    Args:
        state: The state after the policy's decision.
        act: Lets a job board the batch of a lead, and calls `State.board`.
        most: Most requests in a batch.
        closed: Jobs that neither board nor take others in, such as recalled ones.
        coming: Ranks of recalled jobs, which the first jobs in line will get.
    """
    rides = {lead: Ride.of(lead, state) for lead in state.running.values() if state.waiting}
    leads = [lead for lead in rides if lead not in closed and rides[lead].offer(most)[0]]
    waiting = Waiting([job for job in state.waiting if leads and job not in closed], state)
    for place, (*_, narrow, _) in enumerate(waiting.jobs):
        if narrow <= coming:
            coming, waiting.here[place] = coming - narrow, False
    for lead, job, _ in waiting.boardings(rides, leads, most):
        act(job, lead)
        rides[lead] = Ride.of(lead, state)


def _kept(dues: Sequence[tuple[float, float]], free_s: Sequence[float]) -> set[tuple[bool, int]]:
    """Return which jobs, by place, meet their deadlines if each takes the block that is free first.

    First if all jobs run in this order, then if those that would be late are left out. `dues` has
    deadlines, and the seconds that jobs need.
    """
    kept = set[tuple[bool, int]]()
    for leaves_out in (False, True):
        free = sorted(free_s)  # a heap
        for place, (due_s, seconds) in enumerate(dues):
            is_kept = free[0] + seconds <= due_s
            if is_kept:
                kept.add((leaves_out, place))
            if is_kept or not leaves_out:
                heapq.heapreplace(free, free[0] + seconds)
    return kept


_LEAST_GAIN = 1.02  # in steps per second; less may be noise
_MOST_TIMES = 3.0  # of its own seconds, in which a batch ends while others have waited for longer
_MOST_DUE = 32  # jobs with deadlines that are looked at
_MOST_TRIED = 4  # first jobs that are looked at, of a key and of all
