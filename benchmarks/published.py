"""Policies of other systems and published workloads of requests, to compare `Balanced` with.

All are written anew for the protocol of `bascule.plan.requests`.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.machine.cluster import HardwareProfile
from bascule.plan.requests import (
    NEVER,
    Balanced,
    Block,
    EarliestDeadline,
    Job,
    Policy,
    Queue,
    Request,
    Starts,
    State,
    common_degree,
)
from bascule.plan.requests import policy_of as plain_policy_of
from bascule.plan.requests.balanced import Order
from bascule.workload.requests import predicted
from bascule.workload.tokens import model_shape

# --- policies -------------------------------------------------------------------------------------


class Dispatch:
    """Gives each request to a replica when it arrives; replicas take one after the other.

    Args:
        by: "random", "round robin", "least in flight", "least work" (predicted), or "declared
            cost" (llm-d-router 2053): the least that is not done, whole requests counted.
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

        def in_flight(first: int) -> float:
            jobs = [*self._queues[first], *filter(None, [state.running.get(first)])]
            return sum(map(declared_cost, jobs)) if self._by == "declared cost" else len(jobs)

        return min(firsts[at:] + firsts[:at], key=in_flight)


def declared_cost(job: Job) -> float:
    """Return steps x pixels, of a kind that is named after a side; else predicted rank-seconds."""
    request = job.request
    is_side = request.kind.isdecimal()
    return request.steps * float(request.kind) ** 2 if is_side else request.work_s


class Connections(Dispatch):
    """Random replicas for new connections of a client that uses idle ones again.

    It models a plain Kubernetes service before uvicorn, which closes connections that are idle for
    5 s, and aiohttp, which takes the one that has been idle the longest.
    """

    def __init__(self, degree: int = 1, *, seed: int = 0) -> None:
        super().__init__("random", degree, seed=seed)
        self._open: list[tuple[Job, int]] = []  # the last request of a connection, its replica

    def _replica(self, state: State, job: Job) -> int:
        here = {*state.waiting, *state.running.values()}
        idle = [(last.free_s, k) for k, (last, _) in enumerate(self._open) if last not in here]
        idle = [entry for entry in idle if state.now_s - entry[0] <= 5.0]
        first = self._open.pop(min(idle)[1])[1] if idle else super()._replica(state, job)
        self._open.append((job, first))
        return first


