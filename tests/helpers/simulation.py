"""All ranks of a plan in one process, in numpy: who sends what to whom, and what each holds."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.machine.costs import Cost
from bascule.plan.plan import Plan
from bascule.plan.routes import Route

Rows = npt.NDArray[np.int64]


def exchange(routes: Sequence[Route], rows: Sequence[Rows]) -> list[Rows]:
    """What every rank holds after the exchange; checks that the splits of all ranks agree."""
    pieces: list[list[Rows]] = []
    for rank, (route, own) in enumerate(zip(routes, rows, strict=True)):
        sent = own if route.send_index is None else own[route.send_index]
        assert route.send_splits.sum() == sent.shape[0], f"rank {rank} sends all rows, once"
        pieces.append(np.split(sent, np.cumsum(route.send_splits)[:-1]))
    received: list[Rows] = []
    for rank, route in enumerate(routes):
        parts = [pieces[source][rank] for source in range(len(routes))]
        assert [part.shape[0] for part in parts] == route.recv_splits.tolist(), f"rank {rank}"
        whole = np.concatenate(parts)
        received.append(whole if route.recv_index is None else whole[route.recv_index])
    return received


def tokens_at_source(plan: Plan) -> list[Rows]:
    """(tokens, 2) per rank: global sequence id and position of each token, as loaded."""
    ids = np.repeat(np.arange(plan.seq_lens.size), plan.seq_lens)
    positions = np.concatenate([np.zeros(0, np.int64), *map(np.arange, plan.seq_lens)])
    bounds = np.concatenate([[0], np.cumsum(plan.seq_lens)])
    ends = bounds[np.cumsum(plan.source_counts)]
    return np.split(np.stack([ids, positions], axis=1), ends[:-1])


def assert_sound(plan: Plan, seq_lens: Sequence[Sequence[int]], cost: Cost) -> None:
    """Everything that a plan promises, for every rank."""
    assert plan.source_counts.tolist() == [len(rank) for rank in seq_lens]
    assert plan.seq_lens.tolist() == [length for rank in seq_lens for length in rank]
    assert np.all((plan.bag_of >= 0) & (plan.bag_of < plan.topology.num_bags))
    assert_certificate(plan, cost)
    assert_chunks(plan)
    assert_delivery(plan)


def assert_certificate(plan: Plan, cost: Cost) -> None:
    """Loads are the costs, shared evenly within a bag; the bound is one."""
    costs, sizes = cost(plan.seq_lens), plan.topology.bag_sizes
    for bag, ranks in enumerate(plan.topology.bags):
        expected = costs[plan.bag_of == bag].sum() / sizes[bag]
        np.testing.assert_allclose(plan.loads[list(ranks)], expected, rtol=1e-12)
    np.testing.assert_allclose(plan.loads.sum(), costs.sum(), rtol=1e-12)
    assert plan.makespan == plan.loads.max() >= plan.lower_bound >= 0
    assert plan.lower_bound >= costs.sum() / plan.num_ranks * (1 - 1e-12)
    assert plan.lower_bound >= costs.max(initial=0) / sizes.max() * (1 - 1e-12)
    assert plan.gap >= 0
    assert plan.imbalance >= 1
    assert plan.wir >= 1


def assert_chunks(plan: Plan) -> None:
    """Chunks are contiguous, and as even as whole tokens can be, for a sequence and for a rank."""
    for bag, ranks in enumerate(plan.topology.bags):
        seq_ids = np.flatnonzero(plan.bag_of == bag)
        bag_lens = plan.bag_lens(ranks[0])
        assert bag_lens.shape == (len(ranks), seq_ids.size)
        np.testing.assert_array_equal(bag_lens.sum(axis=0), plan.seq_lens[seq_ids])
        if seq_ids.size:
            assert np.all(np.ptp(bag_lens, axis=0) <= 1)
        assert np.ptp(bag_lens.sum(axis=1)) <= 1
        starts = np.cumsum(bag_lens, axis=0) - bag_lens
        for place, rank in enumerate(ranks):
            local = plan.local(rank)
            np.testing.assert_array_equal(plan.bag_lens(rank), bag_lens)
            np.testing.assert_array_equal(local.seq_ids, seq_ids)
            np.testing.assert_array_equal(local.seq_lens, plan.seq_lens[seq_ids])
            np.testing.assert_array_equal(local.chunk_lens, bag_lens[place])
            np.testing.assert_array_equal(local.chunk_starts, starts[place])
            assert local.cu_seqlens.dtype == np.int32
            np.testing.assert_array_equal(local.cu_seqlens, [0, *np.cumsum(bag_lens[place])])
            assert plan.tokens[rank] == bag_lens[place].sum() == local.positions.size


def assert_delivery(plan: Plan) -> None:
    """Route puts every token where `local` says; its inverse puts it back."""
    source = tokens_at_source(plan)
    routes = [plan.route(rank) for rank in range(plan.num_ranks)]
    arrived = exchange(routes, source)
    for rank, rows in enumerate(arrived):
        local = plan.local(rank)
        np.testing.assert_array_equal(rows[:, 0], local.seq_ids[local.slots])
        np.testing.assert_array_equal(rows[:, 1], local.positions)
    stayed = sum(int(route.send_splits[rank]) for rank, route in enumerate(routes))
    assert plan.moved_tokens == plan.seq_lens.sum() - stayed
    back = exchange([route.inverse() for route in routes], arrived)
    for rank, rows in enumerate(back):
        np.testing.assert_array_equal(rows, source[rank], err_msg=f"rank {rank}")
    there_again = [route.inverse().inverse() for route in routes]
    for rank, rows in enumerate(exchange(there_again, source)):
        np.testing.assert_array_equal(rows, arrived[rank], err_msg=f"rank {rank}")


def squares(seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A cost that is exact in float64: the square of the length."""
    return np.asarray(seq_lens, dtype=np.float64) ** 2


def flat(seq_lens: Sequence[Sequence[int]]) -> Ints:
    """All lengths in source order."""
    return np.array([length for rank in seq_lens for length in rank], dtype=np.int64)
