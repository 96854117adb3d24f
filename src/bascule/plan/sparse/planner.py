"""How plans for block-sparse attention are made, and kept across denoising steps.

Legend: H heads, Q query blocks, K key blocks, C columns of work (key blocks, or ring ranks), U
rings (Ulysses ranks), R ranks of a ring.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bascule.errors import ConfigError
from bascule.plan.checks import integer, number, of_type, shown
from bascule.plan.costs.hardware import Cluster
from bascule.plan.routes import Ints
from bascule.plan.sparse.block_layout import BlockLayout, check_degrees
from bascule.plan.sparse.block_partition import METHODS, BlockPlan, partition_blocks
from bascule.plan.sparse.columns import Columns
from bascule.plan.sparse.counts import Floats, tile_work
from bascule.plan.sparse.heads import partition_heads
from bascule.plan.sparse.sparse_plan import SparsePlan

_COPIED = 1 / 3
"""What it costs to lay out a row for exchange and compute, over sending it.

Three copies at 3.3 TB/s against 180 GB/s; assumed.
"""


@dataclass(frozen=True, slots=True)
class SparsePlanner:
    """How plans are made.

    Args:
        ulysses_degree: U.
        ring_degree: R.
        method: How blocks are placed, see `partition_blocks`. With "paper" heads are dealt by the
            paper's greedy too, and all rings share one placement of blocks. "in_order" leaves heads
            in their order and blocks where they are: what there is without a plan, to compare with.
        target: Imbalance that "minimal_move" is to reach, over the mean work of all ranks.
        reward: For "paper", see `partition_blocks`.
        cut_above: See `partition_heads`.
        shared: Whether all rings place blocks alike, from the sum of their work.
        move_cost: Work, in pairs of tokens, that takes as long as to send two rows of a head: the
            query and its output, or the key and its value. That is bytes of a value x FLOP/s / (2 x
            bytes/s): 3,000 on an H100 with NVLink (544 TFLOP/s, 180 GB/s; assumed). Moves that gain
            less are not made by "minimal_move", even if the target is missed. Default: moves cost
            nothing.
        cluster: With one, moves between nodes are dearer than within them. Default: all are alike.

    Raises:
        ConfigError: A degree is less than 1, or the cluster has another number of ranks.
    """

    ulysses_degree: int = 1
    ring_degree: int = 1
    method: str = "minimal_move"
    target: float = 1.005
    reward: float = 2.0
    cut_above: float = 0.01
    move_cost: float = 0.0
    shared: bool = False
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        check_degrees(self.ulysses_degree, self.ring_degree)
        of_type("method", self.method, str, f"one of {METHODS}, or in_order")
        if self.method not in (*METHODS, "in_order"):
            raise ConfigError(
                f"method {shown(self.method)}: blocks are placed by one of {METHODS}, or in_order"
            )
        of_type("shared", self.shared, bool, "True or False")
        for name in ("target", "reward", "move_cost"):
            number(f"SparsePlanner({name}", getattr(self, name))
        number("SparsePlanner(cut_above", self.cut_above, most=np.inf)
        if self.cluster is not None:
            of_type("cluster", self.cluster, Cluster, "a Cluster, or None")
            self.cluster.check_world(self.ulysses_degree * self.ring_degree)

    def plan(
        self,
        work: npt.ArrayLike,
        q: BlockLayout,
        kv: BlockLayout | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> SparsePlan:
        """Choose a rank for every query block of every head, and a ring rank for every key block.

        Heads first, then the blocks of each ring. Pure; the same on every rank that gives the same
        arguments.

        Args:
            work: (H, Q, K) bool masks, or (H, Q, R) counts by home ring rank: `block_counts` with
                the lengths of `kv`. With counts, keys stay at home.
            q: The query blocks at home.
            kv: The key blocks at home. Default: those of the queries.
            num_kv_heads: Key-value heads. Default: H.

        Raises:
            ConfigError: The arguments do not fit each other.
        """
        kv = q if kv is None else kv
        columns = Columns.of(work, q, kv, self.ulysses_degree, self.ring_degree)
        if self.method == "paper" and self.ring_degree > 1 and not columns.are_blocks:
            raise ConfigError(
                'method "paper" moves keys, and counts are by the ring rank where keys are at '
                'home: give the masks, or use "minimal_move"'
            )
        num_kv_heads = _kv_heads(columns.work.shape[0], num_kv_heads)
        if self.method == "in_order":
            degrees = self.ulysses_degree, self.ring_degree
            made = in_order(columns.work.shape[0], q, kv, *degrees, num_kv_heads=num_kv_heads)
            return plan_under(made, work)
        ring_of = self._rings(columns)
        matrices = columns.matrices(ring_of, self.ulysses_degree)
        plans = self._place(columns, matrices, ring_of, num_kv_heads)
        q_of, column_of = np.stack([x.q_of for x in plans]), np.stack([x.kv_of for x in plans])
        if self._is_shared:
            tiles = _tiles(matrices, q_of, column_of, self.ring_degree)
        else:
            tiles = np.stack([x.tiles for x in plans])
        kv_of = column_of if columns.are_blocks else _kv_at_home(kv, self.ulysses_degree)
        degrees = self.ulysses_degree, self.ring_degree
        return SparsePlan(*degrees, num_kv_heads, q, kv, ring_of, q_of, kv_of, tiles)

    @property
    def _is_shared(self) -> bool:
        return self.shared or self.method == "paper"

    def _rings(self, columns: Columns) -> Ints:
        """(H, Q) ring of every query block of every head."""
        # In turns from the ring ranks, so that every rank of a ring gets its share of a cut head.
        order = _dealt(columns.q_home)
        heads = partition_heads(
            columns.per_block()[:, order],
            self.ulysses_degree,
            method="paper" if self.method == "paper" else "assign",
            cut_above=self.cut_above,
        )
        ring_of = np.empty_like(heads.rank_of)
        ring_of[:, order] = heads.rank_of
        return ring_of

    def _place(
        self, columns: Columns, matrices: Floats, ring_of: Ints, num_kv_heads: int
    ) -> list[BlockPlan]:
        """(U,) where query blocks and columns are in each ring."""
        if self._is_shared:
            matrices = matrices.sum(axis=0, keepdims=True)
        # Rings with less work than others need not be as even.
        mean = max(float(matrices.sum()) / len(matrices), 1.0)
        least = (1.0 + self.target) / 2
        tolls = self._tolls(columns, num_kv_heads)
        plans = [
            partition_blocks(
                matrix,
                self.ring_degree,
                method=self.method,
                q_home=columns.q_home,
                kv_home=columns.home,
                reward=self.reward,
                target=max(self.target * mean / max(float(matrix.sum()), 1.0), least),
                prices=self._prices(columns, ring_of, num_kv_heads, ring),
                toll=tolls[0],
                first_toll=tolls[1],
            )
            for ring, matrix in enumerate(matrices)
        ]
        return plans * self.ulysses_degree if self._is_shared else plans

    def _tolls(self, columns: Columns, num_kv_heads: int) -> tuple[float, float]:
        """Work of a rank for a block of one head that moves, and for moving anything at all.

        Without Ulysses ranks nothing is laid out anew as long as nothing moves.
        """
        tokens = float(columns.q_lens.mean()) if columns.q_lens.size else 0.0
        toll = self.move_cost * tokens / self.ring_degree
        rows = (len(columns.work) + num_kv_heads) * columns.q_lens.size
        return toll, _COPIED * rows * toll if self.ulysses_degree == 1 else 0.0

    def _prices(
        self, columns: Columns, ring_of: Ints, num_kv_heads: int, ring: int
    ) -> tuple[Floats, Floats]:
        """(R, R) each: what moving a query block and a key block of a ring costs.

        A query and its output travel for each head in the ring, a key and a value for each
        key-value head. Over other wires than the fastest a row costs more.
        """
        per_row = 1.0 - np.eye(self.ring_degree)
        if self.cluster is not None:
            node = np.arange(self.ring_degree) * self.ulysses_degree + ring
            node //= self.cluster.ranks_per_node
            near, far = self.cluster.intra_bytes_per_s, self.cluster.inter_bytes_per_s
            per_row *= np.where(node == node[:, None], 1.0, near / far)
        is_here = ring_of == ring
        num_heads = max(float(is_here.sum()) / max(ring_of.shape[1], 1), 1.0)
        num_kv = max(int(is_here.reshape(num_kv_heads, -1).any(axis=1).sum()), 1)
        return num_heads * per_row, num_kv * per_row if columns.are_blocks else per_row + np.inf


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

        The plan is also kept where it is as even as it was when it was made: a new one is made in
        the same way, and would hardly be better.

        Raises:
            ConfigError: The work does not fit the plan.
        """
        plan = self.plan
        ran = plan_under(plan, work)
        if ran.imbalance <= max(1.0 + self.tolerance, plan.imbalance):
            return replace(self, num_kept=self.num_kept + 1, ran=ran)
        made = self.planner.plan(work, plan.q, plan.kv, num_kv_heads=plan.num_kv_heads)
        return replace(self, plan=made, num_planned=self.num_planned + 1, ran=ran)


