"""Policies of other systems, to compare with, and all policies by their names."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.requests.balanced import Balanced, Order
from bascule.plan.requests.state import NEVER, Block, Job, Line, Policy, Request, Starts, State


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
        self._line = Line(lambda job: self._key(job, 0.0))  # rests of waiting jobs stay

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
        self._line.update(state)
        while (job := self._line.first(state)) is not None:
            block = state.free_block(self.degree_of(job))
            if block is None:
                if self._order in ("srtf", "pause"):
                    self._recall(state, act)
                return
            self._line.take()
            act.start(job, block)

    def _recall(self, state: State, act: Starts) -> None:
        running = [(self._key(one, state.now_s), one) for one in state.running.values()]
        running.sort(key=lambda one: one[0], reverse=True)
        waiting = self._line.firsts(state, len(running))
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
        self._line = Line(lambda job: (job.request.deadline_s, job.number))

    def decide(self, state: State, act: Starts) -> None:
        """Start in the order of deadlines."""
        self._line.update(state)
        while (job := self._line.first(state)) is not None:
            degrees = [d for d in sorted(job.request.step_s) if state.free_block(d) is not None]
            if not degrees:
                return
            degree = min(degrees, key=job.seconds)
            if self._fit == "best fit":
                ends = {d: state.now_s + job.seconds(d) for d in degrees}
                degree = next((d for d in degrees if ends[d] <= job.request.deadline_s), degree)
            block = state.free_block(degree)
            assert block is not None
            self._line.take()
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


class TetriServe(Balanced):
    """Keeps most requests alive for a round, by a knapsack over the ranks (TetriServe's paper).

    A request asks for the smallest degree that meets its deadline. Alive is one that runs, or could
    still meet its deadline if it idled for the round. Ranks that are left go to requests that are
    late anyway, and then widen others. It decides at each event and not at the end of each round,
    which is five steps of the largest request at its fastest degree.
    """

    def _targets(
        self, state: State, jobs: Sequence[Job]
    ) -> tuple[dict[Job, int], dict[Job, Order]]:
        num, room = state.num_ranks, state.num_ranks
        round_s = 5 * max(min(one.request.step_s.values()) for one in jobs)
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
