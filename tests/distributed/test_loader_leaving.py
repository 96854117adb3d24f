"""A rank that leaves an iteration is heard by the others at once; nobody waits for a timeout.

Loaders wait ten minutes for other ranks, and a world of the harness ends long before that.
"""

import atexit
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bascule.data import loader, prefetch
from bascule.data.loader import BalancedLoader, LoaderOptions
from tests.helpers.loader_cases import COST, FAST, endless, loader_threads, loader_with
from tests.helpers.loader_checks import await_word, tell
from tests.helpers.ranks import run_fresh_ranks, run_ranks, run_to_the_end

BAD_RANK = 1
BAD_STEP = 3
SAID = "ZeroDivisionError: in the training step"

Seen = list[tuple[int, int]]
Case = tuple[Seen, str, list[str]]
"""Microbatches that were handed out, the error with its notes, and threads that are left."""


def loader_of(**settings: Any) -> BalancedLoader:
    return loader_with(
        endless(dist.get_rank()),
        cost=COST,
        min_gain=0.0,
        bytes_per_s=FAST,
        collate_fn=list,
        **settings,
    )


def hurry() -> None:
    """Threads that have nothing to do look around more often."""
    prefetch._LOOK_S = 0.05  # pyright: ignore[reportPrivateUsage]
    loader.PATIENCE_S = 2.0


def outcome(run: Callable[[str, Seen], None], name: str) -> Case:
    seen: Seen = []
    try:
        run(name, seen)
    except (RuntimeError, ZeroDivisionError) as error:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    else:
        said = ["no error"]
    return seen, "\n".join(said), loader_threads()


def train(name: str, seen: Seen, batch: Any) -> None:
    """One rank fails in a step; the others wait for it there until it is out of its loop."""
    seen.append((batch.step, batch.microbatch))
    if (batch.step, batch.microbatch) == (BAD_STEP, 0):
        if dist.get_rank() == BAD_RANK:
            raise ZeroDivisionError("in the training step")
        await_word(name)


def bare(name: str, seen: Seen) -> None:
    try:
        for batch in loader_of():
            train(name, seen, batch)
    finally:
        tell(name)


def in_a_with(name: str, seen: Seen) -> None:
    try:
        with loader_of() as batches:
            for batch in batches:
                train(name, seen, batch)
    finally:
        tell(name)


def by_other_iterators(name: str, seen: Seen) -> None:
    """As progress bars and trackers do: the iteration is inside others."""
    try:
        for _, batch in enumerate(one for one in loader_of()):
            train(name, seen, batch)
    finally:
        tell(name)


def within_a_step(name: str, seen: Seen) -> None:
    try:
        with loader_of(accumulate=3) as batches:
            for batch in batches:
                train(name, seen, batch)
    finally:
        tell(name)


def caught(name: str, seen: Seen) -> None:
    """The error is dealt with in the function that trains, which goes on to something else."""
    try:
        for batch in loader_of():
            train(name, seen, batch)
    except ZeroDivisionError:
        tell(name)
        for rank in range(dist.get_world_size()):
            if rank != BAD_RANK:
                await_word(f"{name}: rank {rank} is out")
        raise
    finally:
        tell(f"{name}: rank {dist.get_rank()} is out")


def kept_alive(name: str, seen: Seen) -> None:
    """The iterator outlives the loop; the others hear when it is closed."""
    kept = loader_of()
    iterator = iter(kept)
    try:
        for batch in iterator:
            train(name, seen, batch)
    finally:
        kept.close()
        tell(name)


CASES: list[Callable[[str, Seen], None]] = [
    bare,
    in_a_with,
    by_other_iterators,
    within_a_step,
    caught,
    kept_alive,
]


def all_cases() -> list[Case]:
    hurry()
    return [outcome(run, f"case {k}") for k, run in enumerate(CASES)]


def test_an_error_of_one_rank_ends_all_at_once() -> None:
    of_rank = run_ranks(all_cases, 3)
    for k, told in enumerate(zip(*of_rank, strict=True)):
        for rank, (seen, said, threads) in enumerate(told):
            where = CASES[k].__name__, rank, said
            # What was ready may be handed out until this rank has heard, and no more is made.
            most = BAD_STEP + (0 if rank == BAD_RANK else 2)
            assert BAD_STEP <= seen[-1][0] <= most and threads == [], where
            if rank == BAD_RANK:
                assert said == SAID, where
            else:
                assert said.startswith("CommError: step "), where
                assert f"rank {BAD_RANK} of group 'loader'" in said, where
        told_reason = {SAID in told[rank][1] for rank in (0, 2)}
        assert told_reason == {CASES[k] in (in_a_with, within_a_step)}, CASES[k].__name__
        assert len({told[rank][1] for rank in (0, 2)}) == 1, told


