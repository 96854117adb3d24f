"""Ranks that fail, leave, die or misuse a loader: one sentence on all ranks, and no thread stays.

Loaders wait ten minutes for other ranks, unless a case says otherwise; a world ends long before.
"""

import atexit
import itertools
import logging
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from bascule.comm.groups import timeout_of
from bascule.data import loader, prefetch
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.steps import Batch, Redistributor
from bascule.errors import CommError
from bascule.plan.costs import PolynomialCost, TransformerCost
from bascule.plan.limits import Limits
from tests.helpers.held import Held, check_held, needs_proc
from tests.helpers.loader_cases import (
    COST,
    FAST,
    PER_RANK,
    allow_workers,
    endless,
    heard_by,
    loader_of,
    loader_threads,
    sample_of,
)
from tests.helpers.loader_checks import await_word, tell
from tests.helpers.ranks import run_ranks, run_to_the_end

BAD_RANK = 1
Heard = tuple[list[str], str]
Seen = list[tuple[int, int]]


def is_bad() -> bool:
    return dist.get_rank() == BAD_RANK


def lists(num: int = 5) -> list[list[dict[str, Any]]]:
    first = PER_RANK * dist.get_rank()
    return [[sample_of(first + k, 3 + k + first % 7)] for k in range(num)]


def ids_of(batches: Any) -> list[int]:
    return [int(sample["id"]) for batch in batches for sample in batch.data]


# --- what fails on one rank -----------------------------------------------------------------------

BAD_STEP = 2


class Data(Dataset[Any]):
    """24 samples of a rank, of which one cannot be read, or cannot travel."""

    def __init__(self, unreadable: int | None = None, odd: int | None = None) -> None:
        self.rank, self.unreadable, self.odd = dist.get_rank(), unreadable, odd

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place == self.unreadable:
            raise KeyError(f"no sample {place}\nin two lines")
        odd = {"odd": {object()}} if place == self.odd else {}
        sample = sample_of(PER_RANK * self.rank + place, 1 + place % 5 * (1 + self.rank))
        return {**sample, **odd}


def raising(error: BaseException) -> Any:
    raise error


def failing(kind: str, seen: Seen) -> None:
    """An epoch of steps of two microbatches of two samples; something is wrong in the third."""
    first = 4 * BAD_STEP  # sample that step begins with
    bad = first + 3 if is_bad() else None
    settings: dict[str, Any] = {"accumulate": 2}
    data = Data(bad if kind.startswith("worker") else None, bad if kind == "no type" else None)

    def spoilt(value: Callable[[], Any]) -> Callable[[Any], Any]:
        bad_id = PER_RANK * BAD_RANK + first + 3
        return lambda one: value() if int(one["id"]) == bad_id else len(one["input_ids"])

    if kind == "length":
        settings["length_fn"] = spoilt(lambda: -1)
    if kind == "weight":
        settings["weight_fn"] = spoilt(lambda: 0.5)
    if kind in ERRORS:
        settings["length_fn"] = spoilt(lambda: raising(ERRORS[kind]))
    if kind == "collate_fn":
        settings["collate_fn"] = lambda samples: (
            sys.exit("cannot collate")
            if is_bad() and any(int(s["id"]) % PER_RANK >= first for s in samples)
            else samples
        )
    if kind == "limits":
        settings |= {"limits": Limits(tokens=20), "length_fn": spoilt(lambda: 21)}
    num_workers = 2 if kind == "worker 2" else 0
    inner: DataLoader[Any] = DataLoader(data, 2, num_workers=num_workers, collate_fn=list)
    with loader_of(inner, **settings) as made:
        for batch in made:
            seen.append((batch.step, batch.microbatch))


