"""Block-sparse attention over a mesh: every rank computes the blocks that a plan gives it.

One uneven all-to-all sends queries, keys and values to the ranks that use them. The ring passes
keys and values on; kernels skip blocks. One all-to-all returns the output (db-SP uses three).

Shapes: B batch, H query heads, K key-value heads, T tokens of this rank, D head width; Q query
blocks and C key blocks of the sequence; X (head, query block) rows that a rank computes; R ring
ranks.
"""

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from bascule.arrays import Bools, Ints, cumulative
from bascule.attention.kernels.registry import select_kernel
from bascule.attention.mask import AttentionMask, BlockRows
from bascule.attention.ring import AttentionCall, Tile
from bascule.attention.sparse.clusters import Clusters, cluster
from bascule.attention.sparse.rules import BlockRule, Pool, RuleCall, in_blocks
from bascule.attention.usp import attend, check_settings, check_tensors, with_positive_scale
from bascule.checks import of_type
from bascule.comm.agree import first_use
from bascule.comm.collectives import all_gather, all_reduce, table_on
from bascule.comm.failures import shared
from bascule.comm.groups import Cache, RankGroup, device_of
from bascule.comm.mesh import AttentionMesh, as_attention_mesh
from bascule.comm.quantized import CommDtype, Quantized
from bascule.comm.route import BoundRoute, move
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError
from bascule.plan.routes import Route
from bascule.plan.sparse import BlockLayout, PackedRows, SparsePlan, block_counts
from bascule.plan.sparse.layout import Counts

_ALL = slice(None)
_NUM_TABLES = 8  # most batch sizes and devices of a plan whose tables are remembered