def plan_under(plan: SparsePlan, work: npt.ArrayLike) -> SparsePlan:
    """The same decision, with other work in its tiles; errors as of `tiles_under`."""
    return replace(plan, tiles=tiles_under(plan, work))


def tiles_under(plan: SparsePlan, work: npt.ArrayLike) -> Floats:
    """(U, R, R) work of the tiles of a plan under masks or counts other than its own.

    Raises:
        ConfigError: The work does not fit the plan; or it is counts, and the plan moves keys.
    """
    of_type("plan", plan, SparsePlan, "a SparsePlan, as SparsePlanner.plan makes them")
    columns = Columns.of(work, plan.q, plan.kv, plan.ulysses_degree, plan.ring_degree)
    if columns.work.shape[0] != plan.ring_of.shape[0]:
        raise ConfigError(
            f"work of {columns.work.shape[0]} heads for a plan of {plan.ring_of.shape[0]}"
        )
    column_of = plan.kv_of
    if not columns.are_blocks:
        if (plan.kv_of != _kv_at_home(plan.kv, plan.ulysses_degree)).any():
            raise ConfigError(
                "this plan moves keys, and counts are by the ring rank where keys are at home: "
                "give the masks, or make plans from counts"
            )
        column_of = np.tile(columns.home, (plan.ulysses_degree, 1))
    matrices = columns.matrices(plan.ring_of, plan.ulysses_degree)
    return _tiles(matrices, plan.q_of, column_of, plan.ring_degree)


