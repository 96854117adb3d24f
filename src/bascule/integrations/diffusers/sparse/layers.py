"""Block-sparse attention of a model over a mesh: a plan for every layer, kept from step to step.

Tokens lie in blocks that are dealt to the ranks in turns, segment by segment, so that work is
nearly even before anything is planned. Layers are counted by the attention calls of a forward pass,
denoising steps by forward passes. After a layer's attention its next step is planned: from the
masks of that step where there is a file of them, else from counts of what this step's rule saw.
A plan is kept while it is even enough, as in db-SP; and where there is a choice of meshes, there is
one for each, and the layer attends on the mesh that is predicted to be the fastest.

Shapes: B batch, H query heads, K key-value heads, T tokens of this rank, D head width; N blocks of
the sequence; R ring ranks.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from bascule.attention.sparse.block_sparse import (
    Bools,
    PooledRule,
    RowsSeen,
    attend_sparse,
    gather_counts,
)
from bascule.comm.meshes import AttentionMesh, meshes_over
from bascule.errors import ConfigError
from bascule.integrations.diffusers.sparse.sparse_config import LayerMasks, SparseConfig
from bascule.plan.routes import Ints
from bascule.plan.sparse import BlockLayout, PlanReuse, SparsePlan, SparsePlanner, block_lens
from bascule.plan.sparse.choose_mesh import Degrees, LayerPlans, columns_of

logger = logging.getLogger(__name__)

TEXT = "text"  # the segment that sees all, and that all see
PLAN_SPAN = "bascule: sparse attention planned"
"""How profiles call planning, with the counts that ranks tell each other for it."""


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """What a layer did in a forward pass, and what became of its plans.

    Attributes:
        layer: By the order of attention calls.
        used: The plan of this pass; its tiles are the work of this pass, of the first batch item.
        density: Share of the pairs of tokens that this was.
        row_bytes: Of the rows of one token and head in all batch items.
        plans: For the next pass, with what it took to get there.
    """

    layer: int
    used: SparsePlan
    density: float
    row_bytes: int
    plans: LayerPlans

    @property
    def imbalance(self) -> float:
        """Rho of db-SP, equation 1, in this pass."""
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


Form = tuple[tuple[int, ...], int]  # tokens of each segment, and B
NUM_FORMS = 4


@dataclass(frozen=True, slots=True)
class LayerKey:
    """What a plan is for.

    Attributes:
        layer: By the order of attention calls.
        segments: Tokens of each.
        batch: B.
        num_heads: H.
        num_kv_heads: K.
        row_bytes: Of one token of one head of one batch item.
    """

    layer: int
    segments: tuple[int, ...]
    batch: int
    num_heads: int
    num_kv_heads: int
    row_bytes: int

    @property
    def form(self) -> Form:
        """What the layers of a forward pass have in common."""
        return self.segments, self.batch


@dataclass(frozen=True, slots=True)
class _Planned:
    """A layer's plans for its next step; and whether they know the work of that step."""

    plans: LayerPlans
    is_known: bool


class _Plans:
    """Plans by what they are for, of the lengths and batches that were met last.

    As many as guidance with two prompts takes at two resolutions.
    """

    def __init__(self) -> None:
        self._kept: dict[Form, dict[LayerKey, _Planned]] = {}

    def get(self, key: LayerKey) -> _Planned | None:
        """The plans for a layer, if there are any."""
        return self._of_form(key).get(key)

    def put(self, key: LayerKey, planned: _Planned) -> None:
        """Keep the plans for a layer; forget those of what was met longest ago."""
        self._of_form(key)[key] = planned
        while len(self._kept) > NUM_FORMS:
            del self._kept[next(iter(self._kept))]

    def _of_form(self, key: LayerKey) -> dict[LayerKey, _Planned]:
        plans = self._kept[key.form] = self._kept.pop(key.form, {})
        return plans

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def copy(self) -> "_Plans":
        """Another one with the same plans."""
        made = _Plans()
        made._kept = {form: dict(plans) for form, plans in self._kept.items()}
        return made

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


