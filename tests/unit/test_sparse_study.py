"""What `bascule sparse` finds out: its numbers against brute force, and its picture."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bascule.plan.machine import AttentionLatency
from bascule.report.sparse_picture import draw
from bascule.sim.sparse_study import WAYS, Mesh, run_layer, study
from tests.helpers.sparse_studies import (
    DEAR_ROUNDS,
    HEAD_DIM,
    ITEMSIZE,
    TOLERANCE,
    Bools,
    drifting,
    setting_of,
)

DEAR_ALL_TO_ALLS = AttentionLatency(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def rho(masks: Bools, rank_of: NDArray[np.int64], kv_of: NDArray[np.int64], mesh: Mesh) -> float:
    """Equations 1 to 3 of db-SP, one block at a time.

    Args:
        masks: (H, Q, K).
        rank_of: (H, Q) rank that computes.
        kv_of: (U, K) ring rank of each key block in each ring.
        mesh: (U, R).
    """
    ulysses, ring = mesh
    work = np.zeros((ulysses, ring, ring))
    for head, q, kv in np.argwhere(masks):
        ring_rank, group = divmod(rank_of[head, q], ulysses)
        work[group, ring_rank, (ring_rank - kv_of[group, kv]) % ring] += 1
    slowest = work.max(axis=1).sum(axis=1).max()
    return float(slowest / (work.sum() / (ulysses * ring)))


@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("shape", [(6, 20, 20), (5, 17, 9), (2, 3, 12)])
def test_every_way_is_as_even_as_it_says(mesh: Mesh, shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(shape)
    masks = random.random(shape) < random.random((shape[0], 1, 1))
    setting = setting_of(masks, mesh)
    found = study("random", [[masks]], setting)
    assert [x.way for x in found.outcomes] == list(WAYS)
    for x in found.outcomes:
        plan = setting.plan(x.way, masks, mesh)
        assert x.imbalance == pytest.approx(max(rho(masks, plan.rank_of, plan.kv_of, mesh), 1.0))
        assert 1.0 <= x.critical_path_imbalance <= x.imbalance + 1e-12
        assert x.planning_s > 0 or x.way == "in order"


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4), (3, 2)])
def test_in_order_is_heads_and_blocks_in_runs(mesh: Mesh) -> None:
    masks = np.ones((5, 13, 11), bool)
    plan = setting_of(masks, mesh).plan("in order", masks, mesh)
    ring_rank, ring = np.divmod(plan.rank_of, mesh[0])
    for table, size in ((ring, mesh[0]), (ring_rank.T, mesh[1]), (plan.kv_of.T, mesh[1])):
        assert (table == table[:, :1]).all() and (np.diff(table[:, 0]) >= 0).all()
        counts = np.bincount(table[:, 0], minlength=size)
        assert counts.max() - counts.min() <= 1
    assert plan.moved == (0.0, 0.0)


def test_the_load_is_that_of_the_slowest_rank() -> None:
    masks = drifting(1)[0][:, :, :21]  # ring ranks have 5 or 6 key blocks
    for mesh in ((1, 1), (4, 1), (2, 2), (1, 4)):
        setting = setting_of(masks, mesh)
        plan = setting.plan("in order", masks, mesh)
        load = setting.load(plan)
        num_ranks, pairs = plan.num_ranks, float(masks.sum()) * 64
        assert load.degrees == mesh
        assert load.work == pytest.approx(plan.imbalance * pairs / num_ranks)
        assert load.all_to_all_bytes * num_ranks == plan.wire_bytes(HEAD_DIM, ITEMSIZE)
        rows = [sum(plan.kv_rows(rank).lens) for rank in range(num_ranks)]
        most = 2 * max(rows) * HEAD_DIM * ITEMSIZE
        assert load.p2p_bytes == (most if mesh[1] > 1 else 0)
        # Of q, k, v and output; nothing where a ring has all heads, and blocks where they are.
        laid_out = 2 * (masks.shape[0] * masks.shape[1] * 8 + sum(rows)) * (mesh[0] > 1)
        assert load.copied_bytes * num_ranks == laid_out * HEAD_DIM * ITEMSIZE


def test_a_kept_plan_is_judged_by_the_masks_that_it_meets() -> None:
    steps, mesh = drifting(6), (2, 2)
    setting = setting_of(steps[0], mesh)
    found = run_layer(iter(steps), setting, (0.0, 9.0))
    first = setting.plan("minimal_move", steps[0], mesh)
    never = found.reuses[mesh, 9.0]
    assert never.state.plan == first and never.state.num_planned == 1
    expected = [rho(masks, first.rank_of, first.kv_of, mesh) for masks in steps]
    assert never.imbalances == pytest.approx(expected)
    # At tolerance 0 a step runs with what was planned from the step before.
    always = found.reuses[mesh, 0.0]
    plan = setting.plan("minimal_move", steps[-2], mesh)
    assert always.imbalances[-1] == pytest.approx(rho(steps[-1], plan.rank_of, plan.kv_of, mesh))
    for reuse in found.reuses.values():
        assert reuse.state.num_planned + reuse.state.num_kept == len(steps)
    planned = [found.reuses[mesh, x].state.num_planned for x in (0.0, TOLERANCE, 9.0)]
    assert planned[0] > planned[2] and planned == sorted(planned, reverse=True)


def test_the_chosen_mesh_has_the_lowest_prediction() -> None:
    steps = drifting(3)
    for latency, mesh in ((DEAR_ROUNDS, (4, 1)), (DEAR_ALL_TO_ALLS, (1, 4))):
        setting = setting_of(steps[0], (4, 1), (2, 2), (1, 4), latency=latency)
        aligned = replace(setting, target=9.0)  # nothing moves, so a ring alone sends nothing
        choices = run_layer(iter(steps), aligned, ()).choices
        assert [choice.degrees for choice in choices] == [mesh] * 3


def test_means_are_over_layers() -> None:
    masks = drifting(2)
    mesh = (2, 2)
    found = study("two", [[x] for x in masks], setting_of(masks[0], mesh))
    rows = [x.imbalance for x in found.outcomes if x.way == "paper"]
    assert len(rows) == 2 and rows[0] != rows[1]
    assert found.mean(mesh, "paper").imbalance == pytest.approx(sum(rows) / 2)


def test_a_picture_shows_the_study() -> None:
    steps = drifting(3)
    setting = setting_of(steps[0], (4, 1), (2, 2), (1, 4), latency=DEAR_ALL_TO_ALLS)
    setting = replace(setting, target=9.0)  # nothing moves: a ring alone has no all-to-all
    tolerances, rewards = (0.0, 0.1), (0.0, 1.0, 4.0)
    found = study("drifting", [steps, steps], setting, tolerances, rewards)
    traces: Any = draw(found, 5).data
    mask, ranks, chosen, *lines = traces
    assert (mask.z == steps[0][5]).all()
    assert (ranks.z == setting.plan("minimal_move", steps[0], (2, 2)).rank_of).all()
    assert chosen.z.shape == (2, 3)
    names = [chosen.colorbar.ticktext[place] for place in chosen.z.ravel()]
    told = [x.degrees for run_of in found.runs for x in run_of.choices]
    assert names == ["U{}R{}".format(*mesh) for mesh in told] == ["U1R4"] * 6
    assert len(lines) == 2 * 2 * 3
    by_tolerance, by_reward = lines[:6], lines[6:]
    for place, mesh in enumerate(setting.meshes):
        kept, plans = by_tolerance[2 * place : 2 * place + 2]
        reuses = [found.runs[0].reuses[mesh, x] for x in (0.0, TOLERANCE, 0.1)]
        assert kept.x == (0.0, TOLERANCE, 0.1) and kept.yaxis != plans.yaxis
        assert kept.y == pytest.approx([np.mean(x.imbalances) for x in reuses])
        assert plans.y == tuple(x.state.num_planned for x in reuses)
        even, moved = by_reward[2 * place : 2 * place + 2]
        assert even.x == moved.x == rewards
        plans = [
            replace(setting, reward=reward).plan("paper", steps[0], mesh) for reward in rewards
        ]
        assert even.y == pytest.approx([plan.imbalance for plan in plans])
        assert moved.y == pytest.approx([plan.moved[0] for plan in plans])
