"""One rank raises, is killed, stops or is late, in each public call: what the others make of it.

They end with its reason long before the timeout of the groups, or at the timeout with its name; who
is late is waited for.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bascule.attention.api import AttentionOptions
from bascule.comm.collectives import all_reduce
from bascule.comm.failures import LOOK_S, ask, leave, read, shared
from bascule.comm.groups import RankGroup, member_of, new_group, resolve, set_timeout
from bascule.data import LoaderOptions
from bascule.encoders import BalancedEncoder, EncoderOptions
from bascule.errors import CommError, ConfigError
from bascule.parallel import SequenceParallel
from bascule.train import train_step
from tests.helpers.cases import COST
from tests.helpers.faults import Fault, Striker, cause_of, ended_by, look_often
from tests.helpers.loader_cases import sample_of
from tests.helpers.loader_checks import loader_of
from tests.helpers.ranks import on_ranks, raised_by, run_ranks, run_to_the_end

VICTIM, RANKS = 1, 3
SOON_S = 120.0
"""A limit for who waits on a busy machine; groups would wait for `LONG_S`."""

LONG_S = 400.0
LENS = [[30, 9, 2], [4], [7]]


def step(fault: Fault, striker: Striker) -> None:
    """Three steps of balanced training, with a place in each of its calls."""
    now = 0

    def cost(lens: Any) -> Any:
        striker.at("plan", now)
        return np.asarray(lens, float)

    spec, lens = "g1r3n1" if fault.place == "backward" else "g3n1", LENS[dist.get_rank()]
    parallel = SequenceParallel(None, spec, cost, timeout_s=LONG_S)
    x = torch.randn(sum(lens), 4, requires_grad=True)
    for now in range(1, 4):
        with parallel.plan(lens) as one:
            striker.at("route", now)
            heads = one.route(x=x)["x"][:, None].expand(-1, 6, -1)
            striker.at("attend", now)
            out = one.attend(heads, heads, heads)[:, 0]
            out.register_hook(lambda _, now=now: striker.at("backward", now))
            striker.at("restore", now)
            one.mean(one.restore(out).square()).backward()


def ddp(fault: Fault, striker: Striker) -> None:
    """One rank fails in its own part of a step, the others wait in DDP."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    for now in range(1, 4):
        if (fault.kind, now) == ("stop", fault.step):
            set_timeout(group_of_all(), 4.0)

        def loss_of(model: nn.Module, now: int = now) -> Tensor:
            striker.at("ddp", now)
            return model(torch.ones(3, 4)).sum()

        train_step(model, [loss_of])


def loader(fault: Fault, striker: Striker) -> None:
    def samples() -> Iterator[Any]:
        for number in range(5):
            striker.at("loader", number)
            long = dist.get_rank() == number % RANKS  # so that samples travel in each step
            first = 100 * dist.get_rank() + 3 * number
            yield [sample_of(first + k, 40 if long else 2) for k in range(3)]

    with loader_of(samples(), timeout_s=LONG_S) as batches:
        for _ in batches:
            dist.all_reduce(torch.ones(1))


class Module(nn.Module):
    def __init__(self, striker: Striker) -> None:
        super().__init__()
        self.inner, self.striker, self.calls = nn.Linear(4, 2), striker, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.striker.at("encoder", self.calls)
        return self.inner(x)


def encoder(fault: Fault, striker: Striker) -> None:
    balanced = BalancedEncoder(Module(striker), length_fn=lambda one: one["x"].shape[1], cost=COST)
    for _ in range(4):
        balanced([{"x": torch.ones(1, 3, 4)}])


PROGRAMS: dict[str, Callable[[Fault, Striker], None]] = {
    **dict.fromkeys(("plan", "route", "attend", "backward", "restore"), step),
    "loader": loader,
    "encoder": encoder,
    "ddp": ddp,
}


def struck(fault: Fault, striker: Striker) -> None:
    look_often()
    PROGRAMS[fault.place](fault, striker)


