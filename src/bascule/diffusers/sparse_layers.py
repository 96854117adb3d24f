"""Block-sparse attention of a model over a mesh: a plan for every layer, kept from step to step.

Tokens lie in blocks that are dealt to the ranks in turns, segment by segment, so that work is
nearly even before anything is planned. Layers are counted by the attention calls of a forward pass,
denoising steps by forward passes. All that is known of a layer is one immutable `SparseLayer`.
After a layer's attention its next step is planned: from the masks of that step where there is a
file of them, else from counts of what this step's rule saw. A plan is kept while it is even enough,
as in db-SP; and where there is a choice of meshes, there is one for each, and the layer attends on
the mesh that is predicted to be the fastest.

Shapes: B batch, H query heads, K key-value heads, T tokens of this rank, D head width; N blocks of
the sequence; R ring ranks.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
PLAN_SPAN = "bascule: sparse attention planned"
"""How profiles call planning, with the counts that ranks tell each other for it."""


NUM_FORMS = 4
"""Lengths and batches whose states are kept: as many as two prompts take at two resolutions."""


@dataclass(frozen=True, slots=True)
class LayerKey:
    """What a plan is for.

    Attributes:
        layer: By the order of attention calls.
        names: Of the segments that are attended to.
        segments: Tokens of each.
        batch: B.
        num_heads: H.
        num_kv_heads: K.
        row_bytes: Of one token of one head of one batch item.
    """

    layer: int
    names: tuple[str, ...]
    segments: tuple[int, ...]
    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """The state of a layer between two forward passes. Immutable: a pass leaves the next one.

    Attributes:
        key: Which layer, and of what sizes.
        plans: For the next pass, with what it took to get there.
        is_known: Whether they are made from the masks of that pass, not from counts of the last.
        used: The plan of the last pass; its tiles are the work of that pass, of the first batch
            item.
    """

    key: LayerKey
    plans: LayerPlans
    is_known: bool
    used: SparsePlan

    @property
    def layer(self) -> int:
        """By the order of attention calls."""
        return self.key.layer

    @property
    def row_bytes(self) -> int:
        """Of the rows of one token and head in all batch items."""
        return self.key.batch * self.key.row_bytes

    @property
    def density(self) -> float:
        """Share of the pairs of tokens that was computed in the last pass."""
        pairs = self.key.num_heads * sum(self.key.segments) ** 2
        return float(self.used.tiles.sum()) / max(pairs, 1)

    @property
    def imbalance(self) -> float:
        """Rho of db-SP, equation 1, in the last pass."""
        return self.used.imbalance

    @property
    def num_planned(self) -> int:
        """Plans made so far, on all meshes."""
        return sum(reuse.num_planned for reuse in self.plans.reuses.values())

    @property
    def num_kept(self) -> int:
        """How often a plan was kept for other masks."""
        return sum(reuse.num_kept for reuse in self.plans.reuses.values())

    @property
    def num_switches(self) -> int:
        """How often the layer left its mesh."""
        return 0 if self.plans.choice is None else self.plans.choice.num_switches

    def after(self, work: Bools | Ints | None) -> "SparseLayer":
        """The state after a pass.

        Args:
            work: The masks (H, N, N) of the next pass, None: as those of this one. Without masks,
                the counts (H, N, ranks) of this pass.
        """
        degrees, plans = self.plans.degrees, self.plans
        used = plans.chosen.ahead
        if work is not None:
            plans = plans.after(work, self.key.batch, self.key.row_bytes)
            ran = plans.reuses[degrees].ran
            used = ran if ran is not None and not self.is_known else used
        return replace(self, plans=plans, used=used)


class SparseLayers:
    """The states of a model's layers, of the lengths and batches that were met last.

    Attributes:
        config: What was asked for.
        mesh: The ranks; where tokens are.
        meshes: Those that layers may use, by (Ulysses, ring) degrees.
        num_passes: Forward passes since the first step.
    """

    def __init__(
        self,
        config: SparseConfig,
        mesh: AttentionMesh,
        noted: dict[int, Bools] | None = None,
    ) -> None:
        strategies = config.strategies if mesh.whole else None
        self.config, self.mesh, self.num_passes = config, mesh, 0
        self.meshes = meshes_over(mesh, () if strategies is None else strategies.meshes)
        self._strategies = strategies if len(self.meshes) > 1 else None
        self._kept: dict[tuple[tuple[int, ...], int], dict[LayerKey, SparseLayer]] = {}
        self._noted = noted

    def __len__(self) -> int:
        """States that are kept."""
        return sum(map(len, self._kept.values()))

    def restart(self) -> None:
        """The next forward pass is the first step of another image."""
        self.num_passes = 0
        self._kept.clear()

    def noting(self, mesh: AttentionMesh, masks: dict[int, Bools]) -> "SparseLayers":
        """The same step on a mesh, where layers see these masks (B, H, N, N), or note them there.

        So a mesh sees what one process saw; by rounding a rule might choose other blocks.
        """
        made = SparseLayers(self.config, mesh, masks)
        made.num_passes = self.num_passes
        if mesh is self.mesh:
            made._kept = {form: dict(layers) for form, layers in self._kept.items()}
        return made

    def begin(self, key: LayerKey) -> tuple[SparsePlan, RowsSeen | PooledRule]:
        """Plan and masks of a layer in this step.

        Raises:
            ConfigError: The masks are not for this model.
        """
        lens, is_text = self._blocks(key)
        masks = self.config.masks_of(self._step(0), key.layer, key.num_heads, lens, is_text)
        layers = self._of_form(key)
        if key not in layers:
            layers[key] = self._first(key, with_text(masks, is_text))
        plan = layers[key].plans.chosen.plan
        noted = None if self._noted is None else self._noted.get(key.layer)
        if noted is not None:
            return plan, lambda rows: noted[:, rows.heads, rows.blocks]
        return plan, self.config.seen(masks, lens, is_text)

    def mesh_of(self, plan: SparsePlan) -> AttentionMesh:
        """The mesh that a plan is for."""
        return self.meshes[plan.ulysses_degree, plan.ring_degree]

    def end(self, key: LayerKey, masks: Bools) -> SparseLayer:
        """Plan the next step of a layer. Collectives: of `gather_counts`, where a rule gave masks.

        Args:
            key: The layer.
            masks: (B or 1, X, N) what this rank's rows saw.
        """
        layers = self._of_form(key)
        layer = layers[key]
        if layer.is_known:
            work = self._next_masks(key)
        else:
            plan = layer.plans.chosen.plan
            work = gather_counts(self.mesh_of(plan), plan, masks, by_rank=True)
        layers[key] = layer.after(work)
        if self._noted is not None and not layer.is_known and key.layer not in self._noted:
            num_blocks = masks.shape[-1]
            self._noted[key.layer] = masks.reshape(-1, key.num_heads, num_blocks, num_blocks)
        return layers[key]

    def _of_form(self, key: LayerKey) -> dict[LayerKey, SparseLayer]:
        """The states of these lengths and this batch; those met longest ago are forgotten."""
        form = key.segments, key.batch
        layers = self._kept[form] = self._kept.pop(form, {})
        while len(self._kept) > NUM_FORMS:
            del self._kept[next(iter(self._kept))]
        return layers

    def _first(self, key: LayerKey, masks: Bools | None) -> SparseLayer:
        """From the first step's masks; where a rule has yet to make them, as if all was seen."""
        home, num_ranks = self._home(key.segments), math.prod(self.mesh.degrees)
        if np.bincount(home.home, minlength=num_ranks).min() == 0:
            logger.warning(
                "sparse: %d blocks, %d tokens to a rank at a time, leave some of %d ranks without "
                "tokens: use smaller blocks or stripes",
                *(home.lens.size, self.config.dealt, num_ranks),
            )
        work = _everything(key.num_heads, home, num_ranks) if masks is None else masks
        reuses: dict[Degrees, PlanReuse] = {}
        for degrees, mesh in self.meshes.items():
            if mesh is self.mesh or degrees[0] <= key.num_heads:
                planner = self.config.planner(*degrees)
                columns = columns_of(work, degrees)
                plan = planner.plan(columns, home, num_kv_heads=key.num_kv_heads)
                reuses[degrees] = PlanReuse(planner, plan, self.config.tolerance)
        ring, ulysses = self.mesh.degrees
        plans = LayerPlans.first(
            reuses,
            self._strategies,
            start=(ulysses, ring) if masks is None else None,
            batch=key.batch,
            row_bytes=key.row_bytes,
        )
        return SparseLayer(key, plans, masks is not None, plans.chosen.plan)

    def _next_masks(self, key: LayerKey) -> Bools | None:
        """(H, N, N) of the next forward pass, where it is a step with masks of its own."""
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
        """(N,) tokens of each block, and whether it is of text."""
        counts = [block_lens([length], self.config.block).size for length in key.segments]
        is_text = np.repeat([name == TEXT for name in key.names], counts)
        return block_lens(key.segments, self.config.block), is_text

    def _home(self, segments: tuple[int, ...]) -> BlockLayout:
        """Blocks as a `SequenceLayout` with `stripe` cuts each segment.

        Each is dealt from the first rank on: it is cut before the lengths of others are known.
        """
        ring, ulysses = self.mesh.degrees
        lens = [block_lens([length], self.config.block) for length in segments]
        width = self.config.dealt // self.config.block
        stripes = [BlockLayout.striped(one[::width], ulysses, ring).home for one in lens]
        home = [x.repeat(width)[: one.size] for x, one in zip(stripes, lens, strict=True)]
        return BlockLayout(np.concatenate(lens), np.concatenate(home))


