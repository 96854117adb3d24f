"""Models that are split and undone again and again: the same mesh is the same process groups."""

import pytest
import torch
import torch.distributed as dist

from bascule.diffusers import parallelize
from tests.helpers.held import Held, check_held, needs_proc
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.ranks import run_ranks

DEGREES = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1), (1, 4)]}


def split_and_undo(num_first: int, num_after: int) -> tuple[Held, Held]:
    model, inputs = make_toy(), toy_inputs(5, 18)
    degrees = DEGREES[dist.get_world_size()]

    def split(turn: int) -> None:
        ulysses, ring = degrees[turn % len(degrees)]
        with parallelize(model, ulysses_degree=ulysses, ring_degree=ring, table=TABLE):
            if turn % 10 == 0:
                with torch.no_grad():
                    model(**inputs)

    for turn in range(num_first):
        split(turn)
    before = Held.now()
    for turn in range(num_after):
        split(turn)
    return before, Held.now()


@pytest.mark.some(1)
@needs_proc
@pytest.mark.parametrize("world_size", DEGREES)
def test_splitting_again_leaves_nothing_behind(world_size: int) -> None:
    for before, after in run_ranks(split_and_undo, world_size, 30, 30):
        check_held(before, after, 8_000)


@needs_proc
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_splitting_a_thousand_times_leaves_nothing_behind() -> None:
    for before, after in run_ranks(split_and_undo, 2, 60, 1000, timeout_s=800.0):
        check_held(before, after, 8_000)