def outcomes_of(fault: Fault, folder: Path) -> list[Any]:
    stopped = (VICTIM,) if fault.kind == "stop" else ()
    return run_to_the_end(ended_by, RANKS, fault, folder, struck, timeout_s=SOON_S, stopped=stopped)


@pytest.mark.some(8)
@pytest.mark.parametrize("kind", ["raise", "kill", "late"])
@pytest.mark.parametrize("place", PROGRAMS)
def test_one_rank_in_a_call(place: str, kind: Any, tmp_path: Path) -> None:
    fault = Fault(kind, place, VICTIM, RANKS)
    outcomes = outcomes_of(fault, tmp_path)
    assert (tmp_path / "struck").exists(), outcomes
    if kind != "late":
        assert (outcomes.pop(VICTIM).value is None) == (kind == "kill")
    reason = f"the fault of rank {VICTIM}" if kind == "raise" else cause_of(fault)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        if kind == "late":
            assert outcome.value.error == ""
        else:
            assert reason in outcome.value.error
        assert outcome.value.threads == ()


def test_who_stops_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    fault = Fault("stop", "ddp", VICTIM, RANKS)
    first, _, last = outcomes_of(fault, tmp_path)
    for outcome in (first, last):
        assert cause_of(fault) in outcome.value.error, outcome


