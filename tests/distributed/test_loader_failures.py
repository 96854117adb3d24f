"""What fails on one rank is the same error on every rank, naming where; and no thread stays."""

import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from bascule.data.loader import BalancedLoader
from bascule.data.steps import Redistributor
from bascule.errors import CommError
from bascule.plan.limits import Limits
from tests.helpers.loader_cases import (
    COST,
    FAST,
    PER_RANK,
    allow_workers,
    endless,
    heard_by,
    loader_threads,
    loader_with,
    sample_of,
)
from tests.helpers.loader_checks import (
    TIMEOUT_S,
    Heard,
    check_deaths,
    loader_of,
)
from tests.helpers.ranks import run_ranks, run_to_the_end

BAD_RANK = 1
BAD_STEP = 2


class Data(Dataset[Any]):
    def __init__(self, rank: int, bad: int | None = None) -> None:
        self.rank, self.bad = rank, bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, Any]:
        if place == self.bad:
            raise KeyError(f"no sample {place}\nin two lines")
        return sample_of(PER_RANK * self.rank + place, 1 + place % 5 * (1 + self.rank))


def consume(loader: BalancedLoader, seen: list[tuple[int, int]]) -> None:
    for batch in loader:
        seen.append((batch.step, batch.microbatch))


def failing(kind: str, seen: list[tuple[int, int]]) -> None:
    """An epoch of steps of two microbatches of two samples; something is wrong in the third."""
    rank = dist.get_rank()
    is_bad = rank == BAD_RANK
    settings: dict[str, Any] = {"collate_fn": list}
    first = 4 * BAD_STEP  # sample that step begins with
    bad_id = PER_RANK * BAD_RANK + first + 3
    data = Data(rank, first + 3 if is_bad and kind.startswith("worker") else None)
    num_workers = 2 if kind == "worker 2" else 0

    def spoil(sample: dict[str, Any], value: Any) -> Any:
        return value if int(sample["id"]) == bad_id else len(sample["input_ids"])

    def raise_on(sample: dict[str, Any]) -> int:
        if int(sample["id"]) == bad_id:
            raise IndexError("no length")
        return len(sample["input_ids"])

    if kind in LENGTHS:
        settings["length_fn"] = lambda sample: spoil(sample, LENGTHS[kind])
    if kind == "length_fn raises":
        settings["length_fn"] = raise_on
    if kind == "weight_fn":
        settings["weight_fn"] = lambda sample: spoil(sample, 0.5)
    if kind == "cannot travel":
        plain = data.__getitem__

        class Odd(Data):
            def __getitem__(self, place: int) -> dict[str, Any]:
                odd = {"odd": {object()}} if is_bad and place == first + 3 else {}
                return {**plain(place), **odd}

        data = Odd(rank)
    if kind == "collate_fn":

        def collate(samples: list[Any]) -> list[Any]:
            if is_bad and any(int(s["id"]) % PER_RANK >= first for s in samples):
                raise ZeroDivisionError("cannot collate")
            return samples

        settings["collate_fn"] = collate
    if kind == "limits":
        settings["limits"] = Limits(tokens=20)
        settings["length_fn"] = lambda sample: spoil(sample, 21)
    if kind == "bytes":
        settings["max_bytes_in_flight"] = 1
    inner: DataLoader[Any] = DataLoader(data, 2, num_workers=num_workers, collate_fn=list)
    with loader_with(
        inner,
        cost=COST,
        accumulate=2,
        min_gain=0.0,
        bytes_per_s=FAST,
        timeout_s=TIMEOUT_S,
        **settings,
    ) as loader:
        consume(loader, seen)


LENGTHS: dict[str, Any] = {
    "length -1": -1,
    "length 1.5": 1.5,
    "length nan": float("nan"),
    "length True": True,
    "length None": None,
    "length 2^41": 2**41,
}
PLACE = "microbatch 1, sample 1"
WORDS: dict[str, tuple[str, ...]] = {
    "worker 0": ("microbatch 1", "KeyError", "no sample 11"),
    "worker 2": ("microbatch 1", "KeyError", "no sample 11"),
    "length_fn raises": (PLACE, "IndexError", "no length"),
    "length -1": (PLACE, "length_fn gave -1"),
    "length 1.5": (PLACE, "length_fn gave 1.5"),
    "length nan": (PLACE, "length_fn gave nan"),
    "length True": (PLACE, "length_fn gave True"),
    "length None": (PLACE, "None"),
    "length 2^41": (PLACE, "2199023255552"),
    "weight_fn": (PLACE, "weight_fn gave 0.5"),
    "cannot travel": (PLACE, "sample['odd'] is a set"),
    "collate_fn": ("making batches", "collate_fn", "ZeroDivisionError", "cannot collate"),
}
INPUT_ERRORS = {*LENGTHS, "weight_fn", "cannot travel"}


