"""Requests on the ranks of an engine as a policy wants them: a plan, and how it is carried out."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bascule.generate.options import Prompt
from bascule.plan.requests import NEVER, Block, Job, Policy, Request, State
from bascule.serve.blocks import Event
from bascule.serve.controller import Controller
from bascule.serve.times import Form, Times

_MOVE_S = 0.05  # until moves are measured
_USUAL_STEPS = 30  # of a pipeline that does not say how many it takes
_READY = "new", "halted", "paused"  # phases in which a task takes the ranks of the plan


def num_steps_of(prompt: Prompt, takes: Mapping[str, Any]) -> int:
    """Return the steps that a prompt is planned with, for a pipeline that takes these arguments."""
    default = getattr(takes.get("num_inference_steps"), "default", None)
    return prompt.steps or (default if isinstance(default, int) else _USUAL_STEPS)


@dataclass(slots=True, eq=False, kw_only=True)
class Task(Job):
    """A request on its way: `block` is where the plan has it, `at` where it is."""

    id: str
    form: Form
    seed: int
    arguments: Callable[[], dict[str, Any]]
    at: Block | None = None
    phase: str = "new"  # "running", "halting", "halted", "moving", "pausing", "paused", "leaving"
    last: Event | None = None
    encoding_s: float = 0.0
    stays: bool = False  # it cannot travel
    runs_alone: bool = False  # after requests that came before, and before later ones

    @classmethod
    def of(
        cls,
        number: int,
        request_id: str,
        prompt: Prompt,
        takes: Mapping[str, Any],
        times: Times,
        arguments: Callable[[], dict[str, Any]],
        deadline_s: float = NEVER,
    ) -> "Task":
        """Return the task of a prompt that comes now, for a pipeline that takes these arguments."""
        form = times.form(prompt, takes)
        request = Request(
            step_s=times.step_s(form),
            steps=num_steps_of(prompt, takes),
            arrival_s=time.monotonic(),
            deadline_s=deadline_s,
            once_s=times.once_s(form),
        )
        facts = {"id": request_id, "form": form, "seed": prompt.seed, "arguments": arguments}
        return cls(number, request, request.steps, **facts)


class Scheduler:
    """Asks a policy where tasks should be, and gives the orders; for one thread at a time.

    The plan runs ahead of the ranks: a task whose ranks are still taken starts when they are free.

    Args:
        controller: Of the engine.
        policy: Decides.
        times: Learns the seconds of steps.
    """

    def __init__(self, controller: Controller, policy: Policy, times: Times) -> None:
        self._controller, self._policy, self._times = controller, policy, times
        self.state = State.of(controller.num_ranks, move_s=_MOVE_S)
        self.tasks: dict[str, Task] = {}  # in the order of arrival
        self._planned: dict[Task, None] = {}  # that are not where the plan has them
        self._moves_s = deque[float](maxlen=9)

    def add(self, task: Task) -> None:
        """Let a task wait."""
        self.tasks[task.id] = task
        self.state.wait(task)

    def cancel(self, task: Task) -> None:
        """Forget a task; if ranks have it, when they report that they left it."""
        if task.phase == "new":
            return self._remove(task)
        task.phase = "leaving"
        self._controller.cancel(task.id)

    def decide(self, *, may_start: bool = True) -> list[str]:
        """Ask the policy, give the orders whose ranks are free by now, and return their ids.

        Without `may_start`, requests that have not started do not start.
        """
        self.state.now_s, ordered = time.monotonic(), list[str]()
        here = self._in_turn()
        hidden = [task for task in self.state.waiting if task.number > here]
        del self.state.waiting[len(self.state.waiting) - len(hidden) :]
        self._policy.decide(self.state, self)
        self.state.waiting += hidden
        free = set(self._controller.free_ranks)
        for task in list(self._planned):
            if task.block is None and task.phase == "halted":
                del self._planned[task]
                task.phase = "pausing"
                self._controller.pause(task.id)
            elif task.phase == "new" and not may_start:
                continue
            elif task.block is not None and task.phase in _READY:
                if free.union(task.at.ranks if task.at else ()).issuperset(task.block.ranks):
                    del self._planned[task]
                    free.difference_update(task.block.ranks)
                    self._order(task, task.block)
                    ordered.append(task.id)
        return ordered

    def ends_s(self, tasks: Sequence[Task]) -> dict[Task, float]:
        """Predict in how many seconds tasks are done, those with them that are not here yet.

        Those that run go on as they are; the others follow, deadlines first, then as they came,
        each on ranks that it need not share if there are enough for all.
        """
        now, running = time.monotonic(), self.state.running.values()
        if all(task.block is not None for task in tasks):
            return {task: max(0.0, task.free_s - now) for task in tasks}
        free, ends = [0.0] * self.state.num_ranks, dict[Job, float]()
        for job in running:
            for rank in job.block.ranks if job.block is not None else ():
                free[rank] = ends[job] = max(0.0, job.free_s - now)
        free.sort()
        waiting = [*self.state.waiting, *(task for task in tasks if task.id not in self.tasks)]
        share = max(1, len(free) // (len(waiting) + len(ends)))
        for job in sorted(waiting, key=lambda one: (one.request.deadline_s, one.number)):
            is_urgent, degrees = job.request.deadline_s < NEVER, job.request.step_s
            wide = [one for one in degrees if is_urgent or one <= share] or [min(degrees)]
            ends[job], degree = min((free[one - 1] + job.seconds(one), one) for one in wide)
            free[:degree] = [ends[job]] * degree
            free.sort()
        return {task: ends[task] for task in tasks}

    def _in_turn(self) -> float:
        """Return the number of the last task whose turn it is; a task that runs alone bars more."""
        last = -1
        for task in self.tasks.values():
            if task.runs_alone:
                return task.number if last == -1 else last
            last = task.number
        return NEVER

    def _order(self, task: Task, block: Block) -> None:
        phase, task.phase = task.phase, "running"
        if phase == "new":
            try:
                self._controller.start(task.id, task.arguments(), task.seed, block)
            except Exception as error:  # also one of its picture
                if not self._controller.is_closed:
                    now, reason = time.monotonic(), str(error)
                    self._controller.events.put(Event("failed", task.id, now, block, reason=reason))
        elif phase == "paused":
            self._controller.resume(task.id, block)
        elif task.at == block:
            self._controller.go_on(task.id)
        else:
            task.phase = "moving"
            self._controller.move(task.id, block)
        task.at = block

    def _remove(self, task: Task) -> None:
        self._leave(task)
        self._planned.pop(task, None)
        del self.tasks[task.id]

    def _leave(self, task: Task) -> None:
        """Take a task out of the plan."""
        if task.block is None:
            self.state.waiting.remove(task)
        else:
            self.state.release(task.block)

    def _enter(self, task: Task, block: Block) -> None:
        self.state.take(block)
        self.state.running[block.first] = task
        task.block = block
        self._predict(task)

    def _predict(self, task: Task) -> None:
        """Predict from now on when a task that runs is done."""
        assert task.block is not None
        task.steps_end_s = time.monotonic() + task.left * task.request.step_s[task.block.degree]
        task.free_s = task.steps_end_s + (task.request.once_s if task.block.degree == 1 else 0.0)

    # --- what the policy decides ------------------------------------------------------------------

    def start(self, job: Job, block: Block) -> None:
        """Plan ranks for a waiting task."""
        assert isinstance(job, Task)
        self.state.waiting.remove(job)
        self._enter(job, block)
        self._planned[job] = None

    def recall(self, job: Job) -> None:
        """Halt a running task at its next boundary, if it is not on its way anyhow."""
        assert isinstance(job, Task)
        if job.phase == "running" and job.left > 1 and not job.stays:
            job.phase = "halting"
            self._controller.halt(job.id)

    # --- news -------------------------------------------------------------------------------------

    def handle(self, event: Event) -> bool:
        """Take news of a task; return whether the plan may change."""
        task = self.tasks[event.request_id]
        before, task.last = task.last, event
        match event.kind:
            case "step":
                self._step(task, event)
                return False
            case "halted":
                self._turn(task, "halting", "halted")
                self.state.wait(task)
                self._planned[task] = None
            case "paused":
                task.at = None
                self._turn(task, "pausing", "paused")
            case "moved":
                if task.phase == "moving" and before is not None:
                    self._moves_s.append(event.time - before.time)
                    self.state.move_s = median(self._moves_s)
                self._turn(task, "moving", "running")
                self._settle(task, event.block)
            case "refused":
                task.stays = True
                self._turn(task, task.phase, "running")
                for one in [one for one in self._planned if one.block is not None]:
                    self.state.wait(one)  # it may have been to get these ranks
                    if one.phase != "halted":
                        del self._planned[one]
                self._settle(task, event.block)
            case _:  # it leaves its ranks
                if event.kind == "done":
                    self._measure(task, 0, task.encoding_s + event.seconds)
                self._remove(task)
        return True

    def _turn(self, task: Task, before: str, phase: str) -> None:
        if task.phase == before != "leaving":
            task.phase = phase

    def _step(self, task: Task, event: Event) -> None:
        if event.step == 0:
            task.encoding_s = event.seconds
        else:
            self._measure(task, event.block.degree, event.seconds)
        task.left = max(0, (event.num_steps or task.request.steps) - event.step)
        if task.block == event.block:
            self._predict(task)

    def _measure(self, task: Task, degree: int, seconds: float) -> None:
        self._times.measure(task.form, degree, seconds)
        self.state.num_changes += 1

    def _settle(self, task: Task, block: Block) -> None:
        """Let the plan have a task where it is."""
        task.at = block
        if task.block != block:
            self._leave(task)
            task.block = None
            self._enter(task, block)
