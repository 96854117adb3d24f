"""Block masks of sparse attention: synthetic masks that resemble video models', and files.

A mask is bool (heads, q_blocks, kv_blocks), True where a block is computed. A block has tokens of
one segment, text or video. Shapes: H heads, N blocks, of which V are video, P points.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools, Floats, Ints
from bascule.checks import each, fields, number, whole
from bascule.errors import ConfigError
from bascule.files import check_regular
from bascule.workload.codes import keyed_generator

Singles = npt.NDArray[np.float32]

# Median width of a head's locality along an axis of the grid, as a share of the axis, and the
# standard deviation of its logarithm: spatial, temporal, local and global heads all occur.
WIDTH, WIDTH_SPREAD = 0.15, 0.7
FIELD_LENGTHS = (0.2, 0.5, 0.5)  # shares of the grid over which the popularity of keys changes
SHARED_VARIANCE = 0.7  # of popularity and breadth, the part that heads of a layer have in common
NOISE = 0.5  # standard deviation, of a block
NUM_WAVES = 32
MAX_CELLS = 2**29  # of a mask that is drawn: half a gigabyte, and minutes
MAX_SPREAD = 8.0  # of the logits of the densities: then most heads are empty or full
_RAREST = 1e-9  # least density, and least share of blocks that are left out


@dataclass(frozen=True, slots=True)
class MaskModel:
    """Random block masks with the sizes, densities and imbalance of a video model's masks.

    A head computes the blocks with the highest scores. A score adds up: the closeness of two blocks
    on the grid, with a width per head and axis; the key's popularity and the query's breadth, which
    are smooth over the video and partly shared by heads; a bonus for keys in the first frame; and
    noise. A head always computes text and the diagonal. Tokens are in raster order.

    Real masks are not published, so this model is fitted to averages. Head densities are
    logistic-normal, with the same imbalance in every layer. All parts but the noise drift over
    layers and steps as Gaussian processes. We assume that their correlation after n steps is
    `exp(-(n step_drift)^2 / 2)`. The default drift is fitted to what db-SP says of SpargeAttn on
    Wan2.1: with a threshold of 1.10 on 8 ranks, 5 of 50 steps need a new greedy plan.
    """

    grid: tuple[int, int, int]  # (frames, height, width) of the latent tokens
    num_heads: int
    text_tokens: int = 0  # before the video; they attend to all and are attended to by all
    density: float = 0.41  # share of the blocks that are computed, mean of the heads
    # Max over mean of the densities of eighths of the heads, which 8 Ulysses ranks compute; nearly.
    head_imbalance: float = 1.355
    # Tendency of neighbouring eighths to opposite densities; 0: independent heads.
    head_contrast: float = 0.15
    field_spread: float = 0.15  # standard deviation of popularity and breadth; closeness is <= 1
    first_frame: float = 0.6  # bonus of keys in the first frame
    step_drift: float = 0.015  # from step to step; 0 for static masks, such as PAROAttention's
    layer_drift: float = 3.0  # from layer to layer; from 3 on, layers are practically independent
    block: int = 64  # tokens of a block

    def __post_init__(self) -> None:
        ones, amounts = (whole, 1), (number, 0.0, 1e3)
        fields(self, grid=(each, *ones), num_heads=ones, text_tokens=whole, block=ones)
        fields(self, density=(number, _RAREST, 1 - _RAREST), head_imbalance=(number, 1.0))
        fields(self, head_contrast=amounts, field_spread=amounts, first_frame=amounts)
        fields(self, step_drift=amounts, layer_drift=amounts)
        if len(self.grid) != 3:
            raise ConfigError(f"MaskModel(grid={self.grid}): give (frames, height, width)")
        num_blocks = sum(-(-segment // self.block) for segment in self.segments)
        if (cells := self.num_heads * num_blocks**2) > MAX_CELLS:
            wrong = f"MaskModel: {num_blocks:,} blocks, {self.num_heads} heads make {cells:,} cells"
            raise ConfigError(f"{wrong}, at most {MAX_CELLS:,}: use larger blocks")

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of tokens of the text segment, if there is one, and of the video segment."""
        video = math.prod(self.grid)
        return (self.text_tokens, video) if self.text_tokens else (video,)

    @property
    def block_lens(self) -> Ints:
        """(N,) tokens of each block."""
        from bascule.plan.sparse.layout import block_lens

        return block_lens(self.segments, self.block)


