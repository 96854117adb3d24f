"""Process groups are made whatever groups the ranks have besides."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from bascule.comm.collectives import Transfers, all_reduce
from bascule.comm.failures import LOOK_S, Watch, watch_of_world
from bascule.comm.groups import member_of, new_group, resolve
from bascule.comm.mesh import mesh_of_all
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.ranks import raised_by, run_ranks

PAIRS = ("a", (0, 1)), ("a", (1, 0)), ("b", (1, 0))


def beside_groups_of_some_ranks() -> None:
    """As those of other parallelism: after them, ranks have unlike numbers of groups."""
    dist.new_group([0, 1])
    if dist.get_rank() == 2:
        for _ in range(2):
            dist.new_group([2], use_local_synchronization=True)
    for topology in ("g1n1+g2n1", "g3n1", "g1r3n1", "g2n1+g1n1"):
        parallel = SequenceParallel(None, topology, COST, timeout_s=100)
        rows = torch.arange(4.0 + dist.get_rank())[:, None, None].expand(-1, 6, 2)
        step = parallel.plan([len(rows)])
        moved = step.route(x=rows)["x"]
        step.attend(moved, moved, moved)
        assert torch.equal(step.restore(moved), rows)


def made_again() -> None:
    for _ in range(3):
        group = new_group([1, 0], "pair", 15.0)
        assert group.ranks == (0, 1)
        total = all_reduce(group, "all_reduce", torch.ones(3))
        assert torch.equal(total, torch.full((3,), 2.0))
        dist.destroy_process_group(group.process_group)


def comes_late() -> None:
    if dist.get_rank() == 2:
        time.sleep(4.0 * LOOK_S)
    total = all_reduce(new_group([0, 1, 2], "late", 60.0), "all_reduce", torch.ones(3))
    assert torch.equal(total, torch.full((3,), 3.0))


def mesh_after_one_rank_ended_it() -> None:
    """The other one has not noticed, and learns of it."""
    before = mesh_of_all(ring=1, ulysses=2).whole
    assert before is not None
    all_reduce(before, "all_reduce", torch.ones(3))
    if dist.get_rank() == 0:
        watch_of_world().end_all("a failure")
    else:
        time.sleep(2.0)
    after = mesh_of_all(ring=1, ulysses=2).whole
    assert after is not None and after.key != before.key
    assert float(all_reduce(after, "all_reduce", torch.ones(3)).sum()) == 6.0


def meetings_without_the_other() -> None:
    """A rank that waited in vain is not counted again."""
    store = _get_default_store()
    if dist.get_rank():
        return store.wait(["the other has waited twice"])
    for _ in range(2):
        text = raised_by(new_group, [0, 1], "pair", 1.0)[1]
        assert "not all of ranks [0, 1] came" in text, text
    store.set("the other has waited twice", "")


def part_of_an_ended_group() -> None:
    group = member_of(resolve(None), "all")
    all_reduce(group, "all_reduce", torch.ones(3))
    watch_of_world().end_all("a failure")
    if dist.get_rank() < 2:
        assert group.part([0, 1], "pair").calls.ended == "a failure"


def pairs_of_two_ranks_in_any_order() -> None:
    """Two ranks have several pairs, each with its messages, as two of more ranks have."""
    world, rank = member_of(resolve(None), "world"), dist.get_rank()
    numbers, others = [torch.full((3,), 10.0 * rank + k) for k in range(3)], torch.zeros(3, 3)
    group = world.process_group
    pairs = [member_of(group, name, ranks=ranks) for name, ranks in PAIRS]
    posted = list[Transfers]()
    for k in (0, 1, 2) if rank == 0 else (2, 1, 0):
        other = pairs[k].ranks.index(1 - rank)
        posted.append(Transfers(pairs[k], "pairs", {other: numbers[k]}, {other: others[k]}))
    for one in posted:
        one.wait()
    assert others[:, 0].tolist() == [10.0 * (1 - rank) + k for k in range(3)]


def tags_of_a_group_and_a_part_of_it() -> list[int]:
    """Their messages take the same connections, and the first call of each is the same."""
    group = member_of(resolve(None), "all")
    if dist.get_rank() == 2:
        return []
    found = [group, group.part([0, 1], "pair"), group.part([1, 0], "pair")]
    return [one.calls.begin("all_reduce") for one in found]


def test_messages_of_a_part_have_tags_of_no_other_ranks() -> None:
    first, second, _ = run_ranks(tags_of_a_group_and_a_part_of_it, 3)
    assert first == second and len(set(first)) == 3


def counting_requests() -> None:
    """Rank 1 comes late; how often the store was asked meanwhile, and for how long."""
    num_asked, start = 0, time.monotonic()
    asked = Watch.ask

    def counted(self: Any, request: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return asked(self, request)

    with mock.patch.object(Watch, "ask", counted):
        if dist.get_rank() == 1:
            time.sleep(2.0)
        new_group([0, 1], "late", 60.0)
    assert num_asked < 15 * (1 + time.monotonic() - start)


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (beside_groups_of_some_ranks, 3),
        (made_again, 2),
        (comes_late, 3),
        (mesh_after_one_rank_ended_it, 2),
        (meetings_without_the_other, 2),
        (part_of_an_ended_group, 3),
        (pairs_of_two_ranks_in_any_order, 2),
        (counting_requests, 2),
    ],
)
def test_groups(program: Callable[[], None], size: int) -> None:
    run_ranks(program, size)
