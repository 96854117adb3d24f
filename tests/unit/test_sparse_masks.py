"""Block masks: synthetic ones against db-SP's table 1, files, and rules against loops."""

import math
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.attention.api import AttentionMesh
from bascule.attention.sparse import Clusters
from bascule.attention.sparse.attend import attend_sparse, sparse_attention
from bascule.attention.sparse.rules import (
    BlockRule,
    RuleCall,
    in_blocks,
    keep_mass,
    keep_top_k,
    means,
    radial,
    sliding_tiles,
    sparge,
    spatial_or_temporal,
)
from bascule.diffusers.sparse_layers import Blocks, SparseConfig
from bascule.errors import ConfigError
from bascule.plan.sparse import BlockLayout, block_lens, in_order, sparse_imbalance
from bascule.plan.sparse.planner import greedy
from bascule.workload import load_masks, save_masks
from bascule.workload.masks import COGVIDEOX15, WAN21, MaskModel, synthetic_masks
from tests.helpers import sparse_rules as rules
from tests.helpers.oracle import dense_attention
from tests.helpers.sparse_reference import Form, by_brute

TABLE_1 = {"wan": (1.355, 1.253, 1.246, 1.255), "cog": (1.447, 1.201, 1.159, 1.269)}
MODELS = {"wan": WAN21, "cog": COGVIDEOX15}
SMALL = MaskModel((5, 6, 8), 16, text_tokens=21, block=8)


