"""Loaders that are used one after the other use the same process groups; two at once never do."""

import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from bascule.comm.collectives import all_gather
from bascule.comm.groups import set_timeout, timeout_of
from bascule.comm.new_groups import new_group
from bascule.data import prefetch
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader, Batch
from bascule.data.prefetch import Lease, pool_of
from bascule.plan.costs import PolynomialCost
from tests.helpers.held import Held, check_held, needs_proc
from tests.helpers.loader_cases import (
    COST,
    FAST,
    PER_RANK,
    endless,
    heard_by,
    loader_threads,
    loader_with,
    sample_of,
)
from tests.helpers.ranks import run_ranks


def loader_of(samples: Any, **settings: Any) -> BalancedLoader:
    given: dict[str, Any] = {"cost": COST, "min_gain": 0.0, "bytes_per_s": FAST}
    return loader_with(samples, collate_fn=list, **{**given, **settings})


def use_one(turn: int) -> None:
    """A loader that is made, used a little and ended, in one of the ways there are."""
    rank = dist.get_rank()
    if turn % 4 == 0:
        for _ in loader_of([[sample_of(PER_RANK * rank + k, 3 + k)] for k in range(3)]):
            pass
    elif turn % 4 == 1:
        for batch in loader_of(endless(rank), timeout_s=60.0 + turn):
            if batch.step == 1:
                break
    elif turn % 4 == 2:
        with loader_of(endless(rank)) as loader:
            next(iter(loader))
    else:
        tracker = CostTracker(loader_of(endless(rank), cost=PolynomialCost(0.0, 1.0, 0.0)))
        iterator = iter(tracker)
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


def group_of(loader: BalancedLoader) -> str:
    running = loader._prefetcher  # pyright: ignore[reportPrivateUsage]
    assert running is not None
    return running._lease.group.process_group.group_name  # pyright: ignore[reportPrivateUsage]


def first_id(first: int, turn: int, rank: int) -> int:
    return PER_RANK * rank + 100 * turn + first


def interleaved(seed: int) -> tuple[int, list[str]]:
    """Loaders begin in one order, and each rank closes them in another; samples never mix."""
    prefetch._LOOK_S = 0.02  # pyright: ignore[reportPrivateUsage]
    rank = dist.get_rank()
    together, apart = random.Random(seed), random.Random(100 * seed + rank)
    alive: dict[int, tuple[BalancedLoader, Iterator[Batch]]] = {}
    used: list[str] = []
    most_alive = 0

    def samples_of(turn: int) -> Iterator[list[dict[str, Any]]]:
        for k in range(90):
            yield [sample_of(first_id(k, turn, rank), 3 + (k * 7 + rank * 9) % 30)]

    for turn in range(24):
        loader = loader_of(samples_of(turn), prefetch=together.choice((1, 2, 4)))
        alive[turn] = loader, iter(loader)
        for other, (_, iterator) in alive.items():
            batch = next(iterator)
            for sample in batch.data:
                expected = {first_id(batch.step, other, r) for r in range(dist.get_world_size())}
                assert int(sample["id"]) in expected
        names = [group_of(one) for one, _ in alive.values()]
        assert len(set(names)) == len(names), names
        most_alive = max(most_alive, len(names))
        used.append(names[-1])
        del loader
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


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_close_in_unlike_orders_borrow_alike(seed: int) -> None:
    of_rank = run_ranks(interleaved, 3, seed)
    assert all(one == of_rank[0] for one in of_rank)
    most_alive, used = of_rank[0]
    assert 2 <= len(set(used)) <= most_alive + 1 < len(used)


def borrow_and_return(seed: int) -> list[str]:
    """Ranks give back unlike groups, and may hold some for ever."""
    group = dist.group.WORLD
    assert group is not None
    num_ranks = dist.get_world_size()
    pool = pool_of(range(num_ranks), 30.0)
    own = random.Random(100 * seed + dist.get_rank())
    leases: dict[str, Lease] = {}
    names: list[str] = []
    uses: set[tuple[str, int]] = set()
    for _ in range(30):
        lent_anywhere: list[Any] = [None] * num_ranks
        dist.all_gather_object(lent_anywhere, list(leases), group=group)
        lease = pool.borrow({}, None, 30.0)
        name = lease.group.process_group.group_name
        assert all(name not in lent for lent in lent_anywhere), lent_anywhere
        leases[name] = lease
        names.append(name)
        uses.add((name, lease.use))
        for one in own.sample(sorted(leases), own.randint(0, len(leases))):
            leases.pop(one).give_back()
    assert len(uses) == len(names)
    return names


def test_what_one_rank_still_holds_is_borrowed_by_none() -> None:
    of_rank = run_ranks(borrow_and_return, 3, 0)
    assert all(names == of_rank[0] for names in of_rank)
    assert 2 < len(set(of_rank[0])) < 15  # some are used again


def unlike_loaders() -> tuple[list[str], str]:
    """Ranks that begin with unlike ones of two loaders."""
    rank = dist.get_rank()
    loaders = [loader_of(endless(rank)), loader_of(endless(rank))]
    return heard_by(lambda: next(iter(loaders[rank])))


def test_ranks_that_begin_with_unlike_loaders_are_refused() -> None:
    one, other = run_ranks(unlike_loaders, 2)
    assert one == other
    assert "disagree on loader: ranks [0]: number 1 of those made; ranks [1]: number 2" in one[1]


def after_a_failure() -> list[int]:
    """A rank that did not come in time ends the groups; loaders made later have others."""
    rank = dist.get_rank()
    loader = loader_of(endless(rank), timeout_s=0.5)
    if rank == 0:
        classes, text = heard_by(lambda: next(iter(loader)))
        assert "CommError" in classes and "beginning an iteration" in text
    else:
        threading.Event().wait(1.0)
    seen: list[int] = []
    while not seen:
        try:
            for batch in loader_of([[sample_of(PER_RANK * rank + k, 3)] for k in range(4)]):
                seen += [int(sample["id"]) for sample in batch.data]
        except RuntimeError:  # it still refers to the groups that the other ended
            continue
    return seen


def test_loaders_can_be_made_after_a_failure() -> None:
    of_rank = run_ranks(after_a_failure, 2)
    expected = [PER_RANK * rank + k for rank in range(2) for k in range(4)]
    assert sorted(i for ids in of_rank for i in ids) == expected


def timeouts() -> list[float]:
    """In seconds, of a group as it is lent, and lent again."""
    pool, found, names = pool_of([0, 1], 60.0), list[float](), list[str]()
    for timeout_s in (600.0, 5.0):
        lease = pool.borrow({}, None, timeout_s)
        timeout = timeout_of(lease.group, torch.device("cpu"))
        assert timeout is not None
        found.append(timeout.total_seconds())
        names.append(lease.group.process_group.group_name)
        lease.give_back()
    assert names[0] == names[1]
    return found


def test_a_group_that_is_lent_again_waits_as_long_as_its_new_loader() -> None:
    assert run_ranks(timeouts, 2) == [[600.0, 5.0]] * 2


def another_does_not_come() -> None:
    """To a call of a group that was made to wait 60 s for it, until it is given up."""
    group, store = new_group([0, 1], "pair", 60.0), _get_default_store()
    set_timeout(group, 1.0)
    if dist.get_rank() == 1:
        store.wait(["test/given up"], timedelta(seconds=30))
        return
    heard_by(lambda: all_gather(group, "all_gather", torch.zeros(3)))
    store.set("test/given up", "")


def test_a_group_waits_as_long_as_it_was_set_to() -> None:
    run_ranks(another_does_not_come, 2)