def mean_or_error(seen: Seen) -> None:
    """Gradients are averaged in each step."""
    with loader_of() as batches:
        for batch in batches:
            seen.append((batch.step, batch.microbatch))
            if batch.step == BAD_STEP and dist.get_rank() == BAD_RANK:
                raise ZeroDivisionError("in the training step")
            dist.all_reduce(torch.ones(1))


def collective() -> None:
    mean_or_error([])


def test_who_waits_in_a_collective_of_the_model_learns_why_it_failed() -> None:
    outcomes = run_to_the_end(collective, 3)
    for rank, one in enumerate(outcomes):
        assert one.error is not None
        if rank == BAD_RANK:
            assert one.error.rstrip().endswith(SAID), one.error
        else:  # its collective ends with the process that failed; the loader says why
            assert "Timed out" not in one.error, one.error
            assert f"rank {BAD_RANK} of group 'loader' left the iteration with {SAID}" in one.error


def errors_logged() -> list[str]:
    hurry()
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bascule").addHandler(handler)
    outcome(in_a_with, "logged")
    return said


def test_who_failed_logs_nothing_of_itself_and_the_others_that_it_did() -> None:
    for rank, said in enumerate(run_ranks(errors_logged, 3)):
        assert len(said) == (0 if rank == BAD_RANK else 1), (rank, said)
        assert all(f"rank {BAD_RANK} of group 'loader'" in x and SAID in x for x in said), said


def at_exit() -> str:
    """The iterator is alive when the interpreter ends, as that of a Trainer is."""
    hurry()
    iterator = iter(loader_of())
    for batch in iterator:
        if batch.step == BAD_STEP:
            break
    if dist.get_rank() == BAD_RANK:
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
    for said in run_fresh_ranks(at_exit, 3):
        assert SAID in said


def unlike_speeds() -> list[list[int]]:
    """All leave alike, one long before the other; nothing that is due is taken away."""
    hurry()
    runs: list[list[int]] = []
    for stop in (0, 1, 4):
        for slow in (0, 1):
            seen: list[int] = []
            for batch in loader_of(prefetch=4):
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


def await_end_of_thread() -> None:
    """Until this rank has heard that another left."""
    deadline = time.monotonic() + 60.0
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)


def behind(has_reason: bool) -> Case:
    """One rank leaves after the second step; another is in the first, and has more ready."""
    hurry()
    loaded: list[Any] = []

    def load() -> Any:
        for group in endless(dist.get_rank()):
            loaded.append(group)
            yield group

    def run(_: str, seen: Seen) -> None:
        settings: dict[str, Any] = {"cost": COST, "bytes_per_s": FAST, "collate_fn": list}
        with loader_with(load(), prefetch=8, **settings) as batches:
            for batch in batches:
                seen.append((batch.step, batch.microbatch))
                while len(loaded) < 6:
                    time.sleep(0.01)
                if dist.get_rank() != BAD_RANK:
                    await_end_of_thread()
                elif batch.step == 1 and has_reason:
                    raise ZeroDivisionError("in the training step")
                elif batch.step == 1:
                    break

    return outcome(run, "behind")


def both_behind() -> list[Case]:
    return [behind(False), behind(True)]


def test_who_has_heard_is_handed_what_the_other_was_and_nothing_after_an_error() -> None:
    plain, failed = run_ranks(both_behind, 2)[0]
    assert plain[0] == [(0, 0), (1, 0)]
    assert "closed the loader after microbatch 0 of step 1" in plain[1]
    assert failed[0] == [(0, 0)] and SAID in failed[1]


def stays_behind() -> tuple[float, str]:
    """The loader of another rank does not come: its error leaves after a while all the same."""
    hurry()
    rank = dist.get_rank()

    def slow() -> Any:
        for k, group in enumerate(endless(rank)):
            if rank == 0 and k == 1:
                await_word("the error is out")
            yield group

    waiting = BalancedLoader(
        slow(),
        cost=COST,
        options=LoaderOptions(bytes_per_s=FAST, collate_fn=list, prefetch=1, min_gain=0.0),
    )
    start = time.monotonic()
    try:
        for batch in waiting:
            if rank == BAD_RANK and batch.step == 0:
                start = time.monotonic()
                raise ZeroDivisionError("in the training step")
    except (RuntimeError, ZeroDivisionError) as error:
        said = str(error)
    else:
        said = "no error"
    seconds = time.monotonic() - start
    assert loader_threads() == (["bascule loader"] if rank == BAD_RANK else [])
    tell("the error is out")
    waiting.close()  # now its thread can end, and does
    assert loader_threads() == []
    return seconds, said


def test_an_error_does_not_wait_for_a_loader_that_hangs() -> None:
    (_, heard), (seconds, own) = run_ranks(stays_behind, 2)
    assert own == "in the training step" and seconds < 60.0
    assert f"rank {BAD_RANK} of group 'loader' closed the loader after microbatch 0" in heard
