"""The index tables of a plan on one rank: what comes, what is computed on what, and the way home.

Shapes: as in `sparse`.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Bools, Ints, cumulative
from bascule.attention.call import AttentionCall, Tile
from bascule.attention.kernels.registry import select_kernel
from bascule.attention.mask import AttentionMask, BlockRows
from bascule.attention.mesh_calls import keep
from bascule.comm.collectives import table_on
from bascule.comm.exchange import BoundRoute, exchange, spread
from bascule.comm.mesh import AttentionMesh
from bascule.plan.routes import Route
from bascule.plan.sparse import PackedRows, SparsePlan


def rank_of(ranks: AttentionMesh) -> int:
    """This rank among all of a mesh."""
    return 0 if ranks.whole is None else ranks.whole.rank


@dataclass(frozen=True, eq=False)
class SparseTables:
    """The index tables of a plan on this rank; made once for a plan."""

    plan: SparsePlan
    ranks: AttentionMesh
    batch: int
    device: torch.device

    @property
    def rank(self) -> int:
        """Of all ranks."""
        return rank_of(self.ranks)

    @cached_property
    def _arriving(self) -> list[int]:
        """Rows of q, k and v that come here."""
        num_q, num_kv = (
            int(rows.lens.sum()) * self.batch for rows in (self.rows, self.plan.kv_rows(self.rank))
        )
        return [num_q, num_kv, num_kv]

    @cached_property
    def _bound(self) -> tuple[BoundRoute, BoundRoute]:
        assert self.ranks.whole is not None
        names = ("rows of heads", "rows of heads, home")
        into, back = (
            BoundRoute(route, self.ranks.whole, self.device, 0, name)
            for route, name in zip(self._routes, names, strict=True)
        )
        return into, back

    @property
    def _routes(self) -> tuple[Route, Route]:
        route, batch = self.plan.route(self.rank, batch=self.batch), self.batch
        return route, self.plan.output_route(self.rank, batch=batch)

    @cached_property
    def _local(self) -> list[Tensor | None]:
        """Where each row of q, k, v and the output is taken from, if none leaves its rank.

        None: all stay where they are.
        """
        into, back = map(_composed, self._routes)
        firsts = np.cumsum([0, *self._arriving])
        parts = [into[a:b] - a for a, b in itertools.pairwise(firsts.tolist())]
        return [
            None if np.array_equal(part, np.arange(part.size)) else table_on(part, self.device)
            for part in (*parts, back)
        ]

    def bring(self, parts: list[Tensor]) -> tuple[Tensor, ...]:
        """Rows of q, k and v from home to where they are used, (1, 1, rows, D) each."""
        if self.plan.is_local:
            found = tuple(map(_taken, parts, self._local))
        else:
            found = spread(self._bound[0], parts).split(self._arriving)
        return tuple(rows[None, None] for rows in found)

    def take_home(self, rows: Tensor) -> Tensor:
        """Home from where they were computed."""
        if self.plan.is_local:
            return _taken(rows, self._local[3])
        return exchange(self._bound[1], [rows])[0]

    @cached_property
    def rows(self) -> PackedRows:
        """(head, query block) rows that this rank computes."""
        return self.plan.q_rows(self.rank)

    @cached_property
    def kv_rows(self) -> list[PackedRows]:
        """By ring rank, the keys that start their way there."""
        degree = self.plan.ulysses_degree
        return [
            self.plan.kv_rows(owner)
            for owner in range(self.rank % degree, self.plan.num_ranks, degree)
        ]

    def call(self, q: Tensor, masks: Bools, scale: float, kernel: str | None) -> AttentionCall:
        """Return the attention of the rows of this rank to the blocks that they see."""
        plan, everything = self.plan, slice(None)
        tiles = [
            [Tile(everything, everything, AttentionMask(blocks=self._blocks(there, masks)))]
            for there in self.kv_rows
        ]
        return AttentionCall(
            ring=self.ranks.ring,
            kv_lens=[int(there.lens.sum()) * self.batch for there in self.kv_rows],
            tiles=lambda _: tiles,
            kernel=select_kernel(
                kernel,
                q.device.type,
                dtype=q.dtype,
                head_dim=q.shape[-1],
                block=int(max(plan.q.lens.max(initial=1), plan.kv.lens.max(initial=1))),
            ),
            scale=scale,
            where="sparse attention",
        )

    def _blocks(self, keys: PackedRows, masks: Bools) -> BlockRows:
        """What the queries of this rank see of keys that lie on one ring rank."""
        plan, rows = self.plan, self.rows
        group = len(plan.ring_of) // plan.num_kv_heads
        place = np.full((plan.num_kv_heads, plan.kv.lens.size), -1)
        place[keys.heads, keys.blocks] = np.arange(keys.heads.size)
        here = place[rows.heads // group]
        is_seen = np.broadcast_to(masks & (here >= 0), (self.batch, *here.shape))
        item, row, block = np.nonzero(is_seen)
        return BlockRows(
            q_bounds=_bounds(rows.lens, self.batch),
            k_bounds=_bounds(keys.lens, self.batch),
            row_bounds=cumulative(is_seen.sum(axis=2).ravel()),
            columns=here[row, block] + item * keys.heads.size,
        )


def tables_of(
    plan: SparsePlan, ranks: AttentionMesh, batch: int, device: torch.device
) -> SparseTables:
    """Return the tables of a plan, which the mesh keeps."""
    key = plan, batch, device
    if key not in ranks.kept:
        keep(ranks.kept, key, SparseTables(plan, ranks, batch, device))
    return ranks.kept[key]


def _bounds(lens: Ints, batch: int) -> Ints:
    return cumulative(np.tile(lens, batch))


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _composed(route: Route) -> Ints:
    """A route of one rank as one index."""
    assert route.send_index is not None
    assert route.recv_index is not None
    return route.send_index[route.recv_index]
