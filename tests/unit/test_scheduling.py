"""The table of requests on ranks that are played, and do what they are told."""

import dataclasses
import queue
import time
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.plan.requests import Balanced, Block, policy_of
from bascule.serve.engine import Engine
from bascule.serve.options import ServeOptions
from bascule.serve.orders import Event, Orders
from bascule.serve.post import Ticket
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.times import RequestSize
from bascule.sim.requests import serve
from tests.helpers.serving import Restless, Scripted, Untaught, task_of


class Obedient(Orders):
    """Ranks that halt, move and pause requests as ordered; some states cannot travel."""

    def __init__(self, num_ranks: int, stuck: Sequence[str] = ()) -> None:
        self.num_ranks, self.events, self._stuck = num_ranks, queue.SimpleQueue[Event](), stuck
        self.at, self.steps, self.said = dict[str, Block](), dict[str, int](), list[str]()
        self._halting, self._resting, self._cancelled = set[str](), set[str](), set[str]()

    def drop(self, ticket: Ticket) -> None:
        """Hold no states."""

    def keep(self, request_id: str, arguments: Any, seed: int) -> Ticket:
        del arguments, seed
        return Ticket(0, request_id, 0)

    def run(self, request_id: str, block: Block, ticket: Ticket) -> None:
        del ticket
        self._take(request_id, block)
        self._report("moved" if request_id in self.steps else "step", request_id)
        self.steps.setdefault(request_id, 0)

    def order(self, at: Block, request_id: str, action: str, block: Block | None = None) -> None:
        if self.at.get(request_id) != at:  # it has ended
            return
        self.said.append(f"{action} {request_id}")
        if action == "halt":
            self._halting.add(request_id)
            return
        if action == "cancel" and request_id not in self._resting:
            self._cancelled.add(request_id)
            return
        self._resting.discard(request_id)
        if action == "cancel":
            self._leave(request_id, "cancelled")
        elif action in ("pause", "move") and request_id in self._stuck:
            self._report("refused", request_id)
        elif action == "move":
            assert block is not None
            del self.at[request_id]
            self._take(request_id, block)
            self._report("moved", request_id)
        elif action == "pause":
            self._leave(request_id, "paused", ticket=Ticket(0, request_id, 0))

    def step(self) -> None:
        """Let requests that do not rest take a step; at the fourth they have ended."""
        for name in [name for name in self.at if name not in self._resting]:
            self.steps[name] += 1
            self._report("step", name)
            if self.steps[name] == 4:
                self._leave(name, "done")
            elif name in self._cancelled:
                self._leave(name, "cancelled")
            elif name in self._halting:
                self._resting.add(name)
                self._report("halted", name)
        self._halting.clear()

    def _leave(self, name: str, kind: str, **facts: Any) -> None:
        self._report(kind, name, **facts)
        del self.at[name]

    def _take(self, name: str, block: Block) -> None:
        taken = {rank for other in self.at.values() for rank in other.ranks}
        assert taken.isdisjoint(block.ranks)
        self.at[name] = block

    def _report(self, kind: str, name: str, **facts: Any) -> None:
        facts |= {"step": self.steps.get(name, 0), "num_steps": 4}
        self.events.put(Event(kind, name, time.monotonic(), self.at[name], **facts))


def take(scheduler: Scheduler, orders: Orders, num: int) -> None:
    """Take up to so many events before the policy is asked."""
    for _ in range(min(num, orders.events.qsize())):
        event = orders.events.get()
        if event.request_id in scheduler.tasks:
            scheduler.handle(event)
        if event.kind == "done" and event.request_id in scheduler.tasks:
            scheduler.remove(scheduler.tasks[event.request_id])
    scheduler.decide()


def tasks_of(scheduler: Scheduler, num: int) -> list[Task]:
    tasks = [task_of(f"r{k}", k, {"num_inference_steps": 4}) for k in range(num)]
    for task in tasks:
        scheduler.add(task)
    return tasks


