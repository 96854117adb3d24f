"""A small model with block-sparse attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bascule.diffusers import ParallelHandle, SparseConfig, parallelize
from tests.helpers.inference_toy import (
    TABLE,
    Toy,
    make_toy,
)
from tests.helpers.sparse_reference import Bools

BLOCK, STEPS, LAYERS = 4, 3, 2


def make_masks(heads: int, num_blocks: int, steps: int = STEPS) -> Bools:
    """Every step has another head that sees all, and rows that see nothing."""
    generator = np.random.default_rng(heads * num_blocks)
    shape = steps, LAYERS, heads, num_blocks, num_blocks
    masks = generator.random(shape) < generator.random((steps, LAYERS, heads, 1, 1)) * 0.6
    for step in range(steps):
        masks[step, :, step % heads] = True
        masks[step, :, (step + 1) % heads, ::2] = False
    return masks


@contextmanager
def split_toy(mesh: Any, **settings: Any) -> Iterator[tuple[Toy, ParallelHandle]]:
    model = make_toy(num_blocks=LAYERS)
    config = SparseConfig(**({"block": BLOCK, "tolerance": 0.0, "target": 1.005} | settings))
    with parallelize(model, mesh=mesh, table=TABLE, sparse=config) as handle:
        yield model, handle
