"""Process groups are made whatever groups the ranks have besides."""

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from bascule.comm.collectives import all_reduce
from bascule.comm.failures import LOOK_S, Watch, watch_of_world
from bascule.comm.groups import member_of, new_group, resolve, timeout_of
from bascule.comm.mesh import AttentionMesh, mesh_of_all
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.ranks import raised_by, run_ranks


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
        total = all_reduce(group, "all_reduce", torch.ones(3))
        assert torch.equal(total, torch.full((3,), 2.0))
        dist.destroy_process_group(group.process_group)


def test_a_group_that_was_destroyed_is_made_again() -> None:
    run_ranks(made_again, 2, 3)


def comes_late() -> None:
    if dist.get_rank() == 2:
        time.sleep(4.0 * LOOK_S)
    total = all_reduce(new_group([0, 1, 2], "late", 60.0), "all_reduce", torch.ones(3))
    assert torch.equal(total, torch.full((3,), 3.0))


def test_a_rank_that_comes_late_to_a_new_group_is_waited_for() -> None:
    run_ranks(comes_late, 3)


def timeouts_of_a_mesh() -> list[float]:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    mesh = AttentionMesh.of(axes, timeout_s=7.0)
    found = [timeout_of(group, torch.device("cpu")) for group in mesh.groups if group is not None]
    return [each.total_seconds() for each in found if each is not None]


def test_the_timeout_of_a_mesh_is_that_of_all_its_groups() -> None:
    assert all(found == [7.0] * 3 for found in run_ranks(timeouts_of_a_mesh, 4))


def mesh_after_one_rank_ended_it() -> float:
    """The other one has not noticed, and learns of it."""
    before = mesh_of_all(1, 2).whole
    assert before is not None
    all_reduce(before, "all_reduce", torch.ones(3))
    if dist.get_rank() == 0:
        watch_of_world().end_all("a failure")
    else:
        time.sleep(2.0)
    after = mesh_of_all(1, 2).whole
    assert after is not None and after.key != before.key
    return float(all_reduce(after, "all_reduce", torch.ones(3)).sum())


def test_a_mesh_that_one_rank_ended_is_made_anew_by_all() -> None:
    assert run_ranks(mesh_after_one_rank_ended_it, 2) == [6.0, 6.0]


def meetings_without_the_other() -> list[str]:
    store = _get_default_store()
    if dist.get_rank():
        store.wait(["the other has waited twice"])
        return []
    texts = [raised_by(new_group, [0, 1], "pair", 1.0)[1] for _ in range(2)]
    store.set("the other has waited twice", "")
    return texts


def test_a_rank_that_waited_in_vain_is_not_counted_again() -> None:
    for text in run_ranks(meetings_without_the_other, 2)[0]:
        assert "not all of ranks [0, 1] came" in text, text


def part_of_an_ended_group() -> str | None:
    group = member_of(resolve(None), "all")
    all_reduce(group, "all_reduce", torch.ones(3))
    watch_of_world().end_all("a failure")
    return group.part([0, 1], "pair").calls.ended if dist.get_rank() < 2 else "a failure"


def test_what_ended_a_group_ended_parts_of_it_that_are_made_later() -> None:
    assert run_ranks(part_of_an_ended_group, 3) == ["a failure"] * 3


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


def counting_requests() -> tuple[int, float]:
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
    return num_asked, time.monotonic() - start


def test_who_waits_for_a_group_asks_the_store_seldom() -> None:
    num_asked, waited_s = run_ranks(counting_requests, 2)[0]
    assert num_asked < 15 * (1 + waited_s), (num_asked, waited_s)
