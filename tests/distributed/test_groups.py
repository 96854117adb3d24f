"""Process groups are made whatever groups the ranks have besides."""

import time

import torch
import torch.distributed as dist

from bascule.comm.guard.calls import Call
from bascule.comm.making import new_group
from bascule.comm.transfers import all_reduce
from bascule.parallel import SequenceParallel
from tests.distributed.cases import COST
from tests.distributed.harness import raised_by, run_ranks


def beside_groups_of_some_ranks(topologies: list[str]) -> None:
    """As those of other parallelism: after them, ranks have unlike numbers of groups."""
    dist.new_group([0, 1])
    if dist.get_rank() == 2:
        for _ in range(2):
            dist.new_group([2], use_local_synchronization=True)
    for topology in topologies:
        parallel = SequenceParallel(None, topology, COST, timeout_s=15)
        rows = torch.arange(4.0 + dist.get_rank())[:, None, None].expand(-1, 6, 2)
        step = parallel.plan([len(rows)])
        moved = step.route(x=rows)["x"]
        step.attend(moved, moved, moved)
        assert torch.equal(step.restore(moved), rows)


def test_ranks_with_unlike_numbers_of_groups() -> None:
    run_ranks(beside_groups_of_some_ranks, 3, ["g1n1+g2n1", "g3n1", "g1r3n1", "g2n1+g1n1"])


def made_again(rounds: int) -> None:
    for _ in range(rounds):
        group = new_group([1, 0], "pair", 15.0)
        assert group.ranks == (0, 1)
        total = all_reduce(group, Call("all_reduce"), torch.ones(3))
        assert torch.equal(total, torch.full((3,), 2.0))
        dist.destroy_process_group(group.process_group)


def test_a_group_that_was_destroyed_is_made_again() -> None:
    run_ranks(made_again, 2, 3)


def after_unlike_calls() -> None:
    """All calls ended; in a new group each rank in turn comes late."""
    rank = dist.get_rank()
    pair = new_group([0, 1], "first", 60.0)
    raised_by(lambda: all_reduce(pair, Call(f"call of rank {rank}"), torch.ones(3)))
    pair = new_group([0, 1], "second", 60.0)
    for late in (0, 1):
        if rank == late:
            time.sleep(4.0)
        total = all_reduce(pair, Call("all_reduce"), torch.ones(3))
        assert torch.equal(total, torch.full((3,), 2.0))


def test_slow_ranks_that_failed_before_are_waited_for_in_a_new_group() -> None:
    run_ranks(after_unlike_calls, 2)
