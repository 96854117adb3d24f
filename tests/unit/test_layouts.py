"""Who has which tokens of a mesh, and what they see of each other's, without any communication."""

from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bascule.attention.kernels.registry import KERNELS, check_name
from bascule.attention.layout import SequenceLayout, positions_on
from bascule.attention.packed import Bag, check, check_shapes
from bascule.attention.tiles import Pieces
from bascule.errors import ConfigError
from bascule.plan.topology import Topology
from bascule.traffic import HeadShares

many = settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.too_slow])
CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    segments = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    ring, ulysses = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["runs", "zigzag", "stripe", "replicated", "both"]))
    replicated: tuple[int, ...] = ()
    if kind in ("replicated", "both"):
        replicated = tuple(i for i in range(len(segments)) if draw(st.booleans()))
    stripe = draw(st.integers(1, 4)) if kind == "stripe" else 0
    return SequenceLayout(segments, ring, ulysses, kind in ("zigzag", "both"), replicated, stripe)


def places(layout: SequenceLayout) -> list[tuple[int, int]]:
    return [(r, u) for r in range(layout.ring_degree) for u in range(layout.ulysses_degree)]


def tokens_of(runs: list[tuple[int, int]]) -> list[int]:
    return [token for start, stop in runs for token in range(start, stop)]


@many
@given(layouts())
def test_every_token_has_one_rank_and_shares_are_even(layout: SequenceLayout) -> None:
    first = 0
    for segment, length in enumerate(layout.segments):
        owned = {place: tokens_of(layout.own(*place)[segment]) for place in places(layout)}
        assert sorted(chain.from_iterable(owned.values())) == list(range(first, first + length))
        assert layout.bounds()[segment] == (first, first + length)
        ring_sizes = [
            sum(len(owned[ring, u]) for u in range(layout.ulysses_degree))
            for ring in range(layout.ring_degree)
        ]
        most = layout.stripe or 2 if layout.zigzag or layout.stripe else 1
        assert max(ring_sizes) - min(ring_sizes) <= most
        for ring in range(layout.ring_degree):
            sizes = [len(owned[ring, u]) for u in range(layout.ulysses_degree)]
            assert max(sizes) - min(sizes) <= most
        first += length
    assert layout.seq_len == first
    lens = [len(positions_on(layout, ring, CPU)) for ring in range(layout.ring_degree)]
    assert lens == layout.ring_lens and sum(lens) == first


# Bags


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
    mesh: Any = SimpleNamespace(place=(0, rank))
    return Bag(mesh, chunks, pieces, None, 0 * chunks[0], np.arange(chunks.shape[1]))


def test_what_does_not_fit_the_bag_is_refused() -> None:
    bag, pairs = bag_of([[3, 2], [3, 0]], 1), Topology(((2, 1),), 1)
    q, k = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
    check_shapes(bag, q, k, k)
    check(pairs, bag, None, q, k, k)
    wrong = [(q[0], k, k), (q, k[0], k[0]), (q, k, k[:2]), (q, k, k[:, :1]), (q[:2], k, k)]
    wrong += [(q, x, x) for x in (k[..., :4], k[:2], k[:, :0])] + [(q[:, :3], k, k)]
    wrong += [(torch.ones(5, 4, 8), *[torch.ones(5, 2, 8)] * 2), (q.to("meta"), k, k)]
    calls = [partial(check_shapes, bag, *tensors) for tensors in wrong]
    calls += [partial(check, pairs, bag, "none", q, k, k), partial(check_name, "")]
    # Another bag has more ranks than heads.
    calls += [partial(check, Topology(((2, 1), (4, 1)), 1), bag, None, q, k, k)]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
    for name in (None, *KERNELS):
        check_name(name)


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
