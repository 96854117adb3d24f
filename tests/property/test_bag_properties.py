"""What a rank of a bag attends to and in which order, without any communication."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bascule.attention.kernels.registry import KERNELS, check_name
from bascule.attention.packed import Bag, check, check_shapes, traffic
from bascule.attention.ring import Merged
from bascule.attention.tiles import Pieces
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError
from bascule.plan.sequences import Masks
from bascule.plan.topology import Topology
from bascule.plan.traffic import HeadShares
from tests.helpers.oracle import packed_attention

CPU = torch.device("cpu")
Lens = list[list[int]]
"""By rank and sequence."""


def shares(most: int = 4) -> st.SearchStrategy[Lens]:
    sizes = st.tuples(st.integers(1, most), st.integers(0, 4))
    length = st.sampled_from([0, 1, 2, 5])
    return sizes.flatmap(
        lambda size: st.lists(
            st.lists(length, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
        )
    )


def bag_of(lens: Lens, rank: int = 0, pieces: Pieces | None = None) -> Bag:
    chunks = np.array(lens, dtype=np.int64).reshape(len(lens), -1)
    pieces = pieces or Pieces(chunks.sum(axis=0)[None], 1, None, CPU)
    return Bag(
        cast(Any, SimpleNamespace(place=(0, rank))),
        chunks,
        pieces,
        None,
        np.zeros_like(chunks[0]),
    )


def labels(lens: Lens) -> list[tuple[int, int, int]]:
    """(sequence, rank, token) of each token as ranks bring them."""
    return [
        (seq, rank, token)
        for rank, of_rank in enumerate(lens)
        for seq, length in enumerate(of_rank)
        for token in range(length)
    ]


@settings(deadline=None, max_examples=100)
@given(shares())
def test_chunks_of_sequences_are_joined_in_the_order_of_ranks_and_parted_again(lens: Lens) -> None:
    bag, brought = bag_of(lens), labels(lens)
    order, back = bag.order
    assert bag.tokens == [sum(of_rank) for of_rank in lens]
    joined = brought if order is None else [brought[i] for i in order.tolist()]
    assert joined == sorted(brought)
    parted = joined if back is None else [joined[i] for i in back.tolist()]
    assert parted == brought
    whole = [sum(column) for column in zip(*lens, strict=True)]
    assert bag.pieces.seq_lens.tolist() == whole
    assert bag.degree == len(lens)


def ring_of(lens: Lens, rank: int) -> Pieces:
    ranks = tuple(range(len(lens)))
    group = RankGroup(lambda: None, rank, ranks, ranks, "ring")
    return Pieces(np.array(lens, dtype=np.int64).reshape(len(lens), -1), 1, group, CPU)


@settings(deadline=None, max_examples=60)
@given(shares(3), st.booleans(), st.sampled_from(["plain", "cpu_flash"]), st.integers(0, 99))
def test_tiles_of_a_ring_of_pieces_give_each_sequence_its_attention(
    lens: Lens, causal: bool, kernel: str, seed: int
) -> None:
    draw, brought = torch.Generator().manual_seed(seed), labels(lens)
    order = sorted(range(len(brought)), key=brought.__getitem__)
    q, k, v = (
        torch.randn(len(brought), heads, 8, generator=draw, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    whole = [sum(column) for column in zip(*lens, strict=True)]
    wanted = torch.empty_like(q)
    wanted[order] = packed_attention(q[order], k[order], v[order], whole, causal=causal)[0]
    bounds = list(accumulate((sum(of_rank) for of_rank in lens), initial=0))

    def of_rank(x: Tensor, rank: int) -> Tensor:
        return x[bounds[rank] : bounds[rank + 1]].transpose(0, 1)[None]

    for rank in range(len(lens)):
        ring, mine = ring_of(lens, rank), of_rank(q, rank)
        masks = Masks.alike(ring.seq_lens, causal=causal)
        merged = Merged(mine)
        for other, tiles in enumerate(ring.tiles(masks)):
            for tile in tiles:
                keys, values = of_rank(k, other), of_rank(v, other)
                parts = mine[:, :, tile.q], keys[:, :, tile.k], values[:, :, tile.k]
                merged.add(tile.q, *KERNELS[kernel].forward(*parts, tile.mask, 8**-0.5))
        torch.testing.assert_close(merged.result()[0], of_rank(wanted, rank))
        assert ring.kv_lens == [sum(one) for one in lens]
        # All keys come by, and those that the next rank has at home end here.
        assert ring.num_sent == sum(ring.kv_lens) - sum(lens[(rank + 1) % len(lens)])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("with_ring", [False, True])
def test_bytes_of_an_attention(rank: int, with_ring: bool) -> None:
    """Of two ranks with five and three tokens, six query heads for three key-value heads."""
    ring = ring_of([[8, 0], [4, 3], [1, 1]], 1) if with_ring else None
    bag = bag_of([[3, 2], [3, 0]], rank, ring)
    tokens, own, others = ((5, 2, 3), (3, 1, 5))[rank]
    q = torch.empty(tokens, 6, 8, dtype=torch.bfloat16)
    k = torch.empty(tokens, 3, 8, dtype=torch.bfloat16)
    rows = tokens * (3 - own) * (2 + 1 + 1)  # queries, keys and values of heads of the other
    rows += others * 2 * own  # the output of its tokens
    rows += 2 * own * (8 + 7) if with_ring else 0  # all keys and values but those of the last
    assert traffic(bag, q, k).total == rows * 8 * 2


def test_what_does_not_fit_the_bag_is_refused() -> None:
    bag = bag_of([[3, 2], [3, 0]], 1)
    q, k = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
    check_shapes(bag, q, k, k)
    check(Topology(((2, 1),), 1), bag, None, q, k, k)
    wrong = [
        (q[0], k, k),
        (q, k[0], k[0]),
        (q, k, k[:2]),
        (q, k, k[:, :1]),
        (q, k[..., :4], k[..., :4]),
        (q[:2], k, k),
        (q, k[:2], k[:2]),
        (torch.ones(5, 4, 8), torch.ones(5, 2, 8), torch.ones(5, 2, 8)),
        (q[:, :3], k, k),
        (q, k[:, :0], k[:, :0]),
        (q.to("meta"), k, k),
        (q, k.to("meta"), k.to("meta")),
    ]
    for tensors in wrong:
        with pytest.raises(ConfigError):
            check_shapes(bag, *tensors)
    with pytest.raises(ConfigError):
        check(Topology(((2, 1),), 1), bag, "none", q, k, k)
    for name in (None, *KERNELS):
        check_name(name)
    for name in ("none", "", 0):
        with pytest.raises(ConfigError):
            check_name(name)
    # Another bag has more ranks than heads.
    with pytest.raises(ConfigError):
        check(Topology(((2, 1), (4, 1)), 1), bag, None, q, k, k)


@given(st.integers(1, 40), st.integers(1, 9))
def test_heads_are_shared_as_evenly_as_possible(num_kv_heads: int, size: int) -> None:
    if num_kv_heads < size:
        with pytest.raises(ConfigError):
            HeadShares.split(num_kv_heads, size)
        return
    found = HeadShares.split(num_kv_heads, size)
    shares = [found.of(rank) for rank in range(size)]
    assert sum(shares) == found.num_kv_heads == num_kv_heads
    assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] <= 1
    assert [found.first(rank) for rank in range(size)] == [sum(shares[:r]) for r in range(size)]
