"""Settings of block-sparse attention: which blocks are computed, from a file or by a rule.

Shapes: B batch, H query heads, N blocks of the sequence; X (head, query block) rows of a rank.
"""

import math
import zlib
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Bools, Ints
from bascule.attention.kernels.registry import check_name
from bascule.attention.sparse.attend import PooledRule, RowsSeen
from bascule.attention.sparse.rules import always_computed, keep_mass, keep_top_k
from bascule.errors import ConfigError
from bascule.plan.checks import choice, each, fields, number, of_type, whole
from bascule.plan.sparse import PackedRows
from bascule.plan.sparse.choose import Strategies
from bascule.plan.sparse.partition import TARGET
from bascule.plan.sparse.planner import PLANNERS, SparsePlanner
from bascule.workload import load_masks

STILL_TARGET = 1.02  # imbalance up to which a ring without Ulysses ranks is left as it is

_SAMPLED = 32  # masks that ranks compare
_LEAST_SHARE = 1e-9


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SparseConfig:
    """Settings of block-sparse attention: which blocks are computed, and how ranks share them.

    Give one of `masks`, `keep` and `mass`. Tokens of a segment "text" see all and are seen by all.

    Attributes:
        masks: (steps, layers, heads, blocks, blocks) bool, True where computed, or a file for
            `workload.load_masks`. Leading dims may be missing; one step or layer stands for all.
        keep: Share of the key blocks that a query block sees: those with the highest products of
            mean queries and keys, its own block among them.
        mass: Least share of the softmax of these products that it sees, as in SpargeAttn.
        block: Tokens of a block.
        method: Placement of blocks, as for `SparsePlanner`; "paper" needs masks, or no ring;
            "in_order" is without balance, to compare with.
        stripe: Tokens that a rank gets at a time, a multiple of `block`. Default: `block`, the most
            even.
        target: Imbalance at which "minimal_move" moves no more. Default: 1.005; 1.02 on a ring
            without Ulysses ranks, which needs no exchange as long as nothing moves.
        tolerance: A layer keeps its plan while its imbalance is at most 1 + tolerance.
        dense_layers: Layers that attend to everything, by the order of attention calls.
        passes_per_step: Forward passes of a denoising step: 2 with guidance in a pass of its own.
        kernel: Name of a block kernel that skips blocks. Default: the fastest for the device.
        strategies: Choice of a mesh by each layer in each step. None: the mesh of `parallelize`.
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
        rules = [name for name in ("masks", "keep", "mass") if getattr(self, name) is not None]
        if len(rules) != 1:
            raise ConfigError(
                f"SparseConfig with {' and '.join(rules) or 'nothing'}: give one of masks, keep "
                "and mass"
            )
        fields(
            self,
            keep=(number, _LEAST_SHARE, 1.0),
            mass=(number, _LEAST_SHARE, 1.0),
            block=(whole, 1),
            method=(choice, *PLANNERS),
            stripe=(whole, 1),
            target=(number, 1.0),
            tolerance=(number, 0.0, np.inf),
            dense_layers=(each, whole),
            passes_per_step=(whole, 1),
            strategies=(of_type, Strategies, "Strategies(latency)"),
        )
        check_name(self.kernel)
        if self.dealt % self.block:
            raise ConfigError(
                f"SparseConfig(stripe={self.stripe!r}): must be a multiple of block, {self.block}"
            )
        if self.masks is not None:
            object.__setattr__(self, "masks", _loaded(self.masks))

    @property
    def array(self) -> Bools | None:
        """The masks, if these decide."""
        assert not isinstance(self.masks, str | Path)
        return self.masks

    @property
    def dealt(self) -> int:
        """Tokens that a rank gets at a time."""
        return self.block if self.stripe is None else self.stripe

    def planner(self, ulysses_degree: int, ring_degree: int) -> SparsePlanner:
        """Return the planner of a mesh."""
        target = self.target or (STILL_TARGET if ulysses_degree == 1 else TARGET)
        return SparsePlanner(ulysses_degree, ring_degree, method=self.method, target=target)

    def masks_of(
        self, step: int, layer: int, num_heads: int, lens: Ints, is_text: Bools
    ) -> Bools | None:
        """Return the masks (H, N, N) of a layer in a step, or None if a rule decides."""
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
        return self.array[step if steps > 1 else 0, layer if layers > 1 else 0]

    def seen(self, masks: Bools | None, lens: Ints, is_text: Bools) -> RowsSeen | PooledRule:
        """Return the masks of rows, from the masks (H, N, N) or by the rule, with those of text."""
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
    """Return masks (H, N, N) in which text sees all, and all see text."""
    if masks is None or not is_text.any():
        return masks
    return masks | is_text[:, None] | is_text


def settings_of(config: SparseConfig | None) -> dict[str, str]:
    """Return the settings that ranks compare, under the same names for any; of masks a sample."""
    values = {field.name: getattr(config, field.name, None) for field in fields_of(SparseConfig)}
    if config is not None and config.array is not None:
        values["masks"] = _fingerprint(config.array)
    strategies = values.pop("strategies")
    for field in fields_of(Strategies):
        values[f"strategies' {field.name}"] = getattr(strategies, field.name, None)
    texts = {f"sparse: {name}": str(value) for name, value in values.items()}
    return {"sparse": "none" if config is None else "given", **texts}


def _fingerprint(masks: Bools) -> str:
    """Return shape and checksum of some steps and layers: all may exceed memory."""
    steps, layers = masks.shape[:2]
    checksum, count = 0, min(steps * layers, _SAMPLED)
    for place in np.linspace(0, steps * layers - 1, count).round().astype(int).tolist():
        checksum = zlib.crc32(np.packbits(masks[divmod(place, layers)]).tobytes(), checksum)
    return f"{masks.shape}, checksum {checksum:08x}"


def _loaded(masks: Bools | str | Path) -> Bools:
    """Return (steps, layers, H, N, N)."""
    if isinstance(masks, str | Path):
        return load_masks(masks)
    array = np.asarray(masks)
    if array.dtype != np.bool_ or not 3 <= array.ndim <= 5 or not array.any():
        raise ConfigError(
            f"SparseConfig: masks of shape {array.shape} and dtype {array.dtype}, "
            f"{np.count_nonzero(array)} of them True: give bool (steps, layers, heads, blocks, "
            "blocks), of which steps and layers may be missing; True means computed"
        )
    return array.reshape((1,) * (5 - array.ndim) + array.shape)
