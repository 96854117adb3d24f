"""Block-sparse attention of a model over a mesh: a plan for every layer, kept from step to step.

Blocks are dealt to the ranks in turns, so that work is nearly even before anything is planned.
After a layer's attention its next step is planned: from the masks of that step, else from counts
of the blocks that this step's rule kept. A plan is kept while it is even enough, as in db-SP. With
several meshes, each layer attends on the fastest by prediction.

Shapes: B batch, H query heads, T tokens of this rank, D head width; N blocks of the sequence.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from bascule.arrays import Bools, Ints
from bascule.attention.sparse.attend import PooledRule, RowsSeen, attend_sparse, gather_counts
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.diffusers.sparse_config import SparseConfig, with_text
from bascule.errors import ConfigError
from bascule.plan.sparse import BlockLayout, PlanReuse, SparsePlan, block_lens
from bascule.plan.sparse.choose import Degrees, LayerPlans, columns_of

logger = logging.getLogger(__name__)

TEXT = "text"  # the segment that sees all, and that all see
PLAN_SPAN = "bascule: sparse attention planned"  # in profiles, with the exchange of counts
NUM_FORMS = 4  # lengths and batches whose states are kept: two prompts at two resolutions


@dataclass(frozen=True, slots=True)
class LayerKey:
    """A layer, and the sizes that its plan is for."""

    layer: int  # by the order of attention calls
    names: tuple[str, ...]  # of the segments that are attended to
    segments: tuple[int, ...]  # tokens of each
    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int  # of one token of one head of one batch item


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """The state of a layer between two forward passes. Immutable: a pass makes the next one."""

    key: LayerKey
    plans: LayerPlans  # for the next pass, with their history
    used: SparsePlan  # of the last pass, with the work of its first batch item in the tiles

    @property
    def layer(self) -> int:
        """The layer's place in the order of attention calls."""
        return self.key.layer

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head in all batch items."""
        return self.key.batch * self.key.row_bytes

    @property
    def density(self) -> float:
        """Share of the pairs of tokens that the last pass computed."""
        pairs = self.key.num_heads * sum(self.key.segments) ** 2
        return float(self.used.tiles.sum()) / max(pairs, 1)

    @property
    def imbalance(self) -> float:
        """Rho of db-SP, equation 1, in the last pass."""
        return self.used.imbalance

    @property
    def num_planned(self) -> int:
        """Number of plans that were made, on all meshes."""
        return sum(reuse.num_planned for reuse in self.plans.reuses.values())

    @property
    def num_kept(self) -> int:
        """Number of times that a plan was kept for other masks."""
        return sum(reuse.num_kept for reuse in self.plans.reuses.values())

    @property
    def num_switches(self) -> int:
        """Number of times that the layer left its mesh."""
        return 0 if self.plans.choice is None else self.plans.choice.num_switches


class SparseLayers:
    """The states of a model's layers, for the lengths and batches of the latest passes."""

    def __init__(
        self, config: SparseConfig, mesh: AttentionMesh, noted: dict[int, Bools] | None = None
    ) -> None:
        strategies = config.strategies if mesh.whole else None
        self.config, self.mesh = config, mesh
        self.num_passes = 0  # forward passes since the first step
        self._meshes = meshes_over(mesh, () if strategies is None else strategies.meshes)
        self._strategies = strategies if len(self._meshes) > 1 else None
        self._states: dict[tuple[tuple[int, ...], int], dict[LayerKey, SparseLayer]] = {}
        self._noted = noted

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))

    def restart(self) -> None:
        """Make the next forward pass the first step of another image."""
        self.num_passes = 0
        self._states.clear()

    def noting(self, mesh: AttentionMesh, masks: dict[int, Bools]) -> "SparseLayers":
        """Return this step on a mesh; its layers use, or note, masks (B, H, N, N)."""
        made = SparseLayers(self.config, mesh, masks)
        made.num_passes = self.num_passes
        if mesh is self.mesh:
            made._states = {form: dict(layers) for form, layers in self._states.items()}
        return made

    def begin(self, key: LayerKey) -> tuple[SparsePlan, AttentionMesh, RowsSeen | PooledRule]:
        """Return plan, mesh and masks of a layer in this step."""
        lens, is_text = self._blocks(key)
        masks = self.config.masks_of(self._step(0), key.layer, key.num_heads, lens, is_text)
        layers = self._of_form(key)
        if key not in layers:
            layers[key] = self._first(key, with_text(masks, is_text))
        plan = layers[key].plans.chosen.plan
        noted = None if self._noted is None else self._noted.get(key.layer)
        if noted is not None:
            return plan, self.mesh_of(plan), lambda rows: noted[:, rows.heads, rows.blocks]
        return plan, self.mesh_of(plan), self.config.seen(masks, lens, is_text)

    def mesh_of(self, plan: SparsePlan) -> AttentionMesh:
        """Return the mesh that a plan is for."""
        return self._meshes[plan.ulysses_degree, plan.ring_degree]

    def end(self, key: LayerKey, masks: Bools) -> SparseLayer:
        """Plan a layer's next step from the masks (B or 1, rows, N) of this rank's rows."""
        layers, sizes = self._of_form(key), (key.batch, key.row_bytes)
        before = layers[key].plans
        if self.config.array is not None:
            next_masks = self._next_masks(key)
            plans = before if next_masks is None else before.after(next_masks, *sizes)
            used = before.chosen.ahead
        else:
            plan = before.chosen.plan
            counts = gather_counts(self.mesh_of(plan), plan, masks, by_rank=True)
            plans = before.after(counts, *sizes)
            used = plans.reuses[before.degrees].ran or plan
            if self._noted is not None and key.layer not in self._noted:
                num_blocks = masks.shape[-1]
                self._noted[key.layer] = masks.reshape(-1, key.num_heads, num_blocks, num_blocks)
        layers[key] = SparseLayer(key, plans, used)
        return layers[key]

    def _of_form(self, key: LayerKey) -> dict[LayerKey, SparseLayer]:
        """Return the states of these sizes; drop the least recently used ones."""
        form = key.segments, key.batch
        layers = self._states[form] = self._states.pop(form, {})
        while len(self._states) > NUM_FORMS:
            del self._states[next(iter(self._states))]
        return layers

    def _first(self, key: LayerKey, masks: Bools | None) -> SparseLayer:
        """Return the first state; with a rule, as if all was seen."""
        home, num_ranks = self._home(key.segments), math.prod(self.mesh.degrees)
        tokens = np.bincount(home.home, home.lens, num_ranks).astype(np.int64)
        if tokens.min() == 0:
            logger.warning(
                "sparse: %d blocks, %d tokens to a rank at a time, leave some of %d ranks without "
                "tokens: use smaller blocks or stripes",
                *(home.lens.size, self.config.dealt, num_ranks),
            )
        work = np.tile(tokens, (key.num_heads, home.lens.size, 1)) if masks is None else masks
        reuses: dict[Degrees, PlanReuse] = {}
        for degrees, mesh in self._meshes.items():
            if mesh is self.mesh or degrees[0] <= key.num_heads:
                planner, columns = self.config.planner(*degrees), columns_of(work, degrees)
                plan = planner.plan(columns, home, num_kv_heads=key.num_kv_heads)
                reuses[degrees] = PlanReuse(planner, plan, self.config.tolerance)
        ring, ulysses = self.mesh.degrees
        start = (ulysses, ring) if masks is None else None
        sizes = {"batch": key.batch, "row_bytes": key.row_bytes}
        plans = LayerPlans.first(reuses, self._strategies, start=start, **sizes)
        return SparseLayer(key, plans, plans.chosen.plan)

    def _next_masks(self, key: LayerKey) -> Bools | None:
        """Return (H, N, N) of the next forward pass, if its step has other masks."""
        assert self.config.array is not None
        step = self._step(1)
        if step == self._step(0) or step >= len(self.config.array):
            return None
        lens, is_text = self._blocks(key)
        masks = self.config.masks_of(step, key.layer, key.num_heads, lens, is_text)
        return with_text(masks, is_text)

    def _step(self, passes_ahead: int) -> int:
        return (self.num_passes + passes_ahead) // self.config.passes_per_step

    def _blocks(self, key: LayerKey) -> tuple[Ints, Bools]:
        """Return (N,) tokens of each block, and True for blocks of text."""
        counts = [block_lens([length], self.config.block).size for length in key.segments]
        is_text = np.repeat([name == TEXT for name in key.names], counts)
        return block_lens(key.segments, self.config.block), is_text

    def _home(self, segments: tuple[int, ...]) -> BlockLayout:
        """Return blocks as a `SequenceLayout` with `stripe` cuts each segment."""
        ring, ulysses = self.mesh.degrees
        lens = [block_lens([length], self.config.block) for length in segments]
        width = self.config.dealt // self.config.block
        stripes = [BlockLayout.striped(one[::width], ulysses, ring).home for one in lens]
        home = [x.repeat(width)[: one.size] for x, one in zip(stripes, lens, strict=True)]
        return BlockLayout(np.concatenate(lens), np.concatenate(home))


