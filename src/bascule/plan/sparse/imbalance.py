"""How uneven a sparse call is: rho of db-SP, for masks on a mesh, with or without a plan."""

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats
from bascule.errors import ConfigError
from bascule.plan.checks import of_type
from bascule.plan.sparse.block_layout import BlockLayout, check_degrees
from bascule.plan.sparse.columns import tiles_under
from bascule.plan.sparse.counts import check_masks
from bascule.plan.sparse.round_metrics import barrier_imbalance, coupled_imbalance
from bascule.plan.sparse.sparse_baselines import in_order
from bascule.plan.sparse.sparse_plan import SparsePlan


def sparse_imbalance(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None = None
) -> float:
    """Rho of db-SP: the slowest rank's work over the mean, summed over rounds.

    Ranks of a ring wait for each other after each of its R rounds, rings only at the end: equation
    2 with R = 1, equation 3 with U = 1, and else the reading of the paper's public code. Equation 1
    taken literally would have all ranks wait for each other after every round.

    Args:
        masks: (H, Q, K) bool.
        ulysses_degree: U; 1 is ring attention.
        ring_degree: R; 1 is Ulysses.
        plan: Who computes what; work is then in pairs of tokens. Default: heads in their order, and
            runs of blocks on each ring rank, as even as their numbers allow; blocks count 1.

    Raises:
        ConfigError: The masks are none, or the plan is for another mesh or other masks.
    """
    return barrier_imbalance(_tiles_of(masks, ulysses_degree, ring_degree, plan))


def critical_path_imbalance(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None = None
) -> float:
    """The same for a ring whose ranks wait for their neighbours alone, as they in fact do.

    Takes the same arguments as `sparse_imbalance`, and is at most as large.
    """
    return coupled_imbalance(_tiles_of(masks, ulysses_degree, ring_degree, plan))


def _tiles_of(
    masks: npt.ArrayLike, ulysses_degree: int, ring_degree: int, plan: SparsePlan | None
) -> Floats:
    checked = check_masks(masks)
    check_degrees(ulysses_degree, ring_degree)
    if plan is None:
        degrees = ulysses_degree, ring_degree
        ones = (np.ones(size, np.int64) for size in checked.shape[1:])
        q, kv = (BlockLayout.contiguous(lens, *degrees) for lens in ones)
        plan = in_order(len(checked), q, kv, *degrees)
    of_type("plan", plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
    if (plan.ulysses_degree, plan.ring_degree) != (ulysses_degree, ring_degree):
        raise ConfigError(
            f"a plan for {plan.ulysses_degree} x {plan.ring_degree} ranks (Ulysses x ring) on a "
            f"mesh of {ulysses_degree} x {ring_degree}"
        )
    return tiles_under(plan, checked)
