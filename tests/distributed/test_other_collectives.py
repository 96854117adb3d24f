"""Ranks that wait outside of bascule, as in a collective of DDP, are ended, too."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bascule.comm.groups import OtherCalls, other_calls
from bascule.comm.guard import notes, watch
from bascule.comm.guard.watch import PATIENCE_S
from bascule.data import BalancedLoader, LoaderOptions
from bascule.parallel import SequenceParallel, Step
from bascule.training import train_step
from tests.helpers.cases import COST
from tests.helpers.loader_checks import await_word, tell
from tests.helpers.ranks import run_ranks, run_to_the_end

WIDTH = 4

Block = Callable[[nn.Module], None]


class OwnError(Exception):
    """Of the user's code."""


def by_ddp(model: nn.Module) -> None:
    DistributedDataParallel(model)(torch.ones(3, WIDTH)).sum().backward()


def by_fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(3, WIDTH)).sum().backward()


def by_all_reduce(model: nn.Module) -> None:
    dist.all_reduce(model(torch.ones(3, WIDTH)).detach())


def used_step() -> Step:
    parallel = SequenceParallel(None, f"g1n{dist.get_world_size()}", COST, timeout_s=60)
    step = parallel.plan([3, 4])
    step.route(x=torch.ones(7, WIDTH))
    return step


def within_a_step(wait: Block, fails: bool) -> None:
    with used_step():
        if fails:
            raise OwnError("the loss of this rank")
        wait(nn.Linear(WIDTH, WIDTH))


def within_a_training_step(wait: Block, fails: bool) -> None:
    used_step()

    def loss_of(model: nn.Module) -> Tensor:
        if fails:
            raise OwnError("the loss of this rank")
        wait(nn.Linear(WIDTH, WIDTH))
        return model(torch.ones(3, WIDTH)).sum()

    train_step(nn.Linear(WIDTH, 1), [loss_of])


def within_a_loader(wait: Block, fails: bool) -> None:
    samples = [{"input_ids": torch.arange(3 + k)} for k in range(60)]
    with BalancedLoader([[one] for one in samples], cost=COST) as loader:
        for number, _ in enumerate(loader):
            if fails and number == 1:
                raise OwnError("the loss of this rank")
            wait(nn.Linear(WIDTH, WIDTH))


def by_another_call(wait: Block, fails: bool) -> None:
    """Its own call failed, without any `with`; it goes on elsewhere."""
    step = used_step()
    if fails:
        with suppress(ValueError):
            step.route(x=torch.ones(2, WIDTH))
        raise OwnError("7 rows")
    wait(nn.Linear(WIDTH, WIDTH))


def outcome(block: Callable[[Block, bool], None], wait: Block) -> tuple[str, list[str]]:
    fails = dist.get_rank() == 1
    try:
        block(wait, fails)
    except OwnError:
        for rank in (0, 2):
            await_word(f"heard by {rank}")  # alive, so that no closed connection tells
        return "", []
    except RuntimeError as error:
        tell(f"heard by {dist.get_rank()}")
        return str(error), getattr(error, "__notes__", [])
    raise AssertionError("nothing was raised")