@dataclass(eq=False)
class SparseTables:
    """The index tables of a plan on this rank, made at first use."""

    of: "weakref.ref[SparsePlan]"  # of the plan: the tables die with it
    ranks: AttentionMesh
    batch: int
    device: torch.device

    @property
    def plan(self) -> SparsePlan:
        """The plan, which the caller keeps alive."""
        plan = self.of()
        assert plan is not None
        return plan

    @cached_property
    def rows(self) -> PackedRows:
        """Rows (head, query block) that this rank computes."""
        return self.plan.q_rows(self.ranks.rank)

    @cached_property
    def kv_rows(self) -> list[PackedRows]:
        """Rows of keys that each ring rank has before the first round."""
        degree = self.plan.ulysses_degree
        owners = range(self.ranks.rank % degree, self.plan.num_ranks, degree)
        return [self.plan.kv_rows(owner) for owner in owners]

    @cached_property
    def _arriving(self) -> list[int]:
        """Numbers of rows of q, k and v that arrive here."""
        of_rank = self.rows, self.plan.kv_rows(self.ranks.rank)
        num_q, num_kv = (int(rows.lens.sum()) * self.batch for rows in of_rank)
        return [num_q, num_kv, num_kv]

    @cached_property
    def _routes(self) -> tuple[Route, Route]:
        """The routes to where rows are used, and home."""
        plan, batch, rank = self.plan, self.batch, self.ranks.rank
        return plan.route(rank, batch=batch), plan.output_route(rank, batch=batch)

    @cached_property
    def _bound(self) -> tuple[BoundRoute, BoundRoute]:
        assert self.ranks.whole is not None
        (into, home), where = self._routes, (self.ranks.whole, self.device)
        plan = self.plan
        num_q, num_kv = (int(x.lens[x.home == self.ranks.rank].sum()) for x in (plan.q, plan.kv))
        num_home = self.batch * (len(plan.ring_of) * num_q + 2 * plan.num_kv_heads * num_kv)
        there = num_home, sum(self._arriving)
        back = self._arriving[0], self.batch * len(plan.ring_of) * num_q
        names = "rows of heads", "gradients of rows"
        bound = BoundRoute(into, *where, there, 0, names, has_copies=True)
        return bound, BoundRoute(home, *where, back, 0, ("rows, home", "rows, home back"))

    @cached_property
    def _local(self) -> list[Tensor | None]:
        """Indices of the rows of q, k, v and output if none leaves its rank; None: in order."""
        into, back = map(_composed, self._routes)
        parts = np.split(into, np.cumsum(self._arriving)[:2])
        firsts = np.cumsum([0, *self._arriving[:2]])
        places = [*(part - first for part, first in zip(parts, firsts, strict=True)), back]
        return [
            None if np.array_equal(x, np.arange(x.size)) else table_on(x, self.device)
            for x in places
        ]

    def bring(self, parts: list[Tensor], wire: Quantized | None) -> tuple[Tensor, ...]:
        """Bring rows (n, D) of q, k and v from home to where they are used."""
        if self.plan.is_local:
            return tuple(map(_taken, parts, self._local))
        return move(self._bound[0], [torch.cat(parts)], wire=wire)[0].split(self._arriving)

    def take_home(self, rows: Tensor, wire: Quantized | None) -> Tensor:
        """Bring rows of the output home from where they were computed."""
        if self.plan.is_local:
            return _taken(rows, self._local[3])
        return move(self._bound[1], [rows], wire=wire)[0]

    def call(
        self, q: Tensor, seen: list[BlockRows], scale: float, kernel: str | None
    ) -> AttentionCall:
        """Return the call in which the rows of this rank attend to the keys that they see."""
        block = int(max(self.plan.q.lens.max(initial=1), self.plan.kv.lens.max(initial=1)))
        query = {"dtype": q.dtype, "head_dim": q.shape[-1], "block": block}
        return AttentionCall(
            kernel=select_kernel(kernel, q.device.type, **query),
            scale=scale,
            tiles=[[Tile(_ALL, _ALL, AttentionMask(blocks=rows))] for rows in seen],
            kv_lens=[int(rows.k_bounds[-1]) for rows in seen],
            ring=self.ranks.ring,
            where="sparse attention",
        )

    def seen(self, masks: Bools, keys: Bools | None) -> list[BlockRows]:
        """Return, by ring rank, which of its keys the rows of this rank see."""
        return [self._blocks(there, self._seen_lens(there, keys), masks) for there in self.kv_rows]

    def _seen_lens(self, there: PackedRows, keys: Bools | None) -> Ints:
        """Return (B, rows) keys of each row that any query may see."""
        if keys is None:
            return np.tile(there.lens, (self.batch, 1))
        of_rows = keys[:, there.tokens(self.plan.kv)]
        sums = np.pad(np.cumsum(of_rows, axis=1), ((0, 0), (1, 0)))
        return np.diff(sums[:, cumulative(there.lens)], axis=1)

    def _blocks(self, keys: PackedRows, lens: Ints, masks: Bools) -> BlockRows:
        """Return which keys of one ring rank the queries of this rank see."""
        plan, rows = self.plan, self.rows
        group = len(plan.ring_of) // plan.num_kv_heads
        place = np.full((plan.num_kv_heads, plan.kv.lens.size), -1)
        place[keys.heads, keys.blocks] = np.arange(keys.heads.size)
        here = place[rows.heads // group]
        # The last entry is for blocks that are not there.
        there = here >= 0 if lens.all() else np.pad(lens > 0, ((0, 0), (0, 1)))[:, here]
        is_seen = np.broadcast_to(masks & there, (self.batch, *here.shape))
        item, row, block = np.nonzero(is_seen)
        number = np.cumsum(lens > 0).reshape(lens.shape) - 1
        return BlockRows(
            q_bounds=cumulative(np.tile(rows.lens, self.batch)),
            k_bounds=cumulative(lens[lens > 0]),
            row_bounds=cumulative(is_seen.sum(axis=2).ravel()),
            columns=number[item, here[row, block]],
        )


def _taken(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _composed(route: Route) -> Ints:
    """Return a route of one rank as one index."""
    assert route.send_index is not None and route.recv_index is not None
    return route.send_index[route.recv_index]


Seen = Callable[[PackedRows], Bools] | BlockRule | Clusters
"""Gives the key blocks that X rows see, (X, C), or (B, X, C) if batch items differ; or a rule."""

EXCHANGE_SPAN, MASKS_SPAN = "bascule: rows exchanged", "bascule: masks to rows"
"""Names of ranges in profiles: both exchanges; making masks and their index tables."""

_A_PLAN = "a SparsePlan, as SparsePlanner.plan makes them"


@dataclass(frozen=True, slots=True, eq=False)
class WholeMasks:
    """Masks (H, Q, C) that every rank has; calling it returns some rows.

    While a plan is kept, calls with the same object reuse the index tables that the first one made:
    they leave the masks alone, copy nothing to a device, and wait for none.
    """

    array: Bools  # the masks
    digest: int  # of the array, which ranks compare
    dense: Bools | None = None  # (Q, C), also seen by all heads
    # By plan: the keys that were seen, rows of the masks, their tables, and the places of the keys.
    made: "weakref.WeakKeyDictionary[SparseTables, tuple[Any, ...]]" = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False
    )

    def __call__(self, rows: PackedRows) -> Bools:
        """Return these rows, (X, C)."""
        masks = self.array[rows.heads, rows.blocks]
        return masks if self.dense is None else masks | self.dense[rows.blocks]


def rows_of(masks: Bools | Tensor) -> WholeMasks:
    """Make the argument `seen` from masks (H, Q, C) that all ranks have, as from a file."""
    array = masks.cpu().numpy() if isinstance(masks, Tensor) else masks
    return WholeMasks(array, zlib.crc32(np.packbits(array != 0).tobytes()))


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh,
    plan: SparsePlan,
    seen: Seen,
    *,
    scale: float | None = None,
    kernel: str | None = None,
    keys: Bools | None = None,
    comm_dtype: CommDtype | None = None,
) -> Tensor:
    """Attend exactly to the blocks of a mask; q, k and v lie as the plan says. Return as q.

    It costs two all-to-alls over all ranks (none if the plan moves no row) and R - 1 exchanges
    around the ring, and twice that backward. The first call with a plan adds an all-gather, in
    which ranks agree; a `BlockRule` that looks at keys adds two all-gathers in the ring.

    Args:
        q: (B, H, T, D) queries of this rank's blocks, in the order of the sequence.
        k: (B, K, T, D) keys; H is a multiple of K.
        v: (B, K, T, D) values.
        mesh: The ranks.
        plan: Says which rank computes which blocks.
        seen: Returns the rows of the mask that this rank computes. A token that sees nothing gives
            0. Ranks compare whole masks (`rows_of`), but not rows that a function makes.
        scale: Factor of the scores. Default: D^-0.5.
        kernel: Name of a block kernel that skips blocks. Default: the first that runs here.
        keys: Bool (B, tokens of the sequence) or (1, ..), the same on all ranks; False hides a key,
            such as padding. Default: all are seen.
        comm_dtype: "int8" or "e4m3" sends rows in 8 bits; the backward pass ignores the rounding.
            Default: their own dtype.

    Raises:
        ConfigError: Shapes, plan, masks or settings do not fit.
        CommError: The ranks disagree, or a rank did not make the call in time.
    """
    settings: Any = {"scale": scale, "kernel": kernel, "keys": keys, "comm_dtype": comm_dtype}
    return attend_sparse(q, k, v, mesh, plan, seen, **settings)[0]


