"""The policy of bascule: it sets degrees by deadlines and load, and a latest start per request."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bascule.plan.requests.state import NEVER, Job, Request, Starts, State

Order = tuple[int, float, int]  # by urgency; the least goes first


@dataclass(slots=True)
class _Known:
    """The facts about a request that stay from its arrival on."""

    step_s: dict[int, float]  # seconds of a step by degree, each faster than those before
    narrow: int  # the least degree
    due_s: float
    later_s: float  # when it is due once `due_s` is lost


class _View(NamedTuple):
    """The figures of a job at a decision."""

    need: int  # the least degree that meets its deadline, else the fastest
    left_s: float  # seconds left at its least degree
    narrow_slack_s: float  # seconds before its deadline at which it ends there
    slack_s: float  # seconds before its deadline at which it ends at its fastest degree
    work: float  # rank-seconds left at the degree `need`


class Balanced:
    """A policy that meets deadlines with the fewest ranks, and speeds requests up with the others.

    In the order of urgency, every request gets a target degree: the smallest that meets its
    deadline. Ranks left over go to the requests that gain the most. Requests with free ranks start;
    while others wait, requests above their targets are recalled. With hundreds of jobs, targets are
    set only from time to time, and jobs start in the last order in between.

    A request without a deadline gets two: first, three times its time at its least degree. If that
    is missed, then its end under first come, first served, or that of 95 % of the last thousand.
    From its latest start on, it precedes all others. A user's deadline is given up if no degree can
    meet it, or if it makes others miss theirs: then the request waits for others, until it has
    waited 30 times its own time.

    Args:
        keeps_tails: Give requests without a deadline latest starts. Without them, the shortest
            rest goes first, at the degree with which the requests here end soonest on average if
            no other comes; the ranks must keep up with it. Most requests then end earlier, and the
            longest later; none waits for others longer than 30 times its own time.
    """

    def __init__(self, *, keeps_tails: bool = True) -> None:
        self._keeps_tails = keeps_tails
        self._base = 0  # degree of requests without a deadline, if it is above their least
        self._works: dict[int, float] = {}  # rank-seconds of the last requests by degree
        self._span_s = 0.0  # in which those arrived
        self._last_s: float | None = None  # the last arrival
        self._known: dict[int, _Known] = {}  # by number of the job
        self._most_known = _MANY
        self._last = -1
        self._virtual: list[float] = []  # times at which ranks would be free under fifo
        self._recent: deque[float] = deque()  # latencies of the last requests under fifo
        self._latencies: list[float] = []  # `_recent`, sorted
        self._line: list[tuple[Order, Job]] = []  # waiting jobs, as of the last targets
        self._beside: list[Job] = []  # jobs outside the line, which may wait
        self._turns = 0  # decisions until new targets
        self._num_changes = 0  # as of the last decision

    def decide(self, state: State, act: Starts) -> None:
        """Set target degrees, start the jobs that fit, and recall jobs above their targets."""
        if self._num_changes != state.num_changes:
            self._num_changes = state.num_changes
            for job in state.everyone():
                if job.number in self._known:
                    self._known[job.number].step_s = _fast(job.request.step_s)
        new = state.after(self._last)
        for job in new:
            self._last = job.number
            self._admit(state, job)
            self._beside.append(job)
        if new and not self._keeps_tails and (self._turns <= 1 or len(state.waiting) < _MANY):
            self._set_base(state)
        needs, room, self._turns = dict[Job, int](), state.num_free, self._turns - 1
        if self._turns <= 0:
            self._beside = []
        for job in state.waiting:
            needs[job] = self._view(state, job).need
            room -= needs[job]
            if room < 0:
                break
        if room < 0 and self._turns > 0:
            self._start_next(state, act)
            return
        order = dict[Job, Order]()
        if room < 0:
            jobs = [*state.running.values(), *state.waiting]
            needs, order = self._targets(state, jobs)
            self._turns = len(jobs) // 32 if len(jobs) > _MANY else 0
            self._line = sorted((order[job], job) for job in state.waiting) if self._turns else []
            self._beside = [job for job in state.everyone() if job.block or job.lead]
        else:  # all waiting jobs fit
            self._widen(state, needs, room)
        missing = 0
        for job in sorted(state.waiting, key=lambda job: -needs[job]):
            if needs[job] and not self._start(state, act, job, needs[job]):
                missing += needs[job]
        if missing and order:
            self._recall(state, act, needs, order, missing)
        elif not missing:
            self._use_idle(state, act)

    def _start(self, state: State, act: Starts, job: Job, degree: int) -> bool:
        """Start a job at a degree, or at a smaller one if no block of that degree is free."""
        block = state.free_block(degree)
        while block is None and degree > 1:
            degree //= 2
            is_known = degree in self._step_s(job)
            block = state.free_block(degree) if is_known else None
        if block is not None:
            act.start(job, block)
        return block is not None

    def _start_next(self, state: State, act: Starts) -> None:
        """Start the first jobs of the line while ranks are free."""
        if not state.num_free:
            return
        again = list(filter(state.waits, self._beside))
        for job in again:
            insort(self._line, (self._order(state, job, self._view(state, job), False), job))
        if again:
            self._beside = [job for job in self._beside if job not in again]
        while state.num_free and self._line:
            job = self._line[0][1]
            need = self._view(state, job).need if state.waits(job) else 0
            if need and not self._start(state, act, job, need):
                return
            del self._line[0]
            self._beside.append(job)

    def _targets(
        self, state: State, jobs: Sequence[Job]
    ) -> tuple[dict[Job, int], dict[Job, Order]]:
        """Return the target degree of each job, 0 to wait, and its order."""
        views = {job: self._view(state, job) for job in jobs}
        lost = self._without_hope(state, views)
        order = {job: self._order(state, job, view, job in lost) for job, view in views.items()}
        room, targets = state.num_ranks, dict.fromkeys(jobs, 0)
        for job in sorted(jobs, key=order.__getitem__):
            known = self._known[job.number]
            need = known.narrow if job in lost else views[job].need
            while need > room:
                need //= 2
            if need in self._step_s(job):
                targets[job] = need
                room -= need
        self._widen(state, targets, room)
        return targets, order

    def _recall(
        self,
        state: State,
        act: Starts,
        targets: Mapping[Job, int],
        order: Mapping[Job, Order],
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
            if job.left and (wide := self._step_s(job).get(2 * block.degree)) is not None:
                gain = job.rest(state.now_s) * (job.step_s(block.degree) - wide)
                if not job.riders:
                    gain += job.free_s - job.steps_end_s - job.request.once_s
                if gain > most:
                    best, most = job, gain
        if best is not None:
            act.recall(best)

    def _admit(self, state: State, job: Job) -> None:
        request, step_s = job.request, _fast(job.request.step_s)
        due = later = request.deadline_s
        if due == NEVER:
            self._virtual = self._virtual or [0.0] * state.num_ranks
            fewest = min(request.step_s)
            alone_s = request.seconds(fewest)
            free_s = [heapq.heappop(self._virtual) for _ in range(min(fewest, state.num_ranks))]
            end = max(free_s[-1], request.arrival_s) + alone_s
            for _ in free_s:
                heapq.heappush(self._virtual, end)
            self._recent.append(end - request.arrival_s)
            insort(self._latencies, self._recent[-1])
            if len(self._recent) > _RECENT:
                del self._latencies[bisect_left(self._latencies, self._recent.popleft())]
            usual = self._latencies[int(0.95 * (len(self._latencies) - 1))]
            later = request.arrival_s + _TAIL * max(usual, end - request.arrival_s)
            due = min(later, request.arrival_s + _SOFT * alone_s)
        if not self._keeps_tails:
            self._add_work(request, step_s, state.num_ranks)
        if len(self._known) > self._most_known:  # forget ended requests
            here = {job.number for job in state.everyone()}
            self._known = {number: self._known[number] for number in here & self._known.keys()}
            self._most_known = 2 * len(self._known) + _MANY
        self._known[job.number] = _Known(step_s, min(step_s), due, later)

    def _add_work(self, request: Request, step_s: Mapping[int, float], num_ranks: int) -> None:
        """Count the rank-seconds of a request at each degree; earlier requests fade."""
        fade, most = 1 - 1 / _RECENT, max(1, *self._works, min(max(step_s), num_ranks))
        if self._last_s is not None:
            self._span_s = fade * self._span_s + request.arrival_s - self._last_s
        self._last_s = request.arrival_s
        for degree in (2**k for k in range(most.bit_length())):
            wide = _at_most(step_s, degree)
            before = self._works.get(degree, self._works.get(degree // 2, 0.0))
            work = wide * request.steps * step_s[wide] + request.once_s
            self._works[degree] = fade * before + work

    def _set_base(self, state: State) -> None:
        """Set the degree at which the jobs here end soonest on average, the shortest first.

        A degree counts if the ranks keep up with it, or if it costs hardly more rank-seconds.
        """
        best, cheapest = NEVER, min(self._works.values())
        most = max(_BUSY * state.num_ranks * self._span_s, _HARDLY * cheapest)
        jobs = [*state.running.values(), *state.waiting]
        rests = [(job, job.rest(state.now_s), self._step_s(job)) for job in jobs]
        for degree, work in self._works.items():
            if degree > 1 and work > most:
                continue
            needs = list[float]()
            for job, rest, step_s in rests:
                wide = _at_most(step_s, degree)
                seconds = rest * step_s[wide] + job.request.once_s
                needs.append(seconds * max(1.0, wide / degree))
            ends, total = [0.0] * (state.num_ranks // degree), 0.0
            for seconds in sorted(needs):
                total += heapq.heapreplace(ends, ends[0] + seconds) + seconds
            if total < best:
                best, self._base = total, degree

    def _step_s(self, job: Job) -> dict[int, float]:
        """Return the seconds of a step of a job and its riders by degree, as `_Known.step_s`."""
        if not job.riders:
            return self._known[job.number].step_s
        return _fast({degree: job.step_s(degree) for degree in job.request.step_s})

    def _first(self, state: State, job: Job) -> Job:
        """Return the job of a batch that is due first: of users and not over, if there are."""

        def urgency(member: Job) -> tuple[int, float]:
            due_s = member.request.deadline_s
            return 2 * (due_s == NEVER) + (due_s < state.now_s), self._known[member.number].due_s

        return min((job, *job.riders), key=urgency)

    def _view(self, state: State, job: Job) -> _View:
        known, request, rest = self._known[job.number], job.request, job.rest(state.now_s)
        at, begin, step_s = 0, state.now_s, known.step_s
        if job.block is not None:
            at = job.block.degree
            begin = job.steps_end_s - (rest and rest * job.step_s(at))
        if at or job.left < request.steps:
            begin += state.move_s
        if job.riders:
            members, first = job.members(state.now_s), self._first(state, job)
            place = [member for _, member in members].index(first)
            spans = {degree: request.spans(degree, members) for degree in self._step_s(job)}
            room = self._known[first.number].due_s - begin
            slacks = [room - span[place] for span in spans.values()]
            if at in spans:
                slacks[list(spans).index(at)] += state.move_s
            need = self._need(spans, slacks, job.deadline_s)
            left_s, work = next(iter(spans.values()))[-1], need * spans[need][place]
            return _View(need, left_s, slacks[0], max(slacks), work)
        room = known.due_s - begin - request.once_s
        slacks = [room - rest * step for step in step_s.values()]
        if at in step_s:
            slacks[list(step_s).index(at)] = known.due_s - job.free_s
        need = self._need(step_s, slacks, request.deadline_s)
        left_s = rest * step_s[known.narrow] + request.once_s
        work = need * rest * step_s[need] + request.once_s
        return _View(need, left_s, slacks[0], max(slacks), work)

    def _need(self, degrees: Mapping[int, object], slacks: Sequence[float], due_s: float) -> int:
        """Return the least degree that meets a deadline, else the last; idle ranks widen others."""
        if due_s == NEVER:
            return _at_most(degrees, self._base)
        return next(
            (d for d, slack in zip(degrees, slacks, strict=True) if slack >= 0), max(degrees)
        )

    def _without_hope(self, state: State, views: Mapping[Job, _View]) -> set[Job]:
        """Return jobs whose deadlines are lost, or cost others theirs (Moore and Hodgson)."""
        lost = set[Job]()
        load, chosen = 0.0, list[tuple[float, int, Job]]()
        firsts = {job: self._first(state, job) if job.riders else job for job in views}
        due = {job: self._known[first.number].due_s for job, first in firsts.items()}
        for job in sorted(views, key=lambda job: (due[job], job.number)):
            if job.deadline_s == NEVER:
                continue
            if views[job].slack_s < 0:
                lost.add(job)
                continue
            heapq.heappush(chosen, (-views[job].work / (1 + len(job.riders)), job.number, job))
            load += views[job].work
            while load > state.num_ranks * max(due[job] - state.now_s, 1e-9) and chosen:
                dropped = heapq.heappop(chosen)[2]
                load -= views[dropped].work
                lost.add(dropped)
        return lost

    def _order(self, state: State, job: Job, view: _View, is_lost: bool) -> Order:
        first = self._first(state, job) if job.riders else job
        each_s = view.left_s / (1 + len(job.riders))
        request, known = first.request, self._known[first.number]
        if is_lost or (request.deadline_s == NEVER and not self._keeps_tails):
            alone = request.seconds(known.narrow)
            if state.now_s - request.arrival_s - alone > _PATIENCE * alone:
                return 0, request.arrival_s, job.number
            return 2 + (is_lost and self._keeps_tails), each_s, job.number
        if request.deadline_s < NEVER:
            return 1, known.due_s, job.number
        if job.block is not None:  # the latest start that it had when it waited
            return 1, known.due_s - request.seconds(known.narrow), job.number
        slack = view.slack_s
        if view.narrow_slack_s < 0:
            slack += known.later_s - known.due_s
            known.due_s = known.later_s
        if slack >= view.left_s:
            return 2, each_s, job.number
        return 1, known.due_s - view.left_s, job.number

    def _widen(self, state: State, targets: dict[Job, int], room: int) -> None:
        """Double degrees where that gains the most seconds, while there are ranks."""
        if not room:
            return
        gains: list[tuple[float, int, Job]] = []

        def offer(job: Job, degree: int) -> None:
            if 0 < degree <= room and 2 * degree in (step_s := self._step_s(job)):
                gain = job.rest(state.now_s) * (step_s[degree] - step_s[2 * degree])
                gain *= 1 + len(job.riders)
                heapq.heappush(gains, (-gain, job.number, job))

        for job, degree in targets.items():
            offer(job, degree)
        while gains and room:
            job = heapq.heappop(gains)[2]
            if targets[job] <= room:
                room -= targets[job]
                targets[job] *= 2
                offer(job, targets[job])


def _at_most(step_s: Mapping[int, object], degree: int) -> int:
    """Return the largest of the ascending degrees up to `degree`, else the least."""
    best = next(iter(step_s))
    for wide in step_s:
        if wide <= degree:
            best = wide
    return best


def _fast(step_s: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of a step by degree, without degrees that are no faster."""
    fast = dict[int, float]()
    for degree, seconds in sorted(step_s.items()):
        if seconds < min(fast.values(), default=NEVER):
            fast[degree] = seconds
    return fast


_SOFT = 3.0  # first deadline of a request without one, in times of its own
_TAIL = 0.97  # share of the fifo latency that is its second deadline
_PATIENCE = 30.0  # longest wait of a request with a lost deadline, in times of its own
_BUSY = 0.9  # most share of the ranks that a degree may keep busy
_HARDLY = 1.05  # or most rank-seconds, in times of the cheapest degree
_MANY = 256  # most jobs for which targets are set at each decision
_RECENT = 1000  # latencies that are remembered
