"""Ulysses attention inside a bag: tokens with all heads become whole sequences with some heads.

Source: DeepSpeed Ulysses (arXiv:2309.14509), here on packed sequences with uneven chunks and uneven
head shares, and with q, k and v in one all-to-all.

A bag is here the G ranks that share heads: those of a compute bag, or of one ring rank of it, which
have a piece of every sequence (`packed`).

Shapes: T tokens on this rank, S tokens of the whole bag, H heads, D head width, G ranks of the bag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bascule.attention.kernels.packed_kernels import Kernel, PackedSequences
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.guard.derivatives import only_first
from bascule.comm.staging import table_on
from bascule.comm.transfers import all_to_all
from bascule.errors import ConfigError
from bascule.plan import routes


@dataclass(frozen=True)
class BagLayout:
    """The tokens of a bag, and the tables from rank order into sequence order and back.

    Attributes:
        chunk_lens: (G, n) tokens of each sequence on each rank of the bag.
        device: Where the tensors are.
        group: The ranks of the bag; None for a bag of one.
        step: Step number in errors.
    """

    chunk_lens: routes.Ints
    device: torch.device
    group: RankGroup | None
    step: int

    @cached_property
    def seqs(self) -> PackedSequences:
        """The whole sequences, as the kernel sees them."""
        return PackedSequences.build(self.chunk_lens.sum(axis=0).tolist(), self.device)

    @cached_property
    def tokens(self) -> list[int]:
        """(G,) tokens of each rank."""
        return self.chunk_lens.sum(axis=1).tolist()

    @cached_property
    def to_sequences(self) -> Tensor | None:
        """(S,) row in rank order of each token in sequence order; None if the orders agree."""
        return self._rows_of(self.chunk_lens.T)

    @cached_property
    def to_ranks(self) -> Tensor | None:
        """(S,) the inverse of `to_sequences`."""
        return self._rows_of(self.chunk_lens)

    def _rows_of(self, wanted_lens: routes.Ints) -> Tensor | None:
        """Row of each token, chunks in the order wanted, where they lie in the transposed order."""
        if (self.chunk_lens.sum(axis=0) > 0).sum() <= 1:
            return None
        lying_lens = wanted_lens.T
        first = routes.cumulative(lying_lens.ravel())[:-1].reshape(lying_lens.shape)
        index = routes.ranges(first.T.ravel(), wanted_lens.ravel())
        return table_on(index, self.device)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """How many heads each rank of a bag attends with: key-value heads as even as possible.

    The first `num_more` ranks take `base + 1` key-value heads, the others `base`; each takes the
    query heads that belong to its key-value heads.
    """

    base: int
    num_more: int
    size: int

    @classmethod
    def split(cls, num_heads: int, num_kv_heads: int, size: int) -> "HeadShares":
        """Share the heads of a layer among the ranks of a bag.

        Raises:
            ConfigError: Query heads are no multiple of the key-value heads, or a rank would get
                none.
        """
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads for {num_kv_heads} key-value heads: must be a multiple"
            )
        if num_kv_heads < size:
            raise ConfigError(
                f"a bag of {size} ranks cannot share {num_kv_heads} key-value heads: Ulysses gives "
                f"every rank at least one, so use bags of at most {num_kv_heads} ranks"
            )
        return cls(num_kv_heads // size, num_kv_heads % size, size)

    def runs(self) -> list[tuple[int, int, int]]:
        """(first rank, ranks, key-value heads of each): at most two, for any number of ranks."""
        both = [
            (0, self.num_more, self.base + 1),
            (self.num_more, self.size - self.num_more, self.base),
        ]
        return [run for run in both if run[1]]

    @property
    def num_kv_heads(self) -> int:
        """Of all ranks."""
        return self.base * self.size + self.num_more

    def of(self, rank: int) -> int:
        """Key-value heads of one rank."""
        return self.base + (rank < self.num_more)

    def first(self, rank: int) -> int:
        """The first key-value head of one rank."""
        return self.base * rank + min(rank, self.num_more)


def attend(
    bag: BagLayout,
    kernel: Kernel,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Exact attention within every sequence of the bag; (T, H, D) as q.

    Two all-to-alls inside the bag, one in and one out, and as many backward; none in a bag of one.
    The number of torch operations does not depend on sequences, chunks or heads (CPU kernels
    aside).

    Raises:
        ConfigError: The shapes do not fit the plan, each other, or the bag.
    """
    check(bag, q_THD, k_TKD, v_TKD)
    num_heads, num_kv_heads = q_THD.shape[1], k_TKD.shape[1]
    if bag.group is None:
        return kernel(q_THD, k_TKD, v_TKD, bag.seqs, causal=causal, scale=scale)[0]
    shares = HeadShares.split(num_heads, num_kv_heads, bag.group.size)
    form = f"causal={causal}, scale={scale}"
    q, k, v = heads_to_ranks(bag, shares, form, q_THD, k_TKD, v_TKD)
    out = kernel(q, k, v, bag.seqs, causal=causal, scale=scale)[0]
    return ranks_to_heads(bag, shares, form, out)