@shared("sparse attention")
def attend_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AttentionMesh | DeviceMesh,
    plan: SparsePlan,
    seen: Seen,
    *,
    scale: float | None = None,
    kernel: str | None = None,
    keys: Bools | None = None,
    comm_dtype: CommDtype | None = None,
) -> tuple[Tensor, Counts]:
    """Compute `sparse_attention`; return also the mask (B or 1, X, C) of this rank's rows.

    With `Clusters` return counts of keys (1, X, ranks) instead, by the rank that has them at home.
    """
    check_settings("sparse_attention", False, scale)
    wire = Quantized.of(comm_dtype)
    check_tensors("sparse_attention", q, k, v)
    of_type("plan", plan, SparsePlan, _A_PLAN)
    refuse_transforms("sparse_attention", q, k, v)
    if isinstance(seen, WholeMasks):
        wanted = (*plan.ring_of.shape, plan.kv.lens.size)
        if seen.array.shape != wanted:
            wrong = f"sparse_attention: masks of shape {seen.array.shape} for a plan of {wanted}"
            raise ConfigError(f"{wrong}: give the masks for which it was made")
    elif not isinstance(seen, BlockRule | Clusters) and not callable(seen):
        raise ConfigError(
            f"sparse_attention: seen is a {type(seen).__name__}: give rows_of(masks), or a rule"
        )
    ranks = as_attention_mesh(mesh)
    text = f"{q.dtype}, head_dim {q.shape[-1]}, batch {q.shape[0]}, scale={scale}, kernel={kernel}"
    text += f", comm_dtype {wire}"
    masks_are = seen.digest if isinstance(seen, WholeMasks) else type(seen).__name__
    shapes = [tuple(x.shape) for x in (q, k, v)]

    def describe() -> tuple[str, ConfigError | None]:
        heads, blocks = plan.ring_of.shape
        of_plan = f"{heads} heads x {blocks} blocks of {int(plan.q.lens.sum())} tokens"
        whole = f"{of_plan}, {text}, digest {plan.digest}, masks {masks_are}"
        return whole, _misfit(ranks, plan, shapes)

    key = None if ranks.whole is None else (ranks.whole.ranks, plan.digest, *shapes, text)
    first_use(ranks.whole, key, describe, what="sparse attention")
    of_plan = ranks.tables.setdefault(plan, Cache(_NUM_TABLES))
    where = q.shape[0], q.device
    tables = of_plan.get(where, lambda: SparseTables(weakref.ref(plan), ranks, *where))
    tables.of = weakref.ref(plan)  # of equal plans, the one that this caller holds
    q, factor = with_positive_scale(q, scale)
    with record_function(EXCHANGE_SPAN):
        here_q, here_k, here_v = tables.bring([x.reshape(-1, x.shape[3]) for x in (q, k, v)], wire)
    with record_function(MASKS_SPAN):
        kept = seen.made.get(tables) if isinstance(seen, WholeMasks) else None
        seen_keys: Any = keys
        if keys is not None:
            keys = np.broadcast_to(keys, (q.shape[0], int(plan.kv.lens.sum())))
        here, index, order = (here_q.detach(), here_k.detach(), here_v.detach()), None, None
        if isinstance(seen, Clusters):
            both = [x.view(q.shape[0], -1, q.shape[3]) for x in here[:2]]
            groups = cluster(seen, plan, ranks, both, factor, keys)
            masks, rows_seen = groups.counts[None], groups.seen
            order, index = groups.q_order, groups.kv_order
            here_q = here_q.index_select(0, order)
        elif kept is not None and np.array_equal(kept[0], seen_keys):
            _, masks, rows_seen, index = kept
        else:
            if isinstance(seen, BlockRule):
                masks = _chosen(seen, tables, here, factor, keys)
            else:
                masks = seen(tables.rows)
            masks = _checked(tables, masks)
            rows_seen = tables.seen(masks, keys)
            if keys is not None:
                of_rows = keys[:, plan.kv_rows(tables.ranks.rank).tokens(plan.kv)].ravel()
                index = table_on(np.flatnonzero(of_rows), q.device)
            if isinstance(seen, WholeMasks):
                seen.made[tables] = seen_keys, masks, rows_seen, index
        if index is not None:
            here_k, here_v = (x.index_select(0, index) for x in (here_k, here_v))
        call = replace(tables.call(q, rows_seen, factor, kernel), wire=wire)
    q_X1D, k_X1D, v_X1D = (x[:, None] for x in (here_q, here_k, here_v))
    rows = attend(q_X1D, k_X1D, v_X1D, call)[:, 0]
    if order is not None:
        rows = rows.index_select(0, order.argsort())
    with record_function(EXCHANGE_SPAN):
        rows = tables.take_home(rows, wire)
    return rows.view(*q.shape[:2], -1, q.shape[3]), masks


