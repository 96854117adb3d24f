"""Write the blocks that the layers of a running model see to a file, on the first of all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bascule.arrays import Bools
from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup
from bascule.diffusers.sparse_layers import SparseLayers
from bascule.errors import ConfigError
from bascule.workload.masks import MaskFile


@contextmanager
def saved_masks(layers: SparseLayers, group: RankGroup | None, path: str | Path) -> Iterator[None]:
    """Write masks of all forward passes within; no file is left after an error."""
    is_first, num_layers, num_before = group is None or group.rank == 0, 0, 0
    file = _together(group, lambda: MaskFile(path) if is_first else None)

    def save(layer: int, masks: Bools | None) -> None:
        nonlocal num_layers, num_before
        if file is not None:
            file.add(masks, num_before + layer)
        if masks is None:  # the pass has ended, after so many layers
            num_layers, num_before = layer, num_before + layer

    layers.saves = save
    try:
        yield
        _together(group, lambda: None if file is None else file.close(num_layers))
    finally:
        layers.saves = None
        if file is not None:
            file.drop()


def _together(group: RankGroup | None, make: Callable[[], MaskFile | None]) -> MaskFile | None:
    """Return what is made; all ranks raise the error of one."""
    made, error = None, None
    try:
        made = make()
    except ConfigError as failure:
        error = failure
    try:
        if group is not None:
            agree(group, {}, error, what="save_masks")
    finally:
        if error is not None:  # in its own words
            raise error
    return made
