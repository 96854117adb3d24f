"""The choice of a mesh, with plans on all that are allowed, against loops and the formula."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.plan.machine import AttentionLatency, AttentionLoad
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_counts,
    block_lens,
    tiles_under,
)
from bascule.plan.sparse.choose import LayerPlans, Strategies, all_degrees, columns_of

LATENCY = AttentionLatency(3.0, 0.002, 40.0, 0.001, 0.01, 5.0, 0.0003)
LENS = block_lens((5, 70), 8)
BATCH, ROW_BYTES = 2, 64
Masks = np.ndarray[Any, np.dtype[np.bool_]]


def random_masks(seed: int, density: float) -> Masks:
    random = np.random.default_rng(seed)
    drawn = random.random((6, LENS.size, LENS.size))
    return drawn < density * 2 * random.random((6, 1, 1))


def test_the_meshes_of_a_number_of_ranks() -> None:
    assert all_degrees(1) == [(1, 1)]
    assert all_degrees(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]


@pytest.mark.parametrize("degrees", all_degrees(6))
def test_counts_by_rank_are_counts_by_ring_rank_of_any_mesh(degrees: tuple[int, int]) -> None:
    masks, home = random_masks(0, 0.4), BlockLayout.striped(LENS, 3, 2).home
    by_rank = block_counts(masks, kv_lens=LENS, kv_of=home, ring_degree=6)
    ulysses, ring = degrees
    expected = block_counts(masks, kv_lens=LENS, kv_of=home // ulysses, ring_degree=ring)
    np.testing.assert_array_equal(columns_of(by_rank, degrees), expected)
    assert columns_of(masks, degrees) is masks


def load_by_loops(plan: SparsePlan, masks: Masks) -> AttentionLoad:
    """Tokens one by one."""
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    work = np.zeros((ulysses, ring, ring))
    sent, copied = 0, 0
    keys: dict[int, set[tuple[int, int]]] = {}
    for head, q_block in np.ndindex(plan.ring_of.shape):
        owner = int(plan.ring_of[head, q_block])
        rank = int(plan.q_of[owner, q_block]) * ulysses + owner
        tokens = int(LENS[q_block])
        copied += 2 * tokens
        sent += 2 * tokens * (rank != plan.q.home[q_block])
        for block in range(LENS.size):
            ring_rank = int(plan.kv_of[owner, block])
            keys.setdefault(ring_rank * ulysses + owner, set()).add((head, block))
            if masks[head, q_block, block]:
                turn = (rank // ulysses - ring_rank) % ring
                work[owner, rank // ulysses, turn] += tokens * int(LENS[block])
    kv_tokens = dict.fromkeys(range(ulysses * ring), 0)
    for rank, blocks in keys.items():
        for _, block in blocks:
            kv_tokens[rank] += int(LENS[block])
            sent += 2 * int(LENS[block]) * (rank != plan.kv.home[block])
    copied = copied + 2 * sum(kv_tokens.values()) if sent else 0
    slowest = max(rounds.max(axis=0).sum() for rounds in work)
    p2p = 2 * max(kv_tokens.values()) if ring > 1 else 0
    ranks, scale = ulysses * ring, BATCH * ROW_BYTES
    return AttentionLoad(
        ulysses, ring, BATCH * slowest, sent * scale / ranks, p2p * scale, copied * scale / ranks
    )


@pytest.mark.parametrize("degrees", all_degrees(4))
@pytest.mark.parametrize("method", ["minimal_move", "in_order"])
def test_the_load_of_a_plan(degrees: tuple[int, int], method: str) -> None:
    masks = random_masks(1, 0.5)
    home = BlockLayout.striped(LENS, 2, 2)
    plan = SparsePlanner(*degrees, method=method).plan(masks, home)
    found, expected = AttentionLoad.of_plan(plan, BATCH, ROW_BYTES), load_by_loops(plan, masks)
    for name in AttentionLoad.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


def seconds_by_hand(load: AttentionLoad) -> float:
    compute = 5.0 + 0.01 * load.work / load.ring_degree
    p2p = 40.0 + 0.001 * load.p2p_bytes
    total = 0.0003 * load.copied_bytes + 0.002 * load.all_to_all_bytes
    total += 6.0 if load.all_to_all_bytes else 0.0
    return total + (load.ring_degree - 1) * max(compute, p2p) + compute


def first_plans(work: Any, meshes: list[tuple[int, int]]) -> dict[tuple[int, int], PlanReuse]:
    home = BlockLayout.striped(LENS, 2, 2)
    planners = {degrees: SparsePlanner(*degrees) for degrees in meshes}
    return {
        d: PlanReuse(one, one.plan(columns_of(work, d), home), 0.02) for d, one in planners.items()
    }


def counts_by_rank(masks: Masks) -> Any:
    home = BlockLayout.striped(LENS, 2, 2).home
    return block_counts(masks, kv_lens=LENS, kv_of=home, ring_degree=4)


@pytest.mark.parametrize("as_counts", [False, True])
def test_every_step_takes_the_mesh_with_the_lowest_prediction(as_counts: bool) -> None:
    steps = [random_masks(seed, density) for seed, density in enumerate((0.9, 0.05, 0.05, 0.9))]
    work: Any = counts_by_rank(steps[0]) if as_counts else steps[0]
    expected = first_plans(work, all_degrees(4))
    plans = LayerPlans.first(
        expected,
        Strategies(LATENCY, min_gain=0.0),
        start=None,
        batch=BATCH,
        row_bytes=ROW_BYTES,
    )
    used = set[tuple[int, int]]()
    for masks, later in itertools.pairwise([steps[0], *steps]):
        predicted = {d: seconds_by_hand(load_by_loops(x.plan, later)) for d, x in expected.items()}
        if later is masks:
            assert plans.choice is not None
            assert plans.choice.predicted_s == pytest.approx(min(predicted.values()))
        work = counts_by_rank(later) if as_counts else later
        expected = {d: x.after(columns_of(work, d)) for d, x in expected.items()}
        plans = plans.after(work, BATCH, ROW_BYTES)
        assert {d: x.plan for d, x in plans.reuses.items()} == {
            d: x.plan for d, x in expected.items()
        }
        predicted = {d: seconds_by_hand(load_by_loops(x.plan, later)) for d, x in expected.items()}
        assert predicted[plans.degrees] == pytest.approx(min(predicted.values()))
        assert plans.chosen.plan.ulysses_degree == plans.degrees[0]
        used.add(plans.degrees)
    assert len(used) > 1 and plans.choice is not None and plans.choice.num_switches > 1


def test_a_layer_starts_where_it_is_told_to_and_has_to_be_paid_for_a_switch() -> None:
    masks = random_masks(0, 0.05)
    given: dict[str, Any] = {"start": (1, 4), "batch": BATCH, "row_bytes": ROW_BYTES}
    reuses = first_plans(masks, all_degrees(4))
    at_once = LayerPlans.first(reuses, Strategies(LATENCY), **given)
    assert at_once.degrees == (1, 4)
    assert at_once.after(masks, BATCH, ROW_BYTES).degrees == (4, 1)
    unsure = Strategies(replace(LATENCY, fit_error=0.9))
    assert LayerPlans.first(reuses, unsure, **given).after(masks, BATCH, ROW_BYTES).degrees == (
        1,
        4,
    )
    dear = LayerPlans.first(reuses, Strategies(LATENCY, switch_s=1e6), **given)
    assert dear.after(masks, BATCH, ROW_BYTES).degrees == (1, 4)


def test_one_mesh_is_no_choice() -> None:
    masks, other = random_masks(0, 0.3), random_masks(1, 0.6)
    plans = LayerPlans.first(
        first_plans(masks, [(2, 2)]), None, start=None, batch=BATCH, row_bytes=ROW_BYTES
    )
    later = plans.after(other, BATCH, ROW_BYTES)
    assert later.choice is None and later.degrees == (2, 2)
    assert later.chosen.plan == plans.chosen.after(other).plan


def test_a_kept_plan_knows_the_work_that_it_was_kept_for() -> None:
    planner, home = SparsePlanner(2, 2), BlockLayout.striped(LENS, 2, 2)
    masks, other = random_masks(0, 0.5), random_masks(1, 0.5)
    kept = PlanReuse(planner, planner.plan(masks, home), 9.0).after(other)
    assert kept.ran is kept.ahead and kept.plan is not kept.ran
    np.testing.assert_array_equal(kept.ahead.tiles, tiles_under(kept.plan, other))
    made = PlanReuse(planner, kept.plan, 0.0).after(other)
    assert made.num_planned == 2 and made.ran is not None
    np.testing.assert_array_equal(made.ran.tiles, tiles_under(kept.plan, other))
    assert made.ahead is made.plan and made.plan.imbalance < made.ran.imbalance


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_gain": -0.1}, "min_gain=-0.1"),
        ({"min_gain": 3}, "min_gain=3.: must be at least 0 and below 1"),
        ({"meshes": ("U2R1",)}, "'U2R1' is not a mesh: give .Ulysses, ring. degrees"),
        ({"meshes": ((2, 0),)}, "2, 0"),
        ({"switch_s": float("nan")}, "switch_s=nan"),
        ({"latency": "fast"}, "latency is 'fast': give an AttentionLatency"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Strategies(**{"latency": LATENCY, **settings})
