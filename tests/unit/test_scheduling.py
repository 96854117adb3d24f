"""The table of requests on ranks that are played, and do what they are told."""

import dataclasses
import queue
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.generate.options import Lora
from bascule.plan.requests import Balanced, Block, board, policy_of
from bascule.serve import engine as engine_module
from bascule.serve import scheduling
from bascule.serve.engine import Engine
from bascule.serve.options import ServeOptions
from bascule.serve.orders import Event, Orders
from bascule.serve.post import Ticket
from bascule.serve.scheduling import Scheduler, Task
from bascule.serve.times import RequestSize
from bascule.sim.requests import serve
from tests.helpers.serving import Restless, Scripted, Untaught, boarding_at_random, task_of


class Obedient(Orders):
    """Ranks that do with batches what is ordered; some states cannot travel."""

    def __init__(self, num_ranks: int, stuck: Sequence[str] = ()) -> None:
        self.num_ranks, self.events, self._stuck = num_ranks, queue.SimpleQueue[Event](), stuck
        self.steps, self.said, self.most = dict[str, int](), list[str](), 0
        self._blocks, self._members = dict[str, Block](), dict[str, list[str]]()
        self._inbox, self._resting = dict[str, list[tuple[str, dict[str, Any]]]](), set[str]()
        self.held = set[str]()  # requests whose states are kept
        self.has_stopped, self.boarded = False, list[str]()
        self.loras = dict[str, Any]()

    def stop(self) -> None:
        assert not self.at
        self.has_stopped = True

    @property
    def at(self) -> dict[str, Block]:
        """Ranks of each request."""
        return {name: self._blocks[b] for b, members in self._members.items() for name in members}

    def drop(self, ticket: Ticket) -> None:
        self.held.remove(ticket.key)

    def keep(self, request_id: str, arguments: Any, seed: int, lora: Any = ()) -> Ticket:
        del arguments, seed
        assert request_id not in self.held and self.loras.setdefault(request_id, lora) == lora
        self.held.add(request_id)
        return Ticket(0, request_id, 0)

    def run(self, batch: str, block: Block, members: Sequence[tuple[str, Ticket]]) -> None:
        assert batch not in self._inbox
        self._inbox[batch], are_new = [], all(name not in self.steps for name, _ in members)
        self._take(batch, block, [name for name, _ in members])
        self._report("step" if are_new else "moved", batch)

    def order(self, at: Block, batch: str, action: str, **what: Any) -> None:
        if self._blocks.get(batch) == at:  # else it has ended
            self.said.append(f"{action} {batch.partition(' ')[0]}")
            self._inbox[batch].append((action, what))
            if batch in self._resting:
                self._follow(batch)

    def step(self) -> None:
        """Let requests that do not rest take a step; at the fourth they have ended."""
        for batch in [batch for batch in self._blocks if batch not in self._resting]:
            for name in self._members[batch]:
                self.steps[name] += 1
            self.most = max(self.most, len(self._members[batch]))
            self._report("step", batch)
            for name in [name for name in self._members[batch] if self.steps[name] == 4]:
                self._leave(batch, name, "done")
            self._follow(batch)

    def _follow(self, batch: str) -> None:
        """Do what is ordered until the batch goes on or has ended."""
        while batch in self._blocks and (inbox := self._inbox[batch]):
            action, what = inbox.pop(0)
            members, name = self._members[batch], what.get("id", "")
            is_stuck = not {*members}.isdisjoint(self._stuck)
            if action == "halt":
                self._resting.add(batch)
                self._report("halted", batch)
            elif action == "board":
                self.boarded.append(name)
                self._take(batch, self._blocks.pop(batch), [*self._members.pop(batch), name])
                self._report("boarded", batch, [name])
            elif action == "cancel":
                if name in members:
                    self._leave(batch, name, "cancelled")
            else:
                self._resting.discard(batch)
                if action == "move" and not is_stuck:
                    del self._blocks[batch]
                    self._take(batch, what["block"], self._members.pop(batch))
                    self._report("moved", batch)
                elif action == "pause" and not is_stuck:
                    tickets = {name: self.keep(name, {}, 0, self.loras[name]) for name in members}
                    self._report("paused", batch, tickets=tickets)
                    del self._blocks[batch], self._members[batch]
                elif action != "go on":
                    self._report("refused", batch)

    def _leave(self, batch: str, name: str, kind: str) -> None:
        self._report(kind, batch, [name])
        self._members[batch].remove(name)
        if not self._members[batch]:
            del self._blocks[batch], self._members[batch]
            self._resting.discard(batch)

    def _take(self, batch: str, block: Block, members: list[str]) -> None:
        assert all({*other.ranks}.isdisjoint(block.ranks) for other in self._blocks.values())
        assert self.at.keys().isdisjoint(members)
        self._blocks[batch], self._members[batch] = block, members
        self.held -= {*members}
        for name in members:
            self.steps.setdefault(name, 0)

    def _report(self, kind: str, batch: str, names: Sequence[str] = (), **facts: Any) -> None:
        members = {name: (self.steps[name], 4) for name in names or self._members[batch]}
        first, (step, num_steps) = next(iter(members.items()))
        facts |= {"step": step, "num_steps": num_steps, "members": members}
        self.events.put(Event(kind, first, time.monotonic(), self._blocks[batch], **facts))