def test_requests_that_swap_their_ranks_do_not_wait_for_each_other() -> None:
    """The news of both arrive before the policy is asked, as on a busy machine."""
    policy, orders = Scripted(), Obedient(3)
    scheduler = Scheduler(orders, policy, Untaught())
    tasks = tasks_of(scheduler, 3)
    policy.wanted = {f"r{k}": Block(k, 1) for k in range(3)}
    scheduler.decide()
    take(scheduler, orders, 9)
    for task in tasks:
        scheduler.halt(task)
    orders.step()
    policy.wanted = {f"r{k}": Block((k + 1) % 3, 1) for k in range(3)}
    while orders.events.qsize():
        take(scheduler, orders, 9)
    assert [str(said) for said in orders.said if "pause" in said] == ["pause r0"]
    assert orders.at == policy.wanted
    assert {task.phase for task in tasks} == {"running"}


@pytest.mark.parametrize("stuck", [(), ("r1", "r4")])
def test_requests_end_wherever_a_policy_puts_them(stuck: Sequence[str]) -> None:
    """In each turn requests that run take a step, and any number of events arrive."""
    for seed in range(200):
        orders, random = Obedient(4, stuck), Random(seed)
        scheduler = Scheduler(orders, Restless(seed), Untaught())
        tasks_of(scheduler, 6)
        for _ in range(200):
            orders.step()
            if scheduler.tasks and random.random() < 0.02:
                scheduler.cancel(random.choice(list(scheduler.tasks.values())))
            take(scheduler, orders, random.randint(0, 8))
        take(scheduler, orders, orders.events.qsize())
        assert not scheduler.tasks, seed
        assert not scheduler._users and scheduler.state.num_free == 4


class Noted(Untaught):
    """Seconds of steps that are only noted."""

    def __init__(self) -> None:
        self.seconds = list[tuple[int, float]]()

    def measure(self, size: RequestSize, degree: int, seconds: float, batch: int = 1) -> None:
        self.seconds.append((degree, seconds))


def test_a_start_takes_from_the_order_to_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk, messages between ranks and the pipeline's call count, beside encoding."""
    policy, orders, noted = Scripted(), Obedient(2), Noted()
    scheduler = Scheduler(orders, policy, noted)
    (task,) = tasks_of(scheduler, 1)
    policy.wanted = {task.id: Block(0, 2)}
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    scheduler.decide()
    for kind, at, step, seconds in [
        ("step", 100.5, 0, 0.25),
        ("step", 102.5, 1, 1.75),
        ("halted", 102.5, 1, 0.0),
        ("moved", 103.0, 1, 0.0),
        ("done", 104.0, 4, 0.5),
    ]:
        facts: dict[str, Any] = {"step": step, "num_steps": 4, "seconds": seconds}
        scheduler.handle(Event(kind, task.id, at, Block(0, 2), **facts))
    assert noted.seconds == [(2, 1.75), (0, 0.5 + 0.5)]
    assert task.encoding_s == 0.25


def test_the_backlog_of_ranks_that_are_free_and_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 4 s on one rank and 2 s on two."""
    policy, orders = Scripted(), Obedient(4)
    scheduler = Scheduler(orders, policy, Untaught())
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert scheduler.backlog_s() == (0, 0)
    (task,) = tasks_of(scheduler, 1)
    policy.wanted = {task.id: Block(0, 2)}
    scheduler.decide()
    orders.step()
    take(scheduler, orders, orders.events.qsize())
    assert scheduler.backlog_s() == (3 * 2 * 2 / 4, 3 * 2)
    for number in (7, 8, 9):  # each on one rank: two on the free ones, the third after the task
        scheduler.add(task_of(f"r{number}", number, {"num_inference_steps": 4}))
    assert scheduler.backlog_s() == ((6 + (6 + 16) + 16 + 16) / 4, 22)
    assert scheduler.backlog_s()[1] == max(
        scheduler.ends_s(list(scheduler.tasks.values())).values()
    )


def test_a_step_takes_from_agreement_to_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report and the agreement before it count; a halt for orders does not."""
    clock, reports = [0.0], list[tuple[str, float]]()
    orders = iter([{}, {"action": "halt"}, {"action": "go on"}])  # none after the first step

    def passing(seconds: float, result: Any = None) -> Any:
        clock[0] += seconds
        return result

    def take(wait_s: float | None = None) -> Any:
        order = next(orders, {})
        if not order:
            raise queue.Empty
        return passing(50.0 if wait_s is None else 0.0, {"kind": "order", "id": "r"} | order)

    engine: Any = object.__new__(Engine)
    run: Any = SimpleNamespace(
        id="r", since=0.0, num_done=1, block=Block(0, 1), is_begun=False, latents=[]
    )
    said: Any = SimpleNamespace(
        send=lambda *_, what, seconds, **__: reports.append((what, seconds)) or passing(0.25)
    )
    engine._mail, engine._pipeline, engine._shares_tiles = said, SimpleNamespace(), True
    engine._save_every = 0
    for name, result in {"_leads": True, "_synchronize": None, "_release": None}.items():
        monkeypatch.setattr(Engine, name, lambda *_, result=result: result)
    monkeypatch.setattr(Engine, "_meet", lambda _, __, decision: passing(1.0, decision))
    monkeypatch.setattr(engine, "_take", take)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for _ in range(3):
        passing(4.0)
        engine._boundary(run, {})
    assert reports == [("step", 4.0), ("step", 5.25), ("halted", 0.25), ("step", 5.0)]