def imbalances(model: MaskModel, num_layers: int) -> np.ndarray:
    """(4,) mean over layers of Ulysses 8, 4 x ring 2, 2 x ring 4 and ring 8."""
    per_layer = [
        [sparse_imbalance(masks, 8 // ulysses, ulysses) for ulysses in (8, 4, 2, 1)]
        for masks in (synthetic_masks(model, layer=layer) for layer in range(num_layers))
    ]
    return np.mean(per_layer, axis=0)


@pytest.mark.parametrize(("name", "block"), [("wan", 315), ("cog", 347)])
def test_the_imbalance_of_table_1(name: str, block: int) -> None:
    """With larger blocks, so that 20 layers take seconds; 8 ranks have equally many of them."""
    model = replace(MODELS[name], block=block)
    assert model.block_lens.size % 8 == 0
    np.testing.assert_allclose(imbalances(model, 20), TABLE_1[name], atol=0.03)


@pytest.mark.stress
@pytest.mark.parametrize("name", ["wan", "cog"])
def test_the_imbalance_of_table_1_at_full_size(name: str) -> None:
    np.testing.assert_allclose(imbalances(MODELS[name], 10), TABLE_1[name], atol=0.03)


@pytest.mark.parametrize(("name", "heads_only"), [("wan", 1.428), ("cog", 1.513)])
def test_the_imbalance_of_dynamic_masks(name: str, heads_only: float) -> None:
    model = replace(MODELS[name], block=640, head_imbalance=heads_only)
    measured = [sparse_imbalance(synthetic_masks(model, layer=layer), 1, 8) for layer in range(20)]
    assert np.mean(measured) == pytest.approx(heads_only, abs=0.03)


@pytest.mark.parametrize("density", [0.41, 0.68, 0.95, 1 - 1e-6])
def test_density_and_what_is_always_computed(density: float) -> None:
    model = replace(SMALL, density=density)
    assert model.block_lens.tolist() == [8, 8, 5] + [8] * 30
    for layer in range(4):
        masks = synthetic_masks(model, layer=layer, seed=9)
        assert masks.mean() == pytest.approx(density, abs=0.02)
        for always in (masks[:, :3], masks[:, :, :3], masks[:, np.arange(33), np.arange(33)]):
            assert always.all()
        uneven = np.ptp(masks[:, 3:].sum(axis=2), axis=1)
        assert uneven.any() == (density < 0.999)


def test_a_pure_function() -> None:
    masks = synthetic_masks(SMALL, layer=3, step=7, seed=5)
    np.testing.assert_array_equal(masks, synthetic_masks(SMALL, layer=3, step=7, seed=5))
    for other in ({"layer": 4}, {"seed": 6}, {"step": 40}):
        changed = synthetic_masks(SMALL, **({"layer": 3, "step": 7, "seed": 5} | other))
        assert (masks != changed).mean() > 0.02, other


def test_default_drift_needs_as_many_plans_as_the_paper_says() -> None:
    """5 plans in 50 steps for SpargeAttn on Wan2.1, with a threshold of 1.10."""
    model = replace(WAN21, grid=(4, 4, 8), block=8, head_imbalance=1.428, field_spread=0.0)
    num_plans = 0
    for layer in range(5):
        rank_of = np.zeros(model.num_heads, np.int64)
        for step in range(50):
            counts = synthetic_masks(model, layer=layer, step=step).sum(axis=(1, 2))
            loads = np.bincount(rank_of, counts, 8)
            if loads.max() > 1.10 * loads.mean():
                rank_of = greedy(counts, 8)
                num_plans += 1
    assert 3 <= num_plans / 5 <= 7


@pytest.mark.parametrize(
    "model",
    [
        MaskModel((1, 1, 1), 1),
        MaskModel((1, 1, 1), 3, text_tokens=1),
        MaskModel((2, 3, 5), 1, block=1),
        MaskModel((2, 3, 5), 5, head_imbalance=1.0, block=4),
        MaskModel((2, 3, 5), 11, head_imbalance=50.0, block=4),
        MaskModel((2, 3, 5), 8, density=0.999, block=4),
        MaskModel((2, 3, 5), 8, density=1e-6, block=4),
        MaskModel((2, 3, 5), 8, field_spread=0.0, step_drift=0.0, layer_drift=0.0, block=4),
        MaskModel((2, 4, 4), 2, density=1e-9, block=8),
        MaskModel((2, 4, 4), 2, head_contrast=1e3, step_drift=1e3, block=8),
    ],
)
def test_degenerate_models(model: MaskModel) -> None:
    masks = synthetic_masks(model, layer=2, step=3)
    num_blocks = model.block_lens.size
    assert masks.shape == (model.num_heads, num_blocks, num_blocks)
    assert masks[:, np.arange(num_blocks), np.arange(num_blocks)].all()


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 3, 5, 9), (2, 2, 3, 5, 4), (1, 1, 1)])
@pytest.mark.parametrize("form", ["npy", "npz", "packed"])
def test_files(tmp_path: Path, shape: tuple[int, ...], form: str) -> None:
    masks = np.random.default_rng(0).random(shape) < 0.4
    masks.flat[-1] = True
    path = tmp_path / f"masks.{'npy' if form == 'npy' else 'npz'}"
    ways = {"npy": np.save, "npz": lambda to, x: np.savez(to, masks=x), "packed": save_masks}
    ways[form](path, masks)
    loaded = load_masks(path)
    assert loaded.dtype == np.bool_ and isinstance(loaded, np.memmap) == (form == "npy")
    assert form != "packed" or path.stat().st_size < 700 + masks.size // 8
    np.testing.assert_array_equal(loaded, masks.reshape((1,) * (5 - len(shape)) + shape))


