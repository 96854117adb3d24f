"""The balanced loader delivers every sample once, on one rank, bit for bit, and keeps the mean."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from bascule.comm import items
from bascule.data.steps import Ends
from bascule.machine.costs import PolynomialCost
from bascule.plan.limits import Limits
from tests.helpers.loader_cases import (
    COST,
    FAST,
    PER_RANK,
    Record,
    Schedule,
    allow_workers,
    check_restore,
    check_schedules,
    heard_by,
    loader_of,
    loader_with,
    note,
    same,
    sample_of,
)
from tests.helpers.ranks import on_ranks, run_ranks

EDGES = {
    "one rank has everything": Schedule((((5, 9, 1, 2), (30, 2)), (), ()), accumulate=2),
    "two ranks only compute": Schedule((((5, 9, 1, 2), (30, 2), (4, 4, 4)), None, None)),
    "no sample at all": Schedule(((), None, ())),
    "one giant, ranks meet once a step": Schedule(
        (((32_768,), (7,)), ((5,), (6, 6)), ((3,), (8,))), accumulate=2, sync="step"
    ),
    "samples without tokens": Schedule((((0, 0, 0),), ((0,),), ((),)), ends="pad_empty"),
    "longer than int32 squares": Schedule((((65_536, 3, 46_341),), ((65_536,),), ((1, 2),))),
    "microbatches of unlike numbers": Schedule(
        (((1, 2, 3), (4,), (5, 6, 7, 8)), ((9,),), ((1,), (), (2, 3))),
        ends="pad_empty",
        accumulate=2,
    ),
    "ends before the first step": Schedule(
        (((1,), (2,), (3,)), ((1,),), ((4,), (5,))), ends="drop_last", accumulate=2
    ),
    "one rank loads, and cannot do all": Schedule(
        (None, ((20, 21, 22, 23, 24, 25),) * 5, None), accumulate=2, limits=Limits(tokens=60)
    ),
}
for ends in get_args(Ends):
    uneven = tuple((5, 9) for _ in range(7)), ((1, 2, 3),) * 4, ((8,), (2,), (3,))
    EDGES[f"uneven, {ends}"] = Schedule(uneven, ends, accumulate=2)
    EDGES[f"a step of nothing, {ends}"] = Schedule((((5,), (), (6, 7), (8,)),) * 3, ends)


def test_awkward_schedules() -> None:
    check_schedules(list(enumerate(EDGES.values())), 3)


def peers() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    refused = heard_by(loader_with, [], cost=COST, mesh_or_group=mesh, axis="pp")
    result: dict[str, Any] = {"refused": refused}
    for name, this, index in (("dp first", mesh, rank // 2), ("dp last", swapped, rank % 2)):
        num_loaded = 0

        def load(index: int = index) -> Iterator[list[dict[str, Any]]]:
            nonlocal num_loaded
            for step in range(4 + 2 * index):
                ids = [PER_RANK * index + 10 * step + k for k in range(1 + 3 * index)]
                num_loaded += len(ids)
                yield [sample_of(i, 20 + i % 7) for i in ids]

        loader = loader_of(load(), mesh_or_group=this, axis="dp", ends="finish")
        records = []
        for batch in loader:
            records.append(note(batch))
            for i, sample in zip(records[-1].ids, batch.data or [], strict=True):
                assert same(sample, sample_of(i, 20 + i % 7))
            first = PER_RANK * index + 10 * batch.step
            last = first + (1 + 3 * index if batch.step < 4 + 2 * index else 0)
            check_restore(batch, [(i, 0) for i in range(first, last)])
        result[name] = records, num_loaded
    return result


def test_peers_on_another_axis_of_the_mesh_get_the_same_batches() -> None:
    of_rank = run_ranks(peers, 4)
    for name, pairs, leaders in (
        ("dp first", ((0, 1), (2, 3)), (0, 2)),
        ("dp last", ((0, 2), (1, 3)), (0, 1)),
    ):
        results = [result[name] for result in of_rank]
        for one, other in pairs:
            assert results[one][0] == results[other][0]
            assert [record.ids for record in results[one][0]] != []
        # Each sample once in each column of peers; only the leaders loaded.
        ids = [i for rank in leaders for record in results[rank][0] for i in record.ids]
        expected = [10 * s for s in range(4)]
        expected += [PER_RANK + 10 * s + k for s in range(6) for k in range(4)]
        assert sorted(ids) == expected
        assert [loaded > 0 for _, loaded in results] == [rank in leaders for rank in range(4)]
        assert any(record.reason == "balanced" for record in results[0][0])
    classes, text = of_rank[0]["refused"]
    assert "ConfigError" in classes and "('dp', 'tp')" in text


def with_workers() -> list[list[Record]]:
    allow_workers()
    rank = dist.get_rank()
    ids = range(PER_RANK * rank, PER_RANK * rank + 13 + 4 * rank)
    data: Any = [sample_of(i, 1 + i * 7919 % 60) for i in ids]
    runs = []
    for num_workers in (0, 2):
        torch.manual_seed(rank)
        inner: DataLoader[Any] = DataLoader(
            data, 3, shuffle=True, num_workers=num_workers, collate_fn=list, drop_last=rank == 0
        )
        loader = loader_of(inner, accumulate=2, ends="finish", collate_fn=None)
        assert len(inner) == (4, 6)[rank] and len(loader) == 6
        torch.manual_seed(rank)
        runs.append([note(batch) for batch in loader])
    assert runs[0] == runs[1] and sum(len(record.ids) for record in runs[0])
    return runs


def test_a_data_loader_without_and_with_workers_gives_the_same() -> None:
    of_rank = run_ranks(with_workers, 2)
    ids = sorted(i for runs in of_rank for record in runs[0] for i in record.ids)
    # Rank 0 drops the last microbatch, which is not full, by itself.
    assert len(ids) == len(set(ids)) == 12 + 17
    assert [i for i in ids if i >= PER_RANK] == list(range(PER_RANK, PER_RANK + 17))


def collated() -> list[Any]:
    """A DataLoader's own collate_fn runs after the exchange; samples are tuples and arrays."""
    rank = dist.get_rank()
    data = [
        (np.full(4, 10 * rank + k, np.int16), [k, "a"], (torch.tensor(1.0 + k), "é"))
        for k in range(6)
    ]
    lens = {k: 1 + 40 * (k % 2) * (1 - rank) for k in range(6)}
    inner: DataLoader[Any] = DataLoader(data, batch_size=2)  # pyright: ignore[reportArgumentType]
    loader = loader_of(inner, length_fn=lambda sample: lens[sample[1][0]], collate_fn=None)
    seen = []
    for batch in loader:
        array, (number, letter), (value, accent) = batch.data
        assert array.dtype == torch.int16 and array.shape == (batch.num_samples, 4)
        assert list(letter) == ["a"] * batch.num_samples
        assert list(accent) == ["é"] * batch.num_samples
        assert torch.equal(value, number + 1.0)
        seen += array[:, 0].tolist()
    return seen


