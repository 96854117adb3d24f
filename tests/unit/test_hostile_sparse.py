"""Planning of sparse attention under hostile use: right, or one sentence."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# What the types forbid is what is tried here.

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bascule.plan.checks import shown
from bascule.plan.fits import fit_attention_latency
from bascule.plan.machine import AttentionLatency, AttentionLoad, HardwareProfile
from bascule.plan.sparse import (
    BlockLayout,
    PlanReuse,
    SparsePlan,
    SparsePlanner,
    block_counts,
    block_lens,
    critical_path_imbalance,
    partition_blocks,
    partition_heads,
    plan_under,
    sparse_imbalance,
)
from bascule.plan.sparse.baselines import paper_blocks, paper_heads
from bascule.plan.sparse.choose import Strategies, all_degrees
from bascule.workload import load_masks, save_masks
from bascule.workload.masks import MaskModel, synthetic_masks
from tests.helpers.refusals import NO_NUMBERS, UNREADABLE, refusal, refused, title

MATRIX = np.arange(16.0).reshape(4, 4)
MASKS = np.ones((2, 4, 4), bool)
METHODS = ("stripe", "minimal_move")
LATENCY = AttentionLatency(1e-5, 1e-11, 1e-5, 1e-11, 1e-12, 1e-5)
LOAD = AttentionLoad(1, 1, 1.0, 0.0, 0.0)
SMALL: dict[str, Any] = {"grid": (2, 4, 4), "num_heads": 2, "block": 8}


def layout(ulysses: int = 1, ring: int = 2, tokens: int = 5) -> BlockLayout:
    return BlockLayout.striped([tokens] * 4, ulysses, ring)


def planned(**settings: Any) -> SparsePlan:
    return SparsePlanner(1, 2, **settings).plan(MASKS, layout())


# Work


@pytest.mark.parametrize(
    "counts",
    [
        *UNREADABLE,
        None,
        5,
        "ab",
        [[-1, 2], [3, 4]],
        [[math.nan, 1]],
        [[math.inf, 1]],
        [[1j]],
        [["1"]],
        [[10**400]],
        np.full((4, 4), 1e308),
        np.ones((2, 2, 2)),
        (x for x in [[1]]),
    ],
    ids=title,
)
def test_work_that_is_none(counts: Any) -> None:
    refused(
        lambda: partition_heads(counts, 2),
        lambda: paper_heads(counts, 2),
        lambda: paper_blocks(counts, 2),
    )
    for method in METHODS:
        refused(lambda method=method: partition_blocks(counts, 2, method=method))


@pytest.mark.parametrize(
    "masks",
    [
        *UNREADABLE,
        None,
        "ab",
        MASKS.astype(np.uint8),
        MASKS.astype(object),
        MASKS[0],
        MASKS[None],
        (x for x in MASKS),
    ],
    ids=title,
)
def test_masks_that_are_none(masks: Any) -> None:
    refused(
        lambda: sparse_imbalance(masks, 1, 2),
        lambda: critical_path_imbalance(masks, 2, 1),
        lambda: block_counts(masks),
    )
    if not isinstance(masks, np.ndarray) or masks.dtype != np.uint8:  # not counts either
        refused(lambda: SparsePlanner(1, 2).plan(masks, layout()))
    assert planned().digest == SparsePlanner(1, 2).plan(torch.ones(2, 4, 4).bool(), layout()).digest


def test_masks_and_matrices_lie_in_memory_as_they_like() -> None:
    rng = np.random.default_rng(0)
    masks, matrix = rng.random((4, 8, 8)) < 0.5, rng.integers(0, 9, (8, 8)).astype(float)
    home = BlockLayout.striped([3] * 8, 1, 2)
    expected = SparsePlanner(1, 2).plan(masks, home)
    moved = partition_blocks(matrix, 2, method="minimal_move")
    wide, tall = np.zeros((4, 16, 16), bool), np.zeros((16, 8))
    wide[:, ::2, ::2], tall[::2] = masks, matrix
    for other in (np.asfortranarray(masks), wide[:, ::2, ::2], masks.tolist()):
        assert SparsePlanner(1, 2).plan(other, home) == expected
    read_only = np.frombuffer(matrix.tobytes()).reshape(8, 8)
    for other in (np.asfortranarray(matrix), tall[::2], read_only, matrix.tolist()):
        again = partition_blocks(other, 2, method="minimal_move")
        np.testing.assert_array_equal(again.q_of, moved.q_of)
        np.testing.assert_array_equal(again.kv_of, moved.kv_of)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint64])
def test_counts_of_small_integers_do_not_wrap(dtype: Any) -> None:
    """40 heads with 100 keys a block: 4,000, which 8 bits do not hold."""
    home = BlockLayout.striped([500] * 4, 2, 2)
    plan = SparsePlanner(2, 2).plan(np.full((40, 4, 2), 100, dtype), home)
    assert plan.tiles.sum() == 40 * 4 * 2 * 100 * 500


def test_amounts_beyond_what_is_counted_exactly() -> None:
    long = BlockLayout.striped([2**38] * 4, 1, 2)
    refused(
        lambda: SparsePlanner(1, 2).plan(MASKS, long),
        lambda: block_counts(MASKS, kv_lens=[2**62] * 4),
        lambda: BlockLayout.striped([2**39] * 4, 1, 2),
        lambda: BlockLayout.striped([2**63] * 4, 1, 2),
        lambda: SparsePlanner(1, 2).plan(np.full((2, 4, 2), 2**62), layout()),
        lambda: SparsePlanner(1, 2).plan(np.full((2, 4, 2), 2**64 - 1, np.uint64), layout()),
        lambda: SparsePlanner(1, 2).plan(np.full((2, 4, 2), 11), layout()),  # of 20 tokens of keys
        lambda: partition_blocks(np.full((4, 4), 2.0**51), 2),
        lambda: block_lens([10**11], 1),
    )


# Placements


@pytest.mark.parametrize(
    "home",
    [
        *UNREADABLE,
        [0.9, 1.9, 0, 1],
        [0.0, 1.0, 0.0, 1.0],
        [-1, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 1],
        [[0, 1, 0, 1]],
        [math.nan, 0, 0, 0],
        ["0"] * 4,
        [None] * 4,
        [True] * 4,
        [2**63] * 4,
        [10**400] * 4,
        5,
        (x for x in [0] * 4),
    ],
    ids=title,
)
def test_homes_that_are_none(home: Any) -> None:
    for method in METHODS:
        refused(
            lambda method=method: partition_blocks(MATRIX, 2, method=method, q_home=home),
            lambda method=method: partition_blocks(MATRIX, 2, method=method, kv_home=home),
            lambda: paper_blocks(MATRIX, 2, q_home=home),
            lambda: paper_blocks(MATRIX, 2, kv_home=home),
        )
    refused(
        lambda: block_counts(MASKS, kv_of=home, ring_degree=2),
        lambda: SparsePlanner(1, 2).plan(MASKS, BlockLayout(np.full(4, 5), home)),
        lambda: BlockLayout([-1, 0, 0, 1] if str(home) in _LENS else home, np.zeros(4, int)),
    )


_LENS = ("[0, 0, 0, 2]", "[0, 1]")
"""Legal lengths, but not as homes."""


@pytest.mark.parametrize("value", NO_NUMBERS, ids=title)
def test_settings_that_are_no_numbers_in_range(value: Any) -> None:
    for method in METHODS:
        told = refusal(lambda m=method: partition_blocks(MATRIX, 2, method=m, target=value))
        assert told.startswith("target")
    assert refusal(lambda: paper_blocks(MATRIX, 2, reward=value)).startswith("reward")
    for name in ("target", "reward"):
        refused(lambda name=name: SparsePlanner(1, 2, **{name: value}))
    for name in ("ulysses_degree", "ring_degree"):
        refused(
            lambda name=name: SparsePlanner(**{name: value}),
            lambda name=name: sparse_imbalance(MASKS, **{**_MESH, name: value}),
            lambda name=name: BlockLayout.striped([1], **{**_MESH, name: value}),
        )
    refused(
        lambda: partition_heads([1, 2], value),
        lambda: partition_blocks(MATRIX, value),
        lambda: block_counts(MASKS, ring_degree=value),
        lambda: all_degrees(value),
        lambda: block_lens([10], value),
        lambda: paper_blocks(MATRIX, 2, capacity=(value, 2)),
        lambda: paper_blocks(MATRIX, value),
        lambda: paper_heads([1, 2], value),
        lambda: planned().route(0, batch=value),
        lambda: planned().route(value),
        lambda: planned().wire_bytes(value),
        lambda: AttentionLoad(1, 1, value, 0.0, 0.0),
        lambda: AttentionLatency(value, 0, 0, 0, 0, 0),
        lambda: Strategies(LATENCY, meshes=((value, 2),)),
        lambda: MaskModel(**{**SMALL, "density": value}),
        lambda: MaskModel(**{**SMALL, "num_heads": value}),
        lambda: MaskModel(**{**SMALL, "grid": value}),
        lambda: MaskModel(**{**SMALL, "first_frame": value}),
        lambda: synthetic_masks(MaskModel(**SMALL), layer=value),
        lambda: synthetic_masks(MaskModel(**SMALL), seed=value),
    )
    if shown(value) != "inf":  # never cut, always keep, never switch
        refused(
            lambda: partition_heads(MATRIX, 2, cut_above=value),
            lambda: SparsePlanner(cut_above=value),
            lambda: PlanReuse(SparsePlanner(1, 2), planned(), value),
            lambda: Strategies(LATENCY, switch_s=value),
        )
    if shown(value) != "None":
        refused(
            lambda: Strategies(LATENCY, min_gain=value),
            lambda: Strategies(LATENCY, meshes=value),
            lambda: planned_with_kv_heads(value),
        )
    refused(
        lambda: Strategies(LATENCY).choose(value),
        lambda: Strategies(value),
        lambda: Strategies(LATENCY).choose([value]),
        lambda: fit_attention_latency(value, [1.0]),
        lambda: fit_attention_latency([LOAD] * 8, [value] * 8),
    )


_MESH = {"ulysses_degree": 1, "ring_degree": 2}


def planned_with_kv_heads(number: Any) -> SparsePlan:
    return SparsePlanner(1, 2).plan(MASKS, layout(), num_kv_heads=number)


@pytest.mark.parametrize("wrong", [(2,), 5, "ab", (1, 4), (2.5, 2)], ids=title)
def test_capacities_that_are_none(wrong: Any) -> None:
    refused(lambda: paper_blocks(MATRIX, 2, capacity=wrong))


def test_meshes_beyond_what_can_be_planned_for() -> None:
    """Ranks are numbered in 16 bits where they are sorted: more would be other ranks."""
    for degrees in ((2**15 + 1, 1), (1, 513), (128, 512), (10**12, 1)):
        refused(
            lambda d=degrees: SparsePlanner(*d),
            lambda d=degrees: BlockLayout.striped([1] * 4, *d),
            lambda d=degrees: sparse_imbalance(MASKS, *d),
        )
    refused(lambda: all_degrees(2**15 + 1), lambda: partition_heads([1], 10**12))
    most = 2**15
    home = BlockLayout(np.ones(4, np.int64), np.array([0, 1, most - 2, most - 1]))
    plan = SparsePlanner(most, 1, method="in_order").plan(MASKS, home)
    sent = plan.route(most - 1).send_splits  # q, k and v of one token of two heads
    assert np.flatnonzero(sent).tolist() == [0, most // 2] and sent.sum() == 6


def test_settings_of_the_wrong_type() -> None:
    plan = planned()
    refused(
        lambda: sparse_imbalance(MASKS, 1, 2, 5),
        lambda: plan_under(None, MASKS),
        lambda: PlanReuse(None, plan),
        lambda: PlanReuse(SparsePlanner(1, 2), None),
        lambda: SparsePlanner(1, 2).plan(MASKS, None),
        lambda: SparsePlanner(1, 2).plan(MASKS, [5] * 4),
        lambda: partition_blocks(MATRIX, 2, keys_stay="no"),
        lambda: Strategies(None),
        lambda: Strategies(LATENCY).choose([LOAD], 5),
    )
    for method in (None, 5, ["paper"], np.array(["paper"]), "Paper", "in_order "):
        refused(
            lambda m=method: SparsePlanner(method=m),
            lambda m=method: partition_blocks(MATRIX, 2, method=m),
        )


def test_masks_of_more_or_less_than_a_plan_has() -> None:
    plan = planned()
    for shape in ((3, 4, 4), (1, 4, 4), (2, 5, 4), (2, 3, 4), (2, 4, 5), (2, 4, 3)):
        refused(
            lambda shape=shape: sparse_imbalance(np.ones(shape, bool), 1, 2, plan),
            lambda shape=shape: plan_under(plan, np.ones(shape, bool)),
            lambda shape=shape: PlanReuse(SparsePlanner(1, 2), plan).after(np.ones(shape, bool)),
        )


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("blocks", [(0, 0), (0, 4), (3, 0)])
def test_a_sequence_of_no_blocks_has_a_plan(mesh: tuple[int, int], blocks: tuple[int, int]) -> None:
    q, kv = (BlockLayout.striped([5] * number, *mesh) for number in blocks)
    masks = np.zeros((2, *blocks), bool)
    assert block_counts(masks, ring_degree=mesh[1]).shape == (2, blocks[0], mesh[1])
    for method in (*METHODS, "paper", "in_order"):
        planner = SparsePlanner(*mesh, method=method)
        plan = planner.plan(masks, q, kv)
        assert plan.imbalance == 1.0 and not plan.tiles.any()
        assert plan.route(0).send_splits.sum() == 2 * (plan.q.home == 0).sum() * 5 + 2 * sum(
            5 * int((plan.kv_rank_of[:, :, block] >= 0).any(0).sum())
            for block in np.flatnonzero(plan.kv.home == 0)
        )
        assert PlanReuse(planner, plan).after(masks).num_kept == 1


def test_a_layout_is_its_own() -> None:
    """Neither what it was made from changes it, nor it what it was made from."""
    base, home = np.array([5, 6, 7, 8]), np.array([0, 1])
    order = np.array([[1, 0, *range(2, 11)]])
    made = BlockLayout(base[:2], home, order)
    digest = made.digest
    base[0], home[0], order[0, 0] = 99, 1, 99
    again = BlockLayout(np.array([5, 6]), np.array([0, 1]), np.array([[1, 0, *range(2, 11)]]))
    assert made.lens.tolist() == [5, 6] and digest == again.digest
    for one in (made.lens, made.home, made.order):
        assert one is not None and not one.flags.writeable


# Masks and latencies


def test_mask_models_at_the_end_of_their_range() -> None:
    for changes in (
        {"density": 1e-300},
        {"density": 1 - 1e-12},
        {"head_contrast": 1e300},
        {"field_spread": 1e300},
        {"block": 10**400},
        {"grid": (10**6, 10**6, 10**6)},
        {"grid": (200, 100, 100), "block": 1},
        {"text_tokens": 10**12},
        {"num_heads": 10**9},
    ):
        refused(lambda changes=changes: MaskModel(**{**SMALL, **changes}))
    for changes in ({"density": 1e-9}, {"head_contrast": 1e3}, {"step_drift": 1e3}):
        drawn = synthetic_masks(MaskModel(**{**SMALL, **changes}), step=2**32, layer=2**32)
        assert drawn.shape == (2, 4, 4) and drawn.any()


def test_masks_that_cannot_be_saved(tmp_path: Path) -> None:
    refused(
        lambda: save_masks(tmp_path / "x.npz", MASKS.astype(int)),
        lambda: save_masks(tmp_path / "gone" / "x.npz", MASKS),
        lambda: save_masks(5, MASKS),
        lambda: load_masks(None),
        lambda: HardwareProfile(device="x").save(tmp_path / "gone" / "x.json"),
    )
    assert not list(tmp_path.iterdir())