def killed_while_another_is_late(folder: Path) -> None:
    """The first rank notices the death at once, the last one long after the roll was called."""
    group, rank = group_of_all(), dist.get_rank()
    all_reduce(group, "first", torch.ones(1))
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == RANKS - 1:
        deadline = time.monotonic() + SOON_S
        while not (folder / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        all_reduce(group, "second", torch.ones(1))
    except CommError as error:
        assert f"no report from ranks [{VICTIM}] " in str(error), error
        (folder / "ended").touch()
        return
    raise AssertionError(f"rank {rank} of {group.size} did not notice")


def test_a_rank_that_is_late_is_not_taken_for_dead(tmp_path: Path) -> None:
    outcomes = run_to_the_end(
        killed_while_another_is_late, RANKS, tmp_path, timeout_s=SOON_S, collectives_s=LONG_S
    )
    assert [one.error for one in outcomes if one.exit_code is None] == [None] * (RANKS - 1), (
        outcomes
    )


OPTIONS: dict[str, Callable[[], object]] = {
    "AttentionOptions": lambda: AttentionOptions(kernel="none"),
    "EncoderOptions": lambda: EncoderOptions(locality_tolerance=-1.0),
    "LoaderOptions": lambda: LoaderOptions(min_gain=2.0),
}


def refused_alone(name: str) -> str:
    group = group_of_all()
    look_often()
    if group.rank == VICTIM:
        OPTIONS[name]()
    return raised_by(all_reduce, group, "the call that follows", torch.ones(1))[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_one_rank_refuses_end_the_others(name: str) -> None:
    first, alone = run_to_the_end(refused_alone, 2, name)
    assert "ConfigError" in str(alone.error)
    assert f"rank {VICTIM} failed in" in first.value and name in first.value


# --- who goes on ----------------------------------------------------------------------------------


def group_of_all() -> RankGroup:
    return member_of(resolve(None), "all")


def note_of(rank: int) -> str | None:
    return ask(lambda store: read(store, f"failed/{rank}"))


def fails_and_goes_on() -> float:
    """Rank 1 fails, and comes to the next call in time; rank 2 comes late."""
    rank, group = dist.get_rank(), group_of_all()
    all_reduce(group, "first", torch.ones(1))
    if rank == 1:
        leave(ValueError("handled"), "code of the user")
        assert note_of(rank) is not None
    if rank == 2:
        time.sleep(4 * LOOK_S)
    total = float(all_reduce(group, "second", torch.ones(1)))
    assert note_of(rank) is None  # who went on leaves no note
    return total


def test_a_rank_that_failed_and_came_is_not_taken_for_one_that_does_not_come() -> None:
    assert run_ranks(fails_and_goes_on, 3) == [3.0] * 3


def all_fail_alike() -> list[str]:
    """And go on, twice: at last one at once, the other after a while."""
    parallel, texts = SequenceParallel(None, "g2n1", COST, timeout_s=LONG_S), list[str]()
    lens = LENS[dist.get_rank()]
    one = parallel.plan(lens)
    for turn in range(2):
        texts.append(raised_by(one.attend, torch.ones(3), torch.ones(3), torch.ones(3))[1])
        if (dist.get_rank(), turn) == (1, 1):
            time.sleep(4 * LOOK_S)
        one = parallel.plan(lens)
    one.mean(torch.ones(3))
    return texts


def test_ranks_that_fail_alike_wait_for_each_other_and_go_on() -> None:
    for texts in run_ranks(all_fail_alike, 2):
        assert len(texts) == 2 and all(texts)


def recomputed() -> str | None:
    one = SequenceParallel(None, "g1n2", COST, timeout_s=LONG_S).plan([6, 3])
    x = torch.randn(one.local.positions.size, 4, 4, requires_grad=True)
    out = checkpoint(lambda q: one.attend(q, q, q), x, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.square().sum().backward()
    return note_of(dist.get_rank())


def test_a_recomputation_that_ends_early_is_no_failure() -> None:
    assert run_ranks(recomputed, 2) == [None, None]


def left_by_an_error_of_all() -> tuple[list[str], str]:
    """All ranks get the error; one leaves the step by it, the other goes on."""
    look_often()
    one = SequenceParallel(None, "g1n2", COST, timeout_s=LONG_S).plan([4])

    def move() -> None:
        with one:
            try:
                one.route(x=torch.ones(4, 1 + dist.get_rank()))
            except CommError:
                if dist.get_rank():
                    raise
                one.route(x=torch.ones(4))

    return raised_by(move)


def test_a_rank_that_leaves_a_step_by_an_error_of_all() -> None:
    for classes, text in run_ranks(left_by_an_error_of_all, 2):
        assert "CommError" in classes and "disagree" in text, text


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    "no text": (NoTextError(), "NoTextError: its text cannot be had"),
    "no unicode": (ValueError("file \udcff"), "file \udcff"),
    "input": (ConfigError("a bad argument"), "rank 1 failed in a call: a bad argument"),
    "interrupted": (KeyboardInterrupt(), "KeyboardInterrupt"),
}


def error_of_one_rank(name: str) -> tuple[list[str], str]:
    group = new_group([0, 1], "pair", LONG_S)
    look_often()

    def call() -> None:
        with shared("a call"):
            if dist.get_rank() == 1:
                raise ERRORS[name][0]
            all_reduce(group, "all_reduce", torch.ones(1))

    try:
        return raised_by(call)
    except (NoTextError, KeyboardInterrupt) as error:
        return [type(error).__name__], ""


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_every_kind_are_known_to_the_others(name: str) -> None:
    (classes, text), _ = run_ranks(error_of_one_rank, 2, name)
    assert "CommError" in classes and ERRORS[name][1] in text, ascii(text)
    assert ("ConfigError" in classes) == (name == "input")


@on_ranks(2)
def test_what_a_failure_ended_stays_ended_and_new_groups_work() -> None:
    """And new groups can be made, in which slow ranks are waited for."""
    rank = dist.get_rank()
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=LONG_S)
    one = parallel.plan(LENS[rank])
    with pytest.raises((CommError, ArithmeticError)) as error, one:
        if rank == 1:
            raise ArithmeticError("mine")
        one.route(x=torch.ones(sum(LENS[rank])))
    assert error.type is (CommError, ArithmeticError)[rank]
    if rank == 0:
        assert "ended before" in raised_by(parallel.plan, LENS[rank])[1]
    again = new_group([0, 1], "again", LONG_S)
    assert float(all_reduce(again, "all_reduce", torch.ones(1))) == 2.0
    look_s = look_often()
    for late in (0, 1):
        if rank == late:
            time.sleep(6 * look_s)
        assert float(all_reduce(again, "all_reduce", torch.ones(1))) == 2.0
