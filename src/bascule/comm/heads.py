"""Exchanges of Ulysses: a rank's tokens with all heads for all tokens with some heads.

Source: DeepSpeed Ulysses (arXiv:2309.14509), here with uneven tokens and heads, in one exchange.

Shapes: B batch, T tokens of a rank, S tokens of all U ranks, D head width. Tensors at home are
(B, T, heads, D), or (T, heads, D) of packed sequences; ranks bring their tokens in rank order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from bascule.comm.collectives import start_all_to_all
from bascule.comm.groups import RankGroup
from bascule.comm.quantized import Quantized
from bascule.traffic import HeadShares

_copy_all: Callable[[list[Tensor], list[Tensor]], None]
_copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_clone = partial(torch.clone, memory_format=torch.contiguous_format)

_NUM_SIZES = 64  # most batches, heads and widths whose sizes are remembered


class _Run(NamedTuple):
    """Consecutive ranks with equal shares of the heads."""

    start: int  # of their slice in the buffer of an exchange
    shape: tuple[int, ...]  # of the slice's view: (B, T, ranks, share of all heads, D)
    strides: tuple[int, ...]  # of the view; the buffer lies as (ranks, B, T, share, D)
    heads: list[tuple[int, int]] | None  # of each tensor, first head and number; None: all
    views: list[tuple[int, ...]]  # of each tensor, (B, T, ranks, share, D) of these heads
    shares: list[int]  # heads of each tensor that each of the ranks has


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Sizes and views of exchanges of tensors of some shapes, in both directions."""

    sent: tuple[int]  # elements of all heads and this rank's tokens, in a row
    by_heads: list[int]  # (U,) bytes of each rank's heads
    by_tokens: list[int]  # (U,) elements of each rank's tokens and this rank's heads
    whole: tuple[int, int, int, int]  # (B, S, this rank's heads of all tensors, D)
    homes: list[tuple[int, ...]]  # shape of each tensor at home
    runs: list[_Run]  # at most two, for any number of ranks

    def of_buffer(self, flat: Tensor) -> list[Tensor]:
        """Return, by run and tensor, (B, T, ranks, share, D) of a buffer."""
        parts = list[Tensor]()
        for run in self.runs:
            block = flat.as_strided(run.shape, run.strides, flat.storage_offset() + run.start)
            parts += block.split_with_sizes(run.shares, 3)
        return parts

    def of_tensors(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return, by run and tensor, (B, T, ranks, share, D) of tensors at home."""
        parts = list[Tensor]()
        for run in self.runs:
            if run.heads is None:
                parts += map(Tensor.view, xs, run.views)
            else:
                of_run = zip(xs, run.heads, run.views, strict=True)
                parts += [x.narrow(-2, *heads).view(view) for x, heads, view in of_run]
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class HeadExchange:
    """Tokens and heads of each Ulysses rank, and the exchanges between the two."""

    group: RankGroup  # the Ulysses ranks
    shares: HeadShares  # key-value heads of each rank; query heads go with theirs
    lens: Sequence[int]  # (U,) tokens that each rank brings
    # Tokens arrive rank by rank; attention wants them in `order`: (S,) indices into what arrived,
    # or slices of it one after another; None: as they arrive. `back` is the inverse.
    order: "Tensor | Sequence[slice] | None" = None
    back: "Tensor | Sequence[slice] | None" = None
    is_packed: bool = False  # whether tensors at home hold packed sequences
    num_kv_heads: int = field(init=False)  # of all ranks
    first_kv_head: int = field(init=False)  # of this rank
    own_kv_heads: int = field(init=False)
    _sizes: Callable[[int, int, tuple[int, ...]], _Sizes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.shares.num_kv_heads)
        object.__setattr__(self, "first_kv_head", self.shares.first(self.group.rank))
        object.__setattr__(self, "own_kv_heads", self.shares.of(self.group.rank))
        made = partial(_sizes_of, self.shares, self.lens, self.group.rank, self.is_packed)
        object.__setattr__(self, "_sizes", lru_cache(_NUM_SIZES)(made))

    @property
    def own_tokens(self) -> slice:
        """Where this rank's tokens lie among the tokens of all ranks."""
        first = sum(self.lens[: self.group.rank])
        return slice(first, first + self.lens[self.group.rank])

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of its own tokens, (B, T, share of the heads, D)."""
        each = x.shape[2] // self.num_kv_heads
        return x.narrow(2, self.first_kv_head * each, self.own_kv_heads * each)

    def start_to_heads(
        self, xs: Sequence[Tensor], where: str, wire: Quantized | None = None
    ) -> Callable[[], Tensor]:
        """Send tensors at home; return a function that waits for (B, S, share of heads, D)."""
        order, dtype = self.order, xs[0].dtype
        if wire is not None:
            xs = list(map(wire.pack, xs))
        factors = tuple([x.shape[-2] // self.num_kv_heads for x in xs])
        sizes = self._sizes(1 if self.is_packed else xs[0].shape[0], xs[0].shape[-1], factors)
        staging = self.group.calls.staging
        sent, parts = staging.cut("sent", sizes.sent, xs[0], sizes.of_buffer)
        _copy_all(parts, sizes.of_tensors(xs))
        batch = sizes.whole[0]
        if batch == 1 and order is None and wire is None:  # it arrives where it stays
            rows = xs[0].new_empty(sizes.whole)
            received = rows.view(-1)
        else:
            rows, received = staging.cut("received", sizes.whole, xs[0], torch.flatten)
        where = f"{where}: all_to_all (tokens to heads)"
        wait = start_all_to_all(self.group, where, received, sent, sizes.by_tokens, sizes.by_heads)

        def finish() -> Tensor:
            wait()
            whole = rows
            if batch > 1:
                parts = [part.view(batch, -1) for part in received.split(sizes.by_tokens)]
                whole = torch.cat(parts, dim=1).view(sizes.whole)
            if wire is not None:
                whole = wire.unpack(whole, dtype)
            return whole if order is None else _ordered(whole, order)

        return finish

    def start_to_tokens(
        self, rows: Tensor, heads: Sequence[int], where: str, wire: Quantized | None = None
    ) -> Callable[[], list[Tensor]]:
        """Send (B, S, share of heads, D) back; return a function that waits for tensors at home.

        `rows` has this rank's heads of all tensors side by side; `heads` is how many each has.
        """
        dtype = rows.dtype
        if self.back is not None:
            rows = _ordered(rows, self.back)
        if wire is not None:
            rows = wire.pack(rows)
        factors = tuple([num // self.own_kv_heads for num in heads])
        sizes = self._sizes(1 if self.is_packed else rows.shape[0], rows.shape[-1], factors)
        if sizes.whole[0] > 1:
            rows = torch.cat([part.reshape(-1) for part in rows.split(list(self.lens), dim=1)])
        sent = rows.contiguous().view(-1)
        staging = self.group.calls.staging
        received, parts = staging.cut("received", sizes.sent, rows, sizes.of_buffer)
        where = f"{where}: all_to_all (heads to tokens)"
        wait = start_all_to_all(self.group, where, received, sent, sizes.by_heads, sizes.by_tokens)

        def finish() -> list[Tensor]:
            wait()
            if len(sizes.runs) == 1:
                outs = list(map(Tensor.view, map(_clone, parts), sizes.homes))
            else:
                outs = list(map(received.new_empty, sizes.homes))
                _copy_all(sizes.of_tensors(outs), parts)
            return outs if wire is None else [wire.unpack(out, dtype) for out in outs]

        return finish


def _sizes_of(
    shares: HeadShares,
    lens: Sequence[int],
    rank: int,
    is_packed: bool,
    batch: int,
    width: int,
    factors: tuple[int, ...],
) -> _Sizes:
    """Return the sizes for tensors with `factors` heads for each key-value head."""
    tokens, each, own = lens[rank], sum(factors), shares.of(rank)
    home = (tokens,) if is_packed else (batch, tokens)
    runs, first, start = list[_Run](), 0, 0
    num_fewer = shares.size - shares.num_more
    for num_ranks, num in ((shares.num_more, shares.base + 1), (num_fewer, shares.base)):
        if not num_ranks:
            continue
        row, of_run, is_all = each * num * width, num_ranks * num, num_ranks == shares.size
        runs.append(
            _Run(
                start=start,
                shape=(batch, tokens, num_ranks, each * num, width),
                strides=(tokens * row, row, batch * tokens * row, width, 1),
                heads=None if is_all else [(first * f, of_run * f) for f in factors],
                views=[(batch, tokens, num_ranks, num * f, width) for f in factors],
                shares=[f * num for f in factors],
            )
        )
        first, start = first + of_run, start + num_ranks * batch * tokens * row
    return _Sizes(
        sent=(batch * tokens * each * width * shares.num_kv_heads,),
        by_heads=[batch * tokens * each * width * shares.of(r) for r in range(shares.size)],
        by_tokens=[batch * num * each * width * own for num in lens],
        whole=(batch, sum(lens), each * own, width),
        homes=[(*home, num * shares.num_kv_heads, width) for num in factors],
        runs=runs,
    )


def _ordered(rows: Tensor, order: Tensor | Sequence[slice]) -> Tensor:
    """Return (B, S, ...) tokens in an order."""
    if isinstance(order, Tensor):
        return rows.index_select(1, order)
    return torch.cat([rows[:, part] for part in order], dim=1)