def take(scheduler: Scheduler, orders: Orders, num: int) -> None:
    """Take up to so many events before the policy is asked."""
    for _ in range(min(num, orders.events.qsize())):
        event = orders.events.get()
        if event.request_id in scheduler.tasks:
            scheduler.handle(event)
        if event.kind == "done" and event.request_id in scheduler.tasks:
            scheduler.remove(scheduler.tasks[event.request_id])
    scheduler.decide()


def tasks_of(scheduler: Scheduler, num: int, random: Random | None = None) -> list[Task]:
    choices = [[(), [Lora("a")]][random is not None and random.random() < 0.5] for _ in range(num)]
    four = {"num_inference_steps": 4}
    tasks = [task_of(f"r{k}", k, four, lora=choices[k]) for k in range(num)]
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


def count(starts: Counter[str], name: str, change: int) -> None:
    starts[name] += change


@pytest.mark.parametrize("most_batch", [1, 3])
@pytest.mark.parametrize("stuck", [(), ("r1", "r4")])
def test_requests_end_wherever_a_policy_puts_them(
    stuck: Sequence[str], most_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each turn requests that run take a step, and any number of events arrive.

    A start counts while ranks have the request, or are to have it.
    """
    most, num_boarded = 0, 0
    for seed in range(200):
        starts = Counter[str]()
        orders, random = Obedient(4, stuck), Random(seed)
        scheduler = Scheduler(orders, Restless(seed), Untaught(), most_batch=most_batch)
        rule = boarding_at_random(seed) if seed % 2 else board
        monkeypatch.setattr(scheduling, "board", rule)
        tasks_of(scheduler, 6, random)
        for turn in range(200):
            orders.step()
            if turn % 2 and turn < 12:
                scheduler.add(task_of(f"s{turn}", 10 + turn, {"num_inference_steps": 4}))
            if scheduler.tasks and random.random() < 0.02:
                scheduler.cancel(random.choice(list(scheduler.tasks.values())))
            for members in orders._members.values() if rule is board else ():
                assert len({tuple(orders.loras[name]) for name in members}) == 1
            if turn == 12 and seed % 8 == 0:
                scheduler.close()
            for task in scheduler.tasks.values():
                task.count_start = partial(count, starts, task.id)
            take(scheduler, orders, random.randint(0, 8))
            for task in scheduler.tasks.values():
                assert task.phase == "made" or starts[task.id] == (task.batch is not None), seed
        take(scheduler, orders, orders.events.qsize())
        most, num_boarded = max(most, orders.most), num_boarded + len(orders.boarded)
        assert not scheduler.tasks or scheduler.is_closed, seed
        assert {(task.phase, task.at) for task in scheduler.tasks.values()} <= {("new", None)}
        assert not (scheduler._users or orders.at or orders.held), seed
        assert scheduler.is_closed or scheduler.state.num_free == 4
        assert orders.has_stopped == scheduler.is_closed
    assert most == most_batch and (num_boarded > 100) == (most_batch > 1)


class Noted(Untaught):
    """Seconds of steps that are only noted."""

    def __init__(self) -> None:
        self.seconds, self.graphs = list[tuple[int, float]](), list[Any]()

    def measure(self, size: RequestSize, degree: int, seconds: float, *graph: Any) -> None:
        self.seconds.append((degree, seconds))
        self.graphs.append(graph)


def test_a_start_takes_from_the_order_to_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk, messages between ranks and the pipeline's call count, beside encoding."""
    policy, orders, noted, style = Scripted(), Obedient(2), Noted(), (Lora("a"),)
    scheduler = Scheduler(orders, policy, noted)
    task = task_of("r0", 0, {"num_inference_steps": 4}, lora=style)
    scheduler.add(task)
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
    assert noted.graphs[0] == (1, (0, style))  # each block compiles, for each choice
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


def test_a_batch_is_on_its_ranks_once_and_each_of_its_requests_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps take 4 s alone and 4.4 s for two; the lead has four steps and its rider eight."""
    policy = Scripted()
    scheduler = Scheduler(Obedient(1), policy, Untaught(), most_batch=2)
    lead, rider = (task_of(name, k, {"num_inference_steps": n}) for k, name, n in RIDING)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(scheduling, "board", lambda _, act, *__: act(rider, lead))
    policy.wanted = {"lead": Block(0, 1), "rider": "rest"}
    for task in (lead, rider):
        scheduler.add(task)
    scheduler.decide()
    assert rider.lead is lead
    for now_s in (0.0, 5.0):
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: 100.0 + now_s)
        wanted = {lead: 4 * 4.4 - now_s, rider: 4 * 4.4 + 4 * 4 - now_s}
        assert scheduler.ends_s([lead, rider]) == pytest.approx(wanted)
        assert scheduler.backlog_s() == pytest.approx((wanted[rider],) * 2)
        new = task_of("new", 9, {"num_inference_steps": 4})  # which takes the place of the lead
        wanted[rider] = wanted[new] = wanted[lead] + 4 * 4.4
        assert scheduler.ends_s([lead, rider, new]) == pytest.approx(wanted)


RIDING = (0, "lead", 4), (1, "rider", 8)


def test_requests_that_wait_are_foreseen_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 4 s alone and 4.8 s for three; a fourth request takes four steps alone."""
    scheduler = Scheduler(Obedient(1), Scripted(), Untaught(), most_batch=3)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    *tasks, fourth = tasks_of(scheduler, 4)
    ends_s = dict.fromkeys(tasks, 4 * 4.8) | {fourth: 4 * 4.8 + 4 * 4}
    assert scheduler.ends_s([*tasks, fourth]) == pytest.approx(ends_s)
    assert scheduler.backlog_s() == pytest.approx((ends_s[fourth],) * 2)
    new = task_of("new", 9, {"num_inference_steps": 4})  # beside the fourth
    assert scheduler.ends_s([new]) == pytest.approx({new: 4 * 4.8 + 4 * 4.4})


def test_a_request_that_resumes_has_the_steps_left_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it takes one here: alone, or boarding a batch. The others have four steps left."""
    policy, block = Scripted(), Block(0, 1)
    scheduler = Scheduler(Obedient(1), policy, Untaught(), most_batch=2)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    lead, rider = tasks_of(scheduler, 2)
    policy.wanted = {lead.id: block, rider.id: "rest"}
    monkeypatch.setattr(scheduling, "board", lambda _, act, *__: None)
    scheduler.decide()
    scheduler.handle(Event("moved", lead.id, 100.0, block, step=3, num_steps=4))
    assert lead.left == 1 and scheduler.ends_s([lead]) == pytest.approx({lead: 4.0})
    monkeypatch.setattr(scheduling, "board", lambda _, act, *__: act(rider, lead))
    scheduler.decide()
    scheduler.handle(Event("boarded", rider.id, 100.0, block, step=2, num_steps=4))
    assert rider.left == 2
    assert scheduler.ends_s([lead, rider]) == pytest.approx({lead: 4.4, rider: 4.4 + 4.0})


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
        return passing(50.0 if wait_s is None else 0.0, {"kind": "order", "batch": "r"} | order)

    engine: Any = object.__new__(Engine)
    run: Any = SimpleNamespace(id="r", num_done=1, num_steps=4, is_last=False, error=None)
    batch: Any = engine_module._Batch("r", Block(0, 1), {"r": run})
    said: Any = SimpleNamespace(
        send=lambda *_, what, seconds, **__: reports.append((what, seconds)) or passing(0.25)
    )
    engine._mail, engine._shares_tiles, engine._save_every = said, True, 0
    engine.stays = False
    for name, result in {"_leads": True, "_synchronize": None}.items():
        monkeypatch.setattr(Engine, name, lambda *_, result=result: result)
    monkeypatch.setattr(Engine, "_meet", lambda _, __, decision: passing(1.0, decision))
    monkeypatch.setattr(engine, "_take", take)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for _ in range(3):
        passing(4.0)
        engine._boundary(batch)
    assert reports == [("step", 4.0), ("step", 5.25), ("halted", 0.25), ("step", 5.0)]


def test_the_decoding_of_a_request_is_no_step_of_the_others() -> None:
    over: Any = SimpleNamespace(id="a", error=None, seconds=3.0)
    over.fiber = SimpleNamespace(is_over=True, result=None)
    other: Any = SimpleNamespace(id="b", fiber=SimpleNamespace(is_over=False))
    batch: Any = engine_module._Batch("a", Block(0, 1), {"a": over, "b": other}, since=10.0)
    engine: Any = object.__new__(Engine)
    engine._post = SimpleNamespace(keep=lambda _: Ticket(0, "", 0))
    engine._leads, engine._meet = lambda _: True, lambda _: None
    engine._report = lambda *_, **__: None
    engine._end_members(batch)
    assert (batch.since, *batch.members) == (13.0, "b")


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
