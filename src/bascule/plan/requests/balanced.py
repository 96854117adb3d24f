"""The policy of bascule: degrees by deadlines and by the load, and latest starts."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bascule.plan.requests.state import NEVER, Job, Request, Starts, State

Order = tuple[int, float, int]  # of urgency: what is less goes first


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

    A request without a deadline gets two. The first is three times its own time. When that is lost
    on its fewest ranks, the second is what first come, first served on these would have done for
    it, or for 95 % of the last thousand. When its latest start comes it goes before all others. A
    deadline of a user that no degree can meet any more, or that costs others theirs, is lost: the
    request waits for others, until it has waited 30 times its own time.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by number of the job
        self._last = -1
        self._virtual: list[float] = []  # when ranks would be free, first come first served
        self._recent: deque[float] = deque()  # latencies there, of the last requests
        self._latencies: list[float] = []  # the same, sorted
        self._line: list[tuple[Order, Job]] = []  # what waits, as of the last targets
        self._beside: list[Job] = []  # jobs outside the line, which may wait
        self._turns = 0  # decisions until new targets
        self._num_changes = 0  # of seconds that are known

    def decide(self, state: State, act: Starts) -> None:
        """Set targets, start what fits, and recall what has more than its target."""
        if self._num_changes != state.num_changes:
            self._num_changes = state.num_changes
            for job in (*state.waiting, *state.running.values()):
                if job.number in self._known:
                    self._known[job.number].step_s = _fast(job.request)
        for job in state.after(self._last):
            self._last = job.number
            self._admit(state, job)
            self._beside.append(job)
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
            self._beside = list(state.running.values())
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
        for job in filter(state.waits, self._beside):
            insort(self._line, (self._order(state, job, self._view(state, job), False), job))
        self._beside = [job for job in self._beside if not state.waits(job)]
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
            step_s = self._known[job.number].step_s
            if job.left and (wide := step_s.get(2 * block.degree)) is not None:
                gain = job.rest(state.now_s) * (job.request.step_s[block.degree] - wide)
                gain += job.free_s - job.steps_end_s - job.request.once_s
                if gain > most:
                    best, most = job, gain
        if best is not None:
            act.recall(best)

    def _admit(self, state: State, job: Job) -> None:
        request, step_s = job.request, _fast(job.request)
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
            later = request.arrival_s + _TAIL * max(usual, end - request.arrival_s)
            due = min(later, request.arrival_s + _SOFT * own)
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

    def _order(self, state: State, job: Job, view: _View, is_lost: bool) -> Order:
        request, known = job.request, self._known[job.number]
        if is_lost:
            alone = request.seconds(known.narrow)
            if state.now_s - request.arrival_s - alone > _PATIENCE * alone:
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


def _fast(request: Request) -> dict[int, float]:
    """Return the seconds of a step at degrees that are each faster than those before."""
    step_s = dict[int, float]()
    for degree, seconds in sorted(request.step_s.items()):
        if seconds < min(step_s.values(), default=NEVER):
            step_s[degree] = seconds
    return step_s


_SOFT = 3.0  # times of its own after which a request without a deadline should be done
_TAIL = 0.97  # of its second deadline
_PATIENCE = 30.0  # times of its own that a request waits at most for those who came later
_MANY = 256  # jobs for which targets are set at each decision
_RECENT = 1000