WAN21 = MaskModel((21, 45, 80), 40)
"""Wan2.1 with PAROAttention. `sparse_imbalance` of 8 ranks in db-SP's table 1, and of these masks
in the mean of layers 0 to 9 of seed 0; single layers deviate by up to 0.1:

| | Ulysses 8 | 4 x ring 2 | 2 x ring 4 | ring 8 |
|---|---|---|---|---|
| table 1 | 1.355 | 1.253 | 1.246 | 1.255 |
| masks | 1.355 | 1.250 | 1.248 | 1.230 |

The table does not say its densities. With SpargeAttn it has 1.428 for Ulysses alone:
`replace(WAN21, head_imbalance=1.428)`.
"""

COGVIDEOX15 = MaskModel(
    (21, 48, 85),
    48,
    text_tokens=226,
    head_imbalance=1.447,
    head_contrast=0.5,
    field_spread=0.04,
    first_frame=0.62,
)
"""CogVideoX1.5 with PAROAttention, measured like `WAN21` (SpargeAttn: 1.513 for Ulysses):

| | Ulysses 8 | 4 x ring 2 | 2 x ring 4 | ring 8 |
|---|---|---|---|---|
| table 1 | 1.447 | 1.201 | 1.159 | 1.269 |
| masks | 1.447 | 1.212 | 1.187 | 1.266 |
"""


def synthetic_masks(model: MaskModel, *, layer: int = 0, step: int = 0, seed: int = 0) -> Bools:
    """Draw the mask (H, N, N) of a layer in a denoising step, a pure function of the arguments."""
    whole("layer", layer, 0, 2**32)
    whole("step", step, 0, 2**32)
    generator = keyed_generator(seed, "masks")
    when = np.array([[layer * model.layer_drift, step * model.step_drift]])
    normal = _waves(generator, 4 * model.num_heads, when).reshape(4, model.num_heads)
    densities_H = _head_densities(model, normal[0])
    widths_H3 = WIDTH * np.exp(WIDTH_SPREAD * normal[1:].T)
    places_V3 = _block_centres(model)
    points = np.hstack([places_V3 / FIELD_LENGTHS, when.repeat(len(places_V3), axis=0)])
    popularity_HV, breadth_HV = (_head_fields(generator, model, points) for _ in range(2))
    # Half a frame, not one: the mean of a block in the second frame may round to just below it.
    popularity_HV[:, places_V3[:, 0] * model.grid[0] < 0.5] += model.first_frame
    num_blocks = model.block_lens.size
    masks = np.ones((model.num_heads, num_blocks, num_blocks), np.bool_)
    video = slice(num_blocks - len(places_V3), None)
    for head, density in enumerate(densities_H.tolist()):
        scores = _closeness(places_V3 / widths_H3[head])
        scores += popularity_HV[head]
        scores += breadth_HV[head, :, None]
        noise = keyed_generator(seed, "masknois", layer, head)
        scores += NOISE * cast(Singles, noise.standard_normal(scores.shape, np.float32))
        np.fill_diagonal(scores, np.inf)
        masks[head, video, video] = _highest(scores, density, num_blocks)
    return masks


def _highest(scores: Singles, density: float, num_blocks: int) -> Bools:
    """Choose the video blocks that, with all blocks of text, are this share of all blocks."""
    num_rows = scores.shape[0]
    keep = round(density * num_blocks**2) - (num_blocks**2 - num_rows**2)
    place = scores.size - min(max(keep, num_rows), scores.size)
    return scores >= np.partition(scores.ravel(), place)[place]