BLOCKS = {
    within_a_step: "OwnError: the loss of this rank",
    within_a_training_step: "OwnError: the loss of this rank",
    within_a_loader: "OwnError: the loss of this rank",
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_ranks_in_a_collective_hear_of_one_that_failed(block: Callable[..., None]) -> None:
    of_rank = run_ranks(outcome, 3, block, by_all_reduce)
    for text, told in (of_rank[0], of_rank[2]):
        assert "Timed out waiting" not in text, text
        assert any("rank 1" in note and BLOCKS[block] in note for note in told), (text, told)


@pytest.mark.parametrize("wait", [by_ddp, by_fsdp], ids=lambda wait: wait.__name__)
def test_ranks_in_a_wrapper_hear_of_one_that_failed(wait: Block) -> None:
    of_rank = run_ranks(outcome, 3, within_a_training_step, wait)
    for text, told in (of_rank[0], of_rank[2]):
        assert "Timed out waiting" not in text, text
        assert any("OwnError: the loss of this rank" in note for note in told), (text, told)


def first_call_is_wrong(wait: Block, fails: bool) -> None:
    """All ranks would have to agree on it, and the others do not come."""
    step = SequenceParallel(None, "g1n3", COST, timeout_s=60).plan([3, 4])
    with step:
        if fails:
            try:
                step.route(x=torch.ones(2, WIDTH))
            except ValueError as error:
                raise OwnError(str(error)) from error
        wait(nn.Linear(WIDTH, WIDTH))


def test_ranks_hear_of_bad_input_that_was_to_be_agreed_on() -> None:
    of_rank = run_ranks(outcome, 3, first_call_is_wrong, by_all_reduce)
    for text, told in (of_rank[0], of_rank[2]):
        assert "Timed out waiting" not in text, text
        assert any("this rank's part of the plan has 7 rows" in note for note in told), told


def test_a_failed_call_of_a_rank_ends_them_too() -> None:
    """Outside of any block of bascule's nobody can add why; it is logged."""
    of_rank = run_ranks(outcome, 3, by_another_call, by_all_reduce)
    for text, _ in (of_rank[0], of_rank[2]):
        assert "Timed out waiting" not in text, text


def fail_alike_and_go_on() -> float:
    """At unlike moments, each after as many collectives."""
    model = DistributedDataParallel(nn.Linear(WIDTH, 1))
    step = used_step()
    time.sleep(0 if dist.get_rank() == 1 else 2 * PATIENCE_S + 1)
    with suppress(OwnError), step:
        raise OwnError
    model(torch.ones(3, WIDTH)).sum().backward()
    return step.mean(torch.tensor([float(dist.get_rank())])).item()


def test_ranks_that_fail_alike_go_on() -> None:
    assert run_ranks(fail_alike_and_go_on, 3) == [1.0] * 3


def comes_late() -> float:
    """The one that failed makes the others' collectives after all, each before they look twice."""
    step = used_step()
    if dist.get_rank() == 1:
        with suppress(OwnError), step:
            raise OwnError
    total = torch.ones(1)
    for _ in range(8):
        if dist.get_rank() == 1:
            time.sleep(0.3 * PATIENCE_S)
        dist.all_reduce(total)
    time.sleep(2 * PATIENCE_S + 1)  # they look again, at one that has come as far as they
    return step.mean(total).item()


def test_who_goes_on_with_collectives_of_other_code_is_waited_for() -> None:
    assert run_ranks(comes_late, 3) == [3.0**8] * 3


def dies_in_a_step() -> tuple[str, list[str]]:
    with_note: tuple[str, list[str]] = "", []
    try:
        with used_step():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        with_note = str(error), error.__notes__
    return with_note


def test_who_died_is_named_where_the_others_waited_in_a_collective() -> None:
    first, _, last = run_to_the_end(dies_in_a_step, 3)
    for text, told in (first.value, last.value):
        assert "no report from ranks [1]" in told[0], (text, told)


def fail_alike_beside_a_loader() -> int:
    """Which is ahead of the slower rank, and waits for its loader meanwhile."""
    step, num_batches = used_step(), 0
    options = LoaderOptions(timeout_s=60, min_gain=0.0, bytes_per_s=1e12, collate_fn=list)
    sample = {"input_ids": torch.arange(5)}
    with BalancedLoader([[sample]] * 8, cost=COST, options=options) as loader:
        for number, _ in enumerate(loader):
            num_batches += 1
            if number == 1:
                is_slow = dist.get_rank() == 0
                time.sleep(PATIENCE_S if is_slow else 0)
                with suppress(RuntimeError), step:
                    raise RuntimeError("of all ranks")
                time.sleep(3 * PATIENCE_S if is_slow else 0)
    return num_batches


def test_an_error_that_all_ranks_meet_ends_no_loader() -> None:
    assert run_ranks(fail_alike_beside_a_loader, 3) == [8] * 3


def goes_on_while_it_is_told() -> bool:
    """The watch says how far a rank came just as that rank's next call ends."""
    step, counted = used_step(), other_calls

    def count_slowly() -> list[OtherCalls]:
        time.sleep(2 * PATIENCE_S)
        return counted()

    with suppress(OwnError), step:
        raise OwnError
    with mock.patch.object(watch, "other_calls", count_slowly):
        time.sleep(2 * PATIENCE_S)  # the watch is counting
        step.mean(torch.ones(1))
        time.sleep(2 * PATIENCE_S)
    return notes.read_failure(dist.get_rank()) is None


def test_who_went_on_is_not_said_to_have_failed_again() -> None:
    assert run_ranks(goes_on_while_it_is_told, 2) == [True, True]
