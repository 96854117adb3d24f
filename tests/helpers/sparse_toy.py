"""A small model with block-sparse attention, and its steps against one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bascule.diffusers import ParallelHandle, SparseConfig, parallelize
from tests.helpers.inference_cases import difference
from tests.helpers.inference_toy import (
    TABLE,
    Toy,
    direct,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.sparse_reference import Bools, one_process
from tests.helpers.sparse_rules import Brute

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
def split_toy(
    mesh: Any, kv_heads: int = 6, num_blocks: int = LAYERS, **settings: Any
) -> Iterator[tuple[Toy, ParallelHandle]]:
    model = make_toy(kv_heads=kv_heads, num_blocks=num_blocks)
    config = SparseConfig(**({"block": BLOCK, "tolerance": 0.0, "target": 1.005} | settings))
    with parallelize(model, mesh=mesh, table=TABLE, sparse=config) as handle:
        yield model, handle


def run_steps(
    mesh: Any,
    segments: tuple[int, int],
    *,
    masks: Bools,
    rule: dict[str, Any] | None = None,
    brute: Brute | None = None,
    brute_block: int | None = None,
    kv_heads: int = 6,
    recomputes: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Errors of all steps against one process, and of the first with recomputation; layer states.

    States are (digest, Ulysses, ring, plans made, switches) of each layer after each step.
    """
    text, image = segments
    steps = [toy_inputs(text=text, image=image, seed=step) for step in range(len(masks))]
    before = make_toy(kv_heads=kv_heads, num_blocks=LAYERS)(**steps[0])
    found: dict[str, Any] = {"errors": [], "states": [], "ok": []}
    seen: dict[str, Any] = dict(rule or {"masks": masks})

    def compare(model: Toy, handle: ParallelHandle, step: int) -> None:
        of_step = None if rule else masks[step]
        cut: dict[str, Any] = {"orders": settings.get("orders")}
        block = brute_block or settings.get("block", BLOCK)
        with one_process(segments, block, masks=of_step, rule=brute or rule, **cut):
            wanted = toy_gradients(make_toy(kv_heads=kv_heads, num_blocks=LAYERS), steps[step])
        found["errors"].append(difference(toy_gradients(model, steps[step])[0], wanted[0]))
        handle.average_gradients()
        found["errors"].append(worst(grads_of(model), wanted[1]))

    with split_toy(mesh, kv_heads, **seen, **settings) as (model, handle):
        for step in range(len(steps)):
            if step:  # a verification is no step
                found["ok"].append(handle.verify(**steps[step]).ok)
            compare(model, handle, step)
            found["states"].append(
                [
                    (
                        *(one.used.digest, one.used.ulysses_degree, one.used.ring_degree),
                        *(one.num_planned, one.num_switches),
                    )
                    for one in handle.explain().sparse
                ]
            )
        found["explained"] = str(handle.explain())
        if recomputes:
            handle.restart()
            model.run = handle.checkpoint
            compare(model, handle, 0)
            model.run = direct
    return found | {"undone": torch.equal(model(**steps[0]), before)}
