"""How plans for block-sparse attention are made, and kept across denoising steps.

Legend: H heads, Q query blocks, K key blocks, U rings (Ulysses ranks), R ranks of a ring.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bascule.arrays import Ints
from bascule.errors import ConfigError
from bascule.plan.checks import integer, number, of_type, shown
from bascule.plan.sparse.block_layout import BlockLayout, check_degrees
from bascule.plan.sparse.block_partition import METHODS, TARGET, partition_blocks
from bascule.plan.sparse.columns import Columns, plan_under
from bascule.plan.sparse.heads import partition_heads
from bascule.plan.sparse.sparse_baselines import REWARD, in_order, paper_plan
from bascule.plan.sparse.sparse_plan import SparsePlan

PLANNERS = (*METHODS, "paper", "in_order")
"""The methods, and what they are compared with."""


@dataclass(frozen=True, slots=True)
class SparsePlanner:
    """How plans are made.

    Args:
        ulysses_degree: U.
        ring_degree: R.
        method: How blocks are placed: "stripe" or "minimal_move", as for `partition_blocks`. To
            compare with: "paper" is the method of db-SP, "in_order" leaves heads in their order and
            blocks where they are, as without a plan.
        target: Imbalance at which "minimal_move" moves no more, over the mean work of all ranks.
        cut_above: See `partition_heads`.
        reward: For "paper": how much less loaded a block's home rank counts, in blocks like it.

    Raises:
        ConfigError: A value is out of range.
    """

    ulysses_degree: int = 1
    ring_degree: int = 1
    method: str = "minimal_move"
    target: float = TARGET
    cut_above: float = 0.01
    reward: float = REWARD

    def __post_init__(self) -> None:
        check_degrees(self.ulysses_degree, self.ring_degree)
        if of_type("method", self.method, str, f"one of {PLANNERS}") not in PLANNERS:
            raise ConfigError(f"method {shown(self.method)}: plans are made by one of {PLANNERS}")
        for name in ("target", "reward"):
            number(f"SparsePlanner({name}", getattr(self, name))
        number("SparsePlanner(cut_above", self.cut_above, most=np.inf)

    def plan(
        self,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> SparsePlan:
        """Decide who computes what.

        Args:
            work: (H, Q, K) masks, or (H, Q, R) counts by home ring rank: `block_counts` with
                the lengths of `kv`. With counts, keys stay at home.
            q: The query blocks at home.
            kv: The key blocks at home. Default: those of the queries.
            num_kv_heads: Key-value heads. Default: H.

        Raises:
            ConfigError: The arguments do not fit each other.
        """
        kv, degrees = q if kv is None else kv, (self.ulysses_degree, self.ring_degree)
        columns = Columns.of(work, q, kv, *degrees)
        num_heads = columns.work.shape[0]
        num_kv = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        if num_kv < 1 or num_heads % num_kv:
            raise ConfigError(
                f"{num_heads} heads and {num_kv} key-value heads: the former must be a multiple of "
                "the latter"
            )
        if self.method == "in_order":
            return plan_under(in_order(num_heads, q, kv, *degrees, num_kv_heads=num_kv), work)
        if self.method == "paper":
            return paper_plan(columns, num_kv_heads=num_kv, reward=self.reward)
        ring_of = self._rings(columns)
        matrices = columns.matrices(ring_of)
        # Rings with less work than others need not be as even.
        mean = max(float(matrices.sum()) / len(matrices), 1.0)
        least = (1.0 + self.target) / 2
        rings = [
            partition_blocks(
                matrix,
                self.ring_degree,
                method=self.method,
                q_home=columns.q_home,
                kv_home=columns.home,
                target=max(self.target * mean / max(float(matrix.sum()), 1.0), least),
                keys_stay=not columns.are_blocks,
            )
            for matrix in matrices
        ]
        return columns.plan(ring_of, rings, num_kv)

    def _rings(self, columns: Columns) -> Ints:
        """(H, Q) ring of every query block of every head."""
        # In turns from the ring ranks, so that every rank of a ring gets its share of a cut head.
        order = _dealt(columns.q_home)
        heads = partition_heads(
            columns.per_block()[:, order], self.ulysses_degree, cut_above=self.cut_above
        )
        ring_of = np.empty_like(heads.rank_of)
        ring_of[:, order] = heads.rank_of
        return ring_of


@dataclass(frozen=True, slots=True)
class PlanReuse:
    """A layer's plan, kept across denoising steps while it is even enough. Immutable.

    A step runs with `plan`; then `after` takes that step's work and gives the state for the next
    one. So planning is off the critical path, and a plan is one step old when it is used.

    Attributes:
        planner: Makes plans.
        plan: The plan for the next step.
        tolerance: It is kept while its imbalance under the new work is at most 1 + tolerance. The
            paper has 0.10.
        num_planned: Plans made so far.
        num_kept: How often the plan was kept.
        ran: The plan of the last step, that step's work in its tiles; None before the first.
    """

    planner: SparsePlanner
    plan: SparsePlan
    tolerance: float = 0.05
    num_planned: int = 1
    num_kept: int = 0
    ran: SparsePlan | None = None

    def __post_init__(self) -> None:
        of_type("planner", self.planner, SparsePlanner, "a SparsePlanner")
        of_type("plan", self.plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
        number("tolerance", self.tolerance, most=np.inf)

    @property
    def ahead(self) -> SparsePlan:
        """The plan for the next step, the last known work in its tiles."""
        if self.ran is None or self.ran.ring_of is not self.plan.ring_of:
            return self.plan
        return self.ran

    def after(self, work: npt.ArrayLike) -> "PlanReuse":
        """The state after a step with this work: masks, or counts, as for `SparsePlanner.plan`.

        The plan is also kept if its imbalance has not grown since it was made, because planning
        again by the same method would not improve it.

        Raises:
            ConfigError: The work does not fit the plan.
        """
        plan = self.plan
        ran = plan_under(plan, work)
        if ran.imbalance <= max(1.0 + self.tolerance, plan.imbalance):
            return replace(self, num_kept=self.num_kept + 1, ran=ran)
        made = self.planner.plan(work, plan.q, plan.kv, num_kv_heads=plan.num_kv_heads)
        return replace(self, plan=made, num_planned=self.num_planned + 1, ran=ran)


def _dealt(ranks: Ints) -> Ints:
    """(n,) items in turns from the ranks: the first of each rank, the second of each, ..."""
    by_rank = np.argsort(ranks, kind="stable")
    first = np.searchsorted(ranks[by_rank], ranks[by_rank])
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(ranks.size) - first
    return np.lexsort((ranks, place))
