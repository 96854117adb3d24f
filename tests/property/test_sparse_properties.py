"""What holds for every mask, mesh, layout and method."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bascule.plan.sparse import (
    BlockLayout,
    SparsePlan,
    SparsePlanner,
    block_counts,
    critical_path_imbalance,
    partition_blocks,
    partition_heads,
    sparse_imbalance,
)
from tests.helpers.simulation import exchange
from tests.helpers.sparse_simulation import (
    Bools,
    at_home,
    attend,
    clustered_mask,
    dense_attention,
    labels,
    listed,
    packed,
    random_mask,
    toeplitz_mask,
    tokens_of,
)

few = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
many = settings(few, max_examples=120)

MESHES = st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (2, 3), (3, 2), (1, 5)])
METHODS = st.sampled_from(["stripe", "minimal_move", "paper"])


@st.composite
def masks(draw: st.DrawFn) -> Bools:
    """Small masks of any shape: more heads than ranks or fewer, non-square, empty rows."""
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 13), st.integers(1, 11)))
    seed = draw(st.integers(0, 2**16))
    kind = draw(st.sampled_from(["random", "sparse", "full", "empty", "toeplitz", "clustered"]))
    densities = {"random": 0.4, "sparse": 0.05, "full": 1.0, "empty": 0.0}
    if kind in densities:
        return random_mask(shape, densities[kind], seed)
    return (toeplitz_mask if kind == "toeplitz" else clustered_mask)(shape, seed)


@st.composite
def layouts(
    draw: st.DrawFn, num_blocks: int, num_ranks: int, num_heads: int | None = None
) -> BlockLayout:
    """Blocks of any lengths anywhere, of tokens in any orders where the heads are told."""
    block = st.tuples(st.integers(0, 4), st.integers(0, num_ranks - 1))
    blocks = draw(st.lists(block, min_size=num_blocks, max_size=num_blocks))
    lens, home = np.array(blocks, np.int64).reshape(num_blocks, 2).T
    if num_heads is None or draw(st.booleans()):
        return BlockLayout(lens.copy(), home.copy())
    random = np.random.default_rng(draw(st.integers(0, 99)))
    order = random.permuted(np.tile(np.arange(lens.sum()), (num_heads, 1)), axis=1)
    return BlockLayout(lens.copy(), home.copy(), order)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Bools, SparsePlan]:
    """A mask, and a plan of any method on any mesh from any home and of any token orders."""
    mask, (ulysses, ring) = draw(masks()), draw(MESHES)
    groups = [n for n in range(1, len(mask) + 1) if len(mask) % n == 0]
    num_kv_heads = draw(st.sampled_from(groups))
    q = draw(layouts(mask.shape[1], ulysses * ring, len(mask)))
    kv = draw(layouts(mask.shape[2], ulysses * ring, num_kv_heads))
    cut_above = draw(st.sampled_from([0.0, 0.1, np.inf]))
    planner = SparsePlanner(ulysses, ring, method=draw(METHODS), cut_above=cut_above)
    return mask, planner.plan(mask, q, kv, num_kv_heads=num_kv_heads)


@many
@given(plans())
def test_every_query_block_has_one_rank_and_meets_every_key_block_once(
    case: tuple[Bools, SparsePlan],
) -> None:
    mask, plan = case
    group = len(mask) // plan.num_kv_heads
    computed: list[tuple[int, int]] = []
    for rank in range(plan.num_ranks):
        rows = listed(plan.q_rows(rank))
        computed += rows
        kv = [pair for owner in plan.owners(rank) for pair in listed(plan.kv_rows(owner))]
        assert len(set(kv)) == len(kv)
        needed = {head // group for head, _ in rows}
        assert {(head, block) for head in needed for block in range(mask.shape[2])} <= set(kv)
    assert sorted(computed) == [(h, i) for h in range(len(mask)) for i in range(mask.shape[1])]


@many
@given(plans())
def test_tiles_are_what_ranks_compute_round_by_round(case: tuple[Bools, SparsePlan]) -> None:
    """In loops over the rows of the ranks: what is at hand in which round, who waits for whom."""
    mask, plan = case
    group = len(mask) // plan.num_kv_heads
    work = np.zeros((plan.num_ranks, plan.ring_degree))
    for rank in range(plan.num_ranks):
        for turn, owner in enumerate(plan.owners(rank)):
            kv = set(listed(plan.kv_rows(owner)))
            for head, i in listed(plan.q_rows(rank)):
                for j in np.flatnonzero(mask[head, i]).tolist():
                    if (head // group, j) in kv:
                        work[rank, turn] += int(plan.q.lens[i] * plan.kv.lens[j])
    weights = np.multiply.outer(plan.q.lens, plan.kv.lens)
    assert work.sum() == (mask * weights).sum()
    np.testing.assert_array_equal(plan.loads, work.sum(axis=1))
    by_ring = work.reshape(plan.ring_degree, plan.ulysses_degree, plan.ring_degree)
    mean = max(work.sum() / plan.num_ranks, 1e-300)
    rho = max(by_ring[:, ring].max(axis=0).sum() for ring in range(plan.ulysses_degree)) / mean
    degrees = plan.ulysses_degree, plan.ring_degree
    assert plan.imbalance == pytest.approx(max(rho, 1.0), rel=1e-12)
    assert sparse_imbalance(mask, *degrees, plan) == plan.imbalance
    ends = [_coupled_end(by_ring[:, ring]) for ring in range(plan.ulysses_degree)]
    assert plan.critical_path_imbalance == pytest.approx(max(*ends, mean) / mean, rel=1e-12)
    assert critical_path_imbalance(mask, *degrees, plan) == plan.critical_path_imbalance
    assert plan.critical_path_imbalance <= plan.imbalance * (1 + 1e-12)


def _coupled_end(work: np.ndarray) -> float:
    """When a ring ends; a rank enters a round after its work and both neighbours' last entry."""
    size = len(work)
    entered = [[0.0] * size]
    for turn in range(1, size):
        last = entered[-1]
        own = [last[i] + float(work[i, turn - 1]) for i in range(size)]
        entered.append([max(own[i], last[i - 1], last[(i + 1) % size]) for i in range(size)])
    return max(entered[-1][i] + float(work[i, -1]) for i in range(size))