BITS, ONES = np.zeros(4, np.uint8), np.ones((2, 4, 4), np.bool_)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"masks": ONES.astype(np.uint8)}, r"masks are uint8.*astype\(bool\)"),
        ({"masks": ONES[0]}, r"shape \(4, 4\).*heads, q_blocks, kv_blocks"),
        ({"masks": np.ones((1,) * 6, np.bool_)}, r"\(steps, layers\)"),
        ({"masks": ONES[:, :0]}, r"shape \(2, 0, 4\).*at least one"),
        ({"masks": ~ONES}, "no block .* is computed.*~masks"),
        ({"packed": BITS, "shape": np.array([2, 4, 4])}, "no block of these"),
        ({"mask": ONES}, "holds mask; it must hold masks, or packed"),
        ({"packed": BITS}, "holds packed; it must hold masks"),
        ({}, "holds nothing"),
        ({"masks": np.array([{}])}, "cannot read masks"),
        ({"packed": BITS, "shape": np.array([2, 4, 5])}, "a bit for each cell"),
        ({"packed": BITS.astype(np.int8), "shape": np.array([2, 4, 4])}, "packed is int8"),
        ({"packed": BITS, "shape": np.array([2.0, 4, 4])}, "a bit for each cell"),
        ({"packed": BITS, "shape": np.array([-2, -4, 4])}, "a bit for each cell"),
    ],
)
def test_archives_that_hold_no_masks(
    tmp_path: Path, content: dict[str, np.ndarray], message: str
) -> None:
    path = tmp_path / "masks.npz"
    np.savez(path, **content)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=message) as error:
        load_masks(path)
    assert str(path) in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    masks = np.ones((2, 30, 30), np.bool_)
    np.save(tmp_path / "cut.npy", masks)
    np.savez(tmp_path / "damaged.npz", masks=masks)
    npy, damaged = (bytearray((tmp_path / x).read_bytes()) for x in ("cut.npy", "damaged.npz"))
    with zipfile.ZipFile(tmp_path / "damaged.npz") as archive:
        damaged[archive.getinfo("masks.npy").header_offset + 500] ^= 255  # not its checksum's
    contents = {"cut.npy": npy[:-9], "text.npy": b"no masks", "empty.npz": b"", "npy.npz": npy}
    contents |= {"zip.npz": b"PK\3\4 cut", "damaged.npz": damaged}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "missing.npz"):
        with pytest.raises(ConfigError, match=f"cannot read masks from .*{name}"):
            load_masks(tmp_path / name)
    with pytest.raises(ConfigError, match=r"masks\.pt is not a mask file.*\.npy or an \.npz"):
        load_masks(tmp_path / "masks.pt")


# Masks from pooled queries and keys, and from the grid


LENS, KV_LENS = (4, 3, 8, 8, 8, 1, 8, 2), (8, 8, 5, 8, 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


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
    torch.testing.assert_close(means(*in_blocks(x, LENS)), expected, rtol=1e-12, atol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        low = means(*in_blocks(x.to(dtype), LENS))
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), expected, rtol=0, atol=10 * tolerance)


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


def always_computed(num_blocks: int, dense: tuple[int, ...]) -> Tensor:
    lens, is_text = np.ones(num_blocks, np.int64), np.isin(np.arange(num_blocks), dense)
    where = np.zeros(1, np.int64), np.arange(num_blocks)[None], lens, lens
    return RuleCall(*where, is_text, is_text, 1.0, torch.device("cpu"), lambda x: x).always[0]


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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_rule_gets_means_of_heads_and_the_scale(kv_heads: int) -> None:
    lens = block_lens([40], 16)
    home = BlockLayout.striped(lens, 1, 1)
    plan = in_order(4, home, home, 1, 1, num_kv_heads=kv_heads)
    q = normal(1, 4, 40, 8)
    k, v = (normal(1, kv_heads, 40, 8, seed=seed) for seed in (1, 2))
    seen: list[tuple[Tensor, RuleCall]] = []

    def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        seen.append((q @ k.mT * at.scale, at))
        return torch.ones(1, 1, 3, 3, dtype=torch.bool)

    alone = AttentionMesh(None, None, None)
    sparse_attention(q, k, v, alone, plan, BlockRule(choose), scale=0.3)
    scores, at = seen[0]
    assert at.heads.tolist() == [0, 1, 2, 3] and at.blocks.tolist() == [[0, 1, 2]] * 4
    torch.testing.assert_close(scores, brute_scores(q, k, lens, 0.3))


