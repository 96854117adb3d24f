"""Ranks that fail, leave or are late in a loader: one sentence on all ranks, and no thread stays.

Loaders wait ten minutes for other ranks, unless a case says otherwise; a world ends long before.
"""

import itertools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from bascule.comm import threads
from bascule.comm.groups import timeout_of
from bascule.data import loader, prefetch
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.steps import Batch, Redistributor
from bascule.machine.costs import PolynomialCost
from bascule.plan.limits import Limits
from tests.helpers.faults import look_often
from tests.helpers.held import Held, check_held, needs_proc
from tests.helpers.loader_cases import (
    PER_RANK,
    allow_workers,
    endless,
    lists,
    loader_of,
    loader_threads,
    sample_of,
)
from tests.helpers.loader_checks import await_word, tell
from tests.helpers.ranks import on_ranks, raised_by, run_ranks, run_to_the_end

BAD_RANK = 1


def is_bad() -> bool:
    return dist.get_rank() == BAD_RANK


def ids_of(batches: Any) -> list[int]:
    return [int(sample["id"]) for batch in batches for sample in batch.data]


def without_end(**settings: Any) -> BalancedLoader:
    return loader_of(endless(dist.get_rank()), **settings)


@dataclass
class End:
    """Records how a loop over a loader ends on this rank."""

    seen: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    classes: list[str] = field(default_factory=list[str])
    text: str = "no error"  # with its notes
    threads: list[str] = field(default_factory=list[str])
    logged: list[str] = field(default_factory=list[str])

    def note(self, batch: Batch) -> tuple[int, int]:
        self.seen.append((batch.step, batch.microbatch))
        return self.seen[-1]


def end_of(run: Callable[..., object], *args: Any) -> End:
    """Call `run(*args, end)`, and look at what is left of it."""
    end, handler = End(), logging.Handler(logging.ERROR)
    handler.emit = lambda record: end.logged.append(record.getMessage())
    logging.getLogger("bascule").addHandler(handler)
    try:
        run(*args, end)
    except (RuntimeError, ValueError, ZeroDivisionError, LookupError) as error:
        end.classes = [cls.__name__ for cls in type(error).__mro__]
        end.text = "\n".join([f"{error}", *getattr(error, "__notes__", ())])
    logging.getLogger("bascule").removeHandler(handler)
    end.threads = loader_threads()
    return end


# --- what fails on one rank -----------------------------------------------------------------------

BAD_STEP = 2
BAD_PLACE = 4 * BAD_STEP + 3  # steps have two microbatches of two samples
BAD_ID = PER_RANK * BAD_RANK + BAD_PLACE


class Data(Dataset[Any]):
    """24 samples of a rank, of which one cannot be read, or cannot travel."""

    def __init__(self, fault: str) -> None:
        self.rank, self.fault = dist.get_rank(), fault

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, Any]:
        sample = sample_of(PER_RANK * self.rank + place, 1 + place % 5 * (1 + self.rank))
        if int(sample["id"]) == BAD_ID and self.fault == "no type":
            sample["odd"] = {object()}
        if int(sample["id"]) == BAD_ID and self.fault.startswith("worker"):
            raise KeyError(f"no sample {place}\nin two lines")
        return sample


def raising(error: BaseException) -> Any:
    raise error