def _misfit(
    ranks: AttentionMesh, plan: SparsePlan, shapes: list[tuple[int, ...]]
) -> ConfigError | None:
    """Return why tensors of these shapes cannot be attended by a plan here."""
    degrees = plan.ring_degree, plan.ulysses_degree
    if degrees != ranks.degrees:
        return ConfigError(
            f"sparse_attention: a plan for {degrees[0]} x {degrees[1]} ranks (ring x Ulysses) "
            "on a mesh of {} x {}".format(*ranks.degrees)
        )
    q, k, v = shapes
    num_q, num_kv = (int(x.lens[x.home == ranks.rank].sum()) for x in (plan.q, plan.kv))
    want_q = (q[0], len(plan.ring_of), num_q, q[-1])
    want_kv = (q[0], plan.num_kv_heads, num_kv, q[-1])
    if shapes != [want_q, want_kv, want_kv]:
        return ConfigError(
            f"sparse_attention: q {q}, k {k}, v {v}: the plan has {want_q} and {want_kv} here"
        )
    return None


def _checked(tables: SparseTables, masks: Bools) -> Bools:
    """Check the masks that a caller's function gave; return them as (B or 1, X, C)."""
    wanted = (tables.rows.heads.size, tables.plan.kv.lens.size)
    whole = (tables.batch, *wanted)
    dtype, shape = getattr(masks, "dtype", type(masks).__name__), getattr(masks, "shape", "")
    if dtype != np.bool_ or shape not in (wanted, (1, *wanted), whole):
        raise ConfigError(
            f"rows of a mask {shape} of {dtype}: return bool {wanted}, or {whole} if items differ"
        )
    return masks if masks.ndim == 3 else masks[None]


