"""The index tables of a plan on one rank: arrivals, work, the way home. Shapes: as in `sparse`."""

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
from bascule.comm.exchange import BoundRoute, exchange
from bascule.comm.mesh import AttentionMesh
from bascule.plan.routes import Route
from bascule.plan.sparse import PackedRows, SparsePlan

_ALL = slice(None)


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
        """This rank among all."""
        return rank_of(self.ranks)

    @cached_property
    def rows(self) -> PackedRows:
        """Rows (head, query block) that this rank computes."""
        return self.plan.q_rows(self.rank)

    @cached_property
    def kv_rows(self) -> list[PackedRows]:
        """Keys that start their way on each ring rank."""
        degree = self.plan.ulysses_degree
        owners = range(self.rank % degree, self.plan.num_ranks, degree)
        return [self.plan.kv_rows(owner) for owner in owners]

    @cached_property
    def _arriving(self) -> list[int]:
        """Rows of q, k and v that come here."""
        of_rank = self.rows, self.plan.kv_rows(self.rank)
        num_q, num_kv = (int(rows.lens.sum()) * self.batch for rows in of_rank)
        return [num_q, num_kv, num_kv]

    @cached_property
    def _routes(self) -> tuple[Route, Route]:
        """To where rows are used, and home."""
        plan, batch = self.plan, self.batch
        return plan.route(self.rank, batch=batch), plan.output_route(self.rank, batch=batch)

    @cached_property
    def _bound(self) -> tuple[BoundRoute, BoundRoute]:
        assert self.ranks.whole is not None
        (into, home), args = self._routes, (self.ranks.whole, self.device, 0)
        plan = self.plan
        num_q, num_kv = (int(x.lens[x.home == self.rank].sum()) for x in (plan.q, plan.kv))
        num_rows = self.batch * (len(plan.ring_of) * num_q + 2 * plan.num_kv_heads * num_kv)
        bound = BoundRoute(into, *args, "rows of heads", num_rows)
        return bound, BoundRoute(home, *args, "rows, home")

    @cached_property
    def _local(self) -> list[Tensor | None]:
        """Sources of rows of q, k, v and the output, if none leaves its rank; None: the same."""
        into, back = map(_composed, self._routes)
        parts = np.split(into, np.cumsum(self._arriving)[:2])
        firsts = np.cumsum([0, *self._arriving[:2]])
        places = [*(part - first for part, first in zip(parts, firsts, strict=True)), back]
        return [
            None if np.array_equal(x, np.arange(x.size)) else table_on(x, self.device)
            for x in places
        ]

    def bring(self, parts: list[Tensor]) -> tuple[Tensor, ...]:
        """Bring rows (n, D) of q, k and v from home to where they are used."""
        if self.plan.is_local:
            return tuple(map(_taken, parts, self._local))
        return exchange(self._bound[0], [torch.cat(parts)])[0].split(self._arriving)

    def take_home(self, rows: Tensor) -> Tensor:
        """Bring rows of the output home from where they were computed."""
        if self.plan.is_local:
            return _taken(rows, self._local[3])
        return exchange(self._bound[1], [rows])[0]

    def call(self, q: Tensor, masks: Bools, scale: float, kernel: str | None) -> AttentionCall:
        """Return the attention of the rows of this rank to the blocks that they see."""
        seen = [AttentionMask(blocks=self._blocks(there, masks)) for there in self.kv_rows]
        tiles = [[Tile(_ALL, _ALL, mask)] for mask in seen]
        block = int(max(self.plan.q.lens.max(initial=1), self.plan.kv.lens.max(initial=1)))
        form = {"dtype": q.dtype, "head_dim": q.shape[-1], "block": block}
        return AttentionCall(
            kernel=select_kernel(kernel, q.device.type, **form),
            scale=scale,
            tiles=tiles,
            kv_lens=[int(there.lens.sum()) * self.batch for there in self.kv_rows],
            ring=self.ranks.ring,
            where="sparse attention",
        )

    def _blocks(self, keys: PackedRows, masks: Bools) -> BlockRows:
        """Return what the queries of this rank see of keys that lie on one ring rank."""
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
