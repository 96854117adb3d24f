"""Plans of ranks: one gather of all sequences, then the same decision on every rank.

A thread plans behind the current step, over another group; gathers come in one order on all ranks.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError
from bascule.plan.checks import listed
from bascule.plan.plan import Plan, PlanSetup
from bascule.plan.sequences import Batch, Sequences, batch_of
from bascule.plan.step import Sync, check_sync, mix_microbatches, plan_microbatches

if TYPE_CHECKING:
    from bascule.step import Step

_FIRST_CAPACITY = 68  # numbers in the first gather: four of a microbatch, and one a sequence


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A rank's sequences and settings for a plan."""

    number: int  # of the first step planned
    batches: Sequence[Batch]  # its sequences, for each microbatch
    sync: Sync
    mixes: bool  # whether sequences may change microbatch
    setup: PlanSetup | None  # None: there is an error
    initial_loads: Floats | None  # as for `plan_batch`
    settings: Mapping[str, str]  # all that must be the same on all ranks, as text
    error: Exception | None

    @property
    def where(self) -> str:
        """Name of the plan in errors."""
        return f"step {self.number}: plan"


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, and which sequences of this rank it is for."""

    plan: Plan
    sources: Ints  # (n, 2) microbatch that loaded each sequence of this rank, and its place there


class Planning:
    """Plans that ranks make one after the other over a group of the host."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._capacity = _FIRST_CAPACITY

    def now(self, request: PlanRequest) -> tuple[Planned, ...]:
        """Make one plan a microbatch, from one gather of a fixed size."""
        with shared(request.where):
            try:
                batches = self._gather(request)
            finally:  # who waits for the next plan waits for the thread that asks for it
                self.group.calls.thread = threading.main_thread().ident
            assert request.setup is not None  # else the gather raised its error
            sources = [
                np.stack([np.full(one.lens.size, number), np.arange(one.lens.size)], axis=1)
                for number, one in enumerate(request.batches)
            ]
            if request.mixes:
                mixed = mix_microbatches(batches, request.setup, request.sync)
                batches, sources = mixed.batches, [one[self.group.rank] for one in mixed.sources]
            if len(batches) == 1:
                plans = (request.setup.plan(batches[0], request.initial_loads),)
            else:
                plans = plan_microbatches(batches, request.setup, request.sync)
            return tuple(map(Planned, plans, sources))

    def _gather(self, request: PlanRequest) -> list[Batch]:
        """Return the sequences of all ranks by microbatch; or raise the same error on all ranks."""
        words = [batch.to_words() for batch in request.batches]
        gathered = agree(
            self.group,
            request.settings,
            request.error,
            what="plan",
            step=request.number,
            values=np.concatenate([np.array([part.size for part in words], np.int64), *words]),
            capacity=self._capacity,
        )
        # Derived from what all ranks gathered, hence the same on all of them.
        most = max(part.size for part in gathered)
        self._capacity = max(self._capacity, 1 << (most - 1).bit_length() if most else 0)
        num = len(request.batches)
        parts = [np.split(x[num:], np.cumsum(x[: num - 1])) for x in gathered]
        return [Batch.joined(list(map(Batch.from_words, one))) for one in zip(*parts, strict=True)]


class PlanFuture:
    """Steps whose plans a thread makes; see `SequenceParallel.plan_async`."""

    def __init__(
        self,
        make: Callable[[], tuple[Planned, ...]],
        bind: Callable[[tuple[Planned, ...]], tuple["Step", ...]],
        where: str,
        before: "PlanFuture | None",
    ) -> None:
        self._bind, self._where = bind, where
        self._steps: tuple[Step, ...] | None = None
        self._plans: Future[tuple[Planned, ...]] = Future()
        args = make, None if before is None else before._plans
        threading.Thread(target=self._run, args=args, name="bascule plan").start()

    def done(self) -> bool:
        """Return whether the plans are made: then `result` does not wait."""
        return self._plans.done()

    def result(self) -> tuple["Step", ...]:
        """Return the steps of `SequenceParallel.plan_step`, or raise its error."""
        if self._steps is None:
            with shared(self._where):  # by this thread, which others wait for
                self._steps = self._bind(self._plans.result())
        return self._steps

    def _run(self, make: Callable[[], tuple[Planned, ...]], before: "Future[Any] | None") -> None:
        if before is not None:
            wait([before])
        try:
            self._plans.set_result(make())
        except BaseException as error:
            self._plans.set_exception(error)


def checked(microbatches: Iterable[npt.ArrayLike | Sequences], sync: str) -> list[Batch]:
    """Return the sequences of this rank by microbatch, checked as they come from the user."""
    check_sync(sync)
    batches: list[Batch] = []
    each = listed("microbatches", microbatches)
    for number, loaded in enumerate(each):
        try:
            batches.append(batch_of([loaded], 1))
        except ConfigError as error:
            text = re.sub("^rank 0[,:] ", "", str(error))  # here it is the only one, hence 0
            where = f"microbatch {number}: " if len(each) > 1 else ""
            raise ConfigError(where + text) from None
    if not batches:
        raise ConfigError("no microbatches: give the lengths of one at least")
    return batches