def test_tuples_lists_and_arrays_are_collated_after_they_moved() -> None:
    of_rank = run_ranks(collated, 2)
    assert sorted(of_rank[0] + of_rank[1]) == [*range(6), *range(10, 16)]
    assert of_rank[0] != list(range(6))


@on_ranks(2)
def test_restore_is_differentiable_and_checks_its_rows() -> None:
    """What restore brings back is differentiable: gradients go to where a sample was computed."""
    rank = dist.get_rank()
    groups = [[(PER_RANK * rank + k, n) for k, n in enumerate([30, 40, 2, 9][: 4 - 2 * rank])]]
    for batch in loader_of([[sample_of(*one) for one in group] for group in groups]):
        assert batch.verdict.applied
        ids = torch.tensor([float(s["id"]) for s in batch.data], dtype=torch.float64)
        values = (ids[:, None] + torch.tensor([0.25, 0.5])).requires_grad_()
        back = batch.restore(values)
        assert back[:, 0].tolist() == [i + 0.25 for i, _ in groups[0]]
        (back * back).sum().backward()
        assert values.grad is not None and torch.equal(values.grad, 2 * values.detach())
        whole = batch.restore(ids.long())
        assert whole.dtype == torch.int64 and whole.tolist() == [i for i, _ in groups[0]]
        # A whole row of no columns, too.
        assert batch.restore(torch.zeros(len(ids), 0)).shape == (len(groups[0]), 0)
        classes, text = heard_by(batch.restore, torch.zeros(len(ids) + 1))
        assert "ConfigError" in classes and f"each of the {len(ids)} samples" in text
        assert "ConfigError" in heard_by(batch.restore, ids.tolist())[0]