class SparsePass:
    """The attention of one forward pass, with its recomputations."""

    def __init__(self, layers: SparseLayers) -> None:
        self.layers = layers
        self.done: dict[int, SparseLayer] = {}  # by layer, after its attention
        self._seen: dict[int, RowsSeen | PooledRule] = {}
        self._first_of: dict[str, int] = {}
        self._next = 0

    def begin_block(self, name: str, is_again: bool) -> None:
        """Begin a block; a recomputed one has the layers of the first time."""
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
    ) -> Tensor:
        """Return (B, H, T, D) by the plan of a layer; the first time, plan its next step."""
        layers, (q, k, _) = self.layers, qkv
        options = {"scale": scale, "kernel": layers.config.kernel}
        if layer in self.done:
            plan = self.done[layer].used
            return attend_sparse(*qkv, layers.mesh_of(plan), plan, self._seen[layer], **options)[0]
        row_bytes = q.shape[3] * q.element_size()
        sizes = tuple(segments), tuple(segments.values()), q.shape[0], q.shape[1], k.shape[1]
        key = LayerKey(layer, *sizes, row_bytes)
        with record_function(PLAN_SPAN):
            plan, mesh, seen = layers.begin(key)
        out, masks = attend_sparse(*qkv, mesh, plan, seen, **options)
        self._seen[layer] = seen
        with record_function(PLAN_SPAN):
            self.done[layer] = layers.end(key, masks)
        return out

    def end(self) -> None:
        """End the forward pass; refuse masks or dense layers that do not fit its layers."""
        config = self.layers.config
        dense = max(config.dense_layers, default=-1)
        if dense >= self._next:
            raise ConfigError(
                f"sparse: layer {dense} is to be dense, and the model has the attention calls 0 to "
                f"{self._next - 1}"
            )
        if config.array is not None and config.array.shape[1] not in (1, self._next):
            raise ConfigError(
                f"sparse: masks of {config.array.shape[1]} layers for a model with {self._next} "
                "attention calls: give masks for each, or one for all"
            )
        self.layers.num_passes += 1
