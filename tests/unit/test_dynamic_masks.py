"""Masks from pooled queries and keys, and from the grid: against loops over blocks and tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.attention.api import AttentionMesh
from bascule.attention.sparse.attend import PooledRule, sparse_attention
from bascule.attention.sparse.rules import (
    always_computed,
    keep_density,
    keep_mass,
    keep_top_k,
    pooled,
    spatial_mask,
    temporal_mask,
)
from bascule.errors import ConfigError
from bascule.plan.sparse import BlockLayout, PackedRows, block_lens, in_order

LENS = (4, 3, 8, 8, 8, 1, 8, 2)
KV_LENS = (8, 8, 5, 8, 1)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def brute_scores(q: Tensor, k: Tensor, lens: Any, scale: float) -> Tensor:
    """(B, H, N, N) a pair of blocks at a time."""
    batch, heads = q.shape[:2]
    scores = torch.empty(batch, heads, len(lens), len(lens), dtype=q.dtype)
    for b, h in np.ndindex(batch, heads):
        queries = q[b, h].split(list(lens))
        keys = k[b, h * k.shape[1] // heads].split(list(lens))
        for i, j in np.ndindex(len(lens), len(lens)):
            scores[b, h, i, j] = scale * queries[i].mean(0) @ keys[j].mean(0)
    return scores


def test_means_against_a_loop() -> None:
    x = normal(2, 4, sum(LENS), 6)
    expected = torch.stack([rows.mean(dim=2) for rows in x.split(list(LENS), dim=2)], dim=2)
    torch.testing.assert_close(pooled(x, LENS), expected, rtol=1e-12, atol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        low = pooled(x.to(dtype), LENS)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), expected, rtol=0, atol=10 * tolerance)


def test_a_block_is_not_poisoned_by_a_token_of_another() -> None:
    block_of = np.repeat(np.arange(len(LENS)), LENS)
    for token, block in enumerate(block_of.tolist()):
        x = normal(1, 1, sum(LENS), 3)
        x[0, 0, token] = math.nan
        bad = pooled(x, LENS).isnan().any(-1)[0, 0]
        assert bad.nonzero().flatten().tolist() == [block], token


def test_means_of_bf16_are_made_in_float32() -> None:
    x = torch.full((1, 1, 999, 1), 1.0, dtype=torch.bfloat16)
    x[..., -1, :] = 3.0
    assert pooled(x, [999]).item() == pytest.approx(1001 / 999, rel=1e-6)


def brute_row(scores: list[float], forced: list[bool], num_keep: int) -> list[bool]:
    """Forced ones, then the best of the rest."""
    kept = list(forced)
    for place in sorted(range(len(scores)), key=lambda j: -scores[j]):
        if sum(kept) < num_keep:
            kept[place] = True
    return kept


@pytest.mark.parametrize("num_keep", [0, 1, 3, 8, 50])
@pytest.mark.parametrize("dense", [(), (0,), (7, 2)])
def test_top_k_against_a_loop(num_keep: int, dense: tuple[int, ...]) -> None:
    scores = normal(2, 3, 8, 8)
    for always in (None, always_computed(8, dense)):
        masks = keep_top_k(scores, num_keep, always)
        forced = torch.zeros(8, 8, dtype=torch.bool) if always is None else always
        for b, h, i in np.ndindex(2, 3, 8):
            expected = brute_row(scores[b, h, i].tolist(), forced[i].tolist(), num_keep)
            assert masks[b, h, i].tolist() == expected


def test_equal_scores_keep_exactly_k() -> None:
    assert keep_top_k(torch.zeros(2, 5, 9), 4).sum(-1).eq(4).all()
    assert keep_density(torch.zeros(2, 5, 9), 0.4).sum((-2, -1)).eq(18).all()


@pytest.mark.parametrize(("rows", "columns"), [(2, 9), (9, 2)])
def test_a_row_keeps_as_many_key_blocks_as_there_are(rows: int, columns: int) -> None:
    for num_keep in (1, 2, 3, 8, 9, 10):
        kept = keep_top_k(normal(rows, columns), num_keep).sum(-1)
        assert kept.tolist() == [min(num_keep, columns)] * rows


def test_what_is_always_computed() -> None:
    mask = always_computed(6, (0, 4))
    for i, j in np.ndindex(6, 6):
        assert mask[i, j] == (i == j or i in (0, 4) or j in (0, 4))


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_mass_against_a_loop(mass: float) -> None:
    scores = 3.0 * normal(2, 3, 6, len(KV_LENS))
    always = torch.arange(5).expand(6, 5) == 2
    masks = keep_mass(scores, mass, KV_LENS, always)
    for b, h, i in np.ndindex(2, 3, 6):
        # Of a softmax over tokens whose keys are the means of their blocks.
        tokens = scores[b, h, i].repeat_interleave(torch.tensor(KV_LENS)).softmax(0)
        shares = [float(part.sum()) for part in tokens.split(list(KV_LENS))]
        kept, covered = {2}, 0.0
        for place in sorted(range(5), key=lambda j: -shares[j]):
            if covered < mass:
                kept.add(place)
                covered += shares[place]
        assert set(masks[b, h, i].nonzero().flatten().tolist()) == kept


def test_a_row_of_nan_is_not_hidden() -> None:
    """It keeps all, or else attention would give numbers where dense attention gives nan."""
    scores = normal(2, 4, 5)
    scores[0, 1, 3] = math.nan
    masks = keep_mass(scores, 0.5, KV_LENS)
    assert masks[0, 1].all() and not masks[1].all()
    scores[0, 1, 3] = 0.0
    others = torch.ones(2, 4, 1, dtype=torch.bool)
    others[0, 1] = False
    assert torch.equal(masks & others, keep_mass(scores, 0.5, KV_LENS) & others)


def test_mass_keeps_the_fewest() -> None:
    scores = normal(4, 30, 40)
    masks = keep_mass(scores, 0.8, [1] * 40)
    shares = scores.softmax(-1)
    kept = torch.where(masks, shares, 0.0)
    assert (kept.sum(-1) >= 0.8).all()
    least = torch.where(masks, shares, torch.inf).amin(-1)
    assert (kept.sum(-1) - least < 0.8).all()


@pytest.mark.parametrize("density", [0.0, 0.2, 0.68, 1.0])
def test_density_against_a_loop(density: float) -> None:
    scores, always = normal(2, 3, 7, 7), always_computed(7, (3,))
    masks = keep_density(scores, density, always)
    for b, h in np.ndindex(2, 3):
        expected = brute_row(
            scores[b, h].flatten().tolist(), always.flatten().tolist(), round(density * 49)
        )
        assert masks[b, h].flatten().tolist() == expected


def test_a_density_for_each_head() -> None:
    densities = torch.tensor([0.1, 0.5, 1.0])
    masks = keep_density(normal(2, 3, 10, 20), densities)
    assert masks.sum((-2, -1)).tolist() == [[20, 100, 200]] * 2


@pytest.mark.parametrize("grid", [(4, 3, 5), (1, 2, 7), (5, 1, 1), (3, 4, 4)])
@pytest.mark.parametrize("block", [1, 4, 7, 16])
@pytest.mark.parametrize("num_text", [0, 2])
@pytest.mark.parametrize("distance", [0, 1, 3])
def test_grid_masks_against_a_loop_over_tokens(
    grid: tuple[int, int, int], block: int, num_text: int, distance: int
) -> None:
    video = math.prod(grid)
    lens = [3, 2][:num_text] + [block] * (video // block) + [video % block] * (video % block > 0)
    block_of = np.repeat(np.arange(len(lens)), lens)[sum(lens[:num_text]) :]
    size = grid[1] * grid[2]
    spatial, temporal = (torch.zeros(len(lens), len(lens), dtype=torch.bool) for _ in range(2))
    for mask in (spatial, temporal):
        mask[:num_text], mask[:, :num_text] = True, True
    for s, t in np.ndindex(video, video):
        around = min((s - t) % size, (t - s) % size)
        pair = (block_of[s], block_of[t])
        spatial[pair] |= abs(s // size - t // size) <= distance
        temporal[pair] |= around <= distance
    made = spatial_mask(grid, lens, frames=distance, num_text=num_text)
    assert torch.equal(made, spatial)
    made = temporal_mask(grid, lens, radius=distance, num_text=num_text)
    assert torch.equal(made, temporal)


def test_illegal_input() -> None:
    x = normal(1, 4, 10, 3)
    with pytest.raises(ConfigError, match="2 blocks have 9 tokens, and there are 10"):
        pooled(x, [4, 5])
    with pytest.raises(ConfigError, match="integers of at least 1"):
        pooled(x, [10, 0])
    with pytest.raises(ConfigError, match="integers of at least 1"):
        pooled(x, [5.0, 5.0])
    with pytest.raises(ConfigError, match="num_keep is -1"):
        keep_top_k(x, -1)
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="mass is"):
            keep_mass(x, bad, [1, 1, 1])
        with pytest.raises(ConfigError, match="density is"):
            keep_density(x, bad)
    for lens in ([2], [1, 1], [1, 1, 1, 1], [[1, 1, 1]]):
        with pytest.raises(ConfigError, match=r"keep_mass: \d lengths of .* for scores of 3"):
            keep_mass(x, 0.5, lens)
    with pytest.raises(ConfigError, match="frames is -1"):
        spatial_mask((3, 2, 2), [4, 4, 4], frames=-1)
    with pytest.raises(ConfigError, match="radius is -1"):
        temporal_mask((3, 2, 2), [4, 4, 4], radius=-1)
    with pytest.raises(ConfigError, match="blocks have 10 tokens, and there are 12"):
        spatial_mask((3, 2, 2), [2, 5, 5], num_text=1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_rule_gets_scaled_scores(kv_heads: int) -> None:
    lens = block_lens([40], 16)
    home = BlockLayout.striped(lens, 1, 1)
    plan = in_order(4, home, home, 1, 1, num_kv_heads=kv_heads)
    q = normal(1, 4, 40, 8)
    k, v = (normal(1, kv_heads, 40, 8, seed=seed) for seed in (1, 2))
    found: list[tuple[Tensor, PackedRows]] = []

    def keep(scores: Tensor, rows: PackedRows) -> Tensor:
        found.append((scores, rows))
        return torch.ones_like(scores, dtype=torch.bool)

    sparse_attention(q, k, v, AttentionMesh(None, None, None), plan, PooledRule(keep), scale=0.3)
    scores, rows = found[0]
    wanted = brute_scores(q, k, lens, 0.3)[:, rows.heads, rows.blocks]
    torch.testing.assert_close(scores, wanted)
