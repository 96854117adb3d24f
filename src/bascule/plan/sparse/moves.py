"""The fewest moves of blocks between the ranks of a ring that make its rounds even enough.

Every query block sits in a row of the ring's matrix of work, every key block in a column. Moving
one changes the tiles of two ranks. What all moves would gain is computed at once, and the best are
made, until the sum over rounds of the slowest ranks is within the budget. Where a whole block is
too much, two ranks swap blocks that differ by little.

As a maximum hides all ranks but one, gains are measured on the 16-norm of the ranks' work in its
place, to second order, each rank for itself. So the gains of all moves are two matrix products.

Every block moves at most once in a pass, as in the exchange of Fiduccia and Mattheyses (1982), and
the best state seen is kept.

Legend: n blocks of one kind, m of the other, R ranks of the ring.
"""

from dataclasses import dataclass

import numpy as np

from bascule.plan.routes import Ints
from bascule.plan.sparse.counts import Floats
from bascule.plan.sparse.round_metrics import barrier_ends, rounds_of

_STALL = 200
"""Moves without a new best after which a pass ends."""

_PASSES = 4

_FREE = 1e-3
"""Price of a move that costs nothing, or brings a block home, over that of the dearest move."""

_SWAPPED = 64
"""Blocks of a rank, evenly spaced, that are tried in swaps with as many of another."""


@dataclass(slots=True)
class _Side:
    """Query blocks, or key blocks with everything transposed.

    Attributes:
        matrix: (n, m) work of each block on each of the other kind.
        profiles: (n, R) work of each block on those of each rank.
        tiles: (R, R) work between ranks; a view, shared by both sides.
        rank_of: (n,) where each block is.
        price: (n, R) cost of moving each block to each rank; inf where it may not go.
        toll: (n, R) work that it costs to have each block on each rank; 0 at home.
    """

    matrix: Floats
    profiles: Floats
    tiles: Floats
    rank_of: Ints
    price: Floats
    toll: Floats


Placement = tuple[Ints, Ints]
"""Ring rank of each query block and of each key block."""

Move = tuple[int, int]
"""A block, and the rank to which it goes."""


def fewest_moves(
    matrix: Floats,
    start: Placement,
    home: Placement,
    budget: float,
    prices: tuple[Floats, Floats],
    toll: float,
) -> tuple[Placement, float]:
    """Move blocks until the sum over rounds of the slowest ranks' work is within the budget.

    Returns the best placement that was found, within the budget or not, and that sum; the best has
    the least of that sum and of its toll. O((n + m) R^2) a step.

    Args:
        matrix: (n, m) work of each query block on each key block.
        start: Where blocks are placed before the first move.
        home: Where they are in fact.
        budget: Work.
        prices: (R, R) each: cost of moving a query block and a key block from rank to rank; if one
            is infinite, blocks of that kind stay.
        toll: Work that a price of 1 is worth.
    """
    best, least, end = start, np.inf, np.inf
    for _ in range(_PASSES):
        found, total, found_end = _one_pass(_sides(matrix, best, home, prices, toll), budget)
        if total >= least:
            break
        best, least, end = found, total, found_end
        if end <= budget:
            break
    return best, end


def _one_pass(sides: tuple[_Side, _Side], budget: float) -> tuple[Placement, float, float]:
    """The best placement on the way when each block moves at most once; with its toll, and without.

    It is that where the sum of both is the least.
    """
    q, kv = sides
    end = float(barrier_ends(q.tiles))
    paid = sum(float(x.toll[np.arange(x.rank_of.size), x.rank_of].sum()) for x in sides)
    best, least, best_end, since = (q.rank_of.copy(), kv.rank_of.copy()), end + paid, end, 0
    while end > budget and since < _STALL:
        chosen, moves = _helpful(sides)
        if not moves:
            break
        for block, rank in moves:
            paid += _move(sides[chosen], sides[1 - chosen], block, rank)
            end = float(barrier_ends(q.tiles))
            since += 1
            if end + paid < least:
                best, since = (q.rank_of.copy(), kv.rank_of.copy()), 0
                least, best_end = end + paid, end
            if end <= budget:
                break
    return best, least, best_end


def _helpful(sides: tuple[_Side, _Side]) -> tuple[int, list[Move]]:
    """Moves of blocks of one side that help, or else swaps; none if there are none."""
    gains = [_gains(side) for side in sides]
    chosen = int(gains[1].max(initial=0.0) > gains[0].max(initial=0.0))
    moves = _disjoint(gains[chosen], sides[chosen].rank_of)
    for other in (0, 1):
        if not moves:
            chosen, moves = other, _swaps(sides[other])
    return chosen, moves


def _sides(
    matrix: Floats,
    start: Placement,
    home: Placement,
    prices: tuple[Floats, Floats],
    toll: float,
) -> tuple[_Side, _Side]:
    places = np.eye(len(prices[0]))
    q_of, kv_of = start[0].copy(), start[1].copy()
    q_profiles, kv_profiles = matrix @ places[kv_of], matrix.T @ places[q_of]
    tiles = places[q_of].T @ q_profiles
    q_price, kv_price = (_extra(*x) for x in zip(start, home, prices, strict=True))
    q_toll, kv_toll = (
        toll * np.where(np.isfinite(price), price, 0.0)[one]
        for one, price in zip(home, prices, strict=True)
    )
    return (
        _Side(matrix, q_profiles, tiles, q_of, q_price, q_toll),
        _Side(matrix.T, kv_profiles, tiles.T, kv_of, kv_price, kv_toll),
    )