@many
@given(plans(), st.integers(1, 2))
def test_rows_arrive_where_the_plan_says_and_return(
    case: tuple[Bools, SparsePlan], batch: int
) -> None:
    mask, plan = case
    heads = {"q": len(mask), "kv": plan.num_kv_heads}
    layout = {"q": plan.q, "kv": plan.kv}
    tensors = [
        (name, labels(place, batch, heads[name], int(layout[name].lens.sum())))
        for place, name in enumerate(("q", "kv", "kv"))
    ]
    ranks = range(plan.num_ranks)
    source = [
        np.concatenate([at_home(values, layout[name], rank) for name, values in tensors])
        for rank in ranks
    ]
    arrived = exchange([plan.route(rank, batch=batch) for rank in ranks], source)
    for rank in ranks:
        rows = {"q": listed(plan.q_rows(rank)), "kv": listed(plan.kv_rows(rank))}
        expected = [packed(values, rows[name], layout[name]) for name, values in tensors]
        np.testing.assert_array_equal(arrived[rank], np.concatenate(expected), f"rank {rank}")
    num_q = [batch * int(plan.q_rows(rank).lens.sum()) for rank in ranks]
    out = [rows[:num] for rows, num in zip(arrived, num_q, strict=True)]
    back = exchange([plan.output_route(rank, batch=batch) for rank in ranks], out)
    for rank in ranks:
        np.testing.assert_array_equal(back[rank], at_home(tensors[0][1], plan.q, rank))


