"""Requests on ranks: blocks, policies against each other, published figures, and bounds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.requests import (
    POLICIES,
    Balanced,
    Block,
    EarliestDeadline,
    Job,
    Policy,
    Queue,
    Request,
    Starts,
    State,
    foresee,
    request_bound,
)
from bascule.plan.requests.boarding import Waiting
from bascule.sim.requests import Served, serve
from benchmarks.published import (
    LLM_D,
    MOST,
    NAMED,
    OTHERS,
    BestFit,
    Dispatch,
    Elastic,
    GenServe,
    Pause,
    TailAware,
    TetriServe,
    best_degrees,
    llm_d,
    policy_of,
    random4_in_batches,
    small_pictures,
)

Figures = tuple[float, float, float]  # P95, P99, share within three times its own seconds


def mixed(seed: int) -> list[Request]:
    """Unlike requests in bursts, with and without deadlines."""
    random, requests, now = np.random.default_rng(seed), list[Request](), 0.0
    for number in range(60):
        now += float(random.choice([0.0, 0.0, 3.0]))
        size = float(random.choice([0.1, 0.4, 1.0]))
        step = {1: size, 2: 0.6 * size, 4: 0.4 * size if size > 0.1 else size}
        due = now + 10 * size * float(random.choice([1.2, 4.0])) if number % 3 else float("inf")
        more = {"once_s": 0.5 * size, "kind": f"{size:g}"}
        requests.append(Request(step_s=step, steps=10, arrival_s=now, deadline_s=due, **more))
    return requests


def check(served: Served) -> None:
    """Each ends once, not before it could; no rank is spent twice; no policy beats the bound."""
    requests = served.requests
    assert np.isfinite(served.end_s).all()
    alone = np.array([one.alone_s for one in requests])
    assert (served.latency_s >= alone - 1e-9).all()
    assert served.rank_s <= served.num_ranks * served.end_s.max() + 1e-6
    assert served.rank_s >= sum(one.work_s for one in requests) - 1e-6
    bound = request_bound(requests, served.num_ranks)
    assert served.on_time.mean() <= bound.on_time + 1e-9
    assert served.latency_s.mean() >= bound.mean_latency_s - 1e-9


@pytest.mark.parametrize("name", [*POLICIES, *OTHERS, "least-work:2", "sjf:4"])
def test_every_request_is_served_within_the_bound(name: str) -> None:
    for seed in range(3):
        requests = mixed(seed)
        served = serve(requests, policy_of(name, requests, 8), 8, move_s=0.05)
        check(served)
        again = serve(requests, policy_of(name, requests, 8), 8, move_s=0.05)
        assert (again.end_s == served.end_s).all() and again.num_moves == served.num_moves


@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_blocks_are_taken_and_joined(num_ranks: int) -> None:
    random, state = np.random.default_rng(0), State.of(num_ranks)
    everything, taken = sorted(state.free), dict[Block, set[int]]()
    for _ in range(300):
        block = state.free_block(1 << int(random.integers(4)))
        if block is not None and random.random() < 0.6:
            state.take(block)
            ranks = set(block.ranks)
            assert block.first % block.degree == 0 and max(ranks) < num_ranks
            assert all(not ranks & others for others in taken.values())
            taken[block] = ranks
        elif taken:
            one = list(taken)[int(random.integers(len(taken)))]
            del taken[one]
            state.release(one)
        free = sum(one.degree for one in state.free)
        assert free + sum(map(len, taken.values())) == num_ranks
    for one in list(taken):
        state.release(one)
    assert sorted(state.free) == everything


def plain(*works: float, arrivals: Sequence[float] = (), **more: Any) -> list[Request]:
    begins = arrivals or [0.0] * len(works)
    return [
        Request(step_s={1: work / 4}, steps=4, arrival_s=begin, kind=f"{work:g}", **more)
        for work, begin in zip(works, begins, strict=True)
    ]


def test_orders_by_hand() -> None:
    long_first = plain(8.0, 2.0, 4.0)
    assert serve(long_first, Queue("fifo"), 1).end_s.tolist() == [8, 10, 14]
    assert serve(long_first, Queue("sjf"), 1).end_s.tolist() == [14, 2, 6]
    # The shortest rest first: the long one is recalled at its first boundary, 2 s.
    late = plain(8.0, 2.0, arrivals=(0.0, 0.5))
    assert serve(late, Queue("srtf"), 1).end_s.tolist() == [10, 4]
    moved = serve(late, Queue("srtf"), 1, move_s=1.0)
    assert moved.end_s.tolist() == [10, 4] and moved.num_moves == 0  # on the same rank again
    # The smaller one as it was: the rest of the long one, 3 s, waits for 4 s.
    later = plain(8.0, 4.0, arrivals=(0.0, 5.0))
    assert serve(later, Queue("srtf"), 1).end_s.tolist() == [8, 12]
    assert serve(later, Pause(), 1).end_s.tolist() == [12, 10]
    two = serve(plain(4.0, 4.0, 4.0), Dispatch("round robin"), 2).end_s.tolist()
    assert sorted(two) == [4, 4, 8]


def wide(steps: int, arrival_s: float = 0.0, deadline_s: float = float("inf")) -> Request:
    step = {1: 1.0, 2: 0.5}
    return Request(step_s=step, steps=steps, arrival_s=arrival_s, deadline_s=deadline_s)


def test_degrees_by_hand() -> None:
    # Of two at once, each has one rank; the last one alone has two.
    assert serve([wide(4), wide(4)], Elastic("load"), 2).end_s.tolist() == [4, 4]
    assert serve([wide(4), wide(4, arrival_s=3.0)], Elastic("load"), 2).end_s.tolist() == [2, 5]
    # Two steps on two ranks, then the large one has one: 8 s more.
    served = serve([wide(10), wide(2, arrival_s=0.75)], Elastic("demote"), 2)
    assert served.end_s.tolist() == [9, 3] and served.num_moves == 1
    # Ranks for the first alone, or for both others: the deadlines of two are worth more. The first
    # takes a step on the rank that is free at 4 s, then both.
    due = [wide(4, deadline_s=2.0), wide(4, deadline_s=4.0), wide(4, deadline_s=4.0)]
    assert serve(due, TetriServe(), 2).end_s.tolist() == [6.5, 4, 4]
    assert serve(due, BestFit(), 2).on_time.tolist() == [1, 1, 0]


def test_many_requests_are_looked_at_from_time_to_time() -> None:
    """Hundreds, of degrees 2 and 4 alone: each ends once, about as soon as in turns."""
    sizes = np.random.default_rng(0).choice((0.1, 1.0), size=600, p=(0.8, 0.2)).tolist()
    requests = [
        replace(wide(10, i / 50), step_s={2: size, 4: 0.6 * size}, once_s=size, kind=f"{size}")
        for i, size in enumerate(sizes)
    ]
    served = serve(requests, Balanced(), 16, move_s=0.05)
    check(served)
    first = serve(requests, Queue("fifo", 2), 16, move_s=0.05)
    for share in (50, 95, 100):
        most = 1.05 * np.percentile(first.latency_s, share)
        assert np.percentile(served.latency_s, share) <= most


def test_a_recall_is_heard_once() -> None:
    """Those that come while a boundary is near do not put it off."""

    class Restless(Pause):
        def decide(self, state: State, act: Starts) -> None:
            for job in [*state.running.values()][: len(state.waiting)]:
                act.recall(job)
            super().decide(state, act)

    arrivals = (0.0, 0.1, 0.2, 0.9)
    requests = plain(8.0, 4.0, 4.0, 4.0, arrivals=arrivals)
    assert serve(requests, Restless(), 1).end_s.tolist() == [20, 6, 10, 14]


def test_the_bound_by_hand() -> None:
    due = plain(2.0, 2.0, 2.0, deadline_s=4.0)
    assert request_bound(due, 1).on_time == pytest.approx(2 / 3)
    assert request_bound(due, 2).on_time == 1.0
    assert request_bound(plain(2.0, 2.0, deadline_s=1.0), 4).on_time == 0.0  # nobody is so fast
    assert request_bound(plain(6.0, 2.0, 4.0), 1).mean_latency_s == pytest.approx((2 + 6 + 12) / 3)


def of_four_sizes(rate: float, seed: int, degrees: Sequence[int], num: int = 500) -> list[Request]:
    """Four sizes in random order, one each 1 / rate seconds."""
    mix = NAMED["random4"]()
    kinds = [replace(one, step_s={d: one.step_s[d] for d in degrees}) for one in mix.kinds]
    return replace(mix, kinds=kinds, most=num).draw(rate, seed)


def figures(policy: Callable[[], Policy], rate: float, degrees: Sequence[int] = (1,)) -> Figures:
    """Means over seeds."""
    rows: list[Figures] = []
    for seed in range(4):
        requests = of_four_sizes(rate, seed, degrees)
        served = serve(requests, policy(), 8, move_s=0.05)
        own = np.array([one.seconds(1) for one in requests])
        late = served.latency_s
        rows.append((*np.percentile(late, [95, 99]), float((late <= 3 * own).mean())))
    p95, p99, share = np.mean(rows, axis=0).tolist()
    return p95, p99, share


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.5, 0.8])
def test_tails_are_no_longer_than_with_least_work(rate: float) -> None:
    """Least in flight has about the P95 that vLLM-Omni 3916 publishes of other hardware."""
    least_work = figures(partial(Dispatch, "least work"), rate)
    p95, p99, share = figures(Balanced, rate, (1, 2, 4))
    assert p95 < least_work[0] and p99 < least_work[1]
    assert share >= least_work[2] - 0.01
    if rate == 0.4:
        in_flight = figures(partial(Dispatch, "least in flight"), rate)
        assert in_flight[0] == pytest.approx(55.1, rel=0.1)
    if rate <= 0.4:
        assert share >= figures(partial(Queue, "sjf"), rate)[2] - 0.03


@pytest.mark.parametrize(
    ("name", "load", "slo", "least"),
    [
        ("gf-dit-qwen", 0.8, 1.0, 0.99),
        ("gf-dit-wan", 0.8, 1.0, 0.92),  # their best have 92 % of the small and none of the large
        pytest.param("gf-dit-qwen", 1.2, 1.0, 0.8, marks=pytest.mark.stress),  # bound: 0.91
        ("gf-dit-wan-foreground", 0.8, 1.0, 1.0),
        ("gf-dit-wan-inflight", 0.8, 1.0, 1.0),
        ("tetriserve-uniform", 0.3, 1.2, 0.91),
        ("tetriserve-skewed", 0.3, 1.2, 0.91),
    ],
)
def test_deadlines_of_published_mixes(name: str, load: float, slo: float, least: float) -> None:
    mix = NAMED[name]()
    requests = mix.draw(mix.scale(load, 8), 0, slo=slo)
    served = serve(requests, Balanced(), 8, move_s=0.05)
    check(served)
    assert served.on_time.mean() >= least
    assert served.on_time.mean() >= serve(requests, BestFit(), 8).on_time.mean()
    if name in ("gf-dit-qwen", "gf-dit-wan") and load == 0.8:
        shares = served.figures()
        assert shares["on_time of S"] >= 0.92 and shares["on_time of L"] == 1.0
    assert served.on_time.mean() >= serve(requests, TetriServe(), 8, move_s=0.05).on_time.mean()


def test_best_degree_of_each_kind() -> None:
    requests = of_four_sizes(1.0, 0, (1, 2, 4), num=40)
    assert best_degrees(requests, 4) == {"512": 1, "768": 1, "1024": 4, "1536": 4}


def least_mean(requests: Sequence[Request], num_ranks: int) -> float:
    """The least mean of all orders and degrees of requests that come at once; none is recalled."""
    best = float("inf")
    for order in permutations(requests):
        for degrees in product(*(request.step_s for request in order)):
            free, total = [0.0] * num_ranks, 0.0
            for request, degree in zip(order, degrees, strict=True):
                free.sort()
                end = free[degree - 1] + request.seconds(degree)
                free[:degree] = [end] * degree
                total += end
            best = min(best, total / len(requests))
    return best


def test_quick_is_near_the_best_of_all_orders_and_degrees() -> None:
    """On one rank it is the best; on two, with degrees of any gain, 5 % above on average."""
    random, ratios = np.random.default_rng(0), list[float]()
    for _ in range(25):
        works = random.uniform(0.5, 9.0, 5)
        narrow = plain(*works.tolist())
        served = serve(narrow, Balanced(keeps_tails=False), 1)
        assert served.latency_s.mean() == pytest.approx(least_mean(narrow, 1))
        gain = float(random.uniform(1.1, 2.0))
        both = [Request(step_s={1: work / 20, 2: work / 20 / gain}, steps=20) for work in works[:4]]
        served = serve(both, Balanced(keeps_tails=False), 2)
        ratios.append(float(served.latency_s.mean()) / least_mean(both, 2))
    assert np.mean(ratios) < 1.05 and max(ratios) < 1.2


def test_a_long_request_waits_thirty_times_its_own_time_for_shorter_ones_and_no_longer() -> None:
    short = [Request(step_s={1: 0.25}, steps=4, arrival_s=0.9 * i) for i in range(400)]
    requests = sorted([*short, wide(5, 1.0)], key=lambda request: request.arrival_s)
    place = next(i for i, request in enumerate(requests) if request.steps == 5)
    starved = serve(requests, Queue("srtf"), 1)
    served = serve(requests, Balanced(keeps_tails=False), 1)
    assert starved.latency_s[place] > 300  # it ends after all others
    assert 31 * 5 < served.latency_s[place] < 33 * 5


def test_quick_takes_degrees_with_which_the_ranks_keep_up() -> None:
    """Wide degrees that cost nothing are taken under any load; others only while ranks are idle."""
    for gain, least, most in ((2.0, 3.5, 4.0), (1.3, 1.0, 1.5)):
        step_s = {1: 1.0, 2: 1 / gain, 4: 1 / gain**2}
        requests = [Request(step_s=step_s, steps=10, arrival_s=2.6 * i) for i in range(80)]
        served = serve(requests, Balanced(keeps_tails=False), 4)
        late = slice(40, None)  # once the load is known
        assert least <= (served.rank_s_of / served.run_s_of)[late].mean() <= most


def test_the_routing_of_llm_d_has_its_published_latencies() -> None:
    """Their requests, arrivals and seconds: nothing is fitted."""
    for replicas, rate, _, published_s in LLM_D:
        served = serve(llm_d(rate), Dispatch("declared cost"), replicas)
        assert np.percentile(served.latency_s, 99) == pytest.approx(published_s, rel=0.035)
        busy = Dispatch("random", seed=1)
        assert np.percentile(serve(llm_d(rate), busy, replicas).latency_s, 99) > published_s


def test_policies_of_2026_by_hand() -> None:
    # Costs (steps x side^2) count whole until a request is done: the last one waits behind 36 + 4,
    # although the replica with 64 is free sooner.
    costs = [4.0, 3.0, 1.0, 4.0]
    served = serve(plain(*costs, arrivals=(0.0, 0.1, 3.0, 3.05)), Dispatch("declared cost"), 2)
    assert served.end_s.tolist() == pytest.approx([4, 3.1, 4.1, 8.1])
    # Waiting 0.5 s and 4 s of service weigh more than 0.9 s and 1 s: 3.9 > 1.75.
    served = serve(plain(2.0, 1.0, 4.0, arrivals=(0.0, 1.1, 1.5)), TailAware(), 1)
    assert served.end_s.tolist() == [2, 7, 6]
    # A video on both ranks gives one to an image at its next step, until the image is done.
    video = replace(wide(40, deadline_s=30.0), kind="video")
    image = Request(step_s={1: 0.5}, steps=2, arrival_s=0.25, deadline_s=2.0, kind="image")
    served = serve([video, image], GenServe(), 2)
    assert served.end_s.tolist() == [20.5, 1.5]


class Recorder:
    """Takes decisions, and lets nothing run."""

    def __init__(self) -> None:
        self.started: list[Block] = []

    def start(self, job: Job, block: Block) -> None:
        self.started.append(block)

    def recall(self, job: Job) -> None:
        raise AssertionError("nothing runs")


def test_seconds_that_are_measured_later_decide() -> None:
    """A request that seemed to meet its deadline on one rank needs two."""
    state, policy, act = State.of(2), Balanced(), Recorder()
    step_s = {1: 1.0, 2: 1.0}
    state.wait(Job(0, Request(step_s=step_s, steps=10, deadline_s=12.0), 10))
    policy.decide(state, act)
    step_s |= {1: 2.0, 2: 1.1}
    policy.decide(state, act)
    assert act.started == [Block(0, 1)] * 2  # as long as nobody says so
    state.num_changes += 1
    policy.decide(state, act)
    assert act.started[2:] == [Block(0, 2)]


def test_what_is_refused() -> None:
    for step, words in (({}, "give seconds"), ({3: 1.0}, "degrees 1, 2, 4"), ({1: 0.0}, "above 0")):
        with pytest.raises(ConfigError, match=words):
            Request(step_s=step, steps=1)
    with pytest.raises(ConfigError, match="steps"):
        Request(step_s={1: 1.0}, steps=0)
    with pytest.raises(ConfigError, match="is not free"):
        State.of(4).take(Block(0, 8))


def equal(num: int, *curve: float, steps: int = 4, **more: Any) -> list[Request]:
    """Requests of one key; step seconds by batch."""
    facts = {"step_s": {1: curve[0]}, "batch_s": {1: curve}, "batch_key": "a"} | more
    return [Request(steps=steps, **facts) for _ in range(num)]


def test_batches_by_hand() -> None:
    first, second = equal(2, 1.0, 1.25)
    together = [first, second]
    assert serve(together, Queue("fifo"), 1, batch=1).end_s.tolist() == [4, 8]
    assert serve(together, Queue("fifo"), 1, batch=2).end_s.tolist() == [5, 5]
    assert serve(together, Queue("fifo"), 2, batch=2).end_s.tolist() == [4, 4]  # ranks come first
    # It boards at 1 s; three steps together, then it takes one alone.
    late = [first, replace(second, arrival_s=0.5)]
    served = serve(late, Queue("fifo"), 1, batch=2)
    assert served.end_s.tolist() == [4.75, 5.75]
    assert served.rank_s_of.tolist() == [1 + 3.75 / 2, 3.75 / 2 + 1]
    # A short one recalls both at 2.5 s, and they go on together.
    requests = [*together, *plain(0.5, arrivals=(2.0,))]
    assert serve(requests, Queue("srtf"), 1, batch=2).end_s.tolist() == [5.5, 5.5, 3.0]
    # A rider that ends first: two steps together, then two alone.
    short = [first, replace(second, steps=2)]
    assert serve(short, Queue("fifo"), 1, batch=2).end_s.tolist() == [4.5, 2.5]
    # The batch waits while one decodes, for half a second.
    late = [replace(request, once_s=0.5) for request in late]
    assert serve(late, Queue("fifo"), 1, batch=2).end_s.tolist() == [5.25, 6.75]
    # On two ranks alone at the end, where the last one decodes on one of them.
    late = [replace(one, step_s={2: 1.0}, batch_s={2: (1.0, 1.25)}) for one in late]
    served = serve(late, Queue("fifo", 2), 2, batch=2)
    assert served.end_s.tolist() == [5.25, 6.75]
    assert served.rank_s == pytest.approx(2 * (1 + 3.75 + 0.5 + 1) + 0.5)


def test_nothing_boards_for_nothing() -> None:
    """Batches that take as long as their requests, keys that differ, and lost deadlines."""
    for others in (
        equal(20, 1.0, 1.99, 2.97),
        [replace(one, batch_key=place) for place, one in enumerate(equal(20, 1.0, 1.1))],
        [replace(one, batch_key=None) for one in equal(20, 1.0, 1.1)],
        equal(20, 1.0, 1.3, deadline_s=5.0),  # the first would be late, at 5.2
    ):
        requests = [replace(one, arrival_s=2.5 * place) for place, one in enumerate(others)]
        if others[0].deadline_s < 6:
            requests = [replace(one, deadline_s=one.arrival_s + 5.0) for one in requests]
        for name in POLICIES:
            ends = [
                serve(requests, policy_of(name, requests, 2), 2, batch=most).end_s
                for most in (1, 8)
            ]
            assert (ends[0] == ends[1]).all()


def test_a_batch_does_not_keep_its_ranks_from_others_for_ever() -> None:
    """A request each second boards it; another one waits until it has had three times its time."""
    stream = [replace(one, arrival_s=float(at)) for at, one in enumerate(equal(40, 1.0, 1.1, 1.2))]
    requests = [stream[0], *plain(2.0, arrivals=(0.5,)), *stream[1:]]
    served = serve(requests, Queue("fifo"), 1, batch=3)
    assert 4 + 2 < served.end_s[1] <= 3 * 4 + 2
    assert served.end_s.max() < 0.6 * serve(requests, Queue("fifo"), 1).end_s.max()


def test_the_next_in_a_batch_leads_it() -> None:
    state = State.of(2)
    first, second, third = (Job(k, one, 4) for k, one in enumerate(equal(3, 1.0, 1.2, 1.4)))
    for job in (first, second, third):
        state.wait(job)
    state.leave(first)
    state.take(Block(0, 1))
    state.running[0], first.block = first, Block(0, 1)
    state.board(second, first)
    state.board(third, first)
    assert state.part(first) is second and state.runs(second) and second.riders == [third]
    assert first.block is first.lead is second.lead is None and third.lead is second
    state.wait(second)
    assert state.waiting == [second] and second.block is third.block is None
    assert state.part(second) is third and state.waiting == [third] and state.num_free == 2
    assert state.part(third) is None and state.waiting == [third]  # alone, it stays


def shared(seed: int, most: int) -> list[Request]:
    """Requests of three sizes, whose batches gain much, little, or lose, some with deadlines."""
    random, requests, now = np.random.default_rng(seed), list[Request](), 0.0
    for _ in range(60):
        now += float(random.choice([0.0, 0.5]))
        size, gain = ((0.2, 0.9), (1.0, 0.3), (0.5, -0.2))[int(random.integers(3))]
        step_s = {1: size, 2: 0.6 * size, 4: 0.5 * size}
        batch_s = {
            d: [s * (b - gain * (b - 1)) for b in range(1, most + 1)] for d, s in step_s.items()
        }
        steps = int(random.integers(1, 12))
        due = now + steps * size * float(random.choice([1.5, 4.0, np.inf, np.inf]))
        facts: dict[str, Any] = {"step_s": step_s, "steps": steps, "arrival_s": now}
        facts |= {"deadline_s": due, "once_s": 0.3 * size, "kind": f"{size}"}
        requests.append(Request(**facts, batch_key=size, batch_s=batch_s))
    return requests


@pytest.mark.parametrize("name", [*POLICIES, "sjf:2", "srtf:2"])
def test_every_request_of_batches_is_served_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, recalls, means = list[int](), list[int](), list[float]()
    board_of, wait_of = State.board, State.wait

    def boards(state: State, job: Job, lead: Job) -> None:
        board_of(state, job, lead)
        assert job.request.batch_key == lead.request.batch_key and state.runs(lead)
        assert lead.lead is None and not job.riders and job.left and not state.waits(job)
        batches.append(1 + len(lead.riders))

    def waits(state: State, job: Job) -> None:
        recalls.append(len(job.riders))
        wait_of(state, job)

    monkeypatch.setattr(State, "board", boards)
    monkeypatch.setattr(State, "wait", waits)
    for seed in range(6):
        requests = shared(seed, most=4)
        served = serve(requests, policy_of(name, requests, 4), 4, move_s=0.05, batch=3)
        check(served)
        again = serve(requests, policy_of(name, requests, 4), 4, move_s=0.05, batch=3)
        assert (again.end_s == served.end_s).all()
        alone = serve(requests, policy_of(name, requests, 4), 4, move_s=0.05)
        means.append(float(served.latency_s.mean() / alone.latency_s.mean()))
    assert np.mean(means) < 0.97 and max(means) < 1.1
    assert max(batches) == 3
    if name.startswith("srtf"):
        assert max(recalls) > 0


def test_no_deadline_is_lost_by_boarding() -> None:
    """On one rank, the first deadline first: who met his one after another meets it in batches."""
    random, num_met, num_lost = np.random.default_rng(0), 0, 0
    for _ in range(300):
        share = float(random.uniform(0.0, 1.0))
        requests = [
            replace(one, deadline_s=float(random.uniform(4, 16)), steps=int(random.integers(1, 6)))
            for one in equal(5, *(b - share * (b - 1) for b in range(1, 5)))
        ]
        alone, served = (serve(requests, EarliestDeadline(), 1, batch=most) for most in (1, 4))
        assert (served.on_time >= alone.on_time).all(), requests
        num_met += int(served.on_time.sum() - alone.on_time.sum())
        balanced = [serve(requests, Balanced(), 1, batch=most).on_time for most in (1, 4)]
        num_lost += int((balanced[0] > balanced[1]).sum())
    assert num_met > 200 and num_lost < 5  # it gives deadlines up for others


def best_batches(requests: Sequence[Request]) -> tuple[float, float]:
    """The least mean, and the most on time, of all orders and batches on one rank from 0 on."""
    mean, on_time = float("inf"), 0.0
    for order in permutations(requests):
        for cuts in product((False, True), repeat=len(order) - 1):
            batches = [[order[0]]]
            for cut, request in zip(cuts, order[1:], strict=True):
                batches += [[request]] if cut else []
                batches[-1] += [] if cut else [request]
            now, ends = 0.0, dict[int, float]()
            for batch in batches:
                done = 0
                for num, request in zip(
                    range(len(batch), 0, -1), sorted(batch, key=lambda one: one.steps), strict=True
                ):
                    now += (request.steps - done) * request.batch_s[1][num - 1]
                    done, ends[id(request)] = request.steps, now
            mean = min(mean, sum(ends.values()) / len(ends))
            met = [ends[id(request)] <= request.deadline_s for request in requests]
            on_time = max(on_time, sum(met) / len(met))
    return mean, on_time


def test_no_batches_beat_the_bound() -> None:
    """All orders and batches of up to four requests; the bound is reached if batches are full."""
    random = np.random.default_rng(0)
    for _ in range(40):
        curve = np.cumsum(random.uniform(0.1, 1.2, 4)).tolist()
        requests = [
            replace(one, steps=int(random.integers(1, 6)), deadline_s=float(random.uniform(1, 9)))
            for one in equal(4, *curve)
        ]
        mean, on_time = best_batches(requests)
        bound = request_bound(requests, 1)
        assert bound.mean_latency_s <= mean + 1e-9 and bound.on_time >= on_time - 1e-9
    full = equal(4, 1.0, 1.0, 1.0, 1.0)
    assert best_batches(full)[0] == 4.0
    assert request_bound(full, 1).mean_latency_s == 4.0  # alone it takes as long
    assert full[0].work_s == 1.0 and replace(full[0], batch_key=None).work_s == 4.0


def test_small_pictures_gain_by_batches_and_random4_does_not_lose() -> None:
    """At the seconds that SGLang published."""
    small = small_pictures(30.0, 500)
    for name in ("balanced", "srtf"):
        last_s = [
            serve(small, policy_of(name, small, 8), 8, move_s=0.05, batch=most).end_s.max()
            for most in (1, MOST)
        ]
        assert last_s[0] >= 2.8 * last_s[1]
    figures = list[list[float]]()
    for most in (1, MOST):
        drawn = [random4_in_batches(300).draw(0.45, seed) for seed in range(2)]
        late = [serve(one, Balanced(), 8, move_s=0.05, batch=most).latency_s for one in drawn]
        figures.append(np.mean([(x.mean(), np.percentile(x, 95)) for x in late], 0).tolist())
    assert all(b <= 1.01 * a for a, b in zip(*figures, strict=True))


class Foreseeing:
    """A policy that foresees all ends when the last request comes, in batches and without."""

    def __init__(self, name: str, requests: Sequence[Request], num_ranks: int, most: int) -> None:
        self._policy, self._last = policy_of(name, requests, num_ranks), len(requests) - 1
        self._most, self.ends, self.now_s = (most, 1), list[dict[int, float]](), 0.0
        self.waiting = list[int]()

    def decide(self, state: State, act: Starts) -> None:
        if not self.ends and state.after(self._last - 1):
            self.waiting, self.now_s = [job.number for job in state.waiting], state.now_s
            for most in self._most:
                free_s, ends = foresee(state, most)
                assert free_s == sorted(free_s) and len(free_s) == state.num_ranks
                self.ends.append({job.number: end_s for job, end_s in ends.items()})
        self._policy.decide(state, act)

    def errors(self, served: Served) -> list[list[float]]:
        """Logarithms of foreseen over simulated seconds of those that wait, by most in a batch."""
        true_s = served.end_s[self.waiting] - self.now_s
        foreseen = [np.array([ends[k] for k in self.waiting]) - self.now_s for ends in self.ends]
        return [np.log(seconds / true_s).tolist() for seconds in foreseen]


def in_a_burst(seed: int, num_keys: int, late: float) -> list[Request]:
    """Up to 30 requests of sizes that share 70 % of a step, with many deadlines or few."""
    random, requests, now = np.random.default_rng(seed), list[Request](), 0.0
    for _ in range(int(random.integers(5, 30))):
        now += float(random.exponential(0.6))
        key, steps = int(random.integers(num_keys)), int(random.integers(2, 9))
        size = 0.2 + 0.3 * key
        curve = [size * (1 + 0.3 * k) for k in range(4)]
        due = now + steps * size * float(random.choice([1.5, 3.0, 6.0]))
        facts: dict[str, Any] = {"steps": steps, "arrival_s": now, "once_s": 0.1 * size}
        facts |= {"batch_key": key, "deadline_s": due if random.random() < late else np.inf}
        requests.append(Request(step_s={1: size}, batch_s={1: curve}, **facts))
    return requests


@pytest.mark.parametrize(("name", "late"), [("fifo", 0.0), ("greedy", 1.0)])
def test_ends_are_foreseen(name: str, late: float) -> None:
    """One key and one order: exactly; two keys: 0 to 3 % off. Without batches: 17 to 44 % off."""
    for num_keys in (1, 2):
        apart = list[list[list[float]]]()
        for seed in range(25):
            requests, num_ranks = in_a_burst(seed, num_keys, late), 1 + seed % 3
            policy = Foreseeing(name, requests, num_ranks, 4)
            apart.append(policy.errors(serve(requests, policy, num_ranks, batch=4)))
        errors, without = (np.abs(np.concatenate(each)) for each in zip(*apart, strict=True))
        assert len(errors) > 20
        assert errors.max() < 1e-9 if num_keys == 1 else errors.mean() < 0.05
        assert without.mean() > 0.15


def test_ends_of_a_server_are_foreseen() -> None:
    """Within 10 % on average, as it may start others first; without batches, 1.9 times too late."""
    apart = list[list[list[float]]]()
    for seed in range(12):
        rate, num_ranks = (20.0, 30.0)[seed % 2], (1, 4, 8)[seed % 3]
        requests = [
            replace(one, steps=20 + 10 * (k % 2)) for k, one in enumerate(small_pictures(rate, 60))
        ]
        policy = Foreseeing("balanced", requests, num_ranks, MOST)
        apart.append(policy.errors(serve(requests, policy, num_ranks, move_s=0.05, batch=MOST)))
    errors, without = (np.concatenate(each) for each in zip(*apart, strict=True))
    assert abs(errors.mean()) < 0.1 and without.mean() > 0.5


class Admitting:
    """A policy before which requests are refused that would be late, as foreseen."""

    def __init__(self, most: int) -> None:
        self._policy, self._most, self._last = Balanced(), most, -1
        self.accepted, self.in_batches = list[int](), list[int]()

    def decide(self, state: State, act: Starts) -> None:
        for job in state.after(self._last):
            self._last = job.number
            if foresee(state, self._most)[1][job] > job.deadline_s:
                state.leave(job)
                continue
            self.accepted.append(job.number)
            if foresee(state)[1][job] > job.deadline_s:
                self.in_batches.append(job.number)
        self._policy.decide(state, act)


def test_who_is_accepted_for_a_batch_is_in_time() -> None:
    """More are in time than if the server foresees no batches, and no more of them are late."""
    num_met, num_lost, in_batches = [0, 0], [0, 0], list[float]()
    for seed in range(30):
        requests = in_a_burst(seed, 2, 1.0)
        for place, most in enumerate((1, 4)):
            policy = Admitting(most)
            on_time = serve(requests, policy, 1 + seed % 2, move_s=0.05, batch=4).on_time
            num_met[place] += int(on_time[policy.accepted].sum())
            num_lost[place] += int((1 - on_time[policy.accepted]).sum())
            in_batches += on_time[policy.in_batches].tolist()
    assert num_met[1] > num_met[0] + 10 and num_lost[1] < 0.03 * num_met[1]
    assert len(in_batches) > 30 and np.mean(in_batches) == 1.0


def test_a_running_batch_keeps_its_ranks_until_its_deadline() -> None:
    """Its first request is nearly done; what the others need does not make that one hopeless."""
    first, *others = equal(3, 1.0, 1.1, 1.2, steps=10)
    requests = [replace(first, deadline_s=12.5), *(replace(one, arrival_s=4.5) for one in others)]
    requests += plain(4.0, arrivals=(9.0,), deadline_s=40.0)
    assert serve(requests, Balanced(), 1, batch=3).end_s[0] == pytest.approx(5 + 5 * 1.2)


class Counted(list[Job]):
    """Jobs, and how many of them were gone through."""

    num_seen = 0

    def __iter__(self) -> Iterator[Job]:
        for job in super().__iter__():
            self.num_seen += 1
            yield job


@pytest.mark.parametrize(
    "name", ["fifo", "sjf", "srtf", "pause", "greedy", "best-fit", "balanced", "quick"]
)
def test_a_long_queue_is_not_gone_through_at_each_event(name: str) -> None:
    waiting, num_decisions = Counted(), 0
    requests = [Request(step_s={1: 1.0}, steps=1 + i % 7, arrival_s=i / 100) for i in range(2000)]
    policy = policy_of(name, requests, 4)

    class Watched:
        def decide(self, state: State, act: Starts) -> None:
            nonlocal num_decisions
            if state.waiting is not waiting:
                waiting.extend(state.waiting)
                state.waiting = waiting
            num_decisions += 1
            policy.decide(state, act)

    serve(requests, Watched(), 4)
    assert num_decisions > 3000 and waiting.num_seen < 300 * num_decisions


def test_a_long_queue_is_foreseen_without_going_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, num_tried, gains = State.of(4), 0, Waiting._gains
    one = equal(1, *(1 + 0.3 * k for k in range(8)))[0]
    for number in range(2000):
        key, steps = number % 5, 4 + number % 3
        state.wait(Job(number, replace(one, batch_key=key, steps=steps), steps))

    def counted(*args: Any) -> bool:
        nonlocal num_tried
        num_tried += 1
        return gains(*args)

    monkeypatch.setattr(Waiting, "_gains", counted)
    free_s, ends = foresee(state, 8)
    assert len(ends) == 2000 and max(ends.values()) == pytest.approx(free_s[-1])
    assert num_tried < 5 * 2000
    assert free_s[-1] < 0.5 * foresee(state)[0][-1]
