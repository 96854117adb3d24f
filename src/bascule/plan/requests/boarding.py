"""The rule by which waiting requests board running batches of requests of equal shapes."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple, Protocol

from bascule.plan.requests.state import NEVER, Job, State


class Boards(Protocol):
    """The receiver of the rule's decisions."""

    def board(self, job: Job, lead: Job) -> None:
        """Let a waiting job ride in the batch of a running one from its next boundary on."""


# What a batch offers: minus the steps per second and rank that each rider adds, minus its most
# steps left, its first rank, and its lead. The least is the best.
_Offer = tuple[float, int, int, Job]


class _Turn(NamedTuple):
    """The place of a job in the line of those that wait."""

    wait_s: float  # predicted, until it gets ranks of its own
    num_before: int
    num_behind: int
    is_late: bool  # a job of another key came before it
    dues: Sequence[tuple[float, float]]  # deadlines of other jobs, and the seconds that they need


def board(
    state: State, act: Boards, most: int, closed: Container[Job] = (), num_coming: int = 0
) -> None:
    """Let jobs that still wait after a policy's decision board batches of their keys.

    A job boards if the block then takes at least 2 % more steps per second, if no deadline of the
    batch or of waiting jobs is lost by it, as predicted, and if the predicted ends of all jobs
    together get earlier: its own, which no longer waits for ranks, and those of the jobs behind it,
    against those of the batch and of the jobs before it. While a job of another key waits that came
    before it, it must also end soon, so that no batch lasts for ever.

    Args:
        state: The state after the policy's decision.
        act: Receives the decisions, and brings each into the state at once; see `State.board`.
        most: Most requests in a batch.
        closed: Jobs that neither board nor take others in, such as recalled ones.
        num_coming: Ranks of recalled jobs, which the first jobs in line will get.
    """
    offers = defaultdict[Hashable, list[_Offer]](list)
    for lead in state.running.values() if state.waiting else ():
        if lead.request.batch_key is not None and lead not in closed:
            offers[lead.request.batch_key] += _offers(state, lead, most)
    if not any(offers.values()):
        return
    wait_s = max(0.0, min(job.free_s for job in state.running.values()) - state.now_s)
    line = sorted(
        (job.deadline_s, job.seconds(min(job.request.step_s)), job.number, job)
        for job in state.waiting
    )
    dues = [entry for entry in line[:_MOST_DUE] if entry[0] < NEVER]
    num_before, failures = 0, Counter[Hashable]()
    for place, (_, seconds, _, job) in enumerate(line, 1):
        key, narrow = job.request.batch_key, min(job.request.step_s)
        if narrow <= num_coming:
            num_coming -= narrow
            continue
        if offers[key] and not job.riders and job not in closed:
            unlike = (other.number for other in state.waiting if other.request.batch_key != key)
            others = [(due_s, needs_s) for due_s, needs_s, _, other in dues if other is not job]
            turn = _Turn(
                wait_s, num_before, len(line) - place, next(unlike, NEVER) < job.number, others
            )
            tried = heapq.nsmallest(_MOST_TRIED, offers[key])
            offer = next((offer for offer in tried if _gains(state, job, offer[-1], turn)), None)
            if offer is not None:
                act.board(job, offer[-1])
                dues = [entry for entry in dues if entry[3] is not job]
                offers[key].remove(offer)
                offers[key] += _offers(state, offer[-1], most)
                continue
            failures[key] += 1
            if failures[key] == _MOST_TRIED:
                offers[key] = []
        num_before += 1
        wait_s += narrow * seconds / state.num_ranks  # the next one waits for this one too


def _offers(state: State, lead: Job, most: int) -> list[_Offer]:
    """Return the place that a batch offers, if it gains by others."""
    assert lead.block is not None
    here, degree = 1 + len(lead.riders), lead.block.degree
    rest = max(job.rest(lead.present(state.now_s)) for job in (lead, *lead.riders))
    rates = {n: n / lead.request.together_s(degree, n) for n in range(here, most + 1)}
    best = max(rates, key=lambda n: rates[n], default=0)
    if not rest or best <= here or rates[best] < _LEAST_GAIN * rates[here]:
        return []
    loss = (rates[here] - rates[best]) / (best - here) / degree
    return [(loss, -rest, lead.block.first, lead)]


def _gains(state: State, job: Job, lead: Job, turn: _Turn) -> bool:
    """Return whether a waiting job should board a batch."""
    assert lead.block is not None
    now_s, degree = lead.present(state.now_s), lead.block.degree
    before, after = lead.spans(degree, now_s), lead.spans(degree, now_s, job)
    begin, narrow = lead.boundary_s(now_s), min(job.request.step_s)
    alone = {d: job.seconds(d) for d in job.request.step_s}
    spans = before | {job: state.now_s + min(alone.values()) - begin}
    for member, span in after.items():
        if begin + spans[member] <= member.request.deadline_s < begin + span:
            return False
    longer = max(after.values()) - max(before.values())
    saved = narrow * alone[narrow] - degree * longer
    until = state.since[lead.block.first] + _MOST_TIMES * job.request.seconds(degree)
    free_s = begin + max(after.values())
    if saved <= 0 or (turn.is_late and free_s > until):
        return False
    earlier = turn.wait_s + alone[narrow] - (begin - state.now_s) + sum(before.values())
    earlier += (turn.num_behind * saved - turn.num_before * degree * longer) / state.num_ranks
    if earlier <= sum(after.values()):
        return False
    others_s = [other.free_s for other in state.running.values() if other is not lead]
    return _kept(turn.dues, [*others_s, lead.free_s]) <= _kept(turn.dues, [*others_s, free_s])


def _kept(dues: Sequence[tuple[float, float]], free_s: list[float]) -> set[tuple[bool, int]]:
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
_MOST_TRIED = 4  # best batches for a job, and jobs of a key that fit in none
