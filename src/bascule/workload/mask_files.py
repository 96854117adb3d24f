"""Block masks in files: bool (heads, q_blocks, kv_blocks), of layers, or of steps and layers."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Bools
from bascule.errors import ConfigError
from bascule.plan.checks import array
from bascule.plan.files import check_regular, to_path
from bascule.plan.sparse.block_layout import MAX_BLOCKS

MASK_DIMS = ("steps", "layers", "heads", "q_blocks", "kv_blocks")

MAX_LAYER = 2**31
"""Most cells of the masks of a layer that is read."""

MAX_ARCHIVE = 2**33
"""Most bytes that are unpacked."""


def load_masks(path: str | Path) -> Bools:
    """Read masks from an `.npy` or `.npz` file, in one of three forms.

    An `.npy` file holds the bool array, and is mapped, not read: a step and a layer can be taken
    from a file that is larger than the memory. An `.npz` file holds the same as `masks`, or what
    `save_masks` wrote: `packed`, the bits of the array in C order (`numpy.packbits`), and `shape`.

    Returns:
        (steps, layers, heads, q_blocks, kv_blocks) bool; steps, or steps and layers, may be missing
        in the file, and are 1 then.

    Raises:
        ConfigError: The file cannot be read, or holds something else; says what.
    """
    path = to_path(path)
    readers = {".npy": _from_array, ".npz": _from_archive}
    if path.suffix not in readers:
        raise ConfigError(f"{path} is not a mask file: give an .npy or an .npz file")
    try:
        check_regular(path)
        with np.errstate(over="ignore"):  # sizes that a damaged file claims
            masks = readers[path.suffix](path)
    except ConfigError:
        raise
    except Exception as error:  # numpy raises what it likes where a file is damaged
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot read masks from {path}: {told}") from error
    if masks.dtype != np.bool_:
        raise ConfigError(
            f"{path}: masks are {masks.dtype}, and must be bool, True where a block is computed: "
            "save masks.astype(bool)"
        )
    if not 3 <= masks.ndim <= 5 or 0 in masks.shape:
        raise ConfigError(
            f"{path}: masks of shape {masks.shape}; give ({', '.join(MASK_DIMS[-3:])}), with "
            f"{MASK_DIMS[1]}, or {MASK_DIMS[0]} and {MASK_DIMS[1]}, before them, and at least one "
            "of each"
        )
    if max(masks.shape[-2:]) > MAX_BLOCKS or math.prod(masks.shape[-3:]) > MAX_LAYER:
        raise ConfigError(
            f"{path}: masks of shape {masks.shape}; at most {MAX_BLOCKS} blocks, and {MAX_LAYER} "
            "cells a layer, can be planned for: use larger blocks"
        )
    if not masks.any():
        raise ConfigError(
            f"{path}: no block of these masks is computed. True means computed, so save ~masks "
            "if your masks say what is hidden"
        )
    return masks.reshape((1,) * (5 - masks.ndim) + masks.shape)


def save_masks(path: str | Path, masks: Bools) -> None:
    """Write masks as `load_masks` reads them, eight blocks a byte and compressed.

    Args:
        path: The file, ending in `.npz`.
        masks: (..., heads, q_blocks, kv_blocks) bool.

    Raises:
        ConfigError: The name does not end in `.npz` (numpy would append it); the masks are not
            bool; or the file cannot be written.
    """
    if to_path(path).suffix != ".npz":
        raise ConfigError(f"{path}: packed masks are an .npz file, so give a name that ends in it")
    given = array("masks", masks)
    if given.dtype != np.bool_:
        raise ConfigError(
            f"{path}: masks are {given.dtype}, and must be bool, True where a block is computed"
        )
    try:
        np.savez_compressed(path, packed=np.packbits(given), shape=np.array(given.shape))
    except OSError as error:
        raise ConfigError(f"cannot write masks to {path}: {error}") from error


def _from_array(path: Path) -> npt.NDArray[Any]:
    return np.lib.format.open_memmap(path, mode="r")


def _from_archive(path: Path) -> npt.NDArray[Any]:
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
        names = sorted(archive)
        size = sum(info.file_size for info in archive.zip.infolist()) if archive.zip else 0
        if size > MAX_ARCHIVE:
            raise ConfigError(
                f"{path} holds {size:,} bytes, at most {MAX_ARCHIVE:,} are unpacked: save an .npy "
                "file, of which only what is looked at is read"
            )
        wanted = [name for name in names if name in ("masks", "packed", "shape")]
        arrays: dict[str, Any] = {name: archive[name] for name in wanted}
    if any(not isinstance(found, np.ndarray) for found in arrays.values()):  # no .npy inside
        raise ConfigError(
            f"{path}: {', '.join(arrays)} in it cannot be read as arrays: write the file with numpy"
        )
    if "masks" in arrays:
        return arrays["masks"]
    if not {"packed", "shape"} <= arrays.keys():
        raise ConfigError(
            f"{path} holds {', '.join(names) or 'nothing'}; it must hold masks, or packed and shape"
        )
    return _unpacked(path, arrays["packed"], arrays["shape"])


def _unpacked(path: Path, packed: npt.NDArray[Any], shape: npt.NDArray[Any]) -> Bools:
    if packed.dtype != np.uint8 or packed.ndim != 1 or shape.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: packed is {packed.dtype} of shape {packed.shape} and shape is {shape.dtype}; "
            "packed must be one row of uint8, and shape integers"
        )
    num_bits = math.prod(sizes := cast(list[int], shape.ravel().tolist()))
    if min(sizes, default=0) < 0 or packed.size != -(-num_bits // 8):
        raise ConfigError(
            f"{path}: masks of shape {tuple(sizes)} take {-(-num_bits // 8)} bytes, and packed has "
            f"{packed.size}"
        )
    return np.unpackbits(packed, count=num_bits).view(np.bool_).reshape(sizes)
