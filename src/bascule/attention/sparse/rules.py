"""Rules choose the blocks to compute, from queries and keys, where attention runs.

A rule is a function (q, k, at) of features of this rank's query blocks, and of all key blocks of
their heads. Its masks of a query block may depend on that block, on all keys of its head, and on
sums over the head by `RuleCall.sum_rows`: then masks are the same on any mesh.

Shapes: B batch, h heads of which a rank has query blocks, P most query blocks of one of them, C key
blocks of the sequence, L tokens of the longest of either kind, D head width, F features of a block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bascule.arrays import Bools, Ints, cumulative
from bascule.checks import function, ints, number, whole
from bascule.errors import ConfigError
from bascule.plan.sparse import grids


@dataclass(frozen=True, slots=True, eq=False)
class RuleCall:
    """The blocks, layer and step for which a rule is called."""

    heads: Ints  # (h,) query head
    blocks: Ints  # (h, P) query block of each row; heads with fewer repeat one, which is not used
    q_lens: Ints  # tokens of each query block of the sequence
    kv_lens: Ints  # (C,)
    q_is_text: Bools  # by query block of the sequence; all is False outside of a model
    kv_is_text: Bools  # (C,)
    scale: float  # of the scores
    device: torch.device
    # (B, h, P, F) to (B, h, 1, F): the sum over all query blocks of a head, on all ranks. A
    # collective: ranks call it equally often.
    sum_rows: Callable[[Tensor], Tensor]
    layer: int = 0  # by the order of attention calls
    step: int = 0
    is_ordered: bool = False  # heads have token orders of their own

    def of_rows(self, table: Bools) -> Tensor:
        """Return rows (h, P, C) of a table (Q, C) of all blocks of the sequence."""
        return torch.from_numpy(table).to(self.device)[torch.from_numpy(self.blocks)]

    @property
    def always(self) -> Tensor:
        """Key blocks (h, P, C) that share tokens with the query block, and all text."""
        (q, kv) = (cumulative(lens) for lens in (self.q_lens, self.kv_lens))
        overlaps = (q[:-1, None] < kv[1:]) & (kv[:-1] < q[1:, None])
        return self.of_rows(overlaps | self.q_is_text[:, None] | self.kv_is_text)


Pool = Callable[[Tensor, Tensor], Tensor]
"""From tokens (.., L, D) of blocks, and (.., L) where there is one, to features (.., F)."""


def means(tokens: Tensor, inside: Tensor) -> Tensor:
    """Return the mean of each block (.., D), in float32 (float64 stays); 0 for an empty block."""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    weights = inside.to(dtype) / inside.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.einsum("...ld,...l->...d", tokens.to(dtype), weights)


@dataclass(frozen=True, slots=True)
class BlockRule:
    """A rule that defines its own features of blocks; a plain function gets the blocks' means.

    The ring gathers features of keys, so large features cost time. None: the rule needs none.

    Attributes:
        choose: Gets q (B, h, P, F), k (B, h, C, F) and a `RuleCall`; returns bool (B, h, P, C),
            True where computed; B and h may be 1. Rows that `at.blocks` repeats do not count.
        of_queries: Returns features of query blocks.
        of_keys: Returns features of key blocks.
        with_values: Whether `of_keys` gets keys and values, (.., L, 2 D).
        name: Name of the rule, which ranks compare.
    """

    choose: Callable[[Tensor, Tensor, RuleCall], Tensor]
    of_queries: Pool | None = means
    of_keys: Pool | None = means
    with_values: bool = False
    name: str = ""

    def masks(self, q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        """Return the mask that the rule chooses, (B or 1, h or 1, P or 1, C)."""
        chosen: Any = self.choose(q, k, at)
        wanted = *q.shape[:3], at.kv_lens.size
        shape = tuple(getattr(chosen, "shape", ()))
        fits = len(shape) == 4 and all(a in (1, b) for a, b in zip(shape, wanted, strict=True))
        if not fits or chosen.dtype != torch.bool:
            raise ConfigError(
                f"the rule {self.name} gave a {type(chosen).__name__} of shape {shape}: give bool "
                f"{wanted} (batch, heads, query blocks here, key blocks), True where computed"
            )
        return chosen.expand(-1, -1, -1, wanted[-1])


def rule_of(rule: object) -> BlockRule:
    """Return a rule or a plain function as a `BlockRule` with a name."""
    made = rule if isinstance(rule, BlockRule) else BlockRule(function("rule", rule))
    name = made.name or getattr(made.choose, "__qualname__", type(made.choose).__name__)
    return replace(made, name=name)


def in_blocks(x: Tensor, lens: npt.ArrayLike, longest: int = 0) -> tuple[Tensor, Tensor]:
    """Return the tokens of N blocks of x (.., T, D) as (.., N, L, D), and (N, L) True at tokens.

    Short blocks repeat their first token, so that no NaN of another block enters them.
    """
    lens_N = ints("block lengths", lens)
    if lens_N.sum() != x.shape[-2] or not lens_N.all():
        wrong = f"{lens_N.size} blocks have {lens_N.tolist()} tokens, and there are {x.shape[-2]}"
        raise ConfigError(f"{wrong}: give lengths of at least 1 that add up to it")
    starts_N, step = np.cumsum(lens_N) - lens_N, np.arange(lens_N.max(initial=longest))
    inside = step < lens_N[:, None]
    tokens = torch.from_numpy(np.where(inside, starts_N[:, None] + step, starts_N[:, None]))
    rows = x.index_select(-2, tokens.flatten().to(x.device)).unflatten(-2, tokens.shape)
    return rows, torch.from_numpy(inside).to(x.device)


def keep_top_k(scores: Tensor, num_keep: int, always: Tensor | None = None) -> Tensor:
    """Keep the `num_keep` highest scores (.., P, C) of each row, `always` (.., P, C) among them.

    A row with more blocks in `always` keeps all of these. ConfigError: `num_keep` is negative.
    """
    num_keep = whole("keep_top_k: num_keep", num_keep)
    forced = scores if always is None else scores.masked_fill(always, torch.inf)
    best = forced.topk(min(num_keep, scores.shape[-1]), dim=-1, sorted=False)
    masks = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, True)
    return masks if always is None else masks | always


def keep_mass(
    scores: Tensor, mass: float, kv_lens: npt.ArrayLike, always: Tensor | None = None
) -> Tensor:
    """Keep in each row of scores (.., P, C) the fewest blocks that hold this share of its softmax.

    A key block counts once for each of its tokens `kv_lens` (C,), as if all had its mean key.
    `always` (.., P, C) is kept, too, beyond the share. ConfigError: `mass` is not in 0 to 1, or
    `kv_lens` does not have one length for each key block.
    """
    mass = number("keep_mass: mass", mass, 0.0, 1.0)
    tokens = torch.from_numpy(np.asarray(kv_lens, dtype=np.float64)).to(scores)
    if tokens.shape != scores.shape[-1:]:
        raise ConfigError(
            f"keep_mass: {tokens.numel()} lengths for {scores.shape[-1]} key blocks: give one each"
        )
    shares = (scores + tokens.log()).softmax(dim=-1)
    highest = shares.sort(dim=-1, descending=True, stable=True)
    before = highest.values.cumsum(dim=-1) - highest.values
    # Not `before < mass`: a row of NaN keeps all, so that attention shows it.
    masks = torch.zeros_like(scores, dtype=torch.bool)
    masks = masks.scatter_(-1, highest.indices, ~(before >= mass))
    return masks if always is None else masks | always


def top_share(keep: float) -> BlockRule:
    """Keep this share of the key blocks: those with the highest products of mean q and mean k."""
    keep = number("top_share: keep", keep, 0.0, 1.0)

    def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        num_keep = math.ceil(keep * at.kv_lens.size)
        return keep_top_k(q @ k.mT * at.scale, num_keep, at.always)

    return BlockRule(choose, name=f"top_share({keep})")


def top_mass(mass: float) -> BlockRule:
    """Keep the blocks that hold this share of the softmax of products of mean q and mean k."""
    mass = number("top_mass: mass", mass, 0.0, 1.0)

    def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        return keep_mass(q @ k.mT * at.scale, mass, at.kv_lens, at.always)

    return BlockRule(choose, name=f"top_mass({mass})")


def sparge(mass: float, alike: float) -> BlockRule:
    """Keep blocks as `top_mass` does, and also all blocks whose tokens are unlike each other.

    Source: SpargeAttn (arXiv:2502.18137), 3.2. If the mean cosine of a block's tokens is below
    `alike`, its mean does not represent it: its row and column are computed, and the softmax leaves
    out its keys.
    """
    mass, alike = number("sparge: mass", mass, 0.0, 1.0), number("sparge: alike", alike, -1.0, 1.0)

    def features(tokens: Tensor, inside: Tensor) -> Tensor:
        units = means(functional.normalize(tokens.to(means(tokens, inside).dtype), dim=-1), inside)
        cosine = units.square().sum(dim=-1, keepdim=True)  # the mean over all pairs
        return torch.cat([means(tokens, inside), cosine], dim=-1)

    def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        unlike_q, unlike_k = q[..., -1:] < alike, (k[..., -1:] < alike).mT
        scores = q[..., :-1] @ k[..., :-1].mT * at.scale
        masks = keep_mass(scores.masked_fill(unlike_k, -torch.inf), mass, at.kv_lens, at.always)
        return masks | unlike_q | unlike_k

    return BlockRule(choose, features, features, name=f"sparge({mass}, {alike})")


def spatial_or_temporal(
    grid: grids.Grid, *, near: int = 1, width: int = 32, every: int = 16
) -> BlockRule:
    """Let each head see near frames, or near places in all frames, whichever has less error.

    Source: Sparse VideoGen (arXiv:2502.01776), 3: output errors of sampled queries decide. Both
    masks include the first frame and text. The sampled queries need all keys and values, which a
    ring gathers.

    Args:
        grid: Frames, height and width of the video's tokens.
        near: Largest distance of near frames.
        width: Largest distance of near places within a frame, in tokens.
        every: Sample one query from every so many blocks.
    """
    whole("spatial_or_temporal: every", every, 1)
    spatial = _of_frames(grid, lambda far, gap: far <= near)
    temporal = _of_frames(grid, lambda far, gap: gap <= width)

    def sample(tokens: Tensor, inside: Tensor) -> Tensor:
        middle = (inside.sum(dim=-1) - 1).clamp(min=0) // 2
        index = middle[..., None, None].expand(*tokens.shape[:-2], 1, tokens.shape[-1])
        return tokens.gather(-2, index)[..., 0, :]

    def all_tokens(tokens: Tensor, inside: Tensor) -> Tensor:
        return torch.cat([tokens, inside.expand(tokens.shape[:-1])[..., None]], -1).flatten(-2)

    def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
        is_sampled = at.blocks % every == 0
        rows = np.flatnonzero(is_sampled.any(axis=0))
        longest = int(at.kv_lens.max(initial=1))
        tokens = k.unflatten(-1, (longest, -1)).flatten(2, 3)
        width = q.shape[-1]
        keys, values, inside = tokens.tensor_split((width, 2 * width), dim=-1)
        scores = (q[:, :, rows] @ keys.mT * at.scale).masked_fill(inside.mT == 0, -torch.inf)
        errors = q.new_zeros(*q.shape[:3], 2)
        full, masks = scores.softmax(dim=-1) @ values, (spatial(at), temporal(at))
        counts = torch.from_numpy(is_sampled).to(q)[:, rows]
        for place, mask in enumerate(masks):
            seen = mask[:, :, rows].repeat_interleave(longest, dim=-1)
            out = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values
            errors[:, :, rows, place] = (out - full).square().sum(dim=-1) * counts
        total = at.sum_rows(errors)
        return torch.where(total[..., :1] <= total[..., 1:], *masks)

    name = f"spatial_or_temporal({grid}, {near}, {width}, {every})"
    return BlockRule(choose, sample, all_tokens, with_values=True, name=name)


def radial(grid: grids.Grid) -> BlockRule:
    """Let queries see a window of places that halves with each doubling of the frame distance.

    Source: Radial Attention (arXiv:2506.19852), 4.2: energy decays with the distance. Instead of
    windows below one place, queries see only some frames, at growing distances. All queries see
    text and the first frame. `grid`: frames, height and width of the video's tokens.
    """
    size = grid[1] * grid[2]

    def sees(far: Ints, gap: Ints) -> Bools:
        span = 1 << np.log2(np.maximum(far, 1)).astype(np.int64)
        in_window = (gap + 1) * span <= size
        return in_window | ((far % -(-span // size) == 0) & (gap == 0))

    mask = _of_frames(grid, sees)
    return BlockRule(lambda q, k, at: mask(at), None, None, name=f"radial({grid})")


def sliding_tiles(grid: grids.Grid, tile: grids.Grid, window: grids.Grid) -> BlockRule:
    """Let queries see a window of tiles around their own tile; it stays within the video.

    Source: Sliding Tile Attention (arXiv:2502.04507), 3. A block is computed if some of its tokens
    see each other: tokens are in raster order, not in tile order.

    Args:
        grid: Frames, height and width of the video's tokens.
        tile: Tokens of a tile, along each axis.
        window: Tiles of a window, along each axis; odd.
    """
    mask = _of_grid(grid, lambda lens, kv: grids.sliding_tiles(lens, kv, grid, tile, window))
    name = f"sliding_tiles({grid}, {tile}, {window})"
    return BlockRule(lambda q, k, at: mask(at), None, None, name=name)


def _of_grid(grid: grids.Grid, make: Callable[[Ints, Ints], Bools]) -> Callable[[RuleCall], Tensor]:
    """Return rows (1, h, P, C) of what `make` gives for the video's blocks, and of text."""
    ints("grid", grid, 3)
    by_lens = lru_cache(maxsize=8)(lambda *lens: make(*(np.array(seq_lens) for seq_lens in lens)))

    def rows(at: RuleCall) -> Tensor:
        q, kv = ~at.q_is_text, ~at.kv_is_text
        if (tokens := int(at.q_lens[q].sum())) != math.prod(grid) or at.is_ordered:
            raise ConfigError(
                f"a rule for a grid {grid}: layer {at.layer} has {tokens} tokens besides text"
                f"{', in orders of the heads' if at.is_ordered else ''}: give frames, height and "
                "width of its tokens, leave out orders, and name other layers in dense_layers"
            )
        mask = np.ones((q.size, kv.size), np.bool_)
        mask[np.ix_(q, kv)] = by_lens(tuple(at.q_lens[q].tolist()), tuple(at.kv_lens[kv].tolist()))
        return at.of_rows(mask)[None]

    return rows


def _of_frames(
    grid: grids.Grid, sees: Callable[[Ints, Ints], Bools]
) -> Callable[[RuleCall], Tensor]:
    return _of_grid(grid, lambda lens, kv: grids.by_frames(lens, kv, grid, sees))