def weighed() -> list[tuple[str, dict[str, Any], list[int]]]:
    """What a step of 100 seconds on one rank and 5 on the other is worth, by how dear bytes are."""
    rank, results = dist.get_rank(), list[tuple[str, dict[str, Any], list[int]]]()
    samples = [[sample_of(PER_RANK * rank + k, n) for k, n in enumerate(((10, 90), (5,))[rank])]]
    for bytes_per_s in (FAST, 1.0, None):  # none: measured; a kilobyte takes less than a second
        cost = PolynomialCost(0.0, 1.0, 0.0)
        loader = loader_of(samples, cost=cost, bytes_per_s=bytes_per_s)
        (batch,) = loader
        results.append((batch.verdict.reason, loader.metrics(), note(batch).ids))
    return results


def test_samples_move_where_it_pays_which_all_ranks_count() -> None:
    for reason, cases in zip(
        ("balanced", "exchange", "balanced"), zip(*run_ranks(weighed, 2), strict=True), strict=True
    ):
        moved, sums = reason == "balanced", np.zeros(2)
        for rank, (told, metrics, ids) in enumerate(cases):
            assert told == reason and metrics["steps"] == 1 and metrics["applied"] == moved
            assert metrics["skipped"] == ({} if moved else {reason: 1})
            assert metrics["predicted_before"] == 100.0
            assert metrics["predicted_after"] == (90.0 if moved else 100.0)
            assert moved or all(i // PER_RANK == rank for i in ids)
            sums += metrics["sent_bytes"], metrics["received_bytes"]
        assert sums[0] == sums[1] and (sums[0] > 0) == moved


@on_ranks(3)
def test_the_slowest_rank_says_how_fast_an_exchange_is() -> None:
    """On a clock that ticks once a look: a thousandth of a second, on one rank a whole one."""
    tick, ticks = (0.001, 1.0, 0.001)[dist.get_rank()], itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * tick)
    with mock.patch.object(items, "time", clock):
        speed = items.measure_exchange(loader_of(None).ranks.group)
    assert speed.byte_s == 2.0**-20  # a second for a mebibyte


SECONDS = PolynomialCost(0.0, 1e-4, 0.0)


def new_costs(alike: bool) -> Any:
    """`set_cost` in the middle of an epoch."""
    rank = dist.get_rank()
    lens = [40, 30, 30, 20] if rank == 0 else [10, 9]
    lists = [
        [sample_of(PER_RANK * rank + 10 * step + k, n) for k, n in enumerate(lens)]
        for step in range(12)
    ]
    loader = loader_of(lists, cost=PolynomialCost(0.0, 0.0, 1.0), ends="finish", prefetch=1)
    seen = []
    for batch in loader:
        seen.append(([len(sample["input_ids"]) for sample in batch.data], batch.verdict))
        if batch.step == 2:
            time.sleep(0.05 * rank)
            is_other = rank == 1 and not alike
            loader.set_cost(PolynomialCost(0.0, 0.0, 1.0) if is_other else SECONDS)
    assert loader.cost == SECONDS
    return seen


def test_a_new_cost_takes_effect_on_all_ranks_at_the_same_step() -> None:
    one, other = run_ranks(new_costs, 2, True)
    assert [verdict for _, verdict in one] == [verdict for _, verdict in other]
    # At first three samples each; then the tokens are even, or nearly so.
    assert sorted([len(one[0][0]), len(other[0][0])]) == [3, 3]
    tokens = sorted([sum(one[-1][0]), sum(other[-1][0])])
    assert tokens[1] <= 70 and len(one) == 12


def test_unlike_new_costs_are_refused_on_all_ranks_alike() -> None:
    one, other = run_ranks(heard_by, 2, new_costs, False, timeout_s=20.0)
    assert one == other and "cost" in one[1] and "disagree" in one[1]
