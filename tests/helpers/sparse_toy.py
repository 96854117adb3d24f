"""A small model with block-sparse attention, and its steps against one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from bascule import HardwareProfile
from bascule.diffusers import ParallelHandle, SparseConfig, parallelize
from bascule.plan.sparse.choose import Strategies
from tests.helpers.inference_cases import same, same_gradients
from tests.helpers.inference_toy import (
    TABLE,
    Toy,
    direct,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
)
from tests.helpers.ranks import by_one_rank
from tests.helpers.sparse_reference import Bools, one_process
from tests.helpers.sparse_rules import Brute

BLOCK, STEPS, LAYERS = 4, 3, 2
# A machine on which moves of so small blocks pay.
FREE = Strategies(
    HardwareProfile(device="", intra_bytes_per_s=1e14, attention_flops_per_s=1e6, launch_s=0.0),
    meshes=(),
)


def make_masks(heads: int, num_blocks: int, steps: int = STEPS) -> Bools:
    """Every step has another head that sees all, and rows that see nothing."""
    generator = np.random.default_rng(heads * num_blocks)
    shape = steps, LAYERS, heads, num_blocks, num_blocks
    masks = generator.random(shape) < generator.random((steps, LAYERS, heads, 1, 1)) * 0.6
    for step in range(steps):
        masks[step, :, step % heads] = True
        masks[step, :, (step + 1) % heads, ::2] = False
    return masks


class State(NamedTuple):
    """Of a layer after a step."""

    digest: str
    ulysses: int
    ring: int
    num_planned: int
    num_switches: int


@contextmanager
def split_toy(
    mesh: Any, kv_heads: int = 6, num_blocks: int = LAYERS, **settings: Any
) -> Iterator[tuple[Toy, ParallelHandle]]:
    model = make_toy(kv_heads=kv_heads, num_blocks=num_blocks)
    defaults = {"block": BLOCK, "tolerance": 0.0, "target": 1.005, "strategies": FREE}
    config = SparseConfig(**(defaults | settings))
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
    what: str = "",
    **settings: Any,
) -> tuple[list[list[State]], str]:
    """Compare all steps with one process, and the first with recomputation.

    Return the states of the layers after each step, alike on all ranks, and what is explained.
    """
    text, image = segments
    steps = [toy_inputs(text=text, image=image, seed=step) for step in range(len(masks))]
    before = make_toy(kv_heads=kv_heads, num_blocks=LAYERS)(**steps[0])
    states, seen = list[list[State]](), dict[str, Any](rule or {"masks": masks})

    def compare(model: Toy, handle: ParallelHandle, step: int) -> None:
        of_step = None if rule else masks[step]
        block = brute_block or settings.get("block", BLOCK)
        orders, kept = settings.get("orders"), brute or rule
        with one_process(segments, block, masks=of_step, rule=kept, orders=orders):
            whole = make_toy(kv_heads=kv_heads, num_blocks=LAYERS)
            wanted, wanted_grads = toy_gradients(whole, steps[step])
        same(toy_gradients(model, steps[step])[0], wanted, 1e-10, (what, step))
        handle.average_gradients()
        same_gradients(grads_of(model), wanted_grads, 1e-10)

    with split_toy(mesh, kv_heads, **seen, **settings) as (model, handle):
        for step in range(len(steps)):
            if step:  # a verification is no step
                assert handle.verify(**steps[step]).ok, (what, step)
            compare(model, handle, step)
            states.append(
                [
                    State(
                        *(one.used.digest, one.used.ulysses_degree, one.used.ring_degree),
                        *(one.num_planned, one.num_switches),
                    )
                    for one in handle.explain().sparse
                ]
            )
        assert states == by_one_rank(lambda: states), what
        explained = str(handle.explain())
        if recomputes:
            handle.restart()
            model.run = handle.checkpoint
            compare(model, handle, 0)
            model.run = direct
    assert torch.equal(model(**steps[0]), before), (what, "undone")
    return states, explained