def _head_densities(model: MaskModel, normal_H: Floats) -> Floats:
    """Return (H,) densities of heads, whose mean and imbalance equal the model's."""
    from scipy.optimize import brentq
    from scipy.special import expit

    eighth_H = np.arange(model.num_heads) * 8 // model.num_heads
    offsets_H = normal_H + model.head_contrast * (-1.0) ** eighth_H
    sizes = np.bincount(eighth_H)

    def densities(spread: float) -> Floats:
        logits_H = spread * offsets_H
        centre = brentq(
            lambda shift: float(expit(logits_H + shift).mean()) - model.density,
            -40.0 - float(logits_H.max()),
            40.0 - float(logits_H.min()),
        )
        return expit(logits_H + centre)

    def excess(spread: float) -> float:
        means = np.bincount(eighth_H, densities(spread))[sizes > 0] / sizes[sizes > 0]
        return float(means.max()) / model.density - model.head_imbalance

    if excess(MAX_SPREAD) <= 0.0:
        return densities(MAX_SPREAD)
    return densities(brentq(excess, 0.0, MAX_SPREAD) if excess(0.0) < 0.0 else 0.0)


def _block_centres(model: MaskModel) -> Floats:
    """Return the (V, 3) mean positions of the tokens of video blocks, every axis from 0 to 1."""
    tokens = np.arange(math.prod(model.grid))
    places = np.stack(np.unravel_index(tokens, model.grid), axis=1) / model.grid
    starts = tokens[:: model.block]
    return np.add.reduceat(places, starts) / np.diff(starts, append=tokens.size)[:, None]


def _closeness(places_V3: Floats) -> Singles:
    """Return exp(-distance^2 / 2), (V, V), by one product of matrices that hold the squares too."""
    squares, ones = -0.5 * (places_V3**2).sum(axis=1, keepdims=True), np.ones((len(places_V3), 1))
    left = np.hstack([places_V3, squares, ones]).astype(np.float32)
    right = np.hstack([places_V3, ones, squares]).astype(np.float32)
    return np.exp(cast(Singles, left @ right.T))


def _head_fields(generator: np.random.Generator, model: MaskModel, points: Floats) -> Singles:
    """Draw (H, P) smooth functions with the model's standard deviation, partly shared by heads."""
    waves = _waves(generator, 1 + model.num_heads, points)
    waves -= waves.mean(axis=1, keepdims=True)
    waves /= np.maximum(waves.std(axis=1, keepdims=True), 1e-9)
    parts = math.sqrt(SHARED_VARIANCE) * waves[:1] + math.sqrt(1 - SHARED_VARIANCE) * waves[1:]
    return (model.field_spread * parts).astype(np.float32)


def _waves(generator: np.random.Generator, num: int, points: Floats) -> Floats:
    """Draw (num, P) Gaussian functions of unit variance and correlation exp(-distance^2 / 2).

    Source: Rahimi and Recht, Random Features for Large-Scale Kernel Machines, 2007.
    """
    frequencies = generator.standard_normal((num, NUM_WAVES, points.shape[1]))
    phases = generator.uniform(0.0, 2.0 * math.pi, (num, NUM_WAVES, 1))
    return math.sqrt(2.0 / NUM_WAVES) * np.cos(frequencies @ points.T + phases).sum(axis=1)


def load_masks(path: str | Path) -> Bools:
    """Read masks (steps, layers, heads, q_blocks, kv_blocks); the file may lack the first two dims.

    An `.npy` file has the bool array, and is memory-mapped. An `.npz` file has it as `masks`, or as
    `save_masks` writes it: its bits as `packed` (`numpy.packbits`), and its `shape`.
    """
    path = Path(path)
    if path.suffix not in (".npy", ".npz"):
        raise ConfigError(f"{path} is not a mask file: give an .npy or an .npz file")
    try:
        check_regular(path)
        is_array = path.suffix == ".npy"
        masks = np.lib.format.open_memmap(path, mode="r") if is_array else _from_archive(path)
    except ConfigError:
        raise
    except Exception as error:  # numpy may raise anything on a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot read masks from {path}: {reason}") from None
    if masks.dtype != np.bool_:
        wrong = f"{path}: masks are {masks.dtype}; they must be bool, True where computed"
        raise ConfigError(f"{wrong}: save masks.astype(bool)")
    if not 3 <= masks.ndim <= 5 or 0 in masks.shape:
        wrong = f"{path}: masks of shape {masks.shape}; give (heads, q_blocks, kv_blocks), or these"
        raise ConfigError(f"{wrong} after (layers,) or (steps, layers), at least one of each")
    if not masks.any():
        wrong = f"{path}: no block of these masks is computed. True means computed"
        raise ConfigError(f"{wrong}, so save ~masks if your masks say what is hidden")
    return masks.reshape((1,) * (5 - masks.ndim) + masks.shape)