class TailAware:
    """Waiting time plus a share of the service time, the most first (vLLM-Omni, documented).

    Each 20th arrival lets one of the longest requests wait for all others. With 10 to 27 waiting, a
    beam search (four requests ahead, 16 states, six branches) chooses the next one. What the search
    minimizes is not documented: here the longest latency of the best six, then their sum. Nothing
    is recalled.
    """

    def __init__(self, degree: int = 1) -> None:
        self._degree = degree
        self._tail: set[int] = set()
        self._credit, self._last = 0.0, -1
        self._shortest, self._longest = NEVER, 0.0

    def decide(self, state: State, act: Starts) -> None:
        """Start normal requests, and others if no normal one waits."""
        for job in state.after(self._last):
            self._last, self._credit = job.number, self._credit + 0.05
            seconds = job.seconds(self._degree)
            self._shortest, self._longest = (
                min(self._shortest, seconds),
                max(self._longest, seconds),
            )
            is_long = seconds >= max(0.8 * self._longest, 1.5 * self._shortest)
            if is_long and self._credit >= 1 - 1e-9:
                self._credit -= 1
                self._tail.add(job.number)
        while state.waiting and (block := state.free_block(self._degree)) is not None:
            normal = [job for job in state.waiting if job.number not in self._tail]
            act.start(self._next(state, normal) if normal else state.waiting[-1], block)

    def _next(self, state: State, normal: Sequence[Job]) -> Job:
        is_band = 10 <= len(normal) <= 27
        beta = 0.625 if is_band else 0.85

        def risk(job: Job) -> tuple[float, int]:
            waits_s = state.now_s - job.request.arrival_s
            return -(waits_s + beta * job.seconds(self._degree)), job.number

        line = sorted(normal, key=risk)[:6]
        if not is_band:
            return line[0]
        ends = [job.free_s for job in state.running.values()]
        ends += [state.now_s] * (state.num_ranks // self._degree - len(ends))
        beam: list[tuple[float, float, list[int], list[float]]] = [(0.0, 0.0, [], ends)]
        for _ in range(4):
            grown = list[tuple[float, float, list[int], list[float]]]()
            for longest, total, chosen, free in beam:
                for k, job in enumerate(line):
                    if k not in chosen:
                        then = free.copy()
                        heapq.heapify(then)
                        end = max(then[0], state.now_s) + job.seconds(self._degree)
                        heapq.heapreplace(then, end)
                        late = end - job.request.arrival_s
                        grown.append((max(longest, late), total + late, [*chosen, k], then))
            beam = sorted(grown)[:16]
        return line[beam[0][2][0]]


class GenServe:
    """Images pause the video with the most slack; videos take more ranks as they need them.

    After the abstract and summaries of 2604.04335. Images go first, the earliest deadline first, on
    their fewest ranks; a video takes the fewest ranks that meet its deadline, and idle ranks widen
    the one with the least slack. A video here is what takes eight times the least work seen. Not
    known, so not here: batches, and the dynamic program that chooses among candidates.
    """

    def __init__(self) -> None:
        self._last, self._least = -1, NEVER

    def decide(self, state: State, act: Starts) -> None:
        """Start images, then videos; pause or widen a video."""
        for job in state.after(self._last):
            self._last, self._least = job.number, min(self._least, job.request.work_s)
        for job in sorted(state.waiting, key=self._key):
            degrees = [d for d in sorted(job.request.step_s) if state.free_block(d) is not None]
            if not degrees:
                self._pause(state, act, job)
                return
            due = job.request.deadline_s
            fits = [d for d in degrees if state.now_s + job.seconds(d) <= due < NEVER]
            best = min(degrees, key=job.seconds) if self._is_video(job) else degrees[0]
            block = state.free_block(fits[0] if fits else best)
            assert block is not None
            act.start(job, block)
        wide = [
            job for job in state.running.values()
            if job.block is not None and self._is_video(job) and job.left
            and 2 * job.block.degree in job.request.step_s
            and Block(job.block.first ^ job.block.degree, job.block.degree) in state.free
            and job.free_s > job.request.deadline_s
        ]  # fmt: skip
        if wide:
            act.recall(min(wide, key=lambda job: (job.request.deadline_s - job.free_s, job.number)))

    def _key(self, job: Job) -> tuple[bool, float, int]:
        return self._is_video(job), job.request.deadline_s, job.number

    def _is_video(self, job: Job) -> bool:
        return job.request.work_s >= 8 * self._least

    def _pause(self, state: State, act: Starts, job: Job) -> None:
        videos = [other for other in state.running.values() if self._is_video(other)]
        slack = {other: other.request.deadline_s - other.free_s for other in videos}
        if videos and not self._is_video(job):
            act.recall(max(videos, key=lambda other: (slack[other], other.number)))


class Pause(Queue):
    """One queue, the smallest first, which recalls larger ones (GF-DiT)."""

    def __init__(self, degree: int = 1) -> None:
        super().__init__("pause", degree)
        self._recalls = True

    def key(self, job: Job, now_s: float) -> tuple[float, int]:
        """Return the seconds of the whole request."""
        return job.request.seconds(self.degree_of(job)), job.number


class Rssp(Queue):
    """First come, first served, each kind at its best degree (TetriServe's paper)."""

    def __init__(self, degrees: Mapping[str, int]) -> None:
        super().__init__("fifo")
        self._degrees = degrees

    def degree_of(self, job: Job) -> int:
        """Return the degree of its kind."""
        return self._degrees[job.request.kind]


def best_degrees(requests: Iterable[Request], most: int) -> dict[str, int]:
    """Return the degree that is best for each kind, for `Rssp`.

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


class BestFit(EarliestDeadline):
    """Earliest deadline first, on the smallest degree that meets it (GF-DiT)."""

    def choose(self, state: State, job: Job, degrees: Sequence[int]) -> int:
        """Return the smallest degree that meets the deadline, else the fastest."""
        ends = {degree: state.now_s + job.seconds(degree) for degree in degrees}
        fitting = (degree for degree, end in ends.items() if end <= job.request.deadline_s)
        return next(fitting, min(degrees, key=job.seconds))


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


_OF_DEGREES: Mapping[str, Callable[[int, int], Policy]] = {  # of a degree and a seed
    "random": lambda degree, seed: Dispatch("random", degree, seed=seed),
    "round-robin": lambda degree, seed: Dispatch("round robin", degree),
    "least-in-flight": lambda degree, seed: Dispatch("least in flight", degree),
    "least-work": lambda degree, seed: Dispatch("least work", degree),
    "declared-cost": lambda degree, seed: Dispatch("declared cost", degree),
    "connections": lambda degree, seed: Connections(degree, seed=seed),
    "tail-aware": lambda degree, seed: TailAware(degree),
    "pause": lambda degree, seed: Pause(degree),
}
_OTHERS: Mapping[str, Callable[[], Policy]] = {
    "load": lambda: Elastic("load"),
    "demote": lambda: Elastic("demote"),
    "best-fit": BestFit,
    "tetriserve": TetriServe,
    "genserve": GenServe,
    "super-p95": SuperP95,
}
OTHERS = *_OF_DEGREES, "rssp", *_OTHERS


def policy_of(name: str, requests: Sequence[Request], num_ranks: int, seed: int = 0) -> Policy:
    """Return a new policy, of another system or of bascule, by its name, such as least-work:2."""
    word, _, text = name.partition(":")
    if name == "rssp":
        return Rssp(best_degrees(requests, num_ranks))
    if name in _OTHERS:
        return _OTHERS[name]()
    if word in _OF_DEGREES:
        degree = common_degree(name, int(text or "1"), requests, num_ranks)
        return _OF_DEGREES[word](degree, seed)
    return plain_policy_of(name, requests, num_ranks, seed)


# --- seconds of a step ----------------------------------------------------------------------------

# Milliseconds by tokens at degrees 1, 2, 4. Source: the README of GF-DiT.
_H20_MS = {1024: (155, 161, 172), 4096: (605, 350, 207), 9216: (1557, 880, 464)}
_WAN_GAINS = {
    1: 1.0,
    2: 1.82,
    4: 3.33,
    8: 5.88,
}  # source: the simulator of GF-DiT


def qwen_h20(tokens: int) -> dict[int, float]:
    """Return the seconds of Qwen-Image on H20, by a parabola through measured sizes."""
    one = (4.817e-6 * tokens**2 + 0.12182 * tokens + 25.2) / 1e3
    gains = [[of_size[0] / of_size[k] for of_size in _H20_MS.values()] for k in range(3)]
    return {2**k: one / float(np.interp(tokens, list(_H20_MS), gains[k])) for k in range(3)}


# Seconds of a step by side and requests in a batch: Qwen-Image with guidance on one H200, compiled.
# Source: SGLang 22183.
_H200_S = {
    512: {1: 0.167, 2: 0.183, 3: 0.186, 4: 0.240, 8: 0.425, 16: 0.832},
    1024: {1: 0.243, 2: 0.474, 3: 0.711},
}
MOST = 8  # requests in a batch


def qwen_h200(side: int) -> list[float]:
    """Return the seconds of 1, 2, .. requests in a batch, by lines through the published ones."""
    points = _H200_S[side]
    sizes = np.arange(1, min(MOST, max(points)) + 1)
    return np.interp(sizes, list(points), list(points.values())).tolist()


def synthetic_wan(tokens: int) -> dict[int, float]:
    """Return the seconds of the Wan that GF-DiT simulates: linear in tokens."""
    return {d: tokens * 0.1323e-3 / gain + 0.02 * (d - 1) for d, gain in _WAN_GAINS.items()}


# --- workloads ------------------------------------------------------------------------------------

_LONG_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Classes of requests that arrive by chance.

    Attributes:
        kinds: A request of each class, as if it arrived at 0.
        phases: Seconds, requests a second, and the share of each class; one after the other.
        most: Requests at most.
        is_regular: They come at equal intervals, and not as a Poisson process.
    """

    kinds: Sequence[Request]
    phases: Sequence[tuple[float, float, Sequence[float]]]
    most: int | None = None
    is_regular: bool = False

    def scale(self, load: float, num_ranks: int) -> float:
        """Return the factor of the rates at which the ranks have a load, at cheapest degrees."""
        work = [one.work_s for one in self.kinds]
        rates = [rate * float(np.dot(shares, work)) for _, rate, shares in self.phases]
        return load * num_ranks / float(np.average(rates, weights=[s for s, _, _ in self.phases]))

    def draw(self, scale: float, seed: int, *, slo: float = 1.0) -> list[Request]:
        """Return requests at so many times the rates; `slo` scales the time until deadlines."""
        random, requests, begin = np.random.default_rng(seed), list[Request](), 0.0
        for seconds, rate, shares in self.phases:
            interval = 1.0 / (rate * scale) if rate else NEVER
            draw = (lambda of: of) if self.is_regular else random.exponential
            now = begin + draw(interval)
            while now < begin + seconds and len(requests) != self.most:
                one = self.kinds[int(random.choice(len(self.kinds), p=shares))]
                due = now + slo * one.deadline_s
                requests.append(replace(one, arrival_s=float(now), deadline_s=float(due)))
                now += draw(interval)
            begin += seconds
        return requests


def evenly(
    kinds: Sequence[Request], shares: Sequence[float], most: int, *, is_regular: bool = False
) -> Trace:
    """Return a trace at one rate, 1 a second."""
    phases = [(_LONG_S, 1.0, (np.array(shares) / sum(shares)).tolist())]
    return Trace(kinds=kinds, phases=phases, most=most, is_regular=is_regular)


def random4() -> Trace:
    """Pictures of four sizes at fixed intervals, without deadlines (vLLM-Omni 3916)."""
    sizes = {"512": (1024, 20), "768": (2304, 20), "1024": (4096, 25), "1536": (9216, 35)}
    kinds = [Request(step_s=qwen_h20(n), steps=k, kind=kind) for kind, (n, k) in sizes.items()]
    return evenly(kinds, (0.15, 0.25, 0.45, 0.15), 500, is_regular=True)


def in_batches(kind: Request, curve: Sequence[float]) -> Request:
    """Return a request that may share batches; its steps get longer with them as in a curve."""
    batch_s = {d: [s / curve[0] * each for each in curve] for d, s in kind.step_s.items()}
    return replace(kind, batch_key=kind.kind, batch_s=batch_s)


def small_pictures(rate: float, most: int) -> list[Request]:
    """Return requests for pictures of 512 x 512 pixels at fixed intervals, on single H200s."""
    curve = qwen_h200(512)
    kind = in_batches(Request(step_s={1: curve[0]}, steps=20, kind="512"), curve)
    return [replace(kind, arrival_s=place / rate) for place in range(most)]


def random4_in_batches(most: int = 500) -> Trace:
    """Return RANDOM4 with batches: H20's seconds, which get longer with them as those of H200.

    Pictures of 768 x 768 pixels, which are not published, are between 512 and 1024 by tokens; the
    largest never share a batch.
    """
    small, large = qwen_h200(512)[:3], qwen_h200(1024)
    share = (2304 - 1024) / (4096 - 1024)
    middle = [
        (1 - share) * a / small[0] + share * b / large[0] for a, b in zip(small, large, strict=True)
    ]
    curves = {"512": qwen_h200(512), "768": middle, "1024": large, "1536": [1.0]}
    mix = random4()
    kinds = [in_batches(kind, curves[kind.kind]) for kind in mix.kinds]
    return replace(mix, kinds=kinds, most=most)


_GF_DIT = {  # seconds, requests a minute, shares of S, M, L: traces of GF-DiT
    "tridentserve": [
        (600, 0.8, (0.5, 0.35, 0.15)),
        (900, 1.4, (0.35, 0.40, 0.25)),
        (900, 2.4, (0.5, 0.3, 0.2)),
        (600, 1.2, (0.2, 0.35, 0.45)),
        (600, 0.6, (0.55, 0.35, 0.10)),
    ],
    "foreground_burst": [
        (180, 0.5, (0.0, 0.4, 0.6)),
        (180, 3.0, (0.85, 0.1, 0.05)),
        (540, 0.8, (0.3, 0.3, 0.4)),
        (180, 3.0, (0.85, 0.1, 0.05)),
        (720, 0.5, (0.4, 0.3, 0.3)),
    ],
    "inflight_burst": [
        (300, 0.6, (0.0, 0.0, 1.0)),
        (300, 0.0, (0.0, 0.0, 1.0)),
        (180, 4.0, (1.0, 0.0, 0.0)),
    ],
}


def gf_dit(
    trace: str, kinds: Mapping[str, tuple[Mapping[int, float], float, float]], extra_s: float
) -> Trace:
    """Return a trace of GF-DiT for classes of 50 steps.

    Args:
        trace: Its name.
        kinds: Seconds of a step, seconds of text and pixels, and how many times as long as on one
            rank a request may take.
        extra_s: Seconds more that each may take.
    """
    requests = [
        Request(
            step_s=step_s, steps=50, once_s=once_s, kind=kind,
            deadline_s=factor * (50 * step_s[1] + once_s) + extra_s,
        )
        for kind, (step_s, once_s, factor) in kinds.items()
    ]  # fmt: skip
    phases = [(float(seconds), rate / 60, shares) for seconds, rate, shares in _GF_DIT[trace]]
    return Trace(kinds=requests, phases=phases)


def gf_dit_qwen(trace: str) -> Trace:
    """Pictures of three sizes at the costs of Qwen-Image on H20."""
    sizes = {"S": (1024, 1.5), "M": (4096, 2.0), "L": (9216, 6.0)}
    kinds = {kind: (qwen_h20(n), 0.0, slo) for kind, (n, slo) in sizes.items()}
    return gf_dit(trace, kinds, 1.0)


def gf_dit_wan(trace: str) -> Trace:
    """Clips of 480p and 49 frames, 480p and 81, 720p and 81, at synthetic costs of Wan."""
    sizes = {
        "S": (20_280, 832 * 480 * 49, 2.0),
        "M": (32_760, 832 * 480 * 81, 2.5),
        "L": (75_600, 1280 * 720 * 81, 3.5),
    }
    kinds = {
        kind: (synthetic_wan(tokens), 9e-11 * voxels + 0.155, slo)
        for kind, (tokens, voxels, slo) in sizes.items()
    }
    return gf_dit(trace, kinds, 5.0)


def tetriserve(skew: float) -> Trace:
    """Pictures of four sizes with tight deadlines, after TetriServe: FLUX.1 on H100, as predicted.

    The sizes and the bias towards large ones are the paper's; 28 steps, the deadlines and the costs
    are ours. A share is in proportion to exp(skew x tokens over the most tokens).
    """
    profile = HardwareProfile.load("h100-datasheet")
    cost = replace(model_shape("flux.1").cost, gamma=profile.gamma)
    costs, due = predicted(profile, cost), {256: 1.5, 512: 2.0, 1024: 3.0, 2048: 5.0}
    kinds = [
        Request(step_s=costs(side**2 // 256 + 512), steps=28, deadline_s=due[side], kind=str(side))
        for side in due
    ]
    return evenly(kinds, [float(np.exp(skew * (side / 2048) ** 2)) for side in due], 300)


# Seconds of a picture on an H100, by side; then replicas, requests a second, and P99 in seconds of
# a plain Kubernetes service and of routing by declared cost. Source: llm-d-router 2053, its report.
_LLM_D_S = {512: 1.72055, 768: 2.05858, 1024: 4.14906, 1536: 13.83085}
LLM_D = (
    (3, 0.2545, 19.08, 14.69), (3, 0.4454, 26.82, 16.99), (3, 0.6363, 21.1, 21.31),
    (2, 0.1697, 27.6, 15.4), (2, 0.2969, 36.0, 23.5), (2, 0.4242, 41.4, 29.1),
)  # fmt: skip


def llm_d(rate: float) -> list[Request]:
    """Return the 80 requests that llm-d sent: RANDOM4 by its client's seeds, 42 and 1."""
    steps = {512: 20, 768: 20, 1024: 25, 1536: 35}
    sides = random.Random(42).choices(list(steps), weights=(0.15, 0.25, 0.45, 0.15), k=80)
    apart, now, requests = random.Random(1), 0.0, list[Request]()
    for side in sides:
        step_s = {1: _LLM_D_S[side] / steps[side]}
        requests.append(Request(step_s=step_s, steps=steps[side], arrival_s=now, kind=str(side)))
        now += apart.expovariate(rate)
    return requests


NAMED: Mapping[str, Callable[[], Trace]] = {
    "random4": random4,
    "gf-dit-qwen": lambda: gf_dit_qwen("tridentserve"),
    "gf-dit-wan": lambda: gf_dit_wan("tridentserve"),
    "gf-dit-wan-foreground": lambda: gf_dit_wan("foreground_burst"),
    "gf-dit-wan-inflight": lambda: gf_dit_wan("inflight_burst"),
    "tetriserve-uniform": lambda: tetriserve(0.0),
    "tetriserve-skewed": lambda: tetriserve(1.0),
}
