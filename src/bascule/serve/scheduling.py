"""The scheduler of requests: a policy plans their ranks, and orders bring the ranks to the plan."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bascule.data.slow_rank import NO_TIMES, STEP_S, Pace
from bascule.generate.options import Prompt
from bascule.plan.requests import NEVER, Block, Job, Policy, Request, State
from bascule.serve.orders import Event, Orders
from bascule.serve.post import Ticket
from bascule.serve.times import RequestSize, Times

_MOVE_S = 0.05  # assumed until moves are measured
_USUAL_STEPS = 30  # assumed for a pipeline without a default
Phase = Literal["new", "running", "halting", "halted", "moving", "pausing", "paused", "made"]
_READY = "new", "halted", "paused"  # phases in which a task takes the ranks of the plan


def num_steps_of(prompt: Prompt, takes: Mapping[str, Any]) -> int:
    """Return the steps to plan for a prompt; `takes` are the parameters of the pipeline's call."""
    default = getattr(takes.get("num_inference_steps"), "default", None)
    return prompt.steps or (default if isinstance(default, int) else _USUAL_STEPS)


@dataclass(slots=True, eq=False, kw_only=True)
class Task(Job):
    """A request from its arrival until its output is written.

    `block` has its planned ranks, `at` the ranks where it runs. Its phase is new, running, halting
    (at its step's end), halted, then running, moving (to other ranks) or pausing; at last made.
    """

    id: str
    prompt: Prompt
    size: RequestSize
    arguments: Callable[[], dict[str, Any] | Tensor]  # of the pipeline; or its saved state
    created_at: float = 0.0  # Unix seconds
    at: Block | None = None
    phase: Phase = "new"
    ticket: Ticket | None = None  # of its state, while it is paused
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
    ) -> "Task":
        """Return the task of a prompt that arrives now; `takes` as in `num_steps_of`."""
        size = times.request_size(prompt, takes)
        request = Request(
            step_s=times.step_s(size),
            steps=num_steps_of(prompt, takes),
            arrival_s=time.monotonic(),
            deadline_s=deadline_s,
            once_s=times.once_s(size),
        )
        facts = {"id": request_id, "prompt": prompt, "size": size, "arguments": arguments}
        return cls(number, request, request.steps, **facts)


