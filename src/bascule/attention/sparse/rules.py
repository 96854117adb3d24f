"""Block masks made where attention runs: from pooled queries and keys, and from the video grid.

Scores of blocks are the products of their mean queries and keys; a rule then says which blocks are
computed. The means and the rules on them are those of SpargeAttn, without its tests of how alike
the tokens of a block are; spatial and temporal heads are those of Sparse VideoGen.

Shapes: B batch, H query heads, T tokens, D head width, N query blocks, M key blocks; block lengths
are (N,) or (M,) integers and add up to the tokens. Masks are bool, True is computed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import number, whole


def pooled(x: Tensor, lens: npt.ArrayLike) -> Tensor:
    """(B, H, N, D) mean of the tokens of each block, in float32 (of float64 in float64).

    Args:
        x: (B, H, T, D).
        lens: (N,) tokens of each block, at least 1.

    Raises:
        ConfigError: They do not add up to the tokens.
    """
    lens_N = _checked(lens, x.shape[2])
    starts_N = np.cumsum(lens_N) - lens_N
    step = np.arange(lens_N.max(initial=0))
    inside = step < lens_N[:, None]
    # Short blocks repeat their first token, with no weight: not even a NaN of others gets in.
    tokens = torch.from_numpy(np.where(inside, starts_N[:, None] + step, starts_N[:, None]))
    weights = torch.from_numpy(inside / lens_N[:, None])
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.index_select(2, tokens.flatten().to(x.device)).unflatten(2, tokens.shape)
    return torch.einsum("bhnld,nl->bhnd", rows.to(dtype), weights.to(x.device, dtype))


def always_computed(
    num_blocks: int, dense: npt.ArrayLike = (), *, device: torch.device | None = None
) -> Tensor:
    """(N, N) the diagonal, and the rows and columns of dense blocks, such as those of text.

    Args:
        num_blocks: N.
        dense: Indices of the dense blocks.
        device: Of the mask.
    """
    mask = torch.eye(num_blocks, dtype=torch.bool, device=device)
    blocks = torch.as_tensor(np.asarray(dense, dtype=np.int64), device=device)
    return mask.index_fill_(0, blocks, True).index_fill_(1, blocks, True)


def keep_top_k(scores: Tensor, num_keep: int, always: Tensor | None = None) -> Tensor:
    """The `num_keep` highest scores of each row, those that are always computed among them.

    Args:
        scores: (..., N, M).
        num_keep: Blocks of a row; a row of which more are always computed has these.
        always: (N, M) or the shape of the scores, bool.

    Raises:
        ConfigError: `num_keep` is negative.
    """
    num_keep = whole("keep_top_k: num_keep", num_keep)
    best = _forced(scores, always).topk(min(num_keep, scores.shape[-1]), dim=-1, sorted=False)
    masks = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, True)
    return _with(masks, always)


def keep_mass(
    scores: Tensor, mass: float, kv_lens: npt.ArrayLike, always: Tensor | None = None
) -> Tensor:
    """The fewest highest scores of each row that have this share of its softmax.

    A key block counts once a token, as if all its keys were its mean key.

    Args:
        scores: (..., N, M).
        mass: 0 to 1; at 0 nothing is kept but what is always computed.
        kv_lens: (M,) tokens of each key block.
        always: (N, M) or the shape of the scores, bool; kept too, beyond the share.

    Raises:
        ConfigError: `mass` is out of range, or there are other lengths than key blocks.
    """
    mass = number("keep_mass: mass", mass, 0.0, 1.0)
    tokens = torch.from_numpy(np.asarray(kv_lens, dtype=np.float64)).to(scores)
    if tokens.shape != scores.shape[-1:]:
        raise ConfigError(
            f"keep_mass: {tokens.numel()} lengths of key blocks for scores of {scores.shape[-1]}: "
            "give one each"
        )
    shares = (scores + tokens.log()).softmax(dim=-1)
    highest = shares.sort(dim=-1, descending=True).values
    before = highest.cumsum(dim=-1) - highest
    # Not `before < mass`: a row of NaN keeps all, so that attention shows it.
    masks = _keep_first(shares, ~(before >= mass))
    return _with(masks, always)


def keep_density(scores: Tensor, density: float | Tensor, always: Tensor | None = None) -> Tensor:
    """The highest scores of each head, so that this share of its blocks is computed.

    Args:
        scores: (..., N, M).
        density: 0 to 1, one for all, or a tensor with one a head that broadcasts to (...).
        always: (N, M) or the shape of the scores, bool; among those that are kept.

    Raises:
        ConfigError: A density is out of range.
    """
    shares = torch.as_tensor(density, dtype=torch.float64)
    if not bool(((shares >= 0.0) & (shares <= 1.0)).all()):
        raise ConfigError(f"keep_density: density is {density}, and must be between 0 and 1")
    num_blocks = scores.shape[-2] * scores.shape[-1]
    counts = (shares * num_blocks).round().expand(scores.shape[:-2]).to(scores.device)
    place = torch.arange(num_blocks, device=scores.device)
    kept = _keep_first(_forced(scores, always).flatten(-2), place < counts[..., None])
    masks = kept.unflatten(-1, scores.shape[-2:])
    return _with(masks, always)


def spatial_mask(
    grid: tuple[int, int, int], lens: npt.ArrayLike, *, frames: int = 0, num_text: int = 0
) -> Tensor:
    """(N, N) blocks with a query and a key that are at most so many frames apart.

    Args:
        grid: (frames, height, width) of the video tokens, in raster order.
        lens: (N,) tokens of each block; the first `num_text` of them are text.
        frames: Largest distance; 0 is a frame and itself.
        num_text: Text blocks, which see all and are seen by all.

    Raises:
        ConfigError: The blocks do not add up to the grid, or straddle text and video; or the
            distance is negative.
    """
    frames = whole("spatial_mask: frames", frames)
    first_N, last_N = _video_spans(grid, lens, num_text)
    size = grid[1] * grid[2]
    first_N, last_N = first_N // size, last_N // size
    apart = np.maximum(first_N[:, None] - last_N, first_N - last_N[:, None])
    return _with_text(apart <= frames, num_text)


def temporal_mask(
    grid: tuple[int, int, int], lens: npt.ArrayLike, *, radius: int = 0, num_text: int = 0
) -> Tensor:
    """(N, N) blocks with a query and a key at the same place of any two frames.

    Args:
        grid: (frames, height, width) of the video tokens, in raster order.
        lens: (N,) tokens of each block; the first `num_text` of them are text.
        radius: Tokens in raster order, modulo a frame, by which places may differ.
        num_text: Text blocks, which see all and are seen by all.

    Raises:
        ConfigError: The blocks do not add up to the grid, or straddle text and video; or the
            radius is negative.
    """
    radius = whole("temporal_mask: radius", radius)
    first_N, last_N = _video_spans(grid, lens, num_text)
    size = grid[1] * grid[2]
    # Queries and keys of two blocks are least to most tokens apart, and all distances between them
    # occur: is a multiple of a frame among them?
    least = first_N[:, None] - last_N - radius
    most = last_N[:, None] - first_N + radius
    return _with_text(most // size >= -(-least // size), num_text)


def _with(masks: Tensor, always: Tensor | None) -> Tensor:
    return masks if always is None else masks | always


def _forced(scores: Tensor, always: Tensor | None) -> Tensor:
    return scores if always is None else scores.masked_fill(always, torch.inf)


def _keep_first(scores: Tensor, kept: Tensor) -> Tensor:
    """Of each row the places that are kept once it is sorted, the highest scores first."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    masks = torch.zeros_like(scores, dtype=torch.bool)
    return masks.scatter_(-1, order, kept.expand(scores.shape))


def _checked(lens: npt.ArrayLike, num_tokens: int) -> Ints:
    lens_N: npt.NDArray[Any] = np.asarray(lens)
    if lens_N.size and (lens_N.ndim != 1 or lens_N.dtype.kind not in "iu" or lens_N.min() < 1):
        raise ConfigError(f"block lengths {lens_N}: must be one row of integers of at least 1")
    if lens_N.sum() != num_tokens:
        raise ConfigError(
            f"{lens_N.size} blocks have {lens_N.sum()} tokens, and there are {num_tokens}: give "
            "the length of each block"
        )
    return lens_N.astype(np.int64)


def _video_spans(
    grid: tuple[int, int, int], lens: npt.ArrayLike, num_text: int
) -> tuple[Ints, Ints]:
    """First and last video token of each video block."""
    lens_N = _checked(np.asarray(lens)[num_text:], grid[0] * grid[1] * grid[2])
    ends_N = np.cumsum(lens_N)
    return ends_N - lens_N, ends_N - 1


def _with_text(video: npt.NDArray[np.bool_], num_text: int) -> Tensor:
    return torch.from_numpy(np.pad(video, (num_text, 0), constant_values=True))
