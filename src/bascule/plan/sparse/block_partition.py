"""Blocks over the ranks of a ring: queries stay on their rank, keys travel from theirs.

Legend: Q query blocks, K key blocks, R ranks of the ring.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.baselines import greedy
from bascule.plan.checks import MAX_WHOLE, amounts, floats, listed, number, of_type, shown, whole
from bascule.plan.routes import Ints
from bascule.plan.sparse.counts import Floats, check_ranks, check_ring, tile_work
from bascule.plan.sparse.moves import Placement, fewest_moves
from bascule.plan.sparse.round_metrics import barrier_ends, barrier_imbalance, coupled_imbalance

METHODS = ("stripe", "minimal_move", "paper")


@dataclass(frozen=True, slots=True, eq=False)
class BlockPlan:
    """Where a ring computes and keeps blocks. Arrays are read-only.

    Attributes:
        q_of: (Q,) ring rank that computes each query block.
        kv_of: (K,) ring rank on which each key block starts its way.
        q_home: (Q,) ring rank where each query block comes from.
        kv_home: (K,) the same of key blocks.
        tiles: (R, R) work of the queries of each rank on the keys of each.
    """

    q_of: Ints
    kv_of: Ints
    q_home: Ints
    kv_home: Ints
    tiles: Floats

    def __post_init__(self) -> None:
        for array in (self.q_of, self.kv_of, self.q_home, self.kv_home, self.tiles):
            array.flags.writeable = False

    @property
    def loads(self) -> Floats:
        """(R,) work of each rank."""
        return self.tiles.sum(axis=1)

    @property
    def imbalance(self) -> float:
        """Rho of equation 3: ranks wait for each other in every round."""
        return barrier_imbalance(self.tiles[None])

    @property
    def critical_path_imbalance(self) -> float:
        """The same where ranks wait for their neighbours alone."""
        return coupled_imbalance(self.tiles[None])

    @property
    def num_moved(self) -> tuple[int, int]:
        """Query blocks and key blocks that leave their home rank."""
        return int((self.q_of != self.q_home).sum()), int((self.kv_of != self.kv_home).sum())


def partition_blocks(  # noqa: PLR0913  (public)
    block_matrix: npt.ArrayLike,
    ring_degree: int,
    *,
    method: str = "stripe",
    q_home: npt.ArrayLike | None = None,
    kv_home: npt.ArrayLike | None = None,
    reward: float = 2.0,
    capacity: tuple[int, int] | None = None,
    target: float = 1.005,
    prices: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    toll: float = 0.0,
    first_toll: float = 0.0,
) -> BlockPlan:
    """Choose the ring rank of every query block and every key block.

    Args:
        block_matrix: (Q, K) work of each query block on each key block, of all heads of the ring
            (or of all heads, for one plan that all rings share). Integers, so that all ranks get
            the same plan.
        ring_degree: R.
        method: "stripe": block i on rank i mod R, wherever it comes from. "minimal_move": from
            home, few moves that reach `target`; where none are found, from the other placements.
            "paper": the greedy of db-SP (section 4.2.2) on the sums of the rows and of the columns.
        q_home: (Q,) ring rank where each query block is. Default: i mod R; for "paper" i * R // Q,
            as it assumes.
        kv_home: (K,) the same of key blocks; may be the ranks themselves, for columns of
            `block_counts`.
        reward: For "paper": how much less loaded a block's home rank counts, in blocks like it.
        capacity: For "paper": most query blocks and most key blocks on a rank. Default: an R-th of
            them, rounded up, as in its public code.
        target: For "minimal_move": imbalance to reach.
        prices: For "minimal_move": (R, R) each, cost of moving a query block and a key block from
            rank to rank. Default: 1. Infinite prices for key blocks: they stay.
        toll: For "minimal_move": work that a price of 1 is worth to the slowest rank; moves that
            gain less are not made, even if the target is missed. Default: they cost nothing.
        first_toll: The same for moving anything at all.

    Raises:
        ConfigError: An argument is wrong.
    """
    matrix = amounts("block_matrix", block_matrix, (2,))
    if float(matrix.sum()) > MAX_WHOLE:
        raise ConfigError(f"block_matrix has work of {matrix.sum():g} in all: at most 2^53")
    ring_degree = check_ring(ring_degree)
    reward, target = number("reward", reward), number("target", target)
    toll, first_toll = number("toll", toll), number("first_toll", first_toll)
    of_type("method", method, str, f"one of {METHODS}")
    is_striped = method != "paper"
    homes = (
        _home("q_home", q_home, matrix.shape[0], ring_degree, striped=is_striped),
        _home("kv_home", kv_home, matrix.shape[1], ring_degree, striped=is_striped),
    )
    if method == "stripe":
        q_of, kv_of = (_striped(size, ring_degree) for size in matrix.shape)
    elif method == "paper":
        q_of, kv_of = _by_paper(matrix, homes, ring_degree, reward, capacity)
    elif method == "minimal_move":
        tolls = toll, first_toll
        q_of, kv_of = _moved(matrix, homes, target, _prices(prices, ring_degree), tolls)
    else:
        raise ConfigError(f"method {shown(method)}: blocks are partitioned by one of {METHODS}")
    return BlockPlan(q_of, kv_of, *homes, tile_work(matrix, q_of, kv_of, ring_degree))


def _home(
    name: str, home: npt.ArrayLike | None, size: int, ring_degree: int, *, striped: bool
) -> Ints:
    if home is not None:
        return check_ranks(name, home, ring_degree, size)
    if striped:
        return _striped(size, ring_degree)
    return np.arange(size, dtype=np.int64) * ring_degree // max(size, 1)


def _by_paper(
    matrix: Floats,
    homes: Placement,
    ring_degree: int,
    reward: float,
    capacity: tuple[int, int] | None,
) -> Placement:
    if capacity is None:
        capacity = -(-matrix.shape[0] // ring_degree), -(-matrix.shape[1] // ring_degree)
    if len(listed("capacity", capacity)) != 2:
        raise ConfigError(f"capacity is {shown(capacity)}: give (query blocks, key blocks)")
    for most, size in zip(capacity, matrix.shape, strict=True):
        if whole("capacity", most) * ring_degree < size:
            raise ConfigError(
                f"{size} blocks on {ring_degree} ranks of at most {most} blocks: raise capacity"
            )
    q_of, kv_of = (
        greedy(matrix.sum(axis), ring_degree, home=home, reward=reward, capacity=most)
        for axis, home, most in zip((1, 0), homes, capacity, strict=True)
    )
    return q_of, kv_of


def _prices(
    prices: tuple[npt.ArrayLike, npt.ArrayLike] | None, ring_degree: int
) -> tuple[Floats, Floats]:
    if prices is None:
        return 1.0 - np.eye(ring_degree), 1.0 - np.eye(ring_degree)
    found = [floats("prices", price) for price in listed("prices", prices)]
    if len(found) != 2:
        raise ConfigError(
            f"prices of {len(found)} kinds: give those of query blocks and of key blocks"
        )
    q, kv = found
    for price in found:
        if price.shape != (ring_degree, ring_degree) or not (price >= 0.0).all():
            raise ConfigError(
                f"a price of shape {price.shape}: give ({ring_degree}, {ring_degree}) numbers of "
                "at least 0, for query blocks and for key blocks"
            )
    return q, kv


def _moved(
    matrix: Floats,
    homes: Placement,
    target: float,
    prices: tuple[Floats, Floats],
    tolls: tuple[float, float],
) -> Placement:
    """The first start from which moves reach the target, or else where they came closest.

    Where moves have a toll it counts like work.
    """
    (toll, first_toll), ring_degree = tolls, len(prices[0])
    budget = target * float(matrix.sum()) / ring_degree
    best, least = homes, float(barrier_ends(tile_work(matrix, *homes, ring_degree)))
    if ring_degree == 1 or least <= budget:
        return homes
    for start in _starts(matrix, homes, ring_degree):
        if not np.isfinite(prices[1]).all():
            start = start[0], homes[1]
        found, end = fewest_moves(matrix, start, homes, budget, prices, toll)
        found, price = _turned(found, homes, prices)
        total = end + toll * price + first_toll
        if total < least:
            best, least = found, total
        if end <= budget:
            break
    return best


def _turned(
    placed: Placement, homes: Placement, prices: tuple[Floats, Floats]
) -> tuple[Placement, float]:
    """The same rounds on other ranks of the ring, so that the price of it is the least.

    All ranks may be another's number further: who is how far from whom stays.
    """
    (q_of, kv_of), (q_home, kv_home), (q_price, kv_price) = placed, homes, prices
    if not np.isfinite(kv_price).all():
        return placed, float(q_price[q_home, q_of].sum())
    size = len(q_price)
    turned = [((q_of + turn) % size, (kv_of + turn) % size) for turn in range(size)]
    costs = [float(q_price[q_home, q].sum() + kv_price[kv_home, kv].sum()) for q, kv in turned]
    best = int(np.argmin(costs))
    return turned[best], costs[best]


def _starts(matrix: Floats, homes: Placement, ring_degree: int) -> Iterator[Placement]:
    """Home, and what to try where moves from it fail: further and further away from it."""
    yield homes
    for reward in (2.0, 0.0):
        yield _by_paper(matrix, homes, ring_degree, reward, None)
    yield _striped(matrix.shape[0], ring_degree), _striped(matrix.shape[1], ring_degree)


def _striped(size: int, ring_degree: int) -> Ints:
    return np.arange(size, dtype=np.int64) % ring_degree