class SparseLayers:
    """The plans of a model's layers.

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
        segments: tuple[str, ...],
        noted: dict[int, Bools] | None = None,
    ) -> None:
        strategies = config.strategies if mesh.whole else None
        self.config, self.mesh, self.num_passes = config, mesh, 0
        self.meshes = meshes_over(mesh, () if strategies is None else strategies.meshes)
        self._strategies = strategies if len(self.meshes) > 1 else None
        self._segments = segments
        self._planned = _Plans()
        self._noted = noted

    def restart(self) -> None:
        """The next forward pass is the first step of another image."""
        self.num_passes = 0
        self._planned.clear()

    def noting(self, mesh: AttentionMesh, masks: dict[int, Bools]) -> "SparseLayers":
        """The same step on a mesh, where layers see these masks (B, H, N, N), or note them there.

        So a mesh sees what one process saw; by rounding a rule might choose other blocks.
        """
        made = SparseLayers(self.config, mesh, self._segments, masks)
        made.num_passes = self.num_passes
        if mesh is self.mesh:
            made._planned = self._planned.copy()
        return made

    def begin(self, key: LayerKey) -> tuple[SparsePlan, RowsSeen | PooledRule]:
        """Plan and masks of a layer in this step.

        Raises:
            ConfigError: The masks are not for this model.
        """
        masks = self._masks(key, self.num_passes)
        planned = self._planned.get(key)
        if planned is None:
            planned = self._first(key, masks)
            self._planned.put(key, planned)
        plan = planned.plans.chosen.plan
        noted = None if self._noted is None else self._noted.get(key.layer)
        if noted is not None:
            return plan, lambda rows: noted[:, rows.heads, rows.blocks]
        return plan, masks.seen

    def mesh_of(self, plan: SparsePlan) -> AttentionMesh:
        """The mesh that a plan is for."""
        return self.meshes[plan.ulysses_degree, plan.ring_degree]

    def end(self, key: LayerKey, masks: Bools) -> SparseLayer:
        """Plan the next step of a layer. Collectives: of `gather_counts`, where a rule gave masks.

        Args:
            key: The layer.
            masks: (B or 1, X, N) what this rank's rows saw.
        """
        planned = self._planned.get(key)
        assert planned is not None
        plans, is_known = planned.plans, planned.is_known
        degrees, used = plans.degrees, plans.chosen.ahead
        if is_known:
            work = self._next_masks(key)
        else:
            mesh, plan = self.meshes[degrees], plans.chosen.plan
            work = gather_counts(mesh, plan, masks, by_rank=True)
        if work is not None:
            plans = plans.after(work, key.batch, key.row_bytes)
            self._planned.put(key, _Planned(plans, is_known))
            used = used if is_known else plans.reuses[degrees].ran
        assert used is not None
        if self._noted is not None and self.config.array is None and key.layer not in self._noted:
            num_blocks = masks.shape[-1]
            self._noted[key.layer] = masks.reshape(-1, key.num_heads, num_blocks, num_blocks)
        pairs = key.num_heads * sum(key.segments) ** 2
        density = float(used.tiles.sum()) / max(pairs, 1)
        return SparseLayer(key.layer, used, density, key.batch * key.row_bytes, plans)

    def _first(self, key: LayerKey, masks: LayerMasks) -> _Planned:
        """From the first step's masks; where a rule has yet to make them, as if all was seen."""
        home, work = self._home(key.segments), masks.whole
        is_known = work is not None
        num_ranks = math.prod(self.mesh.degrees)
        if np.bincount(home.home, minlength=num_ranks).min() == 0:
            logger.warning(
                "sparse: %d blocks, %d tokens to a rank at a time, leave some of %d ranks without "
                "tokens: use smaller blocks or stripes",
                *(home.lens.size, self.config.dealt, num_ranks),
            )
        if work is None:
            work = _everything(key.num_heads, home, num_ranks)
        reuses: dict[Degrees, PlanReuse] = {}
        for degrees, mesh in self.meshes.items():
            if mesh is self.mesh or degrees[0] <= key.num_heads:
                method, target = self.config.method, self.config.target
                planner = SparsePlanner(*degrees, method=method, target=target)
                columns = columns_of(work, degrees)
                plan = planner.plan(columns, home, num_kv_heads=key.num_kv_heads)
                reuses[degrees] = PlanReuse(planner, plan, self.config.tolerance)
        ring, ulysses = self.mesh.degrees
        plans = LayerPlans.first(
            reuses,
            self._strategies,
            start=None if is_known else (ulysses, ring),
            batch=key.batch,
            row_bytes=key.row_bytes,
        )
        return _Planned(plans, is_known)

    def _next_masks(self, key: LayerKey) -> Bools | None:
        """(H, N, N) of the next forward pass, where it is a step with masks of its own."""
        assert self.config.array is not None
        now, later = (self._step(num) for num in (self.num_passes, self.num_passes + 1))
        if now == later or later >= len(self.config.array):
            return None
        return self._masks(key, self.num_passes + 1).whole

    def _masks(self, key: LayerKey, num_passes: int) -> LayerMasks:
        counts = [block_lens([length], self.config.block).size for length in key.segments]
        is_text = np.repeat([name == TEXT for name in self._segments], counts)
        step, lens = self._step(num_passes), block_lens(key.segments, self.config.block)
        return LayerMasks.of(self.config, step, key.layer, key.num_heads, lens, is_text)

    def _step(self, num_passes: int) -> int:
        return num_passes // self.config.passes_per_step

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
        segments: tuple[int, ...],
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
        key = LayerKey(layer, segments, q.shape[0], q.shape[1], k.shape[1], row_bytes)
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
