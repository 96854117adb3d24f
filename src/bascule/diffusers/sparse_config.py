"""Which blocks of a model's attention are computed: from a file, or by a rule.

Shapes: B batch, H query heads, N blocks of the sequence; X (head, query block) rows that a rank
computes.
"""

import math
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Bools, Ints
from bascule.attention.kernels.registry import check_name
from bascule.attention.sparse.attend import PooledRule, RowsSeen
from bascule.attention.sparse.rules import always_computed, keep_mass, keep_top_k
from bascule.errors import ConfigError
from bascule.plan.checks import is_int, listed, number, of_type, whole
from bascule.plan.sparse import PackedRows
from bascule.plan.sparse.choose import Strategies
from bascule.plan.sparse.partition import TARGET
from bascule.plan.sparse.planner import PLANNERS, SparsePlanner
from bascule.workload import load_masks

STILL_TARGET = 1.02
"""Up to which a ring without Ulysses ranks is left as it is."""

_SAMPLED = 32
"""Masks of a layer in a step that are compared between ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SparseConfig:
    """Which blocks of a model's attention are computed, and how they are shared over the ranks.

    Give one of `masks`, `keep` and `mass`. Tokens of a segment called "text" see all and are seen
    by all, whatever the masks say.

    Attributes:
        masks: (steps, layers, heads, blocks, blocks) bool, True where computed, or a file for
            `workload.masks.load_masks`; leading dims may be missing, and one step or layer
            stands for all. Becomes the array with all five dims.
        keep: Share of the key blocks that a query block sees: those with the highest products of
            mean queries and keys, its own block among them.
        mass: Share of the softmax of these products that it sees at least, as SpargeAttn has it.
        block: Tokens of a block.
        method: How blocks are placed, as for `SparsePlanner`; "paper" needs masks, or no ring;
            "in_order" is without balance, to compare with.
        stripe: Tokens that a rank gets at a time when a segment is dealt to the ranks in turns; a
            multiple of `block`. Default: `block`, the most even.
        target: Imbalance at which "minimal_move" moves no more. Default: 1.005; 1.02 on a ring
            without Ulysses ranks, which needs no exchange at all as long as nothing moves.
        tolerance: A layer keeps its plan while its imbalance is at most 1 + tolerance.
        dense_layers: Layers that attend to everything, by the order of attention calls.
        passes_per_step: Forward passes of a denoising step: 2 where guidance takes a pass of its
            own.
        kernel: Name of a block kernel that skips blocks. Default: the fastest for the device.
        strategies: How layers choose their mesh, step by step. None: that of `parallelize`.

    Raises:
        ConfigError: A value is out of range, or the masks are none.
    """

    masks: Bools | str | Path | None = None
    keep: float | None = None
    mass: float | None = None
    block: int = 64
    method: str = "minimal_move"
    stripe: int | None = None
    target: float | None = None
    tolerance: float = 0.05
    dense_layers: tuple[int, ...] = ()
    passes_per_step: int = 1
    kernel: str | None = None
    strategies: Strategies | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("masks", "keep", "mass") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"SparseConfig with {' and '.join(given) or 'nothing'}: give one of masks, keep "
                "and mass"
            )
        for name in ("keep", "mass"):
            share = getattr(self, name)
            if share is not None and (not isinstance(share, int | float) or not 0 < share <= 1):
                raise ConfigError(f"SparseConfig({name}={share!r}): must be between 0 and 1, not 0")
        if self.target is not None:
            number("SparseConfig(target", self.target, 1.0)
        number("SparseConfig(tolerance", self.tolerance, most=np.inf)
        whole("SparseConfig(block", self.block, 1)
        whole("SparseConfig(passes_per_step", self.passes_per_step, 1)
        for layer in listed("SparseConfig(dense_layers", self.dense_layers):
            whole("SparseConfig(dense_layers", layer)
        advice = "Strategies(latency), or None"
        of_type("SparseConfig: strategies", self.strategies, (Strategies, NoneType), advice)
        if self.method not in PLANNERS:
            raise ConfigError(
                f"SparseConfig(method={self.method!r}): must be one of {', '.join(PLANNERS)}"
            )
        check_name(self.kernel)
        if not is_int(self.dealt) or self.dealt < 1 or self.dealt % self.block:
            raise ConfigError(
                f"SparseConfig(stripe={self.stripe!r}): must be a multiple of block, {self.block}"
            )
        if self.masks is not None:
            object.__setattr__(self, "masks", _loaded(self.masks))

    @property
    def array(self) -> Bools | None:
        """The masks, if they were given."""
        assert not isinstance(self.masks, str | Path)
        return self.masks

    @property
    def dealt(self) -> int:
        """Tokens that a rank gets at a time."""
        return self.block if self.stripe is None else self.stripe

    def planner(self, ulysses_degree: int, ring_degree: int) -> SparsePlanner:
        """How plans are made on a mesh."""
        target = self.target
        if target is None:
            target = STILL_TARGET if ulysses_degree == 1 else TARGET
        return SparsePlanner(ulysses_degree, ring_degree, method=self.method, target=target)

    def masks_of(
        self, step: int, layer: int, num_heads: int, lens: Ints, is_text: Bools
    ) -> Bools | None:
        """(H, N, N) what a layer sees in a step by the masks that were given; None: a rule says it.

        Args:
            step: Denoising step.
            layer: By the order of attention calls.
            num_heads: H.
            lens: (N,) tokens of each block.
            is_text: (N,) whether a block is of text.

        Raises:
            ConfigError: The masks are of other sizes; says both.
        """
        if self.array is None:
            return None
        steps, layers, *sizes = self.array.shape
        if sizes != [num_heads, lens.size, lens.size]:
            raise ConfigError(
                f"sparse: masks of {sizes[0]} heads and {sizes[1]} x {sizes[2]} blocks, and the "
                f"model has {num_heads} heads and {lens.size} blocks of {self.block} tokens, "
                f"{int(is_text.sum())} of them text"
            )
        if steps > 1 and step >= steps:
            raise ConfigError(
                f"sparse: step {step} of masks for steps 0 to {steps - 1}: call handle.restart() "
                "before another image, and give passes_per_step where a step has several forward "
                "passes"
            )
        if layers > 1 and layer >= layers:
            raise ConfigError(
                f"sparse: attention call {layer} of masks for layers 0 to {layers - 1}: give masks "
                "for each, or one for all"
            )
        return self.array[step if steps > 1 else 0, layer if layers > 1 else 0]

    def seen(self, masks: Bools | None, lens: Ints, is_text: Bools) -> RowsSeen | PooledRule:
        """What attention asks which blocks are seen: masks, or the rule; text sees and is seen.

        Args:
            masks: (H, N, N) as of `masks_of`.
            lens: (N,) tokens of each block.
            is_text: (N,) whether a block is of text.
        """
        if masks is not None:
            return lambda rows: (
                masks[rows.heads, rows.blocks] | is_text[rows.blocks, None] | is_text
            )

        def kept(scores: Tensor, rows: PackedRows) -> Tensor:
            """(B, X, N)."""
            always = always_computed(is_text.size, np.flatnonzero(is_text))
            always = always[torch.from_numpy(rows.blocks)].to(scores.device)
            if self.mass is not None:
                return keep_mass(scores, self.mass, lens, always)
            assert self.keep is not None
            return keep_top_k(scores, math.ceil(self.keep * is_text.size), always)

        return PooledRule(kept)


def with_text(masks: Bools | None, is_text: Bools) -> Bools | None:
    """(H, N, N) masks in which text sees all, and all see text."""
    if masks is None or not is_text.any():
        return masks
    return masks | is_text[:, None] | is_text


def settings_of(config: SparseConfig | None) -> dict[str, str]:
    """What must be the same on every rank, by the same names for any; of many masks, a sample."""
    values = {field.name: getattr(config, field.name, None) for field in fields(SparseConfig)}
    if config is not None and config.array is not None:
        values["masks"] = _fingerprint(config.array)
    strategies = values.pop("strategies")
    for field in fields(Strategies):
        values[f"strategies' {field.name}"] = getattr(strategies, field.name, None)
    given = "none" if config is None else "given"
    return {"sparse": given} | {f"sparse: {name}": str(value) for name, value in values.items()}


def _fingerprint(masks: Bools) -> str:
    """Shape, and a checksum of some steps of layers: all may be more than memory holds."""
    steps, layers = masks.shape[:2]
    checksum, count = 0, min(steps * layers, _SAMPLED)
    for place in np.linspace(0, steps * layers - 1, count).round().astype(int).tolist():
        checksum = zlib.crc32(np.packbits(masks[divmod(place, layers)]).tobytes(), checksum)
    return f"{masks.shape}, checksum {checksum:08x}"


def _loaded(masks: Bools | str | Path) -> Bools:
    """(steps, layers, H, N, N)."""
    if isinstance(masks, str | Path):
        return load_masks(masks)
    array = np.asarray(masks)
    if array.dtype != np.bool_ or not 3 <= array.ndim <= 5 or 0 in array.shape:
        raise ConfigError(
            f"SparseConfig: masks of shape {array.shape} and dtype {array.dtype}: give bool "
            "(steps, layers, heads, blocks, blocks), of which steps and layers may be missing"
        )
    if not array.any():
        raise ConfigError(
            f"SparseConfig: masks of shape {array.shape} hide everything: True means that a"
            " block is computed, so give some"
        )
    return array.reshape((1,) * (5 - array.ndim) + array.shape)
