"""The exchanges of Ulysses over a mesh: a rank's tokens with all heads for all tokens with some.

Source: DeepSpeed Ulysses (arXiv:2309.14509), here with uneven tokens and heads, all tensors in one
exchange, and nothing of a rank's own on the wire.

Shapes: as in `ops`; each of U ranks brings its tokens in n parts, and a rank with some of the heads
has the first parts of all ranks, then the second ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule.attention.ulysses import HeadShares
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import Transfers


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Who has which tokens and heads.

    Attributes:
        group: The Ulysses ranks.
        shares: Key-value heads of each; query heads, and packed rows, go with theirs.
        lens: (U, n) tokens that each rank brings, in n parts.
    """

    group: RankGroup
    shares: HeadShares
    lens: tuple[tuple[int, ...], ...]

    @property
    def own_tokens(self) -> slice:
        """Where this rank's tokens are among those of all, if they are one part."""
        (first,) = self._parts_of(self.group.rank)
        return slice(first[0], first[1])

    def own_heads(self, x: Tensor) -> Tensor:
        """(B, share of the heads, T, D) this rank's heads of its own tokens."""
        return self._heads_of(x, self.group.rank)

    def start_to_heads(self, xs: Sequence[Tensor], form: str) -> Callable[[], list[Tensor]]:
        """Send (B, heads, T, D) each; what is returned waits for (B, share of the heads, S, D).

        `form` says what else must be the same on all ranks. What arrives is in memory of its own,
        as (B, S, share of the heads, D).
        """
        rank, (batch, _, num_tokens, width) = self.group.rank, xs[0].shape
        each = sum(x.shape[1] for x in xs) // self.shares.num_kv_heads * width
        sent = self._take(
            "sent", xs[0], [batch * num_tokens * each * self.shares.of(r) for r in self._ranks]
        )
        for other, place in sent.items():
            parts = [self._heads_of(x, other).transpose(1, 2) for x in xs]
            heads = sum(part.shape[2] for part in parts)
            torch.cat(parts, dim=2, out=place.view(batch, num_tokens, heads, width))
        own = self.shares.of(rank)
        received = self._take("received", xs[0], [batch * sum(n) * each * own for n in self.lens])
        call = self._call("tokens to heads", form, xs)
        transfers = Transfers(self.group, call, sent, received)

        def finish() -> list[Tensor]:
            transfers.wait()
            sizes = [self._heads_of(x, rank).shape[1] for x in xs]
            come = {
                other: x.view(batch, sum(self.lens[other]), sum(sizes), width).split(sizes, 2)
                for other, x in received.items()
            }
            come[rank] = tuple(self.own_heads(x).transpose(1, 2) for x in xs)
            wholes = [self._whole([come[r][i] for r in self._ranks]) for i in range(len(xs))]
            return [whole.transpose(1, 2) for whole in wholes]

        return finish

    def start_to_tokens(self, xs: Sequence[Tensor], form: str) -> Callable[[], list[Tensor]]:
        """The inverse: send (B, share of the heads, S, D) each, wait for (B, heads, T, D).

        What `xs` hold of this rank's own tokens is read by what waits, and may be written later.
        """
        rank, (batch, _, _, width) = self.group.rank, xs[0].shape
        own, num_tokens = self.shares.of(rank), sum(self.lens[rank])
        factors = [x.shape[1] // own for x in xs]
        each = sum(factors) * width
        sent = self._take("sent", xs[0], [batch * sum(n) * each * own for n in self.lens])
        for other, place in sent.items():
            parts = [self._tokens_of(x, other) for x in xs]
            if len(parts) == 1 and parts[0].is_contiguous():
                sent[other] = parts[0]
            else:
                rows = place.view(batch, sum(self.lens[other]), sum(factors) * own, width)
                torch.cat(parts, dim=2, out=rows)
        received = self._take(
            "received", xs[0], [batch * num_tokens * each * self.shares.of(r) for r in self._ranks]
        )
        call = self._call("heads to tokens", form, xs)
        transfers = Transfers(self.group, call, sent, received)

        def finish() -> list[Tensor]:
            transfers.wait()
            come: dict[int, Sequence[Tensor]] = {}
            for other, x in received.items():
                sizes = [factor * self.shares.of(other) for factor in factors]
                come[other] = x.view(batch, num_tokens, sum(sizes), width).split(sizes, dim=2)
            come[rank] = tuple(self._tokens_of(x, rank) for x in xs)
            wholes = [torch.cat([come[r][i] for r in self._ranks], 2) for i in range(len(xs))]
            return [whole.transpose(1, 2) for whole in wholes]

        return finish

    def _call(self, direction: str, form: str, xs: Sequence[Tensor]) -> Call:
        alike = xs[0].shape[0], xs[0].shape[3], len(xs), xs[0].dtype, self.shares, self.lens
        return Call(f"all_to_all ({direction})", form=f"{alike} {form}")

    @property
    def _ranks(self) -> range:
        return range(self.shares.size)

    def _take(self, role: str, like: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
        """Memory for each other rank."""
        others = {r: size for r, size in enumerate(sizes) if r != self.group.rank}
        flat = self.group.staging.take(role, sum(others.values()), like)
        return dict(zip(others, flat.split(list(others.values())), strict=True))

    def _heads_of(self, x: Tensor, rank: int) -> Tensor:
        each = x.shape[1] // self.shares.num_kv_heads
        return x.narrow(1, self.shares.first(rank) * each, self.shares.of(rank) * each)

    def _tokens_of(self, x: Tensor, rank: int) -> Tensor:
        """(B, tokens of a rank, share of the heads, D) of those of all ranks."""
        parts = [x[:, :, start:stop] for start, stop in self._parts_of(rank)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)

    def _parts_of(self, rank: int) -> list[tuple[int, int]]:
        """Where the tokens of a rank are among those of all."""
        found: list[tuple[int, int]] = []
        first = 0
        for part in zip(*self.lens, strict=True):
            start = first + sum(part[:rank])
            found.append((start, start + part[rank]))
            first += sum(part)
        return found

    def _whole(self, by_rank: Sequence[Tensor]) -> Tensor:
        """(B, S, heads, D) from the (B, T, heads, D) of all ranks."""
        pairs = zip(by_rank, self.lens, strict=True)
        parts = [x.split(lens, dim=1) for x, lens in pairs]
        return torch.cat([part for parts_of in zip(*parts, strict=True) for part in parts_of], 1)
