"""The fewest moves of blocks between the ranks of a ring that make its rounds even enough.

Every query block sits in a row of the ring's matrix of work, every key block in a column. Moving
one changes the tiles of two ranks. What all moves would gain is computed at once; the best are
made, until the sum over rounds of the slowest ranks is within the budget. As a maximum hides all
ranks but one, gains are measured on a mean with a high power in its place.

Every block moves at most once in a pass, as in the exchange of Fiduccia and Mattheyses (1982): so
moves that lose a little can be made, and the best state seen is kept.

Legend: n blocks of one kind, m of the other, R ranks of the ring.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.plan._sparse_counts import Floats
from bascule.plan._sparse_metrics import barrier_ends, rounds_of
from bascule.plan.layout import Ints

_STALL = 40
"""Moves without a new best after which a pass ends."""

_PASSES = 4

_FREE = 1e-3
"""Price of a move that costs nothing, or brings a block home, over that of the dearest move."""


@dataclass(slots=True)
class _Side:
    """Query blocks, or key blocks with everything transposed.

    Attributes:
        matrix: (n, m) work of each block on each of the other kind.
        profiles: (n, R) work of each block on those of each rank.
        tiles: (R, R) work between ranks; a view, shared by both sides.
        rank_of: (n,) where each block is.
        home: (n,) where it comes from.
        price: (R, R) cost of moving a block from rank to rank.
        is_movable: (n,) bool.
    """

    matrix: Floats
    profiles: Floats
    tiles: Floats
    rank_of: Ints
    home: Ints
    price: Floats
    is_movable: npt.NDArray[np.bool_]


Placement = tuple[Ints, Ints]
"""Ring rank of each query block and of each key block."""


def fewest_moves(
    matrix: Floats,
    start: Placement,
    home: Placement,
    budget: float,
    prices: tuple[Floats, Floats],
) -> tuple[Placement, float]:
    """Move blocks until the sum over rounds of the slowest ranks' work is within the budget.

    Returns the best placement that was found, within the budget or not, and that sum. O((n + m)
    R^2) a move.

    Args:
        matrix: (n, m) work of each query block on each key block.
        start: Where blocks are placed before the first move.
        home: Where they are in fact.
        budget: Work.
        prices: (R, R) each: cost of moving a query block and a key block from rank to rank; if one
            is infinite, blocks of that kind stay.
    """
    best, least = start, np.inf
    for _ in range(_PASSES):
        found, end = _one_pass(_sides(matrix, best, home, prices), budget)
        if end >= least:
            break
        best, least = found, end
        if least <= budget:
            break
    return best, least


def _one_pass(sides: tuple[_Side, _Side], budget: float) -> tuple[Placement, float]:
    """The best placement on the way when each block moves at most once, and its end."""
    q, kv = sides
    best, least, since = (q.rank_of.copy(), kv.rank_of.copy()), float(barrier_ends(q.tiles)), 0
    while least > budget and since < _STALL:
        gains = [_gains(side) for side in sides]
        chosen = int(gains[1].max(initial=-np.inf) > gains[0].max(initial=-np.inf))
        moves = _disjoint(gains[chosen], sides[chosen].rank_of)
        if not moves:
            break
        for block, rank in moves:
            _move(sides[chosen], sides[1 - chosen], block, rank)
            end = float(barrier_ends(q.tiles))
            since += 1
            if end < least:
                best, least, since = (q.rank_of.copy(), kv.rank_of.copy()), end, 0
            if end <= budget:
                break
    return best, least


def _sides(
    matrix: Floats, start: Placement, home: Placement, prices: tuple[Floats, Floats]
) -> tuple[_Side, _Side]:
    places = np.eye(len(prices[0]))
    q_of, kv_of = start[0].copy(), start[1].copy()
    q_profiles, kv_profiles = matrix @ places[kv_of], matrix.T @ places[q_of]
    tiles = places[q_of].T @ q_profiles
    movable = [
        np.full(blocks.size, bool(np.isfinite(price).all()))
        for blocks, price in zip(start, prices, strict=True)
    ]
    return (
        _Side(matrix, q_profiles, tiles, q_of, home[0], prices[0], movable[0]),
        _Side(matrix.T, kv_profiles, tiles.T, kv_of, home[1], prices[1], movable[1]),
    )


def _gains(side: _Side) -> Floats:
    """(n, R) by how much moving each block to each rank helps, over its price; -inf: not allowed.

    Rounds are taken in the order that suits the queries. For keys it is the reverse, which their
    sum does not see.
    """
    work = rounds_of(side.tiles)
    scale = 1.0 / work.max()
    work = work * scale
    blocks, turns = np.arange(side.rank_of.size), np.arange(len(work))
    added = (side.profiles * scale)[:, (turns[:, None] - turns) % turns.size]
    left = work[side.rank_of] - added[blocks, side.rank_of]
    powers = _power(work)
    total = powers.sum(axis=0)
    others = total - powers[side.rank_of] + _power(left)
    after = others[:, None] - powers + _power(work + added)
    gains = _root(total).sum() - _root(np.maximum(after, 0.0)).sum(axis=2)
    if not side.is_movable.any():
        return np.full_like(gains, -np.inf)
    price = side.price[side.home] - side.price[side.home, side.rank_of][:, None]
    price = np.maximum(price, _FREE * side.price.max())
    gains: Floats = np.where(gains > 0.0, gains / price, gains * price)
    gains[blocks, side.rank_of] = -np.inf
    gains[~side.is_movable] = -np.inf
    return gains


def _power(values: Floats) -> Floats:
    """To the power of 8: by products, which are the same on every machine, and fast."""
    values = values * values
    values = values * values
    return values * values


def _root(values: Floats) -> Floats:
    return np.sqrt(np.sqrt(np.sqrt(values)))


def _disjoint(gains: Floats, rank_of: Ints) -> list[tuple[int, int]]:
    """The best move, and others that gain at least half as much, of which no two share a rank."""
    gains, moves, least = gains.copy(), list[tuple[int, int]](), -np.inf
    while gains.size:
        block, rank = divmod(int(gains.argmax()), gains.shape[1])
        gain = float(gains[block, rank])
        if gain == -np.inf or gain < least:
            break
        moves.append((block, rank))
        least = max(gain / 2, 0.0)
        ranks = rank_of[block], rank
        gains[np.isin(rank_of, ranks)] = -np.inf
        gains[:, ranks] = -np.inf
    return moves


def _move(side: _Side, other: _Side, block: int, rank: int) -> None:
    source = int(side.rank_of[block])
    side.tiles[source] -= side.profiles[block]
    side.tiles[rank] += side.profiles[block]
    other.profiles[:, source] -= side.matrix[block]
    other.profiles[:, rank] += side.matrix[block]
    side.rank_of[block] = rank
    side.is_movable[block] = False