class Scheduler:
    """Table of tasks and their planned ranks, and sender of the orders; not thread-safe.

    The plan runs ahead of the ranks: a task whose ranks are still in use starts when they are free.
    """

    def __init__(self, orders: Orders, policy: Policy, times: Times) -> None:
        self.orders, self._policy, self._times = orders, policy, times
        self.state = State.of(orders.num_ranks, move_s=_MOVE_S)
        self.tasks: dict[str, Task] = {}  # by id, in the order of arrival, until they are removed
        self.is_closed = False  # True if no task gets ranks any more
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
        if task.phase in ("halted", "pausing"):
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
        self.state.waiting += hidden
        num_made = sum(task.phase == "made" for task in self.tasks.values())
        for task in list(self._planned):
            if task.block is None and task.phase == "halted":
                del self._planned[task]
                self._pause(task)
            elif task.phase == "new" and num_made > self.orders.num_ranks:
                continue
            elif task.block is not None and task.phase in _READY:
                if all(self._users.get(rank, task) is task for rank in task.block.ranks):
                    del self._planned[task]
                    self._place(task, task.block)
                    ordered.append(task)
        if (locked := self._locked()) is not None:
            self._pause(locked)
        return ordered

    def backlog_s(self) -> tuple[float, float]:
        """Predict in how many seconds a rank, on average, has done all tasks; and the last rank."""
        free, _ = self._foresee([])
        return sum(free) / len(free), free[-1]

    def ends_s(self, tasks: Sequence[Task]) -> dict[Task, float]:
        """Predict in how many seconds tasks are done; they may be new ones, not added yet.

        Running tasks stay on their ranks; waiting ones follow, by deadline, then by arrival, each
        on ranks of its own if there are enough for all.
        """
        if all(task.block is not None for task in tasks):
            now = time.monotonic()
            return {task: max(0.0, task.free_s - now) for task in tasks}
        ends = self._foresee(tasks)[1]
        return {task: ends[task] for task in tasks}

    def _foresee(self, tasks: Sequence[Task]) -> tuple[list[float], dict[Job, float]]:
        """Return sorted seconds until each rank is free, and until each task is done."""
        now, running = time.monotonic(), self.state.running.values()
        free, ends = [0.0] * self.state.num_ranks, dict[Job, float]()
        for job in running:
            for rank in job.block.ranks if job.block is not None else ():
                free[rank] = ends[job] = max(0.0, job.free_s - now)
        free.sort()
        waiting = [*self.state.waiting, *(task for task in tasks if task.id not in self.tasks)]
        share = max(1, len(free) // max(1, len(waiting) + len(ends)))
        for job in sorted(waiting, key=lambda job: (job.request.deadline_s, job.number)):
            is_urgent, degrees = job.request.deadline_s < NEVER, job.request.step_s
            wide = [d for d in degrees if is_urgent or d <= share] or [min(degrees)]
            ends[job], degree = min((free[d - 1] + job.seconds(d), d) for d in wide)
            free[:degree] = [ends[job]] * degree
            free.sort()
        return free, ends

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

    def _place(self, task: Task, block: Block) -> None:
        """Let idle ranks start or continue a task."""
        before, task.phase, ticket = task.phase, "running", task.ticket
        if before == "new":
            task.begun_s = time.monotonic()
            try:
                ticket = self.orders.keep(task.id, task.arguments(), task.prompt.seed)
            except Exception as error:  # also one of its picture
                task.at = block
                return self.orders.tell("failed", task.id, str(error))
        self._users |= dict.fromkeys(block.ranks, task)
        if ticket is not None:
            self.orders.run(task.id, block, ticket)
            task.at, task.ticket = block, None
        elif task.at == block:
            self.orders.order(block, task.id, "go on")
        elif task.at is not None:
            task.phase = "moving"
            self.orders.order(task.at, task.id, "move", block)

    def halt(self, task: Task) -> None:
        """Let a running task wait at the end of its step."""
        assert task.at is not None
        task.phase = "halting"
        self.orders.order(task.at, task.id, "halt")

    def _pause(self, task: Task) -> None:
        """Let a halted task leave its ranks, which store its state."""
        assert task.at is not None
        task.phase = "pausing"
        self.orders.order(task.at, task.id, "pause")

    def _dismiss(self, task: Task) -> None:
        """Let a task leave its ranks after its step; one that changes ranks leaves afterwards."""
        if task.phase == "paused":
            assert task.ticket is not None
            self.orders.drop(task.ticket)
            task.phase, task.ticket = "new", None
        if task.phase in ("running", "halting", "halted"):
            assert task.at is not None
            self.orders.order(task.at, task.id, "cancel")
        elif task.phase == "new" and task.is_cancelled:
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

    def _enter(self, task: Task, block: Block) -> None:
        self.state.take(block)
        self.state.running[block.first] = task
        task.block = block
        self._predict(task)

    def _predict(self, task: Task) -> None:
        """Predict the end of a running task from now."""
        assert task.block is not None
        task.steps_end_s = time.monotonic() + task.left * task.request.step_s[task.block.degree]
        task.free_s = task.steps_end_s + (task.request.once_s if task.block.degree == 1 else 0.0)

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
        """Handle an event of a task; return whether the plan may change."""
        task = self.tasks[event.request_id]
        before, task.last = task.last, event
        match event.kind:
            case "step":
                self._step(task, event)
                return False
            case "halted":
                task.phase = "halted"
                if not task.is_cancelled:
                    self.state.wait(task)
                    self._planned[task] = None
                return True
            case "paused":
                self._free(task, None)
                task.phase, task.ticket = "paused", event.ticket
            case "moved":
                if task.phase == "moving" and before is not None:
                    self._moves_s.append(event.time - before.time)
                    self.state.move_s = median(self._moves_s)
                self._settle(task, event.block)
            case "refused":
                task.stays = True
                for other in [planned for planned in self._planned if planned.block is not None]:
                    self.state.wait(other)  # it may have been to get these ranks
                    if other.phase != "halted":
                        del self._planned[other]
                self._settle(task, event.block)
            case _:
                self._end(task, event)
                return True
        if task.is_cancelled or self.is_closed:
            self._dismiss(task)
        return True

    def _end(self, task: Task, event: Event) -> None:
        """Free the ranks of a task that they are done with."""
        self._leave(task)
        if event.kind == "done" and task.starting_s:  # not from a saved state
            self._measure(task, 0, task.starting_s + event.seconds)
        if task.is_cancelled or event.kind == "failed":
            del self.tasks[task.id]
        elif event.kind == "done":
            task.phase = "made"
        else:  # closed
            task.phase = "new"
            self.state.wait(task)
        self._free(task, None)

    def _free(self, task: Task, block: Block | None) -> None:
        """Free the ranks of a task outside the block where it runs."""
        task.at, users = block, dict[int, Task]()
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
        if task.block != block:
            self._leave(task)
            self._enter(task, block)

    def _step(self, task: Task, event: Event) -> None:
        if event.step == 0:
            task.encoding_s, task.starting_s = event.seconds, event.time - task.begun_s
        else:
            task.denoising_s += event.seconds
            self._compare(task, event)
            self._measure(task, event.block.degree, event.seconds)
        task.left = max(0, (event.num_steps or task.request.steps) - event.step)
        if task.block == event.block:
            self._predict(task)

    def _compare(self, task: Task, event: Event) -> None:
        """Compare a step with its prediction, for the ranks of its block."""
        ranks, predicted_s = list(event.block.ranks), task.request.step_s.get(event.block.degree)
        ratio = self.step_ratios[ranks] = event.seconds / (predicted_s or np.nan)
        numbers = self._times_of_ranks
        numbers[ranks] = event.step, ratio, 0.0, ratio, 1.0, 0.0, 0.0
        if np.isfinite(numbers).all():  # each rank has had a step since the last time
            numbers[:, STEP_S] = numbers[:, STEP_S].max()
            self.pace.add(numbers, f"request {task.id}")
            self._times_of_ranks = np.tile(NO_TIMES, (len(numbers), 1))

    def _measure(self, task: Task, degree: int, seconds: float) -> None:
        self._times.measure(task.size, degree, seconds)
        self.state.num_changes += 1
