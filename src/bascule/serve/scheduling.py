"""The scheduler of requests: a policy plans their ranks, and orders bring the ranks to the plan.

Ranks compute batches. The policy only knows the lead of a batch, whose riders take steps with it.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bascule.data.slow_rank import NO_TIMES, STEP_S, Pace
from bascule.generate.options import Prompt
from bascule.plan.requests import NEVER, Block, Job, Policy, Request, State, board, foresee
from bascule.serve.orders import Event, Orders
from bascule.serve.post import Ticket
from bascule.serve.times import RequestSize, Times

_MOVE_S = 0.05  # assumed until moves are measured
_USUAL_STEPS = 30  # assumed for a pipeline without a default
_MOST_TOKENS = 4096  # of a request in a batch: larger ones fill a GPU alone, or all of its memory
Phase = Literal[
    "new", "boarding", "running", "halting", "halted", "moving", "pausing", "paused", "made"
]
_READY = "new", "halted", "paused"  # phases in which a task takes the ranks of the plan
_BOARDS = "new", "paused", "running"  # phases in which a task boards, or a batch takes others in


def num_steps_of(prompt: Prompt, takes: Mapping[str, Any]) -> int:
    """Return the steps to plan for a prompt; `takes` are the parameters of the pipeline's call."""
    default = getattr(takes.get("num_inference_steps"), "default", None)
    return prompt.steps or (default if isinstance(default, int) else _USUAL_STEPS)


@dataclass(slots=True, eq=False)
class Batch:
    """Tasks that ranks compute together, or will when they board."""

    name: str  # never used again
    lead: "Task"  # whose phase is that of the batch
    tasks: dict[str, "Task"]  # by id, also cancelled ones that its ranks still have


@dataclass(slots=True, eq=False, kw_only=True)
class Task(Job):
    """A request from its arrival until its output is written.

    `block` has its planned ranks, `at` the ranks where it runs. Its phase is new, running, halting
    (at its step's end), halted, then running, moving (to other ranks) or pausing; at last made. A
    rider is boarding, then running until its batch is paused.
    """

    id: str
    prompt: Prompt
    size: RequestSize
    arguments: Callable[[], dict[str, Any] | Tensor]  # of the pipeline; or its saved state
    # +1 before ranks get it, -1 when they have given it up.
    count_start: Callable[[int], None] = lambda _: None
    created_at: float = 0.0  # Unix seconds
    at: Block | None = None
    phase: Phase = "new"
    ticket: Ticket | None = None  # of its state, while no ranks have it
    batch: Batch | None = None  # while ranks have it, or are to take it in
    last: Event | None = None
    begun_s: float = 0.0  # monotonic time at which it got ranks
    starting_s: float = 0.0  # from then until its first step
    encoding_s: float = 0.0
    denoising_s: float = 0.0
    stays: bool = False  # its state cannot travel
    runs_alone: bool = False  # starts after all earlier requests, and before all later ones
    is_cancelled: bool = False  # it has ended, and leaves its ranks when it can

    @property
    def is_open(self) -> bool:
        """True if it waits for ranks or runs."""
        return not (self.is_cancelled or self.phase == "made")

    @classmethod
    def of(
        cls,
        number: int,
        request_id: str,
        prompt: Prompt,
        takes: Mapping[str, Any],
        times: Times,
        arguments: Callable[[], dict[str, Any] | Tensor],
        deadline_s: float = NEVER,
        *,
        num_pictures: int = 0,
    ) -> "Task":
        """Return the task of a prompt that arrives now; `takes` as in `num_steps_of`."""
        size = times.request_size(prompt, takes)
        shape = size, prompt.width, prompt.height, prompt.frames, prompt.fps, prompt.lora
        request = Request(
            step_s=times.step_s(size),
            batch_key=None if size.num_tokens > _MOST_TOKENS else (*shape, num_pictures),
            batch_s=times.batch_s(size),
            steps=num_steps_of(prompt, takes),
            arrival_s=time.monotonic(),
            deadline_s=deadline_s,
            once_s=times.once_s(size),
        )
        facts = {"id": request_id, "prompt": prompt, "size": size, "arguments": arguments}
        return cls(number, request, request.steps, **facts)