def spoilt(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a length_fn or weight_fn that gives this value for one sample."""
    return lambda one: value() if int(one["id"]) == BAD_ID else len(one["input_ids"])


def no_batch(samples: Any, error: BaseException) -> Any:
    if is_bad() and any(int(one["id"]) % PER_RANK >= 4 * BAD_STEP for one in samples):
        raise error
    return samples


PLACE = "microbatch 1, sample 1"
ERRORS = IndexError, SystemExit, KeyboardInterrupt, StopIteration
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "worker 0": ({}, ("microbatch 1", "KeyError", "no sample 11")),
    "worker 2": ({}, ("microbatch 1", "KeyError", "no sample 11")),
    "length": ({"length_fn": spoilt(lambda: -1)}, (PLACE, "length_fn gave -1")),
    "weight": ({"weight_fn": spoilt(lambda: 0.5)}, (PLACE, "weight_fn gave 0.5")),
    "no type": ({}, (PLACE, "sample['odd'] is a set")),
    "collate_fn": (
        {"collate_fn": partial(no_batch, error=SystemExit("cannot collate"))},
        ("making batches", "collate_fn", "SystemExit", "cannot collate"),
    ),
    "collate_fn of an Exception": (
        {"collate_fn": partial(no_batch, error=ZeroDivisionError("cannot collate"))},
        ("making batches", "collate_fn", "ZeroDivisionError", "cannot collate"),
    ),
    **{
        kind.__name__: (
            {"length_fn": spoilt(lambda kind=kind: raising(kind("of the user")))},
            (PLACE, f"{kind.__name__}: of the user"),
        )
        for kind in ERRORS
    },
    "limits": (
        {"limits": Limits(tokens=20), "length_fn": spoilt(lambda: 21)},
        ("microbatch 1", "21"),
    ),
}


OWN_ERRORS = {
    **{"worker 0": "KeyError", "worker 2": "KeyError", "IndexError": "IndexError"},
    "collate_fn of an Exception": "ZeroDivisionError",
}


def failing(kind: str, end: End) -> None:
    num_workers = 2 if kind == "worker 2" else 0
    inner: DataLoader[Any] = DataLoader(Data(kind), 2, num_workers=num_workers, collate_fn=list)
    with loader_of(inner, accumulate=2, **FAULTS[kind][0]) as made:
        for batch in made:
            end.note(batch)


def all_faults() -> list[End]:
    allow_workers()
    return [end_of(failing, kind) for kind in FAULTS]


def test_what_fails_on_one_rank_is_its_own_error_there_and_quoted_on_the_others() -> None:
    for kind, *ends in zip(FAULTS, *run_ranks(all_faults, 3), strict=True):
        end, own = ends[0], ends[BAD_RANK]
        if kind in OWN_ERRORS:  # the text of the others is its note
            assert own.classes[0] == OWN_ERRORS[kind], own
            own.classes, own.text = end.classes, own.text[own.text.index(end.text) :]
        assert all(one == end for one in ends), (kind, ends)
        assert all(word in end.text for word in FAULTS[kind][1]), (kind, end)
        if kind == "limits":  # no rank alone is wrong
            assert end.text.startswith(f"step {BAD_STEP}, epoch 0: ") and "PlanError" in end.classes
        else:
            assert end.text.startswith(f"step {BAD_STEP}, epoch 0, "), (kind, end)
            assert f"rank {BAD_RANK} of group 'loader'" in end.text, (kind, end)
            is_input = kind in ("length", "weight", "no type")
            assert "CommError" in end.classes and ("ConfigError" in end.classes) == is_input
        # Whatever was made before is still handed out.
        assert end.seen == [(s, m) for s in range(BAD_STEP) for m in range(2)], (kind, end)
        assert end.threads == []


# --- ranks that are gone, or do not come ----------------------------------------------------------


def never_ready(end: End) -> None:
    """The loader of a rank takes longer than the others may wait."""

    def load() -> Iterator[Any]:
        for k, group in enumerate(endless(dist.get_rank())):
            if is_bad() and k == 2:
                threading.Event().wait(6.0)
            yield group

    list(loader_of(load(), timeout_s=3.5))


def wrong_options(end: End) -> None:
    """A rank is refused before it makes a loader."""
    look_often()
    loader_of([], min_gain=2.0 if is_bad() else 0.0)


def mean_or_error(end: End) -> None:
    """The others wait for gradients, in a collective that ends with the one that failed."""
    look_often()
    with without_end() as batches:
        for batch in batches:
            if batch.step == LEAVES_AT and is_bad():
                raise ZeroDivisionError(REASON)
            dist.all_reduce(torch.ones(1))


REASON, LEAVES_AT = "in the training step", 3
WORLDS: dict[Callable[[End], None], tuple[str, str, tuple[str, ...]]] = {
    # The class of the error on the bad rank, and words of it; words of the others.
    never_ready: ("CommError", "", ("step 2: all_gather (epoch 0, loading)",)),
    wrong_options: (
        "ConfigError",
        "min_gain=2.0",
        ("rank 1 failed in LoaderOptions: LoaderOptions(min_gain=2.0)",),
    ),
    mean_or_error: (
        "ZeroDivisionError",
        REASON,
        # by the loader's thread, or by the watch where that one comes first
        ("rank 1 ", "ZeroDivisionError: " + REASON),
    ),
}


@pytest.mark.parametrize("run", WORLDS)
def test_who_does_not_come_ends_the_others(run: Callable[[End], None]) -> None:
    kind, words, of_others = WORLDS[run]
    for rank, outcome in enumerate(run_to_the_end(end_of, 2, run, collectives_s=100.0)):
        end = outcome.value
        if rank == BAD_RANK:
            assert kind in end.classes and words in end.text, outcome
        else:
            assert all(word in end.text for word in of_others), outcome
            assert run is never_ready or "Timed out" not in end.text
            if run is not mean_or_error:  # whose error is that of torch's collective
                assert "CommError" in end.classes
                assert ("ConfigError" in end.classes) == (kind == "ConfigError")
        assert end.threads == []


def after_failures() -> tuple[list[str], list[int]]:
    """Errors end groups; loaders made later have others."""
    names: list[str] = []
    step = Redistributor.step

    def recorded(self: Redistributor, *args: Any) -> Any:
        names.append(self.ranks.group.process_group.group_name)
        if len(names) == 1:
            raise RuntimeError("nobody thought of it")
        return step(self, *args)

    with mock.patch.object(Redistributor, "step", recorded):
        assert raised_by(lambda: next(iter(loader_of(lists()))))[1] == "nobody thought of it"
        with loader_of(lists()) as made:
            next(iter(made))
    late = without_end(timeout_s=0.5)
    if is_bad():
        threading.Event().wait(1.0)
    else:
        classes, text = raised_by(lambda: next(iter(late)))
        assert "CommError" in classes and "beginning an iteration" in text
    while True:
        try:
            return names[:2], ids_of(loader_of(lists()))
        except RuntimeError:  # it still refers to the groups that the other ended
            continue


def test_groups_of_failures_are_not_lent_again() -> None:
    (names, ids), (_, others) = run_ranks(after_failures, 2)
    assert names[0] != names[1]
    assert sorted(ids + others) == [*range(5), *range(PER_RANK, PER_RANK + 5)]


# --- ranks that leave -----------------------------------------------------------------------------


def hurry() -> None:
    """Threads that have nothing to do look around more often."""
    prefetch._LOOK_S = 0.05  # pyright: ignore[reportPrivateUsage]
    loader.PATIENCE_S = 2.0


def train(name: str, end: End, batches: Any) -> None:
    """One rank fails in a step; the others wait for it there until it is out of its loop."""
    for batch in batches:
        if end.note(batch) == (LEAVES_AT, 0):
            if is_bad():
                raise ZeroDivisionError(REASON)
            await_word(name)


BATCHES: dict[str, Callable[[ExitStack], Any]] = {
    "bare": lambda _: without_end(),
    "in a with": lambda stack: stack.enter_context(without_end()),
    "in a with, within a step": lambda stack: stack.enter_context(without_end(accumulate=3)),
    "inside other iterators": lambda _: (one for one in without_end()),  # as of progress bars
    "closed, and kept": lambda stack: iter(stack.enter_context(closing(without_end()))),
}


def leaving(name: str, end: End) -> None:
    try:
        with ExitStack() as stack:
            train(name, end, BATCHES[name](stack))
    finally:
        tell(name)


def caught(name: str, end: End) -> None:
    """The error is dealt with by a function that goes on to something else."""
    try:
        train(name, end, without_end())
    except ZeroDivisionError:
        tell(name)
        for rank in {0, 1, 2} - {BAD_RANK}:
            await_word(f"{name}: rank {rank} is out")
        raise
    finally:
        tell(f"{name}: rank {dist.get_rank()} is out")


def at_exit(name: str, end: End) -> None:
    """The iterator is alive when the interpreter ends, as that of a Trainer is."""
    iterator = iter(without_end())
    for batch in iterator:
        if end.note(batch) == (LEAVES_AT, 0):
            break
    if is_bad():
        sys.last_value = ZeroDivisionError(REASON)
        threads._end_all()
        assert loader_threads() == []
        tell(name)
        raise sys.last_value
    for batch in iterator:
        end.note(batch)
        await_word(name)


def all_cases() -> list[End]:
    hurry()
    ends = [end_of(leaving, name) for name in BATCHES]
    return [*ends, end_of(caught, "caught"), end_of(at_exit, "at exit")]


def test_an_error_of_one_rank_ends_all_at_once() -> None:
    for name, *ends in zip([*BATCHES, "caught", "at exit"], *run_ranks(all_cases, 3), strict=True):
        for rank, end in enumerate(ends):
            where = name, rank, end
            # What was ready may be handed out until this rank knows, and no more is made.
            most = LEAVES_AT + (0 if rank == BAD_RANK else 2)
            assert LEAVES_AT <= end.seen[-1][0] <= most and end.threads == [], where
            if rank == BAD_RANK:
                assert end.classes[0] == "ZeroDivisionError" and end.text == REASON, where
                assert end.logged == [], where
                continue
            assert end.classes[0] == "CommError" and end.text.startswith("step "), where
            assert f"rank {BAD_RANK} of group 'loader'" in end.text, where
            has_reason = f"ZeroDivisionError: {REASON}" in end.text
            assert has_reason == name.startswith(("in a with", "at exit")), where
            # The training may wait in a collective of its own, which does not say why.
            assert len(end.logged) == has_reason and all(REASON in one for one in end.logged), where
        assert ends[0].text == ends[2].text, ends


@on_ranks(2)
def test_leaving_alike_at_unlike_moments_is_no_error() -> None:
    """All leave alike, one long before the other; nothing that is due is taken away."""
    hurry()
    for stop, slow in itertools.product((0, 1, 4), (0, 1)):
        seen: list[int] = []
        for batch in without_end(prefetch=4):
            seen.append(batch.step)
            if dist.get_rank() == slow and batch.step == 0:
                await_word(f"unlike speeds {stop} {slow}")
            if batch.step == stop:
                break
        tell(f"unlike speeds {stop} {slow}")
        assert seen == [*range(stop + 1)]
    assert loader_threads() == []


def behind(has_reason: bool, end: End) -> None:
    """One rank leaves after the second step; another is in the first, and has more ready."""
    loaded: list[Any] = []

    def load() -> Any:
        for group in endless(dist.get_rank()):
            loaded.append(group)
            yield group

    with loader_of(load(), prefetch=8) as batches:
        for batch in batches:
            end.note(batch)
            while len(loaded) < 6:
                time.sleep(0.01)
            while not is_bad() and loader_threads():  # until it knows
                time.sleep(0.01)
            if is_bad() and batch.step == 1 and has_reason:
                raise ZeroDivisionError(REASON)
            if is_bad() and batch.step == 1:
                break


def hangs(end: End) -> None:
    """The loader of another rank does not come: an error leaves after a while all the same."""

    def slow() -> Any:
        for k, group in enumerate(endless(dist.get_rank())):
            if not is_bad() and k == 1:
                await_word("the error is out")
            yield group

    waiting = loader_of(slow(), prefetch=1)
    try:
        for batch in waiting:
            end.note(batch)
            if is_bad():
                raise ZeroDivisionError(REASON)
    finally:
        assert loader_threads() == (["bascule loader"] if is_bad() else [])
        tell("the error is out")
        waiting.close()  # now its thread can end, and does


def all_behind() -> list[End]:
    hurry()
    return [end_of(behind, False), end_of(behind, True), end_of(hangs)]


def test_who_is_behind_gets_what_the_other_got_and_nothing_after_an_error() -> None:
    (plain, failed, waited), (*_, own) = run_ranks(all_behind, 2)
    assert plain.seen == [(0, 0), (1, 0)]
    assert "closed the loader after microbatch 0 of step 1" in plain.text
    assert failed.seen == [(0, 0)] and f"ZeroDivisionError: {REASON}" in failed.text
    assert own.text == REASON and waited.threads == own.threads == []
    assert f"rank {BAD_RANK} of group 'loader' closed the loader after microbatch 0" in waited.text


# --- groups ---------------------------------------------------------------------------------------


def use_one(turn: int) -> None:
    """A loader that is made, used a little and ended, in one of the ways there are."""
    if turn % 4 == 0:
        ids_of(loader_of(lists(3)))
    elif turn % 4 == 1:
        for batch in without_end(timeout_s=60.0 + turn):
            if batch.step == 1:
                break
    elif turn % 4 == 2:
        with without_end() as made:
            next(iter(made))
    else:
        iterator = iter(CostTracker(without_end(cost=PolynomialCost(0.0, 1.0, 0.0))))
        next(iterator)
        del iterator


def made_and_closed(num_first: int, num_after: int) -> tuple[Held, Held]:
    for turn in range(num_first):
        use_one(turn)
    before = Held.now()
    for turn in range(num_after):
        use_one(turn)
    assert loader_threads() == []
    return before, Held.now()


MANY = pytest.param(40, 1000, marks=[pytest.mark.stress, pytest.mark.timeout(900)])


@needs_proc
@pytest.mark.parametrize(("num_first", "num_after"), [(8, 20), MANY])
def test_loaders_leave_nothing_behind(num_first: int, num_after: int) -> None:
    for before, after in run_ranks(made_and_closed, 2, num_first, num_after, timeout_s=600.0):
        check_held(before, after, 8_000)
        assert before.groups == 3  # the world's, one to borrow in, one that is borrowed


def interleaved() -> tuple[int, list[str]]:
    """Loaders begin in one order, and each rank closes them in another; samples never mix."""
    prefetch._LOOK_S = 0.02  # pyright: ignore[reportPrivateUsage]
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    together, apart = random.Random(0), random.Random(rank)
    alive: dict[int, tuple[BalancedLoader, Iterator[Batch]]] = {}
    used: list[str] = []
    most_alive = 0

    def samples_of(turn: int) -> Iterator[list[dict[str, Any]]]:
        for k in range(90):
            yield [sample_of(PER_RANK * rank + 100 * turn + k, 3 + (k * 7 + rank * 9) % 30)]

    def group_of(one: Any, timeout_s: float) -> str:
        group = one._prefetcher._lease.group
        timeout = timeout_of(group.process_group, torch.device("cpu"))
        assert timeout is not None and timeout.total_seconds() == timeout_s
        return group.process_group.group_name

    for turn in range(24):
        made = loader_of(samples_of(turn), prefetch=together.choice((1, 2, 4)), timeout_s=90 + turn)
        alive[turn] = made, iter(made)
        for other, (_, iterator) in alive.items():
            batch = next(iterator)
            expected = {PER_RANK * r + 100 * other + batch.step for r in ranks}
            assert {int(sample["id"]) for sample in batch.data} <= expected
        names = [group_of(one, 90 + number) for number, (one, _) in alive.items()]
        assert len(set(names)) == len(names), names
        most_alive = max(most_alive, len(names))
        used.append(names[-1])
        del made
        ended = together.sample(sorted(alive), together.randint(0, len(alive)))
        for other in apart.sample(ended, len(ended)):
            one, iterator = alive.pop(other)
            if apart.random() < 0.5:
                one.close()
            del one, iterator
    for one, _ in alive.values():
        one.close()
    assert loader_threads() == []
    return most_alive, used


def test_ranks_that_close_in_unlike_orders_borrow_alike() -> None:
    of_rank = run_ranks(interleaved, 3)
    assert all(one == of_rank[0] for one in of_rank)
    most_alive, used = of_rank[0]
    assert 2 <= len(set(used)) <= most_alive + 1 < len(used)
