"""Block-sparse attention of a model over a mesh: a plan for every layer, reused in later steps.

Ranks get blocks in turns, so work is nearly even before anything is planned. After a layer's
attention, its next step is planned: from the masks of that step, else from counts of the blocks
that the rule chose in this step. A layer keeps a plan while its work is even enough, as in db-SP.
If there are several meshes, each layer attends on the mesh with the shortest predicted time.

Shapes: B batch, H query heads, T tokens of this rank, D head width; Q query blocks and C key
blocks of the sequence.
"""

import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from bascule.arrays import Bools, Ints, cumulative, num_before
from bascule.attention.kernels.registry import check_name
from bascule.attention.sparse.attend import (
    Seen,
    WholeMasks,
    attend_sparse,
    gather_counts,
    gather_masks,
)
from bascule.attention.sparse.clusters import Clusters
from bascule.attention.sparse.rules import BlockRule, RuleCall, rule_of, top_mass, top_share
from bascule.checks import array, choice, each, fields, number, of_type, whole
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.comm.quantized import Quantized
from bascule.errors import ConfigError
from bascule.machine.cluster import LIMITS
from bascule.plan.sparse import BlockLayout, PlanReuse, SparsePlan, block_lens
from bascule.plan.sparse.choose import CallSize, LayerPlans, Strategies, columns_of
from bascule.plan.sparse.layout import Counts, best_step
from bascule.plan.sparse.partition import TARGET
from bascule.plan.sparse.planner import PLANNERS, SparsePlanner
from bascule.plan.topology import Degrees
from bascule.workload import load_masks

logger = logging.getLogger(__name__)

TEXT = "text"  # the segment whose tokens see all, and are seen by all
PLAN_SPAN = "bascule: sparse attention planned"  # in profiles, with the exchange of counts
NUM_SIZES = 4  # lengths and batches whose states are cached: two prompts at two resolutions
STILL_TARGET = 1.02  # imbalance up to which a ring without Ulysses ranks is left as it is
ROW_WORK = 500.0  # pairs of tokens in the time of a row, where no machine says: see the docs