LONG, WIDE = (17, 1, 3), ((3, 4, 5), (2, 3, 2), (3, 1, 3))
FAR, TILES = partial(rules.radial, LONG), partial(rules.tiles, *WIDE)
EITHER = partial(rules.either, (5, 3, 4), 0, 2, 3)
BRUTE_CASES = {
    **{name: (*pair, rules.GRID, (5,)) for name, pair in rules.RULES.items()},
    "radial, far": (radial(LONG), rules.of_places(FAR, LONG), LONG, ()),
    "tiles, a wide window": (
        *(sliding_tiles(*WIDE), rules.of_places(TILES, WIDE[0]), WIDE[0], (5, 1)),
    ),
    "temporal or spatial, wider": (
        *(spatial_or_temporal((5, 3, 4), near=0, width=2, every=3), EITHER, (5, 3, 4), (2,)),
    ),
    "sparge, all unlike": (sparge(0.5, 0.99), partial(rules.sparge, 0.5, 0.99), (2, 3, 4), ()),
    "sparge, all alike": (sparge(0.7, -1.0), partial(rules.sparge, 0.7, -1.0), (2, 3, 4), (3,)),
}


def attended(
    rule: Any, blocks: tuple[int, int], text: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[Ints], list[Any], Any]:
    """Lengths of blocks of text and the rest, which are text, and attention under a rule."""
    segments = (*text, q.shape[2] - sum(text))
    lens = [block_lens(segments, block) for block in blocks]
    homes = [BlockLayout.striped(one, 1, 1) for one in lens]
    plan = in_order(q.shape[1], homes[0], homes[1], 1, 1, num_kv_heads=k.shape[1])
    num_text = [block_lens(text, block).size for block in blocks]
    is_text = [np.arange(one.size) < num for one, num in zip(lens, num_text, strict=True)]
    of_blocks: Any = Blocks(lens[0], lens[1], *is_text)
    seen = SparseConfig(rule=rule).seen(None, 0, 0, of_blocks)
    return lens, is_text, attend_sparse(q, k, v, AttentionMesh(None, None, None), plan, seen)


@pytest.mark.parametrize("case", BRUTE_CASES.values(), ids=BRUTE_CASES)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 4), (7, 7), (6, 3), (3, 7)])
def test_rules_against_brute_force(
    case: tuple[BlockRule, rules.Brute, rules.Grid, tuple[int, ...]], blocks: tuple[int, int]
) -> None:
    rule, brute, grid, text = case
    segments = (*text, math.prod(grid))
    q, k, v = (normal(2, 2, sum(segments), 8, seed=seed) for seed in range(3))
    _, is_text, (_, masks) = attended(rule, blocks, text, q, k, v)
    form = Form(segments, (*(True for _ in text), False))
    wanted = by_brute(q, k, v, form, blocks, brute)
    wanted |= torch.from_numpy(is_text[0][:, None] | is_text[1])
    assert 0.0 < wanted.double().mean() <= 1.0
    found = np.broadcast_to(masks, (2, *masks.shape[1:])).reshape(wanted.shape)
    np.testing.assert_array_equal(found, wanted.numpy())


CLUSTERS = {
    "as published": Clusters(5, 6, 0.5),
    "runs of the sequence": Clusters(5, 6, 0.5, rounds=0),
    "more than tokens": Clusters(40, 50, 0.7, rounds=3),
    "one": Clusters(1, 1, 0.1),
}


@pytest.mark.parametrize("text", [(), (5,)])
@pytest.mark.parametrize("rule", CLUSTERS.values(), ids=CLUSTERS)
def test_clusters_against_brute_force(rule: Clusters, text: tuple[int, ...]) -> None:
    """Outputs, and the keys that a query block sees on average, by which heads are dealt."""
    size = sum(text) + 23
    q, k, v = (normal(2, heads, size, 8, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    (lens, _), _, (out, counts) = attended(rule, (4, 4), text, q, k, v)
    brute = partial(rules.clusters, rule.num_q, rule.num_kv, rule.mass, rule.rounds)
    form = Form((*text, 23), (*(True for _ in text), False))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    mask = by_brute(q, k, v, form, (1, 1), brute)
    of_text = form.is_text(1)
    mask |= of_text[:, None] | of_text
    torch.testing.assert_close(out, dense_attention(q, k, v, mask)[0])
    parts = mask[0].sum(-1).double().split(lens.tolist(), dim=1)
    means = torch.stack([one.mean(1) for one in parts], dim=1)
    np.testing.assert_allclose(counts, means.reshape(1, -1, 1), atol=0.501)
