"""Exchanges of Ulysses: a rank's tokens with all heads for all tokens with some heads.

Source: DeepSpeed Ulysses (arXiv:2309.14509), here with uneven tokens and heads, in one exchange.

Shapes: B batch, T tokens of a rank, S of all U ranks, D head width. Tensors at home are (B, T,
heads, D), or (T, heads, D) of packed sequences; ranks bring their tokens one after the other.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bascule.comm.collectives import start_all_to_all
from bascule.comm.groups import RankGroup
from bascule.comm.quantized import Quantized
from bascule.traffic import HeadShares

_NUM_FORMS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive ranks with equal shares of the heads."""

    start: int  # where what goes to them, or comes from them, begins in the buffer
    shape: tuple[int, ...]  # (B, T, ranks, share of all heads, D) of that
    strides: tuple[int, ...]  # in the buffer, which is (ranks, B, T, share, D) there
    heads: list[tuple[int, int]] | None  # of each tensor, their first and how many; None: all
    views: list[tuple[int, ...]]  # of each tensor, (B, T, ranks, share, D) of these
    shares: list[int]  # heads of each tensor that each of the ranks has

    def of_buffer(self, flat: Tensor) -> Tensor:
        """Return (B, T, ranks, share of all heads, D) of a buffer, in one operator."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)

    def of_tensors(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return (B, T, ranks, share, D) of each tensor with the heads of all ranks."""
        if self.heads is not None:
            pairs = zip(xs, self.heads, strict=True)
            xs = [x.narrow(-2, first, num_heads) for x, (first, num_heads) in pairs]
        return list(map(Tensor.view, xs, self.views))


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Sizes and views of exchanges of tensors of some shapes, in both directions."""

    sent: tuple[int]  # elements of all heads and this rank's tokens, in a row
    by_heads: list[int]  # (U,) of these, those of each rank's heads
    by_tokens: list[int]  # (U,) elements of each rank's tokens and this rank's heads
    whole: tuple[int, int, int, int]  # (B, S, this rank's heads of all tensors, D)
    homes: list[tuple[int, ...]]  # shape of each tensor at home
    runs: list[_Run]  # at most two, for any number of ranks


@dataclass(frozen=True, slots=True, eq=False)
class HeadExchange:
    """Tokens and heads of each Ulysses rank, and the exchanges between the two."""

    group: RankGroup  # the Ulysses ranks
    shares: HeadShares  # key-value heads of each; query heads, and packed rows, go with theirs
    lens: Sequence[int]  # (U,) tokens that each rank brings
    # Tokens arrive rank by rank; attention wants them in `order`: (S,) indices into the arrived, or
    # slices of them one after another; None: as they arrive. `back` is the inverse.
    order: "Tensor | Sequence[slice] | None" = None
    back: "Tensor | Sequence[slice] | None" = None
    is_packed: bool = False  # whether tensors at home are those of packed sequences
    num_kv_heads: int = field(init=False)  # of all ranks
    first_kv_head: int = field(init=False)  # of this rank
    own_kv_heads: int = field(init=False)
    _forms: dict[Hashable, _Form] = field(default_factory=dict[Hashable, _Form], repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.shares.num_kv_heads)
        object.__setattr__(self, "first_kv_head", self.shares.first(self.group.rank))
        object.__setattr__(self, "own_kv_heads", self.shares.of(self.group.rank))

    @property
    def own_tokens(self) -> slice:
        """Place of this rank's tokens among those of all."""
        first = sum(self.lens[: self.group.rank])
        return slice(first, first + self.lens[self.group.rank])

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of its own tokens, (B, T, share of the heads, D)."""
        each = x.shape[2] // self.num_kv_heads
        return x.narrow(2, self.first_kv_head * each, self.own_kv_heads * each)

    def start_to_heads(
        self, xs: Sequence[Tensor], where: str, quantized: Quantized | None = None
    ) -> Callable[[], Tensor]:
        """Send tensors at home; the result waits for (B, S, share of all heads, D), new memory."""
        order, dtype = self.order, xs[0].dtype
        if quantized is not None:
            xs = list(map(quantized.pack, xs))
        factors = tuple([x.shape[-2] // self.num_kv_heads for x in xs])
        form = self._form(xs[0], factors)
        sent = self.group.calls.staging.take("sent", form.sent, xs[0])
        for run in form.runs:
            torch.cat(run.of_tensors(xs), dim=3, out=run.of_buffer(sent))
        batch = form.whole[0]
        if batch == 1 and order is None and quantized is None:  # it arrives where it stays
            rows = xs[0].new_empty(form.whole)
        else:
            rows = self.group.calls.staging.take("received", form.whole, xs[0])
        received = rows.view(-1)
        where = f"{where}: all_to_all (tokens to heads)"
        wait = start_all_to_all(self.group, where, received, sent, form.by_tokens, form.by_heads)

        def finish() -> Tensor:
            wait()
            whole = rows
            if batch > 1:
                come = [part.view(batch, -1) for part in received.split(form.by_tokens)]
                whole = torch.cat(come, dim=1).view(form.whole)
            if quantized is not None:
                whole = quantized.unpack(whole, dtype)
            return whole if order is None else _ordered(whole, order)

        return finish

    def start_to_tokens(
        self, rows: Tensor, heads: Sequence[int], where: str, quantized: Quantized | None = None
    ) -> Callable[[], list[Tensor]]:
        """Send (B, S, share of all heads, D) back; the result waits for tensors at home.

        `rows` are this rank's heads of all tensors side by side, `heads` the number of each.
        """
        dtype = rows.dtype
        if self.back is not None:
            rows = _ordered(rows, self.back)
        if quantized is not None:
            rows = quantized.pack(rows)
        form = self._form(rows, tuple([num // self.own_kv_heads for num in heads]))
        if form.whole[0] > 1:
            rows = torch.cat([part.reshape(-1) for part in rows.split(list(self.lens), dim=1)])
        sent = rows.contiguous().view(-1)
        received = self.group.calls.staging.take("received", form.sent, rows)
        where = f"{where}: all_to_all (heads to tokens)"
        wait = start_all_to_all(self.group, where, received, sent, form.by_heads, form.by_tokens)

        def finish() -> list[Tensor]:
            wait()
            outs = list(map(received.new_empty, form.homes))
            for run in form.runs:
                block = run.of_buffer(received)
                parts = [block] if len(outs) == 1 else block.split_with_sizes(run.shares, 3)
                for out, part in zip(run.of_tensors(outs), parts, strict=True):
                    out.copy_(part)
            return outs if quantized is None else [quantized.unpack(out, dtype) for out in outs]

        return finish

    def _form(self, x: Tensor, factors: tuple[int, ...]) -> _Form:
        """Return the form of tensors with `factors` heads for each key-value head."""
        batch, width = 1 if self.is_packed else x.shape[0], x.shape[-1]
        key = batch, width, factors
        form = self._forms.get(key)
        if form is not None:
            return form
        if len(self._forms) >= _NUM_FORMS:
            self._forms.clear()
        shares, rank, each = self.shares, self.group.rank, sum(factors)
        lens, own = self.lens, self.own_kv_heads
        tokens = lens[rank]
        home = (tokens,) if self.is_packed else (batch, tokens)
        form = self._forms[key] = _Form(
            sent=(batch * tokens * each * width * shares.num_kv_heads,),
            by_heads=[batch * tokens * each * width * shares.of(r) for r in range(shares.size)],
            by_tokens=[batch * num * each * width * own for num in lens],
            whole=(batch, sum(lens), each * own, width),
            homes=[(*home, num * shares.num_kv_heads, width) for num in factors],
            runs=self._runs(batch, tokens, factors, width),
        )
        return form

    def _runs(self, batch: int, tokens: int, factors: tuple[int, ...], width: int) -> list[_Run]:
        runs: list[_Run] = []
        first = start = 0
        for num_ranks, num in (
            (self.shares.num_more, self.shares.base + 1),
            (self.shares.size - self.shares.num_more, self.shares.base),
        ):
            if not num_ranks:
                continue
            row, of_run = sum(factors) * num * width, num_ranks * num
            is_all = num_ranks == self.shares.size
            runs.append(
                _Run(
                    start=start,
                    shape=(batch, tokens, num_ranks, sum(factors) * num, width),
                    strides=(tokens * row, row, batch * tokens * row, width, 1),
                    heads=None if is_all else [(first * f, of_run * f) for f in factors],
                    views=[(batch, tokens, num_ranks, num * f, width) for f in factors],
                    shares=[f * num for f in factors],
                )
            )
            first, start = first + of_run, start + num_ranks * batch * tokens * row
        return runs


def _ordered(rows: Tensor, order: Tensor | Sequence[slice]) -> Tensor:
    """Return (B, S, ...) tokens in another order."""
    if isinstance(order, Tensor):
        return rows.index_select(1, order)
    return torch.cat([rows[:, part] for part in order], dim=1)