@pytest.mark.parametrize(
    ("name", "ranks"), [("fifo", 1), ("sjf", 1), ("srtf", 1), ("greedy", 2), ("sjf:2", 2)]
)
def test_the_server_starts_requests_as_its_policy_does_on_paper(name: str, ranks: int) -> None:
    orders, steps, started = Obedient(ranks), (4, 9, 2, 7, 5, 1), list[str]()
    policy = ServeOptions(policy=name).make_policy([1, 2])
    scheduler = Scheduler(orders, policy, Untaught())
    tasks = [task_of(f"r{k}", k, {"num_inference_steps": num}) for k, num in enumerate(steps)]
    requests = [task.request for task in tasks]
    for task in tasks:
        scheduler.add(task)
    scheduler.decide()
    while scheduler.tasks:
        started += [request_id for request_id in orders.at if request_id not in started]
        assert {block.degree for block in orders.at.values()} <= {ranks}
        orders.step()
        take(scheduler, orders, orders.events.qsize())
    on_paper = serve(requests, policy_of(name, requests, ranks), ranks).end_s.argsort()
    assert started == [f"r{k}" for k in on_paper]
    assert (started == sorted(started)) == (name in ("fifo", "greedy"))


def test_the_policy_of_a_server() -> None:
    assert isinstance(ServeOptions().make_policy([1, 2]), Balanced)
    with pytest.raises(ConfigError, match="'srpt' is not known: give one of fifo, sjf, srtf"):
        ServeOptions(policy="srpt").check()
    with pytest.raises(ConfigError, match="the degree of all requests can be 2, 4"):
        ServeOptions(policy="sjf:1", degrees=(2, 4)).check()
    ServeOptions(policy="sjf", degrees=(2, 4)).check()  # on two ranks each
    assert isinstance(ServeOptions(policy="quick").make_policy([1, 2]), Balanced)


def test_a_slow_rank_of_a_server_is_named_by_steps_against_their_prediction() -> None:
    """Requests of unlike predictions are on any ranks; rank 2 takes 1.6 times as long."""
    scheduler, random = Scheduler(Obedient(4), Scripted(), Untaught()), Random(0)
    tasks = tasks_of(scheduler, 2)
    tasks[1].request = dataclasses.replace(tasks[1].request, step_s={1: 40.0, 2: 30.0})
    blocks = [Block(0, 2), Block(2, 2), *(Block(rank, 1) for rank in range(4))]
    for step in range(1, 600):
        task, block = random.choice(tasks), random.choice(blocks)
        ratio = random.uniform(0.95, 1.05) * (1.6 if 2 in block.ranks else 1.0)
        seconds = task.request.step_s[block.degree] * ratio
        task.last, task.phase = None, "running"
        scheduler._compare(task, Event("step", task.id, 0.0, block, step=step, seconds=seconds))
        assert scheduler.step_ratios[block.first] == pytest.approx(ratio)
    slow = scheduler.pace.culprit
    assert (slow.place, slow.cause) == (2, "slow rank") and 1.5 < slow.ratio < 1.7
    assert 0.3 < slow.share < 0.45
