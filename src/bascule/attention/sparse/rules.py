"""Block masks made where attention runs, from pooled queries and keys.

Scores of blocks are the products of their mean queries and keys; a rule then says which blocks are
computed (SpargeAttn, without its tests of how alike the tokens of a block are).

Shapes: B batch, H query heads, T tokens, D head width, N query blocks, M key blocks.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.plan.checks import ints, number, whole


def pooled(x: Tensor, lens: npt.ArrayLike) -> Tensor:
    """Return the mean of each block of x (B, H, T, D): (B, H, N, D) in float32 (float64 stays)."""
    lens_N = ints("block lengths", lens)
    if lens_N.sum() != x.shape[2] or not lens_N.all():
        raise ConfigError(
            f"{lens_N.size} blocks have {lens_N.tolist()} tokens, and there are {x.shape[2]}: give "
            "the length of each block, at least 1"
        )
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
    """Mark (N, N) the diagonal, and rows and columns of the dense blocks, such as those of text."""
    mask = torch.eye(num_blocks, dtype=torch.bool, device=device)
    blocks = torch.as_tensor(np.asarray(dense, dtype=np.int64), device=device)
    return mask.index_fill_(0, blocks, True).index_fill_(1, blocks, True)


def keep_top_k(scores: Tensor, num_keep: int, always: Tensor | None = None) -> Tensor:
    """Keep the `num_keep` highest scores of each row, those that are always computed among them.

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
    """Keep the fewest highest scores of each row that have this share of its softmax.

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
    """Keep the highest scores of each head, so that this share of its blocks is computed.

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


def _with(masks: Tensor, always: Tensor | None) -> Tensor:
    return masks if always is None else masks | always


def _forced(scores: Tensor, always: Tensor | None) -> Tensor:
    return scores if always is None else scores.masked_fill(always, torch.inf)


def _keep_first(scores: Tensor, kept: Tensor) -> Tensor:
    """Undo the sort of rows, highest scores first, of which these places are kept."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    masks = torch.zeros_like(scores, dtype=torch.bool)
    return masks.scatter_(-1, order, kept.expand(scores.shape))
