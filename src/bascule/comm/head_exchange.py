"""The exchanges of Ulysses: a rank's tokens with all heads for all tokens with some heads.

Source: DeepSpeed Ulysses (arXiv:2309.14509), here with uneven tokens and heads, all tensors in one
exchange, and nothing of a rank's own on the wire.

Shapes: B batch, T tokens of a rank, S of all U ranks, D head width. Tensors are (B, tokens, heads,
D); ranks bring their tokens one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import AllToAll
from bascule.plan.head_shares import HeadShares

_Run = tuple[int, int, int]
"""(first key-value head, ranks, key-value heads of each)."""


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Who has which tokens and heads.

    Attributes:
        group: The Ulysses ranks.
        shares: Key-value heads of each; query heads, and packed rows, go with theirs.
        lens: (U,) tokens that each rank brings.
    """

    group: RankGroup
    shares: HeadShares
    lens: Sequence[int]

    @property
    def own_tokens(self) -> slice:
        """Where this rank's tokens are among those of all."""
        first = sum(self.lens[: self.group.rank])
        return slice(first, first + self.lens[self.group.rank])

    def own_heads(self, x: Tensor) -> Tensor:
        """(B, T, share of the heads, D) this rank's heads of its own tokens."""
        return self._heads_of(x, self.group.rank)

    def heads_of_each(self, xs: Sequence[Tensor]) -> list[int]:
        """This rank's heads of tensors that have those of all ranks."""
        own = self.shares.of(self.group.rank)
        return [x.shape[2] // self.shares.num_kv_heads * own for x in xs]

    def start_to_heads(self, xs: Sequence[Tensor], call: Call) -> Callable[[], Tensor]:
        """Send (B, T, heads, D) each; what is returned waits for (B, S, share of all heads, D).

        The result has memory of its own, and this rank's heads of all tensors side by side.
        """
        batch, num_tokens, _, width = xs[0].shape
        factors = [x.shape[2] // self.shares.num_kv_heads for x in xs]
        each, own = sum(factors) * width, self.shares.of(self.group.rank)
        sizes = [batch * num_tokens * each * of for of in self._shares]
        sent = self.group.staging.take("sent", sum(sizes), xs[0])
        for run, place in self._blocks(sent, (batch, num_tokens, sum(factors), width)):
            parts = [_per_rank(x, run, factor) for x, factor in zip(xs, factors, strict=True)]
            torch.cat(parts, dim=3, out=place)
        rows = xs[0].new_empty(batch, sum(self.lens), sum(factors) * own, width)
        received = rows.view(-1)
        if batch > 1:
            received = self.group.staging.take("received", rows.numel(), rows)
        lens = [batch * tokens * each * own for tokens in self.lens]
        marked = self._marked(call, xs[0], factors)
        moving = AllToAll(self.group, marked, received, sent, lens, sizes)

        def finish() -> Tensor:
            moving.wait()
            if batch > 1:
                come = [part.view(batch, -1) for part in received.split(lens)]
                torch.cat(come, dim=1, out=rows.view(batch, -1))
            return rows

        return finish

    def start_to_tokens(self, xs: Sequence[Tensor], call: Call) -> Callable[[], list[Tensor]]:
        """The inverse: send (B, S, share of the heads, D) each, wait for (B, T, heads, D)."""
        (batch, _, _, width), own = xs[0].shape, self.shares.of(self.group.rank)
        num_tokens, factors = self.lens[self.group.rank], [x.shape[2] // own for x in xs]
        each, rows = sum(factors) * width, xs[0] if len(xs) == 1 else torch.cat(list(xs), 2)
        if batch > 1:
            rows = torch.cat([part.reshape(-1) for part in rows.split(self.lens, dim=1)])
        lens = [batch * tokens * each * own for tokens in self.lens]
        sizes = [batch * num_tokens * each * of for of in self._shares]
        received = self.group.staging.take("received", sum(sizes), xs[0])
        marked = self._marked(call, xs[0], factors)
        sent = rows.contiguous().view(-1)
        moving = AllToAll(self.group, marked, received, sent, sizes, lens)

        def finish() -> list[Tensor]:
            moving.wait()
            heads = [factor * self.shares.num_kv_heads for factor in factors]
            outs = [xs[0].new_empty(batch, num_tokens, num, width) for num in heads]
            for run, block in self._blocks(received, (batch, num_tokens, sum(factors), width)):
                parts = block.split([factor * run[2] for factor in factors], dim=3)
                for out, part, factor in zip(outs, parts, factors, strict=True):
                    _per_rank(out, run, factor).copy_(part)
            return outs

        return finish

    def _marked(self, call: Call, x: Tensor, factors: Sequence[int]) -> Call:
        """With all that decides how many bytes go where."""
        heads = f"{factors} for each of {self.shares.num_kv_heads} heads"
        rows = f"{x.shape[0]} x {self.lens} x {heads} x {x.shape[3]} {x.dtype}"
        return Call(call.what, call.step, f"{rows}, {call.form}")

    @property
    def _shares(self) -> list[int]:
        return [self.shares.of(rank) for rank in range(self.shares.size)]

    def _blocks(
        self, flat: Tensor, shape: tuple[int, int, int, int]
    ) -> Iterator[tuple[_Run, Tensor]]:
        """Runs of ranks with equal shares, and their (ranks, B, T, heads, D) of a flat tensor.

        At most two, for any number of ranks. `shape` is (B, T, heads for each key-value head, D).
        """
        batch, tokens, each, width = shape
        first = start = 0
        for num_ranks, num in (
            (self.shares.num_more, self.shares.base + 1),
            (self.shares.size - self.shares.num_more, self.shares.base),
        ):
            stop = start + num_ranks * batch * tokens * each * num * width
            if num_ranks:
                block = flat[start:stop].view(num_ranks, batch, tokens, each * num, width)
                yield (first, num_ranks, num), block
            first, start = first + num_ranks * num, stop

    def _heads_of(self, x: Tensor, rank: int) -> Tensor:
        each = x.shape[2] // self.shares.num_kv_heads
        return x.narrow(2, self.shares.first(rank) * each, self.shares.of(rank) * each)


def _per_rank(x: Tensor, run: _Run, factor: int) -> Tensor:
    """(ranks, B, T, heads, D) view of consecutive runs of heads, one a rank."""
    first, num_ranks, num = run
    if num_ranks * num * factor != x.shape[2]:
        x = x.narrow(2, first * factor, num_ranks * num * factor)
    batch, tokens, _, width = x.shape
    return x.view(batch, tokens, num_ranks, num * factor, width).permute(2, 0, 1, 3, 4)
