"""Heads over ranks: whole where that is even, and cut along their queries where it is not."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.plan.checks import amounts, number
from bascule.plan.metrics import imbalance
from bascule.plan.solver.solve import Assignment, assign


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlan(Assignment):
    """An `Assignment` of heads to ranks, in which heads may be cut along their queries.

    `bin_of` is the rank that a cut head was cut from; `lower_bound` is then that of cut heads.
    """

    rank_of: Ints  # (heads, q_blocks) rank of each block of a head; (heads, 1) of whole heads

    @property
    def cut_heads(self) -> Ints:
        """Heads that more than one rank computes, ascending."""
        return np.flatnonzero((self.rank_of != self.rank_of[:, :1]).any(axis=1))


def partition_heads(
    block_counts: npt.ArrayLike, num_ranks: int, *, cut_above: float = 0.01
) -> HeadPlan:
    """Assign attention heads to ranks so that all ranks have the same work.

    Ranks may get unequal numbers of heads, or none. A head is cut only where whole heads leave the
    last rank more than `cut_above` over the mean: its keys and values then travel to each of its
    ranks, of its queries the last ones. At most num_ranks - 1 cuts even out all but a block.

    Args:
        block_counts: (heads,) work of each head, or (heads, q_blocks) of each query block of it,
            without which no head can be cut.
        num_ranks: Ranks.
        cut_above: Imbalance of whole heads, less 1, above which heads are cut. Inf: never.
    """
    counts = amounts("block_counts", block_counts, (1, 2))
    cut_above = number("cut_above", cut_above, 0.0, np.inf)
    can_cut = counts.ndim == 2
    counts = counts if can_cut else counts[:, None]
    whole = assign(counts.sum(axis=1), num_ranks)
    rank_of, bound = np.repeat(whole.bin_of[:, None], counts.shape[1], axis=1), whole.lower_bound
    if can_cut and imbalance(whole.loads) > 1.0 + cut_above:
        mean = float(whole.loads.mean())
        _cut(counts, rank_of, whole.loads.copy(), (1.0 + cut_above) * mean)
        bound = max(mean, float(counts.max()))
    loads = np.bincount(rank_of.ravel(), counts.ravel(), num_ranks).astype(np.float64)
    makespan = float(loads.max())
    for array in (rank_of, loads):
        array.flags.writeable = False
    # Both are sums of rounded numbers: where they meet, the bound may be an ulp above.
    return HeadPlan(whole.bin_of, loads, makespan, min(bound, makespan), rank_of)


def _cut(counts: Floats, rank_of: Ints, loads: Floats, limit: float) -> None:
    """Cut the surplus of ranks above the limit off, in `rank_of` (heads, q_blocks) and `loads`."""
    mean = loads.mean()
    while loads.max() > limit:
        giver, taker = int(loads.argmax()), int(loads.argmin())
        owned = np.where(rank_of == giver, counts, 0.0)
        head, blocks = _piece(owned, min(loads[giver] - mean, mean - loads[taker]))
        work = counts[head, blocks].sum()
        if work >= loads[giver] - loads[taker]:  # no block is light enough to help
            break
        rank_of[head, blocks] = taker
        loads[giver] -= work
        loads[taker] += work


def _piece(counts: Floats, amount: float) -> tuple[int, Ints]:
    """Return the last query blocks, within the amount, of the heaviest head; or the lightest."""
    for head in np.argsort(-counts.sum(axis=1), kind="stable").tolist():
        blocks = np.flatnonzero(counts[head])[::-1]
        fitting = np.searchsorted(np.cumsum(counts[head, blocks]), amount, side="right")
        if fitting:
            return head, blocks[:fitting]
    lightest = int(np.where(counts > 0.0, counts, np.inf).argmin())
    head, block = divmod(lightest, counts.shape[1])
    return head, np.array([block])