def _chosen(
    rule: BlockRule,
    tables: SparseTables,
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    keys: Bools | None,
) -> Bools:
    """Return the masks that a rule chooses for the rows of this rank, (B, X, C)."""
    plan, rows, batch, (q, k, v) = tables.plan, tables.rows, tables.batch, qkv

    def features(pool: Pool | None, x: Tensor, layout: BlockLayout, of: PackedRows) -> Tensor:
        if pool is None:
            return x.new_zeros(batch, of.lens.size, 0)
        longest = int(layout.lens.max(initial=1))
        tokens, inside = in_blocks(x.view(batch, len(x) // batch, x.shape[-1]), of.lens, longest)
        if keys is not None:
            of_rows = torch.from_numpy(keys[:, of.tokens(layout)])[..., None].to(x.device)
            inside = inside & in_blocks(of_rows, of.lens, longest)[0][..., 0]
        return pool(tokens, inside.expand(tokens.shape[:-1]))

    of_q = features(rule.of_queries, q, plan.q, rows)
    tokens_k = torch.cat([k, v], dim=-1) if rule.with_values else k
    of_k = features(rule.of_keys, tokens_k, plan.kv, plan.kv_rows(tables.ranks.rank))
    whole = of_k.new_zeros(batch, plan.num_kv_heads, plan.kv.lens.size, of_k.shape[-1])
    if rule.of_keys is not None:
        every = _gathered(tables.ranks.ring, of_k.transpose(0, 1).contiguous(), "features of keys")
        for there, part in zip(tables.kv_rows, every, strict=True):
            whole[:, there.heads, there.blocks] = part[: there.heads.size].transpose(0, 1)
    heads, head_of, counts = np.unique(rows.heads, return_inverse=True, return_counts=True)
    place = np.arange(rows.heads.size) - np.repeat(np.cumsum(counts) - counts, counts)
    padded = of_q.new_zeros(batch, heads.size, counts.max(initial=0), of_q.shape[-1])
    padded[:, head_of, place] = of_q
    blocks = np.tile(rows.blocks[:1], padded.shape[1:3])
    blocks[head_of, place] = rows.blocks
    group = len(plan.ring_of) // plan.num_kv_heads

    def sum_rows(x: Tensor) -> Tensor:
        sums = x.new_zeros(batch, len(plan.ring_of), x.shape[-1])
        of_rows = x.expand(batch, *x.shape[1:])[:, head_of, place]
        sums.index_add_(1, torch.from_numpy(rows.heads).to(x.device), of_rows)
        if (everyone := tables.ranks.whole) is not None:
            sums = all_reduce(everyone, "all_reduce (sums over heads)", sums)
        return sums[:, heads, None]

    no_text = [np.zeros(layout.lens.size, np.bool_) for layout in (plan.q, plan.kv)]
    where = heads, blocks, plan.q.lens, plan.kv.lens, no_text[0], no_text[1]
    at = RuleCall(*where, scale, q.device, sum_rows, is_ordered=plan.q.order is not None)
    masks = rule.masks(padded, whole[:, heads // group], at)
    masks = masks.expand(-1, *blocks.shape, -1)
    return masks[:, head_of, place].cpu().numpy()


def gather_counts(
    mesh: AttentionMesh | DeviceMesh, plan: SparsePlan, masks: Counts, *, by_rank: bool = False
) -> Ints:
    """Count the tokens that each query block sees, (H, Q, R) by ring rank where keys are at home.

    `SparsePlanner.plan` and `PlanReuse.after` need it for the next step; `LayerPlans.after` needs
    (H, Q, U R), by `by_rank`. Counts only the first batch item. Costs two all-gathers.
    """
    of_type("plan", plan, SparsePlan, _A_PLAN)
    of_type("masks", masks, np.ndarray, "what attend_sparse gives")
    degree = plan.num_ranks if by_rank else plan.ring_degree
    if masks.dtype == np.bool_:
        home = plan.kv.home // (plan.num_ranks // degree)
        masks = block_counts(masks[:1], kv_lens=plan.kv.lens, kv_of=home, ring_degree=degree)
    counts = masks[0].reshape(-1, degree, masks.shape[2] // degree).sum(axis=2)
    return _of_all_rows(mesh, plan, counts.astype(np.int64), "counts of blocks")


def gather_masks(mesh: AttentionMesh, plan: SparsePlan, masks: Counts) -> Bools:
    """Return masks (H, Q, C) of all rows, from (B or 1, X, C) here; refuse unlike batch items."""
    if masks.dtype != np.bool_:
        raise ConfigError("save_masks: Clusters form new blocks in each step: save another rule's")
    is_alike = (masks == masks[:1]).all(axis=(0, 2))[:, None]
    bits = np.packbits(np.concatenate([is_alike, masks[0]], axis=1), axis=1)
    whole = _of_all_rows(mesh, plan, bits, "masks")
    cells = np.unpackbits(whole, axis=2, count=1 + masks.shape[2]).view(np.bool_)
    if not cells[..., 0].all():
        raise ConfigError("save_masks: samples of a batch see different blocks: run each alone")
    return cells[..., 1:]


def _of_all_rows(
    mesh: AttentionMesh | DeviceMesh, plan: SparsePlan, local: Counts, what: str
) -> Counts:
    """Gather the rows (X, ..) of each rank as (H, Q, ..)."""
    whole = np.zeros((*plan.ring_of.shape, *local.shape[1:]), local.dtype)
    every = _gathered(as_attention_mesh(mesh).whole, torch.from_numpy(local), what)
    for rank, there in enumerate(every):
        rows = plan.q_rows(rank)
        whole[rows.heads, rows.blocks] = there.cpu().numpy()[: rows.heads.size]
    return whole


def _gathered(group: RankGroup | None, local: Tensor, what: str) -> list[Tensor]:
    """Gather the rows of each rank, padded at the end to the most of any rank."""
    if group is None:
        return [local]
    device = local.device if local.is_cuda else device_of(group)
    sizes = torch.tensor([local.shape[0]], device=device)
    longest = int(all_gather(group, f"all_gather (size of {what})", sizes).max())
    padded = local.new_zeros(longest, *local.shape[1:], device=device)
    padded[: local.shape[0]] = local
    return list(all_gather(group, f"all_gather ({what})", padded))