def hear_all(kinds: list[str]) -> list[tuple[Heard, list[tuple[int, int]], float]]:
    allow_workers()
    heard = []
    for kind in kinds:
        seen: list[tuple[int, int]] = []
        start = time.monotonic()
        heard.append((heard_by(failing, kind, seen), seen, time.monotonic() - start))
        assert not multiprocessing.active_children()  # workers end with the thread that used them
    return heard


def test_what_fails_on_one_rank_is_the_same_error_on_all() -> None:
    of_rank = run_ranks(hear_all, 3, list(WORDS))
    for kind, heard in zip(WORDS, zip(*of_rank, strict=True), strict=True):
        (classes, text), _, _ = heard[0]
        assert all(one[0] == heard[0][0] for one in heard), (kind, heard)
        assert text.startswith(f"step {BAD_STEP}, epoch 0, "), (kind, text)
        assert f"rank {BAD_RANK} of group 'loader'" in text, (kind, text)
        assert all(word in text for word in WORDS[kind]), (kind, text)
        assert "CommError" in classes
        if kind in INPUT_ERRORS:
            assert "ConfigError" in classes, kind
        for _, seen, seconds in heard:
            # Whatever was made before is still handed out; nobody waits for a timeout.
            assert seen == [(s, m) for s in range(BAD_STEP) for m in range(2)], (kind, seen)
            assert seconds < TIMEOUT_S - 1.0 or kind == "worker 2", kind  # workers end slowly


def test_what_no_plan_can_keep_is_the_same_error_on_all() -> None:
    for kind, words in (
        ("limits", ("microbatch 1", "21")),
        ("bytes", ("max_bytes_in_flight=1", "would receive")),
    ):
        of_rank = run_ranks(hear_all, 2, [kind])
        (classes, text), _, seconds = of_rank[0][0]
        assert all(heard[0][0] == (classes, text) for heard in of_rank), of_rank
        assert "PlanError" in classes and all(word in text for word in words), text
        assert seconds < TIMEOUT_S - 1.0


def test_what_no_plan_can_keep_names_the_step() -> None:
    ((_, text), _, _) = run_ranks(hear_all, 2, ["limits"])[0][0]
    assert f"step {BAD_STEP}" in text, text


def leave() -> tuple[float, Heard | None]:
    """Two epochs left early by all, then one left by one rank only."""
    rank = dist.get_rank()
    for stop in (0, 5):
        start = time.monotonic()
        for batch in loader_of(endless(rank), prefetch=3):
            time.sleep(0.03 * rank)
            if batch.step == stop:
                break
        assert not loader_threads()
        seconds = time.monotonic() - start
        assert seconds < 5.0
    try:
        with loader_of(endless(rank)) as loader:
            for batch in loader:
                if batch.step == 2:
                    raise UnicodeError("the user's own")
    except UnicodeError:
        assert not loader_threads()

    def run() -> None:
        for batch in loader_of(endless(rank)):
            assert batch.step < 50
            if rank == BAD_RANK and batch.step == 2:
                break

    start = time.monotonic()
    if rank == BAD_RANK:
        run()
        assert not loader_threads()
        return time.monotonic() - start, None
    return time.monotonic() - start, heard_by(run)


def test_leaving_early_is_quick_and_heard_by_who_stays() -> None:
    of_rank = run_ranks(leave, 3)
    for rank, (seconds, heard) in enumerate(of_rank):
        assert seconds < 5.0
        if rank != BAD_RANK:
            assert heard is not None
            classes, text = heard
            assert "CommError" in classes and f"rank {BAD_RANK} of group 'loader' closed" in text
            assert heard == of_rank[0][1]


def unlike_states(kind: str) -> Heard:
    """One rank begins elsewhere than the others."""
    rank = dist.get_rank()
    lists = [[sample_of(PER_RANK * rank + k, 3 + k)] for k in range(6)]
    loader = loader_of(lists)
    if kind == "epoch" and rank == BAD_RANK:
        loader.set_epoch(3)
    if kind == "state":
        state = loader.state_dict()
        for batch in loader:
            if batch.step == 1:
                state = loader.state_dict()
        if rank == BAD_RANK:
            loader.load_state_dict(state)
    return heard_by(list, loader)


def unlike_starts() -> list[Heard]:
    return [unlike_states("epoch"), unlike_states("state")]


