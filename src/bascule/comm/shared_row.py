"""A row of sequences with tokens split over ranks, for layers that split heads instead.

Shapes: B batch, T tokens of this rank, S tokens of all ranks, H heads of all ranks, N heads of this
rank, F values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.comm.groups import RankGroup
from bascule.comm.route import BoundRoute, move
from bascule.plan.routes import Route


@dataclass(frozen=True, slots=True, eq=False)
class SharedRow:
    """The sequences of a row, and the rank of each token."""

    seq_lens: Sequence[int]  # tokens of each sequence
    group: RankGroup | None = None  # None: one rank has all tokens, in this order
    counts: Sequence[int] = (0,)  # (ranks,) tokens of each
    order: Ints | None = None  # (S,) place in rank order of each token in sequence order
    step: int = 0  # for errors
    count: Callable[[int], None] = lambda num_bytes: None  # gets the bytes sent in a forward
    _routes: dict[tuple[int, torch.device], BoundRoute] = field(default_factory=dict, init=False)

    def own_heads(self, num_heads: int) -> slice:
        """Return the heads that this rank computes; possibly none if heads are fewer than ranks."""
        rank = 0 if self.group is None else self.group.rank
        return slice(*self._bounds(num_heads)[rank : rank + 2])

    def to_heads(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all heads of own tokens (B, T, H, F) for own heads of all tokens (B, S, N, F).

        One exchange; differentiable. Padding after this rank's tokens is left out.
        """
        num_tokens, num_heads = sum(self.seq_lens), xs[0].shape[2]
        if self.group is None:
            return [x[:, :num_tokens] for x in xs]
        heads, count = self.own_heads(num_heads), self.counts[self.group.rank]
        rows = [x[:, :count].permute(1, 2, 0, 3).flatten(0, 1) for x in xs]
        sizes = num_tokens, heads.stop - heads.start
        arrived = move(self._route(num_heads, xs[0].device), rows)
        return [x.unflatten(0, sizes).permute(2, 0, 1, 3) for x in arrived]

    def to_tokens(self, x: Tensor, num_heads: int) -> Tensor:
        """Return all heads of this rank's tokens, (B, T, H, F), from (B, S, N, F)."""
        if self.group is None:
            return x
        route, sizes = self._route(num_heads, x.device), (self.counts[self.group.rank], num_heads)
        (rows,) = move(route, [x.permute(1, 2, 0, 3).flatten(0, 1)], back=True)
        return rows.unflatten(0, sizes).permute(2, 0, 1, 3)

    def _bounds(self, num_heads: int) -> list[int]:
        num_ranks = len(self.counts)
        return [rank * num_heads // num_ranks for rank in range(num_ranks + 1)]

    def _route(self, num_heads: int, device: torch.device) -> BoundRoute:
        """Return the route from (T x H) to (S x N) rows, made at first use."""
        if (num_heads, device) not in self._routes:
            assert self.group is not None and self.order is not None
            bounds, heads = self._bounds(num_heads), self.own_heads(num_heads)
            num = heads.stop - heads.start
            rows = num_heads * np.arange(self.counts[self.group.rank])
            shares = [np.arange(start, stop) for start, stop in pairwise(bounds)]
            sent = np.concatenate([np.add.outer(rows, share).ravel() for share in shares])
            received = np.add.outer(self.order * num, np.arange(num)).ravel()
            splits = len(rows) * np.diff(bounds), num * np.array(self.counts)
            where = self.group, device, (len(sent), len(received)), self.step
            self._routes[num_heads, device] = BoundRoute(
                Route(sent, *splits, received), *where, ("heads", "heads back"), count=self.count
            )
        return self._routes[num_heads, device]