def _has_heir(lead: Task) -> bool:
    """Return whether a rider leads the others if a lead ends; riders board in their order."""
    return any(isinstance(rider, Task) and rider.phase != "boarding" for rider in lead.riders[:1])


class Scheduler:
    """Table of tasks and their planned ranks, and sender of the orders; not thread-safe.

    The plan runs ahead of the ranks: a task whose ranks are still in use starts when they are free.
    """

    def __init__(
        self, orders: Orders, policy: Policy, times: Times, *, most_batch: int = 1
    ) -> None:
        self.orders, self._policy, self._times = orders, policy, times
        self.state = State.of(orders.num_ranks, move_s=_MOVE_S)
        self.tasks: dict[str, Task] = {}  # by id, in the order of arrival, until they are removed
        self.is_closed = False  # True if no task gets ranks any more
        self._most_batch = most_batch if orders.batches else 1
        self._num_batches = count()
        self._boarded = list[Task]()  # in this decision
        self._foreseen = 0.0, dict[Job, float]()  # ends of tasks, and until when they are used
        self._planned: dict[Task, None] = {}  # tasks that are not on their planned ranks yet
        self._users: dict[int, Task] = {}  # by rank, the task that has it, or is about to
        self._moves_s = deque[float](maxlen=9)
        # Compares the ratios of all ranks; a replica is named by its first one.
        self.pace = Pace(range(0, orders.num_ranks * orders.size, orders.size), says=True)
        # Seconds of each rank's newest step over the prediction; nan before its first.
        self.step_ratios = np.full(orders.num_ranks, np.nan)
        self._times_of_ranks = np.tile(NO_TIMES, (orders.num_ranks, 1))

    def add(self, task: Task) -> None:
        """Add a task, which waits for ranks."""
        self.tasks[task.id] = task
        self.state.wait(task)

    def cancel(self, task: Task) -> None:
        """Cancel a task; it is removed at once, or when its ranks report that they left it."""
        task.is_cancelled = True
        if task.lead is not None or _has_heir(task):
            self._withdraw(task)
        elif task.phase in ("halted", "pausing"):
            self._leave(task)
        self._dismiss(task)

    def remove(self, task: Task) -> None:
        """Remove a task that no rank computes."""
        self._leave(task)
        del self.tasks[task.id]

    def close(self) -> None:
        """Let all tasks leave their ranks after their steps and wait; then end the engine."""
        if not self.is_closed:
            self.is_closed = True
            for task in list(self.tasks.values()):
                self._dismiss(task)
            if not self._users:
                self.orders.stop()

    def decide(self) -> list[Task]:
        """Ask the policy, send orders for ranks that are free, and return the tasks that got them.

        New tasks do not start while more outputs wait to be written than there are ranks, as they
        would fill the memory.
        """
        ordered = list[Task]()
        if self.is_closed:
            return ordered
        self.state.now_s = time.monotonic()
        here = self._in_turn()
        hidden = [task for task in self.state.waiting if task.number > here]
        del self.state.waiting[len(self.state.waiting) - len(hidden) :]
        self._policy.decide(self.state, self)
        num_made = sum(task.phase == "made" for task in self.tasks.values())
        is_full = num_made > max(self.orders.num_ranks, self._most_batch)
        if self._most_batch > 1 and not is_full:
            tasks = self.tasks.values()
            closed = {task for task in tasks if task.is_cancelled or task.phase not in _BOARDS}
            coming = [lead.at.degree for lead in tasks if lead.phase == "halting" and lead.at]
            self._boarded = ordered
            board(self.state, self.board, self._most_batch, closed, sum(coming))
        self.state.waiting += hidden
        for task in list(self._planned):
            if task.block is None and task.phase == "halted":
                del self._planned[task]
                self._pause(task)
            elif task.phase == "new" and is_full:
                continue
            elif task.block is not None and task.phase in _READY:
                if all(self._users.get(rank, task) is task for rank in task.block.ranks):
                    del self._planned[task]
                    ordered += self._place(task, task.block)
        if (locked := self._locked()) is not None:
            self._pause(locked)
        return ordered

    def backlog_s(self) -> tuple[float, float]:
        """Predict in how many seconds a rank, on average, has done all tasks; and the last rank."""
        now = time.monotonic()
        free_s, _ = foresee(replace(self.state, now_s=now), self._most_batch)
        return sum(free_s) / len(free_s) - now, free_s[-1] - now

    def ends_s(self, tasks: Sequence[Task]) -> dict[Task, float]:
        """Predict in how many seconds tasks are done; they may be new ones, not added yet.

        Predictions take at most a tenth of the time: while many wait, old ones are used again.
        """
        now, waiting, (until_s, ends) = time.monotonic(), list[Job](), self._foreseen
        if any(task.block is None for task in tasks):  # else soon, as if nobody boards
            waiting = [*self.state.waiting, *(task for task in tasks if task.id not in self.tasks)]
        if not waiting or now > until_s or not ends.keys() >= {*tasks}:
            _, ends = foresee(replace(self.state, now_s=now, waiting=waiting), self._most_batch)
            if waiting == self.state.waiting:
                self._foreseen = now + 10 * (time.monotonic() - now), ends
        return {task: max(0.0, ends[task] - now) for task in tasks}

    def _locked(self) -> Task | None:
        """Return one of several halted tasks that wait for each other's ranks, as in a swap."""
        blockers = {
            task: {self._users.get(rank, task) for rank in task.block.ranks} - {task}
            for task in self._planned
            if task.phase == "halted" and task.block is not None
        }
        while free := [task for task, users in blockers.items() if users.isdisjoint(blockers)]:
            for task in free:
                del blockers[task]
        return next(iter(blockers), None)

    def _in_turn(self) -> float:
        """Return the number of the last task that may start before the next that runs alone."""
        last = -1
        for task in self.tasks.values():
            if task.runs_alone and task.phase != "made":
                return task.number if last == -1 else last
            if task.phase != "made":
                last = task.number
        return NEVER

    # --- orders -----------------------------------------------------------------------------------

    def _place(self, lead: Task, block: Block) -> list[Task]:
        """Let idle ranks start or continue a batch; return its tasks."""
        tasks = [lead, *lead.riders]
        self._users |= dict.fromkeys(block.ranks, lead)
        if lead.batch is None:
            name = f"{lead.id} {next(self._num_batches)}"
            lead.batch, stored = Batch(name, lead, {}), list[tuple[str, Ticket]]()
            for task in tasks:
                assert isinstance(task, Task)
                lead.batch.tasks[task.id], task.batch, task.at = task, lead.batch, block
                if (ticket := self._stored(task)) is not None:
                    stored.append((task.id, ticket))
                task.phase, task.ticket = "running", None
            if stored:
                self.orders.run(name, block, stored)
        elif lead.at == block:
            lead.phase = "running"
            self._order(lead, "go on")
        else:
            lead.phase = "moving"
            self._order(lead, "move", block=block)
        return [task for task in tasks if isinstance(task, Task)]

    def _stored(self, task: Task) -> Ticket | None:
        """Return the ticket of a task's state; None, with an event, if it cannot be stored."""
        if task.phase == "new":
            task.begun_s = time.monotonic()
        task.count_start(1)
        try:
            choice = task.prompt.seed, task.prompt.lora
            task.ticket = task.ticket or self.orders.keep(task.id, task.arguments(), *choice)
        except Exception as error:  # also one of its picture
            self.orders.tell("failed", task.id, str(error))
        return task.ticket

    def board(self, job: Job, lead: Job) -> None:
        """Let a waiting task ride in a batch that runs, or is to start, as `board` decides."""
        assert isinstance(job, Task) and isinstance(lead, Task)
        self.state.board(job, lead)
        self._predict(lead)
        if (batch := lead.batch) is not None:
            batch.tasks[job.id], job.batch, job.at = job, batch, lead.at
            if (ticket := self._stored(job)) is not None:
                job.phase = "boarding"
                self._order(lead, "board", id=job.id, ticket=ticket)
                self._boarded.append(job)

    def halt(self, task: Task) -> None:
        """Let a running batch wait at the end of its step."""
        task.phase = "halting"
        self._order(task, "halt")

    def _pause(self, task: Task) -> None:
        """Let a halted batch leave its ranks, which store the states of its requests."""
        task.phase = "pausing"
        self._order(task, "pause")

    def _order(self, lead: Task, action: str, **what: Any) -> None:
        assert lead.at is not None and lead.batch is not None
        self.orders.order(lead.at, lead.batch.name, action, **what)

    def _dismiss(self, task: Task) -> None:
        """Let a task leave its ranks after its step; one that changes ranks leaves afterwards."""
        if task.batch is not None:
            if task.batch.lead.phase in ("running", "halting", "halted"):
                self._order(task.batch.lead, "cancel", id=task.id)
            return
        if task.ticket is not None:
            self.orders.drop(task.ticket)
            task.ticket = None
        if task.phase == "paused":
            task.phase = "new"
        if task.phase == "new" and task.is_cancelled:
            self.remove(task)

    # --- the plan ---------------------------------------------------------------------------------

    def _leave(self, task: Task) -> None:
        """Remove a task from the plan."""
        self._planned.pop(task, None)
        if task.block is not None:
            self.state.release(task.block)
            task.block = None
        elif self.state.waits(task):
            self.state.leave(task)

    def _withdraw(self, task: Task) -> None:
        """Remove a task from the plan; the others of its batch stay there."""
        is_rider = task.lead is not None
        heir = self.state.part(task) if is_rider or _has_heir(task) else None
        if not isinstance(heir, Task):
            self._leave(task)
            return
        if not is_rider:
            heir.stays = task.stays
            if task in self._planned:
                del self._planned[task]
                self._planned[heir] = None
            self._users = {
                rank: heir if user is task else user for rank, user in self._users.items()
            }
            if task.batch is not None:
                task.batch.lead, heir.phase = heir, task.phase
        self._predict(heir)

    def _enter(self, task: Task, block: Block) -> None:
        self.state.take(block)
        self.state.running[block.first] = task
        task.block = block
        self._predict(task)

    def _predict(self, lead: Task) -> None:
        """Predict the ends of a running batch from now."""
        if lead.block is not None:
            lead.plan(time.monotonic())

    def start(self, job: Job, block: Block) -> None:
        """Plan ranks for a waiting task, as the policy decides."""
        assert isinstance(job, Task)
        self.state.waiting.remove(job)
        self._enter(job, block)
        self._planned[job] = None

    def recall(self, job: Job) -> None:
        """Halt a running task, as the policy decides, except at its last step or if it `stays`."""
        assert isinstance(job, Task)
        if job.phase == "running" and job.left > 1 and not (job.stays or job.is_cancelled):
            self.halt(job)

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: Event) -> bool:
        """Handle an event of a task or a batch; return whether the plan may change."""
        task, events = self.tasks[event.request_id], event.by_request()
        batch = task.batch
        lead = task if batch is None else batch.lead
        before, members = lead.last, [self.tasks[each.request_id] for each in events]
        for member, of_member in zip(members, events, strict=True):
            member.last = of_member
            member.left = max(0, (of_member.num_steps or member.request.steps) - of_member.step)
        match event.kind:
            case "step":
                self._step(lead, events)
                return False
            case "boarded":
                task.phase, task.ticket = "running", None
                self._predict(lead)
                if event.step == 0:
                    task.encoding_s = task.starting_s = event.seconds
                return True
            case "halted":
                lead.phase = "halted"
                if not lead.is_cancelled:
                    self.state.wait(lead)
                    self._planned[lead] = None
                return True
            case "paused":
                self._free(lead, None)
                for member in members:
                    member.phase, member.ticket = "paused", event.tickets[member.id]
                    member.at = member.batch = None
                    member.count_start(-1)
            case "moved":
                if lead.phase == "moving" and before is not None:
                    self._moves_s.append(event.time - before.time)
                    self.state.move_s = median(self._moves_s)
                self._settle(lead, event.block)
            case "refused":
                lead.stays = True
                for other in [planned for planned in self._planned if planned.block is not None]:
                    self.state.wait(other)  # it may have been to get these ranks
                    if other.phase != "halted":
                        del self._planned[other]
                self._settle(lead, event.block)
            case _:
                self._end(task, event)
                return True
        for member in members:
            if member.is_cancelled or self.is_closed:
                self._dismiss(member)
        return True

    def _end(self, task: Task, event: Event) -> None:
        """Free the ranks of a task that they are done with, if they have no other of its batch."""
        batch = task.batch
        self._withdraw(task)
        if event.kind == "done" and task.starting_s:  # not from a saved state
            self._measure(task, 0, task.starting_s + event.seconds)
        if task.is_cancelled or event.kind == "failed":
            del self.tasks[task.id]
        elif event.kind == "done":
            task.phase = "made"
        else:  # closed
            task.phase = "new"
            task.count_start(-1)
            self.state.wait(task)
        task.at = task.batch = None
        if batch is not None:
            del batch.tasks[task.id]
            boarding = list(batch.tasks.values())
            if all(other.phase == "boarding" for other in boarding):  # its ranks have no more
                self._free(batch.lead, None)
                for other in boarding:
                    self._miss(other)

    def _miss(self, task: Task) -> None:
        """Let a task wait again whose batch ended before it boarded."""
        if task.lead is not None:
            task.lead.riders.remove(task)
        task.at = task.batch = task.lead = task.block = None
        task.phase = "new" if task.last is None else "paused"
        task.count_start(-1)
        if not task.is_cancelled:
            self.state.wait(task)
        if task.is_cancelled or self.is_closed:
            self._dismiss(task)

    def _free(self, task: Task, block: Block | None) -> None:
        """Free the ranks of a batch, by its lead, outside the block where it runs."""
        users = dict[int, Task]()
        for member in task.batch.tasks.values() if task.batch is not None else ():
            member.at = block
        for rank, user in self._users.items():
            if user is not task or (block is not None and rank in block.ranks):
                users[rank] = user
        if self.is_closed and self._users and not users:
            self.orders.stop()
        self._users = users

    def _settle(self, task: Task, block: Block) -> None:
        """Set the planned ranks of a task to its actual ones."""
        if task.phase in ("moving", "pausing"):
            task.phase = "running"
        self._free(task, block)
        if task.block == block:
            self._predict(task)
        else:
            self._leave(task)
            self._enter(task, block)

    def _step(self, lead: Task, events: Sequence[Event]) -> None:
        """Note a step of a batch, or that its prompts are encoded."""
        num, first = len(events), events[0]
        for event in events:
            task = self.tasks[event.request_id]
            if first.step == 0:
                task.encoding_s = first.seconds / num
                task.starting_s = (first.time - task.begun_s) / num
            else:
                task.denoising_s += first.seconds
        if first.step:
            self._compare(lead, first, num)
            graph = first.block.first, lead.prompt.lora
            self._measure(lead, first.block.degree, first.seconds, num, graph)
        if lead.block == first.block:
            self._predict(lead)

    def _compare(self, task: Task, event: Event, num: int = 1) -> None:
        """Compare a step of a batch of `num` with its prediction, for the ranks of its block."""
        ranks, degree, predicted_s = list(event.block.ranks), event.block.degree, np.nan
        if degree in task.request.step_s:
            predicted_s = task.request.together_s(degree, num)
        ratio = self.step_ratios[ranks] = event.seconds / predicted_s
        numbers = self._times_of_ranks
        numbers[ranks] = event.step, ratio, 0.0, ratio, 1.0, 0.0, 0.0
        if np.isfinite(numbers).all():  # each rank has had a step since the last time
            numbers[:, STEP_S] = numbers[:, STEP_S].max()
            self.pace.add(numbers, f"request {task.id}")
            self._times_of_ranks = np.tile(NO_TIMES, (len(numbers), 1))

    def _measure(self, task: Task, degree: int, *facts: Any) -> None:
        self._times.measure(task.size, degree, *facts)
        self.state.num_changes += 1