_NUM_COMPARED, _NUM_DEALT = 32, 8  # masks that ranks compare, and that choose the turns
_LEAST_SHARE = 1e-9


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SparseConfig:
    """Settings of block-sparse attention: which blocks are computed, and how ranks share them.

    Give one of `masks`, `keep`, `mass` and `rule`. Tokens of a segment "text" see all tokens, and
    all tokens see them.

    Attributes:
        masks: (steps, layers, heads, blocks, blocks) bool, True where computed; or a file that
            `workload.load_masks` reads. Leading dims may be missing; one step or layer fits all.
        keep: Share of the key blocks that a query block sees: its own block, and the blocks with
            the highest products of mean query and mean key.
        mass: Least share of the softmax of these products that a query block must see.
        rule: A function (q, k, at) of mean queries (B, h, P, D) and keys (B, h, C, D), for h heads
            with P query blocks on this rank and C key blocks of the sequence. It returns bool
            (B, h, P, C), True where computed; `at` is a `RuleCall`. Or a `BlockRule` of
            `attention.sparse`: `sparge`, `spatial_or_temporal`, `radial`, `sliding_tiles`. Or
            `Clusters`, which form blocks of similar tokens.
        block: Tokens per block; or tokens per query block and per key block, as (64, 128).
        orders: (heads, tokens), or (layers, heads, tokens): the token at each place of a head, as
            in PAROAttention. Blocks follow this order. Text tokens have no entry and do not move.
        method: How to place blocks, as for `SparsePlanner`. "paper" needs masks, or no ring;
            "in_order" does not balance, for comparison.
        stripe: Tokens that a rank gets at a time, a multiple of `block`. Default: the smallest,
            which is the most even; masks then choose how turns rotate.
        target: Imbalance at which "minimal_move" stops. Default: 1.005; 1.02 on a ring without
            Ulysses ranks, which needs no exchange as long as nothing moves.
        tolerance: A layer keeps its plan while its imbalance is at most 1 + tolerance.
        dense_layers: Layers that attend to all blocks, numbered in the order of attention calls.
        passes_per_step: Forward passes per denoising step: 2 if guidance has a pass of its own.
        kernel: Name of a block kernel that skips blocks. Default: the first that runs here.
        strategies: Let each layer choose a mesh in each step. None: the mesh of `parallelize`.
    """

    masks: Bools | str | Path | None = None
    keep: float | None = None
    mass: float | None = None
    rule: Callable[[Tensor, Tensor, RuleCall], Tensor] | BlockRule | Clusters | None = None
    block: int | tuple[int, int] = 64
    orders: Ints | None = None
    method: str = "minimal_move"
    stripe: int | None = None
    target: float | None = None
    tolerance: float = 0.05
    dense_layers: tuple[int, ...] = ()
    passes_per_step: int = 1
    kernel: str | None = None
    strategies: Strategies | None = None

    def __post_init__(self) -> None:
        names = ("masks", "keep", "mass", "rule")
        rules = [name for name in names if getattr(self, name) is not None]
        if len(rules) != 1:
            names = " and ".join(rules) or "nothing"
            raise ConfigError(f"SparseConfig with {names}: give one of masks, keep, mass and rule")
        fields(
            self,
            keep=(number, _LEAST_SHARE, 1.0),
            mass=(number, _LEAST_SHARE, 1.0),
            block=_checked_block,
            method=(choice, *PLANNERS),
            stripe=(whole, 1),
            target=(number, 1.0),
            tolerance=(number, 0.0, np.inf),
            dense_layers=(each, whole),
            passes_per_step=(whole, 1),
            strategies=(of_type, Strategies, "Strategies(machine)"),
        )
        check_name(self.kernel)
        if any(self.dealt % size for size in self.blocks):
            raise ConfigError(
                f"SparseConfig(stripe={self.stripe!r}): must be a multiple of block, {self.block}"
            )
        if self.masks is not None:
            object.__setattr__(self, "masks", _masks_of(self.masks))
        if self.rule is not None and not isinstance(self.rule, Clusters):
            object.__setattr__(self, "rule", rule_of(self.rule))
        if self.orders is not None:
            orders = array("orders", self.orders)
            if orders.dtype.kind not in "iu" or orders.ndim not in (2, 3):
                wrong = f"SparseConfig: orders of shape {orders.shape} and dtype {orders.dtype}"
                raise ConfigError(f"{wrong}: give integers ([layers,] heads, tokens)")
            shape = (1,) * (3 - orders.ndim) + orders.shape
            object.__setattr__(self, "orders", orders.reshape(shape))

    @property
    def array(self) -> Bools | None:
        """The masks as an array; None if a rule decides."""
        assert not isinstance(self.masks, str | Path)
        return self.masks

    @property
    def dealt(self) -> int:
        """Tokens that a rank gets at a time."""
        return math.lcm(*self.blocks) if self.stripe is None else self.stripe

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens of a query block, and of a key block."""
        return (self.block, self.block) if isinstance(self.block, int) else self.block

    def planner(self, ring_degree: int, ulysses_degree: int, size: CallSize) -> SparsePlanner:
        """Return the planner of a mesh."""
        target = self.target or (STILL_TARGET if ulysses_degree == 1 else TARGET)
        machine = self.strategies
        prices = {"row_work": ROW_WORK} if machine is None else machine.prices(size)
        options: Any = {"method": self.method, "target": target, **prices}
        return SparsePlanner(ring_degree, ulysses_degree, **options)

    def masks_of(self, step: int, layer: int, num_heads: int, blocks: "Blocks") -> Bools | None:
        """Return the masks (H, Q, C) of a layer in a step, or None if a rule decides."""
        if self.array is None:
            return None
        steps, layers, *sizes = self.array.shape
        q, kv = blocks.q_lens.size, blocks.kv_lens.size
        if sizes != [num_heads, q, kv]:
            raise ConfigError(
                f"sparse: masks of {sizes[0]} heads and {sizes[1]} x {sizes[2]} blocks, but the "
                f"model has {num_heads} heads and {q if q == kv else f'{q} x {kv}'} blocks of "
                f"{self.block} tokens, {int(blocks.q_is_text.sum())} of them text: give such masks"
            )
        if steps > 1 and step >= steps:
            wrong = f"sparse: step {step}, but masks end at step {steps - 1}"
            raise ConfigError(f"{wrong}: call handle.restart() per image, or give passes_per_step")
        return self.array[step if steps > 1 else 0, layer if layers > 1 else 0]

    def order_of(self, key: "LayerKey", num_heads: int) -> Ints | None:
        """Return a layer's order of tokens, (num_heads, S), of its query heads or its key heads."""
        if self.orders is None:
            return None
        bounds = cumulative(np.array(key.segments))
        segments = [slice(*bounds[i : i + 2]) for i, name in enumerate(key.names) if name != TEXT]
        orders = self.orders[key.layer % len(self.orders)]
        shapes = [(key.num_heads, segment.stop - segment.start) for segment in segments]
        group = key.num_heads // num_heads
        if shapes != [orders.shape] or (np.repeat(orders[::group], group, axis=0) != orders).any():
            raise ConfigError(
                f"sparse: orders (heads, tokens) of shape {orders.shape} for layer {key.layer}, "
                f"whose segments {key.names} have {key.segments} tokens, {key.num_heads} heads: "
                "give orders of the only segment besides text, equal in heads that share keys"
            )
        order = np.tile(np.arange(bounds[-1]), (num_heads, 1))
        order[:, segments[0]] = orders[::group] + segments[0].start
        return order

    @property
    def block_rule(self) -> BlockRule | Clusters | None:
        """The rule; None if masks decide."""
        if self.keep is not None:
            return top_share(self.keep)
        if self.mass is not None:
            return top_mass(self.mass)
        return self.rule if isinstance(self.rule, BlockRule | Clusters) else None

    def seen(self, masks: Bools | None, layer: int, step: int, blocks: "Blocks") -> Seen:
        """Return what rows see: blocks by the masks (H, Q, C) or by the rule, and all text."""
        dense = blocks.dense
        if masks is not None:
            return WholeMasks(masks, 0, dense if dense.any() else None)
        rule = self.block_rule
        assert rule is not None
        text = {"q_is_text": blocks.q_is_text, "kv_is_text": blocks.kv_is_text}
        if isinstance(rule, Clusters):
            return replace(rule, **text)

        def choose(q: Tensor, k: Tensor, at: RuleCall) -> Tensor:
            masks = rule.masks(q, k, replace(at, layer=layer, step=step, **text))
            return masks | at.of_rows(dense) if dense.any() else masks

        return replace(rule, choose=choose)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks of a layer's sequence."""

    q_lens: Ints  # (Q,) tokens of each query block
    kv_lens: Ints  # (C,) tokens of each key block
    q_is_text: Bools
    kv_is_text: Bools

    @property
    def dense(self) -> Bools:
        """(Q, C), True in rows and columns of text."""
        return self.q_is_text[:, None] | self.kv_is_text

    def with_text(self, masks: Bools | None) -> Bools | None:
        """Return masks (H, Q, C) in which text sees all, and is seen by all."""
        return masks if masks is None or not self.q_is_text.any() else masks | self.dense


