"""How ranks plan: one gather of what each brings, then the same decision on all; now, or behind.

A plan behind the current step is made by a thread of its own, over a group of its own, and begins
when the one before it is done. So its gathers come in one order on all ranks, and the thread that
trains never takes part in them.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError
from bascule.plan.checks import listed
from bascule.plan.costs import Cost
from bascule.plan.plan import Plan, plan_batch
from bascule.plan.sequences import Batch, Sequences, batch_of
from bascule.plan.step import Sync, check_sync, mix_microbatches, plan_step
from bascule.plan.topology import Topology

if TYPE_CHECKING:
    from bascule.step import Step

_FIRST_CAPACITY = 68  # numbers in the first gather: four of a microbatch, and one a sequence


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank brings to a plan, as it was when it asked."""

    number: int  # of the first step planned
    batches: Sequence[Batch]  # its sequences, for each microbatch
    sync: Sync  # as for `plan_step`
    mixes: bool  # whether sequences may change microbatch
    settings: Mapping[str, str]  # all that must be the same on all ranks, as text
    topology: Topology | str  # as for `plan_batch`
    cost: Cost  # as for `plan_batch`
    others: Mapping[str, Any]  # what else `plan_batch` takes
    error: Exception | None  # what is wrong with it

    @property
    def where(self) -> str:
        """For errors."""
        return f"step {self.number}: plan"


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A plan, and which sequences of this rank it is for."""

    plan: Plan  # the plan
    # (n, 2) by sequence of this rank, the microbatch in which it was loaded, and its place there
    sources: Ints


class Planning:
    """Plans that ranks make one after the other over a group of the host."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._capacity = _FIRST_CAPACITY

    def now(self, asked: Asked) -> tuple[Planned, ...]:
        """One plan a microbatch, from one gather of a fixed size."""
        try:
            loaded = self._gather(asked)
        finally:  # who waits for the next plan waits for the thread that asks for it
            self.group.calls.thread = threading.main_thread().ident
        with shared(asked.where):
            rank = self.group.rank
            sources = [_as_loaded(*one) for one in enumerate(asked.batches)]
            if asked.mixes:
                args = loaded, asked.topology, asked.cost
                mixed = mix_microbatches(*args, sync=asked.sync, **asked.others)
                loaded, sources = mixed.microbatches, [one[rank] for one in mixed.sources]
            if len(loaded) == 1:
                plans = (plan_batch(loaded[0], asked.topology, asked.cost, **asked.others),)
                return tuple(map(Planned, plans, sources))
            args = loaded, asked.topology, asked.cost
            return tuple(map(Planned, plan_step(*args, sync=asked.sync, **asked.others), sources))

    def _gather(self, asked: Asked) -> list[list[Ints | Sequences]]:
        """Sequences by microbatch and rank; or the same error on all ranks."""
        num = len(asked.batches)
        words = [batch.to_words() for batch in asked.batches]
        counts = np.array([part.size for part in words], np.int64)
        said = agree(
            self.group,
            asked.settings,
            asked.error,
            what="plan",
            step=asked.number,
            values=np.concatenate([counts, *words]),
            capacity=self._capacity,
        )
        # Derived from what all ranks gathered, hence the same on all of them.
        most = max(part.size for part in said)
        self._capacity = max(self._capacity, 1 << (most - 1).bit_length() if most else 0)
        parts = [np.split(x[num:], np.cumsum(x[:num])[:-1]) for x in said]
        return [[Batch.from_words(x) for x in of_ranks] for of_ranks in zip(*parts, strict=True)]


class PlannedLater:
    """Steps whose plans a thread makes. Made by `SequenceParallel.plan_later`.

    The interpreter waits for the thread, at most as long as its group does for a rank.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Planned, ...]],
        bind: Callable[[tuple[Planned, ...]], tuple["Step", ...]],
        where: str,
        before: "PlannedLater | None",
    ) -> None:
        self._make, self._bind, self._where = make, bind, where
        self._plans: tuple[Planned, ...] = ()
        self._steps: tuple[Step, ...] | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()  # an interrupted `join` takes a living thread for ended
        self._thread = threading.Thread(target=self._run, args=(before,), name="bascule plan")
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Return whether `get` would not wait."""
        return self._done.is_set()

    def get(self) -> tuple["Step", ...]:
        """A frozen step for each microbatch; the same ones at every call.

        Raises:
            As `SequenceParallel.plan_step`.
        """
        if not self.is_ready:
            self._done.wait()
        if self._error is not None:
            with shared(self._where):  # by this thread, which others wait for
                raise self._error
        if self._steps is None:
            self._steps = self._bind(self._plans)
        return self._steps

    def _run(self, before: "PlannedLater | None") -> None:
        if before is not None:
            before._done.wait()
        try:
            self._plans = self._make()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


def _as_loaded(number: int, batch: Batch) -> Ints:
    return np.stack([np.full(batch.lens.size, number), np.arange(batch.lens.size)], axis=1)


def checked(microbatches: Iterable[npt.ArrayLike | Sequences], sync: str) -> list[Batch]:
    """The sequences of this rank."""
    check_sync(sync)
    found: list[Batch] = []
    given = listed("microbatches", microbatches)
    for number, loaded in enumerate(given):
        try:
            found.append(batch_of([loaded], 1))
        except ConfigError as met:
            text = re.sub("^rank 0[,:] ", "", str(met))  # here it is the only one, hence 0
            where = f"microbatch {number}: " if len(given) > 1 else ""
            raise ConfigError(where + text) from None
    if not found:
        raise ConfigError("no microbatches: give the lengths of one at least")
    return found
