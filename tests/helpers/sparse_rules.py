"""Rules of block-sparse attention by brute force: token by token, in one process."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.attention.sparse import rules

Lens = list[int]
Grid = tuple[int, int, int]
# Of a head: queries, keys and values (S, D), blocks of queries and of keys, which tokens are text
# (S,) bool, to (N, M) bool; text is put on top by whoever calls.
Brute = Callable[[Tensor, Tensor, Tensor, Lens, Lens, Tensor], Tensor]


def spans(lens: Lens) -> list[range]:
    bounds = [0, *itertools.accumulate(lens)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def on_grid(
    sees: Callable[[Any, Any], bool], grid: Grid, q_lens: Lens, kv_lens: Lens, is_text: Tensor
) -> Tensor:
    """A block sees another if a token of one sees a token of the other."""
    place = dict(zip((~is_text).nonzero()[:, 0].tolist(), np.ndindex(*grid), strict=True))
    mask = torch.zeros(len(q_lens), len(kv_lens), dtype=torch.bool)
    for (i, rows), (j, columns) in itertools.product(
        enumerate(spans(q_lens)), enumerate(spans(kv_lens))
    ):
        pairs = itertools.product(rows, columns)
        mask[i, j] = any(a in place and b in place and sees(place[a], place[b]) for a, b in pairs)
    return mask


def spatial(near: int, a: Any, b: Any) -> bool:
    return abs(a[0] - b[0]) <= near or b[0] == 0


def temporal(width: int, grid: Grid, a: Any, b: Any) -> bool:
    return abs((a[1] - b[1]) * grid[2] + a[2] - b[2]) <= width or b[0] == 0


def radial(grid: Grid, a: Any, b: Any) -> bool:
    """The formula of the paper, and the first frame."""
    size, far = grid[1] * grid[2], max(abs(a[0] - b[0]), 1)
    gap, span = abs((a[1] - b[1]) * grid[2] + a[2] - b[2]), 1
    while 2 * span <= far:
        span *= 2
    if span <= size and gap + 1 <= size / span:
        return True
    return b[0] == 0 or (gap == 0 and abs(a[0] - b[0]) % int(np.ceil(span / size)) == 0)


def tiles(grid: Grid, tile: Grid, window: Grid, a: Any, b: Any) -> bool:
    """The window of the tiles that lies inside of the video and has its centre nearest to a's."""
    for axis in range(3):
        num = -(-grid[axis] // tile[axis])
        mine, other = a[axis] // tile[axis], b[axis] // tile[axis]
        width = min(window[axis], num)
        starts = range(num - width + 1)
        start = min(starts, key=lambda s: abs(s + window[axis] // 2 - mine))
        if not start <= other < start + width:
            return False
    return True


def brute_of(rule: Mapping[str, float]) -> Brute:
    """Return what keeps a share of the blocks, or a mass of which none is left out as unlike."""
    return partial(top_share, rule["keep"]) if "keep" in rule else partial(sparge, rule["mass"], -1)


def sparge(
    mass: float,
    alike: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Lens,
    kv_lens: Lens,
    is_text: Tensor,
) -> Tensor:
    def cosine(x: Tensor) -> float:
        if alike <= -1.0:
            return 1.0
        pairs = [float(torch.cosine_similarity(a, b, dim=0)) for a in x for b in x]
        return sum(pairs) / len(pairs)

    queries, keys = q.split(q_lens), k.split(kv_lens)
    is_alike = [cosine(x) >= alike for x in keys]
    mask = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for i, rows in enumerate(queries):
        scores = [float(rows.mean(0) @ x.mean(0)) * q.shape[-1] ** -0.5 for x in keys]
        weights = np.array(
            [np.exp(s) * len(x) * a for s, x, a in zip(scores, keys, is_alike, strict=True)]
        )
        shares, total = weights / max(weights.sum(), 1e-300), 0.0
        for j in np.argsort(-shares):
            mask[i, j] = bool(total < mass and weights.any())
            total += shares[j]
        mask[i] |= ~torch.tensor(is_alike) | (cosine(rows) < alike)
        mask[i, [bool(set(spans(q_lens)[i]) & set(x)) for x in spans(kv_lens)]] = True
    return mask


def top_share(
    keep: float, q: Tensor, k: Tensor, v: Tensor, q_lens: Lens, kv_lens: Lens, is_text: Tensor
) -> Tensor:
    """The highest products of means; a row's own blocks and those of text come first.

    Tokens of NaN, which none sees, do not count.
    """
    mask = torch.zeros(len(q_lens), len(kv_lens), dtype=torch.bool)
    means = torch.stack([x.nanmean(0).nan_to_num() for x in k.split(kv_lens)])
    for i, rows in enumerate(spans(q_lens)):
        own = [bool(is_text[x.start]) or bool(set(rows) & set(x)) for x in spans(kv_lens)]
        scores = means @ q[rows].nanmean(0).nan_to_num()
        scores[torch.tensor(own)] = torch.inf
        mask[i, scores.argsort(descending=True)[: int(np.ceil(keep * len(own)))]] = True
        mask[i, own] = True
    return mask


def either(
    grid: Grid,
    near: int,
    width: int,
    every: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Lens,
    kv_lens: Lens,
    is_text: Tensor,
) -> Tensor:
    """The mask whose outputs of sampled queries are nearest to those of dense attention."""
    text = [bool(is_text[x.start]) for x in spans(kv_lens)]
    masks = list[Tensor]()
    for sees in (partial(spatial, near), partial(temporal, width, grid)):
        mask = on_grid(sees, grid, q_lens, kv_lens, is_text)
        mask[:, text] = True
        mask[[bool(is_text[x.start]) for x in spans(q_lens)]] = True
        masks.append(mask)
    errors = [0.0, 0.0]
    for i, rows in enumerate(spans(q_lens)):
        if i % every:
            continue
        scores = k @ q[rows[(len(rows) - 1) // 2]] * q.shape[-1] ** -0.5
        for place, mask in enumerate(masks):
            seen = mask[i].repeat_interleave(torch.tensor(kv_lens))
            out = scores.masked_fill(~seen, -torch.inf).softmax(0) @ v
            errors[place] += float((out - scores.softmax(0) @ v).square().sum())
    return masks[0] if errors[0] <= errors[1] else masks[1]


def of_places(sees: Callable[[Any, Any], bool], grid: Grid) -> Brute:
    return lambda q, k, v, q_lens, kv_lens, text: on_grid(sees, grid, q_lens, kv_lens, text)


def k_means(x: Tensor, number: int, rounds: int, is_counted: Tensor) -> Tensor:
    """The cluster of each token; runs at first. Only tokens that count make means."""
    labels = torch.arange(len(x)) * number // max(len(x), 1)
    for _ in range(rounds):
        members = [x[(labels == n) & is_counted] for n in range(number)]
        means = {n: one.mean(0) for n, one in enumerate(members) if len(one)}
        far = [{n: float((t - mean).square().sum()) for n, mean in means.items()} for t in x]
        labels = torch.tensor([min(one, key=lambda n: one[n]) if one else 0 for one in far])
    return labels


def clusters(
    num_q: int,
    num_kv: int,
    mass: float,
    rounds: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Lens,
    kv_lens: Lens,
    is_text: Tensor,
) -> Tensor:
    """Blocks are tokens. Tokens of NaN, which none sees, do not count."""
    video = (~is_text).nonzero()[:, 0]
    is_seen = ~k[video].isnan().any(-1)
    queries, keys = (x[video].nan_to_num() for x in (q, k))
    of_q, of_k = (k_means(x, n, rounds, is_seen) for x, n in ((queries, num_q), (keys, num_kv)))
    groups = [((of_k == n) & is_seen).nonzero()[:, 0] for n in range(num_kv)]
    mask = torch.zeros(len(q_lens), len(kv_lens), dtype=torch.bool)
    for n in range(num_q):
        rows = (of_q == n).nonzero()[:, 0]
        mean = queries[rows[is_seen[rows]]].sum(0) / max(int(is_seen[rows].sum()), 1)
        weights = torch.zeros(num_kv).double()
        for j, group in enumerate(groups):
            if len(group):
                weights[j] = len(group) * (mean @ keys[group].mean(0) * q.shape[-1] ** -0.5).exp()
        total = 0.0
        for j in weights.argsort(descending=True).tolist():
            if total < mass:
                mask[video[rows][:, None], video[groups[j]]] = True
            total += float(weights[j] / weights.sum())
    return mask


GRID: Grid = (4, 2, 3)
RULES: dict[str, tuple[rules.BlockRule, Brute]] = {  # for a video of this grid
    "sparge": (rules.sparge(0.5, 0.3), partial(sparge, 0.5, 0.3)),
    "spatial or temporal": (
        rules.spatial_or_temporal(GRID, near=1, width=1, every=2),
        partial(either, GRID, 1, 1, 2),
    ),
    "radial": (rules.radial(GRID), of_places(partial(radial, GRID), GRID)),
    "sliding tiles": (
        rules.sliding_tiles(GRID, (2, 1, 2), (1, 1, 3)),
        of_places(partial(tiles, GRID, (2, 1, 2), (1, 1, 3)), GRID),
    ),
}