def _checked_block(name: str, value: object) -> int | tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return whole(name, value, 1)
    sizes = each(name, cast(list[object], value), whole, 1)
    if len(sizes) != 2:
        raise ConfigError(f"{name}={value}): give one number, or one for queries and one for keys")
    return sizes


def settings_of(config: SparseConfig | None) -> dict[str, str]:
    """Return the settings that ranks compare, with the same names for every config."""
    values = {field.name: getattr(config, field.name, None) for field in fields_of(SparseConfig)}
    if config is not None:
        values["masks"] = None if config.array is None else _fingerprint(config.array)
        values["rule"] = getattr(config.rule, "name", None)
        if config.orders is not None:
            checksum = zlib.crc32(config.orders.astype("<i8").tobytes())
            values["orders"] = f"{config.orders.shape}, checksum {checksum:08x}"
    strategies: Strategies | None = values.pop("strategies")
    for field in fields_of(Strategies):
        values[f"strategies' {field.name}"] = getattr(strategies, field.name, None)
    if strategies is not None:
        rates = {name: getattr(strategies.machine, name) for name in LIMITS}
        values["strategies' machine"] = rates  # the text of a machine rounds its rates
    texts = {f"sparse: {name}": str(value) for name, value in values.items()}
    return {"sparse": "none" if config is None else "given", **texts}