ERRORS: dict[str, BaseException] = {
    "IndexError": IndexError("no length"),
    "SystemExit": SystemExit("of the user"),
    "KeyboardInterrupt": KeyboardInterrupt("of the user"),
    "StopIteration": StopIteration("of the user"),
}
PLACE = "microbatch 1, sample 1"
WORDS: dict[str, tuple[str, ...]] = {
    "worker 0": ("microbatch 1", "KeyError", "no sample 11"),
    "worker 2": ("microbatch 1", "KeyError", "no sample 11"),
    "length": (PLACE, "length_fn gave -1"),
    "weight": (PLACE, "weight_fn gave 0.5"),
    "no type": (PLACE, "sample['odd'] is a set"),
    "collate_fn": ("making batches", "collate_fn", "SystemExit", "cannot collate"),
    **{name: (PLACE, f"{name}: {error}") for name, error in ERRORS.items()},
    "limits": ("microbatch 1", "21"),
}
INPUT_ERRORS = {"length", "weight", "no type"}


def hear_all() -> list[tuple[Heard, Seen]]:
    allow_workers()
    seen: list[Seen] = [[] for _ in WORDS]
    return [(heard_by(failing, kind, one), one) for kind, one in zip(WORDS, seen, strict=True)]


def test_what_fails_on_one_rank_is_the_same_error_on_all() -> None:
    for kind, *told in zip(WORDS, *run_ranks(hear_all, 3), strict=True):
        (classes, text), _ = told[0]
        assert all(one[0] == told[0][0] for one in told), (kind, told)
        assert all(word in text for word in WORDS[kind]), (kind, text)
        if kind == "limits":  # no rank alone is wrong
            assert text.startswith(f"step {BAD_STEP}, epoch 0: ") and "PlanError" in classes
        else:
            assert text.startswith(f"step {BAD_STEP}, epoch 0, "), (kind, text)
            assert f"rank {BAD_RANK} of group 'loader'" in text, (kind, text)
            assert "CommError" in classes and ("ConfigError" in classes) == (kind in INPUT_ERRORS)
        for _, seen in told:  # whatever was made before is still handed out
            assert seen == [(s, m) for s in range(BAD_STEP) for m in range(2)], (kind, seen)