@many
@given(plans(), st.integers(1, 2))
def test_bytes_and_moved_rows_are_those_that_travel(
    case: tuple[Bools, SparsePlan], batch: int
) -> None:
    """Counted in what the routes send, and token by token in the rows of each rank."""
    _, plan = case
    routes = [
        (plan.route(rank, batch=batch), plan.output_route(rank, batch=batch))
        for rank in range(plan.num_ranks)
    ]
    sent = sum(
        int(np.delete(route.send_splits, rank).sum())
        for rank, both in enumerate(routes)
        for route in both
    )
    assert plan.wire_bytes(10, itemsize=4, batch=batch) == sent * 10 * 4
    for share, layout, rows_of in (
        (plan.moved[0], plan.q, plan.q_rows),
        (plan.moved[1], plan.kv, plan.kv_rows),
    ):
        owner = np.repeat(layout.home, layout.lens)
        came = [
            (owner[place] // plan.ulysses_degree, rank // plan.ulysses_degree)
            for rank in range(plan.num_ranks)
            for head, block in listed(rows_of(rank))
            for place in tokens_of(layout, head, block).tolist()
        ]
        assert share == pytest.approx(np.mean([source != there for source, there in came] or [0]))


@few
@given(plans(), st.integers(1, 2))
def test_the_ranks_together_compute_dense_masked_attention(
    case: tuple[Bools, SparsePlan], batch: int
) -> None:
    mask, plan = case
    random = np.random.default_rng(0)
    q, k, v = (
        random.normal(0.0, 0.5, (batch, heads, int(layout.lens.sum()), 3))
        for heads, layout in ((len(mask), plan.q), *[(plan.num_kv_heads, plan.kv)] * 2)
    )
    expected = dense_attention(plan, mask, q, k, v)
    np.testing.assert_allclose(attend(plan, mask, q, k, v), expected, rtol=0, atol=1e-13)


@few
@given(masks(), MESHES, st.data())
def test_counts_plan_as_masks_do(mask: Bools, mesh: tuple[int, int], data: st.DataObject) -> None:
    """What ranks exchange leads to the same plan as the masks, where keys stay at home."""
    ulysses, ring = mesh
    layout = data.draw(layouts(mask.shape[1], ulysses * ring))
    kv = BlockLayout.striped(data.draw(layouts(mask.shape[2], 1)).lens, ulysses, ring)
    counts = block_counts(mask, kv_lens=kv.lens, kv_of=kv.home // ulysses, ring_degree=ring)
    method = data.draw(st.sampled_from(["stripe", "minimal_move"]))
    planner = SparsePlanner(ulysses, ring, method=method)
    plan = planner.plan(counts, layout, kv)
    np.testing.assert_array_equal(plan.kv_of, np.tile(kv.home // ulysses, (ulysses, 1)))
    assert sparse_imbalance(mask, ulysses, ring, plan) == plan.imbalance
    if method == "stripe":
        assert plan == planner.plan(mask, layout, kv)


@few
@given(plans())
def test_a_plan_is_the_same_for_the_same_input_and_frozen(case: tuple[Bools, SparsePlan]) -> None:
    mask, plan = case
    planner = SparsePlanner(plan.ulysses_degree, plan.ring_degree, cut_above=0.0)
    layout = plan.q, plan.kv
    first = planner.plan(mask, *layout, num_kv_heads=plan.num_kv_heads)
    again = planner.plan(np.asfortranarray(mask), *layout, num_kv_heads=plan.num_kv_heads)
    assert first == again
    assert hash(first) == hash(again)
    np.testing.assert_array_equal(first.tiles, again.tiles)
    for array in (first.ring_of, first.q_of, first.kv_of, first.rank_of, first.q.home):
        assert not array.flags.writeable


@many
@given(masks(), st.integers(1, 8), st.sampled_from([0.0, 0.05, np.inf]))
def test_heads_are_within_their_certificate(mask: Bools, num_ranks: int, cut_above: float) -> None:
    counts = mask.sum(axis=2)
    plan = partition_heads(counts, num_ranks, cut_above=cut_above)
    loads = np.bincount(plan.rank_of.ravel(), counts.ravel(), num_ranks)
    np.testing.assert_array_equal(plan.loads, loads)
    assert plan.makespan == loads.max() >= plan.lower_bound
    whole = partition_heads(counts.sum(axis=1), num_ranks)
    assert plan.makespan <= whole.makespan
    mean, heaviest = counts.sum() / num_ranks, counts.max(initial=0)
    assert plan.lower_bound >= min(whole.lower_bound, max(mean, heaviest)) * (1 - 1e-12)
    if np.isinf(cut_above):
        assert plan.cut_heads.size == 0
        assert plan.bin_of.tolist() == whole.bin_of.tolist()
    else:  # what is left over a rank is less than its lightest block
        assert plan.makespan <= max(mean * (1 + cut_above), mean + heaviest) * (1 + 1e-12)
    for head in plan.cut_heads:
        assert (plan.rank_of[head] == plan.bin_of[head]).any()


@many
@given(masks(), st.integers(1, 5), st.booleans(), st.data())
def test_moves_only_ever_lower_the_end_of_a_ring(
    mask: Bools, ring: int, keys_stay: bool, data: st.DataObject
) -> None:
    """From any home, at any target."""
    matrix = mask.sum(axis=0)
    homes = [data.draw(layouts(size, ring)).home for size in matrix.shape]
    target = data.draw(st.sampled_from([0.0, 1.0, 1.05, 1.5]))
    place: dict[str, Any] = {"q_home": homes[0], "kv_home": homes[1]}
    stay = partition_blocks(matrix, ring, method="minimal_move", target=99.0, **place)
    plan = partition_blocks(
        matrix, ring, method="minimal_move", target=target, keys_stay=keys_stay, **place
    )
    assert stay.num_moved == (0, 0) and plan.imbalance <= stay.imbalance
    if stay.imbalance <= target:
        assert plan.num_moved == (0, 0)
    if sum(plan.num_moved):
        assert plan.imbalance < stay.imbalance
    if keys_stay:
        assert plan.num_moved[1] == 0