def sent_bytes(bag: BagLayout, q_THD: Tensor, k_TKD: Tensor) -> int:
    """Bytes that this rank sends to others in the forward of one `attend`."""
    if bag.group is None:
        return 0
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    queries, own = q_THD.shape[1] // num_kv_heads, own_kv_heads(bag, num_kv_heads)
    into = num_tokens * (num_kv_heads - own) * (queries + 2)
    back = (sum(bag.tokens) - num_tokens) * own * queries
    return (into + back) * head_dim * q_THD.element_size()


def own_kv_heads(bag: BagLayout, num_kv_heads: int) -> int:
    """Key-value heads that this rank attends with."""
    if bag.group is None:
        return num_kv_heads
    return HeadShares.split(num_kv_heads, num_kv_heads, bag.group.size).of(bag.group.rank)


def check(bag: BagLayout, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what `attend` cannot do.

    Raises:
        ConfigError: The shapes do not fit the plan or each other.
    """
    tokens = bag.tokens[bag.group.rank if bag.group else 0]
    for x in (q, k, v):
        if x.device.type != bag.device.type:
            raise ConfigError(f"attend: q, k or v is on {x.device}: give tensors on {bag.device}")
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"attend: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give (tokens, "
            "heads, head_dim) each, k and v alike"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ConfigError(
            f"attend: q is {q.dtype}, k {k.dtype} and v {v.dtype}: give all three in one "
            "floating-point dtype"
        )
    if q.shape[0] != tokens or k.shape[0] != tokens:
        raise ConfigError(
            f"attend: q has {q.shape[0]} tokens and k {k.shape[0]}, but the plan gives "
            f"this rank {tokens}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"{q.shape[1]} query heads for {k.shape[1]} key-value heads: must be a multiple"
        )


def heads_to_ranks(
    bag: BagLayout, shares: HeadShares, form: str, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """From (T, heads, D) each to (S, share of the heads, D) each, sequences whole.

    One all-to-all, differentiable. `form` says what else must be the same on all ranks.
    """
    return _HeadsToRanks.apply(bag, shares, form, *tensors)


def ranks_to_heads(bag: BagLayout, shares: HeadShares, form: str, out: Tensor) -> Tensor:
    """The inverse: from (S, share of the heads, D) to (T, heads, D). One all-to-all."""
    return _RanksToHeads.apply(bag, shares, form, out)


class _HeadsToRanks(torch.autograd.Function):
    """Send each rank its heads of this rank's tokens; receive this rank's heads of all tokens."""

    @staticmethod
    def forward(
        ctx: Any, bag: BagLayout, shares: HeadShares, form: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.args = bag, shares, form
        ctx.factors = [x.shape[1] // shares.num_kv_heads for x in tensors]
        found = _heads_to_ranks(bag, shares, form, ctx.factors, tensors)
        ctx.form = _backward_form(bag, form)
        return found

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bag, shares, _ = ctx.args
        return None, None, None, *_ranks_to_heads(bag, shares, ctx.form, ctx.factors, grads)


class _RanksToHeads(torch.autograd.Function):
    """The inverse: send each rank its tokens with this rank's heads; receive all heads."""

    @staticmethod
    def forward(ctx: Any, bag: BagLayout, shares: HeadShares, form: str, out: Tensor) -> Tensor:
        assert bag.group is not None
        ctx.args = bag, shares, form
        ctx.factors = [out.shape[1] // shares.of(bag.group.rank)]
        found = _ranks_to_heads(bag, shares, form, ctx.factors, [out])[0]
        ctx.form = _backward_form(bag, form)
        return found

    @staticmethod
    @only_first
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        bag, shares, _ = ctx.args
        return None, None, None, *_heads_to_ranks(bag, shares, ctx.form, ctx.factors, grad_outputs)


def _backward_form(bag: BagLayout, form: str) -> str:
    """Of the gradients of the call that was just made: ranks must go back through the same one."""
    assert bag.group is not None
    return f"{form}, gradients of {bag.group.calls.number}"


def _heads_to_ranks(
    bag: BagLayout,
    shares: HeadShares,
    form: str,
    factors: Sequence[int],
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """From (T, heads, D) each to (S, share of the heads, D) each, sequences whole; one all-to-all.

    A tensor has `factor` heads for each key-value head. Every destination gets its heads of all
    tensors side by side, so that what arrives is one block of rows.
    """
    assert bag.group is not None
    num_tokens, _, head_dim = tensors[0].shape
    row = sum(factors) * head_dim
    sent = tensors[0].new_empty(num_tokens * row * shares.num_kv_heads)
    first_kv, end = 0, 0
    for _, num_ranks, num_kv in shares.runs():
        block = sent[end : end + num_ranks * num_tokens * num_kv * row]
        parts = [
            _per_rank(x, first_kv * factor, num_ranks, num_kv * factor)
            for x, factor in zip(tensors, factors, strict=True)
        ]
        torch.cat(
            parts, dim=2, out=block.view(num_ranks, num_tokens, sum(factors) * num_kv, head_dim)
        )
        first_kv, end = first_kv + num_ranks * num_kv, end + block.numel()
    own = shares.of(bag.group.rank)
    received = _all_to_all(
        bag,
        f"heads {factors} of {shares.num_kv_heads}, {head_dim} {sent.dtype}, {form}",
        sent,
        [num_tokens * row * shares.of(rank) for rank in range(shares.size)],
        [tokens * row * own for tokens in bag.tokens],
    ).view(sum(bag.tokens), sum(factors) * own, head_dim)
    if bag.to_sequences is not None:
        received = received.index_select(0, bag.to_sequences)
    return received.split([factor * own for factor in factors], dim=1)


def _ranks_to_heads(
    bag: BagLayout,
    shares: HeadShares,
    form: str,
    factors: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """From (S, share of the heads, D) each to (T, heads, D) each; one all-to-all."""
    assert bag.group is not None
    rows = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)
    rows = rows.contiguous() if bag.to_ranks is None else rows.index_select(0, bag.to_ranks)
    own, head_dim = shares.of(bag.group.rank), rows.shape[2]
    row, num_tokens = sum(factors) * head_dim, bag.tokens[bag.group.rank]
    received = _all_to_all(
        bag,
        f"tokens {factors} of {shares.num_kv_heads}, {head_dim} {rows.dtype}, {form}",
        rows.view(-1),
        [tokens * row * own for tokens in bag.tokens],
        [num_tokens * row * shares.of(rank) for rank in range(shares.size)],
    )
    outs = [rows.new_empty(num_tokens, shares.num_kv_heads * f, head_dim) for f in factors]
    first_kv, end = 0, 0
    for _, num_ranks, run_kv in shares.runs():
        block = received[end : end + num_ranks * num_tokens * run_kv * row]
        parts = block.view(num_ranks, num_tokens, sum(factors) * run_kv, head_dim).split(
            [factor * run_kv for factor in factors], dim=2
        )
        for out, part, factor in zip(outs, parts, factors, strict=True):
            _per_rank(out, first_kv * factor, num_ranks, run_kv * factor).copy_(part)
        first_kv, end = first_kv + num_ranks * run_kv, end + block.numel()
    return outs


def _per_rank(x_THD: Tensor, first: int, num_ranks: int, num_heads: int) -> Tensor:
    """(ranks, T, heads, D) view of consecutive runs of `num_heads` heads, one a rank."""
    heads = x_THD.narrow(1, first, num_ranks * num_heads)
    return heads.unflatten(1, (num_ranks, num_heads)).transpose(0, 1)


def _all_to_all(
    bag: BagLayout, form: str, sent: Tensor, send_splits: list[int], recv_splits: list[int]
) -> Tensor:
    assert bag.group is not None
    received = sent.new_empty(sum(recv_splits))
    call = Call("all_to_all (attention)", bag.step, form)
    all_to_all(bag.group, call, received, sent, recv_splits, send_splits)
    return received