def _fingerprint(masks: Bools) -> str:
    """Return the shape, and a checksum of some steps and layers: all may exceed memory."""
    checksum = 0
    for sample in _sampled(masks, _NUM_COMPARED):
        checksum = zlib.crc32(np.packbits(sample).tobytes(), checksum)
    return f"{masks.shape}, checksum {checksum:08x}"


def _sampled(masks: Bools, most: int) -> Iterator[Bools]:
    """Yield the masks (H, Q, C) of some steps and layers, evenly spaced."""
    steps, layers = masks.shape[:2]
    count = min(steps * layers, most)
    for index in np.linspace(0, steps * layers - 1, count).round().astype(int).tolist():
        yield masks[divmod(index, layers)]


@lru_cache(maxsize=8)  # a server's blocks of ranks share a config
def _dealt(config: SparseConfig, ring_degree: int) -> dict[str, Any]:
    """Return how a `SequenceLayout` deals tokens, as suits given masks."""
    dealt: dict[str, Any] = {"stripe": config.dealt}
    if config.array is None or config.stripe is not None or ring_degree == 1:
        return dealt
    works = [x.sum(axis=0, dtype=np.uint16) for x in _sampled(config.array, _NUM_DEALT)]
    is_full = np.all([work == config.array.shape[2] for work in works], axis=0)
    is_text = [is_full.all(axis=1), is_full.all(axis=0)]
    if is_full.shape[0] == is_full.shape[1]:
        is_text = [is_text[0] & is_text[1]] * 2
    sides = list(zip(is_text, config.blocks, strict=True))
    skip = min(-(-int(x.sum()) * size // config.dealt) for x, size in sides)
    # Turns go on after text, wherever it is; so its rank gets a block of the video less.
    q, kv = (
        num_before(x.astype(np.int64)) * size // config.dealt + np.where(x, 0, skip)
        for x, size in sides
    )
    step = best_step((work.astype(np.float64) for work in works), ring_degree, (q, kv))
    return dealt | {"turn_step": step, "turn_skip": skip}


def _masks_of(masks: Bools | str | Path) -> Bools:
    """Return an array or the masks of a file, (steps, layers, H, Q, C)."""
    if isinstance(masks, str | Path):
        return load_masks(masks)
    array = np.asarray(masks)
    if array.dtype != np.bool_ or not 3 <= array.ndim <= 5 or not array.any():
        raise ConfigError(
            f"SparseConfig: masks of shape {array.shape} and dtype {array.dtype}, "
            f"{np.count_nonzero(array)} of them True: give bool (steps, layers, heads, blocks, "
            "blocks), True where computed; steps and layers may be missing"
        )
    return array.reshape((1,) * (5 - array.ndim) + array.shape)


@dataclass(frozen=True, slots=True)
class LayerKey:
    """A layer, and the sizes for which it is planned."""

    layer: int  # by the order of attention calls
    names: tuple[str, ...]  # of the segments of its sequence
    segments: tuple[int, ...]  # tokens of each
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int  # of one token of one head of one batch item

    @property
    def size(self) -> CallSize:
        """Sizes of the layer's attention calls."""
        return CallSize(self.batch, self.head_dim, self.row_bytes)


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """The state of a layer between two forward passes. Immutable: each pass makes a new one."""

    key: LayerKey
    plans: LayerPlans  # for the next pass, with their history
    used: SparsePlan  # plan of the last pass; its tiles have the work of the first batch item
    step: int  # the plans are for the masks of this step, if masks decide

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head in all batch items."""
        return self.key.batch * self.key.row_bytes

    @property
    def density(self) -> float:
        """Share of all pairs of tokens that the last pass computed."""
        pairs = self.key.num_heads * sum(self.key.segments) ** 2
        return float(self.used.tiles.sum()) / max(pairs, 1)

    @property
    def imbalance(self) -> float:
        """Imbalance of the last pass: rho in equation 1 of db-SP."""
        return self.used.imbalance

    @property
    def num_planned(self) -> int:
        """Number of plans made so far, on all meshes."""
        return sum(reuse.num_planned for reuse in self.plans.reuses.values())

    @property
    def num_kept(self) -> int:
        """Number of times that a plan was reused for other masks."""
        return sum(reuse.num_kept for reuse in self.plans.reuses.values())

    @property
    def num_switches(self) -> int:
        """Number of times that the layer changed its mesh."""
        return 0 if self.plans.choice is None else self.plans.choice.num_switches


@dataclass(slots=True)
class Passes:
    """A count of forward passes since the first step, shared by all models of a pipeline."""

    number: int = 0


class SparseLayers:
    """States of a model's layers, for the lengths and batches of the latest passes."""

    def __init__(
        self,
        config: SparseConfig,
        mesh: AttentionMesh,
        recorded: dict[int, Bools] | None = None,
        *,
        dealt: Mapping[str, Any] | None = None,
    ) -> None:
        strategies = config.strategies if mesh.whole else None
        self.config, self.mesh = config, mesh
        self.dealt = _dealt(config, mesh.degrees[0]) if dealt is None else dealt
        self.passes = Passes()
        self._meshes = meshes_over(mesh, () if strategies is None else strategies.meshes)
        self._strategies = strategies if len(self._meshes) > 1 else None
        # By segments and batch: the states of all layers.
        self._states: dict[tuple[tuple[int, ...], int], dict[LayerKey, SparseLayer]] = {}
        # By layer of the masks: step and sizes, and what rows see, with its tables.
        self._seen: dict[int, tuple[tuple[int, LayerKey], Seen]] = {}
        self._recorded = recorded  # masks (B, H, Q, C) by layer, see `replaying`
        self.saves: Callable[[int, Bools | None], None] | None = None  # layer and masks (H, Q, C)
        self._running = deque[object](maxlen=2)  # passes of compiled code, alive for their backward

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))

    def hold(self, forward: object) -> None:
        """Keep a pass alive, so that compiled code can find it by its number."""
        if forward not in self._running:
            self._running.append(forward)

    def restart(self) -> None:
        """Make the next forward pass the first step of another image."""
        self.passes.number = 0
        self._states.clear()

    def replaying(self, mesh: AttentionMesh, masks: dict[int, Bools]) -> "SparseLayers":
        """Copy the state for another mesh; record masks (B, H, Q, C), or replay recorded ones."""
        copy = SparseLayers(self.config, mesh, masks)
        copy.passes.number = self.passes.number
        if mesh is self.mesh:
            copy._states = {sizes: dict(layers) for sizes, layers in self._states.items()}
        return copy

    def begin(self, key: LayerKey) -> tuple[SparsePlan, AttentionMesh, Seen]:
        """Return plan and mesh of a layer in this step, and what its rows see."""
        blocks, step = self._blocks(key), self._step(0)
        masks = self.config.masks_of(step, key.layer, key.num_heads, blocks)
        layers = self._states_of(key)
        if key not in layers:
            layers[key] = self._first_state(key, blocks.with_text(masks))
        layers[key] = self._planned(layers[key], step)  # guidance groups skip steps
        plan = layers[key].plans.chosen.plan
        replayed = None if self._recorded is None else self._recorded.get(key.layer)
        if replayed is not None:
            return plan, self.mesh_of(plan), lambda rows: replayed[:, rows.heads, rows.blocks]
        array = self.config.array
        if array is None:
            return plan, self.mesh_of(plan), self.config.seen(None, key.layer, step, blocks)
        place = key.layer if array.shape[1] > 1 else 0
        same = step if len(array) > 1 else 0, replace(key, layer=place)
        if place not in self._seen or self._seen[place][0] != same:
            self._seen[place] = same, self.config.seen(masks, key.layer, step, blocks)
        return plan, self.mesh_of(plan), self._seen[place][1]

    def mesh_of(self, plan: SparsePlan) -> AttentionMesh:
        """Return the mesh for which a plan was made."""
        return self._meshes[plan.ring_degree, plan.ulysses_degree]

    def end(self, key: LayerKey, masks: Counts) -> SparseLayer:
        """Plan a layer's next step from the masks (B or 1, rows, C) of this rank's rows."""
        layers = self._states_of(key)
        state, next_step = layers[key], self._step(1)
        before = state.plans
        if self.config.array is not None:
            state = self._planned(replace(state, used=before.chosen.ahead), next_step)
        else:
            plan = before.chosen.plan
            counts = gather_counts(self.mesh_of(plan), plan, masks, by_rank=True)
            plans = before.after(counts)
            used = plans.reuses[before.degrees].ran or plan
            is_mask = masks.dtype == np.bool_
            if self._recorded is not None and is_mask and key.layer not in self._recorded:
                shape = len(masks), key.num_heads, -1, masks.shape[-1]
                self._recorded[key.layer] = masks.reshape(shape)
            state = SparseLayer(key, plans, used, next_step)
        layers[key] = state
        return state

    def _states_of(self, key: LayerKey) -> dict[LayerKey, SparseLayer]:
        """Return the states of a layer's segments and batch; drop the least recently used ones."""
        sizes = key.segments, key.batch
        layers = self._states[sizes] = self._states.pop(sizes, {})
        while len(self._states) > NUM_SIZES:
            del self._states[next(iter(self._states))]
        return layers

    def _first_state(self, key: LayerKey, masks: Bools | None) -> SparseLayer:
        """Return a layer's first state; a rule is planned for as if all blocks were computed."""
        q, kv = homes = self._homes(key)
        num_ranks = math.prod(self.mesh.degrees)
        tokens = np.bincount(kv.home, kv.lens, num_ranks).astype(np.int64)
        if tokens.min() == 0 and not self._states_of(key):  # for the first layer only
            logger.warning(
                "sparse: %d blocks, dealt %d tokens at a time, leave some of %d ranks without "
                "tokens: use smaller blocks or stripes",
                *(q.lens.size, self.config.dealt, num_ranks),
            )
        work = np.tile(tokens, (key.num_heads, q.lens.size, 1)) if masks is None else masks
        reuses: dict[Degrees, PlanReuse] = {}
        for degrees, mesh in self._meshes.items():
            if mesh is self.mesh or degrees[1] <= key.num_heads:
                planner = self.config.planner(*degrees, key.size)
                columns = columns_of(work, degrees)
                plan = planner.plan(columns, *homes, num_kv_heads=key.num_kv_heads)
                reuses[degrees] = PlanReuse(planner, plan, self.config.tolerance)
        start = self.mesh.degrees if masks is None else None
        plans = LayerPlans.first(reuses, key.size, self._strategies, start=start)
        return SparseLayer(key, plans, plans.chosen.plan, self._step(0))

    def _planned(self, state: SparseLayer, step: int) -> SparseLayer:
        """Return the state with plans for the masks of a step, if masks decide and differ."""
        array, key = self.config.array, state.key
        if array is None or step == state.step or step >= len(array):
            return state
        blocks = self._blocks(key)
        masks = blocks.with_text(self.config.masks_of(step, key.layer, key.num_heads, blocks))
        assert masks is not None
        return replace(state, plans=state.plans.after(masks), step=step)

    def _step(self, passes_ahead: int) -> int:
        return (self.passes.number + passes_ahead) // self.config.passes_per_step

    def _blocks(self, key: LayerKey) -> Blocks:
        is_text = [name == TEXT for name in key.names]
        q_counts, kv_counts = (
            [-(-length // size) for length in key.segments] for size in self.config.blocks
        )
        q_lens, kv_lens = (block_lens(key.segments, size) for size in self.config.blocks)
        return Blocks(q_lens, kv_lens, np.repeat(is_text, q_counts), np.repeat(is_text, kv_counts))

    def _homes(self, key: LayerKey) -> tuple[BlockLayout, BlockLayout]:
        """Return the layouts of query blocks and key blocks, dealt to ranks as `SequenceLayout`."""

        def layout_of(size: int, num_heads: int) -> BlockLayout:
            lens, homes = list[Ints](), list[Ints]()
            width, (_, *how) = self.config.dealt // size, self.dealt.values()  # blocks of a stripe
            for length in key.segments:
                lens.append(block_lens([length], size))
                stripes = BlockLayout.striped(lens[-1][::width], *self.mesh.degrees, *how)
                homes.append(stripes.home.repeat(width)[: lens[-1].size])
            order = self.config.order_of(key, num_heads)
            return BlockLayout(np.concatenate(lens), np.concatenate(homes), order)

        q_size, kv_size = self.config.blocks
        return layout_of(q_size, key.num_heads), layout_of(kv_size, key.num_kv_heads)


class SparsePass:
    """The block-sparse attention of one forward pass, with its recomputations."""

    def __init__(self, layers: SparseLayers, ticket: Tensor | None = None) -> None:
        self.layers = layers
        # Number of the pass, by which operators find it, and number of its next layer.
        self.ticket = torch.zeros(2, dtype=torch.int64) if ticket is None else ticket
        self.done: dict[int, SparseLayer] = {}  # by layer, after its attention
        self._seen: dict[int, Seen] = {}
        self._first_of: dict[str, int] = {}  # first layer of each block
        # In compiled code, by layer: q, k, v and the output, for the backward.
        self.recorded: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._is_ended = False

    @property
    def _next(self) -> int:
        return int(self.ticket[1])

    @_next.setter
    def _next(self, layer: int) -> None:
        self.ticket = torch.tensor([int(self.ticket[0]), layer])

    def begin_block(self, name: str, is_again: bool) -> None:
        """Begin a block; a recomputed block counts its layers again from its first layer."""
        first = self._first_of.setdefault(name, self._next)
        self._next = first if is_again else self._next

    def next_layer(self) -> int | None:
        """Count an attention call; return its layer, or None for a dense one."""
        layer = self._next
        self._next += 1
        return None if layer in self.layers.config.dense_layers else layer

    def attend(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        segments: Mapping[str, int],
        scale: float | None,
        keys: Bools | None,
        wire: Quantized | None = None,
    ) -> Tensor:
        """Attend by a layer's plan, to (B, H, T, D); at the first call, plan its next step."""
        layers, (q, k, _) = self.layers, qkv
        options: Any = {"scale": scale, "kernel": layers.config.kernel, "keys": keys}
        options["comm_dtype"] = wire
        if layer in self.done:
            plan = self.done[layer].used
            return attend_sparse(*qkv, layers.mesh_of(plan), plan, self._seen[layer], **options)[0]
        head_dim = q.shape[3]
        row_bytes = wire.row_bytes(head_dim) if wire else head_dim * q.element_size()
        sizes = tuple(segments), tuple(segments.values()), q.shape[0], q.shape[1], k.shape[1]
        key = LayerKey(layer, *sizes, head_dim, row_bytes)
        with record_function(PLAN_SPAN):
            plan, mesh, seen = layers.begin(key)
        out, masks = attend_sparse(*qkv, mesh, plan, seen, **options)
        self._seen[layer] = seen
        with record_function(PLAN_SPAN):
            self.done[layer] = layers.end(key, masks)
            if layers.saves is not None:
                layers.saves(layer, gather_masks(mesh, plan, masks))
        return out

    def end(self) -> None:
        """End the forward pass; refuse masks or dense layers that do not fit its layers."""
        if self._is_ended:  # a compiled backward may repeat this call of the forward
            return
        self._is_ended = True
        config = self.layers.config
        dense = max(config.dense_layers, default=-1)
        if dense >= self._next:
            calls = f"the model has the attention calls 0 to {self._next - 1}"
            raise ConfigError(f"sparse: dense_layers names {dense}, but {calls}: leave it out")
        for name, table, axis in (("masks", config.array, 1), ("orders", config.orders, 0)):
            if table is not None and table.shape[axis] not in (1, self._next):
                raise ConfigError(
                    f"sparse: {name} of {table.shape[axis]} layers for a model with {self._next} "
                    f"attention calls: give {name} for each, or one for all"
                )
        self.layers.passes.number += 1
        if self.layers.saves is not None:
            self.layers.saves(self._next, None)