def test_ranks_that_begin_unlike_are_refused_on_all() -> None:
    of_rank = run_ranks(unlike_starts, 3)
    for one in zip(*of_rank, strict=True):
        # The same sentence; what goes before it is the step of the rank that says it.
        assert len({text[text.index("ranks of group") :] for _, text in one}) == 1, one
    for classes, text in of_rank[0]:
        assert "CommError" in classes and "disagree on step" in text
        assert "ranks [0, 2]: " in text and "ranks [1]: " in text
    assert "epoch=3" in of_rank[0][0][1]


def wrong_uses() -> list[Heard]:
    rank = dist.get_rank()
    loader = loader_of([[sample_of(PER_RANK * rank + k, 3)] for k in range(9)])
    heard = []
    first = iter(loader)
    next(first)
    try:
        loader.load_state_dict(loader.state_dict())
    except ValueError as error:
        heard.append(([type(error).__name__], str(error)))
    assert len(list(first)) == 8  # the iteration under way was not hurt
    heard.append(heard_by(loader.load_state_dict, {**loader.state_dict(), "version": 99}))
    return heard


def test_wrong_uses_are_refused() -> None:
    for load, version in run_ranks(wrong_uses, 2):
        assert load[0] == ["ConfigError"] and "close the loader first" in load[1]
        assert "ConfigError" in version[0] and "version 99" in version[1]


def closed_under_way() -> None:
    """An iteration that was closed and forgotten does not close the next one."""
    rank = dist.get_rank()
    loader = loader_of([[sample_of(PER_RANK * rank + k, 3 + rank)] for k in range(9)])
    stale = iter(loader)
    next(stale)
    loader.close()
    loader.set_epoch(1)
    fresh = iter(loader)
    next(fresh)
    if rank == BAD_RANK:
        del stale
    assert [batch.step for batch in fresh] == list(range(1, 9))


def test_a_forgotten_iteration_does_not_close_the_next() -> None:
    run_ranks(closed_under_way, 2)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("place", "seed", "num_ranks"),
    [("loading", 1, 2), ("between steps", 2, 3), *(("any moment", s, 3) for s in (0, 4, 5))],
)
def test_a_killed_rank_ends_the_others(place: str, seed: int, num_ranks: int) -> None:
    check_deaths(place, seed, num_ranks)


def never_ready() -> Heard:
    """A loader that takes longer than the others may wait."""
    rank = dist.get_rank()
    stuck = threading.Event()

    def load() -> Iterator[list[dict[str, Any]]]:
        yield from (group for group, _ in zip(endless(rank), range(2), strict=False))
        if rank == BAD_RANK:
            stuck.wait(4.0)
        yield from endless(rank)

    wait: Callable[..., Any] = heard_by
    return wait(lambda: list(loader_of(load(), timeout_s=1.5)))


def test_a_loader_that_hangs_ends_the_others_after_the_timeout() -> None:
    outcomes = run_to_the_end(never_ready, 2)
    classes, text = outcomes[0].value
    assert "CommError" in classes and "step 2: all_gather (epoch 0, loading)" in text
    assert "CommError" in outcomes[1].value[0]


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
        heard = heard_by(lambda: next(iter(loader_of(endless(dist.get_rank())))))
        with loader_of(endless(dist.get_rank())) as loader:
            next(iter(loader))
    return *heard, names[:2]


def test_a_group_of_a_thread_that_ended_anywhere_is_not_lent_again() -> None:
    for _, text, (first, second) in run_ranks(groups_after_an_unknown_error, 2):
        assert text == "nobody thought of it"
        assert first != second


class Thing:
    """What a function of the user holds when it fails."""


def error_that_is_kept() -> int:
    held: list[weakref.ref[Thing]] = []

    def length_of(sample: Any) -> int:
        thing = Thing()
        held.append(weakref.ref(thing))
        raise KeyError(sample)

    def collate(samples: list[Any]) -> Any:
        thing = Thing()
        held.append(weakref.ref(thing))
        raise KeyError(len(samples))

    kept: list[Exception] = []
    wrong: list[dict[str, Any]] = [
        {"length_fn": length_of},
        {"length_fn": len, "collate_fn": collate},
    ]
    for functions in wrong:
        loader = loader_with([[(1, 2)]], cost=COST, bytes_per_s=FAST, **functions)
        try:
            list(loader)
        except CommError as error:
            kept.append(error)
    assert len(kept) == len(held) == 2
    return sum(one() is not None for one in held)


def test_an_error_that_is_kept_keeps_nothing_of_where_it_was_raised() -> None:
    assert run_ranks(error_that_is_kept, 1) == [0]