class SparsePass:
    """The attention of one forward pass, also where parts of it are computed again.

    Attributes:
        layers: The plans.
        done: By layer, what was attended.
    """

    def __init__(self, layers: SparseLayers) -> None:
        self.layers = layers
        self.done: dict[int, SparseLayer] = {}
        self._seen: dict[int, RowsSeen | PooledRule] = {}
        self._first_of: dict[str, int] = {}
        self._next = 0

    def begin_block(self, name: str, is_again: bool) -> None:
        """A block runs; when it is computed again, its layers are those of the first time."""
        first = self._first_of.setdefault(name, self._next)
        self._next = first if is_again else self._next

    def next_layer(self) -> int | None:
        """Count an attention call: its layer, or None for one that attends to everything."""
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
        """(B, H, T, D) by the plan of a layer, whose next step is planned the first time.

        Collectives: of `attend_sparse` and `SparseLayers.end`.
        """
        layers, kernel = self.layers, self.layers.config.kernel
        q, k, _ = qkv
        if layer in self.done:
            plan, seen = self.done[layer].used, self._seen[layer]
            mesh = layers.mesh_of(plan)
            return attend_sparse(*qkv, mesh, plan, seen, scale=scale, kernel=kernel)[0]
        row_bytes = q.shape[3] * q.element_size()
        names, lens = tuple(segments), tuple(segments.values())
        key = LayerKey(layer, names, lens, q.shape[0], q.shape[1], k.shape[1], row_bytes)
        with record_function(PLAN_SPAN):
            plan, seen = layers.begin(key)
        mesh = layers.mesh_of(plan)
        out, masks = attend_sparse(*qkv, mesh, plan, seen, scale=scale, kernel=kernel)
        self._seen[layer] = seen
        with record_function(PLAN_SPAN):
            self.done[layer] = layers.end(key, masks)
        return out

    def end(self) -> None:
        """The forward pass is over.

        Raises:
            ConfigError: It had fewer layers than the masks, or than the dense ones.
        """
        dense = max(self.layers.config.dense_layers, default=-1)
        if dense >= self._next:
            raise ConfigError(
                f"sparse: layer {dense} is to be dense, and the model has the attention calls 0 to "
                f"{self._next - 1}"
            )
        masks = self.layers.config.array
        if masks is not None and masks.shape[1] not in (1, self._next):
            raise ConfigError(
                f"sparse: masks of {masks.shape[1]} layers for a model with {self._next} attention "
                "calls: give masks for each, or one for all"
            )
        self.layers.num_passes += 1


def _everything(num_heads: int, home: BlockLayout, num_ranks: int) -> Ints:
    """(H, N, ranks) counts, as of `gather_counts` by rank, where all is seen."""
    keys = np.bincount(home.home, home.lens, num_ranks).astype(np.int64)
    return np.tile(keys, (num_heads, home.lens.size, 1))