def in_order(
    num_heads: int,
    q: BlockLayout,
    kv: BlockLayout,
    ulysses_degree: int,
    ring_degree: int,
    *,
    num_kv_heads: int | None = None,
) -> SparsePlan:
    """Heads in their order, and blocks where they are: as without a plan. Its tiles are empty."""
    ring_of = np.arange(num_heads) * ulysses_degree // max(num_heads, 1)
    q_of, kv_of = (np.tile(x.home // ulysses_degree, (ulysses_degree, 1)) for x in (q, kv))
    return SparsePlan(
        ulysses_degree,
        ring_degree,
        num_heads if num_kv_heads is None else num_kv_heads,
        q,
        kv,
        np.tile(ring_of, (q.lens.size, 1)).T,
        q_of,
        kv_of,
        np.zeros((ulysses_degree, ring_degree, ring_degree)),
    )


def _tiles(matrices: Floats, q_of: Ints, column_of: Ints, ring_degree: int) -> Floats:
    """(U, R, R) from (U, Q, C), (U, Q) and (U, C)."""
    rings = zip(matrices, q_of, column_of, strict=True)
    return np.stack([tile_work(*ring, ring_degree) for ring in rings])


def _kv_at_home(kv: BlockLayout, ulysses_degree: int) -> Ints:
    return np.tile(kv.home // ulysses_degree, (ulysses_degree, 1))


def _dealt(ranks: Ints) -> Ints:
    """(n,) items in turns from the ranks: the first of each rank, the second of each, ..."""
    by_rank = np.argsort(ranks, kind="stable")
    first = np.searchsorted(ranks[by_rank], ranks[by_rank])
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(ranks.size) - first
    return np.lexsort((ranks, place))


def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    found = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
    if found < 1 or num_heads % found:
        raise ConfigError(
            f"{num_heads} heads and {found} key-value heads: the former must be a multiple of the "
            "latter"
        )
    return found