def save_masks(path: str | Path, masks: Bools) -> None:
    """Write masks (..., heads, q_blocks, kv_blocks) to an `.npz` file, for `load_masks`."""
    if masks.dtype != np.bool_:
        raise ConfigError(f"masks are {masks.dtype}; they must be bool, True where computed")
    with _writing(path):
        np.savez_compressed(path, packed=np.packbits(masks), shape=np.array(masks.shape))


class MaskFile:
    """Writes masks layer by layer for `load_masks`; `close` writes the file itself."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._shape = path, (0, 0, 0)  # heads, query blocks, key blocks
        self._num_masks = 0  # written
        self._num_layers = 0  # of the last forward pass
        self._num_before = 0  # masks before this forward pass
        self._rest = np.zeros(0, np.bool_)  # cells that do not fill a byte yet
        with _writing(path):
            self._bits = Path(f"{path}.part").open("wb")

    def add(self, layer: int, masks: Bools | None) -> None:
        """Append the mask of a layer, and full masks for layers left out; None ends the pass."""
        shape = self._shape if masks is None else masks.shape
        if shape != self._shape and self._num_masks:
            wrong = f"{self._path}: a mask of shape {shape} after masks of {self._shape}"
            raise ConfigError(f"{wrong}: name such layers in dense_layers; save resolutions apart")
        self._shape = shape
        full = [np.ones(shape, np.bool_)] * (self._num_before + layer - self._num_masks)
        for mask in [*full, *([] if masks is None else [masks])]:
            cells = np.concatenate([self._rest, mask.ravel()])
            split = cells.size // 8 * 8
            self._rest, self._num_masks = cells[split:], self._num_masks + 1
            with _writing(self._path):
                self._bits.write(np.packbits(cells[:split]).tobytes())
        if masks is None:
            self._num_layers, self._num_before = layer, self._num_masks

    def close(self) -> None:
        """Write the file from the masks that were added."""
        steps, rest = divmod(self._num_masks, max(self._num_layers, 1))
        if rest or not steps or 0 in self._shape:
            wrong = f"{self._path}: {self._num_masks} masks of shape {self._shape} are no whole"
            fix = "call the model, and compute the same layers in each pass"
            raise ConfigError(f"{wrong} passes of {self._num_layers} layers: {fix}")
        with _writing(self._path):
            self._bits.write(np.packbits(self._rest).tobytes())
            self._bits.flush()
            packed = np.memmap(self._bits.name, np.uint8, "r")  # larger than memory, maybe
            np.savez(
                self._path, packed=packed, shape=np.array([steps, self._num_layers, *self._shape])
            )

    def drop(self) -> None:
        """Remove the temporary file."""
        self._bits.close()
        Path(self._bits.name).unlink()


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    if Path(path).suffix != ".npz":  # numpy would append it
        raise ConfigError(f"{path}: packed masks are an .npz file: give a name that ends in .npz")
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write masks to {path}: {error}") from None


def _from_archive(path: Path) -> npt.NDArray[Any]:
    with path.open("rb") as file, np.load(file) as archive:
        names = sorted(archive)
        arrays = {n: np.asarray(archive[n]) for n in names if n in ("masks", "packed", "shape")}
    if "masks" in arrays:
        return arrays["masks"]
    if not {"packed", "shape"} <= arrays.keys():
        wrong = f"{path} holds {', '.join(names) or 'nothing'}"
        raise ConfigError(f"{wrong}; it must hold masks, or packed and shape")
    packed, shape = arrays["packed"], arrays["shape"]
    sizes = tuple(shape.ravel().tolist()) if shape.dtype.kind in "iu" else ()
    num_bits, is_row = math.prod(sizes), packed.dtype == np.uint8 and packed.ndim == 1
    if not sizes or min(sizes) < 0 or not is_row or packed.size != -(-num_bits // 8):
        wrong = f"{path}: packed is {packed.dtype} of shape {packed.shape}, and shape is {shape}"
        raise ConfigError(f"{wrong}: give a row of uint8, a bit for each cell of that shape")
    return np.unpackbits(packed, count=num_bits).view(np.bool_).reshape(sizes)