def _extra(rank_of: Ints, home: Ints, price: Floats) -> Floats:
    """(n, R) what it costs more to have each block on each rank than where it is placed."""
    if not np.isfinite(price).all():
        return np.full((rank_of.size, len(price)), np.inf)
    extra = price[home] - price[home, rank_of][:, None]
    extra = np.maximum(extra, _FREE * (price.max() or 1.0))
    extra[np.arange(rank_of.size), rank_of] = np.inf
    return extra


def _slopes(tiles: Floats) -> tuple[Floats, Floats]:
    """(R, R) each: first derivative of the sum of the rounds' norms by a tile, and half the second.

    Rounds are taken in the order that suits the queries. For keys it is the reverse, which their
    sum does not see.
    """
    rank = np.arange(len(tiles))
    norm = _root(_power(rounds_of(tiles)).sum(axis=0))[(rank[:, None] - rank) % rank.size]
    # The first work in a round counts in full.
    share = np.divide(tiles, norm, out=np.ones_like(norm), where=norm > 0.0)
    square = share * share
    sixth = square * square * square
    most = sixth * sixth * square
    bend = 7.5 * most * (1.0 - most * square) / np.where(norm > 0.0, norm, 1.0)
    return most * share, bend


def _gains(side: _Side) -> Floats:
    """(n, R) by how much moving each block to each rank helps, over its price."""
    slope, bend = _slopes(side.tiles)
    first, second = side.profiles @ slope.T, (side.profiles * side.profiles) @ bend.T
    here = np.arange(side.rank_of.size), side.rank_of
    return ((first[here] - second[here])[:, None] - first - second) / side.price


def _disjoint(gains: Floats, rank_of: Ints) -> list[Move]:
    """The best move, and others that gain at least half as much, of which no two share a rank."""
    gains, moves, least = gains.copy(), list[Move](), 0.0
    while gains.size:
        block, rank = divmod(int(gains.argmax()), gains.shape[1])
        gain = float(gains[block, rank])
        if gain <= least:
            break
        moves.append((block, rank))
        least = least or gain / 2
        ranks = rank_of[block], rank
        gains[(rank_of == ranks[0]) | (rank_of == rank)] = 0.0
        gains[:, ranks] = 0.0
    return moves


def _swaps(side: _Side) -> list[Move]:
    """Swaps that help, between ranks as unlike as there are, of which no two share a rank."""
    slope, bend = _slopes(side.tiles)
    unlike = np.stack([((row - slope) ** 2).sum(axis=1) for row in slope])
    moves = list[Move]()
    while unlike.max(initial=0.0) > 0.0:
        a, b = divmod(int(unlike.argmax()), len(unlike))
        moves += _swap(side, (a, b), slope[a] - slope[b], bend[a] + bend[b])
        unlike[[a, b]] = unlike[:, [a, b]] = 0.0
    return moves


def _swap(side: _Side, pair: tuple[int, int], fall: Floats, bend: Floats) -> list[Move]:
    """The best swap of blocks of two ranks, if one helps.

    Moving x from a to b and y from b to a gains fall (x - y) - bend (x - y)^2.
    """
    a, b = pair
    blocks = [_some(side, source, dest) for source, dest in (pair, pair[::-1])]
    x, y = (side.profiles[some] for some in blocks)
    gains = (2.0 * bend * x) @ y.T
    gains += (x @ fall - (x * x) @ bend)[:, None]
    gains -= y @ fall + (y * y) @ bend
    gains /= side.price[blocks[0], b][:, None] + side.price[blocks[1], a]
    if gains.max(initial=0.0) <= 0.0:
        return []
    i, j = divmod(int(gains.argmax()), len(y))
    return [(int(blocks[0][i]), b), (int(blocks[1][j]), a)]


def _some(side: _Side, source: int, dest: int) -> Ints:
    """Blocks of a rank that may go to another, evenly spaced where there are many."""
    blocks = np.flatnonzero((side.rank_of == source) & (side.price[:, dest] < np.inf))
    return blocks[:: -(-blocks.size // _SWAPPED) or 1]


def _power(values: Floats) -> Floats:
    """To the power of 16: by products, which are the same on every machine, and fast."""
    for _ in range(4):
        values = values * values
    return values


def _root(values: Floats) -> Floats:
    for _ in range(4):
        values = np.sqrt(values)
    return values


def _move(side: _Side, other: _Side, block: int, rank: int) -> float:
    """Returns what it adds to the toll."""
    source = int(side.rank_of[block])
    side.tiles[source] -= side.profiles[block]
    side.tiles[rank] += side.profiles[block]
    other.profiles[:, source] -= side.matrix[block]
    other.profiles[:, rank] += side.matrix[block]
    side.rank_of[block] = rank
    side.price[block] = np.inf
    return float(side.toll[block, rank] - side.toll[block, source])