class Odd:
    """A loader of which one method fails on one rank."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def do(self, name: str) -> None:
        if name == self.wrong and is_bad():
            raise ValueError(f"no {name}")

    def __len__(self) -> int:
        self.do("len")
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.do("iter")
        return iter(lists())

    def state_dict(self) -> dict[str, Any]:
        self.do("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.do("load")

    def set_epoch(self, epoch: int) -> None:
        self.do("epoch")


def resumed(change: Callable[[dict[str, Any]], Any], samples: Any = None) -> list[int]:
    """From the state after two steps, changed."""
    made = loader_of(lists() if samples is None else samples)
    state = made.state_dict()
    for batch in made:
        state = made.state_dict()
        if batch.step == 1:
            break
    made.load_state_dict(change(state))
    return ids_of(made)


def wrong_cost(value: Callable[[Any], Any], num_right: int, anywhere: bool) -> Any:
    calls = itertools.count()

    def cost(lens: Any) -> Any:
        is_wrong = next(calls) >= num_right and (anywhere or is_bad())
        return value(lens) if is_wrong else np.asarray(lens, dtype=float)

    return cost


def two_at_once() -> None:
    made = loader_of(lists())
    first, second = iter(made), iter(made)
    assert next(first).step == next(second).step == 0
    assert [batch.step for batch in second] == [1, 2, 3, 4]
    assert made.state_dict()["epoch"] == 1
    next(first)


def closed_within() -> None:
    made = loader_of(lists())
    for batch in made:
        if batch.step == 2:
            made.close()
            assert made.state_dict()["step"] == 3


def loaded_within() -> None:
    made = loader_of(lists())
    first = iter(made)
    next(first)
    try:
        made.load_state_dict(made.state_dict())
    finally:
        assert [batch.step for batch in first] == [1, 2, 3, 4]  # it was not hurt


def unlike_loaders() -> None:
    loaders = [loader_of(endless(0)), loader_of(endless(1))]
    next(iter(loaders[dist.get_rank()]))


def unlike_epochs() -> None:
    made = loader_of(lists())
    made.set_epoch(3 * is_bad())
    list(made)


def tokens(sample: Any) -> int:
    return len(sample["input_ids"])


def more_tokens(sample: Any) -> int:
    return tokens(sample) + 1


UNLIKE: list[tuple[str, tuple[Any, Any], str]] = [
    ("cost", (COST, TransformerCost(65)), "d_model=65"),
    ("accumulate", (1, 2), "ranks [1]: 2"),
    ("ends", ("finish", "drop_last"), "ranks [0]: finish"),
    ("limits", (None, Limits(tokens=5)), "tokens=5"),
    ("bytes_per_s", (10.0, FAST), "10.0"),
    ("length_fn", (tokens, more_tokens), "more_tokens"),
    ("timeout_s", (60.0, 61.0), "61.0"),
]
USES: list[tuple[Callable[[], object], str]] = [
    *(
        (
            lambda name=name, values=values: loader_of([], **{name: values[dist.get_rank()]}),
            f"disagree on {name}: ranks [0]: ",
        )
        for name, values, _ in UNLIKE
    ),
    (
        lambda: ids_of(loader_of(() if is_bad() else [2 * one for one in lists()], **NARROW)),
        "would receive",
    ),
    (lambda: ids_of(loader_of(Odd("len"))), "no len"),
    (lambda: ids_of(loader_of(Odd("iter"))), "ValueError: no iter"),
    (lambda: ids_of(loader_of(Odd("save"))), "ValueError: no save"),
    (lambda: ids_of(loader_of(Odd("epoch"))), "ValueError: no epoch"),
    (lambda: resumed(lambda state: state, Odd("load")), "ValueError: no load"),
    (lambda: resumed(lambda state: {**state, "counts": (90, 90)}), "and there are 5"),
    (lambda: resumed(lambda state: {**state, "counts": (1, 1, 1)}), "3 loaders stopped"),
    (
        lambda: resumed(lambda state: {**state, "counts": (2, 1)} if is_bad() else state),
        "disagree on step",
    ),
    (unlike_epochs, "disagree on step"),
    (unlike_loaders, "disagree on loader: ranks [0]: number "),
    (lambda: ids_of(loader_of(5)), "'int' object is not iterable"),
    (lambda: ids_of(loader_of([[None]] * 3)), 'a NoneType without "input_ids"'),
    (lambda: loader_of([], accumulate=0 if is_bad() else 1), "BalancedLoader(accumulate=0)"),
    *(
        (
            lambda value=value, num=num, anywhere=anywhere: ids_of(
                loader_of(lists(), cost=wrong_cost(value, num, anywhere))
            ),
            word,
        )
        for word, value in (("nan", lambda lens: lens * np.nan), ("ZeroDivision", lambda n: 1 / 0))
        for num in (0, 3)
        for anywhere in (True, False)
    ),
    (lambda: loader_of(lists()).set_cost(5), "cost model is 5"),  # pyright: ignore
    (lambda: loader_of(lists()).set_epoch(-1), "epoch is -1"),
    (two_at_once, "this iteration was ended by close(), or by another iteration"),
    (closed_within, "this iteration was ended by close(), or by another iteration"),
    (loaded_within, "close the loader first"),
]


NARROW: dict[str, Any] = {"max_bytes_in_flight": 1, "ends": "finish"}


def all_used() -> list[Heard]:
    heard = [heard_by(use) for use, _ in USES]
    first = PER_RANK * dist.get_rank()
    assert ids_of(loader_of(lists())) == list(range(first, first + 5))  # nothing is broken
    return heard


def test_wrong_uses_are_refused_in_one_sentence_on_all_ranks() -> None:
    for (_, words), one, other in zip(USES, *run_ranks(all_used, 2), strict=True):
        assert words in one[1] and words in other[1], (words, one, other)
        for name, _, value in UNLIKE:
            assert value in one[1] or f"disagree on {name}:" not in words, one
        if "disagree" not in words:  # begins with the step of the rank that says it
            assert one == other


class Thing:
    """What a function of the user holds when it fails."""


def error_that_is_kept() -> int:
    held: list[weakref.ref[Thing]] = []

    def failing_with(samples: Any) -> Any:
        thing = Thing()
        held.append(weakref.ref(thing))
        raise KeyError(len(samples))

    kept: list[Exception] = []
    for functions in ({"length_fn": failing_with}, {"length_fn": len, "collate_fn": failing_with}):
        try:
            list(loader_of([[(1, 2)]], **functions))
        except CommError as error:
            kept.append(error)
    assert len(kept) == len(held) == 2
    return sum(one() is not None for one in held)


def test_an_error_that_is_kept_keeps_nothing_of_where_it_was_raised() -> None:
    assert run_ranks(error_that_is_kept, 1) == [0]


# --- ranks that are gone, or do not come ----------------------------------------------------------


def never_ready() -> Heard:
    """A loader that takes longer than the others may wait."""
    rank, stuck = dist.get_rank(), threading.Event()

    def load() -> Iterator[list[dict[str, Any]]]:
        yield from itertools.islice(endless(rank), 2)
        if is_bad():
            stuck.wait(4.0)
        yield from endless(rank)

    return heard_by(lambda: list(loader_of(load(), timeout_s=1.5)))


def test_a_loader_that_hangs_ends_the_others_after_the_timeout() -> None:
    one, other = run_to_the_end(never_ready, 2)
    classes, text = one.value
    assert "CommError" in classes and "step 2: all_gather (epoch 0, loading)" in text
    assert "CommError" in other.value[0]


def wrong_options() -> Heard:
    return heard_by(lambda: loader_of([], min_gain=2.0 if is_bad() else 0.0))


def test_who_is_refused_before_it_makes_a_loader_ends_the_others() -> None:
    one, other = run_to_the_end(wrong_options, 2)
    assert "ConfigError" in other.value[0] and "min_gain=2.0" in other.value[1]
    assert "CommError" in one.value[0] and "ConfigError" in one.value[0]
    assert "rank 1 failed in LoaderOptions: LoaderOptions(min_gain=2.0)" in one.value[1]


def groups_after_an_unknown_error() -> tuple[list[str], str, list[str]]:
    """What all ranks hear of one that comes within a step, and the group of it and of the next."""
    names: list[str] = []
    step = Redistributor.step

    def recorded(self: Redistributor, *args: Any) -> Any:
        names.append(self.ranks.group.process_group.group_name)
        if len(names) == 1:
            raise RuntimeError("nobody thought of it")
        return step(self, *args)

    with mock.patch.object(Redistributor, "step", recorded):
        heard = heard_by(lambda: next(iter(loader_of(lists()))))
        with loader_of(lists()) as made:
            next(iter(made))
    return *heard, names[:2]


def test_a_group_of_a_thread_that_ended_anywhere_is_not_lent_again() -> None:
    for _, text, (first, second) in run_ranks(groups_after_an_unknown_error, 2):
        assert text == "nobody thought of it"
        assert first != second


def after_a_failure() -> list[int]:
    """A rank that did not come in time ends the groups; loaders made later have others."""
    made = loader_of(endless(dist.get_rank()), timeout_s=0.5)
    if dist.get_rank() == 0:
        classes, text = heard_by(lambda: next(iter(made)))
        assert "CommError" in classes and "beginning an iteration" in text
    else:
        threading.Event().wait(1.0)
    while True:
        try:
            return ids_of(loader_of(lists()))
        except RuntimeError:  # it still refers to the groups that the other ended
            continue


def test_loaders_can_be_made_after_a_failure() -> None:
    of_rank = run_ranks(after_a_failure, 2)
    assert sorted(of_rank[0] + of_rank[1]) == [*range(5), *range(PER_RANK, PER_RANK + 5)]


# --- ranks that leave -----------------------------------------------------------------------------

SAID = "ZeroDivisionError: in the training step"
LEAVES_AT = 3
Case = tuple[Seen, str, list[str], list[str]]
"""Microbatches that were handed out, the error and its notes, threads left, errors logged."""


def hurry() -> None:
    """Threads that have nothing to do look around more often."""
    prefetch._LOOK_S = 0.05  # pyright: ignore[reportPrivateUsage]
    loader.PATIENCE_S = 2.0


def outcome(run: Callable[[str, Seen], None], name: str) -> Case:
    seen, logged = list[tuple[int, int]](), list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("bascule").addHandler(handler)
    said = ["no error"]
    try:
        run(name, seen)
    except (RuntimeError, ZeroDivisionError) as error:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    logging.getLogger("bascule").removeHandler(handler)
    return seen, "\n".join(said), loader_threads(), logged


def without_end(**settings: Any) -> BalancedLoader:
    return loader_of(endless(dist.get_rank()), **settings)


def train(name: str, seen: Seen, batches: Any) -> None:
    """One rank fails in a step; the others wait for it there until it is out of its loop."""
    for batch in batches:
        seen.append((batch.step, batch.microbatch))
        if (batch.step, batch.microbatch) == (LEAVES_AT, 0):
            if is_bad():
                raise ZeroDivisionError("in the training step")
            await_word(name)


BATCHES: dict[str, Callable[[ExitStack], Any]] = {
    "bare": lambda _: without_end(),
    "in a with": lambda stack: stack.enter_context(without_end()),
    "in a with, within a step": lambda stack: stack.enter_context(without_end(accumulate=3)),
    "inside other iterators": lambda _: (one for one in without_end()),  # as of progress bars
    "closed, and kept": lambda stack: iter(stack.enter_context(closing(without_end()))),
}


def leaving(name: str, seen: Seen) -> None:
    try:
        with ExitStack() as stack:
            train(name, seen, BATCHES[name](stack))
    finally:
        tell(name)


def caught(name: str, seen: Seen) -> None:
    """The error is dealt with by a function that goes on to something else."""
    try:
        train(name, seen, without_end())
    except ZeroDivisionError:
        tell(name)
        for rank in {0, 1, 2} - {BAD_RANK}:
            await_word(f"{name}: rank {rank} is out")
        raise
    finally:
        tell(f"{name}: rank {dist.get_rank()} is out")


def all_cases() -> list[Case]:
    hurry()
    return [*(outcome(leaving, name) for name in BATCHES), outcome(caught, "caught")]


def test_an_error_of_one_rank_ends_all_at_once() -> None:
    for name, *told in zip([*BATCHES, "caught"], *run_ranks(all_cases, 3), strict=True):
        for rank, (seen, said, threads, logged) in enumerate(told):
            where = name, rank, said, logged
            # What was ready may be handed out until this rank has heard, and no more is made.
            most = LEAVES_AT + (0 if rank == BAD_RANK else 2)
            assert LEAVES_AT <= seen[-1][0] <= most and threads == [], where
            if rank == BAD_RANK:
                assert said == SAID and logged == [], where
                continue
            assert said.startswith("CommError: step "), where
            assert f"rank {BAD_RANK} of group 'loader'" in said, where
            assert (SAID in said) == name.startswith("in a with"), where
            # The training may wait in a collective of its own, which does not say why.
            assert len(logged) == (SAID in said) and all(SAID in one for one in logged), where
        assert told[0][1] == told[2][1], told


def mean_or_error() -> None:
    """Gradients are averaged in each step."""
    with without_end() as batches:
        for batch in batches:
            if batch.step == LEAVES_AT and is_bad():
                raise ZeroDivisionError("in the training step")
            dist.all_reduce(torch.ones(1))


def test_who_waits_in_a_collective_of_the_model_learns_why_it_failed() -> None:
    for rank, one in enumerate(run_to_the_end(mean_or_error, 3)):
        assert one.error is not None
        if rank == BAD_RANK:
            assert one.error.rstrip().endswith(SAID), one.error
        else:  # its collective ends with the process that failed; the loader says why
            assert "Timed out" not in one.error, one.error
            assert f"rank {BAD_RANK} of group 'loader' left the iteration with {SAID}" in one.error


def at_exit() -> str:
    """The iterator is alive when the interpreter ends, as that of a Trainer is."""
    hurry()
    iterator = iter(without_end())
    for batch in iterator:
        if batch.step == LEAVES_AT:
            break
    if is_bad():
        sys.last_value = ZeroDivisionError("in the training step")
        atexit._run_exitfuncs()
        assert loader_threads() == []
        tell("the end")
        return SAID
    try:
        for _ in iterator:
            await_word("the end")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_who_ends_says_so() -> None:
    for said in run_ranks(at_exit, 3):
        assert SAID in said


def unlike_speeds() -> list[list[int]]:
    """All leave alike, one long before the other; nothing that is due is taken away."""
    hurry()
    runs: list[list[int]] = []
    for stop, slow in itertools.product((0, 1, 4), (0, 1)):
        seen: list[int] = []
        for batch in without_end(prefetch=4):
            seen.append(batch.step)
            if dist.get_rank() == slow and batch.step == 0:
                await_word(f"unlike speeds {stop} {slow}")
            if batch.step == stop:
                break
        tell(f"unlike speeds {stop} {slow}")
        runs.append(seen)
    assert loader_threads() == []
    return runs


def test_leaving_alike_at_unlike_moments_is_no_error() -> None:
    for runs in run_ranks(unlike_speeds, 2):
        assert runs == [list(range(stop + 1)) for stop in (0, 1, 4) for _ in range(2)]


def behind(has_reason: bool) -> Case:
    """One rank leaves after the second step; another is in the first, and has more ready."""
    hurry()
    loaded: list[Any] = []

    def load() -> Any:
        for group in endless(dist.get_rank()):
            loaded.append(group)
            yield group

    def run(_: str, seen: Seen) -> None:
        with loader_of(load(), prefetch=8) as batches:
            for batch in batches:
                seen.append((batch.step, batch.microbatch))
                while len(loaded) < 6:
                    time.sleep(0.01)
                while not is_bad() and loader_threads():  # until it has heard
                    time.sleep(0.01)
                if is_bad() and batch.step == 1 and has_reason:
                    raise ZeroDivisionError("in the training step")
                if is_bad() and batch.step == 1:
                    break

    return outcome(run, "behind")


def both_behind() -> list[Case]:
    return [behind(False), behind(True)]


def test_who_has_heard_is_handed_what_the_other_was_and_nothing_after_an_error() -> None:
    plain, failed = run_ranks(both_behind, 2)[0]
    assert plain[0] == [(0, 0), (1, 0)]
    assert "closed the loader after microbatch 0 of step 1" in plain[1]
    assert failed[0] == [(0, 0)] and SAID in failed[1]


def stays_behind() -> str:
    """The loader of another rank does not come: its error leaves after a while all the same."""
    hurry()

    def slow() -> Any:
        for k, group in enumerate(endless(dist.get_rank())):
            if not is_bad() and k == 1:
                await_word("the error is out")
            yield group

    waiting, said = loader_of(slow(), prefetch=1), "no error"
    try:
        for _ in waiting:
            if is_bad():
                raise ZeroDivisionError("in the training step")
    except (RuntimeError, ZeroDivisionError) as error:
        said = str(error)
    assert loader_threads() == (["bascule loader"] if is_bad() else [])
    tell("the error is out")
    waiting.close()  # now its thread can end, and does
    assert loader_threads() == []
    return said


def test_an_error_does_not_wait_for_a_loader_that_hangs() -> None:
    heard, own = run_ranks(stays_behind, 2)
    assert own == "in the training step"
    assert f"rank {BAD_RANK} of group 'loader' closed the loader after microbatch 0" in heard


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


@needs_proc
def test_loaders_leave_nothing_behind() -> None:
    for before, after in run_ranks(made_and_closed, 2, 8, 20):
        check_held(before, after, 8_000)
        assert before.groups == 3  # the world's, one to borrow in, one that is borrowed


@needs_proc
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_thousand_loaders_leave_nothing_behind() -> None:
    for before, after in run_ranks(made_and_closed, 2, 40, 1000, timeout_s=600.0):
        check_held(before, after, 8_000)


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
        timeout = timeout_of(group, torch.device("cpu"))
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
