"""A rank that dies or hangs in a step ends the others: within the timeout, saying where and who."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.comm.groups import RankGroup
from bascule.comm.guard import notes
from bascule.comm.guard.failures import ROLL_CALL_S, roll_call
from bascule.comm.guard.notes import Failure
from bascule.parallel import SequenceParallel, Step
from tests.helpers.cases import COST, config_of, make_model, random_batch, rank_loss
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end

TIMEOUT_S = 8.0
SHORT_TIMEOUT_S = 3.0
VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def timed(fn: Any, *args: Any, **kwargs: Any) -> tuple[list[str], str, float]:
    start = time.monotonic()
    classes, text = raised_by(fn, *args, **kwargs)
    return classes, text, time.monotonic() - start


def one_step(
    parallel: SequenceParallel, place: str, on_victim: Any
) -> tuple[list[str], str, float]:
    """A step in which the victim does something else in place of one collective."""

    def reach(what: str) -> bool:
        if what == place and dist.get_rank() == VICTIM:
            on_victim()
        return what == place

    if reach("plan"):
        return timed(parallel.plan, [4, 2])
    step = parallel.plan([4, 2])
    x = torch.randn(6, 4, requires_grad=True)
    if reach("samples"):
        return timed(step.gather_samples, torch.zeros(2, 3))
    if reach("route"):
        return timed(step.route, x=x)
    moved = step.route(x=x)["x"]
    heads = moved[:, None].expand(-1, 6, -1)
    if reach("attention"):
        return timed(step.attend, heads, heads, heads)
    out = step.attend(heads, heads, heads)
    if reach("restore"):
        return timed(step.restore, out[:, 0])
    home = step.restore(out[:, 0])
    if reach("mean"):
        return timed(step.mean, home)
    loss = step.mean(home)
    assert reach("backward")
    return timed(loss.backward)


def hang() -> None:
    time.sleep(SHORT_TIMEOUT_S + ROLL_CALL_S + 1.0)
    die()


def second_step(
    topology: str, place: str, on_victim: Any, timeout_s: float
) -> tuple[list[str], str, float]:
    parallel = SequenceParallel(None, topology, COST, timeout_s=timeout_s)
    warm_up(parallel.plan([4, 2]))
    return one_step(parallel, place, on_victim)


def warm_up(step: Step) -> None:
    """Settle the forms of all exchanges, so that the next step meets no agreement."""
    step.gather_samples(torch.zeros(2, 3))
    moved = step.route(x=torch.randn(6, 4, requires_grad=True))["x"]
    heads = moved[:, None].expand(-1, 6, -1)
    step.mean(step.restore(step.attend(heads, heads, heads)[:, 0]))


NAMES = {
    "plan": "all_gather (plan)",
    "samples": "all_gather (samples)",
    "route": "all_to_all (route)",
    "attention": "all_to_all (tokens to heads)",
    "restore": "all_to_all (route back)",
    "mean": "all_reduce (mean)",
    "backward": "all_to_all (",
}


@pytest.mark.some(3)
@pytest.mark.parametrize("place", NAMES)
def test_a_killed_rank_ends_the_others(place: str) -> None:
    outcomes = run_to_the_end(second_step, 3, "g3n1", place, die, TIMEOUT_S)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        classes, text, seconds = outcomes[rank].value
        assert "CommError" in classes and "ConfigError" not in classes
        assert f"step 2: {NAMES[place]}" in text, text
        assert f"missing: no report from ranks [{VICTIM}]" in text, text
        assert seconds < TIMEOUT_S + ROLL_CALL_S + 2.0


@pytest.mark.some(1)
@pytest.mark.parametrize("place", ["plan", "route"])
def test_a_rank_that_hangs_ends_the_others(place: str) -> None:
    outcomes = run_to_the_end(second_step, 2, "g2n1", place, hang, SHORT_TIMEOUT_S)
    classes, text, seconds = outcomes[0].value
    assert "CommError" in classes and f"step 2: {NAMES[place]}" in text
    assert f"missing: no report from ranks [{VICTIM}]" in text
    assert SHORT_TIMEOUT_S - 1.0 < seconds < SHORT_TIMEOUT_S + ROLL_CALL_S + 10.0


def part_ways() -> tuple[list[str], str, float]:
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=SHORT_TIMEOUT_S)
    warm_up(parallel.plan([4, 2]))
    step = parallel.plan([4, 2])
    if dist.get_rank() == VICTIM:
        return timed(parallel.plan, [4, 2])
    return timed(step.route, x=torch.zeros(6, 4, requires_grad=True))


def test_ranks_in_unlike_collectives_tell_where_the_others_are() -> None:
    outcomes = run_to_the_end(part_ways, 2)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    (_, route, _), (_, plan, _) = (outcome.value for outcome in outcomes)
    assert "step 2: all_to_all (route) failed" in route
    assert "step 3: all_gather (plan) failed" in plan
    assert "rank 1 last failed in step 3: all_gather (plan)" in route, route
    assert "rank 0 last failed in step 2: all_to_all (route)" in plan, plan


def die_while_sending() -> tuple[list[str], str, float]:
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=TIMEOUT_S)
    lens = [20_000] * 4
    x = torch.zeros(sum(lens), 256)
    parallel.plan(lens).route(x=x)
    steps = [parallel.plan([60_000, 20_000] if dist.get_rank() else lens) for _ in range(200)]
    if dist.get_rank() == VICTIM:
        threading.Timer(0.3, die).start()

    def keep_routing() -> None:
        for step in steps:
            step.route(x=x)

    return timed(keep_routing)


def test_a_rank_killed_while_it_sends() -> None:
    outcomes = run_to_the_end(die_while_sending, 2)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    assert outcomes[0].error is None, outcomes[0].error
    classes, text, seconds = outcomes[0].value
    assert "CommError" in classes and "all_to_all (route)" in text
    assert f"missing: no report from ranks [{VICTIM}]" in text
    assert seconds < TIMEOUT_S + ROLL_CALL_S + 5.0


def die_in_training() -> tuple[list[str], str, float]:
    model = make_model(config_of(3, 3))
    parallel = SequenceParallel(None, "g1n1+g2n1", COST, timeout_s=TIMEOUT_S)
    for seed in range(2):
        rank_loss(model, random_batch(3, seed), parallel).backward()
    loss = rank_loss(model, random_batch(3, 2), parallel)
    if dist.get_rank() == VICTIM:
        die()
    return timed(loss.backward)


def test_a_rank_killed_in_the_backward_of_a_model() -> None:
    outcomes = run_to_the_end(die_in_training, 3)
    for rank in (0, 2):
        classes, text, seconds = outcomes[rank].value
        assert "CommError" in classes and text.startswith("step 3: ")
        assert f"missing: no report from ranks [{VICTIM}]" in text
        assert seconds < TIMEOUT_S + ROLL_CALL_S + 2.0


def die_at_construction() -> tuple[list[str], str, float]:
    if dist.get_rank() == VICTIM:
        die()
    return timed(SequenceParallel, None, "g1n1", COST, timeout_s=SHORT_TIMEOUT_S)


def test_a_rank_killed_before_construction() -> None:
    outcomes = run_to_the_end(die_at_construction, 2)
    classes, text, seconds = outcomes[0].value
    assert "CommError" in classes and "new_group" in text and "'plan'" in text
    assert "not all of ranks [0, 1] came within 3 s" in text
    assert f"missing: no report from ranks [{VICTIM}]" in text
    assert seconds < TIMEOUT_S + ROLL_CALL_S + 2.0


def called() -> str:
    """Of two ranks, one of which noticed in a group with a third, and that one with a fourth."""
    notes.write_failure(2, Failure("step 4: third", ranks=(2, 3)))
    notes.write_failure(1, Failure("step 4: elsewhere", ranks=(1, 2)))
    notes.write_failure(0, Failure("step 4: here", ranks=(0, 1)))
    pair = RankGroup(lambda: dist.group.WORLD, 0, (0, 1), (0, 1), "pair")
    return roll_call(pair.ranks, "step 4: here")


def test_who_is_missing_is_asked_among_all_ranks_concerned() -> None:
    (text,) = run_ranks(called, 1)
    assert "missing: no report from ranks [3]" in text
    assert "rank 1 last failed in step 4: elsewhere" in text and "rank 0" not in text
    assert "rank 2 last failed in step 4: third" in text
