"""Who has which tokens of a mesh, and what they see of each other's, without any communication."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bascule.attention.layout import (
    SequenceLayout,
    num_tokens,
    own_tokens,
    positions_on,
    take_runs,
)
from bascule.errors import ConfigError

many = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
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


@many
@given(layouts())
def test_runs_and_blocks_are_dealt_as_said(layout: SequenceLayout) -> None:
    """By the token: pieces in ring order, early with late ones, or blocks in turns."""
    ring_degree, ulysses_degree = layout.ring_degree, layout.ulysses_degree
    for segment, (start, stop) in enumerate(layout.bounds()):
        for ring, ulysses in places(layout):
            runs = layout.own(ring, ulysses)[segment]
            if layout.stripe:
                turn = np.arange(stop - start) // layout.stripe
                mine = (turn % ring_degree == ring) & (
                    turn // ring_degree % ulysses_degree == ulysses
                )
                assert tokens_of(runs) == (start + np.flatnonzero(mine)).tolist()
                assert all(a[1] < b[0] for a, b in pairwise(runs))
                continue
            num = (1 + layout.zigzag) * ring_degree
            pieces = (ring, num - 1 - ring) if layout.zigzag else (ring,)
            assert len(runs) == len(pieces)
            for piece, (low, high) in zip(pieces, runs, strict=True):
                bounds = [math.ceil((stop - start) * p / num) for p in (piece, piece + 1)]
                shares = [
                    math.ceil((bounds[1] - bounds[0]) * u / ulysses_degree)
                    for u in (ulysses, ulysses + 1)
                ]
                assert (low - start, high - start) == tuple(bounds[0] + share for share in shares)


@many
@example(SequenceLayout((), 1, 2, True))
@given(layouts())
def test_tokens_of_ulysses_ranks_come_into_the_order_of_the_ring_and_back(
    layout: SequenceLayout,
) -> None:
    for ring in range(layout.ring_degree):
        lens, order, back = layout.exchanged(ring)
        ranks = range(layout.ulysses_degree)
        arriving = torch.tensor(
            [token for u in ranks for token in tokens_of(layout.own_runs(ring, u))],
            dtype=torch.int64,
        )
        here = arriving if order is None else torch.cat([arriving[part] for part in order])
        assert torch.equal(here, positions_on(layout, ring, CPU))
        again = here if back is None else torch.cat([here[part] for part in back])
        assert torch.equal(again, arriving)
        assert lens == [num_tokens(layout.own_runs(ring, u)) for u in ranks]
        if layout.zigzag:  # kernels take the early piece, then the late one, of each segment
            assert here.tolist() == tokens_of(layout.pieces(ring))


@many
@given(layouts(), st.integers(0, 1))
def test_of_replicated_tokens_a_rank_keeps_its_share(layout: SequenceLayout, dim: int) -> None:
    whole = torch.arange(1.0, 1 + 2 * layout.seq_len).view(-1, 2)
    whole = whole if dim == 0 else whole.T
    for place in places(layout):
        mine = take_runs(whole, layout.shares(*place), dim)
        own = own_tokens(mine, layout, place, dim)
        assert mine.shape[dim] == layout.num_tokens(*place)
        assert torch.equal(own, take_runs(whole, layout.own_runs(*place), dim))


@pytest.mark.parametrize(
    "given_",
    [
        {"segments": [3]},
        {"segments": (-1,)},
        {"segments": (1.5,)},
        {"segments": (3,), "ring_degree": 0},
        {"segments": (3,), "ulysses_degree": 0},
        {"segments": (3,), "stripe": -1},
        {"segments": (3,), "replicated": (1,)},
        {"segments": (3,), "replicated": (-1,)},
        {"segments": (3,), "replicated": 0},
        {"segments": (3,), "stripe": 1, "zigzag": True},
        {"segments": (3,), "stripe": 1, "replicated": (0,)},
    ],
)
def test_layouts_of_no_ranks_or_tokens_are_refused(given_: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SequenceLayout(**given_)  # pyright: ignore[reportArgumentType]
