"""Predict when requests end, event by event; later requests, moves and recalls are not foreseen."""

from collections import deque
from dataclasses import replace

from bascule.plan.requests.boarding import Ride, Waiting
from bascule.plan.requests.state import NEVER, Job, State


def foresee(state: State, most: int = 1) -> tuple[list[float], dict[Job, float]]:
    """Return when each rank is free, ascending, and when jobs end that run or wait.

    Running jobs stay on their ranks; waiting ones follow, by deadline, then by arrival, each on
    ranks of its own if there are enough for all. They board as by `board`, up to `most` in a batch.
    """
    state, ends, free_s = replace(state), dict[Job, float](), [state.now_s] * state.num_free
    jobs = (waiting := Waiting(state.waiting, state)).jobs
    starts = deque(sorted(range(len(jobs)), key=lambda place: (jobs[place][0], jobs[place][2])))
    rides = {lead: Ride.of(lead, state) for lead in state.running.values()}
    share = max(1, state.num_ranks // max(1, len(jobs) + len(rides)))
    leads = list(rides)  # of batches that have begun or lost a job
    while True:
        while free_s and (places := waiting.first(starts, 1)):
            due_s, *_, narrow, job = jobs[places[0]]
            wide = [d for d in job.request.step_s if due_s < NEVER or d <= share] or [narrow]
            busy_s = sorted(ride.ends[-1] for ride in rides.values() for _ in range(ride.degree))
            begins = [state.now_s] * len(free_s) + busy_s
            degree = min((begins[d - 1] + job.seconds(d), d) for d in wide)[1]
            if degree > len(free_s):
                break  # it waits for more ranks
            waiting.here[places[0]] = False
            del free_s[:degree]
            rides[job] = Ride(degree, state.now_s, state.now_s, job.members(state.now_s))
            leads.append(job)
        for lead, _, ride in waiting.boardings(rides, leads, most):
            rides[lead] = ride
        if not rides:
            return free_s, ends
        lead = min(rides, key=lambda lead: rides[lead].ends[0])
        ride, leads = rides.pop(lead), list[Job]()
        (left, job), *rest = ride.members
        ends[job] = ride.ends[0]
        state.now_s = max(state.now_s, ends[job])
        if rest:
            members, leads = [(steps - left, other) for steps, other in rest], [lead]
            rides[lead] = Ride(ride.degree, ride.since_s, ends[job], members)
        else:
            free_s += [state.now_s] * ride.degree
